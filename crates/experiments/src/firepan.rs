//! The evaluation of Firepan, repeated: a VM's flash cache moves with it to another host (section 4 of its paper).
//!
//! The project's cache (`filters::Cache`: LRU, read-only) and its transfer (`migrate::CacheDeparture` and `CacheArrival`) run over hosts that
//! are modelled: whoever asks shares a host fairly (`firepan/host.rs`). The VM that moves is played request by request, and each read is
//! compared with what was written. The six others are closed loops, which always ask, so each is a part of its host. `docs/paper-firepan.md`
//! tells what is modelled and what was fitted.
//!
//! A scale divides sizes and requests, and no times: a request stands for so many, and takes as many times longer.

mod devices;
mod equations;
mod figure_6;
mod guest;
mod host;
mod neighbours;
mod ours;
mod paper;
mod scene;
mod sizes;
mod table_1;

use block::Result;

use crate::figure::Evaluation;
use crate::runs::{self, About, EvaluationOptions, Progress};
use scene::Scene;

/// How large the evaluation is.
pub(crate) struct Setup {
    /// Everything is so many times smaller.
    scale: u64,
}

/// What came of the evaluation's hours.
type Runs = runs::Runs<Scene>;
/// A figure or a table.
type Study = runs::Study<Setup, Scene>;

/// A study that is described by a module.
macro_rules! study {
    ($module:ident) => {
        Study { id: $module::ID, is_of_paper: true, scenes: $module::scenes, figure: $module::figure }
    };
}

const STUDIES: &[Study] =
    &[study!(figure_6), study!(table_1), study!(neighbours), study!(sizes), study!(equations), study!(ours)];

/// The scale at which all of it takes some minutes.
pub const SCALE: u64 = 64;

const PAPER: About = About {
    title: "Firepan: a flash cache that moves with its VM",
    page: "docs/paper-firepan.md",
    about: "The project's cache and its transfer between two modelled hosts, under the paper's load. Rates are shown at the paper's scale. Times \
     are not scaled.",
    scale_max: 256,
};

/// The names of its figures.
pub fn figure_names() -> Vec<&'static str> {
    STUDIES.iter().map(|study| study.id).collect()
}

/// Carries out the evaluation, telling `progress` of every hour.
///
/// # Errors
/// Something that must always hold did not, or there is no figure of a name.
pub fn evaluate(options: &EvaluationOptions, progress: Progress<'_>) -> Result<Evaluation> {
    runs::evaluate(&PAPER, (STUDIES, &Setup { scale: options.scale }), options, progress)
}

#[cfg(test)]
mod tests {
    /// An hour of the paper. The cache and its moves are decided on main by the tests of `filters` and the scenarios of caches, the hour's
    /// figures by those of `tables`.
    mod long {
        use super::super::paper::{COLD, SIZE};
        use super::super::scene::{ATTACH, MOVE, Way};
        use super::super::*;
        use crate::runs::Scene as _;

        #[test]
        fn a_cache_doubles_what_a_vm_reads_and_hybrid_keeps_that_over_a_move() {
            let [none, hybrid] = [Way::None, Way::Hybrid].map(|way| {
                let scene = Scene::of_paper(way, SIZE, PAPER.scale_max);
                scene.play(1).expect("nothing is violated")
            });
            let cold = none.reads_a_second(20, ATTACH);
            assert!((cold / COLD - 1.0).abs() < 0.05, "{cold} reads/s without a cache");
            assert!(none.plateau() > 1.6 * cold, "{} reads/s with a warm one", none.plateau());
            let after = none.reads_a_second(MOVE + 3, MOVE + 40);
            assert!(after < 1.3 * cold, "{after} reads/s with an empty cache");
            let from = hybrid.resumed.ceil() as usize;
            let kept = hybrid.reads_a_second(from, from + 40);
            assert!(kept > 0.8 * hybrid.plateau(), "{kept} of {} reads/s", hybrid.plateau());
            // With three VMs there is a third more for each than with four.
            let [four, three] = [none.neighbour(0, 1500, MOVE), none.neighbour(1, 1500, MOVE)];
            assert!((three / four - 4.0 / 3.0).abs() < 0.02, "{four} and {three} reads/s");
        }
    }
}
