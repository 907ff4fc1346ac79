//! Overlays on disks that lose any part of what was not flushed, torn at sectors: after a crash of the process all that
//! was answered is there, after a power loss each sector is as some write since the last flush left it, and never as
//! none did.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use backends::{BackendSpec, FileBackend, OpenOptions};
use block::testing::conformance;
use block::{Buffer, Bytes, ChunkSize, Data, Device, Extent, Mutation};
use env::RealEnv;
use filters::{Overlay, OverlayHeader};
use futures::future::{Either, join_all, select};
use parking_lot::Mutex;
use sim::disk::{Disk, Faults, Timing};
use sim::log::Keep;
use sim::rng::Rng;
use sim::world::World;
use transhume_sim as sim;

const SECTOR: u64 = 512;
/// No multiple of a grain; its last sector is short.
const SIZE: Bytes = Bytes(16 * 4096 + 3 * 512 + 100);

fn header() -> OverlayHeader {
    OverlayHeader::new(SIZE, [7; 16], [0; 16]).with_grain(ChunkSize::new(4096).expect("a chunk size"))
}

#[test]
fn an_overlay_on_simulated_disks_conforms() {
    sim::clock::run(async {
        let world = World::new(1, Keep::Tail);
        let make = async |size| {
            let header = OverlayHeader::new(size, [7; 16], [0; 16]);
            let delta = Disk::new(&world, "delta", header.delta_bytes(), 1, Timing::FLASH).open(0).await;
            Overlay::create(&delta, &header).await.expect("a good disk takes it");
            let base = Disk::new(&world, "base", size, 1, Timing::FLASH).open(0).await;
            Device::new("overlay", Overlay::open(base, delta, [1; 16]).await.expect("it opens"))
        };
        conformance(1, make).await;
    });
}

#[tokio::test]
async fn an_overlay_on_real_files_conforms_and_outlives_its_process() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory on disk");
    let number = std::sync::atomic::AtomicU32::new(0);
    let make_file = |size: Bytes| {
        let number = number.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = folder.path().join(number.to_string());
        std::fs::File::create(&path).and_then(|file| file.set_len(size.0)).expect("a file");
        path
    };
    let open = async |path: &std::path::Path| {
        let backend = FileBackend::open(&BackendSpec::file(path), &OpenOptions::default(), &RealEnv::new()).await;
        Device::new("file", backend.expect("the file opens"))
    };
    conformance(1, async |size| {
        let header = OverlayHeader::new(size, [7; 16], [0; 16]);
        let delta = open(&make_file(header.delta_bytes())).await;
        Overlay::create(&delta, &header).await.expect("a file takes it");
        Device::new("overlay", Overlay::open(open(&make_file(size)).await, delta, [1; 16]).await.expect("it opens"))
    })
    .await;

    let (base, path) = (make_file(SIZE), make_file(header().delta_bytes()));
    Overlay::create(&open(&path).await, &header()).await.expect("a file takes it");
    for round in 1..=3_u8 {
        let overlay = Overlay::open(open(&base).await, open(&path).await, [1; 16]).await.expect("it opens");
        let device = Device::new("overlay", overlay);
        let read = device.read(Bytes(5120), Buffer::unpooled(512)).await.expect("a file answers");
        assert_eq!((read[0], read[511]), (round - 1, round - 1), "what the process before wrote");
        device.write(Mutation::data(Bytes(5120), Data::copy_of(&[round; 512]))).await.expect("a file takes it");
    }
    let used = std::os::unix::fs::MetadataExt::blocks(&path.metadata().expect("the file is there")) * 512;
    assert!(used < (header().overhead_bytes() + Bytes::kib(64)).0, "{used} bytes are allocated for one grain");
}

/// What a sector may hold, oldest first: what certainly survives, then all that was written since. The last one is what
/// reads see.
struct Sector {
    versions: Vec<u64>,
    /// Writes that were under way when the process died.
    doubtful: Vec<u64>,
}

/// One life of an overlay through crashes and power losses.
struct OverlayRun {
    rng: Rng,
    world: World,
    base: Disk,
    delta: Disk,
    sectors: Vec<Sector>,
    boot: u8,
    next_tag: u64,
    device: Device,
}

impl OverlayRun {
    async fn new(seed: u64, unit: u32) -> Self {
        let world = World::new(seed, Keep::Tail);
        let rng = world.rng("life");
        let base = Disk::new(&world, "base", SIZE, unit, Timing::FLASH);
        let delta = Disk::new(&world, "delta", header().delta_bytes(), unit, Timing::FLASH);
        Overlay::create(&delta.open(0).await, &header()).await.expect("a good disk takes it");
        let sectors = (0..SIZE.0.div_ceil(SECTOR)).map(|_| Sector { versions: vec![0], doubtful: Vec::new() });
        let device = base.open(0).await;
        let mut run = Self { rng, world, base, delta, sectors: sectors.collect(), boot: 1, next_tag: 1, device };
        // The base was written and not flushed when the snapshot was taken.
        run.batch(None).await;
        run.open().await;
        run
    }

    async fn open(&mut self) {
        let (base, delta) = (self.base.open(0).await, self.delta.open(0).await);
        let overlay = Overlay::open(base, delta, [self.boot; 16]).await.expect("a good disk holds an overlay");
        self.device = Device::from_arc("overlay", Arc::new(overlay));
    }

    fn sectors_of(extent: Extent) -> std::ops::Range<usize> {
        (extent.offset.0 / SECTOR) as usize..extent.end().0.div_ceil(SECTOR) as usize
    }

    /// Mutations that do not overlap, in whole units, with the tags that they leave.
    fn mutations(&mut self) -> Vec<(Mutation, u64)> {
        let unit = u64::from(self.device.geometry().request_alignment).max(SECTOR);
        let mut mutations = Vec::new();
        let mut next = Bytes(self.rng.below(12) * unit);
        while next < SIZE && mutations.len() < 16 {
            let longest = if self.rng.chance(0.2) { 60 } else { 6 };
            let end = (next + Bytes(self.rng.within(1..=longest) * unit)).min(SIZE);
            let extent = Extent::between(next, end);
            let fua = self.rng.chance(0.1);
            let tag = self.next_tag;
            self.next_tag += 1;
            let (mutation, tag) = match self.rng.below(6) {
                0 => (Mutation::zeroes(extent, self.rng.chance(0.5)), 0),
                1 if extent.offset.is_multiple_of(4096) && (end.is_multiple_of(4096) || end == SIZE) => {
                    (Mutation::discard(extent), 0)
                }
                _ => {
                    let bytes: Vec<u8> = tag.to_le_bytes().into_iter().cycle().take(extent.length.as_usize()).collect();
                    (Mutation::data(next, Data::copy_of(&bytes)), tag)
                }
            };
            mutations.push((mutation.with_fua(fua), tag));
            next = end + Bytes(self.rng.below(6) * unit);
        }
        mutations
    }

    /// Carries out mutations at once, perhaps beside flushes, up to `limit`; false if the limit cut them short.
    async fn batch(&mut self, limit: Option<Duration>) -> bool {
        let mutations = self.mutations();
        let (device, world, rng) = (&self.device, &self.world, &self.rng);
        let answered = Mutex::new(vec![false; mutations.len()]);
        let flushes = if rng.chance(0.5) { 3 } else { 0 };
        let work = async {
            let writes = join_all(mutations.iter().enumerate().map(async |(number, (mutation, _))| {
                world.sleep(rng.up_to(Duration::from_micros(300))).await;
                device.write(mutation.clone()).await.expect("a good disk takes it");
                answered.lock()[number] = true;
            }));
            let flush = async {
                for _ in 0..flushes {
                    world.sleep(rng.up_to(Duration::from_micros(100))).await;
                    device.flush().await.expect("a good disk flushes");
                }
            };
            futures::join!(writes, flush);
        };
        let limit = limit.unwrap_or(Duration::from_secs(3600));
        let is_done = matches!(select(pin!(work), pin!(world.sleep(limit))).await, Either::Left(_));
        for ((mutation, tag), is_answered) in mutations.into_iter().zip(answered.into_inner()) {
            for sector in &mut self.sectors[Self::sectors_of(mutation.extent())] {
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
        self.device.flush().await.expect("a good disk flushes");
        for sector in &mut self.sectors {
            sector.versions.drain(..sector.versions.len() - 1);
        }
    }

    /// Reads everything: each sector is as its last write left it, or, after a crash, as `may` says.
    async fn check(&mut self, what: &str, may: impl Fn(&Sector, u64) -> bool) {
        let all = self.device.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())).await.expect("a good disk answers");
        for (number, (bytes, sector)) in all.chunks(SECTOR as usize).zip(&mut self.sectors).enumerate() {
            let mut first = [0; 8];
            first.copy_from_slice(&bytes[..8]);
            let tag = u64::from_le_bytes(first);
            let is_whole = bytes.iter().zip(first.iter().cycle()).all(|(byte, expected)| byte == expected);
            assert!(is_whole, "{what}: sector {number} is a mixture");
            assert!(
                may(sector, tag),
                "{what}: sector {number} holds {tag}, versions {:?}, doubtful {:?}",
                sector.versions,
                sector.doubtful
            );
            sector.versions.push(tag);
        }
    }

    async fn crash(&mut self, what: &str) {
        self.open().await;
        self.check(what, |sector, tag| sector.versions.last() == Some(&tag) || sector.doubtful.contains(&tag)).await;
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
        self.open().await;
        self.check(what, |sector, tag| sector.versions.contains(&tag) || sector.doubtful.contains(&tag)).await;
        for sector in &mut self.sectors {
            sector.versions.drain(..sector.versions.len() - 1);
            sector.doubtful.clear();
        }
    }
}

fn live(seed: u64, unit: u32) {
    sim::clock::run(async {
        let mut run = OverlayRun::new(seed, unit).await;
        // Requests that take twenty times as long as others make room for every order of things.
        run.delta.set_faults(Faults { slow: 0.1, ..Faults::default() });
        for step in 0..40 {
            let what = format!("seed {seed}, units of {unit}, step {step}");
            let dies = run.rng.chance(0.3);
            let limit = dies.then(|| run.rng.up_to(Duration::from_micros(3000)));
            let is_done = run.batch(limit).await;
            if is_done && !dies {
                run.check(&what, |sector, tag| sector.versions.last() == Some(&tag)).await;
                if run.rng.chance(0.3) {
                    run.flush().await;
                }
            } else if run.rng.chance(0.5) {
                run.crash(&what).await;
            } else {
                run.lose_power(&what).await;
            }
        }
    });
}

#[test]
fn an_overlay_survives_crashes_and_power_losses_at_any_moment() {
    for seed in 0..300 {
        live(seed, [1, 512, 4096][(seed % 3) as usize]);
    }
}

#[test]
fn a_flush_that_failed_is_never_followed_by_one_that_promises_something() {
    sim::clock::run(async {
        let run = OverlayRun::new(1, 1).await;
        let write = Mutation::data(Bytes(700), Data::copy_of(&[1; 700]));
        run.device.write(write.clone()).await.expect("a good disk takes it");
        run.delta.set_faults(Faults { flush_errors: 1.0, ..Faults::default() });
        run.device.flush().await.expect_err("the disk fails it");
        run.delta.set_faults(Faults::default());
        run.device.write(write.clone()).await.expect("it is still written");
        let later = run.device.flush().await.expect_err("what the first one covered may be lost");
        assert!(later.chain().contains("promises nothing durable any more"), "{}", later.chain());
        run.device.write(write.with_fua(true)).await.expect_err("a forced write promises the same");
    });
}

#[test]
fn nothing_is_flushed_that_nobody_asked_for() {
    sim::clock::run(async {
        let run = OverlayRun::new(2, 1).await;
        run.delta.set_faults(Faults { flush_errors: 1.0, ..Faults::default() });
        for number in 0..16 {
            let write = Mutation::data(Bytes(number * 4096 + 512), Data::copy_of(&[1; 512]));
            run.device.write(write).await.expect("a write needs no flush");
        }
    });
}
