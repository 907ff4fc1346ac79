//! What became of the move of a machine: the record of its group says so, and nothing else does.
//!
//! ```text
//!   NotBegun ──────────────────────────────────────────────▶ NotCommitted: nobody was asked for a commit
//!   Group(record) ── committed ────────────────────────────▶ Committed
//!         │       ── open, nothing asked, or the arbiter withdrew ▶ NotCommitted
//!         │       ── missing, unreadable, the arbiter is away ───▶ an error: asked again
//!   Unnamed (an earlier version) ── a record of that machine ──▶ as Group
//!         │                      ── none, and all its volumes are here ▶ NotCommitted
//!         └──────────────────────── none, and one is not ──▶ an error: a person decides
//! ```
//!
//! [`Committed`] and [`NotCommitted`] are made in this file only. Whoever ends a QEMU, lets a guest go on, or lets disks go asks for
//! one of them: a missing volume, process or answer makes neither.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::record::machine_member;
use super::{MachineMember, record_of};
use crate::daemon::Daemon;
use crate::location::Location;
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// Proof that the record of a machine's group says that the other host has the machine.
#[derive(Debug)]
pub(crate) struct Committed(());

/// Proof that the move of a machine does not count and never will: this host has the machine.
#[derive(Debug)]
pub(crate) struct NotCommitted(());

/// What became of the move of a machine.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It counts.
    Committed(Committed),
    /// It does not.
    NotCommitted(NotCommitted),
}

impl Outcome {
    const fn of(is_committed: bool) -> Self {
        match is_committed {
            true => Self::Committed(Committed(())),
            false => Self::NotCommitted(NotCommitted(())),
        }
    }
}

/// Which record says whether the move of a machine counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CommitRecord {
    /// An earlier version began the move: the journals of its volumes name the record.
    #[default]
    Unnamed,
    /// None: nothing was asked for a commit.
    NotBegun,
    /// The record of this group.
    Group(Uuid),
}

impl CommitRecord {
    /// Whether an earlier version began the move.
    pub(crate) const fn is_unnamed(&self) -> bool {
        matches!(self, Self::Unnamed)
    }
}

impl MachineMember {
    /// Has the commit of all stored. Not to be dropped half-way.
    ///
    /// # Errors
    /// Nobody knows whether it counts: [`settle`](Self::settle) finds out.
    pub(crate) async fn commit(&self) -> block::Result<Committed> {
        self.ask_for_commit().await.map(|()| Committed(()))
    }

    /// Takes the machine off its way to the commit, and settles a commit in doubt, against it if that is possible still.
    ///
    /// # Errors
    /// The doubt is as it was.
    pub(crate) async fn settle(&self) -> block::Result<Outcome> {
        self.leave();
        self.take_back().await.map(Outcome::of)
    }
}

impl Daemon {
    /// After a start: what became of the move of the machine `name`, whose disks are `volumes`.
    ///
    /// # Errors
    /// That is not known, and why. Nothing is to be done that only one of the two hosts may do.
    pub(crate) async fn outcome_of(&self, record: CommitRecord, name: &str, volumes: &[String]) -> Result<Outcome> {
        let record = match record {
            CommitRecord::NotBegun => return Ok(Outcome::of(false)),
            CommitRecord::Group(record) => record,
            CommitRecord::Unnamed => match self.record_with_machine(name, volumes) {
                Some(record) => record,
                None => return self.without_record(name, volumes),
            },
        };
        let Some(group) = self.group_with(record).await else {
            let path = self.layout.group_journal(record);
            let message = format!("whether {name} was moved is on record in {}, which cannot be read", path.display());
            return Err(Error::new(ErrorCode::JournalUnreadable, message)
                .with_hint("put back a copy of that file and restart; nothing of the VM is ended or started before"));
        };
        MachineMember::new(group, name)
            .settle()
            .await
            .map_err(|error| of_backend(&error, "the record of the VM's move"))
    }

    /// The record of the group that the machine `name` is of: the one that its volumes name, or the only one.
    fn record_with_machine(&self, name: &str, volumes: &[String]) -> Option<Uuid> {
        let member = machine_member(name);
        let mut found: Vec<_> =
            self.groups.lock().iter().filter(|(_, group)| group.awaits(&member)).map(|(record, _)| *record).collect();
        let named = volumes.iter().filter_map(|name| record_of(&self.volume(name).ok()?.document())).next();
        found.retain(|record| named.is_none_or(|named| named == *record));
        found.pop().filter(|_| found.is_empty())
    }

    /// An earlier version removed the record when the move was over, or had not made it yet. After a commit it ended QEMU and let the
    /// disks go before that.
    fn without_record(&self, name: &str, volumes: &[String]) -> Result<Outcome> {
        let is_here = |volume: Arc<Volume>| {
            let document = volume.document();
            matches!(document.backend, Location::Local(_) | Location::Foreign(_)) && document.incoming.is_none()
        };
        if !volumes.is_empty() && volumes.iter().all(|name| self.volume(name).is_ok_and(is_here)) {
            return Ok(Outcome::of(false));
        }
        let message = format!("whether {name} was moved is on no record: an earlier version began that move");
        Err(Error::new(ErrorCode::WrongState, message).with_hint(format!(
            "see at which host its disks are; if the VM is there, end its QEMU here yourself, then `transhume vm rm {name}`"
        )))
    }

    /// After a start: whatever `is_awaited` does not know of is over, as far as machines go.
    pub(crate) fn leave_groups_of_machines(&self, is_awaited: impl Fn(Uuid, &str) -> bool) {
        let found: Vec<_> = self.groups.lock().iter().map(|(record, group)| (*record, group.machines())).collect();
        for (record, machines) in found {
            let over = machines.iter().filter(|name| !is_awaited(record, name));
            over.for_each(|name| self.leave_group_as(record, &machine_member(name)));
        }
    }
}

#[cfg(test)]
impl Daemon {
    /// The record of a group of the machine `name` alone, as a commit leaves it, or open.
    pub(crate) async fn record_group(&self, name: &str, is_committed: bool) -> Uuid {
        use super::record::{GroupJournal, GroupRecord, GroupState};
        let id = crate::document::random_uuid(&*self.env);
        let needed = migrate::Journal::<GroupRecord>::bytes_needed();
        let path = self.state.begin_group(id, needed).expect("begun");
        let members = (id, vec![machine_member(name)]);
        let mut journal = GroupJournal::create(&path, members, &self.backends, &*self.env).await.expect("made");
        if is_committed {
            journal.store(GroupState::Committed).await.expect("stored");
        }
        self.state.finish_group(id).expect("it counts");
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_an_earlier_version_names_no_group() {
        #[derive(Deserialize, Serialize, PartialEq, Debug)]
        struct Document {
            #[serde(default, skip_serializing_if = "CommitRecord::is_unnamed")]
            commit: CommitRecord,
        }
        let read = |text| serde_json::from_str::<Document>(text).expect("readable").commit;
        assert_eq!(read("{}"), CommitRecord::Unnamed);
        assert_eq!(read(r#"{"commit":"not-begun"}"#), CommitRecord::NotBegun);
        let named = Document { commit: CommitRecord::Group(Uuid::from_u128(7)) };
        assert_eq!(read(&serde_json::to_string(&named).expect("plain data")), named.commit);
        assert_eq!(serde_json::to_string(&Document { commit: CommitRecord::Unnamed }).expect("plain data"), "{}");
    }
}
