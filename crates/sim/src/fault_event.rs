//! What happens to a scenario while it is played, and when.

use std::time::Duration;

use migrate::Phase;

/// Something that happens once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultEvent {
    /// The process is killed and starts again.
    Crash,
    /// The process is killed, starts again, and is killed one to three times more while it recovers.
    CrashAgain,
    /// The process is killed when a few of the guest's writes have just been asked and answered, and starts again.
    CrashAtWrite,
    /// The host loses its power and comes back.
    PowerLoss,
    /// The host loses its power while the journal is written, and comes back.
    PowerLossAtStore,
    /// The guest's connection is cut and comes back.
    Reconnect,
    /// The guest's connection is lost for the guest, and not for the server. (Over NBD, as the next two.)
    HalfOpen,
    /// The guest does not read its answers for a while.
    SlowReader,
    /// Nothing moves between guest and server for a while.
    LinkDown,
    /// The target is gone for a while.
    TargetLost,
    /// The target answers nothing for so many milliseconds, reads no more than writes.
    TargetSilent(u32),
    /// A byte of the target changes.
    Corruption,
    /// The disk of the journal and of the progress map takes nothing for a while.
    StoreFull,
    /// The journal's disk fails most writes for a while, and any part of them may have landed.
    StoreFails,
    /// The journal's disk takes a minute over most writes for a while, and does them.
    StoreSlow,
    /// Half of what the daemon writes to its small files, and of the syncs of their directories, fails for a while.
    FilesFail,
    /// Somebody else has all buffers for a while.
    PoolEmpty,
    /// The wall clocks jump, by up to two days, forward or back.
    ClockJump,
    /// Somebody pauses the move, and resumes it later.
    Pause,
    /// Somebody cancels the move.
    Cancel,
    /// Somebody changes the bandwidth.
    Bandwidth,
    /// The daemon of the host that the volume moves to is killed, and starts again. (Between hosts, as those that follow.)
    PeerCrash,
    /// That host loses its power, and comes back.
    PeerPowerLoss,
    /// Its daemon is killed, and what it was being filled with is changed before it starts again.
    PeerMeddled,
    /// Its answers vanish on one of the connections; then it loses its power, and comes back.
    PeerUnheard,
    /// The hosts cannot reach each other for a while.
    PeerTrouble,
    /// Somebody asks it to hold the volume under an epoch that nobody was ever to have.
    WrongEpoch,
    /// The arbiter of the hosts is hard to ask for a while.
    ArbiterTrouble,
    /// What is committed there arrives late for a while.
    ArbiterLate,
    /// Half of what the other host's daemon writes to its small files, and of the syncs of their directories, fails for a while.
    PeerFilesFail,
    /// The disk of the other host's journal, and of its daemon's files, takes nothing for a while.
    PeerStoreFull,
    /// The daemon ends, politely or not, and starts while this is away, which comes back later.
    StartWithout(Part),
    /// This is away for a while, under a daemon that runs. Nothing of it is lost.
    Away(Part),
    /// The next flush of this fails, and what it covered is lost. Later ones fail until it is opened again, as those of a file do.
    FlushLost(Part),
    /// The daemon ends, and starts with something else in the place of this.
    StartExchanged(Part, Exchange),
    /// The daemon ends, and somebody writes to the disk that holds the volume before it starts again.
    ChangedBehind,
}

/// What of a volume may be away, or may not be what it was, when the daemon starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The disk that holds it: the base of whatever lies over that.
    Source,
    /// The target of its move.
    Target,
    /// The file of one of its snapshots.
    Layer,
    /// The store of its surrogate with this number.
    Store(u32),
    /// The flash of its cache.
    Cache,
}

/// What is in the place of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exchange {
    /// An empty one.
    Blank,
    /// What it was when the daemon was stopped the last time.
    RolledBack,
}

impl FaultEvent {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Crash => "crash",
            Self::CrashAgain => "crash-again",
            Self::CrashAtWrite => "crash-at-write",
            Self::PowerLoss => "power-loss",
            Self::PowerLossAtStore => "power-loss-at-store",
            Self::Reconnect => "reconnect",
            Self::HalfOpen => "half-open",
            Self::SlowReader => "slow-reader",
            Self::LinkDown => "link-down",
            Self::TargetLost => "target-lost",
            Self::TargetSilent(_) => "target-silent",
            Self::Corruption => "corruption",
            Self::StoreFull => "store-full",
            Self::StoreFails => "store-fails",
            Self::StoreSlow => "store-slow",
            Self::FilesFail => "files-fail",
            Self::PoolEmpty => "pool-empty",
            Self::ClockJump => "clock-jump",
            Self::Pause => "pause",
            Self::Cancel => "cancel",
            Self::Bandwidth => "bandwidth",
            Self::PeerCrash => "neighbour-crash",
            Self::PeerPowerLoss => "neighbour-power-loss",
            Self::PeerMeddled => "neighbour-meddled",
            Self::PeerUnheard => "neighbour-unheard",
            Self::PeerTrouble => "neighbour-trouble",
            Self::WrongEpoch => "wrong-epoch",
            Self::ArbiterTrouble => "arbiter-trouble",
            Self::ArbiterLate => "arbiter-late",
            Self::PeerFilesFail => "neighbour-files-fail",
            Self::PeerStoreFull => "neighbour-store-full",
            Self::StartWithout(Part::Source) => "start-without-source",
            Self::StartWithout(Part::Target) => "start-without-target",
            Self::StartWithout(Part::Layer) => "start-without-layer",
            Self::StartWithout(Part::Store(_)) => "start-without-store",
            Self::StartWithout(Part::Cache) => "start-without-cache",
            Self::Away(_) => "away",
            Self::FlushLost(_) => "flush-lost",
            Self::StartExchanged(_, Exchange::Blank) => "start-blank",
            Self::StartExchanged(_, Exchange::RolledBack) => "start-rolled-back",
            Self::ChangedBehind => "changed-behind",
        }
    }
}

/// At which moment something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// At a moment of the scenario's span that the seed chooses.
    Sometime,
    /// So long after the move was asked for.
    After(Duration),
    /// Up to 200 us after the move was first seen in this phase, or past it where phases are short. If it does not come there within
    /// a minute, the verdict says so.
    In(Phase),
}

/// Something and its moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happens.
    pub what: FaultEvent,
    /// When it happens.
    pub when: When,
}
