//! What `plan` says of every move of figure 4 before it begins, against what it took.
//!
//! The forecast is the engine's own (`migrate::Known`), from what a daemon knows beforehand: the rate of a copy without a
//! guest, what the guest has written for a while, and as long as its slowest requests take for a switchover.

use migrate::{Forecast, Known};

use super::figure::Figure;
use super::grid::{Setup, percent};
use super::runs::Runs;
use super::scene::{Scene, Seen};
use super::way::Way;

pub(super) const ID: &str = "foretold";
/// How exact the time is to be.
const SECONDS_OFF_MAX: f64 = 0.1;
/// By which factor the downtime may be off.
const DOWNTIME_OFF_MAX: f64 = 2.0;

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    setup.all_loads().into_iter().chain(Way::ALL.iter().map(|way| setup.offline(*way))).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Time and downtime foretold",
        "What the engine's forecast says of every move of figure 4 beforehand, in place of the paper's numbers. It knows the \
         rate of the copy without a guest and what the guest did before.",
    );
    for way in Way::ALL {
        let (mut seconds_off, mut downtime_off, mut unlike) = (0.0_f64, 1.0_f64, 0);
        for load in &setup.loads {
            let scene = setup.under_load(*way, *load);
            let seen = runs.get(&scene);
            let expected = forecast(scene, runs.get(&setup.offline(*way)), seen);
            if !seen.switched {
                unlike += u32::from(expected.converges);
                continue;
            }
            let name = format!("{}, {load} outstanding", way.name());
            let seconds = expected.seconds * setup.scale as f64;
            let held = expected.downtime.as_secs_f64();
            figure.row(format!("{name}: time"), "s", seconds, seen.seconds);
            figure.row(format!("{name}: downtime"), "s", held, seen.downtime);
            seconds_off = seconds_off.max((seconds / seen.seconds - 1.0).abs());
            downtime_off = downtime_off.max((held / seen.downtime).max(seen.downtime / held));
        }
        figure.claim(
            format!("{}: time is foretold within 10 %", way.name()),
            seconds_off <= SECONDS_OFF_MAX && unlike == 0,
            format!("{} off at most, {unlike} said to converge that did not", percent(seconds_off)),
            "The guest writes less while it is copied, and a pass that overlaps with it copies less than is expected.",
        );
        figure.claim(
            format!("{}: downtime is foretold within a factor of 2", way.name()),
            downtime_off <= DOWNTIME_OFF_MAX,
            format!("a factor of {downtime_off:.2} at most"),
            "How long requests in flight take to drain, and how dirty the last pass leaves the volume, is known only then.",
        );
    }
    figure
}

/// What is expected of `scene`, at its own scale but for the last copy, which is told at the paper's.
fn forecast(scene: Scene, offline: &Seen, seen: &Seen) -> Forecast {
    let bytes = scene.bytes();
    let span = seen.before.span.as_secs_f64().max(1e-9);
    let known = Known {
        volume: bytes,
        to_copy: bytes,
        to_compare: 0,
        copy_rate: bytes as f64 / (offline.seconds / scene.scale as f64),
        write_bytes: seen.before.bytes_written as f64 / span,
        writes: seen.before.writes as f64 / span,
        switchover: seen.before.latency.quantile(0.99),
    };
    let expected = known.forecast(&scene.way.options(bytes, scene.scale));
    let copied = expected.downtime.saturating_sub(known.switchover);
    Forecast { downtime: known.switchover + copied * scene.scale as u32, ..expected }
}
