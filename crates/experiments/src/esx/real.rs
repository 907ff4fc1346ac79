//! The page of moves that were made on real files. `cargo xtask paper-esx-real` measures. This module makes the figures
//! of it, with the same plots and the paper's numbers beside them.
//!
//! Nothing of the simulator is in those numbers. The paper's are of disks of 38 GB, so only what does not depend on the
//! size is compared. That is growth from the lightest load to the heaviest, parts, and whether something converged.

use std::collections::BTreeMap;

use block::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::{PAPER, paper};
use crate::figure::{Axis, Evaluation, Figure, Mark, Plot, Series};

/// What was measured.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RealRuns {
    command: String,
    kernel: String,
    cores: usize,
    /// The volume.
    bytes: u64,
    offline_seconds: Vec<f64>,
    moves: Vec<RealMove>,
}

/// One move.
#[derive(Clone, Debug, Deserialize)]
struct RealMove {
    guest: Loader,
    strategy: String,
    outstanding: u32,
    bytes: u64,
    seconds: f64,
    downtime_seconds: f64,
    iops_before: f64,
    iops_during: f64,
    /// Why the guest stayed where it was.
    refusal: Option<String>,
    /// What the guest had made different again at the end of each pass.
    dirty_after_passes: Vec<u64>,
}

/// Who asked the requests.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Loader {
    /// A load on the export itself.
    Export,
    /// A guest under QEMU.
    Qemu,
}

/// The paper's growth of time from 2 to 32 outstanding.
const GROWTHS: [(&str, f64); 4] = [
    ("mirror", paper::GROWTH_MIRROR),
    ("mirror-paper", paper::GROWTH_MIRROR),
    ("dbt", paper::GROWTH_DBT),
    ("incremental-dbt", paper::GROWTH_INCREMENTAL),
];
/// Its growth of time beyond the disk's.
const BEYOND_SIZES: [(&str, f64); 4] = [
    ("mirror", paper::BEYOND_SIZE.mirror),
    ("mirror-paper", paper::BEYOND_SIZE.mirror),
    ("dbt", paper::BEYOND_SIZE.dbt),
    ("incremental-dbt", paper::BEYOND_SIZE.incremental),
];
/// What its guest loses.
const PENALTIES: [(&str, f64); 3] =
    [("mirror", paper::PENALTY_MIRROR), ("mirror-paper", paper::PENALTY_MIRROR), ("dbt", paper::PENALTY_DBT)];

/// A number of a move.
type Value = fn(&RealMove) -> f64;

impl RealMove {
    fn penalty(&self) -> f64 {
        (1.0 - self.iops_during / self.iops_before.max(1.0)).max(0.0)
    }

    /// Seconds for which the guest might as well not have run.
    fn cost_seconds(&self) -> f64 {
        self.seconds * self.penalty()
    }
}

impl RealRuns {
    /// Reads what was measured.
    ///
    /// # Errors
    /// It is not such a document.
    pub(super) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("what was measured: {error}")))
    }

    /// The figures.
    pub(super) fn evaluation(&self) -> Evaluation {
        let mut figures = Vec::new();
        if self.has(Loader::Export) {
            figures.extend([self.times(), self.downtimes(), self.penalties(), self.costs(), self.passes()]);
        }
        if self.sizes().len() > 1 {
            figures.push(self.over_sizes());
        }
        if self.has(Loader::Qemu) {
            figures.push(self.in_a_guest());
        }
        let about = format!(
            "The daemon, its command line and its strategies on real files of {} MiB past the page cache, Linux {}, {} cores. \
             Medians of {} runs. Broken lines and diamonds are the paper's numbers; those that hang on a size of 38 GB are \
             left out.",
            self.bytes >> 20,
            self.kernel,
            self.cores,
            self.offline_seconds.len()
        );
        Evaluation {
            title: PAPER.title.to_owned(),
            page: PAPER.page.to_owned(),
            command: self.command.clone(),
            about,
            figures,
            ..Evaluation::default()
        }
    }

    fn has(&self, guest: Loader) -> bool {
        self.moves.iter().any(|made| made.guest == guest)
    }

    /// In the order in which they were measured.
    fn strategies(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for made in &self.moves {
            if !names.contains(&made.strategy.as_str()) {
                names.push(&made.strategy);
            }
        }
        names
    }

    fn loads(&self, guest: Loader) -> Vec<u32> {
        let chosen = self.moves.iter().filter(|made| made.guest == guest && made.bytes == self.bytes);
        let loads: BTreeMap<u32, ()> = chosen.map(|made| (made.outstanding, ())).collect();
        loads.into_keys().collect()
    }

    fn sizes(&self) -> Vec<u64> {
        let chosen = self.moves.iter().filter(|made| made.guest == Loader::Export);
        let sizes: BTreeMap<u64, ()> = chosen.map(|made| (made.bytes, ())).collect();
        sizes.into_keys().collect()
    }

    /// The median over the moves that succeeded; not a number if none did.
    fn under_load(&self, guest: Loader, strategy: &str, load: u32, value: Value) -> f64 {
        median(self.at(guest, strategy, load).filter(|made| made.refusal.is_none()).map(value).collect())
    }

    fn plot(&self, guest: Loader, title: &str, unit: &str, value: Value) -> Plot {
        let loads = self.loads(guest);
        let ticks: Vec<f64> = loads.iter().map(|load| f64::from(*load)).collect();
        let series = self.strategies().into_iter().enumerate().map(|(colour, strategy)| {
            let point = |load: &u32| [f64::from(*load), self.under_load(guest, strategy, *load, value)];
            Series { name: strategy.to_owned(), colour, points: loads.iter().map(point).collect() }
        });
        let series = series.collect();
        let x = Axis::log("requests outstanding", &ticks);
        Plot { title: title.to_owned(), x, y: Axis::linear(unit), bars: false, series, marks: Vec::new() }
    }

    /// How much `value` is at the heaviest load, of what it is at the lightest.
    fn growth(&self, strategy: &str, value: Value) -> f64 {
        let loads = self.loads(Loader::Export);
        let at =
            |load: Option<&u32>| load.map_or(f64::NAN, |load| self.under_load(Loader::Export, strategy, *load, value));
        at(loads.last()) / at(loads.first())
    }

    /// Which moves did not come to an end, and why the first of them did not.
    fn tell_failures(&self, figure: &mut Figure, guest: Loader) {
        for strategy in self.strategies() {
            for load in self.loads(guest) {
                let made: Vec<&RealMove> = self.at(guest, strategy, load).collect();
                let failed: Vec<&str> = made.iter().filter_map(|made| made.refusal.as_deref()).collect();
                let Some(why) = failed.first() else { continue };
                let what = format!("{strategy} with {load} outstanding, of {} moves: not converged", made.len());
                let paper = if load == 32 { "DBT converges with a downtime of 28 s" } else { "it converges" };
                figure.words_beside(what, "", paper, failed.len() as f64);
                figure.about.push_str(&format!(" {strategy} with {load} outstanding: {why}."));
            }
        }
    }

    fn at<'a>(&'a self, guest: Loader, strategy: &'a str, load: u32) -> impl Iterator<Item = &'a RealMove> {
        self.moves.iter().filter(move |made| {
            made.guest == guest && made.bytes == self.bytes && made.strategy == strategy && made.outstanding == load
        })
    }

    fn times(&self) -> Figure {
        let mut figure = Figure::new(
            "real-time",
            "Figure 4: migration time over outstanding requests",
            "Iometer's OLTP on the export itself: 8 KiB, 30 % writes, as many outstanding as the plot says.",
        );
        let mut plot = self.plot(Loader::Export, "Migration time", "seconds", |made| made.seconds);
        let offline = median(self.offline_seconds.clone());
        plot.marks.push(Mark { label: "offline copy (qemu-img)".into(), colour: 5, x: None, y: offline });
        figure.plots.push(plot);
        for (strategy, growth) in self.known(&GROWTHS) {
            let ours = self.growth(strategy, |made| made.seconds);
            figure.beside(format!("growth of time, lightest to heaviest load: {strategy}"), "x", growth, ours);
        }
        self.tell_failures(&mut figure, Loader::Export);
        let loads = self.loads(Loader::Export);
        for (load, paper) in loads.first().zip(loads.last()).map_or_else(Vec::new, |(first, last)| {
            vec![(*first, paper::MIRROR_LONGER[0].1), (*last, paper::MIRROR_LONGER[1].1)]
        }) {
            let ours = self.under_load(Loader::Export, "mirror", load, |made| made.seconds) / offline - 1.0;
            let what = format!("mirror, longer than offline, {load} outstanding");
            figure.beside(what, "%", paper * 100.0, ours * 100.0);
        }
        figure
    }

    fn known<'a>(&self, numbers: &'a [(&'a str, f64)]) -> impl Iterator<Item = (&'a str, f64)> {
        let strategies: Vec<String> = self.strategies().into_iter().map(str::to_owned).collect();
        numbers.iter().copied().filter(move |(name, _)| strategies.iter().any(|strategy| strategy == name))
    }

    fn downtimes(&self) -> Figure {
        let mut figure = Figure::new(
            "real-downtime",
            "Figure 6: downtime over outstanding requests",
            "The longest that a request waited around the switchover, as the report tells it.",
        );
        let mut plot = self.plot(Loader::Export, "Downtime", "seconds", |made| made.downtime_seconds);
        plot.y = Axis::log("seconds", &[0.0001, 0.001, 0.01, 0.1, 1.0, 10.0]);
        let label = "paper: mirroring stays below 0.5 s".into();
        plot.marks.push(Mark { label, colour: 5, x: None, y: paper::MIRROR_DOWNTIME });
        figure.plots.push(plot);
        for strategy in self.strategies() {
            let made = self.moves.iter().filter(|made| made.refusal.is_none() && made.strategy == strategy);
            let longest = made.map(|made| made.downtime_seconds).fold(0.0, f64::max);
            figure.words_beside(
                format!("longest downtime of all moves: {strategy}"),
                "s",
                paper_downtime(strategy),
                longest,
            );
            if strategy == "mirror" {
                figure.claim(
                    "the mirror's downtime is below 0.5 s in every move",
                    longest < paper::MIRROR_DOWNTIME,
                    format!("{:.1} ms at most", longest * 1e3),
                    "A request in flight took that long.",
                );
            }
        }
        figure
    }

    fn penalties(&self) -> Figure {
        let mut figure = Figure::new(
            "real-penalty",
            "Figure 8: the guest's IO penalty over outstanding requests",
            "By which part the guest has fewer requests a second while its disk moves than in the two seconds before.",
        );
        figure.plots.push(self.plot(Loader::Export, "Penalty", "%", |made| made.penalty() * 100.0));
        for (strategy, paper) in self.known(&PENALTIES) {
            let loads = self.loads(Loader::Export);
            let each = loads.iter().map(|load| self.under_load(Loader::Export, strategy, *load, RealMove::penalty));
            let ours = median(each.collect());
            figure.beside(format!("penalty, median over the loads: {strategy}"), "%", paper * 100.0, ours * 100.0);
        }
        figure
    }

    fn costs(&self) -> Figure {
        let mut figure = Figure::new(
            "real-cost",
            "Figure 9: aggregate cost over outstanding requests",
            "Time multiplied by the penalty: seconds for which the guest might as well not have run.",
        );
        figure.plots.push(self.plot(Loader::Export, "Aggregate cost", "seconds", RealMove::cost_seconds));
        let heaviest = self.loads(Loader::Export).last().copied().unwrap_or_default();
        let cost = |strategy| self.under_load(Loader::Export, strategy, heaviest, RealMove::cost_seconds);
        let what = format!("mirror's cost with {heaviest} outstanding, of that of DBT");
        figure.words_beside(what, "x", "about half", cost("mirror") / cost("dbt"));
        figure
    }

    fn passes(&self) -> Figure {
        let mut figure = Figure::new(
            "real-passes",
            "Figure 3: what is dirty after each pass",
            "Uniform OLTP with the heaviest load at which passes converged; the paper's figure has a Zipf load.",
        );
        for strategy in ["dbt", "incremental-dbt"] {
            let loads = self.loads(Loader::Export);
            let has_converged =
                |load: &&u32| self.at(Loader::Export, strategy, **load).all(|made| made.refusal.is_none());
            let Some(load) = loads.iter().rev().find(has_converged) else { continue };
            let Some(made) = self.at(Loader::Export, strategy, *load).next() else { continue };
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let dirty = made.dirty_after_passes.iter().enumerate();
            let points = dirty.map(|(pass, dirty)| [(pass + 1) as f64, mib(*dirty)]).collect();
            let series = vec![Series { name: format!("{strategy}, {load} outstanding"), colour: 1, points }];
            figure.plots.push(Plot {
                title: format!("Dirty after each pass: {strategy}"),
                x: Axis::linear("pass"),
                y: Axis::linear("MiB"),
                bars: true,
                series,
                marks: Vec::new(),
            });
        }
        figure
    }

    fn over_sizes(&self) -> Figure {
        let load = super::grid::LOAD_OF_SIZES as u32;
        let mut figure = Figure::new(
            "real-sizes",
            "Figures 5 and 7: time and downtime over the size of the disk",
            format!("With {load} requests outstanding at the export."),
        );
        let sizes = self.sizes();
        let value = |strategy: &str, size: u64, value: Value| {
            let which = |made: &RealMove| {
                made.guest == Loader::Export
                    && made.strategy == strategy
                    && made.bytes == size
                    && made.outstanding == load
            };
            let made = self.moves.iter().filter(|made| made.refusal.is_none() && which(made));
            median(made.map(value).collect())
        };
        let titles: [(&str, Value); 2] =
            [("Migration time", |made| made.seconds), ("Downtime", |made| made.downtime_seconds)];
        for (title, get) in titles {
            let ticks: Vec<f64> = sizes.iter().map(|size| (size >> 20) as f64).collect();
            let series = self.strategies().into_iter().enumerate().map(|(colour, strategy)| {
                let points = sizes.iter().map(|size| [(size >> 20) as f64, value(strategy, *size, get)]).collect();
                Series { name: strategy.to_owned(), colour, points }
            });
            figure.plots.push(Plot {
                title: title.to_owned(),
                x: Axis { label: "MiB".into(), log: false, ticks },
                y: Axis::linear("seconds"),
                bars: false,
                series: series.collect(),
                marks: Vec::new(),
            });
        }
        if let (Some(least), Some(most)) = (sizes.first(), sizes.last()) {
            for (strategy, paper) in self.known(&BEYOND_SIZES) {
                let seconds = |size| value(strategy, size, |made| made.seconds);
                let ours = seconds(*most) / seconds(*least) / (*most as f64 / *least as f64) - 1.0;
                let what = format!("growth of time beyond that of the disk: {strategy}");
                figure.beside(what, "%", paper * 100.0, ours * 100.0);
            }
        }
        figure
    }

    fn in_a_guest(&self) -> Figure {
        let mut figure = Figure::new(
            "real-guest",
            "A guest under QEMU",
            "The adopted disk of an emulated Linux guest whose load checks what it reads. QEMU's NBD client never has more \
             than 16 requests outstanding, so the paper's 32 are not here.",
        );
        figure.plots.push(self.plot(Loader::Qemu, "Migration time", "seconds", |made| made.seconds));
        let mut downtime = self.plot(Loader::Qemu, "Downtime", "seconds", |made| made.downtime_seconds);
        downtime.y = Axis::log("seconds", &[0.0001, 0.001, 0.01, 0.1, 1.0, 10.0]);
        figure.plots.push(downtime);
        figure.plots.push(self.plot(Loader::Qemu, "Penalty", "%", |made| made.penalty() * 100.0));
        self.tell_failures(&mut figure, Loader::Qemu);
        figure
    }
}

fn paper_downtime(strategy: &str) -> &'static str {
    match strategy {
        "dbt" | "incremental-dbt" => "2 to 28 s of 38 GB",
        "snapshot" => "grows with load and size",
        _ => "below 0.5 s",
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> RealRuns {
        let mut moves = Vec::new();
        for (strategy, slower) in [("mirror", 1.1), ("dbt", 3.0)] {
            for (outstanding, times) in [(2, 1.0), (32, slower)] {
                for run in [0.9, 1.0, 1.4] {
                    moves.push(serde_json::json!({
                        "guest": "export", "strategy": strategy, "outstanding": outstanding, "bytes": 1 << 30,
                        "seconds": 4.0 * times * run, "downtime_seconds": 0.002, "iops_before": 1000.0,
                        "iops_during": 700.0, "worst_seconds": 0.1, "refusal": null, "dirty_after_passes": [10 << 20, 0],
                    }));
                }
            }
        }
        let document = serde_json::json!({
            "command": "x", "kernel": "6", "cores": 2, "bytes": 1 << 30, "offline_seconds": [4.0], "moves": moves,
        });
        RealRuns::parse(&document.to_string()).expect("it is what is written")
    }

    #[test]
    fn the_paper_s_growth_stands_beside_the_median_s() {
        let evaluation = measured().evaluation();
        let rows: Vec<_> = evaluation.figures.iter().flat_map(|figure| &figure.rows).collect();
        let growth = |what: &str| {
            rows.iter().find(|row| row.what.contains("growth") && row.what.ends_with(what)).and_then(|row| row.ours)
        };
        assert!(growth(": dbt").is_some_and(|growth| (growth - 3.0).abs() < 1e-9), "{:?}", growth(": dbt"));
        assert!(growth(": mirror").is_some_and(|growth| (growth - 1.1).abs() < 1e-9));
        assert!(crate::report::html(&evaluation).contains("real-time"));
    }

    #[test]
    fn a_move_that_did_not_converge_is_told_and_not_averaged() {
        let mut real = measured();
        let last = real.moves.last_mut().expect("there are some");
        (last.refusal, last.seconds) = (Some("what is left gets no smaller".to_owned()), 1e6);
        let evaluation = real.evaluation();
        let rows: Vec<_> = evaluation.figures.iter().flat_map(|figure| &figure.rows).collect();
        assert!(rows.iter().any(|row| row.what.contains("of 3 moves: not converged")));
        let growth = rows.iter().find(|row| row.what.contains("growth") && row.what.ends_with(": dbt"));
        assert!(growth.and_then(|row| row.ours).is_some_and(|growth| growth < 10.0));
    }
}
