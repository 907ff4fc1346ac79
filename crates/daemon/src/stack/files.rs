//! The files of a volume's layers: `.NAME.layer.overlay-NUMBER`, beside the image or in a directory that the user names.

use std::path::Path;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use block::{Bytes, Device};
use env::Env;

use crate::document::{LayerDocument, LayerKind, OverlayLayer, layers_beside};
use crate::overlays::OverlayContext;
use crate::platform::{OverlayBackends, OverlayOpening};
use crate::problem::{Result, of_state};

/// The overlays among `layers`, the lowest first.
fn overlays(layers: &[LayerDocument]) -> impl Iterator<Item = &OverlayLayer> {
    layers.iter().filter_map(LayerDocument::overlay)
}

fn opening(env: &dyn Env, lock_wait: Duration) -> OverlayOpening<'_> {
    OverlayOpening { lock_wait, reserve: false, known: None, env }
}

/// Notes which files the overlays among `layers` are that have none on record, over the volume that `image` holds. They are open.
pub(crate) fn note_layer_files(backends: &dyn OverlayBackends, layers: &mut [LayerDocument], image: &Path) {
    for overlay in layers.iter_mut().filter_map(LayerDocument::overlay_mut).filter(|overlay| overlay.file.is_none()) {
        overlay.file = backends.overlay_identity(&overlay.beside(image), overlay.number).map(Box::new);
    }
}

/// Opens the files of the overlays among `layers`, over the volume that `image` holds.
///
/// # Errors
/// One of them is not there or is another file, or somebody else has it.
pub(crate) async fn open_layer_files(
    layers: &[LayerDocument],
    image: &Path,
    context: &OverlayContext,
    lock_wait: Duration,
) -> block::Result<Vec<Device>> {
    let mut files = Vec::new();
    for overlay in overlays(layers) {
        let opening = OverlayOpening { known: overlay.file.as_deref(), ..opening(&*context.env, lock_wait) };
        files.push(context.backends.open_overlay(&overlay.beside(image), overlay.number, opening).await?);
    }
    Ok(files)
}

/// Makes empty files for the overlays among `layers` over the volume that `image` holds, each as long as its number in `sizes`
/// says. When this fails those that were made are removed.
///
/// # Errors
/// What the place says.
pub(crate) async fn make_layer_files(
    layers: &[LayerDocument],
    sizes: &[Bytes],
    image: &Path,
    context: &OverlayContext,
    lock_wait: Duration,
) -> block::Result<Vec<Device>> {
    let mut files = Vec::new();
    for (overlay, size) in overlays(layers).zip(sizes) {
        let opening = opening(&*context.env, lock_wait);
        match context.backends.make_overlay(&overlay.beside(image), overlay.number, *size, opening).await {
            Ok(file) => files.push(file),
            Err(error) => {
                remove_layer_files(&*context.backends, layers, image);
                return Err(error);
            }
        }
    }
    Ok(files)
}

/// Removes the files of the overlays among `layers`. What cannot be removed is logged and stays: nobody reads it.
pub(crate) fn remove_layer_files(backends: &dyn OverlayBackends, layers: &[LayerDocument], image: &Path) {
    for overlay in overlays(layers) {
        let beside = overlay.beside(image);
        if let Err(error) = backends.remove_overlay(&beside, overlay.number) {
            let (number, name) = (overlay.number, &overlay.name);
            tracing::warn!(%error, number, name, image = %image.display(), "a snapshot's file could not be removed");
        }
    }
}

/// The first number that no file beside `image`, or in `directory`, has.
pub(crate) fn free_number(backends: &dyn OverlayBackends, image: &Path, directory: Option<&Path>) -> Result<u32> {
    let beside = layers_beside(image, directory);
    let found = backends.overlays(&beside);
    let found = found.map_err(|error| of_state(error, format!("looking beside {}", beside.display())))?;
    let last = found.into_iter().max().unwrap_or_default();
    last.checked_add(1).ok_or_else(|| Error::new(ErrorCode::Internal, "no number is left for a snapshot's file"))
}

/// The overlays among `layers` once another host holds their files, wherever those are.
pub(crate) fn layers_elsewhere(layers: &[LayerDocument]) -> Vec<LayerDocument> {
    let moved = layers.iter().filter_map(|layer| Some((layer, layer.overlay()?)));
    let moved = moved.map(|(layer, overlay)| {
        let overlay = OverlayLayer { directory: None, file: None, ..overlay.clone() };
        LayerDocument { kind: LayerKind::Overlay(overlay), ..layer.clone() }
    });
    moved.collect()
}

/// Where the overlays among `layers` are once `image` holds the volume: beside it, under the same identities.
///
/// # Errors
/// The directory cannot be listed.
pub(crate) fn target_layers(
    backends: &dyn OverlayBackends,
    layers: &[LayerDocument],
    image: &Path,
) -> Result<Vec<LayerDocument>> {
    let mut moved = layers_elsewhere(layers);
    for (number, layer) in (free_number(backends, image, None)?..).zip(&mut moved) {
        if let LayerKind::Overlay(overlay) = &mut layer.kind {
            overlay.number = number;
        }
    }
    Ok(moved)
}
