//! The paper's numbers (section 4), and what is common to the figures.

use crate::figure::{Axis, Experiment, Plot, Series};

use super::Setup;
use super::scene::{Control, END, MOVE, Scene, Seen, Way};

/// The sizes of the caches, in GB.
pub(super) const SIZES: [u64; 3] = [5, 10, 20];
/// The one of sections 4.2 and 4.3.
pub(super) const SIZE: u64 = 10;
/// Reads a second without a cache and with a warm one (4.2).
pub(super) const COLD: f64 = 8000.0;
pub(super) const WARM: f64 = 15_000.0;
/// Of a VM that has two neighbours on its host, and of one that has three (4.3.2).
pub(super) const OF_THREE: f64 = 20_000.0;
pub(super) const OF_FOUR: f64 = 15_000.0;
/// How long the copy of each size takes, in seconds (4.2, 4.4).
pub(super) const COPY_SECONDS: [f64; 3] = [15.0, 30.0, 60.0];

/// MB/s in the 100 s from each moment on, of the four ways (table 1).
pub(super) const TABLE_1: [[f64; 4]; 8] = [
    [41.89, 45.25, 43.11, 48.67],
    [49.58, 51.16, 61.69, 61.88],
    [53.48, 55.90, 60.13, 62.18],
    [55.88, 58.46, 62.98, 61.59],
    [56.09, 62.21, 61.23, 60.72],
    [57.28, 61.66, 61.04, 60.42],
    [56.99, 63.26, 62.36, 61.39],
    [58.57, 61.91, 59.89, 64.47],
];
/// The means of 400 s by sizes (table 2) and of 800 s (table 3).
pub(super) const TABLE_2: [[f64; 4]; 3] =
    [[43.62, 44.55, 46.23, 46.23], [50.21, 52.69, 56.98, 58.58], [48.75, 48.02, 56.61, 59.41]];
pub(super) const TABLE_3: [[f64; 4]; 3] =
    [[45.64, 46.36, 47.17, 46.97], [53.72, 57.48, 59.05, 60.16], [54.86, 57.93, 61.89, 62.79]];

/// The paper's ways with a cache of `cache_gb`.
pub(super) fn ways(setup: &Setup, cache_gb: u64) -> [Scene; 4] {
    Way::PAPERS.map(|way| Scene::of_paper(way, cache_gb, setup.scale))
}

/// `scene` with `control`.
pub(super) const fn with(scene: Scene, control: Control) -> Scene {
    Scene { control, ..scene }
}

/// What is read for the VM in MB/s as table 1 has it: of Firepan and `FirepanIF` without the copy, of the others all.
pub(super) fn megabytes(seen: &Seen, from: usize, to: usize) -> f64 {
    seen.megabytes(from, to).iter().sum()
}

/// By which part the second is more than the first, in percent.
pub(super) fn more(than: f64, is: f64) -> f64 {
    (is / than - 1.0) * 100.0
}

/// What was played otherwise: explains `paper` if it lies between `ours` and `other`, or is at most half as far from the latter.
pub(super) fn otherwise(what: &str, (paper, ours, other): (f64, f64, f64)) -> Experiment {
    let is_between = ours.min(other) <= paper && paper <= ours.max(other);
    Experiment {
        seen: format!("{what}: {other:.1}"),
        shows: is_between || (other - paper).abs() <= (ours - paper).abs() / 2.0,
    }
}

/// A plot over time, in steps of `step` seconds from `from` on.
pub(super) fn over_time(
    (title, unit): (&str, &str),
    (from, step): (usize, usize),
    series: &[(&str, &Seen)],
    of: impl Fn(&Seen, usize, usize) -> f64,
) -> Plot {
    let series = series.iter().enumerate().map(|(colour, (name, seen))| Series {
        name: (*name).to_owned(),
        colour,
        points: (from..END).step_by(step).map(|at| [at as f64, of(seen, at, (at + step).min(END))]).collect(),
    });
    Plot {
        title: title.to_owned(),
        x: Axis::linear("s"),
        y: Axis::linear(unit),
        bars: false,
        series: series.collect(),
        marks: Vec::new(),
    }
}

/// How long from `from` on until a VM reads so many a second in 40 seconds, in seconds.
pub(super) fn seconds_until(seen: &Seen, from: usize, reads: f64) -> f64 {
    let step = 40;
    let at = (from..END - step).find(|at| seen.reads_a_second(*at, at + step) >= reads);
    at.map_or(f64::NAN, |at| (at - from) as f64)
}

/// How many MB less than by its plateau before the move a VM has read from `from` up to `to`.
pub(super) fn lost(seen: &Seen, from: f64, to: usize) -> f64 {
    let (start, part) = (from.floor() as usize, from.fract());
    let missing = |at: usize| seen.plateau() - seen.reads_a_second(at, at + 1);
    let whole: f64 = (start..to.min(END)).map(missing).sum();
    (whole - missing(start) * part) * super::devices::BLOCK_BYTES as f64 / 1e6
}

/// The mean of the hour's rest.
pub(super) fn mean_after(seen: &Seen) -> f64 {
    seen.reads_a_second(MOVE, END)
}
