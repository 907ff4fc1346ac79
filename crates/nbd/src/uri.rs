//! Where an export is, as the NBD project's `doc/uri.md` and libnbd have it: `nbd+unix:///NAME?socket=PATH` or
//! `nbd://HOST:PORT/NAME`, and the same with `nbds`, which is never spoken but through TLS.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The port that NBD servers listen on unless told otherwise.
const DEFAULT_PORT: u16 = 10809;

/// How an export is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// A unix socket.
    Unix(PathBuf),
    /// TCP: a name or an address (without the brackets of IPv6), and a port.
    Tcp(String, u16),
}

/// Where an export is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NbdUri {
    /// How it is reached.
    pub transport: Transport,
    /// What it is called there; empty for the default export.
    pub export: String,
    /// How it is encrypted; without, it is not.
    pub tls: Option<UriTls>,
}

/// What an `nbds` URI says about TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct UriTls {
    /// The directory of the certificates (`tls-certificates`), an absolute path.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must be for (`tls-hostname`), if it is not the one that is connected to.
    pub hostname: Option<String>,
}

/// What is wrong with a URI.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UriError {
    /// It begins with none of `nbd+unix://`, `nbd://`, `nbds+unix://` and `nbds://`.
    Scheme,
    /// `nbd+unix:` names a host: two slashes where three belong.
    UnixHost(String),
    /// `nbd+unix:` without `?socket=PATH`.
    SocketMissing,
    /// The socket's path does not begin with a slash.
    SocketRelative(String),
    /// The socket's path is longer than the system takes.
    SocketTooLong(String),
    /// Something after the question mark that is not known, is there twice, or belongs to another scheme.
    Query(String),
    /// The directory of the certificates does not begin with a slash.
    CertificatesRelative(String),
    /// A way of TLS that is not spoken here: keys shared beforehand, no proof of who the server is, or a user's name
    /// for these.
    TlsKind(String),
    /// The name for the server's certificate is neither a host's name nor an address.
    TlsHostname(String),
    /// `nbd:` without a host.
    HostMissing,
    /// The host is neither a name nor an address, or an IPv6 address without its brackets.
    Host(String),
    /// The port is no number from 1 to 65535.
    Port(String),
    /// A percent sign without two hexadecimal digits, or bytes that are no text.
    Escape(String),
    /// The export's name is longer than 4096 bytes.
    ExportTooLong,
}

impl fmt::Display for UriError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheme => out.write_str(
                "an export's URI is nbd+unix:///NAME?socket=PATH or nbd://HOST:PORT/NAME, with nbds instead of nbd for TLS",
            ),
            Self::UnixHost(host) => write!(
                out,
                "nbd+unix: takes no host, but here it is \"{host}\": write three slashes, nbd+unix:///NAME?socket=PATH"
            ),
            Self::SocketMissing => out.write_str("nbd+unix: needs the socket's path: nbd+unix:///NAME?socket=PATH"),
            Self::SocketRelative(path) => write!(out, "the socket's path \"{path}\" does not begin with a slash"),
            Self::SocketTooLong(path) => write!(out, "the socket's path \"{path}\" is longer than 107 bytes"),
            Self::Query(part) => write!(out, "\"{part}\" means nothing in this export's URI"),
            Self::CertificatesRelative(path) => {
                write!(out, "the directory of certificates \"{path}\" does not begin with a slash")
            }
            Self::TlsKind(part) => write!(
                out,
                "\"{part}\": TLS is spoken here with certificates that are looked at, not with shared keys (PSK) nor without"
            ),
            Self::TlsHostname(name) => write!(out, "\"{name}\" is no name that a certificate could be for"),
            Self::HostMissing => out.write_str("nbd: needs a host: nbd://HOST:PORT/NAME"),
            Self::Host(host) => {
                write!(out, "\"{host}\" is neither a host's name nor its address (IPv6 goes in brackets)")
            }
            Self::Port(port) => write!(out, "\"{port}\" is no port: a number from 1 to 65535"),
            Self::Escape(text) => write!(out, "\"{text}\" is not percent-encoded text"),
            Self::ExportTooLong => out.write_str("an export's name has at most 4096 bytes"),
        }
    }
}

impl std::error::Error for UriError {}

/// The schemes: what each is called, whether it goes over a unix socket, and whether through TLS.
const SCHEMES: [(&str, bool, bool); 4] =
    [("nbd", false, false), ("nbd+unix", true, false), ("nbds", false, true), ("nbds+unix", true, true)];

/// The longest path of a unix socket on Linux.
const SOCKET_BYTES_MAX: usize = 107;

impl NbdUri {
    /// The export `name` on the unix socket at `path`.
    #[must_use]
    pub fn unix(path: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        Self { transport: Transport::Unix(path.into()), export: name.into(), tls: None }
    }

    /// Whether both name the same export of the same server, whatever they say about how to speak to it.
    #[must_use]
    pub fn is_same_export(&self, other: &Self) -> bool {
        (&self.transport, &self.export) == (&other.transport, &other.export)
    }

    /// Whether `text` is meant as a URI of an export.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        SCHEMES.iter().any(|(scheme, ..)| text.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://")))
    }

    /// The path of the unix socket, if it is one.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        match &self.transport {
            Transport::Unix(path) => Some(path),
            Transport::Tcp(..) => None,
        }
    }
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let (before, query) = text.split_once('?').unwrap_or((text, ""));
        let (scheme, rest) = before.split_once("://").ok_or(UriError::Scheme)?;
        let (_, is_unix, is_encrypted) =
            *SCHEMES.iter().find(|(known, ..)| *known == scheme).ok_or(UriError::Scheme)?;
        let query = Query::parse(query, is_unix, is_encrypted)?;
        let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
        if let (true, Some((user, _))) = (is_encrypted, authority.rsplit_once('@')) {
            return Err(UriError::TlsKind(format!("{user}@")));
        }
        let transport = match is_unix {
            true if !authority.is_empty() => return Err(UriError::UnixHost(authority.to_owned())),
            true => Transport::Unix(query.socket.ok_or(UriError::SocketMissing)?),
            false => {
                let (host, port) = parse_authority(authority)?;
                Transport::Tcp(host, port)
            }
        };
        let uri = Self { transport, export: unescape(name)?, tls: is_encrypted.then_some(query.tls) };
        if uri.export.len() > crate::protocol::STRING_BYTES_MAX {
            return Err(UriError::ExportTooLong);
        }
        Ok(uri)
    }
}

/// What follows the question mark.
#[derive(Default)]
struct Query {
    socket: Option<PathBuf>,
    tls: UriTls,
}

impl Query {
    fn parse(text: &str, is_unix: bool, is_encrypted: bool) -> Result<Self, UriError> {
        let mut query = Self::default();
        for part in text.split('&').filter(|part| !part.is_empty()) {
            let unknown = || UriError::Query(part.to_owned());
            let (key, value) = part.split_once('=').ok_or_else(unknown)?;
            let value = unescape(value)?;
            match key {
                "socket" if is_unix && query.socket.is_none() => query.socket = Some(check_socket(value)?),
                "tls-certificates" if is_encrypted && query.tls.certificates.is_none() => {
                    if !value.starts_with('/') {
                        return Err(UriError::CertificatesRelative(value));
                    }
                    query.tls.certificates = Some(value.into());
                }
                "tls-hostname" if is_encrypted && query.tls.hostname.is_none() => {
                    if value.is_empty()
                        || !value.chars().all(|letter| letter.is_alphanumeric() || "-._:".contains(letter))
                    {
                        return Err(UriError::TlsHostname(value));
                    }
                    query.tls.hostname = Some(value);
                }
                // What is done in any case may be said.
                "tls-type" if is_encrypted && value == "x509" => {}
                "tls-verify-peer" if is_encrypted && ["1", "true"].contains(&value.as_str()) => {}
                "tls-type" | "tls-verify-peer" | "tls-psk-file" if is_encrypted => {
                    return Err(UriError::TlsKind(part.to_owned()));
                }
                _ => return Err(unknown()),
            }
        }
        Ok(query)
    }
}

fn check_socket(socket: String) -> Result<PathBuf, UriError> {
    match socket {
        empty if empty.is_empty() => Err(UriError::SocketMissing),
        relative if !relative.starts_with('/') => Err(UriError::SocketRelative(relative)),
        long if long.len() > SOCKET_BYTES_MAX => Err(UriError::SocketTooLong(long)),
        socket => Ok(socket.into()),
    }
}

fn parse_authority(authority: &str) -> Result<(String, u16), UriError> {
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => (address, rest.strip_prefix(':').or(rest.is_empty().then_some(""))),
        None => authority.rsplit_once(':').map_or((authority, Some("")), |(host, port)| (host, Some(port))),
    };
    let bad_port = |port: &str| UriError::Port(port.to_owned());
    let port = match port.ok_or_else(|| bad_port(authority))? {
        "" if authority.ends_with(':') => return Err(bad_port("")),
        "" => DEFAULT_PORT,
        digits => digits.parse().ok().filter(|port| *port != 0).ok_or_else(|| bad_port(digits))?,
    };
    let host = unescape(host)?;
    if host.is_empty() {
        return Err(UriError::HostMissing);
    }
    let is_bracketed = authority.starts_with('[');
    let belongs = |letter: char| letter.is_alphanumeric() || "-._".contains(letter) || (is_bracketed && letter == ':');
    if !host.chars().all(belongs) {
        return Err(UriError::Host(host));
    }
    Ok((host, port))
}

fn unescape(text: &str) -> Result<String, UriError> {
    let bad = || UriError::Escape(text.to_owned());
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_first_chunk::<2>().ok_or_else(bad)?;
        let value = |digit: u8| char::from(digit).to_digit(16).ok_or_else(bad);
        bytes.push((value(digits[0])? * 16 + value(digits[1])?) as u8);
        rest = after;
    }
    if bytes.contains(&0) {
        return Err(bad());
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

/// Percent-encodes all but what may stand in a path and in a query alike.
fn escape(text: &str, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                write!(out, "{}", char::from(byte))?;
            }
            other => write!(out, "%{other:02X}")?,
        }
    }
    Ok(())
}

impl fmt::Display for NbdUri {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.tls.is_some() { "nbds" } else { "nbd" })?;
        match &self.transport {
            Transport::Unix(_) => out.write_str("+unix:///")?,
            Transport::Tcp(host, port) => {
                out.write_str("://")?;
                match host.contains(':') {
                    true => write!(out, "[{host}]")?,
                    false => escape(host, out)?,
                }
                write!(out, ":{port}/")?;
            }
        }
        escape(&self.export, out)?;
        let socket = self.socket().map(Path::to_string_lossy);
        let certificates = self.tls.as_ref().and_then(|tls| tls.certificates.as_deref()).map(Path::to_string_lossy);
        let hostname = self.tls.as_ref().and_then(|tls| tls.hostname.as_deref()).map(Into::into);
        let parts = [("socket", socket), ("tls-certificates", certificates), ("tls-hostname", hostname)];
        let mut lead = '?';
        for (key, value) in parts.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            write!(out, "{lead}{key}=")?;
            escape(&value, out)?;
            lead = '&';
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<NbdUri, UriError> {
        text.parse()
    }

    #[test]
    fn both_kinds_are_understood() {
        assert_eq!(parse("nbd+unix:///vm1?socket=/run/a.sock"), Ok(NbdUri::unix("/run/a.sock", "vm1")));
        assert_eq!(parse("nbd+unix:///?socket=/run/a%20b"), Ok(NbdUri::unix("/run/a b", "")));
        assert_eq!(parse("nbd+unix:///a/b%3F?socket=/s"), Ok(NbdUri::unix("/s", "a/b?")));
        let tcp = |host: &str, port, export: &str| NbdUri {
            transport: Transport::Tcp(host.into(), port),
            export: export.into(),
            tls: None,
        };
        assert_eq!(parse("nbd://localhost/disk"), Ok(tcp("localhost", 10809, "disk")));
        assert_eq!(parse("nbd://10.0.0.1:4000"), Ok(tcp("10.0.0.1", 4000, "")));
        assert_eq!(parse("nbd://[::1]:4000/x"), Ok(tcp("::1", 4000, "x")));
        assert_eq!(parse("nbd://[::1]/x"), Ok(tcp("::1", 10809, "x")));
    }

    #[test]
    fn an_encrypted_export_names_its_certificates_and_who_the_server_is_to_be() {
        let tls = |certificates: Option<&str>, hostname: Option<&str>| {
            Some(UriTls { certificates: certificates.map(Into::into), hostname: hostname.map(Into::into) })
        };
        let tcp = NbdUri { transport: Transport::Tcp("far".into(), 10809), export: "x".into(), tls: tls(None, None) };
        assert_eq!(parse("nbds://far/x"), Ok(tcp.clone()));
        assert_eq!(parse("nbds://far/x?tls-type=x509&tls-verify-peer=1"), Ok(tcp.clone()));
        let with = NbdUri { tls: tls(Some("/etc/a b"), Some("far.example")), ..tcp.clone() };
        assert_eq!(parse("nbds://far/x?tls-certificates=/etc/a%20b&tls-hostname=far.example"), Ok(with.clone()));
        assert!(with.is_same_export(&tcp) && !with.is_same_export(&NbdUri { export: "y".into(), ..with.clone() }));
        let unix = NbdUri { tls: tls(Some("/c"), None), ..NbdUri::unix("/s", "x") };
        assert_eq!(parse("nbds+unix:///x?socket=/s&tls-certificates=/c"), Ok(unix.clone()));
        assert_eq!(unix.to_string(), "nbds+unix:///x?socket=/s&tls-certificates=/c");
        for text in ["nbd://", "nbds://x", "nbd+unix:///x", "nbds+unix:///x"] {
            assert!(NbdUri::is_meant(text), "{text}");
        }
        for text in ["nbd:x", "file:/nbds://", "nbdx://y"] {
            assert!(!NbdUri::is_meant(text), "{text}");
        }
    }

    #[test]
    fn tls_without_certificates_that_are_looked_at_is_refused_and_so_is_what_belongs_to_it_without_tls() {
        let kind = |part: &str| Err(UriError::TlsKind(part.into()));
        for part in ["tls-type=psk", "tls-type=anon", "tls-psk-file=/k", "tls-verify-peer=0"] {
            assert_eq!(parse(&format!("nbds://h/x?{part}")), kind(part));
        }
        assert_eq!(parse("nbds://alice@h/x"), kind("alice@"));
        assert_eq!(parse("nbds+unix://alice@/x?socket=/s"), kind("alice@"));
        assert_eq!(parse("nbd://h/x?tls-certificates=/c"), Err(UriError::Query("tls-certificates=/c".into())));
        assert_eq!(parse("nbds://h/x?socket=/s"), Err(UriError::Query("socket=/s".into())));
        assert_eq!(parse("nbds://h/x?tls-certificates=c"), Err(UriError::CertificatesRelative("c".into())));
        assert_eq!(parse("nbds://h/x?tls-hostname=a/b"), Err(UriError::TlsHostname("a/b".into())));
        let twice = "nbds://h/x?tls-hostname=a&tls-hostname=b";
        assert_eq!(parse(twice), Err(UriError::Query("tls-hostname=b".into())));
    }

    #[test]
    fn each_mistake_has_its_own_answer() {
        assert_eq!(parse("http://x"), Err(UriError::Scheme));
        assert_eq!(parse("nbd+unix://vm1?socket=/s"), Err(UriError::UnixHost("vm1".into())));
        assert_eq!(parse("nbd+unix:///vm1"), Err(UriError::SocketMissing));
        assert_eq!(parse("nbd+unix:///vm1?socket="), Err(UriError::SocketMissing));
        assert_eq!(parse("nbd+unix:///vm1?socket=a"), Err(UriError::SocketRelative("a".into())));
        assert_eq!(parse("nbd+unix:///vm1?sock=/a"), Err(UriError::Query("sock=/a".into())));
        assert_eq!(parse("nbd+unix:///v?socket=/a&socket=/b"), Err(UriError::Query("socket=/b".into())));
        let long = format!("/{}", "s".repeat(107));
        assert_eq!(parse(&format!("nbd+unix:///v?socket={long}")), Err(UriError::SocketTooLong(long)));
        assert_eq!(parse("nbd:///v"), Err(UriError::HostMissing));
        assert_eq!(parse("nbd://h:0/v"), Err(UriError::Port("0".into())));
        assert_eq!(parse("nbd://h:/v"), Err(UriError::Port("".into())));
        assert_eq!(parse("nbd://h:70000/v"), Err(UriError::Port("70000".into())));
        assert_eq!(parse("nbd://[::1]x/v"), Err(UriError::Port("[::1]x".into())));
        assert_eq!(parse("nbd://::1/v"), Err(UriError::Host(":".into())));
        assert_eq!(parse("nbd://+n]bd:0nbd:001"), Err(UriError::Host("+n]bd:0nbd".into())));
        assert_eq!(parse("nbd://[a:%5D]/v"), Err(UriError::Host("a:]".into())));
        assert_eq!(parse("nbd://h/v?socket=/s"), Err(UriError::Query("socket=/s".into())));
        assert_eq!(parse("nbd://h/%4"), Err(UriError::Escape("%4".into())));
        assert_eq!(parse("nbd://h/%ff"), Err(UriError::Escape("%ff".into())));
        assert_eq!(parse(&format!("nbd://h/{}", "n".repeat(4097))), Err(UriError::ExportTooLong));
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(
            path in "/[^\\x00]{0,24}", name in "[^\\x00]{0,40}", host in "[a-z0-9.-]{1,20}", port in 1_u16..,
            hostname in prop::option::of("[a-z0-9.:-]{1,9}"), certificates in prop::option::of("/[^\\x00]{0,24}"), is_encrypted: bool,
        ) {
            let tls = is_encrypted.then(|| UriTls { certificates: certificates.map(Into::into), hostname });
            let unix = NbdUri { tls: tls.clone(), ..NbdUri::unix(path, name.clone()) };
            prop_assert_eq!(parse(&unix.to_string()), Ok(unix));
            let tcp = NbdUri { transport: Transport::Tcp(host, port), export: name, tls };
            prop_assert_eq!(parse(&tcp.to_string()), Ok(tcp));
        }

        #[test]
        fn hostile_text_never_panics(text in "(nbds?(\\+unix)?://)?\\PC{0,40}") {
            if let Ok(uri) = parse(&text) {
                prop_assert_eq!(parse(&uri.to_string()), Ok(uri));
            }
        }
    }
}
