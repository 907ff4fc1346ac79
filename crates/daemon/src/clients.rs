//! Who may connect to an export.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The owner that a unix socket is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOwner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Who may connect to an export.
#[derive(Clone, Debug, Default)]
pub struct Clients {
    /// The owner of its unix socket.
    pub owner: Option<SocketOwner>,
    /// The adopted disk: nobody may but the QEMU that it was adopted from.
    pub disk: Option<Arc<vm::AdoptedDisk>>,
}
