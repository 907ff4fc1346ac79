//! The caches of a machine's shared disks, as they come to this host.
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
use filters::CacheMode;
use migrate::stream::BoxTransport;
use migrate::{CacheArrival, CacheWay};
use uuid::Uuid;

use super::channel::{Answer, ArrivingCache, send};
use super::departing_caches::to_api_way;
use crate::daemon::Daemon;
use crate::document::{CacheLayer, CacheTrust, LayerDocument, LayerKind, LayerState, random_uuid};
use crate::problem::{Result, of_backend};
use crate::remote::handed_over;
use crate::stack::StackedCache;
use crate::volume::Volume;

/// A cache that comes with its volume.
pub(crate) struct VolumeArrival {
    /// The host and the move that it comes by.
    host: String,
    id: Uuid,
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

impl Daemon {
    /// Refuses a cache for which there is no room here.
    pub(super) fn may_take_cache(&self, cache: &ArrivingCache) -> Result<()> {
        let hint = "make one there, name another by --cache-at, or remove the layer first: `transhume volume layer rm VOLUME cache`";
        let pool = self.caches.get(&cache.layer.cache).map_err(|error| error.with_hint(hint))?;
        pool.has_room(cache.layer.size).map_err(|error| error.with_hint(hint))
    }

    /// Takes a part for the cache of a volume that comes under `epoch`, and gives what is on record of it.
    pub(crate) fn take_arriving_cache(&self, volume: &str, epoch: u64, cache: &ArrivingCache) -> Result<LayerDocument> {
        let id = random_uuid(&*self.env);
        self.caches.get(&cache.layer.cache)?.take(id, volume, cache.layer.size)?;
        let mode = mode_meanwhile(cache.layer.mode);
        let layer = CacheLayer { epoch, mode, trust: CacheTrust::Dirty, ..cache.layer.clone() };
        Ok(LayerDocument { id, state: LayerState::Clean, kind: LayerKind::Cache(layer) })
    }

    /// Takes one connection of a cache's transfer from `host`.
    pub(super) async fn take_cache(
        self: &Arc<Self>,
        mut transport: BoxTransport,
        (host, id): (&str, Uuid),
        name: &str,
    ) -> std::io::Result<()> {
        match Box::pin(self.cache_that_comes((host, id), name)).await {
            Ok(arrival) => {
                send(&mut transport, &Answer::Done).await?;
                arrival.run(transport).await
            }
            Err(error) => send(&mut transport, &Answer::Refused { error }).await,
        }
    }

    async fn cache_that_comes(self: &Arc<Self>, (host, id): (&str, Uuid), name: &str) -> Result<CacheArrival> {
        let volume = self.volume(name)?;
        let _operation = volume.operation.lock().await;
        if let Some(coming) = &*volume.cache_arrival.lock()
            && (coming.host.as_str(), coming.id) == (host, id)
        {
            return Ok(coming.arrival.clone());
        }
        let none = || Error::new(ErrorCode::NotFound, format!("no cache of {name} comes from {host}"));
        let (machine, _) = self.arriving_machine(host, id)?;
        let disks = machine.document().disks;
        let asked = disks.into_iter().find(|disk| disk.volume == name).and_then(|disk| disk.cache).ok_or_else(none)?;
        let document = volume.document();
        let incoming = document.incoming.as_ref().filter(|incoming| incoming.host == host).ok_or_else(none)?;
        let layer = incoming.layers.first().ok_or_else(none)?;
        let geometry = volume.incoming.lock().as_ref().map(|incoming| incoming.geometry()).ok_or_else(none)?;
        let stacked =
            StackedCache::make(&handed_over(geometry), layer, &volume.journal, &self.overlay_context()).await?;
        let arrival = CacheArrival::new(Arc::clone(&self.env), stacked.filter(), asked.options.clone());
        let coming = VolumeArrival {
            host: host.to_owned(),
            id,
            stacked: Some(stacked),
            arrival: arrival.clone(),
            way: asked.options.way,
            mode: asked.layer.mode,
        };
        *volume.cache_arrival.lock() = Some(coming);
        if let Some(base) = volume.incoming.lock().as_ref().map(|incoming| incoming.open_backend.device.clone()) {
            let warming = arrival.clone();
            self.env.spawn(Box::pin(async move { warming.warm_before(base).await }));
        }
        Ok(arrival)
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

    /// The volume does not come, nor does its cache.
    pub(crate) async fn drop_arriving_cache(&self, volume: &Volume, layers: &[LayerDocument]) {
        let coming = volume.cache_arrival.lock().take();
        if let Some(stacked) = coming.and_then(|coming| coming.stacked) {
            stacked.close().await;
        }
        layers.iter().filter(|layer| layer.is_of_host()).for_each(|layer| self.caches.give_back(layer.id));
    }
}

/// All of a cache has come: it is believed from here on, and writes back if it is to.
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
    let stored = volume.journal.update(|document| {
        document.change_cache(layer.id, |layer, state| {
            // A flash that fails has that on record after this, or is seen here.
            is_believed = layer.trust == CacheTrust::Dirty && !cache.status().has_failed;
            if is_believed {
                layer.trust = CacheTrust::Whole;
            }
            if is_believed && writes_back {
                (layer.mode, *state) = (CacheMode::WriteBack, LayerState::MayHold);
            }
        });
    });
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
    if is_believed && writes_back {
        // On record before the first write that only the flash has.
        let changed = cache.set_mode(CacheMode::WriteBack).await;
        changed.map_err(|error| of_backend(&error, "the cache"))?;
    }
    tracing::info!(volume = volume.name, "the cache of a volume has come");
    Ok(())
}
