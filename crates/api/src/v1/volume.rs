//! Volumes, their exports, and the daemon as a whole.

use serde::{Deserialize, Serialize};

use super::{AdoptedVm, Job, Layer};

/// Who answers (`GET /v1/version`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The daemon's version.
    pub version: String,
    /// The versions of the API that it speaks.
    pub api: Vec<String>,
    /// Its process.
    pub pid: u32,
}

/// Asks for a backend to be served (`POST /v1/volumes`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// What the volume shall be called: letters, digits, `.`, `_` and `-`, 64 at most.
    pub name: String,
    /// What holds it: `file:PATH[,format=raw][,cache=auto|direct|page]`.
    pub backend: String,
    /// Where it is served: `nbd+unix:///NAME?socket=PATH` or `nbd://HOST:PORT/NAME`; with `nbds` and
    /// `?tls-certificates=DIR` (`&` after a socket) encrypted.
    pub export: String,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Serve a block device whose first block says that a volume was moved away from some device: it is the guest's own. The tombstone
    /// of this very device is refused all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_tombstone: bool,
}

/// Says that what has the name of a volume's image now is the volume's own (`POST /v1/volumes/NAME/accept`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AcceptRequest {}

/// What a volume is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeState {
    /// It is served.
    Serving,
    /// It is served, and being moved.
    Moving,
    /// Another host fills it, and holds it meanwhile.
    Incoming,
    /// Another host holds it: what clients ask for here is passed on.
    Forwarding,
    /// It could not be brought back after a restart; `problem` says why.
    Down,
    /// A state of a later daemon.
    #[serde(other)]
    Unknown,
}

/// What a volume's clients did and felt in the last second or so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestIo {
    /// Requests a second.
    pub iops: f64,
    /// Bytes read a second.
    pub read_bytes_per_second: f64,
    /// Bytes written a second.
    pub write_bytes_per_second: f64,
    /// Writes a second.
    #[serde(default)]
    pub write_iops: f64,
    /// The median of their latency, in microseconds.
    pub latency_us_p50: u64,
    /// The 99th percentile of their latency, in microseconds.
    pub latency_us_p99: u64,
    /// The longest of them, in microseconds.
    pub latency_us_max: u64,
}

/// Where a volume comes from that another host moves here, or has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrival {
    /// The host, as it is called here.
    pub host: String,
    /// What the volume is called there.
    pub volume: String,
    /// The move.
    pub job: String,
    /// How far it has come.
    pub stage: ArrivalStage,
    /// The epoch under which it is held: there while it is filled, here afterwards.
    pub epoch: u64,
    /// Whether a guest of that host uses it from there now.
    pub used: bool,
}

/// How far a volume has come that another host moves here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrivalStage {
    /// It is being filled.
    Filling,
    /// It is complete, and waits for the other host to give it up.
    Prepared,
    /// It is held here.
    Held,
    /// A stage of a later daemon.
    #[serde(other)]
    Unknown,
}

/// Asks who holds a volume that was on its way between two hosts (`POST /v1/volumes/NAME/resolve`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// What is decided; nothing if both records are only to be shown.
    #[serde(default)]
    pub decision: Option<Decision>,
    /// It is done although the other host does not say that nothing stands against it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_risk: bool,
}

/// Who is to hold a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// The host that it was moved to.
    Take,
    /// The host that it was moved from.
    GiveBack,
    /// Of a VM whose memory follows its guest: what is left of that is given up, and the guest with it.
    Lost,
}

/// What two hosts have on record of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resolution {
    /// The volume.
    pub volume: String,
    /// What this host has on record.
    pub here: String,
    /// The other host, if there is one.
    pub host: Option<String>,
    /// What that has on record, or why it has not answered.
    pub there: Option<String>,
    /// What the arbiter says, or why it says nothing, if there is one.
    #[serde(default)]
    pub arbiter: Option<String>,
    /// Whether somebody may have to decide.
    pub in_doubt: bool,
    /// Who holds the volume, as far as that is known, and what can be done.
    pub verdict: String,
    /// What a decision would risk.
    pub risk: Option<String>,
    /// What was done.
    pub done: Option<String>,
}

/// A volume (`GET /v1/volumes/NAME`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Volume {
    /// What it is called.
    pub name: String,
    /// What it is doing.
    pub state: VolumeState,
    /// What holds it now.
    pub backend: String,
    /// Where it is served.
    pub export: String,
    /// Its size.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// How often it has changed its owner.
    pub epoch: u64,
    /// How many clients are connected.
    pub connections: u64,
    /// What they do and feel.
    pub guest: GuestIo,
    /// The running VM that it was adopted from.
    pub vm: Option<AdoptedVm>,
    /// The job under way or waiting.
    pub job: Option<u64>,
    /// The host that moves it here, or has.
    #[serde(default)]
    pub arrival: Option<Arrival>,
    /// Its layers, the lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<Layer>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

impl Volume {
    /// A volume of which nothing but its name is known, because of `error`.
    #[must_use]
    pub fn unreadable(name: &str, error: &super::Error) -> Self {
        Self {
            name: name.to_owned(),
            state: VolumeState::Down,
            backend: String::new(),
            export: String::new(),
            size_bytes: 0,
            read_only: false,
            epoch: 0,
            connections: 0,
            guest: GuestIo::default(),
            vm: None,
            job: None,
            arrival: None,
            layers: Vec::new(),
            problem: Some(error.to_string()),
        }
    }
}

/// The daemon as a whole (`GET /v1/status`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Who answers.
    pub daemon: Version,
    /// Where its state is.
    pub state_dir: String,
    /// Seconds since it came up.
    pub uptime_seconds: f64,
    /// All volumes.
    pub volumes: Vec<Volume>,
    /// Jobs that wait or run.
    pub jobs: Vec<Job>,
}
