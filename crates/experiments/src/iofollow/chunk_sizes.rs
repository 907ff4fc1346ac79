//! Figures 5.5 and 5.6: the size of a chunk.

use crate::figure::{Axis, Figure, Plot, Series};

use super::paper::{AT_ONCE, BOTH, TRACES, WHY, normalised, otherwise, replayed, with_otherwise};
use super::replayer::{CopyOrder, Replayed};
use super::{Played, Runs};
use crate::waio::Setup;

pub(super) const ID: &str = "figure-5.5";
const SIZES: [u64; 5] = [128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20];

pub(super) fn scenes(_: &Setup) -> Vec<Played> {
    let of_size = |chunk_bytes| {
        TRACES.iter().flat_map(move |trace| {
            with_otherwise(Replayed { chunk_bytes, ..replayed(trace.load, CopyOrder::Follow) }, AT_ONCE)
        })
    };
    SIZES.into_iter().flat_map(of_size).map(Played::Replayer).collect()
}

pub(super) fn figure(_: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figures 5.5 and 5.6: the size of a chunk",
        "What IOFollow leaves of the standard's response, 2:1. The text says that it reduces the migration's \"from 45 % to \
         65 %\" and the guest's \"from 70 % to 88 %\". As what is left, 45 to 65 % does not fit the paper's own 1 MiB (54 \
         to 75 %), nor 70 to 88 % its 60 to 79 %; as what is saved neither fits at all. The first reading stands: what is \
         left.",
    )
    .assumed();
    range(
        &mut figure,
        runs,
        (&SIZES.map(|size| (format!("{} KiB", size >> 10), size as f64 / 1024.0)), "KiB a chunk"),
        |at, load| Replayed { chunk_bytes: SIZES[at], ..replayed(load, CopyOrder::Follow) },
        [(70.0, 88.0), (45.0, 65.0)],
    );
    figure
}

/// What is left for each trace and each of some values, and how that compares with the ranges of the paper's.
pub(super) fn range(
    figure: &mut Figure,
    runs: &Runs,
    (values, across): (&[(String, f64)], &'static str),
    of: impl Fn(usize, crate::interference::load::Load) -> Replayed,
    papers: [(f64, f64); 2],
) {
    for (which, who) in ["guest", "migration"].into_iter().enumerate() {
        let (least, most) = papers[which];
        let mut series = Vec::new();
        for (colour, trace) in TRACES.iter().enumerate() {
            let mut points = Vec::new();
            for (at, (name, x)) in values.iter().enumerate() {
                let replayed = of(at, trace.load);
                let ours = normalised(runs, replayed)[which];
                points.push([*x, ours * 100.0]);
                let seen = BOTH.map(|order| runs.replayed(Replayed { order, ..replayed }));
                let [standard, follow] = seen.map(|seen| [seen.guest, seen.copy][which].mean_ms());
                let words = format!("{least:.0} to {most:.0} %");
                let held = (least - 5.0..=most + 5.0).contains(&(ours * 100.0));
                let nearest = ours.clamp(least / 100.0, most / 100.0);
                let row =
                    format!("{}, {name}: {who}'s response left ({standard:.1} to {follow:.1} ms)", trace.load.name());
                figure
                    .words(row, "%", &words, ours * 100.0, held)
                    .explain(WHY, &otherwise(runs, (replayed, AT_ONCE), which, (nearest, ours)));
            }
            series.push(Series { name: trace.load.name().to_owned(), colour, points });
        }
        figure.plots.push(Plot {
            title: format!("What IOFollow leaves of the {who}'s response"),
            x: Axis::linear(across),
            y: Axis::linear("%"),
            bars: false,
            series,
            marks: Vec::new(),
        });
    }
}
