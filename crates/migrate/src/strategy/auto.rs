//! The strategy that chooses for itself: every chunk is tracked or mirrored, whichever is expected to cost less, and goes
//! from one to the other at any moment.
//!
//! It is the mirror's filter, tracker and life of a chunk with one decision more: what becomes of a guest's write to a
//! chunk that is had.
//!
//! ```text
//!   absent: tracked ───────────── copied, under the range lock ─────────────▶ had: mirrored
//!   (writes go to the source,                                                 (writes go to both sides)
//!    and the copy is yet to come) ◀── a write that is left to the source ────
//! ```
//!
//! *Leaving* a chunk is what the mirror does with every write while it has no target: its activity is on record, the
//! chunk is absent and its had bit stale before the source is written, and the write has its extent alone until it has
//! ended. So there is no moment between the two modes: a write that was mirrored when its chunk is left has the lock on its
//! extent until both sides have answered, and a copy of the chunk waits for it. What holds of the mirror (had means equal;
//! what is had and not active after a crash was copied) holds of any choice of which writes are left, and a wrong one
//! costs time and no data.
//!
//! Absent chunks are copied in sweeps over the volume. [`stance`] says what is left to the source meanwhile, and when
//! that ends:
//!
//! ```text
//!              most mirrored writes wait for the target
//!   mirroring ─────────────────────────────────────────▶ tracking ◀──┐ a sweep has left at most half of what it
//!    │     ▲   what is written anew comes near to what                │ began with, and that takes a while
//!    │     └── is copied: this sweep's tracking is over ──── │ └──────┘
//!    └──────────────── end of the sweep ────────┬────────────┘
//!                                               ▼
//!                                            settled ──▶ every chunk had ──▶ comparison, switchover
//! ```
//!
//! - *Mirroring*: a chunk is left if it is hot: so many more writes to it are expected until the end that copying it once
//!   more, at the end, is cheaper. Hot chunks that are absent are put off until then. At most a third of the chunks can be hot
//!   at once, because hot is three times the mean at least.
//! - *Tracking*: the target makes the guest wait, so every write is left to the source. Now and then a few are mirrored to see
//!   whether it still does.
//! - *Settled*: nothing is left any more. What is absent is copied with the mirror on.
//!
//! **It converges under any load.** A sweep passes each chunk once, so it ends as the copy does. Another one follows only
//! a sweep that has left at most half of what it began with, so there are no more than 2 + log2 of the number of chunks.
//! Then everything is settled, nobody goes back from there while the target lasts, and that is a mirror, which converges.
//! The switchover is a mirror's: only what is settled is compared and switched, so nothing is dirty there and the guest is
//! held for one record; from the pre-switch on flushes go to both sides. A target that was lost and comes back is
//! another one as far as this goes: it is judged anew.
//!
//! Memory: the counters of [`filters::Heat`], beside what a mirror has.

pub(crate) mod stance;

use std::ops::Range;
use std::time::Duration;

use block::{Bytes, Extent};
use filters::Heat;

use super::mirror::tracker::{Life, Mode, Tracker};
use super::tracking::hot::Hot;
use stance::{Sweep, Verdict};

/// So many hot chunks are passed under one lock of the tracker.
const PASSED_AT_ONCE: u32 = 1024;
/// A write that covers a part of a block of this size makes many targets read before they write. It counts twice.
const BLOCK_BYTES: u64 = 4096;

/// What the choice rests on.
pub(crate) struct Auto {
    hot: Hot,
    pub(in crate::strategy) sweep: Sweep,
}

/// What a sweep comes to next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// These chunks are to be copied.
    Run(Range<u64>),
    /// Nothing up to this chunk, and there is more to look at.
    Nothing(u64),
    /// It is over.
    End,
}

impl Tracker {
    /// Chooses between mirroring and tracking from now on.
    pub(crate) fn choose(&mut self, heat: Heat) {
        let sweep = Sweep::new(self.chunks(), self.chunks());
        self.auto = Some(Auto { hot: Hot::new(heat), sweep });
    }

    /// The target is another one than before, as far as anybody knows.
    pub(crate) fn choose_anew(&mut self) {
        let (chunks, absent) = self.chunks_absent();
        if let Some(auto) = &mut self.auto {
            auto.sweep = Sweep::new(chunks, absent);
        }
    }

    /// Whether chunks may be left to the source: the volume is not settled.
    pub(crate) fn sweeps(&self) -> bool {
        self.auto.as_ref().is_some_and(|auto| !auto.sweep.is_settled())
    }

    /// Whether whoever writes shall say how long both sides took.
    pub(crate) fn weighs(&self) -> bool {
        self.auto.as_ref().is_some_and(|auto| auto.sweep.weighs())
    }

    /// A mirrored write has taken so long: the source alone, and all of it.
    pub(crate) fn weigh(&mut self, source: Duration, both: Duration) {
        if let Some(auto) = &mut self.auto {
            auto.sweep.weigh(source, both);
        }
    }

    /// The guest is going to write there.
    pub(in crate::strategy) fn count_write(&mut self, extent: Extent) {
        let Some(auto) = self.auto.as_mut().filter(|auto| !auto.sweep.is_settled()) else { return };
        let is_aligned = extent.offset.0.is_multiple_of(BLOCK_BYTES) && extent.length.0.is_multiple_of(BLOCK_BYTES);
        for index in self.chunk.indices_of(extent) {
            auto.hot.add(index);
            if !is_aligned {
                auto.hot.add(index);
            }
        }
    }

    /// Whether a write to a chunk that is had is left to the source. Whoever asks does so then.
    pub(in crate::strategy) fn leaves(&mut self, index: u64) -> bool {
        if self.mode() != Mode::SourceHolds {
            return false;
        }
        let Some(auto) = &mut self.auto else { return false };
        let leaves = auto.sweep.leaves(|| auto.hot.is_hot(index));
        if leaves {
            auto.sweep.left();
        }
        leaves
    }

    /// What the sweep under way copies next, at or after `from`. Hot chunks on the way are passed.
    pub(crate) fn next_in_sweep(&mut self, from: u64, chunks_max: u64) -> Found {
        let mut from = from;
        for _ in 0..PASSED_AT_ONCE {
            let Some(run) = self.next_absent(from, chunks_max) else { return Found::End };
            let Some(auto) = self.auto.as_mut().filter(|auto| auto.hot.is_on()) else { return Found::Run(run) };
            match run.clone().find(|index| auto.hot.is_hot(*index)) {
                None => return Found::Run(run),
                Some(first) if first > run.start => return Found::Run(run.start..first),
                Some(first) => {
                    auto.sweep.pass();
                    from = first + 1;
                }
            }
        }
        Found::Nothing(from)
    }

    /// Whether anything is hot now.
    pub(crate) fn has_hot(&self) -> bool {
        self.auto.as_ref().is_some_and(|auto| auto.hot.is_on())
    }

    /// Whether the sweep under way has passed everything, being at `from` now.
    pub(crate) fn is_sweep_over(&self, from: u64) -> bool {
        self.sweeps() && self.session().is_some() && self.life.next(Life::Absent, from).is_none()
    }

    /// A pass begins. Gives whether it is one of this strategy's.
    pub(crate) fn begin_sweep(&mut self) -> bool {
        let (chunks, absent) = self.chunks_absent();
        let Some(auto) = &mut self.auto else { return false };
        auto.sweep.begin(chunks, absent);
        true
    }

    /// A sweep is over. Says whether another one follows or what is left is settled; from here on it is. `rate` is how fast
    /// copies are, in bytes a second.
    pub(crate) fn judge_sweep(&mut self, rate: u64) -> Option<(Verdict, String)> {
        let chunk = self.chunk.bytes();
        let (_, absent) = self.chunks_absent();
        let auto = self.auto.as_mut()?;
        let (verdict, why) = auto.sweep.judge(absent, chunk, rate);
        if verdict == Verdict::Settle {
            auto.hot.stop();
        }
        Some((verdict, format!("{verdict}: {why}")))
    }

    /// Says again which chunks are hot: `left` is expected until the end of the move, with as many writes to chunks a second
    /// as there were since `before` of them, `span` ago. Gives how many there were in all.
    pub(crate) fn tune_sweep(&mut self, left: Duration, before: u64, span: Duration) -> u64 {
        let chunks = self.chunks();
        let Some(auto) = self.auto.as_mut().filter(|auto| !auto.sweep.is_settled()) else { return 0 };
        let total = auto.hot.total();
        let rate = total.saturating_sub(before) as f64 / span.as_secs_f64().max(1e-6);
        let threshold = auto.hot.tune_beyond(left / stance::HOT_PART, rate, stance::HOT_MEANS / chunks as f64);
        tracing::debug!(?threshold, rate, ?left, "chunks that are written so often are left to the source");
        total
    }

    /// What the sweep under way has put off, in bytes, and what was left to the source that the target had.
    pub(crate) fn bytes_passed_and_left(&self) -> (Bytes, Bytes) {
        let bytes = |chunks| Bytes(chunks * self.chunk.bytes()).min(self.size());
        let sweep = self.auto.as_ref().map(|auto| &auto.sweep);
        sweep.map_or((Bytes::ZERO, Bytes::ZERO), |sweep| (bytes(sweep.passed_chunks()), bytes(sweep.left_chunks())))
    }

    fn chunks_absent(&self) -> (u64, u64) {
        (self.chunks(), self.chunks() - self.life.count(Life::Had))
    }
}
