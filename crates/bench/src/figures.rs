//! Figures with their spread, and the rows that say whether they are what was promised.

use serde_json::{Value, json};

/// Several measurements of one figure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    /// Takes those of `other` as well.
    pub(crate) fn extend(&mut self, other: &Self) {
        self.0.extend(&other.0);
    }

    /// By how much each is more than its peer's of the same run.
    pub(crate) fn more_than(&self, peer: &Self) -> Self {
        Self(self.0.iter().zip(&peer.0).map(|(own, peer)| own - peer).collect())
    }

    /// The same figures, each made into another.
    pub(crate) fn map(&self, figure: impl Fn(f64) -> f64) -> Self {
        Self(self.0.iter().map(|sample| figure(*sample)).collect())
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    pub(crate) fn median(&self) -> f64 {
        let sorted = self.sorted();
        match sorted.len() {
            0 => f64::NAN,
            count if count % 2 == 1 => sorted[count / 2],
            count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
        }
    }

    pub(crate) fn least(&self) -> f64 {
        self.sorted().first().copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn most(&self) -> f64 {
        self.sorted().last().copied().unwrap_or(f64::NAN)
    }

    /// The median of the ratios of pairs that were measured one after the other. What the machine did to both at that
    /// time cancels out.
    pub(crate) fn paired_ratio(&self, peer: &Self) -> f64 {
        let ratios = self.0.iter().zip(&peer.0).map(|(ours, theirs)| ours / theirs);
        Self(ratios.collect()).median()
    }

    pub(crate) fn json(&self) -> Value {
        json!({ "median": self.median(), "least": self.least(), "most": self.most(), "samples": self.0 })
    }
}

/// What is to be reached.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// The figure itself is at most this.
    AtMost(f64),
    /// The figure itself is at least this.
    AtLeast(f64),
    /// The ratio to the peer is at most this.
    RatioAtMost(f64),
    /// The ratio to the peer is at least this.
    RatioAtLeast(f64),
    /// Reported for its own sake.
    None,
}

/// One line of the table.
pub(crate) struct Row {
    what: String,
    unit: &'static str,
    ours: Samples,
    peer: Option<(String, Samples)>,
    goal: Goal,
}

impl Row {
    pub(crate) fn new(what: impl Into<String>, unit: &'static str, ours: Samples, goal: Goal) -> Self {
        Self { what: what.into(), unit, ours, peer: None, goal }
    }

    pub(crate) fn against(mut self, name: &str, peer: Samples) -> Self {
        self.peer = Some((name.to_owned(), peer));
        self
    }

    fn ratio(&self) -> Option<f64> {
        self.peer.as_ref().map(|(_, peer)| self.ours.paired_ratio(peer))
    }

    fn is_reached(&self) -> Option<bool> {
        let figure = self.ours.median();
        match self.goal {
            Goal::AtMost(limit) => Some(figure <= limit),
            Goal::AtLeast(limit) => Some(figure >= limit),
            Goal::RatioAtMost(limit) => self.ratio().map(|ratio| ratio <= limit),
            Goal::RatioAtLeast(limit) => self.ratio().map(|ratio| ratio >= limit),
            Goal::None => None,
        }
    }

    fn goal_words(&self) -> String {
        match self.goal {
            Goal::AtMost(limit) => format!("<= {}", short(limit)),
            Goal::AtLeast(limit) => format!(">= {}", short(limit)),
            Goal::RatioAtMost(limit) => format!("<= {limit:.2} x"),
            Goal::RatioAtLeast(limit) => format!(">= {limit:.2} x"),
            Goal::None => String::new(),
        }
    }

    fn cells(&self) -> [String; 7] {
        let spread = |samples: &Samples| format!("{} .. {}", short(samples.least()), short(samples.most()));
        let (peer, peer_name) = match &self.peer {
            Some((name, samples)) => (short(samples.median()), name.clone()),
            None => (String::new(), String::new()),
        };
        [
            format!("{} [{}]", self.what, self.unit),
            format!("{} ({})", short(self.ours.median()), spread(&self.ours)),
            peer,
            peer_name,
            self.ratio().map_or(String::new(), |ratio| format!("{ratio:.2}")),
            self.goal_words(),
            self.is_reached().map_or(String::new(), |reached| if reached { "yes" } else { "NO" }.to_owned()),
        ]
    }

    pub(crate) fn print(&self) {
        let [what, figure, peer, peer_name, ratio, goal, reached] = self.cells();
        eprintln!("  {what}: {figure}; {peer_name} {peer} ratio {ratio} goal {goal} {reached}");
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "what": self.what,
            "unit": self.unit,
            "ours": self.ours.json(),
            "peer": self.peer.as_ref().map(|(name, samples)| json!({ "name": name, "figures": samples.json() })),
            "paired_ratio": self.ratio(),
            "goal": self.goal_words(),
            "reached": self.is_reached(),
        })
    }
}

pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// All rows as a Markdown table, so that it can go into the documentation as it is.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = String::new();
    let heads = ["what", "ours: median (spread)", "peer", "which", "ratio", "to reach", "reached"];
    let mut lines: Vec<[String; 7]> = vec![heads.map(str::to_owned)];
    lines.extend(rows.iter().map(Row::cells));
    let widths: Vec<usize> =
        (0..heads.len()).map(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0)).collect();
    for (number, line) in lines.iter().enumerate() {
        let cells: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width)).collect();
        table += &format!("| {} |\n", cells.join(" | "));
        if number == 0 {
            let rule: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
            table += &format!("| {} |\n", rule.join(" | "));
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(values: &[f64]) -> Samples {
        Samples(values.to_vec())
    }

    #[test]
    fn the_ratio_is_that_of_pairs_and_not_of_medians() {
        let ours = samples(&[10.0, 100.0, 30.0]);
        let peer = samples(&[10.0, 100.0, 10.0]);
        assert_eq!(ours.paired_ratio(&peer), 1.0);
        assert_eq!(samples(&[4.0, 1.0, 3.0, 2.0]).median(), 2.5);
    }

    #[test]
    fn a_goal_is_held_against_the_figure_or_the_ratio() {
        let row = Row::new("x", "ms", samples(&[3.0]), Goal::RatioAtMost(0.2)).against("peer", samples(&[20.0]));
        assert_eq!(row.is_reached(), Some(true));
        assert_eq!(Row::new("x", "ms", samples(&[3.0]), Goal::AtMost(2.0)).is_reached(), Some(false));
        assert_eq!(Row::new("x", "ms", samples(&[3.0]), Goal::None).is_reached(), None);
    }
}
