//! Machines that come from other hosts.
//!
//! ```text
//!   (nothing) ─ prepare ─▶ arriving ─ start ─▶ QEMU waits ─ memory ─▶ loaded ─ all disks held here ─▶ running
//!                             │                    │                     │
//!                             └────────────────────┴──── a disk does not come, or abandon ──▶ QEMU is ended, forgotten
//! ```
//!
//! Who holds the disks decides, and nothing else: the machine runs once this host holds all of them, and is given up once one
//! of them is gone. The source holds its guest stopped from *loaded* on, and commits only after it has heard of that.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor, VmChange};
use futures::FutureExt;
use futures::future::{BoxFuture, Either, select};
use migrate::stream::{BoxTransport, PeerName, USAGE_ADDRESSES_MAX};
use tokio::io::AsyncReadExt;
use uuid::Uuid;
use vm::machine::{DomainDefinition, MigrationOptions, TargetCommand, TargetDisk, TargetPlaces};
use vm::{ExportAddress, QemuProcess};

use super::channel::{Answer, Arrival, Ask, receive, send};
use super::document::{self, IncomingMachine, MachineDisk, MachineDocument};
use super::forecast::PROBE_BYTES_MAX;
use super::hooks::HookPhase;
use super::memory::until_cut;
use super::tending::{Found, lost};
use super::{Begin, Machine, is_moved, memory};
use crate::audit::Peer;
use crate::clients::{MachineClient, SocketOwner};
use crate::daemon::Daemon;
use crate::document::IncomingStage;
use crate::hosts::OnMemory;
use crate::hypervisor::{Hypervisor, Lane, MemoryFlow, OnStarted};
use crate::problem::{Result, invalid, of_vm};
use crate::state_dir::check_name;

/// How often the disks are looked at while somebody waits for them.
const LOOK_SOON: Duration = Duration::from_millis(1);
/// How long `loaded` and `run` may take.
const LOADED_LIMIT: Duration = Duration::from_secs(60);
const RUN_LIMIT: Duration = Duration::from_secs(60);

/// Serves one connection of `peer` that is about a machine.
pub(crate) async fn serve(
    daemon: Arc<Daemon>,
    mut transport: BoxTransport,
    (peer, opened): (PeerName, OnMemory),
) -> std::io::Result<()> {
    loop {
        let ask: Ask = match receive(&mut transport).await {
            Ok(ask) => ask,
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        match ask {
            Ask::Memory { id } => {
                opened(id);
                return carry(&daemon, transport, (&peer.0, id), Lane::Memory).await;
            }
            Ask::Control { id } => return carry(&daemon, transport, (&peer.0, id), Lane::Control).await,
            Ask::Cache { id, volume } => return daemon.take_cache(transport, (&peer.0, id), &volume).await,
            Ask::Export { volume } => return daemon.lend_volume(transport, &peer.0, &volume).await,
            Ask::Pages { id } => {
                opened(id);
                return super::parallel::take_pages(&daemon, transport, (&peer.0, id)).await;
            }
            _ => {}
        }
        if let Ask::Probe { bytes } = ask {
            swallow(&mut transport, bytes).await?;
            send(&mut transport, &Answer::Done).await?;
            continue;
        }
        let answer = Box::pin(daemon.answer_about_machine(&peer.0, ask)).await;
        let answer = answer.unwrap_or_else(|error| Answer::Refused { error });
        send(&mut transport, &answer).await?;
    }
}

/// Reads what a host sends to see how fast this one is reached.
async fn swallow(transport: &mut BoxTransport, bytes: u64) -> std::io::Result<()> {
    let mut probed = transport.take(bytes.min(PROBE_BYTES_MAX));
    tokio::io::copy(&mut probed, &mut tokio::io::sink()).await.map(drop)
}

/// Carries one connection of a machine's migration into the hypervisor that waits for it, or into libvirt.
async fn carry(
    daemon: &Arc<Daemon>,
    mut transport: BoxTransport,
    (host, id): (&str, Uuid),
    lane: Lane,
) -> std::io::Result<()> {
    let inlet = async {
        let (machine, incoming) = daemon.coming_machine(host, id)?;
        let cut = until_cut(machine.cut.subscribe());
        let inlet = match lane {
            Lane::Memory => daemon.hypervisor_of(&machine).await?.inlet(&incoming.folder).await,
            Lane::Control => daemon.control_inlet(&incoming).await,
        };
        inlet.map(|inlet| (inlet, cut))
    };
    match inlet.await {
        Ok((inlet, cut)) => {
            // The next connection is made only after this one is there.
            send(&mut transport, &Answer::Done).await?;
            match select(pin!(memory::carry(inlet, transport)), pin!(cut)).await {
                Either::Left((carried, _)) => carried,
                Either::Right(_) => Ok(()),
            }
        }
        Err(error) => send(&mut transport, &Answer::Refused { error }).await,
    }
}

impl Daemon {
    async fn answer_about_machine(self: &Arc<Self>, host: &str, ask: Ask) -> Result<Answer> {
        match ask {
            Ask::Share { disks } => Ok(self.answer_which_are_shared(&disks).await),
            Ask::Plan(arrival) => self.plan_arrival(host, &arrival).await,
            Ask::Prepare(arrival) => self.prepare_arrival(host, &arrival).await,
            Ask::Start { id, channels, postcopy, definition } => {
                self.start_arrival(host, id, (channels, postcopy), definition.map(|definition| *definition)).await
            }
            Ask::Loaded { id, runs } => self.arrival_loaded(host, (id, runs)).await,
            Ask::Run { id } => self.run_arrival(host, id).await,
            Ask::Rejoin { id } => self.rejoin_arrival(host, id).await,
            Ask::Whole { id } => self.is_arrival_whole(host, id).await,
            Ask::Usage { addresses } => Ok(self.answer_usage(&addresses)),
            Ask::Abandon { id } => self.abandon_arrival(host, id).await,
            Ask::TakesMemory { id, regions } => self.memory_places(id, &regions).map(|_| Answer::Done),
            Ask::Memory { .. }
            | Ask::Control { .. }
            | Ask::Pages { .. }
            | Ask::Cache { .. }
            | Ask::Export { .. }
            | Ask::Probe { .. } => {
                unreachable!("it is no question")
            }
        }
    }

    /// The machine that `host` moves here by the move `id`.
    pub(super) fn arriving_machine(&self, host: &str, id: Uuid) -> Result<(Arc<Machine>, IncomingMachine)> {
        let is_meant = |incoming: &IncomingMachine| incoming.id == id && incoming.host == host;
        let mut machines = self.machines.list().into_iter();
        let found = machines.find_map(|machine| {
            let incoming = machine.document().incoming.filter(is_meant)?;
            Some((machine, incoming))
        });
        found.ok_or_else(|| {
            Error::new(ErrorCode::NotFound, format!("no VM comes from {host} by the move {id}"))
                .with_hint("it was given up here: see this host's log, and move it again")
        })
    }

    /// The same, or the one that runs here and whose memory still comes from `host`.
    pub(super) fn coming_machine(&self, host: &str, id: Uuid) -> Result<(Arc<Machine>, IncomingMachine)> {
        let is_meant = |following: &IncomingMachine| following.id == id && following.host == host;
        let mut machines = self.machines.list().into_iter();
        let following = machines.find_map(|machine| {
            let following = machine.document().following.filter(is_meant)?;
            Some((machine, following))
        });
        following.map_or_else(|| self.arriving_machine(host, id), Ok)
    }

    /// As which user machines of other hosts run here.
    pub(super) fn machine_owner(&self) -> Result<Option<SocketOwner>> {
        let user = self.config.hosts.as_ref().and_then(|hosts| hosts.vm_user.clone());
        let Some(user) = user else { return Ok(None) };
        self.hypervisors.user(&user).map(Some)
    }

    /// The program that this host starts for others' `program`.
    fn program_for(&self, program: &str) -> Result<PathBuf> {
        let refuse =
            |what: String, hint: &str| Err(Error::new(ErrorCode::HostRefused, what).with_hint(hint.to_owned()));
        let Some(hosts) = self.config.hosts.as_ref().filter(|hosts| hosts.run_vms) else {
            return refuse(
                "this host runs no VMs of others".to_owned(),
                "give its configuration `run-vms = true` in the section [hosts] and restart it; docs/hosts.md says what that means",
            );
        };
        let program = Path::new(program);
        if let Some(own) = hosts.vm_program_for.get(program) {
            return Ok(own.clone());
        }
        if !hosts.vm_programs.iter().any(|listed| listed == program) {
            return refuse(
                format!("this host does not run {}", program.display()),
                "add it to `vm-programs` in its section [hosts], or say in `vm-program-for` what it runs instead",
            );
        }
        Ok(program.to_owned())
    }

    fn command_for(&self, arrival: &Arrival) -> Result<TargetCommand> {
        let export = |disk: &super::channel::ArrivingDisk| ExportAddress {
            socket: self.socket_dir.join(format!("{}.sock", disk.volume)),
            name: disk.volume.clone(),
        };
        let disk = |disk: &super::channel::ArrivingDisk| TargetDisk {
            image: disk.image.clone(),
            node: disk.node.clone(),
            format: disk.format.clone(),
            export: export(disk),
        };
        let places = TargetPlaces {
            folder: self.machine_folder(&arrival.name),
            disks: arrival.disks.iter().map(disk).collect(),
            machine_type: Some(arrival.facts.machine_type.clone()),
            memory: self.target_memory(arrival)?,
        };
        let command = arrival.description.for_target(&places);
        let command = command.map_err(|error| Error { code: ErrorCode::VmRefused, ..of_vm(&error) })?;
        Ok(command.run_by(&self.program_for(&arrival.description.program)?))
    }

    /// What stands against a machine here, as far as it can be told before.
    async fn arrival_refusals(&self, host: &str, arrival: &Arrival) -> Result<Vec<Error>> {
        check_name(&arrival.name)?;
        arrival.disks.iter().filter_map(|disk| disk.shared.as_ref()).try_for_each(|place| self.may_share(place))?;
        let program = match &arrival.domain {
            Some(definition) => {
                self.may_take_domain(&arrival.name, definition).await?;
                PathBuf::from(&arrival.description.program)
            }
            None => self.program_for(&arrival.description.program)?,
        };
        let owner = self.machine_owner()?;
        self.check_hook()?;
        let mut refusals = Vec::new();
        let caches = arrival.disks.iter().filter_map(|disk| disk.cache.as_ref());
        refusals.extend(caches.filter_map(|cache| self.may_take_cache(cache).err()));
        if arrival.postcopy {
            refusals.extend(self.hypervisors.refuses_postcopy(owner));
        }
        if let Some(known) = self.machines.get(&arrival.name)
            && !self.is_replaceable(&known, host).await
        {
            let message = format!("this host has a VM {} already", arrival.name);
            refusals.push(
                Error::new(ErrorCode::AlreadyExists, message).with_hint("remove that one, or call this one otherwise"),
            );
        }
        let own = self.machines.get(&arrival.name).and_then(|known| known.document().process);
        refusals.extend(self.require_own_folder(&arrival.name, own.as_ref()).err());
        refusals.extend(arrival.disks.iter().filter_map(|disk| self.may_take_name(host, &disk.volume).err()));
        let facts = self.hypervisors.host_facts(&program).await?;
        let found = arrival.facts.refusals(&facts).into_iter();
        refusals.extend(found.map(|refusal| {
            Error::new(ErrorCode::VmRefused, refusal.reason)
                .with_hint("choose another host, or change what stands against it and ask again")
        }));
        Ok(refusals)
    }

    /// Refuses a disk whose name a volume here has that is none of an earlier move from `host`, which that has given up.
    fn may_take_name(&self, host: &str, name: &str) -> Result<()> {
        let Some(volume) = self.volume_if_any(name)? else { return Ok(()) };
        let document = volume.document();
        let is_leftover = document
            .incoming
            .as_ref()
            .is_some_and(|incoming| incoming.host == host && !matches!(incoming.stage, IncomingStage::Held { .. }));
        if is_leftover {
            return Ok(());
        }
        Err(Error::new(ErrorCode::AlreadyExists, format!("there is a volume {name} already")).with_hint(format!(
            "`transhume volume detach {name}` there if nobody needs it, or `transhume release {name}`"
        )))
    }

    async fn plan_arrival(&self, host: &str, arrival: &Arrival) -> Result<Answer> {
        let mut refusals = self.arrival_refusals(host, arrival).await.unwrap_or_else(|error| vec![error]);
        if arrival.domain.is_some() {
            return Ok(Answer::Planned { refusals, command: Vec::new(), changes: self.domain_changes(arrival) });
        }
        let command = self.command_for(arrival);
        let (words, changes) = match command {
            Ok(command) => {
                let words = std::iter::once(command.program).chain(command.words).collect();
                let shown = |change: vm::machine::Change| VmChange {
                    option: change.option,
                    from: change.from,
                    to: change.to,
                    why: change.why,
                };
                (words, command.changes.into_iter().map(shown).collect())
            }
            Err(error) => {
                refusals.push(error);
                (Vec::new(), Vec::new())
            }
        };
        Ok(Answer::Planned { refusals, command: words, changes })
    }

    /// The machine comes, if the hook has nothing against it.
    async fn prepare_arrival(self: &Arc<Self>, host: &str, arrival: &Arrival) -> Result<Answer> {
        let machine = self.admit_arrival(host, arrival).await?;
        let _operation = machine.operation.lock().await;
        let Some(incoming) = machine.document().incoming else { return Ok(Answer::Done) };
        let prepared = self.run_hook(HookPhase::Prepare, self.hook_at_target(&machine, &incoming)).await;
        if prepared.is_err()
            && let Some(never_ran) = self.never_ran(&machine.document())?
        {
            self.give_up(&machine, &never_ran).await?;
        }
        prepared.map(|()| Answer::Done)
    }

    /// Nobody else takes its name from here on.
    async fn admit_arrival(self: &Arc<Self>, host: &str, arrival: &Arrival) -> Result<Arc<Machine>> {
        if let Some(refusal) = self.arrival_refusals(host, arrival).await?.into_iter().next() {
            return Err(refusal);
        }
        let (monitor, begin) = match &arrival.domain {
            Some(definition) => {
                (Monitor::Libvirt(definition.name.clone()), Begin::Domain(Box::new(definition.clone())))
            }
            None => {
                let command = self.command_for(arrival)?;
                let monitor = Monitor::Qmp(command.monitor.display().to_string());
                (monitor, Begin::Command(Box::new((command, arrival.facts.clone(), arrival.memory.clone()))))
            }
        };
        let known = self.machines.get(&arrival.name);
        // In the order in which the others take them: whoever lets disks of a machine go removes volumes.
        let _operation = match &known {
            Some(known) => Some(known.begin_operation(&*self.env).await?),
            None => None,
        };
        let _membership = self.membership.lock().await;
        match (&known, self.machines.get(&arrival.name)) {
            (_, None) => {}
            (Some(known), Some(now)) if Arc::ptr_eq(known, &now) => {
                if !self.is_replaceable(known, host).await {
                    let message = format!("this host has a VM {} already", arrival.name);
                    return Err(Error::new(ErrorCode::AlreadyExists, message)
                        .with_hint("remove that one, or call this one otherwise"));
                }
                if let Some(never_ran) = self.never_ran(&known.document())? {
                    self.give_up(known, &never_ran).await?;
                }
            }
            (_, Some(_)) => {
                let message = format!("another VM {} has just come here", arrival.name);
                return Err(Error::new(ErrorCode::AlreadyExists, message).with_hint("look at it, and ask again"));
            }
        }
        let disk = |disk: &super::channel::ArrivingDisk| MachineDisk {
            volume: disk.volume.clone(),
            node: disk.node.clone(),
            image: disk.image.clone(),
            format: disk.format.clone(),
            shared: disk.shared.clone(),
            grows: disk.grows,
            cache: disk.cache.clone(),
        };
        let folder = self.machine_folder(&arrival.name);
        let incoming = IncomingMachine {
            id: arrival.id,
            host: host.to_owned(),
            folder,
            runs: arrival.runs,
            domain: None,
            memory: self.memory_places(arrival.id, &arrival.memory)?,
            keeps_volumes: arrival.keeps_volumes,
        };
        let document = MachineDocument {
            disks: arrival.disks.iter().map(disk).collect(),
            description: Some(arrival.description.clone()),
            incoming: Some(incoming),
            ..MachineDocument::new(&arrival.name, monitor)
        };
        document::store(&self.layout, &document)?;
        let machine = Machine::new(document);
        *machine.begin.lock() = Some(begin);
        self.machines.admit(Arc::clone(&machine));
        let what = serde_json::json!({ "host": host, "move": arrival.id });
        self.note(&Peer::daemon(), ("vm.arrival", &arrival.name), what, None);
        Ok(machine)
    }

    /// Starts the QEMU of a machine whose disks are being filled.
    async fn start_arrival(
        self: &Arc<Self>,
        host: &str,
        id: Uuid,
        (channels, postcopy): (u8, bool),
        now: Option<DomainDefinition>,
    ) -> Result<Answer> {
        let (machine, incoming) = self.arriving_machine(host, id)?;
        let _operation = machine.operation.lock().await;
        let begin = machine.begin.lock().clone();
        let (command, facts, regions) = match begin {
            Some(Begin::Command(begin)) => *begin,
            Some(Begin::Domain(definition)) => {
                let definition = current(*definition, now)?;
                return self.start_domain(host, (&machine, &incoming), &definition).await;
            }
            None => return Err(invalid("this daemon was restarted since the VM was announced", "move it again")),
        };
        let document = machine.document();
        if document.process.is_some() {
            return Err(invalid(format!("the QEMU of {} was started already", machine.name), "move it again"));
        }
        let owner = self.machine_owner()?;
        for disk in &document.disks {
            let clients = (owner, Some(MachineClient::Expected));
            self.serve_arriving((host, &disk.volume), &machine.name, clients).await?;
        }
        self.run_hook(HookPhase::Start, self.hook_at_target(&machine, &incoming)).await?;
        self.expect_memory((&*machine, &incoming), &regions, owner)?;
        self.require_own_folder(&machine.name, None)?;
        // Whatever ends this daemon from here on, its successor knows whom to end.
        let note = |process| -> BoxFuture<'_, Result<()>> { Box::pin(self.note_started(&machine, process)) };
        let place = (&*incoming.folder, owner, &note as OnStarted<'_>);
        let hypervisor = self.hypervisors.launch(&machine.name, &command, place).await?;
        *machine.hypervisor.lock() = Some(Arc::clone(&hypervisor));
        self.tend(&machine);
        let own = hypervisor.facts().await?;
        if let Some(difference) = facts.differences(&own).into_iter().next() {
            // QEMU would find it out after the guest was stopped, or never.
            let hint = "start the VM anew with the devices that it has now and processors that both hosts have, or unplug what was plugged in";
            return Err(Error::new(ErrorCode::VmRefused, difference.reason).with_hint(hint));
        }
        let options = MigrationOptions {
            channels,
            bandwidth_bytes_max: 0,
            downtime_limit: Duration::ZERO,
            auto_converge: false,
            postcopy,
            ignores_shared: !regions.is_empty(),
        };
        hypervisor.begin_incoming(&options, &incoming.folder).await?;
        Ok(Answer::Done)
    }

    /// The QEMU of a machine that comes was started: its disks are for that process from here on.
    async fn note_started(&self, machine: &Machine, process: QemuProcess) -> Result<()> {
        self.update_machine(machine, |document| document.process = Some(process.clone()))?;
        for disk in &machine.document().disks {
            self.admit_machine(&disk.volume, &process).await?;
        }
        Ok(())
    }

    /// What the interfaces here have carried that have these addresses.
    fn answer_usage(&self, addresses: &[std::net::IpAddr]) -> Answer {
        let addresses = &addresses[..addresses.len().min(USAGE_ADDRESSES_MAX)];
        let interfaces = self.hosts.interfaces();
        Answer::Usage { counters: interfaces.map_or_else(Vec::new, |interfaces| interfaces.look(addresses)) }
    }

    /// Waits until QEMU has all of the machine, whose guest is to run here if it `runs`.
    async fn arrival_loaded(self: &Arc<Self>, host: &str, (id, runs): (Uuid, Option<bool>)) -> Result<Answer> {
        let (machine, incoming) = self.arriving_machine(host, id)?;
        if let Some(runs) = runs.filter(|runs| *runs != incoming.runs) {
            // On record before the commit: after it this host asks nobody.
            self.update_machine(&machine, |document| {
                document.incoming.iter_mut().for_each(|incoming| incoming.runs = runs);
            })?;
        }
        let hypervisor = self.hypervisor_of(&machine).await?;
        if !machine.is_switching.swap(true, Ordering::Relaxed) {
            self.tell_hook_beside(HookPhase::Switchover, self.hook_at_target(&machine, &incoming));
        }
        super::parallel::refuse_missing(&machine)?;
        let began = self.env.now();
        while !hypervisor.is_loaded().await? {
            if self.env.now().since(began) > LOADED_LIMIT {
                return Err(Error::new(ErrorCode::QmpBusy, format!("QEMU has not loaded {} yet", machine.name)));
            }
            self.env.sleep(LOOK_SOON).await;
        }
        if hypervisor.memory_flow(&|_| {}).await? == MemoryFlow::Cut {
            let message = format!("the memory of {} does not come any more: its connection was lost", machine.name);
            return Err(Error::new(ErrorCode::MoveFailed, message)
                .with_hint("see whether both hosts reach each other, and move it again"));
        }
        if let (None, Some(process)) = (machine.document().process, hypervisor.process()) {
            // A domain of libvirt: that it ends before its guest runs is told by its process alone.
            self.update_machine(&machine, |document| document.process = Some(process.clone()))?;
        }
        Ok(Answer::Done)
    }

    pub(super) async fn hypervisor_of(&self, machine: &Machine) -> Result<Arc<dyn Hypervisor>> {
        let kept = machine.hypervisor.lock().clone();
        if let Some(hypervisor) = kept
            && hypervisor.ended().now_or_never().is_none()
        {
            return Ok(hypervisor);
        }
        let hypervisor = self.hypervisors.reach(&machine.document().monitor).await?;
        *machine.hypervisor.lock() = Some(Arc::clone(&hypervisor));
        Ok(hypervisor)
    }

    /// Waits until this host holds all disks of the machine, and it runs.
    pub(super) async fn run_arrival(self: &Arc<Self>, host: &str, id: Uuid) -> Result<Answer> {
        let is_of = |machine: &Arc<Machine>| {
            machine.arrived.lock().as_ref().is_some_and(|arrived| *arrived == (host.to_owned(), id))
        };
        // After a start of this daemon the record says it, as long as the machine is known here.
        let has_come = |machine: &Arc<Machine>| {
            let document = machine.document();
            let is_following = document.following.is_some_and(|following| following.id == id && following.host == host);
            is_following || document.last_word.is_some_and(|word| word.id == id && word.host == host)
        };
        if self.machines.list().iter().any(|machine| is_of(machine) || has_come(machine)) {
            return Ok(Answer::Done);
        }
        let lost_here =
            |machine: &Arc<Machine>| machine.document().lost.is_some_and(|lost| lost.id == id && lost.host == host);
        if let Some(machine) = self.machines.list().iter().find(|machine| lost_here(machine)) {
            return Err(lost(&machine.name));
        }
        let (machine, _) = self.arriving_machine(host, id)?;
        let began = self.env.now();
        loop {
            match self.look_after(&machine).await? {
                Found::Runs => return Ok(Answer::Done),
                Found::Waits if self.env.now().since(began) < RUN_LIMIT => self.env.sleep(LOOK_SOON).await,
                Found::Waits => {
                    let message = format!("this host does not hold all disks of {} yet", machine.name);
                    return Err(Error::new(ErrorCode::WrongState, message).with_hint("it is asked again"));
                }
                Found::Lost => return Err(lost(&machine.name)),
                Found::GivenUp => {
                    return Err(Error::new(ErrorCode::NotFound, format!("{} was given up here", machine.name)));
                }
            }
        }
    }

    async fn abandon_arrival(self: &Arc<Self>, host: &str, id: Uuid) -> Result<Answer> {
        // What is not there need not be given up.
        let Ok((machine, _)) = self.arriving_machine(host, id) else { return Ok(Answer::Done) };
        let _operation = machine.operation.lock().await;
        let document = machine.document();
        if !self.is_known(&machine) || document.incoming.as_ref().is_none_or(|incoming| incoming.id != id) {
            return Ok(Answer::Done);
        }
        match self.never_ran(&document)? {
            Some(never_ran) => self.give_up(&machine, &never_ran).await.map(|()| Answer::Done),
            None => Err(Error::new(ErrorCode::WrongState, format!("this host holds disks of {}", machine.name))),
        }
    }

    /// Whether another machine of its name may come from `host`: it has gone, or is an earlier move of the same host, which has
    /// given that up.
    async fn is_replaceable(&self, known: &Machine, host: &str) -> bool {
        let document = known.document();
        let is_its = document.incoming.as_ref().is_some_and(|incoming| incoming.host == host);
        let is_abandoned = is_its && matches!(self.never_ran(&document), Ok(Some(_)));
        is_abandoned || is_moved(&document) || self.is_gone(&document).await
    }
}

/// A domain as it is now, if its host has said so; otherwise as it was announced.
fn current(announced: DomainDefinition, now: Option<DomainDefinition>) -> Result<DomainDefinition> {
    match now {
        Some(now) if (&now.name, &now.uuid, &now.folder) == (&announced.name, &announced.uuid, &announced.folder) => {
            Ok(now)
        }
        Some(now) => Err(invalid(format!("{} is another domain than was announced", now.name), "move it again")),
        None => Ok(announced),
    }
}
