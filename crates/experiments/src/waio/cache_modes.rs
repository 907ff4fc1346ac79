//! Section 3.6: how QEMU opens the image.

use crate::figure::Figure;
use crate::interference::devices::{CacheMode, Disk};
use crate::interference::load::Load;
use crate::interference::scene::Scene;

use super::controls::{Control, WHY_WRITES, controlled, tried};
use super::gains::gain;
use super::{Runs, Setup};

pub(super) const ID: &str = "section-3.6";

const WHY_OTHERS: &str = "How much of what the guest asks for reaches the disk, and how far apart that is, hangs on what the \
     neighbours and the move do meanwhile, and on how the trace was laid on the image. None of it is stated.";

const PAPER: [(CacheMode, f64); 3] =
    [(CacheMode::WriteThrough, 3.75), (CacheMode::WriteBack, 1.71), (CacheMode::Off, 11.83)];

fn pair(cache: CacheMode, scale: u64) -> [Scene; 2] {
    let dbt = Scene { cache, ..Scene::of_waio(Load::Financial2, scale) };
    [dbt, dbt.on(Disk::SataFlash)]
}

/// What may explain another gain. Barriers are those of writethrough.
const fn controls(cache: CacheMode) -> &'static [Control] {
    match cache {
        CacheMode::WriteThrough => Control::OF_WRITES,
        _ => Control::OF_OTHERS,
    }
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let of = |(cache, _): &(CacheMode, f64)| {
        let pair = pair(*cache, setup.scale);
        let controls: Vec<Scene> = controlled(controls(*cache), &pair).collect();
        pair.into_iter().chain(controls)
    };
    PAPER.iter().flat_map(of).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Section 3.6 (figure 3.6): cache modes",
        "Synthetic Financial2, 15 GB at 40 MB/s, flash as the surrogate, which is opened as the image is.",
    )
    .assumed();
    let gains = PAPER.map(|(cache, paper)| (cache, paper, gain(runs, &pair(cache, setup.scale))));
    for (cache, paper, ours) in gains {
        let pair_of = pair(cache, setup.scale);
        let other = tried(runs, controls(cache), " x", (paper, ours), |runs, change| gain(runs, &pair_of.map(change)));
        let why = if cache == CacheMode::WriteThrough { WHY_WRITES } else { WHY_OTHERS };
        figure.row(format!("WAIO over DBT, {}", cache.name()), "x", paper, ours).explain(why, &other);
        let [dbt, waio] = pair(cache, setup.scale).map(|scene| runs.get(&scene).throughput());
        figure.words_beside(format!("DBT, {}", cache.name()), "MB/s", "", dbt);
        figure.words_beside(format!("WAIO, {}", cache.name()), "MB/s", "", waio);
    }
    let [through, back, off] = gains.map(|(.., ours)| ours);
    figure.claim(
        "the gain is largest without a page cache and smallest with write-back",
        off > through && through > back,
        format!("{off:.2}, {through:.2} and {back:.2} times"),
        "",
    );
    figure
}
