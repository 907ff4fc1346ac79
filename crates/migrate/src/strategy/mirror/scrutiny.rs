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

/// What there is to compare next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Uncompared {
    /// These chunks, and whether they were wanted rather than just unseen.
    Run(Range<u64>, bool),
    /// Nothing as far as was looked, and there is more to look at.
    NothingYet,
    Nothing,
}

impl Tracker {
    /// Asks for a comparison of these chunks.
    pub(crate) fn want_comparison(&mut self, run: Range<u64>) {
        self.scrutiny.set_range(run, Scrutiny::Wanted);
    }

    /// Something has happened to these chunks: an error, or the loss of the target.
    pub(in crate::strategy) fn suspect(&mut self, run: Range<u64>) {
        self.has_suspects = true;
        self.scrutiny.set_range(run, Scrutiny::Wanted);
    }

    /// A comparison begins from the first chunk on.
    pub(crate) fn begin_comparison(&mut self) {
        self.compare_from = 0;
        self.has_suspects = false;
    }

    /// Whether something has happened to chunks since the last comparison began and has not been compared. Where nothing is
    /// tracked, no move ends without that.
    pub(crate) fn has_suspects(&self) -> bool {
        self.has_suspects && self.scrutiny.count(Scrutiny::Wanted) > 0
    }

    /// Whether nothing is left to be compared. Of a volume that is tracked, what the guest changes meanwhile is left out.
    pub(crate) fn is_compared(&self, full: bool) -> bool {
        match self.dirt {
            None => self.uncompared(full) == 0,
            Some(_) => {
                self.scrutiny.count(Scrutiny::Comparing) == 0
                    && self.next_comparable(full, self.compare_from, 1) == Ok(None)
            }
        }
    }

    /// How many chunks wait to be compared: all that have not been if `full`, otherwise those that are wanted.
    pub(crate) fn uncompared(&self, full: bool) -> u64 {
        let unseen = if full { self.scrutiny.count(Scrutiny::Unseen) } else { 0 };
        unseen + self.scrutiny.count(Scrutiny::Wanted) + self.scrutiny.count(Scrutiny::Comparing)
    }

    /// Takes the next run of chunks to compare.
    pub(crate) fn take_uncompared(&mut self, full: bool, chunks_max: u64) -> Uncompared {
        if self.dirt.is_some() {
            return match self.next_comparable(full, self.compare_from, chunks_max) {
                Ok(None) => Uncompared::Nothing,
                Ok(Some((run, is_wanted))) => {
                    self.compare_from = run.end;
                    self.scrutiny.set_range(run.clone(), Scrutiny::Comparing);
                    Uncompared::Run(run, is_wanted)
                }
                Err(next) => {
                    self.compare_from = next;
                    Uncompared::NothingYet
                }
            };
        }
        let wanted = self.scrutiny.next_run(Scrutiny::Wanted, 0, chunks_max);
        let unseen = || self.scrutiny.next_run(Scrutiny::Unseen, 0, chunks_max).filter(|_| full);
        let is_wanted = wanted.is_some();
        let Some(run) = wanted.or_else(unseen) else { return Uncompared::Nothing };
        self.scrutiny.set_range(run.clone(), Scrutiny::Comparing);
        Uncompared::Run(run, is_wanted)
    }

    /// Says how a comparison ended.
    pub(crate) fn end_compare(&mut self, run: Range<u64>, equal: bool) {
        self.scrutiny.set_range(run, if equal { Scrutiny::Equal } else { Scrutiny::Wanted });
    }

    /// A comparison could not be made, and is made again, also of a volume that is tracked.
    pub(crate) fn compare_again(&mut self, run: Range<u64>) {
        self.compare_from = self.compare_from.min(run.start);
        self.scrutiny.set_range(run, Scrutiny::Wanted);
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
