//! Experiments of the papers, in the world and next to the papers' figures: `cargo xtask sim --experiment NAME`.
//!
//! An experiment prints what was run, on which models, and a table. Figures of papers stand beside ours and are marked;
//! where ours differ, the text above the table says why. `docs/simulator.md` tells how to read them.

mod firepan_hour;
pub(crate) mod hard_disk;

use block::Result;

use crate::replay;
use crate::table::Table;

/// An experiment.
pub struct Experiment {
    /// What it is called.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    run: fn(u64) -> Result<Table>,
}

/// All of them.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "hard-disk",
        about: "tables 3.2 and 3.3 of the dissertation on the modelled disk",
        run: hard_disk::run,
    },
    Experiment {
        name: "firepan-hour",
        about: "an hour of the Firepan paper's guest without a cache, one request standing for 20",
        run: firepan_hour::run,
    },
    Experiment {
        name: "synthetic",
        about: "SYNTHETIC loads like Financial1 and 2 and WebSearch1 to 3 on a hard disk and on flash",
        run: replay::synthetic,
    },
];

impl Experiment {
    /// Carries it out with `seed`.
    ///
    /// # Errors
    /// Something in it that must hold did not: then there is no table.
    pub fn run(&self, seed: u64) -> Result<Table> {
        (self.run)(seed)
    }
}

/// The experiment called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static Experiment> {
    EXPERIMENTS.iter().find(|experiment| experiment.name == name)
}
