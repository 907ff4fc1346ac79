//! Figure 3: dirty blocks copied, pass by pass, with and without the optimisations (2.3.4).

use super::exchange::scene;
use super::figure::{Axis, Figure, Plot, Series};
use super::grid::{Setup, percent};
use super::runs::Runs;
use super::scene::{Scene, Seen};
use super::way::Way;

pub(super) const ID: &str = "figure-3";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let exchange = Way::TRACKING.iter().map(|way| scene(*way, 1, setup.scale));
    exchange.chain(Way::TRACKING.iter().map(|way| setup.under_load(*way, 8))).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 3: dirty blocks copied in each pass",
        "What every pass after the first copy began with, under the load of table 1, at the paper's scale. The paper's is of \
         an Exchange 2003 with 100 users and has no numbers on it.",
    );
    let series = Way::TRACKING.iter().map(|way| {
        let seen = runs.get(&scene(*way, 1, setup.scale));
        let times = scene(*way, 1, setup.scale).scale;
        let points = dirty(seen).into_iter().enumerate();
        let points = points.map(|(index, bytes)| [index as f64 + 1.0, (bytes * times) as f64 / f64::from(1 << 20)]);
        Series { name: way.name().to_owned(), colour: way.colour(), points: points.collect() }
    });
    figure.plots.push(Plot {
        title: "Dirty blocks copied".to_owned(),
        x: Axis::linear("pass after the first copy"),
        y: Axis::linear("MiB"),
        bars: true,
        series: series.collect(),
        marks: Vec::new(),
    });
    let first = |way: Way| {
        let seen = runs.get(&setup.under_load(way, 8));
        dirty(seen).first().copied().unwrap_or(0) as f64
    };
    let saved = 1.0 - first(Way::IncrementalDbt) / first(Way::Dbt);
    figure.words("incremental DBT saves of the first pass, uniform writes", "%", "roughly 50 %", saved * 100.0);
    figure.claim(
        "incremental DBT saves about half of the first pass on uniform writes",
        (0.35..=0.65).contains(&saved),
        percent(saved),
        "Chunks that are written more than once blur it.",
    );
    let first = |way: Way| dirty(runs.get(&scene(way, 1, setup.scale))).first().copied().unwrap_or(0) as f64;
    let saved = 1.0 - first(Way::IncrementalDbt) / first(Way::Dbt);
    figure.words("incremental DBT saves of the first pass, Exchange", "%", "more than 50 %", saved * 100.0);
    figure.claim(
        "incremental DBT saves more than half of the first pass where more is written towards the end of the disk",
        saved > 0.5,
        percent(saved),
        "What is written all the time is dirty at the end of the first copy wherever it lies.",
    );
    figure
}

/// What every pass after the first began with.
fn dirty(seen: &Seen) -> Vec<u64> {
    seen.report.iterations.iter().skip(1).map(|pass| pass.bytes).collect()
}
