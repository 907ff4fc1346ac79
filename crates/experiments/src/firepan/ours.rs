//! This project's own way beside the paper's, in the same scene.

use sim::model::FlashFigures;

use crate::figure::Figure;

use super::paper::{SIZE, SIZES, lost, mean_after, megabytes, over_time};
use super::scene::{COSTS, END, MOVE, NEIGHBOURS, SHARE_ENOUGH, Sample, Scene, Seen, Way};
use super::{Runs, Setup};

pub(super) const ID: &str = "ours";
/// What is lost is counted for so long after the guest was held, in seconds.
const LOST_SPAN: usize = 200;
/// Of what `FirepanIF` loses, at most this part.
const LOST_PART: f64 = 0.25;
const ALL: [Way; 6] = [Way::None, Way::Cachemior, Way::CachemiorEarly, Way::FirepanIf, Way::RemoteRead, Way::Hybrid];

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let all = ALL.map(|way| Scene::of_paper(way, SIZE, setup.scale));
    let both = SIZES
        .into_iter()
        .flat_map(|size| [Way::FirepanIf, Way::Hybrid].map(|way| Scene::of_paper(way, size, setup.scale)));
    all.into_iter().chain(both).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Ours: hybrid, and what else the engine has",
        "Hybrid copies while the VM is still at the source, hottest first, and waits with the switchover until 95 % of the hits would be hits at \
         the target. Nothing is withheld. What is lost is counted against the VM's own warm rate before the move, for 200 s from when it runs at \
         the target. Beside it stand the same with the memory's pause of 3 s, which every way has, and with what the VM loses while the copy asks of \
         its host before the switchover. A cache of 20 GB is still filling when it moves, so what is lost of its rate may be less than nothing.",
    )
    .against("firepan-if");
    for size in SIZES {
        let [filtered, hybrid] =
            [Way::FirepanIf, Way::Hybrid].map(|way| runs.get(&Scene::of_paper(way, size, setup.scale)));
        of_size(&mut figure, size, filtered, hybrid);
    }
    let seen = ALL.map(|way| runs.get(&Scene::of_paper(way, SIZE, setup.scale)));
    let filtered = seen[3];
    for (way, seen) in ALL.iter().zip(seen) {
        let name = way.name();
        figure.beside(format!("{name}: mean after the move"), "reads/s", mean_after(filtered), mean_after(seen));
        let of = |seen: &Seen| megabytes(seen, MOVE, MOVE + 400);
        figure.beside(format!("{name}: 400 s after the move"), "MB/s", of(filtered), of(seen));
    }
    let named: Vec<(&str, &Seen)> = ALL.iter().zip(seen).map(|(way, seen)| (way.name(), seen)).collect();
    figure.plots.push(over_time(("Reads a second of the VM", "reads/s"), (1900, 10), &named, Seen::reads_a_second));
    figure
}

fn of_size(figure: &mut Figure, size: u64, filtered: &Seen, hybrid: &Seen) {
    let of = |seen: &Seen, from: f64| lost(seen, from, seen.resumed as usize + LOST_SPAN);
    let [lost_filtered, lost_hybrid] = [filtered, hybrid].map(|seen| of(seen, seen.resumed));
    let with_pause = [filtered, hybrid].map(|seen| of(seen, seen.held));
    let from_start = [filtered, hybrid].map(|seen| of(seen, MOVE as f64));
    let part = lost_hybrid / lost_filtered;
    figure.row_if(format!("{size} GB: lost after the switchover"), "MB", lost_filtered, lost_hybrid, part <= LOST_PART);
    figure.beside(format!("{size} GB: the same with the pause"), "MB", with_pause[0], with_pause[1]);
    figure.beside(format!("{size} GB: the same from the start of the move on"), "MB", from_start[0], from_start[1]);
    let copy = filtered.copy_seconds();
    let waited = hybrid.held - MOVE as f64;
    figure.row_if(format!("{size} GB: the switchover waits, and the copy takes"), "s", copy, waited, waited <= copy);
    figure.claim(
        format!("{size} GB: hybrid loses at most a quarter of what firepan-if loses"),
        part <= LOST_PART,
        format!("{lost_hybrid:.0} of {lost_filtered:.0} MB"),
        "",
    );
    let (least, at) = least_of_allowed(hybrid, size);
    let status = hybrid.status;
    figure.claim(
        format!("{size} GB: after the switchover no second is below 0.9 of what the hit rate allows"),
        least >= 0.9,
        format!(
            "{least:.2} at {at} s; {} blocks came from the source, {} from storage and {} were read remotely, the last at {:.0} s; held at {:.1} s \
             with {:.3} of the hits (wanted: {SHARE_ENOUGH})",
            status.from_source,
            status.from_storage,
            status.read_remotely,
            hybrid.over.unwrap_or(f64::NAN),
            hybrid.held,
            hybrid.share_at_hold
        ),
        "What is still copied asks of the same host as the VM.",
    );
}

/// The least part of what the VM's requests of a second could have been, and when. By what they cost, either its part of the host is the
/// limit or its partition of the flash.
fn least_of_allowed(seen: &Seen, size: u64) -> (f64, usize) {
    let part = 1.0 / f64::from(NEIGHBOURS + 1);
    let of_host = |sample: &Sample| {
        let storage = (sample.storage_reads + sample.writes) * COSTS.storage;
        (storage + sample.flash_reads * COSTS.hit + sample.admissions * COSTS.admission) / part
    };
    let flash = FlashFigures::NVME_512GB.partition(size << 30);
    let of_flash = |sample: &Sample| {
        let [read, write] = [flash.read_page, flash.program_page].map(|page| page.as_secs_f64() / flash.dies as f64);
        sample.flash_reads * read + sample.admissions * write
    };
    let start = seen.resumed.ceil() as usize;
    let used = |at: usize| seen.rate(at, at + 1, of_host).max(seen.rate(at, at + 1, of_flash));
    (start..END)
        .map(|at| (used(at), at))
        .fold((f64::INFINITY, 0), |least, second| if second.0 < least.0 { second } else { least })
}
