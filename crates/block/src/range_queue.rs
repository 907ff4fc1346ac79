//! The rule by which extents are granted, as a plain structure: no threads, no waiting, no clock.
//!
//! `tests/models.rs` compiles this file beside `range_lock.rs`, too.

use super::Extent;

/// Whether others may hold the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeMode {
    /// Others that are shared may hold the same bytes.
    Shared,
    /// Nobody else may.
    Exclusive,
}

/// The number of a request, in the order of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Request {
    ticket: Ticket,
    extent: Extent,
    mode: RangeMode,
    /// How many earlier requests it still waits for; none means granted.
    blockers: usize,
}

impl Request {
    fn conflicts(&self, extent: Extent, mode: RangeMode) -> bool {
        let exclusive = self.mode == RangeMode::Exclusive || mode == RangeMode::Exclusive;
        exclusive && self.extent.overlaps(extent)
    }
}

/// Who holds which bytes and who waits for whom, in the order of asking.
///
/// First come, first served, per byte: a request waits for every earlier one that it overlaps, held or waiting, unless
/// both are shared. So a request over many chunks takes its whole range at once, and nothing starves. Two requests that
/// meet in two places cannot wait for each other.
#[derive(Debug, Default)]
pub struct RangeQueue {
    requests: Vec<Request>,
    next: u64,
}

impl RangeQueue {
    /// Adds a request at the end. Returns whether it is granted at once because it need not wait for any before it.
    pub fn push(&mut self, extent: Extent, mode: RangeMode) -> (Ticket, bool) {
        let ticket = Ticket(self.next);
        self.next += 1;
        let blockers = self.requests.iter().filter(|earlier| earlier.conflicts(extent, mode)).count();
        self.requests.push(Request { ticket, extent, mode, blockers });
        (ticket, blockers == 0)
    }

    /// Whether a request would be granted at once.
    #[must_use]
    pub fn is_free(&self, extent: Extent, mode: RangeMode) -> bool {
        !self.requests.iter().any(|earlier| earlier.conflicts(extent, mode))
    }

    /// Whether the request is granted.
    ///
    /// # Panics
    /// If it has been removed.
    #[must_use]
    pub fn is_granted(&self, ticket: Ticket) -> bool {
        self.requests[self.position(ticket)].blockers == 0
    }

    /// Takes a request out, held or waiting, and hands those that need not wait any more to `granted`, in the order of
    /// asking.
    ///
    /// # Panics
    /// If it has been removed before.
    pub fn remove(&mut self, ticket: Ticket, mut granted: impl FnMut(Ticket)) {
        let at = self.position(ticket);
        let gone = self.requests.remove(at);
        for later in &mut self.requests[at..] {
            if later.blockers > 0 && later.conflicts(gone.extent, gone.mode) {
                later.blockers -= 1;
                if later.blockers == 0 {
                    granted(later.ticket);
                }
            }
        }
    }

    /// How many requests are held or wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether nobody holds or wants anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    fn position(&self, ticket: Ticket) -> usize {
        self.requests.binary_search_by_key(&ticket, |request| request.ticket).expect("the ticket is in the queue")
    }
}
