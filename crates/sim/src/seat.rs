//! A volume of a scenario: its guest, its disks, and its host.

use ::daemon::VolumeDocument;
use block::{Bytes, ChunkSize};
use migrate::{Journal, MoveOptions, ProgressMap};

use crate::disk::{Disk, Faults, Limits, Timing};
use crate::failures::{Failures, Reporter};
use crate::guest::Guest;
use crate::host::{Disks, Host, SNAPSHOTS_MAX, Setup, names};
use crate::hypervisor::SimMachine;
use crate::medium::SECTOR_BYTES;
use crate::pattern::Content;
use crate::port::Port;
use crate::register_history::RegisterHistory;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::world::World;

/// The largest copy, whatever its chunks are; a window may be exceeded by one.
const COPY_BYTES_MAX: u64 = 1 << 20;
/// The smallest window of a copy.
const WINDOW_BYTES_MIN: u64 = 256 << 10;
/// Every other volume is so much larger than the one before it, so that no record of one fits another.
const LARGER: u64 = 64 << 10;

/// A volume and all that is about it alone.
pub(crate) struct Seat {
    size: Bytes,
    pub(crate) options: MoveOptions,
    faults: [Faults; 2],
    pub(crate) port: Port,
    pub(crate) journal: Disk,
    pub(crate) map: Disk,
    pub(crate) sides: [Disk; 2],
    pub(crate) guest: Guest,
    pub(crate) host: Host,
    failures: Failures,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.host.close();
        self.failures.close();
    }
}

impl Seat {
    /// A volume of `scenario`. All but the first are served by the process of `first`.
    pub(crate) fn assemble(scenario: &Scenario, world: &World, rng: &Rng, first: Option<(&Self, usize)>) -> Self {
        let number = first.map_or(0, |(_, number)| number);
        let names = names(number);
        let size = scenario.size + Bytes(LARGER * number as u64);
        let source = Disk::new(world, names.source, size, scenario.alignment, scenario.timings[0]);
        // Not where the volume comes back, for nothing moves to a smaller disk, nor on another host, which makes its file, nor
        // with layers, which go to files alone.
        let is_file = scenario.setup.is_between_hosts || scenario.setup.changes_layers;
        let is_larger = rng.chance(0.2) && scenario.moves < 2 && !is_file;
        let target_size = if is_larger { size + Bytes::kib(64) } else { size };
        let alignment = scenario.target_alignment.unwrap_or(scenario.alignment);
        let is_shared = scenario.shared_volumes.contains(&number);
        let target = match is_shared {
            true => source.clone(),
            false => Disk::new(world, names.target, target_size, alignment, scenario.timings[1]),
        };
        let journal = Disk::new(world, names.journal, Bytes::mib(1), 512, Timing::FLASH);
        let map_bytes = match scenario.setup.changes_layers {
            true => {
                map_bytes_needed(scenario, size, scenario.options_of(number)).unwrap_or_default().max(Bytes::mib(4))
            }
            false => Bytes::mib(1),
        };
        let map = Disk::new(world, names.map, map_bytes, 512, Timing::FLASH);
        let contents = original(scenario, size, rng);
        let mut bytes = vec![0; SECTOR_BYTES as usize];
        for (sector, content) in contents.iter().enumerate() {
            let sector = sector as u64;
            let offset = Bytes(sector * SECTOR_BYTES);
            bytes.resize((size - offset).0.min(SECTOR_BYTES) as usize, 0);
            let is_written_zero = scenario.zeroes_written && (sector / STRETCH_SECTORS).is_multiple_of(2);
            if *content != Content::Zero || is_written_zero {
                content.fill(sector, &mut bytes);
                source.fill(offset, &bytes);
            }
            if scenario.dirty_target && rng.chance(0.5) && !is_shared {
                target.fill(offset, &vec![0xdd; bytes.len()]);
            }
        }
        let history = RegisterHistory::new(size.0, |sector| contents[sector as usize]);
        let port = match (number, scenario.wire) {
            (1.., wire) => Port::beside(world, (names.port, names.wire), wire),
            (_, Some(figures)) if scenario.has_two_connections => Port::over_two_wires(world, figures),
            (_, Some(figures)) => Port::over_wire(world, figures),
            (_, None) => Port::new(world),
        };
        let failures = Failures::default();
        let guest = Guest::excusing(world, names.guest, &port, (scenario.load, history), failures.clone());
        let sides = [source, target];
        let reporting = if is_shared { &sides[..1] } else { &sides[..] };
        for (side, disk) in reporting.iter().enumerate() {
            disk.report_to(Reporter { failures: failures.clone(), side, is_layer: false });
        }
        let disks = Disks { journal: journal.clone(), map: map.clone(), sides: sides.clone() };
        let between = if scenario.setup.is_between_hosts { 256 } else { 0 };
        let between = if scenario.setup.has_machine { 2 * between } else { between };
        // Write-back, who changes the cache, who looks at image and part, and what is admitted.
        let cached = if scenario.setup.cache.is_some() { 4 + 64 } else { 0 };
        // Of a cache that moves: what is asked for, sent, taken and warmed, 32 at a time, and the blocks of what the guest misses.
        let moves = scenario.setup.cache.is_some_and(|cache| cache.moves);
        let moving = if moves { 4 * 32 + 8 * scenario.load.outstanding as usize } else { 0 };
        let each = 64 + between + cached + moving + 4 * scenario.load.outstanding as usize;
        let tasks_max = scenario.volume_count() * each;
        let options = scenario.options_of(number).clone();
        let setup = Setup {
            corrupts: scenario.corrupts(),
            tasks_max,
            options: options.clone(),
            is_shared,
            ..scenario.setup.clone()
        };
        let host = match first {
            Some((first, _)) => first.host.with_beside(setup, &port, &guest, disks),
            None => Host::new(world, setup, &port, &guest, disks),
        };
        if scenario.has_failing_layers() {
            host.report_layers_to(Reporter { failures: failures.clone(), side: 0, is_layer: true });
        }
        let judge = host.clone();
        failures.excused_by(move || judge.answerable());
        let told = guest.clone();
        failures.tell_losses(move || told.history().note_lost());
        let faults = if scenario.only_first_fails && number > 0 { <_>::default() } else { scenario.faults };
        Self { size, options, faults, port, journal, map, sides, guest, host, failures }
    }

    /// The limits of memory and queues. Copies and comparisons stay within their window. Guest requests are as many as
    /// the guest has, with what is buffered. Journal and progress map have a fixed size.
    pub(crate) fn state_limits(&self, scenario: &Scenario) {
        let (options, load) = (&self.options, &scenario.load);
        let window = options.window_bytes_max.min(scenario.setup.pool.0 / 2).max(WINDOW_BYTES_MIN);
        let copies = window + COPY_BYTES_MAX.max(options.chunk_bytes);
        // With a read cache a guest read may read all of the chunks at both its ends.
        let widened = if options.read_cache_bytes > 0 { 2 * options.chunk_bytes } else { 0 };
        let guest = load.outstanding * ((load.sectors_max * SECTOR_BYTES).max(u64::from(scenario.alignment)) + widened);
        // A target that was given up may still hold what the guest had in flight there.
        let buffer = options.buffer().unwrap_or_default().0;
        let in_flight = Some(Bytes(copies + 2 * guest.max(256 * SECTOR_BYTES) + buffer));
        self.sides.iter().for_each(|side| side.set_limits(Limits { in_flight, end: None }));
        let end = Some(Journal::<VolumeDocument>::bytes_needed());
        self.journal.set_limits(Limits { end, in_flight: None });
        let end = map_bytes_needed(scenario, self.size, options);
        self.map.set_limits(Limits { end, in_flight: None });
    }

    pub(crate) fn begin_faults(&self, scenario: &Scenario) {
        for (disk, faults) in self.sides.iter().zip(self.faults).take(if self.host.is_shared() { 1 } else { 2 }) {
            disk.set_faults(faults);
        }
        self.journal.set_faults(scenario.journal_faults);
        self.map.set_faults(scenario.map_faults);
        self.host.set_group_faults(scenario.journal_faults);
        self.sides[usize::from(!self.host.is_shared())]
            .set_space(scenario.space.map(|part| Bytes((self.size.0 as f64 * part) as u64)));
    }

    pub(crate) fn end_faults(&self) {
        self.host.set_group_faults(Faults::default());
        let groups = self.host.group_disks();
        for disk in [&self.journal, &self.map, &self.sides[0], &self.sides[1]].into_iter().chain(&groups) {
            disk.set_faults(Faults::default());
            disk.set_space(None);
            disk.set_lost(false);
            disk.set_full(false);
        }
        self.host.set_files_full(false);
        self.host.set_peer_full(false);
        self.host.set_peer_files_failing(0.0);
        for disk in self.host.parts() {
            disk.come_back();
            disk.keep_flushes();
        }
        self.host.end_surrogate_faults();
        self.host.end_cache_faults();
        self.host.set_files_failing(0.0);
        self.host.machine().into_iter().for_each(SimMachine::calm_down);
        if let Some(control) = self.host.control() {
            control.set_bandwidth(None);
            // A lost host is brought back by the daemon.
            if !self.host.is_between_hosts() {
                control.resume();
            }
        }
    }

    /// How large the volume is.
    pub(crate) const fn size(&self) -> Bytes {
        self.size
    }
}

/// Where zeroes are written as well as left out, it changes after so many sectors.
const STRETCH_SECTORS: u64 = 512;

/// What the volume holds before the scenario begins: runs of data and of holes.
fn original(scenario: &Scenario, size: Bytes, rng: &Rng) -> Vec<Content> {
    let count = size.0.div_ceil(SECTOR_BYTES) as usize;
    let mut contents = Vec::with_capacity(count);
    while contents.len() < count {
        let content = if rng.chance(scenario.filled) { Content::Written(0) } else { Content::Zero };
        let length = rng.within(1..=256) as usize;
        contents.extend(std::iter::repeat_n(content, length.min(count - contents.len())));
    }
    contents
}

/// How large the progress map of a volume of `size` is at most. Nothing if its chunks have no valid size.
fn map_bytes_needed(scenario: &Scenario, size: Bytes, options: &MoveOptions) -> Option<Bytes> {
    let copied = if scenario.setup.changes_layers { with_layers(size) } else { size };
    let chunk = ChunkSize::new(options.chunk_bytes)?;
    Some(ProgressMap::bytes_needed_with_skips(copied, chunk, scenario.setup.map_page_chunks))
}

/// How much a move of a volume of `size` copies at most, with as many snapshots as anybody takes here.
fn with_layers(size: Bytes) -> Bytes {
    let overlay = filters::OverlayHeader::new(size, [0; 16], [0; 16]).delta_bytes();
    let sizes: Vec<Bytes> = std::iter::once(size).chain(std::iter::repeat_n(overlay, SNAPSHOTS_MAX)).collect();
    filters::layout(&sizes, Bytes::mib(1)).last().map_or(size, |last| last.end())
}
