//! A QEMU of which a test says what it does.

use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode, Monitor};
use futures::future::BoxFuture;
use migrate::stream::BoxTransport;
use parking_lot::Mutex;
use vm::QemuProcess;
use vm::machine::{
    FoundMachine, HostFacts, MachineDescription, MachineFacts, MemoryUse, MigrationOptions, TargetCommand, TargetDomain,
};

use crate::clients::SocketOwner;
use crate::hypervisor::{Convergence, Hypervisor, Hypervisors, OnStarted, OnStatus, Outlet, ServedDisk};
use crate::problem::Result;

/// What it does, and what was done to it.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// The process behind the monitor, if there is one.
    pub(super) pid: Option<u32>,
    /// What its guest does, in QEMU's words.
    pub(super) run_state: String,
    /// Somebody else has its monitor.
    pub(super) is_held: bool,
    /// Killing it does nothing.
    pub(super) is_immortal: bool,
    pub(super) killed: Vec<u32>,
    /// Somebody has started another one on its monitor.
    pub(super) beside: Option<u32>,
    /// What it was told by each `go_on`.
    pub(super) gone_on: Vec<bool>,
}

/// A host's only QEMU.
#[derive(Clone)]
pub(super) struct FakeQemu(Arc<Mutex<State>>);

impl FakeQemu {
    /// Process 1, whose guest a migration has stopped.
    pub(super) fn stopped() -> Self {
        Self(Arc::new(Mutex::new(State {
            pid: Some(1),
            run_state: "finish-migrate".to_owned(),
            is_held: false,
            is_immortal: false,
            killed: Vec::new(),
            beside: None,
            gone_on: Vec::new(),
        })))
    }

    pub(super) fn state(&self) -> State {
        self.0.lock().clone()
    }

    pub(super) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.0.lock());
    }
}

fn process(pid: u32) -> QemuProcess {
    QemuProcess { pid, started: 0, boot: "test".to_owned() }
}

fn not_here<T>() -> Result<T> {
    Err(Error::new(ErrorCode::VmRefused, "no test asks for that"))
}

impl Hypervisors for FakeQemu {
    fn reach<'a>(&'a self, _: &'a Monitor) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>> {
        let state = self.state();
        let reached = match state.pid {
            _ if state.is_held => Err(Error::new(ErrorCode::QmpBusy, "another client owns this monitor")),
            None => Err(Error::new(ErrorCode::QmpUnreachable, "nobody listens")),
            Some(_) => Ok(Arc::new(self.clone()) as _),
        };
        Box::pin(async { reached })
    }
    fn launch<'a>(
        &'a self,
        _: &'a str,
        _: &'a TargetCommand,
        _: (&'a Path, Option<SocketOwner>, OnStarted<'a>),
    ) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>> {
        Box::pin(async { not_here() })
    }
    fn host_facts<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, Result<HostFacts>> {
        Box::pin(async { not_here() })
    }
    fn user(&self, _: &str) -> Result<SocketOwner> {
        not_here()
    }
    fn started_for(&self, _: &Monitor) -> Vec<QemuProcess> {
        self.state().beside.into_iter().map(process).collect()
    }
    fn found(&self) -> Vec<FoundMachine> {
        Vec::new()
    }
    fn domains(&self) -> BoxFuture<'_, Vec<String>> {
        Box::pin(async { Vec::new() })
    }
    fn lives(&self, process: &QemuProcess) -> bool {
        self.state().pid == Some(process.pid)
    }
    fn end<'a>(&'a self, process: &'a QemuProcess) -> BoxFuture<'a, ()> {
        self.set(|state| {
            state.killed.push(process.pid);
            if state.pid == Some(process.pid) && !state.is_immortal {
                state.pid = None;
            }
        });
        Box::pin(async {})
    }
    fn clear(&self, _: &Path) {}
}

impl Hypervisor for FakeQemu {
    fn process(&self) -> Option<QemuProcess> {
        self.state().pid.map(process)
    }
    fn facts(&self) -> BoxFuture<'_, Result<MachineFacts>> {
        Box::pin(async { not_here() })
    }
    fn run_state(&self) -> BoxFuture<'_, Result<String>> {
        Box::pin(async { Ok(self.state().run_state) })
    }
    fn stop(&self) -> BoxFuture<'_, Result<()>> {
        self.set(|state| state.run_state = "paused".to_owned());
        Box::pin(async { Ok(()) })
    }
    fn memory_use<'a>(&'a self, _: &'a MachineFacts, _: bool) -> BoxFuture<'a, MemoryUse> {
        Box::pin(async { MemoryUse::default() })
    }
    fn description(&self) -> Result<MachineDescription> {
        not_here()
    }
    fn own_disks(&self) -> BoxFuture<'_, Result<Vec<vm::DiskReport>>> {
        Box::pin(async { Ok(Vec::new()) })
    }
    fn ended(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
    fn begin_outgoing<'a>(
        &'a self,
        _: &'a MigrationOptions,
        _: (&'a Path, Option<&'a TargetDomain>),
    ) -> BoxFuture<'a, Result<Box<dyn Outlet>>> {
        Box::pin(async { not_here() })
    }
    fn converge<'a>(
        &'a self,
        _: Convergence,
        _: &'a (dyn Fn() + Send + Sync),
        _: OnStatus<'a>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { not_here() })
    }
    fn complete<'a>(&'a self, _: OnStatus<'a>) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { not_here() })
    }
    fn go_on(&self, runs: bool) -> BoxFuture<'_, Result<()>> {
        self.set(|state| state.gone_on.push(runs));
        Box::pin(async { Ok(()) })
    }
    fn begin_incoming<'a>(&'a self, _: &'a MigrationOptions, _: &'a Path) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { not_here() })
    }
    fn inlet<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, Result<BoxTransport>> {
        Box::pin(async { not_here() })
    }
    fn is_loaded(&self) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async { not_here() })
    }
    fn run(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { not_here() })
    }
    fn require_straight<'a>(&'a self, _: &'a [ServedDisk]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
