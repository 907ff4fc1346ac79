//! Requests on their way through the connections: each waits for a session. If that is lost and a guest must not
//! notice, it is sent again through the next one.

use std::sync::Arc;

use block::{BlockDevice, Buffer, Bytes, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation, Result};
use env::Moment;
use futures::future::{Either, select};

use super::super::pump::disconnected;
use super::{ANSWER_LIMITS, KEPT_BYTES_MAX, NbdBackend, REST_MAX, Session, Shared};

/// Whether a request may succeed on another connection: the server has gone, or says that it is about to.
fn is_lost(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Disconnected | ErrorKind::Fenced)
}

impl Shared {
    /// `session` is lost with a request in flight. A copy's request fails. A guest's request is sent again, up to its
    /// limit: a server may come back again and again and take nothing.
    fn lose(&self, session: &Session, error: Error, until: Moment) -> Result<()> {
        let mut state = self.state.lock();
        if state.session.as_ref().is_some_and(|current| current.number == session.number) {
            tracing::warn!(error = error.chain(), "the NBD server is lost");
            state.session = None;
            state.has_lost |= state.replay_log.misses_something();
        }
        drop(state);
        if !self.serves_guest() {
            let shuts_down =
                |error| Error::new(ErrorKind::Disconnected, "the NBD server shuts down").with_source(error);
            return Err(if error.kind() == ErrorKind::Fenced { shuts_down(error) } else { error });
        }
        if self.env.now() < until {
            return Ok(());
        }
        let waited = self.options.reconnect_limit;
        let context = format!("the NBD server took no request for the {waited:?} that one waits");
        Err(Error::new(ErrorKind::TimedOut, context).with_source(error))
    }

    /// A write was answered; false if its session is over, so that its successor may lack it.
    fn note_answer(&self, session: &Session, mutation: &Mutation, is_kept: bool, is_durable: bool) -> bool {
        let mut state = self.state.lock();
        let is_current = state.session.as_ref().is_some_and(|current| current.number == session.number);
        match is_kept {
            _ if !is_current => {}
            true => state.replay_log.answered(mutation, is_durable),
            false => state.replay_log.answered_unkept(is_durable),
        }
        is_current
    }

    /// Flushes if more is kept than may be.
    async fn make_room(&self) {
        if self.state.lock().replay_log.bytes() <= KEPT_BYTES_MAX {
            return;
        }
        let _turn = self.flushing.lock().await;
        if self.state.lock().replay_log.bytes() > KEPT_BYTES_MAX
            && let Err(error) = self.flush_session().await
        {
            self.note_failed_flush(&error);
        }
    }

    /// A flush that nobody has asked for has failed. The guest flushes sooner or later itself, and gets the error then.
    fn note_failed_flush(&self, error: &Error) {
        tracing::warn!(error = error.chain(), "what the NBD server has taken could not be flushed");
        let mut state = self.state.lock();
        state.has_lost = true;
        state.replay_log.give_up();
    }

    /// Whether what was answered before a guest came to rely on this is still to be flushed.
    pub(super) fn owes_flush(&self) -> bool {
        let state = self.state.lock();
        !state.is_closed && !state.has_lost && state.replay_log.misses_something()
    }

    /// Flushes what was answered before, however long the server is away.
    pub(super) async fn flush_what_came_before(self: Arc<Self>) {
        while self.owes_flush() {
            let turn = self.flushing.lock().await;
            let outcome = self.flush_session().await;
            drop(turn);
            match outcome {
                Ok(()) => {}
                Err(_) if self.state.lock().session.is_none() => self.env.sleep(REST_MAX).await,
                Err(error) => self.note_failed_flush(&error),
            }
        }
    }

    async fn mutate(&self, mutation: Mutation) -> Result<()> {
        let (until, is_kept) = (self.until(), self.serves_guest());
        let mut turn = None;
        if is_kept {
            self.make_room().await;
            turn = Some(self.ranges.exclusive(mutation.extent()).await);
        }
        loop {
            let session = self.session(until).await?;
            let connection = session.connection();
            match connection.write(mutation.clone()).await {
                Ok(()) => {
                    let is_durable = mutation.fua || !connection.can_flush();
                    if self.note_answer(&session, &mutation, is_kept, is_durable) {
                        drop(turn);
                        return Ok(());
                    }
                    if !self.serves_guest() {
                        return Err(disconnected());
                    }
                }
                Err(error) if is_lost(&error) => self.lose(&session, error, until)?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Flushes, or says that something may be lost, once for each loss.
    async fn sync(&self) -> Result<()> {
        self.tell_of_loss()?;
        self.flush_session().await?;
        // The server may have been lost meanwhile, with what came before.
        self.tell_of_loss()
    }

    fn tell_of_loss(&self) -> Result<()> {
        if !std::mem::take(&mut self.state.lock().has_lost) {
            return Ok(());
        }
        let context = "the NBD server was lost with writes that it had answered and not flushed";
        Err(Error::new(ErrorKind::Disconnected, context))
    }

    /// Flushes what the server of the session has taken. It says nothing of earlier losses.
    pub(super) async fn flush_session(&self) -> Result<()> {
        let until = self.until();
        loop {
            let session = self.session(until).await?;
            let mark = self.state.lock().replay_log.mark();
            match session.connection().flush().await {
                Ok(()) => {
                    let mut state = self.state.lock();
                    if state.session.as_ref().is_some_and(|current| current.number == session.number) {
                        state.replay_log.flushed(mark);
                        return Ok(());
                    }
                    drop(state);
                    if !self.serves_guest() {
                        return Err(disconnected());
                    }
                }
                Err(error) if is_lost(&error) => self.lose(&session, error, until)?,
                Err(error) => return Err(error),
            }
        }
    }

    async fn fetch(&self, offset: Bytes, buffer: Buffer) -> Result<Buffer> {
        let (until, length) = (self.until(), buffer.len());
        // An unanswered write may be lost with the server, and reappear later.
        let turn = match self.serves_guest() {
            true => Some(self.ranges.shared(Extent::new(offset, length.into())).await),
            false => None,
        };
        let mut given = Some(buffer);
        loop {
            let session = self.session(until).await?;
            // The first went with the connection.
            let buffer = given.take().unwrap_or_else(|| Buffer::unpooled(length));
            match session.connection().read(offset, buffer).await {
                Err(error) if is_lost(&error) => self.lose(&session, error, until)?,
                answer => {
                    drop(turn);
                    return answer;
                }
            }
        }
    }

    async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        let until = self.until();
        loop {
            let session = self.session(until).await?;
            match session.connection().extents(extent).await {
                Err(error) if is_lost(&error) => self.lose(&session, error, until)?,
                answer => return answer,
            }
        }
    }
}

impl NbdBackend {
    /// A guest's request fails when its server has not answered within the limit. The request itself goes on, with its
    /// buffer, and keeps others from its bytes. The server may still carry it out, and must not overwrite newer data.
    fn within_limit<T: Send + 'static>(&self, work: IoFuture<'static, T>) -> IoFuture<'static, T> {
        if !self.shared.serves_guest() {
            return work;
        }
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let limit = shared.options.reconnect_limit * ANSWER_LIMITS;
            match select(work, shared.env.sleep(limit)).await {
                Either::Left((outcome, _)) => outcome,
                Either::Right(((), work)) => {
                    tracing::warn!(?limit, "the NBD server leaves a request without an answer");
                    shared.env.spawn(Box::pin(async move { drop(work.await) }));
                    let context = format!("the NBD server is there and did not answer for {limit:?}");
                    Err(Error::new(ErrorKind::TimedOut, context))
                }
            }
        })
    }
}

impl BlockDevice for NbdBackend {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let shared = Arc::clone(&self.shared);
        self.within_limit(Box::pin(async move { shared.fetch(offset, buffer).await }))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let shared = Arc::clone(&self.shared);
        self.within_limit(Box::pin(async move { shared.mutate(mutation).await }))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let shared = Arc::clone(&self.shared);
        self.within_limit(Box::pin(async move { shared.sync().await }))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        let shared = Arc::clone(&self.shared);
        self.within_limit(Box::pin(async move { shared.describe(extent).await }))
    }
}
