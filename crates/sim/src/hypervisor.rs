//! A machine and the programs that run it: a QEMU on each host, in a few words.
//!
//! ```text
//!   source:  running ─▶ sending ─▶ stopped ── complete ─▶ sent (never runs by itself)
//!               ▲          │          │          │
//!               └──────────┴──────────┴──────────┴─ the migration fails, or is given up
//!
//!   target:  waiting ─▶ loading ─▶ loaded ── run ─▶ running
//! ```
//!
//! In post-copy the source goes from completing to following, and the target runs while memory follows ([`postcopy`]).
//!
//! The guests of all volumes are the machine's: while it is stopped none of them asks for anything, and where it runs they are
//! connected. Its memory is a number that grows with every answer that a guest has got, and is what the migration carries. What a
//! QEMU does wrong it does once, at a moment from the seed: it does not start, it dies, it refuses what it was sent.

mod others;
mod outside;
mod postcopy;
mod seen;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::daemon::{Hypervisors, MemoryFlow};
use api::v1::VmMovePhase;
use migrate::stream::BoxTransport;
use nbd::Export;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};

use others::{Judge, Others};
use seen::Seen;

use crate::link::Link;
use crate::occurrence::Occurrence;
use crate::port::Port;
use crate::process::Process;
use crate::rng::Rng;
use crate::world::{Invariant, World};

/// So many pieces the memory has, and so long each takes at most.
const PIECES_MAX: u64 = 12;
const PIECE_SPAN_MAX: Duration = Duration::from_millis(4);
const PIECE_BYTES: usize = 1500;
/// What says that all of it was loaded.
const LOADED: u8 = b'K';
/// Of so many attempts one meets a QEMU that does something wrong.
const WRONG: f64 = 0.35;

/// Which host a machine is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Authority {
    /// The first.
    Here,
    /// The other one.
    There,
    /// Nobody knows yet.
    InDoubt,
}

/// Two QEMUs and what they run. Clones are the same.
#[derive(Clone)]
pub(crate) struct SimMachine {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    rng: Rng,
    state: Mutex<State>,
    changed: Notify,
    seats: Mutex<Vec<MachineSeat>>,
    /// Of one whose memory is copied from outside.
    memories: Mutex<outside::Memories>,
    /// What is between the hosts.
    link: Link,
    /// Who says which host it is at.
    judge: Mutex<Judge>,
    /// The phase that its move was seen in last, until that is over.
    phase: Mutex<Option<VmMovePhase>>,
}

/// A disk of the machine.
struct MachineSeat {
    port: Port,
    exports: [Option<(Process, Arc<Export>)>; 2],
    /// Whether the other host has durably taken it.
    is_held_there: Arc<dyn Fn() -> bool + Send + Sync>,
    answered: Arc<dyn Fn() -> u64 + Send + Sync>,
}

#[derive(Default)]
struct State {
    /// The host that its guests are connected to.
    at: usize,
    instances: [Option<Instance>; 2],
    last_pid: u32,
    others: Others,
    /// QEMUs do nothing wrong once no move is under way.
    calms: bool,
    /// QEMUs do nothing wrong any more.
    is_calm: bool,
    /// Another program has put a snapshot over a disk at this host, and nobody has seen it yet: the guest writes to it.
    snapshot_at: Option<usize>,
}

impl State {
    fn be_calm(&mut self) {
        self.is_calm = true;
        self.instances.iter_mut().flatten().for_each(|instance| instance.refuses = false);
    }
}

struct Instance {
    pid: u32,
    stage: Stage,
    /// Where it listens to daemons.
    monitor: PathBuf,
    /// Its operator has stopped its guest.
    is_paused: bool,
    /// What its guest did when it was stopped for the switch.
    state_at_switch: Option<&'static str>,
    /// Counts migrations of it, so that what is left of an earlier one does nothing.
    attempt: u32,
    /// Where the ways into it lead.
    inlets: Option<mpsc::UnboundedSender<BoxTransport>>,
    /// It refuses what it is sent.
    refuses: bool,
    /// Of one that has come: where its memory is.
    flow: MemoryFlow,
    /// How much of the memory has followed the guest from here.
    followed: u64,
}

impl Instance {
    fn new(pid: u32, stage: Stage) -> Self {
        let (flow, inlets, monitor) = (MemoryFlow::Complete, None, PathBuf::from("/run/vm.qmp"));
        Self {
            pid,
            stage,
            monitor,
            is_paused: false,
            state_at_switch: None,
            attempt: 0,
            inlets,
            refuses: false,
            flow,
            followed: 0,
        }
    }

    /// Whether its guest runs.
    const fn runs(&self) -> bool {
        matches!(self.stage, Stage::Running | Stage::Sending) && !self.is_paused
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Running,
    Sending,
    Stopped,
    Completing,
    Sent,
    /// Its guest is the target's, and a part of the memory is here.
    Following,
    /// The same, and the connection was lost.
    Cut,
    Waiting,
    Loaded(u64),
    Failed,
    Dead,
}

impl SimMachine {
    pub(crate) fn new(world: &World, link: &Link) -> Self {
        let first = Instance::new(1, Stage::Running);
        let state = State { instances: [Some(first), None], last_pid: 1, ..State::default() };
        let shared = Shared {
            world: world.clone(),
            rng: world.rng("machine"),
            state: Mutex::new(state),
            changed: Notify::new(),
            seats: Mutex::default(),
            memories: Mutex::default(),
            link: link.clone(),
            judge: Mutex::default(),
            phase: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// One more disk of it.
    pub(crate) fn add_disk(
        &self,
        port: &Port,
        is_held_there: impl Fn() -> bool + Send + Sync + 'static,
        answered: impl Fn() -> u64 + Send + Sync + 'static,
    ) {
        let (is_held_there, answered) = (Arc::new(is_held_there) as _, Arc::new(answered) as _);
        let seat = MachineSeat { port: port.clone(), exports: [None, None], is_held_there, answered };
        self.shared.seats.lock().push(seat);
    }

    /// What `own` is for the daemon of host number `own`.
    pub(crate) fn seen_from(&self, own: usize) -> Arc<dyn Hypervisors> {
        Arc::new(Seen { machine: self.clone(), own })
    }

    /// The daemon of a host offers the export of a disk. Gives whether the machine's guests are connected there.
    pub(crate) fn offered(&self, host: usize, disk: usize, (process, export): (&Process, &Arc<Export>)) -> bool {
        self.shared.seats.lock()[disk].exports[host] = Some((process.clone(), Arc::clone(export)));
        self.shared.state.lock().at == host
    }

    /// Its QEMUs do nothing wrong any more once its move is over, if one is under way.
    pub(crate) fn calm_down(&self) {
        self.send_others_away();
        let is_moving = self.is_moving();
        let mut state = self.shared.state.lock();
        state.calms = true;
        if !is_moving {
            state.be_calm();
        }
    }

    /// Its move is in `phase`; in none if it is over.
    pub(crate) fn note_phase(&self, phase: Option<VmMovePhase>) {
        let before = std::mem::replace(&mut *self.shared.phase.lock(), phase);
        if before != phase {
            let shown = phase.map_or_else(|| "over".to_owned(), |phase| phase.to_string());
            self.shared.world.event(format_args!("the machine's move: {shown}"));
            self.shared.changed.notify_waiters();
        }
        if phase.is_none() {
            let mut state = self.shared.state.lock();
            if state.calms {
                state.be_calm();
            }
        }
    }

    /// The phase that its move was seen in last.
    pub(crate) fn phase(&self) -> Option<VmMovePhase> {
        *self.shared.phase.lock()
    }

    /// Waits until its move is seen in `phase`.
    pub(crate) async fn seen_in(&self, phase: VmMovePhase) {
        loop {
            let changed = self.shared.changed.notified();
            if self.phase() == Some(phase) {
                return;
            }
            changed.await;
        }
    }

    /// Whether a move of it is under way, as far as was seen.
    pub(crate) fn is_moving(&self) -> bool {
        self.phase().is_some()
    }

    /// The story is over: what is offered leads back to the hosts.
    pub(crate) fn close(&self) {
        self.dismiss_judge();
        let seats = std::mem::take(&mut *self.shared.seats.lock());
        drop(seats);
    }

    /// What is wrong at the end: one QEMU has the machine, and its guest runs if its operator's last word was that.
    pub(crate) fn disorder(&self) -> Option<String> {
        let disobeys = self.disobeys();
        let state = self.shared.state.lock();
        let stages: Vec<_> = state.instances.iter().map(|instance| instance.as_ref().map(|it| it.stage)).collect();
        let alive = stages.iter().flatten().filter(|stage| **stage != Stage::Dead).count();
        // One that has come stopped has not begun to run.
        let has_it = |stage: &&Stage| matches!(stage, Stage::Running | Stage::Loaded(_));
        let is_whole = stages.iter().flatten().filter(has_it).count() == 1;
        let flow = state.instances[state.at].as_ref().map_or(MemoryFlow::Complete, |it| it.flow);
        let why = disobeys.unwrap_or("one alone has its guest and its memory");
        (alive != 1 || !is_whole || disobeys.is_some() || flow != MemoryFlow::Complete)
            .then(|| format!("the QEMUs are {stages:?}, and the guests at host {}: {why}", state.at))
    }

    /// Whether its guests are at the other host.
    pub(crate) fn has_moved(&self) -> bool {
        self.shared.state.lock().at == 1
    }

    fn memory(&self) -> u64 {
        self.shared.seats.lock().iter().map(|seat| (seat.answered)()).sum()
    }

    fn ports(&self) -> Vec<Port> {
        self.shared.seats.lock().iter().map(|seat| seat.port.clone()).collect()
    }

    fn is_held_there(&self) -> Vec<bool> {
        self.shared.seats.lock().iter().map(|seat| (seat.is_held_there)()).collect()
    }

    /// Sets the stage of the process `pid`, if it lives and `may` be.
    fn enter(&self, (host, pid): (usize, u32), stage: Stage, may: impl FnOnce(&Instance) -> bool) -> bool {
        let mut state = self.shared.state.lock();
        let instance = state.instances[host].as_mut();
        let instance = instance.filter(|it| it.pid == pid && it.stage != Stage::Dead && may(it));
        let Some(instance) = instance else { return false };
        instance.stage = stage;
        drop(state);
        self.shared.world.event(format_args!("the QEMU at host {host} is {stage:?}"));
        self.shared.changed.notify_waiters();
        true
    }

    fn stage(&self, (host, pid): (usize, u32)) -> Stage {
        let state = self.shared.state.lock();
        let instance = state.instances[host].as_ref().filter(|it| it.pid == pid);
        instance.map_or(Stage::Dead, |it| it.stage)
    }

    /// Whether it runs, and no later attempt has begun.
    fn is_idle(&self, (host, pid): (usize, u32), attempt: u32) -> bool {
        let state = self.shared.state.lock();
        let instance = state.instances[host].as_ref().filter(|it| it.pid == pid);
        instance.is_some_and(|it| it.stage == Stage::Running && it.attempt == attempt)
    }

    /// Whether its operator has stopped the guest of the process `pid`.
    fn is_paused(&self, (host, pid): (usize, u32)) -> bool {
        let state = self.shared.state.lock();
        state.instances[host].as_ref().is_some_and(|it| it.pid == pid && it.is_paused)
    }

    /// Waits until the process `pid` is in a stage that `is_it`.
    async fn until(&self, who: (usize, u32), is_it: impl Fn(Stage) -> bool) -> Stage {
        loop {
            let changed = self.shared.changed.notified();
            let stage = self.stage(who);
            if is_it(stage) {
                return stage;
            }
            changed.await;
        }
    }

    /// The guests run at `host`, by `why`.
    async fn let_run(&self, (host, pid): (usize, u32), why: &str) {
        let other_runs = {
            let state = self.shared.state.lock();
            state.instances[1 - host].as_ref().is_some_and(Instance::runs)
        };
        self.check_authority(host, why);
        if other_runs {
            self.shared.world.violate(Invariant::OneWriter, format!("the machine runs on both hosts: {why}"));
        }
        let held = self.is_held_there();
        if host == 0 && held.iter().any(|held| *held) {
            let what =
                format!("the machine goes on at the source, and the other host holds disks of it: {held:?} ({why})");
            self.shared.world.violate(Invariant::OneWriter, what);
        }
        if host == 1 && !held.iter().all(|held| *held) {
            let what = format!("the machine runs at the target, which does not hold all disks: {held:?} ({why})");
            self.shared.world.violate(Invariant::OneWriter, what);
        }
        if !self.enter((host, pid), Stage::Running, |_| true) {
            return;
        }
        {
            let mut state = self.shared.state.lock();
            state.at = host;
            state.instances[host].iter_mut().for_each(|it| it.is_paused = false);
        }
        let offers: Vec<_> =
            self.shared.seats.lock().iter().map(|seat| (seat.port.clone(), seat.exports[host].clone())).collect();
        for (port, offer) in offers {
            if host == 1 {
                drop(port.cut());
                if let Some((process, export)) = offer {
                    port.offer(&process, export);
                }
            }
            port.go_on();
        }
        self.wait_for_memory(host);
    }

    /// One that has been loaded runs, with what it had.
    async fn begin_to_run(&self, who: (usize, u32), why: &str) {
        if let Stage::Loaded(memory) = self.stage(who)
            && memory != self.memory()
        {
            let what = format!("the machine runs with memory {memory}, and had {}", self.memory());
            self.shared.world.violate(Invariant::StableRead, what);
        }
        self.compare_memories();
        self.shared.world.occur(Occurrence::Told("machine runs there"));
        self.let_run(who, why).await;
    }

    /// Gives a migration up. Gives whether QEMU lets the guest go on by itself: it has stopped one that ran, and was not done. A guest
    /// that was sent stays stopped.
    fn cancel(&self, who: (usize, u32)) -> bool {
        if self.enter(who, Stage::Running, |it| it.stage == Stage::Sending) {
            return false;
        }
        let was_unsent = matches!(self.stage(who), Stage::Stopped | Stage::Completing);
        let is_stopped = |it: &Instance| !matches!(it.stage, Stage::Running | Stage::Waiting | Stage::Loaded(_));
        if self.enter(who, Stage::Running, is_stopped)
            && let Some(instance) = self.shared.state.lock().instances[who.0].as_mut()
        {
            instance.is_paused = true;
            return was_unsent && instance.state_at_switch == Some("running");
        }
        false
    }

    /// What QEMU does with a guest that it has stopped for a migration which was given up before it was sent.
    fn stop_no_longer(&self, (host, pid): (usize, u32)) {
        let is_to_run = |it: &Instance| it.pid == pid && it.stage == Stage::Running && !it.is_paused;
        if self.shared.state.lock().instances[host].as_ref().is_some_and(is_to_run) {
            self.ports().iter().for_each(Port::go_on);
        }
    }

    /// Whether the guest of the process `pid` runs.
    fn guest_runs(&self, (host, pid): (usize, u32)) -> bool {
        let state = self.shared.state.lock();
        state.instances[host].as_ref().is_some_and(|it| it.pid == pid && it.runs())
    }

    /// What QEMU says of its guest.
    fn run_state(&self, who: (usize, u32)) -> &'static str {
        match self.stage(who) {
            Stage::Running | Stage::Sending if self.is_paused(who) => "paused",
            Stage::Running | Stage::Sending => "running",
            Stage::Stopped | Stage::Completing | Stage::Failed => "finish-migrate",
            Stage::Sent | Stage::Following | Stage::Cut => "postmigrate",
            Stage::Waiting => "inmigrate",
            Stage::Loaded(_) | Stage::Dead => "paused",
        }
    }

    /// Its guest is about to be stopped for the switch.
    fn note_switch(&self, (host, pid): (usize, u32)) {
        let mut state = self.shared.state.lock();
        if let Some(instance) = state.instances[host].as_mut().filter(|it| it.pid == pid) {
            instance.state_at_switch = Some(if instance.is_paused { "paused" } else { "running" });
        }
    }

    fn state_at_switch(&self, (host, pid): (usize, u32)) -> Option<&'static str> {
        let state = self.shared.state.lock();
        state.instances[host].as_ref().filter(|it| it.pid == pid)?.state_at_switch
    }

    fn kill(&self, who: (usize, u32), why: &str) {
        if self.quit(who, why) {
            self.wake_supervisor(who.0);
        }
    }

    /// It ends by itself, and no supervisor minds.
    fn quit(&self, (host, pid): (usize, u32), why: &str) -> bool {
        let was = self.stage((host, pid));
        if was == Stage::Running && self.shared.state.lock().at == host {
            let what = format!("the QEMU at host {host} is ended, and its guest runs there: {why}");
            self.shared.world.violate(Invariant::OneWriter, what);
        }
        self.check_memory_kept(host, was, why);
        self.check_not_needed(host, was, why);
        self.enter((host, pid), Stage::Dead, |_| true)
    }

    /// A guest is let run only where the machine is on record.
    fn check_authority(&self, host: usize, why: &str) {
        let authority = self.authority();
        if authority != [Authority::Here, Authority::There][host] {
            let what = format!("the machine runs at host {host}, and is on record as {authority:?}: {why}");
            self.shared.world.violate(Invariant::OneWriter, what);
        }
    }

    /// A QEMU is ended only where the machine is not. One that has nothing of it is nobody's loss.
    fn check_not_needed(&self, host: usize, was: Stage, why: &str) {
        let authority = self.authority();
        let has_nothing = matches!(was, Stage::Dead) || host == 1 && matches!(was, Stage::Waiting | Stage::Failed);
        if !has_nothing && authority != [Authority::There, Authority::Here][host] {
            let what =
                format!("the QEMU at host {host} is ended, and the machine is on record as {authority:?}: {why}");
            self.shared.world.violate(Invariant::OneWriter, what);
        }
    }

    /// What the source's QEMU does while it sends its machine. QEMU outlives the daemon.
    async fn send(self, who: (usize, u32), (attempt, postcopy): (u32, bool), mut stream: BoxTransport) {
        let is_mine = |it: &Instance| it.attempt == attempt;
        let outcome = async {
            for _ in 0..self.shared.rng.within(1..=PIECES_MAX) {
                stream.write_all(&[0x5a; PIECE_BYTES]).await?;
                self.shared.world.sleep(self.shared.rng.up_to(PIECE_SPAN_MAX)).await;
                if self.stage(who) != Stage::Sending {
                    return Err(std::io::Error::other("given up"));
                }
            }
            for port in self.ports() {
                port.stop().await;
            }
            let memory = self.memory();
            self.note_switch(who);
            if !self.enter(who, Stage::Stopped, |it| is_mine(it) && it.stage == Stage::Sending) {
                self.stop_no_longer(who);
                return Err(std::io::Error::other("given up"));
            }
            let next = self.until(who, |stage| stage != Stage::Stopped).await;
            if next != Stage::Completing {
                return Err(std::io::Error::other("given up"));
            }
            if postcopy {
                return self.send_before_memory(who, memory, &mut stream).await;
            }
            stream.write_all(&memory.to_le_bytes()).await?;
            stream.shutdown().await?;
            let mut answer = [0];
            stream.read_exact(&mut answer).await?;
            if answer[0] == LOADED { Ok(()) } else { Err(std::io::Error::other("refused")) }
        };
        match outcome.await {
            Ok(()) if postcopy => self.follow(who, stream).await,
            Ok(()) => _ = self.enter(who, Stage::Sent, |it| is_mine(it) && it.stage == Stage::Completing),
            Err(error) => {
                self.shared.world.event(format_args!("the migration ends: {error}"));
                let stages = [Stage::Stopped, Stage::Completing];
                // Its guest stays stopped, if it is, until somebody lets it go on.
                let has_run = |it: &Instance| it.stage == Stage::Sending;
                let goes_on = self.enter(who, Stage::Running, |it| is_mine(it) && has_run(it));
                let fails = !goes_on && self.enter(who, Stage::Failed, |it| is_mine(it) && stages.contains(&it.stage));
                let is_paused = self.is_paused(who);
                if !is_paused && (goes_on || !fails && self.is_idle(who, attempt)) {
                    self.ports().iter().for_each(Port::go_on);
                }
            }
        }
    }

    /// What the target's QEMU does with what comes.
    async fn load(self, who: (usize, u32), mut inlets: mpsc::UnboundedReceiver<BoxTransport>) {
        let Some(mut main) = inlets.recv().await else { return };
        let (world, beside) = (self.shared.world.clone(), self.shared.world.clone());
        world.spawn(async move {
            while let Some(mut inlet) = inlets.recv().await {
                beside.spawn(async move { _ = tokio::io::copy(&mut inlet, &mut tokio::io::sink()).await });
            }
        });
        let mut bytes = Vec::new();
        let read = main.read_to_end(&mut bytes).await;
        let whole = read.is_ok() && bytes.len() % PIECE_BYTES == 8;
        let refuses = {
            let state = self.shared.state.lock();
            state.instances[who.0].as_ref().is_none_or(|it| it.pid != who.1 || it.refuses)
        };
        if !whole || refuses {
            if refuses {
                self.shared.world.fault("qemu-refuses", format_args!("the target's QEMU refuses the devices' state"));
            }
            self.enter(who, Stage::Failed, |_| true);
            return;
        }
        let memory = u64::from_le_bytes(bytes[bytes.len() - 8..].try_into().expect("eight bytes"));
        if self.enter(who, Stage::Loaded(memory), |it| it.stage == Stage::Waiting) {
            // The source may be gone.
            let _ = main.write_all(&[LOADED]).await;
            let _ = main.shutdown().await;
        }
    }

    /// Another program may take a snapshot of a disk, as image backups do, just before the guest is stopped.
    fn may_take_snapshot(&self, host: usize) {
        if self.is_wrong() && self.shared.rng.chance(0.3) {
            self.shared.state.lock().snapshot_at = Some(host);
            self.shared.world.fault("snapshot-taken", format_args!("a snapshot lies over a disk at host {host}"));
        }
    }

    /// Whether there is one, which is committed back once it is seen.
    fn sees_snapshot(&self, host: usize) -> bool {
        self.shared.state.lock().snapshot_at.take_if(|at| *at == host).is_some()
    }

    fn is_wrong(&self) -> bool {
        let is_calm = self.shared.state.lock().is_calm;
        !is_calm && self.shared.rng.chance(WRONG)
    }
}
