//! A cache in a volume's stack, directly over the backend: how it is opened, and what the API shows of it.
//!
//! | on record | what is in the partition | if it cannot be opened |
//! |---|---|---|
//! | clean | blocks that the backend has, too | the volume comes up without it, once its store is silent for 10 s; on record first: nothing of it is believed later |
//! | may-hold, draining | blocks that only it has | the volume stays down |
//! | trust `dirty` | what it only caches is not believed: its flash has failed, or the volume was in use without it | as above |
//! | trust `gone` | nothing: it is about to be out of the guest's path, or is | it is not tried |
//!
//! A partition is believed under the volume, the layer and the epoch with which it was made. A layer that is removed and added again is
//! another one, so that no old partition is believed by mistake. How it comes, changes and goes is in
//! [`cache_changes`](super::cache_changes).

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use api::v1::{self, Error, ErrorCode};
use block::{ChunkSize, Device, IoFuture};
use env::EnvRef;
use filters::{Cache, CacheHeader, CacheIdentity, CacheLoss, CacheMode, CacheOptions, CacheStatus};
use uuid::Uuid;

use super::Stack;
use super::image_note::ImageNote;
use super::opening::open_in_time;
use crate::caches::{CacheKind, CachePool, to_api_mode, to_api_policy};
use crate::daemon::Daemon;
use crate::document::{CacheLayer, CacheTrust, LayerDocument, LayerState, random_uuid};
use crate::handed_over::handed_over;
use crate::journal::VolumeJournal;
use crate::overlays::OverlayContext;
use crate::pools::{PartStores, Renewal};
use crate::problem::{RecordError, Result, of_backend, of_holding, of_record};
use crate::volume::Volume;

/// A cache in its place.
#[derive(Clone)]
pub(crate) struct StackedCache {
    /// What the record calls it.
    pub(super) id: Uuid,
    pub(super) cache: Cache,
    /// The same as the guest sees it.
    pub(crate) device: Device,
    /// Where it is noted how the image is.
    image: Option<Arc<ImageNote>>,
    /// Begins generations of its part.
    renewal: Option<Arc<Renewal<CacheKind>>>,
}

/// What became of the attempt to open a volume's cache.
#[derive(Default)]
pub(crate) struct FoundCache {
    /// The cache, if it goes into the guest's path.
    pub(crate) stacked: Option<StackedCache>,
    /// Why it does not.
    pub(crate) problem: Option<String>,
    /// What must be on record of it before the guest comes.
    pub(crate) trust: Option<(Uuid, CacheTrust)>,
}

impl StackedCache {
    /// Opens the cache of `layer` over `base`. It changes nothing of `base` by itself before [`begin`](Self::begin).
    pub(super) async fn open(
        base: Device,
        layer: &LayerDocument,
        cache: &CacheLayer,
        journal: &Arc<VolumeJournal>,
        context: &OverlayContext,
    ) -> block::Result<Self> {
        Self::open_telling(base, (layer, cache), journal, context, None).await
    }

    /// The same, which raises `progress` whenever it gets on.
    async fn open_telling(
        base: Device,
        (layer, cache): (&LayerDocument, &CacheLayer),
        journal: &Arc<VolumeJournal>,
        context: &OverlayContext,
        progress: Option<Arc<AtomicU64>>,
    ) -> block::Result<Self> {
        let pool = pool(cache, context)?;
        let opened = Self::open_in(&pool, base, (layer, cache), journal, context, progress).await;
        if opened.is_err() {
            pool.close_unused().await;
        }
        opened
    }

    async fn open_in(
        pool: &Arc<CachePool>,
        base: Device,
        (layer, cache): (&LayerDocument, &CacheLayer),
        journal: &Arc<VolumeJournal>,
        context: &OverlayContext,
        progress: Option<Arc<AtomicU64>>,
    ) -> block::Result<Self> {
        let partition = pool.partition(layer.id).await?;
        let expected = identity(journal, layer, cache)?;
        let pages = Cache::inspect_as(&partition, &expected).await?.owner_pages();
        pool.check_generation(layer.id, 0, &partition, pages).await?;
        let backend = journal.document().backend.clone();
        let image = match pages.zip(backend.local_path()) {
            Some((pages, image)) => {
                let second = block::Extent::between(pages.offset + block::Bytes(block::BLOCK_BYTES), pages.end());
                ImageNote::new(&context.backends, image, &partition, second).await.map(Arc::new)
            }
            None => None,
        };
        let is_as_left = match &image {
            Some(note) => note.is_as_left().await?,
            None => true,
        };
        if !is_as_left {
            tracing::warn!(image = %backend, "an image was changed while nobody served it: what was cached of it is forgotten");
        }
        if let Some(pages) = pages {
            // From here on no older copy of the store is believed.
            let generation = pool.begin_generation(layer.id).map_err(of_record)?;
            pool.stamp((layer.id, generation), 0, &partition, pages).await?;
            pool.end_generation(layer.id, generation).map_err(of_record)?;
        }
        let stores = PartStores::Only(partition.clone());
        let renewal = pages.map(|pages| Arc::new(Renewal::new(pool, layer.id, pages, stores)));
        let options = CacheOptions {
            mode: cache.mode,
            policy: cache.policy,
            sequential_bytes: block::Bytes(cache.sequential),
            believes_clean: cache.trust == CacheTrust::Whole && is_as_left,
            loss: Some(Arc::new(LostFlash { journal: Arc::clone(journal), layer: layer.id })),
            progress,
            ..CacheOptions::default()
        };
        let env = Arc::clone(&context.env);
        let opened = Cache::open(env, base, partition, context.boot, options, expected).await?;
        let device = Device::new(&format!("cache {}", cache.cache), opened.clone());
        Ok(Self { id: layer.id, cache: opened, device, image, renewal })
    }

    /// Makes an empty cache of `layer` and opens it over `base`.
    pub(crate) async fn make(
        base: &Device,
        layer: &LayerDocument,
        journal: &Arc<VolumeJournal>,
        context: &OverlayContext,
    ) -> Result<Self> {
        let cache = layer.cache().ok_or_else(|| Error::new(ErrorCode::Internal, "a layer of another kind"))?;
        make_header(base, layer, cache, journal, context).await?;
        let opened = Self::open(base.clone(), layer, cache, journal, context).await;
        opened.map_err(|error| of_backend(&error, &format!("the cache {}", cache.cache)))
    }

    /// The cache itself.
    pub(crate) fn filter(&self) -> Cache {
        self.cache.clone()
    }

    /// Whether it is that of layer `id`.
    pub(crate) fn is_of(&self, id: Uuid) -> bool {
        self.id == id
    }

    /// Has it write back until it is closed. What must be on record of it is.
    pub(crate) fn begin(&self, env: &EnvRef) {
        env.spawn(Box::pin(self.cache.clone().run_write_back()));
        if let Some(image) = &self.image {
            env.spawn(Box::pin(ImageNote::watch(Arc::downgrade(image), Arc::clone(env))));
        }
        if let Some(renewal) = &self.renewal {
            env.spawn(Box::pin(Renewal::watch(Arc::downgrade(renewal), Arc::clone(env))));
        }
    }

    /// The process is about to end, and no guest asks for anything any more: what is cached is believed by the next one, if nobody changes
    /// the image until then. A copy of the store that was made while the guest worked is not.
    pub(crate) async fn leave(self) {
        // What is written back changes nothing that a guest reads, so nobody waits for a backend that is away.
        futures::join!(self.leave_image(), self.leave_part());
    }

    async fn leave_image(&self) {
        self.cache.close().await;
        if let Some(image) = &self.image
            && let Err(error) = image.leave().await
        {
            tracing::debug!(
                cache = self.device.name(),
                error = error.chain(),
                "how an image is left could not be noted"
            );
        }
    }

    async fn leave_part(&self) {
        if let Some(renewal) = &self.renewal {
            renewal.leave().await;
        }
    }

    /// What a migration reads the volume by.
    pub(crate) fn copy_face(&self) -> Device {
        self.cache.copy("the volume, whose cache does not warm by it")
    }

    /// How many bytes only the flash has.
    pub(super) fn held_bytes(&self) -> u64 {
        self.cache.status().dirty_bytes
    }

    /// Ends all that works in the background. It is out of the guest's path.
    pub(crate) async fn close(self) {
        self.cache.close().await;
        if let Some(image) = &self.image {
            image.close().await;
        }
        if let Some(renewal) = &self.renewal {
            renewal.close().await;
        }
    }
}

fn pool(cache: &CacheLayer, context: &OverlayContext) -> block::Result<Arc<CachePool>> {
    let pool = context.caches.get(&cache.cache);
    pool.map_err(|error| RecordError::missing(error.message))
}

/// Under which the partition of `layer` is believed.
fn identity(journal: &VolumeJournal, layer: &LayerDocument, cache: &CacheLayer) -> block::Result<CacheIdentity> {
    let volume = journal.document().id;
    let nameless = || block::Error::new(block::ErrorKind::Internal, "a volume with layers has no identity");
    let volume = *volume.ok_or_else(nameless)?.as_bytes();
    Ok(CacheIdentity { volume, layer: *layer.id.as_bytes(), epoch: cache.epoch })
}

/// Makes an empty cache of what `base` holds in the partition of `layer`, whatever was there.
pub(super) async fn make_header(
    base: &Device,
    layer: &LayerDocument,
    cache: &CacheLayer,
    journal: &VolumeJournal,
    context: &OverlayContext,
) -> Result<()> {
    let failed = |error: block::Error| of_backend(&error, &format!("the cache {}", cache.cache));
    let pool = pool(cache, context).map_err(failed)?;
    let partition = pool.partition(layer.id).await.map_err(failed)?;
    let identity = identity(journal, layer, cache).map_err(failed)?;
    let id = random_uuid(&*context.env).into_bytes();
    let header = ChunkSize::new(cache.block)
        .and_then(|block| CacheHeader::new(base.size(), block, partition.size(), id, identity))
        .ok_or_else(|| {
            let message = format!("{} bytes are no room for a block of {} bytes", partition.size().get(), cache.block);
            Error::new(ErrorCode::NoSpace, message).with_hint("give a larger --size, or a --block of 4KiB to 64KiB")
        })?;
    let made = async {
        Cache::create(&partition, &header).await?;
        let Some(pages) = header.owner_pages() else { return Ok(()) };
        // An earlier one of this layer counts no more.
        let generation = pool.begin_generation(layer.id).map_err(of_record)?;
        pool.stamp((layer.id, generation), 0, &partition, pages).await
    };
    made.await.map_err(failed)
}

/// Opens the cache of `layer` over `base` as it is on record, and gives what must be on record of it then, if that is something else.
async fn open_as_on_record(
    base: Device,
    layer: LayerDocument,
    cache: CacheLayer,
    journal: Arc<VolumeJournal>,
    context: OverlayContext,
    progress: Arc<AtomicU64>,
) -> block::Result<(StackedCache, Option<CacheTrust>)> {
    let (believed, trust) = match (cache.trust, layer.state) {
        (CacheTrust::Dirty, LayerState::Clean) => {
            // The backend has everything: it begins anew.
            let whole = CacheLayer { trust: CacheTrust::Whole, ..cache };
            let made = make_header(&base, &layer, &whole, &journal, &context).await;
            made.map_err(|error| block::Error::new(block::ErrorKind::Io, error.message))?;
            (whole, Some(CacheTrust::Whole))
        }
        // What it only cached has been forgotten when this returns.
        (CacheTrust::Dirty, LayerState::MayHold | LayerState::Draining) => (cache, Some(CacheTrust::Whole)),
        (CacheTrust::Whole | CacheTrust::Gone, _) => (cache, None),
    };
    let stacked = StackedCache::open_telling(base, (&layer, &believed), &journal, &context, Some(progress)).await?;
    Ok((stacked, trust))
}

/// Opens the cache among `layers`, if there is one, over `base`. One that holds nothing is waited for a while only.
///
/// # Errors
/// It cannot be opened, and may hold what the backend lacks.
pub(crate) async fn open_cache(
    base: &Device,
    layers: &[LayerDocument],
    journal: &Arc<VolumeJournal>,
    context: &OverlayContext,
) -> Result<FoundCache> {
    let Some((layer, cache)) = layers.iter().find_map(|layer| Some((layer, layer.cache()?))) else {
        return Ok(FoundCache::default());
    };
    if cache.trust == CacheTrust::Gone {
        let problem = Some("it is being taken out".to_owned());
        return Ok(FoundCache { problem, ..FoundCache::default() });
    }
    let progress = Arc::new(AtomicU64::new(0));
    let opening_over = |base: Device| {
        let (layer, cache, progress) = (layer.clone(), cache.clone(), Arc::clone(&progress));
        Box::pin(open_as_on_record(base, layer, cache, Arc::clone(journal), context.clone(), progress))
    };
    let opened = match layer.may_hold() {
        true => opening_over(base.clone()).await,
        false => {
            // One that goes on for long does not keep the backend with its locks: it gets that when it is open.
            let opening = opening_over(handed_over(base.geometry()));
            let opened = open_in_time(layer.id, journal, context, &progress, opening).await;
            opened.inspect(|(stacked, _)| stacked.cache.reach_base_by(base.clone()))
        }
    };
    match opened {
        Ok((stacked, trust)) => {
            let trust = trust.map(|trust| (layer.id, trust));
            Ok(FoundCache { stacked: Some(stacked), problem: None, trust })
        }
        Err(error) if layer.may_hold() => {
            let lost = format!(
                "it holds what the guest has written last: put its store back as it was left, which is looked for again and again; if \
                 it is lost for good, `transhume volume layer rm {} cache --discard-dirty`",
                journal.document().name
            );
            Err(of_holding(&error, &format!("the cache {}", cache.cache), &lost))
        }
        Err(error) => {
            let problem = of_backend(&error, &format!("the cache {}", cache.cache)).message;
            // From here on the guest writes past it.
            let trust = (cache.trust != CacheTrust::Dirty).then_some((layer.id, CacheTrust::Dirty));
            Ok(FoundCache { stacked: None, problem: Some(problem), trust })
        }
    }
}

impl Stack {
    /// Opens the cache among `layers`, if there is one. One that holds nothing is left out if it cannot be opened. `arrived` has come from
    /// another host, and is over nothing yet.
    pub(super) async fn open_cache(
        &mut self,
        layers: &[LayerDocument],
        arrived: Option<StackedCache>,
        journal: &Arc<VolumeJournal>,
        context: &OverlayContext,
    ) -> Result<()> {
        if let Some(arrived) = arrived {
            assert!(layers.iter().any(|layer| arrived.is_of(layer.id)), "the cache that has come is on record");
            arrived.cache.reach_base_by(self.open_backend.device.clone());
            arrived.begin(&context.env);
            self.put_cache(FoundCache { stacked: Some(arrived), ..FoundCache::default() });
            return Ok(());
        }
        let found = open_cache(&self.open_backend.device, layers, journal, context).await?;
        if let Some((id, trust)) = found.trust {
            let stored = journal.update(|document| document.change_cache(id, |cache, _| cache.trust = trust));
            stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        }
        if let Some(problem) = &found.problem {
            tracing::warn!(volume = journal.document().name, problem, "a volume comes up without its cache");
        }
        found.stacked.iter().for_each(|stacked| stacked.begin(&context.env));
        self.put_cache(found);
        Ok(())
    }

    /// Puts what was found of a cache over the backend.
    pub(crate) fn put_cache(&mut self, found: FoundCache) {
        (self.cache, self.cache_problem) = (found.stacked, found.problem);
    }

    /// The cache, if there is one in the guest's path.
    pub(crate) const fn cache(&self) -> Option<&StackedCache> {
        self.cache.as_ref()
    }

    /// Takes the cache out. Whoever does that closes it once it is out of the guest's path.
    pub(crate) const fn take_cache(&mut self) -> Option<StackedCache> {
        self.cache.take()
    }
}

impl Volume {
    /// How the API shows the cache of `layer`.
    pub(super) fn show_cache(&self, layer: &LayerDocument, cache: &CacheLayer) -> v1::CacheUse {
        let found = self.with_stack(|stack| {
            let stacked = stack.cache().filter(|stacked| stacked.id == layer.id);
            (stacked.map(|stacked| stacked.cache.status()), stack.cache_problem.clone())
        });
        let (status, problem) = found.unwrap_or_default();
        let set = v1::CacheUse {
            cache: cache.cache.clone(),
            mode: to_api_mode(cache.mode),
            policy: to_api_policy(cache.policy),
            size_bytes: cache.size,
            block_bytes: cache.block,
            sequential_bytes: cache.sequential,
            problem,
            ..v1::CacheUse::default()
        };
        match status {
            Some(status) => shown(&status, v1::CacheUse { arrival: self.show_cache_arrival(), ..set }),
            None => set,
        }
    }
}

/// What a cache has done, beside how it is set.
fn shown(status: &CacheStatus, set: v1::CacheUse) -> v1::CacheUse {
    let ratio = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
    let reads = status.hits + status.hits_partial + status.misses;
    let caused = status.guest_written_bytes + status.admitted * status.block_bytes;
    let failure = match (status.has_failed, status.dirty_bytes) {
        (false, _) => None,
        (true, 0) => Some("the flash has failed: the volume goes on without it".to_owned()),
        (true, lost) => Some(format!("the flash has failed: {lost} bytes that only it had cannot be read")),
    };
    v1::CacheUse {
        open: true,
        problem: set.problem.or(failure),
        failed: status.has_failed,
        hit_ratio: ratio(status.hits, reads),
        write_amplification: ratio(status.flash_written_bytes, caused),
        hits: status.hits,
        hits_partial: status.hits_partial,
        misses: status.misses,
        admitted: status.admitted,
        bypassed: status.bypassed,
        evicted: status.evicted,
        writes_back: status.writes_back,
        writes_through: status.writes_through,
        writes_around: status.writes_around,
        guest_written_bytes: status.guest_written_bytes,
        flash_written_bytes: status.flash_written_bytes,
        cleaned_bytes: status.cleaned_bytes,
        dirty_bytes: status.dirty_bytes,
        places: status.places,
        capacity: status.capacity,
        places_free: status.places_free,
        places_dirty: status.places_dirty,
        memory_bytes: status.memory_bytes,
        draining: status.is_draining,
        ..set
    }
}

impl Daemon {
    /// How the API shows a cache: with what the volumes do with their parts of it.
    pub(crate) fn show_cache(&self, pool: &CachePool) -> v1::Cache {
        let mut shown = pool.show();
        for partition in &mut shown.partitions {
            let volume = self.volume_if_any(&partition.volume).ok().flatten();
            partition.cached = volume.and_then(|volume| {
                let document = volume.document();
                let (layer, cache) = document.cache_layer()?;
                (layer.id.to_string() == partition.layer).then(|| volume.show_cache(layer, cache))
            });
        }
        shown
    }

    /// How the API shows all of them.
    pub(crate) fn shown_caches(&self) -> Vec<v1::Cache> {
        self.caches.list().iter().map(|pool| self.show_cache(pool)).collect()
    }
}

/// How a cache with this mode is on record: whether it may come to hold what the backend lacks.
pub(super) const fn state_of(mode: CacheMode) -> LayerState {
    match mode {
        CacheMode::WriteBack => LayerState::MayHold,
        CacheMode::ReadOnly | CacheMode::WriteThrough => LayerState::Clean,
    }
}

/// Has it on record that the flash of a cache has failed.
struct LostFlash {
    journal: Arc<VolumeJournal>,
    layer: Uuid,
}

impl CacheLoss for LostFlash {
    fn note<'a>(&'a self, error: &'a block::Error) -> IoFuture<'a, ()> {
        Box::pin(async move {
            let volume = self.journal.document().name.clone();
            tracing::error!(volume, error = error.chain(), "the flash of a volume's cache has failed");
            self.journal.update(|document| document.distrust_cache(self.layer)).await
        })
    }
}
