//! Section 3.4: a guest whose two disks lie on different devices, and move one after the other.

use crate::figure::{Axis, Figure, Plot, Series};
use crate::interference::devices::Disk;
use crate::interference::load::Load;
use crate::interference::scene::{Scene, Seen, Sums};

use super::{Runs, Setup};

pub(super) const ID: &str = "section-3.4";

fn pair(scale: u64) -> [Scene; 2] {
    let dbt = Scene { has_system_disk: true, ..Scene::of_waio(Load::Financial2, scale) };
    [dbt, dbt.on(Disk::SataFlash)]
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    pair(setup.scale).into()
}

/// The mean response while the system disk moves, or while the data disk does, in milliseconds. The first step of each is left
/// out: caches and surrogate are empty then, and the second one's end, for the guest is held.
fn response(seen: &Seen, is_system: bool) -> f64 {
    let of = seen.windows.iter().filter(|(end, _)| (*end <= seen.system_seconds) == is_system);
    let steps: Vec<&(f64, Sums)> = of.collect();
    let inner = steps.get(1..steps.len().saturating_sub(1)).unwrap_or_default();
    let mut sum = Sums::default();
    for (_, step) in inner {
        sum.requests += step.requests;
        sum.seconds += step.seconds;
    }
    sum.mean_ms()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Section 3.4 (figure 3.4): two disks on two devices, the system disk first",
        "The guest (synthetic Financial2) uses the data disk alone, which moves second. The system disk has 8 GB: assumed. \
         Response times are means over ten seconds.",
    )
    .assumed();
    let pair = pair(setup.scale);
    let [dbt, waio] = [runs.get(&pair[0]), runs.get(&pair[1])];
    let change = |is_system| (response(waio, is_system) / response(dbt, is_system) - 1.0) * 100.0;
    figure.row("response while the data disk moves", "%", -91.0, change(false));
    let system = change(true);
    figure.words("response while the system disk moves", "%", "almost the same", system, system.abs() < 10.0);
    let series = [("DBT", dbt), ("WAIO", waio)].into_iter().enumerate().map(|(colour, (name, seen))| {
        let points =
            seen.windows.iter().filter(|(_, step)| step.requests > 0).map(|(end, step)| [*end, step.mean_ms()]);
        Series { name: name.to_owned(), colour, points: points.collect() }
    });
    figure.plots.push(Plot {
        title: "Response time over ten seconds".to_owned(),
        x: Axis::linear("seconds"),
        y: Axis::linear("ms"),
        bars: false,
        series: series.collect(),
        marks: Vec::new(),
    });
    figure
}
