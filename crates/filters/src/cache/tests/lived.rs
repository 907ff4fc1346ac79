//! Lives of a cached volume: whatever is acknowledged is never lost, and nothing older is ever read.

use std::sync::atomic::Ordering;

use block::testing::Random;
use block::{Bytes, Device};
use env::EnvRef;

use super::super::{Cache, CacheMode, CacheOptions, CachePolicy};
use super::{IDENTITY, MODES, POLICIES, header_of};
use crate::lives::{Layer, live};

/// Fewer places than there are blocks.
const PLACES: u64 = 9;
/// A mode that is left as it is, or changed all the time.
const ANY: usize = 3;

/// A cache with blocks of so many KiB, that begins in a mode.
struct Lived<const KIB: u64, const MODE: usize>(Cache);

impl<const KIB: u64, const MODE: usize> Lived<KIB, MODE> {
    /// Another policy with each boot.
    fn options(boot: [u8; 16]) -> CacheOptions {
        let mode = MODES.get(MODE).copied().unwrap_or(MODES[boot[0] as usize % 3]);
        let policy: CachePolicy = POLICIES[boot[0] as usize % 4];
        CacheOptions {
            mode,
            policy,
            sequential_bytes: Bytes::ZERO,
            dirty_low_percent: 10,
            dirty_max_percent: 60,
            write_back_depth: 3,
            ..CacheOptions::default()
        }
    }
}

impl<const KIB: u64, const MODE: usize> Layer for Lived<KIB, MODE> {
    const SIZE: Bytes = Bytes(((17 * KIB) << 10) + 3 * 512 + 100);

    fn own_bytes() -> Bytes {
        header_of(Self::SIZE, KIB << 10, PLACES).partition_bytes()
    }

    async fn make(own: &Device) {
        Cache::create(own, &header_of(Self::SIZE, KIB << 10, PLACES)).await.expect("a good disk takes it");
    }

    async fn open_over(env: EnvRef, base: Device, own: Device, boot: [u8; 16]) -> Self {
        let opened = Cache::open(env, base, own, boot, Self::options(boot), IDENTITY).await;
        Self(opened.expect("a good disk holds a cache"))
    }

    fn views(&self) -> Vec<Device> {
        vec![Device::new("guest", self.0.clone()), self.0.copy("copy")]
    }

    async fn start_draining(&self) {
        // The last word of a life is a drain; until then the cache goes on.
        if MODE != ANY {
            self.0.inner.is_draining.store(true, Ordering::SeqCst);
        }
    }

    async fn drain_some(&self, random: &mut Random) {
        match random.below(if MODE == ANY { 6 } else { 2 }) {
            0 | 1 => drop(self.0.write_back().await.expect("good disks take it")),
            2 | 3 => {
                let mode: CacheMode = MODES[random.below(3) as usize];
                self.0.set_mode(mode).await.expect("good disks take it");
            }
            4 => self.0.resize(1 + random.below(PLACES)).await.expect("good disks take it"),
            _ => self.0.drain().await.expect("good disks take it"),
        }
    }

    async fn drain_all(&self) {
        self.0.drain().await.expect("good disks take it");
    }

    fn holds_nothing(&self) -> bool {
        self.0.holds_nothing()
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_only_cache_lives_through_crashes_and_power_losses() {
    live::<Lived<4, 0>>(50, 25).await;
}

#[tokio::test(start_paused = true)]
async fn a_write_through_cache_lives_through_crashes_and_power_losses() {
    live::<Lived<4, 1>>(50, 25).await;
}

#[tokio::test(start_paused = true)]
async fn a_write_back_cache_lives_through_crashes_and_power_losses_and_is_drained() {
    live::<Lived<4, 2>>(60, 25).await;
}

#[tokio::test(start_paused = true)]
async fn a_cache_lives_through_changes_of_mode_and_size() {
    live::<Lived<4, ANY>>(100, 25).await;
}

#[tokio::test(start_paused = true)]
async fn a_cache_whose_sectors_are_larger_than_the_guests_lives_through_all_of_it() {
    live::<Lived<16, ANY>>(40, 25).await;
}
