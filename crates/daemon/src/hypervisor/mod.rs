//! The programs that run machines, as the moves of machines see them: QEMU, or the simulator's.
//!
//! ```text
//!   Hypervisors ── reach, launch ──▶ Hypervisor
//!                                      │ source: begin_outgoing ─▶ Outlet ─▶ converge ─▶ complete      go_on
//!                                      │ target: begin_incoming ─▶ inlet ─▶ is_loaded ─▶ run
//!                                      │ both, after a lost connection in post-copy: recover_incoming, then recover_outgoing
//! ```
//!
//! How the memory is carried over is the hypervisor's: what leaves it by an [`Outlet`] is bytes that the other side's inlets take,
//! connection by connection. Everything else about a move is none of its business.

mod launch;
mod libvirt;
mod mapped;
mod monitors;
mod outside;
mod qemu;
mod started;
mod straight;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor};
use futures::future::BoxFuture;
use memory::{GuestMemory, Region, TargetMemory};
use migrate::stream::BoxTransport;
use uuid::Uuid;
use vm::machine::{
    DomainDefinition, FoundMachine, HostFacts, MachineDescription, MachineFacts, MemoryUse, MigrationOptions,
    MigrationStatus, TargetCommand, TargetDomain,
};
use vm::{ExportAddress, LibvirtDomain, QemuProcess};

use crate::clients::SocketOwner;
use crate::problem::Result;

pub(crate) use launch::memory_environment;
pub(crate) use libvirt::{connect_to_domain, domain_xml};
pub use monitors::Monitors;
pub(crate) use outside::of_memory;
pub(crate) use qemu::{Qemus, refused_state};
pub(crate) use started::listening_at;
pub use started::{MonitoredProcess, started_with};
pub use straight::ServedDisk;

/// When the guest of a machine is stopped.
#[derive(Clone, Copy, Debug)]
pub struct Convergence {
    /// For so long it may be stopped for the rest of its memory.
    pub downtime_limit: Duration,
    /// Whether the guest is stopped before the hypervisor would stop it by itself.
    pub stops_guest: bool,
    /// Whether memory that does not get little in one pass follows after the guest.
    pub postcopy: bool,
    /// Whether the hypervisor carries nothing of the memory: the guest is stopped at once.
    pub without_memory: bool,
}

/// Where the memory of a machine is whose guest may run at the target already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFlow {
    /// The target has all of it.
    Complete,
    /// It follows.
    Following,
    /// It follows no more: the connection was lost.
    Cut,
}

/// Told how a migration stands, now and then.
pub type OnStatus<'a> = &'a (dyn Fn(&MigrationStatus) + Send + Sync);

/// Told of a process as soon as it was started. If it refuses, the process is ended.
pub type OnStarted<'a> = &'a (dyn Fn(QemuProcess) -> BoxFuture<'a, Result<()>> + Send + Sync);

/// All programs that run machines on this host.
pub trait Hypervisors: Send + Sync {
    /// The one behind `monitor`.
    ///
    /// # Errors
    /// It does not answer.
    fn reach<'a>(&'a self, monitor: &'a Monitor) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>>;

    /// Starts one for the machine `name`, which is to come, and waits until it answers. Its sockets are in the folder of `place`.
    ///
    /// # Errors
    /// It cannot be started, or does not answer; with what it said. `place` refuses its process.
    fn launch<'a>(
        &'a self,
        name: &'a str,
        command: &'a TargetCommand,
        place: (&'a Path, Option<SocketOwner>, OnStarted<'a>),
    ) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>>;

    /// What this host offers to machines of `program`.
    ///
    /// # Errors
    /// It is not there.
    fn host_facts<'a>(&'a self, program: &'a Path) -> BoxFuture<'a, Result<HostFacts>>;

    /// The user called so.
    ///
    /// # Errors
    /// There is none.
    fn user(&self, name: &str) -> Result<SocketOwner>;

    /// What runs with this monitor, whether anybody has it on record or not.
    fn started_for(&self, monitor: &Monitor) -> Vec<QemuProcess>;

    /// Every one that runs on this host, whoever has started it.
    fn found(&self) -> Vec<FoundMachine>;

    /// Why machines run by `owner` cannot run here before all of their memory is here, if they cannot.
    fn refuses_postcopy(&self, _owner: Option<SocketOwner>) -> Option<Error> {
        None
    }

    /// Where on this host the memory `regions` of a machine is to lie that comes by the move `id`, below `folder` if that is a place
    /// for them.
    ///
    /// # Errors
    /// There is no such place.
    fn memory_places(&self, _folder: &Path, _id: Uuid, _regions: &[Region]) -> Result<Vec<PathBuf>> {
        none()
    }

    /// Makes a memory of zeroes there, for `owner`.
    ///
    /// # Errors
    /// It cannot be made.
    fn make_memory(
        &self,
        _regions: &[Region],
        _places: &[PathBuf],
        _owner: Option<SocketOwner>,
    ) -> Result<Arc<dyn TargetMemory>> {
        none()
    }

    /// Takes the names of a memory away. Who has it mapped keeps it.
    fn remove_memory(&self, _places: &[PathBuf]) {}

    /// The domains that libvirt runs here.
    fn domains(&self) -> BoxFuture<'_, Vec<String>>;

    /// Whether `process` still runs.
    fn lives(&self, process: &QemuProcess) -> bool;

    /// Kills `process`, whatever it does, and waits until it has ended, for some seconds. Only `machines::authority` calls it, which
    /// asks for the proof that nobody needs its guest.
    fn end<'a>(&'a self, process: &'a QemuProcess) -> BoxFuture<'a, ()>;

    /// Removes what a machine that did not come has left in `folder`.
    fn clear(&self, folder: &Path);

    /// The libvirt of this host, if it has one.
    fn libvirt(&self) -> Option<&dyn Libvirt> {
        None
    }
}

/// A host's libvirt, which starts and ends its domains itself.
pub trait Libvirt: Send + Sync {
    /// Which it is: `system` or `session`.
    ///
    /// # Errors
    /// It does not answer.
    fn instance(&self) -> BoxFuture<'_, Result<String>>;

    /// Whether it has a domain of this name or UUID, running or not.
    ///
    /// # Errors
    /// It does not answer.
    fn knows<'a>(&'a self, name: &'a str, uuid: &'a str) -> BoxFuture<'a, Result<bool>>;

    /// A domain that is to come, whose sockets are in `folder`. Gives where it takes the memory, too.
    ///
    /// # Errors
    /// The folder cannot be made.
    fn expect(
        &self,
        name: &str,
        place: (&Path, Option<SocketOwner>),
    ) -> Result<(Arc<dyn Hypervisor>, std::path::PathBuf)>;

    /// A connection to it for another host, which lets through only what a migration asks.
    ///
    /// # Errors
    /// It does not answer.
    fn inlet(&self) -> BoxFuture<'_, Result<BoxTransport>>;

    /// Ends the domain with this UUID, which is another host's, and forgets it. Done if there is none.
    fn end<'a>(&'a self, uuid: &'a str) -> BoxFuture<'a, ()>;
}

/// One program that runs a machine. Dropping it leaves the machine as it is.
pub trait Hypervisor: Send + Sync {
    /// Its process, if that is known.
    fn process(&self) -> Option<QemuProcess>;

    /// What it says of its machine.
    ///
    /// # Errors
    /// It does not answer.
    fn facts(&self) -> BoxFuture<'_, Result<MachineFacts>>;

    /// What the machine of `facts` does with its memory. Only if it `watches`, and the guest runs, it is seen how fast that
    /// changes, which takes a second.
    fn memory_use<'a>(&'a self, facts: &'a MachineFacts, watches: bool) -> BoxFuture<'a, MemoryUse>;

    /// How it was started.
    ///
    /// # Errors
    /// That cannot be told.
    fn description(&self) -> Result<MachineDescription>;

    /// The parts of the memory of `facts`, started by `description`, if all of it can be copied from outside of the hypervisor. If its
    /// disks are `adopted`, nothing else of it may stand against that either.
    ///
    /// # Errors
    /// It cannot, and why.
    fn memory_regions<'a>(
        &'a self,
        _facts: &'a MachineFacts,
        _description: &'a MachineDescription,
        _adopted: bool,
    ) -> BoxFuture<'a, Result<Vec<Region>>> {
        Box::pin(async { none() })
    }

    /// Its memory, as [`memory_regions`](Self::memory_regions) has told it. What is written to it is known from now on, as long as
    /// that lives.
    ///
    /// # Errors
    /// As there.
    fn open_memory<'a>(&'a self, _regions: &'a [Region]) -> BoxFuture<'a, Result<Arc<dyn GuestMemory>>> {
        Box::pin(async { none() })
    }

    /// How libvirt describes it, if it is a domain of libvirt.
    ///
    /// # Errors
    /// libvirt does not answer.
    fn definition(&self) -> BoxFuture<'_, Result<Option<(DomainDefinition, LibvirtDomain)>>> {
        Box::pin(async { Ok(None) })
    }

    /// The machine's disks that it opens itself.
    ///
    /// # Errors
    /// It does not answer.
    fn own_disks(&self) -> BoxFuture<'_, Result<Vec<vm::DiskReport>>>;

    /// Fails if the guest's writes do not come straight to one of these disks, which the machine reaches through this daemon.
    ///
    /// # Errors
    /// What lies over it, or that it is elsewhere; it does not answer.
    fn require_straight<'a>(&'a self, disks: &'a [ServedDisk]) -> BoxFuture<'a, Result<()>>;

    /// Waits until it has ended.
    fn ended(&self) -> BoxFuture<'_, ()>;

    /// Begins to send the machine through an outlet at a path; a domain of libvirt by what the target's libvirt is to be given.
    ///
    /// # Errors
    /// It refuses.
    fn begin_outgoing<'a>(
        &'a self,
        options: &'a MigrationOptions,
        place: (&'a Path, Option<&'a TargetDomain>),
    ) -> BoxFuture<'a, Result<Box<dyn Outlet>>>;

    /// Stops the guest once what is left of the memory is little, and sends that. Nothing after that is sent before
    /// [`complete`](Self::complete). `stopped` is told when the guest is about to be stopped. However the migration ends after
    /// that, a guest that was stopped so stays stopped until [`go_on`](Self::go_on).
    ///
    /// # Errors
    /// The migration has failed.
    fn converge<'a>(
        &'a self,
        convergence: Convergence,
        stopped: &'a (dyn Fn() + Send + Sync),
        noted: OnStatus<'a>,
    ) -> BoxFuture<'a, Result<()>>;

    /// Sends all that is left, the guest being stopped; in post-copy all but the memory, which follows by itself.
    ///
    /// # Errors
    /// The migration has failed.
    fn complete<'a>(&'a self, noted: OnStatus<'a>) -> BoxFuture<'a, Result<()>>;

    /// What an adoption of a disk would have come to that this machine was started on through its export; nothing if no disk of it can
    /// be given back.
    ///
    /// # Errors
    /// This one cannot, and why.
    fn plan_release<'a>(
        &'a self,
        _request: &'a vm::AdoptionRequest,
        _image: vm::ArrivedImage<'a>,
    ) -> BoxFuture<'a, Result<Option<vm::Plan>>> {
        Box::pin(async { Ok(None) })
    }

    /// Where the memory is, of a machine that has been sent, or has come.
    ///
    /// # Errors
    /// It does not answer, or the migration has failed.
    fn memory_flow<'a>(&'a self, _noted: OnStatus<'a>) -> BoxFuture<'a, Result<MemoryFlow>> {
        Box::pin(async { Ok(MemoryFlow::Complete) })
    }

    /// At the target: waits for a connection instead of one that was lost, which comes by [`inlet`](Self::inlet).
    ///
    /// # Errors
    /// It has lost none.
    fn recover_incoming<'a>(&'a self, _folder: &'a Path) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { none() })
    }

    /// At the source: goes on with the memory through an outlet at `path`, whose first connection takes the place of one that was lost.
    ///
    /// # Errors
    /// It has lost none.
    fn recover_outgoing<'a>(&'a self, _path: &'a Path) -> BoxFuture<'a, Result<Box<dyn Outlet>>> {
        Box::pin(async { none() })
    }

    /// What the guest did when it was stopped for the switch, in QEMU's words; nothing if it was not stopped, or that cannot be told.
    fn state_at_switch(&self) -> Option<String> {
        None
    }

    /// What the guest does, in QEMU's words.
    ///
    /// # Errors
    /// It does not answer.
    fn run_state(&self) -> BoxFuture<'_, Result<String>> {
        Box::pin(async { Ok(self.facts().await?.run_state) })
    }

    /// Makes sure that the guest is as the migration has left it: nobody has let it run since [`complete`](Self::complete).
    ///
    /// # Errors
    /// Somebody has, or it does not answer.
    fn verify_stopped(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    /// Asks it to end. It may take a while, or refuse.
    ///
    /// # Errors
    /// It does not answer.
    fn quit(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { none() })
    }

    /// Gives the migration up, if there is one, and lets the guest go on here if it `runs`.
    ///
    /// # Errors
    /// The guest is still stopped.
    fn go_on(&self, runs: bool) -> BoxFuture<'_, Result<()>>;

    /// Stops the guest: another one may run elsewhere.
    ///
    /// # Errors
    /// It does not answer.
    fn stop(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { none() })
    }

    /// The machine is the other host's: whoever manages it here ends it, if anybody does.
    fn leave(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Waits for a machine, whose connections come by [`inlet`](Self::inlet)s.
    ///
    /// # Errors
    /// It refuses.
    fn begin_incoming<'a>(&'a self, options: &'a MigrationOptions, folder: &'a Path) -> BoxFuture<'a, Result<()>>;

    /// A way in for one connection of the machine that comes. They are opened in the order in which they left the source.
    ///
    /// # Errors
    /// It waits for none.
    fn inlet<'a>(&'a self, folder: &'a Path) -> BoxFuture<'a, Result<BoxTransport>>;

    /// Whether it has all of the machine, in post-copy all but memory that follows, and the guest is stopped.
    ///
    /// # Errors
    /// It does not answer, or the migration has failed.
    fn is_loaded(&self) -> BoxFuture<'_, Result<bool>>;

    /// Lets the guest run, and tells the network that it is here. Done if it runs.
    ///
    /// # Errors
    /// It does not.
    fn run(&self) -> BoxFuture<'_, Result<()>>;

    /// Whether whoever manages it starts it with this host.
    ///
    /// # Errors
    /// It does not answer.
    fn autostarts(&self) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async { Ok(false) })
    }

    /// Has whoever manages it start it with this host, or not.
    ///
    /// # Errors
    /// It refuses.
    fn set_autostart(&self, _is_on: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { none() })
    }

    /// Has each of these disks, by its name in the machine, wait for its export while that is away, if whoever started the machine could
    /// not say so. The guest does not see a restart of the daemon then.
    ///
    /// # Errors
    /// It does not answer, or refuses.
    fn await_exports<'a>(&'a self, _disks: &'a [(String, ExportAddress)]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// Where the connections of a migration leave a hypervisor.
pub trait Outlet: Send + Sync {
    /// The next connection, and what it carries.
    fn accept(&self) -> BoxFuture<'_, std::io::Result<(Lane, BoxTransport)>>;
}

/// What a connection of a migration carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Memory.
    Memory,
    /// What the source's manager says to the target's.
    Control,
}

/// A host that runs no machines.
pub struct NoHypervisors;

fn none<T>() -> Result<T> {
    let error = Error::new(ErrorCode::VmRefused, "this host runs no VMs");
    Err(error.with_hint("choose a host with QEMU"))
}

impl Hypervisors for NoHypervisors {
    fn reach<'a>(&'a self, _: &'a Monitor) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>> {
        Box::pin(async { none() })
    }
    fn launch<'a>(
        &'a self,
        _: &'a str,
        _: &'a TargetCommand,
        _: (&'a Path, Option<SocketOwner>, OnStarted<'a>),
    ) -> BoxFuture<'a, Result<Arc<dyn Hypervisor>>> {
        Box::pin(async { none() })
    }
    fn host_facts<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, Result<HostFacts>> {
        Box::pin(async { none() })
    }
    fn user(&self, _: &str) -> Result<SocketOwner> {
        none()
    }
    fn started_for(&self, _: &Monitor) -> Vec<QemuProcess> {
        Vec::new()
    }
    fn found(&self) -> Vec<FoundMachine> {
        Vec::new()
    }
    fn domains(&self) -> BoxFuture<'_, Vec<String>> {
        Box::pin(async { Vec::new() })
    }
    fn lives(&self, _: &QemuProcess) -> bool {
        false
    }
    fn end<'a>(&'a self, _: &'a QemuProcess) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }
    fn clear(&self, _: &Path) {}
}
