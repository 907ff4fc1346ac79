//! The groups of `bench-vm`.

use std::time::Duration;

use anyhow::ensure;
use transhume_guest::{GuestSpec, Load, MemoryLoad, Side, TwoHostsSpec};

use super::VmBench;
use super::felt::{Ended, Felt, feel};
use super::ours::{self, transhume};
use super::peers::{How, recipe, shared_disk};
use super::place::{NAME, Place, RUNS_VMS, fillable_mib};
use crate::figures::{Goal, Row, Samples};

/// Requests a second of a guest that is emulated and not at its limit.
const RATE: u32 = 300;
/// And of one that does next to nothing: one to show that it lives.
pub(super) const IDLE_RATE: u32 = 1;
/// A limit of the downtime that leaves hardly any memory for it, in milliseconds.
const SHORT_LIMIT_MS: u64 = 20;
/// What is to be reached of each peer's figures.
const DOWNTIME_RATIO_MAX: f64 = 1.2;
const LONGER_MS_MAX: f64 = 10.0;
const TIME_RATIO_MAX: f64 = 0.9;
const P99_RATIO_MAX: f64 = 0.5;
/// How far a forecast may be off: of the time in percent, of the downtime as a factor.
const FORECAST_PERCENT_MAX: f64 = 15.0;
const FORECAST_FACTOR_MAX: f64 = 2.0;
/// How long the guest warms its cache before it moves.
const WARM_SPAN: Duration = Duration::from_secs(8);
/// How long a move may take that may not end by itself.
pub(super) const DEADLINE_SECONDS: u32 = 120;

/// What moves the guest.
type Mover = fn(&mut Place, How) -> anyhow::Result<Ended>;

/// What was felt of several moves.
#[derive(Default)]
pub(super) struct Series {
    seconds: Samples,
    pub(super) memory_seconds: Samples,
    pub(super) stopped: Samples,
    pub(super) downtime: Samples,
    p99: Samples,
    p99_before: Samples,
    longest: Samples,
    /// In percent.
    pub(super) kept: Samples,
    forecast_percent: Samples,
    forecast_factor: Samples,
}

impl Series {
    pub(super) fn push(&mut self, felt: &Felt) {
        self.seconds.push(felt.seconds);
        self.memory_seconds.push(felt.memory_seconds);
        self.kept.push(felt.kept * 100.0);
        self.stopped.push(felt.stopped_ms);
        self.downtime.push(felt.downtime_ms);
        self.p99.push(felt.p99_ms);
        self.p99_before.push(felt.p99_before_ms);
        self.longest.push(felt.longest_ms);
        if let Some(judged) = felt.forecast {
            self.forecast_percent.push(judged.seconds_percent);
            self.forecast_factor.push(judged.downtime_factor);
        }
    }

    /// How fast a memory of so many MiB was copied, in MiB/s.
    pub(super) fn memory_rate(&self, memory_mib: u32) -> Samples {
        self.memory_seconds.map(|seconds| f64::from(memory_mib) / seconds)
    }

    /// How far the forecasts of these moves were off, each of which was the first between its hosts.
    fn judged(&self) -> [Row; 2] {
        let (percent, factor) = (self.forecast_percent.clone(), self.forecast_factor.clone());
        let (time, downtime) = (
            "the same: its time was forecast wrong by, the first move between its hosts",
            "the same: its downtime was forecast wrong by, the first move between its hosts",
        );
        [
            Row::new(time, "%", percent, Goal::None),
            Row::new(downtime, "times", factor, Goal::AtMost(FORECAST_FACTOR_MAX)),
        ]
    }
}

fn place(bench: &VmBench, load: Load, shares: bool) -> anyhow::Result<Place> {
    let memory = MemoryLoad {
        mib: fillable_mib(bench.memory_mib),
        rewrite_mib_per_second: bench.busy_mib,
        ..MemoryLoad::default()
    };
    let guest = GuestSpec::new().cores(bench.cores).memory_mib(bench.memory_mib).memory_load(memory).load(load);
    let shared = if shares { format!("shared-storage = [{:?}]\n", bench.memory.path()) } else { String::new() };
    let more = format!("{RUNS_VMS}{shared}");
    let hosts = TwoHostsSpec { plaintext: !bench.is_encrypted, more: &more, ..TwoHostsSpec::default() };
    Place::new((&bench.programs, bench.memory.path()), hosts, guest, bench.disk_mib << 20)
}

pub(super) fn load(rate: u32) -> Load {
    Load { is_prefilled: true, rate, workers: 4, interval_ms: 100, ..Load::default() }
}

/// So many moves of a series may be repeated because the peer's own migration has killed its guest, as QEMU 7.2 does with emulated ones.
const PEER_LOSSES_MAX: usize = 2;

/// What a peer's move came to. One that has killed its guest is said and made again, as long as there were not too many.
pub(super) fn measured_again<T>(
    name: &str,
    losses: &mut usize,
    theirs: impl Fn() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    loop {
        match theirs() {
            Err(error) if *losses < PEER_LOSSES_MAX => {
                *losses += 1;
                eprintln!("    {name}: measured again, {error:#}");
            }
            ended => return ended,
        }
    }
}

/// Ours and a peer's moves in pairs, each first in every other pair. A guest that dies of the peer's migration is said and costs the
/// series nothing; one that dies of ours ends it.
pub(super) fn in_turns(
    runs: usize,
    ours: impl Fn() -> anyhow::Result<Felt>,
    theirs: impl Fn() -> anyhow::Result<Felt>,
) -> anyhow::Result<[Series; 2]> {
    let [mut own, mut other] = [(); 2].map(|()| Series::default());
    let mut losses = 0;
    let mut theirs = || measured_again("QEMU", &mut losses, &theirs);
    for run in 0..runs {
        if run % 2 == 0 {
            own.push(&ours()?);
            other.push(&theirs()?);
        } else {
            other.push(&theirs()?);
            own.push(&ours()?);
        }
    }
    Ok([own, other])
}

impl VmBench {
    /// With the disk where both hosts reach it, if this `shares`.
    fn ours(&self, rate: u32, limit_ms: u64, shares: bool) -> anyhow::Result<Felt> {
        let mut place = place(self, load(rate), shares)?;
        place.add()?;
        let options = ours::options(&self.strategy, self.channels, limit_ms);
        ours::plan(&place, &options)?;
        let felt = feel(&mut place, |place| transhume(place, &options))?;
        eprintln!("    ours: {felt}");
        let moved = place.hosts.daemon(Side::A).json(&["vm", "show", NAME])?;
        let copied = moved["last_move"]["disks"][0]["report"]["bytes_copied"].as_u64().unwrap_or_default();
        ensure!(shares == (copied == 0), "{copied} bytes of the disk were copied");
        Ok(felt)
    }

    fn peer(&self, rate: u32, limit_ms: u64, mover: Mover) -> anyhow::Result<Felt> {
        let how = How { channels: self.channels, downtime_limit_ms: limit_ms, is_encrypted: self.is_encrypted };
        let mut place = place(self, load(rate), false)?;
        let felt = feel(&mut place, |place| mover(place, how))?;
        eprintln!("    QEMU: {felt}");
        Ok(felt)
    }

    /// Both by turns.
    fn by_turns(&self, rate: u32, limit_ms: u64, mover: Mover) -> anyhow::Result<[Series; 2]> {
        in_turns(self.runs, || self.ours(rate, limit_ms, false), || self.peer(rate, limit_ms, mover))
    }

    pub(super) fn guest_words(&self) -> String {
        let tls = if self.is_encrypted { ", TLS" } else { "" };
        format!("a guest of {} MiB with a disk of {} MiB{tls}", self.memory_mib, self.disk_mib)
    }
}

/// A guest that does next to nothing: how long nobody reaches it. QEMU stops a guest as soon as it believes that the rest of
/// the memory takes no longer than the limit, so with a short one it is seen what the switch itself takes.
pub(super) fn idle(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for limit_ms in [bench.downtime_limit_ms, SHORT_LIMIT_MS] {
        let [ours, theirs] = bench.by_turns(IDLE_RATE, limit_ms, shared_disk)?;
        let peer = "QEMU, the disk shared";
        let what = format!("{}, idle, limit {limit_ms} ms", bench.guest_words());
        let same = |figure: &str| format!("the same: {figure}");
        let judged = ours.judged();
        let unanswered = Row::new(
            format!("{what}: longest time without an answer"),
            "ms",
            ours.downtime,
            Goal::RatioAtMost(DOWNTIME_RATIO_MAX),
        );
        rows.extend([
            unanswered.against(peer, theirs.downtime),
            Row::new(same("stopped, by QEMU's events"), "ms", ours.stopped, Goal::None).against(peer, theirs.stopped),
            Row::new(same("time, ours with the disk"), "s", ours.seconds, Goal::None).against(peer, theirs.seconds),
        ]);
        rows.extend(judged);
    }
    Ok(rows)
}

/// The same guest, whose disk both hosts reach: ours copies nothing of it either.
pub(super) fn shared(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let moves = || bench.ours(IDLE_RATE, SHORT_LIMIT_MS, true);
    let [ours, theirs] = in_turns(bench.runs, moves, || bench.peer(IDLE_RATE, SHORT_LIMIT_MS, shared_disk))?;
    let longer = ours.downtime.more_than(&theirs.downtime);
    let peer = "QEMU, the disk shared";
    let what = format!("{}, idle, on storage that both hosts reach, limit {SHORT_LIMIT_MS} ms", bench.guest_words());
    let same = |figure: &str| format!("the same: {figure}");
    Ok(vec![
        Row::new(format!("{what}: longest time without an answer"), "ms", ours.downtime, Goal::None)
            .against(peer, theirs.downtime),
        Row::new(same("so much longer than QEMU's, pair by pair"), "ms", longer, Goal::AtMost(LONGER_MS_MAX)),
        Row::new(same("time"), "s", ours.seconds, Goal::None).against(peer, theirs.seconds),
    ])
}

/// A guest that reads and writes a disk on storage that both hosts reach, with a cache that goes along and without one. It is adopted and
/// stays a volume either way.
pub(super) fn cache(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let moved = |has_cache: bool| -> anyhow::Result<Felt> {
        let mut place = place(bench, load(RATE), true)?;
        place.add()?;
        place.adopt()?;
        let mut options = ours::options(&bench.strategy, bench.channels, bench.downtime_limit_ms);
        options.push("--keep-volumes".to_owned());
        if has_cache {
            place.add_cache(bench.disk_mib)?;
            std::thread::sleep(WARM_SPAN);
        }
        let felt = feel(&mut place, |place| transhume(place, &options))?;
        eprintln!("    {}: {felt}", if has_cache { "with a cache" } else { "without one" });
        let shown = place.hosts.daemon(Side::A).json(&["vm", "show", NAME])?["last_move"].clone();
        let there = shown["caches"][0]["blocks_there"].as_u64().unwrap_or_default();
        ensure!(has_cache == (there > 0), "{there} blocks of a cache went along: {shown}");
        Ok(felt)
    };
    let [with, without] = in_turns(bench.runs, || moved(true), || moved(false))?;
    let longer = with.downtime.more_than(&without.downtime);
    let what = format!("{}, {RATE} requests/s, a shared disk with a cache that goes along", bench.guest_words());
    let same = |figure: &str| format!("the same: {figure}");
    let peer = "without a cache";
    Ok(vec![
        Row::new(format!("{what}: longest time without an answer"), "ms", with.downtime, Goal::None)
            .against(peer, without.downtime),
        Row::new(same("so much longer than without, pair by pair"), "ms", longer, Goal::AtMost(LONGER_MS_MAX)),
        Row::new(same("time"), "s", with.seconds, Goal::None).against(peer, without.seconds),
        Row::new(same("the guest's p99"), "ms", with.p99, Goal::None).against(peer, without.p99),
    ])
}

/// A guest that uses its disk: how long all of it takes, and what it feels.
pub(super) fn total(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let [ours, theirs] = bench.by_turns(RATE, bench.downtime_limit_ms, recipe)?;
    let peer = "QEMU's recipe: mirror over NBD, then migrate";
    let what = format!("{}, {RATE} requests/s", bench.guest_words());
    let same = |figure: &str| format!("the same: {figure}");
    let judged = ours.judged();
    let mut rows = vec![
        Row::new(format!("{what}: time"), "s", ours.seconds, Goal::RatioAtMost(TIME_RATIO_MAX))
            .against(peer, theirs.seconds),
        Row::new(same("the guest's p99"), "ms", ours.p99.clone(), Goal::RatioAtMost(P99_RATIO_MAX))
            .against(peer, theirs.p99),
        Row::new(same("the guest's p99"), "ms", ours.p99, Goal::None).against("before", ours.p99_before),
        Row::new(same("the guest's longest request"), "ms", ours.longest, Goal::None).against(peer, theirs.longest),
        Row::new(same("longest time without an answer"), "ms", ours.downtime, Goal::None)
            .against(peer, theirs.downtime),
        Row::new(same("stopped, by QEMU's events"), "ms", ours.stopped, Goal::None).against(peer, theirs.stopped),
    ];
    rows.extend(judged);
    Ok(rows)
}

/// A guest that uses its disk goes to and fro: how far the forecasts are off between hosts that have moved it before.
pub(super) fn forecast(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let [mut first, mut later] = [(); 2].map(|()| [(); 2].map(|()| Samples::default()));
    let mut place = place(bench, load(RATE), false)?;
    place.add()?;
    let options = ours::options(&bench.strategy, bench.channels, bench.downtime_limit_ms);
    for number in 0..2 + 2 * bench.runs {
        let way = if number % 2 == 0 { (Side::A, Side::B) } else { (Side::B, Side::A) };
        let judged = ours::judged(&mut place, way, &options)?;
        let [percent, factor] = if number < 2 { &mut first } else { &mut later };
        percent.push(judged.seconds_percent);
        factor.push(judged.downtime_factor);
    }
    place.verify()?;
    let [first_percent, first_factor] = first;
    let [percent, factor] = later;
    let what = format!("{}, {RATE} requests/s, to and fro", bench.guest_words());
    Ok(vec![
        Row::new(format!("{what}: the time was forecast wrong by"), "%", percent, Goal::AtMost(FORECAST_PERCENT_MAX)),
        Row::new("the same: the downtime was forecast wrong by", "times", factor, Goal::AtMost(FORECAST_FACTOR_MAX)),
        Row::new("the same: the time, the first move to each host", "%", first_percent, Goal::None),
        Row::new("the same: the downtime, the first move to each host", "times", first_factor, Goal::None),
    ])
}

/// A guest that writes faster than one link carries: whether its move ends.
pub(super) fn converge(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for links in [1, 2] {
        let [mut ended, mut foretold, mut seconds] = [(); 3].map(|()| Samples::default());
        for _ in 0..bench.runs.min(2) {
            let run = converging(bench, links)?;
            ended.push(f64::from(u8::from(run.is_done)));
            foretold.push(f64::from(u8::from(run.is_foretold == (links > 1))));
            seconds.push(run.seconds);
        }
        let what = format!(
            "a guest that rewrites {} MiB/s of memory over {links} of {} Mbit/s",
            bench.rewrite_mib,
            bench.link_bits_per_second / 1_000_000
        );
        let goal = if links == 1 { Goal::None } else { Goal::AtLeast(1.0) };
        rows.push(Row::new(format!("{what}: moves that end within {DEADLINE_SECONDS} s"), "share", ended, goal));
        let told = "the same: plans that have said beforehand whether it converges";
        rows.push(Row::new(told, "share", foretold, Goal::AtLeast(1.0)));
        rows.push(Row::new("the same: time until it ends, or is undone", "s", seconds, Goal::None));
    }
    Ok(rows)
}

/// One move of a guest that may be too fast for its links.
struct ConvergingRun {
    /// Whether it was done in time.
    is_done: bool,
    /// Whether its plan has said that it converges.
    is_foretold: bool,
    seconds: f64,
}

fn converging(bench: &VmBench, links: usize) -> anyhow::Result<ConvergingRun> {
    let hosts = TwoHostsSpec {
        links,
        link_bits_per_second: Some(bench.link_bits_per_second),
        plaintext: !bench.is_encrypted,
        more: RUNS_VMS,
        more_at_b: "",
    };
    let memory_mib = bench.memory_mib.min(512);
    let memory =
        MemoryLoad { mib: fillable_mib(memory_mib), rewrite_mib_per_second: bench.rewrite_mib, hot_percent: 100 };
    // The disk is written as fast as the guest gets that done beside.
    let load = Load { read_percent: 0, rate: 1_000, ..load(0) };
    let guest = GuestSpec::new().cores(bench.cores.max(2)).memory_mib(memory_mib).memory_load(memory).load(load);
    let disk_bytes = bench.disk_mib.min(256) << 20;
    let mut place = Place::new((&bench.programs, bench.memory.path()), hosts, guest, disk_bytes)?;
    place.add()?;
    let (deadline, channels) = (format!("{DEADLINE_SECONDS}s"), bench.channels.to_string());
    let options = ["--verify", "off", "--channels", &channels, "--deadline", &deadline];
    let plan = ours::plan(&place, &options.map(str::to_owned))?;
    let is_foretold = plan["converges"] == true;
    eprintln!("    {links} links, plan: converges {}, {}", plan["converges"], plan["notes"]);
    let (is_done, seconds) = ours::may_end(&mut place, &options)?;
    let rewritten = place.guest.load_result().memory.rewritten / 256;
    eprintln!("    {rewritten} MiB were rewritten since the guest's boot");
    Ok(ConvergingRun { is_done, is_foretold, seconds })
}
