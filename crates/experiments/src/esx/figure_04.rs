//! Figure 4: migration time over outstanding requests, and the offline copy (3.1).

use super::Runs;
use super::controls::{AllocatedOverlays, FineTracking, NothingAhead, UnlimitedDowntime, Unpaced};
use super::grid::{Setup, percent};
use super::paper;
use super::scene::Scene;
use super::way::Way;
use crate::figure::{Experiment, Figure, Mark, Series};

pub(super) const ID: &str = "figure-4";
/// What our mirror may take, in offline copies.
const OWN_OFFLINES_MAX: f64 = 1.10;

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let mut scenes = setup.all_loads();
    scenes.extend([setup.offline(Way::PaperMirror), setup.offline(Way::Mirror)]);
    scenes.extend(UnlimitedDowntime::scenes(setup));
    scenes.extend(NothingAhead::scenes(setup));
    scenes.extend(AllocatedOverlays::scenes(setup));
    scenes.extend(Unpaced::scenes(setup));
    scenes.extend(FineTracking::scenes(setup, &light_loads(setup)));
    scenes
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 4: migration time over outstanding requests",
        "A data disk of 32 GB and a system disk of 6 GB move from one array to another under Iometer's OLTP. The paper's \
         data mover has 16 copies of 64 KiB outstanding whatever the guest does; ours has its own pace.",
    );
    let mut plot = setup.plot_loads(runs, "Migration time", "seconds", |seen| seen.seconds);
    let (least, most) = setup.load_ends();
    let offline = runs.get(&setup.offline(Way::PaperMirror)).seconds;
    let mark = |label: &str, x: Option<f64>, y| Mark { label: label.into(), colour: Way::PaperMirror.colour(), x, y };
    plot.marks.push(Mark { colour: 5, ..mark("paper: offline copy", None, paper::OFFLINE_SECONDS) });
    for (load, longer) in paper::MIRROR_LONGER {
        let seconds = paper::OFFLINE_SECONDS * (1.0 + longer);
        plot.marks.push(mark(&format!("paper: {seconds:.0} s"), Some(load as f64), seconds));
    }
    let first = |series: &Series, _| series.points.first().map_or(f64::NAN, |point| point[1]);
    let mut growth = plot.over("Growth of migration time", "times what it takes with 2 outstanding", first);
    for (way, paper) in Way::GROWTHS {
        let label = format!("paper: {paper} x");
        growth.marks.push(Mark { label, colour: way.colour(), x: Some(most as f64), y: *paper });
    }
    figure.plots.extend([plot, growth]);
    figure.row("offline copy", "s", paper::OFFLINE_SECONDS, offline).fitted();
    let nothing_ahead = NothingAhead::of(setup, runs, offline);
    let seconds = |way, load| setup.seen(runs, way, load).seconds;
    for (load, longer) in paper::MIRROR_LONGER.into_iter().filter(|(load, _)| setup.loads.contains(load)) {
        let ours = seconds(Way::PaperMirror, load);
        figure.row(format!("IO mirroring, {load} outstanding"), "s", paper::OFFLINE_SECONDS * (1.0 + longer), ours);
        let ours = ours / offline - 1.0;
        let what = format!("the same, longer than offline, {load} outstanding");
        figure.row(what, "%", longer * 100.0, ours * 100.0).explain(NothingAhead::WHY, &nothing_ahead);
    }
    let iops = |load| setup.seen(runs, Way::PaperMirror, load).before.iops();
    figure.row("growth of the guest's IOPS, 2 to 32 outstanding", "x", paper::GROWTH_GUEST, iops(most) / iops(least));
    for (way, growth) in Way::GROWTHS {
        let ours = growth_of(setup, runs, *way);
        let row = figure.row(format!("growth of time, 2 to 32 outstanding: {}", way.name()), "x", *growth, ours);
        if let Some(unlimited) = UnlimitedDowntime::of(setup, runs, *way) {
            row.assumed().explain(UnlimitedDowntime::WHY, &unlimited);
        } else if way.takes_snapshots() {
            row.assumed().explain(AllocatedOverlays::WHY, &snapshots_grow(setup, runs));
        }
    }
    claims(&mut figure, setup, runs, (offline, &nothing_ahead));
    figure
}

/// From the least to the most outstanding.
fn growth_of(setup: &Setup, runs: &Runs, way: Way) -> f64 {
    let (least, most) = setup.load_ends();
    let (first, last) = (setup.seen(runs, way, least), setup.seen(runs, way, most));
    if first.switched && last.switched { last.seconds / first.seconds } else { f64::NAN }
}

/// Snapshotting's growth with the overlays of the control.
fn snapshots_grow(setup: &Setup, runs: &Runs) -> Experiment {
    AllocatedOverlays::number("the growth", "x", paper::GROWTH_SNAPSHOT, |way| growth_of(setup, runs, way))
}

fn claims(figure: &mut Figure, setup: &Setup, runs: &Runs, (offline, nothing_ahead): (f64, &Experiment)) {
    let growth = growth_of(setup, runs, Way::PaperMirror);
    figure.claim(
        "mirroring's time grows by no more than 12 % from 2 to 32 outstanding",
        growth <= 1.12,
        format!("{growth:.3} x"),
        "The array's disks are shared with more guest requests than in the paper's array.",
    );
    let (least, most) = setup.load_ends();
    for way in Way::TRACKING {
        let (growth, last) = (growth_of(setup, runs, *way), setup.seen(runs, *way, most));
        let seen = match &last.error {
            None => format!("{growth:.2} x"),
            Some(error) => format!("with {most} outstanding it failed after {:.0} s: {error}", last.seconds),
        };
        let claim = figure.claim(
            format!("the time of {} grows 2.7 to 4 times", way.name()),
            (2.5..=4.3).contains(&growth),
            seen,
            "It depends on when the convergence logic gives in, and the paper does not state its thresholds.",
        );
        if let Some(unlimited) = UnlimitedDowntime::of(setup, runs, *way) {
            claim.assumed().explain(UnlimitedDowntime::WHY, &unlimited);
        }
    }
    let longer = |load| setup.seen(runs, Way::PaperMirror, load).seconds / offline - 1.0;
    let (low, high) = (longer(least), longer(most));
    let claim = figure.claim(
        "mirroring takes 5.8 % to 15.7 % longer than the offline copy (within 3 points)",
        (0.028..=0.088).contains(&low) && (0.127..=0.187).contains(&high),
        format!("{} to {}", percent(low), percent(high)),
        NothingAhead::WHY,
    );
    claim.explain(NothingAhead::WHY, nothing_ahead);
    snapshots(figure, setup, runs);
    let own = runs.get(&setup.offline(Way::Mirror)).seconds;
    let worst = setup.loads.iter().map(|load| setup.seen(runs, Way::Mirror, *load).seconds / own);
    let worst = worst.fold(0.0, f64::max);
    let claim = figure.claim(
        "our mirror takes at most 1.10 x the offline copy",
        worst <= OWN_OFFLINES_MAX,
        format!("{worst:.3} x at most"),
        Unpaced::WHY,
    );
    claim.explain(Unpaced::WHY, &Unpaced::of(setup, runs, own, OWN_OFFLINES_MAX));
}

/// What the paper says of snapshotting beside the others.
fn snapshots(figure: &mut Figure, setup: &Setup, runs: &Runs) {
    let growth = growth_of(setup, runs, Way::Snapshot);
    let claim = figure.claim(
        "snapshotting's time grows about 1.4 times",
        (1.2..=1.6).contains(&growth),
        format!("{growth:.2} x"),
        AllocatedOverlays::WHY,
    );
    claim.explain(AllocatedOverlays::WHY, &snapshots_grow(setup, runs));
    let most = setup.load_ends().1;
    let [snapshot, mirror] = [Way::Snapshot, Way::PaperMirror].map(|way| setup.seen(runs, way, most));
    figure.words(
        format!("time of mirroring, of that of snapshotting, {most} outstanding"),
        "x",
        "less than half",
        if snapshot.switched { mirror.seconds / snapshot.seconds } else { f64::NAN },
        snapshot.switched && mirror.seconds < 0.5 * snapshot.seconds,
    );
    let beaten = |way: &Way| {
        let seen = setup.seen(runs, *way, most);
        !seen.switched || seen.seconds > snapshot.seconds
    };
    figure.claim(
        format!("with {most} outstanding snapshotting is faster than both kinds of DBT"),
        snapshot.switched && Way::TRACKING.iter().all(beaten),
        format!("{:.0} s", snapshot.seconds),
        "A fold has 16 requests outstanding, as a pass of DBT has, and writes what it folds to both sides.",
    );
    let order = [Way::Snapshot, Way::Dbt, Way::IncrementalDbt, Way::PaperMirror];
    let below = light_loads(setup);
    let times = |with: fn(Way) -> Way, load: usize| order.map(|way| setup.seen(runs, with(way), load).seconds);
    let is_ordered = |with: fn(Way) -> Way| {
        below.iter().all(|load| times(with, *load).windows(2).all(|pair| pair[1] <= pair[0] * 1.01))
    };
    let told = |with: fn(Way) -> Way| {
        let of_load =
            |load: &usize| format!("{load}: {}", times(with, *load).map(|time| format!("{time:.0}")).join(", "));
        below.iter().map(of_load).collect::<Vec<_>>().join("; ")
    };
    let claim = figure.claim(
        "below 16 outstanding each architecture is faster than the one before it",
        is_ordered(|way| way),
        format!("in seconds, for snapshotting, DBT, incremental DBT and mirroring with {}", told(|way| way)),
        FineTracking::WHY,
    );
    let fine = FineTracking::shape(&told(FineTracking::of_way), is_ordered(FineTracking::of_way));
    claim.explain(FineTracking::WHY, &fine);
}

/// Those below 16 outstanding.
fn light_loads(setup: &Setup) -> Vec<usize> {
    setup.loads.iter().copied().filter(|load| *load < 16).collect()
}
