//! The states that a mirror knows: of a chunk, of what was written of it, and of who answers the guest.

use block::PackedState;

/// Where a chunk is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyState {
    Absent,
    Reading,
    Writing,
    /// The target has it; what the guest writes from then on may make it dirty.
    Copied,
}

impl PackedState for CopyState {
    fn to_bits(self) -> u8 {
        self as u8
    }
    fn from_bits(bits: u8) -> Self {
        [Self::Absent, Self::Reading, Self::Writing, Self::Copied][usize::from(bits)]
    }
}

/// What a flush of the target would make durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// Nothing was written since a flush that succeeded.
    Clean,
    /// Written since the last flush began.
    Unflushed,
    /// Written before the flush that is under way.
    Flushing,
    /// Both.
    FlushingAndUnflushed,
}

impl PackedState for Durability {
    fn to_bits(self) -> u8 {
        self as u8
    }
    fn from_bits(bits: u8) -> Self {
        [Self::Clean, Self::Unflushed, Self::Flushing, Self::FlushingAndUnflushed][usize::from(bits)]
    }
}

/// Who answers the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The filter does nothing any more.
    Detached,
    /// The source answers; its flushes and forced writes are the source's alone.
    SourceHolds,
    /// The source answers; flushes and forced writes go to both sides.
    FlushBoth,
    /// Nobody knows which side holds the volume: only both together answer.
    InDoubt,
    /// The target answers.
    TargetHolds,
}

impl Mode {
    pub(crate) const fn flushes_both(self) -> bool {
        matches!(self, Self::FlushBoth | Self::InDoubt | Self::TargetHolds)
    }
}
