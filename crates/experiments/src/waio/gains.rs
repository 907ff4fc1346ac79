//! Section 3.3: what WAIO on flash gives beside DBT, for each trace.

use crate::figure::{Axis, Figure, Label, Plot, Series};
use crate::interference::devices::Disk;
use crate::interference::load::Load;
use crate::interference::scene::Scene;

use super::controls::{Control, WHY_SPACE, WHY_WRITES, controlled, tried};
use super::{Runs, Setup};

pub(super) const ID: &str = "section-3.3";

/// What the paper says of a trace.
struct Paper {
    load: Load,
    /// How a recorded part of the trace is called.
    prefix: &'static str,
    /// By how many times the guest got more.
    gain: f64,
    /// The part of the image in the surrogate, in percent.
    space: f64,
    /// What may explain another gain.
    controls: &'static [Control],
    why: &'static str,
}

const PAPER: [Paper; 3] = [
    Paper {
        load: Load::Financial1,
        prefix: "financial1",
        gain: 1.30,
        space: 3.99,
        controls: Control::OF_WRITES,
        why: WHY_WRITES,
    },
    Paper {
        load: Load::Financial2,
        prefix: "financial2",
        gain: 2.61,
        space: 5.57,
        controls: Control::OF_WRITES,
        why: WHY_WRITES,
    },
    Paper {
        load: Load::WebSearch1,
        prefix: "websearch1",
        gain: 11.10,
        space: 10.01,
        controls: Control::OF_SPACE,
        why: WHY_SPACE,
    },
];

/// DBT alone, and with WAIO on flash.
fn pair(load: Load, scale: u64) -> [Scene; 2] {
    let dbt = Scene::of_waio(load, scale);
    [dbt, dbt.on(Disk::SataFlash)]
}

/// At the load's own times.
const fn open(scene: Scene) -> Scene {
    Scene { is_open_loop: true, ..scene }
}

fn loads(setup: &Setup) -> impl Iterator<Item = Load> + '_ {
    PAPER.iter().map(|paper| paper.load).chain(setup.recordings.iter().copied())
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let of_load = |load| {
        let pair = pair(load, setup.scale);
        pair.into_iter().chain(pair.map(open))
    };
    let mut scenes: Vec<Scene> = loads(setup).flat_map(of_load).collect();
    for paper in &PAPER {
        let pair = pair(paper.load, setup.scale);
        scenes.extend(controlled(paper.controls, &pair));
        scenes.extend(controlled(Control::OF_SPACE, &pair[1..]));
    }
    scenes
}

/// By how many times the guest gets more with the second scene.
pub(super) fn gain(runs: &Runs, [without, with]: &[Scene; 2]) -> f64 {
    runs.get(with).throughput() / runs.get(without).throughput()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Section 3.3 (figure 3.3): throughput while the guest moves, flash as the surrogate",
        "15 GB at 40 MB/s, chunks of 1 MiB, one request outstanding, cache mode writethrough with a page cache of 5 GB, two \
         neighbours on the same disk. Admission is at the first touch. The loads are generators (Financial1's uses 219 MiB, \
         1.5 % of the image) and the traces that were given, each played once. What QEMU adds to a request (0.1 ms), the \
         neighbours' rates and the page cache's size are assumed.",
    )
    .assumed();
    let mut points = [Vec::new(), Vec::new()];
    for (at, paper) in PAPER.iter().enumerate() {
        for (points, scene) in points.iter_mut().zip(&pair(paper.load, setup.scale)) {
            points.push([at as f64, runs.get(scene).throughput()]);
        }
        generated(&mut figure, setup, runs, paper);
    }
    let series = ["DBT", "WAIO"].into_iter().zip(points).enumerate();
    figure.plots.push(Plot {
        title: "Throughput during the move (Financial1, Financial2, WebSearch1; synthetic)".to_owned(),
        x: Axis::linear("load"),
        y: Axis::linear("MB/s"),
        bars: true,
        series: series.map(|(colour, (name, points))| Series { name: name.to_owned(), colour, points }).collect(),
        marks: Vec::new(),
    });
    for load in setup.recordings.iter().copied() {
        recorded(&mut figure, setup, runs, load);
    }
    for load in loads(setup) {
        let [dbt, waio] = pair(load, setup.scale).map(open).map(|scene| runs.get(&scene).guest.mean_ms());
        figure.claim(
            format!("{}: in an open loop a request is answered sooner with WAIO", load.name()),
            waio < dbt,
            format!("{waio:.1} ms, {dbt:.1} ms without"),
            "",
        );
    }
    figure
}

/// A generator's numbers beside the paper's.
fn generated(figure: &mut Figure, setup: &Setup, runs: &Runs, paper: &Paper) {
    let pair = pair(paper.load, setup.scale);
    let (name, ours, with) = (paper.load.name(), gain(runs, &pair), runs.get(&pair[1]));
    let other = tried(runs, paper.controls, " x", (paper.gain, ours), |runs, change| gain(runs, &pair.map(change)));
    figure.row(format!("{name}: WAIO over DBT"), "x", paper.gain, ours).explain(paper.why, &other);
    for (way, scene) in ["DBT", "WAIO"].into_iter().zip(&pair) {
        figure.words_beside(format!("{name}: {way}"), "MB/s", "", runs.get(scene).throughput());
    }
    let part = with.outsourced();
    figure.words(format!("{name}: requests that the surrogate answers"), "%", "over 90 %", part, part > 90.0);
    let space = with.space();
    let other =
        tried(runs, Control::OF_SPACE, " %", (paper.space, space), |runs, change| runs.get(&change(pair[1])).space());
    figure.row(format!("{name}: space"), "%", paper.space, space).explain(WHY_SPACE, &other);
}

/// What a trace of the user's gives, beside the paper's where it is a part of the same trace.
fn recorded(figure: &mut Figure, setup: &Setup, runs: &Runs, load: Load) {
    let pair = pair(load, setup.scale);
    let (ours, with) = (gain(runs, &pair), runs.get(&pair[1]));
    let name = load.name();
    let paper = PAPER.iter().find(|paper| name.starts_with(paper.prefix));
    for (way, scene) in ["DBT", "WAIO"].into_iter().zip(&pair) {
        figure.words_beside(format!("{name}: {way}"), "MB/s", "", runs.get(scene).throughput());
    }
    for (what, unit, ours, paper) in [
        ("WAIO over DBT", "x", ours, paper.map(|paper| paper.gain)),
        ("space", "%", with.space(), paper.map(|paper| paper.space)),
        ("requests that the surrogate answers", "%", with.outsourced(), None),
    ] {
        let row = format!("{name}: {what}");
        // An excerpt is a short part of the trace: what is to come out of it is not known.
        match paper {
            Some(paper) => figure.beside(row, unit, paper, ours),
            None => figure.words_beside(row, unit, "", ours),
        }
    }
    let judgement = figure.claim(
        format!("{name}: the guest gets more with WAIO"),
        ours > 1.0,
        format!("{ours:.2} times"),
        "The excerpt ends before the chunks that it has had fetched pay for themselves.",
    );
    judgement.label = Label::Predicted;
}
