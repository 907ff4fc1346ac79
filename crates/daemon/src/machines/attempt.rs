//! One move of a machine to another host: the order of things, and what is done when one of them fails.

mod conclusion;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::v1::{Error, ErrorCode, Job, JobState, MemoryEngine, VmMemory, VmMove, VmMovePhase, VmMoveRequest};
use block::Device;
use env::Moment;
use futures::future::{Either, select, try_join_all};
use migrate::stream::BoxTransport;
use parking_lot::Mutex;
use tokio::sync::watch;
use uuid::Uuid;
use vm::machine::{MachineFacts, MigrationOptions, MigrationStatus, TargetDomain};

use super::Machine;
use super::carrying::Lost;
use super::channel::{Answer, Ask};
use super::departing_caches::DepartingCache;
use super::document::OutgoingMachine;
use super::ending::{millis, no_answer};
use super::hooks::{HookInput, HookPhase};
use super::memory_rates::{self, MemoryRates};
use super::outgoing::{Departure, call};
use super::parallel;
use crate::audit::unix_ms;
use crate::config::Config;
use crate::daemon::{Daemon, show_job};
use crate::hosts::HostName;
use crate::hypervisor::{Convergence, Outlet, of_memory};
use crate::jobs::{Committed, JobHandle, MachineMember, Outcome, machine_member};
use crate::problem::Result;
use crate::volume::Volume;

/// For how long QEMU may stop the guest for the rest of the memory, if nothing is said.
const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);
/// How long the disks may take from when the machine is stopped to when all are held, before it goes on here.
pub(super) const HOLD_LIMIT: Duration = Duration::from_secs(10);
/// How long the rest of the memory may take.
const SWITCH_LIMIT: Duration = Duration::from_secs(30);
/// How long the target's QEMU may take to start.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);
/// QEMU's own limit of the bandwidth is none of ours.
const UNLIMITED_BYTES: u64 = 1 << 40;
/// How many connections carry the memory if nothing is said, one a processor.
const CHANNELS_MAX: u8 = 4;
/// Since this version of QEMU. An older one ends, or loses what its guest writes to its memory, if the other host is lost while
/// the state of the devices is sent (tried with 7.2).
const CHANNELS_SINCE: (u64, u64) = (8, 1);

/// A disk and its move.
pub(super) struct MovingDisk {
    pub(super) volume: Arc<Volume>,
    pub(super) job: Arc<JobHandle>,
}

/// A move under way.
pub(crate) struct MachineMove {
    pub(super) id: Uuid,
    pub(super) name: String,
    host: HostName,
    pub(super) departure: Departure,
    pub(super) request: VmMoveRequest,
    /// What is on record of it.
    outgoing: OutgoingMachine,
    record: Uuid,
    pub(super) disks: Vec<MovingDisk>,
    /// The caches of those that stay where they are.
    pub(super) caches: Vec<DepartingCache>,
    started: Moment,
    started_unix_ms: u64,
    state: Mutex<State>,
    cancelled: watch::Sender<bool>,
    over: watch::Sender<bool>,
    /// The connection to the other daemon that everything is asked over.
    channel: tokio::sync::Mutex<BoxTransport>,
    /// A connection of QEMU's migration has failed.
    pub(super) lost: Arc<Lost>,
    /// What the memory may take of the network.
    pub(super) rates: MemoryRates,
    /// All of the memory was sent.
    pub(super) is_sent: AtomicBool,
    is_committed: AtomicBool,
    /// The commit was asked for: until it is settled the guest runs nowhere.
    is_asked: AtomicBool,
    /// Somebody has let the guest run here after the last look before the commit.
    pub(super) ran_again: AtomicBool,
    /// Whether the memory's connection may close: in post-copy not before the commit.
    pub(super) may_close: watch::Sender<bool>,
}

struct State {
    phase: VmMovePhase,
    memory: Option<VmMemory>,
    /// When QEMU has stopped the guest.
    stopped: Option<Moment>,
    /// When QEMU began to send the memory, and how long all of it took.
    sending: Option<Moment>,
    memory_span: Option<Duration>,
    downtime: Option<Duration>,
    /// How long the switchover has waited for caches.
    cache_wait: Option<Duration>,
    error: Option<Error>,
    /// Why nobody knows whether the move counts.
    doubt: Option<Error>,
    outcome: JobState,
}

impl MachineMove {
    pub(super) fn new(
        daemon: &Daemon,
        machine: &Machine,
        request: &VmMoveRequest,
        (departure, channel, outgoing): (Departure, BoxTransport, OutgoingMachine),
        (record, disks, caches): (Uuid, Vec<MovingDisk>, Vec<DepartingCache>),
    ) -> Arc<Self> {
        let state = State {
            phase: VmMovePhase::Disks,
            memory: None,
            stopped: None,
            sending: None,
            memory_span: None,
            downtime: None,
            cache_wait: None,
            error: None,
            doubt: None,
            outcome: JobState::Running,
        };
        Arc::new(Self {
            id: departure.arrival.id,
            name: machine.name.clone(),
            host: departure.host.clone(),
            departure,
            outgoing,
            request: request.clone(),
            record,
            disks,
            caches,
            started: daemon.env.now(),
            started_unix_ms: unix_ms(daemon.env.wall_clock()),
            state: Mutex::new(state),
            cancelled: watch::Sender::new(false),
            over: watch::Sender::new(false),
            channel: channel.into(),
            lost: Arc::default(),
            rates: MemoryRates::new(&daemon.env),
            is_sent: AtomicBool::new(false),
            is_committed: AtomicBool::new(false),
            is_asked: AtomicBool::new(false),
            ran_again: AtomicBool::new(false),
            may_close: watch::Sender::new(!request.postcopy),
        })
    }

    /// How the API shows it.
    pub(crate) fn show(&self, daemon: &Daemon) -> VmMove {
        let state = self.state.lock();
        let job = |disk: &MovingDisk| show_job(&disk.volume).unwrap_or_else(|| disk.job.show());
        let disks: Vec<Job> = self.disks.iter().map(job).collect();
        let forecast = self.departure.forecast.of(&disks);
        VmMove {
            id: self.id.to_string(),
            vm: self.name.clone(),
            to: self.host.to_string(),
            state: state.outcome,
            phase: state.phase,
            started_unix_ms: self.started_unix_ms,
            elapsed_ms: millis(daemon.env.now().since(self.started)),
            forecast_seconds: forecast.map(|forecast| forecast.seconds),
            forecast_downtime_ms: forecast.map(|forecast| forecast.downtime.as_secs_f64() * 1e3),
            memory: state.memory,
            memory_bytes_per_second: self.memory_rate(&state),
            memory_rates: self.rates.shown(),
            connections: Some(match self.is_parallel() {
                true => parallel::streams(&self.request, &daemon.config),
                false => connections(&self.request, &self.departure.arrival.facts, &daemon.config),
            }),
            memory_engine: Some(if self.is_parallel() { MemoryEngine::Parallel } else { MemoryEngine::Qemu }),
            not_parallel: self.departure.not_parallel.clone(),
            disks,
            caches: self.show_caches(),
            cache_wait_ms: state.cache_wait.map(millis),
            downtime_ms: state.downtime.map(|downtime| downtime.as_secs_f64() * 1e3),
            error: state.error.clone(),
        }
    }

    /// To whom it goes.
    pub(super) const fn host(&self) -> &HostName {
        &self.host
    }

    /// How much of the memory was sent, in bytes.
    pub(super) fn memory_sent(&self) -> u64 {
        self.state.lock().memory.map_or(0, |memory| memory.bytes_sent)
    }

    /// How much of the memory is left, in bytes, and how old the move is.
    pub(super) fn memory_left(&self, daemon: &Daemon) -> Option<(u64, Duration)> {
        let left = self.state.lock().memory?.bytes_left;
        Some((left, daemon.env.now().since(self.started)))
    }

    /// What the guest has written to both sides of its disks, in bytes.
    pub(super) fn bytes_mirrored(&self) -> u64 {
        let progress = self.disks.iter().filter_map(|disk| disk.job.show().progress);
        progress.map(|progress| progress.bytes_mirrored).sum()
    }

    /// How fast all of the memory went, if nothing but the hosts and the network has limited it.
    fn memory_rate(&self, state: &State) -> Option<u64> {
        let is_limited =
            self.request.bandwidth.is_some() || self.rates.shown().is_some_and(|rates| rates.limit.is_some());
        let seconds = state.memory_span.filter(|_| !is_limited)?.as_secs_f64();
        Some((state.memory?.bytes_sent as f64 / seconds.max(1e-3)) as u64)
    }

    /// Undoes it.
    ///
    /// # Errors
    /// It is too late.
    pub(crate) fn cancel(&self) -> Result<()> {
        if let Some(doubt) = self.doubt() {
            return Err(doubt);
        }
        if self.is_committed.load(Ordering::Acquire) {
            let message = format!("{} is at {} already", self.name, self.host);
            return Err(Error::new(ErrorCode::WrongState, message).with_hint("move it back from there"));
        }
        self.cancelled.send_replace(true);
        Ok(())
    }

    /// Waits until it is over.
    pub(crate) async fn wait(&self) {
        // The sender lives as long as this.
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// Does it, to its end.
    pub(super) async fn run(self: Arc<Self>, daemon: Arc<Daemon>, machine: Arc<Machine>) {
        let Some(member) = daemon.machine_in_group(self.record, &self.name) else {
            // It was made just before, and is of this machine until that leaves it.
            tracing::error!(vm = self.name, group = %self.record, "the group of a VM's move is missing");
            self.over.send_replace(true);
            return;
        };
        let outcome = match Box::pin(self.reach_commit(&daemon, &member)).await {
            Ok(proof) => Ok(proof),
            Err(error) => match self.settle(&daemon, &member).await {
                Outcome::Committed(proof) => Ok(proof),
                Outcome::NotCommitted(proof) => Err((error, proof)),
            },
        };
        match outcome {
            Ok(proof) => Box::pin(self.finish(&daemon, &machine, &proof)).await,
            Err((error, proof)) => Box::pin(self.undo(&daemon, &machine, error, &proof)).await,
        }
        daemon.leave_group_as(self.record, &machine_member(&self.name));
        self.over.send_replace(true);
    }

    fn enter(&self, phase: VmMovePhase) {
        tracing::info!(vm = self.name, host = %self.host, %phase, "a VM moves");
        self.state.lock().phase = phase;
    }

    /// Everything up to the commit, which counts when this ends well. If it does not, the record says whether it counts.
    async fn reach_commit(self: &Arc<Self>, daemon: &Arc<Daemon>, member: &MachineMember) -> Result<Committed> {
        let disks = Box::pin(self.unless_stopped(daemon, self.disks_and_qemu(daemon, member)));
        let target = disks.await?;
        self.begin_caches(daemon);
        Box::pin(self.unless_stopped(daemon, self.await_caches(daemon))).await?;
        self.enter(VmMovePhase::Memory);
        let mut parallel = Box::pin(self.unless_stopped(daemon, self.precopy(daemon))).await?;
        let outlet = self.unless_stopped(daemon, self.begin_memory(daemon, target.as_ref())).await?;
        let carrying = self.carry_memory(daemon, outlet);
        let switched = async {
            match &mut parallel {
                Some(precopy) => Box::pin(self.stop_and_copy(daemon, precopy)).await?,
                None => self.converge(daemon).await?,
            }
            // The guest stands still, and the migration can be cancelled yet.
            self.require_straight(daemon).await?;
            self.enter(VmMovePhase::Switching);
            self.complete_memory(daemon).await?;
            self.copy_caches_held().await;
            self.flush_layers(daemon).await?;
            let held = env::timeout(&*daemon.env, HOLD_LIMIT, member.hold()).await;
            held.ok_or_else(|| {
                Error::new(ErrorCode::MoveFailed, format!("the disks of {} could not be held in time", self.name))
                    .with_hint("see what their moves say, and move it again")
            })?;
            self.seal_caches().await?;
            if let Some(precopy) = &mut parallel {
                precopy.verify_clean().map_err(|error| of_memory(&error))?;
            }
            // Whoever has died there since is missed by nobody yet. The disks are held meanwhile.
            let runs = Some(self.ran());
            self.ask_within(daemon, HOLD_LIMIT, Ask::Loaded { id: self.id, runs }).await?;
            if self.request.postcopy {
                return Ok(());
            }
            // The disks are held: what its guest would be answered from here on is lost with this QEMU.
            self.departure.hypervisor.verify_stopped().await
        };
        let switched = async {
            let lost = select(Box::pin(carrying), Box::pin(self.silent(daemon)));
            let beside = select(lost, Box::pin(memory_rates::keep(daemon, self)));
            match select(Box::pin(switched), beside).await {
                Either::Left((outcome, _)) => outcome,
                Either::Right((Either::Left((lost, _)), _)) => Err(lost.factor_first().0),
                Either::Right((Either::Right((never, _)), _)) => match never {},
            }
        };
        Box::pin(self.unless_stopped(daemon, switched)).await?;
        self.commit(daemon, member).await
    }

    /// Has the source's QEMU begin, and the socket through which both are joined.
    async fn begin_memory(&self, daemon: &Arc<Daemon>, target: Option<&TargetDomain>) -> Result<Box<dyn Outlet>> {
        let channels = self.channels(daemon);
        let options = MigrationOptions {
            channels,
            bandwidth_bytes_max: self.request.bandwidth.unwrap_or(UNLIMITED_BYTES),
            downtime_limit: self.downtime_limit(),
            auto_converge: self.request.auto_converge,
            postcopy: self.request.postcopy,
            ignores_shared: self.is_parallel(),
        };
        let path = daemon.migration_place(&self.name);
        self.begin_sending(daemon);
        self.departure.hypervisor.begin_outgoing(&options, (&path, target)).await
    }

    /// The memory begins to be sent, if it has not before.
    pub(super) fn begin_sending(&self, daemon: &Daemon) {
        self.state.lock().sending.get_or_insert(daemon.env.now());
    }

    pub(super) fn channels(&self, daemon: &Daemon) -> u8 {
        if self.departure.arrival.domain.is_some() || self.is_parallel() {
            return 0;
        }
        match connections(&self.request, &self.departure.arrival.facts, &daemon.config) {
            0 | 1 => 0,
            channels => u8::try_from(channels).unwrap_or(u8::MAX),
        }
    }

    /// Waits until QEMU has stopped the guest, because what is left of its memory is little.
    pub(super) async fn converge(&self, daemon: &Arc<Daemon>) -> Result<()> {
        let convergence = Convergence {
            downtime_limit: self.downtime_limit(),
            // Also one that does not run: somebody may let it run meanwhile.
            stops_guest: self.channels(daemon) == 0,
            postcopy: self.departure.arrival.runs && self.request.postcopy,
            without_memory: self.is_parallel(),
        };
        let stopped = || {
            self.rates.lift();
            let is_first = {
                let mut state = self.state.lock();
                let is_first = state.stopped.is_none();
                state.stopped.get_or_insert(daemon.env.now());
                is_first
            };
            if is_first {
                self.note_stopped(daemon);
                daemon.tell_hook_beside(HookPhase::Switchover, self.told(daemon));
            }
        };
        self.departure.hypervisor.converge(convergence, &stopped, &|status| self.note_memory(status)).await
    }

    /// Has it on record that the guest is stopped for the switch, and what it did before.
    fn note_stopped(&self, daemon: &Daemon) {
        let ran = self.ran();
        let stored = daemon.machine(&self.name).and_then(|machine| {
            daemon.update_machine(&machine, |document| {
                document.outgoing.iter_mut().for_each(|outgoing| (outgoing.ran, outgoing.stopped) = (ran, Some(true)));
            })
        });
        if let Err(error) = stored {
            // The state of its QEMU says it, too, as long as that lives.
            tracing::warn!(vm = self.name, %error, "that a guest is stopped for the switch could not be stored");
        }
    }

    /// Whether the guest ran when it was stopped for the switch; before that, when the move was asked for.
    fn ran(&self) -> bool {
        let at_switch = self.departure.hypervisor.state_at_switch();
        at_switch.map_or(self.departure.arrival.runs, |state| runs_in(&state))
    }

    fn told(&self, daemon: &Daemon) -> HookInput {
        daemon.hook_at_source(&self.departure.arrival, self.host.as_str())
    }

    pub(super) fn downtime_limit(&self) -> Duration {
        downtime_limit(&self.request)
    }

    pub(super) fn doubt(&self) -> Option<Error> {
        self.state.lock().doubt.clone()
    }

    pub(super) fn set_doubt(&self, doubt: Option<Error>) {
        self.state.lock().doubt = doubt;
    }

    pub(super) fn note_cache_wait(&self, waited: Duration) {
        self.state.lock().cache_wait = Some(waited);
    }

    /// Whether the other host holds the disks.
    pub(super) fn is_committed(&self) -> bool {
        self.is_committed.load(Ordering::Acquire)
    }

    pub(super) fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Whether the guest was stopped for the switch.
    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stopped.is_some()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn note_pages(&self, memory: VmMemory) {
        self.state.lock().memory = Some(memory);
    }

    pub(super) fn note_memory(&self, status: &MigrationStatus) {
        if self.is_parallel() {
            // QEMU's stream carries none of it.
            return;
        }
        self.state.lock().memory = Some(VmMemory {
            bytes_total: status.bytes_total,
            bytes_sent: status.bytes_transferred,
            bytes_left: status.bytes_remaining,
            dirty_bytes_per_second: status.dirty_bytes_per_second,
            iterations: status.iterations,
        });
    }

    /// Has the rest of the memory and the devices' state at the other host, in its QEMU.
    async fn complete_memory(&self, daemon: &Arc<Daemon>) -> Result<()> {
        self.departure.hypervisor.complete(&|status| self.note_memory(status)).await?;
        self.is_sent.store(true, Ordering::Release);
        {
            let mut state = self.state.lock();
            state.memory_span = state.sending.map(|began| daemon.env.now().since(began));
        }
        self.ask_within(daemon, SWITCH_LIMIT, Ask::Loaded { id: self.id, runs: None }).await
    }

    /// Has the layers of the disks say in their files what they hold: another host knows nothing of what this one remembers.
    async fn flush_layers(&self, daemon: &Daemon) -> Result<()> {
        let volumes = self.disks.iter().map(|disk| &disk.volume);
        let tops = volumes.filter(|volume| volume.document().has_overlays()).filter_map(|volume| volume.slot());
        let tops: Vec<_> = tops.map(|slot| slot.device()).collect();
        let flushed = env::timeout(&*daemon.env, HOLD_LIMIT, try_join_all(tops.iter().map(Device::flush))).await;
        let failed = |why: &str| {
            Error::new(
                ErrorCode::MoveFailed,
                format!("the snapshots of {} could not be made durable: {why}", self.name),
            )
            .with_hint("see what its disks say, and move it again")
        };
        match flushed {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(failed(&error.to_string())),
            None => Err(failed("it took too long")),
        }
    }

    /// The one store of all. Awaited to its end, whatever happens. The guest stands still meanwhile.
    async fn commit(&self, daemon: &Daemon, member: &MachineMember) -> Result<Committed> {
        self.is_asked.store(true, Ordering::Release);
        let committed = match select(pin!(member.commit()), pin!(self.keep_still(daemon))).await {
            Either::Left((committed, _)) => committed,
            Either::Right((never, _)) => match never {},
        };
        let proof = committed.map_err(|error| {
            Error::new(ErrorCode::MoveFailed, format!("the commit was taken back: {}", error.chain()))
                .with_hint("remove the cause and move it again")
        })?;
        self.is_committed.store(true, Ordering::Release);
        Ok(proof)
    }

    /// Makes the connection again that everything is asked over. Nothing is being asked.
    pub(super) async fn renew_channel(&self, daemon: &Daemon) -> Result<()> {
        let made = env::timeout(&*daemon.env, HOLD_LIMIT, daemon.machine_channel(&self.host)).await;
        *self.channel.lock().await = made.unwrap_or_else(|| Err(no_answer(&self.host)))?;
        Ok(())
    }

    /// Asks the other daemon, over the connection that was made for that. Nothing is asked there after one that took too long.
    pub(super) async fn ask_within(&self, daemon: &Daemon, limit: Duration, ask: Ask) -> Result<()> {
        self.ask(daemon, limit, ask).await.map(drop)
    }

    pub(super) async fn ask(&self, daemon: &Daemon, limit: Duration, ask: Ask) -> Result<Answer> {
        let asked = async {
            let mut channel = self.channel.lock().await;
            call(&mut channel, &self.host, ask).await
        };
        env::timeout(&*daemon.env, limit, asked).await.unwrap_or_else(|| Err(no_answer(&self.host)))
    }

    /// Does `work`, unless the move is cancelled, a disk's move is over, or it takes too long.
    async fn unless_stopped<T>(&self, daemon: &Daemon, work: impl Future<Output = Result<T>>) -> Result<T> {
        match select(pin!(work), pin!(self.stopped(daemon))).await {
            Either::Left((done, _)) => done,
            Either::Right((why, _)) => Err(why),
        }
    }

    /// Ends when the move cannot go on, and says why.
    async fn stopped(&self, daemon: &Daemon) -> Error {
        let mut cancelled = self.cancelled.subscribe();
        let cancelled = async {
            // The sender lives as long as this.
            let _ = cancelled.wait_for(|cancelled| *cancelled).await;
            Error::new(ErrorCode::MoveCancelled, format!("the move of {} was cancelled", self.name))
        };
        let ended = self.disks.iter().map(|disk| {
            Box::pin(async {
                disk.job.wait().await;
                let over = disk.job.show();
                over.error.unwrap_or_else(|| {
                    let message = format!("the move of its disk {} is over ({})", over.volume, over.state.name());
                    Error::new(ErrorCode::MoveCancelled, message)
                })
            })
        });
        let ended = async { futures::future::select_all(ended).await.0 };
        let late = async {
            match self.request.deadline_ms {
                Some(deadline) => {
                    let left = Duration::from_millis(deadline).saturating_sub(daemon.env.now().since(self.started));
                    daemon.env.sleep(left).await;
                }
                None => std::future::pending().await,
            }
            Error::new(ErrorCode::NoConvergence, format!("the move of {} has taken too long", self.name))
                .with_hint("give it more time, bandwidth or links, or --auto-converge")
        };
        let gone = async {
            self.departure.hypervisor.ended().await;
            Error::new(ErrorCode::QmpUnreachable, format!("the QEMU of {} has ended", self.name))
        };
        match select(pin!(select(pin!(cancelled), pin!(ended))), pin!(select(pin!(late), pin!(gone)))).await {
            Either::Left((Either::Left((why, _)) | Either::Right((why, _)), _))
            | Either::Right((Either::Left((why, _)) | Either::Right((why, _)), _)) => why,
        }
    }
}

/// Whether a guest in such a state of QEMU's is to go on: one that sleeps does when it is woken.
pub(super) fn runs_in(state: &str) -> bool {
    matches!(state, "running" | "suspended")
}

/// How many connections carry the memory of a machine.
pub(super) fn connections(request: &VmMoveRequest, facts: &MachineFacts, config: &Config) -> u16 {
    let own = match facts.version {
        // QEMU carries memory that follows the guest over one.
        _ if request.postcopy => 1,
        version if (version.major, version.minor) < CHANNELS_SINCE => 1,
        _ => u8::try_from(config.worker_count()).unwrap_or(CHANNELS_MAX).clamp(1, CHANNELS_MAX),
    };
    request.channels.unwrap_or(own).max(1).into()
}

/// For how long QEMU may stop the guest for the rest of its memory.
pub(super) fn downtime_limit(request: &VmMoveRequest) -> Duration {
    request.downtime_limit_ms.map_or(DOWNTIME_LIMIT, Duration::from_millis)
}
