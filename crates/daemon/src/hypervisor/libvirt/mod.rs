//! A domain of libvirt as a hypervisor: QMP through libvirt for what is looked at, libvirt's own migration for the memory.
//!
//! The source's libvirt ends its domain when it hears Confirm, and not before: see `outgoing`. So the order of a move is the same
//! as with QEMU alone: the target has loaded everything, the disks are held, the commit, and then Confirm.

mod instance;
mod monitor;
mod outgoing;
mod rpc;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use env::EnvRef;
use futures::future::BoxFuture;
use migrate::stream::BoxTransport;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use vm::machine::{
    self, DomainDefinition, MachineDescription, MachineFacts, MemoryUse, MigrationOptions, MigrationPhase, TargetDomain,
};
use vm::{
    AdoptionRequest, CommandLine, ExportAddress, ExportWait, LibvirtDomain, Plan, QemuProcess, Qmp, RECONNECT_SECONDS,
    Sources, Surroundings, Virsh,
};

use super::{Convergence, Hypervisor, Monitors, OnStatus, Outlet, ServedDisk, straight};
use crate::problem::{Result, of_vm};
use instance::Instance;
pub(crate) use monitor::{connect_to_domain, domain_xml};
use outgoing::{Outgoing, Progress};
use rpc::Verdict;

/// How often libvirt is asked how the memory goes: a start of virsh each.
const LOOK: Duration = Duration::from_millis(100);
/// How often it is looked whether QEMU lives.
const LIFE_LOOK: Duration = Duration::from_millis(250);
/// How long the other host's libvirt is waited for when a move is undone, and how long all of that may take.
const ORDERLY_LIMIT: Duration = Duration::from_secs(2);
const UNDO_LIMIT: Duration = Duration::from_secs(30);
/// How long libvirt may take to end a domain that has gone.
const END_LIMIT: Duration = Duration::from_secs(30);
/// libvirt's default.
const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);

/// One domain.
pub(super) struct Domain {
    name: String,
    monitors: Arc<Monitors>,
    env: EnvRef,
    /// What it runs in, once that was looked at.
    process: Mutex<Option<QemuProcess>>,
    qmp: tokio::sync::Mutex<Option<Qmp>>,
    outgoing: Mutex<Option<Arc<Outgoing>>>,
}

impl Domain {
    /// One that is to come.
    pub(super) fn new(name: &str, monitors: &Arc<Monitors>, env: &EnvRef) -> Self {
        Self {
            name: name.to_owned(),
            monitors: Arc::clone(monitors),
            env: Arc::clone(env),
            process: Mutex::default(),
            qmp: tokio::sync::Mutex::default(),
            outgoing: Mutex::default(),
        }
    }

    /// One that runs here, or is stopped.
    pub(super) async fn reach(name: &str, monitors: &Arc<Monitors>, env: &EnvRef) -> Result<Self> {
        let domain = Self::new(name, monitors, env);
        domain.look().await?;
        Ok(domain)
    }

    /// Its XML, and its QEMU.
    async fn look(&self) -> Result<(String, LibvirtDomain)> {
        let xml = domain_xml(&self.name).await.map_err(|error| of_vm(&error))?;
        let parsed = LibvirtDomain::parse(&xml).map_err(|error| of_vm(&error))?;
        if !parsed.is_running {
            return Err(Error::new(
                ErrorCode::QmpUnreachable,
                format!("the libvirt domain {} does not run", self.name),
            )
            .with_hint("start it, or name one that runs"));
        }
        let pid = vm::qemu_of(&parsed).map_err(|error| of_vm(&error))?;
        *self.process.lock() = QemuProcess::of(pid);
        Ok((xml, parsed))
    }

    async fn qmp(&self) -> Result<Qmp> {
        let mut kept = self.qmp.lock().await;
        if let Some(qmp) = kept.as_ref().filter(|qmp| !qmp.has_ended()) {
            return Ok(qmp.clone());
        }
        let (xml, parsed) = self.look().await?;
        let qmp = connect_to_domain(&xml, &parsed, (&self.monitors, &self.env)).await.map_err(|error| of_vm(&error))?;
        *kept = Some(qmp.clone());
        Ok(qmp)
    }

    async fn virsh(&self, words: &[&str]) -> Result<String> {
        virsh(words).await
    }

    /// Whether libvirt says that of it in its summary.
    async fn says(&self, key: &str, value: &str) -> Result<bool> {
        let said = self.virsh(&["dominfo", "--", &self.name]).await?;
        Ok(said.lines().any(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(key) && words.next() == Some(value)
        }))
    }

    /// Its state and the reason of it, by libvirt's names.
    async fn state(&self) -> Result<(String, String)> {
        let said = self.virsh(&["domstate", "--reason", "--", &self.name]).await?;
        let said = said.trim();
        let (state, reason) = said.split_once(" (").unwrap_or((said, ""));
        Ok((state.to_owned(), reason.trim_end_matches(')').to_owned()))
    }

    fn outgoing(&self) -> Option<Arc<Outgoing>> {
        self.outgoing.lock().clone()
    }

    /// Has libvirt give the migration up, and waits until it has done so.
    async fn abort(&self, outgoing: &Outgoing) {
        outgoing.decide(Verdict::Here);
        let began = self.env.now();
        let aborting = async {
            loop {
                // There may be nothing to abort: Confirm is said in a moment.
                let _ = self.virsh(&["domjobabort", "--", &self.name]).await;
                if self.env.now().since(began) > ORDERLY_LIMIT {
                    outgoing.cut();
                }
                self.env.sleep(LOOK).await;
            }
        };
        tokio::select! {
            _ = env::timeout(&*self.env, UNDO_LIMIT, outgoing.over()) => {}
            () = aborting => {}
        }
    }

    /// Waits until it runs, if it `runs`; lets it go on if libvirt has left it stopped. A libvirt that is away is waited for: it
    /// undoes its migration when it is back.
    async fn resume(&self, runs: bool) -> Result<()> {
        let began = self.env.now();
        loop {
            let resumed = match self.state().await {
                Ok((state, _)) if state == "running" || (state == "paused" && !runs) => return Ok(()),
                Ok((state, _)) if state == "paused" => self.virsh(&["resume", "--", &self.name]).await.map(drop),
                Ok((state, _)) => return Err(self.ended_as(&state)),
                Err(error) if error.code == ErrorCode::QmpBusy => Err(error),
                Err(error) => return Err(error),
            };
            match resumed {
                Err(error) if self.env.now().since(began) > UNDO_LIMIT => return Err(error),
                _ => self.env.sleep(LOOK).await,
            }
        }
    }

    fn ended_as(&self, state: &str) -> Error {
        Error::new(ErrorCode::QmpUnreachable, format!("the domain {} is {state}", self.name))
            .with_hint("see libvirt's log of the domain")
    }
}

async fn virsh(words: &[&str]) -> Result<String> {
    Virsh::default().run(words).await.map_err(|error| of_vm(&error))
}

/// Whether this host's libvirt has a domain of this name or UUID, running or not.
pub(super) async fn knows(name: &str, uuid: &str) -> Result<bool> {
    let names = virsh(&["list", "--all", "--name"]).await?;
    let uuids = virsh(&["list", "--all", "--uuid"]).await?;
    Ok(names.lines().any(|known| known.trim() == name) || uuids.lines().any(|known| known.trim() == uuid))
}

/// Which libvirt of this host it is: `system` or `session`.
pub(super) async fn instance() -> Result<String> {
    Instance::find().await.map(|instance| instance.name)
}

/// A connection to this host's libvirt that lets through only what a migration asks.
pub(super) async fn inlet() -> Result<BoxTransport> {
    Instance::find().await?.inlet().await
}

/// Ends the domain with this UUID, which is another host's, and forgets it. Done if there is none.
pub(super) async fn end(uuid: &str, env: &EnvRef) {
    let began = env.now();
    let is_there = async || match virsh(&["list", "--all", "--uuid"]).await {
        Ok(uuids) => uuids.lines().any(|known| known.trim() == uuid),
        Err(_) => true,
    };
    while is_there().await {
        // Each may have been done already.
        let destroyed = virsh(&["destroy", "--", uuid]).await;
        let forgotten = match virsh(&["undefine", "--", uuid]).await {
            Err(_) => virsh(&["undefine", "--nvram", "--", uuid]).await,
            done => done,
        };
        if env.now().since(began) > END_LIMIT {
            tracing::error!(uuid, ?destroyed, ?forgotten, "libvirt does not end a domain that is not here");
            return;
        }
        env.sleep(LOOK).await;
    }
}

/// Tells the network that a domain is here, which runs meanwhile.
async fn announce(domain: Domain) {
    let announced = async { machine::start_guest(&domain.qmp().await?).await.map_err(|error| of_vm(&error)) };
    if let Err(error) = announced.await {
        tracing::warn!(domain = domain.name, %error, "the guest's network addresses are not announced");
    }
}

/// Where a domain's QEMU takes its memory.
pub(super) fn memory_socket(folder: &Path) -> PathBuf {
    folder.join("memory.sock")
}

impl Hypervisor for Domain {
    fn process(&self) -> Option<QemuProcess> {
        self.process.lock().clone()
    }

    fn facts(&self) -> BoxFuture<'_, Result<MachineFacts>> {
        Box::pin(async { MachineFacts::read(&self.qmp().await?).await.map_err(|error| of_vm(&error)) })
    }

    fn memory_use<'a>(&'a self, facts: &'a MachineFacts, watches: bool) -> BoxFuture<'a, MemoryUse> {
        Box::pin(async move {
            match self.qmp().await {
                Ok(qmp) => machine::memory_use(&qmp, facts, watches).await,
                // What is not known is not foretold.
                Err(_) => MemoryUse::default(),
            }
        })
    }

    /// Only the program: libvirt describes the rest.
    fn description(&self) -> Result<MachineDescription> {
        let pid = self.process().map(|process| process.pid);
        let found = pid.and_then(|pid| MachineDescription::of_process(pid).ok().flatten());
        let found = found.ok_or_else(|| {
            Error::new(ErrorCode::VmRefused, format!("the QEMU of the libvirt domain {} cannot be seen", self.name))
                .with_hint("let the daemon see its process: both in one PID namespace, and the daemon as root")
        })?;
        Ok(MachineDescription { words: Vec::new(), ..found })
    }

    fn definition(&self) -> BoxFuture<'_, Result<Option<(DomainDefinition, LibvirtDomain)>>> {
        Box::pin(async {
            let (_, parsed) = self.look().await?;
            let is_persistent = self.says("Persistent:", "yes").await?;
            if !self.virsh(&["snapshot-list", "--name", "--", &self.name]).await?.trim().is_empty() {
                return Err(Error::new(ErrorCode::VmRefused, format!("the domain {} has snapshots", self.name))
                    .with_hint("libvirt migrates no such domain: see `virsh snapshot-list`, and delete them"));
            }
            let live = self.virsh(&["dumpxml", "--migratable", "--security-info", "--", &self.name]).await?;
            let persistent = match is_persistent {
                true => Some(self.virsh(&["dumpxml", "--inactive", "--security-info", "--", &self.name]).await?),
                false => None,
            };
            let (name, uuid) = (parsed.name.clone(), parsed.uuid.clone());
            Ok(Some((DomainDefinition { name, uuid, live, persistent, folder: PathBuf::new() }, parsed)))
        })
    }

    fn own_disks(&self) -> BoxFuture<'_, Result<Vec<vm::DiskReport>>> {
        Box::pin(async {
            let qmp = self.qmp().await?;
            let (_, parsed) = self.look().await?;
            let sources = Sources { libvirt: Some(parsed.clone()), process: self.process(), ..Sources::default() };
            let mut reports = vm::inventory(&qmp, &sources).await.map_err(|error| of_vm(&error))?;
            reports.retain(|report| !matches!(report.verdict, vm::Adoptability::Adopted));
            for report in &mut reports {
                // The name in the guest stays the same wherever the domain is.
                if let Some(target) = parsed.target_of(&report.device) {
                    report.node = target.to_owned();
                }
            }
            Ok(reports)
        })
    }

    fn require_straight<'a>(&'a self, disks: &'a [ServedDisk]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { straight::require_straight(&self.qmp().await?, disks).await })
    }

    fn ended(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            while self.process().is_none_or(|process| process.lives()) {
                self.env.sleep(LIFE_LOOK).await;
            }
        })
    }

    fn begin_outgoing<'a>(
        &'a self,
        options: &'a MigrationOptions,
        (path, target): (&'a Path, Option<&'a TargetDomain>),
    ) -> BoxFuture<'a, Result<Box<dyn Outlet>>> {
        Box::pin(async move {
            let target = target.ok_or_else(|| {
                Error::new(ErrorCode::VersionMismatch, "the other host does not know domains of libvirt")
                    .with_hint("install the same version of transhumed on both hosts")
            })?;
            // The migration has its connection ready before it begins: libvirt is busy with the domain then.
            self.qmp().await?;
            let (outgoing, outlet) = Outgoing::begin(&self.name, options, target, path).await?;
            *self.outgoing.lock() = Some(Arc::new(outgoing));
            Ok(outlet)
        })
    }

    /// Ends when libvirt has brought everything to the other host: it completes by itself.
    fn converge<'a>(
        &'a self,
        convergence: Convergence,
        stopped: &'a (dyn Fn() + Send + Sync),
        noted: OnStatus<'a>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let outgoing = self.outgoing().ok_or_else(|| outgoing::failed(&self.name, "it has not begun"))?;
            let mut progress = outgoing.progress();
            let mut sent = std::pin::pin!(async {
                let reached = progress.wait_for(|progress| *progress != Progress::Sending).await;
                match reached.as_deref() {
                    Ok(Progress::Sent) => Ok(()),
                    Ok(Progress::Over(Some(why))) => Err(outgoing::failed(&self.name, why)),
                    _ => Err(outgoing::failed(&self.name, "virsh has ended before its time")),
                }
            });
            let limit = convergence.downtime_limit.as_millis().to_string();
            let mut is_limited = convergence.downtime_limit == DOWNTIME_LIMIT;
            let looking = async {
                let Ok(qmp) = self.qmp().await else { return std::future::pending::<()>().await };
                // Before it begins QEMU tells of the migration by which the domain has come.
                let mut has_begun = false;
                loop {
                    self.env.sleep(LOOK).await;
                    let Ok(status) = machine::status(&qmp).await else { continue };
                    has_begun |= status.phase != MigrationPhase::Completed;
                    if !has_begun {
                        continue;
                    }
                    noted(&status);
                    match status.phase {
                        MigrationPhase::Active if !is_limited => {
                            let limited = self.virsh(&["migrate-setmaxdowntime", "--", &self.name, &limit]).await;
                            is_limited = limited.is_ok();
                        }
                        MigrationPhase::PreSwitchover | MigrationPhase::Device | MigrationPhase::Completed => stopped(),
                        _ => {}
                    }
                }
            };
            let outcome = tokio::select! {
                outcome = &mut sent => outcome,
                () = looking => unreachable!("it looks for ever"),
            };
            stopped();
            outcome
        })
    }

    fn complete<'a>(&'a self, _: OnStatus<'a>) -> BoxFuture<'a, Result<()>> {
        // libvirt has done it.
        Box::pin(async { Ok(()) })
    }

    fn go_on(&self, runs: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.outgoing() {
                Some(outgoing) => self.abort(&outgoing).await,
                // That of an earlier process, whose connections are gone.
                None => _ = self.virsh(&["domjobabort", "--", &self.name]).await,
            }
            // Kills virsh if it still runs.
            *self.outgoing.lock() = None;
            self.resume(runs).await
        })
    }

    fn leave(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let Some(outgoing) = self.outgoing() else { return };
            outgoing.decide(Verdict::Away);
            if let Some(Some(why)) = env::timeout(&*self.env, END_LIMIT, outgoing.over()).await {
                tracing::warn!(domain = self.name, why, "libvirt has not ended a domain that has gone");
            }
            *self.outgoing.lock() = None;
        })
    }

    fn begin_incoming<'a>(&'a self, _: &'a MigrationOptions, _: &'a Path) -> BoxFuture<'a, Result<()>> {
        // libvirt does it.
        Box::pin(async { Ok(()) })
    }

    fn inlet<'a>(&'a self, folder: &'a Path) -> BoxFuture<'a, Result<BoxTransport>> {
        Box::pin(async move {
            let socket = memory_socket(folder);
            let stream = UnixStream::connect(&socket).await.map_err(|error| {
                let message = format!("the QEMU of {} takes no memory at {}: {error}", self.name, socket.display());
                Error::new(ErrorCode::VmRefused, message).with_hint("see libvirt's log of the domain there")
            })?;
            Ok(Box::new(stream) as _)
        })
    }

    fn is_loaded(&self) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async {
            let (state, reason) = self.state().await?;
            let is_coming = ["migrating", "starting up"].contains(&reason.as_str());
            match state.as_str() {
                "running" => Ok(true),
                "paused" => Ok(!is_coming),
                ended => Err(self.ended_as(ended)),
            }
        })
    }

    fn stop(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { self.virsh(&["suspend", "--", &self.name]).await.map(drop) })
    }

    fn run(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async {
            if self.virsh(&["resume", "--", &self.name]).await.is_err() {
                self.resume(true).await?;
            }
            self.look().await?;
            tokio::spawn(announce(Self::new(&self.name, &self.monitors, &self.env)));
            Ok(())
        })
    }

    fn autostarts(&self) -> BoxFuture<'_, Result<bool>> {
        Box::pin(self.says("Autostart:", "enable"))
    }

    fn set_autostart(&self, is_on: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let words: &[&str] = if is_on { &["autostart"] } else { &["autostart", "--disable"] };
            self.virsh(&[words, &["--", &self.name]].concat()).await.map(drop)
        })
    }

    fn await_exports<'a>(&'a self, disks: &'a [(String, ExportAddress)]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let (_, parsed) = self.look().await?;
            let process = self.process();
            let command_line = process.as_ref().and_then(|process| CommandLine::of_process(process.pid).ok().flatten());
            let sources = Sources { libvirt: Some(parsed), command_line, process, ..Sources::default() };
            let qmp = self.qmp().await?;
            let mut unawaited = Vec::new();
            for (node, export) in disks {
                let request = AdoptionRequest {
                    node: node.clone(),
                    volume: export.name.clone(),
                    export: export.clone(),
                    accept_option_loss: false,
                    format: None,
                    reconnect_seconds: RECONNECT_SECONDS,
                };
                let awaited = async {
                    match Plan::await_export(&qmp, &sources, &request).await? {
                        ExportWait::Waits => Ok(None),
                        ExportWait::Planned(plan) => vm::adopt(&qmp, &plan, &mut InUse).await.map(|_| None),
                        ExportWait::Unknown(why) => Ok(Some(why)),
                    }
                };
                // What keeps one disk from it need not keep the others.
                let why = awaited.await.unwrap_or_else(|error| Some(error.to_string()));
                unawaited.extend(why.map(|why| format!("{node} ({why})")));
            }
            if unawaited.is_empty() {
                return Ok(());
            }
            let message =
                format!("the guest sees errors of these disks while this daemon is away: {}", unawaited.join(", "));
            Err(Error::new(ErrorCode::QmpRefused, message)
                .with_hint("shut the guest down, or move it away, before this daemon is restarted"))
        })
    }
}

/// An export that its disk is on already, and that has the image's locks.
struct InUse;

impl Surroundings for InUse {
    fn take_locks(&mut self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn drop_locks(&mut self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn is_export_connected(&mut self) -> bool {
        true
    }
}
