//! Moving a volume with a cache that guest and copy read from.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{CHUNK, World, moved_under_writes, options, outcome, switched, until};
use block::{Buffer, Bytes, Extent, IoFuture, Offload};
use migrate::{MigrationContext, MoveOptions, OnNoConverge, Outcome, Phase, ScheduleKind, Strategy, Verify};

const SIZE: u64 = 4 << 20;

/// With room for so many chunks.
fn cached(chunks: u64, strategy: Strategy) -> MoveOptions {
    MoveOptions { read_cache_bytes: chunks * CHUNK, strategy, ..options() }
}

#[tokio::test(start_paused = true)]
async fn with_a_cache_both_sides_are_equal_under_writes_and_copies_come_from_memory() {
    for strategy in [Strategy::Mirror, Strategy::MirrorAsync, Strategy::Dbt, Strategy::IncrementalDbt, Strategy::Auto] {
        let (mut copy_hits, mut guest_hits, mut evictions) = (0, 0, 0);
        for seed in 0..6 {
            let verify = [Verify::Off, Verify::Sample, Verify::Full][(seed % 3) as usize];
            // What iterates does not compare what it copies last.
            let verify = if strategy.iterates() { Verify::Off } else { verify };
            let room = [16, 64, 1024][(seed % 3) as usize];
            let options = MoveOptions {
                verify,
                bandwidth: [Some(1 << 20), None][(seed / 2 % 2) as usize],
                hot_blocks: strategy.iterates() && seed % 2 == 0,
                on_no_converge: OnNoConverge::Mirror,
                schedule: [ScheduleKind::Sequential, ScheduleKind::Follow, ScheduleKind::ColdFirst]
                    [(seed / 2) as usize],
                ..cached(room, strategy)
            };
            let report = moved_under_writes(seed, [1, 40][(seed % 2) as usize], options).await;
            let cache = report.read_cache.expect("there was one");
            assert!(cache.bytes_used_max <= room * CHUNK && cache.bytes_max == room * CHUNK, "{strategy}: {cache:?}");
            copy_hits += cache.copy_hits;
            guest_hits += cache.guest_hits;
            evictions += cache.evictions;
        }
        assert!(copy_hits > 0 && guest_hits > 0 && evictions > 0, "{strategy}: {copy_hits} {guest_hits} {evictions}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_guest_reads_before_its_copy_is_copied_from_memory_and_first() {
    let world = World::new(3, SIZE).await;
    world.source.put(0, &[7; SIZE as usize]).await;
    let (control, work) =
        world.start(MoveOptions { bandwidth: Some(256 << 10), ..cached(256, Strategy::Mirror) }).await;
    until(&control, |progress| progress.bytes_copied > 0).await;
    // The end of the volume, a third of each chunk.
    let guest = world.lane();
    let last = SIZE / CHUNK - 20;
    for chunk in last..last + 20 {
        guest.device.read(Bytes(chunk * CHUNK), Buffer::unpooled(CHUNK as usize / 3)).await.expect("it answers");
    }
    let done = control.snapshot().bytes_done;
    until(&control, |progress| progress.bytes_done >= done + (1 << 20)).await;
    // The target has them long before the copy comes to the end.
    let there = world.target.contents().await;
    assert!(there[(last * CHUNK) as usize..].iter().all(|byte| *byte == 7), "they wait for their turn");
    control.set_bandwidth(None);
    let report = switched(work).await;
    world.assert_equal_at_commit();
    let cache = report.read_cache.expect("there was one");
    assert_eq!((cache.chunks_fetched, cache.bytes_fetched, cache.copy_hits), (20, 20 * CHUNK, 20), "{cache:?}");
    assert_eq!(cache.copy_misses, SIZE / CHUNK - 20);
}

#[tokio::test(start_paused = true)]
async fn a_comparison_reads_the_disk() {
    for verify in [Verify::Full, Verify::Off] {
        let world = World::new(5, SIZE).await;
        world.source.put(0, &[7; SIZE as usize]).await;
        let options = MoveOptions { verify, bandwidth: Some(1 << 20), ..cached(SIZE / CHUNK, Strategy::Mirror) };
        let (control, work) = world.start(options).await;
        until(&control, |progress| progress.bytes_copied > SIZE / 2).await;
        // The disk returns something else from now on; what was copied, and what is in memory, does not have it.
        world.source.put(CHUNK, &[8]).await;
        control.set_bandwidth(None);
        match (verify, outcome(work).await) {
            (Verify::Full, Outcome::Failed { error, report }) => {
                assert!(error.chain().contains("differ"), "{}", error.chain());
                assert_eq!(report.equal, Some(false));
                assert!(world.slot.device().is_same(&world.source_device), "the guest is on the source");
            }
            (Verify::Off, Outcome::Switched(report)) => assert_eq!(report.equal, None),
            (_, other) => panic!("{verify:?}: {other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_cancel_the_guest_is_on_the_source_itself() {
    let world = World::new(6, SIZE).await;
    let guest = world.guest(2);
    let (control, work) = world.start(MoveOptions { bandwidth: Some(256 << 10), ..cached(64, Strategy::Dbt) }).await;
    until(&control, |progress| progress.bytes_copied > 100_000).await;
    control.cancel().expect("it can be cancelled");
    let Outcome::Cancelled(report) = outcome(work).await else { panic!("it was cancelled") };
    assert!(world.slot.device().is_same(&world.source_device), "the cache is in the guest's way");
    assert!(report.phase == Phase::Cancelled && report.read_cache.is_some_and(|cache| cache.guest_misses > 0));
    world.env.sleep(Duration::from_millis(200)).await;
    world.stop_guest(guest).await;
}

/// The file system copies nothing.
struct Unwilling;

impl Offload for Unwilling {
    fn copy(&self, _: Extent) -> IoFuture<'_, Bytes> {
        block::ready(Ok(Bytes::ZERO))
    }
}

#[tokio::test(start_paused = true)]
async fn where_the_file_system_may_copy_by_itself_nothing_is_kept() {
    let world = World::new(7, SIZE).await;
    let context = MigrationContext { offload: Some(Arc::new(Unwilling)), ..world.context() };
    let (_, work) = world.start_with(context, cached(64, Strategy::Mirror)).await;
    assert_eq!(switched(work).await.read_cache, None);
    world.assert_equal_at_commit();
}
