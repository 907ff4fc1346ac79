//! Tables 2 and 3 and figure 10: caches of 5, 10 and 20 GB.

use crate::figure::Figure;

use super::paper::{COPY_SECONDS, SIZE, SIZES, TABLE_2, TABLE_3, megabytes, more, otherwise, over_time, ways};
use super::scene::{MOVE, Scene, Seen, Way};
use super::{Runs, Setup};

pub(super) const ID: &str = "tables-2-3";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    SIZES.into_iter().flat_map(|size| ways(setup, size)).collect()
}

/// What the second gains on the first over 400 s, in percent.
fn gain(none: &Seen, filtered: &Seen) -> f64 {
    more(megabytes(none, MOVE, MOVE + 400), megabytes(filtered, MOVE, MOVE + 400))
}

const WHY_COPY: &str = "The engine copies what the cache holds, and after 1,600 s a cache of 20 GB is not full: what is written leaves it, and what is \
     rarely read comes late. The paper's times are proportional to the partition's size.";

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Tables 2 and 3 and figure 10: MB/s after the move with caches of 5, 10 and 20 GB",
        "As table 1. Nothing was given to the model for 5 and 20 GB. 10 GB are in both tables and in table 1.",
    );
    let of = |size| ways(setup, size).map(|scene| runs.get(&scene));
    for (span, tables) in [(400, TABLE_2), (800, TABLE_3)] {
        for (size, papers) in SIZES.into_iter().zip(tables) {
            for (way, (paper, seen)) in Way::PAPERS.iter().zip(papers.into_iter().zip(of(size))) {
                let what = format!("{size} GB, {}: mean of {span} s", way.name());
                figure.row(what, "MB/s", paper, megabytes(seen, MOVE, MOVE + span));
            }
        }
    }
    for (size, paper) in SIZES.into_iter().zip(COPY_SECONDS) {
        let filtered = of(size)[3];
        let took = filtered.copy_seconds();
        let places = size * (1 << 30) / setup.scale / 4096;
        let whole = took * places as f64 / filtered.status.listed as f64;
        let filled = filtered.status.listed as f64 / places as f64 * 100.0;
        let words = format!("{filled:.0} % of the places hold a block; as long for each of the others, s");
        let experiment = otherwise(&words, (paper, took, whole));
        let row = figure.row(format!("{size} GB, firepan-if: the copy takes"), "s", paper, took);
        row.explain(WHY_COPY, &experiment);
        if size == SIZE {
            row.fitted();
        }
    }
    let gains = SIZES.map(|size| gain(of(size)[0], of(size)[3]));
    let papers = TABLE_2.map(|row| more(row[0], row[3]));
    for ((size, paper), gain) in SIZES.into_iter().zip(papers).zip(gains) {
        figure.row(format!("{size} GB: what firepan-if gains on none over 400 s"), "%", paper, gain);
    }
    figure.claim(
        "the larger the cache, the more firepan-if gains on none",
        gains[0] < gains[1] && gains[1] < gains[2],
        format!("{:.1}, {:.1} and {:.1} % over 400 s", gains[0], gains[1], gains[2]),
        "",
    );
    for size in [5, 20] {
        let named: Vec<(&str, &Seen)> =
            Way::PAPERS.iter().zip(of(size)).map(|(way, seen)| (way.name(), seen)).collect();
        let title = format!("Read for the VM, {size} GB");
        figure.plots.push(over_time((&title, "MB/s"), (1800, 20), &named, megabytes));
    }
    figure
}
