//! The strategy that chooses for itself. Every chunk is tracked or mirrored, whichever is expected to cost less, and
//! goes from one to the other at any moment.
//!
//! It has the mirror's filter, tracker and chunk states. It decides one thing more: what becomes of a guest's write to
//! a chunk that is copied.
//!
//! ```text
//!   absent: tracked ───────────── copied, under the range lock ─────────────▶ copied: mirrored
//!   (writes go to the source,                                                 (writes go to both sides)
//!    and the copy is yet to come) ◀── a write that is left to the source ────
//! ```
//!
//! *Leaving* a chunk is what the mirror does with every write while it has no target. Before the source is written, the
//! write's activity is on record, the chunk is absent and its copied bit is stale. The write has its extent alone until
//! it has ended. So there is no moment between the two modes. A write that was mirrored when its chunk is left has the
//! lock on its extent until both sides have answered. A copy of the chunk waits for that write. Two facts hold of the
//! mirror: copied means equal, and after a crash what is marked copied and not active was copied. Both hold whichever
//! writes are left, so a wrong choice costs time and no data.
//!
//! Absent chunks are copied in passes over the volume. [`write_policy`] says what is left to the source meanwhile, and when
//! that ends:
//!
//! ```text
//!              most mirrored writes wait for the target
//!   mirroring ─────────────────────────────────────────▶ tracking ◀──┐ a pass has left at most half of what it
//!    │     ▲   what is written anew comes near to what                │ began with, and that takes a while
//!    │     └── is copied: this pass's tracking is over ───── │ └──────┘
//!    └──────────────── end of the pass ─────────┬────────────┘
//!                                               ▼
//!                                            settled ──▶ every chunk had ──▶ comparison, switchover
//! ```
//!
//! - *Mirroring*: a chunk is left if it is hot. Hot means that many more writes to it are expected until the end, and
//!   copying it once more, at the end, is cheaper. Hot chunks that are absent are put off until then. At most a third
//!   of the chunks can be hot at once, because hot is three times the mean at least.
//! - *Tracking*: the target makes the guest wait, so every write is left to the source. Now and then a few are mirrored to see
//!   whether it still does.
//! - *Settled*: nothing is left any more. What is absent is copied with the mirror on.
//!
//! **It converges under any load.** A pass passes each chunk once, so it ends as the copy does. Another pass follows
//! only one that has left at most half of what it began with. So there are no more than 2 + log2 of the number of
//! chunks. Then everything is settled, and stays settled while the target lasts. That is a mirror, which converges. The
//! switchover is a mirror's: only what is settled is compared and switched. So nothing is dirty there, and the guest is
//! held for one record. From the pre-switch on flushes go to both sides. A target that was lost and comes back counts
//! as a new one: its speed is measured again.
//!
//! Memory: the counters of [`filters::WriteFrequencySketch`], beside what a mirror has.

pub(crate) mod write_policy;

use std::time::Duration;

use block::{Bytes, Extent};
use filters::WriteFrequencySketch;

use super::mirror::tracker::{CopyState, Mode, Tracker};
use super::tracking::hot_blocks::HotChunks;
use write_policy::{AutoPass, PassRuling};

/// A write that covers a part of a block of this size makes many targets read before they write. It counts twice.
const BLOCK_BYTES: u64 = 4096;

/// What the choice rests on.
pub(crate) struct Auto {
    hot: HotChunks,
    pub(in crate::strategy) pass: AutoPass,
}

impl Tracker {
    /// Chooses between mirroring and tracking from now on.
    pub(crate) fn choose(&mut self, heat: WriteFrequencySketch) {
        let pass = AutoPass::new(self.chunks(), self.chunks());
        self.auto = Some(Auto { hot: HotChunks::new(heat), pass });
    }

    /// The target is another one than before, as far as anybody knows.
    pub(crate) fn choose_anew(&mut self) {
        let (chunks, absent) = self.chunks_absent();
        if let Some(auto) = &mut self.auto {
            auto.pass = AutoPass::new(chunks, absent);
        }
    }

    /// Whether chunks may be left to the source: the volume is not settled.
    pub(crate) fn auto_passes(&self) -> bool {
        self.auto.as_ref().is_some_and(|auto| !auto.pass.is_settled())
    }

    /// Whether whoever writes shall say how long both sides took.
    pub(crate) fn weighs(&self) -> bool {
        self.auto.as_ref().is_some_and(|auto| auto.pass.weighs())
    }

    /// A mirrored write has taken so long: the source alone, and all of it.
    pub(crate) fn weigh(&mut self, source: Duration, both: Duration) {
        if let Some(auto) = &mut self.auto {
            auto.pass.weigh(source, both);
        }
    }

    /// The guest is going to write there.
    pub(in crate::strategy) fn count_write(&mut self, extent: Extent) {
        let Some(auto) = self.auto.as_mut().filter(|auto| !auto.pass.is_settled()) else { return };
        let is_aligned = extent.offset.0.is_multiple_of(BLOCK_BYTES) && extent.length.0.is_multiple_of(BLOCK_BYTES);
        for index in self.chunk.indices_of(extent) {
            auto.hot.add(index);
            if !is_aligned {
                auto.hot.add(index);
            }
        }
    }

    /// Whether a write to a chunk that is copied is left to the source. Whoever asks does so then.
    pub(in crate::strategy) fn defers(&mut self, index: u64) -> bool {
        if self.mode() != Mode::SourceHolds {
            return false;
        }
        let Some(auto) = &mut self.auto else { return false };
        let defers = auto.pass.defers(|| auto.hot.is_hot(index));
        if defers {
            auto.pass.defer_chunk();
        }
        defers
    }

    /// What tells hot chunks from others, if any are hot now.
    pub(in crate::strategy) fn auto_hot(&self) -> Option<&HotChunks> {
        self.auto.as_ref().map(|auto| &auto.hot).filter(|hot| hot.is_on())
    }

    /// The pass under way goes by a hot chunk.
    pub(in crate::strategy) const fn pass_hot(&mut self) {
        if let Some(auto) = &mut self.auto {
            auto.pass.pass();
        }
    }

    /// Whether the order of copies within the pass under way matters for its end no more than in a mirror.
    pub(crate) fn is_auto_order_free(&self) -> bool {
        self.auto.as_ref().is_none_or(|auto| auto.pass.is_order_free())
    }

    /// Whether the pass under way has passed everything, being at `from` now.
    pub(crate) fn is_auto_pass_over(&self, from: u64) -> bool {
        self.auto_passes() && self.session().is_some() && self.copy_state.next(CopyState::Absent, from).is_none()
    }

    /// A pass begins. Gives whether it is one of this strategy's.
    pub(crate) fn begin_auto_pass(&mut self) -> bool {
        let (chunks, absent) = self.chunks_absent();
        let Some(auto) = &mut self.auto else { return false };
        auto.pass.begin(chunks, absent);
        true
    }

    /// A pass is over. Says whether another one follows or what is left is settled; from here on it is. `rate` is how fast
    /// copies are, in bytes a second.
    pub(crate) fn decide_auto_pass(&mut self, rate: u64) -> Option<(PassRuling, String)> {
        let chunk = self.chunk.bytes();
        let (_, absent) = self.chunks_absent();
        let auto = self.auto.as_mut()?;
        let (ruling, why) = auto.pass.decide(absent, chunk, rate);
        if ruling == PassRuling::Settle {
            auto.hot.stop();
        }
        Some((ruling, format!("{ruling}: {why}")))
    }

    /// Says again which chunks are hot. The move is expected to end after `left`, and the guest to write to as many
    /// chunks a second as in the last `span`. `before` is how many such writes there were `span` ago. Gives how many
    /// there were in all.
    pub(crate) fn tune_auto_pass(&mut self, left: Duration, before: u64, span: Duration) -> u64 {
        let chunks = self.chunks();
        let Some(auto) = self.auto.as_mut().filter(|auto| !auto.pass.is_settled()) else { return 0 };
        let total = auto.hot.total();
        let rate = total.saturating_sub(before) as f64 / span.as_secs_f64().max(1e-6);
        let threshold =
            auto.hot.tune_beyond(left / write_policy::HOT_PART, rate, write_policy::HOT_MEANS / chunks as f64);
        tracing::debug!(?threshold, rate, ?left, "chunks that are written so often are left to the source");
        total
    }

    /// What the pass under way has put off, in bytes, and what was left to the source that the target had.
    pub(crate) fn bytes_passed_and_deferred(&self) -> (Bytes, Bytes) {
        let bytes = |chunks| Bytes(chunks * self.chunk.bytes()).min(self.size());
        let pass = self.auto.as_ref().map(|auto| &auto.pass);
        pass.map_or((Bytes::ZERO, Bytes::ZERO), |pass| (bytes(pass.passed_chunks()), bytes(pass.deferred_chunks())))
    }

    fn chunks_absent(&self) -> (u64, u64) {
        (self.chunks(), self.chunks() - self.copy_state.count(CopyState::Copied))
    }
}
