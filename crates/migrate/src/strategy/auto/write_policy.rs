//! Whether writes are mirrored or left to the source, as a plain structure that awaits nothing and reads no clock.
//!
//! Its measures are chosen so that a wrong decision costs little. A target counts as slow when most mirrored writes
//! wait for it, not when one of them waits for long. Tracking pays as long as less is written anew than is copied. As
//! soon as it does not, the rest of the pass is mirrored.

use std::fmt;
use std::time::Duration;

use block::Bytes;

/// A chunk is hot at so many times the mean of all chunks, at least: so no more than a third of them can be.
pub(crate) const HOT_MEANS: f64 = 3.0;
/// To be hot a chunk must be written three times as often as in a pass of dirty block tracking. The writes that make it
/// hot there must come in one part of so many of the time that is left. A copy out of the volume's order costs a disk
/// more than three writes.
pub(crate) const HOT_PART: u32 = 3;
/// So many mirrored writes are looked at together.
const WRITES_LOOKED_AT: u32 = 32;
/// A target that counts as slow is looked at again after one of so many parts of a pass. The distance doubles each time
/// it is found slow again. A write cache that was full for a few seconds is empty then. To track for longer than that
/// costs more copies than it spares the guest.
const LOOK_PART: u64 = 256;
/// Looking takes mirrored writes, of which a small volume has few.
const LOOK_CHUNKS_MIN: u64 = 256;
/// It counts as slow no more when so many looks in a row say so.
const LOOKS_FAST: u32 = 4;
/// A write waits for the target if that takes more than twice as long as the source, and longer by more than this. A
/// write cache that is full now and then does not make a write wait so long. There tracking would cost the copy more
/// than it spares the guest.
const WAIT_MIN: Duration = Duration::from_millis(5);
/// Of fewer copied chunks nothing is concluded,
const COPIED_MIN: u64 = 64;
/// nor of a smaller part of the pass.
const PART_MIN: u64 = 16;
/// What is copied within this many seconds is not worth a pass of its own.
const STRETCH_SECONDS: u64 = 1;

/// What becomes of a write to a chunk that is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WritePolicy {
    /// It goes to both sides, unless the chunk is hot.
    Mirroring,
    /// It goes to the source, and the chunk is copied again.
    Tracking,
    /// It goes to both sides.
    Settled,
}

/// What follows a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassRuling {
    /// Another pass.
    GoOn,
    /// Everything is mirrored, and the rest is copied.
    Settle,
    /// Everything is mirrored, and there is no rest.
    Done,
}

impl fmt::Display for PassRuling {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::GoOn => "go on",
            Self::Settle => "mirror the rest",
            Self::Done => "mirror",
        })
    }
}

/// How the pass under way goes.
#[derive(Debug)]
pub(crate) struct AutoPass {
    policy: WritePolicy,
    /// Tracking has been found to be in vain in this pass.
    in_vain: bool,
    /// Mirrored writes that were looked at, and how many of them have waited for the target.
    writes: u32,
    waited: u32,
    /// The target counts as slow.
    is_slow: bool,
    /// So many looks in a row have said that it is not.
    looks_fast: u32,
    /// How often in a row it was found slow again.
    looks_slow: u32,
    /// How much was copied when it was found slow the last time.
    copied_when_slow: u64,
    /// What was absent when it began.
    chunks: u64,
    /// Most of the volume was.
    is_first: bool,
    /// What has been taken for copies since.
    copied: u64,
    /// Hot chunks that it has passed.
    passed: u64,
    /// Chunks that were copied and have been left to the source.
    left: u64,
}

impl AutoPass {
    /// The first of a volume of `chunks`, of which so many are absent.
    pub(super) const fn new(chunks: u64, absent: u64) -> Self {
        Self {
            policy: WritePolicy::Mirroring,
            in_vain: false,
            writes: 0,
            waited: 0,
            is_slow: false,
            looks_fast: 0,
            looks_slow: 0,
            copied_when_slow: 0,
            chunks: absent,
            is_first: absent * 2 > chunks,
            copied: 0,
            passed: 0,
            left: 0,
        }
    }

    /// The next one begins.
    pub(super) const fn begin(&mut self, chunks: u64, absent: u64) {
        (self.copied, self.passed, self.left, self.in_vain) = (0, 0, 0, false);
        self.copied_when_slow = 0;
        (self.chunks, self.is_first) = (absent, absent * 2 > chunks);
    }

    /// Whether nothing is left to the source any more.
    pub(super) fn is_settled(&self) -> bool {
        self.policy == WritePolicy::Settled
    }

    /// Whether copies may be begun in any order. While the target is slow, what is copied out of order would be written and
    /// copied again in the same pass. A pass that has copied as much as it began with ends in order.
    pub(super) fn is_order_free(&self) -> bool {
        match self.policy {
            WritePolicy::Mirroring => self.copied < self.chunks,
            WritePolicy::Tracking => false,
            WritePolicy::Settled => true,
        }
    }

    /// Whether it matters how long mirrored writes take.
    pub(super) fn weighs(&self) -> bool {
        self.policy == WritePolicy::Mirroring && !self.in_vain
    }

    /// A mirrored write has taken `both`, and `source` the source's part of it.
    pub(super) fn weigh(&mut self, source: Duration, both: Duration) {
        if !self.weighs() {
            return;
        }
        self.writes += 1;
        self.waited += u32::from(both.saturating_sub(source) > source.max(WAIT_MIN));
        if self.writes == WRITES_LOOKED_AT {
            self.look(self.waited * 2 > self.writes);
            (self.writes, self.waited) = (0, 0);
        }
    }

    /// Most of the writes that were looked at have waited, or not.
    fn look(&mut self, waited: bool) {
        if waited {
            if !self.is_slow {
                tracing::info!("the guest waits for the target: its writes are left to the source");
            }
            self.looks_slow = if self.is_slow { self.looks_slow + 1 } else { 0 };
            (self.is_slow, self.looks_fast) = (true, 0);
            self.copied_when_slow = self.copied;
            self.policy = WritePolicy::Tracking;
        } else if self.is_slow {
            self.looks_fast += 1;
            if self.looks_fast == LOOKS_FAST {
                tracing::info!("the target is fast again: writes are mirrored");
                self.is_slow = false;
            }
        }
    }

    /// Whether a write to a chunk that is copied goes to the source alone.
    pub(super) fn defers(&self, is_hot: impl FnOnce() -> bool) -> bool {
        match self.policy {
            WritePolicy::Mirroring => is_hot(),
            WritePolicy::Tracking => true,
            WritePolicy::Settled => false,
        }
    }

    /// A chunk has been left.
    pub(super) fn defer_chunk(&mut self) {
        self.left += 1;
        if self.policy != WritePolicy::Tracking {
            return;
        }
        if self.is_in_vain() {
            tracing::info!(left = self.left, copied = self.copied, "tracking is in vain, and writes are mirrored");
            self.policy = WritePolicy::Mirroring;
            (self.in_vain, self.is_slow) = (true, false);
        } else if self.copied - self.copied_when_slow
            > LOOK_CHUNKS_MIN.max(self.chunks / LOOK_PART) << self.looks_slow.min(16)
        {
            self.policy = WritePolicy::Mirroring;
            (self.writes, self.waited, self.looks_fast) = (0, 0, 0);
        }
    }

    /// These chunks are taken for copies.
    pub(in crate::strategy) const fn copy(&mut self, chunks: u64) {
        self.copied += chunks;
    }

    /// A hot chunk is passed.
    pub(super) const fn pass(&mut self) {
        self.passed += 1;
    }

    pub(super) const fn passed_chunks(&self) -> u64 {
        self.passed
    }

    pub(super) const fn deferred_chunks(&self) -> u64 {
        self.left
    }

    /// Whether about as much is written anew as is copied, if it goes on like this. In the first pass only what it has
    /// copied can be written anew, so that grows with the square of what it has copied.
    fn is_in_vain(&self) -> bool {
        if self.copied < COPIED_MIN.max(self.chunks / PART_MIN) {
            return false;
        }
        let (left, copied, chunks) = (u128::from(self.left), u128::from(self.copied), u128::from(self.chunks));
        match self.is_first {
            true => 4 * left * chunks > 3 * copied * copied,
            false => 2 * left > copied,
        }
    }

    /// It is over, and `absent` chunks of `chunk_bytes` are left; copies take so many bytes a second. Says what follows, and
    /// why.
    pub(super) fn decide(&mut self, absent: u64, chunk_bytes: u64, rate: u64) -> (PassRuling, String) {
        let left = Bytes(absent * chunk_bytes);
        let takes_long = absent > rate / chunk_bytes * STRETCH_SECONDS;
        if self.is_slow && takes_long && absent * 2 <= self.chunks {
            self.policy = WritePolicy::Tracking;
            return (PassRuling::GoOn, format!("the target is slow, and {left} were written meanwhile"));
        }
        self.policy = WritePolicy::Settled;
        if absent == 0 {
            return (PassRuling::Done, "every chunk is on both sides".to_owned());
        }
        let why = match self.is_slow {
            true if !takes_long => "take no more than a second",
            true => "were written meanwhile, and it gets no smaller",
            false => "were put off or written meanwhile",
        };
        (PassRuling::Settle, format!("{left} {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FAST: Duration = Duration::from_micros(300);
    const SLOW: Duration = Duration::from_millis(10);

    fn slow(chunks: u64) -> AutoPass {
        let mut pass = AutoPass::new(chunks, chunks);
        (0..WRITES_LOOKED_AT).for_each(|_| pass.weigh(FAST, SLOW));
        pass
    }

    #[test]
    fn a_target_is_slow_if_most_writes_wait_for_it_and_not_if_one_waits_for_long() {
        let mut pass = AutoPass::new(1000, 1000);
        for number in 0..1000 {
            let both = if number % 5 == 0 { Duration::from_secs(3) } else { FAST * 2 };
            pass.weigh(FAST, both);
            assert!(!pass.defers(|| false));
        }
        assert!(pass.defers(|| true), "a hot chunk is left to the source");
        assert!(slow(1000).defers(|| false));
    }

    #[test]
    fn a_slow_target_is_swept_again_while_that_halves_what_is_left_and_then_mirrored() {
        let mut pass = slow(10_000);
        pass.copy(10_000);
        (0..3000).for_each(|_| pass.defer_chunk());
        assert_eq!(pass.decide(3000, 1, 100).0, PassRuling::GoOn);
        pass.begin(10_000, 3000);
        pass.copy(3000);
        (0..1400).for_each(|_| pass.defer_chunk());
        assert_eq!(pass.decide(1400, 1, 100).0, PassRuling::GoOn);
        pass.begin(10_000, 1400);
        pass.copy(1400);
        assert_eq!(pass.decide(800, 1, 100).0, PassRuling::Settle);
        assert!(pass.is_settled() && !pass.defers(|| true));
    }

    #[test]
    fn what_is_copied_within_a_second_is_not_swept_again() {
        let mut pass = slow(10_000);
        assert_eq!(pass.decide(90, 1, 100).0, PassRuling::Settle);
        assert_eq!(slow(10_000).decide(0, 1, 100).0, PassRuling::Done);
    }

    #[test]
    fn tracking_ends_in_the_middle_of_a_sweep_that_it_makes_vain() {
        // Each copied chunk is soon written again, and the target stays slow.
        let mut pass = slow(10_000);
        let mut copied = 0;
        while !pass.in_vain {
            pass.copy(10);
            copied += 10;
            for _ in 0..9 {
                match pass.defers(|| false) {
                    true => pass.defer_chunk(),
                    false => (0..WRITES_LOOKED_AT).for_each(|_| pass.weigh(FAST, SLOW)),
                }
            }
            assert!(copied <= 10_000 / PART_MIN + 100, "{copied}");
        }
        (0..WRITES_LOOKED_AT).for_each(|_| pass.weigh(FAST, SLOW));
        assert!(!pass.defers(|| false), "it began again in the same pass");
        assert_eq!(pass.decide(500, 1, 1).0, PassRuling::Settle);
    }

    /// Copies until a write is mirrored again, and gives how much that was.
    fn copies_until_a_look(pass: &mut AutoPass) -> u64 {
        let mut copied = 0;
        while pass.defers(|| false) {
            pass.copy(1);
            copied += 1;
            if copied % 64 == 0 {
                pass.defer_chunk();
            }
            assert!(copied < 1 << 30, "nobody looks again");
        }
        copied
    }

    #[test]
    fn a_target_that_was_slow_for_a_moment_is_mirrored_to_again_and_one_that_stays_slow_is_looked_at_ever_less() {
        let mut pass = slow(1 << 20);
        let first = copies_until_a_look(&mut pass);
        (0..WRITES_LOOKED_AT).for_each(|_| pass.weigh(FAST, SLOW));
        let second = copies_until_a_look(&mut pass);
        assert!(second >= 2 * (first - 64), "{first} {second}");
        // One good look is not enough.
        (0..WRITES_LOOKED_AT).for_each(|_| pass.weigh(FAST, FAST));
        (0..WRITES_LOOKED_AT).for_each(|_| pass.weigh(FAST, SLOW));
        assert!(pass.defers(|| false));
        copies_until_a_look(&mut pass);
        (0..WRITES_LOOKED_AT * LOOKS_FAST).for_each(|_| pass.weigh(FAST, FAST));
        assert!(!pass.is_slow && !pass.defers(|| false));
        assert_eq!(pass.decide(1 << 18, 1, 1).0, PassRuling::Settle, "a target that keeps up is not swept again");
    }

    proptest! {
        /// Whatever a guest does, passes end.
        #[test]
        fn sweeps_end(chunks in 1_u64..1 << 30, left in prop::collection::vec(0.0_f64..1.2, 40)) {
            let mut pass = slow(chunks);
            let mut absent = chunks;
            for (number, part) in left.iter().enumerate() {
                prop_assert!(number <= 31, "pass {number} of {chunks} chunks");
                pass.copy(absent);
                absent = ((absent as f64 * part) as u64).min(chunks);
                if pass.decide(absent, 1, 0).0 != PassRuling::GoOn {
                    prop_assert!(pass.is_settled());
                    return Ok(());
                }
                pass.begin(chunks, absent);
            }
            prop_assert!(false, "no end");
        }
    }
}
