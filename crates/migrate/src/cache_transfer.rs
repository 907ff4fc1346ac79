//! A volume's flash cache goes with its VM to another host (the Firepan paper, sections 3.1 to 3.3).
//!
//! ```text
//!   source: Cache ── hottest list, blocks, invalidations ──▶ one connection ──▶ target: Cache, empty
//!                                                                                  ▲
//!                                              shared storage ── the warmer ───────┘
//!
//!   source    connected ─ list ─▶ copying, if it does before ─▶ guest held ─ seal ─▶ the other host has it ─▶ enough
//!   target    (drops all) ──────▶ blocks come, changed ones go ────────── sealed ──▶ guest is here ─────────▶ over
//! ```
//!
//! | way | blocks come from | when | the guest meanwhile |
//! |---|---|---|---|
//! | `none` | nowhere | | starts with an empty cache |
//! | `cachemior` | shared storage, by the source's list | after the switchover | uses the cache |
//! | `firepan` | the source's cache | while the guest is stopped | waits |
//! | `firepan-if` | the source's cache | after the switchover | goes to shared storage until all has come |
//! | `remote-read` | the source's cache, when the guest misses | after the switchover | uses the cache |
//! | `hybrid` | both, and the source's cache when the guest misses | from before the switchover | uses the cache |
//!
//! **Nothing old is believed.** Everything goes over one connection in order. A block is sent only if nobody has written to it since before it was
//! read, and a change is told before any block that is read after it. *Sealed* says that the guest is held at the source and that every change
//! was told. A target that was not sealed drops all it has. What the guest changes at the target the cache itself keeps
//! ([`Cache::begin_transfer`](filters::Cache::begin_transfer)).
//!
//! A lost connection costs what has not come yet. Before the seal the target drops all and begins again; after it nothing of what has come is old.

mod list;
mod source;
mod target;
mod window;
mod wire;

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

pub use source::{CacheDeparture, CacheSeal};
pub use target::CacheArrival;

/// How a cache goes with its volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheWay {
    /// It stays behind.
    None,
    /// The target warms its cache from shared storage.
    Cachemior,
    /// The guest waits until every block is copied.
    Firepan,
    /// The guest goes past the cache until every block is copied.
    FirepanIf,
    /// What the guest misses is read of the source's cache.
    RemoteRead,
    /// Blocks are usable one by one, hottest first, from both; the switchover waits until the most asked for are there.
    #[default]
    Hybrid,
}

/// When the warmer of [`CacheWay::Cachemior`] begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarmStart {
    /// After the switchover, as Bonfire does.
    #[default]
    AfterSwitchover,
    /// Beside the memory, as Successor does. What the guest changes meanwhile is dropped.
    WithMemory,
}

impl CacheWay {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::None, Self::Cachemior, Self::Firepan, Self::FirepanIf, Self::RemoteRead, Self::Hybrid];

    /// Its name, as the command line has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cachemior => "cachemior",
            Self::Firepan => "firepan",
            Self::FirepanIf => "firepan-if",
            Self::RemoteRead => "remote-read",
            Self::Hybrid => "hybrid",
        }
    }

    /// Whether blocks are copied out of the source's cache.
    const fn copies(self) -> bool {
        matches!(self, Self::Firepan | Self::FirepanIf | Self::Hybrid)
    }

    /// Whether that goes on while the guest is here.
    const fn copies_after(self) -> bool {
        matches!(self, Self::FirepanIf | Self::Hybrid)
    }

    /// Whether shared storage is read besides, once the guest is here.
    const fn warms(self) -> bool {
        matches!(self, Self::Cachemior | Self::Hybrid)
    }

    const fn reads_remotely(self) -> bool {
        matches!(self, Self::RemoteRead | Self::Hybrid)
    }

    /// Whether the guest goes past the cache until everything has come.
    #[must_use]
    pub const fn withholds(self) -> bool {
        matches!(self, Self::FirepanIf)
    }
}

impl fmt::Display for CacheWay {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for CacheWay {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|way| way.name() == name).ok_or_else(|| {
            format!("{name} is no way: none, cachemior, firepan, firepan-if, remote-read and hybrid are")
        })
    }
}

/// How a transfer works. Both ends are told the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTransferOptions {
    /// The way.
    pub way: CacheWay,
    /// When the warmer begins.
    pub warm_start: WarmStart,
    /// So many requests for blocks are in flight at most (the paper's warmer has 128).
    pub in_flight: u32,
    /// At the latest after so many milliseconds with the guest at the target the transfer is over, whatever has come.
    pub time_ms_max: u64,
    /// So many changed blocks are kept one by one; more are a bit each.
    pub changed_max: u32,
}

impl Default for CacheTransferOptions {
    fn default() -> Self {
        Self {
            way: CacheWay::default(),
            warm_start: WarmStart::default(),
            in_flight: 128,
            time_ms_max: 600_000,
            changed_max: 1 << 20,
        }
    }
}

impl CacheTransferOptions {
    const fn time_max(&self) -> Duration {
        Duration::from_millis(self.time_ms_max)
    }
}

/// What a transfer has done, as its target knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheTransferStatus {
    /// How many blocks the source's list has.
    pub listed: u64,
    /// Blocks that have come from the source's cache.
    pub from_source: u64,
    /// Blocks that the warmer has read of shared storage.
    pub from_storage: u64,
    /// Blocks that the guest has missed, and that were read of the source's cache.
    pub read_remotely: u64,
    /// Blocks that have come and were not taken: the guest had changed them, or they were there.
    pub refused: u64,
    /// Whether the guest goes past the cache.
    pub is_withheld: bool,
    /// Whether every change at the source was told.
    pub is_sealed: bool,
    /// Whether it is over.
    pub is_over: bool,
}

/// What others wait for a change of. Those who wait are woken in the order in which they came.
struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Copy> Watched<T> {
    fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Notify::new() }
    }

    fn get(&self) -> T {
        *self.value.lock()
    }

    fn change(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.value.lock());
        self.changed.notify_waiters();
    }

    async fn until(&self, is_so: impl Fn(&T) -> bool) {
        loop {
            let changed = self.changed.notified();
            if is_so(&self.get()) {
                return;
            }
            changed.await;
        }
    }
}

/// A bit for each block of a volume.
struct Blocks {
    words: Vec<u64>,
    count: u64,
}

impl Blocks {
    fn new(blocks: u64) -> Self {
        Self { words: vec![0; blocks.div_ceil(64) as usize], count: 0 }
    }

    fn contains(&self, block: u64) -> bool {
        self.words.get(block as usize / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    fn set(&mut self, block: u64, is_in: bool) {
        let Some(word) = self.words.get_mut(block as usize / 64) else { return };
        let bit = 1 << (block % 64);
        let was_in = *word & bit != 0;
        *word = if is_in { *word | bit } else { *word & !bit };
        self.count = self.count + u64::from(is_in) - u64::from(was_in && is_in) - u64::from(was_in && !is_in);
    }

    fn clear(&mut self) {
        self.words.fill(0);
        self.count = 0;
    }
}
