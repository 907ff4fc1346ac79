//! Draining while the guest writes, through crashes of the process and power losses, sector by sector against a list of
//! what each may hold.

use std::pin::pin;
use std::sync::Arc;

use block::testing::{Random, conformance};
use block::{Buffer, Bytes, ChunkSize, Data, Device, ErrorKind, Extent, MemDevice, Mutation};
use futures::future::{Either, join_all, select};
use parking_lot::Mutex;

use super::disk::{CachedDisk, SECTOR};
use crate::overlay::{Overlay, OverlayHeader};

/// No multiple of a grain; its last sector is short.
const SIZE: Bytes = Bytes(12 * 4096 + 3 * 512 + 100);
/// What a discarded sector may hold: anything.
const ANY: u64 = u64::MAX;

fn header(size: Bytes) -> OverlayHeader {
    OverlayHeader::new(size, [7; 16], [0; 16]).with_grain(ChunkSize::new(4096).expect("a chunk size"))
}

/// What a sector may hold, oldest first: what certainly survives, then all that was written since. The last one is what
/// reads see.
struct Sector {
    versions: Vec<u64>,
    /// Writes that were under way when the process died.
    doubtful: Vec<u64>,
}

/// The life of a volume whose overlay is drained.
struct Life {
    random: Random,
    base: Arc<CachedDisk>,
    delta: Arc<CachedDisk>,
    overlay: Arc<Overlay>,
    sectors: Vec<Sector>,
    boot: u8,
    next_tag: u64,
}

fn disk(name: &str, disk: &Arc<CachedDisk>) -> Device {
    Device::from_arc(name, Arc::clone(disk) as _)
}

async fn open(base: &Arc<CachedDisk>, delta: &Arc<CachedDisk>, boot: u8) -> Arc<Overlay> {
    let opened = Overlay::open(disk("base", base), disk("delta", delta), [boot; 16]).await;
    Arc::new(opened.expect("a good disk holds an overlay"))
}

fn sectors_of(extent: Extent) -> std::ops::Range<usize> {
    extent.offset.as_usize() / SECTOR..extent.end().as_usize().div_ceil(SECTOR)
}

/// The tag that fills a sector.
fn tag_of(bytes: &[u8], what: &str) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    let is_whole = bytes.iter().zip(first.iter().cycle()).all(|(byte, expected)| byte == expected);
    assert!(is_whole, "{what}: a sector is a mixture");
    u64::from_le_bytes(first)
}

async fn yield_times(count: u64) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

impl Life {
    async fn new(seed: u64) -> Self {
        let unit = [1, 512, 4096][(seed % 3) as usize];
        let base = Arc::new(CachedDisk::new(seed, SIZE, unit));
        let delta = Arc::new(CachedDisk::new(seed + 1, header(SIZE).delta_bytes(), unit));
        Overlay::create(&disk("delta", &delta), &header(SIZE)).await.expect("a good disk takes it");
        let overlay = open(&base, &delta, 1).await;
        let sectors = (0..SIZE.as_usize().div_ceil(SECTOR)).map(|_| Sector { versions: vec![0], doubtful: Vec::new() });
        Self { random: Random::new(seed + 2), base, delta, overlay, sectors: sectors.collect(), boot: 1, next_tag: 1 }
    }

    fn device(&self) -> Device {
        Device::from_arc("overlay", Arc::clone(&self.overlay) as _)
    }

    /// Mutations that do not overlap, in whole units, with the tags that they leave.
    fn mutations(&mut self) -> Vec<(Mutation, u64)> {
        let unit = u64::from(self.device().geometry().request_alignment).max(SECTOR as u64);
        let mut mutations = Vec::new();
        let mut next = Bytes(self.random.below(12) * unit);
        while next < SIZE && mutations.len() < 16 {
            let longest = if self.random.one_in(5) { 60 } else { 6 };
            let end = (next + Bytes((1 + self.random.below(longest)) * unit)).min(SIZE);
            let extent = Extent::between(next, end);
            let tag = self.next_tag;
            self.next_tag += 1;
            let (mutation, tag) = match self.random.below(6) {
                0 => (Mutation::zeroes(extent, self.random.one_in(2)), 0),
                1 => (Mutation::discard(extent), ANY),
                _ => {
                    let bytes: Vec<u8> = tag.to_le_bytes().into_iter().cycle().take(extent.length.as_usize()).collect();
                    (Mutation::data(next, Data::copy_of(&bytes)), tag)
                }
            };
            mutations.push((mutation.with_fua(self.random.one_in(8)), tag));
            next = end + Bytes(self.random.below(6) * unit);
        }
        mutations
    }

    /// Mutations beside flushes, reads and draining, for at most `limit` turns; false if that cut them short.
    async fn batch(&mut self, limit: u64, what: &str) -> bool {
        let mutations = self.mutations();
        let delays: Vec<u64> = mutations.iter().map(|_| self.random.below(40)).collect();
        let [flushes, reads, pieces, begin] = [3, 8, 9, 20].map(|most| self.random.below(most));
        let mut random = Random::new(self.random.number());
        let (device, overlay) = (self.device(), Arc::clone(&self.overlay));
        let answered = Mutex::new(vec![false; mutations.len()]);
        let work = async {
            let writes =
                join_all(mutations.iter().zip(delays).enumerate().map(async |(number, ((mutation, _), delay))| {
                    yield_times(delay).await;
                    device.write(mutation.clone()).await.expect("a good disk takes it");
                    answered.lock()[number] = true;
                }));
            let flush = async {
                for _ in 0..flushes {
                    yield_times(7).await;
                    device.flush().await.expect("a good disk flushes");
                }
            };
            let read = async {
                for _ in 0..reads {
                    yield_times(3).await;
                    let all = device.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())).await.expect("it answers");
                    for (number, (bytes, sector)) in all.chunks(SECTOR).zip(&self.sectors).enumerate() {
                        let tag = tag_of(bytes, what);
                        let is_under_way = mutations.iter().any(|(mutation, new)| {
                            sectors_of(mutation.extent()).contains(&number) && [tag, ANY].contains(new)
                        });
                        let is_old = sector.versions.last().is_some_and(|last| [tag, ANY].contains(last));
                        assert!(is_old || is_under_way, "{what}: sector {number} was seen with {tag}");
                    }
                }
            };
            let drain = async {
                if pieces == 0 {
                    return;
                }
                yield_times(begin).await;
                overlay.begin_drain();
                for _ in 0..pieces {
                    let from = Bytes(random.below(SIZE.0));
                    overlay.drain_next(from, Bytes(random.below(20_000))).await.expect("good disks take it");
                }
            };
            futures::join!(writes, flush, read, drain);
        };
        let is_done = matches!(select(pin!(work), pin!(yield_times(limit))).await, Either::Left(_));
        for ((mutation, tag), is_answered) in mutations.into_iter().zip(answered.into_inner()) {
            for sector in &mut self.sectors[sectors_of(mutation.extent())] {
                if !is_answered {
                    sector.doubtful.push(tag);
                    continue;
                }
                if mutation.fua {
                    sector.versions.clear();
                }
                sector.versions.push(tag);
            }
        }
        is_done
    }

    async fn flush(&mut self) {
        self.device().flush().await.expect("a good disk flushes");
        self.sectors.iter_mut().for_each(|sector| drop(sector.versions.drain(..sector.versions.len() - 1)));
    }

    /// Reads everything: each sector is as `may` says. What was discarded is from now on what was read.
    async fn check(&mut self, device: &Device, what: &str, may: impl Fn(&Sector, u64) -> bool) {
        let all = device.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())).await.expect("a good disk answers");
        for (number, (bytes, sector)) in all.chunks(SECTOR).zip(&mut self.sectors).enumerate() {
            let tag = tag_of(bytes, what);
            let (versions, doubtful) = (&sector.versions, &sector.doubtful);
            assert!(may(sector, tag), "{what}: sector {number} holds {tag} of {versions:?} and {doubtful:?}");
            sector.versions.push(tag);
        }
    }

    async fn check_last(&mut self, device: &Device, what: &str) {
        self.check(device, what, |sector, tag| sector.versions.last().is_some_and(|last| [tag, ANY].contains(last)))
            .await;
    }

    async fn crash(&mut self, what: &str) {
        self.overlay = open(&self.base, &self.delta, self.boot).await;
        let device = self.device();
        self.check(&device, what, |sector, tag| {
            sector.versions.last().into_iter().chain(&sector.doubtful).any(|version| [tag, ANY].contains(version))
        })
        .await;
        // What was under way may be on the medium or not, whatever reads say.
        for sector in &mut self.sectors {
            let now = sector.versions.pop().expect("just read");
            sector.versions.append(&mut sector.doubtful);
            sector.versions.push(now);
        }
    }

    async fn lose_power(&mut self, what: &str) {
        self.base.lose_power();
        self.delta.lose_power();
        self.boot += 1;
        self.overlay = open(&self.base, &self.delta, self.boot).await;
        let device = self.device();
        self.check(&device, what, |sector, tag| {
            sector.versions.iter().chain(&sector.doubtful).any(|version| [tag, ANY].contains(version))
        })
        .await;
        for sector in &mut self.sectors {
            sector.versions.drain(..sector.versions.len() - 1);
            sector.doubtful.clear();
        }
    }

    /// Takes the overlay away.
    async fn finish(&mut self, what: &str) {
        self.overlay.begin_drain();
        let mut next = Bytes::ZERO;
        while let Some(extent) = self.overlay.drain_next(next, Bytes::kib(16)).await.expect("good disks take it") {
            next = extent.end();
        }
        assert!(self.overlay.is_empty(), "{what}");
        let device = self.device();
        self.check_last(&device, what).await;
        self.flush().await;
        self.base.lose_power();
        let base = disk("base", &self.base);
        self.check_last(&base, &format!("{what}, the base")).await;
    }
}

#[tokio::test]
async fn a_volume_lives_through_crashes_and_power_losses_while_its_overlay_is_drained() {
    for seed in 0..100 {
        let mut life = Life::new(seed * 3 + seed % 3).await;
        for step in 0..25 {
            let what = format!("seed {seed}, step {step}");
            let dies = life.random.one_in(3);
            let limit = if dies { life.random.below(120) } else { u64::MAX };
            let is_done = life.batch(limit, &what).await;
            if is_done && !dies {
                let device = life.device();
                life.check_last(&device, &what).await;
                if life.random.one_in(3) {
                    life.flush().await;
                }
            } else if life.random.one_in(2) {
                life.crash(&what).await;
            } else {
                life.lose_power(&what).await;
            }
        }
        life.finish(&format!("seed {seed}")).await;
    }
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
