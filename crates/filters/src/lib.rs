//! Filters that belong to no strategy.
//!
//! - [`Meter`] counts what passes and how long it takes: what the guest feels.
//! - [`WriteFrequencySketch`] tells which blocks are written often.
//! - [`Throttle`] holds a device to a rate, and [`RateLimit`] a volume to a limit that can be changed.
//! - [`Overlay`] keeps every change of a volume in a delta and leaves the base as it is: a snapshot.
//! - [`Redirect`] keeps what is popular, and what changes, in a surrogate while a volume is copied: WAIO.
//! - [`Cache`] keeps blocks of a volume on a host's flash, read-only, write-through or write-back.
//! - [`ReadCache`] keeps chunks of a volume in memory while it is copied, for the guest and for the copy: `IOFollow`.
//! - [`Regions`] makes one device of several, and [`Region`] a device of a part of one.
//! - [`ReplicaPair`] keeps two devices alike: a surrogate with two stores.
//! - [`Fault`] makes a device fail, hang or slow down as its rules say.

mod cache;
#[cfg(test)]
mod cached_disk;
mod fault;
mod histogram;
#[cfg(test)]
mod lives;
mod meter;
mod overlay;
mod read_cache;
mod redirect;
mod regions;
mod replica_pair;
mod store;
mod throttle;
mod token_bucket;
mod translate;
mod write_frequency;

pub use cache::{
    Admission, AdmitToken, Cache, CacheHeader, CacheIdentity, CacheLoss, CacheMode, CacheOptions, CachePolicy,
    CacheStatus, Invalidations, OtherCache, TransferStatus, WriteBackStep,
};
pub use fault::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};
pub use histogram::LatencyHistogram;
pub use meter::{DirectionWindow, Meter, MeterSnapshot, MeterState, MeterWindow, StallWatch};
pub use overlay::{Overlay, OverlayHeader, RunOrigin};
pub use read_cache::{ReadCache, ReadCacheStatus};
pub use redirect::{AccessCounts, FrequencySketch, Popularity, Recency, Redirect, RedirectHeader, RedirectStatus};
pub use regions::{Region, Regions, layout};
pub use replica_pair::{MemberLoss, ReplicaPair, ReplicaStatus};
pub use throttle::{RateLimit, RateLimits, Throttle};
pub use token_bucket::TokenBucket;
pub use write_frequency::{COUNTERS_MAX, STAGES, WriteFrequencySketch};
