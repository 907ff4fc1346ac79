//! What a run has seen happen: what scenarios name of it must occur over their seeds.

use std::fmt;

use api::v1::{Report, VmMovePhase};
use migrate::Phase;

use crate::fault_event::{Aim, FaultEvent};

/// Something that occurs in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Occurrence {
    /// A fault of this class, as [`World::fault`](crate::world::World::fault) counts them.
    Fault(&'static str),
    /// Something that the scenario has happen, and that met what it is about: a cancel met a move.
    Happens(FaultEvent),
    /// The same, because the move was seen in the phase that it waits for.
    In(Phase, FaultEvent),
    /// The same of a machine's move.
    InMachine(VmMovePhase, FaultEvent),
    /// A move is seen in this phase.
    Comes(Phase),
    /// So many moves run at once.
    AtOnce(usize),
    /// What is said at an end. A move has ended with this [`Status::name`](crate::host::Status::name). Other values are
    /// `resumed`, if a report says that something was, and `told`, if the guest was told of a failure.
    Told(&'static str),
}

impl Occurrence {
    /// Something has happened in the phase that it waits for.
    pub(crate) const fn aimed(aim: Aim, what: FaultEvent) -> Self {
        match aim {
            Aim::Disk(phase) => Self::In(phase, what),
            Aim::Machine(phase) => Self::InMachine(phase, what),
        }
    }

    /// What a report says of skipping.
    pub(crate) fn of_skips(report: &Report) -> impl Iterator<Item = Self> {
        let is_undisturbed = report.target_losses == 0 && report.sessions == 1;
        let told = [
            (report.skipped.contains_key("hole"), "skipped holes"),
            (report.skipped.contains_key("zero"), "skipped zeroes"),
            // By the guest, as nothing else has happened.
            (is_undisturbed && report.bytes_unskipped > 0, "written over what was skipped"),
        ];
        told.into_iter().filter_map(|(is_so, word)| is_so.then_some(Self::Told(word)))
    }

    /// What a report says of a surrogate.
    pub(crate) fn of_redirection(report: &Report) -> impl Iterator<Item = Self> {
        let redirection = report.redirection.unwrap_or_default();
        let told = [
            (redirection.reads_redirected > 0, "read from a surrogate"),
            (redirection.reads_merged > 0, "read from source and surrogate"),
            (redirection.writes_redirected > 0, "written to a surrogate"),
            (redirection.chunks_fetched > 0, "fetched into a surrogate"),
            (redirection.writes_at_source > 0, "a full surrogate"),
        ];
        told.into_iter().filter_map(|(is_so, word)| is_so.then_some(Self::Told(word)))
    }

    /// What a report says of a read cache.
    pub(crate) fn of_read_cache(report: &Report) -> impl Iterator<Item = Self> {
        let cache = report.read_cache.unwrap_or_default();
        let told = [
            (cache.guest_hits > 0, "the guest read from memory"),
            (cache.copy_hits > 0, "copied from memory"),
            (cache.evictions > 0, "evicted from memory"),
        ];
        told.into_iter().filter_map(|(is_so, word)| is_so.then_some(Self::Told(word)))
    }
}

impl fmt::Display for Occurrence {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(class) => write!(out, "fault {class}"),
            Self::Happens(what) => write!(out, "{}", what.name()),
            Self::In(phase, what) => write!(out, "{} in {}", what.name(), phase.name()),
            Self::InMachine(phase, what) => write!(out, "{} in machine {phase}", what.name()),
            Self::Comes(phase) => write!(out, "phase {}", phase.name()),
            Self::AtOnce(moves) => write!(out, "{moves} moves at once"),
            Self::Told(word) => write!(out, "told {word}"),
        }
    }
}
