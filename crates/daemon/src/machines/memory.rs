//! The connections of a machine's migration, carried between two hosts: each leaves the source's hypervisor by its outlet, goes
//! over an encrypted connection between the daemons, and enters the target's by an inlet.
//!
//! They are made one after the other, in the order in which the source makes them: QEMU 7.2 takes the first that comes for the
//! main one, whichever it is.

use env::Env;
use migrate::stream::BoxTransport;

/// How much is on its way between the two ends of a connection.
const BUFFER_BYTES: usize = 256 << 10;

/// Carries bytes both ways until both ends are done, or one fails.
pub(super) async fn carry(mut near: BoxTransport, mut far: BoxTransport) -> std::io::Result<()> {
    let carried = tokio::io::copy_bidirectional_with_sizes(&mut near, &mut far, BUFFER_BYTES, BUFFER_BYTES);
    carried.await.map(drop)
}

/// Carries one of the source's connections beside the main one. When the other host is lost the near end stays open, and what
/// it sends is thrown away, until the hypervisor closes it: QEMU 7.2 can freeze for good with its guest when these are closed
/// at the switchover. The main connection is closed, and that ends the migration.
pub(super) async fn carry_beside(env: &dyn Env, mut near: BoxTransport, mut far: BoxTransport) -> std::io::Result<()> {
    let carried = tokio::io::copy_bidirectional_with_sizes(&mut near, &mut far, BUFFER_BYTES, BUFFER_BYTES).await;
    drop(far);
    if carried.is_err() {
        env.spawn(Box::pin(async move {
            // QEMU ends this, or whoever ends QEMU.
            let _ = tokio::io::copy(&mut near, &mut tokio::io::sink()).await;
        }));
    }
    carried.map(drop)
}
