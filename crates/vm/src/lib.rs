//! QEMU and libvirt: QMP, adoption and release of a running machine's disks.
//!
//! [`Qmp`] speaks to one QEMU.

mod error;
mod qmp;

pub use error::{Error, ErrorKind, QemuError, Result};
pub use qmp::{COMMAND_LIMIT, Event, GREETING_LIMIT, Owner, Qmp, Version, owner_of_socket};
