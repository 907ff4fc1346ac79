//! `transhumed`: it serves volumes over NBD, moves them while they are used, and adopts the disks of running VMs.
//!
//! | module | what it holds |
//! |---|---|
//! | `state_dir`, `journal`, `document`, `location` | what is durable, and where |
//! | `workers`, `listeners`, `sockets`, `volume`, `held` | the data plane: threads, sockets, stacks, backends |
//! | `ground`, `core` | what all of it stands on, and the daemon on a ground that somebody else brings |
//! | `jobs`, `steer`, `persist` | moves, from the queue to the retired source |
//! | `remote` | volumes between hosts |
//! | `adopt` | disks of running VMs |
//! | `hosts` | who other hosts are, how they come to be trusted, connections to and from them |
//! | `foreign` | exports of NBD servers that are not ours, as places of volumes |
//! | `recover`, `rescue`, `cold` | a start after whatever happened; an export, and a copy of a cold disk, without the daemon |
//! | `http`, `metrics`, `audit`, `problem` | the API, figures, who asked for what, errors as users see them |
//!
//! `docs/operations.md` is the page for those who run it.

mod adopt;
pub mod arbiter;
mod args;
mod audit;
mod cold;
mod config;
mod core;
mod daemon;
mod document;
mod foreign;
mod gauge;
pub mod ground;
mod held;
pub mod hosts;
mod http;
mod jobs;
mod journal;
mod listeners;
mod location;
mod metrics;
mod overlays;
mod persist;
mod problem;
mod rates;
mod recover;
mod refusing;
mod remote;
mod rescue;
mod room;
mod run;
mod sockets;
mod state_dir;
mod steer;
mod volume;
mod workers;

pub use args::Args;
pub use cold::{CopyReport, CopyRequest, CopyStep, copy};
pub use config::{Config, HostsConfig};
pub use core::Core;
pub use document::{
    AdoptionDirection, AdoptionDocument, ArrivalDocument, ArrivalStage, Clients, Committed, DOCUMENT_VERSION,
    DOCUMENT_VERSION_ARBITER, DOCUMENT_VERSION_OVERLAYS, DOCUMENT_VERSION_PLACES, GroupDocument, JobDocument,
    SocketOwner, VolumeDocument,
};
pub use foreign::ForeignExport;
pub use held::{CopyEnd, Held, HoldOptions, QemuRule};
pub use location::{JobTarget, Location, RemoteVolume};
pub use rescue::rescue;
pub use run::main;
pub use workers::Worker;
