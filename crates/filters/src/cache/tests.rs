//! The cache against a plain model, through crashes, power losses and changes of its mode and size; and each of its rules alone.

mod failing;
mod lived;
mod moved;
mod overlapping;
mod reads;
mod transferred;
mod writes;

use std::sync::Arc;

use block::testing::conformance;
use block::{Buffer, Bytes, ChunkSize, Data, Device, Extent, MemDevice, Mutation};
use env::EnvRef;
use env::testing::PausedEnv;

use super::{Cache, CacheHeader, CacheIdentity, CacheMode, CacheOptions, CachePolicy};
use crate::cached_disk::CachedDisk;
use crate::lives::disk;

const BLOCK: u64 = 4 << 10;
/// A sector of such a block.
const SECTOR: u64 = 512;
/// Thirty blocks, the last one short, and its last sector too.
const SIZE: Bytes = Bytes(29 * BLOCK + 2 * SECTOR + 100);
const IDENTITY: CacheIdentity = CacheIdentity { volume: [1; 16], layer: [2; 16], epoch: 3 };
const BOOT: [u8; 16] = [1; 16];

fn header_of(volume: Bytes, block: u64, places: u64) -> CacheHeader {
    let block = ChunkSize::new(block).expect("a block size");
    CacheHeader { volume, block, capacity: places, places, id: [7; 16], identity: IDENTITY }
}

fn options(mode: CacheMode) -> CacheOptions {
    CacheOptions { mode, policy: CachePolicy::Lru, ..CacheOptions::default() }
}

fn memory(size: Bytes) -> Device {
    Device::new("memory", MemDevice::new(size))
}

/// A cache in memory, what is below it, and what the guest sees.
struct Stand {
    env: EnvRef,
    base: Device,
    partition: Device,
    cache: Cache,
    guest: Device,
}

impl Stand {
    /// An empty cache with so many places of 4 KiB.
    async fn new(options: CacheOptions, places: u64) -> Self {
        Self::over(memory(SIZE), memory(header_of(SIZE, BLOCK, places).partition_bytes()), options, places).await
    }

    async fn over(base: Device, partition: Device, options: CacheOptions, places: u64) -> Self {
        Cache::create(&partition, &header_of(base.size(), BLOCK, places)).await.expect("it takes it");
        let env = PausedEnv::shared(1);
        let cache = open(&env, &base, &partition, BOOT, options).await;
        let guest = Device::new("guest", cache.clone());
        Self { env, base, partition, cache, guest }
    }

    /// The process has died, and another one opens the cache, in the same boot or in another.
    async fn again(&self, boot: [u8; 16], options: CacheOptions) -> Self {
        let cache = open(&self.env, &self.base, &self.partition, boot, options).await;
        let guest = Device::new("guest", cache.clone());
        Self { env: Arc::clone(&self.env), base: self.base.clone(), partition: self.partition.clone(), cache, guest }
    }

    /// Reads some blocks, one after the other, and lets them be admitted.
    async fn read_blocks(&self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            byte_at(&self.guest, block * BLOCK, BLOCK).await;
            yield_often().await;
        }
    }

    /// Hits, partial hits, misses and admissions.
    fn counts(&self) -> [u64; 4] {
        let status = self.cache.status();
        [status.hits, status.hits_partial, status.misses, status.admitted]
    }
}

async fn open(env: &EnvRef, base: &Device, partition: &Device, boot: [u8; 16], options: CacheOptions) -> Cache {
    Cache::open(Arc::clone(env), base.clone(), partition.clone(), boot, options, IDENTITY).await.expect("it opens")
}

/// The first byte of so many.
async fn byte_at(device: &Device, at: u64, length: u64) -> u8 {
    let length = length.min(device.size().get() - at);
    device.read(Bytes(at), Buffer::unpooled(length as usize)).await.expect("it answers")[0]
}

async fn write(device: &Device, at: u64, bytes: &[u8]) {
    device.write(Mutation::data(Bytes(at), Data::copy_of(bytes))).await.expect("it takes it");
}

async fn zero(device: &Device, at: u64, length: u64) {
    let extent = Extent::new(Bytes(at), Bytes(length));
    device.write(Mutation::zeroes(extent, true)).await.expect("it takes it");
}

async fn yield_often() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

const MODES: [CacheMode; 3] = [CacheMode::ReadOnly, CacheMode::WriteThrough, CacheMode::WriteBack];
const POLICIES: [CachePolicy; 4] = [CachePolicy::Lru, CachePolicy::Fifo, CachePolicy::Random, CachePolicy::S3Fifo];

#[tokio::test(start_paused = true)]
async fn a_cache_conforms_in_every_mode_with_room_for_all_and_for_little() {
    let mut seed = 1;
    for mode in MODES {
        for (places, block) in [(400, BLOCK), (9, BLOCK), (5, 64 << 10), (40, 16 << 10)] {
            seed += 1;
            let policy = POLICIES[seed as usize % 4];
            conformance(seed, async |size| {
                let header = header_of(size, block, places);
                let (base, partition) = (memory(size), memory(header.partition_bytes()));
                Cache::create(&partition, &header).await.expect("it takes it");
                let env = PausedEnv::shared(seed);
                let options = CacheOptions { policy, ..options(mode) };
                Device::new("guest", open(&env, &base, &partition, BOOT, options).await)
            })
            .await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_conforms_over_devices_with_large_sectors() {
    for (mode, below, own) in
        [(CacheMode::WriteBack, 512, 4096), (CacheMode::WriteThrough, 4096, 512), (CacheMode::ReadOnly, 1, 4096)]
    {
        conformance(u64::from(below), async |size| {
            let header = header_of(size, BLOCK, 20);
            let base = Device::new("base", MemDevice::new(size).with_request_alignment(below));
            let flash = MemDevice::new(header.partition_bytes()).with_request_alignment(own);
            let partition = Device::new("partition", flash);
            Cache::create(&partition, &header).await.expect("it takes it");
            Device::new("guest", open(&PausedEnv::shared(1), &base, &partition, BOOT, options(mode)).await)
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_of_another_epoch_is_never_opened_and_one_that_follows_its_volume_is() {
    let stand = Stand::new(options(CacheMode::WriteThrough), 8).await;
    write(&stand.base, 0, &[1; 4096]).await;
    stand.read_blocks([0]).await;
    let Stand { env, base, partition, .. } = &stand;
    let open_in = async |epoch| {
        let expected = CacheIdentity { epoch, ..IDENTITY };
        let (env, base, partition) = (Arc::clone(env), base.clone(), partition.clone());
        Cache::open(env, base, partition, BOOT, options(CacheMode::WriteThrough), expected).await
    };
    // The volume was elsewhere in epoch 4, and written to.
    let error = open_in(4).await.expect_err("it is as old as epoch 3");
    assert!(error.kind() == block::ErrorKind::Fenced && error.context().contains("epoch 3"), "{}", error.chain());
    stand.cache.set_epoch(4).await.expect("the partition takes it");
    assert_eq!(stand.cache.header().identity.epoch, 4);
    assert!(open_in(3).await.is_err(), "who is older must not open it");
    let cache = open_in(4).await.expect("it has followed");
    assert_eq!((byte_at(&Device::new("guest", cache.clone()), 0, 4096).await, cache.status().hits), (1, 1));
    assert!(cache.set_epoch(3).await.is_err(), "it never goes back");
}

#[tokio::test(start_paused = true)]
async fn a_cached_block_takes_no_more_memory_than_is_stated() {
    const PLACES: u64 = 200_000;
    let volume = Bytes::gib(64);
    for policy in POLICIES {
        let base = Device::new("base", MemDevice::new(volume));
        let partition = Device::new("partition", MemDevice::new(header_of(volume, BLOCK, PLACES).partition_bytes()));
        let options = CacheOptions { policy, sequential_bytes: Bytes::ZERO, ..options(CacheMode::WriteBack) };
        let stand = Stand::over(base, partition, options, PLACES).await;
        // Scattered, so that each map sector has something of its own; more than there is room for; some of it dirty.
        let scattered = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (volume.get() / BLOCK);
        let page = Data::copy_of(&[1; BLOCK as usize]);
        for number in 0..PLACES + 1000 {
            let block = scattered(number);
            if number % 5 == 0 {
                let mutation = Mutation::data(Bytes(block * BLOCK), page.clone());
                stand.guest.write(mutation).await.expect("it takes it");
            } else {
                let token = stand.cache.token(block);
                stand.cache.admit(block, page.clone(), token).await.expect("it takes it");
            }
        }
        let status = stand.cache.status();
        assert!(status.places_free < 100 && status.places_dirty > PLACES / 20, "{policy}: {status:?}");
        let bytes = status.memory_bytes as f64 / PLACES as f64;
        assert!(bytes <= 32.0, "{policy}: {bytes} bytes a block");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_was_filled_without_its_bytes_opens_full() {
    const PLACES: u64 = 70_000;
    let volume = Bytes::gib(1);
    let block_of = |place: u64| (place * 4099 + 5) % (volume.get() / BLOCK);
    for policy in POLICIES {
        let base = Device::new("base", MemDevice::new(volume));
        let partition = Device::new("partition", MemDevice::new(header_of(volume, BLOCK, PLACES).partition_bytes()));
        let options = CacheOptions { policy, ..options(CacheMode::WriteThrough) };
        let stand = Stand::over(base, partition, options.clone(), PLACES).await;
        stand.cache.close().await;
        Cache::fill(&stand.partition, block_of).await.expect("it is empty");
        assert!(Cache::fill(&stand.partition, block_of).await.is_err(), "{policy}: it is full");
        let progress = Arc::default();
        let options = CacheOptions { progress: Some(Arc::clone(&progress)), ..options };
        let again = stand.again(BOOT, options).await;
        let status = again.cache.status();
        assert_eq!((status.places, status.places_free), (PLACES, 0), "{policy}");
        assert!(progress.load(std::sync::atomic::Ordering::Relaxed) > 0, "{policy}: nobody could tell that it got on");
        for place in [0, 1, 62, PLACES - 1] {
            byte_at(&again.guest, block_of(place) * BLOCK, BLOCK).await;
        }
        assert_eq!(again.cache.status().hits, 4, "{policy}");
        // Tables are made anew in many steps; what is left is found by the new ones.
        again.cache.resize(PLACES - 3000).await.expect("it takes it");
        again.cache.resize(PLACES).await.expect("it takes it");
        assert_eq!(again.cache.status().places_free, 3000, "{policy}");
        for place in [0, 1, 62, PLACES - 3001] {
            byte_at(&again.guest, block_of(place) * BLOCK, BLOCK).await;
        }
        assert_eq!(again.cache.status().hits, 8, "{policy}");
        let mut cached = again.cache.cached();
        cached.sort_unstable();
        let mut expected: Vec<u64> = (0..PLACES - 3000).map(block_of).collect();
        expected.sort_unstable();
        assert!(cached == expected, "{policy}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_map_that_names_a_block_twice_is_damage() {
    let volume = Bytes::gib(1);
    let partition = Device::new("partition", MemDevice::new(header_of(volume, BLOCK, 1000).partition_bytes()));
    let base = Device::new("base", MemDevice::new(volume));
    let stand = Stand::over(base, partition, options(CacheMode::WriteThrough), 1000).await;
    Cache::fill(&stand.partition, |place| place % 997 * 8191 % 262_144).await.expect("it is empty");
    let Stand { env, base, partition, .. } = &stand;
    let (env, base, partition) = (Arc::clone(env), base.clone(), partition.clone());
    let opened = Cache::open(env, base, partition, BOOT, options(CacheMode::WriteThrough), IDENTITY).await;
    let error = opened.expect_err("places 0 and 997 have one block");
    assert!(error.kind() == block::ErrorKind::Corrupt && error.context().contains("two places"), "{}", error.chain());
}

/// Disks with caches that lose power, and a cache over them.
async fn over_disks(options: CacheOptions, places: u64) -> (Stand, Arc<CachedDisk>, Arc<CachedDisk>) {
    let base = Arc::new(CachedDisk::new(1, SIZE, 1));
    let own = Arc::new(CachedDisk::new(2, header_of(SIZE, BLOCK, places).partition_bytes(), 1));
    let stand = Stand::over(disk("base", &base), disk("own", &own), options, places).await;
    (stand, base, own)
}
