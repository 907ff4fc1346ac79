//! A volume that is being moved is a device like any other: one body of tests for the mirror in the simulated world and
//! over real files, while the copy, the comparison and the switchover go on below it.

use std::sync::Arc;
use std::time::Duration;

use block::testing::conformance;
use block::{BufferPool, Bytes, Device, IoFuture, Slot};
use env::{EnvRef, RealEnv};
use migrate::{JobJournal, Migration, MigrationContext, MoveOptions, Outcome, Phase, UnderWay, Verify};
use parking_lot::Mutex;
use sim::disk::{Disk, Timing};
use sim::log::Keep;
use sim::process::Process;
use sim::world::World;
use transhume_sim as sim;

/// Remembers nothing: no test here ends a process.
struct Blank;

impl JobJournal for Blank {
    fn record(&self, _: Phase) -> IoFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
    fn commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// How the moves of one run of the body have ended.
#[derive(Clone, Default)]
struct Ended(Arc<Mutex<Vec<String>>>);

/// The guest's way to a volume that is on `source` and moves to `target` from now on, at `bandwidth` bytes a second.
async fn on_the_move(env: &EnvRef, source: Device, target: Device, bandwidth: Option<u64>, ended: &Ended) -> Device {
    let slot = Slot::new(source.clone());
    let context = MigrationContext {
        env: Arc::clone(env),
        slot: slot.clone(),
        source,
        target,
        medium: migrate::Medium::default(),
        copy_face: None,
        redirect: None,
        target_is_fresh: true,
        phase: Phase::Preparing,
        under_way: UnderWay::new(Duration::ZERO, env.now()),
        journal: Arc::new(Blank),
        progress_map: None,
        meter: None,
        comparison: None,
        offload: None,
        pool: BufferPool::new(Bytes::mib(8)),
        snapshots: None,
    };
    let options = MoveOptions { chunk_bytes: 4096, bandwidth, verify: Verify::Full, ..MoveOptions::default() };
    let (control, work) = Migration::start(context, options).await.expect("the move begins");
    let ended = ended.clone();
    env.spawn(Box::pin(async move {
        let outcome = work.await;
        drop(control);
        ended.0.lock().push(match outcome {
            Outcome::Switched(report) => format!("switched, equal {:?}", report.equal),
            other => format!("{other:?}"),
        });
    }));
    Device::new("guest", slot.lane())
}

/// Of moves that are slow, and of those that end meanwhile.
const BANDWIDTHS: [Option<u64>; 3] = [Some(1 << 16), Some(4 << 20), None];

fn check(ended: &Ended) {
    let ended = ended.0.lock();
    assert!(ended.iter().all(|end| end == "switched, equal Some(true)"), "{ended:?}");
    assert!(!ended.is_empty(), "no move has come to its end below the tests");
}

#[test]
fn a_volume_on_the_move_conforms_in_the_simulated_world() {
    let ended = Ended::default();
    for (seed, bandwidth) in (0..).zip(BANDWIDTHS) {
        sim::clock::run(async {
            let world = World::new(seed, Keep::Tail);
            let env = Process::start(&world, 0).env();
            let make = async |size| {
                let source = Disk::new(&world, "source", size, 1, Timing::FLASH).open(0).await;
                let target = Disk::new(&world, "target", size, 1, Timing::FLASH).open(0).await;
                on_the_move(&env, source, target, bandwidth, &ended).await
            };
            conformance(seed, make).await;
            assert_eq!(world.violation(), None);
        });
    }
    check(&ended);
}

#[tokio::test]
async fn a_volume_on_the_move_conforms_over_real_files() {
    let folder = tempfile::tempdir().expect("a directory");
    let env: EnvRef = Arc::new(RealEnv::new());
    let file = async |name: &'static str, size: Bytes| {
        let (file, path) =
            tempfile::Builder::new().prefix(name).tempfile_in(&folder).expect("a file").keep().expect("kept");
        file.set_len(size.0).expect("sized");
        let spec = backends::BackendSpec::file(path);
        let opened = backends::FileBackend::open(&spec, &backends::OpenOptions::default(), &*env).await;
        Device::new(name, opened.expect("it opens"))
    };
    let ended = Ended::default();
    for (seed, bandwidth) in (0..).zip(BANDWIDTHS) {
        let make = async |size| {
            let (source, target) = (file("source", size).await, file("target", size).await);
            on_the_move(&env, source, target, bandwidth, &ended).await
        };
        conformance(seed, make).await;
    }
    check(&ended);
}
