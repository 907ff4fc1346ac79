//! Where one host's record of a machine stands, and what it may become.
//!
//! ```text
//!                 vm move                    the disks have a group
//!   rests ──────────────────────▶ goes, unbegun ─────────────▶ goes, in a group
//!     ▲ ▲                              │ undone                   │ undone, or moved
//!     │ └──────────────────────────────┴──────────────────────────╯
//!     │
//!     │ runs here                       QEMU is there
//!     ├───────────────────── loading ◀───────────────── coming ◀── the other host announces it
//!     │                       │    ╰── QEMU has ended ──▶ lost
//!     ╰───── following ◀──────╯ runs here before all of its memory has come
//! ```
//!
//! One that comes, or is lost, is forgotten: then there is no record. Who has the machine is not read from this: the record of the
//! group says so, and the journals of the disks.

use super::document::MachineDocument;
use crate::jobs::CommitRecord;

/// Where a record stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// Nothing is under way. It runs here, or has moved.
    Rests,
    /// It goes to another host, and nothing can have been committed.
    GoesUnbegun,
    /// It goes to another host, and the record of its group says whether that counts.
    Goes,
    /// It comes, and there is no QEMU for it yet.
    Coming,
    /// It comes, and has a QEMU that waits for it.
    Loading,
    /// It runs here, and some of its memory is at the other host.
    Following,
    /// It has come, and its QEMU has ended before its guest ran.
    Lost,
}

impl Stage {
    /// Where `document` stands.
    pub(super) fn of(document: &MachineDocument) -> Self {
        if document.incoming.is_some() {
            return if document.is_begun() { Self::Loading } else { Self::Coming };
        }
        match &document.outgoing {
            Some(outgoing) if outgoing.commit == CommitRecord::NotBegun => Self::GoesUnbegun,
            Some(_) => Self::Goes,
            None if document.following.is_some() => Self::Following,
            None if document.lost.is_some() => Self::Lost,
            None => Self::Rests,
        }
    }

    /// Whether a record that stands here may stand at `next` afterwards.
    pub(super) const fn may_become(self, next: Self) -> bool {
        match self {
            Self::Rests => matches!(next, Self::Rests | Self::GoesUnbegun),
            Self::GoesUnbegun => matches!(next, Self::GoesUnbegun | Self::Goes | Self::Rests),
            Self::Goes => matches!(next, Self::Goes | Self::Rests),
            Self::Coming => matches!(next, Self::Coming | Self::Loading),
            Self::Loading => matches!(next, Self::Loading | Self::Rests | Self::Following | Self::Lost),
            Self::Following => matches!(next, Self::Following | Self::Rests),
            Self::Lost => matches!(next, Self::Lost),
        }
    }

    /// Whether the record may be removed without a person's word: nothing here is the machine's alone.
    #[cfg(test)]
    const fn may_be_forgotten(self) -> bool {
        matches!(self, Self::Rests | Self::Coming | Self::Loading | Self::Lost)
    }
}

#[cfg(test)]
mod pair;
