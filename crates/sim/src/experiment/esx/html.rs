//! The report: one page without anything from elsewhere.

use std::fmt::Write as _;

use super::Evaluation;
use super::figure::{Claim, Figure, Row};
use super::svg::{draw, escaped, short};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;color:#1c2430;max-width:1420px;margin:0 auto;padding:1.5rem}\
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.2rem;margin:2.4rem 0 .4rem;border-top:1px solid #d5dae0;padding-top:1.2rem}\
p{max-width:75ch;margin:.4rem 0}code{background:#f1f3f6;padding:.1em .35em;border-radius:3px}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem;margin:.8rem 0}\
.plots svg{width:100%;max-width:820px;height:auto;border:1px solid #e3e6ea;border-radius:4px}\
table{border-collapse:collapse;margin:.6rem 0;font-size:14px}th,td{padding:.25rem .7rem;border-bottom:1px solid #e3e6ea;\
text-align:right;vertical-align:top}th:first-child,td:first-child{text-align:left}td.t{text-align:left}th{background:#f6f8fa}\
.held{color:#1d7a3e;font-weight:600}.not{color:#b3361b;font-weight:600}.small{color:#556;font-size:13px}\
@media(max-width:600px){.plots{grid-template-columns:1fr}}";

/// The page.
pub(super) fn page(evaluation: &Evaluation) -> String {
    let claims: Vec<&Claim> = evaluation.figures.iter().flat_map(|figure| &figure.claims).collect();
    let held = claims.iter().filter(|claim| claim.held).count();
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>Live storage migration, repeated</title><style>{STYLE}</style></head><body>\
         <h1>“The Design and Evolution of Live Storage Migration in VMware ESX”, repeated</h1>\
         <p>{} Of {} expected shapes {held} held.</p>\
         <p>Made by <code>{}</code>.</p>\
         <p class=\"small\"><code>docs/paper-esx.md</code> tells what was done how, and why some numbers differ.</p>",
        escaped(&evaluation.about),
        claims.len(),
        escaped(&evaluation.command)
    );
    out.push_str(
        "<h2>Paper, ours, deviation</h2><table><tr><th>what</th><th>paper</th><th>ours</th><th>deviation</th></tr>",
    );
    for figure in &evaluation.figures {
        let _ = write!(out, "<tr><th colspan=\"4\"><a href=\"#{}\">{}</a></th></tr>", figure.id, escaped(figure.title));
        figure.rows.iter().for_each(|row| write_row(&mut out, row));
    }
    out.push_str("</table>");
    evaluation.figures.iter().for_each(|figure| write_figure(&mut out, figure));
    out.push_str("</body></html>\n");
    out
}

fn write_row(out: &mut String, row: &Row) {
    let _ = write!(
        out,
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
        escaped(&row.what),
        escaped(&paper_text(row)),
        escaped(&ours_text(row)),
        row.deviation().map_or_else(String::new, |part| format!("{:+.1} %", part * 100.0))
    );
}

/// The paper's number with its unit.
pub(super) fn paper_text(row: &Row) -> String {
    row.paper.map_or_else(|| row.paper_words.clone(), |paper| with_unit(paper, row.unit))
}

/// Our number with its unit.
pub(super) fn ours_text(row: &Row) -> String {
    row.ours.map_or_else(|| "–".to_owned(), |ours| with_unit(ours, row.unit))
}

fn with_unit(value: f64, unit: &str) -> String {
    format!("{} {unit}", short(value)).trim_end().to_owned()
}

fn write_figure(out: &mut String, figure: &Figure) {
    let _ = write!(
        out,
        "<h2 id=\"{}\">{}</h2><p>{}</p><div class=\"plots\">",
        figure.id,
        escaped(figure.title),
        escaped(&figure.about)
    );
    figure.plots.iter().for_each(|plot| out.push_str(&draw(plot)));
    out.push_str("</div>");
    if figure.claims.is_empty() {
        return;
    }
    out.push_str("<table><tr><th>expected</th><th></th><th>seen</th></tr>");
    for claim in &figure.claims {
        let (class, word) = if claim.held { ("held", "held") } else { ("not", "not held") };
        let why = if claim.why.is_empty() { String::new() } else { format!(". {}", claim.why) };
        let _ = write!(
            out,
            "<tr><td>{}</td><td class=\"{class}\">{word}</td><td class=\"t\">{}{}</td></tr>",
            escaped(&claim.what),
            escaped(&claim.seen),
            escaped(&why)
        );
    }
    out.push_str("</table>");
}
