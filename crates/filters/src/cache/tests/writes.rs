//! What is written, in each mode; write-back, its limits and its end.

use std::time::Duration;

use block::{Buffer, Bytes, Data, Device, Extent, Mutation};

use super::super::{CacheMode, CacheOptions, WriteBackStep};
use super::{BLOCK, BOOT, SECTOR, SIZE, Stand, byte_at, header_of, memory, options, over_disks, write, zero};
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};

const READ_ONLY: CacheMode = CacheMode::ReadOnly;
const WRITE_THROUGH: CacheMode = CacheMode::WriteThrough;
const WRITE_BACK: CacheMode = CacheMode::WriteBack;

/// A cache that has some blocks of fives, in a mode.
async fn warm(mode: CacheMode, blocks: u64) -> Stand {
    let stand = Stand::new(options(mode), 16).await;
    write(&stand.base, 0, &[5; 16 * BLOCK as usize]).await;
    stand.read_blocks(0..blocks).await;
    stand
}

#[tokio::test(start_paused = true)]
async fn a_read_only_cache_drops_what_is_written() {
    let stand = warm(READ_ONLY, 2).await;
    write(&stand.guest, 0, &[6; BLOCK as usize]).await;
    write(&stand.guest, BLOCK, &[6; SECTOR as usize]).await;
    let status = stand.cache.status();
    assert_eq!((status.places - status.places_free, status.writes_around), (1, 2));
    assert_eq!(byte_at(&stand.base, BLOCK, 1).await, 6);
    assert_eq!((byte_at(&stand.guest, 0, BLOCK).await, byte_at(&stand.guest, BLOCK, BLOCK).await), (6, 6));
    assert_eq!(stand.counts()[..3], [0, 1, 3]);
    // A crash brings nothing old back.
    let again = stand.again(BOOT, options(READ_ONLY)).await;
    assert_eq!((byte_at(&again.guest, 0, BLOCK).await, byte_at(&again.guest, BLOCK, BLOCK).await), (6, 6));
}

#[tokio::test(start_paused = true)]
async fn a_write_through_cache_has_what_is_written_and_so_has_the_base() {
    let stand = warm(WRITE_THROUGH, 2).await;
    write(&stand.guest, 100, &[6; 10]).await;
    write(&stand.guest, BLOCK, &[7; BLOCK as usize]).await;
    // What is not cached is not admitted by a write.
    write(&stand.guest, 8 * BLOCK, &[7; BLOCK as usize]).await;
    assert_eq!((byte_at(&stand.base, 100, 1).await, byte_at(&stand.base, BLOCK, 1).await), (6, 7));
    let first = stand.guest.read(Bytes(0), Buffer::unpooled(BLOCK as usize)).await.expect("it answers");
    assert_eq!((first[99], first[100], first[110]), (5, 6, 5));
    assert_eq!(byte_at(&stand.guest, BLOCK, BLOCK).await, 7);
    assert_eq!(stand.counts()[..3], [2, 0, 2]);
    assert_eq!(stand.cache.status().places_free, 14);
}

#[tokio::test(start_paused = true)]
async fn a_block_that_is_written_again_and_again_costs_one_note() {
    let stand = warm(WRITE_THROUGH, 1).await;
    let written = |stand: &Stand| stand.cache.status().flash_written_bytes;
    let before = written(&stand);
    write(&stand.guest, 0, &[6; BLOCK as usize]).await;
    let first = written(&stand) - before;
    assert_eq!(first, BLOCK + 512, "the block and a sector of the map");
    for _ in 0..10 {
        write(&stand.guest, 0, &[7; BLOCK as usize]).await;
    }
    assert_eq!(written(&stand) - before - first, 10 * BLOCK);
    // What was noted once is still known to be invalid by whoever comes after a crash.
    let again = stand.again(BOOT, options(WRITE_THROUGH)).await;
    assert_eq!((byte_at(&again.guest, 0, BLOCK).await, again.counts()[0]), (7, 0));
}

#[tokio::test(start_paused = true)]
async fn valid_sectors_that_are_not_recorded_are_few() {
    let blocks = 3000;
    let volume = Bytes(blocks * BLOCK);
    let partition = memory(header_of(volume, BLOCK, blocks).partition_bytes());
    let options = CacheOptions { sequential_bytes: Bytes::ZERO, ..options(WRITE_THROUGH) };
    let stand = Stand::over(memory(volume), partition, options.clone(), blocks).await;
    stand.read_blocks(0..blocks).await;
    for block in 0..blocks {
        write(&stand.guest, block * BLOCK, &[6; BLOCK as usize]).await;
    }
    let unrecorded = stand.cache.inner.record.with(|_, index| index.unrecorded_count());
    assert!(unrecorded <= 1024, "{unrecorded}");
    let again = stand.again(BOOT, options).await;
    for block in 0..blocks {
        assert_eq!(byte_at(&again.guest, block * BLOCK, BLOCK).await, 6);
    }
    assert_eq!(again.counts()[0], blocks - unrecorded as u64);
}

#[tokio::test(start_paused = true)]
async fn what_is_written_back_is_in_the_flash_alone_until_it_is_drained() {
    let stand = warm(WRITE_BACK, 1).await;
    write(&stand.guest, SECTOR, &[6; SECTOR as usize]).await;
    write(&stand.guest, 4 * BLOCK + SECTOR, &[7; SECTOR as usize]).await;
    // Half a sector of what is not cached: the rest of the sector is fetched.
    write(&stand.guest, 6 * BLOCK, &[8; 100]).await;
    let copy = stand.cache.copy("copy");
    for (at, byte) in
        [(0, 5), (SECTOR, 6), (4 * BLOCK, 5), (4 * BLOCK + SECTOR, 7), (6 * BLOCK, 8), (6 * BLOCK + 100, 5)]
    {
        assert_eq!((byte_at(&stand.guest, at, 1).await, byte_at(&copy, at, 1).await), (byte, byte), "at {at}");
        assert_eq!(byte_at(&stand.base, at, 1).await, 5, "at {at}");
    }
    let status = stand.cache.status();
    assert_eq!((status.places_dirty, status.dirty_bytes, status.writes_back), (3, 3 * SECTOR, 3));
    assert!(!stand.cache.is_clean());
    stand.cache.drain().await.expect("it takes it");
    assert!(stand.cache.is_clean() && stand.cache.holds_nothing());
    for (at, byte) in [(0, 5), (SECTOR, 6), (4 * BLOCK + SECTOR, 7), (6 * BLOCK, 8), (6 * BLOCK + 100, 5)] {
        assert_eq!(byte_at(&stand.base, at, 1).await, byte, "at {at}");
    }
    assert_eq!(stand.cache.status().cleaned_bytes, 3 * SECTOR);
    write(&stand.guest, 0, &[9; 1]).await;
    assert_eq!(byte_at(&stand.base, 0, 1).await, 9, "nothing becomes dirty any more");
    // What is drained stays cached.
    let hits = stand.counts()[0];
    assert_eq!((byte_at(&stand.guest, SECTOR, SECTOR).await, stand.counts()[0]), (6, hits + 1));
}

#[tokio::test(start_paused = true)]
async fn what_was_flushed_outlives_the_power_and_nothing_clean_is_believed_afterwards() {
    let (stand, base, own) = over_disks(options(WRITE_BACK), 8).await;
    write(&stand.base, 0, &[5; BLOCK as usize]).await;
    stand.base.flush().await.expect("it flushes");
    stand.read_blocks([0]).await;
    write(&stand.guest, SECTOR, &[6; SECTOR as usize]).await;
    stand.guest.flush().await.expect("it flushes");
    base.lose_cache();
    own.lose_cache();
    let again = stand.again([2; 16], options(WRITE_BACK)).await;
    let entry = again.cache.inner.find(0).expect("it is dirty");
    assert_eq!((entry.entry.dirty(), entry.valid), (0b10, 0b10));
    let read = again.guest.read(Bytes(0), Buffer::unpooled(BLOCK as usize)).await.expect("it answers");
    assert_eq!((read[0], read[SECTOR as usize], read[2 * SECTOR as usize]), (5, 6, 5));
}

#[tokio::test(start_paused = true)]
async fn a_guests_flush_waits_for_the_base_only_if_that_was_written_to() {
    let plain = memory(SIZE);
    let fault = Fault::new(plain, env::testing::PausedEnv::shared(3));
    let partition = memory(header_of(SIZE, BLOCK, 8).partition_bytes());
    let stand = Stand::over(Device::new("base", fault.clone()), partition, options(WRITE_BACK), 8).await;
    // What came before the cache was opened is flushed once.
    stand.guest.flush().await.expect("it flushes");
    let flush = FaultAction::Delay(Duration::from_millis(5));
    fault.add(FaultRule { verb: FaultVerb::Flush, extent: None, when: FaultWhen::Always, action: flush });
    let took = async |stand: &Stand| {
        let before = stand.env.now();
        stand.guest.flush().await.expect("it flushes");
        stand.env.now().since(before)
    };
    write(&stand.guest, 0, &[1; BLOCK as usize]).await;
    assert_eq!(took(&stand).await, Duration::ZERO);
    zero(&stand.guest, 8 * BLOCK, BLOCK).await;
    assert!(took(&stand).await >= Duration::from_millis(5));
    write(&stand.guest, BLOCK, &[1; BLOCK as usize]).await;
    assert_eq!(took(&stand).await, Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_place_that_the_durable_map_calls_dirty_is_given_to_no_other_block_before_a_flush() {
    let (stand, base, own) = over_disks(options(WRITE_BACK), 2).await;
    write(&stand.guest, 0, &[6; BLOCK as usize]).await;
    stand.guest.flush().await.expect("it flushes");
    let found = stand.cache.inner.find(0).expect("it was written");
    stand.cache.inner.clean_held(0, &found).await.expect("it takes it");
    assert!(stand.cache.is_clean() && !stand.cache.holds_nothing());
    stand.read_blocks([4, 5, 6, 7]).await;
    assert_eq!(stand.cache.inner.find(0).expect("it keeps its place").place, found.place);
    // A power loss brings back what the flushed map says, and that is still there.
    base.lose_cache();
    own.lose_cache();
    let again = stand.again([2; 16], options(WRITE_BACK)).await;
    assert_eq!(byte_at(&again.guest, 0, BLOCK).await, 6);
    again.cache.drain().await.expect("it takes it");
    again.read_blocks([4, 5, 6, 7]).await;
    assert!(again.cache.inner.find(0).is_none(), "after the flush it may go");
}

#[tokio::test(start_paused = true)]
async fn zeroes_and_discards_forget_what_is_cached_and_nothing_comes_back() {
    for mode in super::MODES {
        let stand = warm(mode, 4).await;
        if mode == WRITE_BACK {
            write(&stand.guest, 0, &[6; 4 * BLOCK as usize]).await;
            stand.guest.flush().await.expect("it flushes");
        }
        zero(&stand.guest, 0, BLOCK).await;
        zero(&stand.guest, BLOCK + 100, SECTOR).await;
        let discard = Mutation::discard(Extent::new(Bytes(2 * BLOCK), Bytes(2 * BLOCK)));
        stand.guest.write(discard).await.expect("it takes it");
        let check = async |stand: &Stand| {
            let rest = if mode == WRITE_BACK { 6 } else { 5 };
            let read = stand.guest.read(Bytes(0), Buffer::unpooled(2 * BLOCK as usize)).await.expect("it answers");
            let second = &read[BLOCK as usize..];
            assert!(read[..BLOCK as usize].iter().all(|byte| *byte == 0), "{mode}");
            assert_eq!((second[99], second[100], second[100 + SECTOR as usize]), (rest, 0, rest), "{mode}");
            let discarded = async |device| byte_at(device, 2 * BLOCK, 2 * BLOCK).await;
            assert_eq!(discarded(&stand.guest).await, discarded(&stand.base).await, "{mode}");
        };
        check(&stand).await;
        check(&stand.again(BOOT, options(mode)).await).await;
        stand.guest.flush().await.expect("it flushes");
        check(&stand.again([2; 16], options(mode)).await).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_discard_that_the_base_ignores_brings_nothing_older_back() {
    let base = Fault::new(memory(SIZE), env::testing::PausedEnv::shared(3));
    let partition = memory(header_of(SIZE, BLOCK, 8).partition_bytes());
    let stand = Stand::over(Device::new("base", Keeping(base)), partition, options(WRITE_BACK), 8).await;
    write(&stand.base, 0, &[5; 2 * BLOCK as usize]).await;
    write(&stand.guest, 0, &[6; 2 * BLOCK as usize]).await;
    let discard = Mutation::discard(Extent::new(Bytes(SECTOR / 2), Bytes(BLOCK)));
    stand.guest.write(discard).await.expect("it takes it");
    let read = stand.guest.read(Bytes(0), Buffer::unpooled(2 * BLOCK as usize)).await.expect("it answers");
    assert!(read.iter().all(|byte| [0, 6].contains(byte)), "fives are older than sixes");
    stand.cache.drain().await.expect("it takes it");
    let after = stand.base.read(Bytes(0), Buffer::unpooled(2 * BLOCK as usize)).await.expect("it answers");
    assert_eq!(read[..], after[..]);
}

/// A device that keeps what it has in spite of a discard.
struct Keeping(Fault);

impl block::Filter for Keeping {
    fn lower(&self) -> &Device {
        block::Filter::lower(&self.0)
    }

    fn write(&self, mutation: Mutation) -> block::IoFuture<'_, ()> {
        match mutation.kind() {
            block::MutationKind::Discard => block::ready(Ok(())),
            _ => block::Filter::write(&self.0, mutation),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_discard_of_a_volume_far_larger_than_its_cache_forgets_all_of_it() {
    let volume = Bytes::gib(1024);
    let partition = memory(header_of(volume, BLOCK, 8).partition_bytes());
    let stand = Stand::over(memory(volume), partition, options(WRITE_BACK), 8).await;
    write(&stand.guest, Bytes::gib(7).get(), &[1; BLOCK as usize]).await;
    stand.read_blocks([3]).await;
    stand.guest.write(Mutation::discard(Extent::whole(volume))).await.expect("it takes it");
    assert!(stand.cache.is_clean());
    stand.guest.flush().await.expect("it flushes");
    assert!(stand.cache.holds_nothing());
    assert_eq!(byte_at(&stand.guest, Bytes::gib(7).get(), BLOCK).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_change_of_mode_drains_first_and_size_goes_down_and_up() {
    let stand = warm(WRITE_BACK, 6).await;
    write(&stand.guest, 0, &[6; 3 * BLOCK as usize]).await;
    stand.cache.set_mode(WRITE_THROUGH).await.expect("it takes it");
    assert!(stand.cache.holds_nothing());
    assert_eq!(byte_at(&stand.base, 0, 1).await, 6);
    stand.cache.set_mode(WRITE_BACK).await.expect("nothing is asked of it");
    write(&stand.guest, 0, &[7; 3 * BLOCK as usize]).await;
    assert_eq!((byte_at(&stand.base, 0, 1).await, stand.cache.status().places_dirty), (6, 3));

    stand.cache.resize(2).await.expect("it takes it");
    let status = stand.cache.status();
    assert_eq!((status.places, status.capacity), (2, 16));
    assert!(status.places_dirty <= 2);
    for block in 0..3 {
        assert_eq!(byte_at(&stand.guest, block * BLOCK, BLOCK).await, 7);
    }
    assert!(stand.cache.resize(0).await.is_err() && stand.cache.resize(17).await.is_err());
    // Who opens it after a crash finds the new size.
    let again = stand.again(BOOT, options(WRITE_BACK)).await;
    assert_eq!(again.cache.header().places, 2);
    again.cache.resize(12).await.expect("it takes it");
    again.cache.drain().await.expect("it takes it");
    again.read_blocks(0..12).await;
    assert_eq!(again.cache.status().places_free, 0);
}

#[tokio::test(start_paused = true)]
async fn background_write_back_begins_above_the_low_mark_and_writes_neighbours_together() {
    let options = CacheOptions { dirty_low_percent: 25, dirty_max_percent: 75, ..options(WRITE_BACK) };
    let stand = Stand::new(options, 16).await;
    write(&stand.guest, 8 * BLOCK, &[6; 4 * BLOCK as usize]).await;
    assert_eq!(stand.cache.write_back().await.expect("nothing is asked"), WriteBackStep::Idle);
    write(&stand.guest, 0, &[6; BLOCK as usize]).await;
    assert_eq!(stand.cache.write_back().await.expect("it takes it"), WriteBackStep::Wrote(Bytes(5 * BLOCK)));
    assert!(stand.cache.is_clean());
}

/// A base that takes 5 ms for each request, and a cache over it with 256 places of which half may be dirty.
async fn over_slow_base(mode: CacheMode) -> Stand {
    const PLACES: u64 = 256;
    let volume = Bytes::mib(16);
    let fault = Fault::new(memory(volume), env::testing::PausedEnv::shared(3));
    let action = FaultAction::Delay(Duration::from_millis(5));
    fault.add(FaultRule { verb: FaultVerb::Any, extent: None, when: FaultWhen::Always, action });
    let partition = memory(header_of(volume, BLOCK, PLACES).partition_bytes());
    Stand::over(Device::new("slow", fault), partition, options(mode), PLACES).await
}

#[tokio::test(start_paused = true)]
async fn write_back_is_three_times_as_fast_as_write_through_over_a_slow_base_though_the_limit_is_passed_four_times() {
    let mut took = Vec::new();
    for mode in [WRITE_THROUGH, WRITE_BACK] {
        let stand = over_slow_base(mode).await;
        let background = tokio::spawn(stand.cache.clone().run_write_back());
        let mut random = block::testing::Random::new(1);
        let began = stand.env.now();
        for number in 0..512_u64 {
            let at = Bytes(random.below(4096) * BLOCK);
            stand.guest.write(Mutation::data(at, Data::copy_of(&[1; BLOCK as usize]))).await.expect("it takes it");
            if number % 32 == 31 {
                stand.guest.flush().await.expect("it flushes");
            }
            let dirty = stand.cache.status().places_dirty;
            assert!(dirty <= 128, "{dirty}");
        }
        stand.cache.drain().await.expect("it takes it");
        took.push(stand.env.now().since(began));
        stand.cache.close().await;
        background.await.expect("it ends when the cache is closed");
    }
    assert!(took[1] * 3 <= took[0], "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn write_back_yields_to_what_the_guest_asks_of_the_base() {
    let stand = over_slow_base(WRITE_BACK).await;
    for block in 0..60 {
        write(&stand.guest, block * 2 * BLOCK, &[1; BLOCK as usize]).await;
    }
    let (_, step) = futures::join!(byte_at(&stand.guest, 4000 * BLOCK, BLOCK), async {
        tokio::task::yield_now().await;
        stand.cache.write_back().await.expect("it takes it")
    });
    assert_eq!(step, WriteBackStep::Wrote(Bytes(BLOCK)), "one request while the guest waits for one");
    let step = stand.cache.write_back().await.expect("it takes it");
    assert_eq!(step, WriteBackStep::Wrote(Bytes(59 * BLOCK)), "all while it asks for nothing");
}
