//! The strategy that chooses for itself beside the mirror, whose numbers stand in the place of the paper's: whether it is to be
//! the default.

use super::Runs;
use super::grid::{DATA_GIB, Setup};
use super::load::Load;
use super::scene::{Place, Scene};
use super::way::Way;
use crate::figure::Figure;

pub(super) const ID: &str = "auto";
/// The part of the usual disk that moves to NFS, as in figure 10.
const PART: u64 = 8;
/// What it may be worse by.
const WORSE_MAX: f64 = 1.02;

/// The loads of the evaluation, by name.
fn loads(setup: &Setup) -> Vec<(String, Scene)> {
    let way = Way::Mirror;
    let mut scenes: Vec<(String, Scene)> =
        setup.loads.iter().map(|load| (format!("OLTP, {load}"), setup.under_load(way, *load))).collect();
    for intensity in [1, 2] {
        scenes.push((format!("Exchange, {intensity}x"), super::exchange::scene(way, intensity, setup.scale)));
    }
    let oltp = Load::Oltp { outstanding: 16 };
    let nfs = Scene { to: Place::SlowNfs, ..Scene::between_arrays(way, oltp, DATA_GIB, setup.scale * PART) };
    scenes.push(("OLTP, 16, to NFS".to_owned(), nfs));
    scenes
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let both = |(_, scene): (String, Scene)| [scene, Scene { way: Way::Auto, ..scene }];
    loads(setup).into_iter().flat_map(both).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Auto beside our mirror",
        "What becomes of the same guests under `auto`. Where the paper's numbers stand elsewhere, those of our mirror do here.",
    )
    .against("our mirror");
    let mut worst: (f64, String) = (0.0, String::new());
    let mut best: (f64, String) = (f64::MAX, String::new());
    for (name, scene) in loads(setup) {
        let [mirror, auto] = [scene, Scene { way: Way::Auto, ..scene }].map(|scene| runs.get(&scene));
        let mib = |bytes: u64| (bytes * scene.scale) as f64 / f64::from(1 << 20);
        figure.beside(format!("{name}: time"), "s", mirror.seconds, auto.seconds);
        figure.beside(format!("{name}: aggregate cost"), "s", mirror.cost(), auto.cost());
        figure.beside(format!("{name}: a write"), "ms", mirror.during.write_mean_ms(), auto.during.write_mean_ms());
        figure.beside(
            format!("{name}: mirrored"),
            "MiB",
            mib(mirror.report.bytes_mirrored),
            mib(auto.report.bytes_mirrored),
        );
        figure.beside(format!("{name}: copied"), "MiB", mib(mirror.report.bytes_copied), mib(auto.report.bytes_copied));
        let cost = auto.cost() / mirror.cost();
        for (what, part) in [("time", auto.seconds / mirror.seconds), ("cost", cost)] {
            // A guest whose requests come whatever the disks do loses none: there is no cost to compare.
            if what == "cost" && mirror.cost() <= 0.0 {
                continue;
            }
            if part > worst.0 {
                worst = (part, format!("{part:.3} x the mirror's {what} ({name})"));
            }
            if part < best.0 {
                best = (part, format!("{part:.3} x the mirror's {what} ({name})"));
            }
        }
        figure.claim(
            format!("{name}: it moves"),
            auto.switched,
            format!("in {:.0} s", auto.seconds),
            "It must: this is a defect.",
        );
    }
    figure.claim("it is never worse than the mirror by more than 2 %", worst.0 <= WORSE_MAX, worst.1, "");
    figure.claim("it is better somewhere by more than 2 %", best.0 * WORSE_MAX < 1.0, best.1, "");
    figure
}
