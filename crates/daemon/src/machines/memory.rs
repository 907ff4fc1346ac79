//! The connections of a machine's migration, carried between two hosts: each leaves the source's hypervisor by its outlet, goes
//! over an encrypted connection between the daemons, and enters the target's by an inlet.
//!
//! They are made one after the other, in the order in which the source makes them: QEMU 7.2 takes the first that comes for the
//! main one, whichever it is.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use env::{Env, EnvRef};
use futures::future::{Either, select};
use migrate::stream::BoxTransport;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{oneshot, watch};

/// How much is on its way between the two ends of a connection.
const BUFFER_BYTES: usize = 256 << 10;
/// How long a source takes to close its end after the target has closed its own, which has all of the memory then.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Carries bytes both ways until both ends are done, or one fails.
pub(super) async fn carry(mut near: BoxTransport, mut far: BoxTransport) -> io::Result<()> {
    let carried = tokio::io::copy_bidirectional_with_sizes(&mut near, &mut far, BUFFER_BYTES, BUFFER_BYTES);
    carried.await.map(drop)
}

/// Carries one of the source's connections beside the main one. When the other host is lost the near end stays open, and what
/// it sends is thrown away, until the hypervisor closes it: QEMU 7.2 can freeze for good with its guest when these are closed
/// at the switchover. The main connection is closed, and that ends the migration.
pub(super) async fn carry_beside(env: &dyn Env, mut near: BoxTransport, mut far: BoxTransport) -> io::Result<()> {
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

/// Carries the source's connection of a memory that may follow its guest. When the other host is lost the near end stays open until
/// it `may_close`: before the commit its QEMU is to go on here, and it only can as long as it has not lost its connection. What is
/// thrown away meanwhile it sends again after a recovery.
pub(super) async fn carry_held(
    env: &EnvRef,
    (near, mut far): (BoxTransport, BoxTransport),
    (mut may_close, cut): (watch::Receiver<bool>, watch::Receiver<u64>),
) -> io::Result<()> {
    let (told, closed) = oneshot::channel();
    let mut near = HeldOpen { near, told: Some(told) };
    let carried = {
        let carrying = tokio::io::copy_bidirectional_with_sizes(&mut near, &mut far, BUFFER_BYTES, BUFFER_BYTES);
        let closed = async {
            if closed.await.is_err() {
                std::future::pending::<()>().await;
            }
            env.sleep(CLOSE_LIMIT).await;
        };
        match select(pin!(carrying), pin!(select(pin!(closed), pin!(until_cut(cut))))).await {
            Either::Left((carried, _)) => carried.map(drop),
            Either::Right((Either::Left(_), _)) => {
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other host has closed it"))
            }
            Either::Right((Either::Right(_), _)) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "nothing came through it"))
            }
        }
    };
    drop(far);
    if carried.is_err() {
        env.spawn(Box::pin(async move {
            let mut sink = tokio::io::sink();
            let swallowing = pin!(tokio::io::copy(&mut near.near, &mut sink));
            // Whoever ends the move lets it close; so does the end of QEMU.
            let closing = pin!(may_close.wait_for(|may_close| *may_close));
            select(swallowing, closing).await;
        }));
    }
    carried
}

/// Ends when somebody cuts the connections of a machine's memory, after `cut` was made.
pub(super) async fn until_cut(mut cut: watch::Receiver<u64>) {
    if cut.changed().await.is_err() {
        // A machine that is forgotten cuts nothing.
        std::future::pending::<()>().await;
    }
}

/// A connection on which the end of what comes is told, and not passed on.
struct HeldOpen {
    near: BoxTransport,
    told: Option<oneshot::Sender<()>>,
}

impl AsyncRead for HeldOpen {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_read(context, into)
    }
}

impl AsyncWrite for HeldOpen {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.near).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(told) = self.told.take() {
            // Nobody listens any more once the connection is over.
            let _ = told.send(());
        }
        Pin::new(&mut self.near).poll_flush(context)
    }
}
