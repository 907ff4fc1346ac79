//! Where an export is: `nbd+unix:///NAME?socket=PATH` or `nbd://HOST:PORT/NAME`.

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
}

/// What is wrong with a URI.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UriError {
    /// It begins neither with `nbd+unix://` nor with `nbd://`.
    Scheme,
    /// `nbd+unix:` names a host: two slashes where three belong.
    UnixHost(String),
    /// `nbd+unix:` without `?socket=PATH`.
    SocketMissing,
    /// The socket's path does not begin with a slash.
    SocketRelative(String),
    /// The socket's path is longer than the system takes.
    SocketTooLong(String),
    /// Something else than `socket=PATH` after the question mark.
    Query(String),
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
            Self::Scheme => out.write_str("an export's URI is nbd+unix:///NAME?socket=PATH or nbd://HOST:PORT/NAME"),
            Self::UnixHost(host) => write!(
                out,
                "nbd+unix: takes no host, but here it is \"{host}\": write three slashes, nbd+unix:///NAME?socket=PATH"
            ),
            Self::SocketMissing => out.write_str("nbd+unix: needs the socket's path: nbd+unix:///NAME?socket=PATH"),
            Self::SocketRelative(path) => write!(out, "the socket's path \"{path}\" does not begin with a slash"),
            Self::SocketTooLong(path) => write!(out, "the socket's path \"{path}\" is longer than 107 bytes"),
            Self::Query(part) => write!(out, "\"{part}\" means nothing in an export's URI"),
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

/// The longest path of a unix socket on Linux.
const SOCKET_BYTES_MAX: usize = 107;

impl NbdUri {
    /// The export `name` on the unix socket at `path`.
    #[must_use]
    pub fn unix(path: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        Self { transport: Transport::Unix(path.into()), export: name.into() }
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
        let (before, query) = text.split_once('?').map_or((text, None), |(before, query)| (before, Some(query)));
        let uri = if let Some(rest) = before.strip_prefix("nbd+unix://") {
            let (host, name) = rest.split_once('/').unwrap_or((rest, ""));
            if !host.is_empty() {
                return Err(UriError::UnixHost(host.to_owned()));
            }
            Self { transport: Transport::Unix(parse_socket(query)?), export: unescape(name)? }
        } else if let Some(rest) = before.strip_prefix("nbd://") {
            if let Some(query) = query {
                return Err(UriError::Query(query.to_owned()));
            }
            let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
            let (host, port) = parse_authority(authority)?;
            Self { transport: Transport::Tcp(host, port), export: unescape(name)? }
        } else {
            return Err(UriError::Scheme);
        };
        if uri.export.len() > crate::protocol::STRING_BYTES_MAX {
            return Err(UriError::ExportTooLong);
        }
        Ok(uri)
    }
}

fn parse_socket(query: Option<&str>) -> Result<PathBuf, UriError> {
    let mut socket = None;
    for part in query.unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
        match part.split_once('=') {
            Some(("socket", path)) if socket.is_none() => socket = Some(unescape(path)?),
            _ => return Err(UriError::Query(part.to_owned())),
        }
    }
    let socket = socket.filter(|path| !path.is_empty()).ok_or(UriError::SocketMissing)?;
    if !socket.starts_with('/') {
        return Err(UriError::SocketRelative(socket));
    }
    if socket.len() > SOCKET_BYTES_MAX {
        return Err(UriError::SocketTooLong(socket));
    }
    Ok(socket.into())
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
        match &self.transport {
            Transport::Unix(path) => {
                out.write_str("nbd+unix:///")?;
                escape(&self.export, out)?;
                out.write_str("?socket=")?;
                escape(&path.to_string_lossy(), out)
            }
            Transport::Tcp(host, port) => {
                out.write_str("nbd://")?;
                match host.contains(':') {
                    true => write!(out, "[{host}]")?,
                    false => escape(host, out)?,
                }
                write!(out, ":{port}/")?;
                escape(&self.export, out)
            }
        }
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
        };
        assert_eq!(parse("nbd://localhost/disk"), Ok(tcp("localhost", 10809, "disk")));
        assert_eq!(parse("nbd://10.0.0.1:4000"), Ok(tcp("10.0.0.1", 4000, "")));
        assert_eq!(parse("nbd://[::1]:4000/x"), Ok(tcp("::1", 4000, "x")));
        assert_eq!(parse("nbd://[::1]/x"), Ok(tcp("::1", 10809, "x")));
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
        fn what_is_printed_is_read_back(path in "/[^\\x00]{0,24}", name in "[^\\x00]{0,40}", host in "[a-z0-9.-]{1,20}", port in 1_u16..) {
            let unix = NbdUri::unix(path, name.clone());
            prop_assert_eq!(parse(&unix.to_string()), Ok(unix));
            let tcp = NbdUri { transport: Transport::Tcp(host, port), export: name };
            prop_assert_eq!(parse(&tcp.to_string()), Ok(tcp));
        }

        #[test]
        fn hostile_text_never_panics(text in "(nbd(\\+unix)?://)?\\PC{0,40}") {
            if let Ok(uri) = parse(&text) {
                prop_assert_eq!(parse(&uri.to_string()), Ok(uri));
            }
        }
    }
}
