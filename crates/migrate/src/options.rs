//! What whoever starts a move may choose.

use std::time::Duration;

use block::{Bytes, ChunkSize};
use serde::{Deserialize, Serialize};

/// How much of the copy is compared with its source before the switchover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// Nothing is compared. Extents still carry a checksum from the source's read to the target's write.
    Off,
    /// A random sample, and every chunk that saw an error, a retry or a redo.
    #[default]
    Sample,
    /// Every chunk, and a digest of the frozen source after the commit.
    Full,
}

impl Verify {
    /// The word for it on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Sample => "sample",
            Self::Full => "full",
        }
    }
}

impl std::str::FromStr for Verify {
    type Err = block::Error;
    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "off" => Ok(Self::Off),
            "sample" => Ok(Self::Sample),
            "full" => Ok(Self::Full),
            other => Err(block::Error::new(
                block::ErrorKind::Invalid,
                format!("`{other}` is no way to verify: say off, sample or full"),
            )),
        }
    }
}

/// How the copy and what the guest writes meanwhile come together. `docs/strategies.md` compares them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// IO mirroring (ESX paper, section 2.4): guest writes go to both sides where the target is in step. It converges
    /// under any load and has no parameters.
    #[default]
    Mirror,
    /// Dirty block tracking (2.3): guest writes go to the source, and what was written is copied again, pass after
    /// pass. The rest is copied while the guest is held.
    Dbt,
    /// The same, and what is written ahead of the copy is not copied twice.
    IncrementalDbt,
    /// Snapshotting (section 2.2): the guest writes to an overlay while the base is copied. Overlays are folded one
    /// after the other, the last one with the guest held.
    Snapshot,
    /// IO mirroring for a target that is far or slow. Guest writes are answered by the source, and a bounded buffer is
    /// written to the target in order. When the buffer is full guest writes wait for room.
    MirrorAsync,
    /// Every chunk is mirrored or tracked, whichever is expected to cost less; all are mirrored in the end. It converges
    /// under any load and has no parameters.
    Auto,
    /// IO mirroring with no more than the paper describes: two offsets, and one window between them whose writes wait.
    /// Its mover makes 16 copies of 64 KiB at a time and does not yield to the guest. It exists for comparison.
    MirrorPaper,
}

impl Strategy {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Mirror,
        Self::Dbt,
        Self::IncrementalDbt,
        Self::Snapshot,
        Self::MirrorAsync,
        Self::Auto,
        Self::MirrorPaper,
    ];

    /// The word for it on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::Dbt => "dbt",
            Self::IncrementalDbt => "incremental-dbt",
            Self::Snapshot => "snapshot",
            Self::MirrorAsync => "mirror-async",
            Self::Auto => "auto",
            Self::MirrorPaper => "mirror-paper",
        }
    }

    /// Whether it copies in iterations and needs the convergence logic: what the guest writes to chunks that were
    /// copied is copied again.
    #[must_use]
    pub const fn iterates(self) -> bool {
        match self {
            Self::Mirror | Self::MirrorAsync | Self::MirrorPaper | Self::Snapshot | Self::Auto => false,
            Self::Dbt | Self::IncrementalDbt => true,
        }
    }

    /// Whether it copies in order, window by window, and mirrors what lies below: the paper's mirror.
    pub(crate) const fn copies_in_order(self) -> bool {
        matches!(self, Self::MirrorPaper)
    }

    /// Whether it mirrors or tracks, chunk by chunk, as the guest writes.
    pub(crate) const fn chooses_by_chunk(self) -> bool {
        matches!(self, Self::Auto)
    }

    /// Whether a pass that iterates leaves out what is not copied yet: it is copied once, as it is then.
    pub(crate) const fn is_incremental(self) -> bool {
        matches!(self, Self::IncrementalDbt)
    }

    /// Whether a write that the target does not answer may be left to the source, chunk by chunk. The paper's mirror
    /// has no state of single chunks, and the asynchronous mirror has answered the guest already.
    pub(crate) const fn leaves_chunks(self) -> bool {
        !matches!(self, Self::MirrorPaper | Self::MirrorAsync)
    }

    /// Whether the guest is held while the last of what it wrote is copied or folded. Otherwise it is held for one record.
    #[must_use]
    pub const fn holds_for_copy(self) -> bool {
        self.iterates() || matches!(self, Self::Snapshot)
    }
}

impl std::fmt::Display for Strategy {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.name())
    }
}

/// In which order chunks are copied. `docs/strategies.md` compares them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// In the order of the volume, without what a strategy puts off because it is hot.
    #[default]
    Sequential,
    /// Where the head of the source's disk is, after the guest's requests (IOFollow: the dissertation's chapter 5). A source
    /// that is known to have no such head is copied in sequence.
    Follow,
    /// What the guest touches least comes first (Zheng et al., section 5.1 of the dissertation).
    ColdFirst,
}

impl ScheduleKind {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Sequential, Self::Follow, Self::ColdFirst];

    /// The word for it on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Follow => "follow",
            Self::ColdFirst => "cold-first",
        }
    }
}

impl std::fmt::Display for ScheduleKind {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.name())
    }
}

impl std::str::FromStr for ScheduleKind {
    type Err = block::Error;
    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Self::ALL.iter().copied().find(|kind| kind.name() == word).ok_or_else(|| {
            let context = format!("`{word}` is no schedule: say sequential, follow or cold-first");
            block::Error::new(block::ErrorKind::Invalid, context)
        })
    }
}

/// What becomes of a move that copies in iterations and does not converge. It does not converge if what is left to copy
/// gets no smaller, or if the deadline would pass first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnNoConverge {
    /// It ends; the guest stays on the source.
    Abort,
    /// The guest is held for as long as the last copy takes, unless that would take longer than
    /// [`forced_downtime_ms_max`](MoveOptions::forced_downtime_ms_max): then it ends.
    Force,
    /// It goes on as a mirror, which converges.
    #[default]
    Mirror,
}

impl OnNoConverge {
    /// The word for it on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Abort => "abort",
            Self::Force => "force",
            Self::Mirror => "mirror",
        }
    }
}

/// How a move is carried out. The default is right for most; it serialises into the job's record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoveOptions {
    /// The unit of copying and tracking in bytes: a power of two between 4 KiB and 4 MiB.
    pub chunk_bytes: u64,
    /// What is compared.
    pub verify: Verify,
    /// How many bytes a second may be copied; mirrored writes do not count. `None` for no limit.
    pub bandwidth: Option<u64>,
    /// How many bytes may be in flight in copies at most, whatever the devices could take. Of the paper's mirror: how large
    /// its window is, in which guest writes wait.
    pub window_bytes_max: u64,
    /// Through how many places that hold bytes the copy reaches the target: 1 for a device of this host, 4 for one of
    /// another. As many times as much may be queued on the way.
    pub path_depth: u32,
    /// How large a copy is at most: neighbouring chunks are merged up to this, in bytes. Never more than 1 MiB, nor less than a
    /// chunk.
    pub copy_bytes_max: u64,
    /// The guest latency (99th percentile) above which the copy yields, in microseconds.
    pub guest_latency_us: u64,
    /// How long the switchover may hold the guest while it waits for requests in flight, before it gives up and tries
    /// again later, in milliseconds.
    pub quiesce_ms: u64,
    /// How long the commit record may hold the guest before it is let go, in doubt, mirrored to both sides, in
    /// milliseconds.
    pub commit_ms: u64,
    /// How long a write to the target may take once the source has answered, before the target counts as lost, in
    /// milliseconds.
    pub target_ms: u64,
    /// How long a guest waits for a target that answers nothing at all, in milliseconds. After that the request is left
    /// to the source. Where it cannot be left, the guest waits at most three times as long, and then the target is lost. `None`
    /// for as long as the target has for an answer.
    pub silence_ms: Option<u64>,
    /// How often the target is flushed while it is filled, in milliseconds: what was not flushed is copied again if it is lost.
    /// Between 250 and 5,000; less often where flushes take more than a twentieth of the time.
    pub flush_ms: u64,
    /// How many chunks `sample` draws at random.
    pub sample_chunks: u64,
    /// How copy and guest writes come together.
    pub strategy: Strategy,
    /// In which order chunks are copied.
    pub schedule: ScheduleKind,
    /// Of `follow`: how many guest requests are served before one run is copied, 1 to 4.
    pub follow_ratio: u8,
    /// Of `follow`: how much is copied where the head is before it is looked at again, in bytes, 128 KiB to 2 MiB, and at least a
    /// chunk.
    pub follow_run_bytes: u64,
    /// Of strategies that iterate: chunks that the guest writes again and again are left for the last iteration but one.
    pub hot_blocks: bool,
    /// All that is copied is searched for chunks that hold only zeroes. They are recorded as skipped, and not written
    /// to a target that reads zeroes there. For that the copy reads its data even where the file system could share it.
    pub skip_zero: bool,
    /// Of strategies that iterate: for how long the guest may be held while the rest is copied, in milliseconds. A last
    /// copy that is not done by then is given up, and the guest goes on. The ESX paper's limit is 5 s. Of snapshots:
    /// the longest last fold that may be expected. It is given up after four times that.
    pub downtime_limit_ms: u64,
    /// How long after its start the move shall be over, in milliseconds. Of strategies that iterate one that would take longer
    /// does not converge; others take no notice of it, and whoever gives them their rates may. `None` for no limit.
    pub deadline_ms: Option<u64>,
    /// Of strategies that iterate: what is done if that does not converge.
    pub on_no_converge: OnNoConverge,
    /// Of the asynchronous mirror: how much the source may have that the target has yet to get, in bytes, 1 MiB to 1 GiB.
    /// `None` for [`BUFFER_BYTES`](Self::BUFFER_BYTES).
    pub buffer_bytes: Option<u64>,
    /// How much memory keeps chunks of the source for the guest and for the copy, in bytes: at least 16 chunks and at most 64 GiB, or
    /// 0 for none (`IOFollow`: the dissertation's section 5.2.4). None is kept where the file system copies by itself.
    pub read_cache_bytes: u64,
    /// The longest that [`OnNoConverge::Force`] may expect to hold the guest, and the longest that it does, in milliseconds.
    pub forced_downtime_ms_max: u64,
}

impl Default for MoveOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: ChunkSize::default().bytes(),
            verify: Verify::default(),
            bandwidth: None,
            window_bytes_max: 16 << 20,
            path_depth: 1,
            copy_bytes_max: 1 << 20,
            guest_latency_us: 2_000,
            quiesce_ms: 100,
            commit_ms: 500,
            target_ms: 30_000,
            silence_ms: None,
            flush_ms: 5_000,
            sample_chunks: 256,
            strategy: Strategy::default(),
            schedule: ScheduleKind::default(),
            follow_ratio: 2,
            follow_run_bytes: 1 << 20,
            hot_blocks: false,
            skip_zero: false,
            downtime_limit_ms: 200,
            deadline_ms: None,
            on_no_converge: OnNoConverge::default(),
            buffer_bytes: None,
            read_cache_bytes: 0,
            forced_downtime_ms_max: 30_000,
        }
    }
}

impl MoveOptions {
    /// How large the buffer of an asynchronous mirror is if nothing is said: 64 MiB.
    pub const BUFFER_BYTES: u64 = 64 << 20;
    /// The smallest read cache, in chunks.
    pub const READ_CACHE_CHUNKS_MIN: u64 = 16;
    /// The largest read cache: 64 GiB.
    pub const READ_CACHE_BYTES_MAX: u64 = 64 << 30;

    /// The chunk size.
    ///
    /// # Errors
    /// Invalid if it is no power of two between 4 KiB and 4 MiB.
    pub fn chunk_size(&self) -> block::Result<ChunkSize> {
        ChunkSize::new(self.chunk_bytes).ok_or_else(|| {
            let context = format!("a chunk of {} is no power of two between 4 KiB and 4 MiB", Bytes(self.chunk_bytes));
            block::Error::new(block::ErrorKind::Invalid, context)
        })
    }

    /// Looks whether the choices go together.
    ///
    /// # Errors
    /// Invalid, with what does not and why.
    pub fn check(&self) -> block::Result<()> {
        self.chunk_size()?;
        let refuse = |context: String| Err(block::Error::new(block::ErrorKind::Invalid, context));
        if self.hot_blocks && self.strategy == Strategy::Auto {
            return refuse("auto finds hot blocks by itself".to_owned());
        }
        if self.hot_blocks && !self.strategy.iterates() {
            let context =
                format!("hot blocks are for strategies that copy in iterations, and {} does not", self.strategy);
            return refuse(context);
        }
        if self.skip_zero && self.strategy == Strategy::MirrorPaper {
            return refuse("mirror-paper copies what the paper's copies: it skips no zeroes".to_owned());
        }
        self.check_schedule()?;
        self.check_read_cache()?;
        if self.deadline_ms == Some(0) {
            return refuse("a deadline of nothing cannot be kept".to_owned());
        }
        if let Some(bytes) = self.buffer_bytes {
            if self.strategy != Strategy::MirrorAsync {
                let context = format!("a buffer is for mirror-async, and the strategy is {}", self.strategy);
                return refuse(context);
            }
            if !(1 << 20..=1 << 30).contains(&bytes) {
                return refuse(format!("a buffer of {} is not between 1 MiB and 1 GiB", Bytes(bytes)));
            }
        }
        if self.downtime_limit_ms == 0 {
            return refuse("a downtime limit of nothing cannot be kept".to_owned());
        }
        Ok(())
    }

    fn check_read_cache(&self) -> block::Result<()> {
        let refuse = |context: String| Err(block::Error::new(block::ErrorKind::Invalid, context));
        match self.strategy {
            _ if self.read_cache_bytes == 0 => return Ok(()),
            Strategy::MirrorPaper => {
                return refuse("mirror-paper copies what the paper's copies: it has no read cache".to_owned());
            }
            Strategy::Snapshot => {
                let context = "the guest of a move by snapshots works on an overlay, which a read cache of the base does not serve";
                return refuse(context.to_owned());
            }
            _ => {}
        }
        let least = Self::READ_CACHE_CHUNKS_MIN * self.chunk_bytes;
        if !(least..=Self::READ_CACHE_BYTES_MAX).contains(&self.read_cache_bytes) {
            let context = format!(
                "a read cache of {} is not between {} and {}",
                Bytes(self.read_cache_bytes),
                Bytes(least),
                Bytes(Self::READ_CACHE_BYTES_MAX)
            );
            return refuse(context);
        }
        Ok(())
    }

    /// How large the read cache is, if there is one.
    pub(crate) fn read_cache(&self) -> Option<Bytes> {
        (self.read_cache_bytes > 0).then_some(Bytes(self.read_cache_bytes))
    }

    fn check_schedule(&self) -> block::Result<()> {
        let refuse = |context: String| Err(block::Error::new(block::ErrorKind::Invalid, context));
        let schedule = self.schedule;
        match self.strategy {
            _ if schedule == ScheduleKind::Sequential => {}
            Strategy::MirrorPaper => {
                let context = format!("mirror-paper copies in order, and the schedule is {schedule}");
                return refuse(context);
            }
            Strategy::Snapshot => {
                let context = format!(
                    "the guest of a move by snapshots works on an overlay, and {schedule} would not see its requests"
                );
                return refuse(context);
            }
            _ => {}
        }
        if !(1..=4).contains(&self.follow_ratio) {
            return refuse(format!("{} guest requests for one copy are not 1 to 4", self.follow_ratio));
        }
        if !(128 << 10..=2 << 20).contains(&self.follow_run_bytes) {
            let run = Bytes(self.follow_run_bytes);
            return refuse(format!("a run of {run} is not between 128 KiB and 2 MiB"));
        }
        Ok(())
    }

    /// How large the buffer between source and target is; `None` for strategies without one.
    #[must_use]
    pub fn buffer(&self) -> Option<Bytes> {
        let bytes = Bytes(self.buffer_bytes.unwrap_or(Self::BUFFER_BYTES));
        (self.strategy == Strategy::MirrorAsync).then_some(bytes)
    }

    pub(crate) const fn quiesce_limit(&self) -> Duration {
        Duration::from_millis(self.quiesce_ms)
    }

    pub(crate) const fn commit_limit(&self) -> Duration {
        Duration::from_millis(self.commit_ms)
    }

    pub(crate) fn stall_limit(&self) -> Option<Duration> {
        self.silence_ms.map(Duration::from_millis)
    }

    pub(crate) const fn flush_interval(&self) -> Duration {
        Duration::from_millis(self.flush_ms)
    }

    pub(crate) const fn target_limit(&self) -> Duration {
        Duration::from_millis(self.target_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_were_recorded_before_there_were_strategies_are_a_mirror_s() {
        let before: MoveOptions = serde_json::from_str(r#"{"chunk_bytes":65536,"verify":"full"}"#).expect("it reads");
        assert_eq!(before, MoveOptions { verify: Verify::Full, ..MoveOptions::default() });
        assert_eq!(before.strategy, Strategy::Mirror);
    }

    #[test]
    fn what_belongs_to_iterations_is_refused_for_a_mirror() {
        assert!(MoveOptions::default().check().is_ok());
        assert!(MoveOptions { hot_blocks: true, ..MoveOptions::default() }.check().is_err());
        assert!(MoveOptions { skip_zero: true, ..MoveOptions::default() }.check().is_ok());
        let paper = MoveOptions { strategy: Strategy::MirrorPaper, ..MoveOptions::default() };
        assert!(paper.check().is_ok() && MoveOptions { skip_zero: true, ..paper }.check().is_err());
        assert!(MoveOptions { deadline_ms: Some(1), ..MoveOptions::default() }.check().is_ok());
        assert!(MoveOptions { deadline_ms: Some(0), ..MoveOptions::default() }.check().is_err());
        assert!(MoveOptions { buffer_bytes: Some(8 << 20), ..MoveOptions::default() }.check().is_err());
        assert!(MoveOptions { downtime_limit_ms: 0, ..MoveOptions::default() }.check().is_err());
    }

    #[test]
    fn a_schedule_is_refused_where_it_cannot_work_and_its_numbers_have_limits() {
        let follow = MoveOptions { schedule: ScheduleKind::Follow, ..MoveOptions::default() };
        for strategy in Strategy::ALL {
            let is_refused = matches!(strategy, Strategy::MirrorPaper | Strategy::Snapshot);
            for schedule in [ScheduleKind::Follow, ScheduleKind::ColdFirst] {
                let options = MoveOptions { strategy: *strategy, schedule, ..MoveOptions::default() };
                assert_eq!(options.check().is_err(), is_refused, "{schedule} with {strategy}");
            }
            let sequential = MoveOptions { strategy: *strategy, ..MoveOptions::default() };
            assert!(sequential.check().is_ok(), "{strategy}");
        }
        for (ratio, run, is_good) in
            [(1, 128 << 10, true), (4, 2 << 20, true), (0, 1 << 20, false), (5, 1 << 20, false), (2, 64 << 10, false)]
        {
            let options = MoveOptions { follow_ratio: ratio, follow_run_bytes: run, ..follow.clone() };
            assert_eq!(options.check().is_ok(), is_good, "{ratio} to one, {run} bytes");
        }
    }

    #[test]
    fn a_read_cache_is_refused_where_nobody_would_read_from_it_and_has_limits() {
        let cached = MoveOptions { read_cache_bytes: 1 << 20, ..MoveOptions::default() };
        for strategy in Strategy::ALL {
            let is_refused = matches!(strategy, Strategy::MirrorPaper | Strategy::Snapshot);
            let options = MoveOptions { strategy: *strategy, ..cached.clone() };
            assert_eq!(options.check().is_err(), is_refused, "{strategy}");
        }
        for (bytes, is_good) in [(0, true), ((1 << 20) - 1, false), (64 << 30, true), ((64 << 30) + 1, false)] {
            let options = MoveOptions { read_cache_bytes: bytes, ..cached.clone() };
            assert_eq!(options.check().is_ok(), is_good, "{bytes} bytes");
        }
        let large_chunks = MoveOptions { chunk_bytes: 1 << 20, ..cached };
        assert!(large_chunks.check().is_err(), "one chunk");
    }

    #[test]
    fn the_words_are_those_of_the_record() {
        for schedule in ScheduleKind::ALL {
            let word = serde_json::to_string(schedule).expect("a word");
            assert_eq!(word, format!("\"{}\"", schedule.name()));
            assert_eq!(schedule.name().parse::<ScheduleKind>().expect("it is one"), *schedule);
        }
        assert!("elevator".parse::<ScheduleKind>().is_err());
        for strategy in Strategy::ALL {
            let word = serde_json::to_string(strategy).expect("a word");
            assert_eq!(word, format!("\"{}\"", strategy.name()));
        }
    }
}
