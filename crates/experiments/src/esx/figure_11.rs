//! Figure 11: the anatomy of a migration: IOPS over time (3.5).

use super::Runs;
use super::grid::Setup;
use super::over_time::series;
use super::scene::Scene;
use super::way::Way;
use crate::figure::{Axis, Figure, Mark, Plot};

pub(super) const ID: &str = "figure-11";
const OUTSTANDING: usize = 16;

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    Way::ALL.iter().map(|way| setup.under_load(*way, OUTSTANDING)).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 11: the anatomy of a migration",
        "What source and target were asked for, second by second. Left of the first broken line the guest is alone on the \
         source, right of the last one on the target. The paper's plots have no numbers that could be marked here.",
    );
    for way in Way::ALL {
        let scene = setup.under_load(*way, OUTSTANDING);
        let seen = runs.get(&scene);
        let plot = Plot {
            title: format!("{}: IOPS over time", way.name()),
            x: Axis::linear("seconds"),
            y: Axis::linear("requests a second"),
            bars: false,
            series: series(seen, scene.scale),
            marks: Vec::<Mark>::new(),
        };
        figure.plots.push(plot);
    }
    let passes = |way: Way| runs.get(&setup.under_load(way, OUTSTANDING)).report.iterations.len();
    let mirror = passes(Way::PaperMirror).max(passes(Way::Mirror));
    figure.claim(
        "mirroring is one pass over the disk",
        mirror <= 1,
        format!("{mirror} passes"),
        "Something was copied again.",
    );
    for way in Way::TRACKING.iter().chain([&Way::Snapshot]) {
        let passes = passes(*way);
        figure.claim(
            format!("{} copies in passes after the first one", way.name()),
            passes > 1,
            format!("{passes} passes"),
            "The guest dirtied too little for a second pass.",
        );
    }
    figure
}
