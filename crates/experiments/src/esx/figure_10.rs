//! Figure 10: from Fibre Channel to a slow NFS volume (3.4).

use super::Runs;
use super::grid::{DATA_GIB, Setup};
use super::load::Load;
use super::over_time::series;
use super::paper::NFS_IOPS;
use super::scene::{Place, Scene, Seen};
use super::way::Way;
use crate::figure::{Axis, Figure, Mark, Plot};

pub(super) const ID: &str = "figure-10";
const OUTSTANDING: usize = 16;
/// The paper does not say how large the disk is, and its time axis is lost: this is a part of the usual one.
const PART: u64 = 8;
/// Those that must converge.
const MIRRORS: [Way; 3] = [Way::PaperMirror, Way::Mirror, Way::MirrorAsync];

pub(super) fn scene(setup: &Setup, way: Way) -> Scene {
    let scale = setup.scale * PART;
    Scene { to: Place::SlowNfs, ..Scene::between_arrays(way, Load::Oltp { outstanding: OUTSTANDING }, DATA_GIB, scale) }
}

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    let ways = MIRRORS.into_iter().chain(Way::TRACKING.iter().copied());
    ways.map(|way| scene(setup, way)).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Figure 10: from Fibre Channel to a slow NFS volume",
        format!(
            "16 requests outstanding, to a volume ten times slower. Only an {PART}th of the usual disk moves, so that the move \
             ends in this decade: the slow volume is left as slow as it is. IOPS are those that source and target were \
             asked for, the copy's included."
        ),
    );
    for way in MIRRORS {
        let scene = scene(setup, way);
        let seen = runs.get(&scene);
        let plot = Plot {
            title: format!("IOPS over time, {}", way.name()),
            x: Axis::linear("seconds"),
            y: Axis::linear("requests a second"),
            bars: false,
            series: series(seen, scene.scale),
            marks: [("reads before", NFS_IOPS[0][0], 0), ("writes before", NFS_IOPS[0][1], 2)]
                .into_iter()
                .map(|(label, y, colour)| Mark { label: format!("paper: {label}"), colour, x: None, y })
                .collect(),
        };
        figure.plots.push(plot);
    }
    let seen = runs.get(&scene(setup, Way::PaperMirror));
    for (when, tally, paper) in [("before", &seen.before, NFS_IOPS[0]), ("after", &seen.after, NFS_IOPS[1])] {
        let span = tally.span.as_secs_f64();
        figure.row(format!("reads a second {when}"), "", paper[0], tally.reads as f64 / span).fitted();
        figure.row(format!("writes a second {when}"), "", paper[1], tally.writes as f64 / span).fitted();
    }
    claims(&mut figure, setup, runs);
    figure
}

fn claims(figure: &mut Figure, setup: &Setup, runs: &Runs) {
    for way in MIRRORS {
        let seen = runs.get(&scene(setup, way));
        figure.claim(format!("{} converges", way.name()), seen.switched, ending(seen), "It must: this is a defect.");
    }
    for way in Way::TRACKING {
        let seen = runs.get(&scene(setup, *way));
        figure.claim(
            format!("{} does not", way.name()),
            !seen.switched,
            ending(seen),
            "What the guest dirtied fell behind what the copy took.",
        );
    }
    let [mirror, buffered] = [Way::Mirror, Way::MirrorAsync].map(|way| runs.get(&scene(setup, way)));
    figure.claim(
        "with a buffer the guest does no less beside the move than with the mirror",
        buffered.during.iops() >= mirror.during.iops() * 0.98,
        format!(
            "{:.0} requests a second, and {:.0} with the mirror; writes waited {:.1} s for room in all",
            buffered.during.iops(),
            mirror.during.iops(),
            buffered.report.throttled_us as f64 / 1e6
        ),
        "What waits for room waits for landings, which share a full disk with the copy.",
    );
    let seen = runs.get(&scene(setup, Way::PaperMirror));
    let latency = [&seen.before, &seen.after].map(|tally| tally.latency_mean().as_secs_f64());
    // Equation 1 at its end: every write, three of ten requests, waits for the slow volume.
    let predicted = (OUTSTANDING as f64 / latency[1]).min(OUTSTANDING as f64 / latency[0]);
    figure.claim(
        "equation 1 gives the guest's rate on the slow volume within 10 %",
        (seen.after.iops() / predicted - 1.0).abs() < 0.1,
        format!("{:.0} a second, and {predicted:.0} by the equation", seen.after.iops()),
        "Little's law does not fail: the sample was short.",
    );
}

fn ending(seen: &Seen) -> String {
    match &seen.error {
        None => format!("moved in {:.0} s", seen.seconds),
        Some(error) => format!("failed after {:.0} s: {error}", seen.seconds),
    }
}
