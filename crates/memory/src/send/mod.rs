//! The sender's side: what is sent, in which order, and when the guest may be stopped.

mod cutter;
mod encoder;
mod hot_pages;
mod network;
mod pace;
mod precopy;
mod progress;
mod stop_rules;
mod stream;
mod version_cache;

pub use encoder::Compression;
pub use pace::{Pace, RateLimit, Unpaced};
pub use precopy::{Precopy, PrecopyOptions};
pub use progress::Progress;
pub use stop_rules::{StopReason, StopRules};
pub use stream::{CONSUMER_BYTES, Lane};
