//! The record of moves that switch over together, and the checks of what the daemon stores there.

use std::path::Path;
use std::sync::Arc;

use ::daemon::{GroupRecord, GroupState};
use block::{Bytes, Device, Filter, IoFuture, Mutation};
use parking_lot::Mutex;

use super::Host;
use super::fake_arbiter::FakeArbiter;
use super::peer_host::PeerHost;
use super::watched::{alive, payload_in};
use crate::disk::{Disk, Faults, Timing};
use crate::host::setup::Role;
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::world::{Invariant, World};

/// The records, the newest group's last. One that could not be removed stays beside those of later groups.
pub(super) struct GroupStore {
    world: World,
    records: Mutex<Vec<Arc<Record>>>,
    /// Of the disks of all records, also of those to come.
    faults: Mutex<Faults>,
}

/// One record: its disk, and what is known of it.
struct Record {
    /// The name of its directory.
    id: String,
    disk: Disk,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// All targets are on record as holding their volumes.
    is_committed: bool,
    /// A store that says so was not answered, and none since.
    is_in_doubt: bool,
}

impl GroupStore {
    pub(super) fn new(world: &World) -> Arc<Self> {
        Arc::new(Self { world: world.clone(), records: Mutex::default(), faults: Mutex::new(Faults::default()) })
    }

    /// Whether the record of `path` is a group's.
    pub(super) fn is_of(path: &Path) -> bool {
        path.ancestors().any(|above| above.file_name().is_some_and(|name| name == "groups"))
    }

    /// Whether the newest group is committed.
    pub(super) fn is_committed(&self) -> bool {
        self.records.lock().last().is_some_and(|record| record.seen.lock().is_committed)
    }

    /// Whether the newest group may be committed.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.records.lock().last().is_some_and(|record| record.seen.lock().is_in_doubt)
    }

    pub(super) fn lose_power(&self) {
        self.records.lock().iter().for_each(|record| record.disk.lose_power());
    }

    /// The record of that name, with an empty disk if it was never opened.
    fn record(&self, id: &str) -> Arc<Record> {
        let mut records = self.records.lock();
        if let Some(known) = records.iter().find(|record| record.id == id) {
            return Arc::clone(known);
        }
        let disk = Disk::new(&self.world, "group", Bytes::mib(1), 512, Timing::FLASH);
        disk.set_faults(*self.faults.lock());
        let record = Arc::new(Record { id: id.to_owned(), disk, seen: Mutex::default() });
        records.push(Arc::clone(&record));
        record
    }
}

impl Host {
    /// The disks of the records of moves that switch over together.
    pub fn group_disks(&self) -> Vec<Disk> {
        self.shared.daemon_harness.groups.records.lock().iter().map(|record| record.disk.clone()).collect()
    }

    /// From now on those disks have these faults.
    pub fn set_group_faults(&self, faults: Faults) {
        *self.shared.daemon_harness.groups.faults.lock() = faults;
        self.group_disks().iter().for_each(|disk| disk.set_faults(faults));
    }

    /// The record at `path` as this life of the daemon has it.
    pub(super) async fn open_group(&self, path: &Path, process: &Process) -> Device {
        let name = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
        let id = name.trim_start_matches('.').trim_end_matches(".new");
        let record = self.shared.daemon_harness.groups.record(id);
        let lower = self.open(&record.disk, Role::Journal, 0).await;
        let (host, process, is_opened) = (self.clone(), process.clone(), Mutex::new(false));
        let watched = WatchedGroup { lower, host, record, process, is_opened };
        Device::new("group", watched)
    }

    /// All targets are about to be on record: each has what its source has.
    fn check_group(&self, record: &GroupRecord) {
        for volume in self.volumes().iter().filter(|volume| record.members.iter().any(|name| name == volume.name())) {
            volume.check_commit(volume.holder());
            volume.check_durable_there();
            volume.check_awaited_there();
        }
    }

    /// The other host is ready to take the volume, or has it.
    fn check_awaited_there(&self) {
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        if !peer.is_prepared() && !peer.holds() {
            let what = format!("a group is committed, and the neighbour is not ready to take {}", self.name());
            self.shared.world.violate(Invariant::CrashResume, what);
        }
    }

    /// The commit of a volume of a group is about to be stored.
    pub(super) fn check_group_committed(&self) {
        // What the arbiter has decided counts for all volumes, whether the record has heard of it or not.
        let fake_arbiter = self.shared.daemon_harness.peer.as_ref().and_then(PeerHost::fake_arbiter);
        let is_decided = fake_arbiter.is_some_and(FakeArbiter::has_committed);
        if !is_decided && !self.shared.daemon_harness.groups.is_committed() {
            let what = format!("{} goes to its target, and the record of its group does not say so", self.name());
            self.shared.world.violate(Invariant::OneWriter, what);
        }
    }
}

/// The record's disk as one life of the daemon has it.
struct WatchedGroup {
    lower: Device,
    host: Host,
    record: Arc<Record>,
    process: Process,
    /// What was found was stored once more: it has been looked at when it was stored first.
    is_opened: Mutex<bool>,
}

impl Filter for WatchedGroup {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            alive(&self.process).await;
            let payload = payload_in(&mutation);
            let record = payload.and_then(|payload| serde_json::from_slice::<GroupRecord>(&payload).ok());
            let Some(record) = record else { return self.lower.write(mutation).await };
            let is_commit = record.state == GroupState::Committed;
            let is_found = !std::mem::replace(&mut *self.is_opened.lock(), true);
            if is_commit {
                self.host.check_none_undone();
            }
            if is_commit && !is_found {
                self.host.check_group(&record);
            }
            let seen = &self.record.seen;
            seen.lock().is_in_doubt |= is_commit;
            let stored = self.lower.write(mutation).await;
            let word = if stored.is_ok() { "durable" } else { "in doubt" };
            self.host.shared.world.event(format_args!("group {word}: {:?}", record.state));
            let occurs = |what| self.host.shared.world.occur(Occurrence::Told(what));
            match (&stored, is_commit) {
                (Ok(()), true) => occurs("committed together"),
                (Err(_), true) => occurs("group in doubt"),
                _ => {}
            }
            if stored.is_ok() {
                let mut seen = seen.lock();
                (seen.is_committed, seen.is_in_doubt) = (is_commit, false);
            }
            stored
        })
    }
}
