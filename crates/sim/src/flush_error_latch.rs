//! What the host has to tell its guest: that a flush has failed.
//!
//! What a failed flush covered is lost, and no later one brings it back. A guest whose connection goes before it is told
//! asks for that flush again; were that answered well, it would believe what is not so. Real file backends answer no flush
//! well any more once one has failed, until they are opened again. Here the next connection is told once, so that the
//! flushes after it go on to mean something.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Device, Error, ErrorKind, Filter, IoFuture};

/// No flush error is pending.
const NONE: u64 = u64::MAX;

/// The flush error that one process has yet to report. Clones share it.
#[derive(Clone)]
pub(crate) struct FlushErrorLatch {
    shared: Arc<Shared>,
}

struct Shared {
    connections: AtomicU64,
    /// The newest connection on which a flush has failed.
    failed_on: AtomicU64,
}

impl Default for FlushErrorLatch {
    fn default() -> Self {
        Self { shared: Arc::new(Shared { connections: AtomicU64::new(0), failed_on: AtomicU64::new(NONE) }) }
    }
}

impl FlushErrorLatch {
    /// `lower` for one more connection of the guest.
    pub(crate) fn connection(&self, lower: Device) -> Device {
        let number = self.shared.connections.fetch_add(1, Ordering::Relaxed);
        Device::new("flushes of a connection", ConnectionFlushes { lower, latch: self.clone(), number })
    }
}

/// A connection's way down.
struct ConnectionFlushes {
    lower: Device,
    latch: FlushErrorLatch,
    number: u64,
}

impl Filter for ConnectionFlushes {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let failed_on = &self.latch.shared.failed_on;
            // Whoever asks before that was told is told now: the flush that was lost may have covered the same.
            let is_untold = failed_on.load(Ordering::Relaxed) < self.number;
            if let Err(error) = self.lower.flush().await {
                failed_on.store(self.number, Ordering::Relaxed);
                return Err(error);
            }
            if !is_untold {
                return Ok(());
            }
            if failed_on.load(Ordering::Relaxed) < self.number {
                failed_on.store(NONE, Ordering::Relaxed);
            }
            Err(Error::new(ErrorKind::Io, "flushing: a flush has failed on an earlier connection"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, MemDevice};
    use std::sync::atomic::AtomicBool;

    /// Memory whose flushes fail when told to.
    struct Fails(Device, Arc<AtomicBool>);

    impl Filter for Fails {
        fn lower(&self) -> &Device {
            &self.0
        }
        fn flush(&self) -> IoFuture<'_, ()> {
            let fails = self.1.load(Ordering::Relaxed);
            Box::pin(async move { if fails { Err(Error::new(ErrorKind::Io, "as told")) } else { Ok(()) } })
        }
    }

    #[tokio::test]
    async fn the_next_connection_is_told_once_of_a_flush_that_failed() {
        let fails = Arc::new(AtomicBool::new(false));
        let disk = Device::new("disk", Fails(Device::new("mem", MemDevice::new(Bytes(4096))), Arc::clone(&fails)));
        let latch = FlushErrorLatch::default();
        let first = latch.connection(disk.clone());
        first.flush().await.expect("nothing has failed");
        fails.store(true, Ordering::Relaxed);
        first.flush().await.expect_err("it fails");
        fails.store(false, Ordering::Relaxed);
        first.flush().await.expect("this connection was told");
        let second = latch.connection(disk);
        second.flush().await.expect_err("it was not told");
        second.flush().await.expect("it was told once");
    }
}
