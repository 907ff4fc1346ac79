//! Dirty block tracking (VMware ESX, "The Design and Evolution of Live Storage Migration", section 2.3). The guest's
//! writes go to the source alone, and chunks that were copied before become dirty. Each pass copies what has become
//! dirty during the last one, until what is left can be copied while the guest is held.
//!
//! The guest never waits for a copy, and copies take no lock. What makes that sound is the order of things for a chunk:
//!
//! ```text
//!   guest    mark dirty ─▶ write the source ─────────────────────────▶ mark dirty ─▶ answer
//!   copy                        get and clear ─▶ read ─▶ write the target ─▶ copied
//! ```
//!
//! A copy reads after it has cleared the bit. A write that was marked before that and lands after the read is marked
//! once more before it is answered. So its chunk is copied again. Until then the copy may hold a mixture of old and
//! new, which nobody reads. Tracked writes share the range lock: a comparison that must be sure, and a mirror that
//! follows, wait for them.
//!
//! [`hot_blocks`] says which chunks are written so often that their copies are put off until the last pass but one.
//! [`dirty_bitmap`] is the bitmap, and [`track`] what follows from it for a chunk. [`converge`] decides between two
//! passes, and [`rates`] keeps what copies are known to take. In *incremental* tracking a write ahead of the copy is
//! not marked: it will be copied with the rest.

pub(crate) mod converge;
pub(crate) mod dirty_bitmap;
pub(crate) mod hot_blocks;
pub(crate) mod rates;
pub(crate) mod track;
