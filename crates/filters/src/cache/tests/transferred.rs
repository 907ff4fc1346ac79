//! A cache that is filled from another host's while the guest is here.

use std::collections::BTreeSet;
use std::sync::Arc;

use block::testing::Random;
use block::{Buffer, Bytes, Data, Extent, IoFuture, Mutation};
use parking_lot::Mutex;

use super::super::{Admission, Cache, CacheMode, OtherCache};
use super::{BLOCK, MODES, SIZE, Stand, byte_at, options, write, yield_often};

/// A cache of another host, and what was asked of it.
struct Other {
    cache: Cache,
    blocks: BTreeSet<u64>,
    asked: Mutex<Vec<u64>>,
}

impl OtherCache for Other {
    fn may_have(&self, block: u64) -> bool {
        self.blocks.contains(&block)
    }

    fn read(&self, block: u64) -> IoFuture<'_, Option<Buffer>> {
        self.asked.lock().push(block);
        Box::pin(self.cache.peek_then(block, |read| read))
    }
}

fn blocks() -> u64 {
    SIZE.get().div_ceil(BLOCK)
}

fn length_of(block: u64) -> u64 {
    BLOCK.min(SIZE.get() - block * BLOCK)
}

/// A cache with the blocks `cached` of a volume whose block n has the bytes n + 1, and an empty one over the same base.
async fn two(mode: CacheMode, cached: impl IntoIterator<Item = u64>) -> (Stand, Stand) {
    let from = Stand::new(options(CacheMode::WriteThrough), 40).await;
    for block in 0..blocks() {
        write(&from.base, block * BLOCK, &vec![block as u8 + 1; length_of(block) as usize]).await;
    }
    from.read_blocks(cached).await;
    let partition = super::memory(super::header_of(SIZE, BLOCK, 40).partition_bytes());
    let to = Stand::over(from.base.clone(), partition, options(mode), 40).await;
    (from, to)
}

/// Has one block come.
async fn bring(from: &Stand, to: &Stand, block: u64) -> Option<Admission> {
    let bytes = from.cache.peek_then(block, |read| read).await.expect("it answers")?;
    Some(to.cache.take(block, bytes.freeze()).await.expect("it takes it"))
}

#[tokio::test(start_paused = true)]
async fn what_was_changed_while_the_cache_was_withheld_is_dropped_when_it_is_asked_for() {
    for mode in MODES {
        let (from, to) = two(mode, [0, 1, 2, 3]).await;
        to.cache.begin_transfer(true, 100);
        bring(&from, &to, 0).await;
        // One sector, before its block comes and after another has come.
        write(&to.guest, BLOCK + 512, &[9; 512]).await;
        write(&to.guest, 0, &[9; 512]).await;
        for block in [1, 2, 3] {
            assert_eq!(bring(&from, &to, block).await, Some(Admission::Admitted), "{mode}");
        }
        assert_eq!(byte_at(&to.guest, 0, BLOCK).await, 9, "the guest goes to the base, {mode}");
        assert_eq!((to.counts()[0], to.cache.transfer_status().changed), (0, 2), "{mode}");
        to.cache.attach().await;
        assert_eq!(byte_at(&to.guest, 2 * BLOCK, BLOCK).await, 3);
        assert_eq!(to.counts()[0], 1, "{mode}: the cache answers what was not changed");
        assert_eq!((byte_at(&to.guest, 0, BLOCK).await, byte_at(&to.guest, BLOCK, BLOCK).await), (9, 2), "{mode}");
        yield_often().await;
        let status = to.cache.transfer_status();
        assert_eq!((status.changed, status.dropped, to.counts()[0]), (0, 2, 1), "{mode}");
        assert_eq!(byte_at(&to.guest, BLOCK + 512, 512).await, 9, "{mode}: what was read of the base was admitted");
        assert_eq!(to.counts()[0], 2, "{mode}");
        // Nothing may come any more.
        assert_eq!(bring(&from, &to, 0).await, Some(Admission::Outdated), "{mode}");
        to.cache.end_transfer().await.expect("nothing fails");
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_transfer_drops_what_nobody_has_asked_for() {
    let (from, to) = two(CacheMode::WriteThrough, [5, 6]).await;
    to.cache.begin_transfer(true, 1);
    bring(&from, &to, 5).await;
    bring(&from, &to, 6).await;
    // More than the table has room for.
    write(&to.guest, 5 * BLOCK, &[9; 2 * BLOCK as usize]).await;
    to.cache.end_transfer().await.expect("nothing fails");
    assert_eq!((to.cache.transfer_status().dropped, to.cache.hottest(9).len()), (2, 0));
    assert_eq!(byte_at(&to.guest, 5 * BLOCK, BLOCK).await, 9);
}

#[tokio::test(start_paused = true)]
async fn a_miss_is_read_at_the_other_host_unless_the_guest_has_changed_the_block() {
    for mode in MODES {
        let (from, to) = two(mode, [0, 1, 2]).await;
        to.cache.begin_transfer(false, 100);
        let other = Arc::new(Other { cache: from.cache.clone(), blocks: [0, 1, 2].into(), asked: Mutex::default() });
        to.cache.reach_other_by(Some(Arc::clone(&other) as _));
        write(&to.guest, BLOCK, &[9; 512]).await;
        let read = to.guest.read(Bytes(512), Buffer::unpooled(512)).await.expect("it answers");
        assert_eq!((read[0], byte_at(&to.guest, BLOCK, BLOCK).await), (1, 9), "{mode}");
        assert_eq!(byte_at(&to.guest, 8 * BLOCK, BLOCK).await, 9, "what it has not the base has");
        yield_often().await;
        assert_eq!(*other.asked.lock(), [0], "{mode}");
        assert_eq!(byte_at(&to.guest, 0, BLOCK).await, 1);
        assert_eq!(*other.asked.lock(), [0], "{mode}: the block was taken whole");
        assert_eq!(bring(&from, &to, 1).await, Some(Admission::Outdated), "{mode}");
        assert_eq!(bring(&from, &to, 0).await, Some(Admission::Present), "{mode}");
        to.cache.end_transfer().await.expect("nothing fails");
        assert_eq!(byte_at(&to.guest, 2 * BLOCK, BLOCK).await, 3);
        assert_eq!(*other.asked.lock(), [0], "{mode}: it is over");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_invalidated_before_the_guest_came_is_not_answered() {
    let (from, to) = two(CacheMode::WriteBack, [0, 1]).await;
    to.cache.begin_transfer(false, 100);
    bring(&from, &to, 0).await;
    bring(&from, &to, 1).await;
    write(&from.guest, 0, &[9; 512]).await;
    to.cache.invalidate(0).await.expect("nothing fails");
    to.cache.invalidate(1 << 40).await.expect("there is no such block");
    assert_eq!((byte_at(&to.guest, 0, BLOCK).await, byte_at(&to.guest, BLOCK, BLOCK).await), (9, 2));
    assert_eq!(to.counts()[..3], [1, 0, 1]);
    yield_often().await;
    // It may come again, as it is now.
    assert_eq!(bring(&from, &to, 0).await, Some(Admission::Present), "it was read of the base meanwhile");
}

#[tokio::test(start_paused = true)]
async fn what_comes_never_takes_the_place_of_what_the_guest_has_read_here() {
    let (from, to) = two(CacheMode::WriteThrough, 0..20).await;
    let small = Stand::over(
        to.base.clone(),
        super::memory(super::header_of(SIZE, BLOCK, 4).partition_bytes()),
        options(CacheMode::WriteThrough),
        4,
    )
    .await;
    small.cache.begin_transfer(false, 100);
    small.read_blocks([20, 21]).await;
    let mut came = Vec::new();
    for block in [7, 8, 9] {
        came.extend(bring(&from, &small, block).await);
    }
    assert_eq!(came, [Admission::Admitted, Admission::Admitted, Admission::Full]);
    assert_eq!(small.cache.hottest(9), [21, 20, 7, 8], "in the order of their worth, behind what is asked for here");
}

#[tokio::test(start_paused = true)]
async fn the_last_hits_tell_how_often_another_cache_would_hit() {
    let (from, to) = two(CacheMode::WriteThrough, 0..10).await;
    to.cache.begin_transfer(false, 100);
    assert!(from.cache.last_hits().is_empty(), "nobody listens");
    from.cache.watch_invalidations(100);
    from.read_blocks([1, 1, 2, 3]).await;
    bring(&from, &to, 1).await;
    bring(&from, &to, 3).await;
    let has: BTreeSet<u64> = to.cache.hottest(99).into_iter().collect();
    assert_eq!(from.cache.last_hits().iter().filter(|block| has.contains(block)).count(), 3);
}

/// The guest works on and blocks come, in any order, in both ways and all modes: every read is what was written last.
#[tokio::test(start_paused = true)]
async fn a_guest_never_reads_older_bytes_while_a_cache_comes() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mode = MODES[random.below(3) as usize];
        let (from, to) = two(mode, (0..blocks()).filter(|_| random.one_in(2)).collect::<Vec<_>>()).await;
        let is_withheld = random.one_in(2);
        to.cache.begin_transfer(is_withheld, random.below(12) as usize);
        let mut model: Vec<u8> = (0..SIZE.get()).map(|at| (at / BLOCK) as u8 + 1).collect();
        let held = from.cache.hottest(99);
        if !is_withheld && random.one_in(2) {
            let other =
                Other { cache: from.cache.clone(), blocks: held.iter().copied().collect(), asked: Mutex::default() };
            to.cache.reach_other_by(Some(Arc::new(other)));
        }
        for step in 0..200_u64 {
            let start = random.below(SIZE.get() / 512) * 512;
            let length = (512 * (1 + random.below(20))).min(SIZE.get() - start);
            let range = start as usize..(start + length) as usize;
            match random.below(20) {
                0..=7 => {
                    let read =
                        to.guest.read(Bytes(start), Buffer::unpooled(length as usize)).await.expect("it answers");
                    assert!(read[..] == model[range], "seed {seed}, step {step}: {start}..{length} in {mode}");
                }
                8..=12 => {
                    model[range].fill(step as u8);
                    write(&to.guest, start, &vec![step as u8; length as usize]).await;
                }
                13 => {
                    model[range].fill(0);
                    let zeroes = Mutation::zeroes(Extent::new(Bytes(start), Bytes(length)), true);
                    to.guest.write(zeroes).await.expect("it takes it");
                }
                14..=17 => {
                    if let Some(block) = held.get(random.below(30) as usize) {
                        bring(&from, &to, *block).await;
                    }
                }
                18 if step > 100 => to.cache.attach().await,
                19 if step > 150 => to.cache.end_transfer().await.expect("nothing fails"),
                _ => yield_often().await,
            }
        }
        to.cache.end_transfer().await.expect("nothing fails");
        to.cache.drain().await.expect("nothing fails");
        let read = to.guest.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())).await.expect("it answers");
        let base = to.base.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())).await.expect("it answers");
        assert!(read[..] == model[..] && base[..] == model[..], "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_was_closed_leaves_its_partition_alone() {
    let (from, to) = two(CacheMode::WriteThrough, [0, 1]).await;
    to.cache.begin_transfer(true, 100);
    bring(&from, &to, 0).await;
    write(&to.guest, 0, &[9; 512]).await;
    to.cache.close().await;
    let size = to.partition.size();
    let before = to.partition.read(Bytes::ZERO, Buffer::unpooled(size.as_usize())).await.expect("it answers");
    assert_eq!(bring(&from, &to, 1).await, Some(Admission::Full));
    to.cache.end_transfer().await.expect("nothing is asked of it");
    let after = to.partition.read(Bytes::ZERO, Buffer::unpooled(size.as_usize())).await.expect("it answers");
    assert!(before[..] == after[..], "it was written to");
}

#[tokio::test(start_paused = true)]
async fn a_block_of_another_length_is_refused() {
    let (_, to) = two(CacheMode::WriteBack, []).await;
    to.cache.begin_transfer(false, 1);
    for (block, length) in [(0, 512), (blocks() - 1, BLOCK as usize), (blocks(), BLOCK as usize)] {
        assert!(to.cache.take(block, Data::copy_of(&vec![0; length])).await.is_err(), "{block}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_flush_covers_what_others_have_written_to_the_base_before() {
    let (to, base, _own) = super::over_disks(options(CacheMode::WriteThrough), 8).await;
    to.cache.begin_transfer(false, 1);
    // Through the cache of the other host, which does not flush it.
    write(&to.base, 0, &[9; BLOCK as usize]).await;
    to.cache.reach_base_by(to.base.clone());
    to.guest.flush().await.expect("it answers");
    base.lose_power();
    let read = to.base.read(Bytes::ZERO, Buffer::unpooled(BLOCK as usize)).await.expect("it answers");
    assert!(read.iter().all(|byte| *byte == 9), "some of it was lost");
}
