//! What a volume's journal holds: the only authority on which backend holds the volume, and what is being done to it.
//!
//! ```text
//!   attach           move             commit (one store)          source retired, hook run
//!  ────────▶ idle ─────────▶ moving ──────────────────▶ finishing ────────────────────────▶ idle
//!             ▲                │  cancelled, failed
//!             └────────────────┘
//! ```
//!
//! *Idle* has no job; *moving* has one whose `committed` is empty; *finishing* has one whose `committed` says what
//! became of the source. A restart reads this and goes on from there.

use api::v1::MoveRequest;
use backends::{BackendSpec, PreparedTarget, TargetOrigin};
use migrate::{JobRecord, Phase};
use serde::{Deserialize, Serialize};

/// The layout of this document.
pub const DOCUMENT_VERSION: u32 = 1;

/// The layout of a document that lists overlays: a program that does not know them must not serve the backend alone.
pub const DOCUMENT_VERSION_OVERLAYS: u32 = 2;

/// A volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeDocument {
    /// The layout, [`DOCUMENT_VERSION`], or [`DOCUMENT_VERSION_OVERLAYS`] while overlays are listed.
    pub version: u32,
    /// What the volume is called.
    pub name: String,
    /// Counts changes of what holds it.
    pub epoch: u64,
    /// What holds it.
    pub backend: BackendSpec,
    /// Where it is served.
    pub export: String,
    /// Who may connect besides the daemon's own user: the owner of the unix socket.
    #[serde(default)]
    pub socket_owner: Option<SocketOwner>,
    /// Whether writes are refused.
    #[serde(default)]
    pub read_only: bool,
    /// Where the volume ends, if what holds it may be larger: a block device that it was moved to.
    #[serde(default)]
    pub size_limit: Option<u64>,
    /// The running VM that it was adopted from.
    #[serde(default)]
    pub adoption: Option<AdoptionDocument>,
    /// What is being done to it.
    #[serde(default)]
    pub job: Option<JobDocument>,
}

/// The owner that a unix socket is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOwner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// How a volume came from a running VM, and all that it takes to give it back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdoptionDocument {
    /// How the VM is reached.
    pub monitor: api::v1::Monitor,
    /// The node that was named.
    pub node: String,
    /// The image's format.
    pub format: String,
    /// The size that the export shows, for a container that may grow.
    pub size_advertised: Option<u64>,
    /// Which way the adoption is going.
    pub direction: AdoptionDirection,
    /// The plan that leads there: QEMU's graph says how far it has come.
    pub plan: vm::Plan,
}

/// Which way an adoption is going.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdoptionDirection {
    /// The disk is being taken over.
    Adopting,
    /// The disk is ours.
    Adopted,
    /// The disk is being given back.
    Releasing,
}

/// A move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobDocument {
    /// Its number.
    pub id: u64,
    /// What the progress map calls it.
    pub uuid: uuid::Uuid,
    /// The others that it is moved with.
    #[serde(default)]
    pub group: Option<GroupDocument>,
    /// How it was asked for.
    pub request: MoveRequest,
    /// Who asked.
    pub requester: String,
    /// What the migration keeps.
    pub record: JobRecord,
    /// Where to, and how to take that back.
    pub target: PreparedTarget,
    /// How large the volume was when the move was asked for, and stays: source and target may be larger, or become so.
    /// A container may grow instead.
    #[serde(default)]
    pub size: Option<u64>,
    /// How long the file or block device was that held it then.
    #[serde(default)]
    pub source_size: Option<u64>,
    /// Whether it was told to wait.
    #[serde(default)]
    pub paused: bool,
    /// The overlays over the volume's backend, the lowest first: what the guest has written since a snapshot move began.
    /// While there are any, the backend alone is not the volume.
    #[serde(default)]
    pub overlays: Vec<u32>,
    /// What the commit left to be done, once it is committed.
    #[serde(default)]
    pub committed: Option<Committed>,
}

/// Moves of all disks of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupDocument {
    /// The number of the first of them.
    pub id: u64,
    /// The volumes.
    pub members: Vec<String>,
}

/// What is to be done after the commit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Committed {
    /// What held the volume before.
    pub source: BackendSpec,
    /// The epoch that ended with it.
    pub epoch: u64,
    /// Whether the VM's configuration was told of the new place.
    #[serde(default)]
    pub persisted: bool,
    /// What it was, as far as it is known.
    #[serde(default)]
    pub report: Option<api::v1::Report>,
}

impl AdoptionDirection {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Adopting => "adopting",
            Self::Adopted => "adopted",
            Self::Releasing => "releasing",
        }
    }
}

impl VolumeDocument {
    /// Lists the overlays of the job, the lowest first.
    pub fn set_overlays(&mut self, numbers: Vec<u32>) {
        let Some(job) = &mut self.job else { return };
        self.version = if numbers.is_empty() { DOCUMENT_VERSION } else { DOCUMENT_VERSION_OVERLAYS };
        job.overlays = numbers;
    }

    /// This document after the commit of its job: the target holds the volume.
    ///
    /// # Panics
    /// If there is no job.
    #[must_use]
    pub fn after_commit(&self) -> Self {
        let mut document = self.clone();
        let job = document.job.as_mut().expect("a commit belongs to a job");
        let source = std::mem::replace(&mut document.backend, job.target.spec.clone());
        job.committed = Some(Committed { source, epoch: self.epoch, persisted: false, report: None });
        job.record.phase = Phase::Committed;
        let is_block_device = job.target.origin == TargetOrigin::BlockDevice;
        document.size_limit = job.size.filter(|_| is_block_device);
        document.epoch += 1;
        document
    }
}
