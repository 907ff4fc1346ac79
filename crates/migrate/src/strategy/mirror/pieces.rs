//! Long zeroes and discards of the guest's, which a target may have to write out. They go piece by piece, so that
//! nobody waits for all of them.
//!
//! A piece is a write of its own, with its own lock. When the guest has waited for [`PATIENCE`] the rest goes to the
//! source alone. The chunks of the rest are absent, and copied as holes at the copy's pace.

use std::time::Duration;

use block::{Mutation, MutationKind, Result};

use super::filter::{Shared, Writer};

/// The size of a piece.
const PIECE_BYTES: u64 = 4 << 20;
/// So long the guest waits for the target to write zeroes.
const PATIENCE: Duration = Duration::from_millis(250);

impl Shared {
    /// Carries out a write, zeroes and discards piece by piece.
    pub(super) async fn write(&self, mutation: Mutation, writer: Writer) -> Result<()> {
        let extent = mutation.extent();
        if matches!(mutation.kind(), MutationKind::Data(_)) || extent.length.0 <= PIECE_BYTES {
            return self.write_piece(mutation, writer, false).await;
        }
        let began = self.env.now();
        for piece in extent.split_at_multiples(PIECE_BYTES) {
            let leaves = writer == Writer::Guest && self.env.now().since(began) >= PATIENCE;
            self.write_piece(mutation.slice(piece), writer, leaves).await?;
            // Where both sides answer at once, others get their turn.
            crate::pace::yield_now().await;
        }
        Ok(())
    }
}
