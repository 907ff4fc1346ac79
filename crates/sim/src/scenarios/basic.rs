//! One volume and one move, under all that may go wrong with it.

use std::time::Duration;

use block::Bytes;
use migrate::{Phase, Verify};

use super::common;
use crate::disk::{Faults, Timing};
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};
use crate::scenario_dsl::{guest, process, source, store, target};

pub(super) fn rate(rng: &Rng) -> f64 {
    rng.pick(&[0.0005, 0.002, 0.01])
}

pub(super) fn slow_disks(rng: &Rng) -> Scenario {
    let timing = |rng: &Rng| if rng.chance(0.5) { Timing::SLOW } else { Timing::FLASH };
    let slow = Faults { slow: rate(rng), ..Faults::default() };
    let load = Load { requests: 500, ..Load::default() };
    let timings = (timing(rng), timing(rng));
    common(rng).guest(load).timings(timings.0, timings.1).source(slow).target(slow)
}

pub(super) fn hot_spot(rng: &Rng) -> Scenario {
    let load = Load {
        outstanding: 32,
        requests: 1000,
        pattern: Pattern::Hot(64),
        zeroes: 0.1,
        discards: 0.1,
        think: Duration::from_micros(50),
        ..Load::default()
    };
    common(rng).volume(Bytes(rng.pick(&[300_000, 1 << 20]))).alignment(1).guest(load)
}

pub(super) fn source_errors(rng: &Rng) -> Scenario {
    let rate = rate(rng);
    let faults = Faults { read_errors: rate, write_errors: rate, flush_errors: rate * 10.0, ..Faults::default() };
    common(rng).source(faults)
}

pub(super) fn crash(rng: &Rng) -> Scenario {
    common(rng).with(FaultEvent::Crash, rng.within(1..=6))
}

/// So few writes that, on a large volume, the activity log has idle extents and the progress map is worth reading.
pub(super) fn sparse(rng: &Rng) -> Load {
    Load { requests: 200, outstanding: 8, reads: 0.2, think: Duration::from_secs(rng.pick(&[2, 8])), ..Load::default() }
}

/// A long move of a large volume with sparse writes is killed, and goes on where it was.
pub(super) fn resume(rng: &Rng) -> Scenario {
    let load = sparse(rng);
    let crashes = rng.within(1..=6);
    let flush_errors = rng.pick(&[0.0, 0.0, 0.4]);
    let scenario = common(rng)
        .and(target().flush_errors(flush_errors))
        .volume(Bytes::mib(rng.pick(&[9, 13])))
        .guest(load)
        .options(|options| options.bandwidth = Some(rng.pick(&[300 << 10, 600 << 10])))
        .within(Duration::from_secs(40))
        .downtime(Duration::from_secs(2))
        .with(FaultEvent::Crash, crashes)
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::TargetLost, rng.below(3))
        .with(FaultEvent::CrashAtWrite, rng.below(3));
    // What only the source has got must be known to whoever comes after a death in the middle of that.
    if rng.chance(0.5) { scenario.and(process().killed_at_write_in(Phase::TargetLost)) } else { scenario }
}

pub(super) fn power_loss(rng: &Rng) -> Scenario {
    common(rng).with(FaultEvent::PowerLoss, rng.within(1..=3)).with(FaultEvent::Crash, rng.below(2))
}

pub(super) fn steering(rng: &Rng) -> Scenario {
    common(rng)
        .with(FaultEvent::Pause, rng.below(4))
        .with(FaultEvent::Cancel, rng.below(3))
        .with(FaultEvent::Bandwidth, rng.below(4))
}

pub(super) fn corruption(rng: &Rng) -> Scenario {
    common(rng).verify(Verify::Full).with(FaultEvent::Corruption, rng.within(1..=3))
}

pub(super) fn lies(rng: &Rng) -> Scenario {
    let rate = || rng.pick(&[0.0, 0.002, 0.02]);
    let (lost, misdirected, flipped) = (rate(), rate(), rate());
    let target = target().lost_writes(lost).misdirected_writes(misdirected).flipped_bits(flipped);
    common(rng).verify(Verify::Full).and(target)
}

/// A volume of 8 MiB, 2000 requests, and every kind of fault at a rate at which most moves succeed all the same.
pub(super) fn standard(rng: &Rng) -> Scenario {
    let outstanding = rng.pick(&[4, 8, 16]);
    let any = || source().slow(0.001).read_errors(0.0005).write_errors(0.0005).short_reads(0.0005).flush_errors(0.005);
    Scenario::new()
        .dirty_target(rng.chance(0.3))
        .and(guest().asks(2000).at_once(outstanding))
        .and(any())
        .and(any().on(target()).stuck(0.0002))
        .and(any().on(store()))
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::Reconnect, rng.below(3))
        .with(FaultEvent::TargetLost, rng.below(2))
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::Pause, rng.below(2))
        .with(FaultEvent::StoreFull, rng.below(2))
}

/// Always more overlapping writes than a copy of one chunk has time for.
pub(super) fn never_rests(rng: &Rng) -> Scenario {
    let sectors = rng.pick(&[8, 64]);
    let hot = guest().asks(1000).never_rests().at_once(16).writes(0.9).at_one_place(sectors).sectors(8);
    let (size, chunk) = (rng.pick(&[1 << 20, 3 << 20]), rng.pick(&[65_536, 262_144]));
    let hot = hot.thinks(Duration::from_micros(rng.pick(&[5, 40])));
    Scenario::new().volume(Bytes(size)).and(hot).options(|options| options.chunk_bytes = chunk)
}

pub(super) fn failed_flush(rng: &Rng) -> Scenario {
    let writer = guest().asks(1000).at_once(8).writes(0.9).flushes(0.01).thinks(Duration::from_millis(200));
    let place = if rng.chance(0.5) { writer.at_one_place(256) } else { writer };
    let rate = rng.pick(&[0.2, 0.5]);
    let crashes = rng.below(3);
    // Chunks and writes so small that a chunk is left alone between two flushes: what is believed of it then counts.
    let is_fine = rng.chance(0.5);
    let place = if is_fine { writer.sectors(2) } else { place };
    let chunk = if is_fine { 4096 } else { 65_536 };
    Scenario::new()
        .volume(Bytes::mib(rng.pick(&[1, 3])))
        .dirty_target(rng.chance(0.3))
        .and(place)
        .and(target().flush_errors(rate).slow(0.01).is(Timing::SLOW))
        .within(Duration::from_secs(25))
        .options(|options| {
            options.bandwidth = Some(rng.pick(&[40 << 10, 100 << 10]));
            options.chunk_bytes = chunk;
        })
        .with(FaultEvent::Crash, crashes)
}

/// Copies end while a slow target is flushed. The next flush fails, and whoever comes after the process has only the
/// progress map to tell it what is there.
pub(super) fn flush_death(rng: &Rng) -> Scenario {
    // A copy takes a second, so that some end during every flush.
    let thin = Timing {
        base: Duration::from_millis(20),
        per_kib: Duration::from_millis(3),
        jitter: Duration::from_millis(200),
        channels: 4,
    };
    let flaky = target().flush_errors(0.5).is(thin);
    let deaths = process().killed_in(Phase::TargetLost);
    common(rng)
        .volume(Bytes::mib(9))
        .filled(1.0)
        .guest(sparse(rng))
        .and(flaky)
        .and(deaths)
        .options(|options| {
            options.bandwidth = Some(600 << 10);
            options.target_ms = 30_000;
        })
        .within(Duration::from_secs(30))
        .with(FaultEvent::Crash, rng.below(2))
}

pub(super) fn short_reads(rng: &Rng) -> Scenario {
    let rate = rate(rng);
    common(rng).and(source().short_reads(rate)).and(target().short_reads(rate)).and(store().short_reads(rate))
}

/// So little of everything that a run has few awaits.
pub(super) fn at_await(rng: &Rng) -> Scenario {
    // A quiet run has about 150 polls; one that somebody else holds up has more.
    let polls = rng.pick(&[150, 150, 600]);
    let scenario = small(rng).dies_at_poll(rng.below(polls));
    if rng.chance(0.5) { scenario.dies_at_poll(rng.below(150)) } else { scenario }
}

/// A small volume, few requests.
pub(super) fn small(rng: &Rng) -> Scenario {
    let size = Bytes(rng.pick(&[256 << 10, (320 << 10) + 512]));
    let (verify, chunk) = (rng.pick(&[Verify::Off, Verify::Sample, Verify::Full]), rng.pick(&[16_384, 65_536]));
    Scenario::new()
        .volume(size)
        .dirty_target(rng.chance(0.3))
        .and(guest().asks(40).at_once(4).writes(0.7).flushes(0.1).sectors(32).thinks(Duration::from_micros(200)))
        .verify(verify)
        .downtime(Duration::from_millis(1))
        .options(|options| options.chunk_bytes = chunk)
}

pub(super) fn recovery(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Preparing, Phase::Copying, Phase::PreSwitch, Phase::Committing]);
    common(rng).and(process().killed_recovering_in(phase)).with(FaultEvent::CrashAgain, rng.within(1..=3))
}

pub(super) fn there_and_back(rng: &Rng) -> Scenario {
    let times = rng.within(2..=3) as u32;
    common(rng).moves(times).with(FaultEvent::Crash, rng.below(3)).with(FaultEvent::PowerLoss, rng.below(2))
}

/// A flush fails, the session is resumed, and zeroes that read as zeroes are left alone though
/// no flush had made them durable.
pub(super) fn zeroes_lost(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.3, 0.6]);
    Scenario::new()
        .volume(Bytes::mib(1))
        .filled(0.5)
        .dirty_target(true)
        .and(guest().asks(1000).writes(0.8).discards(0.1, 0.2))
        .and(target().flush_errors(rate))
}

pub(super) fn reconnect(rng: &Rng) -> Scenario {
    common(rng).source(Faults { slow: rate(rng), ..Faults::default() }).with(FaultEvent::Reconnect, rng.within(1..=5))
}

pub(super) fn offload(rng: &Rng) -> Scenario {
    let rate = rate(rng);
    let faults = Faults { write_errors: rate, flush_errors: rate * 10.0, stuck: rate / 10.0, ..Faults::default() };
    common(rng).offloads(true).target(faults).with(FaultEvent::Crash, rng.below(3))
}

pub(super) fn swarm(rng: &Rng) -> Scenario {
    let maybe = |value: f64| if rng.chance(0.3) { value * rng.fraction() } else { 0.0 };
    let faults = || Faults {
        read_errors: maybe(0.01),
        write_errors: maybe(0.01),
        flush_errors: maybe(0.2),
        short_reads: maybe(0.01),
        stuck: maybe(0.001),
        slow: maybe(0.01),
        ..Faults::default()
    };
    let (source, target, journal) = (faults(), faults(), faults());
    let times = |limit| if rng.chance(0.3) { rng.within(1..=limit) } else { 0 };
    let mut scenario = common(rng).source(source).target(target).journal(journal);
    for (event_kind, limit) in [
        (FaultEvent::Crash, 4),
        (FaultEvent::CrashAgain, 2),
        (FaultEvent::StoreFull, 2),
        (FaultEvent::PowerLoss, 2),
        (FaultEvent::Reconnect, 3),
        (FaultEvent::TargetLost, 2),
        (FaultEvent::Pause, 3),
        (FaultEvent::Cancel, 2),
        (FaultEvent::Bandwidth, 3),
        (FaultEvent::FilesFail, 2),
    ] {
        scenario = scenario.with(event_kind, times(limit));
    }
    let scenario = if rng.chance(0.1) { scenario.target_space(rng.fraction()) } else { scenario };
    let scenario = scenario.offloads(rng.chance(0.15));
    if rng.chance(0.7) {
        return scenario;
    }
    let (half_open, slow_reader, down) = (times(2), times(2), times(2));
    scenario
        .wire(super::nbd::any_wire(rng))
        .with(FaultEvent::HalfOpen, half_open)
        .with(FaultEvent::SlowReader, slow_reader)
        .with(FaultEvent::LinkDown, down)
}
