//! What is on record of a volume's layers.

use std::path::{Path, PathBuf};

use backends::ImageIdentity;
use filters::{CacheMode, CachePolicy};
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
    /// Has a surrogate serve what is popular. It holds what was written since, directly over the backend.
    Redirect(RedirectLayer),
    /// Keeps blocks on the host's flash, directly over the backend. In write-back it holds what the backend gets later.
    Cache(CacheLayer),
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
    /// Which file of this host it is, whatever its name leads to later. Earlier versions kept none: the first opening that finds
    /// none notes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<Box<ImageIdentity>>,
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
    /// Whether it was there before a move, and is there after one that is undone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stays: bool,
}

/// A volume's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheLayer {
    /// The cache of this host, which has a partition for this layer.
    pub cache: String,
    /// The epoch of the volume in which it was made: the partition is believed in no other.
    pub epoch: u64,
    /// How many bytes of the partition are used.
    pub size: u64,
    /// What it does with writes.
    #[serde(with = "as_text")]
    pub mode: CacheMode,
    /// Which block goes when a place is needed.
    #[serde(with = "as_text")]
    pub policy: CachePolicy,
    /// The unit of caching, in bytes.
    pub block: u64,
    /// Reads that follow each other for more than so many bytes are not cached.
    pub sequential: u64,
    /// How far what the partition only caches can be believed.
    #[serde(default, skip_serializing_if = "CacheTrust::is_whole")]
    pub trust: CacheTrust,
}

/// How far what a partition only caches can be believed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheTrust {
    /// All of it: every write of the guest's since it was made went through it.
    #[default]
    Whole,
    /// None of it: its flash has failed, or the volume was in use without it. What is dirty counts.
    Dirty,
    /// Nothing at all: it is taken out, or was. It is not put into the guest's path again.
    Gone,
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
            LayerKind::Throttle(_) | LayerKind::Redirect(_) | LayerKind::Cache(_) => None,
        }
    }

    /// The limits that it sets, if it sets any.
    #[must_use]
    pub const fn throttle(&self) -> Option<ThrottleLayer> {
        match &self.kind {
            LayerKind::Throttle(throttle) => Some(*throttle),
            LayerKind::Overlay(_) | LayerKind::Redirect(_) | LayerKind::Cache(_) => None,
        }
    }

    /// The redirection that it is, if it is one.
    #[must_use]
    pub const fn redirect(&self) -> Option<&RedirectLayer> {
        match &self.kind {
            LayerKind::Redirect(redirect) => Some(redirect),
            LayerKind::Overlay(_) | LayerKind::Throttle(_) | LayerKind::Cache(_) => None,
        }
    }

    /// The cache that it is, if it is one.
    #[must_use]
    pub const fn cache(&self) -> Option<&CacheLayer> {
        match &self.kind {
            LayerKind::Cache(cache) => Some(cache),
            LayerKind::Overlay(_) | LayerKind::Throttle(_) | LayerKind::Redirect(_) => None,
        }
    }

    /// The same, to change what is said of it.
    pub(crate) const fn overlay_mut(&mut self) -> Option<&mut OverlayLayer> {
        match &mut self.kind {
            LayerKind::Overlay(overlay) => Some(overlay),
            LayerKind::Throttle(_) | LayerKind::Redirect(_) | LayerKind::Cache(_) => None,
        }
    }

    /// The cache, to change what is said of it.
    pub(crate) const fn cache_mut(&mut self) -> Option<&mut CacheLayer> {
        match &mut self.kind {
            LayerKind::Cache(cache) => Some(cache),
            LayerKind::Overlay(_) | LayerKind::Throttle(_) | LayerKind::Redirect(_) => None,
        }
    }

    /// Whether it is of this host, and belongs to what holds the volume here: it stays when the volume goes elsewhere.
    #[must_use]
    pub const fn is_of_host(&self) -> bool {
        self.redirect().is_some() || self.cache().is_some()
    }
}

impl CacheTrust {
    /// Whether all of it can be believed.
    const fn is_whole(&self) -> bool {
        matches!(self, Self::Whole)
    }
}

/// Values that are on record by their names.
pub(crate) mod as_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
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
        let overlay =
            OverlayLayer { name: "before".to_owned(), number: 3, directory: None, created_unix_ms: 7, file: None };
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
    fn a_cache_is_written_as_documented() {
        let cache = CacheLayer {
            cache: "ssd".to_owned(),
            epoch: 7,
            size: 1 << 30,
            mode: CacheMode::WriteBack,
            policy: CachePolicy::S3Fifo,
            block: 4096,
            sequential: 1 << 20,
            trust: CacheTrust::Whole,
        };
        let mut layer = LayerDocument { id: Uuid::nil(), kind: LayerKind::Cache(cache), state: LayerState::MayHold };
        let mut written = serde_json::json!({
            "id": "00000000-0000-0000-0000-000000000000", "kind": "cache", "cache": "ssd", "epoch": 7, "size": 1 << 30,
            "mode": "write-back", "policy": "s3-fifo", "block": 4096, "sequential": 1 << 20, "state": "may-hold"
        });
        assert_eq!(serde_json::to_value(&layer).expect("plain data"), written);
        layer.cache_mut().expect("it is one").trust = CacheTrust::Dirty;
        written["trust"] = "dirty".into();
        assert_eq!(serde_json::from_value::<LayerDocument>(written.clone()).expect("it is read again"), layer);
        written["mode"] = "write-behind".into();
        assert!(serde_json::from_value::<LayerDocument>(written).is_err(), "a mode that nobody knows was read");
    }

    #[test]
    fn files_of_layers_are_none_of_a_move() {
        let beside = layers_beside(Path::new("/vm/web1.img"), None);
        assert_eq!(beside, Path::new("/vm/web1.img.layer"));
        let elsewhere = layers_beside(Path::new("/vm/web1.img"), Some(Path::new("/fast")));
        assert_eq!(elsewhere, Path::new("/fast/web1.img.layer"));
    }
}
