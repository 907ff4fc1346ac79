//! A write on its way to a simulated disk.

use block::{Extent, Mutation, Result};
use env::Moment;

use crate::disk::{Disk, data_bytes};

/// A part of a write and when it lands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritePart {
    pub(crate) at: Moment,
    pub(crate) extent: Extent,
}

/// A write that was submitted. Dropping it before its end leaves the rest of it to the world.
pub(crate) struct InflightWrite {
    disk: Disk,
    number: u64,
    mutation: Mutation,
    /// What has not landed yet, the next first.
    landings: Vec<WritePart>,
    done: Moment,
    outcome: Option<Result<()>>,
    power: u32,
}

impl InflightWrite {
    pub(crate) const fn new(
        disk: Disk,
        number: u64,
        mutation: Mutation,
        landings: Vec<WritePart>,
        done: Moment,
        outcome: Result<()>,
        power: u32,
    ) -> Self {
        Self { disk, number, mutation, landings, done, outcome: Some(outcome), power }
    }

    pub(crate) async fn finish(mut self) -> Result<()> {
        let world = self.disk.world().clone();
        while let Some(part) = self.landings.first().copied() {
            world.sleep_until(part.at).await;
            self.disk.heard().await;
            self.disk.land(&self.mutation, part.extent, self.power);
            self.landings.remove(0);
        }
        world.sleep_until(self.done).await;
        self.disk.heard().await;
        let outcome = self.outcome.take().expect("a flight ends once");
        let word = if outcome.is_ok() { "done" } else { "failed" };
        world.event(format_args!("{} #{} {word}", self.disk.name(), self.number));
        outcome
    }
}

impl Drop for InflightWrite {
    fn drop(&mut self) {
        self.disk.leave(data_bytes(&self.mutation));
        if self.outcome.is_some() {
            self.disk.world().event(format_args!("{} #{} orphaned", self.disk.name(), self.number));
            self.disk.orphan(self.mutation.clone(), std::mem::take(&mut self.landings), self.power);
        }
    }
}
