//! A simulated disk: queue and latency, a volatile cache, and everything that can go wrong with it.
//!
//! ```text
//!   submit ──▶ queued ──▶ landing (in one or two parts) ──▶ answered
//!                │            │
//!                │ the future is dropped: its process died or gave up
//!                ▼            ▼
//!              orphaned: the parts that have not landed do so later, or never
//! ```
//!
//! A dead process's requests go on for a while, as direct IO does; [`Disk::open`] waits for them, as the lock on a
//! backend does, and [`Disk::open_at_once`] is the mistake of not waiting.

mod away;
mod below;
mod host_cache;
mod landing;
mod opened;
mod silent;
mod timing;

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, Device, Error, ErrorKind, Extent, Geometry, Mutation};
use env::Moment;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

pub use away::Absence;
pub(crate) use below::{Below, UnderWay};
pub(crate) use host_cache::HostCache;
pub use timing::Timing;

use crate::failures::Reporter;
pub use crate::faults::{Faults, STUCK_MAX};
use crate::medium::Medium;
use crate::rng::Rng;
use crate::world::{Invariant, World};

/// How long after its process's death a request may still land: tried on a real machine, 56 ms.
const LATE_MAX: Duration = Duration::from_millis(56);
/// How coarse the times of files are: a tick of Linux at 250 Hz.
const FILE_CLOCK_TICK: Duration = Duration::from_millis(4);

const SLOW_FACTOR: u32 = 20;

/// Who may not write to a disk any more.
#[derive(Clone, Copy, Default)]
struct Fence {
    /// Whoever opened it by this grant or an earlier one.
    grants: u64,
    /// Nor whoever opens it, until a holder or a target is admitted.
    closed: bool,
    /// Whoever opened it under an earlier epoch than this.
    epoch: u64,
    /// The same before the newest commit.
    epoch_before: u64,
    why: &'static str,
}

/// What is promised of how a disk is used. The default is nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// How many bytes of data, reads and writes together, are in flight at most.
    pub in_flight: Option<Bytes>,
    /// What is written lies below this.
    pub end: Option<Bytes>,
}

/// A disk. It outlives the processes that open it. Clones are the same disk.
#[derive(Clone)]
pub struct Disk {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    world: World,
    rng: Rng,
    timing: Timing,
    geometry: Geometry,
    state: Mutex<State>,
    settled: Notify,
    written: Notify,
}

struct State {
    medium: Medium,
    channels: Vec<Moment>,
    slow_until: Moment,
    faults: Faults,
    space: Option<Bytes>,
    is_lost: bool,
    is_full: bool,
    away: away::Away,
    /// Nothing is answered before this, and what is written lands no earlier.
    silent_until: Moment,
    /// When it was changed last.
    changed_at: Moment,
    fence: Fence,
    limits: Limits,
    /// Who hears of requests that fail.
    reporter: Option<Reporter>,
    requests: u64,
    in_flight: usize,
    in_flight_bytes: u64,
    in_flight_bytes_max: u64,
    grants: u64,
    orphans: usize,
    /// Whether something of a process that is gone has ever landed.
    has_landed_late: bool,
    /// Grows when the power goes: what was on its way is then decided.
    power: u32,
}

impl Disk {
    /// An empty disk of `size` bytes that takes requests of multiples of `alignment`.
    #[must_use]
    pub fn new(world: &World, name: &'static str, size: Bytes, alignment: u32, timing: Timing) -> Self {
        let state = State {
            medium: Medium::new(size),
            channels: vec![Moment::default(); timing.channels],
            slow_until: Moment::default(),
            faults: Faults::default(),
            space: None,
            is_lost: false,
            is_full: false,
            away: away::Away::default(),
            silent_until: Moment::default(),
            changed_at: Moment::default(),
            fence: Fence::default(),
            limits: Limits::default(),
            reporter: None,
            requests: 0,
            in_flight: 0,
            in_flight_bytes: 0,
            in_flight_bytes_max: 0,
            grants: 0,
            orphans: 0,
            has_landed_late: false,
            power: 0,
        };
        let geometry =
            Geometry { request_alignment: alignment, preferred_bytes: alignment.max(4096), ..Geometry::of_size(size) };
        let shared = Shared {
            name,
            world: world.clone(),
            rng: world.rng(name),
            timing,
            geometry,
            state: Mutex::new(state),
            settled: Notify::new(),
            written: Notify::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.shared.name
    }

    /// Opens it for a process that knows of `epoch`, once nothing of those before it is on its way any more.
    pub async fn open(&self, epoch: u64) -> Device {
        self.no_longer_hanging().await;
        loop {
            let settled = self.shared.settled.notified();
            if self.state().orphans == 0 {
                return self.open_at_once(epoch);
            }
            settled.await;
        }
    }

    /// Whether something of a process that was gone has landed. Nobody can tell it from the write of another program that
    /// did not ask for the file's lock.
    #[must_use]
    pub fn has_landed_late(&self) -> bool {
        self.state().has_landed_late
    }

    /// Waits until no request of whoever has it open is on its way. A file's lock is on its open file, and requests that
    /// were given up keep that open.
    pub async fn let_go(&self) {
        loop {
            let settled = self.shared.settled.notified();
            if self.in_flight() == 0 {
                return;
            }
            settled.await;
        }
    }

    /// Opens it without waiting for what an earlier process has left on its way.
    #[must_use]
    pub fn open_at_once(&self, epoch: u64) -> Device {
        let grant = {
            let mut state = self.state();
            state.grants += 1;
            state.grants
        };
        Device::new(self.shared.name, opened::Opened { disk: self.clone(), grant, epoch, has_lost_flush: false.into() })
    }

    /// Waits until somebody asks it to write.
    pub async fn written_to(&self) {
        self.shared.written.notified().await;
    }

    /// What is promised of how it is used.
    pub fn set_limits(&self, limits: Limits) {
        self.state().limits = limits;
    }

    /// From now on writes are a violation of one-writer if the writer has opened the disk before, or opens it without
    /// being admitted.
    pub fn revoke(&self, why: &'static str) {
        let mut state = self.state();
        state.fence = Fence { grants: state.grants, closed: true, why, ..state.fence };
    }

    /// Whoever opens it from now on may write: it holds the volume by the journal's word, or is the target of a job.
    pub fn admit(&self) {
        self.state().fence.closed = false;
    }

    /// From now on it is a violation of one-writer if somebody writes who opens it without knowing of `epoch`.
    pub fn require_epoch(&self, epoch: u64) {
        let fence = &mut self.state().fence;
        if epoch > fence.epoch {
            (fence.epoch_before, fence.epoch) = (fence.epoch, epoch);
        }
    }

    /// The commit of the newest epoch was taken back: whoever had it before goes on.
    pub fn take_epoch_back(&self) {
        let fence = &mut self.state().fence;
        fence.epoch = fence.epoch_before;
    }

    /// When it was changed last, as a file system tells it: no finer than its clock ticks.
    #[must_use]
    pub fn changed_at(&self) -> Moment {
        self.state().changed_at
    }

    fn note_change(&self, state: &mut State) {
        let now = self.shared.world.now().since(Moment::default());
        let ticks = now.as_nanos() / FILE_CLOCK_TICK.as_nanos();
        state.changed_at = Moment::default() + FILE_CLOCK_TICK * u32::try_from(ticks).expect("days in the world");
    }

    /// What may go wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// From now on every write that is answered is what was asked for.
    pub fn stop_lying(&self) {
        let mut state = self.state();
        state.faults = state.faults.honest();
    }

    /// Whether anything may go wrong with it now.
    #[must_use]
    pub fn is_faulty(&self) -> bool {
        let state = self.state();
        state.faults != Faults::default() || state.space.is_some() || state.is_lost || state.is_full
    }

    /// How many bytes may be allocated on it from now on.
    pub fn set_space(&self, space: Option<Bytes>) {
        self.state().space = space;
    }

    /// Every request fails while it is lost.
    pub fn set_lost(&self, is_lost: bool) {
        if is_lost {
            self.shared.world.fault("disk-lost", format_args!("{} is gone", self.shared.name));
        }
        self.state().is_lost = is_lost;
    }

    /// Nothing can be written to it while it is full, not even over what is there: a store that copies on write.
    pub fn set_full(&self, is_full: bool) {
        if is_full {
            self.shared.world.fault("store-full", format_args!("{} is full", self.shared.name));
        }
        self.state().is_full = is_full;
    }

    /// Takes the power away. Kill the processes first.
    pub fn lose_power(&self) {
        let mut state = self.state();
        state.power += 1;
        let lost = state.medium.lose_power(&self.shared.rng);
        state.channels.fill(self.shared.world.now());
        state.orphans = 0;
        drop(state);
        self.shared.settled.notify_waiters();
        let name = self.shared.name;
        self.shared.world.fault("power-loss", format_args!("{name} lost {lost} sectors"));
    }

    /// Puts another disk in its place, empty or with something on it, as whoever prepares a target again does. What was
    /// on its way to the old one does not reach the new one.
    pub fn replace(&self) {
        let mut state = self.state();
        state.power += 1;
        state.orphans = 0;
        let size = self.shared.geometry.size;
        state.medium = Medium::new(size);
        if self.shared.rng.chance(0.5) {
            let extent = Extent::new(Bytes::ZERO, Bytes(size.0 / 2));
            let kind = block::MutationKind::Data(block::Data::copy_of(&vec![0xee; extent.length.as_usize()]));
            state.medium.apply(extent, &kind, extent, true, &self.shared.rng);
        }
        drop(state);
        self.shared.settled.notify_waiters();
        self.shared.world.event(format_args!("{} is replaced", self.shared.name));
    }

    /// Puts an empty disk in its place, as whoever makes a new file does.
    pub fn blank(&self) {
        let mut state = self.state();
        state.power += 1;
        state.orphans = 0;
        state.medium = Medium::new(self.shared.geometry.size);
        self.note_change(&mut state);
        drop(state);
        self.shared.settled.notify_waiters();
        self.shared.world.event(format_args!("{} is a new file", self.shared.name));
    }

    /// How large it is.
    #[must_use]
    pub fn size(&self) -> Bytes {
        self.shared.geometry.size
    }

    /// Changes bytes behind everybody's back.
    pub fn corrupt(&self, offset: Bytes) {
        let extent = Extent::new(offset, Bytes(1));
        let flipped = [self.state().medium.read(extent)[0] ^ 1];
        self.put(offset, &flipped);
        self.shared.world.fault("corruption", format_args!("{} at {}", self.shared.name, offset.0));
    }

    /// Puts bytes on it before the scenario begins.
    pub fn fill(&self, offset: Bytes, bytes: &[u8]) {
        self.put(offset, bytes);
        self.note_change(&mut self.state());
    }

    fn put(&self, offset: Bytes, bytes: &[u8]) {
        let mutation = Mutation::data(offset, block::Data::copy_of(bytes));
        self.state().medium.apply(mutation.extent(), mutation.kind(), mutation.extent(), true, &self.shared.rng);
    }

    /// Looks at all bytes as reads see them.
    pub fn inspect<T>(&self, look: impl FnOnce(&[u8]) -> T) -> T {
        look(self.state().medium.bytes())
    }

    /// Calls `visit` with everything that a power loss now could leave in each sector that is not durable yet.
    pub fn each_uncertain(&self, visit: impl FnMut(u64, &[u8])) {
        self.state().medium.each_uncertain(visit);
    }

    /// Requests in flight, orphans included.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        let state = self.state();
        state.in_flight + state.orphans
    }

    /// The most bytes that were in flight at once.
    #[must_use]
    pub fn in_flight_bytes_max(&self) -> Bytes {
        Bytes(self.state().in_flight_bytes_max)
    }

    pub(crate) fn world(&self) -> &World {
        &self.shared.world
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock()
    }

    /// When a request of `length` bytes that is asked now will be answered, and whether that is far too late.
    fn schedule(&self, state: &mut State, length: u64) -> Moment {
        let (timing, rng, world) = (&self.shared.timing, &self.shared.rng, &self.shared.world);
        let now = world.now();
        if rng.chance(state.faults.slow) {
            state.slow_until = now + rng.up_to(Duration::from_millis(50));
            world.fault("slow", format_args!("{}", self.shared.name));
        }
        let mut service = timing.base + timing.per_kib * (length.min(1 << 20) / 1024) as u32 + rng.up_to(timing.jitter);
        if now < state.slow_until {
            service *= SLOW_FACTOR;
        }
        let channel = state.channels.iter_mut().min().expect("a disk has a channel");
        *channel = (*channel).max(now) + service;
        let mut done = *channel;
        if rng.chance(state.faults.stuck) {
            done = done + rng.up_to(STUCK_MAX);
            world.fault("stuck", format_args!("{} until {:?}", self.shared.name, done.0));
        }
        done
    }

    fn refusal(&self, state: &State, what: &str) -> Option<Error> {
        let gone = || Error::new(ErrorKind::Io, format!("{what}: {} is gone", self.shared.name));
        state.is_lost.then(gone)
    }

    fn enter(&self, state: &mut State, length: u64) -> u64 {
        state.requests += 1;
        state.in_flight += 1;
        state.in_flight_bytes += length;
        state.in_flight_bytes_max = state.in_flight_bytes_max.max(state.in_flight_bytes);
        if let Some(limit) = state.limits.in_flight
            && state.in_flight_bytes > limit.0
        {
            let (name, bytes) = (self.shared.name, Bytes(state.in_flight_bytes));
            let what = format!("{bytes} of data are in flight to the {name}, {limit} are promised");
            self.shared.world.violate(Invariant::Bounded, what);
        }
        state.requests
    }

    /// Whether a write of `extent` by whoever opened the disk so may be.
    fn check_writer(&self, state: &State, mutation: &Mutation, grant: u64, epoch: u64) {
        let (name, world, fence) = (self.shared.name, &self.shared.world, &state.fence);
        if grant <= fence.grants || fence.closed {
            world.violate(Invariant::OneWriter, format!("{name} was written: {mutation:?}, but {}", fence.why));
        }
        if epoch < fence.epoch {
            let what = format!("{name} was written under epoch {epoch} although {} is known to be newer", fence.epoch);
            world.violate(Invariant::OneWriter, what);
        }
        if let Some(end) = state.limits.end.filter(|end| mutation.extent().end() > *end) {
            let what = format!("{name} was written at {} beyond the promised {end}", mutation.extent());
            world.violate(Invariant::Bounded, what);
        }
    }

    pub(crate) fn leave(&self, length: u64) {
        let mut state = self.state();
        state.in_flight -= 1;
        state.in_flight_bytes -= length;
        let is_last = state.in_flight == 0;
        drop(state);
        if is_last {
            self.shared.settled.notify_waiters();
        }
    }
}

fn mutation_name(mutation: &Mutation) -> (&'static str, Extent) {
    let name = match mutation.kind() {
        block::MutationKind::Data(_) => "write",
        block::MutationKind::Zeroes { .. } => "zeroes",
        block::MutationKind::Discard => "discard",
    };
    (name, mutation.extent())
}

/// How many bytes of memory the write's data takes.
pub(crate) fn data_bytes(mutation: &Mutation) -> u64 {
    match mutation.kind() {
        block::MutationKind::Data(data) => data.len() as u64,
        block::MutationKind::Zeroes { .. } | block::MutationKind::Discard => 0,
    }
}

#[cfg(test)]
mod tests;
