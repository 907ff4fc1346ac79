//! Figure 6: how many reads a second the VM gets, before and after its move.

use crate::figure::Figure;

use super::paper::{COLD, COPY_SECONDS, SIZE, WARM, mean_after, otherwise, over_time, seconds_until, ways, with};
use super::scene::{ATTACH, Control, END, MOVE, Scene, Seen, Way};
use super::{Runs, Setup};

pub(super) const ID: &str = "figure-6";

/// A VM is warm when it reads so much of what it reads later.
const AS_WARM: f64 = 0.98;
const CONTROLS: [(Way, Control); 3] = [
    (Way::FirepanIf, Control::FreeCopies),
    (Way::Cachemior, Control::WarmerApart),
    (Way::None, Control::Outstanding128),
];

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    ways(setup, SIZE).into_iter().chain(controls(setup)).collect()
}

fn controls(setup: &Setup) -> [Scene; 3] {
    CONTROLS.map(|(way, control)| with(Scene::of_paper(way, SIZE, setup.scale), control))
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 6: reads a second of the VM that moves, with a cache of 10 GB",
        "Three numbers were given to the model: what a request to storage costs a host (8,000 reads a second without a cache), what a hit \
         costs (15,000 with a warm one), and what a copied block costs (30 s). The hit rate is the engine's LRU under the load of figure 5. \
         The paper's ratio is taken to be of all requests: a write never hits a read-only cache.",
    );
    let seen = ways(setup, SIZE).map(|scene| runs.get(&scene));
    let [free, apart, many] = controls(setup).map(|scene| runs.get(&scene));
    before(&mut figure, seen[0], many);
    without_and_cachemior(&mut figure, seen[0], (seen[1], apart));
    firepan(&mut figure, seen[2], seen[3], free);
    let named: Vec<(&str, &Seen)> = Way::PAPERS.iter().zip(seen).map(|(way, seen)| (way.name(), seen)).collect();
    figure.plots.push(over_time(("Reads a second of the VM", "reads/s"), (0, 20), &named, Seen::reads_a_second));
    figure
}

fn before(figure: &mut Figure, seen: &Seen, many: &Seen) {
    let plateau = seen.plateau();
    figure.row("without a cache", "reads/s", COLD, seen.reads_a_second(20, ATTACH)).fitted();
    figure.row("with a warm one (1,400 to 2,000 s)", "reads/s", WARM, plateau).fitted();
    let writes = seen.rate(1400, MOVE, |sample| sample.writes);
    let of_all = seen.hit_rate(1400, MOVE) * plateau / (plateau + writes);
    figure.row("hits of all requests, warm", "%", 60.0, of_all * 100.0);
    figure.words_beside("hits of the reads alone, warm", "%", "", seen.hit_rate(1400, MOVE) * 100.0);
    let [ours, other] = [seen, many].map(|seen| seconds_until(seen, ATTACH, AS_WARM * seen.plateau()));
    let experiment = otherwise("with 128 outstanding and 64 misses admitted at a time, s", (800.0, ours, other));
    figure.row("from the attachment until 98 % of that", "s", 800.0, ours).explain(WHY_WARM, &experiment);
    let words = "the engine with 128 outstanding, which admits 64 misses at a time: warm";
    figure.words_beside(words, "reads/s", "", many.plateau());
    figure.words_beside("the same: hits of the reads, warm", "%", "", many.hit_rate(1400, MOVE) * 100.0);
}

const WHY_WARM: &str = "How soon a cache is warm hangs on how many misses it admits. Here it admits all.";
const WHY_WARMER: &str = "The paper says that the VM and the warmer compete for what is allocated to the VM, and its numbers add up to more: 45.25 MB/s \
     in the first 100 s, a third more than the storage gives the VM alone. How its host shares between the two is not stated.";

fn without_and_cachemior(figure: &mut Figure, none: &Seen, (cachemior, apart): (&Seen, &Seen)) {
    figure
        .row("none: in the first 10 s at the target", "reads/s", COLD, none.reads_a_second(MOVE + 4, MOVE + 14))
        .fitted();
    let again = seconds_until(none, MOVE + 3, AS_WARM * none.plateau());
    figure.row("none: from the move until 98 % of the warm rate", "s", 800.0, again);
    let over = cachemior.over.unwrap_or(f64::NAN);
    let [ours, other] = [over, apart.over.unwrap_or(f64::NAN)].map(|over| over - MOVE as f64);
    let experiment = otherwise("if the warmer asks its host for itself, s", (360.0, ours, other));
    figure.row("cachemior: the warmer ends after", "s", 360.0, ours).explain(WHY_WARMER, &experiment);
    figure.words_beside("the same, if the warmer asks its host for itself", "s", "", other);
    figure.words_beside("the same: mean after the move", "reads/s", "", mean_after(apart));
    let [without, with] = [none, cachemior].map(mean_after);
    figure.row("none: mean after the move", "reads/s", 13_946.0, without);
    figure.row("cachemior: mean after the move", "reads/s", 13_672.0, with);
    figure.claim(
        "cachemior loses in the mean of what the VM reads after the move",
        with < without,
        format!("{with:.0} reads/s, {without:.0} without any transfer"),
        "The warmer ends sooner than the paper's, or takes less of the VM's part of the storage.",
    );
    let end = over.ceil() as usize + 1;
    let [warming, after] = [cachemior.reads_a_second(MOVE + 3, end - 1), cachemior.reads_a_second(end, END)];
    figure.claim(
        "cachemior: once the warmer has ended the VM reads as much as before the move",
        after >= 0.95 * cachemior.plateau(),
        format!("{after:.0} reads/s, {warming:.0} while it works, {:.0} before", cachemior.plateau()),
        "",
    );
}

fn firepan(figure: &mut Figure, firepan: &Seen, filtered: &Seen, free: &Seen) {
    figure.row("firepan: the VM stands still", "s", 33.0, firepan.resumed - firepan.held).fitted();
    figure.row("firepan-if: the VM stands still", "s", 3.0, filtered.resumed - filtered.held).fitted();
    let over = filtered.over.unwrap_or(f64::NAN);
    figure.row("firepan-if: the copy takes", "s", COPY_SECONDS[1], filtered.copy_seconds()).fitted();
    let [from, to] = [filtered.resumed.ceil() as usize + 1, (over.floor() as usize).max(MOVE + 6) - 1];
    let during = filtered.reads_a_second(from, to);
    let alone = free.reads_a_second(MOVE + 4, MOVE + 9);
    figure.row("firepan-if: while it copies", "reads/s", 6000.0, during);
    figure.claim(
        "firepan-if: the VM reads less during the copy than without a cache, because the copy asks of the same host",
        during < 0.95 * COLD && alone > 0.95 * COLD,
        format!("{during:.0} reads/s, {alone:.0} if copied blocks cost the hosts nothing"),
        "",
    );
    for (name, seen, from) in [("firepan", firepan, firepan.resumed), ("firepan-if", filtered, over)] {
        let from = from.ceil() as usize + 1;
        let after = seen.reads_a_second(from, from + 20);
        figure.claim(
            format!("{name}: after the copy the VM has its rate at once"),
            after >= 0.95 * seen.plateau(),
            format!("{after:.0} reads/s in the 20 s after it, {:.0} before the move", seen.plateau()),
            "",
        );
    }
}
