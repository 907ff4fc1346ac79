//! The paper's data mover: all of a window by copies of 64 KiB, 16 of them outstanding whatever the guest does.
//!
//! 16 is the paper's (section 3.1). Copies of 64 KiB, of transfers that the mover is asked for as a whole, is what VMware has
//! published of it.

use std::ops::Range;

use block::{Buffer, Extent, Result};
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use crate::strategy::mirror::copy::{Claim, Copied, CopyError};
use crate::strategy::mirror::filter::Shared;
use crate::strategy::mirror::tracker::Session;

/// The size of a copy.
pub(crate) const COPY_BYTES: u64 = 64 << 10;
/// So many are outstanding.
pub(crate) const COPIES_MAX: usize = 16;

impl Shared {
    /// Copies a claimed window, with as many copies outstanding as there are `buffers` of [`COPY_BYTES`]. The guest's
    /// writes there wait until all of it is on the target.
    pub(crate) async fn copy_window(&self, run: Range<u64>, buffers: Vec<Buffer>) -> Result<Copied, CopyError> {
        let mut claim = Claim::new(self, run.clone());
        let window = self.tracker(|tracker| tracker.run_extent(&run));
        // Waits for what is in flight there.
        let Some(guard) = self.lock_for_copy(window).await else {
            claim.nothing_happened();
            return Ok(Copied::default());
        };
        let Some(session) = self.tracker(|tracker| tracker.session().cloned()) else {
            claim.nothing_happened();
            return Ok(Copied::default());
        };
        claim.writes();
        let mut pieces = window.split_at_multiples(COPY_BYTES);
        let mut outstanding = FuturesUnordered::new();
        for buffer in buffers {
            outstanding.extend(pieces.next().map(|piece| self.copy_piece(piece, buffer, &session)));
        }
        let (mut copied, mut failure) = (Copied::default(), None);
        while let Some(ended) = outstanding.next().await {
            match ended {
                Ok((piece, buffer)) => {
                    copied += piece;
                    // After a failure no other begins; those under way are driven to their end.
                    let next = pieces.next().filter(|_| failure.is_none());
                    outstanding.extend(next.map(|piece| self.copy_piece(piece, buffer, &session)));
                }
                Err(error) => _ = failure.get_or_insert(error),
            }
        }
        drop(outstanding);
        if let Some(error) = failure {
            return Err(error);
        }
        self.end_copy(claim, &session, copied, &[]);
        drop(guard);
        Ok(copied)
    }

    /// Copies `piece` of a window. Gives what that was, and the buffer.
    async fn copy_piece(
        &self,
        piece: Extent,
        mut buffer: Buffer,
        session: &Session,
    ) -> Result<(Copied, Buffer), CopyError> {
        // Devices that answer at once would otherwise never let anybody else run.
        crate::pace::yield_now().await;
        if self.offload(piece, session).await? {
            return Ok((Copied::offloaded(piece), buffer));
        }
        buffer.set_len(piece.length.as_usize());
        let read = self.copy_face.read(piece.offset, buffer).await;
        let data = read.map_err(|error| CopyError::Source(error.wrap(format!("copying {piece}"))))?.freeze();
        let copied = self.write_copy(piece, self.pieces_of(piece, data.clone()), session, true).await?;
        // A device that keeps what it was given keeps it from the pool as well: the guest does not wait for that.
        let buffer = data.try_into_buffer().unwrap_or_else(|_| Buffer::unpooled(COPY_BYTES as usize));
        Ok((copied, buffer))
    }
}
