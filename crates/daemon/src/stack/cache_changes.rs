//! A volume's cache comes, changes and goes, while the guest works.
//!
//! ```text
//!   add      part taken ──▶ made, empty ──▶ layer on record ──▶ guest held, cache in, guest goes on
//!   to write-back      on record: may hold ──▶ writes go to the flash
//!   from write-back    writes go to the backend ──▶ all that was dirty is durable there ──▶ on record: clean
//!   rm       on record: draining ──▶ drained ──▶ on record: gone ──▶ guest held, cache out, guest goes on ──▶ off the record
//!            ──▶ part given back
//! ```
//!
//!   set --mode write-back while it drains    on record: may hold ──▶ it stays, and `rm` has not happened
//!
//! Each step of `rm` can be done again. *Gone* is on record before the guest writes past the cache: a start after that does not believe
//! what the partition still caches. One that is clean begins there.

use std::sync::Arc;

use api::v1::{self, Error, ErrorCode, LayerChangeRequest};
use block::{Bytes, Quiesced, Slot};
use filters::{CacheMode, CachePolicy};
use uuid::Uuid;

use super::Stack;
use super::cache::{FoundCache, StackedCache, state_of};
use super::redirect_changes::refuse_redirected;
use super::snapshots::hold_clients;
use crate::caches::{of_api_mode, of_api_policy};
use crate::daemon::Daemon;
use crate::document::{
    AdoptionDirection, CacheLayer, CacheTrust, LayerDocument, LayerKind, LayerState, VolumeDocument, random_uuid,
};
use crate::location::Location;
use crate::problem::{Result, invalid, of_backend};
use crate::volume::Volume;

/// The unit of caching if nothing is said.
const BLOCK_DEFAULT: u64 = 4 << 10;
/// Longer sequential reads are not cached if nothing is said.
const SEQUENTIAL_DEFAULT: u64 = 4 << 20;

/// A cache that is asked for.
pub(super) struct Asked {
    pub(super) cache: String,
    pub(super) size_bytes: u64,
    pub(super) mode: Option<v1::CacheMode>,
    pub(super) policy: Option<v1::CachePolicy>,
    pub(super) block_bytes: Option<u64>,
    pub(super) sequential_bytes: Option<u64>,
}

impl Asked {
    /// What would be on record of it; `policy` is that of the cache.
    fn layer(self, epoch: u64, policy: CachePolicy) -> Result<CacheLayer> {
        let block = self.block_bytes.unwrap_or(BLOCK_DEFAULT);
        if !block.is_power_of_two() || !(4 << 10..=64 << 10).contains(&block) {
            return Err(invalid(format!("{block} bytes cannot be the unit of a cache"), "give 4KiB to 64KiB"));
        }
        Ok(CacheLayer {
            cache: self.cache,
            epoch,
            size: self.size_bytes,
            mode: self.mode.map_or(Ok(CacheMode::default()), of_api_mode)?,
            policy: self.policy.map_or(Ok(policy), of_api_policy)?,
            block,
            sequential: self.sequential_bytes.unwrap_or(SEQUENTIAL_DEFAULT),
            trust: CacheTrust::Whole,
        })
    }
}

/// Refuses a cache for a volume that cannot have one now.
fn check_cacheable(volume: &Volume, document: &VolumeDocument) -> Result<()> {
    let name = &volume.name;
    volume.refuse_moving()?;
    if let Some((_, cache)) = document.cache_layer() {
        return Err(Error::new(ErrorCode::AlreadyExists, format!("{name} has the cache {} already", cache.cache))
            .with_hint(format!("`transhume volume layer set {name} cache` changes it")));
    }
    if document.read_only {
        return Err(Error::new(ErrorCode::ReadOnly, format!("{name} is read-only"))
            .with_hint("attach it without --read-only: a cache is for a volume that its guest writes"));
    }
    if let Location::Remote(remote) = &document.backend {
        return Err(Error::new(ErrorCode::WrongState, format!("{remote} is a volume of another host"))
            .with_hint("add the cache on the host that holds the volume"));
    }
    if document.incoming.is_some() {
        return Err(Error::new(ErrorCode::InUse, format!("the host that {name} came from has not let go of it"))
            .with_hint("wait until that host lets it go"));
    }
    if document.room_to_grow().is_some() {
        return Err(invalid(
            format!("{name} is a container that grows, and a cache is of one size"),
            "caches need an image in the format raw",
        ));
    }
    let is_ours = |adoption: &crate::document::AdoptionDocument| adoption.direction == AdoptionDirection::Adopted;
    if !document.adoption.as_ref().is_none_or(is_ours) {
        return Err(Error::new(ErrorCode::WrongState, format!("{name} is on its way from or to its VM"))
            .with_hint("wait until its adoption or release is over"));
    }
    refuse_redirected(document)
}

/// Refuses what the guest could not do any more with a cache in its path: it has been told what requests it may ask.
fn check_geometry(stacked: &StackedCache, base: &block::Device) -> Result<()> {
    let (needed, taken) = (stacked.device.geometry(), base.geometry());
    if needed.request_alignment > taken.request_alignment {
        let (needed, taken) = (needed.request_alignment, taken.request_alignment);
        let message = format!("the cache takes requests of {needed} bytes, and the guest's are of {taken}");
        return Err(Error::new(ErrorCode::BackendUnusable, message).with_hint("make its store with cache=page"));
    }
    if needed.transfer_bytes_max < taken.transfer_bytes_max || needed.read_only {
        let message = "the store of the cache takes no requests as large as the guest's, or is read-only";
        return Err(Error::new(ErrorCode::BackendUnusable, message).with_hint("use another file or block device"));
    }
    Ok(())
}

impl Volume {
    /// The joint directly over what the backend or its cache shows.
    fn ground_joint(&self) -> Result<Slot> {
        let slot = self.require_up()?;
        Ok(self.with_stack(|stack| stack.joints.first().cloned()).flatten().unwrap_or(slot))
    }

    /// Changes what lies directly over the backend while nobody is at [`ground_joint`](Self::ground_joint).
    fn reground<T>(&self, quiesced: &Quiesced, change: impl FnOnce(&mut Stack) -> T) -> Option<T> {
        let (changed, ground) = self.with_stack(|stack| {
            assert!(stack.copy.is_none(), "layers do not change while a migration copies them");
            (change(stack), stack.ground())
        })?;
        quiesced.swap(ground);
        Some(changed)
    }

    /// Cache `id`, if it is in the guest's path.
    fn stacked_cache(&self, id: Uuid) -> Option<StackedCache> {
        self.with_stack(|stack| stack.cache().filter(|stacked| stacked.id == id).cloned()).flatten()
    }

    async fn note_cache(&self, id: Uuid, change: impl FnOnce(&mut CacheLayer, &mut LayerState) + Send) -> Result<()> {
        let stored = self.journal.update(|document| document.change_cache(id, change));
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
    }
}

impl Daemon {
    /// Puts a cache into the path of a volume's guest.
    pub(super) async fn add_cache(self: &Arc<Self>, name: &str, asked: Asked) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        volume.require_up()?;
        let document = volume.document();
        check_cacheable(&volume, &document)?;
        let pool = self.caches.get(&asked.cache)?;
        let cache = asked.layer(document.epoch, pool.policy())?;
        if document.id.is_none() {
            // The partition is believed under it.
            let id = random_uuid(&*self.env);
            let stored = volume.journal.update(|document| _ = document.id.get_or_insert(id)).await;
            stored.map_err(|error| of_backend(&error, "the volume's journal"))?;
        }
        let id = random_uuid(&*self.env);
        let layer = LayerDocument { id, state: state_of(cache.mode), kind: LayerKind::Cache(cache.clone()) };
        pool.take(id, name, cache.size)?;
        match self.make_cache(&volume, &layer).await {
            Ok(stacked) => self.insert_cache(&volume, layer, stacked).await,
            Err(error) => {
                self.caches.give_back(id);
                Err(error)
            }
        }?;
        Ok(volume.show())
    }

    /// Makes an empty cache and opens it.
    async fn make_cache(&self, volume: &Volume, layer: &LayerDocument) -> Result<StackedCache> {
        let base = volume.with_backend(|open_backend| open_backend.device.clone());
        let base = base.ok_or_else(|| Error::new(ErrorCode::WrongState, format!("{} is down", volume.name)))?;
        let stacked = StackedCache::make(&base, layer, &volume.journal, &self.overlay_context()).await?;
        if let Err(error) = check_geometry(&stacked, &base) {
            stacked.close().await;
            return Err(error);
        }
        Ok(stacked)
    }

    /// Puts an empty cache on record and into the guest's path.
    async fn insert_cache(&self, volume: &Volume, layer: LayerDocument, stacked: StackedCache) -> Result<()> {
        let (id, may_hold) = (layer.id, layer.may_hold());
        let insert = |document: &mut VolumeDocument| document.layers.insert(0, layer);
        let stored = match may_hold {
            true => volume.journal.begin_holding(insert).await,
            false => volume.journal.update(insert).await,
        };
        if let Err(error) = stored {
            // Whether it is on record the next start finds out; nothing is in it.
            stacked.close().await;
            return Err(of_backend(&error, "the volume's journal"));
        }
        let held = match volume.ground_joint() {
            Ok(joint) => hold_clients(self, &joint).await,
            Err(error) => Err(error),
        };
        match held {
            Ok(quiesced) => {
                // The guest has written past it since it was opened.
                stacked.cache.note_base_written();
                stacked.begin(&self.env);
                let found = FoundCache { stacked: Some(stacked), ..FoundCache::default() };
                volume.reground(&quiesced, |stack| stack.put_cache(found));
                Ok(())
            }
            Err(error) => {
                stacked.close().await;
                strike(self, volume, id).await?;
                Err(error)
            }
        }
    }

    /// Changes a layer of a volume while its guest works; `layer` is its identity or its kind.
    pub(crate) async fn change_layer(&self, name: &str, layer: &str, asked: LayerChangeRequest) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let document = volume.document();
        let (found, cache) = find_cache(&document, layer)?;
        if asked.mode.is_none() && asked.size_bytes.is_none() {
            return Err(invalid("nothing is to be changed", "give --mode, --size, or both"));
        }
        volume.refuse_moving()?;
        let calls_off = found.state == LayerState::Draining && asked.size_bytes.is_none();
        if !(calls_off && asked.mode == Some(v1::CacheMode::WriteBack)) {
            super::refuse_draining(&document)?;
        }
        let Some(stacked) = volume.stacked_cache(found.id).filter(|_| cache.trust != CacheTrust::Gone) else {
            return Err(Error::new(ErrorCode::WrongState, format!("the cache of {name} is not in use"))
                .with_hint(format!("`transhume volume show {name}` says why")));
        };
        if let Some(size) = asked.size_bytes {
            self.resize_cache(&volume, (&stacked, cache), size).await?;
        }
        if let Some(mode) = asked.mode {
            change_mode(&volume, &stacked, of_api_mode(mode)?).await?;
        }
        Ok(volume.show())
    }

    /// Has a cache use `size` bytes of its part.
    async fn resize_cache(
        &self,
        volume: &Volume,
        (stacked, cache): (&StackedCache, &CacheLayer),
        size: u64,
    ) -> Result<()> {
        let pool = self.caches.get(&cache.cache)?;
        let most = pool.part_bytes(stacked.id);
        if most.is_none_or(|most| size > most) {
            let message = format!("the part that {} has of the cache {} is smaller", volume.name, cache.cache);
            return Err(Error::new(ErrorCode::NoSpace, message).with_hint(
                "remove the layer and add it with a larger --size: what it holds goes to the backend first",
            ));
        }
        let places = stacked.cache.header().places_of(Bytes(size));
        if places == 0 {
            return Err(invalid("that is less than one block", "give a larger --size, or remove the layer"));
        }
        let resized = stacked.cache.resize(places).await;
        resized.map_err(|error| of_backend(&error, "resizing the cache"))?;
        volume.note_cache(stacked.id, |cache, _| cache.size = size).await
    }

    /// Begins to take a cache out. What only it has goes to the backend first: that goes on after this has returned, and after a
    /// restart.
    pub(super) async fn remove_cache(self: &Arc<Self>, volume: &Arc<Volume>, layer: &LayerDocument) -> Result<()> {
        volume.refuse_moving()?;
        if !layer.may_hold() {
            return take_out(self, volume, layer.id).await;
        }
        volume.require_up()?;
        volume.note_cache(layer.id, |_, state| *state = LayerState::Draining).await?;
        self.drain_aside(volume, layer.id);
        Ok(())
    }

    /// Takes a cache out with all that only it has, which is lost. No client is connected: it would find older bytes than it has
    /// written.
    pub(super) async fn discard_cache(&self, name: &str, layer: &str) -> Result<v1::Volume> {
        const HINT: &str = "stop the guest first: it would find older bytes than it has written";
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let document = volume.document();
        let (found, _) = find_cache(&document, layer)?;
        let id = found.id;
        volume.refuse_moving()?;
        volume.refuse_connected(HINT)?;
        let stacked = volume.stacked_cache(id);
        let quiesced = match &stacked {
            Some(_) => Some(hold_clients(self, &volume.ground_joint()?).await?),
            None => None,
        };
        // Who came meanwhile has been answered nothing yet, or is refused here.
        volume.refuse_connected(HINT)?;
        note_gone(&volume, id).await?;
        if let Some(quiesced) = quiesced {
            volume.reground(&quiesced, |stack| stack.put_cache(FoundCache::default()));
        }
        if let Some(stacked) = stacked {
            stacked.close().await;
        }
        strike(self, &volume, id).await?;
        Ok(volume.show())
    }

    /// Has everything that only a cache has durably in the backends of its volumes, and changes nothing else.
    pub(crate) async fn drain_cache(&self, name: &str) -> Result<v1::Cache> {
        let pool = self.caches.get(name)?;
        let partitions = pool.document().partitions.clone();
        for partition in partitions {
            let Some(volume) = self.volume_if_any(&partition.volume)? else { continue };
            let layer_of = |document: &VolumeDocument| {
                let found = document.cache_layer().filter(|(layer, _)| layer.id == partition.layer);
                found.map(|(layer, cache)| (layer.clone(), cache.mode))
            };
            let Some((layer, _)) = layer_of(&volume.document()) else { continue };
            match volume.stacked_cache(layer.id) {
                Some(stacked) => {
                    // As long as it takes: others may change the volume meanwhile.
                    let drained = stacked.cache.drain().await;
                    // As long as that takes, too: what the drain has changed is taken back.
                    let _operation = volume.operation.lock().await;
                    let staying = layer_of(&volume.document()).filter(|(layer, _)| layer.state != LayerState::Draining);
                    // Nothing becomes dirty while it is drained: from here on that goes on as it is on record.
                    let again = match staying {
                        Some((_, mode)) if drained.is_ok() || mode == CacheMode::WriteBack => {
                            stacked.cache.set_mode(mode).await
                        }
                        _ => Ok(()),
                    };
                    drained.and(again).map_err(|error| of_emptying(&volume, &error))?;
                }
                None if layer.may_hold() => {
                    let message = format!("{} is down, and its cache holds what its backend lacks", volume.name);
                    return Err(Error::new(ErrorCode::WrongState, message)
                        .with_hint(format!("`transhume volume show {}` says why", volume.name)));
                }
                None => {}
            }
        }
        Ok(self.show_cache(&pool))
    }
}

/// The cache of a volume, which `layer` names by its kind or by its identity.
fn find_cache<'a>(document: &'a VolumeDocument, layer: &str) -> Result<(&'a LayerDocument, &'a CacheLayer)> {
    let name = &document.name;
    let found = document.cache_layer().filter(|(found, _)| layer == "cache" || found.id.to_string() == layer);
    found.ok_or_else(|| {
        Error::new(ErrorCode::NotFound, format!("{name} has no cache {layer}")).with_hint(format!(
            "`transhume volume layer ls {name}` lists its layers; this is for caches and surrogates"
        ))
    })
}

fn of_emptying(volume: &Volume, error: &block::Error) -> Error {
    of_backend(error, &format!("emptying the cache of {}", volume.name)).with_hint(format!(
        "it is tried again by itself, and nothing of it is lost meanwhile; if the backend does not get well, `transhume volume layer \
         set {0} cache --mode write-back` calls the removal off, and `transhume move {0} --to PLACE` takes everything along",
        volume.name
    ))
}

/// Changes what a cache does with writes. What is on record is never less than what it may hold.
async fn change_mode(volume: &Volume, stacked: &StackedCache, mode: CacheMode) -> Result<()> {
    let id = stacked.id;
    if mode == CacheMode::WriteBack {
        let stored = volume.journal.begin_holding(|document| {
            document.change_cache(id, |cache, state| {
                cache.mode = mode;
                *state = LayerState::MayHold;
            });
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        return stacked.cache.set_mode(mode).await.map_err(|error| of_backend(&error, "changing the cache's mode"));
    }
    let changed = stacked.cache.set_mode(mode).await;
    // It holds what was dirty still if that has failed, and is on record as one that does.
    let is_clean = changed.is_ok() && stacked.cache.holds_nothing();
    volume
        .note_cache(id, |cache, state| {
            cache.mode = mode;
            if is_clean {
                *state = LayerState::Clean;
            }
        })
        .await?;
    changed.map_err(|error| of_emptying(volume, &error))
}

/// Empties cache `id` into the backend, and takes it out. Every step can be done again.
pub(super) async fn drain(daemon: &Arc<Daemon>, volume: &Arc<Volume>, id: Uuid) -> Result<()> {
    if let Some(stacked) = volume.stacked_cache(id) {
        stacked.cache.drain().await.map_err(|error| of_emptying(volume, &error))?;
        if volume.slot().is_none() {
            // The volume was taken down: the next start goes on.
            return Ok(());
        }
    }
    let _operation = volume.operation.lock().await;
    if !volume.document().layers.iter().any(|layer| layer.id == id && super::drain::is_leaving(layer)) {
        return stay(volume, id).await;
    }
    take_out(daemon, volume, id).await
}

/// The removal of cache `id` was called off while it was emptied: it works as it is on record.
async fn stay(volume: &Volume, id: Uuid) -> Result<()> {
    let document = volume.document();
    let found = document.cache_layer().filter(|(layer, cache)| layer.id == id && cache.mode == CacheMode::WriteBack);
    if let Some((stacked, (_, cache))) = volume.stacked_cache(id).zip(found) {
        let changed = stacked.cache.set_mode(cache.mode).await;
        changed.map_err(|error| of_backend(&error, "changing the cache's mode"))?;
    }
    Ok(())
}

/// Takes cache `id`, which holds nothing that the backend lacks, out of the guest's path, off the record, and gives its part back.
async fn take_out(daemon: &Daemon, volume: &Volume, id: Uuid) -> Result<()> {
    let stacked = volume.stacked_cache(id);
    if stacked.as_ref().is_some_and(|stacked| !stacked.cache.may_be_taken_away()) {
        let message = format!("the cache of {} holds what its backend lacks", volume.name);
        return Err(Error::new(ErrorCode::Busy, message).with_hint("try again"));
    }
    // From here on nothing of it is believed: the guest is about to write past it.
    note_gone(volume, id).await?;
    if let Some(stacked) = stacked {
        let quiesced = hold_clients(daemon, &volume.ground_joint()?).await?;
        volume.reground(&quiesced, |stack| stack.put_cache(FoundCache::default()));
        drop(quiesced);
        stacked.close().await;
    }
    strike(daemon, volume, id).await
}

async fn note_gone(volume: &Volume, id: Uuid) -> Result<()> {
    volume
        .note_cache(id, |cache, state| {
            cache.trust = CacheTrust::Gone;
            *state = LayerState::Clean;
        })
        .await
}

/// Takes the layer, which is out of the guest's path, off the record, and gives its part back.
async fn strike(daemon: &Daemon, volume: &Volume, id: Uuid) -> Result<()> {
    let stored = volume.journal.update(|document| document.layers.retain(|kept| kept.id != id));
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
    daemon.lent_parts.give_back(&daemon.caches, &daemon.env, id);
    Ok(())
}
