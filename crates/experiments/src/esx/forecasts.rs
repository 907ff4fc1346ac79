//! What `plan` says of moves before they begin, against what they took. The moves are those of figure 4 ([`loads`]), of
//! figure 5 ([`sizes`]), and those to a slow volume ([`slow`]).
//!
//! The forecast is the engine's own (`migrate::Known`). It uses what a daemon knows beforehand. That is the rate of a
//! copy without a guest, and what the guest has written for a while. A switchover is taken to last as long as the
//! guest's slowest requests. Short looks at chunks of the source add to that; they are taken in a world with a guest
//! and no move.

use std::time::Duration;

use block::Bytes;
use migrate::{Forecast, Known, LOOKS, MoveOptions, Scattered};

use super::Runs;
use super::grid::{Setup, percent};
use super::load::Load;
use super::scene::{Scene, Seen};
use super::way::Way;
use crate::figure::Figure;
use sim::clock;
use sim::log::Keep;
use sim::model::Volume;
use sim::model::contents::Origin;
use sim::player::Player;
use sim::process::Process;
use sim::workload::Workload;
use sim::world::World;

/// The world in which the source is looked at beforehand is not the one of the move.
const LOOK_SEED: u64 = 77;
/// How long each look takes.
const LOOK_LIMIT: Duration = Duration::from_millis(500);
/// How exact the time is to be.
const SECONDS_OFF_MAX: f64 = 0.1;
/// By which factor the downtime may be off.
const DOWNTIME_OFF_MAX: f64 = 2.0;

/// The moves of one way, by what sets them apart.
type Moves = Vec<(String, Scene)>;

/// Over outstanding requests.
pub(super) mod loads {
    use super::*;

    pub(in crate::esx) const ID: &str = "foretold";

    fn moves(setup: &Setup, way: Way) -> Moves {
        setup.loads.iter().map(|load| (format!("{load} outstanding"), setup.under_load(way, *load))).collect()
    }

    pub(in crate::esx) fn scenes(setup: &Setup) -> Vec<Scene> {
        all_scenes(setup, Way::ALL, moves)
    }

    pub(in crate::esx) fn figure(setup: &Setup, runs: &Runs) -> Figure {
        compare(Figure::new(ID, "Time and downtime foretold", ABOUT), (setup, runs), Way::ALL, moves)
    }
}

/// Over disk sizes.
pub(super) mod sizes {
    use super::*;

    pub(in crate::esx) const ID: &str = "foretold-sizes";

    fn moves(setup: &Setup, way: Way) -> Moves {
        setup.sizes.iter().map(|size| (format!("{size} GB"), setup.of_size(way, *size))).collect()
    }

    pub(in crate::esx) fn scenes(setup: &Setup) -> Vec<Scene> {
        all_scenes(setup, Way::ALL, moves)
    }

    pub(in crate::esx) fn figure(setup: &Setup, runs: &Runs) -> Figure {
        compare(Figure::new(ID, "Time and downtime foretold over disk sizes", ABOUT), (setup, runs), Way::ALL, moves)
    }
}

/// To a volume that is ten times slower.
pub(super) mod slow {
    use super::*;
    use crate::esx::figure_10;

    pub(in crate::esx) const ID: &str = "foretold-slow";
    const WAYS: &[Way] = &[Way::PaperMirror, Way::Mirror, Way::MirrorAsync, Way::Auto, Way::Dbt, Way::IncrementalDbt];

    fn moves(setup: &Setup, way: Way) -> Moves {
        vec![("to NFS".to_owned(), figure_10::scene(setup, way))]
    }

    pub(in crate::esx) fn scenes(setup: &Setup) -> Vec<Scene> {
        all_scenes(setup, WAYS, moves)
    }

    pub(in crate::esx) fn figure(setup: &Setup, runs: &Runs) -> Figure {
        compare(Figure::new(ID, "Time and downtime foretold to a slow volume", ABOUT), (setup, runs), WAYS, moves)
    }
}

const ABOUT: &str = "What the engine's forecast says of every move beforehand, in place of the paper's numbers. It knows the rate of \
     the copy without a guest, what the guest did before, and how fast a few scattered chunks of the source were read.";

/// Without a guest.
const fn offline(scene: Scene) -> Scene {
    Scene { load: Load::Idle, ..scene }
}

fn all_scenes(setup: &Setup, ways: &[Way], moves: fn(&Setup, Way) -> Moves) -> Vec<Scene> {
    let moves = ways.iter().flat_map(|way| moves(setup, *way));
    moves.flat_map(|(_, scene)| [scene, offline(scene)]).collect()
}

fn compare(figure: Figure, (setup, runs): (&Setup, &Runs), ways: &[Way], moves: fn(&Setup, Way) -> Moves) -> Figure {
    let mut figure = figure.against("foretold");
    for way in ways {
        let (mut seconds_off, mut downtime_off, mut unlike) = (0.0_f64, 1.0_f64, 0);
        for (name, scene) in moves(setup, *way) {
            let seen = runs.get(&scene);
            let expected = forecast(scene, runs.get(&offline(scene)), seen);
            let name = format!("{}, {name}", way.name());
            let seconds = expected.seconds * scene.scale as f64;
            figure.beside(format!("{name}: time"), "s", seconds, seen.seconds);
            figure.beside(format!("{name}: passes"), "", expected.passes.into(), seen.report.iterations.len() as f64);
            if scene.way == Way::MirrorAsync {
                let drained = seen.report.switchover.drain_us as f64 / 1e6;
                figure.beside(format!("{name}: emptying the buffer"), "s", expected.drain.as_secs_f64(), drained);
            }
            if expected.gives_up == seen.switched {
                unlike += 1;
                continue;
            }
            seconds_off = seconds_off.max((seconds / seen.seconds - 1.0).abs());
            if seen.switched {
                let held = expected.downtime.as_secs_f64();
                figure.beside(format!("{name}: downtime"), "s", held, seen.downtime);
                downtime_off = downtime_off.max((held / seen.downtime).max(seen.downtime / held));
            }
        }
        figure.claim(
            format!("{}: time is foretold within 10 %", way.name()),
            seconds_off <= SECONDS_OFF_MAX && unlike == 0,
            format!("{} off at most, of {unlike} another end was expected", percent(seconds_off)),
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
    if options.strategy.holds_for_copy() {
        known.scattered = known.worth_a_look(&options).and_then(|parts| looked_at(scene, &options, parts));
    }
    let expected = known.forecast(&options);
    let copied = expected.downtime.saturating_sub(known.switchover);
    Forecast { downtime: known.switchover + copied * scene.scale as u32, ..expected }
}

/// What a look at the source shows beside the guest, before a move, as a daemon looks.
fn looked_at(scene: Scene, options: &MoveOptions, parts: [f64; LOOKS]) -> Option<[Scattered; LOOKS]> {
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
            let device = source.device();
            let look = migrate::scattered(&device, &*env, options, part, LOOK_LIMIT);
            let chunk_seconds = look.await.ok()??;
            let tally = player.take();
            let span = tally.span.as_secs_f64().max(1e-9);
            let [writes, reads] = [tally.writes, tally.reads].map(|count| count as f64 / span);
            seen.push(Scattered { part, chunk_seconds, writes, reads });
        }
        player.stop().await;
        seen.try_into().ok()
    })
}
