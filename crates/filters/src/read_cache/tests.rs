//! The cache against a plain model in random histories, and what it must do where reads and writes meet.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::testing::conformance;
use block::{
    BlockDevice, Buffer, Bytes, ChunkSize, Data, Device, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture,
    MemDevice, Mutation,
};
use env::testing::PausedEnv;
use tokio::sync::Semaphore;

use super::{ReadCache, ReadCacheStatus};
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};

mod histories;

const CHUNK: u64 = 64 << 10;
/// Eight chunks and a short one.
const SIZE: Bytes = Bytes(8 * CHUNK + 5 * 4096);

fn chunk_size() -> ChunkSize {
    ChunkSize::new(CHUNK).expect("a chunk size")
}

/// A disk that counts its reads, and answers reads and writes when it is let, after they were done.
struct Held {
    memory: Device,
    /// Reads are done when they are let.
    reads_late: bool,
    reads: AtomicU64,
    bytes_read: AtomicU64,
    read_turns: Semaphore,
    write_turns: Semaphore,
}

/// More turns than a test takes.
const FREE: usize = 1 << 20;

impl Held {
    fn over(memory: Device, reads_late: bool) -> Arc<Self> {
        let (read_turns, write_turns) = (Semaphore::new(FREE), Semaphore::new(FREE));
        let (reads, bytes_read) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { memory, reads_late, reads, bytes_read, read_turns, write_turns })
    }

    fn read(&self) -> (u64, u64) {
        (self.reads.load(Ordering::Relaxed), self.bytes_read.load(Ordering::Relaxed))
    }
}

/// Waits until one more request may be answered.
async fn turn(turns: &Semaphore) {
    turns.acquire().await.expect("it is never closed").forget();
}

fn hold(turns: &Semaphore) {
    turns.forget_permits(FREE);
}

fn release(turns: &Semaphore) {
    turns.add_permits(FREE);
}

impl BlockDevice for Held {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.reads.fetch_add(1, Ordering::Relaxed);
            self.bytes_read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
            if self.reads_late {
                turn(&self.read_turns).await;
                return self.memory.read(offset, buffer).await;
            }
            let answer = self.memory.read(offset, buffer).await;
            turn(&self.read_turns).await;
            answer
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let answer = self.memory.write(mutation).await;
            turn(&self.write_turns).await;
            answer
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.memory.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.memory.extents(extent))
    }
}

fn memory() -> Device {
    Device::new("memory", MemDevice::new(SIZE))
}

/// A cache over a disk that can be held.
struct Scene {
    disk: Arc<Held>,
    cache: ReadCache,
    guest: Device,
    copy: Device,
}

/// With room for so many chunks.
fn scene(chunks: u64) -> Scene {
    let disk = Held::over(memory(), false);
    let source = Device::from_arc("disk", Arc::clone(&disk) as _);
    let cache = ReadCache::new(source.clone(), source, chunk_size(), Bytes(chunks * CHUNK));
    let (guest, copy) = (cache.guest(), cache.copy());
    Scene { disk, cache, guest, copy }
}

async fn read(device: &Device, at: u64, length: u64) -> Vec<u8> {
    let read = device.read(Bytes(at), Buffer::unpooled(Bytes(length).as_usize())).await;
    read.expect("it answers").to_vec()
}

async fn byte(device: &Device, at: u64) -> u8 {
    read(device, at, 1).await[0]
}

async fn write(device: &Device, at: u64, bytes: &[u8]) {
    device.write(Mutation::data(Bytes(at), Data::copy_of(bytes))).await.expect("it takes it");
}

#[tokio::test(start_paused = true)]
async fn a_cache_conforms_with_room_for_all_and_for_little() {
    for (seed, chunks, unit) in [(1, 100, 1), (2, 2, 512), (3, 1, 4096)] {
        conformance(seed, async |size| {
            let source = Device::new("memory", MemDevice::new(size).with_request_alignment(unit));
            ReadCache::new(source.clone(), source, chunk_size(), Bytes(chunks * CHUNK)).guest()
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_copy_has_read_the_guest_finds_in_memory() {
    let Scene { disk, cache, guest, copy } = scene(4);
    write(&guest, CHUNK + 100, &[7; 10]).await;
    assert_eq!(read(&copy, CHUNK, 2 * CHUNK).await[100], 7);
    assert_eq!(disk.read(), (1, 2 * CHUNK));
    cache.mark_sent(1..3);
    assert_eq!(read(&guest, CHUNK + 100, 10).await, [7; 10]);
    assert_eq!(read(&guest, 2 * CHUNK - 1, 2).await, [0; 2], "across two chunks");
    assert_eq!(disk.read().0, 1, "the disk is read once");
    let status =
        ReadCacheStatus { guest_hits: 3, copy_misses: 2, bytes: 2 * CHUNK, bytes_max: 4 * CHUNK, ..cache.status() };
    assert_eq!(cache.status(), status);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_reads_an_unsent_chunk_again_reads_it_for_the_copy() {
    let Scene { disk, cache, guest, copy } = scene(4);
    byte(&guest, CHUNK).await;
    assert_eq!((disk.read(), cache.next_unsent(0, 9)), ((1, 1), None), "one small read predicts nothing");
    byte(&guest, CHUNK + 4096).await;
    assert_eq!((disk.read(), cache.next_unsent(0, 9)), ((2, 1 + CHUNK), Some(1..2)));
    read(&copy, CHUNK, CHUNK).await;
    // A quarter of a chunk is enough at once, and the ends of a read are widened alike.
    read(&guest, 4 * CHUNK - CHUNK / 4, CHUNK / 2).await;
    assert_eq!((disk.read(), cache.next_unsent(2, 9)), ((3, 1 + 3 * CHUNK), Some(3..5)));
    read(&copy, 3 * CHUNK, 2 * CHUNK).await;
    assert_eq!(disk.read().0, 3, "the copy takes all of it from memory");
    let status = cache.status();
    assert_eq!(
        (status.copy_hits, status.copy_misses, status.chunks_fetched, status.fetched_bytes),
        (3, 0, 3, 3 * CHUNK)
    );
    assert_eq!((status.guest_hits, status.guest_misses), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn a_chunk_that_was_sent_is_not_read_whole_and_one_that_must_be_sent_again_is() {
    let Scene { disk, cache, guest, .. } = scene(4);
    cache.mark_sent(0..9);
    for _ in 0..4 {
        byte(&guest, CHUNK).await;
    }
    assert_eq!((disk.read(), cache.status().bytes), ((4, 4), 0));
    cache.mark_unsent(1..2);
    byte(&guest, CHUNK).await;
    assert_eq!((disk.read(), cache.status().bytes), ((5, 4 + CHUNK), CHUNK));
    // A read of all of a chunk costs nothing more: it is kept although it was sent.
    read(&guest, 2 * CHUNK, CHUNK).await;
    byte(&guest, 2 * CHUNK).await;
    assert_eq!((disk.read().0, cache.next_unsent(0, 9)), (6, Some(1..2)));
}

#[tokio::test(start_paused = true)]
async fn a_part_of_a_chunk_that_cannot_be_read_is_not_the_guest_s_error() {
    let Scene { disk, .. } = scene(1);
    let fault = Fault::new(Device::from_arc("disk", Arc::clone(&disk) as _), PausedEnv::shared(1));
    let bad = Some(Extent::new(Bytes(CHUNK / 2), Bytes(512)));
    let action = FaultAction::Fail(ErrorKind::Io);
    fault.add(FaultRule { verb: FaultVerb::Read, extent: bad, when: FaultWhen::Always, action });
    let source = Device::new("faulty", fault);
    let cache = ReadCache::new(source.clone(), source, chunk_size(), Bytes(4 * CHUNK));
    let guest = cache.guest();
    for _ in 0..3 {
        assert_eq!(byte(&guest, 0).await, 0);
    }
    let error = guest.read(Bytes(CHUNK / 2), Buffer::unpooled(1)).await.expect_err("it is unreadable");
    assert_eq!((error.kind(), cache.status().bytes), (ErrorKind::Io, 0));
}

#[tokio::test(start_paused = true)]
async fn writes_replace_what_is_here_and_zeroes_and_discards_drop_it() {
    let Scene { disk, cache, guest, copy } = scene(4);
    read(&copy, 0, 4 * CHUNK).await;
    write(&guest, CHUNK - 2, &[1; 4]).await;
    assert_eq!(
        (read(&guest, CHUNK - 3, 6).await, read(&copy, CHUNK - 3, 6).await),
        (vec![0, 1, 1, 1, 1, 0], vec![0, 1, 1, 1, 1, 0])
    );
    assert_eq!((disk.read().0, cache.status().bytes), (1, 4 * CHUNK), "it stays in memory");
    let extent = Extent::new(Bytes(CHUNK), Bytes(1));
    guest.write(Mutation::zeroes(extent, false)).await.expect("it takes it");
    assert_eq!((byte(&guest, CHUNK).await, byte(&guest, CHUNK + 1).await, cache.status().bytes), (0, 1, 4 * CHUNK));
    guest.write(Mutation::discard(Extent::new(Bytes(0), Bytes(2 * CHUNK)))).await.expect("it takes it");
    assert_eq!(cache.status().bytes, 2 * CHUNK);
    let refused = copy.write(Mutation::zeroes(extent, false)).await.expect_err("it only reads");
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
}

#[tokio::test(start_paused = true)]
async fn a_write_that_comes_after_the_read_of_a_fill_and_before_its_answer_wins() {
    let Scene { disk, cache, guest, copy } = scene(4);
    hold(&disk.read_turns);
    let mut fill = pin!(read(&copy, 0, CHUNK));
    assert!(futures::poll!(&mut fill).is_pending());
    write(&guest, 10, &[1]).await;
    release(&disk.read_turns);
    assert_eq!(fill.await[10], 0, "it was read before the write");
    assert_eq!((byte(&guest, 10).await, cache.status().outdated, cache.status().bytes), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_fill_that_begins_while_a_write_is_under_way_is_not_kept() {
    let Scene { disk, cache, guest, copy } = scene(4);
    hold(&disk.write_turns);
    let mut writing = pin!(write(&guest, 10, &[1]));
    assert!(futures::poll!(&mut writing).is_pending());
    read(&copy, 0, 2 * CHUNK).await;
    assert_eq!(cache.status().bytes, CHUNK, "only the chunk that nobody writes is kept");
    release(&disk.write_turns);
    writing.await;
    read(&copy, 0, CHUNK).await;
    assert_eq!((byte(&guest, 10).await, cache.status().bytes), (1, 2 * CHUNK));
}

#[tokio::test(start_paused = true)]
async fn a_read_that_meets_a_write_under_way_gives_no_newer_bytes_than_the_next_one_finds() {
    let disk = Held::over(memory(), true);
    let copy_face = disk.memory.clone();
    let cache = ReadCache::new(Device::from_arc("disk", Arc::clone(&disk) as _), copy_face, chunk_size(), Bytes(CHUNK));
    let (guest, copy) = (cache.guest(), cache.copy());
    hold(&disk.read_turns);
    let mut early = pin!(byte(&guest, 10));
    assert!(futures::poll!(&mut early).is_pending());
    read(&copy, 0, CHUNK).await;
    hold(&disk.write_turns);
    let mut writing = pin!(write(&guest, 10, &[1]));
    assert!(futures::poll!(&mut writing).is_pending());
    release(&disk.read_turns);
    // The disk has carried it out after the write.
    let (seen, next) = (early.await, byte(&guest, 10).await);
    assert_eq!(
        (seen, next, byte(&disk.memory, 10).await),
        (0, 0, 1),
        "a reader sees a byte and the next one an older one"
    );
    release(&disk.write_turns);
    writing.await;
    assert_eq!((byte(&guest, 10).await, byte(&copy, 10).await, disk.read().0), (1, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn of_two_writes_that_overlap_nobody_knows_which_the_disk_has() {
    let Scene { disk, cache, guest, copy } = scene(4);
    read(&copy, 0, 2 * CHUNK).await;
    hold(&disk.write_turns);
    let mut one = pin!(write(&guest, 10, &[1, 1]));
    let mut other = pin!(write(&guest, 11, &[2, 2]));
    let mut beside = pin!(write(&guest, CHUNK + 10, &[3]));
    assert!(futures::poll!(&mut one).is_pending() && futures::poll!(&mut other).is_pending());
    assert!(futures::poll!(&mut beside).is_pending());
    disk.write_turns.add_permits(1);
    one.await;
    assert_eq!((read(&guest, 10, 3).await, cache.status().bytes), (vec![1, 2, 2], CHUNK));
    release(&disk.write_turns);
    other.await;
    beside.await;
    assert_eq!((byte(&guest, CHUNK + 10).await, cache.status().bytes), (3, CHUNK), "that one had its bytes for itself");
}

#[tokio::test(start_paused = true)]
async fn after_a_write_that_has_failed_or_was_abandoned_its_chunk_is_not_cached_any_more() {
    let held = Held::over(memory(), false);
    let fault = Fault::new(Device::from_arc("disk", Arc::clone(&held) as _), PausedEnv::shared(1));
    let source = Device::new("faulty", fault.clone());
    let cache = ReadCache::new(source.clone(), source, chunk_size(), Bytes(4 * CHUNK));
    let (guest, copy) = (cache.guest(), cache.copy());
    read(&copy, 0, 3 * CHUNK).await;
    let action = FaultAction::FailAfterwards(ErrorKind::TimedOut);
    fault.add(FaultRule { verb: FaultVerb::Write, extent: None, when: FaultWhen::Nth(0), action });
    guest.write(Mutation::data(Bytes(0), Data::copy_of(&[1]))).await.expect_err("it fails");
    assert_eq!((byte(&guest, 0).await, cache.status().bytes), (1, 2 * CHUNK));
    hold(&held.write_turns);
    {
        let mut abandoned = pin!(write(&guest, CHUNK, &[2]));
        assert!(futures::poll!(&mut abandoned).is_pending());
    }
    release(&held.write_turns);
    assert_eq!((byte(&guest, CHUNK).await, cache.status().bytes), (2, CHUNK));
    read(&copy, 0, 3 * CHUNK).await;
    assert_eq!((cache.status().bytes, cache.next_unsent(0, 9)), (CHUNK, None));
}

#[tokio::test(start_paused = true)]
async fn a_full_cache_takes_no_more_than_it_may_and_counts_what_had_to_go() {
    let Scene { cache, guest, copy, .. } = scene(3);
    read(&copy, 0, 6 * CHUNK).await;
    let status = cache.status();
    assert_eq!(
        (status.bytes, status.bytes_max, status.evictions, status.evictions_unsent),
        (3 * CHUNK, 3 * CHUNK, 3, 0)
    );
    // The short last chunk, whose memory is small, and whole ones in turn.
    for chunk in [8, 0, 8, 1, 8, 2] {
        read(&guest, chunk * CHUNK, CHUNK.min(SIZE.get() - chunk * CHUNK)).await;
    }
    assert_eq!(cache.status().bytes, 3 * CHUNK);
    cache.close();
    assert_eq!((byte(&guest, 8 * CHUNK).await, read(&copy, 0, CHUNK).await.len() as u64), (0, CHUNK));
    assert_eq!((cache.status().bytes, cache.next_unsent(0, 9)), (0, None), "everything passes through");
}

#[tokio::test(start_paused = true)]
async fn a_fill_that_ends_after_the_cache_was_closed_is_not_kept() {
    let Scene { disk, cache, copy, .. } = scene(3);
    hold(&disk.read_turns);
    let mut fill = pin!(read(&copy, 0, CHUNK));
    assert!(futures::poll!(&mut fill).is_pending());
    cache.close();
    release(&disk.read_turns);
    fill.await;
    assert_eq!(cache.status().bytes, 0);
}
