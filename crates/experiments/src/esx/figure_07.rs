//! Figure 7: downtime over disk size (3.2).

use super::Runs;
use super::grid::Setup;
use super::paper;
use super::scene::Scene;
use super::way::Way;
use crate::figure::{Axis, Figure, Mark};

pub(super) const ID: &str = "figure-7";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    setup.all_sizes()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(ID, "Figure 7: downtime over disk size", "The same moves as in figure 5.").assumed();
    let mut plot = setup.plot_sizes(runs, "Downtime", "seconds", |seen| seen.downtime);
    plot.y = Axis::log("seconds", &[0.001, 0.01, 0.1, 1.0, 10.0, 100.0]);
    let mark = |label: &str, y| Mark { label: label.into(), colour: 5, x: None, y };
    plot.marks.push(mark("paper: mirroring stays below 0.5 s", paper::MIRROR_DOWNTIME));
    plot.marks.push(mark("paper: DBT stays below 5 s", paper::DOWNTIME_LIMIT_SECONDS));
    figure.plots.push(plot);
    let longest = |way: Way| {
        let seen = setup.sizes.iter().map(|size| runs.get(&setup.of_size(way, *size)));
        seen.map(|seen| if seen.switched { seen.downtime } else { f64::INFINITY }).fold(0.0, f64::max)
    };
    let mirror = longest(Way::PaperMirror).max(longest(Way::Mirror));
    figure.words("longest downtime of mirroring", "s", "below 0.5 s", mirror, mirror < paper::MIRROR_DOWNTIME);
    figure.claim(
        "mirroring's downtime is below 0.5 s at every size",
        mirror < paper::MIRROR_DOWNTIME,
        format!("{:.0} ms at most", mirror * 1e3),
        "A request in flight took that long.",
    );
    for way in Way::TRACKING {
        let longest = longest(*way);
        let held = longest < paper::DOWNTIME_LIMIT_SECONDS;
        figure.words(format!("longest downtime: {}", way.name()), "s", "below 5 s", longest, held);
        figure.claim(
            format!("{} keeps the target of 5 s at every size", way.name()),
            longest < paper::DOWNTIME_LIMIT_SECONDS,
            format!("{longest:.2} s at most"),
            "What was left took longer than the rate of the passes before had let expect.",
        );
    }
    let (small, large) = setup.size_ends();
    let [small, large] = [small, large].map(|size| runs.get(&setup.of_size(Way::Snapshot, size)).downtime);
    let snapshot = longest(Way::Snapshot);
    figure.words("longest downtime: snapshotting", "s", "significant beyond 32 GB", snapshot, snapshot > 1.0);
    figure.claim(
        "snapshotting's downtime grows with the disk",
        large > 1.5 * small,
        format!("{small:.2} s on the smallest, {large:.2} s on the largest"),
        "Folding stops where what is left fits the limit, whatever the size of the disk; nothing of ours is looked up in more \
         indirections on a larger one.",
    );
    figure
}
