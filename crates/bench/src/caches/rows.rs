//! The tables: a row for each figure and a column for each way.

use super::figures::Figures;
use crate::figures::{Goal, Row, Samples};

/// What `hybrid` may lose after the switchover of what `firepan-if` loses.
const LOST_PART: f64 = 0.25;

/// Of the spans, the one over which it is compared.
const LOST_SPAN: usize = 1;

/// A figure: what it is, its unit, and how it follows from a move.
type Asked = (String, &'static str, Box<dyn Fn(&Figures) -> f64>);

fn asked(spans: &[f64]) -> Vec<Asked> {
    let one = |what: &str, unit, figure: fn(&Figures) -> f64| -> Asked { (what.to_owned(), unit, Box::new(figure)) };
    // The same figure over each of the spans.
    let each = |what: &str, unit: &'static str, figure: fn(&Figures) -> &[f64]| -> Vec<Asked> {
        let of = |(index, span): (usize, f64)| -> Asked {
            (format!("{what} over {span:.0} s"), unit, Box::new(move |figures| figure(figures)[index]))
        };
        spans.iter().copied().enumerate().map(of).collect()
    };
    let mut asked = vec![
        one("requests a second before the move", "IOPS", |figures| figures.plateau),
        one("of the reads before the move hit", "share", |figures| figures.hit_rate),
        one("from the order until the guest stops", "s", |figures| figures.before_stop),
        one("of that, the memory waits for the cache", "s", |figures| figures.wait),
        one("the guest stands still", "s", |figures| figures.stopped),
        one("after the switchover: until the transfer is over", "s", |figures| figures.transfer),
        one("until 0.95 of the requests before", "s", |figures| figures.recovery),
    ];
    asked.extend(each("requests, of those before,", "share", |figures| &figures.kept));
    asked.extend(each("seconds of the load that are lost", "s", |figures| &figures.lost));
    asked.push(one("the same, from the order until the guest stops", "s", |figures| figures.lost_before));
    asked.extend(each("read of storage and flash", "MB/s", |figures| &figures.read));
    asked.push(one("the same before the move", "MB/s", |figures| figures.read_before));
    asked
}

fn samples(measured: &[(String, Figures)], way: &str, figure: impl Fn(&Figures) -> f64) -> Samples {
    let mut samples = Samples::default();
    measured.iter().filter(|(of, _)| of == way).for_each(|(_, figures)| samples.push(figure(figures)));
    samples
}

/// What hybrid loses of what firepan-if loses, run by run.
fn parts(spans: &[f64], measured: &[(String, Figures)]) -> Option<Row> {
    let has = |way: &str| measured.iter().any(|(of, _)| of == way);
    let lost = |way: &str| samples(measured, way, |figures| figures.lost[LOST_SPAN]);
    (has("hybrid") && has("firepan-if")).then(|| {
        let what =
            format!("hybrid: seconds of the load that are lost over {:.0} s after the switchover", spans[LOST_SPAN]);
        Row::new(what, "s", lost("hybrid"), Goal::RatioAtMost(LOST_PART)).against("firepan-if", lost("firepan-if"))
    })
}

/// All rows, for the JSON.
pub(super) fn rows(ways: &[String], spans: &[f64], measured: &[(String, Figures)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for way in ways {
        for (what, unit, figure) in asked(spans) {
            let row = Row::new(format!("{way}: {what}"), unit, samples(measured, way, &figure), Goal::None);
            rows.push(match ways.first() {
                Some(first) if first != way => row.against(first, samples(measured, first, &figure)),
                _ => row,
            });
        }
    }
    rows.extend(parts(spans, measured));
    rows
}

/// A table in Markdown with a column for each way, and what hybrid loses.
pub(super) fn page(ways: &[String], spans: &[f64], measured: &[(String, Figures)]) -> String {
    let mut page = format!("| median (spread) | {} |\n|---|{}\n", ways.join(" | "), "---|".repeat(ways.len()));
    for (what, unit, figure) in asked(spans) {
        let cells: Vec<String> = ways.iter().map(|way| cell(&samples(measured, way, &figure))).collect();
        page += &format!("| {what} [{unit}] | {} |\n", cells.join(" | "));
    }
    if let Some(row) = parts(spans, measured) {
        page += &format!("\n{}", crate::figures::table(&[row]));
    }
    page
}

fn cell(samples: &Samples) -> String {
    let short = crate::figures::short;
    if samples.median().is_nan() {
        return "not seen".to_owned();
    }
    format!("{} ({} .. {})", short(samples.median()), short(samples.least()), short(samples.most()))
}
