//! Figures 5.7 and 5.8: how many requests of the guest's come before one copy.

use crate::figure::{Experiment, Figure};

use super::chunk_sizes::range;
use super::paper::{AT_ONCE, TRACES, WHY, normalised, replayed, with_otherwise};
use super::replayer::{CopyOrder, Replayed};
use super::{Played, Runs};
use crate::waio::Setup;

pub(super) const ID: &str = "figure-5.7";
const RATIOS: [u64; 4] = [1, 2, 3, 4];

pub(super) fn scenes(_: &Setup) -> Vec<Played> {
    let of_ratio = |ratio| {
        TRACES.iter().flat_map(move |trace| {
            with_otherwise(Replayed { ratio, ..replayed(trace.load, CopyOrder::Follow) }, AT_ONCE)
        })
    };
    RATIOS.into_iter().flat_map(of_ratio).map(Played::Replayer).collect()
}

pub(super) fn figure(_: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figures 5.7 and 5.8: requests of the guest's for one copy",
        "What IOFollow leaves of the standard's response, 1 MiB. The text says \"improve by up to 74 %\" for the guest and \
         \"reduce by up to 50 %\" for the migration. With the paper's own 2:1 (60 to 79 % and 54 to 75 % left) the first is \
         what is left at best, and the second fits as either. Both are taken as what is left at best.",
    )
    .assumed();
    range(
        &mut figure,
        runs,
        (&RATIOS.map(|ratio| (format!("{ratio}:1"), ratio as f64)), "requests for one copy"),
        |at, load| Replayed { ratio: RATIOS[at], ..replayed(load, CopyOrder::Follow) },
        [(74.0, 100.0), (50.0, 100.0)],
    );
    // "Up to" says something of the best alone.
    figure.rows.iter_mut().for_each(|row| row.judgement.verdict = None);
    for (which, (who, paper)) in [("guest", 74.0), ("migration", 50.0)].into_iter().enumerate() {
        let least = |change: fn(Replayed) -> Replayed| {
            let of =
                |ratio| TRACES.iter().map(move |trace| Replayed { ratio, ..replayed(trace.load, CopyOrder::Follow) });
            let all = RATIOS.into_iter().flat_map(of).map(|replayed| normalised(runs, change(replayed))[which] * 100.0);
            all.fold(f64::INFINITY, f64::min)
        };
        let (what, change) = AT_ONCE[0];
        let (ours, other) = (least(|replayed| replayed), least(change));
        let shows = other <= paper || (other - paper).abs() <= (ours - paper).abs() / 2.0;
        let experiment = Experiment { seen: format!("{what}: {other:.0} % left"), shows };
        let row = format!("the least that is left of the {who}'s response");
        figure.row(row, "%", paper, ours).explain(WHY, &experiment);
    }
    figure
}
