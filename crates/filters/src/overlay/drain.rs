//! Taking an overlay away while the guest writes: what it holds moves into the base, grain by grain, until it is empty.
//!
//! ```text
//!   held ──▶ its grains are locked ──▶ delta read ──▶ base written ──▶ running map: absent ──▶ unlocked
//!                                                                            │
//!   a flush begins: what is absent now ──▶ base flushed ──▶ delta flushed ──▶ durable map: absent
//! ```
//!
//! Once draining has begun no grain becomes held again. The guest's writes, zeroes and discards go to the base where
//! the overlay holds nothing. They go to the delta where it holds something. Every mutation holds its grains then, so
//! none is lost in the delta while its grain is copied. Those that began earlier without a lock are waited for.
//!
//! What a crash leaves at each moment:
//!
//! | the drain has | after a crash of the process (running map) | after a power loss (durable map) |
//! |---|---|---|
//! | read the delta | held: nothing has changed | as before |
//! | written the base, perhaps in part | held: the delta hides it, and it is drained again | held: the same; absent (the guest wrote the grain since the last flush): each sector of the base is what it was or what the guest wrote since |
//! | written the running map, perhaps | held or absent: both have the same bytes, for the grain is still locked | as above |
//! | let the grain go | absent: the base has it all, with what the guest writes there | held: the delta has what was drained, which is what was flushed last or newer; what the guest writes to the base is unflushed |
//! | flushed the base | absent | as above; a sector of the durable map that says absent already finds the base durable |
//! | flushed the durable map | absent | absent: the base is durable as it was when the flush began |
//!
//! So the delta's bytes of a drained grain stay; its space goes with the whole delta. A forced write to the base may go
//! over a grain that the durable map still holds. It then ends with a whole flush, because a power loss would bring the
//! delta's bytes back.
//!
//! A flush of the base that fails may have lost what was drained and flushed before. The delta still has it, so the
//! overlay holds those grains again: at once on record, and for the guest as soon as nobody writes to them. A write to
//! the base that meets this is tried again once they are held. Then they are drained again. A base that cannot be
//! reached has lost nothing, and nothing changes. For that the delta keeps up with the base: what the guest changes there
//! of a grain that was drained since the last flush is changed in the delta first. One that was drained as zeroes has
//! no bytes in the delta: a change of it is held again, and is drained again with the others.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::{Buffer, Bytes, Extent, Mutation, MutationKind, Result};
use tokio::sync::Notify;

use super::grain::GrainState;
use super::{Overlay, RunOrigin};
use crate::store::BelowError;

impl Overlay {
    /// From now on mutations go to the base wherever the overlay holds nothing, so that it only gets emptier. There is no
    /// way back but to open it again. The base must be writable.
    pub fn begin_drain(&self) {
        self.unlocked.close();
    }

    /// Whether it holds nothing. After a flush that began later, the base alone is the volume.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.record.look(|map| map.count(GrainState::Absent) == map.len())
    }

    /// Whether all that was drained is durable below: the base alone is the volume. False if something is held again, because the base
    /// may have lost it: it is to be drained once more.
    ///
    /// # Errors
    /// What the base says, or the delta, if that is well.
    pub async fn settle(&self) -> Result<bool> {
        self.take_back().await?;
        match self.record.settle().await {
            Ok(()) => {}
            // The delta's record stays as it is, and whoever takes the overlay away has that on record first.
            Err(_) if self.record.has_failed_store() => self.base.flush().await?,
            Err(failed) => {
                self.take_back().await?;
                return Err(failed.error);
            }
        }
        Ok(self.is_empty())
    }

    /// Whether the delta has failed: its durable map stays as it is, whatever was drained.
    #[must_use]
    pub fn has_failed_record(&self) -> bool {
        self.record.has_failed_store()
    }

    /// Holds again what the base may have lost. Nothing is locked by the caller.
    pub(super) async fn take_back(&self) -> Result<()> {
        while self.record.has_pins() {
            let Some((run, state)) = self.record.first_pinned_run() else { return Ok(()) };
            let _guard = self.grains.exclusive(self.extent_of(&run)).await;
            // Somebody may have done it meanwhile.
            if self.record.first_pinned_run() != Some((run.clone(), state)) {
                continue;
            }
            self.record.restore(run, state).await?;
        }
        Ok(())
    }

    /// Writes to the base what the guest has changed where nothing is held. The caller holds its grains.
    async fn write_below(&self, mutation: Mutation) -> Result<(), BelowError> {
        let run = self.header.grain.indices_of(mutation.extent());
        self.record.change_below(run.clone())?;
        let left = self.record.left(run);
        if left.is_empty() {
            return Ok(self.base.write(mutation).await?);
        }
        // What a discard leaves must not depend on which of both is read.
        let mutation = match mutation.kind() {
            MutationKind::Discard => Mutation::zeroes(mutation.extent(), true).with_fua(mutation.fua),
            MutationKind::Data(_) | MutationKind::Zeroes { .. } => mutation,
        };
        for (grain, _) in left {
            let Some(part) = self.extent_of(&(grain..grain + 1)).intersection(mutation.extent()) else { continue };
            if let Err(error) = self.write_delta(mutation.slice(part).with_fua(false)).await {
                // It is needed only if the base loses what it has taken.
                tracing::warn!(delta = self.delta.name(), error = error.chain(), "a drained grain does not keep up");
            }
        }
        Ok(self.base.write(mutation).await?)
    }

    /// Writes what the overlay does not hold, but holds `held_again`. The caller holds its grains alone.
    async fn write_absent(&self, mutation: Mutation, held_again: &BTreeSet<u64>) -> Result<(), BelowError> {
        if held_again.is_empty() {
            return self.write_below(mutation).await;
        }
        for grain in self.header.grain.indices_of(mutation.extent()) {
            let whole = self.extent_of(&(grain..grain + 1));
            let Some(part) = whole.intersection(mutation.extent()) else { continue };
            let piece = mutation.slice(part);
            match held_again.contains(&grain) {
                false => self.write_below(piece).await?,
                true => self.change_held(piece).await?,
            }
        }
        Ok(())
    }

    /// Carries out a mutation of what the overlay holds, or is to hold. The caller holds its grains alone.
    async fn change_held(&self, mutation: Mutation) -> Result<()> {
        match mutation.kind() {
            MutationKind::Data(_) => self.write_held(mutation).await,
            MutationKind::Zeroes { .. } | MutationKind::Discard => self.clear_held(&mutation).await,
        }
    }

    /// Whether some grain of `run` was drained as zeroes since the last flush.
    fn has_left_as_zeroes(&self, run: Range<u64>) -> bool {
        self.record.left(run).iter().any(|(_, state)| *state == GrainState::Zero)
    }

    /// Moves the first run that is held at or after `from` into the base, at most `most` bytes of it or one grain.
    /// Gives what it has moved, or nothing if nothing is held there. What was moved is durable after the next flush.
    ///
    /// Without [`begin_drain`](Self::begin_drain) it is for an overlay that nobody writes to. Once begun it must be
    /// driven to its end, as every operation. If it is dropped midway, the overlay must be opened again before it is
    /// used.
    ///
    /// # Errors
    /// What the delta and the base say. What was to be moved is then still held.
    pub async fn drain_next(&self, from: Bytes, most: Bytes) -> Result<Option<Extent>> {
        self.unlocked.ended().await;
        loop {
            let Some((found, _)) = self.next_stored(from, most) else {
                // Mutations that have begun before the drain may be about to fill what is empty now.
                let rest = Extent::between(from.align_down(self.header.grain.bytes()), self.header.volume);
                if rest.is_empty() {
                    return Ok(None);
                }
                let _guard = self.grains.exclusive(rest).await;
                if self.next_stored(from, most).is_none() {
                    return Ok(None);
                }
                continue;
            };
            let guard = self.grains.exclusive(found).await;
            // Others may have drained or zeroed it meanwhile.
            if let Some((extent, origin)) = self.next_stored(found.offset, self.movable(found))
                && found.contains(extent)
            {
                self.move_to_base(extent, origin).await?;
                return Ok(Some(extent));
            }
            drop(guard);
        }
    }

    /// How much of `extent` one request can carry, in whole grains.
    fn movable(&self, extent: Extent) -> Bytes {
        extent.length.min(Bytes(self.geometry.transfer_bytes_max.into()))
    }

    /// The caller holds the grains of `extent`.
    async fn move_to_base(&self, extent: Extent, origin: RunOrigin) -> Result<()> {
        let mutation = match origin {
            RunOrigin::Zeroes => Mutation::zeroes(extent, true),
            RunOrigin::Data => {
                let buffer = Buffer::unpooled(extent.length.as_usize());
                Mutation::data(extent.offset, self.delta.read(self.place_of(extent.offset), buffer).await?.freeze())
            }
        };
        self.base.write(mutation).await?;
        self.record.set(self.header.grain.indices_of(extent), GrainState::Absent).await
    }

    /// Carries out a mutation while the overlay is drained. A flush that fails meanwhile may pin what it meets: that is held again, and the
    /// whole mutation is tried once more. Nobody was told that the first attempt has ended.
    pub(super) async fn write_draining(&self, mutation: Mutation) -> Result<()> {
        loop {
            // Where that fails now, only what is recorded as held takes no write.
            let taken_back = self.take_back().await;
            let written = match mutation.kind() {
                MutationKind::Data(_) => self.try_write_draining(&mutation).await,
                MutationKind::Zeroes { .. } | MutationKind::Discard => self.try_clear_draining(&mutation).await,
            };
            match written {
                Ok(true) => return Ok(()),
                Ok(false) => return self.flush_all().await,
                Err(BelowError::Failed(error)) => return Err(error),
                Err(BelowError::Pinned) => taken_back?,
            }
        }
    }

    /// Writes data while the overlay is drained. False if it is to be flushed yet.
    async fn try_write_draining(&self, mutation: &Mutation) -> Result<bool, BelowError> {
        let run = self.header.grain.indices_of(mutation.extent());
        let grains = self.extent_of(&run);
        let guard = self.grains.shared(grains).await;
        let runs = self.runs(mutation.extent(), usize::MAX);
        if runs.iter().any(|(_, state)| *state == GrainState::Zero) || self.has_left_as_zeroes(run.clone()) {
            drop(guard);
            let _guard = self.grains.exclusive(grains).await;
            self.write_parts(mutation).await?;
            return Ok(!mutation.fua);
        }
        let is_known = !mutation.fua || self.record.is_durable(&run);
        for (part, state) in runs {
            let piece = mutation.slice(part).with_fua(mutation.fua && is_known);
            match state {
                GrainState::Absent => self.write_below(piece).await?,
                GrainState::Data | GrainState::Zero => self.write_delta(piece).await?,
            }
        }
        Ok(is_known)
    }

    /// The same for zeroes and discards.
    async fn try_clear_draining(&self, mutation: &Mutation) -> Result<bool, BelowError> {
        let _guard = self.grains.exclusive(self.extent_of(&self.header.grain.indices_of(mutation.extent()))).await;
        self.write_parts(mutation).await?;
        Ok(!mutation.fua)
    }

    /// Carries out a mutation while the overlay is drained, each part where its grains are, and forces none. The caller
    /// holds all of them alone.
    async fn write_parts(&self, mutation: &Mutation) -> Result<(), BelowError> {
        let run = self.header.grain.indices_of(mutation.extent());
        self.record.change_below(run.clone())?;
        // The delta has no bytes of these: what is changed of them is held again, with the rest as the base has it.
        let left = self.record.left(run).into_iter().filter(|(_, state)| *state == GrainState::Zero);
        let held_again: BTreeSet<u64> = left.map(|(grain, _)| grain).collect();
        for (part, state) in self.runs(mutation.extent(), usize::MAX) {
            let piece = mutation.slice(part).with_fua(false);
            match state {
                GrainState::Absent => self.write_absent(piece, &held_again).await?,
                GrainState::Data | GrainState::Zero => self.change_held(piece).await?,
            }
        }
        Ok(())
    }
}

/// Writes under way that hold no lock. Once closed, no further ones begin.
#[derive(Default)]
pub(super) struct Unlocked {
    is_closed: AtomicBool,
    under_way: AtomicU64,
    ended: Notify,
}

/// A write under way.
pub(super) struct UnderWay<'a>(&'a Unlocked);

impl Unlocked {
    /// Begins one, unless they are closed.
    pub(super) fn enter(&self) -> Option<UnderWay<'_>> {
        if self.is_closed() {
            return None;
        }
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let entered = UnderWay(self);
        // Whoever closes and then sees none under way must be seen here.
        (!self.is_closed.load(Ordering::SeqCst)).then_some(entered)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    /// Waits for those that began before they were closed; not at all if they are not.
    async fn ended(&self) {
        while self.is_closed() {
            let ended = self.ended.notified();
            if self.under_way.load(Ordering::SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let left = self.0.under_way.fetch_sub(1, Ordering::SeqCst);
        if left == 1 && self.0.is_closed.load(Ordering::SeqCst) {
            self.0.ended.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests;
