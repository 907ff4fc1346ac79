//! The parallel memory engine in a move of a machine (`crates/memory`).
//!
//! ```text
//!   source                                                             target
//!     may it? memory_regions ── TakesMemory ─────────────────────────▶ places for the files
//!     disks copied ─────────────────────────────────────────────────▶ files made, QEMU maps them
//!     open_memory, n streams of Pages ══════════════════════════════▶ Receiver ══▶ the files
//!     rounds while the guest runs; a lost stream is made again
//!     QEMU's own stream begins, without that memory
//!     the guest is stopped; the last round
//!     QEMU's devices ═══════════════════════════════════════════════▶ QEMU, which reads the memory that is there
//!     one more look: nothing was written since
//!     Loaded ───────────────────────────────────────────────────────▶ refused unless all pages are here
//! ```
//!
//! The memory is whole at the target before QEMU loads the devices there, because they look at it when they are loaded.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Error, ErrorCode, MemoryEngine, Monitor, VmChange, VmMemory, VmMoveRequest, VmPreparation};
use env::EnvRef;
use futures::future::{Either, select, try_join, try_join_all};
use memory::{
    Compression, Lane, Precopy, PrecopyOptions, Progress, RateLimit, Receiver, Region, StopReason, StopRules,
};
use migrate::stream::BoxTransport;
use uuid::Uuid;
use vm::machine::TargetMemory;

use super::Machine;
use super::attempt::{MachineMove, downtime_limit};
use super::channel::{Answer, Arrival, Ask, send};
use super::document::{IncomingMachine, MachineDocument};
use super::memory_rates;
use crate::clients::SocketOwner;
use crate::config::{CompressionConfig, Config};
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::hypervisor::{Hypervisor, of_memory};
use crate::problem::{Result, invalid};

/// How often it is looked at how the copy stands.
const LOOK: Duration = Duration::from_millis(100);
/// How long streams are made again, and how long is waited before each time.
const RETRY_LIMIT: Duration = Duration::from_secs(25);
const RETRY_REST: Duration = Duration::from_millis(500);
/// So many times the memory may be sent before the move is given up.
const SENT_FACTOR_MAX: f64 = 10.0;
/// How long the rest may take once the guest is stopped.
const FINISH_LIMIT: Duration = Duration::from_secs(30);
/// How many streams there are if nothing is said, one a processor.
const STREAMS_MAX: u8 = 4;

/// What copies the memory of a machine, and why it is not the parallel engine.
#[derive(Default)]
pub(super) struct MemoryChoice {
    /// What is copied by it; nothing if QEMU sends the memory.
    pub(super) regions: Vec<Region>,
    pub(super) not_parallel: Option<Error>,
}

impl MemoryChoice {
    pub(super) const fn engine(&self) -> MemoryEngine {
        if self.regions.is_empty() { MemoryEngine::Qemu } else { MemoryEngine::Parallel }
    }

    /// Why not, for people.
    pub(super) fn shown(&self) -> Option<String> {
        self.not_parallel.as_ref().map(|error| error.message.clone())
    }
}

/// How many streams carry the memory.
pub(super) fn streams(request: &VmMoveRequest, config: &Config) -> u16 {
    let own = u8::try_from(config.worker_count()).unwrap_or(STREAMS_MAX).clamp(1, STREAMS_MAX);
    u16::from(request.channels.unwrap_or(own).max(1)).min(memory::wire::STREAMS_MAX)
}

/// What of a request the parallel engine does not do.
fn refuse_parallel(document: &MachineDocument, request: &VmMoveRequest) -> Result<()> {
    let refuse = |what: &str| {
        let message = format!("the parallel engine {what}");
        Err(Error::new(ErrorCode::VmRefused, message).with_hint("leave `--memory parallel` out"))
    };
    match () {
        () if matches!(document.monitor, Monitor::Libvirt(_)) => refuse("moves no domain of libvirt"),
        () if request.postcopy => refuse("sends no memory after the guest (--postcopy)"),
        () if request.auto_converge => refuse("does not slow the guest down (--auto-converge)"),
        () => Ok(()),
    }
}

impl Daemon {
    /// Whether the parallel engine copies the memory of a machine.
    ///
    /// # Errors
    /// It was asked for, and cannot.
    pub(super) async fn choose_memory(
        &self,
        host: &HostName,
        hypervisor: &dyn Hypervisor,
        request: &VmMoveRequest,
        (document, arrival, is_adopted): (&MachineDocument, &Arrival, bool),
    ) -> Result<MemoryChoice> {
        if request.memory == MemoryEngine::Qemu {
            return Ok(MemoryChoice::default());
        }
        let chosen = async {
            refuse_parallel(document, request)?;
            let regions = hypervisor.memory_regions(&arrival.facts, &arrival.description, is_adopted).await?;
            let ask = Ask::TakesMemory { id: arrival.id, regions: regions.clone() };
            self.ask_about_machine(host, ask).await?;
            Ok(regions)
        };
        match chosen.await {
            Ok(regions) => Ok(MemoryChoice { regions, not_parallel: None }),
            Err(error) if request.memory == MemoryEngine::Parallel => Err(error),
            Err(error) => Ok(MemoryChoice { regions: Vec::new(), not_parallel: Some(error) }),
        }
    }
}

impl Daemon {
    /// What to change so that the parallel engine can copy the memory of the machine `name`.
    pub(crate) async fn prepare_machine(&self, name: &str) -> Result<VmPreparation> {
        let document = self.machine(name)?.document();
        let hypervisor = self.hypervisors.reach(&document.monitor).await?;
        let (facts, description) = (hypervisor.facts().await?, hypervisor.description()?);
        let possible = match refuse_parallel(&document, &VmMoveRequest::default()) {
            Ok(()) => hypervisor.memory_regions(&facts, &description, false).await.map(drop),
            refused => refused,
        };
        let folder = self.config.hosts.as_ref().map(|hosts| hosts.memory_dir.clone());
        let folder = folder.unwrap_or_else(|| PathBuf::from("/dev/shm")).display().to_string();
        let changes = description.prepare_memory(name, facts.memory_bytes, &folder);
        let shown = |change: vm::machine::Change| VmChange {
            option: change.option,
            from: change.from,
            to: change.to,
            why: change.why,
        };
        Ok(VmPreparation {
            vm: name.to_owned(),
            not_parallel: possible.err().map(|error| error.message),
            changes: changes.into_iter().map(shown).collect(),
            environment: crate::hypervisor::memory_environment(
                &self.machine_folder(name).with_extension("memory.sock"),
            ),
        })
    }

    /// Where the memory of a machine is to lie that the parallel engine brings.
    pub(super) fn memory_places(&self, id: Uuid, regions: &[Region]) -> Result<Vec<PathBuf>> {
        if regions.is_empty() {
            return Ok(Vec::new());
        }
        if regions.len() > memory::wire::REGIONS_MAX {
            return Err(invalid(format!("{} parts are no memory", regions.len()), "move it with --memory qemu"));
        }
        let folder = self.config.hosts.as_ref().map(|hosts| hosts.memory_dir.clone()).unwrap_or_default();
        self.hypervisors.memory_places(&folder, id, regions)
    }

    /// The same for the command line of its QEMU.
    pub(super) fn target_memory(&self, arrival: &Arrival) -> Result<Vec<TargetMemory>> {
        let bytes: u64 = arrival.memory.iter().map(|region| region.bytes).fold(0, u64::saturating_add);
        if !arrival.memory.is_empty() && bytes != arrival.facts.memory_bytes {
            let message = format!("{bytes} of {} bytes of memory would come", arrival.facts.memory_bytes);
            return Err(invalid(message, "move it with --memory qemu"));
        }
        let places = self.memory_places(arrival.id, &arrival.memory)?;
        let parts = places.into_iter().zip(&arrival.memory);
        Ok(parts.map(|(path, region)| TargetMemory { id: region.name.clone(), path }).collect())
    }

    /// Makes the memory of a machine that comes, and takes its pages from now on.
    pub(super) fn expect_memory(
        &self,
        (machine, incoming): (&Machine, &IncomingMachine),
        regions: &[Region],
        owner: Option<SocketOwner>,
    ) -> Result<()> {
        if !regions.is_empty() {
            let memory = self.hypervisors.make_memory(regions, &incoming.memory, owner)?;
            *machine.receiver.lock() = Some(Arc::new(Receiver::new(memory, *incoming.id.as_bytes())));
        }
        Ok(())
    }

    /// Takes the names of the memory away of a machine that runs here, or does not come. A QEMU has it mapped, and it goes with that.
    pub(super) fn release_memory(&self, machine: &Machine, incoming: &IncomingMachine) {
        self.hypervisors.remove_memory(&incoming.memory);
        *machine.receiver.lock() = None;
    }
}

/// Refuses a machine some of whose pages have not come.
pub(super) fn refuse_missing(machine: &Machine) -> Result<()> {
    if machine.receiver.lock().as_ref().is_some_and(|receiver| !receiver.is_complete()) {
        let message = format!("a part of the memory of {} has not come", machine.name);
        return Err(Error::new(ErrorCode::MoveFailed, message).with_hint("move it again"));
    }
    Ok(())
}

/// Takes a stream of a machine's memory, on a worker of its own.
pub(super) async fn take_pages(
    daemon: &Arc<Daemon>,
    mut transport: BoxTransport,
    (host, id): (&str, Uuid),
) -> std::io::Result<()> {
    let taker = daemon.arriving_machine(host, id).and_then(|(machine, _)| {
        let receiver = machine.receiver.lock().clone();
        let turn = machine.streams_taken.fetch_add(1, Ordering::Relaxed);
        receiver
            .map(|receiver| (receiver, turn))
            .ok_or_else(|| invalid(format!("the memory of {} comes otherwise", machine.name), "move it again"))
    });
    let (receiver, turn) = match taker {
        Ok(taken) => taken,
        Err(error) => return send(&mut transport, &Answer::Refused { error }).await,
    };
    send(&mut transport, &Answer::Done).await?;
    let workers = daemon.hosts.stream_workers();
    let worker = workers.get(turn % workers.len().max(1)).unwrap_or(&daemon.env);
    let served = env::spawn_with_result(&**worker, async move { receiver.serve(Box::new(transport)).await });
    // A worker that has ended has nothing to say.
    served.await.unwrap_or(Ok(())).map_err(std::io::Error::other)
}

impl MachineMove {
    /// Whether the parallel engine copies the memory.
    pub(super) fn is_parallel(&self) -> bool {
        !self.departure.arrival.memory.is_empty()
    }

    /// Sends the memory until the guest can be stopped, if the parallel engine does that.
    pub(super) async fn precopy(&self, daemon: &Arc<Daemon>) -> Result<Option<Precopy>> {
        if !self.is_parallel() {
            return Ok(None);
        }
        let memory = self.departure.hypervisor.open_memory(&self.departure.arrival.memory).await?;
        let compression = match daemon.config.hosts.as_ref().map(|hosts| hosts.compression) {
            Some(CompressionConfig::Off) => Compression::Off,
            _ => Compression::Auto,
        };
        let downtime_limit = downtime_limit(&self.request);
        let rules = StopRules { downtime_limit, sent_factor_max: SENT_FACTOR_MAX, ..StopRules::default() };
        let options = PrecopyOptions { rules, compression, ..PrecopyOptions::default() };
        let pace = Arc::new(RateLimit::new(EnvRef::clone(&daemon.env), self.request.bandwidth));
        pace.set_cpu_share(f64::from(self.request.memory_cpu_percent.unwrap_or(100)) / 100.0);
        let session = *self.id.as_bytes();
        let begun = Precopy::new(EnvRef::clone(&daemon.env), memory, options, (session, pace));
        let mut precopy = begun.map_err(|error| of_memory(&error))?;
        self.begin_sending(daemon);
        let look = precopy.watch();
        let converging = self.converge_memory(daemon, &mut precopy);
        let watched = select(Box::pin(converging), Box::pin(self.show_memory(daemon, look)));
        let beside = select(Box::pin(self.silent(daemon)), Box::pin(memory_rates::keep(daemon, self)));
        match select(watched, beside).await {
            Either::Left((Either::Left((converged, _)), _)) => converged?,
            Either::Right((Either::Left((lost, _)), _)) => return Err(lost),
            Either::Left((Either::Right((never, _)), _)) | Either::Right((Either::Right((never, _)), _)) => {
                match never {}
            }
        }
        Ok(Some(precopy))
    }

    async fn converge_memory(&self, daemon: &Arc<Daemon>, precopy: &mut Precopy) -> Result<()> {
        self.connect_memory(daemon, precopy).await?;
        loop {
            match precopy.converge().await {
                Ok(StopReason::Little) => {
                    let Progress { rounds, left_pages, .. } = precopy.watch()();
                    tracing::info!(vm = self.name(), rounds, left_pages, "little is left of a VM's memory");
                    return Ok(());
                }
                // As QEMU's own does: the deadline, or a cancel, ends it.
                Ok(StopReason::NoLess) => {}
                Ok(StopReason::TooMuchSent) => {
                    let message = format!("the memory of {} changes faster than it is sent", self.name());
                    return Err(Error::new(ErrorCode::NoConvergence, message).with_hint(
                        "give it more bandwidth or links, a longer --downtime-limit, or --memory qemu --postcopy",
                    ));
                }
                Err(error) if error.kind() == memory::ErrorKind::Disconnected => {
                    tracing::warn!(vm = self.name(), %error, "the streams of a VM's memory are made again");
                    self.reconnect_memory(daemon, precopy).await?;
                }
                Err(error) => return Err(of_memory(&error)),
            }
        }
    }

    async fn connect_memory(&self, daemon: &Arc<Daemon>, precopy: &mut Precopy) -> Result<()> {
        let workers = daemon.hosts.stream_workers();
        let numbers = 0..streams(&self.request, &daemon.config);
        let dialled = try_join_all(numbers.map(|number| self.dial(daemon, Ask::Pages { id: self.id }, number))).await?;
        let lane = |(number, transport)| {
            let worker = workers.get(number % workers.len().max(1)).unwrap_or(&daemon.env);
            Lane { transport: Box::new(transport), env: EnvRef::clone(worker) }
        };
        let lanes = dialled.into_iter().enumerate().map(lane).collect();
        precopy.connect(lanes).await.map_err(|error| of_memory(&error))
    }

    async fn reconnect_memory(&self, daemon: &Arc<Daemon>, precopy: &mut Precopy) -> Result<()> {
        let began = daemon.env.now();
        loop {
            daemon.env.sleep(RETRY_REST).await;
            match self.connect_memory(daemon, precopy).await {
                // What was said over the one for questions is lost with the streams, most likely.
                Ok(()) => return self.renew_channel(daemon).await,
                // The other daemon has given the machine up, and will not take it any more.
                Err(error) if [ErrorCode::NotFound, ErrorCode::Invalid].contains(&error.code) => return Err(error),
                Err(error) if daemon.env.now().since(began) > RETRY_LIMIT => return Err(error),
                Err(error) => tracing::debug!(vm = self.name(), %error, "no streams for a VM's memory yet"),
            }
        }
    }

    /// Has the guest stopped, while further rounds keep what is left small, and sends the rest.
    pub(super) async fn stop_and_copy(&self, daemon: &Arc<Daemon>, precopy: &mut Precopy) -> Result<()> {
        let look = precopy.watch();
        let copied = async {
            let kept_up = async { precopy.keep_up(|| self.is_stopped()).await.map_err(|error| of_memory(&error)) };
            try_join(self.converge(daemon), kept_up).await?;
            let (began, before) = (daemon.env.now(), look());
            let finished = env::timeout(&*daemon.env, FINISH_LIMIT, precopy.finish()).await;
            let late = || Error::new(ErrorCode::MoveFailed, "the rest of the memory could not be sent in time");
            finished.ok_or_else(late)?.map_err(|error| of_memory(&error))?;
            let (span, bytes) = (daemon.env.now().since(began), look().wire_bytes - before.wire_bytes);
            tracing::info!(vm = self.name(), ?span, bytes, "the rest of a VM's memory is at the target");
            Ok(())
        };
        match select(Box::pin(copied), pin!(self.show_memory(daemon, &look))).await {
            Either::Left((copied, _)) => copied,
            Either::Right((never, _)) => match never {},
        }
    }

    /// Shows how the copy stands, for as long as it is waited for.
    async fn show_memory(&self, daemon: &Arc<Daemon>, look: impl Fn() -> Progress) -> std::convert::Infallible {
        loop {
            let progress = look();
            self.note_pages(VmMemory {
                bytes_total: progress.total_pages * memory::PAGE_BYTES,
                bytes_sent: progress.wire_bytes,
                bytes_left: progress.left_pages * memory::PAGE_BYTES,
                dirty_bytes_per_second: progress.dirty_pages_per_second * memory::PAGE_BYTES,
                iterations: progress.rounds,
            });
            daemon.env.sleep(LOOK).await;
        }
    }
}
