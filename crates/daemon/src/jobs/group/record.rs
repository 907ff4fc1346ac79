//! The record of moves that switch over together: one journal whose document says whether they have.
//!
//! ```text
//!   begun, open ─▶ the journals of all members name it ─▶ committed ─▶ each member's own commit ─▶ nobody names it ─▶ removed
//! ```
//!
//! Before *committed* is durable the source of every member holds its volume, afterwards the target of every member does,
//! whatever its own journal says yet. A record that neither a journal nor the record of a machine names says nothing.

use std::path::Path;
use std::sync::Arc;

use block::{Error, ErrorKind};
use env::Env;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::journal_file::JournalFile;
use crate::platform::Backends;

/// The layout of this record.
const GROUP_VERSION: u32 = 1;

/// The layout of the record of a group with a machine in it: a program that does not know those would commit without it.
const GROUP_VERSION_MACHINES: u32 = 2;

/// What no volume's name begins with.
const MACHINE: &str = "vm/";

/// What the group of a machine's disks calls the machine `name`.
pub(crate) fn machine_member(name: &str) -> String {
    format!("{MACHINE}{name}")
}

/// The machine that a member is, if it is one.
pub(super) fn machine_of(member: &str) -> Option<&str> {
    member.strip_prefix(MACHINE)
}

/// Whether a member is a machine, and no volume.
pub(super) fn is_machine(member: &str) -> bool {
    member.starts_with(MACHINE)
}

/// What is on record of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// The layout.
    pub version: u32,
    /// The group, as its members' journals call it.
    pub id: Uuid,
    /// The volumes, and the machine whose disks they are if that moves with them (`vm/NAME`).
    pub members: Vec<String>,
    /// Whether their targets hold them.
    pub state: GroupState,
}

impl GroupRecord {
    /// Whether a machine is among its members.
    pub(super) fn has_machine(&self) -> bool {
        self.members.iter().any(|member| is_machine(member))
    }
}

/// Whether a group has switched over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupState {
    /// The sources hold the volumes.
    Open,
    /// The targets hold the volumes.
    Committed,
}

/// The record on its disk.
pub(crate) struct GroupJournal {
    file: JournalFile<GroupRecord>,
    record: GroupRecord,
}

impl GroupJournal {
    /// The record at `path`, which holds nothing yet: of the group `id` of `members`, open.
    pub(crate) async fn create(
        path: &Path,
        (id, members): (Uuid, Vec<String>),
        backends: &Arc<dyn Backends>,
        env: &dyn Env,
    ) -> block::Result<Self> {
        let (file, _) = JournalFile::open(path, backends, env).await?;
        let has_machine = members.iter().any(|member| is_machine(member));
        let version = if has_machine { GROUP_VERSION_MACHINES } else { GROUP_VERSION };
        let record = GroupRecord { version, id, members, state: GroupState::Open };
        file.store(&record).await?;
        Ok(Self { file, record })
    }

    /// The record at `path`.
    ///
    /// # Errors
    /// It cannot be read, or a newer version has written it.
    pub(crate) async fn open(path: &Path, backends: &Arc<dyn Backends>, env: &dyn Env) -> block::Result<Self> {
        let (file, record) = JournalFile::open(path, backends, env).await?;
        Ok(Self { file, record: check(path, record)? })
    }

    /// What was last stored.
    pub(crate) const fn record(&self) -> &GroupRecord {
        &self.record
    }

    /// Stores `state`. After an error nobody knows which state counts, until a later store has ended well.
    pub(super) async fn store(&mut self, state: GroupState) -> block::Result<()> {
        let record = GroupRecord { state, ..self.record.clone() };
        self.file.store(&record).await?;
        self.record = record;
        Ok(())
    }
}

fn check(path: &Path, record: Option<GroupRecord>) -> block::Result<GroupRecord> {
    let path = path.display();
    let record = record.ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("the record {path} is empty")))?;
    if !(GROUP_VERSION..=GROUP_VERSION_MACHINES).contains(&record.version) {
        let context = format!("the record {path} was written by a newer version: start that one");
        return Err(Error::new(ErrorKind::Unsupported, context));
    }
    Ok(record)
}
