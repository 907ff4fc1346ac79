//! The vocabulary in which scenarios are told:
//!
//! ```
//! # use transhume_sim as sim;
//! # use migrate::Phase;
//! # use sim::{log::Keep, scenario::Scenario, scenario_dsl::*};
//! let scenario = Scenario::new()
//!     .and(guest().asks(300).writes(0.8).at_one_place(64))
//!     .and(target().flush_errors(0.05).lost_in(Phase::Copying))
//!     .and(process().killed_in(Phase::Committing))
//!     .and(expect().switched());
//! assert_eq!(scenario.play(1, Keep::Tail).violation, None);
//! ```

use std::time::Duration;

use migrate::Phase;

use crate::disk::{Faults, Timing};
use crate::fault_event::{Event, FaultEvent, When};
use crate::guest::{Load, Pattern};
use crate::scenario::{Expected, Scenario};
use crate::wire::WireFigures;

/// Something that can be said of a scenario.
pub trait Clause {
    /// Says it.
    fn add_to(self, scenario: &mut Scenario);
}

/// What the guest does.
#[must_use]
pub fn guest() -> GuestClause {
    GuestClause(Load::default())
}

/// What is wrong with the disk that the volume is on first.
#[must_use]
pub const fn source() -> DiskClause {
    DiskClause::of(0)
}

/// What is wrong with the disk that it moves to.
#[must_use]
pub const fn target() -> DiskClause {
    DiskClause::of(1)
}

/// What is wrong with the disk of the journal and of the progress map.
#[must_use]
pub const fn store() -> DiskClause {
    DiskClause::of(STORE)
}

/// What is wrong with the disk of the progress map alone.
#[must_use]
pub const fn progress_map() -> DiskClause {
    DiskClause::of(MAP)
}

/// What becomes of the process.
#[must_use]
pub const fn process() -> EventClause {
    EventClause(Vec::new())
}

/// What becomes of the guest's connection.
#[must_use]
pub const fn connection() -> EventClause {
    EventClause(Vec::new())
}

/// The guest reaches its disk over NBD.
#[must_use]
pub const fn nbd() -> WireClause {
    WireClause(WireFigures::LOCAL)
}

/// What the operator does.
#[must_use]
pub const fn operator() -> EventClause {
    EventClause(Vec::new())
}

/// What is expected beyond what must always hold.
#[must_use]
pub fn expect() -> ExpectClause {
    ExpectClause(Expected::default())
}

/// The places of the store and of its part that is the progress map beside the two sides.
const STORE: usize = 2;
const MAP: usize = 3;

/// See [`guest`].
#[derive(Clone, Copy)]
pub struct GuestClause(Load);

impl GuestClause {
    /// It makes so many requests.
    #[must_use]
    pub const fn asks(mut self, requests: u64) -> Self {
        self.0.requests = requests;
        self
    }

    /// It goes on until the volume has moved.
    #[must_use]
    pub const fn never_rests(mut self) -> Self {
        self.0.endless = true;
        self
    }

    /// It has so many requests outstanding.
    #[must_use]
    pub const fn at_once(mut self, outstanding: u64) -> Self {
        self.0.outstanding = outstanding;
        self
    }

    /// This part of its requests writes.
    #[must_use]
    pub const fn writes(mut self, part: f64) -> Self {
        self.0.reads = 1.0 - part;
        self
    }

    /// This part flushes.
    #[must_use]
    pub const fn flushes(mut self, part: f64) -> Self {
        self.0.flushes = part;
        self
    }

    /// These parts of its writes are discards and zeroes.
    #[must_use]
    pub const fn discards(mut self, discards: f64, zeroes: f64) -> Self {
        (self.0.discards, self.0.zeroes) = (discards, zeroes);
        self
    }

    /// Its longest request has so many sectors.
    #[must_use]
    pub const fn sectors(mut self, longest: u64) -> Self {
        self.0.sectors_max = longest;
        self
    }

    /// Nine of ten requests go to so many sectors.
    #[must_use]
    pub const fn at_one_place(mut self, sectors: u64) -> Self {
        self.0.pattern = Pattern::Hot(sectors);
        self
    }

    /// It thinks up to so long between two requests.
    #[must_use]
    pub const fn thinks(mut self, think: Duration) -> Self {
        self.0.think = think;
        self
    }
}

impl Clause for GuestClause {
    fn add_to(self, scenario: &mut Scenario) {
        let granule = scenario.load.granule;
        scenario.load = Load { granule, ..self.0 };
    }
}

/// See [`source`], [`target`], [`store`] and [`progress_map`].
#[derive(Clone)]
pub struct DiskClause {
    side: usize,
    faults: Faults,
    timing: Option<Timing>,
    events: Vec<Event>,
}

/// One word for one probability.
macro_rules! faults {
    ($($name:ident $about:literal),*) => {
        $(#[doc = $about]
        #[must_use]
        pub const fn $name(mut self, probability: f64) -> Self {
            self.faults.$name = probability;
            self
        })*
    };
}

impl DiskClause {
    const fn of(side: usize) -> Self {
        let faults = Faults {
            read_errors: 0.0,
            short_reads: 0.0,
            write_errors: 0.0,
            flush_errors: 0.0,
            stuck: 0.0,
            slow: 0.0,
            lost_writes: 0.0,
            misdirected_writes: 0.0,
            flipped_bits: 0.0,
        };
        Self { side, faults, timing: None, events: Vec::new() }
    }

    faults! {
        read_errors "So often a read fails.",
        short_reads "So often a read gives too little.",
        write_errors "So often a write fails.",
        flush_errors "So often a flush fails.",
        stuck "So often a request is stuck.",
        slow "So often it becomes slow for a while.",
        lost_writes "So often it loses a write that it answers.",
        misdirected_writes "So often it puts a write elsewhere.",
        flipped_bits "So often it flips a bit."
    }

    /// The same of another disk.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a sentence reads so")]
    pub fn on(mut self, other: Self) -> Self {
        self.side = other.side;
        self
    }

    /// It is that fast.
    #[must_use]
    pub const fn is(mut self, timing: Timing) -> Self {
        self.timing = Some(timing);
        self
    }

    /// It is lost for a while once the move is in `phase`. (The target.)
    #[must_use]
    pub fn lost_in(mut self, phase: Phase) -> Self {
        self.events.push(Event { what: FaultEvent::TargetLost, when: When::In(phase) });
        self
    }

    /// It answers nothing for so many milliseconds once the move is in `phase`. (The target.)
    #[must_use]
    pub fn silent_in(mut self, phase: Phase, milliseconds: u32) -> Self {
        self.events.push(Event { what: FaultEvent::TargetSilent(milliseconds), when: When::In(phase) });
        self
    }

    /// It fails most writes for a while once the move is in `phase`. (The journal's part of the store.)
    #[must_use]
    pub fn fails_in(mut self, phase: Phase) -> Self {
        self.events.push(Event { what: FaultEvent::StoreFails, when: When::In(phase) });
        self
    }

    /// Most of its writes take long for a while once the move is in `phase`. (The store.)
    #[must_use]
    pub fn slow_in(mut self, phase: Phase) -> Self {
        self.events.push(Event { what: FaultEvent::StoreSlow, when: When::In(phase) });
        self
    }

    /// It takes nothing for a while once the move is in `phase`. (The store.)
    #[must_use]
    pub fn full_in(mut self, phase: Phase) -> Self {
        self.events.push(Event { what: FaultEvent::StoreFull, when: When::In(phase) });
        self
    }
}

impl Clause for DiskClause {
    fn add_to(self, scenario: &mut Scenario) {
        match self.side {
            STORE => (scenario.journal_faults, scenario.map_faults) = (self.faults, self.faults),
            MAP => scenario.map_faults = self.faults,
            side => scenario.faults[side] = self.faults,
        }
        if let (Some(timing), Some(place)) = (self.timing, scenario.timings.get_mut(self.side)) {
            *place = timing;
        }
        scenario.events.extend(self.events);
    }
}

/// See [`process`], [`operator`] and [`connection`].
#[derive(Clone, Default)]
pub struct EventClause(Vec<Event>);

impl EventClause {
    fn add(mut self, what: FaultEvent, when: When) -> Self {
        self.0.push(Event { what, when });
        self
    }

    /// Whether any of it waits for the move to be in `phase`.
    #[must_use]
    pub fn is_in(&self, phase: Phase) -> bool {
        self.0.iter().any(|event| event.when == When::In(phase))
    }

    /// The process is killed once the move is in `phase`.
    #[must_use]
    pub fn killed_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::Crash, When::In(phase))
    }

    /// The process is killed so long after the move was asked for.
    #[must_use]
    pub fn killed_after(self, span: Duration) -> Self {
        self.add(FaultEvent::Crash, When::After(span))
    }

    /// The process is killed around one of the guest's writes, once the move is in `phase`.
    #[must_use]
    pub fn killed_at_write_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::CrashAtWrite, When::In(phase))
    }

    /// The process is killed, and again while it recovers.
    #[must_use]
    pub fn killed_recovering_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::CrashAgain, When::In(phase))
    }

    /// The host loses its power once the move is in `phase`.
    #[must_use]
    pub fn powerless_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::PowerLoss, When::In(phase))
    }

    /// The host loses its power in the middle of the first store of the journal once the move is in `phase`.
    #[must_use]
    pub fn powerless_at_store_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::PowerLossAtStore, When::In(phase))
    }

    /// The connection is cut once the move is in `phase`.
    #[must_use]
    pub fn cut_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::Reconnect, When::In(phase))
    }

    /// The connection becomes half open once the move is in `phase`.
    #[must_use]
    pub fn half_open_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::HalfOpen, When::In(phase))
    }

    /// The guest does not read for a while once the move is in `phase`.
    #[must_use]
    pub fn unread_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::SlowReader, When::In(phase))
    }

    /// The move is cancelled so long after it was asked for.
    #[must_use]
    pub fn cancels_after(self, span: Duration) -> Self {
        self.add(FaultEvent::Cancel, When::After(span))
    }

    /// The move is cancelled once it is in `phase`.
    #[must_use]
    pub fn cancels_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::Cancel, When::In(phase))
    }

    /// The move is paused for a while once it is in `phase`.
    #[must_use]
    pub fn pauses_in(self, phase: Phase) -> Self {
        self.add(FaultEvent::Pause, When::In(phase))
    }
}

impl Clause for EventClause {
    fn add_to(self, scenario: &mut Scenario) {
        scenario.events.extend(self.0);
    }
}

/// See [`nbd()`].
#[derive(Clone, Copy)]
pub struct WireClause(WireFigures);

impl WireClause {
    /// So many bytes of a connection are between writer and reader at most.
    #[must_use]
    pub const fn window(mut self, bytes: usize) -> Self {
        self.0.link.window = bytes;
        self
    }

    /// One way takes so long.
    #[must_use]
    pub const fn latency(mut self, latency: Duration) -> Self {
        self.0.link.latency = latency;
        self
    }

    /// The server takes so many requests of a connection at once.
    #[must_use]
    pub const fn at_once(mut self, requests: usize) -> Self {
        self.0.requests_max = requests;
        self
    }
}

impl Clause for WireClause {
    fn add_to(self, scenario: &mut Scenario) {
        scenario.wire = Some(self.0);
    }
}

/// See [`expect`].
#[derive(Clone, Copy)]
pub struct ExpectClause(Expected);

impl ExpectClause {
    /// The first try moves the volume. (What every scenario that moves one expects is that some try does.)
    #[must_use]
    pub const fn switched(mut self) -> Self {
        self.0.switches = true;
        self
    }

    /// Every phase in which something shall happen comes, and what shall happen there does.
    #[must_use]
    pub const fn all_happens(mut self) -> Self {
        self.0.all_happens = true;
        self
    }

    /// No request of the guest takes longer.
    #[must_use]
    pub const fn no_wait_above(mut self, limit: Duration) -> Self {
        self.0.wait_max = Some(limit);
        self
    }

    /// The guest is held for a last copy no more often.
    #[must_use]
    pub const fn holds_at_most(mut self, times: usize) -> Self {
        self.0.holds_max = Some(times);
        self
    }

    /// No last copy holds the guest longer, done or not.
    #[must_use]
    pub const fn no_hold_above(mut self, limit: Duration) -> Self {
        self.0.hold_max = Some(limit);
        self
    }

    /// The move goes on from what a killed process has left.
    #[must_use]
    pub const fn resumed(mut self) -> Self {
        self.0.resumes = true;
        self
    }

    /// The target has failed, and the same move has ended well.
    #[must_use]
    pub const fn target_failed(mut self) -> Self {
        self.0.target_fails = true;
        self
    }
}

impl Clause for ExpectClause {
    fn add_to(self, scenario: &mut Scenario) {
        scenario.expected = self.0;
    }
}
