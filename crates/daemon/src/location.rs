//! Where a volume's bytes are, or shall be.
//!
//! | place | as a user writes it | in the journal |
//! |---|---|---|
//! | a file or block device of this host | `file:PATH[,...]` | the same string |
//! | a volume of another host's daemon | `HOST[:VOLUME]` | an object with `host` and `volume` |
//! | an export of an NBD server that is not ours | `nbd://HOST:PORT/NAME`, `nbd+unix:///NAME?socket=PATH`, `nbds` for TLS | an object with `nbd` |
//!
//! A further kind of place is a further variant here: the compiler then visits everybody who must know what it means.

use std::fmt;
use std::path::{Path, PathBuf};

use api::v1::Error;
use backends::{BackendSpec, CacheMode, PreparedTarget, TargetOrigin};
use block::{Bytes, Extent};
use migrate::stream::protocol::{PART_ALIGNMENT, SessionLayers};
use nbd::NbdUri;
use serde::{Deserialize, Serialize};

use crate::foreign::{ForeignExport, HostVolume, held_by_server, parse_uri};
use crate::problem::{Result, invalid};
use crate::state_dir::check_name;

/// Where a volume's bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Location {
    /// A file or block device of this host.
    Local(BackendSpec),
    /// A volume that another host's daemon holds, or is to hold.
    Remote(RemoteVolume),
    /// An export of an NBD server that is not ours.
    Foreign(ForeignExport),
}

/// A volume of another host's daemon, and all that it takes to speak of it there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteVolume {
    /// The host, as this daemon's trust store calls it.
    pub host: String,
    /// What the volume is called there.
    pub volume: String,
    /// The move that brings it there, or has.
    pub job: uuid::Uuid,
    /// How large it is, in bytes.
    pub size: u64,
    /// What requests are multiples of, in bytes.
    pub request_alignment: u32,
    /// What makes those bytes the volume, if they are not it by themselves. The guest goes through layers of the host that the
    /// volume came from. Until that host lets it go, the other one keeps no more than the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<SessionLayers>,
    /// Whether its bytes lie on storage that both hosts reach: then they stay where they are, and nothing is copied.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
}

impl RemoteVolume {
    /// Where its parts lie in its bytes, the base's first.
    pub(crate) fn parts(&self) -> Vec<Extent> {
        match &self.layers {
            Some(layers) if layers.hold_bytes() => filters::layout(&layers.part_sizes(), PART_ALIGNMENT),
            Some(_) | None => vec![Extent::new(Bytes::ZERO, Bytes(self.size))],
        }
    }
}

/// Where a move goes to: ready, and with what it takes to take that back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum JobTarget {
    /// A file or block device of this host that is ready to be written.
    Local(PreparedTarget),
    /// A volume of another host, whose daemon knows how it came to be.
    Remote(RemoteVolume),
    /// An export of an NBD server that is not ours, which nobody can take back.
    Foreign(ForeignExport),
}

/// Where a move shall go to, as a user writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// A file or block device of this host.
    Local(BackendSpec),
    /// Another host's daemon, where the volume shall be called so.
    Host { host: String, volume: String },
    /// An export of an NBD server that is not ours.
    Foreign(NbdUri),
}

impl Location {
    /// The file or block device, if it is one of this host.
    #[must_use]
    pub const fn local(&self) -> Option<&BackendSpec> {
        match self {
            Self::Local(spec) => Some(spec),
            Self::Remote(_) | Self::Foreign(_) => None,
        }
    }

    /// The path of the file or block device, if it is one of this host.
    #[must_use]
    pub fn local_path(&self) -> Option<&Path> {
        self.local().map(BackendSpec::path)
    }

    /// The volume of another host that is used from here, and the socket of this daemon that leads there, if it is one.
    pub(crate) fn host_volume(&self) -> Option<(HostVolume, PathBuf)> {
        let Self::Foreign(export) = self else { return None };
        Some((export.host_volume.clone()?, export.uri().ok()?.socket()?.to_owned()))
    }

    /// Whether a program that knows only files can make anything of it.
    pub(crate) const fn is_file(&self) -> bool {
        match self {
            Self::Local(_) => true,
            Self::Remote(_) | Self::Foreign(_) => false,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(spec) => spec.fmt(out),
            Self::Remote(remote) => remote.fmt(out),
            Self::Foreign(export) => export.fmt(out),
        }
    }
}

impl From<BackendSpec> for Location {
    fn from(spec: BackendSpec) -> Self {
        Self::Local(spec)
    }
}

impl From<ForeignExport> for Location {
    fn from(export: ForeignExport) -> Self {
        Self::Foreign(export)
    }
}

impl fmt::Display for RemoteVolume {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.host, self.volume)
    }
}

impl JobTarget {
    /// Where that is.
    #[must_use]
    pub fn location(&self) -> Location {
        match self {
            Self::Local(target) => Location::Local(target.spec.clone()),
            Self::Remote(remote) => Location::Remote(remote.clone()),
            Self::Foreign(export) => Location::Foreign(export.clone()),
        }
    }

    /// The file or block device, if it is one of this host.
    #[must_use]
    pub const fn local(&self) -> Option<&PreparedTarget> {
        match self {
            Self::Local(target) => Some(target),
            Self::Remote(_) | Self::Foreign(_) => None,
        }
    }

    /// Whether all of it was known to read as zeroes when it was made ready, so that holes need not be written.
    pub(crate) const fn reads_zero(&self) -> bool {
        match self {
            Self::Local(target) => target.reads_zero,
            // The other host has made a file for it, which nobody had before.
            Self::Remote(_) => true,
            Self::Foreign(export) => export.reads_zero,
        }
    }

    /// Whether the volume stays where it is, and only its host changes.
    pub(crate) const fn is_shared(&self) -> bool {
        match self {
            Self::Remote(remote) => remote.shared,
            Self::Local(_) | Self::Foreign(_) => false,
        }
    }

    /// Whether it may be larger than the volume: then the volume's end must be kept on record.
    pub(crate) fn may_be_larger(&self) -> bool {
        match self {
            Self::Local(target) => target.origin == TargetOrigin::BlockDevice,
            // What is known of an export says where the volume ends.
            Self::Remote(_) | Self::Foreign(_) => false,
        }
    }
}

impl fmt::Display for JobTarget {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(target) => target.spec.fmt(out),
            Self::Remote(remote) => remote.fmt(out),
            Self::Foreign(export) => export.fmt(out),
        }
    }
}

impl Destination {
    /// What `text` names: a backend with a scheme, or a host. A file is reached in the way of `cache` unless `text` says
    /// otherwise, and the volume is called `name` there unless it does.
    pub(crate) fn parse(text: &str, cache: CacheMode, name: &str) -> Result<Self> {
        if NbdUri::is_meant(text) {
            return parse_uri(text).map(Self::Foreign);
        }
        let (host, volume) = match text.split_once(':') {
            Some((scheme, rest)) if scheme == "file" || rest.starts_with("//") => {
                return parse_backend(text, cache).map(Self::Local);
            }
            Some((host, volume)) => (host, volume),
            None => (text, name),
        };
        if check_name(host).is_err() || check_name(volume).is_err() {
            let message = format!("\"{text}\" names neither a backend nor a volume of a host");
            return Err(invalid(
                message,
                "write file:PATH[,format=raw][,cache=auto|direct|page], nbd[s]://HOST:PORT/NAME, or HOST[:VOLUME]",
            ));
        }
        Ok(Self::Host { host: host.to_owned(), volume: volume.to_owned() })
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(spec) => spec.fmt(out),
            Self::Host { host, volume } => write!(out, "{host}:{volume}"),
            Self::Foreign(uri) => uri.fmt(out),
        }
    }
}

/// A backend as a user writes it, reached in the way of `cache` if nothing is said of that.
pub(crate) fn parse_backend(text: &str, cache: CacheMode) -> Result<BackendSpec> {
    let spec = BackendSpec::parse_with_cache(text, cache)
        .map_err(|error| invalid(format!("{error}"), "write file:PATH[,format=raw][,cache=auto|direct|page]"))?;
    if !spec.path().is_absolute() {
        let hint = "write the whole path, beginning with a slash: the daemon runs in another directory";
        return Err(invalid(format!("{} is no absolute path", spec.path().display()), hint));
    }
    Ok(spec)
}

/// Refuses what only a file or block device of this host can do.
pub(crate) fn require_local<'a>(location: &'a Location, what: &str) -> Result<&'a BackendSpec> {
    match location {
        Location::Local(spec) => Ok(spec),
        Location::Remote(remote) => Err(held_elsewhere(remote, what)),
        Location::Foreign(export) => Err(held_by_server(export, what)),
    }
}

/// Refuses what needs this daemon to hold the volume, wherever its bytes are.
pub(crate) fn require_here(location: &Location, what: &str) -> Result<()> {
    match location {
        Location::Local(_) | Location::Foreign(_) => Ok(()),
        Location::Remote(remote) => Err(held_elsewhere(remote, what)),
    }
}

/// What cannot be done here because another host holds the volume.
pub(crate) fn held_elsewhere(remote: &RemoteVolume, what: &str) -> Error {
    let RemoteVolume { host, volume, .. } = remote;
    Error::new(api::v1::ErrorCode::WrongState, format!("{host} holds the volume, as {volume}: {what}"))
        .with_hint(format!("do it on {host}; this daemon only passes on what its clients ask for"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote() -> RemoteVolume {
        RemoteVolume {
            host: "host2".to_owned(),
            volume: "web1".to_owned(),
            job: uuid::Uuid::from_bytes([7; 16]),
            size: 1 << 30,
            request_alignment: 512,
            layers: None,
            shared: false,
        }
    }

    #[test]
    fn a_place_is_read_back_as_it_was_written_and_a_file_stays_a_string() {
        let file = Location::Local(BackendSpec::file("/vm/a.img"));
        assert_eq!(serde_json::to_value(&file).expect("a value"), "file:/vm/a.img");
        let foreign = ForeignExport {
            nbd: "nbd://far:10809/disk".to_owned(),
            size: 1 << 30,
            request_alignment: 512,
            preferred_bytes: 4096,
            transfer_bytes_max: 1 << 20,
            reads_zero: true,
            host_volume: None,
        };
        for place in [file, Location::Remote(remote()), Location::Foreign(foreign)] {
            let text = serde_json::to_string(&place).expect("a text");
            assert_eq!(serde_json::from_str::<Location>(&text).expect("readable"), place);
        }
        let target = JobTarget::Remote(remote());
        let text = serde_json::to_string(&target).expect("a text");
        assert_eq!(serde_json::from_str::<JobTarget>(&text).expect("readable"), target);
        assert_eq!(target.to_string(), "host2:web1");
    }

    #[test]
    fn a_destination_is_a_backend_a_host_or_a_volume_of_a_host() {
        let parse = |text| Destination::parse(text, CacheMode::Auto, "web1");
        let host = |volume: &str| Destination::Host { host: "host2".to_owned(), volume: volume.to_owned() };
        assert_eq!(parse("file:/a").expect("a file"), Destination::Local(BackendSpec::file("/a")));
        assert_eq!(parse("host2").expect("a host"), host("web1"));
        assert_eq!(parse("host2:db").expect("a volume"), host("db"));
        let uri = "nbd://host/x".parse().expect("an address");
        assert_eq!(parse("nbd://host/x").expect("an export"), Destination::Foreign(uri));
        assert!(matches!(parse("nbds://host/x?tls-certificates=/c").expect("an export"), Destination::Foreign(_)));
        for wrong in
            ["", "/vm/a.img", "host2:", ":web1", "host2:a/b", "file:relative", "nbd:///x", "ssh://host/x", "a:b:c"]
        {
            assert!(parse(wrong).is_err(), "{wrong} was accepted");
        }
    }
}
