//! Limits of what clients may ask for: a layer that holds nothing and stands before the meter. And how layers are shown, added and
//! removed.

use std::sync::Arc;

use api::v1::{self, Error, ErrorCode, LayerRequest};
use filters::RateLimits;

use super::cache_changes::Asked;
use super::redirect_changes::AskedRedirect;
use super::{StackedCache, StackedRedirect};
use crate::daemon::Daemon;
use crate::document::{LayerDocument, LayerKind, LayerState, ThrottleLayer, random_uuid};
use crate::problem::{Result, invalid, of_backend};
use crate::volume::Volume;

/// The least that a limit may be: less would keep clients waiting longer than they wait.
const IOPS_MIN: u64 = 1;
const BYTES_PER_SECOND_MIN: u64 = 4096;

impl Volume {
    /// Puts the limits on record in force.
    pub(crate) fn apply_limits(&self, layers: &[LayerDocument]) {
        let throttle = layers.iter().find_map(LayerDocument::throttle);
        let limits = throttle.map_or_else(RateLimits::default, |throttle| RateLimits {
            iops: throttle.iops,
            bytes_per_second: throttle.bytes_per_second,
        });
        self.meter.rate_limit().set(limits);
    }

    /// How the API shows its layers, the lowest first.
    pub(crate) fn show_layers(&self) -> Vec<v1::Layer> {
        let document = self.document();
        let held = |id| {
            self.with_stack(|stack| {
                let stacked = stack.overlays().iter().find(|stacked| stacked.id == id)?;
                Some(stacked.overlay.data_bytes().get())
            })
            .flatten()
        };
        let shown = document.layers.iter().map(|layer| match &layer.kind {
            LayerKind::Overlay(overlay) => v1::Layer {
                id: layer.id.to_string(),
                kind: v1::LayerKind::Overlay,
                name: overlay.name.clone(),
                state: show_state(layer.state),
                created_unix_ms: Some(overlay.created_unix_ms),
                held_bytes: held(layer.id),
                ..v1::Layer::default()
            },
            LayerKind::Throttle(throttle) => v1::Layer {
                id: layer.id.to_string(),
                kind: v1::LayerKind::Throttle,
                name: "throttle".to_owned(),
                state: show_state(layer.state),
                iops: throttle.iops,
                bytes_per_second: throttle.bytes_per_second,
                ..v1::Layer::default()
            },
            LayerKind::Redirect(redirect) => v1::Layer {
                id: layer.id.to_string(),
                kind: v1::LayerKind::Redirect,
                name: redirect.surrogate.clone(),
                state: show_state(layer.state),
                held_bytes: self.with_stack(|stack| stack.redirect().map(StackedRedirect::held_bytes)).flatten(),
                ..v1::Layer::default()
            },
            LayerKind::Cache(cache) => v1::Layer {
                id: layer.id.to_string(),
                kind: v1::LayerKind::Cache,
                name: cache.cache.clone(),
                state: show_state(layer.state),
                held_bytes: self.with_stack(|stack| stack.cache().map(StackedCache::held_bytes)).flatten(),
                cached: Some(self.show_cache(layer, cache)),
                ..v1::Layer::default()
            },
        });
        shown.collect()
    }
}

/// Whether `layer` names this one, by its identity or by its kind.
fn is_meant(found: &LayerDocument, layer: &str) -> bool {
    let kind = match &found.kind {
        LayerKind::Throttle(_) => "throttle",
        LayerKind::Cache(_) => "cache",
        LayerKind::Redirect(_) => "surrogate",
        // There may be many.
        LayerKind::Overlay(_) => return found.id.to_string() == layer,
    };
    kind == layer || found.id.to_string() == layer
}

const fn show_state(state: LayerState) -> v1::LayerState {
    match state {
        LayerState::Clean => v1::LayerState::Clean,
        LayerState::MayHold => v1::LayerState::MayHold,
        LayerState::Draining => v1::LayerState::Draining,
    }
}

impl Daemon {
    /// Adds a layer that users ask for.
    pub(crate) async fn add_layer(self: &Arc<Self>, name: &str, request: LayerRequest) -> Result<v1::Volume> {
        match request {
            LayerRequest::Throttle { iops, bytes_per_second } => {
                self.add_throttle(name, ThrottleLayer { iops, bytes_per_second }).await
            }
            LayerRequest::Cache { cache, size_bytes, mode, policy, block_bytes, sequential_bytes } => {
                let asked = Asked { cache, size_bytes, mode, policy, block_bytes, sequential_bytes };
                Box::pin(self.add_cache(name, asked)).await
            }
            LayerRequest::Surrogate { surrogate, popular_threshold, surrogate_on_flash, sole_copy } => {
                let asked =
                    AskedRedirect { surrogate, threshold: popular_threshold, on_flash: surrogate_on_flash, sole_copy };
                Box::pin(self.add_redirect(name, asked)).await
            }
        }
    }

    /// Limits what clients of a volume may ask for, or changes the limits that there are.
    async fn add_throttle(self: &Arc<Self>, name: &str, throttle: ThrottleLayer) -> Result<v1::Volume> {
        let ThrottleLayer { iops, bytes_per_second } = throttle;
        if iops.is_none() && bytes_per_second.is_none() {
            return Err(invalid("a throttle without a limit limits nothing", "give --iops, --bandwidth, or both"));
        }
        if iops.is_some_and(|iops| iops < IOPS_MIN) || bytes_per_second.is_some_and(|rate| rate < BYTES_PER_SECOND_MIN)
        {
            return Err(invalid(
                format!("a limit below {IOPS_MIN} request or {BYTES_PER_SECOND_MIN} bytes a second stops the guest"),
                "give a higher one",
            ));
        }
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let id = random_uuid(&*self.env);
        let new_volume_id = random_uuid(&*self.env);
        let stored = volume.journal.update(|document| {
            document.id.get_or_insert(new_volume_id);
            match document.layers.iter_mut().find(|layer| layer.throttle().is_some()) {
                Some(layer) => layer.kind = LayerKind::Throttle(throttle),
                None => document.layers.push(LayerDocument {
                    id,
                    kind: LayerKind::Throttle(throttle),
                    state: LayerState::Clean,
                }),
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        volume.apply_limits(&volume.document().layers);
        Ok(volume.show())
    }

    /// Takes a layer out with all that only it holds, which is lost; `layer` is its identity or its kind.
    pub(crate) async fn discard_layer(self: &Arc<Self>, name: &str, layer: &str) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        {
            let _operation = volume.begin_operation(&*self.env).await?;
            let document = volume.document();
            if let Some((found, _)) = document.redirect_layer().filter(|(found, _)| is_meant(found, layer)) {
                Box::pin(self.discard_redirect(&volume, found.id)).await?;
                return Ok(volume.show());
            }
        }
        Box::pin(self.discard_cache(name, layer)).await
    }

    /// Takes a layer out; `layer` is its identity or its kind. A cache or a surrogate that holds something is emptied first, which goes on after this
    /// has returned.
    pub(crate) async fn remove_layer(self: &Arc<Self>, name: &str, layer: &str) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let document = volume.document();
        let Some(found) = document.layers.iter().find(|found| is_meant(found, layer)) else {
            return Err(Error::new(ErrorCode::NotFound, format!("{name} has no layer {layer}"))
                .with_hint(format!("`transhume volume layer ls {name}` lists them")));
        };
        if let Some(overlay) = found.overlay() {
            return Err(invalid(
                format!("layer {layer} is the snapshot {}", overlay.name),
                format!("use `transhume volume snapshot rm {name} {}`", overlay.name),
            ));
        }
        if let Some(redirect) = found.redirect() {
            Box::pin(self.remove_redirect(&volume, (found, redirect))).await?;
            return Ok(volume.show());
        }
        if found.cache().is_some() {
            Box::pin(self.remove_cache(&volume, found)).await?;
            return Ok(volume.show());
        }
        let id = found.id;
        let stored = volume.journal.update(|document| document.layers.retain(|layer| layer.id != id));
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        volume.apply_limits(&volume.document().layers);
        Ok(volume.show())
    }
}
