//! QEMU as a hypervisor: over its monitor, its migration through unix sockets.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor};
use env::EnvRef;
use futures::future::{BoxFuture, Either, select};
use memory::{GuestMemory, Region, TargetMemory};
use migrate::stream::BoxTransport;
use tokio::net::{UnixListener, UnixStream};

use uuid::Uuid;
use vm::machine::{
    self, FoundMachine, HostFacts, MachineDescription, MachineFacts, MemoryUse, MigrationOptions, MigrationPhase,
    MigrationStatus, TargetCommand, TargetDomain,
};
use vm::{CommandLine, QemuProcess, Qmp, Sources, Virsh};

use super::libvirt::{self, Domain};
use super::{
    Convergence, Hypervisor, Hypervisors, Lane, Libvirt, MemoryFlow, Monitors, OnStarted, OnStatus, Outlet, ServedDisk,
    launch, listening_at, outside, straight,
};
use crate::clients::SocketOwner;
use crate::problem::{Result, of_state, of_vm};

/// How long the rest of the memory may take.
const SWITCH_LIMIT: Duration = Duration::from_secs(30);
/// How long a killed QEMU is waited for, and how often that is looked at.
const END_LIMIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(1);
/// How long libvirt may take to say which domains it has.
const VIRSH_LIMIT: Duration = Duration::from_secs(5);
/// How often the memory is looked at while it is copied.
const CONVERGE_LOOK: Duration = Duration::from_millis(20);

/// Whether programs that are not root's may take page faults of the kernel's own accesses, as QEMU must in post-copy.
const USERFAULTFD_SWITCH: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// The QEMUs of this host.
pub(crate) struct Qemus {
    env: EnvRef,
    monitors: Arc<Monitors>,
}

impl Qemus {
    pub(crate) const fn new(env: EnvRef, monitors: Arc<Monitors>) -> Self {
        Self { env, monitors }
    }
}

impl Hypervisors for Qemus {
    fn reach<'a>(&'a self, monitor: &'a Monitor) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>> {
        Box::pin(async move {
            let path = match monitor {
                Monitor::Qmp(path) => path,
                Monitor::Libvirt(domain) => {
                    return Ok(Arc::new(Domain::reach(domain, &self.monitors, &self.env).await?) as _);
                }
            };
            let qmp = self.monitors.connect(Path::new(path), &self.env).await.map_err(|error| of_vm(&error))?;
            Ok(Arc::new(Qemu::new(qmp)) as _)
        })
    }

    fn launch<'a>(
        &'a self,
        name: &'a str,
        command: &'a TargetCommand,
        (folder, owner, started): (&'a Path, Option<SocketOwner>, OnStarted<'a>),
    ) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>> {
        Box::pin(async move {
            launch::make_folder(folder, owner)?;
            let place = (folder, owner, started);
            let qmp = launch::launch(name, command, place, (&self.monitors, &self.env)).await?;
            Ok(Arc::new(Qemu::new(qmp)) as _)
        })
    }

    fn host_facts<'a>(&'a self, program: &'a Path) -> BoxFuture<'a, Result<HostFacts>> {
        Box::pin(async move { HostFacts::read(program).await.map_err(|error| of_vm(&error)) })
    }

    fn user(&self, name: &str) -> Result<SocketOwner> {
        let found = nix::unistd::User::from_name(name).ok().flatten();
        let found = found.ok_or_else(|| {
            Error::new(ErrorCode::ConfigInvalid, format!("`vm-user` names {name}, who is no user of this host"))
                .with_hint("name a user that exists there")
        })?;
        Ok(SocketOwner { uid: found.uid.as_raw(), gid: found.gid.as_raw() })
    }

    fn started_for(&self, monitor: &Monitor) -> Vec<QemuProcess> {
        let Monitor::Qmp(path) = monitor else { return Vec::new() };
        listening_at(Path::new(path))
    }

    fn found(&self) -> Vec<FoundMachine> {
        FoundMachine::all()
    }

    fn refuses_postcopy(&self, owner: Option<SocketOwner>) -> Option<Error> {
        let uid = owner.map_or_else(|| rustix::process::geteuid().as_raw(), |owner| owner.uid);
        let said = std::fs::read_to_string(USERFAULTFD_SWITCH).unwrap_or_default();
        // QEMU itself checks the rest when it is asked to wait for the memory.
        (uid != 0 && said.trim() == "0").then(|| {
            let message = "the kernel of this host lets QEMU's user take no page faults (vm.unprivileged_userfaultfd)";
            Error::new(ErrorCode::VmRefused, message)
                .with_hint("`sysctl vm.unprivileged_userfaultfd=1` there, or leave --postcopy out")
        })
    }

    fn memory_places(&self, folder: &Path, id: Uuid, regions: &[Region]) -> Result<Vec<PathBuf>> {
        outside::places(folder, id, regions)
    }

    fn make_memory(
        &self,
        regions: &[Region],
        places: &[PathBuf],
        owner: Option<SocketOwner>,
    ) -> Result<Arc<dyn TargetMemory>> {
        outside::make(regions, places, owner)
    }

    fn remove_memory(&self, places: &[PathBuf]) {
        outside::remove(places);
    }

    fn domains(&self) -> BoxFuture<'_, Vec<String>> {
        Box::pin(async {
            let virsh = Virsh::default();
            let listed = env::timeout(&*self.env, VIRSH_LIMIT, virsh.run(&["list", "--name"])).await;
            // Where there is no libvirt it has no domains.
            let names = listed.and_then(std::result::Result::ok).unwrap_or_default();
            names.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
        })
    }

    fn lives(&self, process: &QemuProcess) -> bool {
        process.lives()
    }

    fn end<'a>(&'a self, process: &'a QemuProcess) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let began = self.env.now();
            while process.lives() && self.env.now().since(began) < END_LIMIT {
                if let Err(error) = process.kill() {
                    tracing::warn!(pid = process.pid, %error, "a QEMU could not be killed");
                }
                self.env.sleep(LOOK).await;
            }
        })
    }

    fn clear(&self, folder: &Path) {
        if let Err(error) = std::fs::remove_dir_all(folder)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%error, folder = %folder.display(), "what a VM has left could not be removed");
        }
    }

    fn libvirt(&self) -> Option<&dyn Libvirt> {
        Some(self)
    }
}

impl Libvirt for Qemus {
    fn instance(&self) -> BoxFuture<'_, Result<String>> {
        Box::pin(libvirt::instance())
    }

    fn knows<'a>(&'a self, name: &'a str, uuid: &'a str) -> BoxFuture<'a, Result<bool>> {
        Box::pin(libvirt::knows(name, uuid))
    }

    fn expect(
        &self,
        name: &str,
        (folder, owner): (&Path, Option<SocketOwner>),
    ) -> Result<(Arc<dyn Hypervisor>, PathBuf)> {
        launch::make_folder(folder, owner)?;
        Ok((Arc::new(Domain::new(name, &self.monitors, &self.env)), libvirt::memory_socket(folder)))
    }

    fn inlet(&self) -> BoxFuture<'_, Result<BoxTransport>> {
        Box::pin(libvirt::inlet())
    }

    fn end<'a>(&'a self, uuid: &'a str) -> BoxFuture<'a, ()> {
        Box::pin(libvirt::end(uuid, &self.env))
    }
}

/// One QEMU.
struct Qemu {
    qmp: Qmp,
    /// What its guest did when it was stopped for the switch.
    at_switch: parking_lot::Mutex<Option<String>>,
}

impl Hypervisor for Qemu {
    fn process(&self) -> Option<QemuProcess> {
        self.qmp.process_id().and_then(QemuProcess::of)
    }

    fn facts(&self) -> BoxFuture<'_, Result<MachineFacts>> {
        Box::pin(async { MachineFacts::read(&self.qmp).await.map_err(|error| of_vm(&error)) })
    }

    fn memory_use<'a>(&'a self, facts: &'a MachineFacts, watches: bool) -> BoxFuture<'a, MemoryUse> {
        Box::pin(machine::memory_use(&self.qmp, facts, watches))
    }

    fn description(&self) -> Result<MachineDescription> {
        let refuse = |why: String| {
            Error::new(ErrorCode::VmRefused, format!("how its QEMU was started cannot be told: {why}"))
                .with_hint("let the daemon see its process: both in one PID namespace, and the daemon as root")
        };
        let pid = self.qmp.process_id();
        let pid = pid.ok_or_else(|| refuse("the kernel does not say which process it is".to_owned()))?;
        let found = MachineDescription::of_process(pid).map_err(|error| refuse(error.to_string()))?;
        found.ok_or_else(|| refuse(format!("process {pid} is no QEMU")))
    }

    fn own_disks(&self) -> BoxFuture<'_, Result<Vec<vm::DiskReport>>> {
        Box::pin(async {
            let pid = self.qmp.process_id();
            let command_line = pid.and_then(|pid| CommandLine::of_process(pid).ok().flatten());
            let sources = Sources { command_line, process: self.process(), ..Sources::default() };
            let mut reports = vm::inventory(&self.qmp, &sources).await.map_err(|error| of_vm(&error))?;
            reports.retain(|report| !matches!(report.verdict, vm::Adoptability::Adopted));
            Ok(reports)
        })
    }

    fn require_straight<'a>(&'a self, disks: &'a [ServedDisk]) -> BoxFuture<'a, Result<()>> {
        Box::pin(straight::require_straight(&self.qmp, disks))
    }

    fn ended(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.qmp.ended())
    }

    fn memory_regions<'a>(
        &'a self,
        facts: &'a MachineFacts,
        description: &'a MachineDescription,
        adopted: bool,
    ) -> BoxFuture<'a, Result<Vec<Region>>> {
        Box::pin(outside::regions(&self.qmp, facts, description, adopted))
    }

    fn open_memory<'a>(&'a self, regions: &'a [Region]) -> BoxFuture<'a, Result<Arc<dyn GuestMemory>>> {
        Box::pin(outside::open(&self.qmp, regions))
    }

    fn begin_outgoing<'a>(
        &'a self,
        options: &'a MigrationOptions,
        (path, _): (&'a Path, Option<&'a TargetDomain>),
    ) -> BoxFuture<'a, Result<Box<dyn Outlet>>> {
        Box::pin(async move {
            machine::prepare_outgoing(&self.qmp, options).await.map_err(|error| of_vm(&error))?;
            // Once it migrates, a QEMU without memory to send stops its guest at once.
            *self.at_switch.lock() = None;
            self.note_run_state().await?;
            let owner = self.qmp.process_id().and_then(owner_of);
            let outlet = Socket::open(path, owner)?;
            machine::begin_outgoing(&self.qmp, path).await.map_err(|error| of_vm(&error))?;
            Ok(Box::new(outlet) as _)
        })
    }

    /// QEMU starts a guest that it has stopped for the switch again when the connection fails. QEMU 7.2 does that without taking
    /// the disks back: the next write of the guest ends it with an assertion. A guest that was stopped before stays stopped until
    /// `cont`, which takes the disks back. So the guest is stopped from here, if QEMU has not done so at the end of the same pass. To
    /// give QEMU a lower limit, so that it never does, is no way out: with 1 ms emulated guests of QEMU 7.2 lost writes to their
    /// memory in most moves, over one connection as over several, whoever stopped them.
    fn converge<'a>(
        &'a self,
        convergence: Convergence,
        stopped: &'a (dyn Fn() + Send + Sync),
        noted: OnStatus<'a>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.note_run_state().await?;
            if convergence.without_memory && convergence.stops_guest {
                stopped();
                machine::stop_guest(&self.qmp).await.map_err(|error| of_vm(&error))?;
            } else if convergence.stops_guest || convergence.postcopy {
                let left = self.after_a_pass(convergence, noted).await?;
                if matches!(left, AfterPass::Little) {
                    self.note_run_state().await?;
                }
                stopped();
                let switch = match left {
                    AfterPass::Little => machine::stop_guest(&self.qmp).await,
                    AfterPass::Much => machine::start_postcopy(&self.qmp).await,
                    AfterPass::Stopped => Ok(()),
                };
                switch.map_err(|error| of_vm(&error))?;
                let reached = self.until(MigrationPhase::PreSwitchover, noted, None).await;
                stopped();
                return reached;
            }
            let watched = async {
                loop {
                    self.qmp.env().sleep(CONVERGE_LOOK).await;
                    if let Err(error) = self.note_run_state().await {
                        return error;
                    }
                }
            };
            let reached = pin!(self.until(MigrationPhase::PreSwitchover, noted, None));
            let reached = match select(reached, pin!(watched)).await {
                Either::Left((reached, _)) => reached,
                Either::Right((error, _)) => Err(error),
            };
            stopped();
            reached
        })
    }

    fn complete<'a>(&'a self, noted: OnStatus<'a>) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            machine::switch_over(&self.qmp).await.map_err(|error| of_vm(&error))?;
            let is_sent = |status: &MigrationStatus| {
                noted(status);
                matches!(status.phase, MigrationPhase::Completed | MigrationPhase::PostcopyActive)
            };
            let sent = machine::wait_for(&self.qmp, is_sent, Some(SWITCH_LIMIT)).await;
            sent.map(drop).map_err(|error| of_vm(&error))
        })
    }

    fn plan_release<'a>(
        &'a self,
        request: &'a vm::AdoptionRequest,
        image: vm::ArrivedImage<'a>,
    ) -> BoxFuture<'a, Result<Option<vm::Plan>>> {
        Box::pin(async move {
            let plan = vm::Plan::of_arrived(&self.qmp, request, image).await;
            plan.map(Some).map_err(|error| of_vm(&error))
        })
    }

    fn memory_flow<'a>(&'a self, noted: OnStatus<'a>) -> BoxFuture<'a, Result<MemoryFlow>> {
        Box::pin(async move {
            let status = machine::status(&self.qmp).await.map_err(|error| of_vm(&error))?;
            match status.phase {
                MigrationPhase::Completed => Ok(MemoryFlow::Complete),
                MigrationPhase::PostcopyPaused => Ok(MemoryFlow::Cut),
                MigrationPhase::Failed | MigrationPhase::Cancelled => {
                    let why = status.error.unwrap_or_else(|| "QEMU does not say why".to_owned());
                    let message = format!("the migration of the memory is {}: {why}", status.phase);
                    Err(Error::new(ErrorCode::QmpRefused, message).with_hint("see QEMU's log"))
                }
                _ => {
                    noted(&status);
                    Ok(MemoryFlow::Following)
                }
            }
        })
    }

    fn recover_incoming<'a>(&'a self, folder: &'a Path) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let socket = migration_socket(folder);
            machine::recover_incoming(&self.qmp, &socket).await.map_err(|error| of_vm(&error))
        })
    }

    fn recover_outgoing<'a>(&'a self, path: &'a Path) -> BoxFuture<'a, Result<Box<dyn Outlet>>> {
        Box::pin(async move {
            let outlet = Socket::open(path, self.qmp.process_id().and_then(owner_of))?;
            machine::recover_outgoing(&self.qmp, path).await.map_err(|error| of_vm(&error))?;
            Ok(Box::new(outlet) as _)
        })
    }

    fn state_at_switch(&self) -> Option<String> {
        self.at_switch.lock().clone()
    }

    fn run_state(&self) -> BoxFuture<'_, Result<String>> {
        Box::pin(async { machine::run_state(&self.qmp).await.map_err(|error| of_vm(&error)) })
    }

    fn verify_stopped(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async {
            machine::verify_stopped(&self.qmp).await.map_err(|error| {
                Error { code: ErrorCode::MoveFailed, ..of_vm(&error) }
                    .with_hint("see which other program uses a monitor of this QEMU, and move it again without that")
            })
        })
    }

    fn quit(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { machine::quit(&self.qmp).await.map_err(|error| of_vm(&error)) })
    }

    fn go_on(&self, runs: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let cancelled = machine::cancel(&self.qmp).await;
            if let Err(error) = &cancelled {
                tracing::warn!(%error, "QEMU's migration could not be cancelled");
            }
            let resumed = if runs { machine::resume(&self.qmp).await } else { cancelled };
            resumed.map_err(|error| of_vm(&error))
        })
    }

    fn begin_incoming<'a>(&'a self, options: &'a MigrationOptions, folder: &'a Path) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            machine::prepare_incoming(&self.qmp, options).await.map_err(|error| of_vm(&error))?;
            let socket = migration_socket(folder);
            machine::begin_incoming(&self.qmp, &socket).await.map_err(|error| of_vm(&error))
        })
    }

    fn inlet<'a>(&'a self, folder: &'a Path) -> BoxFuture<'a, Result<BoxTransport>> {
        Box::pin(async move {
            let socket = migration_socket(folder);
            let stream = UnixStream::connect(&socket).await.map_err(|error| {
                let message = format!("QEMU takes no memory at {}: {error}", socket.display());
                Error::new(ErrorCode::VmRefused, message).with_hint("see its log in the same folder")
            })?;
            Ok(Box::new(stream) as _)
        })
    }

    fn is_loaded(&self) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async { machine::is_loaded(&self.qmp).await.map_err(|error| of_vm(&error)) })
    }

    fn stop(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { machine::stop_guest(&self.qmp).await.map_err(|error| of_vm(&error)) })
    }

    fn run(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { machine::start_guest(&self.qmp).await.map_err(|error| of_vm(&error)) })
    }
}

impl Qemu {
    fn new(qmp: Qmp) -> Self {
        Self { qmp, at_switch: parking_lot::Mutex::default() }
    }

    /// Notes what the guest does, as long as it is not stopped for the switch. What QEMU cannot carry to another one ends the migration.
    async fn note_run_state(&self) -> Result<()> {
        let state = machine::run_state(&self.qmp).await.map_err(|error| of_vm(&error))?;
        if machine::is_stopped_for_switch(&state) {
            return Ok(());
        }
        machine::refuse_state(&state, self.qmp.version()).map_err(|error| refused_state(&error))?;
        *self.at_switch.lock() = Some(state);
        Ok(())
    }

    /// Waits until what is left of the memory takes no longer than the limit; in post-copy for one pass, however much is left then.
    async fn after_a_pass(&self, convergence: Convergence, noted: OnStatus<'_>) -> Result<AfterPass> {
        let mut passes = 1;
        loop {
            let status = machine::status(&self.qmp).await.map_err(|error| of_vm(&error))?;
            noted(&status);
            self.note_run_state().await?;
            if !matches!(status.phase, MigrationPhase::None | MigrationPhase::Setup | MigrationPhase::Active) {
                return Ok(AfterPass::Stopped);
            }
            // Right after the beginning of a pass what is left is known; later the guest has made more of it.
            let is_fresh = status.iterations > passes;
            passes = passes.max(status.iterations);
            let is_little = || time_left(&status).is_some_and(|left| left <= convergence.downtime_limit);
            if is_fresh && is_little() && convergence.stops_guest {
                return Ok(AfterPass::Little);
            }
            if is_fresh && convergence.postcopy {
                return Ok(AfterPass::Much);
            }
            self.qmp.env().sleep(CONVERGE_LOOK).await;
        }
    }

    async fn until(&self, phase: MigrationPhase, noted: OnStatus<'_>, limit: Option<Duration>) -> Result<()> {
        let reached = |status: &MigrationStatus| {
            noted(status);
            status.phase == phase
        };
        machine::wait_for(&self.qmp, reached, limit).await.map(drop).map_err(|error| of_vm(&error))
    }
}

/// That a guest in its state cannot be carried to another host.
pub(crate) fn refused_state(error: &vm::Error) -> Error {
    Error { code: ErrorCode::VmRefused, ..of_vm(error) }
        .with_hint("wake it, or use QEMU 9.0 or later, and move it again")
}

/// What is left of a memory after a pass over it.
enum AfterPass {
    /// It fits into the downtime limit.
    Little,
    /// It does not, and may follow the guest.
    Much,
    /// QEMU has stopped the guest before, or the migration is over.
    Stopped,
}

/// How long what is left of the memory takes at the rate of late.
fn time_left(status: &MigrationStatus) -> Option<Duration> {
    let bytes_per_second = status.mbps * 1e6 / 8.0;
    #[expect(clippy::cast_precision_loss, reason = "bytes of a memory, for a forecast")]
    let left = status.bytes_remaining as f64;
    (bytes_per_second > 0.0).then(|| Duration::try_from_secs_f64(left / bytes_per_second).unwrap_or(Duration::MAX))
}

/// Where QEMU takes the memory.
fn migration_socket(folder: &Path) -> PathBuf {
    folder.join("migration.sock")
}

/// Who the process runs as.
fn owner_of(pid: u32) -> Option<SocketOwner> {
    use std::os::unix::fs::MetadataExt;
    let process = std::fs::metadata(format!("/proc/{pid}")).ok()?;
    Some(SocketOwner { uid: process.uid(), gid: process.gid() })
}

/// A socket to which QEMU connects.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// A socket at `path` for the user that QEMU runs as.
    fn open(path: &Path, owner: Option<SocketOwner>) -> Result<Self> {
        let failed = |error: std::io::Error| of_state(error, format!("listening on {}", path.display()));
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        // One that an earlier process has left.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).map_err(failed)?;
        if let Some(owner) = owner {
            std::os::unix::fs::chown(path, Some(owner.uid), Some(owner.gid)).map_err(failed)?;
        }
        Ok(Self { listener, path: path.to_owned() })
    }
}

impl Outlet for Socket {
    fn accept(&self) -> BoxFuture<'_, std::io::Result<(Lane, BoxTransport)>> {
        Box::pin(async { self.listener.accept().await.map(|(stream, _)| (Lane::Memory, Box::new(stream) as _)) })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // It may be gone with its folder.
        let _ = std::fs::remove_file(&self.path);
    }
}
