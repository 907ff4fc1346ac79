//! The evaluation of the ESX paper, repeated: "The Design and Evolution of Live Storage Migration in VMware ESX".
//!
//! Every figure and table is a module that says which moves it needs (`scene::Scene`) and makes of them a
//! [`Figure`]: plots with the paper's numbers as marks, rows "paper, ours, deviation", and the shapes that must come out.
//! Each move is played once, by the engine's own strategies, in a world of its own. `docs/paper-esx.md` tells what is
//! modelled and why some numbers differ.
//!
//! A scale divides the sizes of disks and caches and the limits of time. What does not scale (windows, latencies, the
//! second in which the governor learns) weighs more at larger ones.

mod chosen;
mod exchange;
mod figure;
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
mod html;
mod load;
mod over_time;
mod overlay_disks;
mod paper;
mod real;
mod runs;
mod scene;
mod svg;
mod table_1;
mod table_2;
mod way;

use block::{Error, ErrorKind, Result};
use serde::Serialize;

pub use figure::{Axis, Claim, Figure, Mark, Plot, Row, Series};
use grid::Setup;
pub use real::RealRuns;
use runs::Runs;
use scene::Scene;

/// A figure or a table: the moves that it needs and what it makes of them.
struct Study {
    id: &'static str,
    scenes: fn(&Setup) -> Vec<Scene>,
    figure: fn(&Setup, &Runs) -> Figure,
}

const STUDIES: &[Study] = &[
    Study { id: figure_02::ID, scenes: figure_02::scenes, figure: figure_02::figure },
    Study { id: figure_03::ID, scenes: figure_03::scenes, figure: figure_03::figure },
    Study { id: figure_04::ID, scenes: figure_04::scenes, figure: figure_04::figure },
    Study { id: figure_05::ID, scenes: figure_05::scenes, figure: figure_05::figure },
    Study { id: figure_06::ID, scenes: figure_06::scenes, figure: figure_06::figure },
    Study { id: figure_07::ID, scenes: figure_07::scenes, figure: figure_07::figure },
    Study { id: figure_08::ID, scenes: figure_08::scenes, figure: figure_08::figure },
    Study { id: figure_09::ID, scenes: figure_09::scenes, figure: figure_09::figure },
    Study { id: figure_10::ID, scenes: figure_10::scenes, figure: figure_10::figure },
    Study { id: figure_11::ID, scenes: figure_11::scenes, figure: figure_11::figure },
    Study { id: chosen::ID, scenes: chosen::scenes, figure: chosen::figure },
    Study { id: forecasts::loads::ID, scenes: forecasts::loads::scenes, figure: forecasts::loads::figure },
    Study { id: forecasts::sizes::ID, scenes: forecasts::sizes::scenes, figure: forecasts::sizes::figure },
    Study { id: forecasts::slow::ID, scenes: forecasts::slow::scenes, figure: forecasts::slow::figure },
    Study { id: table_1::ID, scenes: table_1::scenes, figure: table_1::figure },
    Study { id: table_2::ID, scenes: table_2::scenes, figure: table_2::figure },
];

/// What to carry out.
#[derive(Clone, Debug)]
pub struct EvaluationOptions {
    /// Everything is so many times smaller than the paper's.
    pub scale: u64,
    /// Only these figures; all of them if it is empty.
    pub only: Vec<String>,
    /// Where all randomness is from.
    pub seed: u64,
    /// How many moves are played at once.
    pub jobs: usize,
    /// How whoever reads the report repeats it.
    pub command: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Evaluation {
    /// How it was made.
    pub command: String,
    /// What was measured, on what.
    pub about: String,
    /// See [`EvaluationOptions::seed`].
    pub seed: u64,
    /// See [`EvaluationOptions::scale`].
    pub scale: u64,
    /// The figures and tables, in the paper's order.
    pub figures: Vec<Figure>,
}

const ABOUT: &str = "The engine's own strategies on modelled arrays and guests. Broken lines and diamonds are the paper's numbers; \
     everything else was measured in this run. The scale divides the sizes of disks and caches and the limits of time; times \
     and sizes are shown at the paper's scale.";

/// The names that [`EvaluationOptions::only`] takes.
pub fn figure_names() -> impl Iterator<Item = &'static str> {
    STUDIES.iter().map(|study| study.id)
}

/// Carries out the evaluation, telling `progress` of every move.
///
/// # Errors
/// Something that must always hold did not, or there is no figure of a name.
pub fn evaluate(options: &EvaluationOptions, progress: &(dyn Fn(String) + Sync)) -> Result<Evaluation> {
    let refuse = |context: String| Err(Error::new(ErrorKind::Invalid, context));
    if !(1..=1024).contains(&options.scale) {
        return refuse(format!("a scale of 1:{} is none from 1:1 to 1:1024", options.scale));
    }
    if let Some(name) = options.only.iter().find(|name| figure_names().all(|known| known != name.as_str())) {
        return refuse(format!("there is no `{name}`, only {}", figure_names().collect::<Vec<_>>().join(", ")));
    }
    let chosen = |study: &&Study| options.only.is_empty() || options.only.iter().any(|name| name == study.id);
    let setup = Setup { scale: options.scale, loads: vec![2, 4, 8, 16, 32], sizes: vec![4, 8, 16, 32, 64] };
    let studies: Vec<&Study> = STUDIES.iter().filter(chosen).collect();
    let scenes = studies.iter().flat_map(|study| (study.scenes)(&setup)).collect();
    let runs = Runs::play(scenes, options.seed, options.jobs, progress)?;
    let figures = studies.iter().map(|study| (study.figure)(&setup, &runs)).collect();
    let command = format!("{}, seed {}, scale 1:{}", options.command, options.seed, options.scale);
    Ok(Evaluation { command, about: ABOUT.to_owned(), seed: options.seed, scale: options.scale, figures })
}

impl Evaluation {
    /// The report as one page of HTML that needs nothing else.
    #[must_use]
    pub fn html(&self) -> String {
        html::page(self)
    }

    /// The report for programs.
    ///
    /// # Errors
    /// Never; kept for a format that might.
    pub fn json(&self) -> Result<String> {
        serde_json::to_string_pretty(self).map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))
    }

    /// Whether every shape came out, and the report for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut table = super::Table::new(&["figure", "what", "paper", "ours", "deviation"]);
        for figure in &self.figures {
            for row in &figure.rows {
                let deviation = row.deviation().map_or_else(String::new, |part| format!("{:+.1} %", part * 100.0));
                let cells = [figure.id.to_owned(), row.what.clone(), html::paper_text(row), html::ours_text(row)];
                table.row(cells.into_iter().chain([deviation]).collect());
            }
        }
        let claims = self.figures.iter().flat_map(|figure| figure.claims.iter().map(move |claim| (figure.id, claim)));
        let lines = claims.map(|(id, claim)| {
            let word = if claim.held { "held    " } else { "NOT HELD" };
            let why = if claim.why.is_empty() { String::new() } else { format!(". {}", claim.why) };
            format!("{word} {id}: {}: {}{why}", claim.what, claim.seen)
        });
        format!("{table}\n{}\n", lines.collect::<Vec<_>>().join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small part of the evaluation, small.
    fn small(only: &[&str]) -> Evaluation {
        let options = EvaluationOptions {
            scale: 256,
            only: only.iter().map(|name| (*name).to_owned()).collect(),
            seed: 1,
            jobs: 2,
            command: "a <test>".to_owned(),
        };
        evaluate(&options, &|_| {}).expect("nothing is violated")
    }

    #[test]
    fn a_small_evaluation_gives_a_page_and_a_document_with_every_figure_s_numbers() {
        let evaluation = small(&["figure-4", "figure-10"]);
        let page = evaluation.html();
        assert!(
            page.contains("id=\"figure-4\"") && page.contains("id=\"figure-10\"") && page.contains("a &lt;test&gt;")
        );
        assert!(
            !page.contains("NaN") && !page.contains("http://")
                || page.matches("http://").count() == page.matches("xmlns").count()
        );
        let document: serde_json::Value =
            serde_json::from_str(&evaluation.json().expect("it is written")).expect("it is JSON");
        assert_eq!(document["figures"][0]["rows"][0]["paper"], 176.0);
        let rows = evaluation.figures.iter().flat_map(|figure| &figure.rows);
        assert!(rows.clone().count() > 5 && evaluation.text().contains("offline copy"));
        let offline = evaluation.figures[0].rows[0].ours.expect("it was measured");
        assert!((100.0..300.0).contains(&offline), "{offline} s for the offline copy");
    }

    #[test]
    fn a_figure_that_the_paper_does_not_have_is_refused() {
        let options = EvaluationOptions {
            scale: 256,
            only: vec!["figure-99".to_owned()],
            seed: 1,
            jobs: 1,
            command: String::new(),
        };
        assert!(evaluate(&options, &|_| {}).is_err());
    }
}
