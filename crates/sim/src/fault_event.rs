//! What happens to a scenario while it is played, and when.

use std::fmt;
use std::time::Duration;

use api::v1::VmMovePhase;
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
    /// Somebody does something to a QEMU of the machine.
    Machine(MachineEvent),
    /// The daemon ends, and somebody writes to the disk that holds the volume before it starts again.
    ChangedBehind,
}

/// What others do to a machine, of which no daemon is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MachineEvent {
    /// The operator shuts the guest down and starts it again: another process behind the same monitor.
    Restarted,
    /// The operator stops the guest.
    Stopped,
    /// The operator lets a guest go on that he has stopped.
    Resumed,
    /// A script lets the source's guest go on after QEMU has stopped and sent it.
    SentResumed,
    /// Another client has the monitor of one of the QEMUs for a while.
    MonitorHeld,
    /// The source's QEMU is killed, and started again by its operator.
    SourceKilled,
    /// The target's QEMU is killed after it has loaded everything.
    TargetKilled,
    /// The first of its disks moves to the other host alone.
    DiskMoved,
    /// Its move is asked for, where nobody else does: a disk of it is at the other host already.
    Asked,
}

impl From<MachineEvent> for FaultEvent {
    fn from(event: MachineEvent) -> Self {
        Self::Machine(event)
    }
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
            Self::Machine(MachineEvent::Restarted) => "qemu-restarted",
            Self::Machine(MachineEvent::Stopped) => "guest-stopped",
            Self::Machine(MachineEvent::Resumed) => "guest-resumed",
            Self::Machine(MachineEvent::SentResumed) => "sent-resumed",
            Self::Machine(MachineEvent::MonitorHeld) => "monitor-held",
            Self::Machine(MachineEvent::SourceKilled) => "source-qemu-killed",
            Self::Machine(MachineEvent::TargetKilled) => "target-qemu-killed",
            Self::Machine(MachineEvent::DiskMoved) => "disk-moved-alone",
            Self::Machine(MachineEvent::Asked) => "machine-asked",
        }
    }
}

/// At which moment something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before the move of a machine is asked for, once the daemon knows it.
    Before,
    /// At a moment of the scenario's span that the seed chooses.
    Sometime,
    /// So long after the move was asked for.
    After(Duration),
    /// Up to 200 us after the move was first seen in this phase, or past it where phases are short. If it does not come there within
    /// a minute, the verdict says so.
    In(Phase),
    /// The same of the phase of a whole machine's move. It begins again with each move that is asked for.
    InMachine(VmMovePhase),
}

impl When {
    /// The phase that it waits for, if it does.
    #[must_use]
    pub const fn aim(self) -> Option<Aim> {
        match self {
            Self::Before | Self::Sometime | Self::After(_) => None,
            Self::In(phase) => Some(Aim::Disk(phase)),
            Self::InMachine(phase) => Some(Aim::Machine(phase)),
        }
    }
}

/// The phase that an event waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Aim {
    /// Of the move of a disk.
    Disk(Phase),
    /// Of the move of a machine.
    Machine(VmMovePhase),
}

impl Aim {
    /// Whether the volumes are the target's in this phase, or about to be.
    #[must_use]
    pub const fn is_after_commit(self) -> bool {
        match self {
            Self::Disk(phase) => matches!(phase, Phase::Committed | Phase::Switched | Phase::Done),
            Self::Machine(phase) => matches!(phase, VmMovePhase::Postcopy | VmMovePhase::Finishing),
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(phase) => out.write_str(phase.name()),
            Self::Machine(phase) => write!(out, "machine {phase}"),
        }
    }
}

/// Something and its moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happens.
    pub what: FaultEvent,
    /// When it happens.
    pub when: When,
}
