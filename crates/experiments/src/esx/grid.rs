//! What the figures over outstanding requests and over disk sizes have in common.

use super::Runs;
use super::load::Load;
use super::scene::{Scene, Seen};
use super::way::Way;
use crate::figure::{Axis, Plot, Series};

/// How large the evaluation is.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    /// Everything is so many times smaller.
    pub(super) scale: u64,
    /// Outstanding requests.
    pub(super) loads: Vec<usize>,
    /// Data disks, in GiB.
    pub(super) sizes: Vec<u64>,
}

/// The data disk of the figures over outstanding requests (section 3).
pub(super) const DATA_GIB: u64 = 32;
/// What is outstanding in the figures over disk sizes. The paper does not say. Chosen so that the time of DBT grows about
/// as the paper's.
pub(super) const LOAD_OF_SIZES: usize = 6;

impl Setup {
    /// A move under OLTP with so many requests outstanding.
    pub(super) const fn under_load(&self, way: Way, outstanding: usize) -> Scene {
        Scene::between_arrays(way, Load::Oltp { outstanding }, DATA_GIB, self.scale)
    }

    /// A move of a data disk of so many GiB.
    pub(super) const fn of_size(&self, way: Way, data_gib: u64) -> Scene {
        Scene::between_arrays(way, Load::Oltp { outstanding: LOAD_OF_SIZES }, data_gib, self.scale)
    }

    /// The copy without a guest, by the paper's data mover or by ours.
    pub(super) const fn offline(&self, way: Way) -> Scene {
        Scene::between_arrays(way, Load::Idle, DATA_GIB, self.scale)
    }

    /// All moves over outstanding requests.
    pub(super) fn all_loads(&self) -> Vec<Scene> {
        let over = |way: &Way| self.loads.iter().map(|load| self.under_load(*way, *load)).collect::<Vec<_>>();
        Way::ALL.iter().flat_map(over).collect()
    }

    /// All moves over disk sizes.
    pub(super) fn all_sizes(&self) -> Vec<Scene> {
        let over = |way: &Way| self.sizes.iter().map(|size| self.of_size(*way, *size)).collect::<Vec<_>>();
        Way::ALL.iter().flat_map(over).collect()
    }

    /// The least and the most outstanding.
    pub(super) fn load_ends(&self) -> (usize, usize) {
        (self.loads[0], self.loads[self.loads.len() - 1])
    }

    /// The smallest and the largest data disk.
    pub(super) fn size_ends(&self) -> (u64, u64) {
        (self.sizes[0], self.sizes[self.sizes.len() - 1])
    }

    /// A plot of something over outstanding requests, a line each way.
    pub(super) fn plot_loads(&self, runs: &Runs, title: &str, unit: &str, value: impl Fn(&Seen) -> f64) -> Plot {
        let ticks: Vec<f64> = self.loads.iter().map(|load| *load as f64).collect();
        let series = Way::ALL.iter().map(|way| {
            let points = self.loads.iter().map(|load| {
                let seen = runs.get(&self.under_load(*way, *load));
                [*load as f64, if seen.switched { value(seen) } else { f64::NAN }]
            });
            Series { name: way.name().to_owned(), colour: way.colour(), points: points.collect() }
        });
        let series = series.collect();
        let x = Axis::log("requests outstanding", &ticks);
        Plot { title: title.to_owned(), x, y: Axis::linear(unit), bars: false, series, marks: Vec::new() }
    }

    /// A plot of something over disk sizes, a line each way.
    pub(super) fn plot_sizes(&self, runs: &Runs, title: &str, unit: &str, value: impl Fn(&Seen) -> f64) -> Plot {
        let ticks: Vec<f64> = self.sizes.iter().map(|size| *size as f64).collect();
        let series = Way::ALL.iter().map(|way| {
            let points = self.sizes.iter().map(|size| {
                let seen = runs.get(&self.of_size(*way, *size));
                [*size as f64, if seen.switched { value(seen) } else { f64::NAN }]
            });
            Series { name: way.name().to_owned(), colour: way.colour(), points: points.collect() }
        });
        let series = series.collect();
        let x = Axis { label: "data disk in GB (and a system disk of 6 GB)".into(), log: false, ticks };
        Plot { title: title.to_owned(), x, y: Axis::linear(unit), bars: false, series, marks: Vec::new() }
    }

    /// What came of a move under load.
    pub(super) fn seen<'a>(&self, runs: &'a Runs, way: Way, outstanding: usize) -> &'a Seen {
        runs.get(&self.under_load(way, outstanding))
    }
}

/// `part` in per cent.
pub(super) fn percent(part: f64) -> String {
    if !part.is_finite() {
        return "nothing to compare".to_owned();
    }
    format!("{:.1} %", part * 100.0)
}
