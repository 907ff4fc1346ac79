//! Filters that belong to no strategy.
//!
//! - [`Meter`] counts what passes and how long it takes: what the guest feels.
//! - [`Heat`] tells which blocks are written often.
//! - [`Throttle`] holds a device to a rate.
//! - [`Overlay`] keeps every change of a volume in a delta and leaves the base as it is: a snapshot.
//! - [`Fault`] makes a device fail, hang or slow down as its rules say.

mod fault;
mod heat;
mod histogram;
mod meter;
mod overlay;
mod throttle;
mod token_bucket;

pub use fault::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};
pub use heat::{COUNTERS_MAX, Heat, STAGES};
pub use histogram::LatencyHistogram;
pub use meter::{DirectionWindow, Meter, MeterSnapshot, MeterState, MeterWindow, StallWatch};
pub use overlay::{Held, Overlay, OverlayHeader};
pub use throttle::Throttle;
pub use token_bucket::TokenBucket;
