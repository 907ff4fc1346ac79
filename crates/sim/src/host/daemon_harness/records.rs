//! What the checks of the commit read in the daemon's journal.

use std::time::Duration;

use ::daemon::{Location, VolumeDocument};

use super::fake_arbiter::FakeArbiter;
use super::peer_host::PeerHost;
use super::{Host, side_held_by};
use crate::medium::SECTOR_BYTES;
use crate::world::Invariant;

impl Host {
    /// The daemon's journal found `slot` and stores it again, before it acts upon it.
    pub(super) fn check_recovered(&self, slot: &[u8]) {
        let slots = self.shared.daemon_harness.slots.lock();
        let Some(acknowledged) = &slots.acknowledged else { return };
        if acknowledged != slot && !slots.doubtful.iter().any(|doubtful| doubtful == slot) {
            let what = "the journal gave a document that is older than the last one whose store was answered";
            self.shared.world.violate(Invariant::CrashResume, what);
        }
    }

    /// A move that is on record ends, or goes on, before another one is.
    pub(super) fn check_struck(&self, document: &VolumeDocument) {
        let slots = self.shared.daemon_harness.slots.lock();
        let (Some(acknowledged), true) = (&slots.acknowledged, slots.doubtful.is_empty()) else { return };
        let before = serde_json::from_slice::<VolumeDocument>(acknowledged).ok().and_then(|before| before.job);
        if let (Some(before), Some(now)) = (before, &document.job)
            && before.id != now.id
        {
            let what = format!("job {} takes the place of job {}, which nobody has ended", now.id, before.id);
            self.shared.world.violate(Invariant::CrashResume, what);
        }
    }

    /// Whether the journal may say that the other host is to hold the volume under `epoch`.
    pub(super) fn has_given_up(&self, epoch: u64) -> bool {
        let fake_arbiter = self.shared.daemon_harness.peer.as_ref().and_then(PeerHost::fake_arbiter);
        fake_arbiter.is_some_and(FakeArbiter::has_committed) || self.has_on_record(|document| document.epoch == epoch)
    }

    /// Whether the journal may say that the other host is to hold the volume.
    pub(super) fn has_given_up_on_record(&self) -> bool {
        self.has_on_record(|_| true)
    }

    /// Whether the journal may say that a move to that place is under way.
    pub(super) fn is_target_on_record(&self, side: usize) -> bool {
        let slots = self.shared.daemon_harness.slots.lock();
        slots.acknowledged.iter().chain(&slots.doubtful).any(|slot| {
            let document = serde_json::from_slice::<VolumeDocument>(slot);
            document.is_ok_and(|document| document.job.is_some() && side_held_by(&document) != side)
        })
    }

    /// Waits until the journal says that no move is under way.
    pub(crate) async fn job_off_record(&self) {
        let has_job = |slot: &Vec<u8>| {
            let document = serde_json::from_slice::<VolumeDocument>(slot);
            document.is_ok_and(|document| document.job.is_some())
        };
        while self.shared.daemon_harness.slots.lock().acknowledged.as_ref().is_some_and(has_job) {
            self.shared.world.sleep(Duration::from_millis(10)).await;
        }
    }

    /// Whether the journal says so for certain.
    pub(super) fn has_given_up_durably(&self) -> bool {
        let slots = self.shared.daemon_harness.slots.lock();
        let document = slots.acknowledged.as_ref().and_then(|slot| serde_json::from_slice::<VolumeDocument>(slot).ok());
        document.is_some_and(|document| matches!(document.backend, Location::Remote(_)))
    }

    pub(super) fn has_on_record(&self, is_meant: impl Fn(&VolumeDocument) -> bool) -> bool {
        let slots = self.shared.daemon_harness.slots.lock();
        slots.acknowledged.iter().chain(&slots.doubtful).any(|slot| {
            let document = serde_json::from_slice::<VolumeDocument>(slot);
            document.is_ok_and(|document| matches!(document.backend, Location::Remote(_)) && is_meant(&document))
        })
    }

    /// This host gives the volume up to another one, or takes note that it has it.
    pub(super) fn check_given_up(&self, document: &VolumeDocument) {
        let (Some(peer), Location::Remote(_)) = (&self.shared.daemon_harness.peer, &document.backend) else { return };
        let committed = document.job.as_ref().and_then(|job| job.committed.as_ref());
        let is_taken = committed.is_none_or(|committed| committed.taken);
        let epoch = document.epoch;
        if is_taken && !peer.holds() {
            let what = format!("the neighbour is said to have taken the volume under epoch {epoch}, and has not");
            self.shared.world.violate(Invariant::CrashResume, what);
        } else if !peer.is_ready_for(epoch) {
            let what = format!("the volume is given up under epoch {epoch}, and nobody is ready for that");
            self.shared.world.violate(Invariant::CrashResume, what);
        }
    }

    /// What the guest was answered is durable on the other host when that is to have it: its power is not the guest's.
    pub(super) fn check_durable_there(&self) {
        let sides = &self.shared.sides;
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        // A verdict that came late has let the guest go on meanwhile, and what it wrote is kept until the other host has flushed.
        if peer.fake_arbiter().is_some() || sides.iter().any(|side| side.in_flight() > 0) {
            return;
        }
        let newest = sides[1].inspect(<[u8]>::to_vec);
        let mut doubtful = None;
        sides[1].each_uncertain(|sector, bytes| {
            let start = (sector * SECTOR_BYTES) as usize;
            if newest[start..start + bytes.len()] != *bytes {
                doubtful.get_or_insert(sector);
            }
        });
        if let Some(sector) = doubtful {
            let what = format!("the volume is given up, and sector {sector} would not survive the other host's power");
            self.shared.world.violate(Invariant::Flush, what);
        }
    }

    /// A journal slot is durable.
    pub(super) fn note_daemon_stored(&self, document: &VolumeDocument) {
        let shared = &self.shared;
        let holder = side_held_by(document);
        let mut newest = shared.epoch.lock();
        *newest = document.epoch.max(*newest);
        drop(newest);
        let is_commit = document.job.as_ref().is_some_and(|job| job.committed.is_some());
        self.note_holder(holder, document.epoch, is_commit);
    }
}
