//! Machines that go to other hosts: what is looked at before, and the beginning of the move.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{
    AdoptRequest, DiskHandling, Error, ErrorCode, MemoryEngine, Monitor, MoveRequest, Plan, PlanRequest, Resolution,
    ResolveRequest, Strategy, Vm, VmDisk, VmMove, VmMoveRequest, VmPlan,
};
use migrate::MoveOptions;
use migrate::stream::BoxTransport;
use uuid::Uuid;
use vm::machine::TargetDomain;

use super::attempt::{MachineMove, MovingDisk, connections, downtime_limit};
use super::channel::{Answer, Arrival, ArrivingDisk, Ask, receive, send};
use super::departing_caches::arriving_cache;
use super::document::{MachineDocument, OutgoingMachine};
use super::ending::{abandon_there, no_answer};
use super::forecast::{self, BegunForecast, MemoryKnown};
use super::hooks::{HookInput, HookPhase};
use super::parallel::MemoryChoice;
use super::shared::Handling;
use super::straight::require_straight;
use super::unadopted::refuse_probed;
use super::{Machine, budget, is_moved, postcopy};
use crate::audit::{Peer, unix_ms};
use crate::daemon::Daemon;
use crate::document::random_uuid;
use crate::hosts::HostName;
use crate::hypervisor::Hypervisor;
use crate::jobs::record_of;
use crate::problem::{Result, invalid};
use crate::stack::refuse_draining;
use crate::volume::Volume;

/// What a guest's requests may take while its disks are copied, if nothing is said. A machine that moves soon stops for longer than
/// that, and moves the sooner for it.
const GUEST_LATENCY_MS: u64 = 40;

/// How long the other host may take to look at a machine, its QEMU included.
const PREPARE_LIMIT: Duration = Duration::from_secs(30);

/// A machine that is about to move.
pub(super) struct Departure {
    pub(super) hypervisor: Arc<dyn Hypervisor>,
    pub(super) arrival: Arrival,
    pub(super) volumes: Vec<Arc<Volume>>,
    pub(super) host: HostName,
    pub(super) forecast: BegunForecast,
    /// Why the parallel engine does not copy the memory.
    pub(super) not_parallel: Option<String>,
}

impl Departure {
    /// What the other host says of a domain: sockets are made here by it.
    pub(super) fn checked(&self, target: TargetDomain) -> Result<TargetDomain> {
        let folder = self.arrival.domain.as_ref().map(|domain| &domain.folder);
        let is_instance = ["system", "session"].contains(&target.instance.as_str());
        let is_in_folder = target.socket.parent() == folder.map(PathBuf::as_path);
        if is_in_folder && target.socket.file_name().is_some() && is_instance {
            return Ok(target);
        }
        Err(confused(&self.host))
    }
}

impl Daemon {
    /// What a move of the machine `name` would be. Changes nothing.
    pub(crate) async fn plan_machine(self: &Arc<Self>, name: &str, request: VmMoveRequest) -> Result<VmPlan> {
        let machine = self.machine(name)?;
        let document = machine.document();
        refuse_absent(&document)?;
        let host = HostName::new(&request.to)?;
        let hypervisor = self.hypervisors.reach(&document.monitor).await?;
        let mut disks = self.disks_of(&document, &*hypervisor).await?;
        let handled = self.handle_disks(&host, &disks, &request).await?;
        for (disk, handling) in disks.iter_mut().zip(&handled) {
            disk.handling = Some(handling.kind());
            disk.not_shared = handling.why.as_ref().map(ToString::to_string);
        }
        let mut refusals = Vec::new();
        let arriving = self.arriving(&disks, &handled, &request).unwrap_or_else(|error| {
            refusals.push(error);
            arriving_disks(&disks, &handled)
        });
        let arrival = self.describe(&document, &*hypervisor, (&arriving, request.postcopy)).await?;
        let mut plan = VmPlan {
            vm: name.to_owned(),
            to: request.to.clone(),
            refusals,
            command: Vec::new(),
            changes: Vec::new(),
            memory_bytes: arrival.facts.memory_bytes,
            disks: disks.clone(),
            memory_resident_bytes: None,
            dirty_bytes_per_second: None,
            memory_bytes_per_second: None,
            converges: None,
            memory_engine: None,
            not_parallel: None,
            notes: Vec::new(),
            seconds: None,
            downtime_ms: None,
        };
        plan.refusals.extend(self.refuse_disks(&disks).err());
        plan.refusals.extend(self.require_next_start(&document, &request, (&disks, &handled)).err());
        plan.refusals.extend(refuse_probed(name, &*hypervisor).await?);
        let served = disks.iter().filter_map(|disk| self.volume(disk.volume.as_ref()?).ok()).collect::<Vec<_>>();
        plan.refusals.extend(require_straight(&*hypervisor, &served).await.err());
        plan.refusals.extend(self.refuse_surrogate(&disks, &handled, &request).err());
        plan.refusals.extend(refuse_options(&document, &request).err());
        plan.refusals.extend(self.check_hook().err());
        let facts = arrival.facts.clone();
        let choice = self.choose_memory(&host, &*hypervisor, &request, (&document, &arrival, false)).await;
        let choice = choice.unwrap_or_else(|error| {
            plan.refusals.push(error);
            MemoryChoice::default()
        });
        (plan.memory_engine, plan.not_parallel) = (Some(choice.engine()), choice.shown());
        let arrival = Arrival { memory: choice.regions, ..arrival };
        match self.ask_about_machine(&host, Ask::Plan(arrival.without_definition())).await {
            Ok(Answer::Planned { refusals, command, changes }) => {
                plan.refusals.extend(refusals);
                (plan.command, plan.changes) = (command, changes);
            }
            Ok(_) => plan.refusals.push(confused(&host)),
            Err(error) => plan.refusals.push(error),
        }
        let connections = connections(&request, &facts, &self.config);
        let seen = hypervisor.memory_use(&facts, true).await;
        let shown = self.moves_shown(&host, connections);
        let (memory_rate, disk_rate) = self.rates_to(&host, &request, (connections, &shown)).await;
        let mut disk_seconds = 0.0;
        // Nothing is copied of those that stay where they are, and their host was asked about them.
        for disk in disks.iter().filter(|disk| disk.handling != Some(DiskHandling::Shared)) {
            let (planned, refusal) = self.plan_disk(disk, &request).await?;
            disk_seconds += self.disk_seconds(disk, planned.as_ref(), &request, disk_rate);
            plan.refusals.extend(refusal);
        }
        let known = MemoryKnown::new(&facts, seen, memory_rate, downtime_limit(&request));
        (plan.memory_resident_bytes, plan.dirty_bytes_per_second) = (seen.resident_bytes, seen.dirty_bytes_per_second);
        let (memory, forecast) = (known.forecast(), forecast::together(disk_seconds, known.forecast(), shown.beside()));
        (plan.memory_bytes_per_second, plan.converges) = (Some(memory_rate as u64), Some(memory.converges));
        plan.notes = forecast::notes(&known, &request);
        plan.notes.extend(forecast::emulation_note(&facts));
        plan.notes.extend(request.postcopy.then(|| postcopy::NOTE.to_owned()));
        plan.downtime_ms = Some(forecast.downtime.as_secs_f64() * 1e3);
        if memory.converges {
            plan.seconds = Some(forecast.seconds);
            self.keep_machine_plan(&machine, &request, forecast);
        }
        Ok(plan)
    }

    /// The plan of a disk's move, and what stands against that. There is none of a disk that is no volume yet, or whose volume is
    /// gone: after an earlier move its disks are given back to QEMU.
    async fn plan_disk(
        self: &Arc<Self>,
        disk: &VmDisk,
        request: &VmMoveRequest,
    ) -> Result<(Option<Plan>, Option<Error>)> {
        let request = disk_request(request, false);
        let Some(volume) = &disk.volume else { return Ok((None, self.check_unadopted(disk, &request).err())) };
        match self.plan(volume, PlanRequest { request }).await {
            Err(error) if error.code == ErrorCode::NotFound => Ok((None, None)),
            Err(error) => Err(error),
            Ok(planned) => {
                let refusal = planned.refusal.clone();
                Ok((Some(planned), refusal))
            }
        }
    }

    /// Begins a move of the machine `name`. When this returns an error its guest runs here and nothing was left behind.
    pub(crate) async fn start_machine_move(
        self: &Arc<Self>,
        peer: &Peer,
        name: &str,
        request: VmMoveRequest,
    ) -> Result<VmMove> {
        let machine = self.machine(name)?;
        let _operation = machine.begin_operation(&*self.env).await?;
        let document = machine.document();
        refuse_absent(&document)?;
        if machine.outgoing().is_some() || document.outgoing.is_some() {
            return Err(Error::new(ErrorCode::Busy, format!("{name} is being moved already"))
                .with_hint(format!("`transhume vm watch {name}`")));
        }
        let departure = Box::pin(self.make_departure(&machine, &request)).await?;
        let id = departure.arrival.id;
        let outgoing = OutgoingMachine {
            id,
            host: request.to.clone(),
            volumes: departure.volumes.iter().map(|volume| volume.name.clone()).collect(),
            ran: departure.arrival.runs,
            started_unix_ms: unix_ms(self.env.wall_clock()),
            domain: departure.arrival.domain.as_ref().map(|domain| domain.uuid.clone()),
            description: Some(departure.arrival.description.clone()),
            postcopy: request.postcopy,
        };
        // Before the other host hears of it: what it has on record after a crash somebody here must take back.
        self.update_machine(&machine, |document| document.outgoing = Some(outgoing))?;
        let told = self.hook_at_source(&departure.arrival, &request.to);
        let prepared = async {
            self.run_hook(HookPhase::Prepare, told.clone()).await?;
            let called = async {
                let mut channel = self.machine_channel(&departure.host).await?;
                call(&mut channel, &departure.host, Ask::Prepare(departure.arrival.clone())).await?;
                Ok(channel)
            };
            env::timeout(&*self.env, PREPARE_LIMIT, called).await.unwrap_or_else(|| Err(no_answer(&departure.host)))
        };
        let channel = match prepared.await {
            Ok(channel) => channel,
            Err(error) => {
                self.take_back(&machine, (&departure.host, id), told).await?;
                return Err(error);
            }
        };
        match Box::pin(self.start_disks(peer, name, &request, &departure)).await {
            Ok((record, disks)) => {
                let caches = match self.ready_caches(&departure.volumes, &request).await {
                    Ok(caches) => caches,
                    Err(error) => {
                        disks.iter().for_each(|disk| disk.job.fail(error.clone()));
                        self.take_back(&machine, (&departure.host, id), told).await?;
                        return Err(error);
                    }
                };
                let moving = MachineMove::new(self, &machine, &request, (departure, channel), (record, disks, caches));
                *machine.outgoing.lock() = Some(Arc::clone(&moving));
                self.env.spawn(Box::pin(Arc::clone(&moving).run(Arc::clone(self), Arc::clone(&machine))));
                Ok(moving.show(self))
            }
            Err(error) => {
                self.take_back(&machine, (&departure.host, id), told).await?;
                Err(error)
            }
        }
    }

    /// A move that has not begun is none. The other host is told, and does not wait for what does not come.
    async fn take_back(
        self: &Arc<Self>,
        machine: &Machine,
        (host, id): (&HostName, Uuid),
        told: HookInput,
    ) -> Result<()> {
        abandon_there(self, host, id);
        self.tell_hook(HookPhase::Abandoned, told).await;
        self.update_machine(machine, |document| document.outgoing = None)
    }

    async fn make_departure(self: &Arc<Self>, machine: &Machine, request: &VmMoveRequest) -> Result<Departure> {
        let document = machine.document();
        refuse_options(&document, request)?;
        // Before disks are adopted for it.
        self.refuse_surrogate(&[], &[], request)?;
        let host = HostName::new(&request.to)?;
        let hypervisor = self.hypervisors.reach(&document.monitor).await?;
        let disks = self.disks_of(&document, &*hypervisor).await?;
        Box::pin(self.require_next_start_early(&document, (&host, request), &disks)).await?;
        Box::pin(self.adopt_rest(&machine.name, &document, &*hypervisor)).await?;
        let disks = self.disks_of(&document, &*hypervisor).await?;
        self.refuse_disks(&disks)?;
        let handled = self.handle_disks(&host, &disks, request).await?;
        self.require_next_start(&document, request, (&disks, &handled))?;
        self.refuse_surrogate(&disks, &handled, request)?;
        let mut volumes: Vec<_> = disks
            .iter()
            .filter_map(|disk| disk.volume.as_ref())
            .map(|name| self.volume(name))
            .collect::<Result<_>>()?;
        if volumes.is_empty() {
            let message = format!("{} has no disk that could say which host it is at", machine.name);
            return Err(Error::new(ErrorCode::VmRefused, message).with_hint("give it one disk at least"));
        }
        require_straight(&*hypervisor, &volumes).await?;
        // In the order in which groups are put on record.
        volumes.sort_by(|one, other| one.name.cmp(&other.name));
        let arriving = self.arriving(&disks, &handled, request)?;
        let has_cache = arriving.iter().any(|disk| disk.cache.is_some());
        let arrival = self.describe(&document, &*hypervisor, (&arriving, request.postcopy)).await?;
        let choice = self.choose_memory(&host, &*hypervisor, request, (&document, &arrival, true)).await?;
        let not_parallel = choice.shown();
        // A disk with a cache cannot be given to QEMU, which knows of none.
        let keeps_volumes = request.keep_volumes || has_cache;
        let arrival = Arrival { keeps_volumes, memory: choice.regions, ..arrival };
        let seen = hypervisor.memory_use(&arrival.facts, false).await;
        let shown = self.moves_shown(&host, connections(request, &arrival.facts, &self.config));
        let memory = shown.memory_known(request, (&arrival.facts, seen)).forecast();
        let planned = self.planned_forecast(machine, request);
        let forecast = BegunForecast { planned, memory, beside: shown.beside() };
        Ok(Departure { hypervisor, arrival, volumes, host, forecast, not_parallel })
    }

    /// The disks as the target is told of them.
    fn arriving(&self, disks: &[VmDisk], handled: &[Handling], request: &VmMoveRequest) -> Result<Vec<ArrivingDisk>> {
        let mut arriving = arriving_disks(disks, handled);
        for disk in arriving.iter_mut().filter(|disk| disk.shared.is_some() && !disk.volume.is_empty()) {
            disk.cache = arriving_cache(&self.volume(&disk.volume)?.document(), request)?;
        }
        Ok(arriving)
    }

    /// Adopts those disks of a machine that do not go through the daemon yet.
    async fn adopt_rest(
        self: &Arc<Self>,
        name: &str,
        document: &MachineDocument,
        hypervisor: &dyn Hypervisor,
    ) -> Result<()> {
        for disk in self.disks_of(document, hypervisor).await? {
            if disk.volume.is_some() {
                continue;
            }
            let volume: String = format!("{name}-{}", disk.node.trim_start_matches('#'));
            let request = AdoptRequest {
                monitor: document.monitor.clone(),
                node: disk.node,
                name: volume,
                accept_option_loss: false,
                accept_tombstone: false,
                format: None,
            };
            Box::pin(self.adopt(request)).await?;
        }
        Ok(())
    }

    /// Refuses disks that cannot go with their machine.
    fn refuse_disks(&self, disks: &[VmDisk]) -> Result<()> {
        for name in disks.iter().filter_map(|disk| disk.volume.as_ref()) {
            refuse_draining(&self.volume(name)?.document())?;
        }
        Ok(())
    }

    /// Refuses a surrogate without room for each disk that is copied and that it helps.
    fn refuse_surrogate(&self, disks: &[VmDisk], handled: &[Handling], request: &VmMoveRequest) -> Result<()> {
        let Some(name) = &request.surrogate else { return Ok(()) };
        let surrogate = self.surrogates.get(name)?;
        let needs_part = |(disk, handling): &(&VmDisk, &Handling)| {
            let helps = self.surrogate_helps(Path::new(&disk.file), request.surrogate_on_flash);
            let has_one = disk.volume.as_ref().and_then(|name| self.volume(name).ok());
            let has_one = has_one.is_some_and(|volume| volume.document().redirect_layer().is_some());
            handling.kind() == DiskHandling::Copied && helps && !has_one
        };
        surrogate.check_room(disks.iter().zip(handled).filter(needs_part).count())
    }

    /// What the target is told of a machine.
    async fn describe(
        &self,
        document: &MachineDocument,
        hypervisor: &dyn Hypervisor,
        (disks, postcopy): (&[ArrivingDisk], bool),
    ) -> Result<Arrival> {
        let facts = hypervisor.facts().await?;
        let description = match &document.description {
            Some(description) => description.clone(),
            None => hypervisor.description()?,
        };
        let (domain, disks) = match self.describe_domain(document, hypervisor, disks).await? {
            Some((domain, disks)) => (Some(domain), disks),
            None => (None, disks.iter().map(|disk| self.as_first_started(document, disk)).collect::<Result<_>>()?),
        };
        let runs = facts.run_state == "running";
        let (id, name) = (random_uuid(&*self.env), document.name.clone());
        let (memory, keeps_volumes) = (Vec::new(), false);
        Ok(Arrival { id, name, description, facts, disks, domain, runs, postcopy, memory, keeps_volumes })
    }

    /// The disk with node and image as the command line has them with which its machine was started first.
    fn as_first_started(&self, document: &MachineDocument, disk: &ArrivingDisk) -> Result<ArrivingDisk> {
        if let Some(known) = document.disks.iter().find(|known| known.volume == disk.volume) {
            return Ok(ArrivingDisk { node: known.node.clone(), image: known.image.clone(), ..disk.clone() });
        }
        if disk.volume.is_empty() {
            // A disk that would be adopted is called so afterwards.
            let volume = format!("{}-{}", document.name, disk.node.trim_start_matches('#'));
            return Ok(ArrivingDisk { volume, ..disk.clone() });
        }
        let volume = self.volume(&disk.volume)?.document();
        let plan = volume.adoption.as_ref().map(|adoption| &adoption.plan.disk);
        let plan = plan.ok_or_else(|| invalid(format!("{} is no disk of a VM", disk.volume), "adopt it first"))?;
        let image = plan.image.display().to_string();
        Ok(ArrivingDisk { node: plan.nodes.format.clone(), image, ..disk.clone() })
    }

    /// Begins the moves of the disks, which do not switch over without the machine.
    async fn start_disks(
        self: &Arc<Self>,
        peer: &Peer,
        name: &str,
        request: &VmMoveRequest,
        departure: &Departure,
    ) -> Result<(Uuid, Vec<MovingDisk>)> {
        let volumes = &departure.volumes;
        let is_shared = |volume: &Arc<Volume>| {
            let mut disks = departure.arrival.disks.iter();
            disks.any(|disk| disk.volume == volume.name && disk.shared.is_some())
        };
        let share = request.bandwidth.map(|limit| budget::first_share(limit, volumes.len()));
        let deadline_ms =
            request.deadline_ms.map(|deadline| deadline_of_disks(deadline, departure.forecast.memory.seconds));
        let request = VmMoveRequest { bandwidth: share, deadline_ms, ..request.clone() };
        let requests = volumes.iter().map(|volume| disk_request(&request, is_shared(volume))).collect();
        let latency_us = request.guest_latency_ms.unwrap_or(GUEST_LATENCY_MS).max(1).saturating_mul(1000);
        let tune = |_: &str, options: &mut MoveOptions| options.guest_latency_us = latency_us;
        self.start_together(peer, volumes, requests, Some(name), tune).await?;
        let record = volumes.iter().find_map(|volume| record_of(&volume.document()));
        let record =
            record.ok_or_else(|| Error::new(ErrorCode::MoveFailed, "the moves of the disks are over already"))?;
        let moving = |volume: &Arc<Volume>| Some(MovingDisk { volume: Arc::clone(volume), job: volume.job()? });
        let disks: Option<Vec<_>> = volumes.iter().map(moving).collect();
        let disks = disks.ok_or_else(|| Error::new(ErrorCode::MoveFailed, "the move of a disk is over already"))?;
        Ok((record, disks))
    }

    /// A connection to `host` for what is said of machines.
    pub(super) async fn machine_channel(&self, host: &HostName) -> Result<BoxTransport> {
        self.hosts.machine_connection(host, 0).await
    }

    /// Asks `host` one thing about a machine.
    pub(super) async fn ask_about_machine(&self, host: &HostName, ask: Ask) -> Result<Answer> {
        let asked = async {
            let mut channel = self.machine_channel(host).await?;
            call(&mut channel, host, ask).await
        };
        env::timeout(&*self.env, PREPARE_LIMIT, asked).await.unwrap_or_else(|| Err(no_answer(host)))
    }

    /// Undoes the move of a machine, as long as that is possible.
    pub(crate) async fn cancel_machine_move(self: &Arc<Self>, name: &str) -> Result<VmMove> {
        let machine = self.machine(name)?;
        let Some(moving) = machine.outgoing() else {
            return Err(Error::new(ErrorCode::WrongState, format!("{name} is not being moved"))
                .with_hint("`transhume vm ls` shows every VM and where it is"));
        };
        moving.cancel()?;
        moving.wait().await;
        let over = self.show_machine_move(&machine)?;
        match over.state {
            api::v1::JobState::Cancelled | api::v1::JobState::Failed => Ok(over),
            _ => Err(Error::new(ErrorCode::WrongState, format!("the cancel came too late: {name} is at {}", over.to))),
        }
    }

    /// Tries the other host again at once, if the move of the machine's disks has lost it.
    pub(crate) fn resume_machine_move(&self, name: &str) -> Result<VmMove> {
        let machine = self.machine(name)?;
        for volume in volumes_under_way(self, &machine.document()) {
            volume.remote_device().into_iter().for_each(|remote_device| remote_device.kick());
            volume.job().into_iter().for_each(|job| job.resume());
        }
        self.show_machine_move(&machine)
    }

    /// What both hosts have on record of the disks of a machine that was on its way, and what follows from a decision.
    pub(crate) async fn resolve_machine(
        self: &Arc<Self>,
        name: &str,
        request: ResolveRequest,
    ) -> Result<Vec<Resolution>> {
        let machine = self.machine(name)?;
        let mut found = Vec::new();
        for volume in volumes_under_way(self, &machine.document()) {
            found.push(self.resolve(&volume.name, request).await?);
        }
        Ok(found)
    }

    /// The machine `name`, with its move.
    pub(crate) async fn machine_shown(&self, name: &str) -> Result<Vm> {
        Ok(self.show_machine(&*self.machine(name)?).await)
    }
}

/// Asks one thing, and gives what was answered unless that is a refusal.
pub(super) async fn call(channel: &mut BoxTransport, host: &HostName, ask: Ask) -> Result<Answer> {
    let answered = async {
        send(channel, &ask).await?;
        receive::<Answer>(channel).await
    };
    match answered.await {
        Ok(Answer::Refused { error }) => Err(Error { message: format!("{host}: {}", error.message), ..error }),
        Ok(answer) => Ok(answer),
        Err(error) => Err(Error::new(ErrorCode::HostUnreachable, format!("the connection to {host} is lost: {error}"))
            .with_hint("see whether its transhumed runs, is as new as this one, and can be reached")),
    }
}

/// The disks of a machine that goes or comes.
fn volumes_under_way(daemon: &Daemon, document: &MachineDocument) -> Vec<Arc<Volume>> {
    let going = document.outgoing.iter().flat_map(|outgoing| outgoing.volumes.clone());
    let here = document.disks.iter().map(|disk| disk.volume.clone());
    going.chain(here).filter_map(|name| daemon.volume(&name).ok()).collect()
}

fn confused(host: &HostName) -> Error {
    Error::new(ErrorCode::VersionMismatch, format!("{host} answers something else"))
        .with_hint("install the same version of transhumed on both hosts")
}

fn refuse_absent(document: &MachineDocument) -> Result<()> {
    if let Some(moved) = document.last_move.as_ref().filter(|_| is_moved(document)) {
        return Err(Error::new(ErrorCode::WrongState, format!("{} is at {}", document.name, moved.to))
            .with_hint(format!("ask transhumed on {}", moved.to)));
    }
    if let Some(incoming) = &document.incoming {
        return Err(Error::new(ErrorCode::Busy, format!("{} comes from {} just now", document.name, incoming.host))
            .with_hint("wait until it runs here"));
    }
    if let Some(following) = &document.following {
        let message = format!("the memory of {} still comes from {}", document.name, following.host);
        return Err(Error::new(ErrorCode::Busy, message).with_hint("wait until all of it is here"));
    }
    Ok(())
}

/// Refuses what libvirt's own migration is not asked for here.
fn refuse_options(document: &MachineDocument, request: &VmMoveRequest) -> Result<()> {
    let is_many = request.channels.is_some_and(|channels| channels > 1);
    if is_many && matches!(document.monitor, Monitor::Libvirt(_)) {
        return Err(Error::new(ErrorCode::VmRefused, "the memory of a libvirt domain goes over one connection")
            .with_hint("leave --channels out"));
    }
    if request.memory_cpu_percent.is_some_and(|percent| !(1..=100).contains(&percent)) {
        return Err(Error::new(ErrorCode::Invalid, "the memory's share of the processors is 1 to 100 percent")
            .with_hint("leave --memory-cpu out for all of it"));
    }
    if request.memory_cpu_percent.is_some() && request.memory == MemoryEngine::Qemu {
        return Err(Error::new(ErrorCode::VmRefused, "QEMU limits no processors while it sends memory")
            .with_hint("leave --memory-cpu out, or have `--memory parallel` copy it"));
    }
    if request.postcopy && is_many {
        return Err(Error::new(ErrorCode::VmRefused, "memory that follows the guest goes over one connection")
            .with_hint("leave --channels or --postcopy out"));
    }
    if request.postcopy && matches!(document.monitor, Monitor::Libvirt(_)) {
        return Err(Error::new(ErrorCode::VmRefused, "the memory of a libvirt domain does not follow its guest")
            .with_hint("leave --postcopy out; --auto-converge and a longer --downtime-limit help a busy guest"));
    }
    Ok(())
}

/// The move of a disk that goes with its machine.
fn disk_request(request: &VmMoveRequest, shared: bool) -> MoveRequest {
    // Of a disk of which nothing is copied no head is to be spared.
    let head = match shared {
        true => MoveRequest::default(),
        false => MoveRequest {
            schedule: request.schedule,
            follow_ratio: request.follow_ratio,
            read_cache: request.read_cache,
            surrogate: request.surrogate.clone(),
            popular_threshold: request.popular_threshold,
            surrogate_on_flash: request.surrogate_on_flash,
            sole_copy: request.sole_copy,
            ..MoveRequest::default()
        },
    };
    MoveRequest {
        to: request.to.clone(),
        shared,
        bandwidth: request.bandwidth,
        verify: request.verify,
        strategy: request.strategy,
        // For those that track it is no wish: they end by it.
        deadline_ms: request
            .deadline_ms
            .filter(|_| !matches!(request.strategy, Strategy::Dbt | Strategy::IncrementalDbt)),
        // What both hosts reach is nobody's to delete.
        delete_source: request.delete_source && !shared,
        // Where the machine is started next is no question of one disk.
        no_persist: true,
        ..head
    }
}

/// When the disks are to be there so that the memory, which is expected to take so many seconds, is in time, too.
fn deadline_of_disks(deadline_ms: u64, memory_seconds: f64) -> u64 {
    let memory_ms = Duration::try_from_secs_f64(memory_seconds).map_or(u64::MAX, |span| span.as_millis() as u64);
    deadline_ms.saturating_sub(memory_ms).max(deadline_ms / 2).max(1)
}

/// The disks as the target is told of them, without their caches; one that is no volume yet has no name.
fn arriving_disks(disks: &[VmDisk], handled: &[Handling]) -> Vec<ArrivingDisk> {
    let arriving = |(disk, handling): (&VmDisk, &Handling)| ArrivingDisk {
        volume: disk.volume.clone().unwrap_or_default(),
        node: disk.node.clone(),
        image: disk.file.clone(),
        format: disk.format.clone(),
        size: disk.size_bytes,
        shared: handling.place.clone(),
        grows: handling.grows,
        cache: None,
    };
    disks.iter().zip(handled).map(arriving).collect()
}
