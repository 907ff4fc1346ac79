//! What the tracker decides about a guest's write, and what it keeps count of.

use std::time::Duration;

use block::Extent;

use super::session::Session;

/// What is to be done with a guest write.
pub(crate) struct WritePlan {
    /// The target's session and the parts that go there; `None` for none.
    pub(crate) mirror: Option<(Session, Vec<Extent>)>,
    /// Whether a forced write is forced on the target, too.
    pub(crate) force_target: bool,
    /// Extents of the activity log that must be on record before the write is issued.
    pub(crate) activate: Vec<u64>,
    /// Whether the write is counted as active.
    pub(in crate::strategy) active: bool,
    /// Whether it was tracked instead of mirrored.
    pub(in crate::strategy) tracked: bool,
    /// Whether the target gets it later.
    pub(in crate::strategy) buffered: bool,
    pub(in crate::strategy) extent: Extent,
}

impl WritePlan {
    /// A write that goes to the source alone and is tracked.
    pub(in crate::strategy) const fn of_source(extent: Extent) -> Self {
        let activate = Vec::new();
        Self { mirror: None, force_target: false, activate, active: false, tracked: true, buffered: false, extent }
    }
}

/// An extent of the activity log.
#[derive(Default)]
pub(crate) struct Activity {
    /// Writes that are not answered yet.
    pub(in crate::strategy) in_flight: u32,
    /// Whether the device has it.
    pub(in crate::strategy) on_record: bool,
}

/// What the driver and reports count.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) copied: u64,
    pub(crate) zero: u64,
    /// Of what was copied, what nobody has read here.
    pub(crate) offloaded: u64,
    pub(crate) mirrored: u64,
    /// What was skipped, and is not any more.
    pub(crate) unskipped: u64,
    pub(crate) redos: u64,
    /// Mirrored writes that the target failed and the guest did not notice.
    pub(crate) missed: u64,
    pub(crate) unflushed: u64,
    /// What the target had been written, or may have been, and gets again: it was lost before a flush, or has failed.
    pub(crate) again: u64,
    /// How long guest writes have waited for room in the buffer, all together.
    pub(crate) throttled: Duration,
}
