//! What others do to the machine's QEMUs: its operator, whoever supervises them, another client of their monitors, and another VM of
//! its name. The daemon is told of none of it.
//!
//! | who | what |
//! |---|---|
//! | the operator | stops the guest, lets it go on, shuts it down and starts it again; starts it anew where its disks are once its QEMU has died |
//! | a script | lets a guest go on that QEMU has stopped after it was sent |
//! | a client | has the monitor for a while: nobody else gets through |
//! | a supervisor | starts a QEMU again that was killed |
//! | another VM | lives at the other host under the machine's name |
//!
//! QEMU decides what it takes. It refuses to go on while it sends (`finish-migrate`), and takes that word again once all is sent.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ::daemon::MemoryFlow;
use env::Moment;

use super::{Authority, Instance, SimMachine, Stage};
use crate::occurrence::Occurrence;
use crate::port::Port;
use crate::world::Invariant;

/// The sockets of a machine that has come are kept below this.
const NAMESAKE_FOLDER: &str = "/run/vm/vm";
/// How long it lives at most.
const NAMESAKE_SPAN: Duration = Duration::from_millis(400);
/// Its process.
const NAMESAKE_PID: u32 = 4_000_000;
/// How long somebody waits for what he wants to happen to, and how often he looks.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_micros(200);
const LOOK_CLOSELY: Duration = Duration::from_micros(20);
/// So soon at most an operator, a script or a supervisor acts.
const PROMPT: Duration = Duration::from_millis(3);
/// A QEMU of which the daemon has just asked what its guest does is as that was told for so long.
const ANSWER_HOLDS: Duration = Duration::from_millis(50);
/// The source's QEMU has ended so long after the commit: nobody can let its guest go on any more.
const ENDED_WITHIN: Duration = Duration::from_secs(5);
/// How long another client has the monitor.
const HELD_MS: [u64; 4] = [1, 100, 3000, 15_000];

/// What others have done, and who they are.
#[derive(Default)]
pub(super) struct Others {
    /// The guest is to be stopped, by the operator's last word.
    is_stopped: bool,
    /// Somebody else has the monitor of each host's QEMU until then.
    held_until: [Option<Moment>; 2],
    /// The source's QEMU is started again when it was killed.
    is_supervised: bool,
    /// Another VM of the machine's name lives at the other host.
    has_namesake: bool,
    /// When the daemon last asked what the guest does whose machine was sent.
    looked_at: Option<Moment>,
    /// Since when the other host has the machine.
    there_since: Option<Moment>,
}

/// Which host the machine is at, as far as is on record.
type AuthorityOf = Arc<dyn Fn() -> Authority + Send + Sync>;

/// Who says which host the machine is at.
#[derive(Default)]
pub(super) struct Judge(Option<AuthorityOf>);

impl SimMachine {
    /// Has `authority` say which host the machine is at.
    pub(crate) fn be_judged_by(&self, authority: impl Fn() -> Authority + Send + Sync + 'static) {
        self.shared.judge.lock().0 = Some(Arc::new(authority));
    }

    /// Nobody says so any more.
    pub(super) fn dismiss_judge(&self) {
        let judge = self.shared.judge.lock().0.take();
        drop(judge);
    }

    pub(super) fn authority(&self) -> Authority {
        let judge = self.shared.judge.lock().0.clone();
        judge.map_or(Authority::Here, |authority| authority())
    }

    /// A supervisor starts the source's QEMU again when it was killed.
    pub(crate) fn be_supervised(&self) {
        self.shared.state.lock().others.is_supervised = true;
    }

    /// Another VM of its name has come to the other host before, was released and forgotten there, and runs.
    pub(crate) fn have_namesake(&self) {
        self.shared.state.lock().others.has_namesake = true;
        let (machine, span) = (self.clone(), self.shared.rng.up_to(NAMESAKE_SPAN));
        self.shared.world.spawn(async move {
            machine.shared.world.sleep(span).await;
            machine.shared.state.lock().others.has_namesake = false;
        });
    }

    /// Others do nothing more, and the other VM is shut down.
    pub(super) fn send_others_away(&self) {
        let others = &mut self.shared.state.lock().others;
        (others.has_namesake, others.held_until) = (false, [None, None]);
    }

    /// The daemon asks a QEMU what its guest does.
    pub(super) fn note_look(&self, who: (usize, u32)) {
        if self.stage(who) == Stage::Sent {
            let now = self.shared.world.now();
            self.shared.state.lock().others.looked_at = Some(now);
        }
    }

    /// Whether somebody else has the monitor of the QEMU at `host`.
    pub(super) fn is_monitor_held(&self, host: usize) -> bool {
        let now = self.shared.world.now();
        self.shared.state.lock().others.held_until[host].is_some_and(|until| now < until)
    }

    /// Another client has the monitor of one of the QEMUs for a while.
    pub(crate) fn hold_monitor(&self) -> bool {
        let rng = &self.shared.rng;
        let host = usize::from(rng.chance(0.3));
        let until = self.shared.world.now() + rng.up_to(Duration::from_millis(rng.pick(&HELD_MS)));
        self.shared.state.lock().others.held_until[host] = Some(until);
        self.shared
            .world
            .fault("monitor-held", format_args!("another client has the monitor of the QEMU at host {host}"));
        true
    }

    /// The operator stops the guest, if it runs.
    pub(crate) fn stop_guest(&self) -> bool {
        {
            let mut state = self.shared.state.lock();
            let at = state.at;
            let Some(instance) = state.instances[at].as_mut().filter(|it| it.runs()) else { return false };
            instance.is_paused = true;
            state.others.is_stopped = true;
        }
        self.shared.world.fault("guest-stopped", format_args!("the operator stops the guest"));
        for port in self.ports() {
            self.shared.world.spawn(async move { port.stop().await });
        }
        true
    }

    /// The operator lets a guest go on that he has stopped.
    pub(crate) async fn resume_guest(&self) -> bool {
        let (at, word) = {
            let state = self.shared.state.lock();
            (state.at, state.others.is_stopped)
        };
        if !word {
            return false;
        }
        let resumed = {
            let mut state = self.shared.state.lock();
            let paused = |it: &&mut Instance| it.is_paused && matches!(it.stage, Stage::Running | Stage::Sending);
            state.instances[at].as_mut().filter(paused).map(|it| {
                it.is_paused = false;
                it.flow
            })
        };
        match resumed {
            Some(flow) => {
                self.shared.state.lock().others.is_stopped = false;
                self.shared.world.fault("guest-resumed", format_args!("the operator lets the guest go on"));
                if flow != MemoryFlow::Cut {
                    self.ports().iter().for_each(Port::go_on);
                }
                true
            }
            None => self.resume_arrived().await,
        }
    }

    /// The same of one that has come, and was stopped when it came.
    async fn resume_arrived(&self) -> bool {
        let Some(pid) = self.loaded_there().filter(|_| self.authority() == Authority::There) else { return false };
        self.shared.state.lock().others.is_stopped = false;
        self.shared.world.fault("guest-resumed", format_args!("the operator lets the guest go on"));
        self.begin_to_run((1, pid), "its operator").await;
        true
    }

    fn loaded_there(&self) -> Option<u32> {
        let state = self.shared.state.lock();
        state.instances[1].as_ref().filter(|it| matches!(it.stage, Stage::Loaded(_))).map(|it| it.pid)
    }

    /// A script lets the source's guest go on, which QEMU has stopped and sent. What is said after the daemon's last look before the
    /// commit comes too late, and so does what is said while the source's QEMU is being ended.
    pub(crate) async fn resume_sent(&self) -> bool {
        let until = self.shared.world.now() + PATIENCE + ENDED_WITHIN;
        let prompt = self.shared.world.now() + self.shared.rng.up_to(PROMPT);
        while self.shared.world.now() < until {
            if self.shared.world.now() >= prompt
                && self.is_sent()
                && let Some(pid) = self.may_resume_sent()
            {
                self.shared.world.fault("sent-resumed", format_args!("a script lets the source's guest go on"));
                self.let_run((0, pid), "a script says so").await;
                return true;
            }
            self.shared.world.sleep(LOOK).await;
        }
        false
    }

    fn is_sent(&self) -> bool {
        let state = self.shared.state.lock();
        state.instances[0].as_ref().is_some_and(|it| it.stage == Stage::Sent)
    }

    /// The process of the source's QEMU that takes the word now, and against which the daemon could do something.
    fn may_resume_sent(&self) -> Option<u32> {
        let (now, authority) = (self.shared.world.now(), self.authority());
        let mut state = self.shared.state.lock();
        match authority {
            Authority::There => _ = state.others.there_since.get_or_insert(now),
            Authority::Here | Authority::InDoubt => state.others.there_since = None,
        }
        let others = &state.others;
        let is_late = others.looked_at.is_some_and(|looked| now.since(looked) < ANSWER_HOLDS);
        let may = match authority {
            Authority::Here => !is_late && !others.is_stopped,
            Authority::InDoubt => false,
            Authority::There => others.there_since.is_some_and(|since| now.since(since) > ENDED_WITHIN),
        };
        state.instances[0].as_ref().filter(|it| may && it.stage == Stage::Sent).map(|it| it.pid)
    }

    /// The operator shuts the guest down and starts it again: another process behind the same monitor.
    pub(crate) async fn restart_qemu(&self) -> bool {
        let (host, pid) = {
            let state = self.shared.state.lock();
            let Some(instance) = state.instances[state.at].as_ref().filter(|it| it.runs()) else { return false };
            (state.at, instance.pid)
        };
        let ports = self.ports();
        let stopped = async {
            for port in &ports {
                port.stop().await;
            }
        };
        let is_stopped = tokio::select! {
            biased;
            () = stopped => true,
            () = self.shared.world.sleep(PATIENCE) => false,
        };
        let pid = {
            let mut state = self.shared.state.lock();
            let runs = state.instances[host].as_ref().is_some_and(|it| it.pid == pid && it.runs());
            if !is_stopped || !runs {
                drop(state);
                self.go_on_unless_stopped(host);
                return false;
            }
            state.last_pid += 1;
            let pid = state.last_pid;
            state.instances[host] = Some(Instance::new(pid, Stage::Running));
            pid
        };
        self.shared.changed.notify_waiters();
        self.shared
            .world
            .fault("qemu-restarted", format_args!("the operator starts the guest again, as process {pid}"));
        self.go_on_unless_stopped(host);
        true
    }

    fn go_on_unless_stopped(&self, host: usize) {
        let runs = {
            let state = self.shared.state.lock();
            state.at == host && state.instances[host].as_ref().is_some_and(Instance::runs)
        };
        if runs {
            self.ports().iter().for_each(Port::go_on);
        }
    }

    /// The source's QEMU is killed, and its operator starts it again once the machine is this host's for certain.
    pub(crate) async fn kill_source(&self) -> bool {
        let pid = {
            let state = self.shared.state.lock();
            let Some(instance) = state.instances[0].as_ref().filter(|it| it.stage != Stage::Dead) else { return false };
            if state.at != 0 {
                return false;
            }
            instance.pid
        };
        for port in self.ports() {
            // What it has asked for is answered: nothing else is simulated.
            tokio::select! {
                biased;
                () = port.stop() => {}
                () = self.shared.world.sleep(PATIENCE) => {
                    self.go_on_unless_stopped(0);
                    return false;
                }
            }
        }
        if self.authority() != Authority::Here || !self.enter((0, pid), Stage::Dead, |_| true) {
            self.go_on_unless_stopped(0);
            return false;
        }
        self.shared.world.fault("qemu-killed", format_args!("the source's QEMU is killed"));
        let machine = self.clone();
        self.shared.world.spawn(async move { machine.revive_source().await });
        true
    }

    /// Its operator starts the source's QEMU again once nothing is under way with it.
    async fn revive_source(&self) {
        loop {
            self.shared.world.sleep(PROMPT).await;
            let is_started = self.shared.state.lock().instances[0].as_ref().is_some_and(|it| it.stage != Stage::Dead);
            if self.authority() == Authority::There || is_started {
                return;
            }
            // The other host's may live on for a while that has loaded what does not count.
            if !self.is_moving() && self.is_dead() && self.authority() == Authority::Here {
                return self.start_anew().await;
            }
        }
    }

    /// The target's QEMU is killed after it has loaded everything and before its guest runs; in half of the cases after the commit.
    pub(crate) async fn kill_target(&self) -> bool {
        let (until, is_late) = (self.shared.world.now() + PATIENCE, self.shared.rng.chance(0.5));
        let is_awaited = || self.loaded_there().is_none() || is_late && self.authority() != Authority::There;
        while is_awaited() && self.shared.world.now() < until {
            self.shared.world.sleep(LOOK_CLOSELY).await;
        }
        if !is_late {
            self.shared.world.sleep(self.shared.rng.up_to(PROMPT)).await;
        }
        let Some(pid) = self.loaded_there() else { return false };
        let is_killed = self.enter((1, pid), Stage::Dead, |it| matches!(it.stage, Stage::Loaded(_)));
        if is_killed {
            self.shared
                .world
                .fault("qemu-killed", format_args!("the target's QEMU is killed, with all that it has loaded"));
        }
        is_killed
    }

    /// Whether no QEMU of it lives.
    pub(crate) fn is_dead(&self) -> bool {
        let state = self.shared.state.lock();
        state.instances.iter().flatten().all(|it| it.stage == Stage::Dead)
    }

    /// Its operator starts it as after a crash, on the disks of the host that has them.
    pub(crate) async fn start_anew(&self) {
        let host = match self.authority() {
            Authority::Here => 0,
            Authority::There => 1,
            Authority::InDoubt => return,
        };
        self.shared.state.lock().others.is_stopped = false;
        self.shared.world.occur(Occurrence::Told("started as after a crash"));
        self.boot((host, Stage::Running), "its operator starts it anew").await;
    }

    async fn boot(&self, (host, stage): (usize, Stage), why: &str) {
        let pid = {
            let mut state = self.shared.state.lock();
            state.last_pid += 1;
            let pid = state.last_pid;
            // It is not there before it runs.
            state.instances[host] = Some(Instance::new(pid, Stage::Failed));
            pid
        };
        self.shared.changed.notify_waiters();
        if stage == Stage::Running {
            self.let_run((host, pid), why).await;
        }
    }

    /// A supervisor sees that the QEMU at `host` was killed. Where every disk stays where it is, nothing keeps it from starting again.
    pub(super) fn wake_supervisor(&self, host: usize) {
        let is_supervised = self.shared.state.lock().others.is_supervised;
        if !is_supervised || host != 0 {
            return;
        }
        let (machine, span) = (self.clone(), self.shared.rng.up_to(PROMPT));
        self.shared.world.spawn(async move {
            machine.shared.world.sleep(span).await;
            machine.shared.world.fault("qemu-supervised", format_args!("a supervisor starts the source's QEMU again"));
            machine.boot((0, Stage::Running), "its supervisor starts it again").await;
        });
    }

    /// The other VM of its name that lives at `host`, if `path` is its.
    pub(super) fn namesake(&self, host: usize, path: &Path) -> Option<u32> {
        let has_one = host == 1 && self.shared.state.lock().others.has_namesake;
        (has_one && path.starts_with(NAMESAKE_FOLDER)).then_some(NAMESAKE_PID)
    }

    /// Whether `pid` is the other VM of its name.
    pub(super) const fn is_namesake(pid: u32) -> bool {
        pid == NAMESAKE_PID
    }

    /// Somebody takes what is in `folder` away.
    pub(super) fn check_folder(&self, host: usize, folder: &Path, why: &str) {
        if self.namesake(host, folder).is_some() {
            let what = format!("the sockets of another VM of that name are taken away at host {host}: {why}");
            self.shared.world.violate(Invariant::OneWriter, what);
        }
    }

    /// What is wrong with its guest, by the last word of its operator.
    pub(super) fn disobeys(&self) -> Option<&'static str> {
        let state = self.shared.state.lock();
        let runs = state.instances.iter().flatten().any(Instance::runs);
        match (state.others.is_stopped, runs) {
            (true, true) => Some("its operator has stopped it, and it runs"),
            (false, false) => Some("its operator has not stopped it, and it does not run"),
            _ => None,
        }
    }
}
