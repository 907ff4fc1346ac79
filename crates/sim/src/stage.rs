//! How a story is played.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ::daemon::VolumeDocument;
use block::{Bytes, ChunkSize};
use env::Moment;
use futures::future::{join, join_all};
use migrate::{Journal, OnNoConverge, Phase, ProgressMap};

use crate::checks;
use crate::dice::Dice;
use crate::disk::{Disk, Faults, Limits, STUCK_MAX, Timing};
use crate::failures::{Failures, Reporter};
use crate::guest::Guest;
use crate::happening::{Event, Happening, When};
use crate::host::{Disks, Host, Outage, Setup, Status};
use crate::ledger::Ledger;
use crate::medium::SECTOR_BYTES;
use crate::occurrence::Occurrence;
use crate::pattern::Content;
use crate::port::Port;
use crate::story::Story;
use crate::world::{Invariant, World};

/// Once faults have stopped a job ends within this: a request that is stuck, another behind it, and the work.
const JOB_LIMIT: Duration = STUCK_MAX.saturating_mul(3);
/// The same where the guest does not rest and nothing is stuck.
const ENDLESS_LIMIT: Duration = Duration::from_secs(5);
/// So many jobs may end badly after the faults have stopped: the one that they have struck. The next succeeds.
const TRIES_MAX: u32 = 2;
/// All that happens is over within the story's span and this.
const CHAOS_LIMIT: Duration = STUCK_MAX.saturating_mul(10);
/// So long is a phase waited for in which something shall happen.
const PHASE_LIMIT: Duration = Duration::from_secs(60);
/// The end of a job is on record within this.
const RECORD_LIMIT: Duration = Duration::from_secs(5);
/// So long is a write of the guest waited for at which something shall happen.
const WRITE_LIMIT: Duration = Duration::from_secs(2);
/// The largest copy, whatever its chunks are; a window may be exceeded by one.
const COPY_BYTES_MAX: u64 = 1 << 20;
/// The smallest window of a copy.
const WINDOW_BYTES_MIN: u64 = 256 << 10;

/// Everything that takes part in a story.
pub(crate) struct Cast<'a> {
    story: &'a Story,
    world: World,
    dice: Dice,
    port: Port,
    journal: Disk,
    map: Disk,
    sides: [Disk; 2],
    pub(crate) guest: Guest,
    pub(crate) host: Host,
    failures: Failures,
    deaths: Cell<u64>,
    missed: RefCell<Vec<(Phase, Happening)>>,
}

impl Drop for Cast<'_> {
    fn drop(&mut self) {
        self.host.close();
        self.failures.close();
    }
}

impl<'a> Cast<'a> {
    pub(crate) fn assemble(story: &'a Story, world: &World) -> Self {
        let dice = world.dice("story");
        let size = story.size;
        let source = Disk::new(world, "source", size, story.alignment, story.timings[0]);
        // Not where the volume comes back, for nothing moves to a smaller disk, nor on another host, which makes its file.
        let is_larger = dice.chance(0.2) && story.moves < 2 && !story.setup.is_between_hosts;
        let target_size = if is_larger { size + Bytes::kib(64) } else { size };
        let alignment = story.target_alignment.unwrap_or(story.alignment);
        let target = Disk::new(world, "target", target_size, alignment, story.timings[1]);
        let journal = Disk::new(world, "journal", Bytes::mib(1), 512, Timing::FLASH);
        let map = Disk::new(world, "map", Bytes::mib(1), 512, Timing::FLASH);
        let contents = original(story, &dice);
        let mut bytes = vec![0; SECTOR_BYTES as usize];
        for (sector, content) in contents.iter().enumerate() {
            let sector = sector as u64;
            let offset = Bytes(sector * SECTOR_BYTES);
            bytes.resize((size - offset).0.min(SECTOR_BYTES) as usize, 0);
            if *content != Content::Zero {
                content.fill(sector, &mut bytes);
                source.fill(offset, &bytes);
            }
            if story.dirty_target && dice.chance(0.5) {
                target.fill(offset, &vec![0xdd; bytes.len()]);
            }
        }
        let ledger = Ledger::new(size.0, |sector| contents[sector as usize]);
        let port = match story.wire {
            Some(figures) if story.has_two_connections => Port::over_two_wires(world, figures),
            Some(figures) => Port::over_wire(world, figures),
            None => Port::new(world),
        };
        let failures = Failures::default();
        let guest = Guest::excusing(world, &port, story.load, ledger, failures.clone());
        let sides = [source, target];
        for (side, disk) in sides.iter().enumerate() {
            disk.report_to(Reporter { failures: failures.clone(), side });
        }
        let disks = Disks { journal: journal.clone(), map: map.clone(), sides: sides.clone() };
        let between = if story.setup.is_between_hosts { 256 } else { 0 };
        let tasks_max = 64 + between + 4 * story.load.outstanding as usize;
        let setup = Setup { corrupts: story.corrupts(), tasks_max, ..story.setup.clone() };
        let host = Host::new(world, setup, &port, &guest, disks);
        let judge = host.clone();
        failures.judged_by(move || judge.answerable());
        let (deaths, missed, world) = (Cell::new(0), RefCell::default(), world.clone());
        Self { story, world, dice, port, journal, map, sides, guest, host, failures, deaths, missed }
    }

    /// What should have happened in a phase that did not come, or found nothing there to happen to.
    pub(crate) fn missed(&self) -> Vec<(Phase, Happening)> {
        self.missed.borrow().clone()
    }

    /// How often the process was killed at a chosen poll.
    pub(crate) const fn deaths(&self) -> u64 {
        self.deaths.get()
    }

    pub(crate) async fn play(&self) {
        self.state_limits();
        self.begin_faults();
        self.host.boot();
        self.guest.start();
        self.world.sleep(self.dice.up_to(Duration::from_millis(2))).await;
        if self.story.moves > 0 {
            self.host.ask_for_move();
        }
        let limit = self.story.span + CHAOS_LIMIT;
        let Some(()) = self.within(limit, "it is not over", self.chaos()).await else { return };
        self.end_faults();
        let Some(()) = self.come_to_an_end().await else { return };
        if !self.story.setup.is_between_hosts {
            // The next start of the daemon would begin it again.
            let cleared = self.host.job_off_record();
            let Some(()) = self.within(RECORD_LIMIT, "the job is on record still", cleared).await else { return };
        }
        self.last_checks();
    }

    /// What is promised of memory and queues: copies and comparisons within their window, guest requests as many as the
    /// guest has and what is buffered, journal and progress map of a fixed size.
    fn state_limits(&self) {
        let (options, load) = (&self.story.setup.options, &self.story.load);
        let window = options.window_bytes_max.min(self.story.setup.pool.0 / 2).max(WINDOW_BYTES_MIN);
        let copies = window + COPY_BYTES_MAX.max(options.chunk_bytes);
        let guest = load.outstanding * (load.sectors_max * SECTOR_BYTES).max(u64::from(self.story.alignment));
        // A target that was given up may still hold what the guest had in flight there.
        let buffer = options.buffer().unwrap_or_default().0;
        let in_flight = Some(Bytes(copies + 2 * guest.max(256 * SECTOR_BYTES) + buffer));
        self.sides.iter().for_each(|side| side.set_limits(Limits { in_flight, end: None }));
        let end = Some(Journal::<VolumeDocument>::bytes_needed());
        self.journal.set_limits(Limits { end, in_flight: None });
        let page_chunks = self.story.setup.map_page_chunks;
        let needed = |chunk| ProgressMap::bytes_needed(self.story.size, chunk, page_chunks);
        let end = ChunkSize::new(options.chunk_bytes).map(needed);
        self.map.set_limits(Limits { end, in_flight: None });
    }

    fn begin_faults(&self) {
        let story = self.story;
        for (disk, faults) in self.sides.iter().zip(story.faults) {
            disk.set_faults(faults);
        }
        self.journal.set_faults(story.journal_faults);
        self.map.set_faults(story.map_faults);
        self.sides[1].set_space(story.space.map(|part| Bytes((story.size.0 as f64 * part) as u64)));
    }

    fn end_faults(&self) {
        self.world.event(format_args!("the faults end"));
        for disk in [&self.journal, &self.map, &self.sides[0], &self.sides[1]] {
            disk.set_faults(Faults::default());
            disk.set_space(None);
            disk.set_lost(false);
            disk.set_full(false);
        }
        self.host.set_files_full(false);
        self.host.set_files_failing(0.0);
        if let Some(control) = self.host.control() {
            control.set_bandwidth(None);
            // A lost host is brought back by the daemon.
            if !self.story.setup.is_between_hosts {
                control.resume();
            }
        }
    }

    /// What happens, at moments from the seed, after phases, and at chosen polls.
    async fn chaos(&self) {
        let story = self.story;
        let start = self.world.now();
        let mut timed: Vec<(Moment, Happening)> = Vec::new();
        let mut phased: Vec<(Phase, Happening)> = Vec::new();
        for Event { what, when } in story.events.iter().copied() {
            match when {
                When::Sometime => timed.push((start + self.dice.up_to(story.span), what)),
                When::After(span) => timed.push((start + span, what)),
                When::In(phase) => phased.push((phase, what)),
            }
        }
        timed.sort_by_key(|(moment, _)| *moment);
        let events = async {
            let timed = async {
                for (moment, what) in timed {
                    self.world.sleep_until(moment).await;
                    self.happen(what).await;
                }
                self.world.sleep_until(start + story.span).await;
            };
            join(timed, join_all(phased.into_iter().map(|(phase, what)| self.happen_in(phase, what)))).await;
            if !story.deaths.is_empty() {
                // Whatever the job does may be the poll at which the process dies.
                self.limited(PHASE_LIMIT, self.host.ended()).await;
            }
            self.world.fuse().put_out();
        };
        join(events, self.die_at_polls()).await;
    }

    async fn die_at_polls(&self) {
        for polls in &self.story.deaths {
            self.world.fuse().light(*polls);
            if !self.world.fuse().burned().await {
                return;
            }
            self.deaths.set(self.deaths.get() + 1);
            if self.story.setup.neighbour_burns {
                self.world.fuse().renew();
                self.host.strike_neighbour(Outage::Death, self.story.downtime).await;
                continue;
            }
            let _outage = self.host.outage().await;
            self.host.crash().await;
            self.world.fuse().renew();
            self.world.sleep(self.dice.up_to(self.story.downtime)).await;
            self.host.boot();
        }
    }

    async fn happen_in(&self, phase: Phase, what: Happening) {
        let mut phases = self.host.phases();
        let seen = async {
            // The host lives as long as the story does.
            let _ = phases.wait_for(|seen| *seen == Some(phase)).await;
        };
        if self.limited(PHASE_LIMIT, seen).await.is_some() {
            self.world.sleep(self.dice.up_to(Duration::from_micros(200))).await;
            if self.happen(what).await {
                self.world.occur(Occurrence::In(phase, what));
                return;
            }
        }
        self.world.event(format_args!("{} in {phase} did not happen", what.name()));
        self.missed.borrow_mut().push((phase, what));
        if self.story.expected.all_happens {
            let what = format!("{} was to happen in {phase}, and did not", what.name());
            self.world.violate(Invariant::AsTold, what);
        }
    }

    /// False if it must not die now.
    async fn crash(&self) -> bool {
        if !self.host.may_die().await {
            return false;
        }
        self.host.crash().await;
        self.world.sleep(self.dice.up_to(self.story.downtime)).await;
        self.host.boot();
        true
    }

    async fn lose_power(&self) {
        let _outage = self.host.outage().await;
        self.host.lose_power().await;
        self.world.sleep(self.dice.up_to(self.story.downtime)).await;
        self.host.boot();
        self.host.note_awaited(true);
        self.guest.read_all().await;
        self.host.note_awaited(false);
        self.guest.start();
    }

    /// Has `happening` happen; false if there is nothing now that it could happen to.
    async fn happen(&self, happening: Happening) -> bool {
        let happened = match happening {
            Happening::Crash => {
                let _outage = self.host.outage().await;
                self.crash().await
            }
            Happening::Pause | Happening::Cancel | Happening::Bandwidth => self.steer(happening),
            Happening::TargetLost => self.lose_target(),
            Happening::Corruption => self.corrupt(),
            _ => self.happen_anyhow(happening).await,
        };
        if happened {
            self.world.occur(Occurrence::Happens(happening));
        }
        happened
    }

    /// Of what needs no move.
    async fn happen_anyhow(&self, happening: Happening) -> bool {
        match happening {
            Happening::CrashAgain => {
                let _outage = self.host.outage().await;
                let mut died = self.crash().await;
                for _ in 0..self.dice.within(1..=3) {
                    self.world.sleep(self.dice.up_to(Duration::from_micros(800))).await;
                    died |= self.crash().await;
                }
                return died;
            }
            Happening::CrashAtWrite => {
                let _outage = self.host.outage().await;
                for _ in 0..self.dice.within(1..=4) {
                    // A guest that writes nothing any more does not keep the process from dying.
                    self.limited(WRITE_LIMIT, self.guest.wrote()).await;
                }
                self.world.sleep(self.dice.up_to(Duration::from_micros(150))).await;
                return self.crash().await;
            }
            Happening::PowerLoss => self.lose_power().await,
            Happening::PowerLossAtStore => {
                // A job that stores nothing any more does not keep the power on.
                self.limited(WRITE_LIMIT, self.journal.written_to()).await;
                self.world.sleep(self.dice.up_to(Duration::from_micros(120))).await;
                self.lose_power().await;
            }
            Happening::Reconnect => {
                let _outage = self.host.outage().await;
                self.host.reconnect().await;
            }
            Happening::HalfOpen => self.port.half_open(),
            Happening::SlowReader => self.port.stop_reading(),
            Happening::LinkDown => self.port.interrupt(),
            Happening::TargetSilent(milliseconds) => return self.silence_target(milliseconds).await,
            Happening::StoreFull => self.fill_store(),
            Happening::FilesFail => self.fail_files(),
            Happening::PoolEmpty => return self.empty_pools(),
            Happening::ClockJump => {
                let seconds = self.dice.below(2 * 86_400 + 1) as i64;
                self.world.step_wall_clock(if self.dice.chance(0.5) { seconds } else { -seconds });
            }
            Happening::StoreFails => self.trouble_store(Faults { write_errors: 0.7, ..self.story.journal_faults }),
            Happening::StoreSlow => self.trouble_store(Faults { stuck: 0.7, ..self.story.journal_faults }),
            Happening::NeighbourCrash => self.host.strike_neighbour(Outage::Death, self.story.downtime).await,
            Happening::NeighbourPowerLoss => self.host.strike_neighbour(Outage::PowerLoss, self.story.downtime).await,
            Happening::NeighbourMeddled => self.host.strike_neighbour(Outage::Meddling, self.story.downtime).await,
            Happening::NeighbourUnheard => self.host.silence_and_strike_neighbour(self.story.downtime).await,
            Happening::NeighbourTrouble => self.host.trouble_with_neighbour(),
            Happening::WrongEpoch => self.host.ask_under_wrong_epoch().await,
            Happening::ArbiterTrouble => self.host.trouble_with_arbiter(),
            Happening::ArbiterLate => self.host.delay_arbiter(),
            Happening::Crash
            | Happening::TargetLost
            | Happening::Corruption
            | Happening::Pause
            | Happening::Cancel
            | Happening::Bandwidth => return false,
        }
        true
    }

    /// What an operator does with a move.
    fn steer(&self, happening: Happening) -> bool {
        let Some(control) = self.host.control() else { return false };
        match happening {
            Happening::Pause => {
                self.world.event(format_args!("pause"));
                control.pause();
                let (world, span) = (self.world.clone(), self.dice.up_to(Duration::from_millis(10)));
                self.world.spawn(async move {
                    world.sleep(span).await;
                    world.event(format_args!("resume"));
                    control.resume();
                });
                true
            }
            Happening::Cancel => {
                self.host.note_wish();
                let taken = control.cancel().is_ok();
                self.world.event(format_args!("cancel{}", if taken { "" } else { " comes too late" }));
                taken
            }
            _ => {
                let rate = self.dice.pick(&[None, Some(1 << 20), Some(50 << 20), Some(1 << 30)]);
                self.world.event(format_args!("bandwidth {rate:?}"));
                control.set_bandwidth(rate.map(Bytes));
                true
            }
        }
    }

    /// Only while the target is copied to: what is compared later may be believed.
    fn corrupt(&self) -> bool {
        let is_before = |phase| matches!(phase, Phase::Preparing | Phase::Copying);
        let Some(target) = self.host.target() else { return false };
        let happens = self.host.control().is_some_and(|control| is_before(control.snapshot().phase));
        if happens {
            self.sides[target].corrupt(Bytes(self.dice.below(self.story.size.0)));
        }
        happens
    }

    /// The disks of the journal and the progress map, and with them the daemon's files.
    fn fill_store(&self) {
        let (stores, world, host) = ([self.journal.clone(), self.map.clone()], self.world.clone(), self.host.clone());
        stores.iter().for_each(|store| store.set_full(true));
        host.set_files_full(true);
        let span = self.dice.up_to(Duration::from_millis(30));
        self.world.spawn(async move {
            world.sleep(span).await;
            stores.iter().for_each(|store| store.set_full(false));
            host.set_files_full(false);
        });
    }

    /// The daemon's small files.
    fn fail_files(&self) {
        let (world, host) = (self.world.clone(), self.host.clone());
        host.set_files_failing(0.5);
        let span = self.dice.up_to(Duration::from_millis(30));
        self.world.spawn(async move {
            world.sleep(span).await;
            host.set_files_failing(0.0);
        });
    }

    /// Every buffer of the process that is free, or becomes it, is somebody else's for a while.
    fn empty_pools(&self) -> bool {
        let pools = self.host.pools();
        if pools.is_empty() {
            return false;
        }
        let (world, end) = (self.world.clone(), self.world.now() + self.dice.up_to(Duration::from_millis(20)));
        self.world.fault("pool-empty", format_args!("{} pools until {:?}", pools.len(), end.0));
        self.world.spawn(async move {
            let mut taken = Vec::new();
            while world.now() < end {
                for pool in &pools {
                    for length in [1 << 20, 64 << 10, 4 << 10] {
                        taken.extend(std::iter::from_fn(|| pool.try_acquire(length)));
                    }
                }
                world.sleep(Duration::from_micros(100)).await;
            }
        });
        true
    }

    /// The journal's disk has these faults for a while.
    fn trouble_store(&self, trouble: Faults) {
        let faults = self.story.journal_faults;
        self.journal.set_faults(trouble);
        let (journal, world) = (self.journal.clone(), self.world.clone());
        let span = self.dice.up_to(Duration::from_millis(300));
        self.world.spawn(async move {
            world.sleep(span).await;
            // The faults may have ended meanwhile.
            if journal.is_faulty() {
                journal.set_faults(faults);
            }
        });
    }

    /// Only while it is a target: a disk that holds the volume alone and is lost is nobody's fault.
    fn lose_target(&self) -> bool {
        let Some(target) = self.host.target() else { return false };
        self.sides[target].set_lost(true);
        let (disk, world) = (self.sides[target].clone(), self.world.clone());
        let span = self.dice.up_to(Duration::from_millis(10));
        self.world.spawn(async move {
            world.sleep(span).await;
            disk.set_lost(false);
        });
        true
    }

    /// Only while it is a target: from the commit on it is the guest's own disk that answers nothing.
    async fn silence_target(&self, milliseconds: u32) -> bool {
        let (Some(target), Some(control)) = (self.host.target(), self.host.control()) else { return false };
        if control.snapshot().phase.is_committed() {
            return false;
        }
        let span = Duration::from_millis(milliseconds.into());
        self.sides[target].be_silent(span);
        let mut phases = self.host.phases();
        // The host lives as long as the story does.
        let committed = async { _ = phases.wait_for(|phase| phase.is_some_and(Phase::is_committed)).await };
        if self.limited(span, committed).await.is_some() {
            self.sides[target].end_silence();
        }
        true
    }

    /// What `work` gives, or `None` after `limit`.
    async fn limited<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            value = &mut work => Some(value),
            () = self.world.sleep(limit) => None,
        }
    }

    /// The same, and a violation of `converges` after `limit`.
    async fn within<T>(&self, limit: Duration, what: &str, work: impl Future<Output = T>) -> Option<T> {
        let value = self.limited(limit, work).await;
        if value.is_none() {
            let progress = self.host.control().map(|control| control.snapshot());
            let what = format!("{what} after {limit:?}: {:?}, {progress:?}", self.host.status());
            self.world.violate(Invariant::Converges, what);
        }
        value
    }

    async fn come_to_an_end(&self) -> Option<()> {
        let mut tries = 0;
        let mut moves = 0;
        while moves < self.story.moves {
            let limit = if self.story.load.endless { ENDLESS_LIMIT } else { JOB_LIMIT };
            let status = self.within(limit, "no end of the job", self.host.ended()).await?;
            if matches!(status, Status::Switched(_)) {
                moves += 1;
                if moves == self.story.moves {
                    break;
                }
                tries = 0;
            } else if self.story.expected.switches {
                let what = format!("the first try is {status:?}, expected that it moves the volume");
                self.world.violate(Invariant::AsTold, what);
                return None;
            } else if self.has_given_up(&status) {
                // A strategy that need not converge has said so, and left the guest where it was.
                break;
            } else {
                // Whatever has become of the first try, nothing of it may be in the way of the next. A request that still
                // hangs may be why it failed.
                tries += 1;
                self.world.sleep(STUCK_MAX / TRIES_MAX).await;
                if self.story.setup.is_between_hosts && self.dice.chance(0.5) {
                    let forgotten = self.host.forgotten_by_neighbour();
                    self.within(JOB_LIMIT, "something of the move is left", forgotten).await?;
                }
                if tries > TRIES_MAX {
                    let what = format!("{tries} moves without faults did not succeed: {:?}", self.host.status());
                    self.world.violate(Invariant::Converges, what);
                    return None;
                }
            }
            self.host.move_again();
        }
        self.guest.let_end();
        let load = &self.story.load;
        let think = load.think * u32::try_from(load.requests / load.outstanding.max(1) + 1).unwrap_or(u32::MAX);
        let guest = async {
            self.guest.finish().await;
            self.guest.read_all().await;
            self.guest.flush_at_last().await;
        };
        self.within(JOB_LIMIT + think, "the guest is not served", guest).await
    }

    /// Whether a move has ended because it does not converge, where that is a good end.
    fn has_given_up(&self, status: &Status) -> bool {
        let options = &self.story.setup.options;
        let may = options.strategy.iterates() && options.on_no_converge != OnNoConverge::Mirror;
        may && matches!(status, Status::Failed(why) if why.contains("does not converge"))
    }

    fn last_checks(&self) {
        let ledger = self.guest.ledger();
        checks::flushed(&self.world, &self.sides[self.host.holder()], &ledger, true);
        self.host.check_arrived();
        checks::as_told(&self.world, &self.story.expected, &self.guest.report(), &self.host.status());
    }
}

/// What the volume holds before the story begins: runs of data and of holes.
fn original(story: &Story, dice: &Dice) -> Vec<Content> {
    let count = story.size.0.div_ceil(SECTOR_BYTES) as usize;
    let mut contents = Vec::with_capacity(count);
    while contents.len() < count {
        let content = if dice.chance(story.filled) { Content::Written(0) } else { Content::Zero };
        let length = dice.within(1..=256) as usize;
        contents.extend(std::iter::repeat_n(content, length.min(count - contents.len())));
    }
    contents
}
