//! Volumes that are down after a start: they may be for as long as something is away that they need. Then they come back, by
//! themselves or by what their message names.

use std::time::Duration;

use ::daemon::{Core, VolumeDocument};
use api::v1::{Error, ErrorCode, Job, JobState, SnapshotRequest};
use parking_lot::Mutex;

use super::{Host, side_held_by};
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::world::Invariant;

/// So long after the return of what it needs a volume may be down.
const RETURN_LIMIT: Duration = Duration::from_secs(20);
/// So many starts in a row may leave a volume down though nothing is away that it needs.
const STARTS_MAX: u32 = 2;
/// How often it is looked at whether a volume is back.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// What outlives a process of it.
#[derive(Default)]
pub(super) struct Returning {
    /// So many starts in a row have left a volume down though nothing was away that it needs.
    starts: Mutex<u32>,
    /// Moves whose target was away at a start.
    awaited: Mutex<Vec<u64>>,
}

impl Host {
    /// Waits until no volume is down.
    ///
    /// # Errors
    /// One is, and what an operator does about it is to start the daemon anew.
    pub(super) async fn see_up(&self, process: &Process, core: &Core) -> Result<(), Error> {
        let shared = &self.shared;
        let is_down = || core.volumes().into_iter().find_map(|volume| Some((volume.name, volume.problem?)));
        let mut since = None;
        while let Some((name, problem)) = is_down() {
            let absences = shared.world.absences();
            if problem.contains("arbiter") {
                // It is asked again until it answers.
            } else if absences.ever == 0 {
                return Err(Error::new(ErrorCode::WrongState, problem));
            } else if absences.needed > 0 {
                shared.world.occur(Occurrence::Told("down while something is away"));
                since = None;
            } else if shared.world.now() - *since.get_or_insert(shared.world.now()) >= RETURN_LIMIT {
                return Err(self.restarted_if_named(core, &name, problem).await);
            }
            process.env().sleep(LOOK_INTERVAL).await;
        }
        *shared.daemon_harness.returning.starts.lock() = 0;
        Ok(())
    }

    /// What an operator does about a volume that is down: the daemon is started anew.
    pub(super) fn restart(&self, process: &Process) {
        let (host, process) = (self.clone(), process.clone());
        self.shared.world.spawn(async move {
            let _outage = loop {
                match host.shared.outage.try_lock() {
                    Ok(outage) => break Some(outage),
                    // A guest without power does not come back before its disk does.
                    Err(_) if *host.shared.is_awaited.lock() => break None,
                    Err(_) => host.shared.world.sleep(Duration::from_millis(1)).await,
                }
            };
            if !process.is_dead() {
                host.crash().await;
                host.boot();
            }
        });
    }

    /// A volume has not come back by itself: is there something else to be done?
    async fn restarted_if_named(&self, core: &Core, name: &str, problem: String) -> Error {
        // What whoever asks something of the volume is told, too.
        let told = match core.add_snapshot(name, SnapshotRequest::default()).await {
            Err(error) => format!("{problem}; {error}"),
            // It has come back at this very moment.
            Ok(_) => problem,
        };
        let mut starts = self.shared.daemon_harness.returning.starts.lock();
        *starts += 1;
        if !told.contains("restart") || *starts > STARTS_MAX {
            let what =
                format!("{name} is down, nothing is away that it needs, and what it names does not help: {told}");
            self.shared.world.violate(Invariant::Converges, what);
        }
        self.shared.world.event(format_args!("an operator restarts the daemon, as he is told: {told}"));
        Error::new(ErrorCode::WrongState, told)
    }

    /// The number of the move under way that is not committed, and the side that is its target.
    pub(in crate::host) fn uncommitted_job(&self) -> Option<(u64, usize)> {
        let slots = self.shared.daemon_harness.slots.lock();
        let newest = slots.acknowledged.as_ref().filter(|_| slots.doubtful.is_empty())?;
        let document: VolumeDocument = serde_json::from_slice(newest).ok()?;
        let job = document.job.as_ref().filter(|job| job.committed.is_none())?;
        Some((job.id, 1 - side_held_by(&document)))
    }

    /// The target of the move under way is away at the next start. That is no reason to give the move up.
    pub(crate) fn expect_to_go_on(&self) {
        if let Some((job, _)) = self.uncommitted_job() {
            self.shared.daemon_harness.returning.awaited.lock().push(job);
        }
    }

    /// A move is over: not because its target was away for a while at a start.
    pub(super) fn check_not_given_up(&self, job: &Job) {
        let is_awaited = self.shared.daemon_harness.returning.awaited.lock().contains(&job.id);
        if is_awaited && job.state == JobState::Failed {
            let why = job.error.as_ref().map_or_else(String::new, ToString::to_string);
            let what = format!("job {} was given up because its target was away at a start: {why}", job.id);
            self.shared.world.violate(Invariant::CrashResume, what);
        }
    }

    /// Whether the daemon that runs says that store `number` of the surrogate is lost for this volume.
    pub(crate) fn is_store_lost(&self, number: u32) -> bool {
        let Some(core) = self.shared.now.lock().core.clone() else { return true };
        let partitions = core.surrogates().into_iter().flat_map(|surrogate| surrogate.partitions);
        let mut lost = partitions.filter(|part| part.volume == self.name()).filter_map(|part| part.lost_store);
        // Without a part nothing of it is believed.
        !self.has_surrogate_layer() || lost.any(|lost| lost == u64::from(number))
    }

    /// Whether the daemon that runs has all volumes up.
    pub(crate) fn is_up(&self) -> bool {
        let core = self.shared.now.lock().core.clone();
        core.is_some_and(|core| core.volumes().iter().all(|volume| volume.problem.is_none()))
    }
}
