//! Equations 1 to 3, with min, beside what was measured.

use sim::model::FlashFigures;

use crate::figure::Figure;

use super::paper::{SIZE, SIZES};
use super::scene::{ATTACH, END, MOVE, NEIGHBOURS, Scene, Seen, Way};
use super::{Runs, Setup};

pub(super) const ID: &str = "equations";

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    SIZES.map(|size| Scene::of_paper(Way::None, size, setup.scale)).into()
}

/// What a VM does while it is warm, in requests a second.
struct Warm {
    all: f64,
    reads: f64,
    /// Hits of all requests.
    hit_rate: f64,
}

impl Warm {
    fn of(seen: &Seen) -> Self {
        let reads = seen.plateau();
        let all = reads + seen.rate(1400, MOVE, |sample| sample.writes);
        Self { all, reads, hit_rate: seen.hit_rate(1400, MOVE) * reads / all }
    }
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Equations 1 to 3: what a VM gets by the model of 4.3.1, and in the run",
        "The paper prints max where its text says that a device throttles: min is the reading that stands. Equation 3 is garbled. It is read as \
         min{F_i/E_i, H F} + min{S/(sum of E), N_i/(B_i E_i), (1 - H) S_k}: the network of a host is shared by that host's VMs. IOPS are reads; H \
         is of all requests. S_k is what a VM has without a cache, F_k is fitted to the warm VM of 10 GB.",
    )
    .against("equation");
    let seen = |size| runs.get(&Scene::of_paper(Way::None, size, setup.scale));
    let standard = Warm::of(seen(SIZE));
    let storage = seen(SIZE).reads_a_second(20, ATTACH);
    let flash = (standard.reads - (1.0 - standard.hit_rate) * storage) / standard.hit_rate;
    for size in SIZES {
        let warm = Warm::of(seen(size));
        let equation = warm.hit_rate * flash + (1.0 - warm.hit_rate) * storage;
        let what = format!("equation 1, {size} GB (H = {:.0} %)", warm.hit_rate * 100.0);
        let row = figure.row(what, "reads/s", equation, warm.reads);
        if size == SIZE {
            row.fitted();
        }
    }
    throttled(&mut figure, seen(SIZE), &standard);
    figure
}

/// Equations 2 and 3: what four VMs of a host have, and three.
fn throttled(figure: &mut Figure, seen: &Seen, warm: &Warm) {
    let (four, three) = (f64::from(NEIGHBOURS + 1), f64::from(NEIGHBOURS));
    // What one of four has of the host's flash and of its path is the host's, divided by four.
    let reads = warm.reads / warm.all;
    let flash_of_host = four * warm.all * warm.hit_rate;
    let path_of_host = four * warm.all * (1.0 - warm.hit_rate);
    let of_two = reads * (flash_of_host / three + path_of_host / four);
    let of_three = reads * (flash_of_host / three + path_of_host / three);
    let ours = seen.neighbour(0, MOVE + 400, END);
    figure.beside("equation 2, three VMs: F_i/E_i grows, S/(sum of E) does not", "reads/s", of_two, ours);
    figure.row("equation 3 as read, three VMs: N_i/(B_i E_i) grows as well", "reads/s", of_three, ours);
    figure.claim(
        "a neighbour that has lost one of four VMs gains what equation 3 says as it is read here, and more than equation 2 says",
        (ours / of_three - 1.0).abs() < 0.05 && ours > 1.05 * of_two,
        format!("{ours:.0} reads/s, {of_three:.0} by equation 3 and {of_two:.0} by equation 2"),
        "",
    );
    let device = 1.0 / FlashFigures::NVME_512GB.command.as_secs_f64();
    let by_max = reads * (device / four).max(warm.all * warm.hit_rate);
    figure.claim(
        "with max, as printed, equation 2 is no throttle: a quarter of the whole device alone would be more than a VM gets",
        by_max > 2.0 * warm.reads,
        format!("at least {by_max:.0} reads/s, not {:.0}", warm.reads),
        "",
    );
}
