//! Whether a copy in passes comes to an end, and what is done if it does not: the decision after every pass (ESX paper,
//! section 2.5), as a plain structure that awaits nothing.
//!
//! ```text
//!                 the rest fits the downtime limit              the target is flushed, and it still fits
//!   ┌─▶ pass ──────────────────────────────────────▶ complete ──────────────────────────────────────────▶ last copy
//!   │    │  │ what is not hot fits, or gets no smaller                              │ it does not
//!   │    │  └────────────▶ pass with what was put off                               ▼
//!   │    │ it gets smaller                                                        a miss
//!   └────┴─── go on ◀────────────────────────────────────────────────────────────────┘
//!        │ neither of the last two passes left a tenth less than any before them, the deadline would pass, or too many
//!        ▼ misses
//!   no convergence: abort, force, or mirror
//! ```
//!
//! A burst of writes makes one pass leave more than the one before; so the better of the last two is looked at. Because it
//! is held against the best of all before, passes end: each pair leaves a tenth less, from the volume down to the limit.

use std::time::Duration;

use block::Bytes;

use crate::{MoveOptions, OnNoConverge};

/// What the last two passes must have left of the least before them, to go on.
const PROGRESS: f64 = 0.9;
/// What was put off gets a pass of its own if it is more than one part of so many of all that is dirty.
const DEFERRED_PART_MIN: u64 = 10;
/// So many switchovers may find more than they can copy in their time.
const MISSES_MAX: u32 = 6;
/// What a switchover takes beside the copy before one has been seen: a flush, the record.
const OVERHEAD_FIRST: Duration = Duration::from_millis(10);
/// Copies in a hold are expected to be no faster than this many bytes a second if nothing is known of them.
const RATE_UNKNOWN: f64 = 10e6;

/// What a pass has come to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Passed {
    /// Since the move began.
    pub(crate) age: Duration,
    /// What must be copied again, what is put off included.
    pub(crate) dirty: u64,
    /// What is put off.
    pub(crate) deferred: u64,
}

/// What is done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
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
struct Left {
    best: Option<u64>,
    last: [Option<u64>; 2],
}

impl Left {
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
    all: Left,
    rest: Left,
    misses: u32,
    /// How fast copies were while some were under way.
    rate: Option<f64>,
    /// How fast they were while the guest was held, where that was slower than expected.
    held_rate: Option<f64>,
    /// What a switchover takes beside the copy.
    overhead: Duration,
    /// Hot chunks have had their turn: nothing is put off any more.
    had_all: bool,
}

impl Convergence {
    pub(crate) fn new(options: &MoveOptions) -> Self {
        Self {
            limit: Duration::from_millis(options.downtime_limit_ms),
            forced_max: Duration::from_millis(options.forced_downtime_ms_max),
            deadline: options.deadline_ms.map(Duration::from_millis),
            choice: options.on_no_converge,
            all: Left::default(),
            rest: Left::default(),
            misses: 0,
            rate: None,
            held_rate: None,
            overhead: OVERHEAD_FIRST,
            had_all: !options.hot_blocks,
        }
    }

    /// The longest that the guest may be held for the last copy, unless it is forced: twice what was asked for, because
    /// an expectation is no promise.
    pub(crate) fn hold_limit(&self) -> Duration {
        self.limit * 2
    }

    /// Whether what is hot is put off for now.
    pub(crate) const fn defers(&self) -> bool {
        !self.had_all
    }

    /// Copies of so many bytes took so long, with the time in which none was under way left out.
    pub(crate) fn note_rate(&mut self, bytes: u64, busy: Duration) {
        if bytes > 0 && !busy.is_zero() {
            self.rate = Some(bytes as f64 / busy.as_secs_f64());
        }
    }

    /// A flush of the target took so long.
    pub(crate) fn note_flush(&mut self, took: Duration) {
        self.overhead = (self.overhead / 2 + took / 2).max(Duration::from_millis(2));
    }

    /// The guest was held for a copy that did not end in its time.
    pub(crate) fn note_hold(&mut self, bytes: u64, took: Duration) {
        self.misses += 1;
        self.held_rate = Some((bytes.max(1) as f64 / took.as_secs_f64().max(1e-6)).max(1.0));
    }

    /// More is dirty right before the guest is held than can be copied in its time.
    pub(crate) const fn note_miss(&mut self) {
        self.misses += 1;
    }

    /// How long a pass over so much takes, as the last one went.
    pub(crate) fn pass_expected(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64((bytes as f64 / self.rate.unwrap_or(RATE_UNKNOWN)).min(1e9))
    }

    /// How long the guest would be held for the copy of so much.
    pub(crate) fn expected(&self, bytes: u64) -> Duration {
        if bytes == 0 {
            return self.overhead;
        }
        let rate = match (self.rate, self.held_rate) {
            (Some(rate), Some(held)) => rate.min(held),
            (rate, held) => rate.or(held).unwrap_or(RATE_UNKNOWN),
        };
        self.overhead + Duration::from_secs_f64((bytes as f64 / rate).min(1e9))
    }

    /// Whether the copy of so much fits the downtime limit.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        self.expected(bytes) <= self.limit
    }

    /// Whether the time that the move was given is over.
    pub(crate) fn is_too_late(&self, age: Duration) -> bool {
        self.deadline.is_some_and(|deadline| age >= deadline)
    }

    /// A pass is over. Says what is done next, and why.
    pub(crate) fn judge(&mut self, passed: Passed) -> (Verdict, String) {
        let rest = passed.dirty - passed.deferred.min(passed.dirty);
        let expected = self.expected(passed.dirty);
        if expected <= self.limit && self.misses <= MISSES_MAX {
            let why = format!("{} can be copied in {expected:.0?}, within {:?}", Bytes(passed.dirty), self.limit);
            return (Verdict::Complete, format!("complete: {why}"));
        }
        if self.is_too_late(passed.age) {
            return self.give_up(passed, format!("the deadline of {:?} has passed", self.deadline.unwrap_or_default()));
        }
        if self.misses > MISSES_MAX {
            return self.give_up(passed, format!("{} switchovers found more than they could copy", self.misses));
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
                return (Verdict::GoOnWithAll, text);
            }
        }
        if !smaller {
            let why = format!("what is left gets no smaller: {} after the last pass", Bytes(rest));
            return self.give_up(passed, why);
        }
        if let Some(deadline) = self.deadline
            && passed.age + self.expected(rest) >= deadline
        {
            return self.give_up(passed, format!("another pass would end after the deadline of {deadline:?}"));
        }
        let why =
            format!("{} would hold the guest for {expected:.0?}, longer than {:?}", Bytes(passed.dirty), self.limit);
        (Verdict::GoOn, format!("go on: {why}"))
    }

    fn give_up(&self, passed: Passed, why: String) -> (Verdict, String) {
        let expected = self.expected(passed.dirty);
        match self.choice {
            OnNoConverge::Mirror => (Verdict::Mirror, format!("go on as a mirror: {why}")),
            OnNoConverge::Force if expected <= self.forced_max => {
                let text = format!("force: {why}; the guest is held for {expected:.0?} as expected");
                (Verdict::Force, text)
            }
            OnNoConverge::Force => {
                let text = format!(
                    "abort: {why}, and the guest would be held for {expected:.0?}, longer than {:?}",
                    self.forced_max
                );
                (Verdict::Abort, text)
            }
            OnNoConverge::Abort => {
                (Verdict::Abort, format!("abort: {why}; the guest would be held for {expected:.0?}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options(choice: OnNoConverge) -> MoveOptions {
        MoveOptions { on_no_converge: choice, downtime_limit_ms: 1000, ..MoveOptions::default() }
    }

    /// 10 MB/s: what fits a second is 9.9 MB.
    fn convergence(options: &MoveOptions) -> Convergence {
        let mut convergence = Convergence::new(options);
        convergence.note_rate(10_000_000, Duration::from_secs(1));
        convergence
    }

    fn judge(convergence: &mut Convergence, dirty: u64) -> Verdict {
        convergence.judge(Passed { dirty, ..Passed::default() }).0
    }

    #[test]
    fn what_fits_the_limit_is_completed_and_what_does_not_is_copied_again() {
        let mut convergence = convergence(&options(OnNoConverge::Abort));
        assert_eq!(judge(&mut convergence, 400_000_000), Verdict::GoOn);
        assert_eq!(judge(&mut convergence, 40_000_000), Verdict::GoOn);
        assert_eq!(judge(&mut convergence, 9_000_000), Verdict::Complete);
    }

    #[test]
    fn one_burst_does_not_end_it_and_two_passes_without_progress_do() {
        let mut convergence = convergence(&options(OnNoConverge::Abort));
        for dirty in [900, 500, 800, 400] {
            assert_eq!(judge(&mut convergence, dirty * 1_000_000), Verdict::GoOn, "after {dirty}");
        }
        assert_eq!(judge(&mut convergence, 390_000_000), Verdict::GoOn, "one pass of the last two was better");
        assert_eq!(judge(&mut convergence, 395_000_000), Verdict::Abort);
    }

    #[test]
    fn what_is_done_without_convergence_is_what_was_chosen() {
        for (choice, dirty, expected) in [
            (OnNoConverge::Abort, 100_000_000, Verdict::Abort),
            (OnNoConverge::Mirror, 100_000_000, Verdict::Mirror),
            (OnNoConverge::Force, 100_000_000, Verdict::Force),
            (OnNoConverge::Force, 1_000_000_000, Verdict::Abort),
        ] {
            let mut convergence = convergence(&options(choice));
            let verdicts: Vec<_> = (0..3).map(|_| judge(&mut convergence, dirty)).collect();
            assert_eq!(verdicts, [Verdict::GoOn, Verdict::GoOn, expected], "{choice:?} with {dirty}");
        }
    }

    #[test]
    fn a_deadline_that_would_pass_is_no_convergence() {
        let mut options = options(OnNoConverge::Mirror);
        options.deadline_ms = Some(60_000);
        let mut convergence = convergence(&options);
        let mut after =
            |age, dirty| convergence.judge(Passed { age: Duration::from_secs(age), dirty, ..Passed::default() }).0;
        assert_eq!(after(10, 400_000_000), Verdict::GoOn);
        assert_eq!(after(50, 200_000_000), Verdict::Mirror, "another pass takes 20 s");
        assert_eq!(after(70, 1000), Verdict::Complete, "what fits is completed, late or not");
    }

    #[test]
    fn what_is_hot_is_copied_in_the_last_pass_but_one() {
        let mut convergence = convergence(&MoveOptions { hot_blocks: true, ..options(OnNoConverge::Abort) });
        let mut after = |dirty, deferred| convergence.judge(Passed { dirty, deferred, age: Duration::ZERO }).0;
        assert_eq!(after(400_000_000, 100_000_000), Verdict::GoOn);
        assert_eq!(after(105_000_000, 100_000_000), Verdict::GoOnWithAll);
        assert_eq!(after(8_000_000, 0), Verdict::Complete);
        assert!(!convergence.defers());
    }

    #[test]
    fn a_switchover_that_keeps_missing_its_time_is_no_convergence() {
        let mut convergence = convergence(&options(OnNoConverge::Mirror));
        for _ in 0..MISSES_MAX {
            assert_eq!(judge(&mut convergence, 1_000_000), Verdict::Complete);
            convergence.note_miss();
        }
        assert_eq!(judge(&mut convergence, 1_000_000), Verdict::Complete);
        convergence.note_miss();
        assert_eq!(judge(&mut convergence, 1_000_000), Verdict::Mirror);
    }

    #[test]
    fn a_hold_that_was_too_slow_is_learned_from() {
        let mut convergence = convergence(&options(OnNoConverge::Abort));
        assert!(convergence.fits(8_000_000));
        convergence.note_hold(1_000_000, Duration::from_secs(2));
        assert!(!convergence.fits(8_000_000) && convergence.fits(400_000));
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
                let (verdict, _) = convergence.judge(Passed { dirty: *dirty, deferred, age: Duration::ZERO });
                match verdict {
                    Verdict::GoOn | Verdict::GoOnWithAll => {}
                    // Always struck again on the way to the switchover.
                    Verdict::Complete => convergence.note_miss(),
                    _ => break,
                }
                // Two for every tenth from 2^40 down to what fits, once more with what is hot, and the misses.
                prop_assert!(passes <= 2 * 2 * 120 + 2 * MISSES_MAX + 4, "{passes} passes");
            }
        }
    }
}
