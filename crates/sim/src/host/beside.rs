//! Several volumes of one daemon: each has a guest, disks, a journal, a progress map and moves of its own. What they have in common
//! is the process, its pools, its places for moves, and the files of its state directory.

use std::fmt;
use std::path::Path;

use api::v1::JobState;

use super::daemon_harness::DaemonHarness;
use super::{Disks, Host, Setup};
use crate::guest::Guest;
use crate::occurrence::Occurrence;
use crate::port::Port;
use crate::world::Invariant;

/// A scenario has no more volumes.
pub(crate) const VOLUMES_MAX: usize = 3;

/// Names that differ by the number of the volume. Each random number generator has one of these names.
pub(crate) struct Names {
    pub(crate) volume: &'static str,
    pub(super) host: &'static str,
    pub(crate) guest: &'static str,
    pub(crate) source: &'static str,
    pub(crate) target: &'static str,
    pub(crate) journal: &'static str,
    pub(crate) map: &'static str,
    pub(crate) port: &'static str,
    pub(crate) wire: &'static str,
    /// What another host calls the volume once it has moved there.
    pub(super) there: &'static str,
    pub(super) journal_there: &'static str,
    pub(super) map_there: &'static str,
    /// The directory of its places.
    pool: &'static str,
}

macro_rules! names {
    ($volume:literal, $pool:literal, $suffix:literal) => {
        Names {
            volume: $volume,
            host: concat!("host", $suffix),
            guest: concat!("guest", $suffix),
            source: concat!("source", $suffix),
            target: concat!("target", $suffix),
            journal: concat!("journal", $suffix),
            map: concat!("map", $suffix),
            port: concat!("port", $suffix),
            wire: concat!("wire", $suffix),
            there: concat!("1", $suffix),
            journal_there: concat!("neighbour-journal", $suffix),
            map_there: concat!("neighbour-map", $suffix),
            pool: $pool,
        }
    };
}

static NAMES: [Names; VOLUMES_MAX] =
    [names!("volume", "pool", ""), names!("volume-1", "pool-1", "-1"), names!("volume-2", "pool-2", "-2")];

/// The names of volume `number`.
pub(crate) fn names(number: usize) -> &'static Names {
    &NAMES[number]
}

impl Host {
    /// One more volume of the same process. `disks.sides[0]` holds it.
    #[must_use]
    pub(crate) fn with_beside(&self, setup: Setup, port: &Port, guest: &Guest, disks: Disks) -> Self {
        let mut besides = self.shared.besides.lock();
        let number = besides.len() + 1;
        let daemon_harness = DaemonHarness::beside(&self.shared.daemon_harness, number, &disks.map);
        let host = Self::of(&self.shared.world, (number, daemon_harness), setup, (port, guest), disks);
        besides.push(host.clone());
        host
    }

    /// The other volumes of the process.
    pub(super) fn besides(&self) -> Vec<Self> {
        self.shared.besides.lock().clone()
    }

    /// All volumes of the process.
    pub(super) fn volumes(&self) -> Vec<Self> {
        std::iter::once(self.clone()).chain(self.besides()).collect()
    }

    /// What the daemon calls the volume.
    pub(super) fn name(&self) -> &'static str {
        names(self.shared.number).volume
    }

    /// Where its guest finds it.
    pub(super) fn export(&self) -> String {
        let name = self.name();
        format!("nbd+unix:///{name}?socket=/run/{name}.sock")
    }

    /// The path of the place of that number.
    pub(super) fn path_of(&self, side: usize) -> String {
        format!("/{}/{side}", names(self.shared.number).pool)
    }

    /// The volume whose place is at `path`; the first one's if it is nobody's.
    pub(super) fn with_place(&self, path: &Path) -> Self {
        let stem = path.file_stem();
        let is_meant = |volume: &Self| {
            let names = names(volume.shared.number);
            path.starts_with(Path::new("/").join(names.pool))
                || stem.is_some_and(|stem| stem == names.there || stem == names.volume)
        };
        self.besides().into_iter().find(is_meant).unwrap_or_else(|| self.clone())
    }

    /// The volume of that name, on either host; the first one if there is none.
    pub(super) fn named(&self, name: &str) -> Self {
        let is_meant = |volume: &Self| volume.name() == name || names(volume.shared.number).there == name;
        self.besides().into_iter().find(is_meant).unwrap_or_else(|| self.clone())
    }

    /// The volume in whose directory `path` is, or will be once its name counts.
    pub(super) fn with_store(&self, path: &Path) -> Self {
        let directory = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
        self.named(directory.trim_start_matches('.').trim_end_matches(".new"))
    }

    /// Writes down what happens to this volume.
    pub(super) fn say(&self, event: fmt::Arguments<'_>) {
        match self.shared.number {
            0 => self.shared.world.event(event),
            _ => self.shared.world.event(format_args!("{}: {event}", self.name())),
        }
    }

    /// Looks how many moves run: no more than have places.
    pub(super) fn check_running(&self, core: &::daemon::Core) {
        let is_running = |state: JobState| matches!(state, JobState::Running | JobState::Paused);
        let jobs = core.jobs().into_iter().filter(|job| is_running(job.state));
        // Those of a group give their places back when they wait for one another.
        let (of_group, alone): (Vec<_>, Vec<_>) = jobs.partition(|job| job.group.is_some());
        let running = of_group.len() + alone.len();
        let limit = self.shared.setup.running_jobs_max;
        if alone.len() > limit {
            let what = format!("{running} moves run at once, and {limit} may");
            self.shared.world.violate(Invariant::Bounded, what);
        }
        if running > 1 {
            self.shared.world.occur(Occurrence::AtOnce(running));
        }
    }
}
