//! Figure 2: how often blocks are written, from the most written to the least (2.3.2).
//!
//! The paper's trace of Exchange 2003 with 100 users is not public. What is shown is the load that figure 3 runs on: three
//! disks whose writes follow Zipf's law, with exponents that are assumed.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Runs;
use super::grid::Setup;
use super::load::{MAIL_DISKS, MAIL_PAGE_BYTES, MailDisk};
use super::scene::Scene;
use crate::figure::{Axis, Figure, Plot, Series};
use sim::rng::Rng;
use sim::workload::{Exchange, ExchangeFigures, Workload};

pub(super) const ID: &str = "figure-2";
/// The time that is looked at.
const SPAN: Duration = Duration::from_secs(1800);

pub(super) fn scenes(_: &Setup) -> Vec<Scene> {
    Vec::new()
}

pub(super) fn figure(_: &Setup, _: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 2: write repetition on the three disks of an Exchange server",
        "How often each block of 8 KiB is written in half an hour, from the most written to the least, by a synthetic load. \
         The paper's trace is not public; rates and exponents are assumed. Figure 3 moves these three disks.",
    ).assumed();
    let mut series = Vec::new();
    for (index, MailDisk { name, gib, pages, exponent, writes: rate }) in MAIL_DISKS.into_iter().enumerate() {
        let page_bytes = MAIL_PAGE_BYTES;
        let figures = ExchangeFigures { size: gib << 30, page_bytes, pages, exponent, reads: 0.0, rate };
        let counts = repetition(Exchange::new(figures));
        let slope = slope(&counts);
        figure.claim(
            format!("the writes to the {name} are distributed like Zipf's law"),
            (slope + exponent).abs() < 0.25,
            format!("a slope of {slope:.2} in the upper half of the ranks"),
            "The least written blocks are written once or not at all, which bends the line.",
        );
        series.push(Series { name: name.to_owned(), colour: index, points: thinned(&counts) });
    }
    figure.plots.push(Plot {
        title: "Writes a block".to_owned(),
        x: Axis::log("blocks, from the most written to the least", &[1.0, 10.0, 100.0, 1e3, 1e4, 1e5]),
        y: Axis::log("times written", &[1.0, 10.0, 100.0, 1e3, 1e4, 1e5]),
        bars: false,
        series,
        marks: Vec::new(),
    });
    figure
}

/// How often each page was written, the most often first.
fn repetition(mut load: Exchange) -> Vec<u64> {
    let (rng, mut counts) = (Rng::new(1, "figure 2"), BTreeMap::<u64, u64>::new());
    while let Some(step) = load.next(&rng).filter(|step| step.at < SPAN) {
        *counts.entry(step.request.offset).or_default() += 1;
    }
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable_by(|one, other| other.cmp(one));
    counts
}

/// The slope in a plot with two logarithmic axes, where counts are large enough to be more than chance.
fn slope(counts: &[u64]) -> f64 {
    let last = counts.iter().take_while(|count| **count >= 8).count().max(2);
    let points =
        counts[..last].iter().enumerate().map(|(index, count)| ((index as f64 + 1.0).ln(), (*count as f64).ln()));
    let points: Vec<(f64, f64)> = points.collect();
    let mean = |pick: fn(&(f64, f64)) -> f64| points.iter().map(pick).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let (above, below) = points.iter().fold((0.0, 0.0), |(above, below), point| {
        (above + (point.0 - x) * (point.1 - y), below + (point.0 - x) * (point.0 - x))
    });
    above / below
}

/// A few of the points, evenly on a logarithmic axis.
fn thinned(counts: &[u64]) -> Vec<[f64; 2]> {
    let mut ranks: Vec<usize> = (0..60).map(|step| 10_f64.powf(f64::from(step) / 11.0) as usize).collect();
    ranks.push(counts.len());
    ranks.dedup();
    let ranks = ranks.into_iter().filter(|rank| (1..=counts.len()).contains(rank));
    ranks.map(|rank| [rank as f64, counts[rank - 1] as f64]).collect()
}
