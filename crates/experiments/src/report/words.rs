//! The report for a terminal.

use super::svg::short;
use crate::figure::{Evaluation, Judgement, Row, Verdict};
use crate::table::Table;

/// The paper's numbers beside ours, every shape that must come out, and how many results held.
#[must_use]
pub fn text(evaluation: &Evaluation) -> String {
    let mut table = Table::new(&["figure", "what", "paper", "ours", "deviation", "label", "verdict"]);
    for figure in &evaluation.figures {
        for row in &figure.rows {
            let (label, verdict) = (row.judgement.label.word(), verdict_text(&row.judgement));
            let cells = [figure.id.to_owned(), row.what.clone(), paper_text(row), ours_text(row), deviation_text(row)];
            table.row(cells.into_iter().chain([label.to_owned(), verdict.to_owned()]).collect());
        }
    }
    let mut out = format!("{table}\n");
    for figure in &evaluation.figures {
        for row in figure.rows.iter().filter(|row| !row.judgement.why.is_empty()) {
            let seen = format!("{} for {}", ours_text(row), paper_text(row));
            out += &line(figure.id, &row.what, &seen, &row.judgement);
        }
        figure.claims.iter().for_each(|claim| out += &line(figure.id, &claim.what, &claim.seen, &claim.judgement));
    }
    let [held, explained, not_held] =
        [Verdict::Held, Verdict::Explained, Verdict::NotHeld].map(|verdict| evaluation.count(verdict));
    out + &format!("{held} results held, {explained} are explained, {not_held} did not hold\n")
}

fn line(id: &str, what: &str, seen: &str, judgement: &Judgement) -> String {
    let word = match judgement.verdict {
        Some(Verdict::NotHeld) => "NOT HELD",
        Some(verdict) => verdict.word(),
        None => "",
    };
    format!("{word:<9} {id}: {what} ({}): {seen}{}\n", judgement.label.word(), reason(judgement))
}

/// Why a result did not hold, and what was played to show it.
pub(super) fn reason(judgement: &Judgement) -> String {
    let why = if judgement.why.is_empty() { String::new() } else { format!(". {}", judgement.why) };
    if judgement.experiment.is_empty() { why } else { format!("{why} Tried: {}.", judgement.experiment) }
}

/// What became of a result; a dash where nothing is expected.
pub(super) fn verdict_text(judgement: &Judgement) -> &'static str {
    judgement.verdict.map_or("–", Verdict::word)
}

/// The paper's number with its unit.
pub(super) fn paper_text(row: &Row) -> String {
    row.paper.map_or_else(|| row.paper_words.clone(), |paper| with_unit(paper, row.unit))
}

/// Our number with its unit.
pub(super) fn ours_text(row: &Row) -> String {
    row.ours.map_or_else(|| "–".to_owned(), |ours| with_unit(ours, row.unit))
}

/// By how much ours is more than the paper's.
pub(super) fn deviation_text(row: &Row) -> String {
    row.deviation().map_or_else(String::new, |part| format!("{:+.1} %", part * 100.0))
}

fn with_unit(value: f64, unit: &str) -> String {
    format!("{} {unit}", short(value)).trim_end().to_owned()
}
