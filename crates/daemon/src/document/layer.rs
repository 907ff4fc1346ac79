//! What is on record of a volume's layers.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A filter that is part of a volume, and what it may hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerDocument {
    /// What it is, wherever the volume is.
    pub id: Uuid,
    /// What it does.
    #[serde(flatten)]
    pub kind: LayerKind,
    /// Whether it may hold bytes that what lies below lacks.
    pub state: LayerState,
}

/// What a layer does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum LayerKind {
    /// A snapshot: it holds what was written since the snapshot was taken.
    Overlay(OverlayLayer),
    /// Limits what clients may ask for. It holds nothing and stands before the meter.
    Throttle(ThrottleLayer),
    /// Has a surrogate serve what is popular while the volume is moved. It holds what was written since, directly over the backend.
    Redirect(RedirectLayer),
}

/// A snapshot's overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayLayer {
    /// What the user calls the snapshot.
    pub name: String,
    /// The number of its file.
    pub number: u32,
    /// The directory of its file, if that is not beside the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// When the snapshot was taken, in milliseconds since 1970.
    pub created_unix_ms: u64,
}

/// Limits of what clients may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottleLayer {
    /// Requests a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes read and written a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// A redirection to a surrogate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectLayer {
    /// The surrogate, which has a partition for this layer.
    pub surrogate: String,
    /// From which request on a chunk is popular.
    pub threshold: u16,
}

/// Whether a layer may hold bytes that what lies below lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerState {
    /// It holds none. A layer that is clean can be left out.
    Clean,
    /// It may. This is on record before the first such byte.
    MayHold,
    /// It may, and is being emptied into what lies below.
    Draining,
}

impl LayerDocument {
    /// Whether the volume is not whole without it.
    #[must_use]
    pub fn may_hold(&self) -> bool {
        self.state != LayerState::Clean
    }

    /// The overlay that it is, if it is one.
    #[must_use]
    pub const fn overlay(&self) -> Option<&OverlayLayer> {
        match &self.kind {
            LayerKind::Overlay(overlay) => Some(overlay),
            LayerKind::Throttle(_) | LayerKind::Redirect(_) => None,
        }
    }

    /// The limits that it sets, if it sets any.
    #[must_use]
    pub const fn throttle(&self) -> Option<ThrottleLayer> {
        match &self.kind {
            LayerKind::Throttle(throttle) => Some(*throttle),
            LayerKind::Overlay(_) | LayerKind::Redirect(_) => None,
        }
    }

    /// The redirection that it is, if it is one.
    #[must_use]
    pub const fn redirect(&self) -> Option<&RedirectLayer> {
        match &self.kind {
            LayerKind::Redirect(redirect) => Some(redirect),
            LayerKind::Overlay(_) | LayerKind::Throttle(_) => None,
        }
    }
}

impl OverlayLayer {
    /// Beside what its file lies, as `.NAME.layer.overlay-NUMBER`, when `image` holds the volume.
    #[must_use]
    pub fn beside(&self, image: &Path) -> PathBuf {
        layers_beside(image, self.directory.as_deref())
    }
}

/// The name beside which the files of a volume's layers lie: beside the image, or in `directory`. The overlays of a snapshot
/// move have other names, because the end of a move removes all of those.
pub(crate) fn layers_beside(image: &Path, directory: Option<&Path>) -> PathBuf {
    let mut name = image.file_name().unwrap_or_default().to_owned();
    name.push(".layer");
    match directory {
        Some(directory) => directory.join(name),
        None => image.with_file_name(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_written_as_documented() {
        let overlay = OverlayLayer { name: "before".to_owned(), number: 3, directory: None, created_unix_ms: 7 };
        let layer = LayerDocument { id: Uuid::nil(), kind: LayerKind::Overlay(overlay), state: LayerState::MayHold };
        let written = serde_json::to_value(&layer).expect("plain data");
        assert_eq!(
            written,
            serde_json::json!({
                "id": "00000000-0000-0000-0000-000000000000", "kind": "overlay", "name": "before", "number": 3,
                "created_unix_ms": 7, "state": "may-hold"
            })
        );
        assert_eq!(serde_json::from_value::<LayerDocument>(written).expect("it is read again"), layer);
    }

    #[test]
    fn files_of_layers_are_none_of_a_move() {
        let beside = layers_beside(Path::new("/vm/web1.img"), None);
        assert_eq!(beside, Path::new("/vm/web1.img.layer"));
        let elsewhere = layers_beside(Path::new("/vm/web1.img"), Some(Path::new("/fast")));
        assert_eq!(elsewhere, Path::new("/fast/web1.img.layer"));
    }
}
