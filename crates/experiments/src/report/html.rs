//! The report: one page without anything from elsewhere.

use std::fmt::Write as _;

use super::comparison;
use super::svg::{draw, escaped};
use super::words::{deviation_text, ours_text, paper_text, reason, verdict_text};
use crate::figure::{Evaluation, Figure, Judgement, Row, Verdict};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;color:#1c2430;max-width:1420px;margin:0 auto;padding:1.5rem}\
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.2rem;margin:2.4rem 0 .4rem;border-top:1px solid #d5dae0;padding-top:1.2rem}\
p{max-width:75ch;margin:.4rem 0}code{background:#f1f3f6;padding:.1em .35em;border-radius:3px}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem;margin:.8rem 0}\
.plots svg{width:100%;max-width:820px;height:auto;border:1px solid #e3e6ea;border-radius:4px}\
table{border-collapse:collapse;margin:.6rem 0;font-size:14px}th,td{padding:.25rem .7rem;border-bottom:1px solid #e3e6ea;\
text-align:right;vertical-align:top}th:first-child,td:first-child{text-align:left}td:first-child{min-width:20rem}td.t,th:last-child{text-align:left}th{background:#f6f8fa}\
details{margin:.6rem 0}summary{cursor:pointer;color:#556}\
.held{color:#1d7a3e;font-weight:600}.not{color:#b3361b;font-weight:600}.explained{color:#8a6100;font-weight:600}.small{color:#556;font-size:13px}\
@media(max-width:600px){.plots{grid-template-columns:1fr}}";

/// The page: of each figure the plots, and below them its few results. Numbers of which nothing is expected are folded.
#[must_use]
pub fn page(evaluation: &Evaluation) -> String {
    let [held, explained, not_held] =
        [Verdict::Held, Verdict::Explained, Verdict::NotHeld].map(|verdict| evaluation.count(verdict));
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{title}, repeated</title><style>{STYLE}</style></head><body><h1>“{title}”, repeated</h1>\
         <p>{} Of the results {held} held, {explained} are explained by an experiment of the same run, and {not_held} did \
         not hold.</p><p>Made by <code>{}</code>.</p>\
         <p class=\"small\">A result is <em>fitted</em> if a model was given this very number of the paper's, <em>assumed</em> \
         if it hangs on something that the paper does not state, and <em>predicted</em> otherwise. <code>{}</code> tells \
         what was done how, and why some numbers differ.</p>",
        escaped(&evaluation.about),
        escaped(&evaluation.command),
        escaped(&evaluation.page),
        title = escaped(&evaluation.title),
    );
    let open: Vec<_> =
        evaluation.judged().filter(|(.., judgement)| judgement.verdict == Some(Verdict::NotHeld)).collect();
    if !open.is_empty() {
        out.push_str("<h2>Not held</h2><ul>");
        for (id, what, _) in open {
            let _ = write!(out, "<li><a href=\"#{id}\">{id}</a>: {}</li>", escaped(what));
        }
        out.push_str("</ul>");
    }
    evaluation.figures.iter().for_each(|figure| write_figure(&mut out, figure));
    out.push_str("</body></html>\n");
    out
}

fn write_figure(out: &mut String, figure: &Figure) {
    let _ = write!(out, "<h2 id=\"{}\">{}</h2><div class=\"plots\">", figure.id, escaped(figure.title),);
    figure.plots.iter().for_each(|plot| out.push_str(&draw(plot)));
    if figure.plots.iter().all(|plot| plot.marks.is_empty()) {
        out.push_str(&comparison::draw(&figure.rows, figure.reference).unwrap_or_default());
    }
    let _ = write!(out, "</div><p>{}</p>", escaped(&figure.about));
    let (expected, beside): (Vec<_>, Vec<_>) = figure.rows.iter().partition(|row| row.judgement.verdict.is_some());
    write_rows(out, figure, &expected);
    write_claims(out, figure);
    if !beside.is_empty() {
        let _ = write!(out, "<details><summary>{} numbers of which nothing is expected</summary>", beside.len());
        write_rows(out, figure, &beside);
        out.push_str("</details>");
    }
}

fn write_rows(out: &mut String, figure: &Figure, rows: &[&Row]) {
    if rows.is_empty() {
        return;
    }
    let _ = write!(
        out,
        "<table><tr><th>what</th><th>{}</th><th>ours</th><th>deviation</th><th></th><th></th><th></th></tr>",
        escaped(figure.reference)
    );
    rows.iter().for_each(|row| write_row(out, row));
    out.push_str("</table>");
}

fn write_claims(out: &mut String, figure: &Figure) {
    if figure.claims.is_empty() {
        return;
    }
    out.push_str("<table><tr><th>expected</th><th></th><th></th><th>seen</th></tr>");
    for claim in &figure.claims {
        let _ = write!(
            out,
            "<tr><td>{}</td>{}<td class=\"t\">{}{}</td></tr>",
            escaped(&claim.what),
            judgement_cells(&claim.judgement),
            escaped(&claim.seen),
            escaped(&reason(&claim.judgement))
        );
    }
    out.push_str("</table>");
}

fn write_row(out: &mut String, row: &Row) {
    let _ = write!(
        out,
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td>{}<td class=\"t\">{}</td></tr>",
        escaped(&row.what),
        escaped(&paper_text(row)),
        escaped(&ours_text(row)),
        deviation_text(row),
        judgement_cells(&row.judgement),
        escaped(reason(&row.judgement).trim_start_matches(". "))
    );
}

/// The label and the verdict.
fn judgement_cells(judgement: &Judgement) -> String {
    let class = match judgement.verdict {
        Some(Verdict::Held) => "held",
        Some(Verdict::Explained) => "explained",
        Some(Verdict::NotHeld) => "not",
        None => "small",
    };
    format!("<td class=\"small\">{}</td><td class=\"{class}\">{}</td>", judgement.label.word(), verdict_text(judgement))
}
