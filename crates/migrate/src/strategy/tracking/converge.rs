//! Whether a copy in passes comes to an end, and what is done if it does not. This is the decision after every pass
//! (ESX paper, section 2.5), as a plain structure that awaits nothing.
//!
//! ```text
//!                 the rest fits the downtime limit              the target is flushed, and it still fits
//!   ┌─▶ pass ──────────────────────────────────────▶ complete ──────────────────────────────────────────▶ last copy
//!   │    │  │ what is not hot fits, or gets no smaller                              │ it does not              │
//!   │    │  └────────────▶ pass with what was put off                               ▼        the limit is over │
//!   │    │ it gets smaller                                                        a miss ◀─────────────────────┘
//!   └────┴─── go on ◀────────────────────────────────────────────────────────────────┘
//!        │ neither of the last two passes left a tenth less than any before them, the deadline would pass, or too many
//!        ▼ misses
//!   no convergence: abort, force, or mirror
//! ```
//!
//! The downtime limit is kept: a last copy that is not done by then is given up, and the guest and the passes go on. To
//! make that rare, the expected time of a last copy comes from passes over scattered chunks alone ([`Rates`]). It must
//! be no more than a part of the limit.
//!
//! A burst of writes makes one pass leave more than the one before, so the better of the last two counts. It is
//! compared with the best of all before. So passes end: each pair leaves a tenth less, from the volume down to the
//! limit.

use std::time::Duration;

use block::Bytes;

use super::rates::Rates;
use crate::{MoveOptions, OnNoConverge};

/// What the last two passes must have left of the least before them, to go on.
const PROGRESS: f64 = 0.9;
/// What was put off gets a pass of its own if it is more than one part of so many of all that is dirty.
const DEFERRED_PART_MIN: u64 = 10;
/// So many switchovers may find more than they can copy in their time.
const MISSES_MAX: u32 = 6;
/// What a last copy may be expected to take of the limit when a pass is over, and right before the guest is held.
const AIM: f64 = 0.75;
const AIM_AT_HOLD: f64 = 0.9;
/// A last copy is looked at once it has had this part of its time.
pub(crate) const LOOK_AT: f64 = 0.25;

/// What a pass has come to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Passed {
    /// Since the move's turn came, over restarts.
    pub(crate) age: Duration,
    /// What must be copied again, what is put off included.
    pub(crate) dirty: u64,
    /// What is put off.
    pub(crate) deferred: u64,
}

/// What is done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassDecision {
    /// Another pass over what is dirty and not put off.
    GoOn,
    /// Another pass over all that is dirty: the last but one.
    GoOnWithAll,
    /// The switchover, with the rest copied while the guest is held.
    Complete,
    /// The same, whatever that takes.
    Force,
    /// The move ends.
    Abort,
    /// The rest is copied by a mirror.
    Mirror,
}

/// The least that the passes before the last two have left, and what those two have.
#[derive(Debug, Default)]
struct Remaining {
    best: Option<u64>,
    last: [Option<u64>; 2],
}

impl Remaining {
    /// Whether one of the last two passes has left less than those before, by a tenth.
    fn note(&mut self, left: u64) -> bool {
        let least = |values: &[Option<u64>]| values.iter().copied().flatten().min();
        let [gone, before] = self.last;
        self.last = [before, Some(left)];
        self.best = least(&[self.best, gone]);
        match (self.best, least(&self.last)) {
            (Some(best), Some(last)) => (last as f64) < best as f64 * PROGRESS,
            _ => true,
        }
    }
}

/// The decision and what it rests on.
#[derive(Debug)]
pub(crate) struct Convergence {
    limit: Duration,
    forced_max: Duration,
    deadline: Option<Duration>,
    choice: OnNoConverge,
    /// What passes have left, with and without what was put off.
    all: Remaining,
    rest: Remaining,
    misses: u32,
    /// A last copy that was forced was not done in its time.
    forced_in_vain: bool,
    rates: Rates,
    /// Hot chunks have had their turn: nothing is put off any more.
    had_all: bool,
}

impl Convergence {
    pub(crate) fn new(options: &MoveOptions) -> Self {
        let limit = Duration::from_millis(options.downtime_limit_ms);
        Self {
            limit,
            forced_max: Duration::from_millis(options.forced_downtime_ms_max),
            deadline: options.deadline_ms.map(Duration::from_millis),
            choice: options.on_no_converge,
            all: Remaining::default(),
            rest: Remaining::default(),
            misses: 0,
            forced_in_vain: false,
            rates: Rates::new(options.chunk_bytes, limit),
            had_all: !options.hot_blocks,
        }
    }

    /// The move was given another time, or any.
    pub(crate) const fn set_deadline(&mut self, deadline: Option<Duration>) {
        self.deadline = deadline;
    }

    /// How long the guest may be held until its last copy is done and flushed: what the record takes comes after that.
    pub(crate) fn hold_limit(&self, forced: bool) -> Duration {
        self.limit(forced).saturating_sub(self.rates.record())
    }

    /// How long it may be held until the last copy is done, so that there is time for the flush.
    pub(crate) fn copy_limit(&self, forced: bool) -> Duration {
        let limit = self.limit(forced);
        limit.saturating_sub(self.rates.beside().min(limit / 2))
    }

    const fn limit(&self, forced: bool) -> Duration {
        if forced { self.forced_max } else { self.limit }
    }

    /// Whether a last copy will not be done in its time, from how long it has taken and how much of it has begun. Then
    /// the guest is not held in vain.
    pub(crate) fn is_in_vain(spent: Duration, limit: Duration, begun: u64, bytes: u64) -> bool {
        let part = spent.as_secs_f64() / limit.as_secs_f64().max(1e-9);
        part >= LOOK_AT && (begun as f64) < bytes as f64 * part / 2.0
    }

    /// Whether what is hot is put off for now.
    pub(crate) const fn defers(&self) -> bool {
        !self.had_all
    }

    /// What is known of how fast copies are.
    pub(crate) const fn rates(&mut self) -> &mut Rates {
        &mut self.rates
    }

    /// The guest was held for a copy that did not end in its time; so much of it was done.
    pub(crate) fn note_hold(&mut self, copied: u64, took: Duration, forced: bool) {
        self.misses += 1;
        self.forced_in_vain |= forced;
        self.rates.note_hold(copied, took);
    }

    /// More is dirty right before the guest is held than can be copied in its time.
    pub(crate) const fn note_miss(&mut self) {
        self.misses += 1;
    }

    /// How long a pass over so much takes, as the last one went.
    pub(crate) fn pass_expected(&self, bytes: u64) -> Duration {
        self.rates.pass(bytes)
    }

    /// How long the guest would be held for the copy of so much.
    pub(crate) fn expected(&self, bytes: u64) -> Duration {
        self.rates.hold(bytes)
    }

    /// Whether the copy of so much is expected to take no more than its part of the downtime limit.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        self.expected(bytes) <= self.limit.mul_f64(AIM)
    }

    /// The same right before the guest is held: nothing is written any more.
    pub(crate) fn fits_hold(&self, bytes: u64) -> bool {
        self.expected(bytes) <= self.limit.mul_f64(AIM_AT_HOLD)
    }

    /// Whether the time that the move was given is over.
    pub(crate) fn is_too_late(&self, age: Duration) -> bool {
        self.deadline.is_some_and(|deadline| age >= deadline)
    }

    /// A pass is over. Says what is done next, and why.
    pub(crate) fn decide(&mut self, passed: Passed) -> (PassDecision, String) {
        let rest = passed.dirty - passed.deferred.min(passed.dirty);
        let expected = self.expected(passed.dirty);
        if self.fits(passed.dirty) && self.misses <= MISSES_MAX {
            let why = format!("{} can be copied in {expected:.0?}, well within {:?}", Bytes(passed.dirty), self.limit);
            return (PassDecision::Complete, format!("complete: {why}"));
        }
        if self.is_too_late(passed.age) {
            return self
                .abort_copy(passed, format!("the deadline of {:?} has passed", self.deadline.unwrap_or_default()));
        }
        if self.misses > MISSES_MAX {
            return self.abort_copy(passed, format!("{} switchovers found more than they could copy", self.misses));
        }
        let (all, rest_is_smaller) = (self.all.note(passed.dirty), self.rest.note(rest));
        let smaller = if self.had_all { all } else { rest_is_smaller };
        if !self.had_all && (self.fits(rest) || !smaller) {
            self.had_all = true;
            // So little that its copy would change nothing is not worth a pass of its own.
            if self.fits(rest) && passed.deferred > 0 || passed.deferred > passed.dirty / DEFERRED_PART_MIN {
                let why = match smaller {
                    true => "what is not hot fits",
                    false => "what is not hot gets no smaller",
                };
                let text = format!("go on with the {} that were put off: {why}", Bytes(passed.deferred));
                return (PassDecision::GoOnWithAll, text);
            }
        }
        if !smaller {
            let why = format!("what is left gets no smaller: {} after the last pass", Bytes(rest));
            return self.abort_copy(passed, why);
        }
        if let Some(deadline) = self.deadline
            && passed.age + self.pass_expected(rest) >= deadline
        {
            return self.abort_copy(passed, format!("another pass would end after the deadline of {deadline:?}"));
        }
        let dirty = Bytes(passed.dirty);
        let why = match self.rates.knows_scattered() {
            true => format!("{dirty} would hold the guest for {expected:.0?}, too long for {:?}", self.limit),
            false => format!("how fast the {dirty} are copied, which lie scattered, has yet to be seen"),
        };
        (PassDecision::GoOn, format!("go on: {why}"))
    }

    fn abort_copy(&self, passed: Passed, why: String) -> (PassDecision, String) {
        let expected = self.rates.forced_hold(passed.dirty);
        match self.choice {
            OnNoConverge::Mirror => (PassDecision::Mirror, format!("go on as a mirror: {why}")),
            OnNoConverge::Force if self.forced_in_vain => {
                let text = format!("abort: {why}, and the guest has been held in vain for {:?}", self.forced_max);
                (PassDecision::Abort, text)
            }
            OnNoConverge::Force if expected <= self.forced_max => {
                let text = format!("force: {why}; the guest is held for {expected:.0?} as expected");
                (PassDecision::Force, text)
            }
            OnNoConverge::Force => {
                let text = format!(
                    "abort: {why}, and the guest would be held for {expected:.0?}, longer than {:?}",
                    self.forced_max
                );
                (PassDecision::Abort, text)
            }
            OnNoConverge::Abort => {
                (PassDecision::Abort, format!("abort: {why}; the guest would be held for {expected:.0?}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::tracking::rates::Kind;
    use proptest::prelude::*;

    fn options(choice: OnNoConverge) -> MoveOptions {
        MoveOptions { on_no_converge: choice, downtime_limit_ms: 1000, ..MoveOptions::default() }
    }

    /// 10 MB/s: what fits three quarters of a second is 7.4 MB.
    fn convergence(options: &MoveOptions) -> Convergence {
        let mut convergence = Convergence::new(options);
        for kind in [Kind::Whole, Kind::Scattered] {
            convergence.rates().note_pass(kind, 10_000_000, Duration::from_secs(1));
        }
        convergence
    }

    fn decide(convergence: &mut Convergence, dirty: u64) -> PassDecision {
        convergence.decide(Passed { dirty, ..Passed::default() }).0
    }

    #[test]
    fn what_fits_the_limit_is_completed_and_what_does_not_is_copied_again() {
        let mut convergence = convergence(&options(OnNoConverge::Abort));
        assert_eq!(decide(&mut convergence, 400_000_000), PassDecision::GoOn);
        assert_eq!(decide(&mut convergence, 40_000_000), PassDecision::GoOn);
        assert_eq!(decide(&mut convergence, 8_000_000), PassDecision::GoOn, "that is too close to the limit");
        assert_eq!(decide(&mut convergence, 7_000_000), PassDecision::Complete);
    }

    #[test]
    fn one_burst_does_not_end_it_and_two_passes_without_progress_do() {
        let mut convergence = convergence(&options(OnNoConverge::Abort));
        for dirty in [900, 500, 800, 400] {
            assert_eq!(decide(&mut convergence, dirty * 1_000_000), PassDecision::GoOn, "after {dirty}");
        }
        assert_eq!(decide(&mut convergence, 390_000_000), PassDecision::GoOn, "one pass of the last two was better");
        assert_eq!(decide(&mut convergence, 395_000_000), PassDecision::Abort);
    }

    #[test]
    fn what_is_done_without_convergence_is_what_was_chosen() {
        for (choice, dirty, expected) in [
            (OnNoConverge::Abort, 100_000_000, PassDecision::Abort),
            (OnNoConverge::Mirror, 100_000_000, PassDecision::Mirror),
            (OnNoConverge::Force, 100_000_000, PassDecision::Force),
            (OnNoConverge::Force, 1_000_000_000, PassDecision::Abort),
        ] {
            let mut convergence = convergence(&options(choice));
            let decisions: Vec<_> = (0..3).map(|_| decide(&mut convergence, dirty)).collect();
            assert_eq!(decisions, [PassDecision::GoOn, PassDecision::GoOn, expected], "{choice:?} with {dirty}");
        }
    }

    #[test]
    fn a_deadline_that_would_pass_is_no_convergence() {
        let mut options = options(OnNoConverge::Mirror);
        options.deadline_ms = Some(60_000);
        let mut convergence = convergence(&options);
        let mut after =
            |age, dirty| convergence.decide(Passed { age: Duration::from_secs(age), dirty, ..Passed::default() }).0;
        assert_eq!(after(10, 400_000_000), PassDecision::GoOn);
        assert_eq!(after(50, 200_000_000), PassDecision::Mirror, "another pass takes 20 s");
        assert_eq!(after(70, 1000), PassDecision::Complete, "what fits is completed, late or not");
    }

    #[test]
    fn what_is_hot_is_copied_in_the_last_pass_but_one() {
        let mut convergence = convergence(&MoveOptions { hot_blocks: true, ..options(OnNoConverge::Abort) });
        let mut after = |dirty, deferred| convergence.decide(Passed { dirty, deferred, age: Duration::ZERO }).0;
        assert_eq!(after(400_000_000, 100_000_000), PassDecision::GoOn);
        assert_eq!(after(105_000_000, 100_000_000), PassDecision::GoOnWithAll);
        assert_eq!(after(7_000_000, 0), PassDecision::Complete);
        assert!(!convergence.defers());
    }

    #[test]
    fn a_switchover_that_keeps_missing_its_time_is_no_convergence() {
        let mut convergence = convergence(&options(OnNoConverge::Mirror));
        for _ in 0..MISSES_MAX {
            assert_eq!(decide(&mut convergence, 1_000_000), PassDecision::Complete);
            convergence.note_miss();
        }
        assert_eq!(decide(&mut convergence, 1_000_000), PassDecision::Complete);
        convergence.note_miss();
        assert_eq!(decide(&mut convergence, 1_000_000), PassDecision::Mirror);
    }

    #[test]
    fn a_hold_that_was_too_slow_is_learned_from() {
        let mut convergence = convergence(&options(OnNoConverge::Abort));
        assert!(convergence.fits(7_000_000));
        convergence.note_hold(1_000_000, Duration::from_secs(1), false);
        assert!(!convergence.fits(7_000_000) && convergence.fits(400_000));
    }

    #[test]
    fn after_the_first_pass_alone_the_guest_is_not_held_for_more_than_the_slowest_disk_copies_in_time() {
        let mut convergence = Convergence::new(&options(OnNoConverge::Abort));
        convergence.rates().note_pass(Kind::Whole, 1_000_000_000, Duration::from_secs(1));
        let (decision, why) = convergence.decide(Passed { dirty: 100_000_000, ..Passed::default() });
        assert_eq!(decision, PassDecision::GoOn, "100 MB at the stream's rate take a tenth of a second");
        assert!(why.contains("has yet to be seen"), "{why}");
        convergence.rates().note_pass(Kind::Scattered, 100_000_000, Duration::from_millis(500));
        assert_eq!(decide(&mut convergence, 100_000_000), PassDecision::Complete);
        let mut nearly_idle = Convergence::new(&options(OnNoConverge::Abort));
        nearly_idle.rates().note_pass(Kind::Whole, 1_000_000_000, Duration::from_secs(1));
        assert_eq!(decide(&mut nearly_idle, 5_000_000), PassDecision::Complete);
    }

    #[test]
    fn a_forced_last_copy_that_was_held_in_vain_is_not_forced_again() {
        let mut convergence = convergence(&options(OnNoConverge::Force));
        let decisions: Vec<_> = (0..3).map(|_| decide(&mut convergence, 100_000_000)).collect();
        assert_eq!(decisions[2], PassDecision::Force);
        convergence.note_hold(90_000_000, Duration::from_secs(30), true);
        assert_eq!(decide(&mut convergence, 10_000_000), PassDecision::GoOn, "that is a tenth of what there was");
        let last: Vec<_> = (0..2).map(|_| decide(&mut convergence, 10_000_000)).collect();
        assert_eq!(last[1], PassDecision::Abort);
    }

    #[test]
    fn a_last_copy_that_is_far_behind_is_given_up_early() {
        let limit = Duration::from_secs(1);
        let is_in_vain = |ms, begun| Convergence::is_in_vain(Duration::from_millis(ms), limit, begun, 1000);
        assert!(!is_in_vain(100, 0), "it has hardly begun");
        assert!(is_in_vain(300, 100) && !is_in_vain(300, 200));
        assert!(is_in_vain(900, 400) && !is_in_vain(900, 500));
    }

    proptest! {
        /// Whatever a guest does, passes end within the stated number.
        #[test]
        fn passes_end(left in prop::collection::vec(0_u64..1 << 40, 1..400), hot: bool) {
            let mut convergence =
                convergence(&MoveOptions { hot_blocks: hot, ..options(OnNoConverge::Abort) });
            let mut passes = 0;
            for dirty in left.iter().cycle() {
                let deferred = if convergence.defers() { dirty / 3 } else { 0 };
                passes += 1;
                let (decision, _) = convergence.decide(Passed { dirty: *dirty, deferred, age: Duration::ZERO });
                match decision {
                    PassDecision::GoOn | PassDecision::GoOnWithAll => {}
                    // Always struck again on the way to the switchover.
                    PassDecision::Complete => convergence.note_miss(),
                    _ => break,
                }
                // Two for every tenth from 2^40 down to what fits, once more with what is hot, and the misses.
                prop_assert!(passes <= 2 * 2 * 120 + 2 * MISSES_MAX + 4, "{passes} passes");
            }
        }
    }
}
