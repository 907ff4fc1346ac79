//! Flushes of the guest's that a silent target was not waited for: the target must be flushed before it may hold the volume.

use super::tracker::{Mode, Tracker};

impl Tracker {
    /// The guest was told that a flush is done, and the target has not done it.
    pub(crate) const fn detach_flush(&mut self) {
        self.flushes_detached += 1;
    }

    /// The same before the target is asked, if it is silent.
    pub(crate) fn detach_flush_in_stall(&mut self) -> bool {
        let is_silent = self.target_stall.since().is_some() && self.mode() == Mode::FlushBoth;
        if is_silent {
            self.detach_flush();
        }
        is_silent
    }

    /// Whether a flush that has succeeded covers all that the guest has flushed.
    pub(crate) const fn covers_guest_flushes(&self) -> bool {
        self.flushes_covered == self.flushes_detached
    }

    /// A flush of the target of `session` has succeeded, before which so many of the guest's had been left.
    pub(crate) fn cover_flushes(&mut self, session: u64, detached: u64) {
        if self.is_current(session) {
            self.flushes_covered = self.flushes_covered.max(detached);
        }
    }
}
