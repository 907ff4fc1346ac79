//! Figure 9: aggregate cost over outstanding requests: time times penalty (3.3).

use super::Runs;
use super::grid::Setup;
use super::scene::Scene;
use super::way::Way;
use crate::figure::Figure;

pub(super) const ID: &str = "figure-9";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    setup.all_loads()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 9: aggregate cost over outstanding requests",
        "The requests that the guest lost, as seconds in which it did nothing: migration time times penalty.",
    );
    figure.plots.push(setup.plot_loads(runs, "Aggregate cost", "seconds", super::scene::Seen::cost));
    let (_, most) = setup.load_ends();
    let cost = |way| setup.seen(runs, way, most).cost();
    for way in Way::TRACKING {
        let ratio = cost(*way) / cost(Way::PaperMirror);
        figure.words(
            format!("cost of {} over that of mirroring, {most} outstanding", way.name()),
            "x",
            "about 2 x better overall",
            ratio,
            ratio >= 1.5,
        );
        let own = cost(Way::Mirror) / cost(*way);
        figure.claim(
            format!("our mirror costs at most half of {} with {most} outstanding", way.name()),
            own <= 0.5,
            format!("{own:.2} of it"),
            "See figure 4: where DBT's passes are few, it loses little more than one pass does.",
        );
    }
    let ratio = cost(Way::Snapshot) / cost(Way::PaperMirror);
    figure.words(
        format!("cost of snapshotting over that of mirroring, {most} outstanding"),
        "x",
        "the greatest of all",
        ratio,
        Way::ALL.iter().all(|way| cost(*way) <= cost(Way::Snapshot)),
    );
    figure.claim(
        "snapshotting costs more than mirroring at every load",
        setup.loads.iter().all(|load| {
            setup.seen(runs, Way::Snapshot, *load).cost() > setup.seen(runs, Way::PaperMirror, *load).cost()
        }),
        format!("{ratio:.1} times as much with {most} outstanding"),
        "It took less time than expected.",
    );
    figure
}
