//! What was answered and is not known to be durable. A guest's writes are kept, and written again when a server comes
//! back that may have lost them. A copy's are counted, so that the next flush fails.

use block::{Bytes, Mutation, Unflushed};

/// The answers since the last flush.
#[derive(Default)]
pub(super) struct ReplayLog {
    unflushed: Unflushed,
    /// How many writes were answered that were neither kept nor durable, and how many of them a flush has covered.
    unkept: u64,
    unkept_flushed: u64,
}

/// What a flush covers.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    replay_log: u64,
    unkept: u64,
}

impl ReplayLog {
    /// The log of an export that an earlier process may have used: what that one was answered counts as a write that is
    /// neither kept nor durable, unless nobody writes there.
    pub(super) fn of_used(is_read_only: bool) -> Self {
        Self { unkept: u64::from(!is_read_only), ..Self::default() }
    }

    /// A guest's write was answered.
    pub(super) fn answered(&mut self, mutation: &Mutation, is_durable: bool) {
        self.unflushed.answered(mutation, is_durable);
    }

    /// A write was answered that is not kept.
    pub(super) const fn answered_unkept(&mut self, is_durable: bool) {
        if !is_durable {
            self.unkept += 1;
        }
    }

    /// What a flush that begins now covers.
    pub(super) const fn mark(&self) -> Mark {
        Mark { replay_log: self.unflushed.mark(), unkept: self.unkept }
    }

    /// The flush that began at `mark` has succeeded.
    pub(super) fn flushed(&mut self, mark: Mark) {
        self.unflushed.flushed(mark.replay_log);
        self.unkept_flushed = self.unkept_flushed.max(mark.unkept);
    }

    /// The answered writes cannot be repeated: the next flush must report it.
    pub(super) fn give_up(&mut self) {
        self.flushed(self.mark());
    }

    /// Whether a server that is lost may have lost something that is not here.
    pub(super) const fn misses_something(&self) -> bool {
        self.unkept > self.unkept_flushed
    }

    /// Whether anything was answered that is not known to be durable.
    pub(super) fn is_unflushed(&self) -> bool {
        self.misses_something() || !self.unflushed.is_empty()
    }

    /// What is to be written again, in order. Unanswered requests are repeated by their callers.
    pub(super) fn to_replay(&self) -> Vec<Mutation> {
        self.unflushed.to_replay()
    }

    /// How much memory that takes.
    pub(super) const fn bytes(&self) -> Bytes {
        self.unflushed.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_was_not_kept_is_missed_until_a_flush_that_began_after_it() {
        let mut replay_log = ReplayLog::default();
        let mark = replay_log.mark();
        replay_log.answered_unkept(true);
        assert!(!replay_log.misses_something(), "it was durable");
        replay_log.answered_unkept(false);
        replay_log.flushed(mark);
        assert!(replay_log.misses_something());
        replay_log.flushed(replay_log.mark());
        assert!(!replay_log.misses_something());
    }

    #[test]
    fn what_is_kept_and_what_is_not_is_unflushed_until_a_flush() {
        let mut replay_log = ReplayLog::default();
        assert!(!replay_log.is_unflushed());
        replay_log.answered(&Mutation::zeroes(block::Extent::new(Bytes(0), Bytes(4096)), false), false);
        assert!(replay_log.is_unflushed() && !replay_log.misses_something());
        replay_log.flushed(replay_log.mark());
        assert!(!replay_log.is_unflushed());
        replay_log.answered_unkept(false);
        assert!(replay_log.is_unflushed());
    }
}
