//! Whole machines: memory, device state and disks go to another host in one commit.
//!
//! ```text
//!  source                                                          target
//!   running ── plan, prepare ────────────────────────────────────▶ on record: arriving
//!     │ disks: a job each, in one group with the machine ═════════▶ volumes, filled
//!     │ start, when nearly all is copied ────────────────────────▶ exports over the copies, QEMU -incoming, stopped
//!     │ all complete: guest writes go to both sides
//!     │ memory: QEMU's own engine, over connections of the daemons ▶ QEMU
//!   stopped by QEMU (pre-switchover) ── the rest of the memory ──▶ loaded
//!     │ the disks are held, and durable there
//!     ▼ THE COMMIT of the group                                      │
//!   never runs here again ── the disks are taken, run ───────────▶ running
//!     │ QEMU is ended, the disks are let go
//!     ▼
//!   moved
//! ```
//!
//! Before the commit whatever fails leaves the machine running at the source: QEMU's migration is cancelled, or its guest goes
//! on from where it was stopped, and the target's QEMU is ended with the volumes that do not come. After the commit the guest
//! never runs at the source, whoever dies. The target runs it as soon as it holds all disks: it needs nobody for that.
//!
//! | module | what it is |
//! |---|---|
//! | `document` | what is on record of a machine |
//! | `channel` | what the two daemons say |
//! | `authority` | what only one of the two hosts may do, and by which proof |
//! | `outgoing`, `attempt` | a move from here: what is looked at before, and the order above |
//! | `ending` | what is done at the end of a move, also after a restart |
//! | `doubt` | a machine whose commit is in doubt, or that two hosts hold |
//! | `move_rules` | what stands against a move whatever the other host says |
//! | `early` | when the target's QEMU is started |
//! | `incoming` | a move to here |
//! | `budget` | one limit of the network for all disks |
//! | `domains` | what differs for domains of libvirt |
//! | `autostart`, `exports` | domains of libvirt: that a host does not start one that goes, that a QEMU waits for its exports |
//! | `forecast` | what a move takes, foretold |
//! | `found` | machines that run here and are not known |
//! | `hooks` | the operator's program that is run at each phase |
//! | `carrying`, `memory` | the connections of a machine's migration, made and carried between the hosts |
//! | `memory_rates` | what those may take of the network beside others |
//! | `next_start` | who starts a machine whose disks stay where they are |
//! | `own_disks` | whose the disks of a machine are that has come |
//! | `own_folder` | where a machine's sockets are |
//! | `parallel` | the parallel memory engine in a move |
//! | `postcopy` | memory that follows the guest |
//! | `release` | disks that have come are given back to their QEMU |
//! | `stage` | where one host's record of a machine stands, and what it may become |
//! | `shared` | disks that lie where both hosts reach them |
//! | `restart` | machines after a start of the daemon |
//! | `straight` | that nothing lies between a guest and its disks |
//! | `unadopted` | disks that a move would have to adopt |

mod arriving_caches;
mod attempt;
mod authority;
mod autostart;
mod beside;
mod budget;
mod carrying;
mod channel;
mod departing_caches;
mod document;
mod domains;
mod doubt;
mod early;
mod ending;
mod exports;
mod forecast;
mod found;
mod hooks;
mod host_stores;
mod incoming;
mod memory;
mod memory_rates;
mod move_rules;
mod next_start;
mod outgoing;
mod own_disks;
mod own_folder;
mod parallel;
mod postcopy;
mod release;
mod restart;
mod shared;
mod stage;
mod still;
mod straight;
mod tending;
#[cfg(test)]
mod tests;
mod unadopted;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor, Vm, VmAddRequest, VmDisk, VmFacts, VmMove, VmState};
use env::Env;
use futures::future::BoxFuture;
use migrate::stream::{BoxTransport, OnOpened, PeerName, Receiver};
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;
use vm::machine::{DomainDefinition, MachineFacts, TargetCommand};

use crate::daemon::Daemon;
use crate::hosts::OnMemory;
use crate::hypervisor::Hypervisor;
use crate::problem::Result;
use crate::state_dir::check_name;
use crate::volume::Volume;
use crate::workers::Worker;

use forecast::{PlannedMove, Shown};
use hooks::HookTurns;
use stage::Stage;
use tending::lost;

pub(crate) use attempt::MachineMove;
pub use document::{IncomingMachine, MACHINE_VERSION, MachineDisk, MachineDocument, OutgoingMachine};
pub(crate) use host_stores::HostStores;
pub(crate) use restart::recover;

/// How long a request waits for what is under way with its machine: to give disks back to a QEMU takes some seconds.
const OPERATION_LIMIT: Duration = Duration::from_secs(30);

/// All machines.
#[derive(Default)]
pub(crate) struct Machines {
    known: RwLock<BTreeMap<String, Arc<Machine>>>,
    /// What the last moves to other hosts have shown. A machine's own record of its move goes when it comes back.
    shown: Mutex<BTreeMap<(String, u16), Shown>>,
    hook_turns: HookTurns,
}

/// Where a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    /// At this host.
    Here,
    /// At this host, and on its way to another one.
    Leaving,
    /// On its way to this host.
    Coming,
    /// At another host.
    Away,
}

/// A machine while the daemon runs.
pub(crate) struct Machine {
    pub(crate) name: String,
    document: Mutex<MachineDocument>,
    /// One thing that changes it at a time.
    operation: tokio::sync::Mutex<()>,
    /// Its move from here, while this process works on it.
    outgoing: Mutex<Option<Arc<MachineMove>>>,
    problem: Mutex<Option<Error>>,
    /// What its last plan has said.
    planned: Mutex<Option<PlannedMove>>,
    /// How its QEMU is started, of one that comes.
    begin: Mutex<Option<Begin>>,
    /// What takes its memory, of one that comes by the parallel engine.
    receiver: Mutex<Option<Arc<::memory::Receiver>>>,
    /// How many streams of it have come: each gets the next worker.
    streams_taken: AtomicUsize,
    /// The connection to its QEMU, of one that comes.
    hypervisor: Mutex<Option<Arc<dyn Hypervisor>>>,
    /// Whether the hook has heard that one that comes is about to run here.
    is_switching: AtomicBool,
    /// Cuts the connection by which its memory comes.
    cut: tokio::sync::watch::Sender<u64>,
    /// This process has let its guest run, of one that comes: it is not told twice.
    has_run: AtomicBool,
    /// Its move from here waits for nothing that this host can do: once its QEMU has ended a person may have it forgotten.
    may_be_forgotten: AtomicBool,
    /// A person has given up what is left of its memory, of one whose memory follows its guest to another host.
    is_given_up: AtomicBool,
    /// By which move of which host it has come, of one that runs since.
    arrived: Mutex<Option<(String, Uuid)>>,
}

/// How the QEMU of a machine that comes is started.
#[derive(Clone)]
enum Begin {
    /// By this daemon; with what the source's QEMU says, and the memory that the parallel engine brings.
    Command(Box<(TargetCommand, MachineFacts, Vec<::memory::Region>)>),
    /// By libvirt.
    Domain(Box<DomainDefinition>),
}

impl Machine {
    fn new(document: MachineDocument) -> Arc<Self> {
        Arc::new(Self {
            name: document.name.clone(),
            document: Mutex::new(document),
            operation: tokio::sync::Mutex::default(),
            outgoing: Mutex::default(),
            problem: Mutex::default(),
            planned: Mutex::default(),
            begin: Mutex::default(),
            receiver: Mutex::default(),
            streams_taken: AtomicUsize::new(0),
            hypervisor: Mutex::default(),
            is_switching: AtomicBool::new(false),
            has_run: AtomicBool::new(false),
            may_be_forgotten: AtomicBool::new(false),
            cut: tokio::sync::watch::Sender::new(0),
            is_given_up: AtomicBool::new(false),
            arrived: Mutex::default(),
        })
    }

    pub(crate) fn document(&self) -> MachineDocument {
        self.document.lock().clone()
    }

    /// Begins what a request asks for, once nothing else that changes the machine is under way.
    ///
    /// # Errors
    /// Something else is for too long. Nothing has changed then, and nothing will.
    async fn begin_operation(&self, env: &dyn Env) -> Result<tokio::sync::MutexGuard<'_, ()>> {
        let begun = env::timeout(env, OPERATION_LIMIT, self.operation.lock()).await;
        begun.ok_or_else(|| {
            let why = self.problem.lock().as_ref().map(|problem| format!(": {problem}")).unwrap_or_default();
            Error::new(ErrorCode::Busy, format!("another operation on the VM {} is under way{why}", self.name))
                .with_hint("nothing was changed; try again when it is over")
        })
    }

    /// Where it is, as far as is on record.
    pub(crate) fn place(&self) -> Where {
        let document = self.document.lock();
        match () {
            () if document.outgoing.is_some() => Where::Leaving,
            () if document.incoming.is_some() => Where::Coming,
            () if is_moved(&document) => Where::Away,
            () => Where::Here,
        }
    }

    pub(crate) fn outgoing(&self) -> Option<Arc<MachineMove>> {
        self.outgoing.lock().clone()
    }
}

impl Machines {
    pub(crate) fn get(&self, name: &str) -> Option<Arc<Machine>> {
        self.known.read().get(name).cloned()
    }

    pub(crate) fn list(&self) -> Vec<Arc<Machine>> {
        self.known.read().values().cloned().collect()
    }

    fn admit(&self, machine: Arc<Machine>) {
        self.known.write().insert(machine.name.clone(), machine);
    }

    fn forget(&self, name: &str) {
        self.known.write().remove(name);
    }
}

/// What serves other hosts: streams of volumes, and what they say of machines.
pub(crate) struct Reception {
    daemon: Arc<Daemon>,
    receiver: Arc<Receiver>,
    /// Where processes are started and waited for: streams go on meanwhile.
    worker: Worker,
}

impl Reception {
    /// # Errors
    /// There are no threads to be had.
    pub(crate) fn new(daemon: &Arc<Daemon>, receiver: Arc<Receiver>) -> Result<Arc<Self>> {
        let worker = daemon.spawner.spawn_worker("machines")?;
        Ok(Arc::new(Self { daemon: Arc::clone(daemon), receiver, worker }))
    }
}

impl crate::hosts::Reception for Reception {
    fn serve(
        self: Arc<Self>,
        transport: BoxTransport,
        peer: PeerName,
        opened: OnOpened,
    ) -> BoxFuture<'static, block::Result<()>> {
        crate::hosts::Reception::serve(Arc::clone(&self.receiver), transport, peer, opened)
    }

    fn serve_machine(
        self: Arc<Self>,
        transport: BoxTransport,
        peer: PeerName,
        opened: OnMemory,
    ) -> BoxFuture<'static, block::Result<()>> {
        let lost =
            |error: std::io::Error| block::Error::new(block::ErrorKind::Disconnected, "about a VM").with_source(error);
        let served = self.worker.spawn(incoming::serve(Arc::clone(&self.daemon), transport, (peer, opened)));
        Box::pin(async move { served.await.unwrap_or(Ok(())).map_err(lost) })
    }
}

impl Daemon {
    /// The machine `name`.
    pub(crate) fn machine(&self, name: &str) -> Result<Arc<Machine>> {
        self.machines.get(name).ok_or_else(|| {
            Error::new(ErrorCode::NotFound, format!("there is no VM {name} here"))
                .with_hint("`transhume vm ls` lists them; `transhume vm add NAME --qmp PATH` adds one that runs")
        })
    }

    /// Changes what is on record of a machine, durably.
    fn update_machine(&self, machine: &Machine, change: impl FnOnce(&mut MachineDocument)) -> Result<()> {
        let mut document = machine.document.lock();
        let mut changed = document.clone();
        change(&mut changed);
        let (before, after) = (Stage::of(&document), Stage::of(&changed));
        if !before.may_become(after) {
            let message = format!("{} is on record as {before:?}, which does not become {after:?}", machine.name);
            return Err(Error::new(ErrorCode::Internal, message).with_hint("this is a defect of this program"));
        }
        document::store(&self.layout, &changed)?;
        *document = changed;
        Ok(())
    }

    /// Makes a running machine known.
    pub(crate) async fn add_machine(&self, request: VmAddRequest) -> Result<Vm> {
        check_name(&request.name)?;
        let process = self.hypervisors.reach(&request.monitor).await?.process();
        let _membership = self.membership.lock().await;
        for machine in self.machines.list() {
            let document = machine.document();
            let is_same = document.process.is_some() && document.process == process;
            if machine.name == request.name && self.has_ended_as_known(&document) {
                // It was here before.
                continue;
            }
            if machine.name == request.name || is_same {
                let message = format!("{} is known already, as {}", document.monitor, machine.name);
                return Err(Error::new(ErrorCode::AlreadyExists, message)
                    .with_hint(format!("use that name, or `transhume vm rm {}` first", machine.name)));
            }
        }
        let document = MachineDocument { process, ..MachineDocument::new(&request.name, request.monitor) };
        document::store(&self.layout, &document)?;
        let machine = Machine::new(document);
        self.machines.admit(Arc::clone(&machine));
        Ok(self.show_machine(&machine).await)
    }

    /// Makes a machine known whose disks are volumes already. Done if it is known.
    pub(crate) async fn add_machine_of(&self, name: &str, monitor: Monitor, disks: Vec<MachineDisk>) -> Result<()> {
        let process = self.hypervisors.reach(&monitor).await?.process();
        let _membership = self.membership.lock().await;
        if self.machines.get(name).is_some() {
            return Ok(());
        }
        let document = MachineDocument { process, disks, ..MachineDocument::new(name, monitor) };
        document::store(&self.layout, &document)?;
        self.machines.admit(Machine::new(document));
        Ok(())
    }

    /// Forgets a machine. What runs goes on.
    pub(crate) async fn remove_machine(self: &Arc<Self>, name: &str) -> Result<Vm> {
        let machine = self.machine(name)?;
        let _operation = machine.begin_operation(&*self.env).await?;
        let shown = self.show_machine(&machine).await;
        let document = machine.document();
        if document.outgoing.is_some() && !self.may_be_forgotten(&machine, &document) {
            return Err(Error::new(ErrorCode::Busy, format!("{name} is being moved")).with_hint(format!(
                "wait for it, or `transhume vm cancel {name}` first; `transhume vm show {name}` says what it waits for"
            )));
        }
        if let Some(incoming) = &document.incoming {
            let is_switching = machine.is_switching.load(Ordering::Relaxed) || self.may_be_committed(&machine).await;
            match self.never_ran(&document)? {
                // The other host hears that it does not come, and its guest goes on there.
                Some(never_ran) if !is_switching => {
                    self.give_up(&machine, &never_ran).await?;
                    return Ok(shown);
                }
                // What this host holds of it stays, and there is nothing to end.
                None if !is_switching && self.is_nothing_left(&document) => {}
                _ => {
                    let message = format!("{name} comes from {}", incoming.host);
                    return Err(Error::new(ErrorCode::Busy, message).with_hint(format!(
                        "`transhume vm cancel {name}` there; `transhume vm resolve {name}` says what both have; if {} knows of no such \
                         move any more, end its QEMU here yourself first",
                        incoming.host
                    )));
                }
            }
        }
        if let Some(following) = &document.following {
            let message = format!("the memory of {name} still comes from {}", following.host);
            return Err(Error::new(ErrorCode::Busy, message).with_hint(format!(
                "wait until all of it is here; if it never will be, `transhume vm resolve {name} --lost` ends its QEMU"
            )));
        }
        self.free_disks(&document).await?;
        self.forget_machine(&machine)?;
        Ok(shown)
    }

    /// Whether the other host may have committed the move of a machine that comes: its QEMU has all of it, so the only guest may be here.
    async fn may_be_committed(&self, machine: &Machine) -> bool {
        let document = machine.document();
        if document.process.as_ref().is_some_and(|process| !self.hypervisors.lives(process)) {
            return false;
        }
        if document.process.is_none() && matches!(document.monitor, Monitor::Qmp(_)) {
            // None was started yet.
            return false;
        }
        match self.hypervisor_of(machine).await {
            Ok(hypervisor) => hypervisor.is_loaded().await.unwrap_or(true),
            Err(_) => true,
        }
    }

    /// Whether no QEMU of a machine that comes is left here, on record or not.
    fn is_nothing_left(&self, document: &MachineDocument) -> bool {
        let is_qmp = matches!(document.monitor, Monitor::Qmp(_));
        let has_ended = document.process.as_ref().is_none_or(|process| !self.hypervisors.lives(process));
        is_qmp && has_ended && self.hypervisors.started_for(&document.monitor).is_empty()
    }

    /// Whether the move of a machine waits only for another host or a missing record, and nothing runs here.
    fn may_be_forgotten(&self, machine: &Machine, document: &MachineDocument) -> bool {
        let has_ended = document.process.as_ref().is_some_and(|process| !self.hypervisors.lives(process));
        has_ended && machine.may_be_forgotten.load(Ordering::Acquire)
    }

    fn forget_machine(&self, machine: &Machine) -> Result<()> {
        document::remove(&self.layout, &machine.name)?;
        self.machines.forget(&machine.name);
        Ok(())
    }

    /// How the API shows all machines.
    pub(crate) async fn show_machines(&self) -> Vec<Vm> {
        let machines = self.machines.list();
        futures::future::join_all(machines.iter().map(|machine| self.show_machine(machine))).await
    }

    /// How the API shows one.
    pub(crate) async fn show_machine(&self, machine: &Machine) -> Vm {
        let document = machine.document();
        let mut shown = Vm {
            name: machine.name.clone(),
            state: VmState::Gone,
            monitor: document.monitor.clone(),
            pid: document.process.as_ref().filter(|it| self.hypervisors.lives(it)).map(|it| it.pid),
            facts: None,
            disks: Vec::new(),
            host: None,
            last_move: self.show_machine_move(machine).ok(),
            problem: machine.problem.lock().as_ref().map(ToString::to_string),
        };
        if document.lost.is_some() {
            shown.problem = Some(lost(&machine.name).to_string());
        }
        if let Some(moved) = document.last_move.as_ref().filter(|_| is_moved(&document)) {
            (shown.state, shown.host, shown.pid) = (VmState::Moved, Some(moved.to.clone()), None);
            return shown;
        }
        if let Some(outgoing) = &document.outgoing {
            (shown.state, shown.host) = (VmState::Moving, Some(outgoing.host.clone()));
        }
        if let Some(incoming) = &document.incoming {
            (shown.state, shown.host) = (VmState::Arriving, Some(incoming.host.clone()));
        }
        match self.look_at(&document).await {
            Ok((process, facts, disks)) => {
                shown.pid = process.or(shown.pid);
                if shown.state == VmState::Gone {
                    shown.state = if facts.run_state == "running" { VmState::Running } else { VmState::Paused };
                }
                (shown.facts, shown.disks) = (Some(show_facts(&facts)), disks);
            }
            Err(error) => shown.problem = shown.problem.or_else(|| Some(error.to_string())),
        }
        shown
    }

    async fn look_at(&self, document: &MachineDocument) -> Result<(Option<u32>, MachineFacts, Vec<VmDisk>)> {
        let hypervisor = self.hypervisors.reach(&document.monitor).await?;
        let facts = hypervisor.facts().await?;
        let pid = hypervisor.process().map(|process| process.pid);
        Ok((pid, facts, self.disks_of(document, &*hypervisor).await?))
    }

    /// The disks of a machine, those included that are not ours.
    async fn disks_of(&self, document: &MachineDocument, hypervisor: &dyn Hypervisor) -> Result<Vec<VmDisk>> {
        let mut disks = Vec::new();
        for disk in &document.disks {
            let volume = self.volume(&disk.volume)?;
            let file = volume.document().backend.to_string();
            let size_bytes = volume.show().size_bytes;
            disks.push(known_disk(&disk.node, (file, disk.format.clone()), size_bytes, Some(&disk.volume)));
        }
        let is_listed = |volume: &Arc<Volume>| document.disks.iter().any(|disk| disk.volume == volume.name);
        for volume in self.adopted_from(&document.monitor).into_iter().filter(|volume| !is_listed(volume)) {
            let adopted = volume.document();
            let Some(adoption) = &adopted.adoption else { continue };
            let (node, file) = (adoption.node.clone(), adopted.backend.to_string());
            let size_bytes = volume.show().size_bytes;
            let of = (file, Some(adoption.format.clone()));
            disks.push(known_disk(&node, of, size_bytes, Some(&volume.name)));
        }
        for report in hypervisor.own_disks().await? {
            if disks.iter().any(|disk| disk.node == report.node) {
                continue;
            }
            let size_bytes = report.bytes.unwrap_or_default();
            let of = (report.image.display().to_string(), Some(report.format.clone()));
            disks.push(known_disk(&report.node, of, size_bytes, None));
        }
        Ok(disks)
    }

    /// The volumes that were adopted from the QEMU behind `monitor`, by name.
    fn adopted_from(&self, monitor: &Monitor) -> Vec<Arc<Volume>> {
        let is_its = |volume: &Arc<Volume>| {
            volume.document().adoption.as_ref().is_some_and(|adoption| adoption.monitor == *monitor)
        };
        self.volumes().into_iter().filter(is_its).collect()
    }

    /// Whether the process on record of a machine has ended. Its QEMU may have been started again since.
    fn has_ended_as_known(&self, document: &MachineDocument) -> bool {
        let lives = document.process.as_ref().is_some_and(|process| self.hypervisors.lives(process));
        !lives && document.outgoing.is_none() && document.incoming.is_none()
    }

    /// Whether the QEMU of a machine has ended, and no other one answers for it, so that another machine may have its name.
    async fn is_gone(&self, document: &MachineDocument) -> bool {
        if !self.has_ended_as_known(document) {
            return false;
        }
        if matches!(document.monitor, Monitor::Libvirt(_)) {
            return true;
        }
        let reached = self.hypervisors.reach(&document.monitor).await;
        reached.err().is_some_and(|error| error.code == ErrorCode::QmpUnreachable)
    }

    /// How the API shows the move of a machine from here, the last if none is under way.
    pub(crate) fn show_machine_move(&self, machine: &Machine) -> Result<VmMove> {
        if let Some(outgoing) = machine.outgoing() {
            return Ok(outgoing.show(self));
        }
        machine.document().last_move.ok_or_else(|| {
            Error::new(ErrorCode::NotFound, format!("{} was not moved from here", machine.name))
                .with_hint(format!("`transhume vm move {} --to HOST`", machine.name))
        })
    }
}

/// Whether a machine is at another host, as far as is on record.
fn is_moved(document: &MachineDocument) -> bool {
    let has_moved = document.last_move.as_ref().is_some_and(|last| last.error.is_none());
    has_moved && document.outgoing.is_none() && document.incoming.is_none() && document.process.is_none()
}

fn show_facts(facts: &MachineFacts) -> VmFacts {
    VmFacts {
        qemu: facts.version.to_string(),
        machine: facts.machine_type.clone(),
        memory_bytes: facts.memory_bytes,
        vcpus: facts.vcpus,
        accelerator: facts.accelerator.clone(),
    }
}

fn known_disk(
    node: &str,
    (file, format): (String, Option<String>),
    size_bytes: u64,
    volume: Option<&String>,
) -> VmDisk {
    let (handling, not_shared) = (None, None);
    VmDisk { node: node.to_owned(), file, size_bytes, format, volume: volume.cloned(), handling, not_shared }
}
