//! Which host a machine is at, as far as both have it on record, and what must hold of that after every store.
//!
//! ```text
//!   a's journals, the record of the group, b's journals ─▶ here │ in doubt │ there
//!   here      no record that counts gives a disk up
//!   in doubt  a store that gives the disks up was not answered
//!   there     one that does was
//! ```
//!
//! The two documents of the machine are written before and after the commit. Neither says that it runs where it is not.

use std::sync::Arc;

use ::daemon::MachineDocument;

use super::Host;
use super::machine::MACHINE_FILE;
use super::peer_host::PeerHost;
use crate::files::SimFiles;
use crate::hypervisor::Authority;
use crate::world::Invariant;

/// What a host has on record of the machine.
pub(super) fn document_in(files: &SimFiles) -> Option<MachineDocument> {
    serde_json::from_str(&files.contents(MACHINE_FILE)?).ok()
}

/// What keeps a machine from being at rest, by its document.
fn unrest(document: &MachineDocument) -> Option<&'static str> {
    [
        (document.outgoing.is_some(), "on its way to the other host"),
        (document.incoming.is_some(), "on its way here"),
        (document.following.is_some(), "waiting for its memory"),
        (document.release_due, "about to give disks back"),
    ]
    .into_iter()
    .find_map(|(is_so, what)| is_so.then_some(what))
}

impl Host {
    /// Which host the machine is at.
    pub(super) fn authority(&self) -> Authority {
        let volumes: Vec<_> = self.volumes().into_iter().filter(|volume| !volume.is_gone_alone()).collect();
        let groups = &self.shared.daemon_harness.groups;
        let is_there = |volume: &Self| {
            let holds = volume.shared.daemon_harness.peer.as_ref().is_some_and(PeerHost::holds);
            holds || volume.has_given_up_durably()
        };
        if groups.is_committed() || volumes.iter().any(is_there) {
            return Authority::There;
        }
        match groups.is_in_doubt() || volumes.iter().any(Self::has_given_up_on_record) {
            true => Authority::InDoubt,
            false => Authority::Here,
        }
    }

    /// Looks at the machine's documents each time that one of them is durable, until the story is over.
    pub(super) fn judge_machine(&self) {
        let Some(machine) = self.machine() else { return };
        let weak = Arc::downgrade(&self.shared);
        let authority = weak.clone();
        machine.be_judged_by(move || authority.upgrade().map_or(Authority::Here, |shared| Self { shared }.authority()));
        let harness = &self.shared.daemon_harness;
        let files = [Some(&harness.files), harness.peer.as_ref().map(PeerHost::files)];
        for files in files.into_iter().flatten() {
            let weak = weak.clone();
            files.watch(move || {
                if let Some(shared) = weak.upgrade() {
                    Self { shared }.check_documents();
                }
            });
        }
    }

    fn documents(&self) -> [Option<MachineDocument>; 2] {
        let harness = &self.shared.daemon_harness;
        [document_in(&harness.files), harness.peer.as_ref().and_then(|peer| document_in(peer.files()))]
    }

    /// Neither document says that the machine runs where it is not.
    fn check_documents(&self) {
        let ([here, there], authority) = (self.documents(), self.authority());
        let is_left = |document: &MachineDocument| document.outgoing.is_some() || document.incoming.is_some();
        let gone = here.as_ref().filter(|document| !is_left(document));
        let says_moved = gone.is_some_and(|document| {
            document.process.is_none() && document.last_move.as_ref().is_some_and(|last| last.error.is_none())
        });
        let says_here =
            gone.is_some_and(|document| document.last_move.as_ref().is_none_or(|last| last.error.is_some()));
        let is_failed = here.as_ref().is_some_and(|document| document.last_move.is_some());
        let says_there = there.as_ref().is_some_and(|document| !is_left(document));
        let what = match authority {
            Authority::Here | Authority::InDoubt if says_moved => "the first host has it on record as moved",
            Authority::Here | Authority::InDoubt if says_there => "the other host has it on record as its own",
            Authority::There if says_here && !is_failed => "the first host has it on record as its own",
            _ => return,
        };
        let what = format!("the machine is on record as {authority:?}, and {what}");
        self.shared.world.violate(Invariant::OneWriter, what);
    }

    /// What keeps the machine from being at rest, if anything does.
    pub(crate) fn machine_unrest(&self) -> Option<String> {
        let documents = self.documents().into_iter().zip(["a", "b"]);
        let mut unrests = documents.filter_map(|(document, host)| Some((host, unrest(&document?)?)));
        unrests.next().map(|(host, what)| format!("{host} has the machine on record as {what}"))
    }

    /// Whether the daemon knows the machine.
    pub(crate) fn is_machine_known(&self) -> bool {
        self.documents()[0].is_some()
    }

    /// Whether this host has it on record that the machine is on its way to the other one.
    pub(super) fn is_machine_leaving(&self) -> bool {
        self.documents()[0].as_ref().is_some_and(|document| document.outgoing.is_some())
    }

    /// Whether the other host has it on record that the machine is on its way there.
    pub(crate) fn is_machine_arriving(&self) -> bool {
        self.documents()[1].as_ref().is_some_and(|document| document.incoming.is_some())
    }
}
