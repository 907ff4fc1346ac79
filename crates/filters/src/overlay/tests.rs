//! The overlay against a plain model: on its own, opened again, over another base and folded into its base.

use std::sync::Arc;
use std::task::{Context, Waker};

use block::testing::{Model, Random, conformance};
use block::{
    BlockDevice, Buffer, Bytes, ChunkSize, Data, Device, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture,
    MemDevice, Mutation,
};
use tokio::sync::Semaphore;

use super::{Overlay, OverlayHeader, RunOrigin};

const BOOT: [u8; 16] = [1; 16];

fn memory(size: Bytes, unit: u32) -> Device {
    Device::new("memory", MemDevice::new(size).with_request_alignment(unit))
}

fn header_of(size: Bytes, grain: u64) -> OverlayHeader {
    OverlayHeader::new(size, [7; 16], [0; 16]).with_grain(ChunkSize::new(grain).expect("a chunk size"))
}

async fn new_delta(header: &OverlayHeader, unit: u32) -> Device {
    let delta = memory(header.delta_bytes(), unit);
    Overlay::create(&delta, header).await.expect("memory takes it");
    delta
}

async fn open(base: &Device, delta: &Device, boot: [u8; 16]) -> Arc<Overlay> {
    Arc::new(Overlay::open(base.clone(), delta.clone(), boot).await.expect("it opens"))
}

fn device(overlay: &Arc<Overlay>) -> Device {
    Device::from_arc("overlay", Arc::clone(overlay) as _)
}

async fn over(base: Device, unit: u32, grain: u64) -> Device {
    let delta = new_delta(&header_of(base.size(), grain), unit).await;
    device(&open(&base, &delta, BOOT).await)
}

#[tokio::test]
async fn an_overlay_conforms_whatever_units_its_devices_and_it_have() {
    for (below, own, grain) in [(1, 1, 4096), (1, 1, 65536), (512, 1, 4096), (1, 4096, 8192), (4096, 512, 65536)] {
        conformance(1, async |size| over(memory(size, below), own, grain).await).await;
    }
}

#[tokio::test]
async fn overlays_over_each_other_conform() {
    conformance(2, async |size| over(over(over(memory(size, 1), 1, 4096).await, 1, 65536).await, 512, 8192).await)
        .await;
}

/// Memory whose reads, and whose writes below `maps_end`, wait while they are held.
struct BlockingMemory {
    memory: MemDevice,
    maps_end: Bytes,
    reads: Arc<Semaphore>,
    map_writes: Arc<Semaphore>,
}

impl BlockDevice for BlockingMemory {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let _pass = self.reads.acquire().await.expect("the gate is never closed for good");
            self.memory.read(offset, buffer).await
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if mutation.extent().offset < self.maps_end {
                drop(self.map_writes.acquire().await.expect("the gate is never closed for good"));
            }
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

fn is_pending<T>(work: &mut IoFuture<'_, T>) -> bool {
    work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[tokio::test]
async fn a_read_does_not_see_what_the_map_does_not_show_yet() {
    let header = header_of(Bytes(1 << 20), 4096);
    let (reads, map_writes) = (Arc::new(Semaphore::new(9)), Arc::new(Semaphore::new(9)));
    let (below, maps_end) = (MemDevice::new(header.delta_bytes()), header.data_at());
    let gate =
        BlockingMemory { memory: below, maps_end, reads: Arc::clone(&reads), map_writes: Arc::clone(&map_writes) };
    let delta = Device::new("gate", gate);
    Overlay::create(&delta, &header).await.expect("memory takes it");
    let volume = device(&open(&memory(Bytes(1 << 20), 1), &delta, BOOT).await);
    let grain = |byte| Mutation::data(Bytes::ZERO, Data::copy_of(&[byte; 4096]));
    volume.write(grain(1)).await.expect("written");

    reads.forget_permits(9);
    let mut read: IoFuture<'_, Buffer> = Box::pin(volume.read(Bytes::ZERO, Buffer::unpooled(512)));
    assert!(is_pending(&mut read));
    volume.write(Mutation::zeroes(Extent::new(Bytes::ZERO, Bytes(4096)), true)).await.expect("zeroed");
    map_writes.forget_permits(9);
    let mut write: IoFuture<'_, ()> = Box::pin(volume.write(grain(2)));
    assert!(is_pending(&mut write));
    reads.add_permits(9);
    let seen = read.await.expect("read")[0];
    assert_eq!(seen, 0, "a later read would give zeroes again");
    map_writes.add_permits(9);
    write.await.expect("written");
    assert_eq!(volume.read(Bytes::ZERO, Buffer::unpooled(512)).await.expect("read")[0], 2);
}

/// A volume with something on it, an overlay, and what the overlay should read as.
struct Case {
    random: Random,
    base: Device,
    delta: Device,
    overlay: Arc<Overlay>,
    model: Model,
}

impl Case {
    async fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let grain = 4096 << random.below(5);
        let size = Bytes(400_000 + random.below(400_000));
        let unit = if random.one_in(2) { 1 } else { 512 };
        let base = memory(size, 1);
        let mut model = Model::new(&base);
        for _ in 0..10 {
            let start = random.below(size.0);
            let length = (1 + random.below(50_000)).min(size.0 - start);
            let write = Mutation::data(Bytes(start), Data::copy_of(&random.bytes(length as usize)));
            model.apply(&write);
            base.write(write).await.expect("memory takes it");
        }
        let delta = new_delta(&header_of(size, grain), unit).await;
        let overlay = open(&base, &delta, BOOT).await;
        Self { random, base, delta, overlay, model }
    }

    async fn mutate(&mut self) {
        let size = self.model.size();
        let unit = u64::from(device(&self.overlay).geometry().request_alignment);
        let start = Bytes(self.random.below(size.0)).align_down(unit);
        let length = if self.random.one_in(3) { 300_000 } else { 9_000 };
        let end = (start + Bytes(1 + self.random.below(length))).align_up(unit).min(size);
        let extent = Extent::between(start, end);
        let mutation = match self.random.below(5) {
            0 => Mutation::zeroes(extent, self.random.one_in(2)),
            1 => Mutation::discard(extent),
            _ => Mutation::data(extent.offset, Data::copy_of(&self.random.bytes(extent.length.as_usize()))),
        };
        let fua = self.random.one_in(8);
        self.model.apply(&mutation);
        device(&self.overlay).write(mutation.with_fua(fua)).await.expect("memory takes it");
    }

    async fn check(&mut self, device: &Device, what: &str) {
        let all = device.read(Bytes::ZERO, Buffer::unpooled(device.size().as_usize())).await.expect("memory answers");
        if let Err(difference) = self.model.compare(Bytes::ZERO, &all) {
            panic!("{what}: {difference}");
        }
    }
}

#[tokio::test]
async fn an_overlay_reads_as_a_plain_volume_would_and_leaves_its_base_alone() {
    for seed in 0..40 {
        let mut case = Case::new(seed).await;
        let size = case.base.size().as_usize();
        let before = case.base.read(Bytes::ZERO, Buffer::unpooled(size)).await.expect("memory answers");
        for step in 0..60 {
            case.mutate().await;
            match case.random.below(12) {
                // The process dies: nothing was flushed, and all of it is there.
                0 => case.overlay = open(&case.base, &case.delta, BOOT).await,
                // The machine stops after a flush.
                1 => {
                    device(&case.overlay).flush().await.expect("memory flushes");
                    case.overlay = open(&case.base, &case.delta, [2 + step as u8; 16]).await;
                    case.overlay = open(&case.base, &case.delta, BOOT).await;
                }
                2 => device(&case.overlay).flush().await.expect("memory flushes"),
                _ => {}
            }
            let device = device(&case.overlay);
            case.check(&device, &format!("seed {seed}, step {step}")).await;
        }
        let after = case.base.read(Bytes::ZERO, Buffer::unpooled(size)).await.expect("memory answers");
        assert!(before[..] == after[..], "seed {seed}: the base was written");
    }
}

#[tokio::test]
async fn what_an_overlay_holds_folded_into_its_base_makes_the_volume() {
    for seed in 100..130 {
        let mut case = Case::new(seed).await;
        for _ in 0..30 {
            case.mutate().await;
        }
        let device = device(&case.overlay);
        case.check(&device, "before").await;
        let (mut next, mut data, mut zeroes) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
        while let Some((extent, held)) = case.overlay.next_stored(next, Bytes::kib(64)) {
            let write = match held {
                RunOrigin::Data => {
                    data += extent.length;
                    let buffer = Buffer::unpooled(extent.length.as_usize());
                    Mutation::data(extent.offset, device.read(extent.offset, buffer).await.expect("answers").freeze())
                }
                RunOrigin::Zeroes => {
                    zeroes += extent.length;
                    Mutation::zeroes(extent, true)
                }
            };
            case.base.write(write).await.expect("memory takes it");
            next = extent.end();
        }
        let base = case.base.clone();
        case.check(&base, &format!("seed {seed}, folded")).await;
        let tail = Bytes(case.overlay.header().grain.bytes());
        assert!(case.overlay.data_bytes() + case.overlay.zero_bytes() <= data + zeroes + tail);
        assert!(data + zeroes <= case.overlay.data_bytes() + case.overlay.zero_bytes());
    }
}

#[tokio::test]
async fn an_overlay_may_be_laid_over_another_device_with_the_same_bytes() {
    let base = memory(Bytes(100_000), 1);
    base.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[5; 100_000]))).await.expect("memory takes it");
    let first = open(&base, &new_delta(&header_of(base.size(), 4096), 1).await, BOOT).await;
    let second = open(&device(&first), &new_delta(&header_of(base.size(), 4096), 1).await, BOOT).await;
    device(&first).write(Mutation::data(Bytes(10), Data::copy_of(&[6; 10]))).await.expect("memory takes it");
    device(&second).write(Mutation::data(Bytes(50_000), Data::copy_of(&[7; 10]))).await.expect("memory takes it");
    base.write(Mutation::data(Bytes(10), Data::copy_of(&[6; 10]))).await.expect("memory takes it");
    second.rebase(base.clone()).expect("it has the same size");
    drop(first);
    let read = device(&second).read(Bytes::ZERO, Buffer::unpooled(100_000)).await.expect("memory answers");
    assert_eq!((read[9], read[10], read[50_000], read[99_999]), (5, 6, 7, 5));
    let other = second.rebase(memory(Bytes(99_999), 1)).expect_err("another size");
    assert_eq!(other.kind(), ErrorKind::Invalid);
    let coarse = second.rebase(memory(Bytes(100_000), 512)).expect_err("coarser requests");
    assert_eq!(coarse.kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn what_is_no_overlay_of_this_volume_is_refused_in_one_line() {
    let header = header_of(Bytes(100_000), 4096);
    let delta = new_delta(&header, 1).await;
    let kind = async |base: Device, delta: Device| {
        let error = Overlay::open(base, delta, BOOT).await.expect_err("it does not fit");
        assert!(!error.chain().contains('\n'), "{}", error.chain());
        error.kind()
    };
    let base = || memory(Bytes(100_000), 1);
    assert_eq!(kind(memory(Bytes(100_001), 1), delta.clone()).await, ErrorKind::Invalid);
    assert_eq!(kind(base(), memory(header.delta_bytes(), 1)).await, ErrorKind::Invalid);
    assert_eq!(kind(base(), memory(Bytes(10), 1)).await, ErrorKind::Invalid);
    let longer = Overlay::create(&memory(header.delta_bytes() + Bytes(1), 1), &header).await;
    assert_eq!(longer.expect_err("another size").kind(), ErrorKind::Invalid);
    // Both maps begin at 8192.
    delta.write(Mutation::data(Bytes(8192), Data::copy_of(&[3; 512]))).await.expect("memory takes it");
    assert_eq!(kind(base(), delta.clone()).await, ErrorKind::Corrupt);
    delta.write(Mutation::data(Bytes(20), Data::copy_of(&[3]))).await.expect("memory takes it");
    assert_eq!(kind(base(), delta).await, ErrorKind::Corrupt);
}

#[tokio::test]
async fn whatever_an_earlier_overlay_left_on_the_delta_is_gone_in_a_new_one() {
    let base = memory(Bytes(100_000), 1);
    let delta = new_delta(&header_of(base.size(), 4096), 1).await;
    let old = device(&open(&base, &delta, BOOT).await);
    old.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[9; 50_000])).with_fua(true)).await.expect("memory takes it");
    Overlay::create(&delta, &header_of(base.size(), 4096)).await.expect("memory takes it");
    let new = device(&open(&base, &delta, BOOT).await);
    let read = new.read(Bytes::ZERO, Buffer::unpooled(100_000)).await.expect("memory answers");
    assert!(read.iter().all(|byte| *byte == 0));
}
