//! IO mirroring (VMware ESX, "The Design and Evolution of Live Storage Migration", section 2.4). It has a state for
//! every chunk and a range lock instead of two integers and one window. That allows many copies in flight, in any
//! order.
//!
//! [`tracker`] knows what every chunk is and decides; [`filter`] is the guest's path; [`copy`] and [`compare`] are what
//! the driver does with a run of chunks. The states of a chunk:
//!
//! ```text
//!            claim              under the range lock: read        written, no redo
//!  absent ─────────▶ reading ──────────────────────────▶ writing ─────────────────▶ copied
//!    ▲                                                      │                        │
//!    └────────────── redo: the guest wrote meanwhile ◀──────┘                        │
//!    └────────────── one side failed a write, or the target was lost before a flush ◀┘
//! ```
//!
//! A guest write to an absent chunk goes to the source: it will be copied later. While the copy reads, the write waits in
//! the range lock. While the copy writes, the guest's write goes to the source, marks the chunk for a redo and is
//! answered. If it were mirrored now, the slower copy could land after it. After two redos the copy keeps the lock and
//! the guest waits. A write to a chunk that is copied goes to both sides. If the target fails it and may do better the
//! next time, the source answers the guest and the chunk is absent again. [`error_budget`] limits how often that may
//! happen. [`target_stall`] says what becomes of a write to a target that answers nothing at all.
//!
//! An asynchronous mirror answers when the source has the write, and the target gets it later, in order: [`write_queue`] and
//! [`write_buffer`].

pub(crate) mod candidates;
pub(crate) mod compare;
pub(crate) mod copy;
pub(crate) mod device;
pub(crate) mod error_budget;
pub(crate) mod filter;
pub(crate) mod flushes;
pub(crate) mod in_memory;
pub(crate) mod map_pages;
pub(crate) mod pieces;
pub(crate) mod plan;
pub(crate) mod session;
pub(crate) mod skipped;
pub(crate) mod states;
pub(crate) mod target_stall;
pub(crate) mod target_work;
#[cfg(test)]
mod tests;
pub(crate) mod tracker;
pub(crate) mod verify_state;
pub(crate) mod write_buffer;
pub(crate) mod write_queue;

pub(crate) use filter::Mirror;
