//! Figure 9: aggregate cost over outstanding requests: time times penalty (3.3).

use super::Runs;
use super::controls::{AllocatedOverlays, FasterReads};
use super::grid::Setup;
use super::scene::Scene;
use super::way::Way;
use crate::figure::{Figure, Mark, Series};

pub(super) const ID: &str = "figure-9";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let controls = AllocatedOverlays::scenes(setup).into_iter().chain(FasterReads::scenes(setup));
    setup.all_loads().into_iter().chain(controls).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 9: aggregate cost over outstanding requests",
        "The requests that the guest lost, as seconds in which it did nothing: migration time times penalty.",
    );
    let plot = setup.plot_loads(runs, "Aggregate cost", "seconds", super::scene::Seen::cost);
    let mirror = |_: &Series, at: [f64; 2]| setup.seen(runs, Way::PaperMirror, at[0] as usize).cost();
    let mut over_mirror = plot.over("Aggregate cost over that of the paper's mirroring", "times", mirror);
    let label = "paper: mirroring is about 2 x better than DBT, section 5".to_owned();
    over_mirror.marks.push(Mark { label, colour: Way::Dbt.colour(), x: None, y: 2.0 });
    figure.plots.extend([plot, over_mirror]);
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
    let greatest = |with: fn(Way) -> Way| Way::ALL.iter().all(|way| cost(*way) <= cost(with(Way::Snapshot)));
    figure
        .words(
            format!("cost of snapshotting over that of mirroring, {most} outstanding"),
            "x",
            "the greatest of all",
            ratio,
            greatest(|way| way),
        )
        .explain(
            AllocatedOverlays::WHY,
            &AllocatedOverlays::shape(
                "the cost of snapshotting",
                |way| {
                    let [own, dbt] = [way, Way::Dbt].map(|way| cost(way) / cost(Way::PaperMirror));
                    format!("{own:.2} x that of mirroring, and DBT's {dbt:.2} x")
                },
                greatest,
            ),
        );
    let over_mirror = |way: Way| {
        let cost = |way: Way, load: &usize| setup.seen(runs, way, *load).cost();
        setup.loads.iter().map(|load| cost(way, load) / cost(Way::PaperMirror, load)).collect::<Vec<f64>>()
    };
    let is_more = |with: fn(Way) -> Way| over_mirror(with(Way::Snapshot)).iter().all(|times| *times > 1.0);
    let told = |way: Way| {
        let times = over_mirror(way).iter().map(|times| format!("{times:.2}")).collect::<Vec<_>>();
        format!("{} times as much", times.join(", "))
    };
    let claim = figure.claim(
        "snapshotting costs more than mirroring at every load",
        is_more(|way| way),
        told(Way::Snapshot),
        AllocatedOverlays::WHY,
    );
    claim.explain(AllocatedOverlays::WHY, &AllocatedOverlays::shape("the cost", told, is_more));
    claim.explain(FasterReads::WHY, &FasterReads::of(setup, runs));
    figure
}
