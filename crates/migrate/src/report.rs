//! What a migration says of itself, while it runs and at its end.

use std::collections::BTreeMap;

use block::Error;
use serde::{Deserialize, Serialize};

use crate::{Phase, ScheduleKind, Strategy, Verify};

/// An error as it is shown and stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The stable name of the kind.
    pub kind: String,
    /// The whole story in one line.
    pub message: String,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        Self { kind: error.kind().name().to_owned(), message: error.chain() }
    }
}

/// Where a migration stands. Counts never go back; `bytes_done` neither, though chunks may have to be copied again.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// What it does now.
    pub phase: Phase,
    /// Whether it is paused.
    pub paused: bool,
    /// The size of the volume.
    pub bytes_total: u64,
    /// The most that has been in step on both sides so far.
    pub bytes_done: u64,
    /// What is not in step now; it may grow again when a target was lost.
    pub bytes_left: u64,
    /// Data copied, everything that was copied again included.
    pub bytes_copied: u64,
    /// Of that, what was copied again because the target was lost before a flush, or failed a request.
    pub bytes_again: u64,
    /// Holes and zeroes, which are not copied as data.
    pub bytes_zero: u64,
    /// What the guest wrote to both sides.
    pub bytes_mirrored: u64,
    /// Of an asynchronous mirror: what the source has and the target will get.
    pub bytes_buffered: u64,
    /// How long guest writes have waited for room in that buffer, all together, in microseconds.
    pub throttled_us: u64,
    /// What has been compared.
    pub bytes_verified: u64,
    /// What is going to be compared, once that is known.
    pub bytes_to_verify: u64,
    /// How fast the current phase moves, in bytes a second.
    pub rate: u64,
    /// How far it is, of copy and comparison, in percent: from 0 to 100, which is the guest on the target. It never goes back.
    pub percent: f64,
    /// Seconds until the switchover, from recent rates.
    pub eta_seconds: Option<u64>,
    /// The same at the fast ones of all rates so far,
    pub eta_seconds_min: Option<u64>,
    /// and at the slow ones.
    pub eta_seconds_max: Option<u64>,
    /// Which pass over what is not in step this is; the first goes over the whole volume.
    pub iteration: u32,
    /// What the guest has written to chunks that had been copied and that is not copied again yet. None is kept by a
    /// strategy that does not iterate.
    pub bytes_dirty: u64,
    /// The longest guest request in the switchover so far, in microseconds.
    pub stall_us_max: u64,
    /// Since the migration began.
    pub seconds: f64,
    /// How often the target was lost.
    pub target_losses: u64,
    /// The last error, if there was one.
    pub error: Option<Failure>,
}

/// What was expected on the way, once so much was done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// How far the move was, in percent: 10, 50 or 90, or where it was when something could be said first.
    pub percent: f64,
    /// How long it had taken so far.
    pub seconds: f64,
    /// How long it was expected to take from there, in seconds.
    pub eta_seconds: f64,
    /// At least,
    pub eta_seconds_min: f64,
    /// and at most.
    pub eta_seconds_max: f64,
    /// By how much of what the whole move took that was off, in percent: more than nothing if it took less than expected.
    /// Nothing if the move has not come to its switchover.
    pub error_percent: Option<f64>,
}

/// What was compared, and what it proves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verification {
    /// What was asked for.
    pub mode: Verify,
    /// How many chunks were compared.
    pub chunks: u64,
    /// How many bytes were compared, those that were compared again included.
    pub bytes: u64,
    /// How much of the volume was equal at a moment after its last copy. A strategy that tracks compares once, before the
    /// switchover; what it copies after that, the last copy included, is not compared.
    pub bytes_proved: u64,
    /// Of those, the chunks that were looked at because something had happened to them.
    pub suspects: u64,
    /// Comparisons that a guest write disturbed and that were done again.
    pub conflicts: u64,
    /// Chunks that had to be compared under the lock.
    pub locked: u64,
    /// Whether the comparisons read past the page cache.
    pub past_page_cache: bool,
    /// What it took.
    pub seconds: f64,
    /// What the digest of the frozen source took, after the guest was already on the target.
    pub digest_seconds: f64,
    /// The checksum that every extent carried from the source's read to the target's write.
    pub checksum: String,
}

/// The switchover, step by step, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switchover {
    /// Emptying an asynchronous mirror's buffer, before the guest was held.
    #[serde(default)]
    pub drain_us: u64,
    /// The last flush of the target, before the guest was held.
    pub flush_us: u64,
    /// Waiting for the guest's requests in flight.
    pub quiesce_us: u64,
    /// The longest that the guest might be held for that, which follows from its own latency.
    #[serde(default)]
    pub quiesce_limit_us: u64,
    /// Holding the guest when the move began, until the mirror was in its path: all attempts together,
    #[serde(default)]
    pub entry_us: u64,
    /// the longest request of the guest's around that,
    #[serde(default)]
    pub entry_stall_us: u64,
    /// and how often it was let go and held again later.
    #[serde(default)]
    pub entry_retries: u64,
    /// Copying the rest while the guest was held, and flushing that; nothing for a mirror.
    pub last_copy_us: u64,
    /// How much that was, in bytes.
    pub last_copy_bytes: u64,
    /// The commit record.
    pub commit_us: u64,
    /// All of the time that new requests were held in the attempt that succeeded.
    pub window_us: u64,
    /// How many times requests did not drain in time, so that the guest was let go and held again later.
    pub quiesce_retries: u64,
    /// How many commits were left in doubt and settled later.
    pub doubts: u64,
}

/// One pass over what was not in step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Iteration {
    /// From 1, which goes over the whole volume.
    pub number: u32,
    /// What was not in step when it began, holes included.
    pub bytes: u64,
    /// What it copied as data.
    pub bytes_copied: u64,
    /// What it took, pauses and comparisons in between included.
    pub seconds: f64,
    /// What the guest had made different again at its end.
    pub bytes_dirty: u64,
    /// Of that, what was put off because the guest writes it again and again.
    pub bytes_deferred: u64,
    /// Whether the guest was held meanwhile.
    pub held: bool,
    /// What was decided at its end, and why, in words.
    pub decision: String,
}

/// In which order chunks were copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleReport {
    /// What was asked for.
    pub asked: ScheduleKind,
    /// What was done. A source without a head that moves is copied in sequence instead of following it.
    pub used: ScheduleKind,
    /// Runs that the schedule chose: of `follow` those nearest to the head, of `cold-first` those of the coldest region.
    pub runs_chosen: u64,
    /// Of `follow`, runs at the lowest chunk that waited, whose turn had come.
    pub runs_bounded: u64,
    /// Copies in the order of the volume, of a schedule that has chosen others.
    pub copies_swept: u64,
    /// Of `follow`, how often a run began because the guest's requests that come before it took too long.
    pub waits_ended: u64,
}

/// What the read cache has done. Reads are counted once for each chunk that they touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadCacheReport {
    /// Reads of the guest's that memory has answered.
    pub guest_hits: u64,
    /// Those that the source has answered.
    pub guest_misses: u64,
    /// Reads of the copy's that memory has answered.
    pub copy_hits: u64,
    /// Those that the source has answered.
    pub copy_misses: u64,
    /// Chunks that were read whole for their copy although the guest has asked for a part.
    pub chunks_fetched: u64,
    /// How many bytes those chunks have.
    pub bytes_fetched: u64,
    /// Chunks that were read and not kept, because a write came meanwhile.
    pub outdated: u64,
    /// Chunks that had to go because others came.
    pub evictions: u64,
    /// How many of them were yet to be sent.
    pub evictions_unsent: u64,
    /// The most memory that was used at once, in bytes.
    pub bytes_used_max: u64,
    /// How much might have been used.
    pub bytes_max: u64,
}

impl From<filters::ReadCacheStatus> for ReadCacheReport {
    fn from(status: filters::ReadCacheStatus) -> Self {
        Self {
            guest_hits: status.guest_hits,
            guest_misses: status.guest_misses,
            copy_hits: status.copy_hits,
            copy_misses: status.copy_misses,
            chunks_fetched: status.chunks_fetched,
            bytes_fetched: status.fetched_bytes,
            outdated: status.outdated,
            evictions: status.evictions,
            evictions_unsent: status.evictions_unsent,
            bytes_used_max: status.bytes_used_max,
            bytes_max: status.bytes_max,
        }
    }
}

/// The whole of a migration, for people and for programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Where it ended.
    pub phase: Phase,
    /// How copy and guest writes came together.
    pub strategy: Strategy,
    /// In which order chunks were copied.
    #[serde(default)]
    pub schedule: ScheduleReport,
    /// What the read cache has done, if there was one.
    #[serde(default)]
    pub read_cache: Option<ReadCacheReport>,
    /// From the start of its last session, if the daemon was started again in between, to the switchover or whatever ended it.
    pub seconds: f64,
    /// The same from when the move's turn came, over restarts: what its deadline is held against.
    #[serde(default)]
    pub age_seconds: f64,
    /// The size of the volume.
    pub bytes_total: u64,
    /// Data copied, everything that was copied again included.
    pub bytes_copied: u64,
    /// Of the data copied, what the file system has copied or shared by itself: it carried no checksum.
    pub bytes_offloaded: u64,
    /// Holes and zeroes, which were not copied as data.
    pub bytes_zero: u64,
    /// What was skipped and still is: bytes that were not sent and read as zeroes on both sides, by the names of the reasons
    /// ([`SkipReason`](crate::SkipReason)). Empty if nothing is recorded.
    #[serde(default)]
    pub skipped: BTreeMap<String, u64>,
    /// What was skipped and is not any more: the guest has written there, or the target was lost.
    #[serde(default)]
    pub bytes_unskipped: u64,
    /// What the guest wrote to both sides.
    pub bytes_mirrored: u64,
    /// Of an asynchronous mirror: the most that was buffered at once.
    pub bytes_buffered_max: u64,
    /// How long guest writes have waited for room in that buffer, all together, in microseconds.
    pub throttled_us: u64,
    /// What did not have to be copied because an earlier session had done it.
    pub bytes_resumed: u64,
    /// What was compared by digests when a target came back that had been away.
    #[serde(default)]
    pub bytes_rechecked: u64,
    /// What of that was not there any more, and was copied again.
    #[serde(default)]
    pub bytes_different: u64,
    /// What the target had been written, or may have been, and got again: it was lost before a flush, or has failed a request.
    #[serde(default)]
    pub bytes_again: u64,
    /// The longest guest request around the switchover, in microseconds.
    pub stall_us_max: u64,
    /// Whether the comparison that was asked for was carried out to its end (never with `off`).
    pub verified: bool,
    /// Whether everything compared was equal; `None` if nothing was.
    pub equal: Option<bool>,
    /// BLAKE3 of the frozen source, in hex as `b3sum` prints it; only with `full`.
    pub digest: Option<String>,
    /// What was compared and how.
    pub verification: Verification,
    /// The switchover's steps.
    pub switchover: Switchover,
    /// Seconds in each phase.
    pub phases: BTreeMap<String, f64>,
    /// The passes over what was not in step, in order; of very many the first and the last ones.
    pub iterations: Vec<Iteration>,
    /// Chunks that were copied again because the guest wrote to them meanwhile.
    pub redos: u64,
    /// Copies and comparisons that were tried again after an error.
    pub retries: u64,
    /// Mirrored writes that the target failed: the source answered the guest, and the chunks were copied again.
    pub missed_writes: u64,
    /// How often the target was lost and the copy resumed.
    pub target_losses: u64,
    /// What was expected on the way.
    #[serde(default)]
    pub estimates: Vec<Estimate>,
    /// The size of the window in bytes that the copy settled at.
    pub window_bytes: u64,
    /// The error that ended it, or the last one that it survived.
    pub error: Option<Failure>,
}

/// How a migration ended.
#[derive(Debug)]
pub enum Outcome {
    /// The target holds the volume and serves the guest. What becomes of the source is the caller's to decide.
    Switched(Report),
    /// It was cancelled before the commit: the guest is on the source as if nothing had been. The target holds an
    /// incomplete copy that the caller may delete.
    Cancelled(Report),
    /// It ended before the commit because of an error: the guest is on the source, the target is an incomplete copy.
    Failed {
        /// What went wrong.
        error: Error,
        /// The whole story.
        report: Report,
    },
}

impl Outcome {
    /// The report, however it ended.
    #[must_use]
    pub const fn report(&self) -> &Report {
        match self {
            Self::Switched(report) | Self::Cancelled(report) | Self::Failed { report, .. } => report,
        }
    }
}
