//! Writes on their way to the medium. They are cut into parts that land by themselves; a power loss takes those that have not.

use block::{Bytes, Error, ErrorKind, Extent, Mutation};
use env::Moment;

use super::{Disk, LATE_MAX, data_bytes, mutation_name};
use crate::failures::Verb;
use crate::inflight_write::{InflightWrite, WritePart};
use crate::medium::SECTOR_BYTES;

impl Disk {
    pub(super) fn submit_write(&self, mutation: Mutation, grant: u64, epoch: u64) -> InflightWrite {
        self.check_writer(&self.state(), &mutation, grant, epoch);
        self.submit_admitted(mutation)
    }

    /// Of a writer that was looked at before.
    pub(super) fn submit_admitted(&self, mutation: Mutation) -> InflightWrite {
        let (rng, world) = (&self.shared.rng, &self.shared.world);
        let mut state = self.state();
        let extent = mutation.extent();
        let done = self.schedule(&mut state, extent.length.0);
        let number = self.enter(&mut state, data_bytes(&mutation));
        let mut outcome = Ok(());
        let mut landings = self.plan_landings(extent, matches!(mutation.kind(), block::MutationKind::Discard), done);
        let is_data = matches!(mutation.kind(), block::MutationKind::Data(_));
        let needed = Bytes(state.medium.blocks_needed(extent) * block::BLOCK_BYTES);
        if let Some(error) = self.refusal(&state, "writing") {
            landings.clear();
            outcome = Err(error);
        } else if state.is_full || is_data && state.space.is_some_and(|space| state.medium.allocated() + needed > space)
        {
            world.fault("no-space", format_args!("{} write {extent:?}", self.shared.name));
            landings.clear();
            outcome = Err(Error::new(ErrorKind::NoSpace, format!("writing {extent}: {} is full", self.shared.name)));
        } else if rng.chance(state.faults.write_errors) {
            world.fault("write-error", format_args!("{} write {extent:?}", self.shared.name));
            landings.retain(|_| rng.chance(0.5));
            outcome = Err(Error::new(ErrorKind::Io, format!("writing {extent}: injected")));
        }
        if outcome.is_err() {
            self.report(&state, Verb::Write, extent);
        }
        let name = self.shared.name;
        world.event(format_args!(
            "{name} #{number} {:?}{}",
            mutation_name(&mutation),
            if mutation.fua { " fua" } else { "" }
        ));
        let power = state.power;
        drop(state);
        self.shared.written.notify_waiters();
        InflightWrite::new(self.clone(), number, mutation, landings, done, outcome, power)
    }

    fn plan_landings(&self, extent: Extent, whole: bool, done: Moment) -> Vec<WritePart> {
        let rng = &self.shared.rng;
        let now = self.shared.world.now();
        let sectors = extent.length.0 / SECTOR_BYTES;
        let early = now + rng.up_to(done - now);
        if sectors < 2 || whole || rng.chance(0.7) {
            let at = if rng.chance(0.5) { early } else { done };
            return vec![WritePart { at, extent }];
        }
        let middle = (extent.offset + Bytes(rng.within(1..=sectors - 1) * SECTOR_BYTES)).align_down(SECTOR_BYTES);
        let middle = middle.max(extent.offset + Bytes(1));
        let first = WritePart { at: early, extent: Extent::between(extent.offset, middle) };
        let second = WritePart { at: done, extent: Extent::between(middle, extent.end()) };
        if rng.chance(0.5) {
            let (a, b) = (WritePart { extent: second.extent, ..first }, WritePart { extent: first.extent, ..second });
            return vec![a, b];
        }
        vec![first, second]
    }

    /// Puts the part `extent` of `mutation` on the medium, unless the power has gone since it was asked for, or the disk
    /// lies.
    pub(crate) fn land(&self, mutation: &Mutation, extent: Extent, power: u32) {
        let mut state = self.state();
        if state.power != power {
            return;
        }
        let (name, rng, world) = (self.shared.name, &self.shared.rng, &self.shared.world);
        let (whole, fua, faults) = (mutation.extent(), mutation.fua, state.faults);
        self.note_change(&mut state);
        if rng.chance(faults.lost_writes) {
            world.fault("lost-write", format_args!("{name} {extent:?}"));
            return;
        }
        if rng.chance(faults.misdirected_writes) {
            let last = (self.shared.geometry.size - extent.length).0 / SECTOR_BYTES;
            let place = Bytes(rng.within(0..=last) * SECTOR_BYTES);
            world.fault("misdirected-write", format_args!("{name} {extent:?} to {}", place.0));
            let moved = |from: Extent| Extent::new(place, from.length);
            // Only the part goes astray, so the part is a whole there.
            let part = mutation.slice(extent);
            state.medium.apply(moved(extent), part.kind(), moved(extent), fua, rng);
            return;
        }
        state.medium.apply(whole, mutation.kind(), extent, fua, rng);
        if rng.chance(faults.flipped_bits) && matches!(mutation.kind(), block::MutationKind::Data(_)) {
            let place = Extent::new(extent.offset + Bytes(rng.below(extent.length.0)), Bytes(1));
            world.fault("flipped-bit", format_args!("{name} at {}", place.offset.0));
            let flipped = [state.medium.read(place)[0] ^ (1 << rng.below(8))];
            let kind = block::MutationKind::Data(block::Data::copy_of(&flipped));
            state.medium.apply(place, &kind, place, fua, rng);
        }
    }

    /// Takes over what a dropped request has not landed yet.
    pub(crate) fn orphan(&self, mutation: Mutation, landings: Vec<WritePart>, power: u32) {
        let mut state = self.state();
        if state.power != power {
            return;
        }
        state.orphans += 1;
        drop(state);
        let rng = &self.shared.rng;
        let (lands, late) = (rng.chance(0.8), rng.up_to(LATE_MAX));
        let disk = self.clone();
        self.shared.world.spawn(async move {
            let world = disk.world().clone();
            for part in landings {
                world.sleep_until(part.at.max(world.now()) + late).await;
                if lands {
                    world.fault("late-landing", format_args!("{} {:?}", disk.name(), part.extent));
                    disk.land(&mutation, part.extent, power);
                    disk.state().has_landed_late = true;
                }
            }
            let mut state = disk.state();
            if state.power == power {
                state.orphans -= 1;
            }
            drop(state);
            disk.shared.settled.notify_waiters();
        });
    }
}
