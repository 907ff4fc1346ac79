//! Figure 6: downtime over outstanding requests (3.2).

use super::Runs;
use super::controls::{AllocatedOverlays, UnlimitedDowntime};
use super::grid::Setup;
use super::paper;
use super::scene::Scene;
use super::way::Way;
use crate::figure::{Axis, Figure, Mark};

pub(super) const ID: &str = "figure-6";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let controls = UnlimitedDowntime::scenes(setup).into_iter().chain(AllocatedOverlays::scenes(setup));
    setup.all_loads().into_iter().chain(controls).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 6: downtime over outstanding requests",
        "The longest that a request of the guest's waited around the switchover. The paper's downtime also holds what it \
         takes to suspend and resume the machine, which a switch of the disk below a running guest does not need.",
    );
    let mut plot = setup.plot_loads(runs, "Downtime", "seconds", |seen| seen.downtime);
    plot.y = Axis::log("seconds", &[0.001, 0.01, 0.1, 1.0, 10.0, 100.0]);
    let mark = |label: &str, y| Mark { label: label.into(), colour: 5, x: None, y };
    plot.marks.push(mark("paper: mirroring stays below 0.5 s", paper::MIRROR_DOWNTIME));
    plot.marks.push(mark("paper: the downtime target of DBT, 5 s", paper::DOWNTIME_LIMIT_SECONDS));
    let (_, most) = setup.load_ends();
    plot.marks.push(Mark {
        label: "paper: DBT is above 28 s, snapshotting below".to_owned(),
        colour: Way::Dbt.colour(),
        x: Some(most as f64),
        y: paper::FORCED_DOWNTIME_SECONDS,
    });
    figure.plots.push(plot);
    for way in [Way::PaperMirror, Way::Mirror] {
        let longest = setup.loads.iter().map(|load| setup.seen(runs, way, *load).downtime).fold(0.0, f64::max);
        figure.words(
            format!("longest downtime: {}", way.name()),
            "s",
            "below 0.5 s",
            longest,
            longest < paper::MIRROR_DOWNTIME,
        );
        figure.claim(
            format!("the downtime of mirroring is below 0.5 s at every load ({})", way.name()),
            longest < paper::MIRROR_DOWNTIME,
            format!("{:.0} ms at most", longest * 1e3),
            "A request in flight took that long.",
        );
    }
    for way in Way::TRACKING {
        let seen = setup.seen(runs, *way, most);
        let ours = if seen.switched { seen.downtime } else { f64::NAN };
        let what = format!("downtime with {most} outstanding: {}", way.name());
        let row = figure.words(what, "s", "more than 28 s", ours, ours > paper::FORCED_DOWNTIME_SECONDS);
        if let Some(unlimited) = UnlimitedDowntime::of(setup, runs, *way) {
            row.assumed().explain(UnlimitedDowntime::WHY, &unlimited);
        }
    }
    let snapshots: Vec<f64> = setup.loads.iter().map(|load| setup.seen(runs, Way::Snapshot, *load).downtime).collect();
    let (first, last) = (snapshots[0], snapshots[snapshots.len() - 1]);
    figure
        .words(
            format!("downtime with {most} outstanding: {}", Way::Snapshot.name()),
            "s",
            "less than DBT's 28 s",
            last,
            last < paper::FORCED_DOWNTIME_SECONDS,
        )
        .assumed()
        .explain(
            AllocatedOverlays::WHY,
            &AllocatedOverlays::shape(
                &format!("the downtime with {most} outstanding"),
                |way| format!("{:.1} s, not {last:.1} s", setup.seen(runs, way, most).downtime),
                |with| setup.seen(runs, with(Way::Snapshot), most).downtime < paper::FORCED_DOWNTIME_SECONDS,
            ),
        );
    figure.claim(
        "snapshotting's downtime grows with the load, and is shorter than DBT's at the highest",
        last > 1.5 * first && Way::TRACKING.iter().all(|way| {
            let seen = setup.seen(runs, *way, most);
            !seen.switched || seen.downtime > last
        }),
        snapshots.iter().map(|held| format!("{held:.2} s")).collect::<Vec<_>>().join(", "),
        "The last snapshot is folded when that is expected to fit the same 5 s, whatever the load; the paper's threshold is not \
         stated.",
    );
    figure
}
