//! A way to a device that carries so many requests and no more: a host's stack, a switch, a share of either.

use std::collections::VecDeque;
use std::time::Duration;

use env::Moment;

use super::channels::Server;
use super::{Model, Request, Ticket};

/// A way in front of a device. Answers come back at once.
pub struct Path<M> {
    request: Duration,
    server: Server,
    arriving: VecDeque<(Moment, Ticket, Request)>,
    lower: M,
}

impl<M: Model> Path<M> {
    /// A way on which every request takes `request`, one after another.
    #[must_use]
    pub const fn new(request: Duration, lower: M) -> Self {
        Self { request, server: Server::new(), arriving: VecDeque::new(), lower }
    }
}

impl<M: Model> Model for Path<M> {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        let at = self.server.serve(now, self.request);
        self.arriving.push_back((at, ticket, request));
    }

    fn next(&self) -> Option<Moment> {
        let arrival = self.arriving.front().map(|(at, ..)| *at);
        [arrival, self.lower.next()].into_iter().flatten().min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        while let Some(next) = self.next().filter(|next| *next <= now) {
            while let Some((at, ticket, request)) = self.arriving.front().copied().filter(|(at, ..)| *at <= next) {
                self.arriving.pop_front();
                self.lower.submit(at, ticket, request);
            }
            self.lower.advance(next, done);
        }
    }
}
