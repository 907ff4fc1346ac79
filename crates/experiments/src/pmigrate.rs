//! The evaluation of PMigrate, repeated: "Parallelizing Live Migration of Virtual Machines" (VEE'13).
//!
//! The engine of `crates/memory` copies modelled guests over modelled processors and ports (`pmigrate/host.rs`). What the paper
//! compares itself with is a model of its own (`pmigrate/vanilla.rs`). After every migration each page of memory and disk is compared.
//! `docs/paper-pmigrate.md` tells what is modelled, and which reading stands where the paper contradicts itself.
//!
//! A scale divides the sizes of memories, disks and working sets, and the limits of time. Rates are the paper's. So times are
//! multiplied by it afterwards; what a stop takes beside its memory is added unscaled.

mod guest;
mod host;
mod scaling;
mod scene;
mod tables;
mod vanilla;

use block::Result;

use crate::figure::Evaluation;
use crate::runs::{self, About, EvaluationOptions, Progress};
use scene::{Load, Scene};

/// How large the evaluation is.
pub(crate) struct Setup {
    /// Everything is so many times smaller.
    scale: u64,
}

/// What came of the evaluation's migrations.
type Runs = crate::runs::Runs<Scene>;
/// A figure or a table.
type Study = crate::runs::Study<Setup, Scene>;

/// A table that is described in `tables`.
macro_rules! table {
    ($id:literal) => {
        Study {
            id: $id,
            is_of_paper: true,
            scenes: |setup| tables::scenes(setup, $id),
            figure: |setup, runs| tables::figure(setup, runs, $id),
        }
    };
}

const FIGURE_6: (&str, &str, Load) = ("figure-6", "Figure 6: more consumers, an idle guest on Xen", Load::XenIdle);
const FIGURE_7: (&str, &str, Load) = ("figure-7", "Figure 7: more consumers, memcached on Xen", Load::XenMemcached);

const STUDIES: &[Study] = &[
    Study { id: tables::TABLE_2, is_of_paper: true, scenes: tables::scenes_of_table_2, figure: tables::table_2 },
    table!("table-3"),
    table!("table-4"),
    table!("table-5"),
    table!("table-6"),
    table!("table-7"),
    table!("table-8"),
    Study {
        id: FIGURE_6.0,
        is_of_paper: true,
        scenes: |setup| scaling::scenes(setup, FIGURE_6.2),
        figure: |setup, runs| scaling::figure(setup, runs, FIGURE_6),
    },
    Study {
        id: FIGURE_7.0,
        is_of_paper: true,
        scenes: |setup| scaling::scenes(setup, FIGURE_7.2),
        figure: |setup, runs| scaling::figure(setup, runs, FIGURE_7),
    },
    Study {
        id: scaling::CORES_AND_PORTS,
        is_of_paper: true,
        scenes: scaling::scenes_of_cores_and_ports,
        figure: scaling::cores_and_ports,
    },
    Study {
        id: scaling::WEB_SERVER,
        is_of_paper: true,
        scenes: scaling::scenes_of_web_server,
        figure: scaling::web_server,
    },
    table!("table-10"),
];

const PAPER: About = About {
    title: "Parallelizing Live Migration of Virtual Machines (PMigrate)",
    page: "docs/paper-pmigrate.md",
    about: "The parallel memory engine on modelled guests, processors and ports. Diamonds and broken lines are the paper's numbers; \
     everything else was measured in this run. The scale divides sizes and limits of time; times and sizes are shown at the paper's \
     scale.",
    scale_max: 256,
};

/// The names of its figures.
pub fn figure_names() -> Vec<&'static str> {
    STUDIES.iter().map(|study| study.id).collect()
}

/// Carries out the evaluation, telling `progress` of every migration.
///
/// # Errors
/// Something that must always hold did not, or there is no figure of a name.
pub fn evaluate(options: &EvaluationOptions, progress: Progress<'_>) -> Result<Evaluation> {
    runs::evaluate(&PAPER, (STUDIES, &Setup { scale: options.scale }), options, progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_table_that_is_described_is_repeated() {
        for id in tables::ids() {
            assert!(figure_names().contains(&id), "{id}");
        }
    }

    #[test]
    fn a_guest_that_writes_arrives_whole_and_a_seed_is_a_run() {
        let options = EvaluationOptions {
            scale: 256,
            only: vec!["table-5".to_owned()],
            seed: 3,
            jobs: 1,
            traces: None,
            command: "a test".to_owned(),
        };
        let [one, other] = [(), ()].map(|()| evaluate(&options, &|_| ()).expect("nothing is violated"));
        let ours = |evaluation: &Evaluation| evaluation.figures[0].rows.iter().map(|row| row.ours).collect::<Vec<_>>();
        assert_eq!(ours(&one), ours(&other));
        let downtimes = &one.figures[0].rows[2..4];
        assert!(
            downtimes[0].ours > downtimes[1].ours,
            "a guest that writes faster than one thread sends is stopped for long"
        );
    }
}
