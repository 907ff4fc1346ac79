//! The copy goes where the head of the disk already is (IOFollow: the dissertation's chapter 5, section 5.2.3, algorithms 1 and 3).
//!
//! The head is where the last request was served, the guest's or a copy's. The next run to copy is the one nearest to it, both
//! ways. A run is the part that waits for a copy of a piece of [`follow_run_bytes`](crate::MoveOptions::follow_run_bytes), which
//! is the paper's chunk.
//!
//! ```text
//!   guest    r r       r r       r r               r: a request served, two for one run (follow_ratio)
//!   copy        [run]     [run]     [run][run]     no request waits: the next run begins at once
//! ```
//!
//! - *Turns*: [`guest_turns`](super::guest_turns). The copier bounds how long a run waits for a guest that is not answered.
//! - *No run waits for ever*: after [`NEAREST_IN_A_ROW`] runs one copy goes to the lowest chunk that waits.
//! - *The end is a sweep*: what is left below 1/[`SWEEP_PART`] of the volume is copied in its order, without turns. So are
//!   later passes, unless more than half of the volume waits.

use std::ops::Range;
use std::sync::Arc;

use block::{Bytes, Extent};

use super::guest_turns::GuestTurns;
use super::head::HeadPosition;
use super::{Candidates, Choice, GuestListener, Schedule, ScheduleContext, cool_stretch};
use crate::{ScheduleKind, ScheduleReport};

/// So many runs are copied where the head is, then one where the lowest chunk waits.
const NEAREST_IN_A_ROW: u32 = 31;
/// When less than one of so many parts of the volume waits, the rest is copied in order.
const SWEEP_PART: u64 = 64;
/// A run whose pieces are all hot is passed for the next one above it, so many times.
const RUNS_LOOKED_AT: u32 = 16;

/// Why the run under way was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// It was the nearest.
    Nearest,
    /// Its turn had come.
    Lowest,
    /// In the order of the volume.
    Swept,
}

/// Follows the head, and leaves to `sweep` what is to be copied in order.
pub(super) struct Follow {
    head: HeadPosition,
    turns: Arc<GuestTurns>,
    sweep: Box<dyn Schedule>,
    size: Bytes,
    chunk_bytes: u64,
    /// How many chunks a run has.
    run_chunks: u64,
    /// Enough waits.
    is_worth_it: bool,
    /// The last choice was not left to the sweep.
    is_following: bool,
    /// What was chosen last: why, and up to where its run goes; 0 if it is no run.
    chosen: (Reason, u64),
    /// What is left of the run under way.
    rest: Range<u64>,
    in_a_row: u32,
    counts: ScheduleReport,
}

impl Follow {
    /// For the volume of `context`. What is copied in order is copied as `sweep` says.
    pub(super) fn new(context: ScheduleContext<'_>, sweep: Box<dyn Schedule>) -> Self {
        let ScheduleContext { options, size, medium, wake } = context;
        let turns = GuestTurns::new(medium.head.clone(), u64::from(options.follow_ratio), wake);
        Self {
            head: medium.head,
            turns: Arc::new(turns),
            sweep,
            size,
            chunk_bytes: options.chunk_bytes,
            run_chunks: (options.follow_run_bytes / options.chunk_bytes).max(1),
            is_worth_it: true,
            is_following: true,
            chosen: (Reason::Swept, 0),
            rest: 0..0,
            in_a_row: 0,
            counts: ScheduleReport { used: ScheduleKind::Follow, ..ScheduleReport::default() },
        }
    }

    /// Whether enough waits for the head to be followed. It begins again when most of the volume waits: with another target.
    fn look(&mut self, candidates: &dyn Candidates) -> bool {
        let (absent, chunks) = (candidates.absent(), candidates.chunks());
        if absent < chunks.div_ceil(SWEEP_PART) {
            self.is_worth_it = false;
        } else if absent > chunks / 2 {
            self.is_worth_it = true;
        }
        self.is_following = self.is_worth_it && candidates.is_order_free();
        self.is_following
    }

    /// The next piece of `run`, of at most `chunks_max`.
    fn piece(&mut self, reason: Reason, window: &Range<u64>, candidates: &dyn Candidates, max: u64) -> Option<Choice> {
        // The run goes on to the end of the window, also where one copy is smaller.
        let run = cool_stretch(candidates, window, max.max(self.run_chunks))?;
        self.chosen = (reason, run.end.min(window.end));
        let data_max = self.chosen.1 - run.start;
        Some(Choice::Detour { data_max: data_max.min(max), run: run.start..run.end.min(run.start + max) })
    }

    /// The run nearest to the head that has something cool.
    fn nearest(&mut self, candidates: &dyn Candidates, chunks_max: u64) -> Option<Choice> {
        let at = (self.head.offset().0 / self.chunk_bytes).min(candidates.chunks().saturating_sub(1));
        let mut next = candidates.nearest_absent(at);
        for _ in 0..RUNS_LOOKED_AT {
            let start = next? / self.run_chunks * self.run_chunks;
            let window = start..start + self.run_chunks;
            if let Some(choice) = self.piece(Reason::Nearest, &window, candidates, chunks_max) {
                return Some(choice);
            }
            next = candidates.next_absent(window.end, 1).map(|run| run.start);
        }
        None
    }

    fn sweep(&mut self, reason: Reason, candidates: &mut dyn Candidates, from: u64, chunks_max: u64) -> Choice {
        let choice = self.sweep.next(candidates, from, chunks_max);
        if let Choice::Copy(run) = &choice {
            let is_run = reason == Reason::Lowest;
            self.chosen = (reason, if is_run { run.end.min(run.start + self.run_chunks) } else { 0 });
        }
        choice
    }
}

impl Schedule for Follow {
    fn next(&mut self, candidates: &mut dyn Candidates, from: u64, chunks_max: u64) -> Choice {
        if !self.look(candidates) {
            self.rest = 0..0;
            return self.sweep(Reason::Swept, candidates, from, chunks_max);
        }
        if !self.rest.is_empty() {
            let rest = self.rest.clone();
            let reason = self.chosen.0;
            if let Some(choice) = self.piece(reason, &rest, candidates, chunks_max) {
                return choice;
            }
            self.rest = 0..0;
        }
        if self.in_a_row >= NEAREST_IN_A_ROW {
            let lowest = if candidates.passes_once() { from } else { 0 };
            match self.sweep(Reason::Lowest, candidates, lowest, chunks_max) {
                Choice::Nothing => {}
                choice => return choice,
            }
        }
        match self.nearest(candidates, chunks_max) {
            Some(choice) => choice,
            None => self.sweep(Reason::Swept, candidates, from, chunks_max),
        }
    }

    fn hears_disk(&self) -> bool {
        true
    }

    fn listener(&self) -> Option<Arc<dyn GuestListener>> {
        Some(Arc::clone(&self.turns) as Arc<dyn GuestListener>)
    }

    fn began(&mut self, run: &Range<u64>, is_hole: bool) {
        let (reason, end) = self.chosen;
        let is_new = self.rest.is_empty();
        self.rest = run.end.min(end)..end;
        if !is_hole {
            let start = Bytes(run.start * self.chunk_bytes);
            self.head.served(Extent::between(start, Bytes(run.end * self.chunk_bytes).min(self.size)));
        }
        if !is_new {
            return;
        }
        // Nothing is read of a hole, so the guest need not be let first after it.
        if !is_hole {
            self.turns.took_turn();
        }
        match reason {
            Reason::Nearest => {
                self.counts.runs_chosen += 1;
                self.in_a_row += 1;
            }
            Reason::Lowest => {
                self.counts.runs_bounded += 1;
                self.in_a_row = 0;
            }
            Reason::Swept => self.counts.copies_swept += 1,
        }
    }

    fn lets_guest_first(&self) -> bool {
        self.is_following && self.rest.is_empty() && !self.turns.ask()
    }

    fn waited_for_long(&mut self) {
        self.counts.waits_ended += 1;
    }

    fn report(&self) -> ScheduleReport {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MoveOptions;
    use crate::schedule::ascending::Ascending;
    use crate::schedule::fake::{Waiting, copy_all};
    use crate::schedule::hot_last::HotLast;
    use crate::schedule::{GuestRequest, Medium};
    use tokio::sync::Notify;

    const CHUNK: u64 = 65_536;

    fn follow(chunks: u64, run_bytes: u64) -> Follow {
        let options =
            MoveOptions { schedule: ScheduleKind::Follow, follow_run_bytes: run_bytes, ..MoveOptions::default() };
        let context = ScheduleContext {
            options: &options,
            size: Bytes(chunks * CHUNK),
            medium: Medium::default(),
            wake: Arc::new(Notify::new()),
        };
        Follow::new(context, Box::new(HotLast::new(Ascending)))
    }

    /// The guest reads the end of chunk `chunk`.
    fn serve(schedule: &Follow, chunk: u64) {
        let request = GuestRequest { extent: Extent::new(Bytes(chunk * CHUNK), Bytes(512)), is_write: false };
        schedule.turns.begins(request);
        schedule.turns.ended(request);
    }

    fn copy_one(schedule: &mut Follow, waiting: &mut Waiting, chunks_max: u64) -> Range<u64> {
        let run = match schedule.next(waiting, 0, chunks_max) {
            Choice::Detour { run, data_max } => run.start..run.start + data_max,
            Choice::Copy(run) => run,
            other => panic!("{other:?}"),
        };
        schedule.began(&run, false);
        waiting.copy(&run);
        run
    }

    #[test]
    fn the_nearest_run_is_copied_whichever_side_of_the_head_it_is_on() {
        let (mut schedule, mut waiting) = (follow(1000, 2 * CHUNK), Waiting::new(1000, []));
        serve(&schedule, 500);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 16), 500..502);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 16), 502..504, "the head is where the copy has ended");
        serve(&schedule, 500);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 16), 498..500, "498 is nearer than 504");
        serve(&schedule, 503);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 16), 504..506);
        serve(&schedule, 999);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 16), 998..1000);
        serve(&schedule, 999);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 16), 996..998, "there is nothing behind the last one");
    }

    #[test]
    fn a_run_is_copied_to_its_end_before_the_guest_is_followed_again() {
        let (mut schedule, mut waiting) = (follow(1000, 16 * CHUNK), Waiting::new(1000, []));
        serve(&schedule, 330);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 4), 320..324, "a run begins at a multiple of its size");
        serve(&schedule, 900);
        schedule.turns.begins(GuestRequest { extent: Extent::new(Bytes(0), Bytes(512)), is_write: true });
        assert!(!schedule.lets_guest_first(), "in the middle of a run");
        for start in [324, 328, 332] {
            assert_eq!(copy_one(&mut schedule, &mut waiting, 4), start..start + 4);
        }
        assert!(schedule.lets_guest_first(), "one guest request in flight, and one served since the run began");
        assert_eq!(schedule.report().runs_chosen, 1);
    }

    #[test]
    fn the_lowest_chunk_has_its_turn_although_the_guest_is_elsewhere_for_ever() {
        let (mut schedule, mut waiting) = (follow(4096, 2 * CHUNK), Waiting::new(4096, []));
        let mut lowest = Vec::new();
        for copies in 1..=200_u32 {
            serve(&schedule, 3000);
            if copy_one(&mut schedule, &mut waiting, 2).start < 2000 {
                lowest.push(copies);
            }
        }
        assert_eq!(lowest, [32, 64, 96, 128, 160, 192], "one in so many");
        let report = schedule.report();
        assert_eq!((report.runs_bounded, report.runs_chosen, report.copies_swept), (6, 194, 0));
    }

    #[test]
    fn the_rest_is_swept_in_order_without_waiting_for_the_guest() {
        let (mut schedule, mut waiting) = (follow(6400, 2 * CHUNK), Waiting::new(6400, []));
        waiting.absent.retain(|index| index % 65 == 0);
        assert_eq!(waiting.absent.len(), 99, "less than a sixty-fourth");
        serve(&schedule, 6000);
        let runs = copy_all(&mut schedule, &mut waiting, 2);
        assert!(runs.is_sorted_by_key(|run| run.start), "{runs:?}");
        schedule.turns.begins(GuestRequest { extent: Extent::new(Bytes(0), Bytes(512)), is_write: true });
        assert!(!schedule.lets_guest_first(), "the sweep takes no turns");
        let report = schedule.report();
        assert_eq!((report.runs_chosen, report.copies_swept), (0, 99));
    }

    #[test]
    fn following_begins_again_when_most_of_the_volume_waits_and_not_before() {
        let (mut schedule, mut waiting) = (follow(640, 2 * CHUNK), Waiting::new(640, []));
        copy_all(&mut schedule, &mut waiting, 8);
        waiting.absent.extend(0..320);
        serve(&schedule, 100);
        assert_eq!(schedule.next(&mut waiting, 0, 2), Choice::Copy(0..2), "a later pass is a sweep");
        waiting.absent.extend(0..640);
        assert_eq!(schedule.next(&mut waiting, 0, 2), Choice::Detour { run: 100..102, data_max: 2 });
        waiting.is_order_free = false;
        assert_eq!(schedule.next(&mut waiting, 0, 2), Choice::Copy(0..2), "the pass would not end");
    }

    #[test]
    fn what_is_hot_is_passed_by_and_the_sweep_puts_it_off() {
        let (mut schedule, mut waiting) = (follow(128, 4 * CHUNK), Waiting::new(128, [64, 65, 66, 67, 69]));
        serve(&schedule, 64);
        assert_eq!(copy_one(&mut schedule, &mut waiting, 4), 68..69, "the next run above that has something cool");
        let runs = copy_all(&mut schedule, &mut waiting, 4);
        assert!(runs.iter().all(|run| run.clone().all(|index| !waiting.hot.contains(&index))), "{runs:?}");
        waiting.put_off.sort_unstable();
        assert_eq!((waiting.put_off, waiting.absent.len()), (vec![64, 65, 66, 67, 69], 0));
    }

    #[test]
    fn a_hole_reaches_past_its_run_and_does_not_take_the_guest_s_turn() {
        let (mut schedule, mut waiting) = (follow(1000, 2 * CHUNK), Waiting::new(1000, []));
        let choice = schedule.next(&mut waiting, 0, 500);
        assert_eq!(choice, Choice::Detour { run: 0..500, data_max: 2 });
        schedule.turns.begins(GuestRequest { extent: Extent::new(Bytes(0), Bytes(512)), is_write: true });
        schedule.began(&(0..500), true);
        waiting.copy(&(0..500));
        assert!(!schedule.lets_guest_first(), "nothing was read");
        assert_eq!(schedule.head.offset(), Bytes::ZERO, "nothing was read");
    }

    proptest::proptest! {
        #[test]
        fn everything_is_copied_once_wherever_the_guest_goes(
            guest in proptest::collection::vec(0_u64..700, 1..60),
            gaps in proptest::collection::btree_set(0_u64..700, 0..300),
            run_chunks in 1_u64..20,
        ) {
            let (mut schedule, mut waiting) = (follow(700, run_chunks * CHUNK), Waiting::new(700, []));
            waiting.absent.retain(|index| !gaps.contains(index));
            let mut left = waiting.absent.len();
            for chunk in guest.iter().cycle() {
                serve(&schedule, *chunk);
                if waiting.absent.is_empty() {
                    break;
                }
                let run = copy_one(&mut schedule, &mut waiting, 8);
                left -= (run.end - run.start) as usize;
                proptest::prop_assert_eq!(waiting.absent.len(), left);
            }
            proptest::prop_assert_eq!(schedule.next(&mut waiting, 0, 8), Choice::Nothing);
        }
    }
}
