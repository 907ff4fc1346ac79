//! The evaluation of WAIO, repeated: "Workload-aware IO outsourcing", chapter 3 of the dissertation.
//!
//! Tables 3.2 and 3.3 are played on the bare model of the disk, all else with the engine and the filter of `crates/filters`
//! in the scenes of `interference`. The paper states throughputs in a few places and factors elsewhere; what it gives as
//! plots only is not measured off them. `docs/paper-waio.md` tells what is modelled, and which reading stands where the text
//! contradicts itself.

mod beyond;
mod cache_modes;
mod controls;
mod gains;
mod image_sizes;
mod speeds;
mod surrogates;
mod tables;
mod two_disks;

use std::path::Path;

use block::Result;

use crate::figure::Evaluation;
use crate::interference::load::Load;
use crate::interference::recording::Recording;
use crate::interference::scene::Scene;
use crate::runs::{self, About, EvaluationOptions, Progress};

/// How large the evaluation is, and of which loads.
pub(crate) struct Setup {
    /// Everything is so many times smaller.
    pub(crate) scale: u64,
    /// The user's traces.
    pub(crate) recordings: Vec<Load>,
}

impl Setup {
    /// As `options` say.
    ///
    /// # Errors
    /// A trace cannot be read.
    pub(crate) fn new(options: &EvaluationOptions) -> Result<Self> {
        let recordings = options.traces.as_deref().map_or(Ok(Vec::new()), Self::recordings)?;
        Ok(Self { scale: options.scale, recordings })
    }

    fn recordings(directory: &Path) -> Result<Vec<Load>> {
        // A scene is a plain value that is copied, and names its trace: the few surveys live as long as the program does.
        let found = Recording::all_in(directory)?.into_iter().map(|one| Load::Recorded(Box::leak(Box::new(one))));
        Ok(found.collect())
    }
}

/// What came of the evaluation's moves.
type Runs = crate::runs::Runs<Scene>;
/// A figure or a table.
type Study = crate::runs::Study<Setup, Scene>;

/// A study that is described by a module.
macro_rules! study {
    ($module:ident, $is_of_paper:expr) => {
        Study { id: $module::ID, is_of_paper: $is_of_paper, scenes: $module::scenes, figure: $module::figure }
    };
}

const STUDIES: &[Study] = &[
    Study { id: tables::TABLE_2, is_of_paper: true, scenes: |_| Vec::new(), figure: tables::table_2 },
    Study { id: tables::TABLE_3, is_of_paper: true, scenes: |_| Vec::new(), figure: tables::table_3 },
    study!(gains, true),
    study!(two_disks, true),
    study!(surrogates, true),
    study!(cache_modes, true),
    study!(speeds, true),
    study!(image_sizes, true),
    study!(beyond, true),
];

const PAPER: About = About {
    title: "Workload-aware IO outsourcing for live storage migration (WAIO)",
    page: "docs/paper-waio.md",
    about: "The engine's dirty block tracking (DBT) alone and with the filter that redirects what is popular, on modelled \
     disks. Loads called synthetic are generators with published characteristics of the traces, and no traces. The scale \
     divides images, caches and what a generator uses; times are shown at the paper's scale.",
    scale_max: 256,
};

/// The names of its figures.
pub fn figure_names() -> Vec<&'static str> {
    STUDIES.iter().map(|study| study.id).collect()
}

/// Carries out the evaluation, telling `progress` of every scene.
///
/// # Errors
/// Something that must always hold did not, a trace cannot be read, or there is no figure of a name.
pub fn evaluate(options: &EvaluationOptions, progress: Progress<'_>) -> Result<Evaluation> {
    runs::evaluate(&PAPER, (STUDIES, &Setup::new(options)?), options, progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_surrogates_are_compared_in_one_scene() {
        let options = EvaluationOptions {
            scale: 128,
            only: vec!["section-3.5".to_owned(), "table-3.3".to_owned()],
            seed: 1,
            jobs: 2,
            traces: None,
            command: "a test".to_owned(),
        };
        let evaluation = evaluate(&options, &|_| ()).expect("nothing is violated");
        let ours = |what: &str| {
            let mut rows = evaluation.figures.iter().flat_map(|figure| &figure.rows);
            let row = rows.find(|row| row.what.starts_with(what));
            row.and_then(|row| row.ours).unwrap_or_else(|| panic!("no row of {what}"))
        };
        assert!(
            ours("DBT") < ours("WAIO on a hard disk") && ours("WAIO on a hard disk") < ours("WAIO on SATA flash, if")
        );
    }
}
