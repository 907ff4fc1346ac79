//! Figure 8: what the guest loses, over outstanding requests (3.3).

use super::Runs;
use super::controls::AllocatedOverlays;
use super::grid::{Setup, percent};
use super::paper;
use super::scene::Scene;
use super::way::Way;
use crate::figure::{Figure, Mark};

pub(super) const ID: &str = "figure-8";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    setup.all_loads().into_iter().chain(AllocatedOverlays::scenes(setup)).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 8: the guest's IO penalty over outstanding requests",
        "Requests a second during the move, against those before it. The rate at which the modelled array reads was chosen \
         so that the paper's mirroring costs the guest what section 5 says, in the mean over all loads.",
    );
    let mut plot = setup.plot_loads(runs, "Penalty", "% of the guest's IOPS", |seen| seen.penalty() * 100.0);
    let mark =
        |label: &str, way: Way, part: f64| Mark { label: label.into(), colour: way.colour(), x: None, y: part * 100.0 };
    plot.marks.push(mark("paper: mirroring, section 5", Way::PaperMirror, paper::PENALTY_MIRROR));
    for (way, part) in Way::PENALTIES {
        plot.marks.push(mark(&format!("paper: {}, section 5", way.name()), *way, *part));
    }
    figure.plots.push(plot);
    let mean = |way: Way| {
        let penalties = setup.loads.iter().map(|load| setup.seen(runs, way, *load).penalty());
        penalties.sum::<f64>() / setup.loads.len() as f64
    };
    let name = |way: Way| format!("mean penalty over all loads: {}", way.name());
    figure.row(name(Way::PaperMirror), "%", paper::PENALTY_MIRROR * 100.0, mean(Way::PaperMirror) * 100.0).fitted();
    for (way, part) in Way::PENALTIES {
        let row = figure.row(name(*way), "%", part * 100.0, mean(*way) * 100.0);
        if way.takes_snapshots() {
            let value = |way| mean(way) * 100.0;
            let experiment = AllocatedOverlays::number("the mean penalty", "%", part * 100.0, value);
            row.explain(AllocatedOverlays::WHY, &experiment);
        }
    }
    let penalties: Vec<f64> =
        setup.loads.iter().map(|load| setup.seen(runs, Way::PaperMirror, *load).penalty()).collect();
    figure.claim(
        "mirroring's penalty falls as the guest's requests grow in number",
        penalties.windows(2).all(|pair| pair[1] < pair[0] + 0.01),
        penalties.iter().map(|part| percent(*part)).collect::<Vec<_>>().join(", "),
        "The copy's share of the array does not fall with the guest's queue.",
    );
    let is_largest = |with: fn(Way) -> Way| Way::ALL.iter().all(|way| mean(*way) <= mean(with(Way::Snapshot)));
    let claim = figure.claim(
        "snapshotting costs the guest the most",
        is_largest(|way| way),
        Way::ALL.iter().map(|way| format!("{}: {}", way.name(), percent(mean(*way)))).collect::<Vec<_>>().join("; "),
        AllocatedOverlays::WHY,
    );
    let told = |way| percent(mean(way));
    let experiment = AllocatedOverlays::shape("the mean penalty of snapshotting", told, is_largest);
    claim.explain(AllocatedOverlays::WHY, &experiment);
    figure
}
