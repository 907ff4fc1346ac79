//! What a plan of adoption or release needs of the volume.

use std::io;
use std::sync::Arc;

use futures::future::BoxFuture;
use vm::{Step, Surroundings};

use crate::volume::Volume;

/// The locks and the export of one volume.
pub(super) struct VolumeSurroundings {
    volume: Arc<Volume>,
}

impl VolumeSurroundings {
    pub(super) fn new(volume: &Arc<Volume>) -> Self {
        Self { volume: Arc::clone(volume) }
    }
}

impl Surroundings for VolumeSurroundings {
    fn take_locks(&mut self) -> BoxFuture<'_, io::Result<()>> {
        let outcome = match self.volume.with_backend(|open_backend| open_backend.retake_qemu_locks()) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(io::Error::other(error.chain())),
            None => Err(io::Error::other("the volume is down")),
        };
        Box::pin(std::future::ready(outcome))
    }

    fn drop_locks(&mut self) -> BoxFuture<'_, io::Result<()>> {
        // QEMU opens the image by its name next. A volume that is down holds no locks.
        let dropped = self.volume.with_backend(|open_backend| {
            open_backend.require_name()?;
            open_backend.drop_qemu_locks();
            Ok::<_, block::Error>(())
        });
        Box::pin(std::future::ready(dropped.unwrap_or(Ok(())).map_err(|error| io::Error::other(error.chain()))))
    }

    fn is_export_connected(&mut self) -> bool {
        self.volume.connections() > 0
    }

    fn before(&mut self, index: usize, step: &Step) -> BoxFuture<'_, io::Result<()>> {
        tracing::info!(volume = self.volume.name, index, step = step.describe(), "next step");
        Box::pin(std::future::ready(Ok(())))
    }
}
