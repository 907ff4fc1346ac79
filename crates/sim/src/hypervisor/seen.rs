//! The machine's QEMUs as the daemons see them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ::daemon::machine_types::{
    CpuFacts, DiskReport, FoundMachine, HostFacts, MachineDescription, MachineFacts, MemoryUse, MigrationOptions,
    MigrationPhase, MigrationStatus, QemuProcess, TargetCommand, TargetDomain, Version,
};
use ::daemon::{
    Convergence, Hypervisor, Hypervisors, Lane, MemoryFlow, MonitoredProcess, OnStarted, OnStatus, Outlet, ServedDisk,
    SocketOwner, started_with,
};
use api::v1::{Error, ErrorCode, Monitor};
use futures::future::BoxFuture;
use memory::{GuestMemory, Region, TargetMemory};
use migrate::stream::BoxTransport;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::{Instance, PIECE_BYTES, SimMachine, Stage};
use crate::world::Invariant;

/// How much of a connection's bytes are on their way between QEMU and a daemon.
const SOCKET_BYTES: usize = 16 << 10;

/// The QEMUs as the daemon of one host sees them.
pub(super) struct Seen {
    pub(super) machine: SimMachine,
    pub(super) own: usize,
}

/// The number of a QEMU that runs on each host, and is another VM's.
const BYSTANDER: u32 = u32::MAX;

fn process_of(pid: u32) -> QemuProcess {
    QemuProcess { pid, started: 0, boot: "sim".to_owned() }
}

fn gone() -> Error {
    Error::new(ErrorCode::QmpUnreachable, "nothing listens there")
}

fn facts_version() -> Version {
    Version { major: 7, minor: 2, micro: 0 }
}

impl Hypervisors for Seen {
    fn reach<'a>(&'a self, _: &'a Monitor) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>, Error>> {
        Box::pin(async {
            if self.machine.is_monitor_held(self.own) {
                return Err(Error::new(ErrorCode::QmpBusy, "another client has the monitor"));
            }
            let state = self.machine.shared.state.lock();
            let instance = state.instances[self.own].as_ref().filter(|it| it.stage != Stage::Dead).ok_or_else(gone)?;
            Ok(Arc::new(One { machine: self.machine.clone(), who: (self.own, instance.pid) }) as _)
        })
    }

    fn launch<'a>(
        &'a self,
        _: &'a str,
        command: &'a TargetCommand,
        (folder, _, started): (&'a Path, Option<SocketOwner>, OnStarted<'a>),
    ) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>, Error>> {
        Box::pin(async move {
            let shared = &self.machine.shared;
            self.machine.check_folder(self.own, folder, "a QEMU is started there");
            shared.world.sleep(shared.rng.up_to(Duration::from_millis(3))).await;
            let wrong = if self.machine.is_wrong() { shared.rng.below(3) } else { 3 };
            if wrong == 0 {
                shared.world.fault("qemu-does-not-start", format_args!("the target's QEMU does not start"));
                return Err(Error::new(ErrorCode::VmRefused, "QEMU has ended"));
            }
            let pid = {
                let mut state = shared.state.lock();
                if state.instances[self.own].as_ref().is_some_and(|it| it.stage != Stage::Dead) {
                    drop(state);
                    shared.world.violate(Invariant::OneWriter, "a second QEMU is started on one host");
                    return Err(gone());
                }
                state.last_pid += 1;
                let pid = state.last_pid;
                let monitor = command.monitor.clone();
                let instance = Instance { refuses: wrong == 1, monitor, ..Instance::new(pid, Stage::Waiting) };
                state.instances[self.own] = Some(instance);
                pid
            };
            shared.changed.notify_waiters();
            if let Err(error) = started(process_of(pid)).await {
                self.machine.kill((self.own, pid), "it is not noted");
                return Err(error);
            }
            // Its monitor is there a while later.
            shared.world.sleep(shared.rng.up_to(Duration::from_millis(3))).await;
            if wrong == 2 {
                let (machine, who) = (self.machine.clone(), (self.own, pid));
                let span = shared.rng.up_to(Duration::from_millis(60));
                shared.world.spawn(async move {
                    machine.shared.world.sleep(span).await;
                    let stage = machine.stage(who);
                    // One that has loaded everything is awaited by a commit: what dies from then on dies as on one host.
                    if stage == Stage::Waiting {
                        machine
                            .shared
                            .world
                            .fault("qemu-dies", format_args!("the target's QEMU dies while it is {stage:?}"));
                        machine.kill(who, "it dies");
                    }
                });
            }
            Ok(Arc::new(One { machine: self.machine.clone(), who: (self.own, pid) }) as _)
        })
    }

    fn host_facts<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, Result<HostFacts, Error>> {
        Box::pin(async {
            Ok(HostFacts {
                version: facts_version(),
                machine_types: vec!["pc-i440fx-7.2".to_owned()],
                memory_available_bytes: 1 << 40,
                huge_pages_free: Default::default(),
                cpu: CpuFacts::default(),
                has_kvm: true,
            })
        })
    }

    fn user(&self, _: &str) -> Result<SocketOwner, Error> {
        Ok(SocketOwner { uid: 1, gid: 1 })
    }

    fn started_for(&self, monitor: &Monitor) -> Vec<QemuProcess> {
        let Monitor::Qmp(path) = monitor else { return Vec::new() };
        let path = Path::new(path);
        let monitored = |pid, monitors| MonitoredProcess { process: process_of(pid), monitors };
        let namesake = self.machine.namesake(self.own, path).map(|pid| monitored(pid, vec![path.to_owned()]));
        let state = self.machine.shared.state.lock();
        let own = state.instances[self.own].as_ref().filter(|it| it.stage != Stage::Dead);
        let own = own.map(|it| monitored(it.pid, vec![it.monitor.clone()]));
        // Others run beside it whose command lines have that path in them, too.
        let shown = path.display();
        let beside = monitored(BYSTANDER, [format!("{shown}.old"), format!("/mnt{shown}")].map(PathBuf::from).to_vec());
        started_with(&own.into_iter().chain(namesake).chain([beside]).collect::<Vec<_>>(), path, |_, _| None)
    }

    fn memory_places(&self, _: &Path, id: Uuid, regions: &[Region]) -> Result<Vec<PathBuf>, Error> {
        Ok(regions.iter().map(|region| Path::new("/ram").join(format!("{id}-{}", region.name))).collect())
    }

    fn make_memory(&self, _: &[Region], _: &[PathBuf], _: Option<SocketOwner>) -> Result<Arc<dyn TargetMemory>, Error> {
        Ok(self.machine.make_memory_at(self.own))
    }

    fn found(&self) -> Vec<FoundMachine> {
        Vec::new()
    }

    fn domains(&self) -> BoxFuture<'_, Vec<String>> {
        Box::pin(async { Vec::new() })
    }

    fn lives(&self, process: &QemuProcess) -> bool {
        SimMachine::is_namesake(process.pid) || self.machine.stage((self.own, process.pid)) != Stage::Dead
    }

    fn end<'a>(&'a self, process: &'a QemuProcess) -> BoxFuture<'a, ()> {
        Box::pin(async {
            if process.pid == BYSTANDER || SimMachine::is_namesake(process.pid) {
                let what = "the QEMU of another VM is ended, whose name is this one's, or like it";
                self.machine.shared.world.violate(Invariant::OneWriter, what);
            }
            self.machine.kill((self.own, process.pid), "its daemon ends it");
            self.machine.shared.world.sleep(Duration::from_micros(200)).await;
        })
    }

    fn clear(&self, folder: &Path) {
        self.machine.check_folder(self.own, folder, "what did not come is cleared away");
    }
}

/// One QEMU.
struct One {
    machine: SimMachine,
    who: (usize, u32),
}

impl One {
    fn alive(&self) -> Result<(), Error> {
        if self.machine.stage(self.who) == Stage::Dead { Err(gone()) } else { Ok(()) }
    }

    async fn pause(&self) {
        let shared = &self.machine.shared;
        shared.world.sleep(shared.rng.up_to(Duration::from_micros(300))).await;
    }
}

fn failed() -> Error {
    Error::new(ErrorCode::QmpRefused, "the migration has failed")
}

impl Hypervisor for One {
    fn process(&self) -> Option<QemuProcess> {
        Some(process_of(self.who.1))
    }

    fn facts(&self) -> BoxFuture<'_, Result<MachineFacts, Error>> {
        Box::pin(async {
            self.pause().await;
            self.alive()?;
            self.machine.note_look(self.who);
            Ok(MachineFacts {
                version: facts_version(),
                machine_type: "pc-i440fx-7.2".to_owned(),
                name: None,
                uuid: None,
                memory_bytes: super::outside::regions().iter().map(|region| region.bytes).sum(),
                vcpus: 1,
                cpu_type: "qemu64-x86_64-cpu".to_owned(),
                accelerator: "tcg".to_owned(),
                run_state: self.machine.run_state(self.who).to_owned(),
                blocked_reasons: Vec::new(),
                capabilities: ["events", "return-path", "pause-before-switchover", "late-block-activate", "multifd"]
                    .map(str::to_owned)
                    .to_vec(),
                devices: BTreeSet::new(),
                memory_backends: Vec::new(),
                cpu_features: BTreeMap::new(),
                cpu: CpuFacts::default(),
            })
        })
    }

    fn run_state(&self) -> BoxFuture<'_, Result<String, Error>> {
        Box::pin(async {
            self.pause().await;
            self.alive()?;
            Ok(self.machine.run_state(self.who).to_owned())
        })
    }

    fn state_at_switch(&self) -> Option<String> {
        self.machine.state_at_switch(self.who).map(str::to_owned)
    }

    fn verify_stopped(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            self.pause().await;
            self.alive()?;
            self.machine.note_look(self.who);
            match self.machine.stage(self.who) {
                Stage::Sent => Ok(()),
                stage => Err(Error::new(ErrorCode::QmpRefused, format!("the guest is not as it was left: {stage:?}"))),
            }
        })
    }

    fn quit(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            self.pause().await;
            self.alive()?;
            self.machine.quit(self.who, "its daemon asks it to end");
            Ok(())
        })
    }

    fn memory_use<'a>(&'a self, _: &'a MachineFacts, _: bool) -> BoxFuture<'a, MemoryUse> {
        Box::pin(async { MemoryUse::default() })
    }

    fn description(&self) -> Result<MachineDescription, Error> {
        self.alive()?;
        let mut words = vec!["-machine".to_owned(), "pc".to_owned()];
        for disk in 0..self.machine.shared.seats.lock().len() {
            let node = format!("disk{disk}");
            let blockdev = format!(r#"{{"driver":"file","node-name":"{node}","filename":"/images/{disk}"}}"#);
            words.extend(["-blockdev".to_owned(), blockdev]);
        }
        let file = "memory-backend-file,id=ram,size=384K,share=on,mem-path=/ram/own";
        words.extend(["-object".to_owned(), file.to_owned()]);
        Ok(MachineDescription { program: "/usr/bin/qemu-system-x86_64".to_owned(), words })
    }

    fn memory_regions<'a>(
        &'a self,
        _: &'a MachineFacts,
        _: &'a MachineDescription,
        _: bool,
    ) -> BoxFuture<'a, Result<Vec<Region>, Error>> {
        Box::pin(async {
            self.alive()?;
            self.machine.memory_at(self.who.0).map(|memory| memory.regions().to_vec())
        })
    }

    fn open_memory<'a>(&'a self, _: &'a [Region]) -> BoxFuture<'a, Result<Arc<dyn GuestMemory>, Error>> {
        Box::pin(async {
            self.pause().await;
            self.alive()?;
            self.machine.open_memory_at(self.who.0)
        })
    }

    fn own_disks(&self) -> BoxFuture<'_, Result<Vec<DiskReport>, Error>> {
        Box::pin(async { self.alive().map(|()| Vec::new()) })
    }

    fn require_straight<'a>(&'a self, _: &'a [ServedDisk]) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async {
            self.pause().await;
            self.alive()?;
            if self.machine.sees_snapshot(self.who.0) {
                return Err(Error::new(ErrorCode::WrongState, "a snapshot lies over a disk"));
            }
            Ok(())
        })
    }

    fn ended(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { _ = self.machine.until(self.who, |stage| stage == Stage::Dead).await })
    }

    fn begin_outgoing<'a>(
        &'a self,
        options: &'a MigrationOptions,
        _: (&'a Path, Option<&'a TargetDomain>),
    ) -> BoxFuture<'a, Result<Box<dyn Outlet>, Error>> {
        Box::pin(async move {
            self.pause().await;
            let attempt = {
                let mut state = self.machine.shared.state.lock();
                let instance = state.instances[self.who.0].as_mut().filter(|it| it.stage == Stage::Running);
                let instance = instance.ok_or_else(failed)?;
                (instance.stage, instance.attempt) = (Stage::Sending, instance.attempt + 1);
                instance.attempt
            };
            let mut near = Vec::new();
            for number in 0..=options.channels {
                let (qemu, daemon) = tokio::io::duplex(SOCKET_BYTES);
                near.push(Box::new(daemon) as BoxTransport);
                let world = self.machine.shared.world.clone();
                if number == 0 {
                    let how = (attempt, options.postcopy);
                    world.spawn(self.machine.clone().send(self.who, how, Box::new(qemu)));
                } else {
                    let (machine, who, mut qemu) = (self.machine.clone(), self.who, qemu);
                    world.spawn(async move {
                        // It ends with the migration.
                        let _ = qemu.write_all(&[0xa5; PIECE_BYTES]).await;
                        let is_under_way = |stage| matches!(stage, Stage::Sending | Stage::Stopped | Stage::Completing);
                        machine.until(who, |stage| !is_under_way(stage)).await;
                    });
                }
            }
            near.reverse();
            Ok(Box::new(SimOutlet { near: Mutex::new(near) }) as _)
        })
    }

    fn converge<'a>(
        &'a self,
        _: Convergence,
        stopped: &'a (dyn Fn() + Send + Sync),
        noted: OnStatus<'a>,
    ) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            noted(&status(MigrationPhase::Active));
            let stage = self.machine.until(self.who, |stage| stage != Stage::Sending).await;
            if stage == Stage::Stopped {
                self.machine.may_take_snapshot(self.who.0);
            }
            stopped();
            if stage == Stage::Stopped { Ok(()) } else { Err(failed()) }
        })
    }

    fn complete<'a>(&'a self, noted: OnStatus<'a>) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            if !self.machine.enter(self.who, Stage::Completing, |it| it.stage == Stage::Stopped) {
                return Err(failed());
            }
            noted(&status(MigrationPhase::Device));
            self.machine.save_devices(self.who.0);
            match self.machine.until(self.who, |stage| stage != Stage::Completing).await {
                Stage::Sent | Stage::Following | Stage::Cut => Ok(()),
                _ => Err(failed()),
            }
        })
    }

    fn go_on(&self, runs: bool) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            self.pause().await;
            self.alive()?;
            if self.machine.stage(self.who) == Stage::Cut {
                // QEMU cannot be cancelled then: somebody ends it, and starts the guest on its disks.
                self.machine.shared.world.fault("started-anew", format_args!("the guest is started as after a crash"));
            }
            let goes_on = self.machine.cancel(self.who);
            if (runs || goes_on) && !self.machine.guest_runs(self.who) {
                self.machine.let_run(self.who, "it is told to go on").await;
            }
            Ok(())
        })
    }

    fn begin_incoming<'a>(&'a self, options: &'a MigrationOptions, _: &'a Path) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            self.pause().await;
            let (inlets, incoming) = mpsc::unbounded_channel();
            {
                let mut state = self.machine.shared.state.lock();
                let instance = state.instances[self.who.0].as_mut().filter(|it| it.stage == Stage::Waiting);
                instance.ok_or_else(failed)?.inlets = Some(inlets);
            }
            let machine = self.machine.clone();
            let world = &self.machine.shared.world;
            match options.postcopy {
                true => world.spawn(machine.load_before_memory(self.who, incoming)),
                false => world.spawn(machine.load(self.who, incoming)),
            };
            Ok(())
        })
    }

    fn inlet<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, Result<BoxTransport, Error>> {
        Box::pin(async {
            let (qemu, daemon) = tokio::io::duplex(SOCKET_BYTES);
            let state = self.machine.shared.state.lock();
            let awaits = |it: &&Instance| it.stage == Stage::Waiting || it.flow == MemoryFlow::Cut;
            let instance = state.instances[self.who.0].as_ref().filter(awaits);
            let inlets = instance.and_then(|it| it.inlets.as_ref()).ok_or_else(failed)?;
            inlets.send(Box::new(qemu)).map_err(|_| failed())?;
            Ok(Box::new(daemon) as _)
        })
    }

    fn memory_flow<'a>(&'a self, noted: OnStatus<'a>) -> BoxFuture<'a, Result<MemoryFlow, Error>> {
        Box::pin(async move {
            self.pause().await;
            self.alive()?;
            let bytes_transferred = self.machine.followed(self.who);
            noted(&MigrationStatus { bytes_transferred, ..status(MigrationPhase::PostcopyActive) });
            Ok(self.machine.flow(self.who))
        })
    }

    fn recover_incoming<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async {
            self.pause().await;
            self.machine.wait_again(self.who).then_some(()).ok_or_else(failed)
        })
    }

    fn recover_outgoing<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, Result<Box<dyn Outlet>, Error>> {
        Box::pin(async {
            self.pause().await;
            if !self.machine.enter(self.who, Stage::Following, |it| it.stage == Stage::Cut) {
                return Err(failed());
            }
            let (qemu, daemon) = tokio::io::duplex(SOCKET_BYTES);
            let world = &self.machine.shared.world;
            world.spawn(self.machine.clone().follow(self.who, Box::new(qemu)));
            Ok(Box::new(SimOutlet { near: Mutex::new(vec![Box::new(daemon) as BoxTransport]) }) as _)
        })
    }

    fn is_loaded(&self) -> BoxFuture<'_, Result<bool, Error>> {
        Box::pin(async {
            match self.machine.stage(self.who) {
                Stage::Loaded(_) | Stage::Running => Ok(true),
                Stage::Waiting => Ok(false),
                _ => Err(failed()),
            }
        })
    }

    fn run(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            self.pause().await;
            match self.machine.stage(self.who) {
                Stage::Running if self.machine.is_paused(self.who) => {
                    self.machine.let_run(self.who, "it is told to, again").await;
                }
                Stage::Running => {}
                Stage::Loaded(_) => {
                    let snapshot_at = self.machine.shared.state.lock().snapshot_at;
                    if let Some(host) = snapshot_at {
                        let what = format!("what the guest has written stays in a snapshot at host {host}");
                        self.machine.shared.world.violate(Invariant::AckedWrite, what);
                    }
                    self.machine.begin_to_run(self.who, "it is told to").await;
                }
                _ => return Err(failed()),
            }
            Ok(())
        })
    }
}

fn status(phase: MigrationPhase) -> MigrationStatus {
    MigrationStatus { phase, ..MigrationStatus::default() }
}

struct SimOutlet {
    near: Mutex<Vec<BoxTransport>>,
}

impl Outlet for SimOutlet {
    fn accept(&self) -> BoxFuture<'_, std::io::Result<(Lane, BoxTransport)>> {
        let next = self.near.lock().pop();
        Box::pin(async {
            match next {
                Some(near) => Ok((Lane::Memory, near)),
                None => std::future::pending().await,
            }
        })
    }
}
