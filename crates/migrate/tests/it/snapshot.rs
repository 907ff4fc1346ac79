//! Snapshotting: the guest's disk is at every moment the source with the overlays that are on record, and a move that ends,
//! however it ends, leaves none behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::common::{Disk, World, map_device, map_on, options, outcome, switched, until};
use block::{Buffer, Bytes, Device, Error, ErrorKind, IoFuture, Slot};
use env::EnvRef;
use filters::OverlayHeader;
use migrate::{MigrationContext, MoveOptions, Outcome, Phase, SnapshotStore, Snapshots, Strategy, Verify};
use parking_lot::Mutex;

/// Overlays on disks of the test's world.
struct Store {
    env: EnvRef,
    boot: u8,
    kept: Arc<Kept>,
}

/// What outlives a process.
#[derive(Default)]
struct Kept {
    disks: Mutex<BTreeMap<u32, Disk>>,
    recorded: Mutex<Vec<u32>>,
    made: AtomicU32,
    /// So many overlays can be made.
    makes_left: Mutex<Option<u32>>,
    /// So many records succeed, then this many fail.
    records: Mutex<(u32, u32)>,
    /// Is done when the first overlay has been folded.
    at_first_fold: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl SnapshotStore for Store {
    fn boot(&self) -> [u8; 16] {
        [self.boot; 16]
    }
    fn recorded(&self) -> Vec<u32> {
        self.kept.recorded.lock().clone()
    }
    fn create(&self, number: u32, length: Bytes) -> IoFuture<'_, Device> {
        if let Some(left) = &mut *self.kept.makes_left.lock() {
            if *left == 0 {
                return block::ready(Err(Error::new(ErrorKind::NoSpace, "there is no room")));
            }
            *left -= 1;
        }
        assert!(!self.kept.recorded.lock().contains(&number), "overlay {number} is in use");
        self.kept.made.fetch_add(1, Ordering::Relaxed);
        let disk = Disk::new(&self.env, length);
        disk.manners.lock().delay_ms = 1;
        self.kept.disks.lock().insert(number, disk.clone());
        block::ready(Ok(disk.device("delta")))
    }
    fn open(&self, number: u32) -> IoFuture<'_, Device> {
        let disk = self.kept.disks.lock().get(&number).cloned().expect("what is on record is there");
        disk.reboot();
        block::ready(Ok(disk.device("delta")))
    }
    fn record(&self, numbers: Vec<u32>) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.env.sleep(Duration::from_millis(1)).await;
            let mut records = self.kept.records.lock();
            if records.1 > 0 && records.0 == 0 {
                records.1 -= 1;
                if self.env.random().is_multiple_of(2) {
                    *self.kept.recorded.lock() = numbers;
                }
                return Err(Error::new(ErrorKind::Io, "the journal fails"));
            }
            records.0 = records.0.saturating_sub(1);
            if !numbers.is_empty() && !numbers.contains(&1) {
                self.kept.at_first_fold.lock().take().into_iter().for_each(|then| then());
            }
            *self.kept.recorded.lock() = numbers;
            Ok(())
        })
    }
    fn remove(&self, number: u32) -> IoFuture<'_, ()> {
        assert!(!self.kept.recorded.lock().contains(&number), "overlay {number} is removed while it is on record");
        self.kept.disks.lock().remove(&number);
        block::ready(Ok(()))
    }
}

fn by_snapshots() -> MoveOptions {
    MoveOptions { strategy: Strategy::Snapshot, downtime_limit_ms: 50, ..options() }
}

/// Slow enough that the guest has written much before the base is copied.
fn slowly() -> MoveOptions {
    MoveOptions { bandwidth: Some(600_000), ..by_snapshots() }
}

type Shared = Arc<tokio::sync::Mutex<Snapshots>>;

fn none(world: &World, kept: &Arc<Kept>) -> Shared {
    let store = Store { env: Arc::clone(&world.env), boot: 1, kept: Arc::clone(kept) };
    Arc::new(tokio::sync::Mutex::new(Snapshots::none(Arc::new(store), Arc::clone(&world.env))))
}

fn context(world: &World, kept: &Arc<Kept>) -> MigrationContext {
    MigrationContext { snapshots: Some(none(world, kept)), ..world.context() }
}

fn assert_nothing_is_left(kept: &Kept) {
    let recorded = kept.recorded.lock().clone();
    assert!(recorded.is_empty(), "overlays are on record: {recorded:?}");
    assert!(kept.disks.lock().is_empty(), "overlays were left behind: {:?}", kept.disks.lock().keys());
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_writes_all_the_time_is_moved_by_snapshots_and_both_sides_are_equal() {
    let mut held = 0;
    for seed in 0..12 {
        let world = World::new(seed, 3_000_000 + seed * 513).await;
        let kept = Arc::new(Kept::default());
        let guest = world.guest(2);
        let verify = if seed % 2 == 0 { Verify::Full } else { Verify::Sample };
        let (_, work) = world.start_with(context(&world, &kept), MoveOptions { verify, ..by_snapshots() }).await;
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        assert_nothing_is_left(&kept);
        assert_eq!(report.equal, Some(true));
        assert!(report.iterations.len() >= 3, "{:?}", report.iterations);
        held += report.iterations.iter().filter(|iteration| iteration.held).count();
        assert!(kept.made.load(Ordering::Relaxed) >= 2, "the paper's migration takes more than one snapshot");
    }
    assert!(held >= 12, "the last snapshot of every move is folded with the guest held");
}

#[tokio::test(start_paused = true)]
async fn a_last_fold_that_takes_too_long_lets_the_guest_go_and_the_move_goes_on() {
    let mut let_go = 0;
    for seed in 0..6 {
        let world = World::new(seed, 3_000_000).await;
        let kept = Arc::new(Kept::default());
        let guest = world.guest(2);
        let (target, env) = (world.target.clone(), Arc::clone(&world.env));
        let slow = move || {
            target.manners.lock().delay_ms = 2_000;
            let later = Arc::clone(&env);
            env.spawn(Box::pin(async move {
                later.sleep(Duration::from_secs(5)).await;
                target.manners.lock().delay_ms = 1;
            }));
        };
        *kept.at_first_fold.lock() = Some(Box::new(slow));
        let reader = Device::new("reader", world.slot.lane());
        let (env, stop) = (Arc::clone(&world.env), Arc::clone(&world.stop));
        let reading = tokio::spawn(async move {
            let mut longest = Duration::ZERO;
            while !stop.load(Ordering::Relaxed) {
                let began = env.now();
                reader.read(Bytes(0), Buffer::unpooled(4096)).await.expect("the guest reads");
                longest = longest.max(env.now().since(began));
                env.sleep(Duration::from_millis(5)).await;
            }
            longest
        });
        let (_, work) = world.start_with(context(&world, &kept), by_snapshots()).await;
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        let longest = reading.await.expect("it ends");
        assert_nothing_is_left(&kept);
        let holds = report.iterations.iter().filter(|pass| pass.held);
        let in_vain: Vec<_> = holds.filter(|pass| pass.decision.contains("let go")).collect();
        assert!(in_vain.iter().all(|pass| pass.seconds >= 0.1), "{in_vain:?}");
        assert!(longest < Duration::from_secs(1), "the guest waited for the target: {longest:?}");
        let_go += in_vain.len();
    }
    assert!(let_go >= 3, "{let_go} holds were given up");
}

#[tokio::test(start_paused = true)]
async fn while_the_base_is_copied_nothing_is_written_to_the_source() {
    let world = World::new(3, 2_000_000).await;
    let kept = Arc::new(Kept::default());
    let guest = world.guest(2);
    let (control, work) = world.start_with(context(&world, &kept), slowly()).await;
    let before = world.source.contents().await;
    until(&control, |progress| progress.bytes_done > 300_000).await;
    assert!(kept.disks.lock()[&1].data_written.load(Ordering::Relaxed) > 0, "the guest has written nothing yet");
    assert!(world.source.contents().await == before, "the base is read-only while it is copied");
    switched(work).await;
    world.assert_equal_at_commit();
    world.stop_guest(guest).await;
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_any_moment_leaves_the_guest_on_the_source_and_no_overlay() {
    let mut cancelled = 0;
    for seed in 0..30 {
        let world = World::new(seed, 1_500_000).await;
        let kept = Arc::new(Kept::default());
        let guest = world.guest(2);
        let (control, work) = world.start_with(context(&world, &kept), slowly()).await;
        world.env.sleep(Duration::from_millis(seed * 97)).await;
        let _ = control.cancel();
        match outcome(work).await {
            Outcome::Cancelled(_) => {
                cancelled += 1;
                assert!(world.slot.device().is_same(&world.source_device), "seed {seed}");
            }
            Outcome::Switched(_) => assert!(world.slot.device().is_same(&world.target_device), "seed {seed}"),
            Outcome::Failed { error, .. } => panic!("seed {seed}: {}", error.chain()),
        }
        assert_nothing_is_left(&kept);
        world.stop_guest(guest).await;
    }
    assert!(cancelled > 15, "only {cancelled} were early enough");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_fails_is_resumed_or_given_up_and_the_guest_sees_nothing() {
    for (seed, writes) in (0..160).step_by(8).enumerate() {
        let world = World::new(seed as u64, 1_500_000).await;
        let kept = Arc::new(Kept::default());
        {
            let mut manners = world.target.manners.lock();
            (manners.writes_left, manners.kind) = (Some(writes), Some(ErrorKind::NoSpace));
        }
        let guest = world.guest(2);
        let (control, work) = world.start_with(context(&world, &kept), by_snapshots()).await;
        let seen = until(&control, |progress| progress.phase == Phase::TargetLost || progress.phase.is_final()).await;
        let resumes = seed % 2 == 0;
        world.target.manners.lock().writes_left = None;
        if seen.phase == Phase::TargetLost {
            world.env.sleep(Duration::from_millis(200)).await;
            match resumes {
                true => control.resume(),
                false => control.cancel().expect("it is not committed"),
            }
        }
        match (outcome(work).await, resumes) {
            (Outcome::Switched(_), _) => world.assert_equal_at_commit(),
            (Outcome::Cancelled(_), false) => assert!(world.slot.device().is_same(&world.source_device)),
            (other, _) => panic!("seed {seed}: {other:?}"),
        }
        assert_nothing_is_left(&kept);
        world.stop_guest(guest).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_fails_writes_is_folded_into_once_it_takes_them() {
    for seed in 0..10 {
        let world = World::new(seed, 1_000_000).await;
        let kept = Arc::new(Kept::default());
        let guest = world.guest(2);
        let (control, work) = world.start_with(context(&world, &kept), slowly()).await;
        world.env.sleep(Duration::from_millis(300)).await;
        world.source.manners.lock().writes_left = Some(seed);
        until(&control, |progress| progress.phase == Phase::Cancelling).await;
        world.env.sleep(Duration::from_secs(10)).await;
        assert!(!control.snapshot().phase.is_final(), "it ended with the guest's data in an overlay");
        world.source.manners.lock().writes_left = None;
        let Outcome::Failed { error, .. } = outcome(work).await else { panic!("seed {seed}: it did not fail") };
        assert!(error.chain().contains("the disk fails a write"), "{}", error.chain());
        assert_nothing_is_left(&kept);
        assert!(world.slot.device().is_same(&world.source_device));
        world.stop_guest(guest).await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_room_for_the_first_snapshot_nothing_changes_and_without_room_for_a_later_one_the_move_is_undone() {
    for room in 0..4 {
        let world = World::new(u64::from(room), 1_500_000).await;
        let kept = Arc::new(Kept { makes_left: Mutex::new(Some(room)), ..Kept::default() });
        let guest = world.guest(2);
        let started = migrate::Migration::start(context(&world, &kept), by_snapshots()).await;
        let Ok((_, work)) = started else {
            assert_eq!(room, 0);
            assert!(world.slot.device().is_same(&world.source_device));
            world.stop_guest(guest).await;
            continue;
        };
        match outcome(tokio::spawn(work)).await {
            Outcome::Failed { error, .. } => assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain()),
            Outcome::Switched(_) => assert!(room > 1, "it cannot end with one snapshot"),
            Outcome::Cancelled(_) => panic!("nobody cancelled it"),
        }
        assert_nothing_is_left(&kept);
        world.stop_guest(guest).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_in_doubt_harms_nothing() {
    for seed in 0..24 {
        let world = World::new(seed, 1_000_000).await;
        let kept =
            Arc::new(Kept { records: Mutex::new((1 + seed as u32 / 2, 1 + seed as u32 % 3)), ..Kept::default() });
        let guest = world.guest(2);
        let (_, work) = world.start_with(context(&world, &kept), by_snapshots()).await;
        match outcome(work).await {
            Outcome::Switched(_) => world.assert_equal_at_commit(),
            Outcome::Failed { .. } => assert!(world.slot.device().is_same(&world.source_device)),
            Outcome::Cancelled(_) => panic!("nobody cancelled it"),
        }
        assert_nothing_is_left(&kept);
        world.stop_guest(guest).await;
    }
}

/// What the volume holds by the record: the source with the overlays that are listed.
async fn reopened(world: &World, kept: &Arc<Kept>) -> (World, Shared) {
    let (source, target) = (world.source.clone(), world.target.clone());
    source.reboot();
    target.reboot();
    let world = World::over(Arc::clone(&world.env), source, target);
    let store = Store { env: Arc::clone(&world.env), boot: 1, kept: Arc::clone(kept) };
    let snapshots = Snapshots::open(Arc::new(store), Arc::clone(&world.env), world.source_device.clone()).await;
    let snapshots = snapshots.expect("what is on record opens");
    let slot = Slot::new(snapshots.top().unwrap_or_else(|| world.source_device.clone()));
    (World { slot, ..world }, Arc::new(tokio::sync::Mutex::new(snapshots)))
}

async fn contents(device: &Device) -> Vec<u8> {
    let size = device.size().as_usize();
    device.read(Bytes::ZERO, Buffer::unpooled(size)).await.expect("it reads").to_vec()
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_at_any_moment_the_volume_is_the_source_with_its_overlays_and_the_move_goes_on_or_is_undone() {
    let (mut with_overlays, mut resumed_bytes) = (0, 0);
    for seed in 0..36 {
        let size = 1_500_000;
        let world = World::new(seed, size).await;
        let kept = Arc::new(Kept::default());
        let map = map_device(size);
        let context = MigrationContext { progress_map: Some(map_on(&map, size, 1).await), ..context(&world, &kept) };
        let guest = world.guest(2);
        let slow = MoveOptions { bandwidth: Some(150_000), ..by_snapshots() };
        let (_, work) = world.start_with(context, slow).await;
        world.env.sleep(Duration::from_millis(30 + seed * 311)).await;
        // The process dies with the migration where it is; the guest has stopped before, so what it saw is known.
        world.stop_guest(guest).await;
        let guest_saw = contents(&world.slot.device()).await;
        work.abort();
        let was_committed = world.journal.committed.load(Ordering::Relaxed);
        let _ = work.await;
        if was_committed {
            continue;
        }
        let (world, snapshots) = reopened(&world, &kept).await;
        assert!(contents(&world.slot.device()).await == guest_saw, "seed {seed}: the volume is not what the guest saw");
        with_overlays += u64::from(!snapshots.lock().await.is_empty());
        let guest = world.guest(2);
        let context = MigrationContext {
            progress_map: Some(map_on(&map, size, 1).await),
            target_is_fresh: false,
            snapshots: Some(snapshots),
            ..world.context()
        };
        let (control, work) = world.start_with(context, by_snapshots()).await;
        if seed % 3 == 0 {
            let _ = control.cancel();
        }
        match outcome(work).await {
            Outcome::Switched(report) => {
                resumed_bytes += report.bytes_resumed;
                world.assert_equal_at_commit();
            }
            Outcome::Cancelled(_) => assert!(world.slot.device().is_same(&world.source_device), "seed {seed}"),
            Outcome::Failed { error, .. } => panic!("seed {seed}: {}", error.chain()),
        }
        assert_nothing_is_left(&kept);
        world.stop_guest(guest).await;
    }
    assert!(with_overlays > 15, "only {with_overlays} crashes met overlays");
    assert!(resumed_bytes > 0, "nothing was resumed");
}

#[tokio::test(start_paused = true)]
async fn a_progress_map_that_cannot_be_written_ends_the_job_with_everything_folded_into_the_source() {
    let mut in_folds = 0;
    for seed in 0..24 {
        let size = 1_500_000;
        let world = World::new(seed, size).await;
        let kept = Arc::new(Kept::default());
        let map = Disk::new(&world.env, map_device(size).size());
        let device = map.device("map");
        let context = MigrationContext { progress_map: Some(map_on(&device, size, 1).await), ..context(&world, &kept) };
        let guest = world.guest(2);
        // Nothing is mirrored before the first fold, so that is what needs the map first.
        map.manners.lock().writes_left = Some(seed % 2);
        let (_, work) = world.start_with(context, by_snapshots()).await;
        match outcome(work).await {
            Outcome::Failed { error, .. } => {
                assert!(error.chain().contains("progress map"), "{}", error.chain());
                assert!(world.slot.device().is_same(&world.source_device), "seed {seed}");
                in_folds += u64::from(kept.made.load(Ordering::Relaxed) > 1);
            }
            Outcome::Switched(_) => world.assert_equal_at_commit(),
            Outcome::Cancelled(_) => panic!("nobody cancelled it"),
        }
        assert_nothing_is_left(&kept);
        world.stop_guest(guest).await;
    }
    assert!(in_folds > 8, "only {in_folds} failed while something was folded");
}

/// A disk that takes no writes.
struct ReadOnly(Disk);

impl block::BlockDevice for ReadOnly {
    fn geometry(&self) -> block::Geometry {
        block::Geometry { read_only: true, ..self.0.geometry() }
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.0.read(offset, buffer)
    }
    fn write(&self, _: block::Mutation) -> IoFuture<'_, ()> {
        block::ready(Err(Error::new(ErrorKind::ReadOnly, "the source is read-only")))
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        self.0.flush()
    }
    fn extents(&self, extent: block::Extent) -> IoFuture<'_, Vec<block::ExtentStatus>> {
        self.0.extents(extent)
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_only_source_is_moved_without_an_overlay_and_stays_read_only_for_the_guest() {
    let world = World::new(5, 1_500_000).await;
    let kept = Arc::new(Kept::default());
    let source = Device::new("source", ReadOnly(world.source.clone()));
    let world = World { slot: Slot::new(source.clone()), source_device: source, ..world };
    let options = MoveOptions { verify: Verify::Full, ..slowly() };
    let (control, work) = world.start_with(context(&world, &kept), options).await;
    until(&control, |progress| progress.bytes_done > 100_000).await;
    assert!(world.slot.device().geometry().read_only, "the guest could write to what is read-only");
    let report = switched(work).await;
    assert_eq!(report.equal, Some(true));
    world.assert_equal_at_commit();
    assert_eq!(kept.made.load(Ordering::Relaxed), 0, "there is nothing that an overlay would hold");
}

#[tokio::test(start_paused = true)]
async fn the_space_that_an_overlay_takes_is_known_beforehand() {
    let header = OverlayHeader::new(Bytes::gib(40), [0; 16], [0; 16]);
    assert!(header.overhead_bytes() < Bytes::mib(8), "{}", header.overhead_bytes());
}
