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
        let members = self.shared.members.lock();
        LifeQuestion { asked: members.iter().map(|member| (Arc::clone(member), member.ask())).collect() }
    }

    /// How many members there are.
    pub(crate) fn members(&self) -> usize {
        self.shared.members.lock().len()
    }
}

/// A question to the connections of an export whether their clients are there. Those on this machine answer at once, also while they wait
/// for what they have asked for.
pub struct LifeQuestion {
    asked: Vec<(Arc<MemberState>, u64)>,
}

impl LifeQuestion {
    /// Whether one has answered.
    #[must_use]
    pub fn has_answer(&self) -> bool {
        let is_proved =
            |(member, question): &(Arc<MemberState>, u64)| member.proved.load(Ordering::SeqCst) >= *question;
        self.asked.iter().any(is_proved)
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
    fn only_a_living_member_answers_whether_it_is_there() {
        let fence = ConnectionFence::default();
        let (gone, _) = fence.join();
        let question = fence.ask();
        assert!(!question.has_answer());
        drop(gone);
        assert!(!question.has_answer(), "one that has finished is not there");
        let (living, _) = fence.join();
        let question = fence.ask();
        let asked = living.question(Waker::noop()).expect("it was asked");
        living.prove(asked);
        assert!(question.has_answer());
    }
}
