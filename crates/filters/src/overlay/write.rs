//! How an overlay takes mutations.

use std::ops::Range;

use block::{Buffer, Bytes, Extent, Mutation, MutationKind, Result};

use super::Overlay;
use super::grain::GrainState;
use crate::translate::moved;

impl Overlay {
    pub(super) async fn write_data(&self, mutation: Mutation) -> Result<()> {
        let run = self.header.grain.indices_of(mutation.extent());
        let fua = mutation.fua;
        if fua {
            self.record.check()?;
        }
        if self.is_data(&run)
            && let Some(_under_way) = self.unlocked.enter()
        {
            return self.write_over(mutation, &run).await;
        }
        if self.unlocked.is_closed() {
            return Box::pin(self.write_draining(mutation)).await;
        }
        let guard = self.grains.exclusive(self.extent_of(&run)).await;
        if self.unlocked.is_closed() {
            drop(guard);
            return Box::pin(self.write_draining(mutation)).await;
        }
        if self.is_data(&run)
            && let Some(_under_way) = self.unlocked.enter()
        {
            drop(guard);
            return self.write_over(mutation, &run).await;
        }
        self.write_held(mutation).await?;
        drop(guard);
        if fua { self.flush_all().await } else { Ok(()) }
    }

    fn is_data(&self, run: &Range<u64>) -> bool {
        self.record.look(|map| map.is_all(run, GrainState::Data))
    }

    /// Writes data where the delta is to have it, whatever it has. The caller holds its grains.
    pub(super) async fn write_held(&self, mutation: Mutation) -> Result<()> {
        let mut direct = mutation.extent();
        let run = self.header.grain.indices_of(direct);
        for grain in [run.start, run.end - 1] {
            let whole = self.extent_of(&(grain..grain + 1));
            let Some(part) = whole.intersection(direct) else { continue };
            if part != whole && !self.is_data(&(grain..grain + 1)) {
                self.write_part(whole, &mutation.slice(part)).await?;
                direct = match part.offset == direct.offset {
                    true => Extent::between(part.end(), direct.end()),
                    false => Extent::between(direct.offset, part.offset),
                };
            }
        }
        if !direct.is_empty() {
            self.write_delta(mutation.slice(direct).with_fua(false)).await?;
        }
        self.record.set(run, GrainState::Data).await
    }

    /// Writes where the delta has all of it already.
    async fn write_over(&self, mutation: Mutation, run: &Range<u64>) -> Result<()> {
        let fua = mutation.fua;
        let is_known = !fua || self.record.is_durable(run);
        self.write_delta(mutation.with_fua(fua && is_known)).await?;
        if is_known { Ok(()) } else { self.flush_all().await }
    }

    /// Writes a part of a grain that the delta does not have, and the rest of it as it reads now.
    async fn write_part(&self, whole: Extent, part: &Mutation) -> Result<()> {
        let state = self.record.look(|map| map.get(self.header.grain.index_of(whole.offset).0));
        let mut buffer = self.read_run(whole.offset, state, Buffer::unpooled(whole.length.as_usize())).await?;
        let at = (part.extent().offset - whole.offset).as_usize();
        let place = &mut buffer[at..at + part.extent().length.as_usize()];
        match part.kind() {
            MutationKind::Data(data) => place.copy_from_slice(data),
            MutationKind::Zeroes { .. } | MutationKind::Discard => place.fill(0),
        }
        self.write_delta(Mutation::data(whole.offset, buffer.freeze())).await
    }

    /// Writes to the delta what the volume is to have.
    pub(super) async fn write_delta(&self, mutation: Mutation) -> Result<()> {
        self.delta.write(moved(&mutation, self.place_of(mutation.extent().offset))).await
    }

    /// Zeroes and discards: whole grains hide the base; of parts of grains zeroes are written and discards forgotten.
    pub(super) async fn clear(&self, mutation: Mutation) -> Result<()> {
        let fua = mutation.fua;
        if fua {
            self.record.check()?;
        }
        if self.unlocked.is_closed() {
            return Box::pin(self.write_draining(mutation)).await;
        }
        let extent = self.extent_of(&self.header.grain.indices_of(mutation.extent()));
        let guard = self.grains.exclusive(extent).await;
        if self.unlocked.is_closed() {
            drop(guard);
            return Box::pin(self.write_draining(mutation)).await;
        }
        self.clear_held(&mutation).await?;
        drop(guard);
        if fua { self.flush_all().await } else { Ok(()) }
    }

    /// Zeroes and discards that the overlay is to keep. The caller holds their grains.
    pub(super) async fn clear_held(&self, mutation: &Mutation) -> Result<()> {
        let extent = mutation.extent();
        let whole = self.whole_grains(extent);
        let inner = if whole.is_empty() { Extent::new(extent.offset, Bytes::ZERO) } else { self.extent_of(&whole) };
        if !matches!(mutation.kind(), MutationKind::Discard) {
            let (head, tail) = match whole.is_empty() {
                // Both lie in one grain or in two neighbours.
                true => {
                    let border = extent.offset.align_up(self.header.grain.bytes()).min(extent.end());
                    (Extent::between(extent.offset, border), Extent::between(border, extent.end()))
                }
                false => (Extent::between(extent.offset, inner.offset), Extent::between(inner.end(), extent.end())),
            };
            for part in [head, tail].into_iter().filter(|part| !part.is_empty()) {
                self.clear_part(&mutation.slice(part).with_fua(false)).await?;
            }
        }
        if whole.is_empty() { Ok(()) } else { self.clear_whole(inner, whole).await }
    }

    async fn clear_part(&self, mutation: &Mutation) -> Result<()> {
        let grain = self.header.grain.index_of(mutation.extent().offset).0;
        let whole = self.extent_of(&(grain..grain + 1));
        match self.record.look(|map| map.get(grain)) {
            GrainState::Zero => Ok(()),
            GrainState::Data => self.write_delta(mutation.clone()).await,
            GrainState::Absent => {
                self.write_part(whole, mutation).await?;
                self.record.set(grain..grain + 1, GrainState::Data).await
            }
        }
    }

    async fn clear_whole(&self, extent: Extent, run: Range<u64>) -> Result<()> {
        let (is_zero, has_data) = self.record.look(|map| {
            let runs = map.run_at(run.start, run.end);
            let has_data = !matches!(runs, (ref found, GrainState::Absent | GrainState::Zero) if *found == run);
            (map.is_all(&run, GrainState::Zero), has_data)
        });
        if is_zero {
            return Ok(());
        }
        self.record.set(run, GrainState::Zero).await?;
        if has_data {
            // Only the space is at stake: whoever writes here again writes whole grains. Zeroes and no discard, for
            // until the next flush the durable map still points here, and nothing but old or zero may be found then.
            let place = Extent::new(self.place_of(extent.offset), extent.length);
            if let Err(error) = self.delta.write(Mutation::zeroes(place, true)).await {
                tracing::debug!(delta = self.delta.name(), error = error.chain(), "space was not given back");
            }
        }
        Ok(())
    }
}
