//! What the paper does not have: when a chunk is popular, how skewed the load is, how many requests are outstanding, and what is
//! left of the gain on flash.

use crate::figure::{Axis, Figure, Plot, Series};
use crate::interference::devices::{CacheMode, Disk};
use crate::interference::load::Load;
use crate::interference::scene::Scene;

use super::gains::gain;
use super::{Runs, Setup};

pub(super) const ID: &str = "waio-beyond";
const THRESHOLDS: [u16; 4] = [1, 2, 4, 8];
const SKEWS: [u32; 4] = [50, 100, 150, 200];
const DEPTHS: [usize; 3] = [1, 4, 16];
const FLASH: [Disk; 2] = [Disk::SataFlash, Disk::NvmeFlash];
const LOADS: [Load; 2] = [Load::Financial2, Load::WebSearch1];

/// Past the page cache, so that the devices are seen.
fn dbt(load: Load, setup: &Setup) -> Scene {
    Scene { cache: CacheMode::Off, ..Scene::of_waio(load, setup.scale) }
}

fn on_flash(scene: Scene) -> [Scene; 2] {
    [scene, scene.on(Disk::SataFlash)]
}

/// The load, what is varied and how it is called.
fn variants(setup: &Setup) -> Vec<(Load, &'static str, f64, [Scene; 2])> {
    let mut all = Vec::new();
    for load in LOADS {
        let dbt = dbt(load, setup);
        for threshold in THRESHOLDS {
            let [without, with] = on_flash(dbt);
            all.push((
                load,
                "request that makes popular",
                f64::from(threshold),
                [without, Scene { threshold, ..with }],
            ));
        }
        for skew in SKEWS {
            let name = "skew, of the specification's";
            all.push((load, name, f64::from(skew) / 100.0, on_flash(Scene { skew, ..dbt })));
        }
        for outstanding in DEPTHS {
            all.push((load, "outstanding", outstanding as f64, on_flash(Scene { outstanding, ..dbt })));
        }
    }
    all
}

/// Source and surrogate are flash; the surrogate is a device of its own.
fn of_flash(setup: &Setup) -> Vec<(Load, Disk, [Scene; 2])> {
    let of = |load| {
        FLASH.map(|source| {
            let dbt = Scene { source, ..dbt(load, setup) };
            (load, source, [dbt, dbt.on(source)])
        })
    };
    LOADS.into_iter().flat_map(of).collect()
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let varied = variants(setup).into_iter().flat_map(|(.., pair)| pair);
    varied.chain(of_flash(setup).into_iter().flat_map(|(.., pair)| pair)).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Not in the paper: popularity, skew, depth, and flash",
        "Cache mode none, 15 GB at 40 MB/s. On flash the source has no head: what is left is that two devices serve instead of \
         one.",
    )
    .against("without");
    let variants = variants(setup);
    for load in LOADS {
        for what in ["request that makes popular", "skew, of the specification's", "outstanding"] {
            let of: Vec<_> = variants.iter().filter(|(of, name, ..)| *of == load && *name == what).collect();
            let points = of.iter().map(|(.., at, pair)| [*at, gain(runs, pair)]).collect();
            for (.., at, pair) in of {
                let with = runs.get(&pair[1]);
                let row = format!(
                    "{}: {what} {at}: gain; {:.0} % outsourced, {:.2} % space",
                    load.name(),
                    with.outsourced(),
                    with.space()
                );
                figure.words_beside(row, "x", "", gain(runs, pair));
            }
            figure.plots.push(Plot {
                title: format!("{}: gain over {what}", load.name()),
                x: Axis::linear(what),
                y: Axis::linear("times"),
                bars: false,
                series: vec![Series { name: load.name().to_owned(), colour: 0, points }],
                marks: Vec::new(),
            });
        }
    }
    for (load, source, pair) in of_flash(setup) {
        let [without, with] = pair.map(|scene| runs.get(&scene).throughput());
        figure.beside(format!("{} on {}: WAIO beside DBT", load.name(), source.name()), "MB/s", without, with);
    }
    figure
}
