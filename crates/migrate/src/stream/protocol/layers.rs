//! The layers of a volume that is moved, as one host tells another.

use block::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A volume with layers is copied as one device: its base, then the bytes of each overlay, each at the next multiple of
/// [`PART_ALIGNMENT`]. Only with [`feature::LAYERS`](super::feature::LAYERS).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionLayers {
    /// How many bytes the base has.
    pub base_bytes: u64,
    /// The layers over it, the lowest first.
    pub layers: Vec<SessionLayer>,
}

/// Where the parts of a volume with layers begin: no chunk is of two parts.
pub const PART_ALIGNMENT: Bytes = Bytes::mib(1);

/// A layer of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionLayer {
    /// What it is, wherever the volume is.
    pub id: Uuid,
    /// What it does.
    pub kind: SessionLayerKind,
}

/// What a layer of a volume does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionLayerKind {
    /// A snapshot, whose overlay is a part of what is copied.
    Overlay {
        /// What its user calls it.
        name: String,
        /// When it was taken, in milliseconds since 1970.
        created_unix_ms: u64,
        /// How many bytes its overlay has.
        bytes: u64,
    },
    /// Limits of what clients may ask for.
    Throttle {
        /// Requests a second.
        iops: Option<u64>,
        /// Bytes a second.
        bytes_per_second: Option<u64>,
    },
}

impl SessionLayers {
    /// The size of each part, the base's first.
    #[must_use]
    pub fn part_sizes(&self) -> Vec<Bytes> {
        let overlays = self.layers.iter().filter_map(|layer| match layer.kind {
            SessionLayerKind::Overlay { bytes, .. } => Some(Bytes(bytes)),
            SessionLayerKind::Throttle { .. } => None,
        });
        std::iter::once(Bytes(self.base_bytes)).chain(overlays).collect()
    }

    /// Whether what is copied is no volume without them.
    #[must_use]
    pub fn hold_bytes(&self) -> bool {
        self.part_sizes().len() > 1
    }
}
