//! What of a volume may be away, or may not be what it was, when the daemon starts.

use super::Host;
use super::daemon_harness::{CACHE, LAYERS_OF, SURROGATE};
use crate::disk::{Disk, Faults};
use crate::failures::Reporter;
use crate::fault_event::Part;

impl Host {
    /// The disk of `part`, if there is one now.
    pub(crate) fn part(&self, part: Part) -> Option<Disk> {
        let shared = &self.shared;
        match part {
            Part::Source => Some(shared.sides[self.holder()].clone()),
            Part::Target => self.uncommitted_job().map(|(_, side)| shared.sides[side].clone()),
            Part::Layer => {
                let side = LAYERS_OF + self.holder();
                let numbers = shared.shelf.numbers(side);
                let number = (!numbers.is_empty()).then(|| shared.rng.pick(&numbers))?;
                shared.shelf.disk((side, number))
            }
            Part::Store(number) => self.has_surrogate_layer().then(|| shared.shelf.disk((SURROGATE, number))).flatten(),
            Part::Cache => shared.shelf.disk((CACHE, self.current_cache())),
        }
    }

    /// Whether the volume cannot be served without `part`.
    pub(crate) fn needs(&self, part: Part) -> bool {
        let setup = &self.shared.setup;
        match part {
            Part::Source | Part::Layer => true,
            Part::Target => false,
            Part::Store(_) => setup.surrogate_stores < 2,
            Part::Cache => setup.cache.is_some_and(|cache| cache.may_hold()),
        }
    }

    /// All disks that may be away, or another one's.
    pub(crate) fn parts(&self) -> Vec<Disk> {
        self.shared.sides.iter().cloned().chain(self.shared.shelf.all()).collect()
    }

    /// Store `number` of the surrogate fails all reads from now on, or none any more.
    pub(crate) fn fail_reads_of_store(&self, number: u32, is_failing: bool) {
        let faults = Faults { read_errors: if is_failing { 1.0 } else { 0.0 }, ..Faults::default() };
        self.shared.shelf.set_faults((SURROGATE, number), faults);
    }

    /// The other host's daemon's files, and its journals' disks, take nothing while they are full.
    pub fn set_peer_full(&self, is_full: bool) {
        if let Some(peer) = self.shared.daemon_harness.peer() {
            peer.files().set_full(is_full);
            peer.own_journal().set_full(is_full);
        }
    }

    /// So many writes and syncs of the other host's daemon's files fail.
    pub fn set_peer_files_failing(&self, part: f64) {
        if let Some(peer) = self.shared.daemon_harness.peer() {
            peer.files().set_failing(part);
        }
    }

    /// `reporter` hears of every request that fails to what lies beside the volume's disks.
    pub(crate) fn report_layers_to(&self, reporter: Reporter) {
        self.shared.shelf.report_to(reporter);
    }
}
