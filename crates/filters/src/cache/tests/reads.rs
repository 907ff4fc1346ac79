//! What is read, admitted, passed by and evicted.

use std::time::Duration;

use block::{Buffer, Bytes, Device, ErrorKind};

use super::super::{CacheMode, CacheOptions};
use super::{BLOCK, BOOT, SECTOR, SIZE, Stand, byte_at, options, write, yield_often};
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};

#[tokio::test(start_paused = true)]
async fn what_was_read_once_is_read_from_the_flash_and_a_migration_warms_nothing() {
    let stand = Stand::new(options(CacheMode::ReadOnly), 8).await;
    write(&stand.base, BLOCK, &[5; BLOCK as usize]).await;
    let copy = stand.cache.copy("copy");
    assert_eq!(byte_at(&copy, BLOCK, BLOCK).await, 5);
    yield_often().await;
    assert_eq!(stand.counts(), [0; 4]);
    stand.read_blocks([1]).await;
    assert_eq!(stand.counts(), [0, 0, 1, 1]);
    assert_eq!(byte_at(&stand.guest, BLOCK, BLOCK).await, 5);
    assert_eq!(byte_at(&stand.guest, BLOCK + SECTOR, SECTOR).await, 5);
    assert_eq!(stand.counts(), [2, 0, 1, 1]);
    assert_eq!(byte_at(&copy, BLOCK, BLOCK).await, 5);
    assert_eq!(stand.counts(), [2, 0, 1, 1]);
    let refused = copy.write(block::Mutation::discard(block::Extent::new(Bytes(0), Bytes(512)))).await;
    assert_eq!(refused.expect_err("it only reads").kind(), ErrorKind::ReadOnly);
}

#[tokio::test(start_paused = true)]
async fn sectors_are_admitted_alone_and_laid_together_with_the_base() {
    let stand = Stand::new(options(CacheMode::WriteThrough), 8).await;
    write(&stand.base, 0, &[5; 3 * BLOCK as usize]).await;
    assert_eq!(byte_at(&stand.guest, 2 * SECTOR, 2 * SECTOR).await, 5);
    yield_often().await;
    // Half a sector is nothing that could be valid.
    assert_eq!(byte_at(&stand.guest, BLOCK, SECTOR / 2).await, 5);
    yield_often().await;
    assert_eq!(stand.counts(), [0, 0, 2, 1]);
    // Something else in the base, behind the cache's back, tells what is read where.
    write(&stand.base, 0, &[6; 3 * BLOCK as usize]).await;
    let read = stand.guest.read(Bytes(0), Buffer::unpooled(2 * BLOCK as usize)).await.expect("it answers");
    let bytes: Vec<u8> = read.chunks(SECTOR as usize).map(|sector| sector[0]).collect();
    assert_eq!(bytes, [6, 6, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6]);
    assert_eq!(stand.counts()[..3], [0, 1, 3]);
    yield_often().await;
    assert_eq!(byte_at(&stand.guest, 0, 2 * BLOCK).await, 6);
    assert_eq!(stand.counts()[..3], [2, 1, 3]);
}

#[tokio::test(start_paused = true)]
async fn the_short_end_of_a_volume_is_cached_too() {
    let stand = Stand::new(options(CacheMode::WriteThrough), 8).await;
    let last = SIZE.get() - 100;
    write(&stand.base, last, &[5; 100]).await;
    for _ in 0..2 {
        assert_eq!(byte_at(&stand.guest, last, 100).await, 5);
        yield_often().await;
    }
    assert_eq!(stand.counts(), [1, 0, 1, 1]);
    write(&stand.guest, last + 90, &[6; 10]).await;
    let read = stand.guest.read(Bytes(last), Buffer::unpooled(100)).await.expect("it answers");
    assert_eq!((read[89], read[90], read[99]), (5, 6, 6));
    assert_eq!(stand.counts()[0], 2);
}

#[tokio::test(start_paused = true)]
async fn a_long_stream_passes_by_and_what_is_read_here_and_there_does_not() {
    let sequential_bytes = Bytes(4 * BLOCK);
    let stand = Stand::new(CacheOptions { sequential_bytes, ..options(CacheMode::ReadOnly) }, 32).await;
    stand.read_blocks(0..12).await;
    let status = stand.cache.status();
    assert_eq!((status.admitted, status.bypassed), (4, 8));
    stand.read_blocks([20, 15, 25]).await;
    assert_eq!(stand.cache.status().admitted, 7);
    let all = Stand::new(CacheOptions { sequential_bytes: Bytes::ZERO, ..options(CacheMode::ReadOnly) }, 32).await;
    all.read_blocks(0..12).await;
    assert_eq!(all.cache.status().admitted, 12);
}

#[tokio::test(start_paused = true)]
async fn a_full_cache_lets_the_least_recently_used_go() {
    let stand = Stand::new(options(CacheMode::ReadOnly), 4).await;
    stand.read_blocks([0, 2, 4, 6, 0, 8]).await;
    let status = stand.cache.status();
    assert_eq!((status.admitted, status.evicted, status.places_free), (5, 1, 0));
    assert_eq!(stand.cache.hottest(9), [8, 0, 6, 4]);
    stand.read_blocks([0, 4, 6, 8]).await;
    assert_eq!((stand.cache.status().hits, stand.cache.status().evicted), (5, 1));
    stand.read_blocks([2]).await;
    assert_eq!(stand.cache.status().evicted, 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_cached_outlives_the_process_and_not_the_power() {
    let stand = Stand::new(options(CacheMode::WriteThrough), 4).await;
    write(&stand.base, 0, &[5; 8 * BLOCK as usize]).await;
    // One of them has a place that another had before.
    stand.read_blocks([0, 1, 2, 3, 4]).await;
    let again = stand.again(BOOT, options(CacheMode::WriteThrough)).await;
    again.read_blocks([1, 2, 3, 4]).await;
    assert_eq!(again.counts(), [4, 0, 0, 0]);
    let doubted = stand.again(BOOT, CacheOptions { believes_clean: false, ..options(CacheMode::WriteThrough) }).await;
    assert_eq!(doubted.cache.status().places_free, 4);
    doubted.read_blocks([1]).await;
    let after = stand.again([2; 16], options(CacheMode::WriteThrough)).await;
    after.read_blocks([1]).await;
    assert_eq!(after.counts(), [0, 0, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_write_that_meets_an_admission_wins() {
    let plain = super::memory(SIZE);
    let fault = Fault::new(plain.clone(), env::testing::PausedEnv::shared(3));
    let partition = super::memory(super::header_of(SIZE, BLOCK, 8).partition_bytes());
    let base = Device::new("slow", fault.clone());
    for mode in super::MODES {
        let stand = Stand::over(base.clone(), partition.clone(), options(mode), 8).await;
        write(&plain, 0, &[1; BLOCK as usize]).await;
        // The bytes of the read are old ones: what it reads is answered late.
        let action = FaultAction::Delay(Duration::from_millis(50));
        fault.add(FaultRule { verb: FaultVerb::Write, extent: None, when: FaultWhen::Nth(0), action });
        let (read, ()) = futures::join!(byte_at(&stand.guest, 0, BLOCK), async {
            write(&stand.guest, 0, &[2; BLOCK as usize]).await;
        });
        assert!([1, 2].contains(&read), "{mode}");
        yield_often().await;
        for _ in 0..2 {
            assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 2, "{mode}");
            yield_often().await;
        }
        fault.clear();
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_whose_place_is_given_away_meanwhile_begins_again() {
    let base = super::memory(SIZE);
    for block in 0..20_u8 {
        write(&base, u64::from(block) * BLOCK, &[block + 1; BLOCK as usize]).await;
    }
    let flash = super::memory(super::header_of(SIZE, BLOCK, 2).partition_bytes());
    let fault = Fault::new(flash, env::testing::PausedEnv::shared(3));
    let stand = Stand::over(base, Device::new("slow", fault.clone()), options(CacheMode::ReadOnly), 2).await;
    stand.read_blocks([0]).await;
    let action = FaultAction::Delay(Duration::from_millis(50));
    fault.add(FaultRule { verb: FaultVerb::Read, extent: None, when: FaultWhen::Nth(0), action });
    let (read, ()) = futures::join!(byte_at(&stand.guest, 0, BLOCK), async {
        stand.read_blocks([1, 2, 3, 4]).await;
    });
    assert_eq!((read, stand.cache.status().evicted), (1, 3));
}
