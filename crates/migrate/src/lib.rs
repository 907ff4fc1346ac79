//! Live migration of one volume: a device below a running guest is changed for another, and the guest does not notice.
//!
//! [`Migration::start`] takes the [`MigrationContext`] that somebody has assembled and puts a mirror into the guest's path. From
//! then on a [`Machine`] says what may happen and a driver does it: copy, compare, switch over. [`Control`] steers it,
//! and the [`Outcome`] with its [`Report`] says what was done and what was proved. `docs/migration.md` tells the whole
//! story.
//!
//! [`stream`] is what a volume moves over between hosts: a target whose bytes are at the other end of several connections.
//!
//! This crate names no VM, no API and no daemon. What the journal's document contains besides, what becomes of the
//! source afterwards and who is told about it is the caller's.

mod cache_transfer;
mod checksum;
mod cold;
mod context;
mod control;
mod digests;
mod driver;
mod forecast;
mod guest;
mod handover;
mod journal;
mod machine;
mod map_writer;
mod migration;
mod options;
mod pace;
mod probe;
mod progress_map;
mod reduce;
mod report;
mod schedule;
mod strategy;
pub mod stream;
mod zeroes;

pub use cache_transfer::{
    CacheArrival, CacheDeparture, CacheSeal, CacheTransferOptions, CacheTransferStatus, CacheWay, WarmStart,
};
pub use cold::{ColdOptions, ColdProgress, copy_cold};
pub use context::{Comparison, GuestMeter, GuestWindow, JobJournal, JobRecord, MigrationContext, UnderWay};
pub use control::Control;
pub use digests::{DeviceDigests, Digests};
pub use forecast::{Forecast, Known, LOOKS, Scattered};
pub use guest::VolumeMeter;
pub use handover::{Handover, HandoverContext};
pub use journal::Journal;
pub use machine::{Action, Event, Machine, Phase};
pub use migration::Migration;
pub use options::{MoveOptions, OnNoConverge, ScheduleKind, Strategy, Verify};
pub use probe::scattered;
pub use progress_map::{MapIdentity, ProgressMap};
pub use reduce::skip::SkipReason;
pub use report::{
    Estimate, Failure, Iteration, Outcome, Progress, ReadCacheReport, Report, ScheduleReport, Switchover, Verification,
};
pub use schedule::{DiskPiece, HeadPosition, Medium};
pub use strategy::snapshot::{SnapshotStore, Snapshots};
