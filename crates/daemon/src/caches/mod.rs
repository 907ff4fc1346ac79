//! Caches: pools on the host's flash in which blocks of volumes are kept, with a partition for each volume.
//!
//! What holds the bytes is `filters::Cache`; what puts that into a volume's stack is `stack::cache`.

mod document;

use std::path::PathBuf;
use std::sync::Arc;

use api::v1::{self, Error, ErrorCode};
use block::{Bytes, Device};
use filters::{CacheMode, CachePolicy, Region};
use uuid::Uuid;

pub(crate) use self::document::CacheSettings;
use self::document::{CachePlace, PARTITION_ALIGNMENT};
use crate::pools::{DocumentOf, NewStore, Pool, PoolKind, Pools};
use crate::problem::{Result, invalid, of_backend, of_state};
use crate::state_dir::Layout;

/// The kind of pool that caches are.
pub(crate) struct CacheKind;

/// A cache: one store for many volumes.
pub(crate) type CachePool = Pool<CacheKind>;

/// All caches of this host.
pub(crate) type Caches = Pools<CacheKind>;

impl PoolKind for CacheKind {
    type Settings = CacheSettings;
    type Place = CachePlace;

    const NAME: &'static str = "cache";

    fn directory(layout: &Layout) -> PathBuf {
        layout.caches()
    }

    fn is_sound(document: &DocumentOf<Self>) -> bool {
        document.is_sound()
    }
}

impl Caches {
    /// Makes a cache. When this fails nothing was left behind.
    ///
    /// # Errors
    /// There is one of that name, the request makes no sense, or the store cannot be used.
    pub(crate) async fn create(
        &self,
        name: String,
        store: NewStore,
        policy: Option<v1::CachePolicy>,
    ) -> Result<v1::Cache> {
        let settings = CacheSettings { policy: policy.map_or(Ok(CachePolicy::default()), of_api_policy)? };
        let made = self.make(name, vec![store], settings, |document| {
            document.bytes -= document.bytes % PARTITION_ALIGNMENT;
            if document.bytes == 0 {
                return Err(Error::new(ErrorCode::NoSpace, "the store of the cache is empty")
                    .with_hint("give a size: --store file:PATH,size=40GiB"));
            }
            Ok(())
        });
        Ok(made.await?.show())
    }

    /// Removes a cache that no volume has a part of, with the file that was made for it.
    ///
    /// # Errors
    /// There is none of that name, or it is in use.
    pub(crate) async fn remove(&self, name: &str) -> Result<v1::Cache> {
        let hint = "take it out of their stacks first: `transhume volume layer rm VOLUME cache`";
        Ok(self.unmake(name, hint).await?.show())
    }

    /// Has volumes use so much of the store of a cache, or all that it has by now. A file that was made for it gets larger.
    ///
    /// # Errors
    /// There is none of that name, a volume has a part beyond that, or the store is smaller.
    pub(crate) async fn resize(&self, name: &str, size_bytes: Option<u64>) -> Result<Arc<CachePool>> {
        let cache = self.get(name)?;
        let of_store = |error: block::Error| of_backend(&error, "the store of the cache");
        let asked = size_bytes.map(|bytes| bytes - bytes % PARTITION_ALIGNMENT);
        let known = cache.document().bytes;
        let is_made = cache.document().stores.iter().all(|store| store.made.is_some());
        let mut has = cache.measure_again().await.map_err(of_store)?;
        if let Some(asked) = asked.filter(|asked| *asked > has && *asked > known && is_made) {
            cache.grow(0, Bytes(asked)).map_err(|error| of_state(error, "making the store of the cache larger"))?;
            has = cache.measure_again().await.map_err(of_store)?;
        }
        let bytes = asked.unwrap_or(has - has % PARTITION_ALIGNMENT);
        if bytes > has {
            let message = format!("the store of the cache {name} has {}", Bytes(has));
            return Err(Error::new(ErrorCode::NoSpace, message)
                .with_hint("make the file or the block device larger first, then resize the cache"));
        }
        if bytes == 0 {
            return Err(invalid("a cache without room caches nothing", "give a larger --size, or remove it"));
        }
        cache.update(|document| {
            if let Some((end, volume)) = document.used().filter(|(end, _)| *end > bytes) {
                let message = format!("{volume} has a part of the cache {name} that ends at {}", Bytes(end));
                return Err(Error::new(ErrorCode::InUse, message)
                    .with_hint(format!("`transhume volume layer rm {volume} cache` first, or give a larger --size")));
            }
            document.bytes = bytes;
            Ok(())
        })?;
        Ok(cache)
    }
}

impl CachePool {
    /// How the API shows it.
    pub(crate) fn show(&self) -> v1::Cache {
        self.document().show()
    }

    /// Which block goes when a place is needed, unless a volume says otherwise.
    pub(crate) fn policy(&self) -> CachePolicy {
        self.document().settings.policy
    }

    /// Gives `bytes` to `layer` of `volume`. Done means durable.
    ///
    /// # Errors
    /// It is full, or that could not be stored.
    pub(crate) fn take(&self, layer: Uuid, volume: &str, bytes: u64) -> Result<()> {
        self.update(|document| document.take(layer, volume, bytes))
    }

    /// Whether there is room for a partition of `bytes`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn has_room(&self, bytes: u64) -> Result<()> {
        self.document().clone().take(Uuid::nil(), "", bytes)
    }

    /// How large the partition of `layer` is, in bytes; none if it has none.
    pub(crate) fn part_bytes(&self, layer: Uuid) -> Option<u64> {
        self.document().find(layer).map(|partition| partition.place.length)
    }

    /// The partition of `layer`.
    ///
    /// # Errors
    /// It has none, or the store cannot be opened.
    pub(crate) async fn partition(&self, layer: Uuid) -> block::Result<Device> {
        let extent = self.document().find(layer).map(|partition| partition.place.extent());
        let extent = extent.ok_or_else(|| {
            let context = format!("the cache {} has no part of layer {layer}", self.name());
            block::Error::new(block::ErrorKind::NotFound, context)
        })?;
        let name = format!("{}'s part for {layer}", self.name());
        Ok(Device::new(&name, Region::new(self.device(0).await?, extent)?))
    }
}

/// What the API calls a policy.
pub(crate) const fn to_api_policy(policy: CachePolicy) -> v1::CachePolicy {
    match policy {
        CachePolicy::Lru => v1::CachePolicy::Lru,
        CachePolicy::Fifo => v1::CachePolicy::Fifo,
        CachePolicy::Random => v1::CachePolicy::Random,
        CachePolicy::S3Fifo => v1::CachePolicy::S3Fifo,
    }
}

/// The policy that the API names.
pub(crate) fn of_api_policy(policy: v1::CachePolicy) -> Result<CachePolicy> {
    match policy {
        v1::CachePolicy::Lru => Ok(CachePolicy::Lru),
        v1::CachePolicy::Fifo => Ok(CachePolicy::Fifo),
        v1::CachePolicy::Random => Ok(CachePolicy::Random),
        v1::CachePolicy::S3Fifo => Ok(CachePolicy::S3Fifo),
        v1::CachePolicy::Unknown => {
            Err(invalid("this is no policy of a cache", "lru, fifo, random and s3-fifo are those that there are"))
        }
    }
}

/// What the API calls a mode.
pub(crate) const fn to_api_mode(mode: CacheMode) -> v1::CacheMode {
    match mode {
        CacheMode::ReadOnly => v1::CacheMode::ReadOnly,
        CacheMode::WriteThrough => v1::CacheMode::WriteThrough,
        CacheMode::WriteBack => v1::CacheMode::WriteBack,
    }
}

/// The mode that the API names.
pub(crate) fn of_api_mode(mode: v1::CacheMode) -> Result<CacheMode> {
    match mode {
        v1::CacheMode::ReadOnly => Ok(CacheMode::ReadOnly),
        v1::CacheMode::WriteThrough => Ok(CacheMode::WriteThrough),
        v1::CacheMode::WriteBack => Ok(CacheMode::WriteBack),
        v1::CacheMode::Unknown => Err(invalid(
            "this is no mode of a cache",
            "read-only, write-through and write-back are those that there are",
        )),
    }
}
