//! What is on record of a machine: `STATE/machines/NAME.json`, replaced as a whole.
//!
//! Who runs a machine that moves is not in it: it names the record of the group that says so ([`CommitRecord`]), the disks, and the
//! QEMU that is meant.

use std::path::PathBuf;

use api::v1::{Error, ErrorCode, Monitor, VmMove};
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vm::QemuProcess;
use vm::machine::MachineDescription;

use crate::jobs::CommitRecord;
use crate::location::Location;
use crate::problem::{Result, of_state};
use crate::stack::ArrivingCache;
use crate::state_dir::Layout;

/// The layout of this document.
pub const MACHINE_VERSION: u32 = 1;

/// A machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineDocument {
    /// The layout.
    pub version: u32,
    /// Its name.
    pub name: String,
    /// How its QEMU is reached.
    pub monitor: Monitor,
    /// That QEMU's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<QemuProcess>,
    /// The disks of one that came from another host: its QEMU was started on the exports of these volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<MachineDisk>,
    /// How it was started first, of one that came from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<MachineDescription>,
    /// Its move to another host, while that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outgoing: Option<OutgoingMachine>,
    /// Its move here, until it runs here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incoming: Option<IncomingMachine>,
    /// Its move here, once it runs, until the hook has heard of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrived: Option<IncomingMachine>,
    /// Its move here, once it runs, until all of its memory is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub following: Option<IncomingMachine>,
    /// What has become of its last move here, of one that runs since or whose QEMU has ended since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_word: Option<LastWord>,
    /// Whether its disks are to be given back to its QEMU, of one that has come, once the other host has let go of them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub release_due: bool,
    /// Its move here, if its QEMU ended after the commit and before its guest ran: the disks are here, and whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<IncomingMachine>,
    /// Its last move from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_move: Option<VmMove>,
}

/// A disk that QEMU reaches through the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineDisk {
    /// The volume.
    pub volume: String,
    /// The node, as the command line has it.
    pub node: String,
    /// The image, as the command line had it where the machine was started first.
    pub image: String,
    /// Its format, as QEMU had it open where the machine was started first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Of a machine that comes: where the disk is and stays, if both hosts reach it there. It is copied otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<Location>,
    /// Whether that is a container that grows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub grows: bool,
    /// Of a machine that comes: the cache that such a disk is to have here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<ArrivingCache>,
}

/// What has become of a move here: its source asks for that after a restart, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastWord {
    /// The move.
    pub id: Uuid,
    /// The host that it came from.
    pub host: String,
    /// Whether all of the memory has come.
    pub memory: MemoryFate,
}

/// What has become of memory that followed its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryFate {
    /// All of it is here.
    Whole,
    /// The QEMU has ended before, or a person has given it up.
    Lost,
}

/// A move to another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutgoingMachine {
    /// Its identity, which both hosts know.
    pub id: Uuid,
    /// The host.
    pub host: String,
    /// Its disks.
    pub volumes: Vec<String>,
    /// Whether its guest ran when it was stopped for the switch; before that, when the move was asked for.
    pub ran: bool,
    /// Whether it was stopped for the switch. An earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<bool>,
    /// Which record says whether the move counts.
    #[serde(default, skip_serializing_if = "CommitRecord::is_unnamed")]
    pub commit: CommitRecord,
    /// The disks that were adopted for the move: one that does not count gives them back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adopted: Vec<String>,
    /// When it was asked for, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The UUID of a domain of libvirt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Whether libvirt has started it with this host, and does not while it goes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub autostart: bool,
    /// How its QEMU was started, for the hook.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<MachineDescription>,
    /// Whether its memory may follow its guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub postcopy: bool,
}

/// A move here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncomingMachine {
    /// Its identity.
    pub id: Uuid,
    /// The host, as this daemon trusts it.
    pub host: String,
    /// Where its QEMU's sockets and log are.
    pub folder: PathBuf,
    /// Whether its guest ran at the other host, and is to run here.
    pub runs: bool,
    /// The UUID of a domain that libvirt may have brought here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The files of its memory, if the parallel engine brings it: their names are taken away once it runs, or does not come.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<PathBuf>,
    /// Whether its disks stay volumes here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_volumes: bool,
}

impl MachineDocument {
    /// A machine that runs here.
    pub(crate) fn new(name: &str, monitor: Monitor) -> Self {
        Self {
            version: MACHINE_VERSION,
            name: name.to_owned(),
            monitor,
            process: None,
            disks: Vec::new(),
            description: None,
            outgoing: None,
            incoming: None,
            arrived: None,
            following: None,
            last_word: None,
            release_due: false,
            lost: None,
            last_move: None,
        }
    }

    /// Whether there may be a QEMU here for it.
    pub(super) fn is_begun(&self) -> bool {
        self.process.is_some() || self.incoming.as_ref().is_some_and(|incoming| incoming.domain.is_some())
    }
}

/// Stores `document`.
pub(super) fn store(layout: &Layout, document: &MachineDocument) -> Result<()> {
    let text = serde_json::to_string_pretty(document).expect("plain data serialises");
    layout.write_atomically(&layout.machine(&document.name), &text)
}

/// Forgets the machine `name`.
pub(super) fn remove(layout: &Layout, name: &str) -> Result<()> {
    layout.remove_document(&layout.machine(name))
}

/// Every machine on record, or why it cannot be read.
pub(super) fn load_all(layout: &Layout) -> Result<Vec<Result<MachineDocument>>> {
    let paths = layout.documents(&layout.machines());
    let paths = paths.map_err(|error| of_state(error, format!("listing {}", layout.machines().display())))?;
    Ok(paths.iter().map(|path| load(layout, path)).collect())
}

fn load(layout: &Layout, path: &std::path::Path) -> Result<MachineDocument> {
    let unreadable = |why: String| {
        Error::new(ErrorCode::JournalUnreadable, format!("{} cannot be read: {why}", path.display()))
            .with_hint("put back a copy of it and restart, or remove it and add the VM again")
    };
    let text = layout.files().read(path).map_err(|error| unreadable(error.to_string()))?;
    let document: MachineDocument = serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
    if document.version != MACHINE_VERSION {
        return Err(unreadable(format!("it has the layout {}: a newer version wrote it", document.version)));
    }
    Ok(document)
}
