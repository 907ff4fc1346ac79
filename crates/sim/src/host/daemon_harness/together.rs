//! Moves of all volumes that are asked for as one.

use std::collections::BTreeMap;
use std::time::Duration;

use ::daemon::VolumeDocument;
use api::v1::{Job, JobState};
use env::Moment;

use super::Host;
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::world::Invariant;

/// So long after one of them was undone, or the daemon has begun after that, no other is committed any more: it has been told.
const TOLD_WITHIN: Duration = Duration::from_secs(1);

/// What is known of a move of all volumes.
#[derive(Default)]
pub(super) struct Together {
    /// It was asked for, which happens once.
    was_asked: bool,
    /// The daemon is about to answer that.
    is_asked: bool,
    /// Somebody has wished one of them away.
    is_unwanted: bool,
    /// One of this group was undone, at this moment.
    aborted: Option<(u64, Moment)>,
    /// This life of the daemon began.
    began: Moment,
}

impl Host {
    /// A life of the daemon begins.
    pub(super) fn begin_life(&self) {
        let mut together = self.shared.daemon_harness.together.lock();
        (together.began, together.is_asked) = (self.shared.world.now(), false);
    }

    /// Whether nobody else is about to ask for the move of this volume.
    pub(super) fn asks_itself(&self) -> bool {
        !self.shared.daemon_harness.together.lock().is_asked
    }

    pub(super) fn note_wish_of_all(&self) {
        self.shared.daemon_harness.together.lock().is_unwanted = true;
    }

    /// Whether somebody has wished away `job`, or one that it belongs together with.
    pub(super) fn is_wished_away(&self, job: &Job) -> bool {
        let belongs_together = job.group.is_some() && self.shared.daemon_harness.together.lock().is_unwanted;
        belongs_together || *self.shared.daemon_harness.is_unwanted.lock()
    }

    /// Asks for the moves of all volumes at once, if that is to be done and has not been. Each asks for its own if that is refused.
    pub(super) async fn moved_together(&self, process: &Process, core: &::daemon::Core) -> bool {
        let is_first_ask = {
            let mut together = self.shared.daemon_harness.together.lock();
            let is_first_ask = self.shared.setup.together && !std::mem::replace(&mut together.was_asked, true);
            together.is_asked |= is_first_ask;
            is_first_ask
        };
        if !is_first_ask {
            return false;
        }
        let volumes = self.volumes();
        let mut requests = BTreeMap::new();
        for volume in &volumes {
            // A life after this one asks for each that is not on record.
            *volume.shared.wanted.lock() = true;
            requests.insert(volume.name(), volume.request());
        }
        let tuned: BTreeMap<_, _> =
            volumes.iter().map(|volume| (volume.name(), &volume.shared.setup.options)).collect();
        let started = core.start_tuned_moves_together(requests, |name, options| options.clone_from(tuned[name])).await;
        self.shared.daemon_harness.together.lock().is_asked = false;
        match started {
            Ok(_) => {
                self.shared.world.occur(Occurrence::Told("asked together"));
                volumes.iter().for_each(|volume| *volume.shared.wanted.lock() = false);
            }
            Err(error) => {
                self.say(format_args!("the moves of all are refused: {error}"));
                process.env().sleep(Duration::from_millis(20)).await;
            }
        }
        volumes.iter().for_each(|volume| volume.shared.asked.notify_one());
        true
    }

    /// A move is over, and the volume where it was.
    pub(super) fn note_undone(&self, job: &Job) {
        if let (Some(group), JobState::Failed | JobState::Cancelled) = (job.group, job.state) {
            self.shared.world.occur(Occurrence::Told("undone together"));
            self.shared.daemon_harness.together.lock().aborted.get_or_insert((group, self.shared.world.now()));
        }
    }

    /// A move is committed: none that it belongs together with was undone long ago.
    pub(super) fn check_together(&self, document: &VolumeDocument) {
        let group = document.job.as_ref().and_then(|job| job.group.as_ref()).map(|group| group.id);
        let together = self.shared.daemon_harness.together.lock();
        let Some((_, at)) = together.aborted.filter(|(aborted, _)| Some(*aborted) == group) else { return };
        if self.shared.world.now() > at.max(together.began) + TOLD_WITHIN {
            let what =
                format!("the move of {} is committed, and one that it belongs together with was undone", self.name());
            self.shared.world.violate(Invariant::CancelSafe, what);
        }
    }
}
