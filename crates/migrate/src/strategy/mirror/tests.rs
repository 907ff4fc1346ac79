//! The tracker and the guest's path by themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{
    BlockDevice, Buffer, Bytes, ChunkSize, Data, Device, ErrorKind, Extent, Filter, IoFuture, MemDevice, Mutation,
};
use env::testing::PausedEnv;
use parking_lot::Mutex;

use super::copy::{ZERO_BYTES_MAX, write_zeroes};
use super::device::JobEntry;
use super::filter::Mirror;
use super::map_pages::{CHUNKS_AT_ONCE, Part};
use super::session::Session;
use super::states::Durability;
use super::tracker::{CopyState, Mode, Tracker};
use super::verify_state::Uncompared;
use super::write_queue::BufferPlan;
use crate::control::Control;
use crate::progress_map::{ACTIVE_EXTENT, Found, PAGE_BYTES};
use crate::reduce::skip::SkipReason;
use crate::schedule::{GuestListener, GuestRequest};
use crate::{MoveOptions, Progress};

const SIZE: Bytes = Bytes::mib(1);

fn device(name: &str) -> Device {
    Device::new(name, MemDevice::new(SIZE))
}

/// A tracker of whose volume all is copied and flushed.
fn copied() -> Tracker {
    let mut tracker = Tracker::new(SIZE, ChunkSize::default(), device("target"), true);
    tracker.keep_progress(crate::ProgressMap::PAGE_CHUNKS);
    let run = 0..tracker.chunks();
    assert!(tracker.claim(run.clone()));
    tracker.begin_writing(run.clone());
    tracker.end_copy(run, 1);
    flush(&mut tracker);
    tracker
}

fn flush(tracker: &mut Tracker) {
    for step in [Tracker::begin_flush, Tracker::end_flush] {
        let mut next = Some(Part::default());
        while let Some(from) = next {
            next = step(tracker, from);
        }
    }
}

#[test]
fn a_write_that_ends_after_its_target_is_lost_may_be_lost_there_although_a_flush_came_between() {
    let mut tracker = copied();
    let plan = tracker.plan_write(Extent::new(Bytes::kib(64), Bytes::kib(4)), false);
    // The target answers its part after this flush has begun, and the source is late.
    flush(&mut tracker);
    assert!(!tracker.has_unflushed());
    let _ = tracker.drop_session();
    tracker.begin_session(device("the same target"), false);
    tracker.finish_write(&plan, false);
    assert_eq!(tracker.copy_state.get(1), CopyState::Absent, "the target may have lost what no flush has covered");
    assert_eq!(tracker.copy_state.get(2), CopyState::Copied, "nobody has written there");
}

#[test]
fn a_buffered_write_keeps_its_extent_of_the_activity_log_over_a_flush_of_the_target() {
    let mut tracker = copied();
    tracker.mirror_asynchronously();
    while tracker.take_stale_page(0).is_some() {}
    let extent = Extent::new(Bytes::kib(64), Bytes::kib(4));
    let BufferPlan::Buffer(plan) = tracker.plan_buffered(extent, true) else { panic!("it is buffered") };
    tracker.activated(&plan.activate);
    let data = Data::copy_of(&[7; 4096]);
    assert!(tracker.buffer(&Mutation::data(extent.offset, data.clone()), &data), "the guest may be answered");
    tracker.finish_write(&plan, false);
    // The target has not been written yet: this flush makes nothing of it durable.
    flush(&mut tracker);
    assert_eq!(tracker.take_idle(0), (Vec::new(), None), "a crash would forget what the target has yet to get");
    let landed = tracker.take_buffered().expect("it waits");
    tracker.end_buffered(&landed, false);
    flush(&mut tracker);
    assert_eq!(tracker.take_idle(0).0, plan.activate);
}

#[test]
fn a_chunk_that_is_left_to_the_source_is_no_longer_the_targets_on_record() {
    let mut tracker = copied();
    while tracker.take_stale_page(0).is_some() {}
    let plan = tracker.plan_write(Extent::new(Bytes::kib(64), Bytes::kib(4)), true);
    assert_eq!((tracker.copy_state.get(1), tracker.copy_state.get(2)), (CopyState::Absent, CopyState::Copied));
    assert_eq!(tracker.take_stale_page(0), Some(0), "after a crash the chunk would be taken for copied");
    tracker.finish_write(&plan, false);
    assert_eq!(tracker.copy_state.get(1), CopyState::Absent);
}

#[test]
fn what_was_proved_of_one_target_is_not_proved_of_another() {
    let mut tracker = copied();
    tracker.want_comparison(0..4);
    let Uncompared::Run(run, _) = tracker.take_uncompared(false, 4) else { panic!("they are wanted") };
    tracker.end_compare(run, true);
    assert_eq!(tracker.bytes_proved(), Bytes::kib(256));
    let _ = tracker.drop_session();
    tracker.begin_session(device("another target"), true);
    assert_eq!((tracker.bytes_proved(), tracker.uncompared(false)), (Bytes::ZERO, 4));
}

/// A target whose session ends while its first write is under way.
struct GivenUp {
    lower: Device,
    session: Mutex<Option<Session>>,
    writes: AtomicU64,
}

impl Filter for GivenUp {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.session.lock().iter().for_each(Session::end);
        Box::pin(self.lower.write(mutation))
    }
}

#[tokio::test]
async fn a_copy_that_was_given_up_with_its_session_writes_no_further_piece() {
    let extent = Extent::new(Bytes::ZERO, Bytes(2 * ZERO_BYTES_MAX));
    let lower = Device::new("memory", MemDevice::new(extent.length));
    let target = Arc::new(GivenUp { lower, session: Mutex::default(), writes: AtomicU64::new(0) });
    let session = Session::new(1, Device::from_arc("target", Arc::clone(&target) as _), false);
    *target.session.lock() = Some(session.clone());
    let written = write_zeroes(&session, extent).await;
    assert_eq!(written.expect_err("its session is over").kind(), ErrorKind::Disconnected);
    assert_eq!(target.writes.load(Ordering::Relaxed), 1, "another session may use the target by now");
    target.session.lock().take();
}

/// A tracker of 16 TiB, all copied, of which every thousandth chunk was written since the last flush.
fn large() -> Tracker {
    let mut tracker = Tracker::new(Bytes(16 << 40), ChunkSize::default(), device("target"), true);
    tracker.keep_progress(crate::ProgressMap::PAGE_CHUNKS);
    let chunks = tracker.chunks();
    tracker.copy_state.set_range(0..chunks, CopyState::Copied);
    (0..chunks).step_by(1000).for_each(|index| tracker.touch_target(index));
    tracker
}

/// Walks over the volume, and looks after every step at how many chunks `count` gives. No step changes more of them
/// than may be looked at under one lock. Gives how many steps there were.
fn in_parts<T>(
    tracker: &mut Tracker,
    from: T,
    step: impl Fn(&mut Tracker, T) -> Option<T>,
    count: impl Fn(&Tracker) -> u64,
) -> u64 {
    let (mut next, mut steps) = (Some(from), 0);
    while let Some(from) = next {
        let before = count(tracker);
        next = step(tracker, from);
        let changed = before.abs_diff(count(tracker));
        assert!(changed <= CHUNKS_AT_ONCE, "{changed} chunks were changed under one lock");
        steps += 1;
    }
    steps
}

#[test]
fn a_flush_of_16_tib_holds_the_tracker_for_a_part_of_it_at_a_time() {
    let mut tracker = large();
    let written = tracker.chunks().div_ceil(1000);
    let unflushed = |tracker: &Tracker| tracker.durability.count(Durability::Unflushed);
    let steps = in_parts(&mut tracker, Part::default(), Tracker::begin_flush, unflushed);
    assert!(steps > written / CHUNKS_AT_ONCE, "{steps} steps");
    assert_eq!(tracker.durability.count(Durability::Flushing), written);
    tracker.touch_target(7000);
    let flushing = |tracker: &Tracker| tracker.durability.count(Durability::Flushing);
    in_parts(&mut tracker, Part::default(), Tracker::end_flush, flushing);
    assert_eq!(
        (flushing(&tracker), unflushed(&tracker)),
        (0, 1),
        "what was written meanwhile waits for the next flush"
    );
}

#[test]
fn a_target_of_16_tib_that_is_lost_or_another_one_is_forgotten_a_part_at_a_time() {
    let mut tracker = large();
    let written = tracker.chunks().div_ceil(1000);
    let _ = tracker.drop_session();
    let copied = |tracker: &Tracker| tracker.copy_state.count(CopyState::Copied);
    in_parts(&mut tracker, 0, Tracker::forget_unflushed, copied);
    assert_eq!((copied(&tracker), tracker.has_unflushed()), (tracker.chunks() - written, false));
    let end = tracker.chunks() - 1_000_000;
    in_parts(&mut tracker, end, Tracker::forget_all_copied, copied);
    assert_eq!(tracker.next_copied(end, 1), None);
    tracker.track(false);
    (0..1_000_000).for_each(|chunk| tracker.mark_dirty(Extent::new(Bytes(chunk << 20), Bytes(1))));
    let dirty = |tracker: &Tracker| tracker.dirty_bitmap.as_ref().map_or(0, |dirty_bitmap| dirty_bitmap.dirty().0);
    in_parts(&mut tracker, Part::default(), Tracker::forget_copies, |tracker| copied(tracker).max(dirty(tracker)));
    assert_eq!((copied(&tracker), dirty(&tracker)), (0, 0));
}

#[test]
fn the_map_of_16_tib_is_brought_up_to_date_in_pieces() {
    let mut tracker = large();
    tracker.mark_stale(0..tracker.chunks());
    let (mut from, mut pages, mut page) = (0, 0, Box::new([0; PAGE_BYTES]));
    while let Some(number) = tracker.take_stale_page(from) {
        (from, pages) = (number + 1, pages + 1);
        // All pages are alike: a few tell.
        let mut next = (number % 1000 == 0).then_some(0);
        while let Some(at) = next {
            next = tracker.fill_copied_page(number, at, &mut page);
            assert!(next.is_none_or(|next| next - at <= CHUNKS_AT_ONCE), "from {at} to {next:?} under one lock");
        }
    }
    assert_eq!(pages, tracker.chunks() / crate::ProgressMap::PAGE_CHUNKS);
    let extents = tracker.size().0 / ACTIVE_EXTENT.0;
    let active = (0..extents).step_by(10).collect();
    tracker.adopt_record(&Found { active, ..Found::default() });
    let extents_max = CHUNKS_AT_ONCE / tracker.chunk.count(ACTIVE_EXTENT);
    let (mut next, mut idle) = (Some(0), 0);
    while let Some(from) = next {
        let (some, more) = tracker.take_idle(from);
        assert!(some.len() as u64 <= extents_max, "{} extents under one lock", some.len());
        assert!(more.is_none_or(|more| more - from <= extents_max * 10), "from {from} to {more:?} under one lock");
        (next, idle) = (more, idle + some.len());
    }
    assert!(
        idle > 0 && idle < (extents / 10) as usize,
        "{idle} extents are idle, and those with unflushed chunks are not"
    );
}

#[test]
fn a_volume_of_16_tib_with_nothing_to_compare_is_passed_a_part_at_a_time() {
    let mut tracker = Tracker::new(Bytes(16 << 40), ChunkSize::default(), device("target"), true);
    tracker.track(false);
    // What was copied the guest has changed since, and what it has not is not copied.
    for index in (0..100_000).step_by(2) {
        tracker.copy_state.set(index, CopyState::Copied);
        tracker.mark_dirty(tracker.chunk_extent(index));
    }
    tracker.copy_state.set_range(200_000..200_010, CopyState::Copied);
    assert_eq!(tracker.take_uncompared(true, 256), Uncompared::NothingYet);
    assert!(tracker.compare_from < CHUNKS_AT_ONCE, "{} chunks under one lock", tracker.compare_from);
    let found =
        std::iter::repeat_with(|| tracker.take_uncompared(true, 256)).find(|next| *next != Uncompared::NothingYet);
    assert_eq!(found, Some(Uncompared::Run(200_000..200_010, false)));
}

#[tokio::test(start_paused = true)]
async fn holes_are_those_of_the_side_that_is_read() {
    let (source, target) = (device("source"), device("target"));
    let tracker = Tracker::new(SIZE, ChunkSize::default(), target.clone(), true);
    let options = MoveOptions::default();
    let control = Control::new(Progress::default(), &options);
    let chunk = ChunkSize::default();
    let mirror = Mirror::new(PausedEnv::shared(1), source, tracker, chunk, None, &options, control);
    let hole = Extent::new(Bytes::kib(128), Bytes::kib(64));
    target.write(Mutation::data(hole.offset, Data::copy_of(&[7; 65_536]))).await.expect("memory takes it");
    let is_hole =
        async || mirror.extents(hole).await.expect("memory answers").iter().all(|piece| piece.state.reads_zero());
    assert!(is_hole().await, "the source has nothing there");
    mirror.shared.set_mode(Mode::TargetHolds);
    assert!(!is_hole().await, "reads go to the target, which has data there");
}

/// Writes down what it is told.
#[derive(Default)]
struct Heard(parking_lot::Mutex<Vec<(bool, GuestRequest)>>);

impl GuestListener for Heard {
    fn begins(&self, request: GuestRequest) {
        self.0.lock().push((true, request));
    }
    fn ended(&self, request: GuestRequest) {
        self.0.lock().push((false, request));
    }
}

#[tokio::test(start_paused = true)]
async fn a_schedule_that_listens_is_told_when_guest_requests_begin_and_end() {
    let tracker = Tracker::new(SIZE, ChunkSize::default(), device("target"), true);
    let (options, chunk) = (MoveOptions::default(), ChunkSize::default());
    let control = Control::new(Progress::default(), &options);
    let heard = Arc::new(Heard::default());
    let mirror = Mirror::new(PausedEnv::shared(1), device("source"), tracker, chunk, None, &options, control)
        .heard_by(Some(Arc::clone(&heard) as Arc<dyn GuestListener>));
    let extent = Extent::new(Bytes::kib(64), Bytes::kib(4));
    let buffer = || Buffer::unpooled(extent.length.as_usize());
    mirror.read(extent.offset, buffer()).await.expect("memory answers");
    mirror.write(Mutation::zeroes(extent, true)).await.expect("memory answers");
    drop(mirror.read(extent.offset, buffer()));
    let told = |is_write| [(true, GuestRequest { extent, is_write }), (false, GuestRequest { extent, is_write })];
    assert_eq!(*heard.0.lock(), [told(false), told(true), told(false)].concat(), "and one was given up");
    JobEntry(mirror.clone()).read(extent.offset, buffer()).await.expect("memory answers");
    assert_eq!(heard.0.lock().len(), 6, "the job is not the guest");
}

#[test]
fn what_was_skipped_is_an_ordinary_chunk_once_it_is_written_or_lost_and_the_record_follows() {
    let mut tracker = copied();
    tracker.record_skips();
    tracker.note_skipped(0..6, SkipReason::Zero);
    while tracker.take_stale_page(0).is_some() {}
    let extent = Extent::new(Bytes::kib(64), Bytes::kib(4));
    assert_eq!(tracker.skipped_in(extent), [extent]);
    let plan = tracker.plan_write(extent, false);
    assert!(plan.mirror.is_some() && tracker.skipped_in(extent).is_empty(), "it is mirrored like any other");
    assert_eq!(tracker.take_stale_page(0), Some(0), "the record says that it is skipped");
    tracker.finish_write(&plan, false);
    assert_eq!((tracker.bytes_skipped()["zero"], tracker.counts.unskipped), (5 << 16, 1 << 16));
    assert!(tracker.forget_copied(2), "it was in step");
    assert_eq!((tracker.bytes_skipped()["zero"], tracker.copy_state.get(2)), (4 << 16, CopyState::Absent));
    let _ = tracker.drop_session();
    tracker.begin_session(device("another target"), true);
    assert!(tracker.bytes_skipped().is_empty(), "another target has nothing");
}

#[test]
fn of_a_skip_that_the_guest_has_disturbed_only_the_rest_counts_and_nothing_behind_it() {
    let mut tracker = copied();
    tracker.record_skips();
    assert!(tracker.forget_copied(0), "it was in step");
    tracker.note_skipped(0..3, SkipReason::Zero);
    let chunks = |from: u64, to: u64| Extent::between(Bytes::kib(from * 64), Bytes::kib(to * 64));
    assert_eq!(tracker.skipped_in(chunks(0, 8)), [chunks(1, 2), chunks(2, 3)]);
}
