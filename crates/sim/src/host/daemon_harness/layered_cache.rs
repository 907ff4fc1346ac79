//! A flash cache that the daemon makes, opens and judges: a layer of the volume, with a part of a pool, as the API is asked for it. Its store
//! is a disk of its own, which outlives the process and loses power with the host. What the daemon checks of it at a start (its generation,
//! how the image was left) is checked here, too. Somebody changes its mode and its size, and drains it, while the guest works.
//!
//! One that is tuned as no request can, or that goes to other flash, is opened by the world itself, below the daemon: `cache`.

use std::io::ErrorKind as OsErrorKind;
use std::path::Path;
use std::time::Duration;

use ::daemon::Core;
use api::v1::{
    CacheMode, CachePolicy, CacheRequest, CacheUse, Error, LayerChangeRequest, LayerRequest, StoreRequest, Volume,
};
use block::{Bytes, ChunkSize, Device};
use env::EnvRef;
use filters::{CacheHeader, CacheIdentity};

use super::Host;
use super::cache::{BLOCK_BYTES, CACHE, CacheSetup};
use crate::occurrence::Occurrence;
use crate::process::Process;

/// What it is called.
const NAME: &str = "flash";
/// Where its store is.
const FOLDER: &str = "/flash";
/// Which disk that is.
const STORE: u32 = 0;
/// What the API calls the layer.
const LAYER: &str = "cache";
const POLICIES: &[CachePolicy] = &[CachePolicy::Lru, CachePolicy::Fifo, CachePolicy::Random, CachePolicy::S3Fifo];
/// After this long at most something about it is changed. That is stored, so it is not done as often as where the world has the cache.
const CHANGES_AFTER: Duration = Duration::from_millis(15);
/// How often it is tried to empty it.
const DRAIN_INTERVAL: Duration = Duration::from_millis(5);

/// The number of the store at `path`, if that is one.
pub(super) fn store_of(path: &Path) -> Option<u32> {
    path.strip_prefix(FOLDER).ok()?.to_str()?.parse().ok()
}

/// What the API calls a mode.
const fn api_mode(mode: filters::CacheMode) -> CacheMode {
    match mode {
        filters::CacheMode::ReadOnly => CacheMode::ReadOnly,
        filters::CacheMode::WriteThrough => CacheMode::WriteThrough,
        filters::CacheMode::WriteBack => CacheMode::WriteBack,
    }
}

/// How large a part is in which `places` blocks have room.
fn part_bytes(volume: Bytes, places: u64) -> u64 {
    let header = CacheHeader {
        volume,
        block: ChunkSize::new(BLOCK_BYTES).expect("a power of two"),
        capacity: places,
        places,
        id: [0; 16],
        identity: CacheIdentity { volume: [0; 16], layer: [0; 16], epoch: 0 },
    };
    header.partition_bytes().get()
}

impl Host {
    /// The cache that the daemon has, if it is that kind.
    fn layered_cache(&self) -> Option<CacheSetup> {
        self.shared.setup.cache.filter(|cache| cache.is_layer)
    }

    /// What the daemon says of this volume.
    fn shown_volume(&self, core: &Core) -> Option<Volume> {
        core.volumes().into_iter().find(|volume| volume.name == self.name())
    }

    /// What the daemon says of its cache, if that is on record.
    fn shown_cache(&self, core: &Core) -> Option<CacheUse> {
        self.shown_volume(core)?.layers.into_iter().find_map(|layer| layer.cached)
    }

    /// Makes the cache and puts it over the volume's disk, unless a life before this has. Somebody changes it from then on.
    pub(super) async fn make_cache(&self, process: &Process, core: &Core) -> Result<(), Error> {
        let Some(setup) = self.layered_cache() else { return Ok(()) };
        let size_bytes = part_bytes(self.shared.sides[0].size(), setup.places);
        if core.caches().is_empty() {
            let store = StoreRequest { place: format!("file:{FOLDER}/{STORE}"), size_bytes: Some(size_bytes) };
            core.create_cache(CacheRequest { name: NAME.to_owned(), store, policy: None }).await?;
        }
        if self.shown_cache(core).is_none() {
            let rng = &self.shared.rng;
            let layer = LayerRequest::Cache {
                cache: NAME.to_owned(),
                size_bytes,
                mode: Some(api_mode(rng.pick(setup.modes))),
                policy: Some(rng.pick(POLICIES)),
                block_bytes: Some(BLOCK_BYTES),
                sequential_bytes: Some(rng.pick(&[0, 256 << 10])),
            };
            core.add_layer(self.name(), layer).await?;
        }
        let (host, env, core) = (self.clone(), process.env(), core.clone());
        process.env().spawn(Box::pin(async move { host.change_layered_cache(&env, &core, &setup).await }));
        Ok(())
    }

    /// What an operator does about it.
    async fn change_layered_cache(&self, env: &EnvRef, core: &Core, setup: &CacheSetup) {
        let rng = &self.shared.rng;
        loop {
            env.sleep(rng.up_to(CHANGES_AFTER)).await;
            let change = |request| core.change_layer(self.name(), LAYER, request);
            let changed = match rng.below(8) {
                0..=2 => {
                    let mode = Some(api_mode(rng.pick(setup.modes)));
                    change(LayerChangeRequest { mode, size_bytes: None }).await.map(|_| "another mode")
                }
                3..=4 => {
                    let size_bytes = Some(rng.within(1..=setup.places) * BLOCK_BYTES);
                    change(LayerChangeRequest { mode: None, size_bytes }).await.map(|_| "another size")
                }
                5 => core.drain_cache(NAME).await.map(|_| "drained"),
                _ => Ok("looked at"),
            };
            match changed {
                Ok(word) => self.shared.world.occur(Occurrence::Told(word)),
                Err(error) => self.shared.world.event(format_args!("the cache is not changed: {error}")),
            }
            self.shown_cache(core).iter().for_each(|shown| self.note_shown_cache(shown));
        }
    }

    fn note_shown_cache(&self, shown: &CacheUse) {
        let told = [
            (shown.hits > 0, "read from a cache"),
            (shown.hits_partial > 0, "read from base and cache"),
            (shown.admitted > 0, "admitted"),
            (shown.evicted > 0, "a full cache"),
            (shown.bypassed > 0, "passed by a cache"),
            (shown.writes_back > 0, "written to a cache"),
            (shown.writes_through > 0, "written through a cache"),
            (shown.cleaned_bytes > 0, "written back"),
            (shown.failed, "a failed cache"),
            (!shown.open, "left without its cache"),
        ];
        told.into_iter()
            .filter(|(is_so, _)| *is_so)
            .for_each(|(_, word)| self.shared.world.occur(Occurrence::Told(word)));
    }

    /// Ends when the daemon has emptied the cache: the disk alone is the volume.
    pub(super) async fn layered_cache_emptied(&self) {
        loop {
            let core = self.shared.now.lock().core.clone();
            if let Some(core) = core {
                self.shown_cache(&core).iter().for_each(|shown| self.note_shown_cache(shown));
                match core.drain_cache(NAME).await {
                    Ok(_) => return,
                    Err(error) => self.shared.world.event(format_args!("the cache is not drained: {error}")),
                }
            }
            self.shared.world.sleep(DRAIN_INTERVAL).await;
        }
    }

    /// Makes the disk of its store.
    pub(super) async fn prepare_cache_store(&self, number: u32, size: Bytes) {
        let shared = &self.shared;
        drop(shared.shelf.make(&shared.world, (CACHE, number), size, 1).await);
        if let Some(cache) = self.layered_cache() {
            shared.shelf.set_faults((CACHE, number), cache.faults);
        }
    }

    pub(super) async fn open_cache_store(&self, number: u32) -> std::io::Result<Device> {
        let disk = self.shared.shelf.disk((CACHE, number)).ok_or(OsErrorKind::NotFound)?;
        if disk.require_there().is_err() {
            return Err(OsErrorKind::NotFound.into());
        }
        self.shared.shelf.open(&self.shared.world, (CACHE, number)).await.map_err(std::io::Error::other)
    }

    pub(super) fn discard_cache_store(&self, number: u32) {
        self.shared.shelf.remove((CACHE, number));
    }
}
