//! What the machine itself does to latencies, with nothing else running: the floor of every worst case in the table.
//!
//! One thread a core reads the clock without end. A virtual machine's host takes its processors away now and then; the
//! clock jumps by then, and a guest's request that is due in a jump waits for its end, whoever serves it.

use std::thread;
use std::time::{Duration, Instant};

use super::Bench;
use crate::figures::{Goal, Row, Samples};

const WATCH: Duration = Duration::from_secs(3);
/// Interrupts and the scheduler's own work take less.
const GAP_MIN: Duration = Duration::from_millis(1);

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let (mut longest, mut lost) = (Samples::default(), Samples::default());
    for _ in 0..bench.runs {
        let cores = thread::available_parallelism()?.get();
        let gaps = thread::scope(|scope| {
            let watchers: Vec<_> = (0..cores).map(|_| scope.spawn(gaps)).collect();
            watchers.into_iter().flat_map(|watcher| watcher.join().expect("a watcher only watches")).collect::<Vec<_>>()
        });
        longest.push(milliseconds(gaps.iter().max().copied().unwrap_or_default()));
        lost.push(milliseconds(gaps.iter().sum()) / cores as f64);
    }
    Ok(vec![
        Row::new(
            "the machine with nothing running: longest time without a processor in 3 s",
            "ms",
            longest,
            Goal::None,
        ),
        Row::new("the machine with nothing running: time without a processor in 3 s", "ms", lost, Goal::None),
    ])
}

/// The times during which this thread did not run.
fn gaps() -> Vec<Duration> {
    let start = Instant::now();
    let (mut last, mut gaps) = (start, Vec::new());
    while last.duration_since(start) < WATCH {
        let now = Instant::now();
        let gap = now - last;
        if gap >= GAP_MIN {
            gaps.push(gap);
        }
        last = now;
    }
    gaps
}

fn milliseconds(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}
