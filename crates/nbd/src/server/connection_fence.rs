//! Who may enter an export's transmission.
//!
//! A client that loses its connection makes another and sends unanswered requests again. A write of the dead connection
//! that is carried out after that repetition, or after a later write, would undo acknowledged data. So a new connection
//! waits until every earlier connection of the export has *finished* or *proved itself alive*. Finished means that all
//! its requests were driven to their end. Alive means that, after the new one came, it read its socket and found
//! neither bytes nor an end. What it had begun by then must be finished, too.
//!
//! A client that reconnects has closed its old socket before. So over a unix socket the first half says that a
//! connection is not the predecessor. Over TCP it does not: the end may have been lost (the connection is half open).
//! Then the second half keeps the dead client's requests from overwriting newer data.
//!
//! ```text
//!              join()                     every earlier member finished or proved itself
//!   (no member) ─────▶ waiting ───────────────────────────────────────────────────────────▶ admitted
//!                         │                                                                    │
//!                         │ its client goes away                    its last request finished  │
//!                         └──────────────────────────▶ finished ◀──────────────────────────────┘
//! ```
//!
//! A waiting member answers later members like an admitted one. Members wait only for earlier ones, so there is no
//! deadlock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use futures::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The fence of one export. Clones are the same fence.
#[derive(Clone, Default)]
pub(crate) struct ConnectionFence {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    members: Mutex<Vec<Arc<MemberState>>>,
    /// A member finished or proved itself.
    changed: Notify,
}

#[derive(Default)]
struct MemberState {
    /// How many proofs of life have been asked for.
    asked: AtomicU64,
    /// Which of them have been given.
    proved: AtomicU64,
    is_finished: AtomicBool,
    /// Its client has closed its socket, or the kernel has given it up.
    has_left: AtomicBool,
    waker: AtomicWaker,
}

impl ConnectionFence {
    /// Joins behind all who are members now. The future is done when this member may start requests.
    pub(crate) fn join(&self) -> (Member, impl Future<Output = ()> + Send + use<>) {
        let state = Arc::new(MemberState::default());
        let earlier: Vec<(Arc<MemberState>, u64)> = {
            let mut members = self.shared.members.lock();
            let earlier = members.iter().map(|member| (Arc::clone(member), member.ask())).collect();
            members.push(Arc::clone(&state));
            earlier
        };
        let shared = Arc::clone(&self.shared);
        let admission = async move {
            loop {
                let changed = shared.changed.notified();
                if earlier.iter().all(|(member, question)| member.has_answered(*question)) {
                    return;
                }
                changed.await;
            }
        };
        (Member { shared: Arc::clone(&self.shared), state }, admission)
    }

    /// Asks every member for a proof of life.
    pub(crate) fn ask(&self) -> LifeQuestion {
        let asked = self.shared.members.lock().clone();
        asked.iter().for_each(|member| _ = member.ask());
        LifeQuestion { asked }
    }

    /// How many members there are.
    pub(crate) fn members(&self) -> usize {
        self.shared.members.lock().len()
    }
}

/// A question to the connections of an export whether their clients are there, also to those that wait for what they have asked for.
pub struct LifeQuestion {
    asked: Vec<Arc<MemberState>>,
}

impl LifeQuestion {
    /// Whether all that were asked are known by now to have gone. One on another machine that was cut off is not for a while.
    #[must_use]
    pub fn have_all_left(&self) -> bool {
        let has_left = |member: &Arc<MemberState>| {
            member.is_finished.load(Ordering::SeqCst) || member.has_left.load(Ordering::SeqCst)
        };
        self.asked.iter().all(has_left)
    }
}

impl MemberState {
    fn ask(&self) -> u64 {
        let question = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        self.waker.wake();
        question
    }

    fn has_answered(&self, question: u64) -> bool {
        self.is_finished.load(Ordering::SeqCst) || self.proved.load(Ordering::SeqCst) >= question
    }
}

/// A connection's membership. Dropping it says that all its requests are finished.
pub(crate) struct Member {
    shared: Arc<Shared>,
    state: Arc<MemberState>,
}

impl Member {
    /// The newest proof of life that is owed, if any. `waker` is woken when another is asked for.
    pub(crate) fn question(&self, waker: &Waker) -> Option<u64> {
        self.state.waker.register(waker);
        let asked = self.state.asked.load(Ordering::SeqCst);
        (asked > self.state.proved.load(Ordering::SeqCst)).then_some(asked)
    }

    /// Its client has gone; what that has asked for goes on.
    pub(crate) fn leave(&self) {
        self.state.has_left.store(true, Ordering::SeqCst);
    }

    /// Gives the proof that `question` asked for.
    pub(crate) fn prove(&self, question: u64) {
        self.state.proved.fetch_max(question, Ordering::SeqCst);
        self.shared.changed.notify_waiters();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shared.members.lock().retain(|member| !Arc::ptr_eq(member, &self.state));
        self.state.is_finished.store(true, Ordering::SeqCst);
        self.shared.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn a_new_member_waits_for_each_earlier_one_to_finish_or_prove_itself() {
        let fence = ConnectionFence::default();
        let (first, admission) = fence.join();
        assert!(admission.now_or_never().is_some(), "the only member had to wait");
        let (second, admission) = fence.join();
        let mut admission = Box::pin(admission);
        assert!((&mut admission).now_or_never().is_none(), "entered beside a member that may be dead");
        let question = first.question(Waker::noop()).expect("a proof is owed");
        first.prove(question);
        assert!((&mut admission).now_or_never().is_some(), "a living member blocked the gate");
        assert_eq!(first.question(Waker::noop()), None);

        let (_third, admission) = fence.join();
        let mut admission = Box::pin(admission);
        drop(first);
        assert!((&mut admission).now_or_never().is_none(), "entered before the second member answered");
        drop(second);
        assert!((&mut admission).now_or_never().is_some(), "a finished member blocked the gate");
    }

    #[test]
    fn a_proof_given_before_the_question_does_not_count() {
        let fence = ConnectionFence::default();
        let (first, _) = fence.join();
        let (_second, _) = fence.join();
        first.prove(first.question(Waker::noop()).expect("a proof is owed"));
        let (_third, admission) = fence.join();
        assert!(admission.now_or_never().is_none(), "an old proof opened the gate");
    }

    #[test]
    fn who_has_left_is_told_apart_from_who_is_silent() {
        let fence = ConnectionFence::default();
        let (silent, _) = fence.join();
        let (gone, _) = fence.join();
        let question = fence.ask();
        gone.leave();
        assert!(!question.have_all_left(), "one is silent");
        drop(silent);
        assert!(question.have_all_left());
    }
}
