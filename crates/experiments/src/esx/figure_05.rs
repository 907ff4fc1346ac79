//! Figure 5: migration time over disk size (3.1).

use super::Runs;
use super::grid::{LOAD_OF_SIZES, Setup, percent};
use super::scene::{SYSTEM_GIB, Scene};
use super::way::Way;
use crate::figure::Figure;

pub(super) const ID: &str = "figure-5";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    setup.all_sizes()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 5: migration time over disk size",
        format!(
            "Data disks of 4 to 64 GB with the system disk of 6 GB, which is a sevenfold growth. How many requests the \
             paper's guest has outstanding is not stated: {LOAD_OF_SIZES} here."
        ),
    )
    .assumed();
    figure.plots.push(setup.plot_sizes(runs, "Migration time", "seconds", |seen| seen.seconds));
    for (way, paper) in Way::BEYOND_SIZES {
        let beyond = beyond(setup, runs, *way);
        figure.row(format!("time beyond the growth of size: {}", way.name()), "%", paper * 100.0, beyond * 100.0);
    }
    let mirror = beyond(setup, runs, Way::PaperMirror);
    figure.claim(
        "mirroring's time grows by less than 3.4 % more than the disk",
        mirror < 0.034,
        percent(mirror),
        "Fixed costs of a move weigh more on a small disk.",
    );
    let snapshot = beyond(setup, runs, Way::Snapshot);
    figure.claim(
        "snapshotting's time grows much more than the disk, and mirroring's does not",
        snapshot > 0.2 && snapshot > mirror,
        percent(snapshot),
        "The paper's snapshots fragment on VMFS and are looked up in more and more indirections as they grow; a grain of ours is \
         where it is in the volume, and its map is in memory.",
    );
    figure
}

/// By which part the time grows more than the disks do.
fn beyond(setup: &Setup, runs: &Runs, way: Way) -> f64 {
    let (small, large) = setup.size_ends();
    let [first, last] = [small, large].map(|size| runs.get(&setup.of_size(way, size)));
    let expected = (large + SYSTEM_GIB) as f64 / (small + SYSTEM_GIB) as f64;
    if first.switched && last.switched { last.seconds / first.seconds / expected - 1.0 } else { f64::NAN }
}
