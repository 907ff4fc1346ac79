//! Moves: asking for them, watching them, and what they say at the end.

use serde::{Deserialize, Serialize};

use super::{Error, GuestIo, Rates, Report, StreamReport};

/// How much of the copy is compared with its source before the switchover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// Nothing; extents still carry a checksum from the source's read to the target's write.
    Off,
    /// A random sample, and every chunk that saw an error, a retry or a redo.
    #[default]
    Sample,
    /// Every chunk, and a digest of the frozen source.
    Full,
}

impl std::fmt::Display for Verify {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Off => "off",
            Self::Sample => "sample",
            Self::Full => "full",
        })
    }
}

/// How the copy and what the guest writes meanwhile come together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Guest writes go to both sides.
    #[default]
    Mirror,
    /// Dirty block tracking: what the guest writes is copied again, pass after pass, and the rest while it is held.
    Dbt,
    /// The same, but what is written ahead of the copy is copied once.
    IncrementalDbt,
    /// Guest writes go to an overlay, and overlays are folded one after the other.
    Snapshot,
    /// Guest writes are answered by the source, and a bounded buffer is written to the target in order.
    MirrorAsync,
    /// Every chunk is mirrored or tracked, whichever is expected to cost less; all are mirrored in the end.
    Auto,
    /// As `mirror`, with no more than the ESX paper has of it: one window, in which guest writes wait. To be compared
    /// with.
    MirrorPaper,
}

impl std::fmt::Display for Strategy {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Mirror => "mirror",
            Self::Dbt => "dbt",
            Self::IncrementalDbt => "incremental-dbt",
            Self::Snapshot => "snapshot",
            Self::MirrorAsync => "mirror-async",
            Self::Auto => "auto",
            Self::MirrorPaper => "mirror-paper",
        })
    }
}

/// In which order chunks are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// In the order of the volume.
    #[default]
    Sequential,
    /// Where the head of the source's disk is, after the guest's requests. A source known to have no head is copied in sequence.
    Follow,
    /// What the guest touches least comes first.
    ColdFirst,
}

impl Schedule {
    /// Whether it is what a move has if nothing is said.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks like this")]
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl std::fmt::Display for Schedule {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Sequential => "sequential",
            Self::Follow => "follow",
            Self::ColdFirst => "cold-first",
        })
    }
}

/// What becomes of a move that copies in iterations and does not converge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnNoConverge {
    /// It ends; the guest stays on the source.
    Abort,
    /// The guest is held until the rest is copied, if that takes less than half a minute; otherwise it ends.
    Force,
    /// It goes on as a mirror.
    #[default]
    Mirror,
}

/// Asks for a volume to be moved (`POST /v1/volumes/NAME/move`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// Where to: `file:PATH[,format=raw][,cache=auto|direct|page]`, `HOST[:VOLUME]` for another host's daemon, or the
    /// export of an NBD server, `nbd://HOST:PORT/NAME` or `nbd+unix:///NAME?socket=PATH`, with `nbds` for TLS.
    pub to: String,
    /// Of a disk that goes with its machine: it stays on storage that both hosts reach, and nothing is copied.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// How many bytes a second may be copied; what the guest writes meanwhile does not count.
    #[serde(default)]
    pub bandwidth: Option<u64>,
    /// What is compared.
    #[serde(default)]
    pub verify: Verify,
    /// How copy and guest writes come together.
    #[serde(default)]
    pub strategy: Strategy,
    /// In which order chunks are copied. With `mirror-paper` and `snapshot` only `sequential`.
    #[serde(default, skip_serializing_if = "Schedule::is_default")]
    pub schedule: Schedule,
    /// Of the schedule `follow`: how many guest requests are served before one run is copied, 1 to 4; 2 if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow_ratio: Option<u8>,
    /// Of strategies that iterate: leave what the guest writes again and again for the last iteration but one.
    #[serde(default)]
    pub hot_blocks: bool,
    /// Look for chunks that hold zeroes only in all that is copied, record them as skipped, and do not write them to a target that
    /// reads zeroes there. Not with `mirror-paper`.
    #[serde(default)]
    pub skip_zero: bool,
    /// The surrogate that serves the guest's popular data while the volume is copied, and takes what it writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub surrogate: Option<String>,
    /// Of a move with a surrogate: from which request on a chunk is popular; 1, at the first, if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub popular_threshold: Option<u16>,
    /// The surrogate serves the guest also of a disk without a head, where it is not used otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub surrogate_on_flash: bool,
    /// A surrogate with one store may hold the only copy of what the guest has written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sole_copy: bool,
    /// Of strategies that iterate: for how long the guest may be held for the rest, in milliseconds; 200 if nothing is
    /// said.
    #[serde(default)]
    pub downtime_limit_ms: Option<u64>,
    /// How long after its start the move shall be over, in milliseconds. The move takes as much network and processor
    /// time as that needs. Strategies that iterate then do what `on_no_converge` says; others go on.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
    /// Of moves to another host: how many bytes a second they may take of the network whatever others want there.
    /// Nothing: what others leave.
    #[serde(default)]
    pub reserve: Option<u64>,
    /// Of strategies that iterate: what to do if that does not converge; `mirror` if nothing is said.
    #[serde(default)]
    pub on_no_converge: Option<OnNoConverge>,
    /// Of `mirror-async`: how many bytes the target may be behind the source, 1 MiB to 1 GiB; 64 MiB if nothing is
    /// said.
    #[serde(default)]
    pub buffer: Option<u64>,
    /// How many bytes of memory keep chunks of the source for the guest and the copy, at least 16 chunks and at most 64 GiB; none if
    /// nothing is said. Not with `snapshot` or `mirror-paper`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_cache: Option<u64>,
    /// Replace what the target holds.
    #[serde(default)]
    pub overwrite: bool,
    /// Delete the source once the move is committed, instead of renaming it `*.moved-EPOCH`.
    #[serde(default)]
    pub delete_source: bool,
    /// Of an adopted VM: do not tell its configuration of the new place.
    #[serde(default)]
    pub no_persist: bool,
    /// Of an adopted VM: the program that tells its configuration, instead of the daemon's own.
    #[serde(default)]
    pub persist_hook: Option<String>,
}

/// Asks what a move would cost (`POST /v1/volumes/NAME/plan`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// The move, as it would be asked for.
    #[serde(rename = "move")]
    pub request: MoveRequest,
}

/// What a move would cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The volume.
    pub volume: String,
    /// What holds it now.
    pub source: String,
    /// Where it would go.
    pub target: String,
    /// The volume's size.
    pub bytes_total: u64,
    /// What would be copied as data.
    pub bytes_to_copy: u64,
    /// Holes, which would not.
    pub bytes_zero: u64,
    /// What the guest writes a second now; that goes to both sides.
    pub guest_write_bytes_per_second: f64,
    /// How fast the copy would go.
    pub copy_bytes_per_second: u64,
    /// The whole move, comparisons included.
    pub seconds: f64,
    /// Between which that is expected to lie: at least
    #[serde(default)]
    pub seconds_min: f64,
    /// and at most.
    #[serde(default)]
    pub seconds_max: f64,
    /// How many passes over what is not in step, the last copy included.
    #[serde(default)]
    pub passes: u32,
    /// Whether the strategy converges by itself under what the guest writes now.
    #[serde(default)]
    pub converges: bool,
    /// The guest's longest request at the switchover, as expected.
    pub stall_us: u64,
    /// What the figures rest on and what to know beforehand, one line each.
    pub notes: Vec<String>,
    /// What would make the move be refused now.
    pub refusal: Option<Error>,
}

/// What was expected of a move before it began, and, once it is over, how far off that was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Prediction {
    /// When it was made, in milliseconds since 1970.
    pub made_unix_ms: u64,
    /// Whether it is the plan that somebody had asked for; otherwise it was made in a moment, right before the move
    /// began.
    pub planned: bool,
    /// How fast the copy would go.
    pub copy_bytes_per_second: u64,
    /// What the guest wrote a second then.
    pub guest_write_bytes_per_second: f64,
    /// The whole move, comparisons included,
    pub seconds: f64,
    /// at least,
    pub seconds_min: f64,
    /// and at most.
    pub seconds_max: f64,
    /// How many passes over what is not in step, the last copy included.
    pub passes: u32,
    /// Whether the strategy would converge by itself.
    pub converges: bool,
    /// The guest's longest request at the switchover.
    pub stall_us: u64,
    /// By how much of what the move took its time was off, in percent: more than nothing if it took less than expected.
    /// Nothing if it has not come to its switchover, or was paused, given another bandwidth, restarted or without its
    /// target on the way.
    pub seconds_error_percent: Option<f64>,
    /// Whether the time lay in the interval.
    pub seconds_within: Option<bool>,
    /// How many times what the guest felt the stall was expected to be: more than one if it felt less than expected.
    /// Nothing if it asked for nothing then.
    pub stall_factor: Option<f64>,
}

/// Asks for a change of a running move (`PATCH /v1/volumes/NAME/job`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRequest {
    /// How many bytes a second may be copied; 0 for no limit.
    #[serde(default)]
    pub bandwidth: Option<u64>,
    /// How many bytes a second it may take of the network whatever others want there; 0 for what others leave.
    #[serde(default)]
    pub reserve: Option<u64>,
    /// How long after its start it shall be over, in milliseconds; 0 for no deadline.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    /// It waits for its turn.
    Queued,
    /// It runs.
    Running,
    /// It was told to wait.
    Paused,
    /// The target holds the volume; the source is being retired.
    Finishing,
    /// The target holds the volume and everything is done.
    Done,
    /// It was cancelled; the guest is on the source.
    Cancelled,
    /// It failed; the guest is on the source.
    Failed,
    /// A state of a later daemon.
    #[serde(other)]
    Unknown,
}

impl JobState {
    /// Whether nothing more will happen.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }

    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Finishing => "finishing",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// What a move is doing. A word, because later versions may know more of them.
pub type Phase = String;

/// How far a move has come. Counts never go back.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// What it does now.
    pub phase: Phase,
    /// The volume's size.
    pub bytes_total: u64,
    /// The most that has been in step on both sides.
    pub bytes_done: u64,
    /// What is not in step now.
    pub bytes_left: u64,
    /// Data copied, copies of the same chunk again included.
    pub bytes_copied: u64,
    /// Holes and zeroes, which are not copied as data.
    pub bytes_zero: u64,
    /// What the guest wrote to both sides.
    pub bytes_mirrored: u64,
    /// Of `mirror-async`: what the source has and the target has yet to get.
    pub bytes_buffered: u64,
    /// Of `mirror-async`: how long guest writes have waited for room in the buffer, all together, in microseconds.
    pub throttled_us: u64,
    /// What has been compared.
    pub bytes_verified: u64,
    /// What is going to be compared.
    pub bytes_to_verify: u64,
    /// Bytes a second in this phase.
    pub rate: u64,
    /// How far it is, of copy and comparison, in percent. It never goes back.
    pub percent: f64,
    /// Seconds until the switchover, from recent rates.
    pub eta_seconds: Option<u64>,
    /// The same at the fast ones of all rates so far,
    pub eta_seconds_min: Option<u64>,
    /// and at the slow ones.
    pub eta_seconds_max: Option<u64>,
    /// Which pass over what is not in step this is; the first goes over the whole volume.
    pub iteration: u32,
    /// What the guest has made different again since it was copied.
    pub bytes_dirty: u64,
    /// The guest's longest request around the switchover, in microseconds.
    pub stall_us_max: u64,
    /// Since it began.
    pub seconds: f64,
    /// How often the target was lost.
    pub target_losses: u64,
    /// The last error that it survived.
    pub last_error: Option<String>,
    /// Of a move to another host: what has been sent.
    pub stream: Option<StreamReport>,
    /// What it may take of the network and of the processors, if anybody has looked.
    pub rates: Option<Rates>,
}

/// A move (`GET /v1/jobs/ID`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its number; it survives restarts.
    pub id: u64,
    /// What is moved.
    pub volume: String,
    /// The group of moves: the number of the first of them. Those with the same number are all disks of one machine. If
    /// one of them is cancelled or fails, so are the others that are not on their targets yet.
    #[serde(default)]
    pub group: Option<u64>,
    /// Where it stands.
    pub state: JobState,
    /// Where from.
    pub source: String,
    /// Where to.
    pub target: String,
    /// How it was asked for.
    pub request: MoveRequest,
    /// Who asked, as the audit log says it.
    pub requester: String,
    /// When it was asked for, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// When it was over.
    pub finished_unix_ms: Option<u64>,
    /// What was expected of it before it began; at the end with how far off that was.
    #[serde(default)]
    pub prediction: Option<Prediction>,
    /// How far it has come.
    pub progress: Option<Progress>,
    /// What the volume's clients do and feel beside it.
    pub guest: Option<GuestIo>,
    /// What it was; only when it is over.
    pub report: Option<Report>,
    /// Why it did not succeed.
    pub error: Option<Error>,
}
