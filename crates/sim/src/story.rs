//! Stories: what a run is made of, in a small vocabulary, and how it is played.
//!
//! A story says what there is (a volume, a guest, two disks) and what happens to it; the moments and the rest come from
//! the seed. When all has happened that should, the faults end, and the story must come to a good end within a stated
//! time: the volume has moved, or a second try moves it; the guest's requests are answered; what it reads is right.

use std::collections::BTreeMap;
use std::time::Duration;

use block::Bytes;
use env::Moment;
use migrate::{MoveOptions, Phase, Verify};

use crate::clock;
use crate::dice::Dice;
use crate::disk::{Disk, Faults, STUCK_MAX, Timing};
use crate::guest::{Guest, GuestReport, Load};
use crate::host::{Disks, Host, Mistakes, Setup, Status};
use crate::ledger::Ledger;
use crate::log::Keep;
use crate::medium::SECTOR_BYTES;
use crate::pattern::Content;
use crate::port::Port;
use crate::world::{Invariant, Violation, World};

/// Once faults have stopped a story ends within this, or it does not converge.
const END_LIMIT: Duration = STUCK_MAX.saturating_mul(4);

/// Something that happens once, at a moment that the seed chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// The process is killed and starts again.
    Crash,
    /// The host loses its power and comes back.
    PowerLoss,
    /// The guest's connection is cut and comes back.
    Reconnect,
    /// The target is gone for a while.
    TargetLost,
    /// A byte of the target changes.
    Corruption,
    /// Somebody pauses the move, and resumes it later.
    Pause,
    /// Somebody cancels the move.
    Cancel,
    /// Somebody changes the bandwidth.
    Bandwidth,
}

/// A story.
#[derive(Clone)]
pub struct Story {
    size: Bytes,
    filled: f64,
    dirty_target: bool,
    alignment: u32,
    timings: [Timing; 2],
    faults: [Faults; 2],
    journal_faults: Faults,
    space: Option<f64>,
    load: Load,
    setup: Setup,
    happenings: Vec<Happening>,
    span: Duration,
    downtime: Duration,
    moves: bool,
}

/// How a story ended.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The seed that repeats it.
    pub seed: u64,
    /// What did not hold, if anything.
    pub violation: Option<Violation>,
    /// The hash of its event log.
    pub log_hash: u64,
    /// How many events there were.
    pub events: u64,
    /// The events that were kept.
    pub log: Vec<String>,
    /// How much simulated time it took.
    pub simulated: Duration,
    /// Faults by class.
    pub faults: BTreeMap<&'static str, u64>,
    /// What the guest has seen.
    pub guest: GuestReport,
    /// How the last move ended.
    pub status: Status,
}

impl Default for Story {
    fn default() -> Self {
        Self::new()
    }
}

impl Story {
    /// A volume of 8 MiB on flash, a guest with 2000 requests, a move to an empty disk, and nothing goes wrong.
    #[must_use]
    pub fn new() -> Self {
        let options = MoveOptions { bandwidth: Some(300 << 20), ..MoveOptions::default() };
        Self {
            size: Bytes::mib(8),
            filled: 0.7,
            dirty_target: false,
            alignment: 1,
            timings: [Timing::FLASH; 2],
            faults: [Faults::default(); 2],
            journal_faults: Faults::default(),
            space: None,
            load: Load::default(),
            setup: Setup {
                options,
                pool: Bytes::mib(16),
                resumes_lost_targets: true,
                corrupts: false,
                mistakes: Mistakes::default(),
            },
            happenings: Vec::new(),
            span: Duration::from_millis(60),
            downtime: Duration::from_millis(20),
            moves: true,
        }
    }

    /// The volume has `size`.
    #[must_use]
    pub const fn volume(mut self, size: Bytes) -> Self {
        self.size = size;
        self
    }

    /// Which part of the volume holds data at the start.
    #[must_use]
    pub const fn filled(mut self, part: f64) -> Self {
        self.filled = part;
        self
    }

    /// The target holds something else at the start.
    #[must_use]
    pub const fn dirty_target(mut self, dirty: bool) -> Self {
        self.dirty_target = dirty;
        self
    }

    /// Nothing is moved.
    #[must_use]
    pub const fn without_move(mut self) -> Self {
        self.moves = false;
        self
    }

    /// Requests are multiples of `bytes`.
    #[must_use]
    pub const fn alignment(mut self, bytes: u32) -> Self {
        self.alignment = bytes;
        self.load.granule = if bytes > 512 { bytes as u64 / SECTOR_BYTES } else { 1 };
        self
    }

    /// How fast the source and the target are.
    #[must_use]
    pub const fn timings(mut self, source: Timing, target: Timing) -> Self {
        self.timings = [source, target];
        self
    }

    /// What the guest does.
    #[must_use]
    pub const fn guest(mut self, load: Load) -> Self {
        let granule = self.load.granule;
        self.load = load;
        self.load.granule = granule;
        self
    }

    /// How the move is carried out.
    #[must_use]
    pub fn options(mut self, change: impl FnOnce(&mut MoveOptions)) -> Self {
        change(&mut self.setup.options);
        self
    }

    /// What is compared.
    #[must_use]
    pub const fn verify(mut self, verify: Verify) -> Self {
        self.setup.options.verify = verify;
        self
    }

    /// What goes wrong with the source.
    #[must_use]
    pub const fn source(mut self, faults: Faults) -> Self {
        self.faults[0] = faults;
        self
    }

    /// What goes wrong with the target.
    #[must_use]
    pub const fn target(mut self, faults: Faults) -> Self {
        self.faults[1] = faults;
        self
    }

    /// What goes wrong with the journal's disk and that of the progress map.
    #[must_use]
    pub const fn journal(mut self, faults: Faults) -> Self {
        self.journal_faults = faults;
        self
    }

    /// The target has space for this part of the volume only, until the faults end.
    #[must_use]
    pub const fn target_space(mut self, part: f64) -> Self {
        self.space = Some(part);
        self
    }

    /// A job whose target was lost is cancelled instead of resumed.
    #[must_use]
    pub const fn gives_up_lost_targets(mut self) -> Self {
        self.setup.resumes_lost_targets = false;
        self
    }

    /// `happening` happens `times` times.
    #[must_use]
    pub fn with(mut self, happening: Happening, times: u64) -> Self {
        self.happenings.extend((0..times).map(|_| happening));
        self.setup.corrupts |= happening == Happening::Corruption && times > 0;
        self
    }

    /// All of it happens within this time from the start of the move.
    #[must_use]
    pub const fn within(mut self, span: Duration) -> Self {
        self.span = span;
        self
    }

    /// A process that died comes back within this time.
    #[must_use]
    pub const fn downtime(mut self, limit: Duration) -> Self {
        self.downtime = limit;
        self
    }

    /// Makes mistakes, to prove that checkers see them.
    #[must_use]
    pub fn mistakes(mut self, mistakes: Mistakes) -> Self {
        self.setup.mistakes = mistakes;
        self
    }

    /// Plays it with `seed`.
    #[must_use]
    pub fn play(&self, seed: u64, keep: Keep) -> Verdict {
        clock::run(async {
            let world = World::new(seed, keep);
            let cast = Cast::assemble(self, &world);
            let mut story = std::pin::pin!(cast.play());
            tokio::select! {
                biased;
                () = world.violated() => {}
                () = &mut story => {}
            }
            let (log_hash, events) = world.log_hash();
            Verdict {
                seed,
                violation: world.violation(),
                log_hash,
                events,
                log: world.log_lines(),
                simulated: world.now().0,
                faults: world.faults(),
                guest: cast.guest.report(),
                status: cast.host.status(),
            }
        })
    }
}

/// Everything that takes part in a story.
struct Cast<'a> {
    story: &'a Story,
    world: World,
    dice: Dice,
    journal: Disk,
    map: Disk,
    sides: [Disk; 2],
    guest: Guest,
    host: Host,
}

impl<'a> Cast<'a> {
    fn assemble(story: &'a Story, world: &World) -> Self {
        let dice = world.dice("story");
        let size = story.size;
        let source = Disk::new(world, "source", size, story.alignment, story.timings[0]);
        let target_size = if dice.chance(0.2) { size + Bytes::kib(64) } else { size };
        let target = Disk::new(world, "target", target_size, story.alignment, story.timings[1]);
        let journal = Disk::new(world, "journal", Bytes::mib(1), 512, Timing::FLASH);
        let map = Disk::new(world, "map", Bytes::mib(1), 512, Timing::FLASH);
        let contents = original(story, &dice);
        let mut bytes = vec![0; SECTOR_BYTES as usize];
        for (sector, content) in contents.iter().enumerate() {
            let sector = sector as u64;
            let offset = Bytes(sector * SECTOR_BYTES);
            bytes.resize((size - offset).0.min(SECTOR_BYTES) as usize, 0);
            if *content != Content::Zero {
                content.fill(sector, &mut bytes);
                source.fill(offset, &bytes);
            }
            if story.dirty_target && dice.chance(0.5) {
                target.fill(offset, &vec![0xdd; bytes.len()]);
            }
        }
        let ledger = Ledger::new(size.0, |sector| contents[sector as usize]);
        let port = Port::new(world);
        let guest = Guest::new(world, &port, story.load, ledger);
        let sides = [source, target];
        let disks = Disks { journal: journal.clone(), map: map.clone(), sides: sides.clone() };
        let host = Host::new(world, story.setup.clone(), &port, &guest, disks);
        Self { story, world: world.clone(), dice, journal, map, sides, guest, host }
    }

    async fn play(&self) {
        self.begin_faults();
        self.host.boot();
        self.guest.start();
        self.world.sleep(self.dice.up_to(Duration::from_millis(2))).await;
        if self.story.moves {
            self.host.ask_for_move();
        }
        self.chaos().await;
        self.end_faults();
        let Some(()) = self.within_limit(self.come_to_an_end()).await else { return };
        self.last_checks();
    }

    fn begin_faults(&self) {
        let story = self.story;
        for (disk, faults) in self.sides.iter().zip(story.faults) {
            disk.set_faults(faults);
        }
        self.journal.set_faults(story.journal_faults);
        self.map.set_faults(story.journal_faults);
        self.sides[1].set_space(story.space.map(|part| Bytes((story.size.0 as f64 * part) as u64)));
        if story.faults[0] != Faults::default() {
            self.guest.allow_errors();
        }
    }

    fn end_faults(&self) {
        self.world.event(format_args!("the faults end"));
        for disk in [&self.journal, &self.map, &self.sides[0], &self.sides[1]] {
            disk.set_faults(Faults::default());
            disk.set_space(None);
            disk.set_lost(false);
        }
        if let Some(control) = self.host.control() {
            control.set_bandwidth(None);
            control.resume();
        }
    }

    /// What happens, at moments from the seed.
    async fn chaos(&self) {
        let start = self.world.now();
        let mut moments: Vec<(Moment, Happening)> = self
            .story
            .happenings
            .iter()
            .map(|happening| (start + self.dice.up_to(self.story.span), *happening))
            .collect();
        moments.sort_by_key(|(moment, _)| *moment);
        for (moment, happening) in moments {
            self.world.sleep_until(moment).await;
            self.happen(happening).await;
        }
        self.world.sleep_until(start + self.story.span).await;
    }

    async fn happen(&self, happening: Happening) {
        match happening {
            Happening::Crash => {
                self.host.crash().await;
                self.world.sleep(self.dice.up_to(self.story.downtime)).await;
                self.host.boot();
            }
            Happening::PowerLoss => {
                self.host.lose_power().await;
                self.world.sleep(self.dice.up_to(self.story.downtime)).await;
                self.host.boot();
                self.guest.read_all().await;
                self.guest.start();
            }
            Happening::Reconnect => self.host.reconnect().await,
            Happening::TargetLost => {
                // Only while it is a target: a disk that holds the volume alone and is lost is nobody's fault.
                let phase = self.host.control().map(|control| control.snapshot().phase);
                if phase.is_some_and(|phase| !phase.is_committed() && !phase.is_final()) {
                    let is_late = |phase| phase >= Phase::Quiescing && phase < Phase::Committed;
                    if phase.is_some_and(is_late) {
                        // The commit may be decided already: then it is the guest's own disk that is lost.
                        self.guest.allow_errors();
                    }
                    self.sides[1].set_lost(true);
                    let (disk, world) = (self.sides[1].clone(), self.world.clone());
                    let span = self.dice.up_to(Duration::from_millis(10));
                    self.world.spawn(async move {
                        world.sleep(span).await;
                        disk.set_lost(false);
                    });
                }
            }
            Happening::Corruption => {
                let is_before = |phase| matches!(phase, Phase::Preparing | Phase::Copying);
                if self.host.control().is_some_and(|control| is_before(control.snapshot().phase)) {
                    self.sides[1].corrupt(Bytes(self.dice.below(self.story.size.0)));
                }
            }
            Happening::Pause => {
                let Some(control) = self.host.control() else { return };
                self.world.event(format_args!("pause"));
                control.pause();
                let (world, span) = (self.world.clone(), self.dice.up_to(Duration::from_millis(10)));
                self.world.spawn(async move {
                    world.sleep(span).await;
                    world.event(format_args!("resume"));
                    control.resume();
                });
            }
            Happening::Cancel => {
                let Some(control) = self.host.control() else { return };
                let taken = control.cancel().is_ok();
                self.world.event(format_args!("cancel{}", if taken { "" } else { " comes too late" }));
            }
            Happening::Bandwidth => {
                let Some(control) = self.host.control() else { return };
                let rate = self.dice.pick(&[None, Some(1 << 20), Some(50 << 20), Some(1 << 30)]);
                self.world.event(format_args!("bandwidth {rate:?}"));
                control.set_bandwidth(rate.map(Bytes));
            }
        }
    }

    async fn within_limit<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            value = &mut work => Some(value),
            () = self.world.sleep(END_LIMIT) => {
                let phase = self.host.control().map(|control| control.snapshot());
                let what = format!("no end {END_LIMIT:?} after the last fault: {:?}, {phase:?}", self.host.status());
                self.world.violate(Invariant::Converges, what);
                None
            }
        }
    }

    async fn come_to_an_end(&self) {
        let mut tries = 0;
        while self.story.moves && !matches!(self.host.ended().await, Status::Switched(_)) {
            // Whatever has become of the first try, nothing of it may be in the way of the next.
            tries += 1;
            if tries > 5 {
                let what = format!("five moves without faults did not succeed: {:?}", self.host.status());
                self.world.violate(Invariant::Converges, what);
                return;
            }
            self.host.move_again();
        }
        self.guest.finish().await;
        self.guest.read_all().await;
        self.guest.flush().await;
    }

    fn last_checks(&self) {
        let ledger = self.guest.ledger();
        crate::checks::flushed(&self.world, &self.sides[usize::from(self.story.moves)], &ledger, true);
        let window = self.story.setup.options.window_bytes_max;
        let guest = self.story.load.outstanding * self.story.load.sectors_max * SECTOR_BYTES;
        let limit = Bytes(2 * window + 2 * guest) + Bytes::mib(8);
        let most = self.sides[1].in_flight_bytes_max();
        if most > limit {
            let what = format!("{most} were in flight to the target, {limit} is the limit");
            self.world.violate(Invariant::Bounded, what);
        }
    }
}

/// What the volume holds before the story begins: runs of data and of holes.
fn original(story: &Story, dice: &Dice) -> Vec<Content> {
    let count = story.size.0.div_ceil(SECTOR_BYTES) as usize;
    let mut contents = Vec::with_capacity(count);
    while contents.len() < count {
        let content = if dice.chance(story.filled) { Content::Written(0) } else { Content::Zero };
        let length = dice.within(1..=256) as usize;
        contents.extend(std::iter::repeat_n(content, length.min(count - contents.len())));
    }
    contents
}
