//! WAIO, IOFollow and its cache at once, which no paper has: against either alone, and against DBT at an equal guest.

use crate::figure::{Experiment, Figure};
use crate::interference::devices::Disk;
use crate::interference::load::Load;
use crate::interference::scene::{Scene, Seen};

use super::engine::{FOLLOW, READ_CACHE, loads, standard};
use super::{Played, Runs};
use crate::waio::Setup;

pub(super) const ID: &str = "together";
/// Speeds at which DBT is looked at, in bytes a second.
const RATES: [u64; 6] = [2_500_000, 5_000_000, 10_000_000, 20_000_000, 40_000_000, 60_000_000];
/// A metric that is worse by no more than this is as good.
const AS_GOOD: f64 = 0.03;
/// And one that is better by this is better.
const BETTER: f64 = 0.05;

/// DBT, WAIO, IOFollow with its cache, all at once.
fn ways(load: Load, scale: u64) -> [Scene; 4] {
    let dbt = standard(load, scale);
    let follow = Scene { order: Some(FOLLOW), read_cache: READ_CACHE, ..dbt };
    [dbt, dbt.on(Disk::SataFlash), follow, follow.on(Disk::SataFlash)]
}

/// What is left out of all at once, to see which part is in another's way.
const WITHOUT: [&str; 3] = [
    "in the order of the volume instead of following",
    "without the read cache",
    "chunks admitted at their fourth request instead of the first",
];
/// From this request on a chunk is admitted, for comparison.
const LATER: u16 = 4;

/// All at once, without one part.
fn without(load: Load, scale: u64) -> [Scene; 3] {
    let dbt = standard(load, scale).on(Disk::SataFlash);
    let together = Scene { order: Some(FOLLOW), read_cache: READ_CACHE, ..dbt };
    [
        Scene { read_cache: READ_CACHE, ..dbt },
        Scene { order: Some(FOLLOW), ..dbt },
        Scene { threshold: LATER, ..together },
    ]
}

/// DBT with a limit, as its only means of sparing the guest.
fn limited(load: Load, scale: u64) -> [Scene; RATES.len()] {
    RATES.map(|rate| standard(load, scale).at_rate(rate))
}

/// Loads that nothing was tuned to, beside those of the paper.
fn all(setup: &Setup) -> Vec<Load> {
    std::iter::once(Load::Financial1).chain(loads(setup)).collect()
}

pub(super) fn scenes(setup: &Setup) -> Vec<Played> {
    let of = |load| {
        let others = limited(load, setup.scale).into_iter().chain(without(load, setup.scale));
        ways(load, setup.scale).into_iter().chain(others)
    };
    all(setup).into_iter().flat_map(of).map(Played::Engine).collect()
}

/// MB/s of the migration, and the guest's response in milliseconds.
fn metrics(seen: &Seen, scene: Scene) -> [f64; 2] {
    [seen.copied_rate(scene.scale), seen.guest.mean_ms()]
}

const WHY: &str = "The admission of a chunk reads all of it of the source. It pays once the guest comes back to the chunk: in a trace of \
     a minute few are asked for again. Where WAIO alone has the disk copy as fast as without a guest nothing is left to gain.";

/// By which parts migration and guest are better than with `alone`.
fn against(together: [f64; 2], alone: [f64; 2]) -> [f64; 2] {
    [together[0] / alone[0] - 1.0, alone[1] / together[1] - 1.0]
}

/// Whether neither is worse, and one of them better.
fn is_better([rate, guest]: [f64; 2]) -> bool {
    rate >= -AS_GOOD && guest >= -AS_GOOD && (rate >= BETTER || guest >= BETTER)
}

fn words([rate, guest]: [f64; 2]) -> String {
    format!("migration {:+.1} %, guest {:+.1} %", rate * 100.0, guest * 100.0)
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Not in the paper: both together, against either alone",
        "Moves of 15 GB as fast as they go, cache mode none, flash as the surrogate, a read cache of 2 GiB, two requests \
         for one copy. Neither the migration's MB/s nor the guest's response may be more than 3 % worse than with either \
         alone, and one of them is to be at least 5 % better. DBT at an equal guest is the fastest of its speeds at which \
         the guest is answered as soon.",
    )
    .against("DBT")
    .assumed();
    for load in all(setup) {
        let ways = ways(load, setup.scale);
        let name = load.name();
        let seen = ways.map(|scene| metrics(runs.engine(scene), scene));
        for ([rate, guest], way) in seen.into_iter().zip(["DBT", "WAIO", "IOFollow and cache", "together"]) {
            figure.beside(format!("{name}, {way}: migration"), "MB/s", seen[0][0], rate);
            figure.beside(format!("{name}, {way}: guest"), "ms", seen[0][1], guest);
        }
        let [.., together] = seen;
        for (alone, which) in [(seen[1], "WAIO"), (seen[2], "IOFollow")] {
            let change = against(together, alone);
            let claim = format!("{name}: together no worse than {which} alone, and better");
            let others = without(load, setup.scale).map(|scene| against(metrics(runs.engine(scene), scene), alone));
            let tried = WITHOUT.iter().zip(others).map(|(what, other)| format!("{what}: {}", words(other)));
            let seen = tried.collect::<Vec<_>>().join("; ");
            let other = Experiment { seen, shows: others.into_iter().any(is_better) };
            figure.claim(claim, is_better(change), words(change), WHY).explain(WHY, &other);
        }
        equal_guest(&mut figure, setup, runs, load, together);
    }
    figure
}

/// How fast DBT is at the same guest.
fn equal_guest(figure: &mut Figure, setup: &Setup, runs: &Runs, load: Load, [rate, guest]: [f64; 2]) {
    let limited = limited(load, setup.scale).map(|scene| metrics(runs.engine(scene), scene));
    let equal = limited.iter().rev().find(|[_, theirs]| *theirs <= guest);
    let (dbt, words) = match equal {
        Some([dbt, theirs]) => (*dbt, format!("{dbt:.1} MB/s of DBT's at {theirs:.1} ms")),
        None => {
            (limited[0][0], format!("DBT's guest waits {:.1} ms already at {:.1} MB/s", limited[0][1], limited[0][0]))
        }
    };
    figure.claim(
        format!("{}: at least 1.5 times DBT's migration at an equal guest", load.name()),
        rate >= 1.5 * dbt,
        format!("{rate:.1} MB/s at {guest:.1} ms; {words}"),
        "",
    );
}
