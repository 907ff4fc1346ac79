//! All disks of a machine, moved together.
//!
//! Each disk has a job of its own, with its own copy and report. Together they are asked for, and refused, they switch over in
//! one commit ([`switchover`]), and together they are undone: a job that is cancelled or fails takes the others along. After a
//! restart the journals say who belongs together, and the group's [`record`] whether all of it is on its targets.

mod machine;
mod outcome;
pub(crate) mod record;
mod switchover;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode, Job, JobState, MoveRequest, Plan, PlanRequest};

use migrate::{JobJournal, Journal, MoveOptions};
use uuid::Uuid;

pub(crate) use self::machine::MachineMember;
pub use self::outcome::CommitRecord;
pub(crate) use self::outcome::{Committed, NotCommitted, Outcome};
pub(crate) use self::record::machine_member;
use self::record::{GroupJournal, GroupRecord, is_machine};
pub(crate) use self::switchover::Group;
use self::switchover::GroupMember;
use super::finish::{Ending, finish};
use super::start::{Enlisted, Ready, destination};
use crate::arbiter::Arbiter;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::{GroupDocument, JobDocument, VolumeDocument, random_uuid};
use crate::free_space::Needs;
use crate::location::{Destination, JobTarget, RemoteVolume, require_here};
use crate::problem::{Result, invalid, of_backend};
use crate::remote::GroupRuling;
use crate::stack::require_no_cache;
use crate::volume::Volume;

impl Daemon {
    /// Starts or queues moves of all disks of the machine whose disk `name` is. When this returns an error, nothing was
    /// left behind.
    pub(crate) async fn start_move_of_all(
        self: &Arc<Self>,
        peer: &Peer,
        name: &str,
        request: MoveRequest,
    ) -> Result<Vec<Job>> {
        let volumes = self.disks_beside(name)?;
        let requests = requests_for(&volumes, &request)?;
        self.start_together(peer, &volumes, requests, None, |_, _| ()).await
    }

    /// The same of any volumes, in the order of their names. With a `machine` they do not switch over without that: it is a member
    /// of their group. `tune` changes the options of each.
    pub(crate) async fn start_together(
        self: &Arc<Self>,
        peer: &Peer,
        volumes: &[Arc<Volume>],
        requests: Vec<MoveRequest>,
        machine: Option<&str>,
        mut tune: impl FnMut(&str, &mut MoveOptions) + Send,
    ) -> Result<Vec<Job>> {
        // By name, so that two groups never wait for each other.
        let mut operations = Vec::with_capacity(volumes.len());
        for volume in volumes {
            operations.push(volume.begin_operation(&*self.env).await?);
        }
        if machine.is_some() {
            // The guest is at the other host from the commit on, and nothing is known there of what only a cache has.
            // The cache of one that stays where it is goes along, or is empty there.
            let copied = volumes.iter().zip(&requests).filter(|(_, request)| !request.shared);
            copied
                .map(|(volume, _)| volume)
                .try_for_each(|volume| require_no_cache(&volume.document()).map_err(|error| of_disk(volume, error)))?;
        }
        let mut ready = Vec::with_capacity(volumes.len());
        let outcome = self.make_all_ready(volumes, requests, &mut ready).await;
        volumes.iter().zip(&mut ready).for_each(|(volume, ready)| tune(&volume.name, &mut ready.options));
        let of = |ready: &Ready| (ready.target.clone(), ready.layers.clone(), ready.place.clone());
        let targets: Vec<_> = ready.iter().map(of).collect();
        let outcome = match outcome {
            Ok(()) => Box::pin(self.enlist_all(peer, volumes, machine, ready)).await,
            Err(error) => Err(error),
        };
        match outcome {
            Ok(enlisted) => Ok(enlisted.into_iter().map(|enlisted| self.begin(enlisted)).collect()),
            Err(error) => {
                for (target, layers, _place) in &targets {
                    self.discard_unused(target, layers).await;
                }
                Err(error)
            }
        }
    }

    async fn make_all_ready(
        self: &Arc<Self>,
        volumes: &[Arc<Volume>],
        requests: Vec<MoveRequest>,
        ready: &mut Vec<Ready>,
    ) -> Result<()> {
        let mut needs = Needs::default();
        for (volume, request) in volumes.iter().zip(requests) {
            let made = self.make_ready(volume, request, &mut needs).await;
            ready.push(made.map_err(|error| of_disk(volume, error))?);
        }
        needs.check()
    }

    async fn enlist_all(
        self: &Arc<Self>,
        peer: &Peer,
        volumes: &[Arc<Volume>],
        machine: Option<&str>,
        mut ready: Vec<Ready>,
    ) -> Result<Vec<Enlisted>> {
        self.join_moves(&mut ready);
        let mut open_backend = Vec::with_capacity(volumes.len());
        for (volume, ready) in volumes.iter().zip(&ready) {
            let opened = self.open_target(volume, &ready.target, &ready.layers).await;
            open_backend.push(opened.map_err(|error| of_disk(volume, error))?);
        }
        let ids = self.history.next_ids(volumes.len() as u64)?;
        let members: Vec<String> = volumes.iter().map(|volume| volume.name.clone()).collect();
        let record = match (volumes, machine) {
            ([_], None) => None,
            _ => Some(self.begin_group(members.iter().cloned().chain(machine.map(machine_member)), &ready).await?),
        };
        let group = GroupDocument { id: ids.start, members, record, machine: machine.map(str::to_owned) };
        let mut enlisted = Vec::with_capacity(volumes.len());
        for (((volume, ready), open_backend), id) in volumes.iter().zip(ready).zip(open_backend).zip(ids) {
            match self.enlist(peer, volume, ready, (id, Some(group.clone())), open_backend).await {
                Ok(one) => enlisted.push(one),
                Err(error) => {
                    for Enlisted { volume: other, handle, open_backend, .. } in enlisted {
                        // It is told as failed: nobody has cancelled it.
                        handle.fail(failed_with(&other.name, &volume.name, Some(&error)));
                        finish(self, &other, &handle, Ending::Cancelled(None), open_backend).await;
                    }
                    record.into_iter().for_each(|record| self.drop_group(record));
                    return Err(of_disk(volume, error));
                }
            }
        }
        Ok(enlisted)
    }

    /// Gives moves that an arbiter decides on one identity: so there is one ruling, which both hosts ask for as for any.
    fn join_moves(&self, ready: &mut [Ready]) {
        let mut remotes = ready.iter_mut().filter_map(|ready| match &mut ready.target {
            JobTarget::Remote(remote) => Some(remote),
            JobTarget::Local(_) | JobTarget::Foreign(_) => None,
        });
        let first = remotes.next().filter(|_| self.hosts.arbiter().is_some()).map(|remote| remote.job);
        first.into_iter().for_each(|job| remotes.by_ref().for_each(|remote| remote.job = job));
    }

    /// The arbiter, if it decides on moves to these targets, and one of those.
    fn judged<'a>(&self, targets: impl IntoIterator<Item = &'a JobTarget>) -> Option<(Arc<dyn Arbiter>, RemoteVolume)> {
        let remote = targets.into_iter().find_map(|target| match target {
            JobTarget::Remote(remote) => Some(remote.clone()),
            JobTarget::Local(_) | JobTarget::Foreign(_) => None,
        });
        Some((self.hosts.arbiter()?, remote?))
    }

    /// Puts it on record that `members` switch over in one commit.
    async fn begin_group(&self, members: impl Iterator<Item = String>, ready: &[Ready]) -> Result<Uuid> {
        let members = members.collect();
        let id = random_uuid(&*self.env);
        let path = self.state.begin_group(id, Journal::<GroupRecord>::bytes_needed())?;
        let journal = GroupJournal::create(&path, (id, members), &self.backends, &*self.env).await;
        let journal = journal.map_err(|error| of_backend(&error, "the record of the group"))?;
        self.state.finish_group(id)?;
        let judged = self.judged(ready.iter().map(|ready| &ready.target));
        let ruling = judged.map(|(arbiter, remote)| GroupRuling::new(self, arbiter, remote));
        self.groups.lock().insert(id, Arc::new(Group::new(journal, ruling, |_| true)));
        Ok(id)
    }

    /// No journal names the record any more.
    fn drop_group(&self, record: Uuid) {
        if self.groups.lock().remove(&record).is_some() {
            self.state.remove_group(record);
        }
    }

    /// The move of `volume`, which was of the group with this record, is over and off its journal.
    pub(crate) fn leave_group(&self, record: Uuid, volume: &Volume) {
        self.leave_group_as(record, &volume.name);
    }

    /// The same of any member.
    pub(crate) fn leave_group_as(&self, record: Uuid, member: &str) {
        let group = self.groups.lock().get(&record).cloned();
        let Some(group) = group.filter(|group| group.note_over(member)) else { return };
        self.drop_group(record);
        self.env.spawn(Box::pin(async move { group.forget_ruling().await }));
    }

    /// The journal of the job of `volume`: `own`, behind what its group has to say if it is of one.
    ///
    /// # Errors
    /// Its group has no record.
    pub(super) fn job_journal(&self, volume: &Volume, own: Arc<dyn JobJournal>) -> block::Result<Arc<dyn JobJournal>> {
        let Some(record) = record_of(&volume.document()) else { return Ok(own) };
        let group = self.groups.lock().get(&record).cloned().ok_or_else(|| {
            block::Error::new(block::ErrorKind::Internal, format!("the group {record} has no record"))
        })?;
        let (name, journal) = (volume.name.clone(), Arc::clone(&volume.journal));
        Ok(Arc::new(GroupMember { group, name, journal, own, job: volume.job() }))
    }

    /// After a start: reads the records of the groups that `volumes` are of, and removes those that neither a volume nor a machine
    /// is of.
    pub(crate) async fn recover_groups(&self, volumes: &[Arc<Volume>]) -> Result<()> {
        for id in self.state.groups()? {
            self.recover_group(id, volumes).await;
        }
        Ok(())
    }

    /// The group with this record. One that could not be read at the start is read again: what stood in the way may have passed.
    pub(crate) async fn group_with(&self, record: Uuid) -> Option<Arc<Group>> {
        let _one_at_a_time = self.group_recovery.lock().await;
        let known = self.groups.lock().get(&record).cloned();
        if known.is_none() && self.state.groups().is_ok_and(|groups| groups.contains(&record)) {
            self.recover_group(record, &self.volumes()).await;
            return self.groups.lock().get(&record).cloned();
        }
        known
    }

    async fn recover_group(&self, id: Uuid, volumes: &[Arc<Volume>]) {
        let documents = volumes.iter().map(|volume| volume.document());
        let members: Vec<_> = documents.filter(|document| record_of(document) == Some(id)).collect();
        let path = self.layout.group_journal(id);
        let journal = match GroupJournal::open(&path, &self.backends, &*self.env).await {
            Ok(journal) => journal,
            Err(error) => {
                tracing::error!(group = %id, error = error.chain(), "the record of a group cannot be read");
                return;
            }
        };
        let has_machine = journal.record().has_machine();
        // Of a machine only its own record says that it needs this one no more.
        if members.is_empty() && self.unreadable.read().is_empty() && !has_machine {
            self.state.remove_group(id);
            return;
        }
        let jobs = || members.iter().filter_map(|document| document.job.as_deref());
        let judged = self.judged(jobs().map(|job| &job.target));
        let ruling = judged.map(|(arbiter, remote)| GroupRuling::found(self, arbiter, remote, &members));
        // What a journal that cannot be read says nobody knows: it may name the record.
        let is_member = |name: &str| members.iter().any(|document| document.name == name);
        // A machine that was under way is waited for: whoever brings machines back ends its move.
        let is_under_way = |name: &str| is_member(name) || self.is_unreadable(name) || is_machine(name);
        let mut group = Group::new(journal, ruling, is_under_way);
        if has_machine {
            let may_name_it = self.hosts.arbiter().is_some() && !self.unreadable.read().is_empty();
            let was_asked = jobs().any(JobDocument::is_for_the_arbiter) || may_name_it;
            group = group.found_with_machine(jobs().any(|job| job.committed.is_some()), was_asked);
        }
        self.groups.lock().insert(id, Arc::new(group));
    }

    /// After a start, before anybody is let in: what the record of its group says of `volume` goes on its own journal.
    ///
    /// # Errors
    /// There is no such record, or the journal cannot be stored. Who holds the volume is not known.
    pub(crate) async fn settle_group(&self, volume: &Volume) -> Result<()> {
        let Some(record) = undecided_record_of(&volume.document()) else { return Ok(()) };
        let Some(group) = self.group_with(record).await else {
            let path = self.layout.group_journal(record);
            let message =
                format!("whether {} was moved is on record in {}, which cannot be read", volume.name, path.display());
            return Err(Error::new(ErrorCode::JournalUnreadable, message)
                .with_hint("put back a copy of that file and restart; the volume's bytes are untouched"));
        };
        if group.is_committed() {
            commit_with_group(volume).await?;
            tracing::info!(volume = volume.name, group = %record, "the volume was switched over with the other disks");
        }
        Ok(())
    }

    /// What moves of all disks of the machine whose disk `name` is would cost.
    pub(crate) async fn plan_all(self: &Arc<Self>, name: &str, request: PlanRequest) -> Result<Vec<Plan>> {
        let volumes = self.disks_beside(name)?;
        let requests = requests_for(&volumes, &request.request)?;
        let mut plans = Vec::with_capacity(volumes.len());
        for (volume, request) in volumes.iter().zip(requests) {
            plans.push(self.plan(&volume.name, PlanRequest { request }).await?);
        }
        Ok(plans)
    }

    /// All adopted disks of the machine whose disk `name` is, by name.
    fn disks_beside(&self, name: &str) -> Result<Vec<Arc<Volume>>> {
        let monitor_of = |volume: &Volume| volume.document().adoption.as_ref().map(|adoption| adoption.monitor.clone());
        let Some(monitor) = monitor_of(&*self.volume(name)?) else {
            return Err(invalid(
                format!("{name} was not adopted from a VM: nobody knows which disks belong to it"),
                "leave --all-disks out",
            ));
        };
        let mut volumes = self.volumes();
        volumes.retain(|volume| monitor_of(volume).as_ref() == Some(&monitor));
        Ok(volumes)
    }

    /// The others that `group` has and that are not over.
    fn members(&self, group: u64, but: &str) -> Vec<Arc<Volume>> {
        let belongs = |volume: &Volume| {
            let document = volume.document();
            document.job.as_ref().and_then(|job| job.group.as_ref()).is_some_and(|found| found.id == group)
        };
        self.volumes().into_iter().filter(|volume| volume.name != but && belongs(volume)).collect()
    }

    /// The job of a group is undone: so are the others that are not on their targets.
    pub(super) fn undo_others(&self, group: &GroupDocument, over: &Job) {
        for volume in self.members(group.id, &over.volume) {
            let Some(handle) = volume.job() else { continue };
            match over.state {
                // If it is too late for that, all of them are on their targets.
                JobState::Cancelled => _ = handle.cancel(),
                _ => handle.fail(failed_with(&volume.name, &over.volume, over.error.as_ref())),
            }
        }
    }

    /// Waits until the others of the group of `job` are over.
    pub(crate) async fn wait_for_others(&self, job: &Job) {
        let Some(group) = job.group else { return };
        for volume in self.members(group, &job.volume) {
            if let Some(handle) = volume.job() {
                handle.wait().await;
            }
        }
    }

    /// The machine `name` as a member of the group with this record, if there is such a group.
    pub(crate) fn machine_in_group(&self, record: Uuid, name: &str) -> Option<MachineMember> {
        let group = self.groups.lock().get(&record).cloned()?;
        Some(MachineMember::new(group, name))
    }

    /// Whether the disk moves with its machine: then QEMU's own migration is ours.
    pub(crate) fn moves_with_its_machine(&self, volume: &Volume) -> bool {
        let record = record_of(&volume.document());
        let group = record.and_then(|record| self.groups.lock().get(&record).cloned());
        group.is_some_and(|group| group.has_machine())
    }

    /// After a restart: groups of which a member was undone before the restart, or was never on record. Only the moves `found` by
    /// the start are meant: groups that somebody has begun since are whole.
    pub(crate) fn settle_groups(&self, found: &BTreeSet<u64>) {
        let mut volumes = self.volumes();
        let is_meant = |job: &JobDocument| job.group.is_some() && found.contains(&job.id);
        volumes.retain(|volume| volume.document().job.as_deref().is_some_and(is_meant));
        if volumes.is_empty() {
            return;
        }
        let over = self.history.list();
        for volume in volumes {
            let document = volume.document();
            let Some(job) = &document.job else { continue };
            let (Some(group), Some(handle)) = (&job.group, volume.job()) else { continue };
            for member in group.members.iter().filter(|member| **member != volume.name) {
                let ended = over.iter().find(|over| over.volume == *member && over.group == Some(group.id));
                let is_under_way = self.members(group.id, &volume.name).iter().any(|other| other.name == *member);
                match ended {
                    // Looked at first: one that is over may not have been taken off its journal yet.
                    Some(over) if over.state == JobState::Done || self.has_moved(over) => {}
                    Some(over) if over.state == JobState::Cancelled => _ = handle.cancel(),
                    Some(over) => handle.fail(failed_with(&volume.name, member, over.error.as_ref())),
                    // The daemon died while the jobs were put on record. None of them had begun then, and this one waits for
                    // the missing one for ever.
                    None if !is_under_way && (job.record.sessions == 0 || self.waits_for(group, member)) => {
                        handle.fail(failed_with(&volume.name, member, None))
                    }
                    None => {}
                }
            }
        }
    }

    /// Whether the commit of `group` waits for `member`, about which this daemon knows all that there is.
    fn waits_for(&self, group: &GroupDocument, member: &str) -> bool {
        let found = group.record.and_then(|record| self.groups.lock().get(&record).cloned());
        found.is_some_and(|found| !found.is_committed()) && !self.is_unreadable(member)
    }

    /// Whether a job that is over has put its volume where it was to go.
    fn has_moved(&self, over: &Job) -> bool {
        self.volume(&over.volume).is_ok_and(|volume| volume.document().backend.to_string() == over.target)
    }
}

/// The record of the group that the move of a volume is of.
pub(crate) fn record_of(document: &VolumeDocument) -> Option<Uuid> {
    document.job.as_ref()?.group.as_ref()?.record
}

/// The same while the volume's own journal does not say that it was moved: the record may know better.
pub(crate) fn undecided_record_of(document: &VolumeDocument) -> Option<Uuid> {
    let is_committed = document.job.as_ref().is_some_and(|job| job.committed.is_some());
    record_of(document).filter(|_| !is_committed)
}

/// The record says that the group of `volume` is committed: so does the volume's own journal.
pub(crate) async fn commit_with_group(volume: &Volume) -> Result<()> {
    let stored = volume.journal.update(VolumeDocument::commit).await;
    stored.map_err(|error| of_backend(&error, "the volume's journal"))
}

fn failed_with(name: &str, other: &str, cause: Option<&Error>) -> Error {
    let cause = cause.map_or_else(|| "it was never on record".to_owned(), |cause| cause.message.clone());
    Error::new(
        ErrorCode::MoveFailed,
        format!("the move of {name} was undone with that of {other}, a disk of the same machine: {cause}"),
    )
    .with_hint("the guest is on the source and goes on; remove the cause and move all disks again")
}

fn of_disk(volume: &Volume, error: Error) -> Error {
    Error { message: format!("{}: {}", volume.name, error.message), ..error }
}

/// A request for each of `volumes`: `{name}` in the target is its name, and a target that ends with a slash a directory.
fn requests_for(volumes: &[Arc<Volume>], request: &MoveRequest) -> Result<Vec<MoveRequest>> {
    let mut targets = BTreeSet::new();
    let mut requests = Vec::with_capacity(volumes.len());
    for volume in volumes {
        let document = volume.document();
        require_here(&document.backend, "it cannot be moved from here")?;
        let source = document.backend.local_path().unwrap_or_else(|| Path::new(&volume.name));
        let to = target_for(&request.to, &volume.name, source);
        let request = MoveRequest { to, ..request.clone() };
        if !targets.insert(place_of(&destination(volume, &request.to)?)) {
            return Err(invalid(
                format!("two disks would go to {}", request.to),
                "write {name} in the target where the volume's name is to stand, or name a directory with a slash at its end",
            ));
        }
        requests.push(request);
    }
    Ok(requests)
}

/// What two disks must not have in common.
fn place_of(destination: &Destination) -> String {
    match destination {
        Destination::Local(spec) => spec.path().display().to_string(),
        Destination::Host { .. } | Destination::Foreign(_) => destination.to_string(),
    }
}

fn target_for(pattern: &str, name: &str, source: &Path) -> String {
    let (place, options) = match pattern.split_once(',') {
        Some((place, options)) => (place, format!(",{options}")),
        None => (pattern, String::new()),
    };
    let file = source.file_name().unwrap_or_default().to_string_lossy();
    let place = place.replace("{name}", name);
    let place = if place.ends_with('/') { format!("{place}{file}") } else { place };
    place + &options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_for_several_disks_is_a_pattern_or_a_directory() {
        let source = std::path::Path::new("/vm/web1-data.img");
        assert_eq!(target_for("file:/new/{name}.img", "data", source), "file:/new/data.img");
        assert_eq!(
            target_for("file:/new/{name}/,cache=page", "data", source),
            "file:/new/data/web1-data.img,cache=page"
        );
        assert_eq!(target_for("file:/new/", "data", source), "file:/new/web1-data.img");
        assert_eq!(target_for("file:/new/one.img", "data", source), "file:/new/one.img");
    }
}
