//! What is done to a VM that moves, drawn from a seed.

use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;

/// Which end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Source,
    Target,
}

/// What is done to the hosts, or to the move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blow {
    /// Nothing comes through the link for a while, and nobody is told.
    Cut(Duration),
    /// `kill -9` of a daemon, and a new one after a rest.
    Kill(End, Duration),
    /// The same of both.
    KillBoth(Duration),
    /// A daemon is stopped for a while.
    Freeze(End, Duration),
    /// A QEMU is stopped for a while.
    FreezeQemu(End, Duration),
    /// `kill -9` of the target's QEMU before it has the machine.
    KillTargetQemu,
    /// The target's QEMU loses a device, and refuses the state of it.
    Refuse,
    /// The target's file system is filled, and has room again when the move is over.
    Fill,
    /// The move is cancelled.
    Cancel,
    /// `kill -9` of the source's QEMU: the guest crashes, and its disks must be intact.
    Crash,
    /// Another client has the monitor of a QEMU for a while, as soon as the daemon's connection ends; its daemon is killed meanwhile.
    HoldMonitor(End, Duration),
    /// The operator stops the guest.
    Stop,
    /// Somebody lets a guest go on that the operator, or QEMU at the end of its migration, has stopped at the source.
    Resume,
    /// The state directory of a host is full, and has room again when the move is over.
    FillState(End),
}

/// Every kind, and the move that nothing happens to.
pub(super) const KINDS: [&str; 11] =
    ["Cut", "Kill", "KillBoth", "Freeze", "FreezeQemu", "KillTargetQemu", "Refuse", "Fill", "Cancel", "Crash", "none"];

/// What the daemon does not bear yet, and why. No seed draws it; `--with KIND` has it in every cycle. `Restart` is of an act: the VM
/// is added while another QEMU is behind its monitor. Whoever mends one of them draws it in [`Rng::blow`].
pub(super) const UNMENDED: [(&str, &str); 5] = [
    ("HoldMonitor", "a guest stays stopped when the monitor was busy once"),
    ("Stop", "whether the guest runs is what it was when the move was asked for"),
    ("Resume", "a guest that goes on after it was sent runs twice"),
    ("FillState", "a move whose end cannot be stored is taken for committed by the next start"),
    ("Restart", "the QEMU of a VM that was started again since `vm add` is not ended"),
];

/// Codes of errors by which a move fails whose other host, or the way there, was lost at any moment.
const LOST: &[&str] = &["host-unreachable", "qmp-refused", "qmp-unreachable", "not-found", "move-failed"];
/// The same of one whose QEMU has ended, or does not take what comes.
const ENDED: &[&str] = &["qmp-unreachable", "qmp-refused", "vm-refused", "not-found", "wrong-state"];

impl Blow {
    /// The codes of errors by which a move may fail that this was done to.
    pub(super) const fn codes(self) -> &'static [&'static str] {
        match self {
            Self::Cut(_) | Self::Kill(..) | Self::KillBoth(_) | Self::Freeze(..) => LOST,
            Self::FreezeQemu(..) => &["qmp-busy", "qmp-refused", "move-failed", "host-unreachable"],
            Self::KillTargetQemu | Self::Refuse => ENDED,
            Self::Fill => &["no-space"],
            // It is cancelled, or goes on.
            Self::Cancel | Self::Stop => &[],
            Self::Crash => &["qmp-unreachable", "qmp-refused"],
            Self::HoldMonitor(..) => &["qmp-busy", "move-failed", "host-unreachable"],
            Self::Resume => &["wrong-state", "qmp-refused", "move-failed"],
            Self::FillState(_) => &["no-space", "io", "move-failed", "host-refused"],
        }
    }

    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Cut(_) => "Cut",
            Self::Kill(..) => "Kill",
            Self::KillBoth(_) => "KillBoth",
            Self::Freeze(..) => "Freeze",
            Self::FreezeQemu(..) => "FreezeQemu",
            Self::KillTargetQemu => "KillTargetQemu",
            Self::Refuse => "Refuse",
            Self::Fill => "Fill",
            Self::Cancel => "Cancel",
            Self::Crash => "Crash",
            Self::HoldMonitor(..) => "HoldMonitor",
            Self::Stop => "Stop",
            Self::Resume => "Resume",
            Self::FillState(_) => "FillState",
        }
    }

    /// Whether it only means something while the target's QEMU waits for the memory.
    const fn is_of_arrival(self) -> bool {
        matches!(self, Self::KillTargetQemu | Self::Refuse)
    }
}

/// How far a move is, as its QEMUs show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It was just asked for.
    Asked,
    /// The target's QEMU is there.
    TargetStarted,
    /// The guest is stopped.
    Stopped,
    /// The target's guest runs.
    TargetRuns,
}

/// A blow and when it comes: so long after the move has reached a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timed {
    pub(super) stage: Stage,
    pub(super) rest: Duration,
    pub(super) blow: Blow,
}

/// The random numbers of one act.
pub(super) struct Rng(ChaCha12Rng);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha12Rng::seed_from_u64(seed))
    }

    pub(super) fn number(&mut self, below: u32) -> u32 {
        self.0.random_range(0..below)
    }

    pub(super) fn seed(&mut self) -> u64 {
        self.0.random()
    }

    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.0.random_range(from..=to))
    }

    fn end(&mut self) -> End {
        [End::Source, End::Target][self.0.random_range(0..2)]
    }

    fn blow(&mut self) -> Blow {
        match self.0.random_range(0..31) {
            0..=5 => Blow::Cut(self.millis(50, 4000)),
            6..=12 => Blow::Kill(self.end(), self.millis(0, 1500)),
            13 | 14 => Blow::KillBoth(self.millis(0, 1000)),
            15..=17 => Blow::Freeze(self.end(), self.millis(50, 2500)),
            18 | 19 => Blow::FreezeQemu(self.end(), self.millis(50, 2000)),
            20..=22 => Blow::KillTargetQemu,
            23 | 24 => Blow::Refuse,
            25 | 26 => Blow::Fill,
            27..=29 => Blow::Cancel,
            _ => Blow::Crash,
        }
    }

    fn timed(&mut self) -> Timed {
        let blow = self.blow();
        let (stage, rest) = match (blow, self.0.random_range(0..6)) {
            (Blow::Fill, _) => (Stage::Asked, self.millis(0, 600)),
            (blow, _) if blow.is_of_arrival() => (Stage::TargetStarted, self.millis(0, 1500)),
            (_, 0 | 1) => (Stage::Asked, self.millis(0, 4000)),
            (_, 2) => (Stage::TargetStarted, self.millis(0, 2500)),
            (_, 3 | 4) => (Stage::Stopped, self.millis(0, 400)),
            _ => (Stage::TargetRuns, self.millis(0, 300)),
        };
        Timed { stage, rest, blow }
    }

    /// Up to three blows.
    pub(super) fn blows(&mut self) -> Vec<Timed> {
        let count = [0, 1, 1, 1, 1, 2, 2, 3][self.0.random_range(0..8)];
        (0..count).map(|_| self.timed()).collect()
    }

    /// What a cycle has of a kind that no seed draws, one after the other.
    pub(super) fn blows_of(&mut self, kind: &str) -> Vec<Timed> {
        let timed = |stage, rest, blow| Timed { stage, rest, blow };
        match kind {
            "HoldMonitor" => {
                let (end, span) = (self.end(), self.millis(500, 8000));
                vec![timed(Stage::Stopped, self.millis(0, 200), Blow::HoldMonitor(end, span))]
            }
            "Stop" => {
                let stop = timed(Stage::Asked, self.millis(0, 3000), Blow::Stop);
                let resume = timed(Stage::Asked, self.millis(0, 2000), Blow::Resume);
                if self.number(2) == 0 { vec![stop] } else { vec![stop, resume] }
            }
            "Resume" => vec![timed(Stage::Stopped, self.millis(0, 300), Blow::Resume)],
            "FillState" => vec![timed(Stage::Asked, self.millis(0, 3000), Blow::FillState(self.end()))],
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_blows_again_and_every_blow_is_drawn() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            (0..20).flat_map(|_| rng.blows()).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        let drawn: std::collections::BTreeSet<&str> =
            (0..30).flat_map(draw).map(|timed| timed.blow.kind()).chain(["none"]).collect();
        assert_eq!(drawn, KINDS.into_iter().collect());
    }

    #[test]
    fn what_no_seed_draws_is_drawn_by_its_name_and_every_blow_has_its_own_codes() {
        for (kind, why) in UNMENDED {
            assert!(!why.is_empty() && !KINDS.contains(&kind), "{kind}");
            let blows = Rng::new(1).blows_of(kind);
            assert_eq!(blows.iter().any(|timed| timed.blow.kind() == kind), kind != "Restart", "{kind}");
        }
        // A target that is full says so, and nothing else does.
        assert_eq!(Blow::Fill.codes(), ["no-space"]);
        assert!(!Blow::Cut(Duration::ZERO).codes().contains(&"no-space") && Blow::Cancel.codes().is_empty());
    }
}
