//! A surrogate in a volume's stack: for as long as the volume is moved, or from when somebody adds it.
//!
//! The layer is on record as one that may hold bytes from before the guest's first write to it. An empty one on record that never came
//! into the path is opened like any other. How it comes and goes is in `redirect_changes`.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use api::v1::{self, Error, ErrorCode};
use block::{ChunkSize, Device};
use filters::{AccessCounts, Redirect, RedirectHeader, RedirectStatus, ReplicaPair};
use uuid::Uuid;

use super::Stack;
use crate::daemon::Daemon;
use crate::document::{LayerDocument, LayerState, RedirectLayer};
use crate::overlays::OverlayContext;
use crate::pools::{PartStores, Renewal};
use crate::problem::{Result, of_backend, of_holding};
use crate::surrogates::{Surrogate, SurrogateKind, SurrogatePart};
use crate::volume::Volume;

/// A redirection in its place, directly over the backend.
#[derive(Clone)]
pub(crate) struct StackedRedirect {
    /// What the record calls it.
    pub(super) id: Uuid,
    pub(super) redirect: Redirect,
    /// Held while something goes back to the backend. True once what it holds is given up: nothing goes back then.
    pub(super) is_discarded: Arc<tokio::sync::Mutex<bool>>,
    /// What holds its part, if that is in two stores.
    pub(super) pair: Option<ReplicaPair>,
    /// Begins generations of its part.
    renewal: Option<Arc<Renewal<SurrogateKind>>>,
    /// The same as the guest sees it.
    pub(crate) device: Device,
}

impl StackedRedirect {
    /// Opens the redirection of `layer` over `base`.
    pub(super) async fn open(
        base: Device,
        layer: &LayerDocument,
        redirect: &RedirectLayer,
        context: &OverlayContext,
    ) -> Result<Self> {
        let surrogate = context.surrogates.get(&redirect.surrogate)?;
        let opened = async {
            let SurrogatePart { device: partition, pair } = surrogate.partition(layer.id).await?;
            let header = Redirect::inspect(&partition).await?;
            let is_same_boot = Redirect::is_of_boot(&partition, &header, context.boot).await?;
            let popularity = Box::new(AccessCounts::new(header.chunk.count(header.volume), redirect.threshold));
            let stores = match &pair {
                Some(pair) => PartStores::Pair(pair.clone()),
                None => PartStores::Only(partition.clone()),
            };
            let opened = Redirect::open(Arc::clone(&context.env), base, partition, context.boot, popularity).await?;
            let renewal = header.owner_pages().map(|pages| Renewal::new(&surrogate, layer.id, pages, stores));
            if let Some(pair) = pair.as_ref().filter(|_| !is_same_boot) {
                // A power loss may have left other bytes in each store of what was not flushed.
                let (pair, extents) = (pair.clone(), opened.held_extents());
                pair.expect_unlike(&extents);
                context.env.spawn(Box::pin(async move {
                    if let Err(error) = pair.copy_to_second(&extents).await {
                        tracing::warn!(error = error.chain(), "two stores are made alike where they are read");
                    }
                }));
            }
            Ok((opened, pair, renewal.map(Arc::new)))
        };
        let lost = match surrogate.is_sole() {
            true => {
                "the surrogate holds what the guest has written last: put its store back as it was, which is looked for again and again; \
                 if it is lost for good, `transhume volume layer rm VOLUME surrogate --discard-dirty`"
            }
            false => {
                "the surrogate holds what the guest has written last: put one of its stores back as it was left, which is looked for \
                 again and again; the other one is repaired from it afterwards (`transhume surrogate repair`)"
            }
        };
        let (opened, pair, renewal) = opened.await.map_err(|error| of_holding(&error, "the surrogate's part", lost))?;
        if layer.state == LayerState::Draining {
            opened.begin_drain().await;
        }
        if let Some(renewal) = &renewal {
            context.env.spawn(Box::pin(Renewal::watch(Arc::downgrade(renewal), Arc::clone(&context.env))));
        }
        let device = Device::new(&format!("surrogate {}", redirect.surrogate), opened.clone());
        Ok(Self { id: layer.id, redirect: opened, is_discarded: Arc::default(), pair, renewal, device })
    }

    /// The process is about to end, and no guest asks for anything any more: a copy of a store that was made while the guest worked is not
    /// believed.
    pub(crate) async fn leave(self) {
        if let Some(renewal) = &self.renewal {
            renewal.leave().await;
        }
    }

    /// It is out of the guest's path: its part may be another's when this returns.
    pub(crate) async fn close(&self) {
        if let Some(renewal) = &self.renewal {
            renewal.close().await;
        }
    }

    /// The redirection itself.
    pub(crate) fn redirect(&self) -> Redirect {
        self.redirect.clone()
    }

    /// What it has done and holds.
    pub(crate) fn show(&self) -> v1::Redirection {
        shown(&self.redirect.status())
    }

    /// How many bytes it may hold that the backend lacks: all of each chunk of which it has something.
    pub(super) fn held_bytes(&self) -> u64 {
        self.redirect.status().places_dirty * self.redirect.header().chunk.bytes()
    }
}

const fn shown(status: &RedirectStatus) -> v1::Redirection {
    v1::Redirection {
        reads_redirected: status.reads_redirected,
        reads_merged: status.reads_merged,
        reads_at_source: status.reads_at_source,
        writes_redirected: status.writes_redirected,
        writes_at_source: status.writes_at_source,
        chunks_fetched: status.chunks_fetched,
        fetched_bytes: status.fetched_bytes,
        places: status.places,
        places_free: status.places_free,
        places_cached: status.places_cached,
        places_dirty: status.places_dirty,
        index_bytes: status.index_bytes,
        has_failed: status.has_failed,
    }
}

/// Opens the redirection among `layers`, if there is one, over `base`, which a move had left.
pub(crate) async fn reopen_redirect(
    base: &Device,
    layers: &[LayerDocument],
    context: &OverlayContext,
) -> Result<Option<StackedRedirect>> {
    let mut found = layers.iter().filter_map(|layer| Some((layer, layer.redirect()?)));
    match found.next() {
        Some((layer, redirect)) => StackedRedirect::open(base.clone(), layer, redirect, context).await.map(Some),
        None => Ok(None),
    }
}

impl Stack {
    /// Opens the redirection among `layers`, if there is one.
    pub(super) async fn open_redirect(&mut self, layers: &[LayerDocument], context: &OverlayContext) -> Result<()> {
        self.redirect = reopen_redirect(&self.open_backend.device, layers, context).await?;
        Ok(())
    }

    /// The redirection to a surrogate, if there is one.
    pub(crate) const fn redirect(&self) -> Option<&StackedRedirect> {
        self.redirect.as_ref()
    }

    /// The target holds the volume: what the surrogate holds is of no use any more. Whoever takes it closes it.
    pub(crate) const fn take_redirect(&mut self) -> Option<StackedRedirect> {
        self.redirect.take()
    }

    /// The source holds the volume again, with what the surrogate holds.
    pub(crate) fn restore_redirect(&mut self, redirect: Option<StackedRedirect>) {
        self.redirect = redirect;
    }
}

impl Volume {
    /// The move that has put something between its surrogate and its source is over, and has closed that.
    pub(crate) fn reach_source_directly(&self) {
        if let Some(redirect) = self.with_stack(|stack| stack.redirect().map(StackedRedirect::redirect)).flatten() {
            redirect.reach_source_directly();
        }
    }

    /// What its redirection to a surrogate has done and holds, if it has one.
    pub(crate) fn redirection(&self) -> Option<v1::Redirection> {
        self.with_stack(|stack| stack.redirect().map(StackedRedirect::show)).flatten()
    }
}

impl Daemon {
    /// Whether a surrogate would spare the disk that holds `image` anything, or shall be used all the same.
    pub(crate) fn surrogate_helps(&self, image: &Path, on_flash: bool) -> bool {
        spares_head(on_flash, self.is_rotational_at(image))
    }

    /// How the API shows a surrogate: with what the volumes do with their parts of it.
    pub(crate) fn show_surrogate(&self, surrogate: &Surrogate) -> v1::Surrogate {
        // Before what is on record is read: otherwise a copy that is done in between would look like one that has failed.
        let partitions = surrogate.document().partitions.clone();
        let left: HashMap<String, u64> = partitions
            .into_iter()
            .filter_map(|partition| Some((self.rebuild_left_bytes(&partition.volume)?, partition.volume)))
            .map(|(left_bytes, volume)| (volume, left_bytes))
            .collect();
        let mut shown = surrogate.show();
        for partition in &mut shown.partitions {
            partition.rebuild_left_bytes = left.get(&partition.volume).copied();
            let volume = self.volume_if_any(&partition.volume).ok().flatten();
            partition.redirection = volume.and_then(|volume| volume.redirection());
        }
        shown
    }

    /// How much is to be copied still to the store that a volume's part of a surrogate has lost, while that goes on.
    fn rebuild_left_bytes(&self, volume: &str) -> Option<u64> {
        let volume = self.volume_if_any(volume).ok().flatten()?;
        let stacked = volume.with_stack(|stack| stack.redirect().cloned()).flatten()?;
        let status = stacked.pair?.status();
        status.rebuilt.map(|_| status.unsettled_bytes)
    }

    /// How the API shows all of them.
    pub(crate) fn shown_surrogates(&self) -> Vec<v1::Surrogate> {
        self.surrogates.list().iter().map(|surrogate| self.show_surrogate(surrogate)).collect()
    }
}

/// Whether a surrogate spares the volume's disk anything: its head. Where the kernel knows of no disk, it may.
pub(super) fn spares_head(on_flash: bool, is_rotational: Option<bool>) -> bool {
    on_flash || is_rotational != Some(false)
}

/// Makes the redirection `id` of what `base` holds in `partition`.
pub(super) async fn make_header(base: &Device, partition: &Device, (id, chunk_bytes): (Uuid, u64)) -> Result<()> {
    let largest = base.geometry().transfer_bytes_max.min(partition.geometry().transfer_bytes_max);
    // No larger than a request may be.
    let chunk_bytes = chunk_bytes.min(largest.checked_ilog2().map_or(0, |log2| 1 << log2));
    let header = ChunkSize::new(chunk_bytes)
        .and_then(|chunk| RedirectHeader::new(base.size(), chunk, partition.size(), *id.as_bytes()));
    let header = header.ok_or_else(|| {
        Error::new(ErrorCode::NoSpace, format!("{} is too small for the volume", partition.name()))
            .with_hint("make the surrogate with a larger --partition")
    })?;
    Redirect::create(partition, &header).await.map_err(|error| of_backend(&error, "the surrogate"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_a_head_has_a_surrogate_only_if_that_is_wanted() {
        let used = [Some(true), Some(false), None].map(|is_rotational| spares_head(false, is_rotational));
        assert_eq!(used, [true, false, true]);
        assert!(spares_head(true, Some(false)));
    }
}
