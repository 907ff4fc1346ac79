//! Section 3.8: how large the image is, the trace's addresses laid over all of it.

use crate::figure::{Axis, Figure, Plot, Series};
use crate::interference::devices::Disk;
use crate::interference::load::Load;
use crate::interference::scene::Scene;

use super::controls::{Control, WHY_SPACE, controlled, tried};
use super::gains::gain;
use super::{Runs, Setup};

pub(super) const ID: &str = "section-3.8";
const SIZES: [u64; 4] = [15, 20, 25, 30];

fn pair(gigabytes: u64, scale: u64) -> [Scene; 2] {
    let image = gigabytes * 1_000_000_000;
    let dbt = Scene { image, is_stretched: true, ..Scene::of_waio(Load::Financial2, scale) };
    [dbt, dbt.on(Disk::SataFlash)]
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let of = |size: &u64| {
        let pair = pair(*size, setup.scale);
        let controls: Vec<Scene> = controlled(Control::OF_OTHERS, &pair).collect();
        pair.into_iter().chain(controls)
    };
    SIZES.iter().flat_map(of).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Section 3.8 (figure 3.8): the size of the image",
        "Synthetic Financial2 with its addresses laid over the whole image, as the paper did it, at 40 MB/s.",
    )
    .assumed();
    let gains = SIZES.map(|size| gain(runs, &pair(size, setup.scale)));
    let most = |runs: &Runs, change: &dyn Fn(Scene) -> Scene| {
        SIZES.iter().map(|size| gain(runs, &pair(*size, setup.scale).map(change))).fold(0.0, f64::max)
    };
    let ours = most(runs, &|scene| scene);
    let other = tried(runs, Control::OF_OTHERS, " x", (2.10, ours), most);
    figure.row("the largest gain over all sizes", "x", 2.10, ours).explain(WHY_SPACE, &other);
    let got = |size: u64, with: usize| runs.get(&pair(size, setup.scale)[with]).throughput();
    for with in [0, 1] {
        let name = ["DBT", "WAIO"][with];
        let (first, last) = (got(SIZES[0], with), got(SIZES[3], with));
        figure.claim(
            format!("{name}'s guest gets less on a larger image"),
            last < first,
            format!("{first:.2} MB/s on 15 GB, {last:.2} on 30"),
            "",
        );
    }
    figure.claim(
        "WAIO gains more on a larger image",
        gains[3] > gains[0],
        format!("{:.2} times on 15 GB, {:.2} on 30", gains[0], gains[3]),
        "",
    );
    let series = ["DBT", "WAIO"].into_iter().enumerate().map(|(with, name)| {
        let points = SIZES.map(|size| [size as f64, got(size, with)]);
        Series { name: name.to_owned(), colour: with, points: points.into() }
    });
    figure.plots.push(Plot {
        title: "Throughput over the image's size".to_owned(),
        x: Axis::linear("GB"),
        y: Axis::linear("MB/s"),
        bars: false,
        series: series.collect(),
        marks: Vec::new(),
    });
    figure
}
