//! Draining while the guest writes, and what failing disks leave.

use std::sync::Arc;

use block::testing::{Random, conformance};
use block::{Buffer, Bytes, ChunkSize, Data, Device, ErrorKind, Extent, MemDevice, Mutation};
use env::EnvRef;

use crate::cached_disk::CachedDisk;
use crate::lives::{Layer, disk, live};
use crate::overlay::{Overlay, OverlayHeader};
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};

/// No multiple of a grain; its last sector is short.
const SIZE: Bytes = Bytes(12 * 4096 + 3 * 512 + 100);

fn header(size: Bytes) -> OverlayHeader {
    OverlayHeader::new(size, [7; 16], [0; 16]).with_grain(ChunkSize::new(4096).expect("a chunk size"))
}

async fn open(base: &Arc<CachedDisk>, delta: &Arc<CachedDisk>, boot: u8) -> Arc<Overlay> {
    let opened = Overlay::open(disk("base", base), disk("delta", delta), [boot; 16]).await;
    Arc::new(opened.expect("a good disk holds an overlay"))
}

impl Layer for Arc<Overlay> {
    const SIZE: Bytes = SIZE;

    fn own_bytes() -> Bytes {
        header(SIZE).delta_bytes()
    }

    async fn make(own: &Device) {
        Overlay::create(own, &header(SIZE)).await.expect("a good disk takes it");
    }

    async fn open_over(_env: EnvRef, base: Device, own: Device, boot: [u8; 16]) -> Self {
        Self::new(Overlay::open(base, own, boot).await.expect("a good disk holds an overlay"))
    }

    fn views(&self) -> Vec<Device> {
        vec![Device::from_arc("overlay", Self::clone(self) as _)]
    }

    async fn start_draining(&self) {
        self.begin_drain();
    }

    async fn drain_some(&self, random: &mut Random) {
        let from = Bytes(random.below(SIZE.0));
        self.drain_next(from, Bytes(random.below(20_000))).await.expect("good disks take it");
    }

    async fn drain_all(&self) {
        let mut next = Bytes::ZERO;
        while let Some(extent) = self.drain_next(next, Bytes::kib(16)).await.expect("good disks take it") {
            next = extent.end();
        }
    }

    fn holds_nothing(&self) -> bool {
        self.is_empty()
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_lives_through_crashes_and_power_losses_while_its_overlay_is_drained() {
    live::<Arc<Overlay>>(100, 25).await;
}

fn memory(size: Bytes) -> Device {
    Device::new("memory", MemDevice::new(size))
}

#[tokio::test]
async fn an_overlay_that_is_drained_conforms() {
    conformance(1, async |size| {
        let (base, delta) = (memory(size), memory(header(size).delta_bytes()));
        Overlay::create(&delta, &header(size)).await.expect("memory takes it");
        base.write(Mutation::data(Bytes::ZERO, Data::copy_of(&vec![7; size.as_usize()]))).await.expect("it takes it");
        let overlay = Arc::new(Overlay::open(base, delta, [1; 16]).await.expect("it opens"));
        let volume = Device::from_arc("overlay", Arc::clone(&overlay) as _);
        // The first third is absent, the second data and the last zero.
        let (one, two) = (Bytes(size.0 / 3), Bytes(size.0 / 3 * 2));
        let zeroes = vec![0; (two - one).as_usize()];
        volume.write(Mutation::zeroes(Extent::whole(size), true)).await.expect("memory takes it");
        volume.write(Mutation::data(one, Data::copy_of(&zeroes))).await.expect("memory takes it");
        overlay.begin_drain();
        let mut next = Bytes::ZERO;
        while let Some(extent) = overlay.drain_next(next, Bytes::kib(64)).await.expect("memory takes it") {
            next = extent.end();
            if next >= one {
                break;
            }
        }
        assert!(!overlay.is_empty());
        volume
    })
    .await;
}

/// A volume whose first grain is 5, flushed and then drained.
async fn drained() -> (Arc<CachedDisk>, Arc<CachedDisk>, Arc<Overlay>, Device) {
    let base = Arc::new(CachedDisk::new(1, SIZE, 1));
    let delta = Arc::new(CachedDisk::new(2, header(SIZE).delta_bytes(), 1));
    Overlay::create(&disk("delta", &delta), &header(SIZE)).await.expect("a good disk takes it");
    let overlay = open(&base, &delta, 1).await;
    let volume = Device::from_arc("overlay", Arc::clone(&overlay) as _);
    volume.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[5; 4096]))).await.expect("a good disk takes it");
    volume.flush().await.expect("a good disk flushes");
    overlay.begin_drain();
    let moved = overlay.drain_next(Bytes::ZERO, Bytes(1)).await.expect("a good disk takes it");
    assert_eq!(moved, Some(Extent::new(Bytes::ZERO, Bytes(4096))));
    assert_eq!(overlay.drain_next(Bytes::ZERO, SIZE).await.expect("nothing is asked of it"), None);
    (base, delta, overlay, volume)
}

async fn first_bytes(volume: &Device) -> (u8, u8) {
    let read = volume.read(Bytes::ZERO, Buffer::unpooled(4096)).await.expect("a good disk answers");
    (read[0], read[4095])
}

#[tokio::test]
async fn a_forced_write_to_the_base_outlives_the_power_and_a_plain_one_leaves_what_was_flushed() {
    for fua in [false, true] {
        let (base, delta, overlay, volume) = drained().await;
        assert!(overlay.is_empty());
        let write = Mutation::data(Bytes::ZERO, Data::copy_of(&[6; 512])).with_fua(fua);
        volume.write(write).await.expect("a good disk takes it");
        base.lose_cache();
        delta.lose_cache();
        let overlay = open(&base, &delta, 2).await;
        let volume = Device::from_arc("overlay", overlay as _);
        assert_eq!(first_bytes(&volume).await, (if fua { 6 } else { 5 }, 5));
    }
}

#[tokio::test]
async fn a_base_that_loses_what_was_drained_does_not_lose_what_was_flushed() {
    let (base, delta, overlay, volume) = drained().await;
    base.fail_flushes();
    volume.flush().await.expect_err("the base fails it");
    volume.flush().await.expect_err("a later one proves nothing");
    volume.write(Mutation::data(Bytes(4096), Data::copy_of(&[1])).with_fua(true)).await.expect_err("nor does this");
    base.lose_cache();
    drop((volume, overlay));
    let overlay = open(&base, &delta, 1).await;
    let volume = Device::from_arc("overlay", overlay as _);
    assert_eq!(first_bytes(&volume).await, (5, 5), "the delta still has it");
}

#[tokio::test]
async fn what_is_answered_after_a_flush_of_the_base_has_failed_is_there_in_the_next_life() {
    let (base, delta, overlay, volume) = drained().await;
    base.fail_flushes();
    volume.flush().await.expect_err("the base fails it");
    let mut answered = Vec::new();
    // Over what was drained, over nothing, and over half of a grain.
    for (offset, byte) in [(0, 7), (4096, 8), (3 * 4096 + 512, 9)] {
        let write = Mutation::data(Bytes(offset), Data::copy_of(&[byte; 512]));
        if volume.write(write).await.is_ok() {
            answered.push((offset, byte));
        }
    }
    drop((volume, overlay));
    let overlay = open(&base, &delta, 1).await;
    let volume = Device::from_arc("overlay", overlay as _);
    for (offset, byte) in answered {
        let read = volume.read(Bytes(offset), Buffer::unpooled(512)).await.expect("a good disk answers");
        assert_eq!(&read[..], [byte; 512], "an answered write at {offset} is lost in the same boot");
    }
}

#[tokio::test]
async fn what_the_guest_changes_where_nothing_is_held_makes_an_overlay_hold_nothing_again() {
    let (base, _, overlay, volume) = drained().await;
    let extent = |start, end| Extent::between(Bytes(start), Bytes(end));
    volume.write(Mutation::data(Bytes(100), Data::copy_of(&[6; 9000]))).await.expect("a good disk takes it");
    volume.write(Mutation::zeroes(extent(0, 4096), true)).await.expect("a good disk takes it");
    volume.write(Mutation::zeroes(extent(4096, 4608), false)).await.expect("a good disk takes it");
    volume.write(Mutation::discard(extent(8192, SIZE.0))).await.expect("a good disk takes it");
    assert!(overlay.is_empty());
    let below = disk("base", &base).read(Bytes::ZERO, Buffer::unpooled(8192)).await.expect("a good disk answers");
    assert_eq!([below[100], below[4607], below[4608], below[8191]], [0, 0, 6, 6]);
}

#[tokio::test]
async fn a_base_that_is_drained_into_is_not_replaced() {
    let (_, _, overlay, _) = drained().await;
    let refused = overlay.rebase(memory(SIZE)).expect_err("the old one has what was drained");
    assert_eq!(refused.kind(), ErrorKind::Busy);
}

/// The same as [`drained`], over a base that can be told to fail.
async fn drained_into_failing() -> (Device, Fault, Device, Arc<Overlay>, Device) {
    let (plain, delta) = (memory(SIZE), memory(header(SIZE).delta_bytes()));
    let fault = Fault::new(plain.clone(), env::testing::PausedEnv::shared(1));
    Overlay::create(&delta, &header(SIZE)).await.expect("memory takes it");
    let base = Device::new("base", fault.clone());
    let overlay = Arc::new(Overlay::open(base, delta.clone(), [1; 16]).await.expect("it opens"));
    let volume = Device::from_arc("overlay", Arc::clone(&overlay) as _);
    volume.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[5; 8192]))).await.expect("memory takes it");
    volume.flush().await.expect("memory flushes");
    overlay.begin_drain();
    drain_all(&overlay).await;
    (plain, fault, delta, overlay, volume)
}

async fn drain_all(overlay: &Overlay) {
    let mut next = Bytes::ZERO;
    while let Some(extent) = overlay.drain_next(next, SIZE).await.expect("memory takes it") {
        next = extent.end();
    }
}

fn flushes_fail(fault: &Fault, kind: ErrorKind) {
    let action = FaultAction::Fail(kind);
    fault.add(FaultRule { verb: FaultVerb::Flush, extent: None, when: FaultWhen::Always, action });
}

#[tokio::test]
async fn a_base_that_is_away_changes_nothing_of_an_overlay_that_is_drained_into_it() {
    let (_, fault, _, overlay, volume) = drained_into_failing().await;
    flushes_fail(&fault, ErrorKind::TimedOut);
    volume.flush().await.expect_err("the base is away");
    assert!(overlay.is_empty(), "something is held again although nothing was lost");
    fault.clear();
    volume.flush().await.expect("nothing was lost");
    assert!(overlay.settle().await.expect("the base is well"));
}

#[tokio::test]
async fn what_the_base_may_have_lost_is_held_again_outlives_a_restart_and_is_drained_once_more() {
    let (plain, fault, delta, overlay, volume) = drained_into_failing().await;
    // One grain is changed in the base.
    volume.write(Mutation::data(Bytes(4096), Data::copy_of(&[7; 512]))).await.expect("memory takes it");
    // It has lost all of that by the time it says so, and whoever asks it later reads what was there before.
    plain.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[1; 8192]))).await.expect("memory takes it");
    flushes_fail(&fault, ErrorKind::Io);
    overlay.settle().await.expect_err("the base has failed");
    assert!(!overlay.is_empty(), "what was flushed is lost");
    assert_eq!(first_bytes(&volume).await, (5, 5));
    // Writes go on, over what is held and beside it, and a restart keeps them.
    for at in [8192 - 512, 16384] {
        volume.write(Mutation::data(Bytes(at), Data::copy_of(&[6; 512]))).await.expect("memory takes it");
    }
    let bytes = async |volume: &Device| {
        let read = volume.read(Bytes::ZERO, Buffer::unpooled(20480)).await.expect("memory answers");
        [read[0], read[4096], read[5000], read[8191], read[16384]]
    };
    let again = Overlay::open(Device::new("base", fault.clone()), delta, [1; 16]).await.expect("it opens");
    assert_eq!(bytes(&Device::new("again", again)).await, [5, 7, 5, 6, 6]);
    fault.clear();
    volume.flush().await.expect_err("a later flush proves nothing of what the guest has written");
    drain_all(&overlay).await;
    assert!(overlay.settle().await.expect("the base is well again"), "it cannot be taken away");
    assert_eq!(bytes(&plain).await, [5, 7, 5, 6, 6]);
}

#[tokio::test]
async fn a_delta_that_makes_nothing_durable_any_more_is_drained_all_the_same() {
    let (plain, own) = (memory(SIZE), memory(header(SIZE).delta_bytes()));
    Overlay::create(&own, &header(SIZE)).await.expect("memory takes it");
    let fault = Fault::new(own, env::testing::PausedEnv::shared(1));
    let overlay = Overlay::open(plain.clone(), Device::new("delta", fault.clone()), [1; 16]).await.expect("it opens");
    let overlay = Arc::new(overlay);
    let volume = Device::from_arc("overlay", Arc::clone(&overlay) as _);
    volume.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[5; 8192]))).await.expect("memory takes it");
    flushes_fail(&fault, ErrorKind::Io);
    volume.flush().await.expect_err("the delta has failed");
    overlay.begin_drain();
    drain_all(&overlay).await;
    assert!(overlay.settle().await.expect("the base has it") && overlay.has_failed_record());
    assert_eq!(first_bytes(&plain).await, (5, 5));
}
