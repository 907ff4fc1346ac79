//! What the backend says of its holes, and what it remembers of them.
//!
//! In memory `SEEK_HOLE` goes from page to page and keeps writers out meanwhile: 10 ms for a GiB without a hole. So a
//! file that is allocated whole is not asked. It may read as zeroes in places, which a reader sees.

use std::io;

use block::{Bytes, Extent, ExtentState, ExtentStatus, IoFuture, ready};

use super::{Engine, FileBackend};
use crate::holes::{Found, all_data, find_holes, is_allocated};

impl FileBackend {
    /// Cuts `extent` out of the run of data that is remembered, and keeps the larger rest: finding the end of a long
    /// run takes long.
    pub(super) fn forget_data(&self, extent: Extent) {
        let mut remembered = self.data_run.lock();
        let Some(run) = remembered.filter(|run| run.overlaps(extent)) else { return };
        let before = Extent::between(run.offset, extent.offset.max(run.offset));
        let after = Extent::between(extent.end().min(run.end()), run.end());
        let rest = if before.length > after.length { before } else { after };
        *remembered = (!rest.is_empty()).then_some(rest);
    }

    /// Describes `extent` from its start.
    pub(super) fn describe(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        // A block device has no holes that it would tell of.
        let known = match (self.is_block_device, *self.data_run.lock()) {
            (true, _) => Some(extent),
            (false, run) => run.filter(|run| run.contains(Extent::new(extent.offset, Bytes(1)))),
        };
        if let Some(known) = known {
            let part = known.intersection(extent).expect("both hold the first byte of the extent");
            return ready(Ok(vec![ExtentStatus { extent: part, state: ExtentState::Data }]));
        }
        Box::pin(async move {
            let outcome = self.look_for_holes(extent).await;
            let found = outcome.map_err(|error| self.failed(error, "looking for holes in", extent))?;
            if found.data_run.is_some() {
                *self.data_run.lock() = found.data_run;
            }
            Ok(found.pieces)
        })
    }

    async fn look_for_holes(&self, extent: Extent) -> io::Result<Found> {
        let unit = self.geometry.request_alignment;
        let may_be_short = self.advertised.is_some();
        if self.engine != Engine::Memory {
            return self.executor.holes(&self.file, extent, unit, may_be_short).await;
        }
        let file = self.file.clone();
        let look = move || {
            file.with(|file| match is_allocated(file, extent)? {
                true => Ok(all_data(extent)),
                false => find_holes(file, extent, unit.into(), may_be_short),
            })
        };
        self.executor.run(look).await
    }
}
