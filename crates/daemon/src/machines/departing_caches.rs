//! The caches of a machine's shared disks, as they leave this host.
//!
//! ```text
//!   move begins    write-back ends, what is dirty goes to the backend
//!   QEMU waits there    Ask::Cache ═══ list, blocks, invalidations ═══▶ an empty cache there
//!   before the memory    hybrid: until the guest would hit there as it does here, or the time is up
//!   guest stopped    firepan: until all has come
//!   disks held    sealed: every change was told ──▶ the commit
//!   afterwards    the rest, until the target has enough ──▶ the part is given back
//! ```
//!
//! A cache is never a reason to undo a move. One that cannot be sealed begins empty at the target.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, CacheTransferRequest, Error, ErrorCode, VmMoveRequest};
use env::Moment;
use filters::{Cache, CacheMode};
use futures::future::join_all;
use migrate::{CacheDeparture, CacheTransferOptions, CacheWay, WarmStart};
use uuid::Uuid;

use super::attempt::{HOLD_LIMIT, MachineMove};
use super::channel::Ask;
use super::outgoing::call;
use crate::daemon::Daemon;
use crate::document::{CacheLayer, CacheTrust, VolumeDocument};
use crate::problem::{Result, invalid, of_backend};
use crate::stack::{ArrivingCache, to_api_way};
use crate::volume::Volume;

/// With so great a share of its hits the guest may go.
const SHARE_MIN: f64 = 0.95;
/// How often it is looked whether it has that.
const LOOK: Duration = Duration::from_millis(50);
/// The target has so long at least to drop what the guest has changed last, however short the downtime is to be.
const SEAL_LEAST: Duration = Duration::from_millis(100);
/// How long is waited before another connection is made, and for how long that is tried once the guest is gone.
const REST: Duration = Duration::from_millis(200);
const GONE_LIMIT: Duration = Duration::from_secs(15);

/// A cache that leaves.
pub(super) struct DepartingCache {
    pub(super) volume: Arc<Volume>,
    /// The layer, whose part is given back at the end.
    layer: Uuid,
    cache: Cache,
    /// What it did with writes before the move.
    mode: CacheMode,
    options: CacheTransferOptions,
    /// None if it stays behind.
    departure: Option<CacheDeparture>,
}

/// How a transfer works, as it was asked for.
fn options_of(request: &CacheTransferRequest) -> Result<CacheTransferOptions> {
    let way = match request.transfer {
        v1::CacheTransfer::None => CacheWay::None,
        v1::CacheTransfer::Cachemior => CacheWay::Cachemior,
        v1::CacheTransfer::Firepan => CacheWay::Firepan,
        v1::CacheTransfer::FirepanIf => CacheWay::FirepanIf,
        v1::CacheTransfer::RemoteRead => CacheWay::RemoteRead,
        v1::CacheTransfer::Hybrid => CacheWay::Hybrid,
        v1::CacheTransfer::Unknown => {
            let hint = "none, cachemior, firepan, firepan-if, remote-read and hybrid are those that there are";
            return Err(invalid("this is no way for a cache to go", hint));
        }
    };
    let warm_start = match request.warm_start {
        v1::CacheWarmStart::Memory => WarmStart::WithMemory,
        v1::CacheWarmStart::Switchover | v1::CacheWarmStart::Unknown => WarmStart::AfterSwitchover,
    };
    let defaults = CacheTransferOptions::default();
    Ok(CacheTransferOptions {
        way,
        warm_start,
        in_flight: request.in_flight.map_or(defaults.in_flight, |count| count.clamp(1, 1024)),
        time_ms_max: request.time_ms.unwrap_or(defaults.time_ms_max),
        ..defaults
    })
}

/// The cache that a shared disk has, if that is its one layer, and goes with it.
pub(super) fn lone_cache(document: &VolumeDocument) -> Option<(Uuid, &CacheLayer)> {
    let [layer] = &document.layers[..] else { return None };
    Some((layer.id, layer.cache()?))
}

/// What the target is told of the cache of a disk that stays where it is. None if it has none.
pub(super) fn arriving_cache(document: &VolumeDocument, request: &VmMoveRequest) -> Result<Option<ArrivingCache>> {
    let Some((_, layer)) = lone_cache(document) else { return Ok(None) };
    let options = options_of(&request.caches)?;
    if options.warm_start == WarmStart::WithMemory {
        let is_export = matches!(document.backend, crate::location::Location::Foreign(_));
        if options.way != CacheWay::Cachemior || !is_export {
            let message = format!("the cache of {} cannot be warmed beside the memory", document.name);
            return Err(invalid(
                message,
                "that needs `--cache-transfer cachemior` and a volume on an NBD export: a host's page cache could keep older bytes \
                 of a file or block device",
            ));
        }
    }
    let cache = request.caches.at.clone().unwrap_or_else(|| layer.cache.clone());
    Ok(Some(ArrivingCache { layer: CacheLayer { cache, trust: CacheTrust::Dirty, ..layer.clone() }, options }))
}

impl Daemon {
    /// Makes the caches of those disks ready that stay where they are: nothing is dirty in them from here on. When this fails they are as
    /// before.
    pub(super) async fn ready_caches(
        &self,
        volumes: &[Arc<Volume>],
        request: &VmMoveRequest,
    ) -> Result<Vec<DepartingCache>> {
        let mut ready = Vec::new();
        for volume in volumes {
            match self.ready_cache(volume, request).await {
                Ok(cache) => ready.extend(cache),
                Err(error) => {
                    for cache in &ready {
                        self.keep_cache(cache).await;
                    }
                    return Err(error);
                }
            }
        }
        Ok(ready)
    }

    async fn ready_cache(&self, volume: &Arc<Volume>, request: &VmMoveRequest) -> Result<Option<DepartingCache>> {
        let document = volume.document();
        let is_shared = document.job.as_ref().is_some_and(|job| job.target.is_shared());
        let Some((layer, set)) = lone_cache(&document).filter(|_| is_shared) else { return Ok(None) };
        let stacked = volume.with_stack(|stack| stack.cache().cloned()).flatten();
        let Some(stacked) = stacked else { return Ok(None) };
        let options = options_of(&request.caches)?;
        let cache = stacked.filter();
        if set.mode == CacheMode::WriteBack
            && let Err(error) = cache.set_mode(CacheMode::WriteThrough).await
        {
            let _ = cache.set_mode(CacheMode::WriteBack).await;
            return Err(of_backend(
                &error,
                &format!("bringing what only the cache of {} has to its backend", volume.name),
            ));
        }
        let is_alone = options.way != CacheWay::None;
        let departure = is_alone.then(|| CacheDeparture::new(Arc::clone(&self.env), cache.clone(), options.clone()));
        if departure.is_some() {
            self.lent_parts.lock().insert(layer);
        }
        Ok(Some(DepartingCache { volume: Arc::clone(volume), layer, cache, mode: set.mode, options, departure }))
    }

    /// The machine stays here, and so does the cache.
    pub(super) async fn keep_cache(&self, departing: &DepartingCache) {
        self.lent_parts.lock().remove(&departing.layer);
        // As it was, unless somebody has changed that since.
        if departing.mode == CacheMode::WriteBack
            && let Err(error) = departing.cache.set_mode(CacheMode::WriteBack).await
        {
            tracing::error!(volume = departing.volume.name, error = error.chain(), "a cache does not write back again");
        }
    }

    /// The target has enough, or nothing comes of it: the part is somebody else's to have.
    fn return_part(&self, volume: &Volume, layer: Uuid) {
        self.lent_parts.lock().remove(&layer);
        let document = self.volume(&volume.name).ok().map(|volume| volume.document());
        let is_named = document.is_some_and(|document| document.layers_named().any(|named| named.id == layer));
        if !is_named {
            self.caches.give_back(layer);
        }
    }
}

impl MachineMove {
    /// Has the target's caches filled from now on.
    pub(super) fn begin_caches(self: &Arc<Self>, daemon: &Arc<Daemon>) {
        for departing in &self.caches {
            let Some(departure) = departing.departure.clone() else { continue };
            let (moving, other, env) = (Arc::clone(self), Arc::clone(daemon), Arc::clone(&daemon.env));
            let (volume, layer) = (Arc::clone(&departing.volume), departing.layer);
            env.spawn(Box::pin(async move {
                moving.serve_cache(&other, &volume, &departure).await;
                if moving.is_committed() {
                    tracing::info!(volume = volume.name, "the transfer of a cache is over");
                    other.return_part(&volume, layer);
                }
            }));
        }
    }

    /// Serves the target over one connection after the other, until it has enough or the move is undone.
    async fn serve_cache(&self, daemon: &Arc<Daemon>, volume: &Volume, departure: &CacheDeparture) {
        let mut lost: Option<Moment> = None;
        while !departure.is_enough() {
            if self.is_over() && !self.is_committed() {
                return;
            }
            let connecting = async {
                let mut other = daemon.hosts.machine_connection(self.host(), 0).await?;
                call(&mut other, self.host(), Ask::Cache { id: self.id, volume: volume.name.clone() }).await?;
                Ok::<_, Error>(other)
            };
            match env::timeout(&*daemon.env, HOLD_LIMIT, connecting).await {
                Some(Ok(transport)) => {
                    lost = None;
                    if let Err(error) = departure.run(transport).await {
                        tracing::info!(volume = volume.name, %error, "the connection of a cache's transfer is lost");
                    }
                }
                Some(Err(error)) if error.code == ErrorCode::NotFound && self.is_committed() => return,
                Some(Err(error)) => tracing::info!(volume = volume.name, %error, "a cache waits for its target"),
                None => {}
            }
            let now = daemon.env.now();
            let since = *lost.get_or_insert(now);
            if self.is_committed() && now.since(since) > GONE_LIMIT {
                return;
            }
            daemon.env.sleep(REST).await;
        }
    }

    /// Waits until the guest would hit at the target as it does here.
    pub(super) async fn await_caches(&self, daemon: &Daemon) -> Result<()> {
        let waits = |departing: &DepartingCache| {
            let is_warm = || departing.departure.as_ref().is_none_or(|departure| departure.share_there() >= SHARE_MIN);
            departing.options.way == CacheWay::Hybrid && !is_warm()
        };
        // Without a limit that was asked for it is that of what there is to copy, which is known once the target is connected.
        let asked = self.request.caches.wait_ms.map(Duration::from_millis);
        let departures = || self.caches.iter().filter_map(|departing| departing.departure.as_ref());
        let limit = || asked.or_else(|| departures().map(CacheDeparture::wait_max).max()).unwrap_or_default();
        let began = daemon.env.now();
        while self.caches.iter().any(waits) && daemon.env.now().since(began) < limit() {
            daemon.env.sleep(LOOK).await;
        }
        if self.caches.iter().any(|departing| departing.options.way == CacheWay::Hybrid) {
            self.note_cache_wait(daemon.env.now().since(began));
        }
        Ok(())
    }

    /// The guest is stopped: with `firepan` it waits until all has come.
    pub(super) async fn copy_caches_held(&self) {
        let held = self.caches.iter().filter(|departing| departing.options.way == CacheWay::Firepan);
        join_all(held.filter_map(|departing| departing.departure.as_ref()).map(|departure| async move {
            departure.begin_copy();
            departure.whole().await;
        }))
        .await;
    }

    /// How long the stopped guest waits for the seal. With `firepan` it has waited for all that was copied, which an end here would waste.
    fn seal_limit(&self, way: CacheWay) -> Duration {
        match way {
            CacheWay::Firepan => Duration::MAX,
            _ => self.downtime_limit().max(SEAL_LEAST),
        }
    }

    /// The disks are held: what has come may be believed.
    ///
    /// # Errors
    /// The backend lacks what a cache has.
    pub(super) async fn seal_caches(&self) -> Result<()> {
        for departing in &self.caches {
            if !departing.cache.holds_nothing() {
                let message = format!("the cache of {} holds what its backend lacks", departing.volume.name);
                return Err(
                    Error::new(ErrorCode::MoveFailed, message).with_hint("see its store, and move the VM again")
                );
            }
        }
        let sealing = self.caches.iter().filter_map(|departing| Some((departing, departing.departure.as_ref()?)));
        join_all(sealing.map(|(departing, departure)| async move {
            if let Err(error) = departure.seal(self.seal_limit(departing.options.way)).await {
                tracing::warn!(
                    volume = departing.volume.name,
                    error = error.chain(),
                    "a cache begins empty at its new host"
                );
            }
        }))
        .await;
        Ok(())
    }

    /// How the API shows them.
    pub(super) fn show_caches(&self) -> Vec<v1::CacheDeparture> {
        let shown = |departing: &DepartingCache| {
            let departure = departing.departure.as_ref()?;
            let (blocks_there, blocks) = departure.progress();
            Some(v1::CacheDeparture {
                volume: departing.volume.name.clone(),
                transfer: to_api_way(departing.options.way),
                blocks,
                blocks_there,
                hit_share: departure.share_there(),
                seal_ms: departure.last_seal().map(|seal| seal.took.as_secs_f64() * 1e3),
                sealed: departure.last_seal().map(|seal| seal.is_answered),
            })
        };
        self.caches.iter().filter_map(shown).collect()
    }
}
