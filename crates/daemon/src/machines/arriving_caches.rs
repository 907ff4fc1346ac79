//! The caches of a machine's shared disks, as they come to this host: whether there is room, and the connections that they come by. The rest
//! is in [`cache_arrival`](crate::stack).

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use migrate::CacheArrival;
use migrate::stream::BoxTransport;
use uuid::Uuid;

use super::channel::{Answer, send};
use crate::daemon::Daemon;
use crate::handed_over::handed_over;
use crate::problem::Result;
use crate::stack::{ArrivingCache, StackedCache, VolumeArrival};

impl Daemon {
    /// Refuses a cache for which there is no room here.
    pub(super) fn may_take_cache(&self, cache: &ArrivingCache) -> Result<()> {
        let hint = "make one there, name another by --cache-at, or remove the layer first: `transhume volume layer rm VOLUME cache`";
        let pool = self.caches.get(&cache.layer.cache).map_err(|error| error.with_hint(hint))?;
        pool.has_room(cache.layer.size).map_err(|error| error.with_hint(hint))
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
        if let Some(arrival) = volume.cache_arrival.lock().as_ref().and_then(|coming| coming.by(host, id)) {
            return Ok(arrival);
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
        let by = (host.to_owned(), id);
        let coming = VolumeArrival::new(&self.env, by.clone(), stacked, &asked);
        let arrival = coming.by(&by.0, by.1).ok_or_else(none)?;
        *volume.cache_arrival.lock() = Some(coming);
        if let Some(base) = volume.incoming.lock().as_ref().map(|incoming| incoming.open_backend.device.clone()) {
            let warming = arrival.clone();
            self.env.spawn(Box::pin(async move { warming.warm_before(base).await }));
        }
        Ok(arrival)
    }
}
