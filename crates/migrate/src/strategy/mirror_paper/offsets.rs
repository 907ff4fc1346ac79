//! The two offsets, and what follows from them: plain decisions under the tracker's lock.

use std::ops::Range;

use block::{Bytes, Extent};

use crate::strategy::mirror::tracker::{CopyState, Tracker};

/// Which part of a volume is copied, being copied, and to be copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::strategy) struct Offsets {
    /// What lies before this is on both sides: writes are mirrored.
    copied: Bytes,
    /// What lies between is being copied. No window is open while the two are the same.
    copying: Bytes,
    /// The progress map may say of chunks before this that they are on both sides.
    recorded: Bytes,
}

impl Offsets {
    fn is_open(&self) -> bool {
        self.copying > self.copied
    }

    fn open(&mut self, window: Extent) -> bool {
        assert!(!self.is_open(), "{window} would be a second window beside {self:?}");
        let is_next = window.offset == self.copied;
        if is_next {
            self.copying = window.end();
        }
        is_next
    }

    /// The window was copied. Not if the copy has gone back meanwhile.
    fn close(&mut self, window: Extent) -> bool {
        let is_next = window.offset == self.copied;
        if is_next {
            self.copied = window.end();
            self.recorded = self.recorded.max(self.copied);
        }
        self.abandon();
        is_next
    }

    fn abandon(&mut self) {
        self.copying = self.copied;
    }

    fn go_back(&mut self, to: Bytes) {
        self.copied = self.copied.min(to);
        self.abandon();
    }
}

impl Tracker {
    /// Mirrors by two offsets from now on, as the paper does.
    pub(crate) fn mirror_by_offsets(&mut self) {
        self.offsets = Some(Offsets::default());
    }

    /// Where the copy by two offsets goes on; `None` where it is not by offsets.
    pub(in crate::strategy) fn window_start(&self) -> Option<u64> {
        self.offsets.map(|offsets| self.chunk.count(offsets.copied))
    }

    /// Whether a window is open: there is only one.
    pub(in crate::strategy) fn is_window_open(&self) -> bool {
        self.offsets.is_some_and(|offsets| offsets.is_open())
    }

    /// A copy takes `run`: the window opens. Its writes are held by the range lock, in whose turn the mover waits for those
    /// that are in flight. Gives whether it is where the copy is to go on.
    pub(in crate::strategy) fn open_window(&mut self, run: &Range<u64>) -> bool {
        let window = self.run_extent(run);
        self.offsets.as_mut().is_none_or(|offsets| offsets.open(window))
    }

    /// All of `run` is on both sides: the first offset moves behind it. Gives whether that is so.
    pub(in crate::strategy) fn close_window(&mut self, run: &Range<u64>) -> bool {
        let window = self.run_extent(run);
        self.offsets.as_mut().is_none_or(|offsets| offsets.close(window))
    }

    /// The window, or its end, was not copied.
    pub(in crate::strategy) fn abandon_window(&mut self) {
        if let Some(offsets) = &mut self.offsets {
            offsets.abandon();
        }
    }

    /// The copy is at its beginning again.
    pub(in crate::strategy) fn go_back_to_start(&mut self) {
        if let Some(offsets) = &mut self.offsets {
            offsets.go_back(Bytes::ZERO);
        }
    }

    /// Chunk `index`, which was copied, must be copied again, and so must what lies behind it. Gives whether the copy is
    /// by offsets.
    pub(in crate::strategy) fn go_back(&mut self, index: u64) -> bool {
        let Some(end) = self.window_start() else { return false };
        let to = self.chunk_extent(index).offset;
        self.copy_state.set_range(index..end, CopyState::Absent);
        self.mark_stale(index..end);
        self.offsets.as_mut().expect("asked above").go_back(to);
        true
    }

    /// Of what an earlier session had, takes what two offsets can say: the part without a gap.
    pub(in crate::strategy) fn adopt_to_offset(&mut self, had: &[Range<u64>]) {
        let copied = had.first().filter(|run| run.start == 0).map_or(0, |run| run.end);
        self.copy_state.set_range(0..copied, CopyState::Copied);
        let byte = |chunk: u64| Bytes(chunk * self.chunk.bytes()).min(self.size());
        let recorded = had.last().map_or(Bytes::ZERO, |run| byte(run.end));
        self.offsets = Some(Offsets { copied: byte(copied), copying: byte(copied), recorded });
        // The others are on record, and must not be there any more once the guest has written to them.
        had.iter().filter(|run| run.start > 0).for_each(|run| self.mark_stale(run.clone()));
    }

    /// Which part of a write is to be mirrored, and whether the activity log must have the write first. That is so if
    /// after a crash something could count as copied that is not. An example is what lies beyond the first offset and
    /// may be on record as copied, because the copy has gone back.
    pub(in crate::strategy) fn mirrored_by_offset(&mut self, extent: Extent) -> (Vec<Extent>, bool) {
        let Some(offsets) = self.offsets else { return (Vec::new(), false) };
        let may_be_recorded = extent.offset < offsets.recorded;
        if extent.offset >= offsets.copied {
            return (Vec::new(), may_be_recorded);
        }
        let part = Extent::between(extent.offset, extent.end().min(offsets.copied));
        let chunks = self.chunk.indices_of(part);
        if self.session().is_none() {
            self.lose(chunks.start);
            return (Vec::new(), true);
        }
        chunks.for_each(|index| self.touch_target(index));
        (vec![part], may_be_recorded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{ChunkSize, Device, MemDevice};
    use proptest::prelude::*;

    const CHUNK: u64 = 4096;
    const CHUNKS: u64 = 20;
    /// The last chunk is not a whole one.
    const SIZE: Bytes = Bytes(CHUNKS * CHUNK - 100);

    fn tracker() -> Tracker {
        let chunk = ChunkSize::new(CHUNK).expect("a chunk size");
        let target = Device::new("target", MemDevice::new(SIZE));
        let mut tracker = Tracker::new(SIZE, chunk, target, true);
        tracker.keep_progress(crate::ProgressMap::PAGE_CHUNKS);
        tracker.mirror_by_offsets();
        tracker
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// A window of so many chunks is opened.
        Open(u64),
        /// And ends, copied or not.
        Close(bool),
        /// A write of so many bytes, which may leave the sides different.
        Write(u64, u64, bool),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (1_u64..6).prop_map(Step::Open),
            3 => prop::bool::weighted(0.8).prop_map(Step::Close),
            3 => (0..SIZE.0, 1_u64..40_000, prop::bool::weighted(0.2)).prop_map(|(at, length, fails)| {
                Step::Write(at, length.min(SIZE.0 - at), fails)
            }),
        ]
    }

    proptest! {
        /// Beside a model that is one number: how many chunks from the start are on both sides.
        #[test]
        fn the_offsets_and_the_chunks_say_the_same_and_a_failure_takes_all_behind_it_along(
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let mut tracker = tracker();
            let (mut copied, mut window): (u64, Option<Range<u64>>) = (0, None);
            let mut recorded = 0;
            for step in steps {
                match step {
                    Step::Open(chunks) => {
                        // The driver begins no copy while one is under way.
                        let next = if window.is_some() { None } else { tracker.next_absent(7, chunks) };
                        prop_assert_eq!(next.is_some(), window.is_none() && copied < CHUNKS);
                        if let Some(run) = next {
                            prop_assert_eq!(run.start, copied);
                            prop_assert!(copied == 0 || !tracker.claim(0..1), "a window that is not the next");
                            prop_assert!(tracker.claim(run.clone()));
                            prop_assert_eq!(tracker.next_absent(0, 1), None, "a second window");
                            window = Some(run);
                        }
                    }
                    Step::Close(is_copied) => {
                        let Some(run) = window.take() else { continue };
                        if is_copied {
                            tracker.end_copy(run.clone(), 1);
                            copied = if run.start == copied { run.end } else { copied };
                            recorded = recorded.max(copied);
                        } else {
                            tracker.abort_written_copy(run);
                        }
                    }
                    Step::Write(at, length, fails) => {
                        let extent = Extent::new(Bytes(at), Bytes(length));
                        let plan = tracker.plan_write(extent, false);
                        let end = (copied * CHUNK).min(extent.end().0);
                        let expected = (at < end).then(|| vec![Extent::between(Bytes(at), Bytes(end))]);
                        let parts = plan.mirror.as_ref().map(|(_, parts)| parts.clone());
                        prop_assert_eq!(&parts, &expected);
                        prop_assert_eq!(plan.active, at < (recorded * CHUNK).min(SIZE.0));
                        tracker.finish_write(&plan, fails);
                        if fails && expected.is_some() {
                            copied = at / CHUNK;
                        }
                    }
                }
                let is_had = (0..CHUNKS).map(|index| tracker.copy_state.get(index) == CopyState::Copied);
                prop_assert_eq!(is_had.collect::<Vec<_>>(), (0..CHUNKS).map(|index| index < copied).collect::<Vec<_>>());
                prop_assert_eq!(tracker.window_start(), Some(copied));
            }
        }
    }

    #[test]
    fn of_what_was_had_before_a_crash_the_part_without_a_gap_is_taken() {
        let mut tracker = tracker();
        tracker.adopt(&[0..3, 5..9]);
        assert_eq!((tracker.window_start(), tracker.bytes_in_step()), (Some(3), Bytes(3 * CHUNK)));
        let plan = tracker.plan_write(Extent::new(Bytes(6 * CHUNK), Bytes(10)), false);
        assert!(plan.mirror.is_none() && plan.active, "it is on record as copied, and a crash must not believe that");
        let plan = tracker.plan_write(Extent::new(Bytes(10 * CHUNK), Bytes(10)), false);
        assert!(plan.mirror.is_none() && !plan.active);
        tracker.adopt(&[1..2, 2..3]);
        assert_eq!(tracker.window_start(), Some(0));
    }

    #[test]
    fn without_a_target_a_write_takes_the_copy_back_to_its_place() {
        let mut tracker = tracker();
        tracker.adopt(&[0..12, 14..15]);
        assert!(tracker.drop_session().is_empty());
        assert_eq!(tracker.window_start(), Some(12), "all of it was flushed");
        let plan = tracker.plan_write(Extent::new(Bytes(5 * CHUNK + 7), Bytes(3 * CHUNK)), false);
        assert!(plan.mirror.is_none() && plan.active);
        assert_eq!(tracker.window_start(), Some(5));
    }
}
