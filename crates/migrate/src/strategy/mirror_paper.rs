//! IO mirroring as the ESX paper has it (section 2.4): two offsets, one window between them, and a queue for what the
//! guest writes there. It is here to be compared with: [`mirror`](super::mirror) is what it was made into.
//!
//! ```text
//!   0              copied          copying                        size
//!   ├── mirrored ────┼── waits ───────┼── to the source only ───────┤
//!                    └─ the window: 16 copies of 64 KiB at a time ─▶
//! ```
//!
//! [`offsets`] decides, [`mover`] copies. Everything else is the mirror's: its filter, its sessions, its comparison, its
//! switchover. The queue of the window is the range lock's: the mover takes all of the window at once, which waits for the
//! writes there that are in flight ("as part of the updating operation"), and lets those that came meanwhile go on in their
//! order when all of it is on the target. So a write is held for as long as the whole window takes, and nothing is ever
//! copied twice for the guest's sake.
//!
//! What the paper does not say. It ends the migration when the target fails; here a chunk that is lost takes
//! everything behind it along, for two offsets have no other way to say it: the copy *goes back* and goes on from there.
//! So it is after a crash, a lost target and an error that the mirror would have borne with one chunk.

pub(crate) mod mover;
pub(crate) mod offsets;
