//! The evaluation of the ESX paper, repeated: "The Design and Evolution of Live Storage Migration in VMware ESX".
//!
//! Every figure and table is a module that says which moves it needs (`scene::Scene`). It makes a
//! [`Figure`](crate::figure::Figure) of them: plots with the paper's numbers as marks, rows "paper, ours, deviation",
//! and the shapes that must come out. Each move is played once, by the engine's own strategies, in a world of its own.
//! `docs/paper-esx.md` tells what is modelled and why some numbers differ.
//!
//! A scale divides the sizes of disks and caches and the limits of time. What does not scale weighs more at larger
//! scales: windows, latencies, the second in which the latency controller learns.

mod allocated;
mod chosen;
mod controls;
mod exchange;
mod figure_02;
mod figure_03;
mod figure_04;
mod figure_05;
mod figure_06;
mod figure_07;
mod figure_08;
mod figure_09;
mod figure_10;
mod figure_11;
mod forecasts;
mod grid;
mod load;
mod over_time;
mod overlay_disks;
mod paper;
mod real;
mod scene;
mod table_1;
mod table_2;
mod way;

use block::Result;

use crate::figure::Evaluation;
use crate::runs::{self, About, EvaluationOptions, Progress};
use grid::Setup;
use real::RealRuns;
use scene::Scene;

/// What came of the evaluation's moves.
type Runs = crate::runs::Runs<Scene>;
/// A figure or a table.
type Study = crate::runs::Study<Setup, Scene>;

const STUDIES: &[Study] = &[
    Study { id: figure_02::ID, is_of_paper: true, scenes: figure_02::scenes, figure: figure_02::figure },
    Study { id: figure_03::ID, is_of_paper: true, scenes: figure_03::scenes, figure: figure_03::figure },
    Study { id: figure_04::ID, is_of_paper: true, scenes: figure_04::scenes, figure: figure_04::figure },
    Study { id: figure_05::ID, is_of_paper: true, scenes: figure_05::scenes, figure: figure_05::figure },
    Study { id: figure_06::ID, is_of_paper: true, scenes: figure_06::scenes, figure: figure_06::figure },
    Study { id: figure_07::ID, is_of_paper: true, scenes: figure_07::scenes, figure: figure_07::figure },
    Study { id: figure_08::ID, is_of_paper: true, scenes: figure_08::scenes, figure: figure_08::figure },
    Study { id: figure_09::ID, is_of_paper: true, scenes: figure_09::scenes, figure: figure_09::figure },
    Study { id: figure_10::ID, is_of_paper: true, scenes: figure_10::scenes, figure: figure_10::figure },
    Study { id: figure_11::ID, is_of_paper: true, scenes: figure_11::scenes, figure: figure_11::figure },
    Study { id: chosen::ID, is_of_paper: false, scenes: chosen::scenes, figure: chosen::figure },
    Study {
        id: forecasts::loads::ID,
        is_of_paper: false,
        scenes: forecasts::loads::scenes,
        figure: forecasts::loads::figure,
    },
    Study {
        id: forecasts::sizes::ID,
        is_of_paper: false,
        scenes: forecasts::sizes::scenes,
        figure: forecasts::sizes::figure,
    },
    Study {
        id: forecasts::slow::ID,
        is_of_paper: false,
        scenes: forecasts::slow::scenes,
        figure: forecasts::slow::figure,
    },
    Study { id: table_1::ID, is_of_paper: true, scenes: table_1::scenes, figure: table_1::figure },
    Study { id: table_2::ID, is_of_paper: true, scenes: table_2::scenes, figure: table_2::figure },
];

const PAPER: About = About {
    title: "The Design and Evolution of Live Storage Migration in VMware ESX",
    page: "docs/paper-esx.md",
    about: "The engine's own strategies on modelled arrays and guests. Broken lines and diamonds are the paper's numbers; \
     everything else was measured in this run. The scale divides the sizes of disks and caches and the limits of time; times \
     and sizes are shown at the paper's scale.",
    scale_max: 1024,
};

/// The names of its figures.
pub fn figure_names() -> Vec<&'static str> {
    STUDIES.iter().map(|study| study.id).collect()
}

/// Carries out the evaluation, telling `progress` of every move.
///
/// # Errors
/// Something that must always hold did not, or there is no figure of a name.
pub fn evaluate(options: &EvaluationOptions, progress: Progress<'_>) -> Result<Evaluation> {
    let setup = Setup { scale: options.scale, loads: vec![2, 4, 8, 16, 32], sizes: vec![4, 8, 16, 32, 64] };
    runs::evaluate(&PAPER, (STUDIES, &setup), options, progress)
}

/// Makes the same page of what was measured on real files.
///
/// # Errors
/// `measured` is not what `cargo xtask paper-esx-real` writes down.
pub fn evaluate_real(measured: &str) -> Result<Evaluation> {
    Ok(RealRuns::parse(measured)?.evaluation())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;

    /// A small part of the evaluation, small.
    fn small(only: &[&str]) -> Evaluation {
        let options = EvaluationOptions {
            scale: 256,
            only: only.iter().map(|name| (*name).to_owned()).collect(),
            seed: 1,
            jobs: 2,
            traces: None,
            command: "a <test>".to_owned(),
        };
        evaluate(&options, &|_| {}).expect("nothing is violated")
    }

    #[test]
    fn a_figure_that_the_paper_does_not_have_is_refused() {
        let options = EvaluationOptions {
            scale: 256,
            only: vec!["figure-99".to_owned()],
            seed: 1,
            jobs: 1,
            traces: None,
            command: String::new(),
        };
        assert!(evaluate(&options, &|_| {}).is_err());
    }

    /// A part of the evaluation. What a scene measures is decided on main by the tests of the scenes, and what a page shows by those of
    /// `report`.
    mod long {
        use super::*;

        #[test]
        fn a_small_evaluation_gives_a_page_and_a_document_with_every_figure_s_numbers() {
            let evaluation = small(&["figure-4", "figure-10"]);
            let page = report::html(&evaluation);
            assert!(
                page.contains("id=\"figure-4\"")
                    && page.contains("id=\"figure-10\"")
                    && page.contains("a &lt;test&gt;")
            );
            assert!(
                !page.contains("NaN") && !page.contains("http://")
                    || page.matches("http://").count() == page.matches("xmlns").count()
            );
            let document: serde_json::Value =
                serde_json::from_str(&report::json(&evaluation).expect("it is written")).expect("it is JSON");
            assert_eq!(document["figures"][0]["rows"][0]["paper"], 176.0);
            let rows = evaluation.figures.iter().flat_map(|figure| &figure.rows);
            assert!(rows.clone().count() > 5 && report::text(&evaluation).contains("offline copy"));
            let offline = evaluation.figures[0].rows[0].ours.expect("it was measured");
            assert!((100.0..300.0).contains(&offline), "{offline} s for the offline copy");
        }
    }
}
