//! Which member is lost, which is about to be, and where the members may differ: a plain structure.

use std::sync::Arc;

use block::{Bytes, Error, Extent};

/// So many extents may be unsettled apart from each other. Then all are taken for one.
const UNSETTLED_MAX: usize = 64;

/// What is known of the two members.
pub(super) struct State {
    /// The member that is never asked again, and why if that has happened since the start.
    pub(super) lost: Option<(usize, Option<Arc<Error>>)>,
    /// The member that lacks something, which is not on record yet, and what it has failed with.
    pub(super) suspect: Option<(usize, Arc<Error>)>,
    /// The member that is made like the other one. It is on record as lost, and has nothing that is unsettled.
    pub(super) rebuilt: Option<usize>,
    /// The member that is like the other one again, while that is put on record.
    pub(super) noted_whole: Option<usize>,
    /// Where the members may differ although none is lost. They do not overlap.
    unsettled: Vec<Extent>,
    /// How many flushes have failed on both, and how often a member was replaced.
    failed_flushes: u64,
}

impl State {
    pub(super) const fn new(lost: Option<usize>) -> Self {
        let lost = match lost {
            Some(member) => Some((member, None)),
            None => None,
        };
        Self { lost, suspect: None, rebuilt: None, noted_whole: None, unsettled: Vec::new(), failed_flushes: 0 }
    }

    /// The member that reads come from.
    pub(super) fn first(&self) -> usize {
        usize::from(self.is_lost(0) || self.rebuilt == Some(0))
    }

    pub(super) fn is_lost(&self, member: usize) -> bool {
        self.lost.as_ref().is_some_and(|(lost, _)| *lost == member)
    }

    /// Whether `member` may have everything.
    pub(super) fn is_trusted(&self, member: usize) -> bool {
        let is_whole = !self.is_lost(member) && self.rebuilt != Some(member);
        is_whole && self.suspect.as_ref().is_none_or(|(suspect, _)| *suspect != member)
    }

    /// `member` has failed what the other one has done. Gives the error back if the other one is lost, or is about to be: then
    /// nothing is left that has what was to be done.
    pub(super) fn accuse(&mut self, member: usize, error: Error) -> Result<(), Error> {
        if !self.is_trusted(1 - member) {
            return Err(error);
        }
        if self.is_trusted(member) {
            self.suspect = Some((member, Arc::new(error)));
        }
        Ok(())
    }

    /// The lost member is another device from now on, which has nothing of `whole`. Gives which one it is; none if there is none.
    pub(super) fn begin_rebuild(&mut self, whole: Extent) -> Option<usize> {
        let (member, _) = self.lost.take()?;
        self.rebuilt = Some(member);
        // Who writes to the other one alone, because this one was lost, settles nothing.
        self.failed_flushes += 1;
        self.unsettle(whole);
        Some(member)
    }

    /// The member that was to be made like the other one has failed. It is on record as lost.
    pub(super) fn abandon_rebuild(&mut self, error: Error) {
        if let Some(member) = self.rebuilt.take() {
            self.lost = Some((member, Some(Arc::new(error))));
            self.unsettled.clear();
        }
    }

    /// That a member is suspect is on record: it is lost.
    pub(super) fn lose_suspect(&mut self) {
        if let Some((member, error)) = self.suspect.take() {
            self.lost = Some((member, Some(error)));
            self.unsettled.clear();
        }
    }

    /// Something begins that may settle an extent; see [`settle`](Self::settle).
    pub(super) const fn moment(&self) -> u64 {
        self.failed_flushes
    }

    /// Both members have had the same written to `extent` since that moment, or were found alike there.
    pub(super) fn settle(&mut self, extent: Extent, since: u64) {
        // A flush that has failed meanwhile may have taken one member's bytes away again.
        if self.failed_flushes == since && !self.unsettled.is_empty() {
            self.cut(extent);
            self.limit();
        }
    }

    /// The members may differ in `extent`.
    pub(super) fn unsettle(&mut self, extent: Extent) {
        if self.lost.is_none() {
            self.cut(extent);
            self.unsettled.push(extent);
            self.limit();
        }
    }

    fn cut(&mut self, extent: Extent) {
        let rests = self.unsettled.iter().flat_map(|old| {
            let before = Extent::between(old.offset, extent.offset.clamp(old.offset, old.end()));
            let behind = Extent::between(extent.end().clamp(old.offset, old.end()), old.end());
            if old.overlaps(extent) { [Some(before), Some(behind)] } else { [Some(*old), None] }
        });
        self.unsettled = rests.flatten().filter(|rest| !rest.is_empty()).collect();
    }

    /// Takes too many extents for one with all that lies between. Where the members are alike, to compare them is only some work.
    fn limit(&mut self) {
        if self.unsettled.len() > UNSETTLED_MAX {
            let start = self.unsettled.iter().map(|one| one.offset).min().unwrap_or(Bytes::ZERO);
            let end = self.unsettled.iter().map(|one| one.end()).max().unwrap_or(start);
            self.unsettled = vec![Extent::between(start, end)];
        }
    }

    /// A flush has failed on both: each may have lost other bytes than the other one.
    pub(super) fn flush_failed(&mut self, whole: Extent) {
        self.failed_flushes += 1;
        self.unsettle(whole);
    }

    /// Where the members may differ in `extent`.
    pub(super) fn unsettled_in(&self, extent: Extent) -> Vec<Extent> {
        self.unsettled.iter().filter_map(|one| one.intersection(extent)).collect()
    }

    /// Where they may differ in all.
    pub(super) fn unsettled_bytes(&self) -> Bytes {
        self.unsettled.iter().map(|one| one.length).sum()
    }
}

#[cfg(test)]
mod tests {
    use block::ErrorKind;
    use block::testing::Random;

    use super::*;

    #[test]
    fn what_is_unsettled_is_what_a_list_of_bytes_says_and_never_less() {
        for seed in 0..200 {
            let (mut random, mut state, mut plain) = (Random::new(seed), State::new(None), [false; 2000]);
            let longest = if seed % 2 == 0 { 4 } else { 300 };
            let (mut is_exact, mut count) = (true, 0);
            for _ in 0..300 {
                let offset = random.below(1990);
                let length = (1 + random.below(longest)).min(2000 - offset);
                let (extent, adds) = (Extent::new(Bytes(offset), Bytes(length)), random.below(3) < 2);
                plain[offset as usize..(offset + length) as usize].fill(adds);
                match adds {
                    true => state.unsettle(extent),
                    false => state.settle(extent, state.moment()),
                }
                // Another extent is one more, or two for one; far fewer are all taken for one.
                is_exact &= state.unsettled.len() > 1 || count < UNSETTLED_MAX - 1;
                count = state.unsettled.len();
                for (at, is_unsettled) in plain.iter().enumerate() {
                    let told = !state.unsettled_in(Extent::new(Bytes(at as u64), Bytes(1))).is_empty();
                    let is_right = if is_exact { told == *is_unsettled } else { told || !is_unsettled };
                    assert!(is_right, "seed {seed}: byte {at} is told as {told}");
                }
                assert!(state.unsettled.len() <= UNSETTLED_MAX, "seed {seed}: the list is without a limit");
            }
        }
    }

    #[test]
    fn what_was_written_before_a_flush_failed_is_not_settled_by_it() {
        let (whole, part) = (Extent::whole(Bytes(100)), Extent::new(Bytes(10), Bytes(20)));
        let mut state = State::new(None);
        let began = state.moment();
        state.flush_failed(whole);
        state.settle(part, began);
        assert_eq!(state.unsettled_bytes(), Bytes(100), "the flush may have failed after the write");
        state.settle(part, state.moment());
        assert_eq!(state.unsettled_bytes(), Bytes(80), "a later write settles");
    }

    #[test]
    fn only_one_member_can_be_accused() {
        let error = || Error::new(ErrorKind::Io, "a test's");
        let mut state = State::new(None);
        assert!(state.accuse(1, error()).is_ok(), "both were well");
        assert!(state.accuse(0, error()).is_err(), "the other one is suspect");
        assert!(state.accuse(1, error()).is_ok(), "it is so already");
        assert!(state.is_trusted(0) && !state.is_trusted(1) && state.lost.is_none(), "it is not on record");
        state.unsettle(Extent::whole(Bytes(10)));
        state.lose_suspect();
        assert!(state.is_lost(1) && state.first() == 0 && state.unsettled_bytes().is_zero(), "one is left");
        assert!(state.accuse(0, error()).is_err(), "the other one is lost");
        assert_eq!(State::new(Some(0)).first(), 1, "it was lost before");
    }
}
