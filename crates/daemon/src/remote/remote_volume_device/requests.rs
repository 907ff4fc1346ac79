//! Requests on their way through a remote volume device. Each waits for a session and goes through it. If that session
//! is lost and the guest must not notice, the request is sent again through the next one.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::{
    BlockDevice, Buffer, Bytes, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation, Result,
};
use migrate::stream::Remote;

use super::{RemoteVolumeDevice, State, UNFLUSHED_BYTES_MAX};

/// The largest request that is passed on at once.
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

impl RemoteVolumeDevice {
    /// The session that requests go through now; waits for one after the turn.
    async fn session(&self) -> Result<Session> {
        let failed = self.failed.load(Ordering::Relaxed);
        loop {
            let changed = self.changed.notified();
            if self.failed.load(Ordering::Relaxed) != failed {
                return Err(Error::new(ErrorKind::Disconnected, "the volume is used by others at its new host"));
            }
            match &*self.state.lock() {
                State::Down => return Err(self.unreachable()),
                State::Copying(remote) => return Ok(Session::Copying(Arc::clone(remote))),
                State::Forwarding(_, remote) => return Ok(Session::Forwarding(Arc::clone(remote))),
                State::GivenBack(device) => return Ok(Session::GivenBack(device.clone())),
                State::Closed => return Err(Error::new(ErrorKind::Disconnected, "the volume was detached")),
                State::Waiting(_) | State::Deciding(_) | State::KeptOut(_) => {}
            }
            changed.await;
        }
    }

    /// Whether a request that `session` has failed is to be sent again, by the next one.
    fn is_to_be_sent_again(&self, session: &Session, error: &Error) -> bool {
        let is_lost = matches!(error.kind(), ErrorKind::Disconnected | ErrorKind::TimedOut | ErrorKind::Fenced);
        match session {
            // The turn came while it was under way: the other host has closed the copy's session for it.
            Session::Copying(_) => is_lost && self.state.lock().has_turned(),
            Session::Forwarding(remote) => {
                if is_lost {
                    self.lose(remote, error);
                }
                is_lost
            }
            Session::GivenBack(_) => false,
        }
    }

    async fn send_write(&self, mutation: Mutation) -> Result<()> {
        let turn = if self.keeps_order() { Some(self.ranges.exclusive(mutation.extent()).await) } else { None };
        loop {
            let session = self.session().await?;
            match session.device().write(mutation.clone()).await {
                Ok(()) => {
                    let is_much = self.keeps_writes_of(&session)
                        && self.unflushed.lock().answered(&mutation, mutation.fua) > UNFLUSHED_BYTES_MAX;
                    drop(turn);
                    return if is_much { self.send_flush().await } else { Ok(()) };
                }
                Err(error) if self.is_to_be_sent_again(&session, &error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether what is written now may be kept. Before that whoever copies keeps the order.
    fn keeps_order(&self) -> bool {
        self.state.lock().has_turned() || self.keeps_copy.load(Ordering::Relaxed)
    }

    fn keeps_writes_of(&self, session: &Session) -> bool {
        match session {
            Session::Forwarding(_) => true,
            Session::Copying(_) => self.keeps_copy.load(Ordering::Relaxed),
            Session::GivenBack(_) => false,
        }
    }

    async fn send_flush(&self) -> Result<()> {
        loop {
            let session = self.session().await?;
            let before = self.unflushed.lock().mark();
            match session.device().flush().await {
                Ok(()) => {
                    self.unflushed.lock().flushed(before);
                    return Ok(());
                }
                Err(error) if self.is_to_be_sent_again(&session, &error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn send_read(&self, offset: Bytes, buffer: Buffer) -> Result<Buffer> {
        let length = buffer.len();
        let extent = Extent::new(offset, length.into());
        // A write that was not answered may be lost with the other host's power, and be there again later.
        let _turn = if self.keeps_order() { Some(self.ranges.shared(extent).await) } else { None };
        let mut buffer = Some(buffer);
        loop {
            let session = self.session().await?;
            let into = buffer.take().unwrap_or_else(|| Buffer::unpooled(length));
            match session.device().read(offset, into).await {
                Err(error) if self.is_to_be_sent_again(&session, &error) => {}
                outcome => return outcome,
            }
        }
    }

    async fn send_extents(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        loop {
            let session = self.session().await?;
            match session.device().extents(extent).await {
                Err(error) if self.is_to_be_sent_again(&session, &error) => {}
                outcome => return outcome,
            }
        }
    }
}

/// A session that a request goes through.
enum Session {
    Copying(Arc<Remote>),
    Forwarding(Arc<Remote>),
    GivenBack(Device),
}

impl Session {
    fn device(&self) -> Device {
        match self {
            Self::Copying(remote) | Self::Forwarding(remote) => Device::from_arc("remote", Arc::clone(remote) as _),
            Self::GivenBack(device) => device.clone(),
        }
    }
}

impl BlockDevice for RemoteVolumeDevice {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: Bytes(self.place.size),
            request_alignment: self.place.request_alignment,
            preferred_bytes: 4096,
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            read_only: false,
        }
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.send_read(offset, buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.send_write(mutation))
    }

    fn compares_checks(&self) -> bool {
        !matches!(*self.state.lock(), State::GivenBack(_))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.send_flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.send_extents(extent))
    }
}
