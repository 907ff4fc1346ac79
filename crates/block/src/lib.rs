//! The basic types of Transhume's data path.
//!
//! A [`BlockDevice`] has four verbs: it reads, mutates, flushes and describes extents. Every change by a guest is one
//! [`Mutation`], so no tracker or mirror can miss a kind of write. A [`Device`] is the checked handle through which one
//! layer calls the next. A [`Filter`] is a device over a device. A [`Slot`] is the one joint of a stack that can be
//! changed while requests run.
//!
//! This crate imports no other crate of the workspace, knows no file, no socket and no clock.

mod buffer;
mod chunk_map;
mod device;
mod error;
mod filter;
mod mem;
mod mutation;
mod offload;
mod range_lock;
#[cfg(test)]
mod range_lock_tests;
mod range_queue;
mod slot;
mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod unflushed;
mod units;

pub use buffer::{Buffer, BufferPool, Data, PAGE_BYTES};
pub use chunk_map::{ChunkMap, PackedState};
pub use device::{BlockDevice, Device, ExtentState, ExtentStatus, Geometry, IoFuture, ready};
pub use error::{Error, ErrorKind, Result};
pub use filter::Filter;
pub use mem::MemDevice;
pub use mutation::{Checks, Mutation, MutationKind};
pub use offload::Offload;
pub use range_lock::{RangeGuard, RangeLock, RangeWait};
pub use range_queue::{RangeMode, RangeQueue, Ticket};
pub use slot::{Quiesced, Slot, SlotLane};
pub use unflushed::Unflushed;
pub use units::{BLOCK_BYTES, Bytes, ChunkIndex, ChunkSize, Extent};
