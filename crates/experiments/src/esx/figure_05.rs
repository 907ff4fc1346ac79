//! Figure 5: migration time over disk size (3.1).

use super::Runs;
use super::controls::{LighterLoad, LookedUpOverlays};
use super::grid::{LOAD_OF_SIZES, Setup, percent};
use super::paper;
use super::scene::{SYSTEM_GIB, Scene};
use super::way::Way;
use crate::figure::{Figure, Mark, Series};

pub(super) const ID: &str = "figure-5";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let (small, large) = setup.size_ends();
    let both = |way: &Way| [small, large].map(|size| LighterLoad::of_scene(setup.of_size(*way, size)));
    let looked_up = [small, large].map(|size| LookedUpOverlays::of_scene(setup.of_size(Way::Snapshot, size)));
    setup.all_sizes().into_iter().chain(looked_up).chain(Way::TRACKING.iter().flat_map(both)).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 5: migration time over disk size",
        format!(
            "Data disks of 4 to 64 GB with the system disk of 6 GB, which is a sevenfold growth. How many requests the \
             paper's guest has outstanding is not stated: {LOAD_OF_SIZES} here, chosen so that the time of DBT grows about as \
             the paper's."
        ),
    )
    .assumed();
    let plot = setup.plot_sizes(runs, "Migration time", "seconds", |seen| seen.seconds);
    let (smallest, largest) = setup.size_ends();
    let with_system = |data: f64| data + SYSTEM_GIB as f64;
    let expected = |series: &Series, at: [f64; 2]| {
        let first = series.points.first().map_or(f64::NAN, |point| point[1]);
        first * with_system(at[0]) / with_system(smallest as f64)
    };
    let mut beyond_size = plot.over("Growth of migration time over that of the disks", "times", expected);
    for (way, paper) in Way::BEYOND_SIZES {
        let label = format!("paper: {:.3} x", 1.0 + paper);
        beyond_size.marks.push(Mark { label, colour: way.colour(), x: Some(largest as f64), y: 1.0 + paper });
    }
    figure.plots.extend([plot, beyond_size]);
    for (way, paper) in Way::BEYOND_SIZES {
        let percents = |scene: fn(Scene) -> Scene| beyond(setup, runs, *way, scene) * 100.0;
        let (paper, ours) = (paper * 100.0, percents(|scene| scene));
        let row = figure.row(format!("time beyond the growth of size: {}", way.name()), "%", paper, ours);
        if *way == Way::Dbt {
            row.fitted();
        }
        if way.takes_snapshots() {
            let looked_up = percents(LookedUpOverlays::of_scene);
            row.explain(LookedUpOverlays::WHY, &LookedUpOverlays::number(paper, ours, looked_up));
        } else if Way::TRACKING.contains(way) {
            row.explain(LighterLoad::WHY, &LighterLoad::number(paper, ours, percents(LighterLoad::of_scene)));
        }
    }
    let mirror = beyond(setup, runs, Way::PaperMirror, |scene| scene);
    figure.claim(
        "mirroring's time grows by less than 3.4 % more than the disk",
        mirror < 0.034,
        percent(mirror),
        "Fixed costs of a move weigh more on a small disk.",
    );
    let snapshot = beyond(setup, runs, Way::Snapshot, |scene| scene);
    let claim = figure.claim(
        "snapshotting's time grows much more than the disk, and mirroring's does not",
        snapshot > 0.2 && snapshot > mirror,
        percent(snapshot),
        LookedUpOverlays::WHY,
    );
    let looked_up = beyond(setup, runs, Way::Snapshot, LookedUpOverlays::of_scene);
    let number = LookedUpOverlays::number(paper::BEYOND_SIZE.snapshot * 100.0, snapshot * 100.0, looked_up * 100.0);
    claim.explain(LookedUpOverlays::WHY, &number);
    figure
}

/// By which part the time grows more than the disks do.
fn beyond(setup: &Setup, runs: &Runs, way: Way, scene: fn(Scene) -> Scene) -> f64 {
    let (small, large) = setup.size_ends();
    let [first, last] = [small, large].map(|size| runs.get(&scene(setup.of_size(way, size))));
    let expected = (large + SYSTEM_GIB) as f64 / (small + SYSTEM_GIB) as f64;
    if first.switched && last.switched { last.seconds / first.seconds / expected - 1.0 } else { f64::NAN }
}
