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
//! switchover. The queue of the window is the range lock's. The mover locks all of the window at once, which waits for
//! the writes there that are in flight ("as part of the updating operation"). When all of the window is on the target,
//! the mover lets the writes that came meanwhile go on in their order. So a write is held for as long as the whole
//! window takes, and nothing is ever copied twice because of the guest.
//!
//! Some of this is not in the paper. The paper ends the migration when the target fails. Here a lost chunk means that
//! everything behind it is lost, because two offsets cannot say anything else. The copy *goes back* and goes on from
//! there. The same happens after a crash, after a lost target, and after an error that would cost the mirror one chunk.

pub(crate) mod mover;
pub(crate) mod offsets;
