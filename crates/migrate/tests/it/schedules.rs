//! Moving a volume in another order than its own: where the guest's disk head is, or the coldest first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{World, moved_under_writes, options, switched, until};
use block::{
    BlockDevice, Buffer, Bytes, Data, Device, Extent, ExtentStatus, Geometry, IoFuture, MemDevice, Mutation, Slot,
};
use migrate::{Medium, MigrationContext, MoveOptions, OnNoConverge, ScheduleKind, Strategy, Verify};
use parking_lot::Mutex;

const SIZE: u64 = 8 << 20;

fn in_order_of(schedule: ScheduleKind, strategy: Strategy) -> MoveOptions {
    MoveOptions { schedule, strategy, follow_run_bytes: 128 << 10, ..options() }
}

#[tokio::test(start_paused = true)]
async fn whatever_the_order_both_sides_are_equal_under_writes() {
    for schedule in [ScheduleKind::Follow, ScheduleKind::ColdFirst] {
        for strategy in
            [Strategy::Mirror, Strategy::MirrorAsync, Strategy::Dbt, Strategy::IncrementalDbt, Strategy::Auto]
        {
            for seed in 0..6 {
                let verify = [Verify::Off, Verify::Sample, Verify::Full][(seed % 3) as usize];
                // What iterates does not compare what it copies last.
                let verify = if strategy.iterates() { Verify::Off } else { verify };
                let options = MoveOptions {
                    verify,
                    bandwidth: [None, Some(1 << 20)][(seed / 2 % 2) as usize],
                    hot_blocks: strategy.iterates() && seed % 2 == 0,
                    on_no_converge: OnNoConverge::Mirror,
                    follow_ratio: (seed % 4) as u8 + 1,
                    ..in_order_of(schedule, strategy)
                };
                let report = moved_under_writes(seed, [1, 40][(seed % 2) as usize], options).await;
                assert_eq!((report.schedule.asked, report.schedule.used), (schedule, schedule), "{strategy}");
                assert!(report.schedule.runs_chosen > 0, "{schedule} with {strategy}: {:?}", report.schedule);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_without_a_head_is_copied_in_sequence() {
    let world = World::new(1, SIZE).await;
    let medium = Medium { is_rotational: Some(false), ..Medium::default() };
    let context = MigrationContext { medium, ..world.context() };
    let (_, work) = world.start_with(context, in_order_of(ScheduleKind::Follow, Strategy::Mirror)).await;
    let report = switched(work).await;
    assert_eq!((report.schedule.asked, report.schedule.used), (ScheduleKind::Follow, ScheduleKind::Sequential));
    assert_eq!(report.schedule.runs_chosen, 0);
}

/// A disk that counts how far its head travels, and does not answer reads of one size while it holds them.
#[derive(Clone)]
struct Head {
    memory: Arc<MemDevice>,
    env: env::EnvRef,
    at: Arc<Mutex<u64>>,
    travelled: Arc<AtomicU64>,
    holds: Arc<AtomicBool>,
}

const HELD_BYTES: usize = 512;

impl Head {
    fn new(env: &env::EnvRef) -> Self {
        let (at, travelled, holds) = (Arc::default(), Arc::default(), Arc::default());
        Self { memory: Arc::new(MemDevice::new(Bytes(SIZE))), env: Arc::clone(env), at, travelled, holds }
    }

    fn seek(&self, extent: Extent) {
        let mut at = self.at.lock();
        self.travelled.fetch_add(at.abs_diff(extent.offset.0), Ordering::Relaxed);
        *at = extent.end().0;
    }
}

impl BlockDevice for Head {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            while buffer.len() == HELD_BYTES && self.holds.load(Ordering::Relaxed) {
                self.env.sleep(Duration::from_millis(10)).await;
            }
            self.env.sleep(Duration::from_millis(2)).await;
            self.seek(Extent::new(offset, Bytes(buffer.len() as u64)));
            self.memory.read(offset, buffer).await
        })
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.env.sleep(Duration::from_millis(2)).await;
            self.seek(mutation.extent());
            self.memory.write(mutation).await
        })
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        self.memory.flush()
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.memory.extents(extent)
    }
}

/// A world whose source is that disk, full of data.
async fn world_with_head(seed: u64) -> (World, Head) {
    let mut world = World::new(seed, SIZE).await;
    let head = Head::new(&world.env);
    let all = Mutation::data(Bytes::ZERO, Data::copy_of(&[7; SIZE as usize]));
    head.memory.write(all).await.expect("memory takes it");
    world.source_device = Device::new("source", head.clone());
    world.slot = Slot::new(world.source_device.clone());
    // A guest that is answered at once after the switchover would let nobody else run.
    world.target.manners.lock().delay_ms = 1;
    (world, head)
}

/// How far the head travels while a volume moves whose guest reads in one place after another, about as fast as the volume is
/// copied, from the middle on.
async fn travelled(schedule: ScheduleKind) -> u64 {
    let (world, head) = world_with_head(5).await;
    // As fast in either order, so that the guest's own way is as long.
    let bandwidth = Some(1 << 20);
    let own = in_order_of(schedule, Strategy::Mirror);
    let options = MoveOptions { chunk_bytes: 65_536, verify: Verify::Off, bandwidth, ..own };
    let (_, work) = world.start(options).await;
    let (lane, stop) = (world.lane(), Arc::clone(&world.stop));
    let guest = tokio::spawn(async move {
        let mut place = SIZE / 2;
        while !stop.load(Ordering::Relaxed) {
            place = (place + (128 << 10)) % SIZE;
            for step in 0..64 {
                let buffer = Buffer::unpooled(4096);
                lane.device.read(Bytes(place + step % 16 * 4096), buffer).await.expect("it reads");
            }
        }
    });
    switched(work).await;
    let travelled = head.travelled.load(Ordering::Relaxed);
    world.stop.store(true, Ordering::Relaxed);
    guest.await.expect("the guest is content");
    travelled
}

#[tokio::test(start_paused = true)]
async fn the_head_travels_less_when_the_copy_follows_it() {
    let (sequential, follow) = (travelled(ScheduleKind::Sequential).await, travelled(ScheduleKind::Follow).await);
    assert!(follow * 2 < sequential, "{follow} bytes when it is followed, {sequential} in sequence");
}

#[tokio::test(start_paused = true)]
async fn a_guest_whose_request_is_not_answered_does_not_stop_the_copy() {
    let (world, head) = world_with_head(6).await;
    let options = MoveOptions { chunk_bytes: 65_536, ..in_order_of(ScheduleKind::Follow, Strategy::Mirror) };
    head.holds.store(true, Ordering::Relaxed);
    let (control, work) = world.start(options).await;
    let lane = world.lane();
    let stuck =
        tokio::spawn(async move { lane.device.read(Bytes(SIZE / 2), Buffer::unpooled(HELD_BYTES)).await.map(drop) });
    let began = world.env.now();
    until(&control, |progress| progress.bytes_left == 0).await;
    // 64 runs of 128 KiB, each after 50 ms at most.
    let took = world.env.now().since(began);
    assert!(took < Duration::from_secs(5), "the copy took {took:?}");
    head.holds.store(false, Ordering::Relaxed);
    stuck.await.expect("it ends").expect("it is answered");
    let report = switched(work).await;
    assert!(report.schedule.waits_ended >= 32, "{:?}", report.schedule);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_reads_one_place_for_ever_has_the_other_end_moved_too() {
    let (world, _) = world_with_head(7).await;
    let (lane, stop) = (world.lane(), Arc::clone(&world.stop));
    let guest = tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            lane.device.read(Bytes(SIZE - 4096), Buffer::unpooled(4096)).await.expect("it reads");
        }
    });
    let (_, work) = world.start(in_order_of(ScheduleKind::Follow, Strategy::Mirror)).await;
    let report = switched(work).await;
    world.stop.store(true, Ordering::Relaxed);
    guest.await.expect("the guest is content");
    assert!(report.schedule.runs_bounded > 0 && report.schedule.runs_chosen > 0, "{:?}", report.schedule);
    assert_eq!(report.bytes_copied, SIZE, "everything was copied once");
}
