//! A guest and a migration that want the same disk: the scenes of the dissertation's chapters 3 (WAIO) and 5 (IOFollow).
//!
//! ```text
//!   replayer ── the guest's way (a request's cost, write-through) ── meter ── slot ── [the move's mirror] ── [redirect]
//!                                                                                            │               │      │
//!                                    the move's reads ── counted ── copy face ───────────────┴───────────────┤   surrogate
//!                                                                                                         source
//!                       [the host's page cache lies over source and surrogate; neighbours use the source's disk]
//! ```
//!
//! [`scene`] plays one such move with the real engine and the real filter, [`load`] is what the guest does, [`devices`] what
//! disks and caches are. `docs/paper-waio.md` tells what of it is modelled, and what is assumed.

pub(crate) mod devices;
mod guest_path;
pub(crate) mod load;
pub(crate) mod recording;
pub(crate) mod scene;
