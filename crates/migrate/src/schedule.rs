//! Which chunk is copied next.
//!
//! The copier pulls: it asks a [`Schedule`] for the next run of chunks whenever it has room for one more copy. It asks under
//! the tracker's lock, so what the schedule chooses is absent at that moment, and a schedule never waits.
//!
//! ```text
//!   copier ──next(candidates, from)──▶ HotLast ──next──▶ Ascending ──next_absent──▶ Candidates (the tracker)
//!      ▲                                  │ cuts off what is hot and puts it off
//!      └──────────── Choice ──────────────┘
//! ```
//!
//! Orders chain: one takes what another chooses and puts a part of it off ([`hot_last`]). `from` is the chunk behind the last
//! copy in the order of the volume, as far as the pass has come. The copier goes on there, and goes back to the start when a
//! schedule finds nothing. A [`Choice::Detour`] is out of that order: the pass goes on where it was.
//!
//! Two orders make detours, [`follow`] and [`cold_first`]. Both are followed by an ascending sweep over what they leave.
//!
//! A schedule that follows the guest has a [`GuestListener`]. It is told when each guest request at the mirror begins
//! and ends, reads included, or at the disk below a redirection or a cache if it follows the head ([`heard_disk`]). Without one, a request costs one look at a field. Of a move by snapshots the mirror sees
//! only what reaches the base, so such a move has no order but the volume's.
//!
//! Where a read cache is kept, copies whose data is in memory come before all others ([`in_memory`]).

mod ascending;
mod cold_first;
#[cfg(test)]
mod fake;
mod follow;
mod guest_turns;
mod head;
mod heard_disk;
mod hot_last;
mod in_memory;

use std::ops::Range;
use std::sync::Arc;

use block::{Bytes, Extent};
use tokio::sync::Notify;

use crate::{MoveOptions, ScheduleKind, ScheduleReport};
use ascending::Ascending;
use cold_first::ColdFirst;
use follow::Follow;
pub use head::{DiskPiece, HeadPosition, Medium};
pub(crate) use heard_disk::HeardDisk;
use hot_last::HotLast;
pub(crate) use in_memory::InMemoryFirst;

/// An order that makes detours looks past so many hot stretches before it leaves the choice to the sweep.
const HOT_STRETCHES_MAX: u32 = 64;

/// What a schedule chooses from.
pub(crate) trait Candidates {
    /// The first run of chunks at or after `from` that wait for a copy, of at most `chunks_max`. `None` if there is none, or no
    /// copy may begin now.
    fn next_absent(&self, from: u64, chunks_max: u64) -> Option<Range<u64>>;

    /// Whether the copies of some chunks are put off now.
    fn puts_off(&self) -> bool;

    /// Whether the copy of this chunk is one of them.
    fn is_hot(&self, index: u64) -> bool;

    /// The pass does without this chunk.
    fn put_off(&mut self, index: u64);

    /// Whether the pass under way passes each chunk once, and is over at the end of the volume.
    fn passes_once(&self) -> bool;

    /// The chunk that waits for a copy and is nearest to chunk `at`, in either direction; of two the later one. `None` if
    /// there is none, or no copy may begin now. It takes time logarithmic in the number of chunks.
    fn nearest_absent(&self, at: u64) -> Option<u64>;

    /// How many chunks the volume has.
    fn chunks(&self) -> u64;

    /// How many of them wait for a copy.
    fn absent(&self) -> u64;

    /// Whether copies may be begun in any order now. If not, a chunk that was copied out of order could be absent again in
    /// the same pass so often that the pass would not end.
    fn is_order_free(&self) -> bool;

    /// The first run of chunks that wait for a copy and whose bytes are in memory already, of at most `chunks_max`.
    fn in_memory(&self, chunks_max: u64) -> Option<Range<u64>>;
}

/// The first stretch of `run` without a hot chunk.
fn cool_part(candidates: &dyn Candidates, run: Range<u64>) -> Option<Range<u64>> {
    if !candidates.puts_off() {
        return Some(run);
    }
    let start = run.clone().find(|index| !candidates.is_hot(*index))?;
    let end = (start..run.end).find(|index| candidates.is_hot(*index)).unwrap_or(run.end);
    Some(start..end)
}

/// The first stretch at or after `window.start` and before its end that waits for a copy and is not hot, of at most
/// `chunks_max` chunks. It may reach past the end of the window.
fn cool_stretch(candidates: &dyn Candidates, window: &Range<u64>, chunks_max: u64) -> Option<Range<u64>> {
    let mut from = window.start;
    for _ in 0..HOT_STRETCHES_MAX {
        let run = candidates.next_absent(from, chunks_max).filter(|run| run.start < window.end)?;
        let end = run.end;
        if let Some(cool) = cool_part(candidates, run) {
            return Some(cool).filter(|cool| cool.start < window.end);
        }
        from = end;
    }
    None
}

/// What is copied next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// These chunks, in the order of the volume: the pass has come to their end.
    Copy(Range<u64>),
    /// These chunks, out of that order. If they hold data, the first `data_max` of them; all of them if they are a hole.
    Detour {
        /// Which.
        run: Range<u64>,
        /// At least one.
        data_max: u64,
    },
    /// Nothing up to this chunk, and there is more to look at; the lock was held for long enough.
    GoOnAt(u64),
    /// Nothing at or after the chunk that was asked for.
    Nothing,
}

/// An order of copying.
pub(crate) trait Schedule: Send + Sync {
    /// The next run to copy, at or after `from` if the order has no better one, of at most `chunks_max` chunks. Called with the
    /// tracker locked.
    fn next(&mut self, candidates: &mut dyn Candidates, from: u64, chunks_max: u64) -> Choice;

    /// What wants to hear of guest requests on this order's behalf; asked once, before the first of them.
    fn listener(&self) -> Option<Arc<dyn GuestListener>>;

    /// Whether only those requests count that reach the source's disk, and not those that a layer above it answers.
    fn hears_disk(&self) -> bool {
        false
    }

    /// A copy of `run`, chosen by the last [`next`](Self::next), begins. Nothing is read of a hole.
    fn began(&mut self, _run: &Range<u64>, _is_hole: bool) {}

    /// Whether the guest's requests come before the next copy. If so, whoever waits for copies is woken when that changes.
    fn lets_guest_first(&self) -> bool {
        false
    }

    /// The next copy begins although [`lets_guest_first`](Self::lets_guest_first): the guest's requests take too long.
    fn waited_for_long(&mut self) {}

    /// What it has done, for the report.
    fn report(&self) -> ScheduleReport {
        ScheduleReport::default()
    }
}

/// What an order is made for.
pub(crate) struct ScheduleContext<'a> {
    /// How the move was asked for.
    pub(crate) options: &'a MoveOptions,
    /// The size of the volume.
    pub(crate) size: Bytes,
    /// What the source is on.
    pub(crate) medium: Medium,
    /// Wakes the copier.
    pub(crate) wake: Arc<Notify>,
}

/// A guest's request, as a listener is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestRequest {
    /// Where.
    pub(crate) extent: Extent,
    /// Whether it changes anything.
    pub(crate) is_write: bool,
}

/// Hears of guest requests. It is called on the guest's path, and must neither wait nor take long.
pub(crate) trait GuestListener: Send + Sync {
    /// A request begins.
    fn begins(&self, request: GuestRequest);

    /// A request is over, answered or given up.
    fn ended(&self, request: GuestRequest);
}

/// A request that a listener was told of; it ends when this is dropped.
pub(crate) struct HeardRequest {
    listener: Arc<dyn GuestListener>,
    request: GuestRequest,
}

impl HeardRequest {
    /// Tells `listener` of a request that begins now.
    pub(crate) fn begin(listener: &Arc<dyn GuestListener>, request: GuestRequest) -> Self {
        listener.begins(request);
        Self { listener: Arc::clone(listener), request }
    }
}

impl Drop for HeardRequest {
    fn drop(&mut self) {
        self.listener.ended(self.request);
    }
}

/// The order in which a move copies. A medium without a head that moves is copied in the order of the volume instead of
/// following one.
pub(crate) fn of(context: ScheduleContext<'_>) -> Box<dyn Schedule> {
    let options = context.options;
    let in_order: Box<dyn Schedule> = match options.hot_blocks || options.strategy.chooses_by_chunk() {
        true => Box::new(HotLast::new(Ascending)),
        false => Box::new(Ascending),
    };
    match used(options, &context.medium) {
        ScheduleKind::Sequential => in_order,
        ScheduleKind::Follow => Box::new(Follow::new(context, in_order)),
        ScheduleKind::ColdFirst => Box::new(ColdFirst::new(context.size, options.chunk_bytes, in_order)),
    }
}

/// Which schedule a move with `options` has of a source on `medium`.
pub(crate) fn used(options: &MoveOptions, medium: &Medium) -> ScheduleKind {
    match options.schedule {
        ScheduleKind::Follow if medium.is_rotational == Some(false) => ScheduleKind::Sequential,
        asked => asked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_medium_known_to_have_no_head_switches_following_off() {
        let asked = MoveOptions { schedule: ScheduleKind::Follow, ..MoveOptions::default() };
        let on = |is_rotational| used(&asked, &Medium { is_rotational, ..Medium::default() });
        assert_eq!(on(Some(false)), ScheduleKind::Sequential);
        assert_eq!([on(None), on(Some(true))], [ScheduleKind::Follow; 2]);
        let cold = MoveOptions { schedule: ScheduleKind::ColdFirst, ..asked };
        assert_eq!(
            used(&cold, &Medium { is_rotational: Some(false), ..Medium::default() }),
            ScheduleKind::ColdFirst,
            "what it saves are bytes"
        );
    }
}
