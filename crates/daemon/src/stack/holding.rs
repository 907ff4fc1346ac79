//! What is refused while a layer holds bytes that the backend lacks.

use api::v1::{Error, ErrorCode};

use crate::document::{LayerState, VolumeDocument};
use crate::location::Location;
use crate::problem::Result;

/// Refuses what would leave the backend alone as the volume although its layers may hold bytes that it lacks; `command` is what
/// was asked for.
pub(crate) fn require_complete_backend(document: &VolumeDocument, command: &str) -> Result<()> {
    let name = &document.name;
    if matches!(document.backend, Location::Remote(_)) {
        // They go on where the volume is.
        return Ok(());
    }
    let Some(layer) = document.layers.iter().find(|layer| layer.may_hold()) else { return Ok(()) };
    if let Some(redirect) = layer.redirect() {
        let message = format!("the surrogate {} holds what {name} has written last", redirect.surrogate);
        let hint = match redirect.stays && layer.state != LayerState::Draining {
            true => format!("`transhume volume layer rm {name} surrogate` brings it to {}", document.backend),
            false => format!("wait until that is in {}: `transhume volume show {name}`", document.backend),
        };
        return Err(Error::new(ErrorCode::InUse, message).with_hint(hint));
    }
    if let Some(cache) = layer.cache() {
        let message = format!("the cache {} may hold what {name} has written last", cache.cache);
        return Err(Error::new(ErrorCode::InUse, message)
            .with_hint(format!("`transhume volume layer rm {name} cache` brings it to {}", document.backend)));
    }
    let snapshot = layer.overlay().map_or("", |overlay| &overlay.name);
    let message = format!("{name} has snapshots, so {} alone is not the volume", document.backend);
    Err(Error::new(ErrorCode::InUse, message).with_hint(format!(
        "`transhume volume snapshot rm {name} {snapshot}` folds the lowest into it; once none is left, `{command} {name}`"
    )))
}

/// Refuses what would have others write what holds the volume, past its cache.
pub(crate) fn require_no_cache(document: &VolumeDocument) -> Result<()> {
    let Some((_, cache)) = document.cache_layer() else { return Ok(()) };
    let name = &document.name;
    Err(Error::new(ErrorCode::InUse, format!("{name} has the cache {}", cache.cache))
        .with_hint(format!("`transhume volume layer rm {name} cache` first")))
}
