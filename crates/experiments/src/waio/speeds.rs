//! Section 3.7: how fast the move is.

use crate::figure::{Axis, Figure, Plot, Series};
use crate::interference::devices::Disk;
use crate::interference::load::Load;
use crate::interference::scene::Scene;

use super::controls::{Control, WHY_WRITES, controlled, tried};
use super::gains::gain;
use super::{Runs, Setup};

pub(super) const ID: &str = "section-3.7";
const RATES: [u64; 6] = [10_000_000, 20_800_000, 33_800_000, 41_600_000, 57_000_000, 70_000_000];

fn pair(rate: u64, scale: u64) -> [Scene; 2] {
    let dbt = Scene::of_waio(Load::Financial2, scale).at_rate(rate);
    [dbt, dbt.on(Disk::SataFlash)]
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let of = |rate: &u64| {
        let pair = pair(*rate, setup.scale);
        let controls: Vec<Scene> = controlled(Control::OF_WRITES, &pair).collect();
        pair.into_iter().chain(controls)
    };
    RATES.iter().flat_map(of).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Section 3.7 (figure 3.7): the speed of the move",
        "Synthetic Financial2, 15 GB, flash as the surrogate. The text gives DBT 5.25 MB/s and 2.24 at the same 33.8 MB/s. The \
         second reading stands: the first one says at which speed WAIO's guest gets what DBT's gets at 33.8.",
    )
    .assumed();
    let of = |runs: &Runs, change: &dyn Fn(Scene) -> Scene, rate, with: usize| {
        runs.get(&change(pair(rate, setup.scale)[with])).throughput()
    };
    let most = |runs: &Runs, change: &dyn Fn(Scene) -> Scene| {
        RATES.iter().map(|rate| gain(runs, &pair(*rate, setup.scale).map(change))).fold(0.0, f64::max)
    };
    let same = |scene| scene;
    let ours = most(runs, &same);
    let other = tried(runs, Control::OF_WRITES, " x", (6.09, ours), most);
    figure.row("the largest gain over all speeds", "x", 6.09, ours).explain(WHY_WRITES, &other);
    let got = |rate: u64, with: usize| of(runs, &same, rate, with);
    for (what, paper, with) in [("DBT at 33.8 MB/s", 2.24, 0), ("WAIO at 33.8 MB/s", 5.25, 1)] {
        let ours = got(33_800_000, with);
        let other =
            tried(runs, Control::OF_WRITES, " MB/s", (paper, ours), |runs, change| of(runs, change, 33_800_000, with));
        figure.row(what, "MB/s", paper, ours).explain(WHY_WRITES, &other);
    }
    let equal = got(41_600_000, 1);
    figure.claim(
        "a guest with WAIO gets at 41.6 MB/s at least what DBT's gets at 33.8",
        equal >= got(33_800_000, 0),
        format!("{equal:.2} and {:.2} MB/s", got(33_800_000, 0)),
        "",
    );
    let falls = RATES.windows(2).all(|pair| got(pair[1], 0) <= got(pair[0], 0) * 1.02);
    figure.claim("DBT's guest gets less the faster the move is", falls, "see the plot", "");
    let fall = |with| got(RATES[0], with) / got(RATES[RATES.len() - 1], with);
    figure.claim(
        "WAIO's guest feels the speed less than DBT's",
        fall(1) < fall(0),
        format!("from the slowest to the fastest {:.2} times less, DBT's {:.2}", fall(1), fall(0)),
        "",
    );
    let series = ["DBT", "WAIO"].into_iter().enumerate().map(|(with, name)| {
        let points = RATES.map(|rate| [rate as f64 / 1e6, got(rate, with)]);
        Series { name: name.to_owned(), colour: with, points: points.into() }
    });
    figure.plots.push(Plot {
        title: "Throughput over the move's speed".to_owned(),
        x: Axis::linear("MB/s of the move"),
        y: Axis::linear("MB/s"),
        bars: false,
        series: series.collect(),
        marks: Vec::new(),
    });
    figure
}
