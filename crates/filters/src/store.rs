//! The extent store: a record, on a device, of where each grain of a volume is, and how it becomes durable.
//!
//! ```text
//!   policy (the overlay, ...)  which requests go where, and what a state means
//!     │ set, look, flush
//!     ▼
//!   Record<E>      running map before an answer, durable map at flushes, the boot in which the running one holds
//!     ├ StateMap<E>   the states in memory          ├ Layout   their bytes
//!     ├ E: Entry      what is recorded of a grain   ├ Base     what shows through, flushed first
//!     ▼
//!   device                                          Placement: where the bytes of a grain are on it
//!                                                    PlaceAllocator: which are free, if they are allocated
//! ```
//!
//! A crash of the process leaves what was answered and a power loss what was flushed, whatever the states mean. A
//! policy says what a state is ([`Entry`]), and writes the bytes before it sets the state. The flushed durable map may
//! still point to some bytes. A policy never changes these into something that the volume never held.

use block::BLOCK_BYTES;

mod base;
mod entry;
mod layout;
mod map;
mod place;
mod record;

pub(crate) use base::{Base, geometry_of_both};
pub(crate) use entry::{BODY_BYTES, Body, Entry};
pub(crate) use layout::Layout;
pub(crate) use map::StateMap;
/// How much of a partition a store leaves to its owner, if there is room for it.
pub(crate) const OWNER_BYTES: u64 = 2 * BLOCK_BYTES;

pub(crate) use place::{PlaceAllocator, Placement};
pub(crate) use record::{BelowError, FlushError, Record, STEP_BYTES, may_have_lost};
