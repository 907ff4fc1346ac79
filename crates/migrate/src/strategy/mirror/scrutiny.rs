//! Which chunks have been compared, and which still have to be.

use std::ops::Range;

use block::PackedState;

use super::tracker::Tracker;

/// How far the comparison of a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scrutiny {
    /// Nobody has compared it since it was copied.
    Unseen,
    /// It must be compared: it was drawn, or something happened to it.
    Wanted,
    /// It is being compared.
    Comparing,
    /// It was equal on both sides.
    Equal,
}

impl PackedState for Scrutiny {
    fn to_bits(self) -> u8 {
        self as u8
    }
    fn from_bits(bits: u8) -> Self {
        [Self::Unseen, Self::Wanted, Self::Comparing, Self::Equal][usize::from(bits)]
    }
}

impl Tracker {
    /// Asks for a comparison of these chunks.
    pub(crate) fn want_comparison(&mut self, run: Range<u64>) {
        self.scrutiny.set_range(run, Scrutiny::Wanted);
    }

    /// Whether nothing is left to be compared. Of a volume that is tracked, what the guest changes meanwhile is left out.
    pub(crate) fn is_compared(&self, full: bool) -> bool {
        match self.dirt {
            None => self.uncompared(full) == 0,
            Some(_) => {
                self.scrutiny.count(Scrutiny::Comparing) == 0
                    && self.next_comparable(full, self.compare_from, 1).is_none()
            }
        }
    }

    /// How many chunks wait to be compared: all that have not been if `full`, otherwise those that are wanted.
    pub(crate) fn uncompared(&self, full: bool) -> u64 {
        let unseen = if full { self.scrutiny.count(Scrutiny::Unseen) } else { 0 };
        unseen + self.scrutiny.count(Scrutiny::Wanted) + self.scrutiny.count(Scrutiny::Comparing)
    }

    /// Takes the next run of chunks to compare, and says whether they were wanted rather than just unseen.
    pub(crate) fn take_uncompared(&mut self, full: bool, chunks_max: u64) -> Option<(Range<u64>, bool)> {
        if self.dirt.is_some() {
            let (run, is_wanted) = self.next_comparable(full, self.compare_from, chunks_max)?;
            self.compare_from = run.end;
            self.scrutiny.set_range(run.clone(), Scrutiny::Comparing);
            return Some((run, is_wanted));
        }
        let wanted = self.scrutiny.next_run(Scrutiny::Wanted, 0, chunks_max);
        let unseen = || self.scrutiny.next_run(Scrutiny::Unseen, 0, chunks_max).filter(|_| full);
        let (run, is_wanted) = match wanted {
            Some(run) => (run, true),
            None => (unseen()?, false),
        };
        self.scrutiny.set_range(run.clone(), Scrutiny::Comparing);
        Some((run, is_wanted))
    }

    /// Says how a comparison ended.
    pub(crate) fn end_compare(&mut self, run: Range<u64>, equal: bool) {
        self.scrutiny.set_range(run, if equal { Scrutiny::Equal } else { Scrutiny::Wanted });
    }

    /// Chunks that were copied again after they had been compared must be compared again.
    pub(super) fn want_again(&mut self, run: Range<u64>) {
        let mut from = run.start;
        while let Some(equal) = self.scrutiny.next_run(Scrutiny::Equal, from, run.end.saturating_sub(from)) {
            if equal.start >= run.end {
                return;
            }
            from = equal.end;
            self.scrutiny.set_range(equal.start..equal.end.min(run.end), Scrutiny::Wanted);
        }
    }
}
