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
//! copy, as far as the pass has come. The copier goes on there, and goes back to the start when a schedule finds nothing.
//!
//! A schedule that follows the guest has a [`GuestListener`]. It is told when each guest request at the mirror begins
//! and ends, reads included. Without one, a request costs one look at a field. Of a move by snapshots the mirror sees
//! only what reaches the base.
//!
//! A copy whose data is in hand already has no place here: its first user brings it.

pub(crate) mod ascending;
pub(crate) mod hot_last;

use std::ops::Range;
use std::sync::Arc;

use block::Extent;

use crate::MoveOptions;
use ascending::Ascending;
use hot_last::HotLast;

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
}

/// What is copied next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// These chunks.
    Copy(Range<u64>),
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

/// The order in which a move with `options` copies.
pub(crate) fn of(options: &MoveOptions) -> Box<dyn Schedule> {
    match options.hot_blocks || options.strategy.chooses_by_chunk() {
        true => Box::new(HotLast::new(Ascending)),
        false => Box::new(Ascending),
    }
}
