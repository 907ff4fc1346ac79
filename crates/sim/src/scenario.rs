//! Scenarios: what a run is made of, in a small vocabulary, and how it is played.
//!
//! A scenario says what there is (a volume, a guest, two disks) and what happens to it. The moments and the rest come
//! from the seed. When all events have happened, the faults end, and the scenario must come to a good end within a
//! stated time. The volume has moved, or a second try moves it. The guest's requests are answered, and what it reads is
//! right.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use block::Bytes;
use migrate::{MoveOptions, ProgressMap, Verify};

use crate::clock;
use crate::disk::{Faults, Timing};
pub use crate::fault_event::{Aim, Event, Exchange, FaultEvent, MachineEvent, Part, When};
use crate::guest::{GuestReport, Load};
use crate::host::{CacheSetup, Mistakes, Others, Setup, Status, VOLUMES_MAX};
use crate::log::Keep;
use crate::medium::SECTOR_BYTES;
use crate::occurrence::Occurrence;
use crate::scenario_dsl::Clause;
use crate::scenario_runner::ScenarioRunner;
use crate::wire::WireFigures;
use crate::world::{Violation, World};

/// The progress map's disk has room for so many pages and some more.
const MAP_PAGES_MAX: u64 = 200;

/// A scenario.
#[derive(Clone)]
pub struct Scenario {
    pub(crate) size: Bytes,
    pub(crate) filled: f64,
    /// In every other stretch of the volume zeroes are written, and no holes.
    pub(crate) zeroes_written: bool,
    pub(crate) dirty_target: bool,
    pub(crate) alignment: u32,
    pub(crate) timings: [Timing; 2],
    pub(crate) faults: [Faults; 2],
    pub(crate) journal_faults: Faults,
    pub(crate) map_faults: Faults,
    /// What requests to the target are multiples of, if not what those to the source are.
    pub(crate) target_alignment: Option<u32>,
    pub(crate) has_two_connections: bool,
    pub(crate) space: Option<f64>,
    pub(crate) load: Load,
    pub(crate) setup: Setup,
    /// Which volumes lie where both hosts reach them.
    pub(crate) shared_volumes: Vec<usize>,
    /// Nothing is wrong with the disks of the other volumes.
    pub(crate) only_first_fails: bool,
    /// How the moves of the other volumes are carried out.
    pub(crate) besides: Vec<MoveOptions>,
    pub(crate) events: Vec<Event>,
    /// Polls of the process's tasks after which it is killed; the next count begins when it is there again.
    pub(crate) deaths: Vec<u64>,
    pub(crate) span: Duration,
    pub(crate) downtime: Duration,
    pub(crate) moves: u32,
    pub(crate) expected: Expected,
    /// How the guest reaches its disk over NBD; otherwise its requests are calls.
    pub(crate) wire: Option<WireFigures>,
}

/// What a scenario expects beyond what must always hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Expected {
    /// The first try moves the volume.
    pub switches: bool,
    /// Everything that is told happens: every phase in which something shall happen comes.
    pub all_happens: bool,
    /// No request of the guest takes longer.
    pub wait_max: Option<Duration>,
    /// The move goes on from what an earlier process has left.
    pub resumes: bool,
    /// The target fails, and the same move ends well: it bears that, or goes on once the target is back.
    pub target_fails: bool,
    /// The guest is held for a last copy no more often.
    pub holds_max: Option<usize>,
    /// And no longer, each time.
    pub hold_max: Option<Duration>,
}

/// How a scenario ended.
#[derive(Clone, Debug)]
pub struct ScenarioResult {
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
    /// What has occurred.
    pub occurred: BTreeSet<Occurrence>,
    /// What should have happened in a phase, and did not.
    pub missed: Vec<(Aim, FaultEvent)>,
    /// What the guest has seen.
    pub guest: GuestReport,
    /// How the last move ended.
    pub status: Status,
    /// How often tasks of the process were polled.
    pub polls: u64,
    /// How often it was killed at one of those.
    pub deaths: u64,
}

impl Default for Scenario {
    fn default() -> Self {
        Self::new()
    }
}

impl Scenario {
    /// A volume of 8 MiB on flash, a guest with 2000 requests, a move to an empty disk, and nothing goes wrong.
    #[must_use]
    pub fn new() -> Self {
        let options = MoveOptions { bandwidth: Some(300 << 20), ..MoveOptions::default() };
        Self {
            size: Bytes::mib(8),
            filled: 0.7,
            zeroes_written: false,
            dirty_target: false,
            alignment: 1,
            timings: [Timing::FLASH; 2],
            faults: [Faults::default(); 2],
            journal_faults: Faults::default(),
            map_faults: Faults::default(),
            target_alignment: None,
            has_two_connections: false,
            space: None,
            load: Load::default(),
            shared_volumes: Vec::new(),
            setup: Setup {
                options,
                map_page_chunks: ProgressMap::PAGE_CHUNKS,
                pool: Bytes::mib(16),
                request_pool: Bytes::mib(64),
                together: false,
                running_jobs_max: 2,
                tasks_max: usize::MAX,
                resumes_lost_targets: true,
                offloads: false,
                corrupts: false,
                is_between_hosts: false,
                has_arbiter: false,
                peer_dies_at_poll: false,
                changes_layers: false,
                surrogate_stores: 0,
                surrogate_faults: Faults::default(),
                cache: None,
                is_shared: false,
                has_machine: false,
                memory_follows: false,
                memory_outside: false,
                others: Others::default(),
                mistakes: Mistakes::default(),
            },
            only_first_fails: false,
            besides: Vec::new(),
            events: Vec::new(),
            deaths: Vec::new(),
            span: Duration::from_millis(60),
            downtime: Duration::from_millis(20),
            moves: 1,
            expected: Expected::default(),
            wire: None,
        }
    }

    /// The volume has `size`.
    #[must_use]
    pub const fn volume(mut self, size: Bytes) -> Self {
        self.size = size;
        self
    }

    /// There are `count` volumes in one daemon, each with a guest and a move of its own. Their moves are told like the first one's,
    /// as far as `change` leaves them so. What happens to a volume happens to any of them.
    ///
    /// # Panics
    /// If there are none, or more than three.
    #[must_use]
    pub fn volumes(mut self, count: usize, mut change: impl FnMut(&mut MoveOptions)) -> Self {
        assert!((1..=VOLUMES_MAX).contains(&count), "a story has one volume to three");
        let options = &self.setup.options;
        self.besides = std::iter::repeat_with(|| options.clone()).take(count - 1).collect();
        self.besides.iter_mut().for_each(&mut change);
        self
    }

    /// The first moves of all volumes are asked for as one: if one is undone, so are those that are not on their targets.
    #[must_use]
    pub const fn together(mut self) -> Self {
        self.setup.together = true;
        self
    }

    /// The volumes are the disks of a machine, which moves to the other host with them.
    #[must_use]
    pub const fn machine(mut self) -> Self {
        self.setup.has_machine = true;
        self
    }

    /// Others have to do with the machine, too.
    #[must_use]
    pub fn others(mut self, change: impl FnOnce(&mut Others)) -> Self {
        change(&mut self.setup.others);
        self
    }

    /// The memory of the machine follows its guest.
    #[must_use]
    pub const fn memory_follows(mut self) -> Self {
        self.setup.memory_follows = true;
        self
    }

    /// The machine's memory is copied from outside by the parallel engine.
    #[must_use]
    pub const fn memory_outside(mut self) -> Self {
        self.setup.memory_outside = true;
        self
    }

    /// These volumes of the machine, by their numbers, lie where both hosts reach them.
    #[must_use]
    pub fn sharing(mut self, volumes: Vec<usize>) -> Self {
        self.shared_volumes = volumes;
        self
    }

    /// Somebody takes snapshots, removes them and limits the guest while it works, between the moves.
    #[must_use]
    pub const fn changes_layers(mut self) -> Self {
        self.setup.changes_layers = true;
        self
    }

    /// A surrogate of so many stores serves the guest while the volume moves; this is wrong with the first of two.
    ///
    /// # Panics
    /// If faults are told of the only store: what it alone holds is lost then.
    #[must_use]
    pub fn surrogate(mut self, stores: usize, faults: Faults) -> Self {
        assert!(stores > 1 || faults == Faults::default(), "a guest may lose what a single store has lost");
        (self.setup.surrogate_stores, self.setup.surrogate_faults) = (stores, faults);
        self
    }

    /// A flash cache lies over the volume, and somebody changes it while the guest works.
    #[must_use]
    pub const fn cache(mut self, cache: CacheSetup) -> Self {
        self.setup.cache = Some(cache);
        self
    }

    /// The flash cache goes to other flash while the guest works.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn cache_moves(mut self) -> Self {
        let cache = self.setup.cache.as_mut().expect("what moves is there");
        cache.moves = true;
        self
    }

    /// The flash cache is a layer of the daemon's own.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn cache_is_layer(mut self) -> Self {
        let cache = self.setup.cache.as_mut().expect("what the daemon has is there");
        cache.is_layer = true;
        self
    }

    /// So many moves run at once, and the others wait.
    #[must_use]
    pub const fn moves_at_once(mut self, limit: usize) -> Self {
        self.setup.running_jobs_max = limit;
        self
    }

    /// The buffers of all guests' requests, and those of each move's copies, take no more than so many MiB.
    #[must_use]
    pub const fn pools_of(mut self, requests: u64, copies: u64) -> Self {
        (self.setup.request_pool, self.setup.pool) = (Bytes::mib(requests), Bytes::mib(copies));
        self
    }

    /// Nothing is wrong with the disks of the other volumes, and of what is expected of waits the first one's guest is excused.
    #[must_use]
    pub const fn only_first_fails(mut self) -> Self {
        self.only_first_fails = true;
        self
    }

    /// How many volumes there are.
    pub(crate) const fn volume_count(&self) -> usize {
        1 + self.besides.len()
    }

    /// How the move of volume `number` is carried out.
    pub(crate) fn options_of(&self, number: usize) -> &MoveOptions {
        number.checked_sub(1).map_or(&self.setup.options, |beside| &self.besides[beside])
    }

    /// Which part of the volume holds data at the start.
    #[must_use]
    pub const fn filled(mut self, part: f64) -> Self {
        self.filled = part;
        self
    }

    /// Of what holds no data at the start, a half holds zeroes that were written, and the other half is holes.
    #[must_use]
    pub const fn zeroes_written(mut self) -> Self {
        self.zeroes_written = true;
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
        self.moves = 0;
        self
    }

    /// The volume is moved so many times: there, back, there again.
    #[must_use]
    pub const fn moves(mut self, times: u32) -> Self {
        self.moves = times;
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

    /// A page of the progress map stands for about so many chunks, so that a small volume has many: no more than
    /// `MAP_PAGES_MAX`.
    #[must_use]
    pub fn map_pages_of(mut self, chunks: u64) -> Self {
        let all = self.size.0.div_ceil(self.setup.options.chunk_bytes);
        // What is skipped takes two pages more for each.
        let pages_max = if self.setup.options.skip_zero { MAP_PAGES_MAX / 3 } else { MAP_PAGES_MAX };
        self.setup.map_page_chunks = chunks.max(all.div_ceil(pages_max)).min(ProgressMap::PAGE_CHUNKS);
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
        (self.journal_faults, self.map_faults) = (faults, faults);
        self
    }

    /// What goes wrong with the disk of the progress map.
    #[must_use]
    pub const fn map(mut self, faults: Faults) -> Self {
        self.map_faults = faults;
        self
    }

    /// Requests to the target are multiples of `bytes`, which the source's are multiples of.
    #[must_use]
    pub const fn target_alignment(mut self, bytes: u32) -> Self {
        self.target_alignment = Some(bytes);
        self
    }

    /// The guest has two connections to its disk, over NBD.
    #[must_use]
    pub const fn two_connections(mut self) -> Self {
        self.has_two_connections = true;
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

    /// Source and target can copy between each other by themselves.
    #[must_use]
    pub const fn offloads(mut self, offloads: bool) -> Self {
        self.setup.offloads = offloads;
        self
    }

    /// `event_kind` happens `times` times.
    #[must_use]
    pub fn with(mut self, event_kind: FaultEvent, times: u64) -> Self {
        self.events.extend((0..times).map(|_| Event { what: event_kind, when: When::Sometime }));
        self
    }

    /// `event_kind` happens at this moment.
    #[must_use]
    pub fn at(mut self, when: When, event_kind: FaultEvent) -> Self {
        self.events.push(Event { what: event_kind, when });
        self
    }

    /// The process is killed after so many polls of its tasks, and comes back. Said again, it is killed once more, so
    /// many polls after it came back.
    #[must_use]
    pub fn dies_at_poll(mut self, poll: u64) -> Self {
        self.deaths.push(poll);
        self
    }

    /// The process is killed after so many polls of its tasks, and at no other.
    #[must_use]
    pub fn dying_only_at_poll(mut self, poll: u64) -> Self {
        self.deaths = vec![poll];
        self
    }

    /// What else is expected.
    #[must_use]
    pub const fn expecting(mut self, expected: Expected) -> Self {
        self.expected = expected;
        self
    }

    /// The guest reaches its disk over NBD.
    #[must_use]
    pub const fn wire(mut self, figures: WireFigures) -> Self {
        self.wire = Some(figures);
        self
    }

    /// The volume moves to another host's daemon, and the guest speaks NBD. The target's disk is that host's. Of what was said of
    /// the move only what its API knows counts: verification, bandwidth, the strategy and its limit of downtime. No flush fails.
    #[must_use]
    pub fn between_hosts(mut self) -> Self {
        let MoveOptions { verify, bandwidth, strategy, downtime_limit_ms, skip_zero, .. } = self.setup.options;
        let asked = MoveOptions { verify, bandwidth, strategy, downtime_limit_ms, skip_zero, ..MoveOptions::default() };
        self.setup.options = asked;
        self.setup.is_between_hosts = true;
        self.setup.offloads = false;
        self.wire.get_or_insert(WireFigures::LOCAL);
        self.faults.iter_mut().for_each(|faults| faults.flush_errors = 0.0);
        // Nothing is overwritten there, and there is no way back while the first host passes requests on.
        self.dirty_target = false;
        self.moves = 1;
        self
    }

    /// The two hosts have an arbiter.
    #[must_use]
    pub fn with_arbiter(mut self) -> Self {
        self.setup.has_arbiter = true;
        self
    }

    /// At chosen polls the process of the other host dies, and not that of the first one.
    #[must_use]
    pub fn peer_dies(mut self) -> Self {
        self.setup.peer_dies_at_poll = true;
        self
    }

    /// Whether it is the other host's process that dies at chosen polls.
    #[must_use]
    pub const fn kills_peer(&self) -> bool {
        self.setup.peer_dies_at_poll
    }

    /// Says one more thing of it; see [`scenario_dsl`](crate::scenario_dsl).
    #[must_use]
    pub fn and(mut self, word: impl Clause) -> Self {
        word.add_to(&mut self);
        self
    }

    /// Whether what lies over the volume's disk, and alone has what the guest has written, may fail a request.
    pub(crate) fn has_failing_layers(&self) -> bool {
        let fails = self.setup.cache.is_some_and(|cache| cache.may_hold() && cache.faults != Faults::default());
        fails || self.events.iter().any(|event| matches!(event.what, FaultEvent::Away(Part::Cache | Part::Layer)))
    }

    /// Whether a flush may be lost for good that whoever has the disk open goes on to fail for.
    pub(crate) fn loses_flushes(&self) -> bool {
        let under_layers = self.setup.changes_layers && self.faults.iter().any(|faults| faults.flush_errors > 0.0);
        let is_lost = |event: &Event| matches!(event.what, FaultEvent::FlushLost(_));
        self.has_failing_layers() || under_layers || self.events.iter().any(is_lost)
    }

    /// Whether the target may come to hold what nobody wrote there, so that only a full comparison promises equality.
    pub(crate) fn corrupts(&self) -> bool {
        self.faults[1].lies() || self.events.iter().any(|event| event.what == FaultEvent::Corruption)
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
    pub fn play(&self, seed: u64, keep: Keep) -> ScenarioResult {
        clock::run(async {
            let world = World::new(seed, keep);
            let cast = ScenarioRunner::assemble(self, &world);
            let mut scenario = std::pin::pin!(cast.play());
            tokio::select! {
                biased;
                () = world.violated() => {}
                () = &mut scenario => {}
            }
            let (log_hash, events) = world.log_hash();
            ScenarioResult {
                seed,
                violation: world.violation(),
                log_hash,
                events,
                log: world.log_lines(),
                simulated: world.now().0,
                faults: world.faults(),
                occurred: world.occurred(),
                missed: cast.missed(),
                guest: cast.first().guest.report(),
                status: cast.first().host.status(),
                polls: world.crash_point().polls(),
                deaths: cast.deaths(),
            }
        })
    }
}
