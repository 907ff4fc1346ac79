//! The group `guests` of `bench-vm`: guests that run Debian's memcached, PostgreSQL, dbench or nothing, moved by the parallel memory
//! engine, by QEMU with one stream, and by QEMU's multifd, in turn. After each move the guest must go on as if nothing had been.

mod counter;
mod measure;
mod memcached;
mod processors;
mod programs;
mod system;

use measure::{Mover, Seen};
pub(super) use programs::Program;
use system::System;

use super::VmBench;
use super::rows::measured_again;
use crate::figures::{Goal, Row, Samples};

/// What was seen of several moves by one mover.
#[derive(Default)]
struct Series {
    seconds: Samples,
    rounds: Samples,
    sent_mib: Samples,
    stopped_ms: Samples,
    unanswered_ms: Samples,
    client_gap_ms: Samples,
    processor_seconds: Samples,
    before: Samples,
    kept_percent: Samples,
}

impl Series {
    fn push(&mut self, seen: &Seen) {
        self.seconds.push(seen.seconds);
        self.rounds.push(seen.rounds as f64);
        self.sent_mib.push(seen.sent_bytes as f64 / f64::from(1 << 20));
        self.stopped_ms.push(seen.stopped_ms);
        self.unanswered_ms.push(seen.unanswered_ms);
        self.processor_seconds.push(seen.processor_seconds);
        if let Some(throughput) = seen.throughput {
            self.before.push(throughput.before);
            self.kept_percent.push(throughput.during / throughput.before * 100.0);
        }
        if let Some(gap) = seen.client_gap_ms {
            self.client_gap_ms.push(gap);
        }
    }
}

/// Every program, and with each every mover.
pub(super) fn guests(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let system = System::create(bench.memory.path())?;
    let mut rows = Vec::new();
    let wanted = |program: &Program| bench.guest_programs.is_empty() || bench.guest_programs.contains(program);
    for program in Program::ALL.into_iter().filter(wanted) {
        let series = in_turns(bench, &system, program)?;
        let measured = rows_of(bench, program, &series);
        measured.iter().for_each(Row::print);
        rows.extend(measured);
    }
    Ok(rows)
}

/// The three movers in turn; each is first in every third turn. A guest that dies of QEMU's migration is said and costs the series nothing;
/// one that dies of ours ends it.
fn in_turns(bench: &VmBench, system: &System, program: Program) -> anyhow::Result<[Series; 3]> {
    let movers = Mover::all(bench.channels);
    let mut series = [(); 3].map(|()| Series::default());
    let mut losses = 0;
    for run in 0..bench.runs {
        for turn in 0..movers.len() {
            let number = (run + turn) % movers.len();
            let mover = movers[number];
            let play = || measure::play(bench, system, program, mover);
            let seen = match mover {
                Mover::Parallel => play()?,
                Mover::Qemu(_) => measured_again(&mover.name(), &mut losses, play)?,
            };
            eprintln!("    {program:?}, {}: {seen}", mover.name());
            series[number].push(&seen);
        }
    }
    Ok(series)
}

/// Each figure against both of QEMU's.
fn rows_of(bench: &VmBench, program: Program, [ours, one, several]: &[Series; 3]) -> Vec<Row> {
    let tls = if bench.is_encrypted { ", TLS" } else { "" };
    let what = format!("a guest of {} MiB with {}{tls}", measure::MEMORY_MIB, program.words());
    let [_, one_name, several_name] = Mover::all(bench.channels).map(|mover| mover.name());
    let mut rows = Vec::new();
    let mut add = |figure: &str, unit: &'static str, samples: fn(&Series) -> &Samples| {
        for (name, peer) in [(&one_name, one), (&several_name, several)] {
            let what = if rows.is_empty() { format!("{what}: {figure}") } else { format!("the same: {figure}") };
            rows.push(Row::new(what, unit, samples(ours).clone(), Goal::None).against(name, samples(peer).clone()));
        }
    };
    add("time", "s", |series| &series.seconds);
    add("rounds", "times", |series| &series.rounds);
    add("sent over the link", "MiB", |series| &series.sent_mib);
    add("stopped, by QEMU's events", "ms", |series| &series.stopped_ms);
    add("longest time without an answer by UDP", "ms", |series| &series.unanswered_ms);
    if program == Program::Memcached {
        add("longest time without an answer of memcached", "ms", |series| &series.client_gap_ms);
    }
    add("processor time of the hosts", "s", |series| &series.processor_seconds);
    if let Some(unit) = program.unit() {
        add("throughput before", unit, |series| &series.before);
        add("throughput while it moves, of that", "%", |series| &series.kept_percent);
    }
    rows
}
