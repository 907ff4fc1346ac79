//! What every chunk is, and what follows from it: plain decisions without waiting, made under one short lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use block::{Bytes, ChunkIndex, ChunkMap, ChunkSize, Device, Extent, Offload};
use env::Moment;
use filters::ReadCache;

use super::error_budget::ErrorBudget;
pub(crate) use super::plan::{Activity, Counts, WritePlan};
pub(crate) use super::session::Session;
pub(crate) use super::states::{CopyState, Durability, Mode};
use super::target_stall::TargetStall;
use super::verify_state::VerifyState;
use super::write_queue::{Buffered, Queue};
use crate::progress_map::{ProgressMap, active_of};
use crate::reduce::skip_map::SkipMap;
use crate::strategy::auto::Auto;
use crate::strategy::mirror_paper::offsets::Offsets;
use crate::strategy::tracking::dirty_bitmap::DirtyBitmap;
use crate::strategy::tracking::hot_blocks::HotChunks;

/// How many redos a chunk may have before the guest's write waits for the copy.
const REDOS_MAX: u8 = 2;
/// Write generations are kept for so many groups of chunks.
const GENERATIONS: u64 = 1024;

/// The state of a mirror.
pub(crate) struct Tracker {
    size: Bytes,
    pub(in crate::strategy) chunk: ChunkSize,
    pub(in crate::strategy) copy_state: ChunkMap<CopyState>,
    pub(super) durability: ChunkMap<Durability>,
    pub(in crate::strategy) verify_state: ChunkMap<VerifyState>,
    /// What the guest has written since it was copied, where that is tracked and not mirrored.
    pub(in crate::strategy) dirty_bitmap: Option<DirtyBitmap>,
    /// How often chunks are written, where hot ones are put off.
    pub(in crate::strategy) hot: Option<HotChunks>,
    /// What the target gets later, if it does not get it at once.
    pub(in crate::strategy) queue: Option<Queue>,
    /// What is left to the source although it was copied, where that is chosen chunk by chunk.
    pub(in crate::strategy) auto: Option<Auto>,
    /// How far the copy is, where that is all that is known of it.
    pub(in crate::strategy) offsets: Option<Offsets>,
    /// What was not sent, and why, where that is recorded.
    pub(super) skip_map: Option<SkipMap>,
    /// Something has happened to chunks that were, or are, to be compared since the comparison last began.
    pub(super) has_suspects: bool,
    /// From which chunk on a comparison of a volume that is tracked goes on.
    pub(in crate::strategy) compare_from: u64,
    session: Option<Session>,
    sessions: u64,
    /// Bytes that the last session's target had been written and that are to be copied again.
    lost: u64,
    /// Copies to the session's target below us.
    offload: Option<Arc<dyn Offload>>,
    /// Is told what the target has.
    pub(super) read_cache: Option<ReadCache>,
    /// With the session's target.
    error_budget: ErrorBudget,
    /// The session's target's.
    pub(super) target_stall: TargetStall,
    /// How many flushes of the guest's the session's target was not waited for, or not asked for.
    pub(crate) flushes_detached: u64,
    /// How many of them a flush that has succeeded since covers.
    pub(super) flushes_covered: u64,
    mode: Mode,
    /// Chunks in `writing` that the guest has written to.
    pub(in crate::strategy) redo: BTreeSet<u64>,
    /// How often a chunk has been redone and is still not had.
    redone: BTreeMap<u64, u8>,
    generations: Vec<u32>,
    /// `None` without a progress map.
    pub(in crate::strategy) activity: Option<BTreeMap<u64, Activity>>,
    /// Pages of the progress map's copied bits that are not up to date.
    pub(super) stale_pages: BTreeSet<u64>,
    /// For how many chunks a page of them stands.
    pub(super) page_chunks: u64,
    pub(crate) counts: Counts,
}

impl Tracker {
    /// Of a volume of `size` that is copied to `target`, without a progress map.
    pub(crate) fn new(size: Bytes, chunk: ChunkSize, target: Device, is_fresh: bool) -> Self {
        let chunks = chunk.count(size);
        Self {
            size,
            chunk,
            copy_state: ChunkMap::new(chunks, CopyState::Absent),
            durability: ChunkMap::new(chunks, Durability::Clean),
            verify_state: ChunkMap::new(chunks, VerifyState::Unverified),
            dirty_bitmap: None,
            hot: None,
            queue: None,
            auto: None,
            offsets: None,
            skip_map: None,
            has_suspects: false,
            compare_from: 0,
            session: Some(Session::new(1, target, is_fresh)),
            sessions: 1,
            lost: 0,
            offload: None,
            read_cache: None,
            error_budget: ErrorBudget::default(),
            target_stall: TargetStall::default(),
            flushes_detached: 0,
            flushes_covered: 0,
            mode: Mode::SourceHolds,
            redo: BTreeSet::new(),
            redone: BTreeMap::new(),
            generations: vec![0; GENERATIONS as usize],
            activity: None,
            stale_pages: BTreeSet::new(),
            page_chunks: ProgressMap::PAGE_CHUNKS,
            counts: Counts::default(),
        }
    }

    /// Keeps a progress map up to date, of whose pages each stands for so many chunks.
    pub(crate) fn keep_progress(&mut self, page_chunks: u64) {
        self.activity = Some(BTreeMap::new());
        self.page_chunks = page_chunks;
    }

    pub(crate) const fn mode(&self) -> Mode {
        self.mode
    }

    pub(crate) const fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    pub(crate) const fn session(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    pub(crate) fn is_current(&self, session: u64) -> bool {
        self.session.as_ref().is_some_and(|current| current.number == session)
    }

    /// What copies to the target below us from now on.
    pub(crate) fn set_offload(&mut self, offload: Option<Arc<dyn Offload>>) {
        self.offload = offload;
    }

    pub(crate) fn offload(&self) -> Option<Arc<dyn Offload>> {
        self.offload.clone()
    }

    /// Chunks that an earlier session of the job has copied and flushed.
    pub(in crate::strategy) fn adopt(&mut self, runs: &[Range<u64>]) {
        if let Some(session) = &mut self.session {
            session.trusts_zeroes = false;
        }
        if self.offsets.is_some() {
            return self.adopt_to_offset(runs);
        }
        for run in runs {
            self.copy_state.set_range(run.clone(), CopyState::Copied);
            self.note_sent(run.clone());
        }
    }

    /// Goes on with `target`, which has what was copied before unless it is `empty`.
    pub(crate) fn begin_session(&mut self, target: Device, empty: bool) {
        // Whoever calls has done most of it, and of what follows, a part at a time.
        let mut from = Some(0);
        while let Some(at) = from {
            from = self.forget_unflushed(at);
        }
        if empty {
            // A copy that still runs ends with its session and makes its chunks absent itself.
            self.copy_state.replace(CopyState::Copied, CopyState::Absent);
            self.go_back_to_start();
            self.mark_stale(0..self.chunks());
            self.note_unsent(0..self.chunks());
            // What was proved was proved of the target before.
            self.verify_state.replace(VerifyState::Equal, VerifyState::Wanted);
            if let Some(dirty_bitmap) = &mut self.dirty_bitmap {
                dirty_bitmap.clear();
            }
            self.forget_skips();
        }
        self.compare_from = 0;
        self.sessions += 1;
        self.counts.again += std::mem::take(&mut self.lost);
        (self.error_budget, self.target_stall) = (ErrorBudget::default(), TargetStall::default());
        self.flushes_covered = self.flushes_detached;
        self.session = Some(Session::new(self.sessions, target, empty));
    }

    /// Whether the mirror is kept although the target of `session` has failed a request. It is kept if it still is the
    /// target, the source alone answers the guest, and there were not too many failures. What the request was about
    /// must be copied again.
    pub(crate) fn bears_failure(&mut self, session: u64, now: Moment) -> bool {
        let is_the_sources = matches!(self.mode, Mode::SourceHolds | Mode::FlushBoth);
        is_the_sources && self.is_current(session) && self.error_budget.bears_failure(now)
    }

    /// The target is gone. What was not flushed there is to be [lost](Self::forget_unflushed) before another session begins.
    /// Gives what was buffered.
    #[must_use = "it is freed outside the tracker's lock"]
    pub(crate) fn drop_session(&mut self) -> VecDeque<Buffered> {
        if let Some(session) = self.session.take() {
            session.end();
        }
        self.drop_buffered()
    }

    /// The target gets these chunks again, although the guest has not asked for that, or will when there is one again.
    pub(super) fn count_again(&mut self, run: Range<u64>) {
        let bytes = self.run_extent(&run).length.0;
        *(if self.session.is_some() { &mut self.counts.again } else { &mut self.lost }) += bytes;
    }

    /// A chunk that was copied must be copied again.
    pub(in crate::strategy) fn lose(&mut self, index: u64) {
        self.unskip(index);
        if self.go_back(index) {
            return;
        }
        self.copy_state.set(index, CopyState::Absent);
        self.mark_stale(index..index + 1);
        self.note_unsent(index..index + 1);
    }

    /// The next run of chunks at or after `from`, at most `chunks_max` long, that the target is thought to have.
    pub(crate) fn next_copied(&self, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        self.copy_state.next_run(CopyState::Copied, from, chunks_max)
    }

    /// The target, which was away, has not got this after all. Gives whether that is new: what the guest has changed is copied
    /// again anyhow.
    pub(crate) fn forget_copied(&mut self, index: u64) -> bool {
        let is_new = self.is_in_step(index);
        if is_new {
            self.mark_suspect(index..index + 1);
            self.count_again(index..index + 1);
            self.lose(index);
        }
        is_new
    }

    /// Decides what becomes of a guest write, all of which is left to the source with `defers` where that can be. The caller
    /// holds the extent's lock until [`finish_write`].
    ///
    /// [`finish_write`]: Self::finish_write
    pub(crate) fn plan_write(&mut self, extent: Extent, defers: bool) -> WritePlan {
        if let Some(tracked) = self.plan_tracked(extent) {
            return tracked;
        }
        let mut plan = WritePlan { tracked: false, ..WritePlan::of_source(extent) };
        if self.mode == Mode::Detached {
            return plan;
        }
        self.count_write(extent);
        let (parts, active) = match self.offsets {
            Some(_) => self.mirrored_by_offset(extent),
            None => self.mirrored_by_state(extent, self.may_leave() && (defers || self.target_stall.since().is_some())),
        };
        if active {
            self.activate(&mut plan);
        }
        if let (false, Some(session)) = (parts.is_empty(), &self.session) {
            self.counts.mirrored += parts.iter().map(|part| part.length.0).sum::<u64>();
            plan.mirror = Some((session.clone(), parts));
            plan.force_target = self.mode.flushes_both();
        }
        plan
    }

    /// Which parts of a write are to be mirrored, and whether the activity log must have it first.
    fn mirrored_by_state(&mut self, extent: Extent, defers: bool) -> (Vec<Extent>, bool) {
        let mut parts: Vec<Extent> = Vec::new();
        let mut lost = false;
        for index in self.chunk.indices_of(extent) {
            match self.copy_state.get(index) {
                CopyState::Absent | CopyState::Reading => {}
                CopyState::Writing => _ = self.redo.insert(index),
                CopyState::Copied if self.session.is_none() || defers || self.defers(index) => {
                    self.lose(index);
                    lost = true;
                }
                CopyState::Copied => {
                    self.touch_target(index);
                    let part = self.chunk_extent(index).intersection(extent).expect("the write touches the chunk");
                    match parts.last_mut() {
                        Some(last) if last.end() == part.offset => last.length += part.length,
                        _ => parts.push(part),
                    }
                }
            }
        }
        let active = lost || !parts.is_empty();
        (parts, active)
    }

    /// Whether what the target has may be left to the source: its chunks are absent then.
    const fn may_leave(&self) -> bool {
        let is_able = self.offsets.is_none() && self.queue.is_none();
        is_able && matches!(self.mode, Mode::SourceHolds | Mode::FlushBoth)
    }

    /// The activity log has these extents now.
    pub(crate) fn activated(&mut self, numbers: &[u64]) {
        let Some(activity) = &mut self.activity else { return };
        for number in numbers {
            if let Some(entry) = activity.get_mut(number) {
                entry.on_record = true;
            }
        }
    }

    /// A guest write is over. If one side failed it, they may differ.
    pub(crate) fn finish_write(&mut self, plan: &WritePlan, may_differ: bool) {
        if let (true, Some(activity)) = (plan.active, &mut self.activity) {
            for number in active_of(plan.extent) {
                activity.get_mut(&number).expect("counted in by the plan").in_flight -= 1;
            }
        }
        if self.tracks() {
            self.mark_dirty(plan.extent);
        } else if plan.tracked {
            self.end_tracked(plan.extent);
        } else if plan.buffered && may_differ {
            self.differ(plan.extent);
        }
        let Some((session, parts)) = &plan.mirror else { return };
        // If the target that has answered is lost, so may be what no flush has covered. A flush that ended while the
        // source was still under way has left the chunks clean.
        let may_differ = may_differ || !self.is_current(session.number);
        for part in parts {
            for index in self.chunk.indices_of(*part) {
                // Said again at the end: a flush that began meanwhile does not cover this write.
                self.touch_target(index);
                if may_differ {
                    self.mark_suspect(index..index + 1);
                    // Where the target may hold the volume, writes must go on to reach it. When a doubt is settled for the
                    // source, the mirror is dropped and with it everything that was written since the last flush.
                    let may_be_lost = matches!(self.mode, Mode::SourceHolds | Mode::FlushBoth);
                    if may_be_lost && self.copy_state.get(index) == CopyState::Copied {
                        self.count_again(index..index + 1);
                        self.lose(index);
                    }
                }
            }
        }
    }

    /// The target was or will be written at this chunk.
    pub(in crate::strategy) fn touch_target(&mut self, index: u64) {
        self.bump_generation(index);
        let next = match self.durability.get(index) {
            Durability::Clean => Durability::Unflushed,
            Durability::Flushing => Durability::FlushingAndUnflushed,
            Durability::Unflushed | Durability::FlushingAndUnflushed => return,
        };
        self.durability.set(index, next);
    }

    pub(in crate::strategy) fn bump_generation(&mut self, index: u64) {
        self.unskip(index);
        let generation = &mut self.generations[(index % GENERATIONS) as usize];
        *generation = generation.wrapping_add(1);
    }

    /// A number that changes when a mirrored write to one of the chunks begins or ends.
    pub(crate) fn generation(&self, chunks: Range<u64>) -> u64 {
        chunks.take(GENERATIONS as usize).map(|index| u64::from(self.generations[(index % GENERATIONS) as usize])).sum()
    }

    /// The next run of absent chunks at or after `from`, of at most `chunks_max`. A chunk that has been redone too often
    /// comes alone.
    pub(crate) fn next_absent(&self, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        if self.is_window_open() {
            return None;
        }
        let from = self.window_start().unwrap_or(from);
        let run = self.copy_state.next_run(CopyState::Absent, from, chunks_max)?;
        match self.redone.range(run.clone()).find(|(_, redos)| **redos >= REDOS_MAX) {
            Some((index, _)) if *index == run.start => Some(run.start..run.start + 1),
            Some((index, _)) => Some(run.start..*index),
            None => Some(run),
        }
    }

    /// Whether the copy of this run keeps the lock while it writes. A copy that is not the last one need not.
    pub(crate) fn holds_guest(&self, run: Range<u64>) -> bool {
        self.offsets.is_some() || !self.auto_passes() && self.redone.range(run).any(|(_, redos)| *redos >= REDOS_MAX)
    }

    /// Takes absent chunks for a copy. Not if the copy is by offsets and has gone back since they were chosen.
    #[must_use]
    pub(crate) fn claim(&mut self, run: Range<u64>) -> bool {
        if !self.open_window(&run) {
            return false;
        }
        if let Some(dirty_bitmap) = &mut self.dirty_bitmap {
            dirty_bitmap.claim(run.clone());
        }
        if let Some(auto) = &mut self.auto {
            auto.pass.copy(run.end - run.start);
        }
        self.copy_state.set_range(run, CopyState::Reading);
        true
    }

    /// Gives up again claimed chunks of which the target may have got something. What it got may be lost by a flush that
    /// fails, also if it reads as if nothing had to be written there.
    pub(crate) fn abort_written_copy(&mut self, run: Range<u64>) {
        if !run.is_empty() {
            self.count_again(run.clone());
        }
        run.clone().for_each(|index| self.touch_target(index));
        self.abort_copy(run, true);
    }

    /// Gives claimed chunks up again.
    pub(crate) fn abort_copy(&mut self, run: Range<u64>, suspect: bool) {
        self.redo.retain(|index| !run.contains(index));
        if suspect {
            self.mark_suspect(run.clone());
        }
        self.abandon_window();
        self.note_unsent(run.clone());
        self.copy_state.set_range(run, CopyState::Absent);
    }

    /// The copy has read its chunks and begins to write them.
    pub(crate) fn begin_writing(&mut self, run: Range<u64>) {
        self.copy_state.set_range(run, CopyState::Writing);
    }

    /// The copy has written its chunks to the target of `session`. Gives how many bytes are copied now for the first time
    /// or again.
    pub(crate) fn end_copy(&mut self, run: Range<u64>, session: u64) {
        if !self.is_current(session) || !self.close_window(&run) {
            return self.abort_written_copy(run);
        }
        self.want_again(run.clone());
        self.mark_stale(run.clone());
        for index in run.clone() {
            self.touch_target(index);
            if self.redo.remove(&index) {
                self.counts.redos += 1;
                *self.redone.entry(index).or_default() += 1;
                self.verify_state.set(index, VerifyState::Wanted);
                self.copy_state.set(index, CopyState::Absent);
            } else {
                self.redone.remove(&index);
                self.copy_state.set(index, CopyState::Copied);
            }
        }
        self.note_sent(run);
    }

    /// Chunks that were already equal without a write to the target: both sides read as zeroes.
    pub(crate) fn end_skip(&mut self, run: Range<u64>, session: u64) {
        if !self.is_current(session) || !self.close_window(&run) {
            return self.abort_copy(run, false);
        }
        self.want_again(run.clone());
        self.redone.clear_range(run.clone());
        self.mark_stale(run.clone());
        self.copy_state.set_range(run.clone(), CopyState::Copied);
        self.note_sent(run);
    }

    /// How many bytes are in step on both sides. The last chunk counts as a whole one.
    pub(crate) fn bytes_in_step(&self) -> Bytes {
        let dirty = self.dirty_bitmap.as_ref().map_or(0, |dirty_bitmap| dirty_bitmap.dirty().0);
        Bytes(self.copy_state.count(CopyState::Copied).saturating_sub(dirty) * self.chunk.bytes()).min(self.size)
    }

    /// Whether every chunk is on both sides.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_pass_over() && self.dirty_bitmap.as_ref().is_none_or(DirtyBitmap::is_clean)
    }

    /// Whether the target has been written since the last flush that succeeded began.
    pub(crate) fn has_unflushed(&self) -> bool {
        self.durability.count(Durability::Clean) != self.durability.len()
    }

    /// Whether all of these chunks are on both sides.
    pub(crate) fn all_copied(&self, run: Range<u64>) -> bool {
        let length = run.end - run.start;
        self.session.is_some() && self.copy_state.next_run(CopyState::Copied, run.start, length) == Some(run)
    }

    pub(crate) fn chunk_extent(&self, index: u64) -> Extent {
        self.chunk.extent_of(ChunkIndex(index), self.size)
    }

    pub(crate) fn run_extent(&self, run: &Range<u64>) -> Extent {
        Extent::between(self.chunk_extent(run.start).offset, self.chunk_extent(run.end - 1).end())
    }

    pub(crate) const fn size(&self) -> Bytes {
        self.size
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.copy_state.len()
    }
}

/// Removing a range of keys.
trait ClearRange {
    fn clear_range(&mut self, range: Range<u64>);
}

impl<V> ClearRange for BTreeMap<u64, V> {
    fn clear_range(&mut self, range: Range<u64>) {
        while let Some(key) = self.range(range.clone()).next().map(|(key, _)| *key) {
            self.remove(&key);
        }
    }
}
