//! Connections within this process that give and take bytes as a script says, for tests.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::LazyLock;

use futures::task::noop_waker_ref;
use proptest::collection::vec;
use proptest::prelude::*;
use tokio::io::DuplexStream;

use super::tests::{Configs, configs};
use super::*;

/// The same for every case: making an identity takes longer than all the rest of one.
pub(super) static CONFIGS: LazyLock<Configs> = LazyLock::new(configs);

/// What comes and what is taken.
pub(super) struct Script {
    coming: Vec<u8>,
    pub(super) given: usize,
    /// The bytes that are given at a time, in turn; with 0 it is to be asked again.
    pieces: Vec<usize>,
    stays_open: bool,
    /// The same of what is taken, and all that was.
    pub(super) takes: Vec<usize>,
    pub(super) taken: Vec<u8>,
    turns: [usize; 2],
}

impl Script {
    pub(super) fn new(coming: Vec<u8>, pieces: Vec<usize>, stays_open: bool) -> Self {
        Self { coming, given: 0, pieces, stays_open, takes: vec![usize::MAX], taken: Vec::new(), turns: [0; 2] }
    }

    /// Nothing comes any more, not even the end.
    pub(super) fn is_dry(&self) -> bool {
        self.stays_open && self.given == self.coming.len()
    }
}

/// A connection within this process; after its handshake, if it has one, what a script says in its place.
pub(super) struct Line {
    inner: Option<DuplexStream>,
    script: Option<Rc<RefCell<Script>>>,
}

impl Line {
    pub(super) const fn within(stream: DuplexStream) -> Self {
        Self { inner: Some(stream), script: None }
    }

    pub(super) fn scripted(script: &Rc<RefCell<Script>>) -> Self {
        Self { inner: None, script: Some(Rc::clone(script)) }
    }

    pub(super) fn inner(&mut self) -> Pin<&mut DuplexStream> {
        Pin::new(self.inner.as_mut().expect("a line has either"))
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(script) = self.script.clone() else { return self.inner().poll_read(context, target) };
        let Script { coming, given, pieces, stays_open, turns: [turn, _], .. } = &mut *script.borrow_mut();
        let left = &coming[*given..];
        if left.is_empty() {
            return if *stays_open { Poll::Pending } else { Poll::Ready(Ok(())) };
        }
        *turn += 1;
        let count = pieces[*turn % pieces.len()].min(left.len()).min(target.remaining());
        target.put_slice(&left[..count]);
        *given += count;
        if count == 0 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }
}

impl AsyncWrite for Line {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Some(script) = self.script.clone() else { return self.inner().poll_write(context, bytes) };
        let Script { takes, taken, turns: [_, turn], .. } = &mut *script.borrow_mut();
        *turn += 1;
        let count = takes[*turn % takes.len()].min(bytes.len());
        taken.extend_from_slice(&bytes[..count]);
        if count == 0 { Poll::Pending } else { Poll::Ready(Ok(count)) }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Sizes of pieces in turn, not all of them nothing.
pub(super) fn pieces() -> impl Strategy<Value = Vec<usize>> {
    let piece = prop_oneof![1 => Just(0), 4 => 1..60_usize, 4 => 1000..40_000_usize];
    (vec(piece, 0..5), 1..20_000_usize).prop_map(|(some, one)| [some, vec![one]].concat())
}

/// What becomes of it when all that comes has come; `None` if it waits for more.
pub(super) fn poll_until_dry<F: Future>(script: &Rc<RefCell<Script>>, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(noop_waker_ref())) {
            Poll::Ready(outcome) => return Some(outcome),
            Poll::Pending if script.borrow().is_dry() => return None,
            Poll::Pending => {}
        }
    }
}
