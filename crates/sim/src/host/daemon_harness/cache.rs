//! A flash cache over the disk of the volume, which the world opens itself, below the daemon: its partition is a disk of its own, which outlives the process and loses power with the host.
//! Somebody changes its mode and its size, and drains it, while the guest works. Nothing here keeps a generation, or looks whether the disk
//! was changed meanwhile: where that counts the cache is the daemon's, see `layered_cache`.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, ChunkSize, Device, Error, IoFuture, Slot};
use env::EnvRef;
use filters::{Cache, CacheHeader, CacheIdentity, CacheLoss, CacheMode, CacheOptions, CachePolicy, CacheStatus};
use parking_lot::Mutex;

use super::Host;
use crate::disk::Faults;
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::world::Invariant;

/// Its partition is kept beside this place.
pub(in crate::host) const CACHE: usize = 5;
pub(super) const BLOCK_BYTES: u64 = 4 << 10;
const POLICIES: &[CachePolicy] = &[CachePolicy::Lru, CachePolicy::Fifo, CachePolicy::Random, CachePolicy::S3Fifo];
/// Whose it is. The volume stays where it is, so its epoch stays, too.
const IDENTITY: CacheIdentity = CacheIdentity { volume: [1; 16], layer: [2; 16], epoch: 1 };
/// After this long at most something about it is changed.
const CHANGES_AFTER: Duration = Duration::from_millis(6);

/// The cache of a scenario.
#[derive(Clone, Copy, Debug)]
pub struct CacheSetup {
    /// The modes that it may have.
    pub modes: &'static [CacheMode],
    /// How many places it has at most.
    pub places: u64,
    /// What is wrong with its flash.
    pub faults: Faults,
    /// Whether it goes to other flash while the guest works.
    pub moves: bool,
    /// Whether it is a layer that the daemon makes, opens and judges. Otherwise the world does.
    pub is_layer: bool,
}

impl CacheSetup {
    /// Whether the flash may have something that the disk lacks.
    pub(crate) fn may_hold(&self) -> bool {
        self.modes.contains(&CacheMode::WriteBack)
    }
}

/// What of the cache outlives a process, beside its partition.
#[derive(Default)]
pub(super) struct CacheHarness {
    /// The cache that the process's life with this number has opened.
    opened: Mutex<Option<(u32, Cache)>>,
    /// The boot in which it was opened last.
    boot: Mutex<u8>,
    /// It is on record that nothing clean of it is believed.
    is_lost: Mutex<bool>,
    /// Which partition is the volume's, as it is on record. Of the other nothing is believed.
    current: Mutex<u32>,
    /// What the guest comes to, where the cache moves, in the process's life with this number.
    joint: Mutex<Option<(u32, Slot)>>,
}

/// Puts it on record that the flash has failed.
struct Record(Host);

impl CacheLoss for Record {
    fn note<'a>(&'a self, error: &'a Error) -> IoFuture<'a, ()> {
        Box::pin(async move {
            let world = &self.0.shared.world;
            world.event(format_args!("the flash of the cache has failed: {}", error.chain()));
            world.sleep(Duration::from_micros(50)).await;
            *self.0.shared.daemon_harness.cache.is_lost.lock() = true;
            world.occur(Occurrence::Told("a failed cache"));
            Ok(())
        })
    }
}

impl Host {
    /// `base` with the scenario's cache over it, if it has one.
    pub(super) async fn cached(&self, process: &Process, base: Device) -> block::Result<Device> {
        let Some(setup) = self.shared.setup.cache.filter(|cache| !cache.is_layer) else { return Ok(base) };
        let harness = &self.shared.daemon_harness.cache;
        let life = *self.shared.lives.lock();
        let joint = harness.joint.lock().clone().filter(|(opened, _)| *opened == life);
        if let Some((_, joint)) = joint {
            return Ok(Device::new(base.name(), joint.lane()));
        }
        let opened = harness.opened.lock().clone().filter(|(opened, _)| *opened == life);
        if let Some((_, cache)) = opened {
            return Ok(Device::new(base.name(), cache));
        }
        let is_failing = setup.faults != Faults::default();
        let cache = match self.open_cache(process, &base, &setup).await {
            Ok(cache) => cache,
            // A cache that holds nothing is left out, and nothing of it is believed later.
            Err(error) if !setup.may_hold() && is_failing => {
                self.shared.world.event(format_args!("the cache is left out: {}", error.chain()));
                *harness.is_lost.lock() = true;
                return Ok(base);
            }
            Err(error) => {
                self.shared.world.violate(Invariant::CrashResume, format!("a cache does not open: {}", error.chain()));
                return Err(error);
            }
        };
        *harness.opened.lock() = Some((life, cache.clone()));
        process.env().spawn(Box::pin(cache.clone().run_write_back()));
        let (host, env) = (self.clone(), process.env());
        process.env().spawn(Box::pin(async move { host.change_cache(&env, &setup).await }));
        let device = Device::new(base.name(), cache);
        if !setup.moves {
            return Ok(device);
        }
        let joint = Slot::new(device);
        *harness.joint.lock() = Some((life, joint.clone()));
        process.env().spawn(Box::pin(self.clone().move_cache(process.clone(), base.clone(), joint.clone(), setup)));
        Ok(Device::new(base.name(), joint.lane()))
    }

    /// Which partition is the volume's.
    pub(in crate::host) fn current_cache(&self) -> u32 {
        *self.shared.daemon_harness.cache.current.lock()
    }

    /// The cache that the process has opened.
    pub(super) fn open_cache_now(&self) -> Option<Cache> {
        let life = *self.shared.lives.lock();
        self.shared
            .daemon_harness
            .cache
            .opened
            .lock()
            .clone()
            .filter(|(opened, _)| *opened == life)
            .map(|(_, cache)| cache)
    }

    /// An empty cache in the partition that is not the volume's.
    pub(super) async fn make_other_cache(
        &self,
        process: &Process,
        base: &Device,
        setup: &CacheSetup,
    ) -> block::Result<Cache> {
        let number = 1 - *self.shared.daemon_harness.cache.current.lock();
        let (header, partition, _) = self.partition(base, setup, number).await?;
        Cache::create(&partition, &header).await?;
        let boot = *self.shared.boots.lock();
        // Until everything has come it holds nothing that the base lacks.
        let options = CacheOptions { mode: CacheMode::WriteThrough, ..self.cache_options(setup) };
        Cache::open(process.env(), base.clone(), partition, [boot; 16], options, IDENTITY).await
    }

    /// Has it on record that the other partition is the volume's from now on, and that nothing of it is believed.
    pub(super) fn commit_cache(&self, cache: &Cache) {
        let (harness, life) = (&self.shared.daemon_harness.cache, *self.shared.lives.lock());
        let mut current = harness.current.lock();
        *current = 1 - *current;
        *harness.is_lost.lock() = true;
        *harness.opened.lock() = Some((life, cache.clone()));
    }

    /// Has it on record that what the cache has is believed.
    pub(super) fn believe_cache(&self, cache: &Cache) {
        // One that has failed since is on record as such.
        if !cache.status().has_failed {
            *self.shared.daemon_harness.cache.is_lost.lock() = false;
        }
    }

    fn cache_options(&self, setup: &CacheSetup) -> CacheOptions {
        let rng = &self.shared.rng;
        CacheOptions {
            mode: rng.pick(setup.modes),
            policy: rng.pick(POLICIES),
            sequential_bytes: Bytes(rng.pick(&[0, 256 << 10])),
            dirty_max_percent: rng.pick(&[10, 50]),
            dirty_low_percent: rng.pick(&[1, 30]),
            write_back_depth: rng.pick(&[1, 16]),
            loss: Some(Arc::new(Record(self.clone()))),
            ..CacheOptions::default()
        }
    }

    /// The partition of this number, whether it is new, and what a new cache on it is.
    async fn partition(
        &self,
        base: &Device,
        setup: &CacheSetup,
        number: u32,
    ) -> block::Result<(CacheHeader, Device, bool)> {
        let shared = &self.shared;
        let key = (CACHE, number);
        let header = CacheHeader {
            volume: base.size(),
            block: ChunkSize::new(BLOCK_BYTES).expect("a power of two"),
            capacity: setup.places,
            places: setup.places,
            id: [(shared.rng.below(250) + 1) as u8; 16],
            identity: IDENTITY,
        };
        let is_new = !shared.shelf.numbers(CACHE).contains(&number);
        let partition = match is_new {
            true => {
                let (size, alignment) = (header.partition_bytes(), base.geometry().request_alignment);
                shared.shelf.make(&shared.world, key, size, alignment).await
            }
            false => shared.shelf.open(&shared.world, key).await?,
        };
        if is_new {
            shared.shelf.set_faults(key, setup.faults);
        }
        Ok((header, partition, is_new))
    }

    async fn open_cache(&self, process: &Process, base: &Device, setup: &CacheSetup) -> block::Result<Cache> {
        let shared = &self.shared;
        let harness = &shared.daemon_harness.cache;
        let boot = *shared.boots.lock();
        let number = *harness.current.lock();
        let (header, partition, is_new) = self.partition(base, setup, number).await?;
        let is_lost = *harness.is_lost.lock();
        let may_hold = setup.may_hold() && !setup.moves;
        // A first life may have died while it was made: nothing was dirty then.
        if is_new || is_lost && !may_hold || *harness.boot.lock() == 0 {
            Cache::create(&partition, &header).await?;
        }
        // Of one that may hold something, what is clean alone is forgotten.
        let options = CacheOptions { believes_clean: !is_lost, ..self.cache_options(setup) };
        let cache = Cache::open(process.env(), base.clone(), partition, [boot; 16], options, IDENTITY).await?;
        *harness.is_lost.lock() = false;
        let before = std::mem::replace(&mut *harness.boot.lock(), boot);
        let CacheStatus { places, places_free, places_dirty, .. } = cache.status();
        let outlived = [
            (before == boot && places_free < places, "cached blocks outlived the process"),
            (before != boot && places_dirty > 0, "dirty blocks outlived the power"),
        ];
        outlived
            .into_iter()
            .filter(|(is_so, _)| *is_so)
            .for_each(|(_, word)| shared.world.occur(Occurrence::Told(word)));
        Ok(cache)
    }

    /// What an operator does about the cache.
    async fn change_cache(&self, env: &EnvRef, setup: &CacheSetup) {
        let rng = &self.shared.rng;
        loop {
            env.sleep(rng.up_to(CHANGES_AFTER)).await;
            let Some(cache) = self.open_cache_now() else { return };
            if setup.moves && *self.shared.daemon_harness.cache.is_lost.lock() {
                // Nobody changes one that comes: nothing of it is believed yet.
                continue;
            }
            let changed = match rng.below(8) {
                0..=2 => cache.set_mode(rng.pick(setup.modes)).await.map(|()| "another mode"),
                3..=4 => cache.resize(rng.within(1..=setup.places)).await.map(|()| "another size"),
                5 => cache.drain().await.map(|()| "drained"),
                _ => Ok("looked at"),
            };
            match changed {
                Ok(word) => self.shared.world.occur(Occurrence::Told(word)),
                Err(error) => self.shared.world.event(format_args!("the cache is not changed: {}", error.chain())),
            }
            self.note_cache(&cache.status());
        }
    }

    fn note_cache(&self, status: &CacheStatus) {
        let told = [
            (status.hits > 0, "read from a cache"),
            (status.hits_partial > 0, "read from base and cache"),
            (status.admitted > 0, "admitted"),
            (status.evicted > 0, "a full cache"),
            (status.bypassed > 0, "passed by a cache"),
            (status.writes_back > 0, "written to a cache"),
            (status.writes_through > 0, "written through a cache"),
            (status.cleaned_bytes > 0, "written back"),
        ];
        told.into_iter()
            .filter(|(is_so, _)| *is_so)
            .for_each(|(_, word)| self.shared.world.occur(Occurrence::Told(word)));
    }

    /// Nothing goes wrong with the cache's flash any more.
    pub(crate) fn end_cache_faults(&self) {
        for number in self.shared.shelf.numbers(CACHE) {
            self.shared.shelf.set_faults((CACHE, number), Faults::default());
        }
    }

    /// Ends when the disk alone is the volume.
    pub(crate) async fn cache_emptied(&self) {
        if self.shared.setup.cache.is_some_and(|cache| cache.is_layer) {
            return self.layered_cache_emptied().await;
        }
        loop {
            // Another one, if it moves.
            let Some(cache) = self.open_cache_now() else { return };
            self.note_cache(&cache.status());
            if cache.holds_nothing() {
                return;
            }
            if let Err(error) = cache.drain().await {
                self.shared.world.event(format_args!("the cache is not drained: {}", error.chain()));
                self.shared.world.sleep(Duration::from_millis(5)).await;
            }
        }
    }
}
