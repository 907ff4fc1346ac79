//! How fast moves to other hosts may go, and at whose cost (PMigrate, section 3.2).
//!
//! ```text
//!   this host's kernel                        the other host's kernel
//!     counters of each interface                counters of each interface
//!        │                                         ▲
//!        ▼ every second                            │ every second, over the wire: Ask::Usage
//!   ┌─ keeper, one a move ─────────────────────────┴──┐
//!   │ agreement: others = counters - our streams      │──▶ a rate for each stream (Remote::set_rate)
//!   │ deadline:  needed = what is left / time left    │──▶ the copy's threads give way, or do not
//!   └─────────────────────────────────────────────────┘
//!        ▲ │
//!        │ ▼ what all moves of this host take of an interface
//!      shares
//! ```
//!
//! A move takes what others leave of an interface, on both hosts. It may always take its reserve, and what it needs for its
//! deadline. What a user allows at most (`--bandwidth`) is the migration's own matter and stays above all of this, and so does
//! the guest: the migration's governor slows the copy down when the guest feels it, whatever it may take here.
//!
//! | module | what it is |
//! |---|---|
//! | `interfaces` | which interface has an address, and what it has carried |
//! | `agreement` | from both hosts' counters to rates of streams; pure |
//! | `deadline` | what is needed, and whether it is at risk; pure |
//! | `keeper` | looks and acts once a second |

mod agreement;
mod deadline;
mod interfaces;
mod keeper;

pub(crate) use agreement::Shares;
pub(crate) use interfaces::KernelInterfaces;
pub(crate) use keeper::{Keeping, keep};
