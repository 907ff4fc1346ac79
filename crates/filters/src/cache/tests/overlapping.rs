//! Reads that overlap with changes: what one has seen, no later one may miss.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::{BlockDevice, ExtentStatus, Geometry, IoFuture};

use super::*;

/// A device that holds its reads back, and writes before a byte, as long as it is told to.
struct Gate {
    inner: Device,
    holds_reads: AtomicBool,
    /// Writes before this byte are held.
    holds_writes_before: AtomicU64,
    /// How many reads it has answered.
    reads: AtomicU64,
}

impl Gate {
    fn over(inner: Device) -> (Device, Arc<Self>) {
        let (holds_reads, holds_writes_before) = (AtomicBool::new(false), AtomicU64::new(0));
        let gate = Arc::new(Self { inner, holds_reads, holds_writes_before, reads: AtomicU64::new(0) });
        (Device::from_arc("gate", Arc::clone(&gate) as _), gate)
    }

    fn hold_reads(&self, holds: bool) {
        self.holds_reads.store(holds, Ordering::SeqCst);
    }

    fn hold_writes_before(&self, end: u64) {
        self.holds_writes_before.store(end, Ordering::SeqCst);
    }
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            while self.holds_reads.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            self.reads.fetch_add(1, Ordering::SeqCst);
            self.inner.read(offset, buffer).await
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            while mutation.extent().offset.get() < self.holds_writes_before.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            self.inner.write(mutation).await
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.inner.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.inner.extents(extent))
    }
}

const PLACES: u64 = 9;

/// A write-back cache whose base and partition have gates, and where the data of the partition begins.
async fn gated() -> (Stand, [Arc<Gate>; 2], u64) {
    gated_of(SIZE).await
}

/// The same of a volume of `size`.
async fn gated_of(size: Bytes) -> (Stand, [Arc<Gate>; 2], u64) {
    let header = header_of(size, BLOCK, PLACES);
    let (base, base_gate) = Gate::over(memory(size));
    let (partition, partition_gate) = Gate::over(memory(header.partition_bytes()));
    let stand = Stand::over(base, partition, options(CacheMode::WriteBack), PLACES).await;
    (stand, [base_gate, partition_gate], header.partition_bytes().get() - PLACES * BLOCK)
}

fn reading(stand: &Stand) -> tokio::task::JoinHandle<u8> {
    let guest = stand.guest.clone();
    tokio::spawn(async move { byte_at(&guest, 0, SECTOR).await })
}

#[tokio::test(start_paused = true)]
async fn a_read_in_a_place_that_was_cleared_does_not_see_the_next_write_before_others_do() {
    let (stand, [_, partition], data_start) = gated().await;
    write(&stand.guest, 0, &[1; SECTOR as usize]).await;
    partition.hold_reads(true);
    let first = reading(&stand);
    yield_often().await;
    zero(&stand.guest, 0, SECTOR).await;
    // The bytes of the next write come into the place, and it is not on record yet that they are valid.
    partition.hold_writes_before(data_start);
    let guest = stand.guest.clone();
    let writing = tokio::spawn(async move { write(&guest, 0, &[2; SECTOR as usize]).await });
    yield_often().await;
    partition.hold_reads(false);
    let (first, second) = (first.await.expect("it ends"), byte_at(&stand.guest, 0, SECTOR).await);
    assert_eq!((first, second), (0, 0), "the first saw what the second did not");
    partition.hold_writes_before(0);
    writing.await.expect("it ends");
    assert_eq!(byte_at(&stand.guest, 0, SECTOR).await, 2);
}

#[tokio::test(start_paused = true)]
async fn a_read_of_the_base_does_not_see_a_discard_while_others_see_what_it_discards() {
    let (stand, [base, partition], data_start) = gated().await;
    write(&stand.base, 0, &[9; SECTOR as usize]).await;
    base.hold_reads(true);
    let first = reading(&stand);
    yield_often().await;
    write(&stand.guest, 0, &[1; SECTOR as usize]).await;
    // The base has zeroes, and what is dirty in the place is valid still.
    partition.hold_writes_before(data_start);
    let guest = stand.guest.clone();
    let zeroing = tokio::spawn(async move { zero(&guest, 0, SECTOR).await });
    yield_often().await;
    base.hold_reads(false);
    let (first, second) = (first.await.expect("it ends"), byte_at(&stand.guest, 0, SECTOR).await);
    assert_eq!((first, second), (1, 1), "the first saw what the second did not");
    partition.hold_writes_before(0);
    zeroing.await.expect("it ends");
    assert_eq!(byte_at(&stand.guest, 0, SECTOR).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_read_of_the_base_is_not_repeated_for_writes_to_other_blocks() {
    // More blocks than there are stamps: the last one has that of block 0.
    const BLOCKS: u64 = (1 << 16) + 1;
    let (stand, [base, _], _) = gated_of(Bytes(BLOCKS * BLOCK)).await;
    write(&stand.base, 0, &[9; BLOCK as usize]).await;
    // Of block 0 some is in its place: the read is one of pieces.
    write(&stand.guest, BLOCK - SECTOR, &[1; SECTOR as usize]).await;
    base.hold_reads(true);
    let guest = stand.guest.clone();
    let reading = tokio::spawn(async move { byte_at(&guest, 0, BLOCK).await });
    yield_often().await;
    write(&stand.guest, (BLOCKS - 1) * BLOCK, &[2; BLOCK as usize]).await;
    // What is dirty of block 0 itself and was read in its place is no reason either.
    write(&stand.guest, BLOCK - SECTOR, &[3; SECTOR as usize]).await;
    base.hold_reads(false);
    assert_eq!(reading.await.expect("it ends"), 9);
    assert_eq!(base.reads.load(Ordering::SeqCst), 1, "the base was read again for nothing");
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_is_closed_while_it_is_emptied_leaves_its_partition_alone_afterwards() {
    const MANY: u64 = 64;
    let header = header_of(SIZE, BLOCK, MANY);
    let (partition, gate) = Gate::over(memory(header.partition_bytes()));
    let options = CacheOptions { dirty_low_percent: 0, ..options(CacheMode::WriteBack) };
    let stand = Stand::over(memory(SIZE), partition, options, MANY).await;
    write(&stand.guest, 0, &[1; 2 * BLOCK as usize]).await;
    stand.guest.flush().await.expect("it takes it");
    stand.cache.write_back().await.expect("it takes it");
    assert!(stand.cache.is_clean() && !stand.cache.holds_nothing(), "the durable map names what was cleaned");
    // The last that an emptying does is to write the durable map.
    gate.hold_writes_before(header.partition_bytes().get() - MANY * BLOCK);
    let (emptied, closed) = (stand.cache.clone(), stand.cache.clone());
    let emptying = tokio::spawn(async move { emptied.drain().await });
    yield_often().await;
    assert!(!emptying.is_finished(), "it waits for the partition");
    let closing = tokio::spawn(async move { closed.close().await });
    yield_often().await;
    assert!(!closing.is_finished(), "the partition is given away while it is still written to");
    gate.hold_writes_before(0);
    closing.await.expect("it ends");
    emptying.await.expect("it ends").expect("nothing fails");
    assert!(stand.cache.holds_nothing());
}
