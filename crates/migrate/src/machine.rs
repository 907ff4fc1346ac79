//! The phases of a migration as a pure state machine: `apply(event)` gives actions and never awaits. The driver awaits.
//!
//! ```text
//!  preparing ──Prepared──▶ copying ──Copied──▶ verifying ──Verified──▶ pre-switch ──Flushed──▶ quiescing
//!                           ▲   ▲                  │ Missing               │ Missing    ▲          │
//!                           │   └──────────────────┴───────────────────────┘            │   NotQuiesced
//!                           │         ▲                                                 └──────────┤
//!                           │         │ Missing                                                    │ Quiesced
//!                           │         └──────── last-copy ◀── Behind ──────────────────────────────┤
//!                   TargetResumed                   └── CaughtUp ───────────────────────────────┐  │
//!                           │                                                                   ▼  ▼
//!                      target-lost ◀── TargetFailed, from any phase                            committing
//!                           ▲          above that line                                  CommitFailed│   │CommitStored
//!                           │                                                                   ▼   │   │
//!                           │  Reverted, the target had failed       Cancel, TargetFailed   in-doubt│   │
//!                           ├──────────────────────────── reverting ◀───────────────────────┤  ▲    │   │
//!                           │                                 │ Reverted, cancelled          │  └────┘   │
//!                           │ Cancel                          ├──── CommitCounts ──▶ ╮       │           │
//!                           ▼                                 ▼                      ▼       ▼CommitStored
//!   Cancel, Broken ──▶ cancelling ◀───────────────────────────┘                             committed ◀──┘
//!   (any phase up to       │ Cleaned                                                          │ Swapped
//!    last-copy)            ▼                                                                  ▼
//!                  cancelled or failed                                          done ◀──── switched
//!                                                                                  Finished
//! ```
//!
//! Up to *committing* the source holds the volume, from *committed* on the target does, and nothing leads back. Between
//! the two lies *in-doubt*: a failed store may or may not be on the disk. So guest writes and flushes go to both sides,
//! and none is answered by one side alone. A later store settles the doubt: the commit again, or its revocation. Paused
//! is orthogonal: copies and comparisons stop, mirroring goes on, and no switchover begins.
//!
//! A strategy that tracks what the guest writes copies the rest in *last-copy*, while the guest is held. One that mirrors
//! has nothing left to copy there, and goes from *quiescing* to *committing* at once.

use serde::{Deserialize, Serialize};

/// Where a migration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The mirror is in the guest's path, nothing has been copied.
    #[default]
    Preparing,
    /// Chunks are copied, the guest's writes mirrored.
    Copying,
    /// Everything is copied; source and target are compared.
    Verifying,
    /// Guest flushes go to both sides; the target is flushed for the last time.
    PreSwitch,
    /// New guest requests wait until those in flight are answered.
    Quiescing,
    /// What the guest has changed since it was copied is copied while the guest is held.
    LastCopy,
    /// The commit record is on its way to the disk.
    Committing,
    /// The commit record may or may not be on the disk.
    InDoubt,
    /// A commit in doubt is being taken back.
    Reverting,
    /// The target holds the volume; the guest's requests do not go there alone yet.
    Committed,
    /// The guest is on the target; the digest of the frozen source is computed if it was asked for.
    Switched,
    /// All is done.
    Done,
    /// The target failed: the mirror is dropped, writes are tracked, somebody must resume or cancel.
    TargetLost,
    /// The mirror is being taken out of the guest's path.
    Cancelling,
    /// The guest is on the source as before.
    Cancelled,
    /// The guest is on the source, because of an error.
    Failed,
}

impl Phase {
    /// The stable name, as reports and the API show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Copying => "copying",
            Self::Verifying => "verifying",
            Self::PreSwitch => "pre-switch",
            Self::Quiescing => "quiescing",
            Self::LastCopy => "last-copy",
            Self::Committing => "committing",
            Self::InDoubt => "in-doubt",
            Self::Reverting => "reverting",
            Self::Committed => "committed",
            Self::Switched => "switched",
            Self::Done => "done",
            Self::TargetLost => "target-lost",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }

    /// Whether nothing follows.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }

    /// Whether the target holds the volume.
    #[must_use]
    pub const fn is_committed(self) -> bool {
        matches!(self, Self::Committed | Self::Switched | Self::Done)
    }

    /// Whether a cancel is still taken: the commit has not begun, or can be taken back.
    #[must_use]
    pub const fn can_cancel(self) -> bool {
        !self.is_final() && !self.is_committed() && !matches!(self, Self::Committing)
    }

    /// Whether the target takes part and its failure means that it is lost.
    const fn needs_target(self) -> bool {
        matches!(
            self,
            Self::Preparing | Self::Copying | Self::Verifying | Self::PreSwitch | Self::Quiescing | Self::LastCopy
        )
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.name())
    }
}

/// What happens to a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The job is on record.
    Prepared,
    /// Every chunk is on both sides.
    Copied,
    /// What had to be compared was equal, or nothing had to be.
    Verified,
    /// Some chunk must be copied again.
    Missing,
    /// The last flush of the target has succeeded, with guest flushes going to both sides since before it.
    Flushed,
    /// No guest request is in flight and none can begin.
    Quiesced,
    /// The same, and some chunks are to be copied before anybody lets the guest go again.
    Behind,
    /// They are copied, and the target is flushed.
    CaughtUp,
    /// The guest's requests did not drain in time; it was let go.
    NotQuiesced,
    /// The commit record is on the disk.
    CommitStored,
    /// The store of the commit record failed, or nobody knows yet.
    CommitFailed,
    /// The record that takes the commit back is on the disk.
    Reverted,
    /// The store of that record failed.
    NotReverted,
    /// The commit can be taken back no more, and is on record.
    CommitCounts,
    /// The guest's requests go to the target.
    Swapped,
    /// Nothing is left to do after the switchover.
    Finished,
    /// The target failed a write, a flush or a read.
    TargetFailed,
    /// The target, or another one, is there again.
    TargetResumed,
    /// The source cannot be read, the sides differ, or the job cannot be recorded.
    Broken,
    /// The mirror is out of the guest's path.
    Cleaned,
    /// Somebody wants it to wait.
    Pause,
    /// Somebody wants it to go on.
    Resume,
    /// Somebody wants it undone.
    Cancel,
}

/// What the driver is to do at once, before the next event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Make the phase durable, as far as that is possible: the source holds the volume.
    Record(Phase),
    /// Guest flushes and forced writes go to the source alone, or to both sides.
    FlushBoth(bool),
    /// Answer no guest write or flush by one side alone.
    HoldDoubt,
    /// Drop the mirror; track what the guest writes.
    DropMirror,
    /// The target answers the guest from now on, whatever the source says.
    TargetHolds,
    /// Let the guest's requests go again.
    LetGo,
}

/// The state machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    phase: Phase,
    paused: bool,
    /// It ends as failed rather than cancelled.
    broken: bool,
    /// A target failed while a commit was in doubt: what `reverting` leads to.
    target_failed: bool,
}

impl Default for Machine {
    fn default() -> Self {
        Self { phase: Phase::Preparing, paused: false, broken: false, target_failed: false }
    }
}

impl Machine {
    /// Where it is.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether copies, comparisons and the switchover wait.
    #[must_use]
    pub const fn paused(&self) -> bool {
        self.paused
    }

    /// Whether it ends as failed, if it is undone.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        self.broken
    }

    /// Takes `event`; gives what is to be done for it. An event that means nothing in this phase does nothing.
    pub fn apply(&mut self, event: Event) -> Vec<Action> {
        use Phase as P;
        match (self.phase, event) {
            (phase, Event::Pause) if !phase.is_committed() && !phase.is_final() => self.paused = true,
            (_, Event::Resume) => self.paused = false,

            (P::Preparing, Event::Prepared) => self.phase = P::Copying,
            (P::Copying, Event::Copied) => self.phase = P::Verifying,
            (P::Verifying, Event::Verified) => return self.to(P::PreSwitch, &[Action::FlushBoth(true)]),
            (P::Verifying | P::PreSwitch | P::Quiescing | P::LastCopy, Event::Missing) => {
                return self.to(P::Copying, &[Action::LetGo, Action::FlushBoth(false)]);
            }
            (P::PreSwitch, Event::Flushed) if !self.paused => self.phase = P::Quiescing,
            // From here on the commit may count, whatever fails while it is stored.
            (P::Quiescing, Event::Quiesced) | (P::LastCopy, Event::CaughtUp) => {
                return self.to(P::Committing, &[Action::HoldDoubt]);
            }
            (P::Quiescing, Event::Behind) => self.phase = P::LastCopy,
            (P::Quiescing, Event::NotQuiesced) => return self.to(P::PreSwitch, &[Action::LetGo]),

            (P::Committing | P::InDoubt, Event::CommitStored) => return self.to(P::Committed, &[Action::TargetHolds]),
            (P::Reverting, Event::CommitCounts) => {
                // Whoever wished it away, and whatever has failed since.
                (self.target_failed, self.broken) = (false, false);
                return self.to(P::Committed, &[Action::TargetHolds]);
            }
            (P::Committing, Event::CommitFailed) => return self.to(P::InDoubt, &[Action::LetGo]),
            (P::InDoubt, Event::Cancel) => self.phase = P::Reverting,
            (P::InDoubt | P::Reverting, Event::TargetFailed) => {
                self.target_failed = true;
                self.phase = P::Reverting;
            }
            (P::InDoubt, Event::Broken) => {
                self.broken = true;
                self.phase = P::Reverting;
            }
            (P::Reverting, Event::Reverted) => {
                let target_failed = std::mem::take(&mut self.target_failed);
                if target_failed && !self.broken {
                    return self.to(P::TargetLost, &[Action::DropMirror, Action::FlushBoth(false)]);
                }
                return self.to(P::Cancelling, &[Action::DropMirror, Action::FlushBoth(false)]);
            }

            (P::Committed, Event::Swapped) => self.phase = P::Switched,
            (P::Switched, Event::Finished) => self.phase = P::Done,

            (phase, Event::TargetFailed) if phase.needs_target() => {
                let actions =
                    [Action::DropMirror, Action::LetGo, Action::FlushBoth(false), Action::Record(P::TargetLost)];
                return self.to(P::TargetLost, &actions);
            }
            (P::TargetLost, Event::TargetResumed) => return self.to(P::Copying, &[Action::Record(P::Copying)]),

            (phase, Event::Cancel | Event::Broken) if phase.needs_target() || phase == P::TargetLost => {
                self.broken |= event == Event::Broken;
                return self.to(P::Cancelling, &[Action::LetGo, Action::FlushBoth(false)]);
            }
            (P::Cancelling, Event::Cleaned) => self.phase = if self.broken { P::Failed } else { P::Cancelled },
            _ => {}
        }
        Vec::new()
    }

    fn to(&mut self, phase: Phase, actions: &[Action]) -> Vec<Action> {
        self.phase = phase;
        actions.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [Event; 23] = [
        Event::Prepared,
        Event::Copied,
        Event::Verified,
        Event::Missing,
        Event::Flushed,
        Event::Quiesced,
        Event::Behind,
        Event::CaughtUp,
        Event::NotQuiesced,
        Event::CommitStored,
        Event::CommitFailed,
        Event::Reverted,
        Event::NotReverted,
        Event::CommitCounts,
        Event::Swapped,
        Event::Finished,
        Event::TargetFailed,
        Event::TargetResumed,
        Event::Broken,
        Event::Cleaned,
        Event::Pause,
        Event::Resume,
        Event::Cancel,
    ];

    fn after(events: &[Event]) -> Machine {
        let mut machine = Machine::default();
        for event in events {
            machine.apply(*event);
        }
        machine
    }

    /// Up to the moment when the commit record is on its way.
    const TO_COMMIT: [Event; 5] = [Event::Prepared, Event::Copied, Event::Verified, Event::Flushed, Event::Quiesced];

    #[test]
    fn the_straight_way_leads_through_every_phase() {
        let mut machine = after(&TO_COMMIT);
        assert_eq!(machine.phase(), Phase::Committing);
        assert_eq!(machine.apply(Event::CommitStored), [Action::TargetHolds]);
        machine.apply(Event::Swapped);
        machine.apply(Event::Finished);
        assert_eq!(machine.phase(), Phase::Done);
    }

    #[test]
    fn what_is_behind_is_copied_while_the_guest_is_held_or_the_guest_is_let_go() {
        let mut machine = after(&TO_COMMIT[..4]);
        machine.apply(Event::Behind);
        assert_eq!(machine.phase(), Phase::LastCopy);
        for event in [Event::Missing, Event::Cancel, Event::TargetFailed, Event::Broken] {
            let mut tried = machine.clone();
            assert!(tried.apply(event).contains(&Action::LetGo), "{event:?} leaves the guest held");
        }
        machine.apply(Event::CaughtUp);
        assert_eq!(machine.phase(), Phase::Committing);
    }

    #[test]
    fn a_paused_migration_does_not_switch_over() {
        let mut machine = after(&TO_COMMIT[..3]);
        machine.apply(Event::Pause);
        machine.apply(Event::Flushed);
        assert_eq!(machine.phase(), Phase::PreSwitch);
        machine.apply(Event::Resume);
        machine.apply(Event::Flushed);
        assert_eq!(machine.phase(), Phase::Quiescing);
    }

    #[test]
    fn a_doubt_is_settled_by_a_store_and_by_nothing_else() {
        let mut machine = after(&TO_COMMIT);
        assert_eq!(machine.apply(Event::CommitFailed), [Action::LetGo]);
        for event in EVENTS {
            let mut tried = machine.clone();
            tried.apply(event);
            let expected = match event {
                Event::CommitStored => Phase::Committed,
                Event::Cancel | Event::TargetFailed | Event::Broken => Phase::Reverting,
                _ => Phase::InDoubt,
            };
            assert_eq!(tried.phase(), expected, "after {event:?}");
        }
        machine.apply(Event::TargetFailed);
        machine.apply(Event::CommitStored);
        assert_eq!(machine.phase(), Phase::Reverting, "a commit that is being taken back was believed");
        let mut counted = machine.clone();
        assert_eq!(counted.apply(Event::CommitCounts), [Action::TargetHolds]);
        assert_eq!(counted.phase(), Phase::Committed);
        assert!(machine.apply(Event::Reverted).contains(&Action::DropMirror));
        assert_eq!(machine.phase(), Phase::TargetLost);
    }

    /// Every pair of phases between which one event may lead.
    fn allowed(from: Phase, to: Phase) -> bool {
        use Phase as P;
        from == to
            || match from {
                P::Preparing => matches!(to, P::Copying | P::TargetLost | P::Cancelling),
                P::Copying => matches!(to, P::Verifying | P::TargetLost | P::Cancelling),
                P::Verifying => matches!(to, P::PreSwitch | P::Copying | P::TargetLost | P::Cancelling),
                P::PreSwitch => matches!(to, P::Quiescing | P::Copying | P::TargetLost | P::Cancelling),
                P::Quiescing => {
                    matches!(
                        to,
                        P::Committing | P::LastCopy | P::PreSwitch | P::Copying | P::TargetLost | P::Cancelling
                    )
                }
                P::LastCopy => matches!(to, P::Committing | P::Copying | P::TargetLost | P::Cancelling),
                P::Committing => matches!(to, P::Committed | P::InDoubt),
                P::InDoubt => matches!(to, P::Committed | P::Reverting),
                P::Reverting => matches!(to, P::TargetLost | P::Cancelling | P::Committed),
                P::Committed => to == P::Switched,
                P::Switched => to == P::Done,
                P::TargetLost => matches!(to, P::Copying | P::Cancelling),
                P::Cancelling => matches!(to, P::Cancelled | P::Failed),
                P::Done | P::Cancelled | P::Failed => false,
            }
    }

    proptest! {
        #[test]
        fn no_sequence_of_events_leaves_the_drawing(choices in prop::collection::vec(0..EVENTS.len(), 0..60)) {
            let mut machine = Machine::default();
            let mut doubt = false;
            let mut flush_both = false;
            for choice in choices {
                let before = machine.clone();
                let actions = machine.apply(EVENTS[choice]);
                let (from, to) = (before.phase(), machine.phase());
                prop_assert!(allowed(from, to), "{from:?} led to {to:?} by {:?}", EVENTS[choice]);
                if from.is_committed() {
                    prop_assert!(to.is_committed(), "the commit was undone by {:?}", EVENTS[choice]);
                    prop_assert!(!actions.contains(&Action::DropMirror));
                }
                for action in &actions {
                    match action {
                        Action::FlushBoth(both) => flush_both = *both,
                        Action::HoldDoubt => doubt = true,
                        Action::DropMirror | Action::TargetHolds if doubt => {
                            let settled = matches!(EVENTS[choice], Event::CommitStored | Event::Reverted | Event::CommitCounts);
                            prop_assert!(settled, "a doubt ended by {:?}", EVENTS[choice]);
                            doubt = false;
                        }
                        _ => {}
                    }
                }
                let needs_both = matches!(
                    to,
                    Phase::PreSwitch | Phase::Quiescing | Phase::LastCopy | Phase::Committing | Phase::InDoubt
                );
                let is_doubtful = matches!(to, Phase::Committing | Phase::InDoubt | Phase::Reverting);
                prop_assert_eq!(doubt, is_doubtful, "{:?} by {:?}", to, EVENTS[choice]);
                prop_assert!(flush_both || !needs_both, "{to:?} with flushes to one side");
                prop_assert!(!flush_both || !matches!(to, Phase::Copying | Phase::TargetLost));
            }
        }

        #[test]
        fn whatever_has_happened_a_cancel_before_the_commit_ends_on_the_source(
            choices in prop::collection::vec(0..EVENTS.len(), 0..30),
        ) {
            let mut machine = Machine::default();
            for choice in choices {
                machine.apply(EVENTS[choice]);
            }
            let cancellable = machine.phase().can_cancel();
            for event in [Event::Cancel, Event::Reverted, Event::Cancel, Event::Cleaned] {
                machine.apply(event);
            }
            let ended = matches!(machine.phase(), Phase::Cancelled | Phase::Failed);
            prop_assert!(ended == cancellable || machine.phase().is_final(), "{:?}", machine);
        }
    }
}
