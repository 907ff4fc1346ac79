//! What a paper's evaluation gives: plots, comparisons with the paper's numbers, and shapes that held or not.
//!
//! Every result says how it came about (its [`Label`]) and what became of it (its [`Verdict`]). A result that differs
//! from the paper's is *explained* only by an experiment that was played in the same run and shows why. A reason that
//! nobody has tried leaves it *not held*.

use serde::Serialize;

/// A number holds within this part of the paper's.
const NEAR_PART: f64 = 0.25;
/// A percentage also within so many points.
const NEAR_POINTS: f64 = 5.0;

/// What came of an evaluation.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Evaluation {
    /// The paper.
    pub title: String,
    /// The page of the documentation that tells how it was repeated.
    pub page: String,
    /// How it was made.
    pub command: String,
    /// What was measured, on what.
    pub about: String,
    /// Where all randomness is from.
    pub seed: u64,
    /// Everything is so many times smaller than the paper's.
    pub scale: u64,
    /// The figures and tables, in the paper's order.
    pub figures: Vec<Figure>,
}

impl Evaluation {
    /// Every result's judgement, with its figure and what it is of.
    pub fn judged(&self) -> impl Iterator<Item = (&'static str, &str, &Judgement)> {
        self.figures.iter().flat_map(|figure| {
            let rows = figure.rows.iter().map(|row| (figure.id, row.what.as_str(), &row.judgement));
            rows.chain(figure.claims.iter().map(|claim| (figure.id, claim.what.as_str(), &claim.judgement)))
        })
    }

    /// How many results have this verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.judged().filter(|(.., judgement)| judgement.verdict == Some(verdict)).count()
    }
}

/// A figure or a table of the paper, repeated.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Its name, as `--only` takes it.
    pub id: &'static str,
    /// The paper's name of it and what it shows.
    pub title: &'static str,
    /// How it was repeated, and where what was given to the models is from.
    pub about: String,
    /// Whose numbers stand beside ours.
    pub reference: &'static str,
    /// The plots.
    pub plots: Vec<Plot>,
    /// The paper's numbers beside ours.
    pub rows: Vec<Row>,
    /// What the paper says must come out.
    pub claims: Vec<Claim>,
    /// What its results are, unless they say otherwise.
    #[serde(skip)]
    label: Label,
}

impl Figure {
    /// An empty one, whose results are predicted.
    pub(crate) fn new(id: &'static str, title: &'static str, about: impl Into<String>) -> Self {
        let (plots, rows, claims) = (Vec::new(), Vec::new(), Vec::new());
        Self { id, title, about: about.into(), reference: "paper", plots, rows, claims, label: Label::Predicted }
    }

    /// The same, where the numbers of `reference` stand in place of the paper's.
    pub(crate) fn against(self, reference: &'static str) -> Self {
        Self { reference, ..self }
    }

    /// The same, whose results hang on something that the paper does not state.
    pub(crate) fn assumed(self) -> Self {
        Self { label: Label::Assumed, ..self }
    }

    /// Sets a number of the paper's beside ours, which is to be near it.
    pub(crate) fn row(&mut self, what: impl Into<String>, unit: &'static str, paper: f64, ours: f64) -> &mut Judgement {
        let is_near_in_points = unit == "%" && (ours - paper).abs() <= NEAR_POINTS;
        let held = is_near_in_points || (ours / paper - 1.0).abs() <= NEAR_PART;
        self.row_if(what, unit, paper, ours, held)
    }

    /// Sets a number beside ours; whether that holds is decided by whoever calls this.
    pub(crate) fn row_if(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        paper: f64,
        ours: f64,
        held: bool,
    ) -> &mut Judgement {
        let judgement = Judgement::new(self.label, held);
        let (paper, ours) = (Some(paper), ours.is_finite().then_some(ours));
        self.add(Row { what: what.into(), unit, paper, paper_words: String::new(), ours, judgement })
    }

    /// Sets a number beside ours of which nothing is expected.
    pub(crate) fn beside(&mut self, what: impl Into<String>, unit: &'static str, other: f64, ours: f64) {
        self.row(what, unit, other, ours).verdict = None;
    }

    /// Sets what the paper says in words beside our number.
    pub(crate) fn words(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        paper: &str,
        ours: f64,
        held: bool,
    ) -> &mut Judgement {
        let judgement = Judgement::new(self.label, held);
        let ours = ours.is_finite().then_some(ours);
        self.add(Row { what: what.into(), unit, paper: None, paper_words: paper.to_owned(), ours, judgement })
    }

    /// The same of which nothing is expected.
    pub(crate) fn words_beside(&mut self, what: impl Into<String>, unit: &'static str, paper: &str, ours: f64) {
        self.words(what, unit, paper, ours, false).verdict = None;
    }

    fn add(&mut self, row: Row) -> &mut Judgement {
        self.rows.push(row);
        &mut self.rows.last_mut().expect("one was pushed").judgement
    }

    /// Notes whether a shape came out, and why it may not have.
    pub(crate) fn claim(
        &mut self,
        what: impl Into<String>,
        held: bool,
        seen: impl Into<String>,
        why: &str,
    ) -> &mut Judgement {
        let mut judgement = Judgement::new(self.label, held);
        if !held {
            judgement.why = why.to_owned();
        }
        self.claims.push(Claim { what: what.into(), held, seen: seen.into(), judgement });
        &mut self.claims.last_mut().expect("one was pushed").judgement
    }
}

/// How a result of ours came about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Label {
    /// A model was given this very number of the paper's.
    Fitted,
    /// It follows from the engine and from models that were fitted to something else.
    #[default]
    Predicted,
    /// It hangs on a figure that the paper does not state, and that was chosen.
    Assumed,
}

impl Label {
    /// As a page shows it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Fitted => "fitted",
            Self::Predicted => "predicted",
            Self::Assumed => "assumed",
        }
    }
}

/// What became of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is as in the paper.
    Held,
    /// It is not, and an experiment of the same run shows why.
    Explained,
    /// It is not.
    NotHeld,
}

impl Verdict {
    /// As a page shows it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Explained => "explained",
            Self::NotHeld => "not held",
        }
    }
}

/// How a result came about, and what became of it.
#[derive(Clone, Debug, Serialize)]
pub struct Judgement {
    /// How it came about.
    pub label: Label,
    /// What became of it; nothing where nothing is expected.
    pub verdict: Option<Verdict>,
    /// Why it did not hold, as far as that is understood.
    pub why: String,
    /// What was played to show that.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub experiment: String,
}

/// Something that was played to show why a result differs from the paper's.
pub(crate) struct Experiment {
    /// What was done otherwise, and what came out.
    pub(crate) seen: String,
    /// Whether that shows it.
    pub(crate) shows: bool,
}

impl Judgement {
    fn new(label: Label, held: bool) -> Self {
        let verdict = Some(if held { Verdict::Held } else { Verdict::NotHeld });
        Self { label, verdict, why: String::new(), experiment: String::new() }
    }

    /// A model was given this very number.
    pub(crate) fn fitted(&mut self) -> &mut Self {
        self.label = Label::Fitted;
        self
    }

    /// It hangs on something that the paper does not state.
    pub(crate) fn assumed(&mut self) -> &mut Self {
        self.label = Label::Assumed;
        self
    }

    /// What did not hold is explained if `experiment` shows why.
    pub(crate) fn explain(&mut self, why: &str, experiment: &Experiment) {
        if self.verdict == Some(Verdict::NotHeld) {
            self.why = why.to_owned();
            self.experiment.clone_from(&experiment.seen);
            if experiment.shows {
                self.verdict = Some(Verdict::Explained);
            }
        }
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

impl Plot {
    /// The same points over what `base` gives for each series and point, without marks.
    pub(crate) fn over(&self, title: &str, unit: &str, base: impl Fn(&Series, [f64; 2]) -> f64) -> Self {
        let mut plot = Self { title: title.to_owned(), y: Axis::linear(unit), marks: Vec::new(), ..self.clone() };
        for (series, own) in plot.series.iter_mut().zip(&self.series) {
            series.points.iter_mut().for_each(|point| point[1] /= base(own, *point));
        }
        plot
    }
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
    pub(crate) fn linear(label: impl Into<String>) -> Self {
        Self { label: label.into(), log: false, ticks: Vec::new() }
    }

    /// A logarithmic axis with labels at `ticks`.
    pub(crate) fn log(label: impl Into<String>, ticks: &[f64]) -> Self {
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
    /// What is to be thought of it.
    #[serde(flatten)]
    pub judgement: Judgement,
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
    /// What is to be thought of it.
    #[serde(flatten)]
    pub judgement: Judgement,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure() -> Figure {
        Figure::new("figure-0", "a figure", "about it")
    }

    #[test]
    fn a_number_holds_near_the_paper_s_and_a_percentage_within_some_points() {
        let mut figure = figure();
        for (unit, paper, ours, held) in
            [("s", 100.0, 124.0, true), ("s", 100.0, 126.0, false), ("%", 4.0, 8.9, true), ("s", 1.0, f64::NAN, false)]
        {
            let verdict = figure.row("a number", unit, paper, ours).verdict;
            assert_eq!(verdict, Some(if held { Verdict::Held } else { Verdict::NotHeld }), "{ours} for {paper}{unit}");
        }
    }

    #[test]
    fn only_an_experiment_that_shows_why_explains() {
        let mut figure = figure().assumed();
        let experiment = |shows| Experiment { seen: "without it: 3".to_owned(), shows };
        figure.claim("it grows", false, "it shrinks", "a guess").explain("known", &experiment(false));
        figure.claim("it grows", false, "it shrinks", "a guess").explain("known", &experiment(true));
        figure.claim("it grows", true, "it grows", "a guess").explain("known", &experiment(true));
        let judgements = figure.claims.iter().map(|claim| claim.judgement.verdict.expect("one is expected").word());
        assert_eq!(judgements.collect::<Vec<_>>(), ["not held", "explained", "held"]);
        assert_eq!((figure.claims[2].judgement.why.as_str(), figure.claims[2].judgement.label.word()), ("", "assumed"));
        let evaluation = Evaluation { figures: vec![figure], ..Evaluation::default() };
        assert_eq!((evaluation.count(Verdict::NotHeld), evaluation.count(Verdict::Explained)), (1, 1));
    }
}
