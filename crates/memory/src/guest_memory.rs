//! What a VMM gives: its guest's memory, and which pages of it were written.

use std::ops::Range;

use crate::dirty_map::DirtyMap;
use crate::error::Result;
use crate::region::Region;

/// A guest's memory at the source. A VMM implements it over its own mappings and dirty log.
///
/// Regions are named by their place in [`regions`](Self::regions), pages by their number in the region, in units of
/// [`PAGE_BYTES`](crate::PAGE_BYTES).
pub trait GuestMemory: Send + Sync {
    /// The regions. They do not change.
    fn regions(&self) -> &[Region];

    /// Adds every page that was written since the last call to `into`, and forgets it (get-and-clear). A page that is written while
    /// this runs is in this answer or in the next one.
    ///
    /// # Errors
    /// Tracking has ended. Nothing may be taken for clean then.
    fn take_dirty(&self, into: &mut DirtyMap) -> Result<()>;

    /// Copies the bytes of the pages from `page` on, as many as `into` is long. The guest may write meanwhile: then the bytes are a
    /// mixture, and the pages are dirty.
    ///
    /// # Errors
    /// They cannot be read.
    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> Result<()>;

    /// The first pages from `page` on that may hold anything but zeroes; `None` if there are none. Who cannot tell gives all.
    ///
    /// # Errors
    /// That cannot be told.
    fn next_data(&self, region: usize, page: u64) -> Result<Option<Range<u64>>>;
}

/// A guest's memory at the target, before the guest runs there. Streams write to it at the same time, each to pages of its own.
pub trait TargetMemory: Send + Sync {
    /// The regions. They do not change.
    fn regions(&self) -> &[Region];

    /// Writes `bytes` to the pages from `page` on.
    ///
    /// # Errors
    /// They cannot be written.
    fn write(&self, region: usize, page: u64, bytes: &[u8]) -> Result<()>;

    /// Has `count` pages from `page` on read as zeroes.
    ///
    /// # Errors
    /// They cannot be written.
    fn zero(&self, region: usize, page: u64, count: u64) -> Result<()>;

    /// Copies the bytes of the pages from `page` on.
    ///
    /// # Errors
    /// They cannot be read.
    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> Result<()>;
}
