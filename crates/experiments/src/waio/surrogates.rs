//! Section 3.5: what the surrogate is.

use crate::figure::Figure;
use crate::interference::devices::Disk;
use crate::interference::load::Load;
use crate::interference::scene::Scene;

use super::controls::{Control, WHY_SPACE, WHY_WRITES, controlled, tried};
use super::{Runs, Setup};

pub(super) const ID: &str = "section-3.5";
const RATE: u64 = 57_000_000;

fn dbt(setup: &Setup) -> Scene {
    Scene::of_waio(Load::Financial2, setup.scale).at_rate(RATE)
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let dbt = dbt(setup);
    let all = [dbt, dbt.on(Disk::Hard), dbt.on(Disk::SataFlash), dbt.on(Disk::FourHard)];
    let controls = controlled(Control::OF_WRITES, &all[..3]).chain(controlled(Control::OF_SPACE, &all[1..2]));
    all.into_iter().chain(controls).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Section 3.5 (figure 3.5): what the surrogate is, at 57 MB/s",
        "Synthetic Financial2, 15 GB, writethrough. \"Improved by 213 % with a spare SSD\" has no stated base. Both \
         readings stand here: over DBT it is 1.82 MB/s, over the surrogate on a hard disk 3.26.",
    )
    .assumed();
    let dbt = dbt(setup);
    let got = |runs: &Runs, scene: Scene| runs.get(&scene).throughput();
    for (what, paper, scene) in [("DBT", 0.58, dbt), ("WAIO on a hard disk", 1.04, dbt.on(Disk::Hard))] {
        let ours = got(runs, scene);
        let other = tried(runs, Control::OF_WRITES, " MB/s", (paper, ours), |runs, change| got(runs, change(scene)));
        figure.row(what, "MB/s", paper, ours).explain(WHY_WRITES, &other);
    }
    let times = |runs: &Runs, change: &dyn Fn(Scene) -> Scene, surrogate| {
        got(runs, change(dbt.on(surrogate))) / got(runs, change(dbt))
    };
    for (what, paper, surrogate) in
        [("a hard disk over DBT", 1.793, Disk::Hard), ("SATA flash over DBT, 213 % more", 3.13, Disk::SataFlash)]
    {
        let ours = times(runs, &|scene| scene, surrogate);
        let other = tried(runs, Control::OF_WRITES, " x", (paper, ours), |runs, change| times(runs, change, surrogate));
        figure.row(format!("WAIO on {what}"), "x", paper, ours).explain(WHY_WRITES, &other);
    }
    let flash = got(runs, dbt.on(Disk::SataFlash));
    figure.beside("WAIO on SATA flash, if 213 % over DBT", "MB/s", 1.82, flash);
    figure.beside("WAIO on SATA flash, if 213 % over the hard disk", "MB/s", 3.26, flash);
    figure.words_beside("WAIO on a RAID-0 of four hard disks", "MB/s", "", got(runs, dbt.on(Disk::FourHard)));
    let space = |runs: &Runs, scene: Scene| runs.get(&scene).space() / 100.0 * scene.image as f64 / 1e6;
    let ours = space(runs, dbt.on(Disk::Hard));
    let other =
        tried(runs, Control::OF_SPACE, " MB", (528.0, ours), |runs, change| space(runs, change(dbt.on(Disk::Hard))));
    figure.row("space on the hard disk", "MB", 528.0, ours).explain(WHY_SPACE, &other);
    figure
}
