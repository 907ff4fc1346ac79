//! A small world for tests: a virtual clock, disks that take time and fail on demand, a journal, a guest.
#![allow(dead_code, missing_docs, unreachable_pub, unused_imports, reason = "each test file uses a part of it")]

pub mod disk;
pub mod guest;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::{
    BlockDevice, Buffer, BufferPool, Bytes, Data, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture,
    MemDevice, Mutation, MutationKind, Result, Slot,
};
use env::EnvRef;
use env::testing::PausedEnv;
use migrate::{Control, JobJournal, Migration, MigrationContext, MoveOptions, Outcome, Phase, ProgressMap, UnderWay};
use parking_lot::Mutex;

pub use disk::{Disk, Manners};
pub use guest::Guest;

/// What becomes of a commit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fate {
    Stored,
    /// It fails; the disk may have it or not, and the journal does not know.
    Failed,
    /// It takes this long and is stored then.
    Late(Duration),
}

/// A journal in memory that looks at both disks at the commit.
pub struct TestJournal {
    env: EnvRef,
    disks: Mutex<(Disk, Disk)>,
    pub recorded: Mutex<Vec<Phase>>,
    pub fates: Mutex<VecDeque<Fate>>,
    /// Records fail while this is set.
    pub records_fail: AtomicBool,
    /// Somebody else has decided that the commit counts: it cannot be taken back.
    pub counts: AtomicBool,
    pub commits: AtomicU64,
    /// Whether the target holds the volume, as far as the journal knows.
    pub committed: AtomicBool,
    /// Whether the commit found the two sides equal; only the first is looked at, which has the guest held.
    pub equal: Mutex<Option<bool>>,
    pub target_flushes: AtomicU64,
    /// How often it was asked to have the target as the commit needs it.
    pub before_commits: AtomicU64,
}

impl JobJournal for TestJournal {
    fn record(&self, phase: Phase) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.env.sleep(Duration::from_millis(1)).await;
            if self.records_fail.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Io, "the journal fails"));
            }
            self.recorded.lock().push(phase);
            self.committed.store(false, Ordering::Relaxed);
            Ok(())
        })
    }

    fn revert(&self) -> IoFuture<'_, bool> {
        Box::pin(async move {
            let counts = self.counts.load(Ordering::Relaxed);
            if !counts {
                return self.record(Phase::Reverting).await.map(|()| true);
            }
            self.committed.store(true, Ordering::Relaxed);
            Ok(false)
        })
    }

    fn before_commit(&self) -> IoFuture<'static, ()> {
        self.before_commits.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(()) })
    }

    fn commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            assert!(
                self.before_commits.load(Ordering::Relaxed) > self.commits.load(Ordering::Relaxed),
                "the commit is stored, and the target was not made ready for it"
            );
            if self.commits.fetch_add(1, Ordering::Relaxed) == 0 {
                let (source, target) = self.disks.lock().clone();
                // From here on the guest's errors would be its own.
                target.manners.lock().writes_left = None;
                let (a, b) = (source.contents().await, target.contents().await);
                *self.equal.lock() = Some(a[..] == b[..a.len()]);
                assert_eq!(
                    target.overlaps.load(Ordering::Relaxed),
                    0,
                    "overlapping writes were under way at the target"
                );
                self.target_flushes.store(target.flushes.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            let fate = self.fates.lock().pop_front().unwrap_or(Fate::Stored);
            match fate {
                Fate::Stored => self.env.sleep(Duration::from_millis(1)).await,
                Fate::Failed => return Err(Error::new(ErrorKind::Io, "the journal fails the commit")),
                Fate::Late(span) => self.env.sleep(span).await,
            }
            self.committed.store(true, Ordering::Relaxed);
            Ok(())
        })
    }
}

/// Source, target, slot, journal, and a guest.
pub struct World {
    pub env: EnvRef,
    pub source: Disk,
    pub source_device: Device,
    pub target: Disk,
    pub target_device: Device,
    pub slot: Slot,
    pub journal: Arc<TestJournal>,
    pub stop: Arc<AtomicBool>,
}

pub const CHUNK: u64 = 4096;

pub fn options() -> MoveOptions {
    MoveOptions { chunk_bytes: CHUNK, window_bytes_max: 1 << 20, ..MoveOptions::default() }
}

impl World {
    /// A volume of `size` bytes, about half of it data in pieces of all sizes.
    pub async fn new(seed: u64, size: u64) -> Self {
        let env: EnvRef = PausedEnv::shared(seed);
        let source = Disk::new(&env, Bytes(size));
        let target = Disk::new(&env, Bytes(size));
        let mut at = 0;
        while at < size {
            let length = (env.random() % 100_000).min(size - at);
            if env.random().is_multiple_of(2) {
                let byte = (env.random() % 255) as u8 + 1;
                source.put(at, &vec![byte; length as usize]).await;
            }
            at += length.max(1);
        }
        for disk in [&source, &target] {
            disk.manners.lock().delay_ms = 3;
        }
        Self::over(env, source, target)
    }

    pub fn over(env: EnvRef, source: Disk, target: Disk) -> Self {
        let (source_device, target_device) = (source.device("source"), target.device("target"));
        let journal = TestJournal {
            env: Arc::clone(&env),
            disks: Mutex::new((source.clone(), target.clone())),
            recorded: Mutex::default(),
            fates: Mutex::default(),
            records_fail: AtomicBool::new(false),
            counts: AtomicBool::new(false),
            commits: AtomicU64::new(0),
            committed: AtomicBool::new(false),
            equal: Mutex::new(None),
            target_flushes: AtomicU64::new(0),
            before_commits: AtomicU64::new(0),
        };
        Self {
            slot: Slot::new(source_device.clone()),
            env,
            source,
            source_device,
            target,
            target_device,
            journal: Arc::new(journal),
            stop: Arc::default(),
        }
    }

    pub fn context(&self) -> MigrationContext {
        MigrationContext {
            env: Arc::clone(&self.env),
            slot: self.slot.clone(),
            source: self.source_device.clone(),
            target: self.target_device.clone(),
            medium: migrate::Medium::default(),
            copy_face: None,
            redirect: None,
            target_is_fresh: true,
            phase: Phase::Preparing,
            under_way: UnderWay::new(Duration::ZERO, self.env.now()),
            journal: Arc::clone(&self.journal) as _,
            progress_map: None,
            meter: None,
            comparison: None,
            offload: None,
            pool: BufferPool::new(Bytes::mib(8)),
            snapshots: None,
        }
    }

    pub async fn start(&self, options: MoveOptions) -> (Control, tokio::task::JoinHandle<Outcome>) {
        self.start_with(self.context(), options).await
    }

    pub async fn start_with(
        &self,
        context: MigrationContext,
        options: MoveOptions,
    ) -> (Control, tokio::task::JoinHandle<Outcome>) {
        let (control, work) = Migration::start(context, options).await.expect("the migration starts");
        (control, tokio::spawn(work))
    }

    /// Guest tasks that write, zero, discard and flush until they are stopped, each in a part of its own that it checks
    /// against a model, and one that writes anywhere, overlapping itself.
    pub fn guest(&self, tasks: u64) -> Vec<tokio::task::JoinHandle<u64>> {
        self.guest_within(tasks, self.source.geometry().size.0)
    }

    /// The same, within the first `size` bytes.
    pub fn guest_within(&self, tasks: u64, size: u64) -> Vec<tokio::task::JoinHandle<u64>> {
        let own = size / 2 / tasks;
        let mut all: Vec<_> = (0..tasks)
            .map(|task| {
                let guest = self.lane();
                tokio::spawn(async move { guest.work_alone(task * own, own).await })
            })
            .collect();
        let wild = self.lane();
        all.push(tokio::spawn(async move { wild.work_wildly(size / 2, size - size / 2).await }));
        all
    }

    pub fn lane(&self) -> Guest {
        let device = Device::new("guest", self.slot.lane());
        Guest { device, env: Arc::clone(&self.env), stop: Arc::clone(&self.stop) }
    }

    /// Stops the guest; every one of its tasks must have seen what it expected.
    pub async fn stop_guest(&self, tasks: Vec<tokio::task::JoinHandle<u64>>) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let mut done = 0;
        for task in tasks {
            done += task.await.expect("the guest is content");
        }
        done
    }

    pub fn assert_equal_at_commit(&self) {
        assert_eq!(*self.journal.equal.lock(), Some(true), "the sides differed at the switchover");
    }
}

/// Waits until a migration has lost its target or is over: whether it has lost it.
pub async fn lost(control: &Control) -> bool {
    until(control, |progress| progress.phase == Phase::TargetLost || progress.phase.is_final()).await.phase
        == Phase::TargetLost
}

/// Waits until `is_reached` holds of the progress.
pub async fn until(control: &Control, is_reached: impl Fn(&migrate::Progress) -> bool) -> migrate::Progress {
    let mut watch = control.watch();
    let reached = tokio::time::timeout(Duration::from_secs(600), watch.wait_for(|progress| is_reached(progress)));
    reached.await.expect("the migration gets there").expect("the migration runs").clone()
}

/// The outcome, which must come.
pub async fn outcome(work: tokio::task::JoinHandle<Outcome>) -> Outcome {
    let ended = tokio::time::timeout(Duration::from_secs(3600), work).await;
    ended.expect("the migration ends").expect("the migration does not panic")
}

/// The report of a migration that must have switched.
pub async fn switched(work: tokio::task::JoinHandle<Outcome>) -> migrate::Report {
    match outcome(work).await {
        Outcome::Switched(report) => report,
        other => panic!("the migration did not switch over: {other:?}"),
    }
}

/// Moves a volume while a guest writes to all of it, and gives the report: both sides were equal at the commit, and nothing
/// was written to the source after it.
pub async fn moved_under_writes(seed: u64, target_delay_ms: u64, options: MoveOptions) -> migrate::Report {
    let world = World::new(seed, 3_000_000 + seed * 1013).await;
    world.target.manners.lock().delay_ms = target_delay_ms;
    let guest = world.guest(3);
    let is_verified = options.verify != migrate::Verify::Off;
    let (_, work) = world.start(options).await;
    let report = switched(work).await;
    world.assert_equal_at_commit();
    let frozen = world.source.contents().await;
    world.env.sleep(Duration::from_millis(500)).await;
    world.stop_guest(guest).await;
    assert_eq!(world.source.contents().await, frozen, "the source changed after the switchover");
    assert_eq!(report.equal, is_verified.then_some(true));
    assert_eq!(report.verified, is_verified, "{report:?}");
    report
}

/// Lets a move with `options` and `map` go on for `seconds` beside a guest that writes to the first 3 MB, all of which is in
/// the first extent of the activity log; then its process dies. Gives the disks to the next one.
pub async fn killed_after(world: World, map: &Device, size: u64, options: MoveOptions, seconds: f64) -> World {
    let mut context = world.context();
    context.progress_map = Some(map_on(map, size, 1).await);
    let guest = world.guest_within(2, 3_000_000);
    let (control, work) = Migration::start(context, options).await.expect("it starts");
    let work = tokio::spawn(work);
    until(&control, |progress| progress.seconds > seconds).await;
    work.abort();
    world.stop_guest(guest).await;
    world.source.reboot();
    world.target.reboot();
    World::over(world.env.clone(), world.source.clone(), world.target.clone())
}

pub async fn map_on(device: &Device, size: u64, boot: u8) -> ProgressMap {
    map_of_pages(device, size, boot, ProgressMap::PAGE_CHUNKS).await
}

/// The same, with pages of so many chunks.
pub async fn map_of_pages(device: &Device, size: u64, boot: u8, page_chunks: u64) -> ProgressMap {
    let chunk = options().chunk_size().expect("the chunk size is valid");
    let identity =
        migrate::MapIdentity { boot: [boot; 16], job: [1; 16], volume: Bytes(size), chunk, page_chunks, skips: false };
    ProgressMap::open(device.clone(), identity).await.expect("the map opens")
}

pub fn map_device(size: u64) -> Device {
    let chunk = options().chunk_size().expect("the chunk size is valid");
    Device::new("map", MemDevice::new(ProgressMap::bytes_needed(Bytes(size), chunk, 1)))
}
