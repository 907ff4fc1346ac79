//! What a host is made of, what it is told, and what it tells.

use std::sync::Arc;

use api::v1::Report;
use block::{Bytes, Device};
use migrate::MoveOptions;

use super::CacheSetup;
use crate::disk::{Disk, Faults};
use crate::world::World;

/// Which device of the host a wrapper is asked to wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The journal.
    Journal,
    /// The progress map.
    Map,
    /// The side that holds the volume.
    Source,
    /// The side that it moves to.
    Target,
}

/// Mistakes that a host or a device may be made to make, to prove that the checkers see them.
#[derive(Clone, Default)]
pub struct Mistakes {
    /// Opens a disk without waiting for what a dead process has left on its way.
    pub opens_at_once: bool,
    /// Lets a new connection in before the requests of the old one are finished.
    pub no_barrier: bool,
    /// Believes a progress map of another boot.
    pub trusts_old_maps: bool,
    /// Takes what an undone move has left behind for a target that nobody has used.
    pub trusts_used_targets: bool,
    /// Serves the guest from the source again after the switchover.
    pub returns_to_source: bool,
    /// Puts something between the host and a disk.
    pub wrap: Option<Arc<Wrap>>,
}

/// See [`Mistakes::wrap`].
pub type Wrap = dyn Fn(&World, Role, Device) -> Device + Send + Sync;

/// So many snapshots somebody who changes layers takes of a volume at most.
pub(crate) const SNAPSHOTS_MAX: usize = 4;

/// Who else has to do with a machine, from the beginning on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// A supervisor starts the source's QEMU again when it was killed.
    pub are_supervisors: bool,
    /// Another VM of its name lives at the other host for a while.
    pub have_namesake: bool,
    /// A volume there has the name of one of its disks, until the faults end.
    pub have_leftover: bool,
    /// A move that was undone is asked for again soon, as long as something waits for a later phase of it.
    pub are_impatient: bool,
    /// The operator's hooks take their time, on both hosts.
    pub have_slow_hooks: bool,
}

/// How a host is set up.
#[derive(Clone)]
pub struct Setup {
    /// How its moves are carried out.
    pub options: MoveOptions,
    /// For how many chunks a page of the progress map stands.
    pub map_page_chunks: u64,
    /// How many bytes the copy's buffers may take.
    pub pool: Bytes,
    /// How many bytes the buffers of guests' requests may take, of all volumes together.
    pub request_pool: Bytes,
    /// Whether the first moves of all volumes are asked for as one.
    pub together: bool,
    /// How many moves may run at once.
    pub running_jobs_max: usize,
    /// How many tasks the process may have at once.
    pub tasks_max: usize,
    /// Whether a target that was lost is resumed, or the job cancelled.
    pub resumes_lost_targets: bool,
    /// Whether the two sides can copy between each other without the engine.
    pub offloads: bool,
    /// Whether bytes on the target are changed behind everybody's back, so that only `full` guarantees equality.
    pub corrupts: bool,
    /// Whether the volume moves to another host, whose process is a daemon, too, and its guest speaks NBD.
    pub is_between_hosts: bool,
    /// Whether the two hosts have an arbiter.
    pub has_arbiter: bool,
    /// Whether the world's crash point kills the other host's process, and not this one's.
    pub peer_dies_at_poll: bool,
    /// Whether somebody takes snapshots, removes them and limits the guest.
    pub changes_layers: bool,
    /// How many stores the surrogate has that serves the guest while the volume moves; none if there is none.
    pub surrogate_stores: usize,
    /// What is wrong with the first of two stores.
    pub surrogate_faults: Faults,
    /// The flash cache over the disk that holds the volume, if there is one.
    pub cache: Option<CacheSetup>,
    /// Whether the volume lies where both hosts reach it: its sides are one disk, with a power of its own.
    pub is_shared: bool,
    /// Whether the volumes are the disks of a machine, which moves to the other host with them.
    pub has_machine: bool,
    /// Whether its memory may follow its guest.
    pub memory_follows: bool,
    /// Whether the machine's memory is copied from outside by the parallel engine.
    pub memory_outside: bool,
    /// Who else has to do with the machine.
    pub others: Others,
    /// See [`Mistakes`].
    pub mistakes: Mistakes,
}

/// How the move stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Status {
    /// None was asked for.
    Idle,
    /// It is under way.
    Running,
    /// The volume has moved. Without a report if the process died before it could make one.
    Switched(Option<Box<Report>>),
    /// It was cancelled.
    Cancelled,
    /// It failed, and says why.
    Failed(String),
}

impl Status {
    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Switched(_) => "switched",
            Self::Cancelled => "cancelled",
            Self::Failed(_) => "failed",
        }
    }
}

/// The disks of a host.
pub struct Disks {
    /// Holds the journal.
    pub journal: Disk,
    /// Holds the progress map.
    pub map: Disk,
    /// The two places of the volume.
    pub sides: [Disk; 2],
}
