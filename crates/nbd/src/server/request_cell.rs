//! Where the futures of requests live.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use super::outbox::Reply;

/// A box for a request's future, used again and again.
pub(super) type RequestCell<F> = Pin<Box<Option<F>>>;

/// A request that was not done at once.
pub(super) struct Running<F> {
    cell: Option<RequestCell<F>>,
    cost: usize,
    /// The engine's turn in which it was begun.
    turn: u32,
}

impl<F> Running<F> {
    /// The request whose future is in `cell`, begun in `turn`; `cost` is what it takes of the connection's allowance.
    pub(super) const fn new(cell: RequestCell<F>, cost: usize, turn: u32) -> Self {
        Self { cell: Some(cell), cost, turn }
    }
}

impl<F: Future<Output = Reply>> Future for Running<F> {
    type Output = (Reply, RequestCell<F>, usize, u32);

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let cell = self.cell.as_mut().expect("a running request is not polled after it is done");
        let future = cell.as_mut().as_pin_mut().expect("a running request has its future");
        let Poll::Ready(reply) = future.poll(task) else { return Poll::Pending };
        let mut cell = self.cell.take().expect("it was there a moment ago");
        cell.set(None);
        Poll::Ready((reply, cell, self.cost, self.turn))
    }
}
