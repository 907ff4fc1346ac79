//! A machine among its disks: it switches over in their commit.
//!
//! ```text
//!   disks ready ──▶ memory is copied ──▶ QEMU is stopped, all of it is at the target ──▶ hold ──▶ commit
//!                                                     ▲                                  │ put off
//!                                                     └──────────────────────────────────┘
//! ```

use std::sync::Arc;

use block::Result;

use super::record::machine_member;
use super::switchover::Group;

/// A machine as a member of the group of its disks.
pub(crate) struct MachineMember {
    group: Arc<Group>,
    name: String,
}

impl MachineMember {
    pub(super) fn new(group: Arc<Group>, name: &str) -> Self {
        Self { group, name: machine_member(name) }
    }

    /// Waits until the copies of all disks are complete: from then on guest writes go to both sides.
    pub(crate) async fn disks_ready(&self) {
        self.group.others_ready(&self.name).await;
    }

    /// The machine is stopped and complete at its target: waits until all disks are held and durable there. May be dropped;
    /// then [`leave`](Self::leave) tells the others.
    pub(crate) async fn hold(&self) {
        loop {
            self.group.turn(&self.name).await;
            match self.group.all_held(&self.name).await {
                Ok(()) => return,
                Err(error) => tracing::info!(member = self.name, error = error.chain(), "the switchover is put off"),
            }
            self.group.leave(&self.name);
        }
    }

    /// The machine is not on its way to the commit any more.
    pub(super) fn leave(&self) {
        self.group.leave(&self.name);
    }

    /// Has the commit of all stored. After an error nobody knows whether it counts.
    pub(super) async fn ask_for_commit(&self) -> Result<()> {
        self.group.commit(&self.name).await
    }

    /// Takes the commit back if it does not count. Gives whether it does. After an error the doubt is as it was.
    pub(super) async fn take_back(&self) -> Result<bool> {
        self.group.take_back(&self.name).await
    }
}
