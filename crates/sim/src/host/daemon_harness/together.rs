//! Moves of all volumes that are asked for as one.

use std::collections::BTreeMap;
use std::time::Duration;

use api::v1::{Job, JobState};

use super::Host;
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::world::Invariant;

/// What is known of a move of all volumes.
#[derive(Default)]
pub(super) struct Together {
    /// It was asked for, which happens once.
    was_asked: bool,
    /// The daemon is about to answer that.
    is_asked: bool,
    /// Somebody has wished one of them away.
    is_unwanted: bool,
    /// One of them was undone.
    is_undone: bool,
}

impl Host {
    /// A life of the daemon begins.
    pub(super) fn begin_life(&self) {
        self.shared.daemon_harness.together.lock().is_asked = false;
    }

    /// Whether nobody else is about to ask for the move of this volume.
    pub(super) fn asks_itself(&self) -> bool {
        !self.shared.daemon_harness.together.lock().is_asked
    }

    /// Another move of all begins.
    pub(super) fn begin_machine_move(&self) {
        let mut together = self.shared.daemon_harness.together.lock();
        (together.is_unwanted, together.is_undone) = (false, false);
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
        let is_between_hosts = self.shared.setup.is_between_hosts;
        let started = core.start_tuned_moves_together(requests, |name, options| {
            // What a move to another host needs, the daemon knows better.
            if !is_between_hosts {
                options.clone_from(tuned[name]);
            }
        });
        let started = started.await;
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
        let (Some(_), JobState::Failed | JobState::Cancelled) = (job.group, job.state) else { return };
        self.shared.world.occur(Occurrence::Told("undone together"));
        self.shared.daemon_harness.together.lock().is_undone = true;
        if self.shared.daemon_harness.groups.is_committed() {
            let what =
                format!("{} was left where it was, and those that it belongs together with were moved", self.name());
            self.shared.world.violate(Invariant::CancelSafe, what);
        }
    }

    /// A group is about to be committed: no move of it was undone.
    pub(super) fn check_none_undone(&self) {
        if self.shared.daemon_harness.together.lock().is_undone {
            let what = "a group is committed, and a move of it was undone";
            self.shared.world.violate(Invariant::CancelSafe, what);
        }
    }
}
