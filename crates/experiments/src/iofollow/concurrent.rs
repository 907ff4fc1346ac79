//! Figures 5.9 and 5.10: several guests move at once, each guest's requests and its copy as a unit, in turn.

use crate::figure::{Axis, Experiment, Figure, Plot, Series};
use crate::interference::load::Load;

use super::paper::{AT_ONCE, TRACES, WHY, normalised, otherwise, replayed, with_otherwise};
use super::replayer::{CopyOrder, Replayed};
use super::{Played, Runs};
use crate::waio::Setup;

pub(super) const ID: &str = "figure-5.9";
const MACHINES: [u64; 3] = [1, 2, 4];
/// What is left in the paper, of the guest's and of the migration's response.
const LEFT: [f64; 2] = [0.55, 0.45];

pub(super) fn scenes(_: &Setup) -> Vec<Played> {
    let of = |machines| TRACES.iter().flat_map(move |trace| with_otherwise(of_machines(trace.load, machines), AT_ONCE));
    MACHINES.into_iter().flat_map(of).map(Played::Replayer).collect()
}

const fn of_machines(load: Load, machines: u64) -> Replayed {
    Replayed { machines, ..replayed(load, CopyOrder::Follow) }
}

/// Whether what following saves grows with the guests where something else is otherwise.
fn grows(runs: &Runs, load: Load, which: usize) -> Experiment {
    let (what, change) = AT_ONCE[0];
    let seen = MACHINES.map(|machines| normalised(runs, change(of_machines(load, machines)))[which] * 100.0);
    let words = seen.map(|part| format!("{part:.0} %"));
    Experiment { seen: format!("{what}: {}", words.join(", ")), shows: seen[2] < seen[0] }
}

pub(super) fn figure(_: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figures 5.9 and 5.10: several guests move at once",
        "Images of 15 GB one behind the other. Two requests of a guest's and one copy of its image are a unit, and guests take \
         turns. The text gives 55 % for the migration and 45 % for the guest, without saying of how many guests: of four here.",
    )
    .assumed();
    for (which, who) in ["guest", "migration"].into_iter().enumerate() {
        let mut series = Vec::new();
        for (colour, trace) in TRACES.iter().enumerate() {
            let left = |machines| normalised(runs, of_machines(trace.load, machines))[which];
            let most = MACHINES[MACHINES.len() - 1];
            let (ours, paper, name) = (left(most), LEFT[which], trace.load.name());
            let other = otherwise(runs, (of_machines(trace.load, most), AT_ONCE), which, (paper, ours));
            let row = format!("{name}: change of the {who}'s response, {most} guests");
            figure.row(row, "%", (paper - 1.0) * 100.0, (ours - 1.0) * 100.0).explain(WHY, &other);
            let words = MACHINES.map(|machines| format!("{:.0} %", left(machines) * 100.0));
            let claim = format!("{name}: the more guests move, the more following saves the {who}");
            figure
                .claim(claim, left(most) < left(1), words.join(", "), "")
                .explain(WHY, &grows(runs, trace.load, which));
            let points = MACHINES.map(|machines| [machines as f64, left(machines) * 100.0]);
            series.push(Series { name: name.to_owned(), colour, points: points.into() });
        }
        figure.plots.push(Plot {
            title: format!("What IOFollow leaves of the {who}'s response"),
            x: Axis::linear("guests"),
            y: Axis::linear("%"),
            bars: false,
            series,
            marks: Vec::new(),
        });
    }
    figure
}
