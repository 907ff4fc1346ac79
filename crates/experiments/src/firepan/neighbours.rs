//! Figures 8 and 9: the other VMs on both hosts.

use crate::figure::{Figure, Plot};

use super::paper::{OF_FOUR, OF_THREE, SIZE, over_time, ways, with};
use super::scene::{Control, END, MOVE, Scene, Seen, Way};
use super::{Runs, Setup};

pub(super) const ID: &str = "figures-8-9";
const HOSTS: [&str; 2] = ["source", "target"];

fn one_storage(setup: &Setup) -> Scene {
    with(Scene::of_paper(Way::None, SIZE, setup.scale), Control::OneStorage)
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    ways(setup, SIZE).into_iter().chain([one_storage(setup)]).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figures 8 and 9: reads a second of a neighbour at the source and at the target",
        "A neighbour is a warm VM that always asks: it gets what its host leaves it, by what a read costs the VM that moves while that is warm \
         (measured in the same run). So with four VMs it has what that VM has. The paper blames the shared storage, which the same seven VMs use \
         before and after the move. What changes is a host's own: its path, which its VMs share.",
    );
    let seen = ways(setup, SIZE).map(|scene| runs.get(&scene));
    let none = seen[0];
    figure.row("source, four VMs, the one that moves without a cache", "reads/s", OF_FOUR, none.neighbour(0, 100, 400));
    figure.row("source, four VMs, all warm", "reads/s", OF_FOUR, none.neighbour(0, 1400, MOVE)).fitted();
    figure.row("target, three VMs", "reads/s", OF_THREE, none.neighbour(1, 1400, MOVE));
    for (way, seen) in Way::PAPERS.iter().zip(seen) {
        let name = way.name();
        figure.row(format!("{name}: source, three VMs"), "reads/s", OF_THREE, seen.neighbour(0, MOVE + 400, END));
        figure.row(format!("{name}: target, four VMs"), "reads/s", OF_FOUR, seen.neighbour(1, MOVE + 400, END));
    }
    let control = runs.get(&one_storage(setup));
    let of = |seen: &Seen| [seen.neighbour(0, 1400, MOVE), seen.neighbour(0, MOVE + 400, END)];
    let ([before, after], [control_before, control_after]) = (of(none), of(control));
    figure.claim(
        "a host's own path explains that neighbours gain by the move, one storage that all share does not",
        after > 1.2 * before && (control_after / control_before - 1.0).abs() < 0.1,
        format!(
            "a neighbour at the source goes from {before:.0} to {after:.0} reads/s; if seven VMs share the storage alone, from {control_before:.0} \
             to {control_after:.0}"
        ),
        "",
    );
    let filtered = seen[3];
    let over = filtered.over.map_or(END, |over| over.floor() as usize);
    let during = [0, 1].map(|host| filtered.neighbour(host, MOVE + 4, over));
    figure.claim(
        "once the copy of firepan-if has ended, a neighbour has no less than without any transfer",
        [0, 1]
            .into_iter()
            .all(|host| filtered.neighbour(host, over + 1, END) >= 0.98 * none.neighbour(host, over + 1, END)),
        format!(
            "while it copies a neighbour has {:.0} reads/s at the source and {:.0} at the target",
            during[0], during[1]
        ),
        "",
    );
    figure.plots.extend((0..2).map(|host| plot(host, seen)));
    figure
}

fn plot(host: usize, seen: [&Seen; 4]) -> Plot {
    let named: Vec<(&str, &Seen)> = Way::PAPERS.iter().zip(seen).map(|(way, seen)| (way.name(), seen)).collect();
    let title = format!("A neighbour at the {}", HOSTS[host]);
    over_time((&title, "reads/s"), (0, 20), &named, |seen, from, to| seen.neighbour(host, from, to))
}
