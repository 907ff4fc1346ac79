//! Figures 5.3 and 5.4: one guest, chunks of 1 MiB, two requests for one copy.

use crate::figure::{Axis, Figure, Mark, Plot, Series};

use super::paper::{BOTH, OTHERWISE, TRACES, Trace, WHY, normalised, otherwise, replayed, with_otherwise};
use super::replayer::{CopyOrder, Replayed};
use super::{Played, Runs};
use crate::interference::load::Load;
use crate::waio::Setup;

pub(super) const ID: &str = "figure-5.3";
const ORDERS: [CopyOrder; 4] = [CopyOrder::None, CopyOrder::Sequential, CopyOrder::ColdFirst, CopyOrder::Follow];

pub(super) fn scenes(setup: &Setup) -> Vec<Played> {
    let loads = TRACES.iter().map(|trace| trace.load).chain(setup.recordings.iter().copied());
    let of = |load| {
        let closed = ORDERS.map(|order| replayed(load, order));
        let open = ORDERS.map(|order| Replayed { is_open_loop: true, ..replayed(load, order) });
        closed.into_iter().chain(open).chain(with_otherwise(replayed(load, CopyOrder::Follow), OTHERWISE))
    };
    loads.flat_map(of).map(Played::Replayer).collect()
}

/// How many requests a guest has outstanding for its response alone to be the paper's, and how many copies for Financial2's.
fn outstanding(runs: &Runs, trace: &Trace) -> [f64; 2] {
    let first = &TRACES[0];
    let copies = first.copy[0] / runs.replayed(replayed(first.load, CopyOrder::Sequential)).copy.mean_ms();
    [trace.alone / runs.replayed(replayed(trace.load, CopyOrder::None)).guest.mean_ms(), copies]
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figures 5.3 and 5.4: response times of one guest and of its migration",
        "The paper's replayer (algorithm 3) in a closed loop on the ST31000524AS by its data sheet, 15 GB at its outside, 1 \
         MiB, 2:1, the loads synthetic, their addresses laid over the whole image. A queue that is never empty is served in \
         turn, so a response is the number outstanding times what one takes alone, which was played. The number is not \
         stated. It is fitted: of the guest by its response without a migration, of the copies by Financial2's under the \
         standard order.",
    )
    .assumed();
    let mut points = [[const { Vec::new() }; 4], [const { Vec::new() }; 4]];
    let mut marks = [Vec::new(), Vec::new()];
    for (at, trace) in TRACES.iter().enumerate() {
        add(&mut figure, runs, trace);
        let [guests, copies] = outstanding(runs, trace);
        for (series, order) in ORDERS.into_iter().enumerate() {
            let seen = runs.replayed(replayed(trace.load, order));
            points[0][series].push([at as f64, seen.guest.mean_ms() * guests]);
            if order != CopyOrder::None {
                points[1][series].push([at as f64, seen.copy.mean_ms() * copies]);
            }
        }
        for (which, papers) in [trace.guest, trace.copy].into_iter().enumerate() {
            let of = papers.into_iter().zip(BOTH).zip([1, 3]);
            marks[which].extend(of.map(|((y, order), colour)| Mark {
                label: format!("paper, {}: {y:.0} ms", order.name()),
                colour,
                x: Some(at as f64),
                y,
            }));
        }
    }
    let titles = ["Guest: response (Fin2, WebSearch1 to 3; synthetic)", "Migration: response of a chunk"];
    for ((title, points), marks) in titles.into_iter().zip(points).zip(marks) {
        let series = points.into_iter().enumerate().map(|(colour, points)| Series {
            name: ORDERS[colour].name().to_owned(),
            colour,
            points,
        });
        let series = series.filter(|series| !series.points.is_empty()).collect();
        figure.plots.push(Plot {
            title: title.to_owned(),
            x: Axis::linear("trace"),
            y: Axis::linear("ms"),
            bars: true,
            series,
            marks,
        });
    }
    for load in setup.recordings.iter().copied() {
        let left = normalised(runs, replayed(load, CopyOrder::Follow));
        let is_part_of = |trace: &&Trace| load.name().starts_with("websearch1") && trace.load == Load::WebSearch1;
        let paper = TRACES.iter().find(is_part_of);
        for (which, who) in ["guest", "migration"].into_iter().enumerate() {
            let row = format!("{}: response that IOFollow leaves the {who}", load.name());
            let here = replayed(load, CopyOrder::Follow);
            let seen = otherwise(runs, (here, OTHERWISE), which, (0.0, left[which])).seen;
            figure.words_beside(format!("{row} ({seen})"), "%", "", left[which] * 100.0);
            if let Some(trace) = paper {
                let [standard, follow] = [trace.guest, trace.copy][which];
                let why = otherwise(runs, (here, OTHERWISE), which, (follow / standard, left[which]));
                figure.row(row, "%", follow / standard * 100.0, left[which] * 100.0).explain(WHY, &why);
            }
        }
    }
    figure
}

fn add(figure: &mut Figure, runs: &Runs, trace: &Trace) {
    let name = trace.load.name();
    let of = |order| runs.replayed(replayed(trace.load, order));
    let [guests, copies] = outstanding(runs, trace);
    figure
        .row(
            format!("{name}: guest alone ({guests:.1} outstanding)"),
            "ms",
            trace.alone,
            of(CopyOrder::None).guest.mean_ms() * guests,
        )
        .fitted();
    let [standard, follow] = BOTH.map(of);
    let here = replayed(trace.load, CopyOrder::Follow);
    let left = normalised(runs, here);
    let papers = [trace.guest[1] / trace.guest[0], trace.copy[1] / trace.copy[0]];
    figure.row(format!("{name}: guest beside the standard"), "ms", trace.guest[0], standard.guest.mean_ms() * guests);
    figure
        .row(format!("{name}: guest beside IOFollow"), "ms", trace.guest[1], follow.guest.mean_ms() * guests)
        .explain(WHY, &otherwise(runs, (here, OTHERWISE), 0, (papers[0], left[0])));
    let row = figure.row(format!("{name}: migration, standard"), "ms", trace.copy[0], standard.copy.mean_ms() * copies);
    if name == TRACES[0].load.name() {
        row.fitted();
    }
    figure
        .row(format!("{name}: migration, IOFollow"), "ms", trace.copy[1], follow.copy.mean_ms() * copies)
        .explain(WHY, &otherwise(runs, (here, OTHERWISE), 1, (papers[1], left[1])));
    for (which, who) in ["guest", "migration"].into_iter().enumerate() {
        let row = format!("{name}: response that IOFollow leaves the {who}");
        let judgement = figure.row(row, "%", papers[which] * 100.0, left[which] * 100.0);
        judgement.explain(WHY, &otherwise(runs, (here, OTHERWISE), which, (papers[which], left[which])));
    }
    let cold = of(CopyOrder::ColdFirst);
    figure.claim(
        format!("{name}: cold first disturbs the guest more than IOFollow"),
        cold.guest.mean_ms() > follow.guest.mean_ms(),
        format!("{:.1} ms with one outstanding, {:.1} with IOFollow", cold.guest.mean_ms(), follow.guest.mean_ms()),
        "",
    );
    let open = |order| runs.replayed(Replayed { is_open_loop: true, ..replayed(trace.load, order) });
    let [standard, follow] = BOTH.map(open);
    figure.words_beside(format!("{name}, open loop: guest alone"), "ms", "", open(CopyOrder::None).guest.mean_ms());
    figure.words_beside(format!("{name}, open loop: guest beside the standard"), "ms", "", standard.guest.mean_ms());
    figure.words_beside(format!("{name}, open loop: guest beside IOFollow"), "ms", "", follow.guest.mean_ms());
}
