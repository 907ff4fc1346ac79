//! QEMU and libvirt: QMP, adoption and release of a running machine's disks.
//!
//! ```text
//!  Qmp ── Graph ── Disk ── DiskOptions ──▶ Plan (data, journalled) ──▶ adopt / release / recover
//!                   └──▶ inventory            └─ AdoptedDisk ──▶ VmEvents (what happens meanwhile), persist (afterwards)
//! ```
//!
//! [`Qmp`] speaks to one QEMU, over a monitor of its own or through libvirt. [`Graph`] is what it says of its block
//! nodes, and the truth about where a disk stands. A [`Plan`] is a list of steps that can be begun again at any time.
//! [`Surroundings`] is what a running plan needs of the daemon: the image's locks, and whether QEMU is connected to the
//! export.

mod access;
mod arrived;
mod check;
mod descriptor;
mod disk;
mod error;
mod event;
mod graph;
pub mod machine;
mod options;
mod persist;
mod plan;
mod process;
mod qmp;
mod run;
mod straight;

pub use arrived::{ArrivedImage, ExportWait};
pub use check::{Adoptability, DiskReport, inventory};
pub use disk::{Disk, Form};
pub use error::{Error, ErrorKind, QemuError, Result};
pub use event::{Outcome, VmEvent, VmEvents};
pub use graph::{Edge, Frontend, Graph, Job, Node};
pub use options::{CommandLine, DiskOptions, LibvirtDisk, LibvirtDomain, Origin, Remembered, Sources};
pub use persist::{
    Moved, PROGRAM_LIMIT, Persist, PersistOutcome, Rewritten, RunOutput, Runner, SystemRunner, persist, rewrite_domain,
};
pub use plan::{
    AdoptedDisk, AdoptionPlan, AdoptionRequest, Direction, ExpectedSize, ExportAddress, NodeNames, Plan,
    RECONNECT_SECONDS, Step, node_name,
};
pub use process::{ProcessState, QemuProcess, require_writer, writers_of, writes_to};
pub use qmp::{COMMAND_LIMIT, Event, GREETING_LIMIT, Owner, Qmp, Version, Virsh, WeakQmp, owner_of_socket, qemu_of};
pub use run::{
    DiskState, RecoveryGoal, Surroundings, adopt, cover_of, disk_state, forget, name_image, recover, release,
};
pub use straight::GuestPath;
