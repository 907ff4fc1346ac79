//! What most models are made of: servers that take one request after another, and a list of what ends when.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use env::Moment;

use super::Ticket;

/// Requests whose ends are known.
#[derive(Default)]
pub(super) struct Endings {
    heap: BinaryHeap<Reverse<(Moment, u64, Ticket)>>,
    count: u64,
}

impl Endings {
    pub(super) fn add(&mut self, at: Moment, ticket: Ticket) {
        self.count += 1;
        self.heap.push(Reverse((at, self.count, ticket)));
    }

    pub(super) fn next(&self) -> Option<Moment> {
        self.heap.peek().map(|Reverse((at, ..))| *at)
    }

    /// Takes the first one that has ended by `now`.
    pub(super) fn take(&mut self, now: Moment) -> Option<(Moment, Ticket)> {
        let Reverse((at, _, ticket)) = *self.heap.peek()?;
        (at <= now).then(|| {
            self.heap.pop();
            (at, ticket)
        })
    }
}

/// One server: what it is given it does in that order, one at a time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Server {
    free_at: Moment,
}

impl Server {
    pub(super) const fn new() -> Self {
        Self { free_at: Moment(Duration::ZERO) }
    }

    /// Serves something that arrives at `now` and takes `span`; says when that is done.
    pub(super) fn serve(&mut self, now: Moment, span: Duration) -> Moment {
        self.free_at = self.free_at.max(now) + span;
        self.free_at
    }
}
