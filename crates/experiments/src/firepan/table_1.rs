//! Table 1 and figure 7: what is read for the VM after its move, with a cache of 10 GB.

use crate::figure::{Experiment, Figure};

use super::paper::{SIZE, TABLE_1, TABLE_2, TABLE_3, mean_after, megabytes, over_time, ways, with};
use super::scene::{Control, MOVE, Scene, Seen, Way};
use super::{Runs, Setup};

pub(super) const ID: &str = "table-1";

/// Cachemior whose warmer asks its host for itself.
fn apart(setup: &Setup) -> Scene {
    with(Scene::of_paper(Way::Cachemior, SIZE, setup.scale), Control::WarmerApart)
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    ways(setup, SIZE).into_iter().chain([apart(setup)]).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Table 1 and figure 7: MB/s that are read for the VM after its move, 10 GB",
        "Storage and flash together, without the copy of Firepan and FirepanIF. The paper leaves out that copy alone. Cachemior's warmer reads \
         the storage for the VM as well, so the reading that stands has it in: only so the paper's mean of 13,672 reads a second (56.0 MB/s) and \
         its 52.69 MB/s in the first 400 s fit each other. MB are 10^6 bytes.",
    );
    let seen = ways(setup, SIZE).map(|scene| runs.get(&scene));
    for (at, papers) in TABLE_1.iter().enumerate() {
        let from = MOVE + 100 * at;
        for (way, (paper, seen)) in Way::PAPERS.iter().zip(papers.iter().zip(seen)) {
            figure.row(format!("{}: {from} s", way.name()), "MB/s", *paper, megabytes(seen, from, from + 100));
        }
    }
    for (span, papers) in [(400, TABLE_2[1]), (800, TABLE_3[1])] {
        for (way, (paper, seen)) in Way::PAPERS.iter().zip(papers.iter().zip(seen)) {
            let what = format!("{}: mean of {span} s", way.name());
            figure.row(what, "MB/s", *paper, megabytes(seen, MOVE, MOVE + span));
        }
    }
    claims(&mut figure, seen, runs.get(&apart(setup)));
    let named: Vec<(&str, &Seen)> = Way::PAPERS.iter().zip(seen).map(|(way, seen)| (way.name(), seen)).collect();
    figure.plots.push(over_time(("Read for the VM", "MB/s"), (1800, 20), &named, megabytes));
    figure
}

const WHY_CACHEMIOR: &str = "In the paper storage gives Cachemior's VM and warmer together a third more than a VM without any cache. Here the warmer takes \
     its requests from its VM's part, because the paper says that the two compete for it. The paper's 57.5 MB/s lie between that and a warmer that \
     asks for itself.";

fn claims(figure: &mut Figure, seen: [&Seen; 4], apart: &Seen) {
    let [none, cachemior, firepan, filtered] = seen.map(|seen| megabytes(seen, MOVE, MOVE + 800));
    let [guest, warmer] = seen[1].megabytes(MOVE, MOVE + 800);
    let [none_iops, cachemior_iops] = [seen[0], seen[1]].map(mean_after);
    let other = megabytes(apart, MOVE, MOVE + 800);
    figure.words_beside("cachemior, if the warmer asks its host for itself: mean of 800 s", "MB/s", "", other);
    let experiment = |shows| Experiment {
        seen: format!("if the warmer asks its host for itself, cachemior's MB/s: {other:.2}"),
        shows,
    };
    let wins = figure.claim(
        "cachemior wins against none in this table, and loses in the mean of the VM's reads",
        cachemior > none && cachemior_iops < none_iops,
        format!(
            "{cachemior:.2} against {none:.2} MB/s over 800 s, of which the VM has {guest:.2} and the warmer {warmer:.2}; \
             {cachemior_iops:.0} against {none_iops:.0} reads/s over 1,600 s"
        ),
        "",
    );
    wins.explain(WHY_CACHEMIOR, &experiment(other > none));
    let order = figure.claim(
        "firepan-if is ahead of firepan, that of cachemior, and that of none over 800 s",
        filtered > firepan && firepan > cachemior && cachemior > none,
        format!("{none:.2}, {cachemior:.2}, {firepan:.2} and {filtered:.2} MB/s"),
        "",
    );
    order.explain(WHY_CACHEMIOR, &experiment(filtered > firepan && other > none));
}
