//! What a move says of itself while it runs and at its end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Redirection, Schedule, Strategy, Verify};

/// How fast a move may go, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// What it may take of the network, all paths together, in bytes a second; nothing for no limit.
    pub limit: Option<u64>,
    /// What it may take whatever others want, in bytes a second.
    pub reserve: u64,
    /// What it must get to be over at its deadline, in bytes a second; nothing without a deadline.
    pub needed: Option<u64>,
    /// How long after its start it shall be over, in milliseconds.
    pub deadline_ms: Option<u64>,
    /// Whether it is slower than what is needed.
    pub at_risk: bool,
    /// Whether its threads do not give way to others for now.
    pub hurries: bool,
    /// At the end: whether it was over in time.
    pub deadline_kept: Option<bool>,
    /// The ways between the two hosts, as both have agreed on them.
    pub paths: Vec<PathRate>,
    /// What is not as one would expect, one line each.
    pub notes: Vec<String>,
}

/// What a move may take of the way from a network interface of this host to one of the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PathRate {
    /// This host's interface.
    pub interface: String,
    /// The other host's, if that has said so.
    pub other_interface: Option<String>,
    /// What the way can carry, in bytes a second; nothing if nobody knows.
    pub capacity: Option<u64>,
    /// How many of the move's streams use it.
    pub streams: u64,
    /// What the move took of late, in bytes a second.
    pub ours: u64,
    /// What others took of late where they took most.
    pub others: u64,
    /// The most that others took in a second.
    pub others_max: u64,
    /// What the move may take; nothing for no limit.
    pub limit: Option<u64>,
    /// The least that it was held to.
    pub limit_min: Option<u64>,
}

/// What a move to another host has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamReport {
    /// How many connections carried it beside each other.
    pub streams: u64,
    /// How many sessions: one more each time that all connections were lost.
    pub sessions: u64,
    /// Bytes of the volume in writes, before anything was left out; sent again, they count again.
    pub bytes_raw: u64,
    /// The payloads that went for them.
    pub bytes_payload: u64,
    /// Of the writes, what were zeroes and went as such.
    pub bytes_zero: u64,
    /// Of the writes, what went compressed.
    pub bytes_compressed: u64,
    /// Of the writes, what was sent twice or more. A connection was lost, something came damaged, or the other host was
    /// lost before its flush.
    pub bytes_again: u64,
    /// All bytes that were given to the connections.
    pub bytes_sent: u64,
    /// How many connections were lost.
    pub streams_lost: u64,
    /// Frames that came damaged.
    pub damaged: u64,
}

/// What was compared, and what it proves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verification {
    /// What was asked for.
    pub mode: Verify,
    /// Chunks compared.
    pub chunks: u64,
    /// Bytes compared, those compared again included.
    pub bytes: u64,
    /// How much of the volume was equal at a moment after its last copy.
    pub bytes_proved: u64,
    /// Of the chunks, those that something had happened to.
    pub suspects: u64,
    /// Comparisons done again because a guest write disturbed them.
    pub conflicts: u64,
    /// Whether the comparisons read past the page cache.
    pub past_page_cache: bool,
    /// What it took.
    pub seconds: f64,
    /// What the digest took, after the guest was on the target.
    pub digest_seconds: f64,
    /// The checksum that extents carried from the source's read to the target's write.
    pub checksum: String,
}

/// The switchover step by step, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Switchover {
    /// Emptying the buffer of `mirror-async`, before the guest was held.
    pub drain_us: u64,
    /// The last flush of the target, before the guest was held.
    pub flush_us: u64,
    /// Waiting for requests in flight.
    pub quiesce_us: u64,
    /// The longest that the guest might be held for that, which follows from its own latency.
    pub quiesce_limit_us: u64,
    /// Holding the guest when the move began: all attempts together,
    pub entry_us: u64,
    /// the longest request of the guest's around that,
    pub entry_stall_us: u64,
    /// and how often it was let go and held again later.
    pub entry_retries: u64,
    /// Copying the rest while the guest was held; nothing for a mirror.
    pub last_copy_us: u64,
    /// How much that was, in bytes.
    pub last_copy_bytes: u64,
    /// The commit record.
    pub commit_us: u64,
    /// All of the time that new requests were held.
    pub window_us: u64,
    /// How often the guest was let go and held again later.
    pub retries: u64,
}

/// What the read cache has done. Reads are counted once for each chunk that they touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReadCache {
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

/// One pass over what was not in step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Iteration {
    /// From 1, which goes over the whole volume.
    pub number: u32,
    /// What was not in step when it began, holes included.
    pub bytes: u64,
    /// What it copied as data.
    pub bytes_copied: u64,
    /// What it took.
    pub seconds: f64,
    /// What the guest had made different again at its end.
    pub bytes_dirty: u64,
    /// Of that, what was put off because the guest writes it again and again.
    pub bytes_deferred: u64,
    /// Whether the guest was held meanwhile.
    pub held: bool,
    /// What was decided at its end, and why.
    pub decision: String,
}

/// What was expected on the way, once so much was done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
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
    /// By how much of what the whole move took that was off, in percent: more than nothing if it took less than
    /// expected.
    pub error_percent: Option<f64>,
}

/// In which order chunks were copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScheduleReport {
    /// What was asked for.
    pub asked: Schedule,
    /// What was done: a source without a head that moves is copied in sequence instead of following it.
    pub used: Schedule,
    /// Runs that the schedule chose: of `follow` those nearest to the head, of `cold-first` those of the coldest region.
    pub runs_chosen: u64,
    /// Of `follow`, runs at the lowest chunk that waited, whose turn had come.
    pub runs_bounded: u64,
    /// Copies in the order of the volume, of a schedule that has chosen others.
    pub copies_swept: u64,
    /// Of `follow`, how often a run began because the guest's requests that come before it took too long.
    pub waits_ended: u64,
}

/// What a move was, for people and for programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// How copy and guest writes came together.
    pub strategy: Strategy,
    /// In which order chunks were copied.
    pub schedule: ScheduleReport,
    /// From its start to the switchover, or whatever ended it.
    pub seconds: f64,
    /// The volume's size.
    pub bytes_total: u64,
    /// Data copied, copies of the same chunk again included.
    pub bytes_copied: u64,
    /// Of the data copied, what the file system has copied or shared by itself: it carried no checksum.
    pub bytes_offloaded: u64,
    /// Holes and zeroes, which were not copied as data.
    pub bytes_zero: u64,
    /// Of moves with `skip_zero`: bytes that were not sent and read as zeroes on both sides at the end, by reason: `hole` (the source
    /// said so without being read) or `zero` (it was read). More reasons may follow.
    pub skipped: BTreeMap<String, u64>,
    /// Of moves with `skip_zero`: what was skipped and was not any more at the end: the guest wrote there, or the target was lost.
    pub bytes_unskipped: u64,
    /// Of moves with a surrogate: what that has done until the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redirection: Option<Redirection>,
    /// Of moves with a read cache: what that has done. None is kept where the file system copies by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_cache: Option<ReadCache>,
    /// What the guest wrote to both sides.
    pub bytes_mirrored: u64,
    /// Of `mirror-async`: the most that was buffered at once.
    pub bytes_buffered_max: u64,
    /// Of `mirror-async`: how long guest writes have waited for room in the buffer, all together, in microseconds.
    pub throttled_us: u64,
    /// What did not have to be copied because an earlier session had.
    pub bytes_resumed: u64,
    /// What was compared by digests when another host's daemon came back that had been away.
    pub bytes_rechecked: u64,
    /// What of that was not there any more, and was copied again.
    pub bytes_different: u64,
    /// The guest's longest request around the switchover, in microseconds.
    pub stall_us_max: u64,
    /// Whether the comparison asked for was carried out to its end.
    pub verified: bool,
    /// Whether everything compared was equal; nothing if nothing was.
    pub equal: Option<bool>,
    /// BLAKE3 of the frozen source as `b3sum` prints it; only with `full`.
    pub digest: Option<String>,
    /// What was compared.
    pub verification: Verification,
    /// The switchover.
    pub switchover: Switchover,
    /// Seconds in each phase.
    pub phases: BTreeMap<String, f64>,
    /// The passes over what was not in step, in order; of very many the first and the last ones.
    pub iterations: Vec<Iteration>,
    /// What was expected on the way, and how far off that was.
    pub estimates: Vec<Estimate>,
    /// Chunks copied again because the guest wrote to them.
    pub redos: u64,
    /// Copies and comparisons tried again after an error.
    pub retries: u64,
    /// Mirrored writes that the target failed: the source answered the guest, and the chunks were copied again.
    pub missed_writes: u64,
    /// How often the target was lost.
    pub target_losses: u64,
    /// How many processes worked on it.
    pub sessions: u32,
    /// Where the old source is now, if it was kept.
    pub source_kept: Option<String>,
    /// Of a move to another host: what was sent.
    pub stream: Option<StreamReport>,
    /// What it took of the network and of the processors beside others, and whether its deadline was kept.
    pub rates: Option<Rates>,
    /// What was done after the switchover and what is left to do, one line each.
    pub notes: Vec<String>,
}
