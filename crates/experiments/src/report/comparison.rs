//! The plot of a figure that is a table in the paper, or whose plots have none of the paper's numbers: every number of
//! ours over the paper's.

use std::fmt::Write as _;

use super::svg::{colour, escaped, short};
use crate::figure::Row;

const WIDTH: f64 = 820.0;
/// Where names end and the plot begins.
const LEFT: f64 = 430.0;
const RIGHT: f64 = 60.0;
const TOP: f64 = 30.0;
const LINE: f64 = 19.0;
/// The plot shows from a tenth of the paper's number to ten times that; what is beyond lies on its edge.
const DECADES: f64 = 1.0;

/// Draws `rows`: `reference`, the paper, is the broken line in the middle, ours are the points. Nothing without a number
/// of both.
pub(super) fn draw(rows: &[Row], reference: &str) -> Option<String> {
    let ratios = rows.iter().filter_map(|row| Some((row, 1.0 + row.deviation()?)));
    let ratios: Vec<(&Row, f64)> = ratios.filter(|(_, ratio)| *ratio > 0.0).collect();
    if ratios.is_empty() {
        return None;
    }
    let bottom = TOP + ratios.len() as f64 * LINE;
    let height = bottom + 30.0;
    let at = |ratio: f64| {
        let part = (ratio.log10() / DECADES).clamp(-1.0, 1.0);
        LEFT + (part + 1.0) / 2.0 * (WIDTH - LEFT - RIGHT)
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"ours over the reference\" font-family=\"system-ui, sans-serif\" font-size=\"12\">\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\
         <text x=\"14\" y=\"18\" font-size=\"13\" font-weight=\"600\">Ours over {}</text>",
        escaped(if reference == "paper" { "the paper's" } else { reference })
    );
    for ratio in [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0] {
        let (across, dashes) = (at(ratio), if ratio == 1.0 { " stroke-dasharray=\"6 4\"" } else { "" });
        let ink = if ratio == 1.0 { colour(5) } else { "#e3e6ea" };
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "<line x1=\"{across:.1}\" x2=\"{across:.1}\" y1=\"{TOP}\" y2=\"{bottom:.1}\" stroke=\"{ink}\"{dashes}/>\
             <text x=\"{across:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#444\">{}</text>",
            bottom + 16.0,
            if ratio == 1.0 { reference.to_owned() } else { format!("{} x", short(ratio)) }
        );
    }
    for (index, (row, ratio)) in ratios.iter().enumerate() {
        let (across, down) = (at(*ratio), TOP + (index as f64 + 0.5) * LINE);
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <line x1=\"{:.1}\" x2=\"{across:.1}\" y1=\"{down:.1}\" y2=\"{down:.1}\" stroke=\"{ink}\" stroke-width=\"2\"/>\
             <circle cx=\"{across:.1}\" cy=\"{down:.1}\" r=\"3.6\" fill=\"{ink}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#444\">{:.2} x</text>",
            LEFT - 10.0,
            down + 4.0,
            escaped(&row.what),
            at(1.0),
            WIDTH - RIGHT + 12.0,
            down + 4.0,
            ratio,
            ink = colour(0)
        );
    }
    out.push_str("</svg>");
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Figure;

    #[test]
    fn every_number_of_both_has_a_point_within_the_plot() {
        let mut figure = Figure::new("table-0", "a table", "about it");
        for ours in [1.0, 100.0, 1e6, f64::NAN] {
            figure.row("a < b", "s", 100.0, ours);
        }
        figure.words("in words", "s", "few", 3.0, true);
        let svg = draw(&figure.rows, "paper").expect("some have both");
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("a &lt; b") && !svg.contains("NaN") && svg.contains("cx=\"430.0\""), "{svg}");
        assert!(draw(&figure.rows[3..], "paper").is_none());
    }
}
