//! What an evaluation is shown as: one page of HTML with plots, a document for programs, and words for a terminal.

mod comparison;
mod html;
mod svg;
mod words;

use block::{Error, ErrorKind, Result};

use crate::figure::Evaluation;

pub use html::page as html;
pub use words::text;

/// The report for programs.
///
/// # Errors
/// Never; kept for a format that might.
pub fn json(evaluation: &Evaluation) -> Result<String> {
    serde_json::to_string_pretty(evaluation).map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))
}
