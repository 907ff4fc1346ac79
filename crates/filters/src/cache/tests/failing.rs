//! A flash that fails, and a base that does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use block::{Buffer, Bytes, Data, Device, Error, ErrorKind, Extent, IoFuture, Mutation};

use super::super::{CacheLoss, CacheMode, CacheOptions};
use super::{BLOCK, BOOT, MODES, SECTOR, SIZE, Stand, byte_at, header_of, memory, options, write, zero};
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};

/// Counts what is put on record, and fails as often as it is told.
#[derive(Default)]
struct Losses {
    noted: AtomicU64,
    refusals: AtomicU64,
}

impl CacheLoss for Losses {
    fn note<'a>(&'a self, error: &'a Error) -> IoFuture<'a, ()> {
        assert!(!error.chain().is_empty(), "it says why");
        if self.refusals.load(Ordering::SeqCst) > 0 {
            self.refusals.fetch_sub(1, Ordering::SeqCst);
            return block::ready(Err(Error::new(ErrorKind::Io, "the journal is full")));
        }
        self.noted.fetch_add(1, Ordering::SeqCst);
        block::ready(Ok(()))
    }
}

/// A cache whose block 0 is clean, fives, and whose block 2 is sixes, dirty if the mode is write-back; and then the flash fails `verb`.
async fn failing(mode: CacheMode, verb: FaultVerb, losses: &Arc<Losses>) -> (Stand, Fault) {
    let base = memory(SIZE);
    let flash = memory(header_of(SIZE, BLOCK, 8).partition_bytes());
    let fault = Fault::new(flash, env::testing::PausedEnv::shared(3));
    let options = CacheOptions { loss: Some(Arc::clone(losses) as _), ..options(mode) };
    let stand = Stand::over(base, Device::new("flash", fault.clone()), options, 8).await;
    write(&stand.base, 0, &[5; 8 * BLOCK as usize]).await;
    stand.read_blocks([0]).await;
    write(&stand.guest, 2 * BLOCK, &[6; BLOCK as usize]).await;
    let action = FaultAction::Fail(ErrorKind::Io);
    fault.add(FaultRule { verb, extent: None, when: FaultWhen::Always, action });
    (stand, fault)
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_holds_nothing_goes_on_without_its_flash_and_is_never_believed_again() {
    for mode in [CacheMode::ReadOnly, CacheMode::WriteThrough] {
        for verb in [FaultVerb::Read, FaultVerb::Write, FaultVerb::Any] {
            let losses = Arc::new(Losses::default());
            let (stand, fault) = failing(mode, verb, &losses).await;
            assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 5, "{mode}");
            write(&stand.guest, 0, &[7; BLOCK as usize]).await;
            zero(&stand.guest, 4 * BLOCK, BLOCK).await;
            assert_eq!((byte_at(&stand.guest, 0, BLOCK).await, byte_at(&stand.base, 0, 1).await), (7, 7), "{mode}");
            stand.guest.flush().await.expect("the base flushes");
            let has_failed = stand.cache.status().has_failed;
            assert!(has_failed, "{mode}, {verb:?}");
            let noted = losses.noted.load(Ordering::SeqCst);
            // A flash that takes writes records it itself.
            assert_eq!(noted, u64::from(verb != FaultVerb::Read), "{mode}, {verb:?}");
            // The flash is well again, and another process opens it as it was told.
            fault.clear();
            let options = CacheOptions { believes_clean: noted == 0, ..options(mode) };
            let again = stand.again(BOOT, options).await;
            assert_eq!(byte_at(&again.guest, 0, BLOCK).await, 7, "{mode}, {verb:?}");
            assert_eq!(again.counts()[0], 0, "{mode}, {verb:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_came_from_another_host_and_cannot_be_dropped_is_read_by_nobody_and_believed_by_no_other_process() {
    for asks in [true, false] {
        let losses = Arc::new(Losses::default());
        let flash = memory(header_of(SIZE, BLOCK, 8).partition_bytes());
        let fault = Fault::new(flash, env::testing::PausedEnv::shared(3));
        let withheld = CacheOptions { loss: Some(Arc::clone(&losses) as _), ..options(CacheMode::WriteThrough) };
        let stand = Stand::over(memory(SIZE), Device::new("flash", fault.clone()), withheld, 8).await;
        stand.cache.begin_transfer(true, 100);
        stand.cache.take(0, Data::copy_of(&[5; BLOCK as usize])).await.expect("it takes it");
        // The guest changes it past the cache, and the flash fails before it is dropped.
        write(&stand.guest, 0, &[7; BLOCK as usize]).await;
        let action = FaultAction::Fail(ErrorKind::Io);
        fault.add(FaultRule { verb: FaultVerb::Write, extent: None, when: FaultWhen::Always, action });
        stand.cache.attach().await;
        if asks {
            assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 7, "the guest does not notice");
        }
        stand.cache.end_transfer().await.expect("the failure is on record");
        assert_eq!((losses.noted.load(Ordering::SeqCst), stand.cache.status().has_failed), (1, true));
        fault.clear();
        let again = CacheOptions { believes_clean: false, ..options(CacheMode::WriteThrough) };
        assert_eq!(byte_at(&stand.again(BOOT, again).await.guest, 0, BLOCK).await, 7);
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_waits_for_the_record_of_a_failure_and_fails_without_it() {
    let losses = Arc::new(Losses { refusals: AtomicU64::new(1), ..Losses::default() });
    let (stand, _fault) = failing(CacheMode::WriteThrough, FaultVerb::Any, &losses).await;
    let data = || Mutation::data(Bytes(0), Data::copy_of(&[7; BLOCK as usize]));
    let error = stand.guest.write(data()).await.expect_err("the next process might answer old bytes");
    assert!(error.chain().contains("the journal is full"), "{}", error.chain());
    assert_eq!(byte_at(&stand.base, 0, 1).await, 5);
    stand.guest.write(data()).await.expect("it is on record now");
    assert_eq!(losses.noted.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn what_only_the_flash_had_is_an_error_and_never_the_older_bytes() {
    for verb in [FaultVerb::Read, FaultVerb::Any] {
        let losses = Arc::new(Losses::default());
        let (stand, fault) = failing(CacheMode::WriteBack, verb, &losses).await;
        assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 5, "it is in the base, too");
        let read = async |device: &Device, at, length: u64| {
            device.read(Bytes(at), Buffer::unpooled(length as usize)).await.map(|read| read[0])
        };
        for device in [&stand.guest, &stand.cache.copy("copy")] {
            let error = read(device, 2 * BLOCK, BLOCK).await.expect_err("the base has older bytes");
            assert!(error.chain().contains("only the cache has it"), "{}", error.chain());
            read(device, 0, 4 * BLOCK).await.expect_err("some of it is lost");
            assert_eq!(read(device, 3 * BLOCK, BLOCK).await.expect("the base has it"), 5);
        }
        assert!(stand.cache.status().has_failed);
        stand.cache.drain().await.expect_err("what is lost cannot be drained");
        // What is not lost goes on at the base.
        write(&stand.guest, 0, &[7; BLOCK as usize]).await;
        assert_eq!((byte_at(&stand.guest, 0, BLOCK).await, byte_at(&stand.base, 0, 1).await), (7, 7));
        assert_eq!(losses.noted.load(Ordering::SeqCst), 1);
        // The flash comes back: what was dirty is there, and what was clean is not believed.
        fault.clear();
        let again = stand.again(BOOT, CacheOptions { believes_clean: false, ..options(CacheMode::WriteBack) }).await;
        assert_eq!((byte_at(&again.guest, 2 * BLOCK, BLOCK).await, byte_at(&again.guest, 0, BLOCK).await), (6, 7));
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_over_what_only_the_flash_has_fails_if_the_flash_takes_none() {
    let losses = Arc::new(Losses::default());
    let (stand, _fault) = failing(CacheMode::WriteBack, FaultVerb::Write, &losses).await;
    let over = Mutation::data(Bytes(2 * BLOCK), Data::copy_of(&[7; BLOCK as usize]));
    stand.guest.write(over).await.expect_err("the flash alone has what is there");
    assert_eq!(byte_at(&stand.guest, 2 * BLOCK, BLOCK).await, 6);
    write(&stand.guest, 5 * BLOCK, &[7; BLOCK as usize]).await;
    assert_eq!((byte_at(&stand.base, 5 * BLOCK, 1).await, stand.cache.status().places_dirty), (7, 1));
}

/// A cache in write-back over a base of fives, and where its places begin on its flash, which can be told to fail.
async fn over_failing_flash(losses: &Arc<Losses>) -> (Stand, Fault, Bytes) {
    let bytes = header_of(SIZE, BLOCK, 8).partition_bytes();
    let fault = Fault::new(memory(bytes), env::testing::PausedEnv::shared(3));
    let options = CacheOptions { loss: Some(Arc::clone(losses) as _), ..options(CacheMode::WriteBack) };
    let stand = Stand::over(memory(SIZE), Device::new("flash", fault.clone()), options, 8).await;
    write(&stand.base, 0, &[5; 8 * BLOCK as usize]).await;
    (stand, fault, bytes - Bytes(8 * BLOCK))
}

#[tokio::test(start_paused = true)]
async fn sectors_whose_write_could_not_be_recorded_are_neither_old_nor_new_for_a_guest_until_another_process_looks() {
    for (action, found) in [(FaultAction::FailAfterwards(ErrorKind::Io), 6), (FaultAction::Fail(ErrorKind::Io), 5)] {
        let (stand, fault, places) = over_failing_flash(&Arc::default()).await;
        let maps = Some(Extent::between(Bytes::ZERO, places));
        fault.add(FaultRule { verb: FaultVerb::Write, extent: maps, when: FaultWhen::Always, action });
        let data = Mutation::data(Bytes(SECTOR), Data::copy_of(&[6; SECTOR as usize]));
        stand.guest.write(data).await.expect_err("it cannot be recorded");
        let read = |at: u64, length: u64| stand.guest.read(Bytes(at), Buffer::unpooled(length as usize));
        read(0, BLOCK).await.expect_err("a part of it is in doubt");
        read(SECTOR, 1).await.expect_err("it is in doubt");
        assert_eq!(
            (byte_at(&stand.guest, 0, SECTOR).await, byte_at(&stand.guest, 2 * SECTOR, 7 * SECTOR).await),
            (5, 5)
        );
        assert_eq!(byte_at(&stand.cache.copy("copy"), 0, BLOCK).await, 5, "where a copy goes that is what holds");
        fault.clear();
        let again = stand.again(BOOT, CacheOptions { believes_clean: false, ..options(CacheMode::WriteBack) }).await;
        assert_eq!((byte_at(&again.guest, SECTOR, SECTOR).await, byte_at(&again.guest, 0, SECTOR).await), (found, 5));
    }
}

#[tokio::test(start_paused = true)]
async fn what_becomes_dirty_while_the_flash_fails_is_not_forgotten_with_what_was_clean() {
    let losses = Arc::new(Losses::default());
    let (stand, fault, places) = over_failing_flash(&losses).await;
    let actions = [FaultAction::Delay(Duration::from_millis(10)), FaultAction::Fail(ErrorKind::Io)];
    for (place, action) in (0..).zip(actions) {
        let extent = Some(Extent::new(places + Bytes(place * BLOCK), Bytes(BLOCK)));
        fault.add(FaultRule { verb: FaultVerb::Write, extent, when: FaultWhen::Always, action });
    }
    let block = [6; BLOCK as usize];
    futures::join!(write(&stand.guest, 2 * BLOCK, &block), write(&stand.guest, 4 * BLOCK, &block));
    assert_eq!((stand.cache.status().places_dirty, byte_at(&stand.base, 4 * BLOCK, 1).await), (1, 6));
    fault.clear();
    let believes_clean = losses.noted.load(Ordering::SeqCst) == 0;
    let again = stand.again(BOOT, CacheOptions { believes_clean, ..options(CacheMode::WriteBack) }).await;
    let found = (byte_at(&again.guest, 2 * BLOCK, BLOCK).await, byte_at(&again.guest, 4 * BLOCK, BLOCK).await);
    assert_eq!(found, (6, 6), "what was answered is lost");
}

#[tokio::test(start_paused = true)]
async fn a_base_that_fails_loses_nothing_that_is_dirty() {
    let plain = memory(SIZE);
    let fault = Fault::new(plain.clone(), env::testing::PausedEnv::shared(3));
    let partition = memory(header_of(SIZE, BLOCK, 8).partition_bytes());
    for verb in [FaultVerb::Write, FaultVerb::Flush] {
        let stand =
            Stand::over(Device::new("base", fault.clone()), partition.clone(), options(CacheMode::WriteBack), 8).await;
        write(&stand.guest, 0, &[6; BLOCK as usize]).await;
        let action = FaultAction::Fail(ErrorKind::Io);
        fault.add(FaultRule { verb, extent: None, when: FaultWhen::Nth(0), action });
        stand.cache.drain().await.expect_err("the base has failed");
        assert!(!stand.cache.is_clean());
        assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 6);
        stand.cache.drain().await.expect("it takes it now");
        assert_eq!(byte_at(&plain, 0, 1).await, 6);
        fault.clear();
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_the_base_refuses_leaves_nothing_in_the_cache() {
    for mode in MODES {
        let plain = memory(SIZE);
        let fault = Fault::new(plain.clone(), env::testing::PausedEnv::shared(3));
        let partition = memory(header_of(SIZE, BLOCK, 8).partition_bytes());
        let stand = Stand::over(Device::new("base", fault.clone()), partition, options(mode), 8).await;
        stand.read_blocks([0]).await;
        let action = FaultAction::FailAfterwards(ErrorKind::Io);
        fault.add(FaultRule { verb: FaultVerb::Write, extent: None, when: FaultWhen::Always, action });
        let written = stand.guest.write(Mutation::data(Bytes(0), Data::copy_of(&[6; BLOCK as usize]))).await;
        assert_eq!(written.is_ok(), mode == CacheMode::WriteBack);
        assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 6, "{mode}: it has reached the base, or the flash");
    }
}

fn flushes_fail(fault: &Fault, kind: ErrorKind) {
    let action = FaultAction::Fail(kind);
    fault.add(FaultRule { verb: FaultVerb::Flush, extent: None, when: FaultWhen::Always, action });
}

/// A cache in write-back with so many places over a base that can be told to fail.
async fn over_failing_base(places: u64) -> (Stand, Fault, Device) {
    let plain = memory(SIZE);
    let fault = Fault::new(plain.clone(), env::testing::PausedEnv::shared(3));
    let partition = memory(header_of(SIZE, BLOCK, places).partition_bytes());
    let stand = Stand::over(Device::new("base", fault.clone()), partition, options(CacheMode::WriteBack), places).await;
    (stand, fault, plain)
}

async fn fill(device: &Device, blocks: std::ops::Range<u64>, byte: u8) {
    for block in blocks {
        write(device, block * BLOCK, &[byte; BLOCK as usize]).await;
    }
}

async fn holds(device: &Device, blocks: std::ops::Range<u64>, byte: u8) -> bool {
    let mut is_so = true;
    for block in blocks {
        is_so &= byte_at(device, block * BLOCK, BLOCK).await == byte;
    }
    is_so
}

#[tokio::test(start_paused = true)]
async fn an_opening_while_the_base_is_away_changes_nothing_of_what_was_answered() {
    let (stand, fault, _) = over_failing_base(12).await;
    fill(&stand.guest, 0..4, 6).await;
    stand.guest.flush().await.expect("it flushes");
    // Some of it is cleaned, so that only the durable map names it as dirty.
    stand.cache.write_back().await.expect("the base takes it");
    fill(&stand.guest, 4..8, 7).await;
    for kind in [ErrorKind::TimedOut, ErrorKind::Io] {
        flushes_fail(&fault, kind);
        let action = FaultAction::Fail(kind);
        fault.add(FaultRule { verb: FaultVerb::Write, extent: None, when: FaultWhen::Always, action });
        let meanwhile = stand.again(BOOT, options(CacheMode::WriteBack)).await;
        assert!(holds(&meanwhile.guest, 4..8, 7).await, "{kind}: what was answered is not there");
        meanwhile.guest.flush().await.expect_err("the base is away");
        fault.clear();
        let again = stand.again(BOOT, options(CacheMode::WriteBack)).await;
        assert!(holds(&again.guest, 0..4, 6).await && holds(&again.guest, 4..8, 7).await, "{kind}: something is lost");
    }
}

#[tokio::test(start_paused = true)]
async fn a_base_that_is_away_for_a_flush_is_flushed_when_it_is_there_again() {
    let (stand, fault, plain) = over_failing_base(24).await;
    fill(&stand.guest, 0..4, 6).await;
    stand.guest.flush().await.expect("it flushes");
    stand.cache.write_back().await.expect("the base takes it");
    fill(&stand.guest, 4..6, 7).await;
    zero(&stand.guest, 20 * BLOCK, BLOCK).await;
    flushes_fail(&fault, ErrorKind::TimedOut);
    stand.guest.flush().await.expect_err("the base is away");
    fault.clear();
    stand.guest.flush().await.expect("nothing was lost");
    fill(&stand.guest, 8..12, 8).await;
    assert!(stand.cache.status().places_dirty >= 4, "it takes nothing any more");
    stand.cache.drain().await.expect("the base takes it");
    assert!(stand.cache.holds_nothing() && holds(&plain, 0..4, 6).await);
    assert!(holds(&plain, 4..6, 7).await && holds(&plain, 8..12, 8).await);
}

#[tokio::test(start_paused = true)]
async fn what_the_base_may_have_lost_is_dirty_again_and_nothing_is_taken_that_a_restart_would_lose() {
    let (stand, fault, plain) = over_failing_base(24).await;
    fill(&stand.guest, 0..4, 6).await;
    stand.guest.flush().await.expect("it flushes");
    // Forgotten in the cache, and in the base only.
    zero(&stand.guest, 0, BLOCK).await;
    fill(&stand.guest, 4..8, 7).await;
    flushes_fail(&fault, ErrorKind::Io);
    stand.guest.flush().await.expect_err("the base has failed");
    // What the base loses after all is in the cache again.
    write(&plain, 0, &[1; BLOCK as usize]).await;
    assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 0, "what was answered is lost");
    let dirty = stand.cache.status().places_dirty;
    fill(&stand.guest, 12..16, 8).await;
    assert_eq!(stand.cache.status().places_dirty, dirty, "something was taken that nobody can make durable");
    fault.clear();
    stand.guest.flush().await.expect_err("a later flush proves nothing");
    let after = |guest: Device| async move {
        let are_old = holds(&guest, 0..1, 0).await && holds(&guest, 1..4, 6).await;
        are_old && holds(&guest, 4..8, 7).await && holds(&guest, 12..16, 8).await
    };
    assert!(after(stand.again(BOOT, options(CacheMode::WriteBack)).await.guest).await, "a restart has lost something");
    stand.cache.drain().await.expect("what it holds can be brought out");
    assert!(stand.cache.may_be_taken_away() && after(plain).await);
}

#[tokio::test(start_paused = true)]
async fn what_is_dirty_gets_out_of_a_flash_that_makes_nothing_durable_any_more() {
    let (base, flash) = (memory(SIZE), memory(header_of(SIZE, BLOCK, 24).partition_bytes()));
    let fault = Fault::new(flash, env::testing::PausedEnv::shared(3));
    let loss = Some(Arc::new(Losses::default()) as _);
    let options = CacheOptions { loss, ..options(CacheMode::WriteBack) };
    let stand = Stand::over(base, Device::new("flash", fault.clone()), options, 24).await;
    fill(&stand.guest, 0..4, 6).await;
    stand.guest.flush().await.expect("it flushes");
    fill(&stand.guest, 4..8, 7).await;
    flushes_fail(&fault, ErrorKind::Io);
    stand.guest.flush().await.expect_err("the flash has failed");
    fill(&stand.guest, 12..16, 8).await;
    assert!(!stand.cache.may_be_taken_away());
    stand.cache.drain().await.expect("the base takes it");
    assert!(stand.cache.may_be_taken_away() && !stand.cache.holds_nothing(), "its record says more than there is");
    assert!(
        holds(&stand.base, 0..4, 6).await && holds(&stand.base, 4..8, 7).await && holds(&stand.base, 12..16, 8).await
    );
    stand.cache.set_mode(CacheMode::WriteBack).await.expect("it stays");
    assert!(!stand.cache.may_be_taken_away());
}
