//! Where a migration begins.

use std::future::Future;

use block::{Error, ErrorKind, Result};

use crate::{Control, MoveOptions, Outcome, Parts};

/// A migration of one volume.
pub struct Migration;

impl Migration {
    /// Puts the mirror into the guest's path and gives the handle that steers the migration and the work itself, which
    /// the caller must drive to its end (dropping it is what a crash is). Once this has returned every guest write is
    /// tracked: whoever resumes after a crash serves the volume only then.
    ///
    /// # Errors
    /// Source and target do not suit each other, the guest's requests do not drain, or the progress map cannot be
    /// read. Nothing has changed then.
    pub async fn start(
        parts: Parts,
        options: MoveOptions,
    ) -> Result<(Control, impl Future<Output = Outcome> + Send + use<>)> {
        let _ = (parts, options);
        Err::<(Control, std::future::Pending<Outcome>), _>(Error::new(
            ErrorKind::Unsupported,
            "no strategy has landed yet",
        ))
    }
}
