//! A volume's cache that comes from another host with a machine.
//!
//! ```text
//!   prepared   a part is taken, the layer is on record: nothing of it is believed
//!   Ask::Cache   an empty cache, over nothing yet ◀═══ blocks
//!   held here   sealed ──▶ over the backend, in the guest's path ──▶ over ──▶ on record: believed
//!               not sealed ──▶ begins anew, empty
//! ```
//!
//! A daemon that is restarted meanwhile begins with an empty cache. Until the transfer is over a cache never holds what the backend lacks: one
//! that is to write back does so from then on.

use std::sync::Arc;

use api::v1::{self, Error, ErrorCode};
use block::Device;
use env::EnvRef;
use filters::CacheMode;
use migrate::{CacheArrival, CacheTransferOptions, CacheWay};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::StackedCache;
use crate::daemon::Daemon;
use crate::document::{CacheLayer, CacheTrust, LayerDocument, LayerKind, LayerState, VolumeDocument, random_uuid};
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// The cache of a disk that stays where both hosts reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivingCache {
    /// How it is set, with the cache of the target that it goes to.
    pub(crate) layer: CacheLayer,
    /// How it goes.
    pub(crate) options: CacheTransferOptions,
}

/// A cache that comes with its volume.
pub(crate) struct VolumeArrival {
    /// The host and the move that it comes by.
    by: (String, Uuid),
    /// The cache, until it is in the guest's path.
    stacked: Option<StackedCache>,
    arrival: CacheArrival,
    way: CacheWay,
    /// What it is to do with writes in the end.
    mode: CacheMode,
}

/// How a cache works until its transfer is over.
const fn mode_meanwhile(mode: CacheMode) -> CacheMode {
    match mode {
        CacheMode::ReadOnly => CacheMode::ReadOnly,
        CacheMode::WriteThrough | CacheMode::WriteBack => CacheMode::WriteThrough,
    }
}

impl VolumeArrival {
    /// Begins to take what comes into `stacked`, an empty cache over nothing, by a move of a host.
    pub(crate) fn new(env: &EnvRef, by: (String, Uuid), stacked: StackedCache, asked: &ArrivingCache) -> Self {
        let arrival = CacheArrival::new(Arc::clone(env), stacked.filter(), asked.options.clone());
        let (way, mode) = (asked.options.way, asked.layer.mode);
        Self { by, stacked: Some(stacked), arrival, way, mode }
    }

    /// The transfer, if it comes by this move of this host.
    pub(crate) fn by(&self, host: &str, id: Uuid) -> Option<CacheArrival> {
        (self.by.0 == host && self.by.1 == id).then(|| self.arrival.clone())
    }

    /// How the API shows it.
    fn show(&self) -> v1::CacheArrival {
        let status = self.arrival.status();
        v1::CacheArrival {
            transfer: to_api_way(self.way),
            blocks: status.listed,
            from_source: status.from_source,
            from_storage: status.from_storage,
            read_remotely: status.read_remotely,
            refused: status.refused,
            withheld: status.is_withheld,
            over: status.is_over,
        }
    }
}

impl Volume {
    /// How the API shows a cache that has come.
    pub(crate) fn show_cache_arrival(&self) -> Option<v1::CacheArrival> {
        self.cache_arrival.lock().as_ref().map(VolumeArrival::show)
    }

    /// Refuses what cannot be done while a cache comes.
    pub(crate) fn refuse_cache_arriving(&self) -> Result<()> {
        let is_over = self.cache_arrival.lock().as_ref().is_none_or(|coming| coming.arrival.status().is_over);
        if is_over {
            return Ok(());
        }
        Err(Error::new(ErrorCode::Busy, format!("the cache of {} still comes from its old host", self.name))
            .with_hint(format!("wait until `transhume volume show {}` says that all of it is here", self.name)))
    }
}

/// What the API calls a way.
pub(crate) const fn to_api_way(way: CacheWay) -> v1::CacheTransfer {
    match way {
        CacheWay::None => v1::CacheTransfer::None,
        CacheWay::Cachemior => v1::CacheTransfer::Cachemior,
        CacheWay::Firepan => v1::CacheTransfer::Firepan,
        CacheWay::FirepanIf => v1::CacheTransfer::FirepanIf,
        CacheWay::RemoteRead => v1::CacheTransfer::RemoteRead,
        CacheWay::Hybrid => v1::CacheTransfer::Hybrid,
    }
}

impl Daemon {
    /// Takes a part for the cache of a volume that comes under `epoch`, and gives what is on record of it.
    pub(crate) fn take_arriving_cache(&self, volume: &str, epoch: u64, cache: &ArrivingCache) -> Result<LayerDocument> {
        let id = random_uuid(&*self.env);
        self.caches.get(&cache.layer.cache)?.take(id, volume, cache.layer.size)?;
        let mode = mode_meanwhile(cache.layer.mode);
        let layer = CacheLayer { epoch, mode, trust: CacheTrust::Dirty, ..cache.layer.clone() };
        Ok(LayerDocument { id, state: LayerState::Clean, kind: LayerKind::Cache(layer) })
    }

    /// The volume is held here and about to be served: its cache, if that may be believed. One that may not is closed, and begins anew.
    pub(crate) async fn arrived_cache(&self, volume: &Volume) -> Option<StackedCache> {
        let coming = {
            let mut arrival = volume.cache_arrival.lock();
            let coming = arrival.as_mut()?;
            if coming.arrival.is_sealed() {
                return coming.stacked.take();
            }
            arrival.take()
        };
        tracing::warn!(
            volume = volume.name,
            "the cache of a volume begins empty: not every change was told before it came"
        );
        if let Some(stacked) = coming.and_then(|coming| coming.stacked) {
            stacked.close().await;
        }
        None
    }

    /// The guest goes through the cache of `volume` from now on, over `base`: the rest of its transfer is done aside.
    pub(crate) fn finish_cache_arrival(&self, volume: &Arc<Volume>, base: Device) {
        let Some((arrival, mode)) =
            volume.cache_arrival.lock().as_ref().map(|coming| (coming.arrival.clone(), coming.mode))
        else {
            return;
        };
        arrival.guest_is_here(base);
        let volume = Arc::clone(volume);
        self.env.spawn(Box::pin(async move {
            arrival.over().await;
            if let Err(error) = believe_cache(&volume, mode).await {
                tracing::error!(volume = volume.name, %error, "that a cache has come could not be stored: it begins empty after a restart");
            }
        }));
    }

    /// A cache that begins empty works as its volume's did at the other host.
    pub(crate) fn begin_empty_cache(&self, volume: &Arc<Volume>, asked: &ArrivingCache) {
        let (volume, mode) = (Arc::clone(volume), asked.layer.mode);
        self.env.spawn(Box::pin(async move {
            if let Err(error) = believe_cache(&volume, mode).await {
                tracing::error!(volume = volume.name, %error, "a cache does not write back at its new host");
            }
        }));
    }

    /// The volume does not come, nor does its cache.
    pub(crate) async fn drop_arriving_cache(&self, volume: &Volume, layers: &[LayerDocument]) {
        let coming = volume.cache_arrival.lock().take();
        if let Some(stacked) = coming.and_then(|coming| coming.stacked) {
            stacked.close().await;
        }
        layers.iter().filter(|layer| layer.is_of_host()).for_each(|layer| self.caches.give_back(layer.id));
    }
}

/// All of a cache has come, or nothing does: it is believed from here on, and writes back if it is to.
async fn believe_cache(volume: &Volume, mode: CacheMode) -> Result<()> {
    let _operation = volume.operation.lock().await;
    let document = volume.document();
    let Some((layer, set)) = document.cache_layer() else { return Ok(()) };
    let Some(stacked) = volume.with_stack(|stack| stack.cache().cloned()).flatten() else { return Ok(()) };
    if !stacked.is_of(layer.id) {
        return Ok(());
    }
    let cache = stacked.filter();
    let writes_back = mode == CacheMode::WriteBack && set.mode == CacheMode::WriteThrough;
    let mut is_believed = false;
    let change = |document: &mut VolumeDocument| {
        document.change_cache(layer.id, |layer, state| {
            // A flash that fails has that on record after this, or is seen here.
            is_believed = layer.trust != CacheTrust::Gone && !cache.status().has_failed;
            if is_believed {
                layer.trust = CacheTrust::Whole;
            }
            if is_believed && writes_back {
                (layer.mode, *state) = (CacheMode::WriteBack, LayerState::MayHold);
            }
        });
    };
    let stored = match writes_back {
        true => volume.journal.begin_holding(change).await,
        false => volume.journal.update(change).await,
    };
    stored.map_err(|error| of_backend(&error, "the volume's journal"))?;
    if is_believed && writes_back {
        // On record before the first write that only the flash has.
        let changed = cache.set_mode(CacheMode::WriteBack).await;
        changed.map_err(|error| of_backend(&error, "the cache"))?;
    }
    tracing::info!(volume = volume.name, "the cache of a volume is as it was at the other host");
    Ok(())
}
