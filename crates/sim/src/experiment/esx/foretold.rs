//! What `plan` says of every move of figure 4 before it begins, against what it took.
//!
//! The forecast is the engine's own (`migrate::Known`), from what a daemon knows beforehand: the rate of a copy without a
//! guest, what the guest has written for a while, as long as its slowest requests take for a switchover, and what three
//! short looks at chunks of the source show, in a world with a guest and no move.

use std::time::Duration;

use block::Bytes;
use migrate::{Forecast, Known, MoveOptions, Scattered};

use super::figure::Figure;
use super::grid::{Setup, percent};
use super::runs::Runs;
use super::scene::{Scene, Seen};
use super::way::Way;
use crate::clock;
use crate::log::Keep;
use crate::model::Volume;
use crate::model::contents::Origin;
use crate::player::Player;
use crate::process::Process;
use crate::workload::Workload;
use crate::world::World;

pub(super) const ID: &str = "foretold";
/// The world in which the source is looked at beforehand is not the one of the move.
const LOOK_SEED: u64 = 77;
/// How long each look takes.
const LOOK_LIMIT: Duration = Duration::from_millis(750);
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
         rate of the copy without a guest, what the guest did before, and how fast a few scattered chunks were read.",
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
    let options = scene.way.options(bytes, scene.scale);
    let mut known = Known {
        volume: bytes,
        to_copy: bytes,
        to_compare: 0,
        copy_rate: bytes as f64 / (offline.seconds / scene.scale as f64),
        write_bytes: seen.before.bytes_written as f64 / span,
        writes: seen.before.writes as f64 / span,
        switchover: seen.before.latency.quantile(0.99),
        scattered: None,
    };
    if options.strategy.iterates() {
        known.scattered = known.worth_a_look(&options).and_then(|parts| looked_at(scene, &options, parts));
    }
    let expected = known.forecast(&options);
    let copied = expected.downtime.saturating_sub(known.switchover);
    Forecast { downtime: known.switchover + copied * scene.scale as u32, ..expected }
}

/// What a look at the source shows beside the guest, before a move, as a daemon looks.
fn looked_at(scene: Scene, options: &MoveOptions, parts: [f64; 3]) -> Option<[Scattered; 3]> {
    clock::run(async {
        let world = World::new(LOOK_SEED, Keep::Tail);
        let source = Volume::new(&world, "source", Bytes(scene.bytes()), Origin::Filled, scene.model(scene.from));
        let process = Process::start(&world, 0);
        let (load, outstanding) = scene.load.start(scene.system_bytes()..scene.bytes(), scene.scale)?;
        let player =
            Player::start(&world, "guest", source.device(), Origin::Filled, load as Box<dyn Workload>, outstanding);
        world.sleep(scene.around()).await;
        let mut seen = Vec::new();
        for part in parts {
            let _ = player.take();
            let env = process.env();
            let chunk_seconds = migrate::scattered(&source.device(), &*env, options, part, LOOK_LIMIT).await.ok()??;
            let tally = player.take();
            let writes = tally.writes as f64 / tally.span.as_secs_f64().max(1e-9);
            seen.push(Scattered { part, chunk_seconds, writes });
        }
        player.stop().await;
        seen.try_into().ok()
    })
}
