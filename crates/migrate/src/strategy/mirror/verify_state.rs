//! Which chunks have been compared, and which still have to be.

use std::ops::Range;

use block::PackedState;

use super::tracker::Tracker;

/// How far the comparison of a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VerifyState {
    /// Nobody has compared it since it was copied.
    Unverified,
    /// It must be compared: it was drawn, or something happened to it.
    Wanted,
    /// It is being compared.
    Comparing,
    /// It was equal on both sides.
    Equal,
}

impl PackedState for VerifyState {
    fn to_bits(self) -> u8 {
        self as u8
    }
    fn from_bits(bits: u8) -> Self {
        [Self::Unverified, Self::Wanted, Self::Comparing, Self::Equal][usize::from(bits)]
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
        self.verify_state.set_range(run, VerifyState::Wanted);
    }

    /// Something has happened to these chunks: an error, or the loss of the target.
    pub(in crate::strategy) fn mark_suspect(&mut self, run: Range<u64>) {
        self.has_suspects = true;
        self.verify_state.set_range(run, VerifyState::Wanted);
    }

    /// A comparison begins from the first chunk on.
    pub(crate) fn begin_comparison(&mut self) {
        self.compare_from = 0;
        self.has_suspects = false;
    }

    /// Whether something has happened to chunks since the last comparison began and has not been compared. Where nothing is
    /// tracked, no move ends without that.
    pub(crate) fn has_suspects(&self) -> bool {
        self.has_suspects && self.verify_state.count(VerifyState::Wanted) > 0
    }

    /// Whether nothing is left to be compared. Of a volume that is tracked, what the guest changes meanwhile is left out.
    pub(crate) fn is_compared(&self, full: bool) -> bool {
        match self.dirty_bitmap {
            None => self.uncompared(full) == 0,
            Some(_) => {
                self.verify_state.count(VerifyState::Comparing) == 0
                    && self.next_comparable(full, self.compare_from, 1) == Ok(None)
            }
        }
    }

    /// How many chunks wait to be compared: all that have not been if `full`, otherwise those that are wanted.
    pub(crate) fn uncompared(&self, full: bool) -> u64 {
        let unseen = if full { self.verify_state.count(VerifyState::Unverified) } else { 0 };
        unseen + self.verify_state.count(VerifyState::Wanted) + self.verify_state.count(VerifyState::Comparing)
    }

    /// Takes the next run of chunks to compare.
    pub(crate) fn take_uncompared(&mut self, full: bool, chunks_max: u64) -> Uncompared {
        if self.dirty_bitmap.is_some() {
            return match self.next_comparable(full, self.compare_from, chunks_max) {
                Ok(None) => Uncompared::Nothing,
                Ok(Some((run, is_wanted))) => {
                    self.compare_from = run.end;
                    self.verify_state.set_range(run.clone(), VerifyState::Comparing);
                    Uncompared::Run(run, is_wanted)
                }
                Err(next) => {
                    self.compare_from = next;
                    Uncompared::NothingYet
                }
            };
        }
        let wanted = self.verify_state.next_run(VerifyState::Wanted, 0, chunks_max);
        let unseen = || self.verify_state.next_run(VerifyState::Unverified, 0, chunks_max).filter(|_| full);
        let is_wanted = wanted.is_some();
        let Some(run) = wanted.or_else(unseen) else { return Uncompared::Nothing };
        self.verify_state.set_range(run.clone(), VerifyState::Comparing);
        Uncompared::Run(run, is_wanted)
    }

    /// Says how a comparison ended.
    pub(crate) fn end_compare(&mut self, run: Range<u64>, equal: bool) {
        self.verify_state.set_range(run, if equal { VerifyState::Equal } else { VerifyState::Wanted });
    }

    /// A comparison could not be made, and is made again, also of a volume that is tracked.
    pub(crate) fn compare_again(&mut self, run: Range<u64>) {
        self.compare_from = self.compare_from.min(run.start);
        self.verify_state.set_range(run, VerifyState::Wanted);
    }

    /// Chunks that were copied again after they had been compared must be compared again.
    pub(super) fn want_again(&mut self, run: Range<u64>) {
        let mut from = run.start;
        while let Some(equal) = self.verify_state.next_run(VerifyState::Equal, from, run.end.saturating_sub(from)) {
            if equal.start >= run.end {
                return;
            }
            from = equal.end;
            self.verify_state.set_range(equal.start..equal.end.min(run.end), VerifyState::Wanted);
        }
    }
}
