//! What an experiment of the evaluation gives: plots, comparisons with the paper's numbers, and shapes that held or not.

use serde::Serialize;

/// A figure or a table of the paper, repeated.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Its name, as `--only` takes it.
    pub id: &'static str,
    /// The paper's name of it and what it shows.
    pub title: &'static str,
    /// How it was repeated, and where what was given to the models is from.
    pub about: String,
    /// The plots.
    pub plots: Vec<Plot>,
    /// The paper's numbers beside ours.
    pub rows: Vec<Row>,
    /// What the paper says must come out.
    pub claims: Vec<Claim>,
}

impl Figure {
    /// An empty one.
    pub(super) fn new(id: &'static str, title: &'static str, about: impl Into<String>) -> Self {
        Self { id, title, about: about.into(), plots: Vec::new(), rows: Vec::new(), claims: Vec::new() }
    }

    /// Sets a number of the paper's beside ours.
    pub(super) fn row(&mut self, what: impl Into<String>, unit: &'static str, paper: f64, ours: f64) {
        let (paper, ours) = (Some(paper), ours.is_finite().then_some(ours));
        self.rows.push(Row { what: what.into(), unit, paper, paper_words: String::new(), ours });
    }

    /// Sets what the paper says in words beside our number.
    pub(super) fn words(&mut self, what: impl Into<String>, unit: &'static str, paper: &str, ours: f64) {
        let ours = ours.is_finite().then_some(ours);
        self.rows.push(Row { what: what.into(), unit, paper: None, paper_words: paper.to_owned(), ours });
    }

    /// Notes whether a shape came out.
    pub(super) fn claim(&mut self, what: impl Into<String>, held: bool, seen: impl Into<String>, why: &str) {
        let why = if held { String::new() } else { why.to_owned() };
        self.claims.push(Claim { what: what.into(), held, seen: seen.into(), why });
    }
}

/// A plot.
#[derive(Clone, Debug, Serialize)]
pub struct Plot {
    /// What is above it.
    pub title: String,
    /// Across.
    pub x: Axis,
    /// Up.
    pub y: Axis,
    /// Whether the series are bars side by side.
    pub bars: bool,
    /// Points to be joined; a bar each in a plot of bars.
    pub series: Vec<Series>,
    /// The paper's numbers.
    pub marks: Vec<Mark>,
}

/// An axis.
#[derive(Clone, Debug, Serialize)]
pub struct Axis {
    /// What it shows, with the unit.
    pub label: String,
    /// Whether it is logarithmic.
    pub log: bool,
    /// Where its labels are; round numbers where there are none.
    pub ticks: Vec<f64>,
}

impl Axis {
    /// A linear axis.
    pub(super) fn linear(label: impl Into<String>) -> Self {
        Self { label: label.into(), log: false, ticks: Vec::new() }
    }

    /// A logarithmic axis with labels at `ticks`.
    pub(super) fn log(label: impl Into<String>, ticks: &[f64]) -> Self {
        Self { label: label.into(), log: true, ticks: ticks.to_vec() }
    }
}

/// Points of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// What they are.
    pub name: String,
    /// Which colour: the same thing has the same one in every plot.
    pub colour: usize,
    /// Where they are.
    pub points: Vec<[f64; 2]>,
}

/// A number of the paper's in a plot.
#[derive(Clone, Debug, Serialize)]
pub struct Mark {
    /// What it is.
    pub label: String,
    /// Whose colour it has.
    pub colour: usize,
    /// Where it is across; `None` for a line over the whole plot.
    pub x: Option<f64>,
    /// Where it is up.
    pub y: f64,
}

/// A number of the paper's beside ours.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What it is.
    pub what: String,
    /// Its unit.
    pub unit: &'static str,
    /// The paper's.
    pub paper: Option<f64>,
    /// The same where the paper gives no number.
    pub paper_words: String,
    /// Ours; `None` if the run gave none.
    pub ours: Option<f64>,
}

impl Row {
    /// By which part ours is more than the paper's.
    #[must_use]
    pub fn deviation(&self) -> Option<f64> {
        Some(self.ours? / self.paper.filter(|paper| *paper != 0.0)? - 1.0)
    }
}

/// Something that must come out.
#[derive(Clone, Debug, Serialize)]
pub struct Claim {
    /// What.
    pub what: String,
    /// Whether it did.
    pub held: bool,
    /// What came out.
    pub seen: String,
    /// Why it did not, as far as that is understood.
    pub why: String,
}
