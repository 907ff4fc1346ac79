//! The ordered buffer of an asynchronous mirror: what of it the tracker decides, without waiting.
//!
//! A guest write to what has been copied goes to the source and is answered; its data waits here for the target. The
//! steps of such a write:
//!
//! ```text
//!   room ─▶ extent locked ─▶ source written ─▶ buffered ─▶ answered, lock released
//!                                                 └──────▶ taken, in order ─▶ written to the target ─▶ landed
//! ```
//!
//! A chunk with a write that has not landed is *pending*. It stays copied, because the target will have it. That is
//! sound for these reasons:
//!
//! - Writes are buffered in the order in which the source had them, because the extent is locked until they are. They
//!   are taken in that order, and two that overlap are written one after the other.
//! - A chunk whose copy is being written takes buffered writes already: they land after the copy. A chunk that is absent,
//!   or that a copy is reading, takes none: the copy will have read them.
//! - A copy of a chunk begins only when nothing of it is pending, so an older write never lands on a newer copy.
//! - A pending write keeps its extent of the activity log, so after a crash its chunks are copied again. The log is
//!   written before the source is.
//! - When the target is lost, the buffer is dropped, and its chunks are absent.

use std::collections::{BTreeMap, VecDeque};

use block::{Data, Extent, Mutation, MutationKind};

use super::tracker::{CopyState, Mode, Session, Tracker, WritePlan};
use crate::progress_map::active_of;

/// A write on its way to the target.
pub(crate) struct Buffered {
    /// With whose target it was buffered.
    pub(crate) session: Session,
    /// To one run of chunks, never forced.
    pub(crate) mutation: Mutation,
    /// Its room: the memory of its data, or a page for a write that has none.
    _room: Data,
}

/// What waits for the target or is on its way there.
#[derive(Default)]
pub(in crate::strategy) struct Queue {
    /// What nobody has taken yet, the oldest first.
    waiting: VecDeque<Buffered>,
    /// How many writes to a chunk have not landed.
    pending: BTreeMap<u64, u32>,
    /// Writes are mirrored at once for now: the buffer drains.
    writes_through: bool,
    bytes: u64,
    bytes_max: u64,
}

/// What becomes of a guest write under an asynchronous mirror.
pub(crate) enum BufferPlan {
    /// It is not for the buffer.
    Through,
    /// It needs room that it does not have.
    NeedsBuffer,
    /// The source is written; then what is said of its chunks is asked of [`Tracker::buffer`].
    Buffer(WritePlan),
}

impl Tracker {
    /// Buffers guest writes to what was copied from now on.
    pub(crate) fn mirror_asynchronously(&mut self) {
        self.queue = Some(Queue::default());
    }

    /// Whether guest writes may be answered before the target has them.
    pub(crate) fn is_buffering(&self) -> bool {
        let is_on = self.queue.as_ref().is_some_and(|queue| !queue.writes_through);
        is_on && self.mode() == Mode::SourceHolds && self.session().is_some()
    }

    /// Mirrors guest writes at once from now on, or buffers them again.
    pub(crate) fn write_through(&mut self, through: bool) {
        if let Some(queue) = &mut self.queue {
            queue.writes_through = through;
        }
    }

    /// Whether a write there will need room. It may still turn out otherwise.
    pub(crate) fn needs_buffer(&self, extent: Extent) -> bool {
        self.is_buffering()
            && self.chunk.indices_of(extent).any(|index| self.copy_state.get(index) != CopyState::Absent)
    }

    /// Decides what becomes of a guest write. The caller has the extent alone until the write has ended.
    pub(crate) fn plan_buffered(&mut self, extent: Extent, has_room: bool) -> BufferPlan {
        if !self.is_buffering() {
            return BufferPlan::Through;
        }
        let mut plan = WritePlan { tracked: false, ..WritePlan::of_source(extent) };
        plan.buffered = self.chunk.indices_of(extent).any(|index| self.takes_buffered(index));
        if plan.buffered {
            if !has_room {
                return BufferPlan::NeedsBuffer;
            }
            // Said before the write, as for a mirror's: losing the target meanwhile loses the chunk.
            for index in self.chunk.indices_of(extent) {
                if self.takes_buffered(index) {
                    self.touch_target(index);
                }
            }
            self.activate(&mut plan);
        }
        BufferPlan::Buffer(plan)
    }

    /// The source has `mutation`; the target gets what it changes of chunks that were copied. Gives whether the guest
    /// may be answered before that has landed.
    pub(crate) fn buffer(&mut self, mutation: &Mutation, write_buffer: &Data) -> bool {
        let extent = mutation.extent();
        let Some(session) = self.session().cloned() else {
            // Lost meanwhile, and with it what was flushed there since the plan.
            self.differ(extent);
            return true;
        };
        let mut parts: Vec<Extent> = Vec::new();
        for index in self.chunk.indices_of(extent) {
            if !self.takes_buffered(index) {
                continue;
            }
            self.touch_target(index);
            let part = self.chunk_extent(index).intersection(extent).expect("the write touches the chunk");
            match parts.last_mut() {
                Some(last) if last.end() == part.offset => last.length += part.length,
                _ => parts.push(part),
            }
        }
        for part in parts {
            let mutation = if part == extent { mutation.clone() } else { mutation.slice(part) }.with_fua(false);
            self.count_pending(&mutation, true);
            self.counts.mirrored += part.length.0;
            let entry = Buffered { session: session.clone(), mutation, _room: write_buffer.clone() };
            self.queue.as_mut().expect("it is asynchronous").waiting.push_back(entry);
        }
        self.is_buffering()
    }

    /// The oldest write that nobody has taken.
    pub(crate) fn take_buffered(&mut self) -> Option<Buffered> {
        self.queue.as_mut()?.waiting.pop_front()
    }

    /// A buffered write is on the target, or not: then its chunks may differ.
    pub(crate) fn end_buffered(&mut self, entry: &Buffered, may_differ: bool) {
        let extent = entry.mutation.extent();
        self.count_pending(&entry.mutation, false);
        // Said again: a flush that began meanwhile does not cover this write.
        self.chunk.indices_of(extent).for_each(|index| self.touch_target(index));
        if may_differ || !self.is_current(entry.session.number) {
            self.differ(extent);
        }
    }

    /// Forgets what waits, because its target is lost. Gives it, so that its memory is freed without the tracker's lock.
    pub(super) fn drop_buffered(&mut self) -> VecDeque<Buffered> {
        let waiting = self.queue.as_mut().map(|queue| std::mem::take(&mut queue.waiting)).unwrap_or_default();
        for entry in &waiting {
            self.count_pending(&entry.mutation, false);
            self.differ(entry.mutation.extent());
        }
        waiting
    }

    /// Whether a write to a chunk of `extent` has not landed yet.
    pub(crate) fn is_pending(&self, extent: Extent) -> bool {
        let chunks = self.chunk.indices_of(extent);
        self.queue.as_ref().is_some_and(|queue| queue.pending.range(chunks).next().is_some())
    }

    /// Whether everything that was buffered has landed.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.as_ref().is_none_or(|queue| queue.pending.is_empty())
    }

    /// What is buffered, and the most that ever was, in bytes of data.
    pub(crate) fn bytes_buffered(&self) -> (u64, u64) {
        self.queue.as_ref().map_or((0, 0), |queue| (queue.bytes, queue.bytes_max))
    }

    /// The two sides may differ in the chunks of `extent`, which the guest has written.
    pub(in crate::strategy) fn differ(&mut self, extent: Extent) {
        let may_be_lost = matches!(self.mode(), Mode::SourceHolds | Mode::FlushBoth);
        for index in self.chunk.indices_of(extent) {
            match self.copy_state.get(index) {
                CopyState::Absent => {}
                CopyState::Reading | CopyState::Writing => _ = self.redo.insert(index),
                CopyState::Copied => {
                    self.mark_suspect(index..index + 1);
                    if may_be_lost {
                        self.lose(index);
                    }
                }
            }
        }
    }

    /// Whether a write to the chunk goes to the buffer.
    fn takes_buffered(&self, index: u64) -> bool {
        matches!(self.copy_state.get(index), CopyState::Writing | CopyState::Copied)
    }

    fn count_pending(&mut self, mutation: &Mutation, begins: bool) {
        let extent = mutation.extent();
        if let Some(activity) = &mut self.activity {
            for number in active_of(extent) {
                let in_flight = &mut activity.entry(number).or_default().in_flight;
                *in_flight = if begins { *in_flight + 1 } else { *in_flight - 1 };
            }
        }
        let Some(queue) = &mut self.queue else { return };
        let length = if matches!(mutation.kind(), MutationKind::Data(_)) { extent.length.0 } else { 0 };
        queue.bytes = if begins { queue.bytes + length } else { queue.bytes - length };
        queue.bytes_max = queue.bytes_max.max(queue.bytes);
        for index in self.chunk.indices_of(extent) {
            let count = queue.pending.entry(index).or_default();
            *count = if begins { *count + 1 } else { *count - 1 };
            if *count == 0 {
                queue.pending.remove(&index);
            }
        }
    }
}
