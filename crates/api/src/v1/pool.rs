//! What surrogates and caches have in common: stores, of which volumes have parts.

use serde::{Deserialize, Serialize};

/// A store of a surrogate or a cache that is to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreRequest {
    /// `file:PATH[,cache=auto|direct|page]`: a file or a block device. Of a surrogate also the export of an NBD server.
    pub place: String,
    /// Of a file that is to be made: how large.
    pub size_bytes: Option<u64>,
}

/// A store as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolStore {
    /// Where it is.
    pub place: String,
    /// Whether the daemon has made its file, and removes that with the surrogate or the cache.
    pub made: bool,
}
