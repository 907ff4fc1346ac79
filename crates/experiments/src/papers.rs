//! The papers that are repeated, by name.

use block::Result;

use crate::esx;
use crate::figure::Evaluation;
use crate::firepan;
use crate::iofollow;
use crate::pmigrate;
use crate::runs::{EvaluationOptions, Progress};
use crate::waio;

/// A paper.
pub struct Paper {
    /// What `cargo xtask paper` calls it.
    pub name: &'static str,
    /// What is repeated.
    pub about: &'static str,
    /// Sizes are so many times smaller unless it is said otherwise.
    pub scale: u64,
    /// The names of its figures.
    pub figures: fn() -> Vec<&'static str>,
    /// Carries out its evaluation.
    pub evaluate: fn(&EvaluationOptions, Progress<'_>) -> Result<Evaluation>,
    /// Makes the same page of what was measured on real files, where that is done.
    pub evaluate_real: Option<fn(&str) -> Result<Evaluation>>,
}

/// All of them.
pub const PAPERS: &[Paper] = &[
    Paper {
        name: "esx",
        about: "the evaluation of live storage migration in VMware ESX",
        scale: 4,
        figures: esx::figure_names,
        evaluate: esx::evaluate,
        evaluate_real: Some(esx::evaluate_real),
    },
    Paper {
        name: "pmigrate",
        about: "the evaluation of parallel live migration of virtual machines",
        scale: 4,
        figures: pmigrate::figure_names,
        evaluate: pmigrate::evaluate,
        evaluate_real: None,
    },
    Paper {
        name: "waio",
        about: "the evaluation of outsourcing popular data (dissertation, chapter 3)",
        scale: 4,
        figures: waio::figure_names,
        evaluate: waio::evaluate,
        evaluate_real: None,
    },
    Paper {
        name: "iofollow",
        about: "the evaluation of a copy that follows the guest (dissertation, chapter 5), and of both together",
        scale: 4,
        figures: iofollow::figure_names,
        evaluate: iofollow::evaluate,
        evaluate_real: None,
    },
    Paper {
        name: "firepan",
        about: "the evaluation of a flash cache that moves with its VM",
        scale: firepan::SCALE,
        figures: firepan::figure_names,
        evaluate: firepan::evaluate,
        evaluate_real: None,
    },
];

/// The paper called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static Paper> {
    PAPERS.iter().find(|paper| paper.name == name)
}
