//! Whose turn it is: so many guest requests, then one copy (IOFollow, section 5.3.1, "storage resource allocation").

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

use super::head::HeadPosition;
use super::{GuestListener, GuestRequest};

/// Counts the guest's requests, and moves the head with them.
pub(super) struct GuestTurns {
    head: HeadPosition,
    /// So many guest requests are served for one copy.
    ratio: u64,
    in_flight: AtomicU64,
    served: AtomicU64,
    /// It is the copy's turn once so many are served.
    turn_at: AtomicU64,
    /// The copier waits for its turn.
    is_awaited: AtomicBool,
    wake: Arc<Notify>,
}

impl GuestTurns {
    /// `ratio` guest requests for one copy. `wake` is told when the turn that somebody waits for has come.
    pub(super) fn new(head: HeadPosition, ratio: u64, wake: Arc<Notify>) -> Self {
        let counter = AtomicU64::default;
        let (in_flight, served, turn_at) = (counter(), counter(), counter());
        Self { head, ratio, in_flight, served, turn_at, is_awaited: AtomicBool::new(false), wake }
    }

    /// Whether it is the copy's turn. If not, `wake` is told when it is.
    pub(super) fn ask(&self) -> bool {
        if self.is_turn() {
            return true;
        }
        self.is_awaited.store(true, Ordering::SeqCst);
        // Asked again: the request that was waited for may have ended in between.
        self.is_turn()
    }

    /// A copy has taken its turn.
    pub(super) fn took_turn(&self) {
        self.turn_at.store(self.served.load(Ordering::SeqCst) + self.ratio, Ordering::SeqCst);
    }

    /// A copy comes as soon as no guest request waits.
    fn is_turn(&self) -> bool {
        let is_served = self.served.load(Ordering::SeqCst) >= self.turn_at.load(Ordering::SeqCst);
        is_served || self.in_flight.load(Ordering::SeqCst) == 0
    }
}

impl GuestListener for GuestTurns {
    fn begins(&self, _request: GuestRequest) {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
    }

    fn ended(&self, request: GuestRequest) {
        self.head.served(request.extent);
        self.served.fetch_add(1, Ordering::SeqCst);
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        if self.is_turn() && self.is_awaited.swap(false, Ordering::SeqCst) {
            self.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Extent};
    use futures::FutureExt;

    const REQUEST: GuestRequest = GuestRequest { extent: Extent::new(Bytes(4096), Bytes(512)), is_write: true };

    fn turns(ratio: u64) -> (GuestTurns, Arc<Notify>) {
        let wake = Arc::new(Notify::new());
        (GuestTurns::new(HeadPosition::new(), ratio, Arc::clone(&wake)), wake)
    }

    #[test]
    fn under_load_one_copy_comes_after_so_many_requests() {
        for ratio in 1..=4 {
            let (turns, _) = turns(ratio);
            // There is always one more in flight.
            turns.begins(REQUEST);
            let (mut copies, mut served) = (0, 0);
            while served < 120 {
                match turns.ask() {
                    true => {
                        turns.took_turn();
                        copies += 1;
                    }
                    false => {
                        turns.begins(REQUEST);
                        turns.ended(REQUEST);
                        served += 1;
                    }
                }
            }
            assert_eq!(copies, 120 / ratio, "{ratio} to one");
        }
    }

    #[test]
    fn an_idle_guest_lets_every_copy_begin() {
        let (turns, _) = turns(4);
        for _ in 0..10 {
            assert!(turns.ask(), "nothing is in flight");
            turns.took_turn();
        }
        turns.begins(REQUEST);
        assert!(!turns.ask(), "one is, and the last copy was begun before it");
    }

    #[test]
    fn whoever_waits_is_woken_once_when_its_turn_has_come() {
        let (turns, wake) = turns(2);
        (0..4).for_each(|_| turns.begins(REQUEST));
        turns.took_turn();
        assert!(!turns.ask(), "two requests come first");
        turns.ended(REQUEST);
        assert!(wake.notified().now_or_never().is_none(), "one is not enough");
        turns.ended(REQUEST);
        assert!(wake.notified().now_or_never().is_some(), "nobody was woken");
        turns.ended(REQUEST);
        assert!(wake.notified().now_or_never().is_none(), "nobody waits any more");
        assert_eq!(turns.head.offset(), REQUEST.extent.end(), "the head follows");
    }
}
