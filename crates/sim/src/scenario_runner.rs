//! How a scenario is played.

mod machines;
mod starts;

use std::cell::{Cell, RefCell};
use std::time::Duration;

use block::Bytes;
use env::Moment;
use futures::future::{join, join_all};
use migrate::{OnNoConverge, Phase};

use crate::checks;
use crate::disk::{Faults, STUCK_MAX};
use crate::fault_event::{Aim, Event, FaultEvent, When};
use crate::host::{Outage, Status};
use crate::occurrence::Occurrence;
use crate::rng::Rng;
use crate::scenario::{Expected, Scenario};
use crate::seat::Seat;
use crate::world::{Invariant, World};

/// Once faults have stopped a job ends within this: a request that is stuck, another behind it, and the work.
const JOB_LIMIT: Duration = STUCK_MAX.saturating_mul(3);
/// The same where the guest does not rest and nothing is stuck.
const ENDLESS_LIMIT: Duration = Duration::from_secs(5);
/// So many jobs may end badly after the faults have stopped: the one that they have struck. The next succeeds.
const TRIES_MAX: u32 = 2;
/// All that happens is over within the scenario's span and this.
const CHAOS_LIMIT: Duration = STUCK_MAX.saturating_mul(10);
/// So long is a phase waited for in which something shall happen.
const PHASE_LIMIT: Duration = Duration::from_secs(60);
/// The end of a job is on record within this.
const RECORD_LIMIT: Duration = Duration::from_secs(5);
/// How long the end of a machine's move may take: a word that was not heard is said again.
const MACHINE_LIMIT: Duration = Duration::from_secs(30);
/// So long is a write of the guest waited for at which something shall happen.
const WRITE_LIMIT: Duration = Duration::from_secs(2);

/// Everything that takes part in a scenario.
pub(crate) struct ScenarioRunner<'a> {
    scenario: &'a Scenario,
    world: World,
    rng: Rng,
    /// The volumes. The process is the first one's.
    seats: Vec<Seat>,
    deaths: Cell<u64>,
    missed: RefCell<Vec<(Aim, FaultEvent)>>,
}

impl<'a> ScenarioRunner<'a> {
    pub(crate) fn assemble(scenario: &'a Scenario, world: &World) -> Self {
        let rng = world.rng("story");
        let mut seats = vec![Seat::assemble(scenario, world, &rng, None)];
        for number in 1..scenario.volume_count() {
            seats.push(Seat::assemble(scenario, world, &rng, Some((&seats[0], number))));
        }
        let (deaths, missed, world) = (Cell::new(0), RefCell::default(), world.clone());
        Self { scenario, world, rng, seats, deaths, missed }
    }

    /// The first volume, whose host has the process of all of them.
    pub(crate) fn first(&self) -> &Seat {
        &self.seats[0]
    }

    /// Any volume.
    fn one(&self) -> &Seat {
        match self.seats.len() {
            1 => self.first(),
            count => &self.seats[self.rng.below(count as u64) as usize],
        }
    }

    /// What should have happened in a phase that did not come, or found nothing there to happen to.
    pub(crate) fn missed(&self) -> Vec<(Aim, FaultEvent)> {
        self.missed.borrow().clone()
    }

    /// How often the process was killed at a chosen poll.
    pub(crate) const fn deaths(&self) -> u64 {
        self.deaths.get()
    }

    pub(crate) async fn play(&self) {
        for seat in &self.seats {
            seat.state_limits(self.scenario);
            seat.begin_faults(self.scenario);
        }
        self.first().host.boot();
        self.seats.iter().for_each(|seat| seat.guest.start());
        self.world.sleep(self.rng.up_to(Duration::from_millis(2))).await;
        self.happen_before().await;
        if self.scenario.moves > 0 {
            self.first().host.ask_for_move();
            if !self.scenario.setup.together {
                self.seats[1..].iter().for_each(|seat| self.ask_sometime(seat));
            }
        }
        let limit = self.scenario.span + CHAOS_LIMIT;
        let Some(()) = self.within(limit, "it is not over", self.first(), self.chaos()).await else { return };
        self.clear_leftover().await;
        if self.scenario.moves == 0 {
            self.first().host.ask_no_more();
        }
        self.world.event(format_args!("the faults end"));
        self.seats.iter().for_each(Seat::end_faults);
        self.reopen_what_has_lost().await;
        // All of them at once: what one waits for may be what another has.
        let ends = join_all(self.seats.iter().map(|seat| self.end_and_look(seat))).await;
        if ends.into_iter().all(|end| end.is_some()) {
            self.seats.iter().for_each(|seat| self.last_checks(seat));
            self.check_machine().await;
        }
    }

    /// One QEMU is left of the machine, and it runs.
    async fn check_machine(&self) {
        let Some(machine) = self.first().host.machine() else { return };
        let begun = self.world.now();
        while let Some(disorder) = machine.disorder() {
            if self.world.now() - begun > MACHINE_LIMIT {
                self.world.violate(Invariant::OneWriter, disorder);
                return;
            }
            self.world.sleep(Duration::from_millis(10)).await;
        }
        if machine.has_moved() {
            self.world.occur(Occurrence::Told("machine moved"));
        }
    }

    /// Half of the other volumes' moves begin with the first one's.
    fn ask_sometime(&self, seat: &Seat) {
        let span = if self.rng.chance(0.5) { Duration::from_micros(200) } else { self.scenario.span / 2 };
        let (world, host, span) = (self.world.clone(), seat.host.clone(), self.rng.up_to(span));
        self.world.spawn(async move {
            world.sleep(span).await;
            host.ask_for_move();
        });
    }

    async fn end_and_look(&self, seat: &Seat) -> Option<()> {
        self.come_to_an_end(seat).await?;
        let given_back = seat.host.surrogate_given_back();
        self.within(JOB_LIMIT, "the surrogate is not given back", seat, given_back).await?;
        self.within(JOB_LIMIT, "the cache is not emptied", seat, seat.host.cache_emptied()).await?;
        if !self.scenario.setup.is_between_hosts {
            // The next start of the daemon would begin it again.
            let cleared = seat.host.job_off_record();
            self.within(RECORD_LIMIT, "the job is on record still", seat, cleared).await?;
        }
        Some(())
    }

    /// How long a move may take once faults have stopped: those that wait for a place have others before them.
    fn job_limit(&self) -> Duration {
        let waits = self.seats.len() > self.scenario.setup.running_jobs_max;
        let limit = if self.scenario.load.endless { ENDLESS_LIMIT } else { JOB_LIMIT };
        limit * if waits { self.seats.len() as u32 } else { 1 }
    }

    /// What happens, at moments from the seed, after phases, and at chosen polls.
    async fn chaos(&self) {
        let scenario = self.scenario;
        let start = self.world.now();
        let mut timed: Vec<(Moment, FaultEvent)> = Vec::new();
        let mut phased: Vec<(Aim, FaultEvent)> = Vec::new();
        for Event { what, when } in scenario.events.iter().copied() {
            match when {
                When::Before => {}
                When::Sometime => timed.push((start + self.rng.up_to(scenario.span), what)),
                When::After(span) => timed.push((start + span, what)),
                When::In(phase) => phased.push((Aim::Disk(phase), what)),
                When::InMachine(phase) => phased.push((Aim::Machine(phase), what)),
            }
        }
        timed.sort_by_key(|(moment, _)| *moment);
        let events = async {
            let timed = async {
                for (moment, what) in timed {
                    self.world.sleep_until(moment).await;
                    self.happen(self.one(), what).await;
                }
                self.world.sleep_until(start + scenario.span).await;
            };
            let phased = join_all(phased.into_iter().map(|(aim, what)| self.happen_in(aim, what)));
            let again = self.move_machine_again();
            tokio::select! {
                biased;
                _ = join(timed, phased) => {}
                () = again => {}
            }
            if !scenario.deaths.is_empty() {
                // Whatever the job does may be the poll at which the process dies.
                self.limited(PHASE_LIMIT, join_all(self.seats.iter().map(|seat| seat.host.ended()))).await;
            }
            self.world.crash_point().disarm();
        };
        join(events, self.die_at_polls()).await;
    }

    async fn die_at_polls(&self) {
        for polls in &self.scenario.deaths {
            self.world.crash_point().arm(*polls);
            if !self.world.crash_point().reached().await {
                return;
            }
            self.deaths.set(self.deaths.get() + 1);
            if self.scenario.setup.peer_dies_at_poll {
                self.world.crash_point().renew();
                self.first().host.strike_peer(Outage::Death, self.scenario.downtime).await;
                continue;
            }
            let _outage = self.first().host.outage().await;
            self.first().host.crash().await;
            self.world.crash_point().renew();
            self.world.sleep(self.rng.up_to(self.scenario.downtime)).await;
            self.first().host.boot();
        }
    }

    async fn happen_in(&self, aim: Aim, what: FaultEvent) {
        let seat = self.one();
        let seen = async {
            tokio::select! {
                biased;
                () = self.seen(seat, aim) => true,
                () = self.moved_for_good() => false,
            }
        };
        if self.limited(PHASE_LIMIT, seen).await == Some(true) {
            self.world.sleep(self.rng.up_to(Duration::from_micros(200))).await;
            if self.happen(seat, what).await {
                self.world.occur(Occurrence::aimed(aim, what));
                return;
            }
        }
        self.world.event(format_args!("{} in {aim} did not happen", what.name()));
        self.missed.borrow_mut().push((aim, what));
        if self.scenario.expected.all_happens {
            let what = format!("{} was to happen in {aim}, and did not", what.name());
            self.world.violate(Invariant::AsTold, what);
        }
    }

    /// Waits until the move of a disk, or that of its machine, is in a phase, or has been where phases are short.
    async fn seen(&self, seat: &Seat, aim: Aim) {
        match aim {
            Aim::Disk(phase) => {
                let mut phases = seat.host.phases();
                // The host lives as long as the scenario does.
                let _ = phases.wait_for(|seen| seen.is_some_and(|seen| is_at_or_past(seen, phase))).await;
            }
            Aim::Machine(phase) => {
                let Some(machine) = self.first().host.machine() else { return };
                machine.seen_in(phase).await;
            }
        }
    }

    /// False if it must not die now.
    async fn crash(&self) -> bool {
        if !self.first().host.may_die().await {
            return false;
        }
        self.first().host.crash().await;
        self.world.sleep(self.rng.up_to(self.scenario.downtime)).await;
        self.first().host.boot();
        true
    }

    async fn lose_power(&self) {
        let _outage = self.first().host.outage().await;
        self.first().host.lose_power().await;
        self.world.sleep(self.rng.up_to(self.scenario.downtime)).await;
        self.first().host.boot();
        self.first().host.note_awaited(true);
        join_all(self.seats.iter().map(|seat| seat.guest.read_all())).await;
        self.first().host.note_awaited(false);
        self.seats.iter().for_each(|seat| seat.guest.start());
    }

    /// Has `event_kind` happen; false if there is nothing now that it could happen to.
    async fn happen(&self, seat: &Seat, event_kind: FaultEvent) -> bool {
        let happened = match event_kind {
            FaultEvent::Crash => {
                let _outage = self.first().host.outage().await;
                self.crash().await
            }
            FaultEvent::Pause | FaultEvent::Cancel | FaultEvent::Bandwidth => self.steer(seat, event_kind),
            FaultEvent::TargetLost => self.lose_target(seat),
            FaultEvent::Corruption => self.corrupt(seat),
            _ => self.happen_anyhow(seat, event_kind).await,
        };
        if happened {
            self.world.occur(Occurrence::Happens(event_kind));
        }
        happened
    }

    /// Of what needs no move.
    async fn happen_anyhow(&self, seat: &Seat, event_kind: FaultEvent) -> bool {
        match event_kind {
            FaultEvent::CrashAgain => {
                let _outage = self.first().host.outage().await;
                let mut died = self.crash().await;
                for _ in 0..self.rng.within(1..=3) {
                    self.world.sleep(self.rng.up_to(Duration::from_micros(800))).await;
                    died |= self.crash().await;
                }
                return died;
            }
            FaultEvent::CrashAtWrite => {
                let _outage = self.first().host.outage().await;
                for _ in 0..self.rng.within(1..=4) {
                    // A guest that writes nothing any more does not keep the process from dying.
                    self.limited(WRITE_LIMIT, seat.guest.wrote()).await;
                }
                self.world.sleep(self.rng.up_to(Duration::from_micros(150))).await;
                return self.crash().await;
            }
            FaultEvent::PowerLoss => self.lose_power().await,
            FaultEvent::PowerLossAtStore => {
                // A job that stores nothing any more does not keep the power on.
                self.limited(WRITE_LIMIT, seat.journal.written_to()).await;
                self.world.sleep(self.rng.up_to(Duration::from_micros(120))).await;
                self.lose_power().await;
            }
            FaultEvent::Reconnect => {
                let _outage = self.first().host.outage().await;
                seat.host.reconnect().await;
            }
            FaultEvent::HalfOpen => seat.port.half_open(),
            FaultEvent::SlowReader => seat.port.stop_reading(),
            FaultEvent::LinkDown => seat.port.interrupt(),
            FaultEvent::TargetSilent(milliseconds) => return self.silence_target(seat, milliseconds).await,
            FaultEvent::StoreFull => self.fill_store(seat),
            FaultEvent::FilesFail => self.fail_files(seat),
            FaultEvent::PoolEmpty => return self.empty_pools(seat),
            FaultEvent::ClockJump => {
                let seconds = self.rng.below(2 * 86_400 + 1) as i64;
                self.world.step_wall_clock(if self.rng.chance(0.5) { seconds } else { -seconds });
            }
            FaultEvent::StoreFails => {
                self.trouble_store(seat, Faults { write_errors: 0.7, ..self.scenario.journal_faults })
            }
            FaultEvent::StoreSlow => self.trouble_store(seat, Faults { stuck: 0.7, ..self.scenario.journal_faults }),
            FaultEvent::PeerCrash => self.first().host.strike_peer(Outage::Death, self.scenario.downtime).await,
            FaultEvent::PeerPowerLoss => self.first().host.strike_peer(Outage::PowerLoss, self.scenario.downtime).await,
            FaultEvent::PeerMeddled => self.first().host.strike_peer(Outage::Meddling, self.scenario.downtime).await,
            FaultEvent::PeerUnheard => self.first().host.silence_and_strike_peer(self.scenario.downtime).await,
            FaultEvent::PeerTrouble => self.first().host.trouble_with_peer(),
            FaultEvent::WrongEpoch => seat.host.ask_under_wrong_epoch().await,
            FaultEvent::ArbiterTrouble => seat.host.trouble_with_arbiter(),
            FaultEvent::ArbiterLate => seat.host.delay_arbiter(),
            FaultEvent::PeerFilesFail => self.fail_peer_files(seat),
            FaultEvent::PeerStoreFull => self.fill_peer_store(seat),
            FaultEvent::StartWithout(part) => return self.start_without(seat, part).await,
            FaultEvent::Away(part) => return self.take_away(seat, part),
            FaultEvent::FlushLost(part) => return self.lose_flush(seat, part),
            FaultEvent::StartExchanged(part, exchange) => return self.start_exchanged(seat, part, exchange).await,
            FaultEvent::Machine(what) => return self.happen_to_machine(what).await,
            FaultEvent::ChangedBehind => return self.change_behind(seat).await,
            FaultEvent::Crash
            | FaultEvent::TargetLost
            | FaultEvent::Corruption
            | FaultEvent::Pause
            | FaultEvent::Cancel
            | FaultEvent::Bandwidth => return false,
        }
        true
    }

    /// What an operator does with a move.
    fn steer(&self, seat: &Seat, event_kind: FaultEvent) -> bool {
        let Some(control) = seat.host.control() else { return false };
        match event_kind {
            FaultEvent::Pause => {
                self.world.event(format_args!("pause"));
                control.pause();
                let (world, span) = (self.world.clone(), self.rng.up_to(Duration::from_millis(10)));
                self.world.spawn(async move {
                    world.sleep(span).await;
                    world.event(format_args!("resume"));
                    control.resume();
                });
                true
            }
            FaultEvent::Cancel => {
                seat.host.note_wish();
                let taken = control.cancel().is_ok();
                self.world.event(format_args!("cancel{}", if taken { "" } else { " comes too late" }));
                taken
            }
            _ => {
                let rate = self.rng.pick(&[None, Some(1 << 20), Some(50 << 20), Some(1 << 30)]);
                self.world.event(format_args!("bandwidth {rate:?}"));
                control.set_bandwidth(rate.map(Bytes));
                true
            }
        }
    }

    /// Only while the target is copied to: what is compared later may be believed.
    fn corrupt(&self, seat: &Seat) -> bool {
        let is_before = |phase| matches!(phase, Phase::Preparing | Phase::Copying);
        let Some(target) = seat.host.target() else { return false };
        let happens = seat.host.control().is_some_and(|control| is_before(control.snapshot().phase));
        if happens {
            seat.sides[target].corrupt(Bytes(self.rng.below(seat.size().0)));
        }
        happens
    }

    /// The disks of the journal and the progress map, and with them the daemon's files.
    fn fill_store(&self, seat: &Seat) {
        let (stores, world, host) = ([seat.journal.clone(), seat.map.clone()], self.world.clone(), seat.host.clone());
        stores.iter().for_each(|store| store.set_full(true));
        host.set_files_full(true);
        let span = self.rng.up_to(Duration::from_millis(30));
        self.world.spawn(async move {
            world.sleep(span).await;
            stores.iter().for_each(|store| store.set_full(false));
            host.set_files_full(false);
        });
    }

    /// The daemon's small files.
    fn fail_files(&self, seat: &Seat) {
        let (world, host) = (self.world.clone(), seat.host.clone());
        host.set_files_failing(0.5);
        let span = self.rng.up_to(Duration::from_millis(30));
        self.world.spawn(async move {
            world.sleep(span).await;
            host.set_files_failing(0.0);
        });
    }

    /// The other host's.
    fn fail_peer_files(&self, seat: &Seat) {
        let (world, host) = (self.world.clone(), seat.host.clone());
        host.set_peer_files_failing(0.5);
        let span = self.rng.up_to(Duration::from_millis(30));
        self.world.spawn(async move {
            world.sleep(span).await;
            host.set_peer_files_failing(0.0);
        });
    }

    /// The other host's, and the disk of its journal.
    fn fill_peer_store(&self, seat: &Seat) {
        let (world, host) = (self.world.clone(), seat.host.clone());
        host.set_peer_full(true);
        let span = self.rng.up_to(Duration::from_millis(30));
        self.world.spawn(async move {
            world.sleep(span).await;
            host.set_peer_full(false);
        });
    }

    /// Every buffer of the process that is free, or becomes it, is somebody else's for a while.
    fn empty_pools(&self, seat: &Seat) -> bool {
        let pools = seat.host.pools();
        if pools.is_empty() {
            return false;
        }
        let (world, end) = (self.world.clone(), self.world.now() + self.rng.up_to(Duration::from_millis(20)));
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
    fn trouble_store(&self, seat: &Seat, trouble: Faults) {
        let faults = self.scenario.journal_faults;
        let world = self.world.clone();
        let stores: Vec<_> = std::iter::once(seat.journal.clone()).chain(seat.host.group_disks()).collect();
        stores.iter().for_each(|store| store.set_faults(trouble));
        let span = self.rng.up_to(Duration::from_millis(300));
        self.world.spawn(async move {
            world.sleep(span).await;
            // The faults may have ended meanwhile.
            stores.iter().filter(|store| store.is_faulty()).for_each(|store| store.set_faults(faults));
        });
    }

    /// Only while it is a target: a disk that holds the volume alone and is lost is nobody's fault.
    fn lose_target(&self, seat: &Seat) -> bool {
        let Some(target) = seat.host.target() else { return false };
        seat.sides[target].set_lost(true);
        let (disk, world) = (seat.sides[target].clone(), self.world.clone());
        let span = self.rng.up_to(Duration::from_millis(10));
        self.world.spawn(async move {
            world.sleep(span).await;
            disk.set_lost(false);
        });
        true
    }

    /// Only while it is a target: from the commit on it is the guest's own disk that answers nothing.
    async fn silence_target(&self, seat: &Seat, milliseconds: u32) -> bool {
        let (Some(target), Some(control)) = (seat.host.target(), seat.host.control()) else { return false };
        if control.snapshot().phase.is_committed() {
            return false;
        }
        let span = Duration::from_millis(milliseconds.into());
        seat.sides[target].be_silent(span);
        let mut phases = seat.host.phases();
        // The host lives as long as the scenario does.
        let committed = async { _ = phases.wait_for(|phase| phase.is_some_and(Phase::is_committed)).await };
        if self.limited(span, committed).await.is_some() {
            seat.sides[target].end_silence();
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
    async fn within<T>(&self, limit: Duration, what: &str, seat: &Seat, work: impl Future<Output = T>) -> Option<T> {
        let value = self.limited(limit, work).await;
        if value.is_none() {
            let progress = seat.host.control().map(|control| control.snapshot());
            let what = format!("{what} after {limit:?}: {:?}, {progress:?}", seat.host.status());
            self.world.violate(Invariant::Converges, what);
        }
        value
    }

    async fn come_to_an_end(&self, seat: &Seat) -> Option<()> {
        let mut tries = 0;
        let mut moves = 0;
        while moves < self.scenario.moves {
            let status = self.within(self.job_limit(), "no end of the job", seat, seat.host.ended()).await?;
            if matches!(status, Status::Switched(_)) {
                moves += 1;
                if moves == self.scenario.moves {
                    break;
                }
                tries = 0;
            } else if self.scenario.expected.switches {
                let what = format!("the first try is {status:?}, expected that it moves the volume");
                self.world.violate(Invariant::AsTold, what);
                return None;
            } else if has_given_up(seat, &status) {
                // A strategy that need not converge has said so, and left the guest where it was.
                break;
            } else {
                // Whatever has become of the first try, nothing of it may be in the way of the next. A request that still
                // hangs may be why it failed.
                tries += 1;
                self.world.sleep(STUCK_MAX / TRIES_MAX).await;
                if self.scenario.setup.is_between_hosts && self.rng.chance(0.5) {
                    let forgotten = seat.host.forgotten_by_peer();
                    self.within(JOB_LIMIT, "something of the move is left", seat, forgotten).await?;
                }
                if tries > TRIES_MAX {
                    let what = format!("{tries} moves without faults did not succeed: {:?}", seat.host.status());
                    self.world.violate(Invariant::Converges, what);
                    return None;
                }
            }
            seat.host.move_again();
        }
        self.settle_machine().await?;
        seat.guest.let_end();
        let load = &self.scenario.load;
        let think = load.think * u32::try_from(load.requests / load.outstanding.max(1) + 1).unwrap_or(u32::MAX);
        let guest = async {
            seat.guest.finish().await;
            seat.guest.read_all().await;
            seat.guest.flush_at_last().await;
        };
        self.within(JOB_LIMIT + think, "the guest is not served", seat, guest).await
    }

    fn last_checks(&self, seat: &Seat) {
        let history = seat.guest.history();
        let holder = seat.host.holder();
        if !seat.host.has_layers(holder) {
            checks::flushed(&self.world, &seat.sides[holder], &history, true);
        }
        // A machine that was not to move is where it was.
        if self.scenario.moves > 0 || holder == 1 {
            seat.host.check_arrived();
        }
        let is_excused = self.scenario.only_first_fails && std::ptr::eq(seat, self.first());
        let wait_max = self.scenario.expected.wait_max.filter(|_| !is_excused);
        let expected = Expected { wait_max, ..self.scenario.expected };
        checks::as_told(&self.world, &expected, &seat.guest.report(), &seat.host.status());
    }
}

/// Whether a move that is seen in `seen` is in `phase`, or has been. From the quiescing on one phase may follow another so soon that
/// nobody sees both.
const fn is_at_or_past(seen: Phase, phase: Phase) -> bool {
    let is_short = matches!(phase, Phase::Quiescing | Phase::Committing | Phase::Committed | Phase::Switched);
    let comes_after =
        matches!(seen, Phase::Committing | Phase::InDoubt | Phase::Committed | Phase::Switched | Phase::Done);
    seen as u8 == phase as u8 || is_short && comes_after && seen as u8 > phase as u8
}

/// Whether a move has ended because it does not converge, where that is a good end.
fn has_given_up(seat: &Seat, status: &Status) -> bool {
    let options = &seat.options;
    let may = options.strategy.iterates() && options.on_no_converge != OnNoConverge::Mirror;
    may && matches!(status, Status::Failed(why) if why.contains("does not converge"))
}
