//! A plot as SVG: axes, lines or bars, and the paper's marks.

use std::fmt::Write as _;

use crate::figure::{Axis, Mark, Plot};

const WIDTH: f64 = 680.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 46.0;
/// A line of the legend.
const LEGEND_LINE: f64 = 17.0;
const LEGEND_COLUMNS: usize = 2;

/// Colours that are told apart in print and by most eyes.
const COLOURS: [&str; 8] = ["#0b6fb8", "#c8472f", "#d99a1c", "#3c8d5a", "#7b4fa3", "#5b6770", "#14a3a8", "#a05a2c"];

/// The colour with this number.
pub(super) const fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

/// From values to places on the page.
struct Frame {
    log: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Frame {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>, from: f64, to: f64, with_zero: bool) -> Self {
        let values = values.filter(|value| value.is_finite() && (!axis.log || *value > 0.0));
        let (mut low, mut high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (f64::min(low, value), f64::max(high, value))
        });
        if !low.is_finite() {
            (low, high) = (if axis.log { 1.0 } else { 0.0 }, 10.0);
        }
        if axis.log {
            (low, high) = (low / 1.12, high * 1.12);
        } else if with_zero {
            (low, high) = (low.min(0.0), high * 1.06);
        }
        if high <= low {
            high = low + 1.0;
        }
        Self { log: axis.log, low, high, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let place = |value: f64| if self.log { value.max(self.low).ln() } else { value };
        let part = (place(value) - place(self.low)) / (place(self.high) - place(self.low));
        self.from + part * (self.to - self.from)
    }

    fn ticks(&self, axis: &Axis) -> Vec<f64> {
        if !axis.ticks.is_empty() {
            return axis.ticks.iter().copied().filter(|tick| (self.low..=self.high).contains(tick)).collect();
        }
        if self.log {
            let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let ticks = powers.map(|power| 10_f64.powi(power));
            return ticks.filter(|tick| (self.low..=self.high).contains(tick)).collect();
        }
        let rough = (self.high - self.low) / 6.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (first..).map(|number| number as f64 * step).take_while(|tick| *tick <= self.high).collect()
    }
}

/// A number as an axis shows it.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size == 0.0 => "0".to_owned(),
        _ if size >= 10_000.0 => format!("{:.0}k", value / 1000.0),
        _ if size >= 100.0 => format!("{value:.0}"),
        _ if size >= 10.0 => trimmed(format!("{value:.1}")),
        _ if size >= 0.1 => trimmed(format!("{value:.2}")),
        _ => trimmed(format!("{value:.4}")),
    }
}

fn trimmed(text: String) -> String {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// `text` with what HTML takes for itself written otherwise.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Draws `plot`.
pub(super) fn draw(plot: &Plot) -> String {
    let points = || plot.series.iter().flat_map(|series| series.points.iter());
    let across = points().map(|point| point[0]).chain(plot.marks.iter().filter_map(|mark| mark.x));
    let up = points().map(|point| point[1]).chain(plot.marks.iter().map(|mark| mark.y));
    let mut x = Frame::new(&plot.x, across, LEFT, WIDTH - RIGHT, false);
    let y = Frame::new(&plot.y, up, HEIGHT - BOTTOM, TOP, true);
    if plot.bars {
        (x.low, x.high) = (x.low - 0.5, x.high + 0.5);
    }
    let legend = plot.series.len().div_ceil(LEGEND_COLUMNS) as f64 * LEGEND_LINE;
    let mut out = String::new();
    let total = HEIGHT + legend + 6.0;
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {total}\" role=\"img\" aria-label=\"{0}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\"><rect width=\"{WIDTH}\" height=\"{total}\" \
         fill=\"#fff\"/><text x=\"{LEFT}\" y=\"18\" font-size=\"13\" font-weight=\"600\">{0}</text>",
        escaped(&plot.title)
    );
    axes(&mut out, plot, &x, &y);
    if plot.bars {
        bars(&mut out, plot, &x, &y)
    } else {
        lines(&mut out, plot, &x, &y)
    }
    plot.marks.iter().for_each(|mark| draw_mark(&mut out, mark, &x, &y));
    for (index, series) in plot.series.iter().enumerate() {
        let left = LEFT + (index % LEGEND_COLUMNS) as f64 * (WIDTH - LEFT - RIGHT) / LEGEND_COLUMNS as f64;
        let down = HEIGHT + 8.0 + (index / LEGEND_COLUMNS) as f64 * LEGEND_LINE;
        let _ = write!(
            out,
            "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"14\" height=\"8\" fill=\"{}\"/><text x=\"{:.1}\" y=\"{down:.1}\">{}</text>",
            down - 8.0,
            colour(series.colour),
            left + 20.0,
            escaped(&series.name)
        );
    }
    out.push_str("</svg>");
    out
}

fn axes(out: &mut String, plot: &Plot, x: &Frame, y: &Frame) {
    for tick in y.ticks(&plot.y) {
        let at = y.at(tick);
        let _ = write!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e3e6ea\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#444\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            short(tick)
        );
    }
    let bottom = HEIGHT - BOTTOM;
    for tick in x.ticks(&plot.x) {
        let at = x.at(tick);
        let _ = write!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{:.1}\" stroke=\"#888\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#444\">{}</text>",
            bottom + 4.0,
            bottom + 17.0,
            short(tick)
        );
    }
    let (middle, centre) = ((LEFT + WIDTH - RIGHT) / 2.0, (TOP + bottom) / 2.0);
    let _ = write!(
        out,
        "<path d=\"M{LEFT} {TOP}V{bottom}H{:.1}\" fill=\"none\" stroke=\"#888\"/>\
         <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
         <text x=\"16\" y=\"{centre:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {centre:.1})\">{}</text>",
        WIDTH - RIGHT,
        bottom + 34.0,
        escaped(&plot.x.label),
        escaped(&plot.y.label)
    );
}

fn lines(out: &mut String, plot: &Plot, x: &Frame, y: &Frame) {
    for series in &plot.series {
        let many = series.points.len() > 40;
        let places = series.points.iter().filter(|point| point[1].is_finite());
        let places: Vec<String> = places.map(|point| format!("{:.1},{:.1}", x.at(point[0]), y.at(point[1]))).collect();
        let width = if many { 1.2 } else { 2.2 };
        let _ = write!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>",
            places.join(" "),
            colour(series.colour)
        );
        for place in places.iter().filter(|_| !many) {
            let (across, down) = place.split_once(',').unwrap_or((place, place));
            let _ = write!(out, "<circle cx=\"{across}\" cy=\"{down}\" r=\"3.4\" fill=\"{}\"/>", colour(series.colour));
        }
    }
}

fn bars(out: &mut String, plot: &Plot, x: &Frame, y: &Frame) {
    let wide = (x.at(1.0) - x.at(0.0)).abs() * 0.8 / plot.series.len().max(1) as f64;
    let count = plot.series.len() as f64;
    for (index, series) in plot.series.iter().enumerate() {
        for point in series.points.iter().filter(|point| point[1].is_finite()) {
            let left = x.at(point[0]) + (index as f64 - count / 2.0) * wide;
            let top = y.at(point[1]);
            let _ = write!(
                out,
                "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
                (wide - 1.0).max(0.5),
                (y.at(0.0).min(HEIGHT - BOTTOM) - top).max(0.0),
                colour(series.colour)
            );
        }
    }
}

/// A diamond where the paper has a number, or a broken line at its height.
fn draw_mark(out: &mut String, mark: &Mark, x: &Frame, y: &Frame) {
    let (down, ink) = (y.at(mark.y), colour(mark.colour));
    let label = escaped(&mark.label);
    match mark.x {
        Some(value) => {
            let across = x.at(value);
            let anchor = if across > WIDTH * 0.7 { "end" } else { "start" };
            let side = if across > WIDTH * 0.7 { -9.0 } else { 9.0 };
            let _ = write!(
                out,
                "<path d=\"M{across:.1} {:.1}l6 6l-6 6l-6 -6z\" fill=\"#fff\" stroke=\"{ink}\" stroke-width=\"2\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" fill=\"{ink}\" font-size=\"11\" stroke=\"#fff\" \
                 stroke-width=\"3\" paint-order=\"stroke\">{label}</text>",
                down - 6.0,
                across + side,
                down - 5.0
            );
        }
        None => {
            let _ = write!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{down:.1}\" y2=\"{down:.1}\" stroke=\"{ink}\" \
                 stroke-width=\"1.4\" stroke-dasharray=\"6 4\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" \
                 fill=\"{ink}\" font-size=\"11\" stroke=\"#fff\" stroke-width=\"3\" paint-order=\"stroke\">{label}</text>",
                WIDTH - RIGHT,
                WIDTH - RIGHT - 4.0,
                down - 4.0
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Series;

    #[test]
    fn a_plot_has_every_point_and_every_mark_within_its_frame() {
        let series = Series { name: "a < b".into(), colour: 0, points: vec![[2.0, 100.0], [32.0, 400.0]] };
        let mark = Mark { label: "paper".into(), colour: 0, x: Some(32.0), y: 500.0 };
        let plot = Plot {
            title: "t".into(),
            x: Axis::log("x", &[2.0, 32.0]),
            y: Axis::linear("y"),
            bars: false,
            series: vec![series],
            marks: vec![mark],
        };
        let svg = draw(&plot);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("a &lt; b") && svg.contains(">paper</text>"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 0.0042, 0.5, 12.5, 250.0, 32_000.0].map(short);
        assert_eq!(texts, ["0", "0.0042", "0.5", "12.5", "250", "32k"]);
    }
}
