//! What a guest feels while a sparse volume of 16 TiB is moved that it writes to everywhere: whatever walks over the whole
//! volume must not hold its requests.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::server::{Endpoint, Transhumed, VOLUME};
use transhume_guest::programs::private_folder;

use super::Bench;

const VOLUME_BYTES: u64 = 16 << 40;
/// Writes of 4 KiB a second, each to a place of its own, as good as always.
const RATE: u32 = 1_000;
const MIX: &[&str] = &["read_percent=0", "io_bytes=4096"];
/// So long the load runs without a migration first.
const IDLE: Duration = Duration::from_secs(20);
const STRATEGIES: [&str; 2] = ["mirror", "dbt"];
/// The hold at the end of a strategy that tracks is as long as it may be. At the default of 200 ms it would be all that the
/// p99.9 shows.
const DOWNTIME_LIMIT: &str = "10ms";

/// What was seen with one strategy.
#[derive(Default)]
struct Figures {
    idle_p999_ms: Samples,
    beside_compute_p999_ms: Samples,
    p999_ms: Samples,
    idle_longest_ms: Samples,
    longest_ms: Samples,
    seconds: Samples,
    hold_ms: Samples,
    requests: Samples,
}

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let mut figures: [Figures; 2] = Default::default();
    for _ in 0..bench.runs {
        for (strategy, figures) in STRATEGIES.iter().zip(&mut figures) {
            measure(bench, strategy, figures).with_context(|| format!("measuring {strategy}"))?;
        }
    }
    let mut rows = Vec::new();
    for (strategy, figures) in STRATEGIES.iter().zip(figures) {
        let Figures {
            idle_p999_ms,
            beside_compute_p999_ms,
            p999_ms,
            idle_longest_ms,
            longest_ms,
            seconds,
            hold_ms,
            requests,
        } = figures;
        let what =
            |figure: &str| format!("16 TiB sparse in memory, 1,000 writes/s over all of it, {strategy}: {figure}");
        let idle = "the same load without a migration";
        rows.push(Row::new(what("p99.9"), "ms", p999_ms, Goal::RatioAtMost(2.0)).against(idle, idle_p999_ms));
        // What of it is the processor's alone: a thread that only computes asks for as much of it as a copy at most.
        rows.push(Row::new(
            what("p99.9 beside a thread that only computes, without a migration"),
            "ms",
            beside_compute_p999_ms,
            Goal::None,
        ));
        rows.push(Row::new(what("longest"), "ms", longest_ms, Goal::None).against(idle, idle_longest_ms));
        rows.push(Row::new(what("time"), "s", seconds, Goal::None));
        // A hold that meets more than one of a thousand requests is what the p99.9 shows.
        rows.push(Row::new(what("the hold at the end"), "ms", hold_ms, Goal::None));
        rows.push(Row::new(what("requests"), "", requests, Goal::None));
    }
    Ok(rows)
}

/// Keeps a processor busy for so long.
fn compute_for(span: Duration) {
    let began = Instant::now();
    while began.elapsed() < span {
        std::hint::spin_loop();
    }
}

/// One migration under load, from a file that nobody has written to before.
fn measure(bench: &Bench, strategy: &str, figures: &mut Figures) -> anyhow::Result<()> {
    let folder = private_folder(bench.memory.path())?;
    let (source, target) = (folder.path().join("source.raw"), folder.path().join("target.raw"));
    let file = File::create(&source).context("creating the sparse volume")?;
    file.set_len(VOLUME_BYTES).context("sizing the sparse volume: a folder on tmpfs or XFS takes 16 TiB")?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    let endpoint = Endpoint { socket: folder.path().join("nbd.sock"), export: VOLUME };
    daemon.attach(VOLUME, &source, &endpoint.socket, "")?;
    let mut load = NbdLoad::start_with(&bench.programs, &endpoint, Offer::Rate(RATE), MIX)?;
    load.mark()?;
    std::thread::sleep(IDLE);
    let idle = load.mark()?;
    compute_for(IDLE);
    let beside_compute = load.mark()?;
    let hold = ["--downtime-limit", DOWNTIME_LIMIT];
    let words = ["--strategy", strategy, "--verify", "off", "--delete-source"];
    let words = [&words[..], if strategy == "dbt" { &hold } else { &[] }].concat();
    let report = daemon.move_to(VOLUME, &target, &words)?;
    let during = load.mark()?;
    let ms = |span: Duration| span.as_secs_f64() * 1e3;
    figures.idle_p999_ms.push(ms(idle.p999));
    figures.beside_compute_p999_ms.push(ms(beside_compute.p999));
    figures.p999_ms.push(ms(during.p999));
    figures.idle_longest_ms.push(ms(idle.longest));
    figures.longest_ms.push(ms(during.longest));
    let hold_us = report["switchover"]["window_us"].as_f64().context("the report tells the hold")?;
    figures.hold_ms.push(hold_us / 1e3);
    figures.requests.push((during.reads + during.writes) as f64);
    figures.seconds.push(report["seconds"].as_f64().context("the report tells seconds")?);
    Ok(())
}
