//! A simulated disk as a process sees it.

use std::sync::atomic::{AtomicBool, Ordering};

use block::{BlockDevice, Buffer, Bytes, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation, Result};
use env::Moment;

use super::{Disk, State};
use crate::failures::{EVERYTHING, Reporter, Verb};

/// What a read will be answered.
enum ReadOutcome {
    Whole,
    Short(usize),
    Failed(Error),
}

/// Counts a request out, however it ends.
struct Leaving<'a> {
    disk: &'a Disk,
    length: u64,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.disk.leave(self.length);
    }
}

/// A flush under way; one that is dropped has happened or not.
struct FlushGuard<'a> {
    disk: &'a Disk,
    cut: u64,
    power: u32,
    ended: bool,
}

impl FlushGuard<'_> {
    fn end(mut self, success: bool) {
        self.finish(Some(success));
    }

    fn finish(&mut self, outcome: Option<bool>) {
        self.ended = true;
        let mut state = self.disk.state();
        if state.power == self.power {
            match outcome {
                Some(success) => state.medium.end_flush(self.cut, success),
                None => state.medium.abandon_flush(),
            }
        }
        drop(state);
        self.disk.leave(0);
    }
}

impl Drop for FlushGuard<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let happened = self.disk.shared.rng.chance(0.5);
            self.finish(happened.then_some(true));
        }
    }
}

/// The disk as a process sees it.
pub(super) struct Opened {
    pub(super) disk: Disk,
    /// By which opening it is held.
    pub(super) grant: u64,
    /// What whoever opened it knew.
    pub(super) epoch: u64,
    /// A flush was lost by which it may have lost what was written: no later one says that all is well.
    pub(super) has_lost_flush: AtomicBool,
}

impl BlockDevice for Opened {
    fn geometry(&self) -> Geometry {
        self.disk.shared.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let disk = &self.disk;
        let length = buffer.len() as u64;
        if let Some(refused) = disk.turned_away(Verb::Read, Extent::new(offset, Bytes(length))) {
            return refused;
        }
        let mut state = disk.state();
        let done = disk.schedule(&mut state, length);
        disk.enter(&mut state, length);
        let mut outcome = ReadOutcome::Whole;
        let (name, world, rng) = (disk.shared.name, &disk.shared.world, &disk.shared.rng);
        if let Some(error) = disk.refusal(&state, "reading") {
            outcome = ReadOutcome::Failed(error);
        } else if rng.chance(state.faults.read_errors) {
            world.fault("read-error", format_args!("{name} read {}+{length}", offset.0));
            let context = format!("reading {length} bytes at {}: injected", offset.0);
            outcome = ReadOutcome::Failed(Error::new(ErrorKind::Io, context));
        } else if rng.chance(state.faults.short_reads) {
            world.fault("short-read", format_args!("{name} read {}+{length}", offset.0));
            outcome = ReadOutcome::Short(rng.below(length) as usize);
        }
        if !matches!(outcome, ReadOutcome::Whole) {
            disk.report(&state, Verb::Read, Extent::new(offset, Bytes(length)));
        }
        drop(state);
        Box::pin(disk.read(offset, buffer, done, outcome))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        if let Some(refused) = self.disk.turned_away(Verb::Write, mutation.extent()) {
            return refused;
        }
        let write = self.disk.submit_write(mutation, self.grant, self.epoch);
        Box::pin(write.finish())
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let disk = &self.disk;
        if let Some(refused) = disk.turned_away(Verb::Flush, EVERYTHING) {
            return refused;
        }
        let mut state = disk.state();
        let done = disk.schedule(&mut state, 0);
        let number = disk.enter(&mut state, 0);
        let name = disk.shared.name;
        disk.shared.world.event(format_args!("{name} #{number} flush"));
        let mut outcome = Ok(());
        let is_latched = self.has_lost_flush.load(Ordering::Relaxed);
        if std::mem::take(&mut state.away.loses_flush) {
            disk.shared.world.fault("flush-lost", format_args!("{name}"));
            self.has_lost_flush.store(true, Ordering::Relaxed);
            if let Some(reporter) = &state.reporter {
                reporter.failures.note_lost();
            }
            outcome = Err(Error::new(ErrorKind::Io, "flushing: what was written may be lost"));
        } else if is_latched {
            outcome = Err(Error::new(ErrorKind::Io, "flushing: a flush has failed before; it must be opened again"));
        } else if let Some(error) = disk.refusal(&state, "flushing") {
            disk.shared.world.fault("flush-error", format_args!("{name} is gone"));
            outcome = Err(error);
        } else if disk.shared.rng.chance(state.faults.flush_errors) {
            disk.shared.world.fault("flush-error", format_args!("{name}"));
            outcome = Err(Error::new(ErrorKind::Io, "flushing: injected"));
        }
        if outcome.is_err() {
            disk.report(&state, Verb::Flush, EVERYTHING);
        }
        let guard = FlushGuard { disk, cut: state.medium.begin_flush(), power: state.power, ended: false };
        drop(state);
        Box::pin(disk.flush(guard, done, outcome, is_latched))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        let disk = &self.disk;
        Box::pin(async move {
            if let Some(refused) = disk.turned_away::<()>(Verb::Read, extent) {
                refused.await?;
            }
            let timing = &disk.shared.timing;
            disk.shared.world.sleep(timing.base / 8).await;
            disk.heard().await;
            let mut pieces = disk.state().medium.extents(extent);
            // The contract lets an answer end early.
            if disk.shared.rng.chance(0.1) {
                pieces.truncate(1);
            }
            Ok(pieces)
        })
    }
}

impl Disk {
    /// From now on `reporter` hears of every request that fails.
    pub(crate) fn report_to(&self, reporter: Reporter) {
        self.state().reporter = Some(reporter);
    }

    /// A request fails.
    pub(super) fn report(&self, state: &State, verb: Verb, extent: Extent) {
        if let Some(reporter) = &state.reporter {
            reporter.note(verb, extent, self.shared.world.now());
        }
    }

    async fn read(&self, offset: Bytes, mut buffer: Buffer, done: Moment, outcome: ReadOutcome) -> Result<Buffer> {
        let world = &self.shared.world;
        let extent = Extent::new(offset, buffer.len().into());
        let guard = Leaving { disk: self, length: extent.length.0 };
        // What a read sees was there at some moment while the read was in flight. Often it is the first moment, so that
        // code that relies on the last one fails.
        let early = self.shared.rng.chance(0.5);
        if early {
            buffer.copy_from_slice(self.state().medium.read(extent));
        }
        world.sleep_until(done).await;
        self.heard().await;
        if !early {
            buffer.copy_from_slice(self.state().medium.read(extent));
        }
        drop(guard);
        match outcome {
            ReadOutcome::Whole => Ok(buffer),
            ReadOutcome::Short(length) => {
                buffer.set_len(length);
                Ok(buffer)
            }
            ReadOutcome::Failed(error) => Err(error),
        }
    }

    async fn flush(
        &self,
        mut guard: FlushGuard<'_>,
        done: Moment,
        outcome: Result<()>,
        is_latched: bool,
    ) -> Result<()> {
        self.shared.world.sleep_until(done).await;
        self.heard().await;
        match is_latched {
            // Nobody has tried.
            true => guard.finish(None),
            false => guard.end(outcome.is_ok()),
        }
        outcome
    }
}
