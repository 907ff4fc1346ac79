//! What is on a volume's record of its move.

use std::collections::BTreeMap;

use api::v1::MoveRequest;
use backends::{ImageIdentity, ImageTimes, SourceIdentity};
use migrate::JobRecord;
use serde::{Deserialize, Serialize};

use super::LayerDocument;
use crate::location::{JobTarget, Location};

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
    pub target: JobTarget,
    /// How large the volume was when the move was asked for, and stays: source and target may be larger, or become so.
    /// A container may grow instead.
    #[serde(default)]
    pub size: Option<u64>,
    /// How long the file or block device was that held it then.
    #[serde(default)]
    pub source_size: Option<u64>,
    /// Which file or block device that was, whatever its name leads to later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_identity: Option<Box<SourceIdentity>>,
    /// When its turn came, in milliseconds since 1970.
    #[serde(default)]
    pub begun_unix_ms: Option<u64>,
    /// What source and target were like when the daemon was stopped: nobody has changed them while they still are. None while
    /// it runs, and after a crash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rested: Option<Rested>,
    /// Whether it was told to wait.
    #[serde(default)]
    pub paused: bool,
    /// Whether another program has used its target while no daemon ran: it waits for a word, and the target is left as it is.
    #[serde(default)]
    pub disturbed: bool,
    /// Whether somebody has said since that it goes on all the same.
    #[serde(default)]
    pub goes_on_disturbed: bool,
    /// When the last daemon lived that had its target open, in milliseconds since 1970: those that came later have only waited for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_unix_ms: Option<u64>,
    /// What that daemon had seen of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_target: Option<TargetSeen>,
    /// Whether one of those has seen another program use it: on record before the target is tried again.
    #[serde(default)]
    pub target_was_in_use: bool,
    /// The overlays over the volume's backend, the lowest first: what the guest has written since a snapshot move began.
    /// While there are any, the backend alone is not the volume.
    #[serde(default)]
    pub overlays: Vec<u32>,
    /// Which file each of them is, by their numbers, where that is known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub overlay_files: BTreeMap<u32, ImageIdentity>,
    /// Where the layers that hold bytes are once the target holds the volume, under the same identities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerDocument>,
    /// What was expected of it before it began, if that could be told.
    #[serde(default)]
    pub prediction: Option<api::v1::Prediction>,
    /// Of a move to another host: the arbiter may have been asked to decide. So its ruling may differ from what is said
    /// here.
    #[serde(default)]
    pub asked: bool,
    /// How many commits in doubt were taken back at the arbiter.
    #[serde(default)]
    pub withdrawals: u32,
    /// The target was asked to forget the move, or is about to be. It may have forgotten, and never takes the volume then: *committed*
    /// counts no more by the arbiter's ruling, but by the target's word alone. The move never goes on after this.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub abandoning: bool,
    /// Why it is being undone, if not because somebody has cancelled it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<api::v1::Error>,
    /// What the commit left to be done, once it is committed.
    #[serde(default)]
    pub committed: Option<Committed>,
}

impl JobDocument {
    /// Whether only the arbiter knows if the commit counts: it may have been asked, and nothing it has said is on record.
    #[must_use]
    pub const fn is_for_the_arbiter(&self) -> bool {
        self.asked && self.committed.is_none()
    }
}

/// What a daemon that has the target of a move open sees of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetSeen {
    /// When it was changed last, by the clock of its file system.
    pub times: ImageTimes,
    /// How far that clock was ahead of this host's, in nanoseconds: another one's if a server keeps the file. Negative if it was behind.
    pub clock_ahead_ns: i64,
}

/// When source and target of a move were changed last, at the moment when nobody of the daemon wrote to them any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rested {
    /// Of the source's file.
    pub source: ImageTimes,
    /// Of the target's.
    pub target: ImageTimes,
}

/// Moves of all disks of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupDocument {
    /// The number of the first of them.
    pub id: u64,
    /// The volumes.
    pub members: Vec<String>,
    /// The record that says whether all of them are on their targets. Earlier versions had none, and switched each over by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<uuid::Uuid>,
    /// The machine that moves with them: its guest goes through their layers at the target from the commit on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

/// What is to be done after the commit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Committed {
    /// What held the volume before.
    pub source: Location,
    /// The epoch that ended with it.
    pub epoch: u64,
    /// Which file or block device that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Box<ImageIdentity>>,
    /// How much of the source was the volume, if it was not all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<u64>,
    /// Whether the source may lack what it had answered, and no guest has been told.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_lost: bool,
    /// The layers that held bytes over the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerDocument>,
    /// Whether the VM's configuration was told of the new place.
    #[serde(default)]
    pub persisted: bool,
    /// Of a move to another host: whether that has answered that it holds the volume.
    #[serde(default)]
    pub taken: bool,
    /// What it was, as far as it is known.
    #[serde(default)]
    pub report: Option<api::v1::Report>,
}
