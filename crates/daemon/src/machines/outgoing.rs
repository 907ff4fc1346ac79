//! Machines that go to other hosts: what is looked at before, and the beginning of the move.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{
    AdoptRequest, Decision, DiskHandling, Error, ErrorCode, Plan, PlanRequest, Resolution, ResolveRequest, Vm, VmDisk,
    VmMove, VmMoveRequest, VmPlan,
};
use migrate::MoveOptions;
use migrate::stream::BoxTransport;
use uuid::Uuid;
use vm::machine::TargetDomain;

use super::attempt::{MachineMove, MovingDisk, connections, downtime_limit, runs_in};
use super::channel::{Answer, Arrival, ArrivingDisk, Ask, receive, send};
use super::departing_caches::arriving_cache;
use super::document::{MachineDocument, OutgoingMachine};
use super::ending::{abandon_there, give_back_adopted, no_answer, store_surely};
use super::forecast::{self, BegunForecast, MemoryKnown};
use super::hooks::{HookInput, HookPhase};
use super::move_rules::{deadline_of_disks, disk_request, refusals_of, refuse_absent, refuse_options, refuse_state};
use super::parallel::MemoryChoice;
use super::shared::Handling;
use super::straight::require_straight;
use super::unadopted::adoption_obstacles;
use super::{Machine, budget, postcopy};
use crate::audit::{Peer, unix_ms};
use crate::daemon::Daemon;
use crate::document::random_uuid;
use crate::hosts::HostName;
use crate::hypervisor::Hypervisor;
use crate::jobs::{CommitRecord, machine_member, record_of};
use crate::location::require_here;
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
        plan.refusals.extend(self.refusals_here((&document, &*hypervisor), (&disks, &handled), &request).await?);
        plan.refusals.extend(refusals_of(&document, &arrival.facts, &request));
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

    /// What stands against a move of a machine as far as this host knows.
    async fn refusals_here(
        self: &Arc<Self>,
        (document, hypervisor): (&MachineDocument, &dyn Hypervisor),
        (disks, handled): (&[VmDisk], &[Handling]),
        request: &VmMoveRequest,
    ) -> Result<Vec<Error>> {
        let served = disks.iter().filter_map(|disk| self.volume(disk.volume.as_ref()?).ok()).collect::<Vec<_>>();
        let found = [
            self.refuse_disks(disks).err(),
            self.require_next_start(document, request, (disks, handled)).err(),
            require_straight(hypervisor, &served).await.err(),
            self.refuse_surrogate(disks, handled, request).err(),
            self.check_hook().err(),
            self.check_arbiter().await.err(),
        ];
        let unadoptable = adoption_obstacles(&document.name, hypervisor, disks).await?;
        Ok(found.into_iter().flatten().chain(unadoptable).collect())
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
                // Of the whole machine that is said once.
                let refusal = planned.refusal.clone().filter(|error| error.code != ErrorCode::ArbiterUnreachable);
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
        let (departure, adopted) = Box::pin(self.make_departure(&machine, &request)).await?;
        let outgoing = OutgoingMachine {
            id: departure.arrival.id,
            host: request.to.clone(),
            volumes: departure.volumes.iter().map(|volume| volume.name.clone()).collect(),
            ran: departure.arrival.runs,
            stopped: Some(false),
            commit: CommitRecord::NotBegun,
            adopted,
            started_unix_ms: unix_ms(self.env.wall_clock()),
            domain: departure.arrival.domain.as_ref().map(|domain| domain.uuid.clone()),
            autostart: departure.hypervisor.autostarts().await?,
            description: Some(departure.arrival.description.clone()),
            postcopy: request.postcopy,
        };
        let process = departure.hypervisor.process();
        // Before the other host hears of it: what it has on record after a crash somebody here must take back. The process is the one
        // behind the monitor now: the machine may have been started again since it was added.
        let stored = self.update_machine(&machine, |document| {
            document.outgoing = Some(outgoing.clone());
            document.process = process.or(document.process.take());
        });
        if let Err(error) = stored {
            give_back_adopted(self, &machine, &outgoing.adopted).await;
            return Err(error);
        }
        let told = self.hook_at_source(&departure.arrival, &request.to);
        match Box::pin(self.begin_machine_move(peer, &machine, &request, (departure, &outgoing, &told))).await {
            Ok(moving) => {
                *machine.outgoing.lock() = Some(Arc::clone(&moving));
                self.env.spawn(Box::pin(Arc::clone(&moving).run(Arc::clone(self), Arc::clone(&machine))));
                Ok(moving.show(self))
            }
            Err(error) => {
                self.take_back(&machine, outgoing, told).await;
                Err(error)
            }
        }
    }

    /// Has the other host expect a machine whose move is on record, and begins the moves of its disks.
    async fn begin_machine_move(
        self: &Arc<Self>,
        peer: &Peer,
        machine: &Machine,
        request: &VmMoveRequest,
        (departure, outgoing, told): (Departure, &OutgoingMachine, &HookInput),
    ) -> Result<Arc<MachineMove>> {
        machine.may_be_forgotten.store(false, Ordering::Release);
        self.hold_autostart(machine, &*departure.hypervisor).await?;
        self.run_hook(HookPhase::Prepare, told.clone()).await?;
        let called = async {
            let mut channel = self.machine_channel(&departure.host).await?;
            call(&mut channel, &departure.host, Ask::Prepare(departure.arrival.clone())).await?;
            Ok(channel)
        };
        let called = env::timeout(&*self.env, PREPARE_LIMIT, called).await;
        let channel = called.unwrap_or_else(|| Err(no_answer(&departure.host)))?;
        let (record, disks) = Box::pin(self.start_disks(peer, &machine.name, request, &departure)).await?;
        let ready = async {
            // Before the machine can ask for the commit: whoever ends or undoes the move after a crash asks that record.
            let outgoing = OutgoingMachine { commit: CommitRecord::Group(record), ..outgoing.clone() };
            self.update_machine(machine, |document| document.outgoing = Some(outgoing.clone()))?;
            Ok::<_, Error>((self.ready_caches(&departure.volumes, request).await?, outgoing))
        };
        match ready.await {
            Ok((caches, outgoing)) => {
                let on_record = (departure, channel, outgoing);
                Ok(MachineMove::new(self, machine, request, on_record, (record, disks, caches)))
            }
            Err(error) => {
                disks.iter().for_each(|disk| disk.job.fail(error.clone()));
                for disk in &disks {
                    disk.job.wait().await;
                }
                self.leave_group_as(record, &machine_member(&machine.name));
                Err(error)
            }
        }
    }

    /// A move that has not begun is none. The other host is told, and does not wait for what does not come.
    async fn take_back(self: &Arc<Self>, machine: &Arc<Machine>, outgoing: OutgoingMachine, told: HookInput) {
        if let Ok(host) = HostName::new(&outgoing.host) {
            abandon_there(self, &host, outgoing.id);
        }
        give_back_adopted(self, machine, &outgoing.adopted).await;
        self.tell_hook(HookPhase::Abandoned, told).await;
        self.restore_autostart(machine).await;
        let forget = move |document: &mut MachineDocument| {
            document.outgoing = document.outgoing.take().filter(|known| known.id != outgoing.id);
        };
        if self.update_machine(machine, forget).is_err() {
            // Whoever has asked for the move need not wait for that.
            let (daemon, machine, env) = (Arc::clone(self), Arc::clone(machine), Arc::clone(&self.env));
            env.spawn(Box::pin(async move { store_surely(&daemon, &machine, forget).await }));
        }
    }

    /// Looks at a machine that is about to move. Gives the disks that were adopted for it, too; after an error none is.
    async fn make_departure(
        self: &Arc<Self>,
        machine: &Machine,
        request: &VmMoveRequest,
    ) -> Result<(Departure, Vec<String>)> {
        let document = machine.document();
        refuse_options(&document, request)?;
        // Before disks are adopted for it.
        self.refuse_surrogate(&[], &[], request)?;
        let host = HostName::new(&request.to)?;
        let hypervisor = self.hypervisors.reach(&document.monitor).await?;
        let disks = self.disks_of(&document, &*hypervisor).await?;
        Box::pin(self.require_next_start_early(&document, (&host, request), &disks)).await?;
        let mut adopted = Vec::new();
        let made = async {
            Box::pin(self.adopt_rest(&machine.name, (&document, &*hypervisor), &mut adopted)).await?;
            Box::pin(self.look_at_departure(machine, request, (&document, host, &hypervisor))).await
        };
        match made.await {
            Ok(departure) => Ok((departure, adopted)),
            Err(error) => {
                give_back_adopted(self, machine, &adopted).await;
                Err(error)
            }
        }
    }

    /// The same, once all of its disks go through the daemon.
    async fn look_at_departure(
        self: &Arc<Self>,
        machine: &Machine,
        request: &VmMoveRequest,
        (document, host, hypervisor): (&MachineDocument, HostName, &Arc<dyn Hypervisor>),
    ) -> Result<Departure> {
        let disks = self.disks_of(document, &**hypervisor).await?;
        self.refuse_disks(&disks)?;
        let handled = self.handle_disks(&host, &disks, request).await?;
        self.require_next_start(document, request, (&disks, &handled))?;
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
        require_straight(&**hypervisor, &volumes).await?;
        // In the order in which groups are put on record.
        volumes.sort_by(|one, other| one.name.cmp(&other.name));
        let arriving = self.arriving(&disks, &handled, request)?;
        let has_cache = arriving.iter().any(|disk| disk.cache.is_some());
        let arrival = self.describe(document, &**hypervisor, (&arriving, request.postcopy)).await?;
        refuse_state(&arrival.facts)?;
        let choice = self.choose_memory(&host, &**hypervisor, request, (document, &arrival, true)).await?;
        let not_parallel = choice.shown();
        // A disk with a cache cannot be given to QEMU, which knows of none.
        let keeps_volumes = request.keep_volumes || has_cache;
        let arrival = Arrival { keeps_volumes, memory: choice.regions, ..arrival };
        let seen = hypervisor.memory_use(&arrival.facts, false).await;
        let shown = self.moves_shown(&host, connections(request, &arrival.facts, &self.config));
        let memory = shown.memory_known(request, (&arrival.facts, seen)).forecast();
        let planned = self.planned_forecast(machine, request);
        let forecast = BegunForecast { planned, memory, beside: shown.beside() };
        Ok(Departure { hypervisor: Arc::clone(hypervisor), arrival, volumes, host, forecast, not_parallel })
    }

    /// The disks as the target is told of them.
    fn arriving(&self, disks: &[VmDisk], handled: &[Handling], request: &VmMoveRequest) -> Result<Vec<ArrivingDisk>> {
        let mut arriving = arriving_disks(disks, handled);
        for disk in arriving.iter_mut().filter(|disk| disk.shared.is_some() && !disk.volume.is_empty()) {
            disk.cache = arriving_cache(&self.volume(&disk.volume)?.document(), request)?;
        }
        Ok(arriving)
    }

    /// Adopts those disks of a machine that do not go through the daemon yet, and says which: also of what was adopted before an error.
    async fn adopt_rest(
        self: &Arc<Self>,
        name: &str,
        (document, hypervisor): (&MachineDocument, &dyn Hypervisor),
        adopted: &mut Vec<String>,
    ) -> Result<()> {
        for disk in self.disks_of(document, hypervisor).await? {
            if disk.volume.is_some() {
                continue;
            }
            let volume: String = format!("{name}-{}", disk.node.trim_start_matches('#'));
            let request = AdoptRequest {
                monitor: document.monitor.clone(),
                node: disk.node,
                name: volume.clone(),
                accept_option_loss: false,
                accept_tombstone: false,
                format: None,
            };
            Box::pin(self.adopt(request)).await?;
            adopted.push(volume);
        }
        Ok(())
    }

    /// Refuses disks that cannot go with their machine.
    fn refuse_disks(&self, disks: &[VmDisk]) -> Result<()> {
        for name in disks.iter().filter_map(|disk| disk.volume.as_ref()) {
            let document = self.volume(name)?.document();
            refuse_draining(&document)?;
            require_here(&document.backend, "it cannot be moved from here")?;
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
        let runs = runs_in(&facts.run_state);
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
        let Some(disks) = disks else {
            self.leave_group_as(record, &machine_member(name));
            return Err(Error::new(ErrorCode::MoveFailed, "the move of a disk is over already"));
        };
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
            if machine.document().outgoing.is_some() {
                let message = format!("the move of {name} is being ended already, after a restart of the daemon");
                return Err(Error::new(ErrorCode::Busy, message)
                    .with_hint(format!("`transhume vm show {name}` says what that waits for")));
            }
            return Err(Error::new(ErrorCode::WrongState, format!("{name} is not being moved"))
                .with_hint("`transhume vm ls` shows every VM and where it is"));
        };
        moving.cancel()?;
        moving.over_or_in_doubt(self).await?;
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
        if request.decision == Some(Decision::Lost) {
            let done = Some(self.give_up_memory(&machine).await?);
            let verdict = "what is left of the memory is given up".to_owned();
            return Ok(vec![Resolution { volume: name.to_owned(), verdict, done, ..Resolution::default() }]);
        }
        let volumes = volumes_under_way(self, &machine.document());
        let comes = machine.document().incoming.is_some();
        if request.decision == Some(Decision::GiveBack) {
            Box::pin(self.decide_give_back(name, &volumes, request.at_risk)).await?;
        }
        let mut found = Vec::new();
        for volume in &volumes {
            // The doubt about one ends with that about all. What this host has given up is given back disk by disk.
            let was_ended = request.decision.is_some() && found.iter().any(|one: &Resolution| one.done.is_some());
            let is_open = comes
                || is_given_up(volume)
                || volume.document().job.as_deref().is_some_and(crate::document::JobDocument::is_for_the_arbiter);
            // An earlier call that failed may have given some of them back.
            let is_of_others = !is_open && volumes.iter().any(|volume| is_given_up(volume));
            let request = if was_ended && !is_open || is_of_others { ResolveRequest::default() } else { request };
            match self.resolve(&volume.name, request).await {
                // Those of a machine that does not come go with it.
                Err(error) if comes && !found.is_empty() && error.code == ErrorCode::NotFound => {}
                resolved => found.push(resolved?),
            }
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

/// Whether this host has given a volume up that the other one has not answered to hold.
fn is_given_up(volume: &Volume) -> bool {
    volume.document().given_up().is_some()
}

/// The disks of a machine that goes or comes.
fn volumes_under_way(daemon: &Daemon, document: &MachineDocument) -> Vec<Arc<Volume>> {
    let going = document.outgoing.iter().flat_map(|outgoing| outgoing.volumes.clone());
    let here = document.disks.iter().map(|disk| disk.volume.clone());
    // A disk that has come and goes on is named twice.
    let names: BTreeSet<String> = going.chain(here).collect();
    names.into_iter().filter_map(|name| daemon.volume(&name).ok()).collect()
}

fn confused(host: &HostName) -> Error {
    Error::new(ErrorCode::VersionMismatch, format!("{host} answers something else"))
        .with_hint("install the same version of transhumed on both hosts")
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
