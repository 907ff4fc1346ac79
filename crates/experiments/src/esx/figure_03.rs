//! Figure 3: dirty blocks copied, pass by pass, with and without the optimisations (2.3.4).

use super::Runs;
use super::controls::FewerPages;
use super::grid::{Setup, percent};
use super::load::{Load, mail_gib};
use super::scene::{Place, Scene, Seen};
use super::way::Way;
use crate::figure::{Axis, Figure, Plot, Series};

pub(super) const ID: &str = "figure-3";

/// Plain, with one optimisation, and with both.
const WAYS: [Way; 3] = [Way::Dbt, Way::IncrementalDbt, Way::HotDbt];
/// By which part hot block avoidance may make a move longer.
const LONGER_MAX: f64 = 0.02;
/// The passes after the first copy that the paper's moves take with both optimisations.
const PASSES_WITH_BOTH: f64 = 4.0;
/// What is outstanding in the uniform load.
const OUTSTANDING: usize = 8;

/// A move of the three disks of figure 2.
const fn scene(way: Way, setup: &Setup) -> Scene {
    Scene {
        way,
        load: Load::MailServer,
        data_gib: mail_gib(),
        system_gib: 0,
        from: Place::ExchangeArray,
        to: Place::ExchangeArray,
        scale: setup.scale,
    }
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let exchange = WAYS.iter().map(|way| scene(*way, setup));
    let controls = [Way::Dbt, Way::HotDbt].map(|way| FewerPages::of_scene(scene(way, setup)));
    exchange.chain(WAYS.iter().map(|way| setup.under_load(*way, OUTSTANDING))).chain(controls).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 3: dirty blocks copied in each pass",
        "What every pass after the first copy began with, at the paper's scale: the three disks of figure 2 move between two \
         groups of six disks while their server writes 1.3 times as often as there, so that plain tracking takes about as \
         many passes as the paper's. The paper's figure has no numbers on it. Plain DBT has neither optimisation, the last one both.",
    ).assumed();
    let series = WAYS.iter().map(|way| {
        let seen = runs.get(&scene(*way, setup));
        let times = setup.scale;
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
        let seen = runs.get(&setup.under_load(way, OUTSTANDING));
        dirty(seen).first().copied().unwrap_or(0) as f64
    };
    let saved = 1.0 - first(Way::IncrementalDbt) / first(Way::Dbt);
    figure.words(
        "incremental DBT saves of the first pass, uniform writes",
        "%",
        "roughly 50 %",
        saved * 100.0,
        (0.35..=0.65).contains(&saved),
    );
    figure.claim(
        "incremental DBT saves about half of the first pass on uniform writes",
        (0.35..=0.65).contains(&saved),
        percent(saved),
        "Chunks that are written more than once blur it.",
    );
    let first = |way: Way| dirty(runs.get(&scene(way, setup))).first().copied().unwrap_or(0) as f64;
    let saved = 1.0 - first(Way::IncrementalDbt) / first(Way::Dbt);
    figure.words(
        "incremental DBT saves of the first pass, Exchange",
        "%",
        "more than 50 %",
        saved * 100.0,
        saved > 0.5,
    );
    figure.claim(
        "incremental DBT saves more than half of the first pass where more is written towards the end of the disk",
        saved > 0.5,
        percent(saved),
        "What is written all the time is dirty at the end of the first copy wherever it lies.",
    );
    hot_blocks(&mut figure, setup, runs);
    figure
}

/// What putting off copies of hot blocks gains and costs (2.3.4, 2.3.5).
fn hot_blocks(figure: &mut Figure, setup: &Setup, runs: &Runs) {
    let exchange = WAYS.map(|way| runs.get(&scene(way, setup)));
    let uniform = WAYS.map(|way| runs.get(&setup.under_load(way, OUTSTANDING)));
    let passes = |seen: &Seen| dirty(seen).len() as f64;
    figure.row("passes after the first copy: DBT", "", 10.0, passes(exchange[0])).fitted();
    let hotter = [Way::Dbt, Way::HotDbt].map(|way| runs.get(&FewerPages::of_scene(scene(way, setup))));
    let fewer_pages = FewerPages::of(hotter.map(passes), PASSES_WITH_BOTH);
    figure
        .row("passes after the first copy: with both optimisations", "", PASSES_WITH_BOTH, passes(exchange[2]))
        .explain(FewerPages::WHY, &fewer_pages);
    let claim = figure.claim(
        "both optimisations together make iterations 5 to 10 needless",
        passes(exchange[2]) <= PASSES_WITH_BOTH && passes(exchange[0]) > passes(exchange[2]),
        WAYS.iter().zip(exchange).map(|(way, seen)| ending(*way, seen)).collect::<Vec<_>>().join("; "),
        FewerPages::WHY,
    );
    claim.explain(FewerPages::WHY, &fewer_pages);
    for (name, [_, without, with]) in [("the Exchange load", exchange), ("the uniform load", uniform)] {
        let longer = with.seconds / without.seconds - 1.0;
        figure.claim(
            format!("hot block avoidance makes no move longer by more than 2 %: {name}"),
            longer <= LONGER_MAX && (with.switched || !without.switched),
            format!("{}; {}", ending(Way::IncrementalDbt, without), ending(Way::HotDbt, with)),
            "What was put off should have been copied at once.",
        );
    }
    let deferred = uniform[2].report.iterations.iter().map(|pass| pass.bytes_deferred).max().unwrap_or(0);
    figure.claim(
        "hot block avoidance finds nothing to put off in the uniform load",
        deferred == 0,
        format!("{deferred} bytes were put off at most"),
        "Chance made some chunks look hot.",
    );
}

/// How a move ended.
fn ending(way: Way, seen: &Seen) -> String {
    let end = if seen.switched { "moved" } else { "failed" };
    let passes = dirty(seen).len();
    format!("{}: {end} in {:.0} s, {passes} passes, {:.2} s of downtime", way.name(), seen.seconds, seen.downtime)
}

/// What every pass after the first began with.
fn dirty(seen: &Seen) -> Vec<u64> {
    seen.report.iterations.iter().skip(1).map(|pass| pass.bytes).collect()
}
