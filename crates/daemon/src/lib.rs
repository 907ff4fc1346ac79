//! `transhumed`: it serves volumes over NBD, moves them while they are used, and adopts the disks of running VMs.
//!
//! | module | what it holds |
//! |---|---|
//! | `state_dir`, `journal`, `document`, `location` | what is durable, and where |
//! | `workers`, `listeners`, `sockets`, `volume`, `open_backend` | the data plane: threads, sockets, stacks, backends |
//! | `platform`, `core` | what all of it stands on, and the daemon on a ground that somebody else brings |
//! | `jobs`, `job_control`, `persist` | moves, from the queue to the retired source |
//! | `pools`, `surrogates`, `caches` | stores of which volumes have parts |
//! | `remote` | volumes between hosts |
//! | `adopt` | disks of running VMs |
//! | `hypervisor` | the programs that run machines, QEMU among them |
//! | `machines` | whole VMs: memory, device state and disks, to another host |
//! | `hosts` | who other hosts are, how they come to be trusted, connections to and from them |
//! | `foreign` | exports of NBD servers that are not ours, as places of volumes |
//! | `recover`, `rescue`, `cold` | a start after whatever happened; an export, and a copy of a cold disk, without the daemon |
//! | `log`, `reload` | the log, which keeps nobody waiting, and what is read again while the daemon serves |
//! | `http`, `metrics`, `audit`, `problem` | the API, figures, who asked for what, errors as users see them |
//!
//! `docs/operations.md` is the page for those who run it.

mod accept;
mod adopt;
pub mod arbiter;
mod args;
mod audit;
mod caches;
mod clients;
mod cold;
mod config;
mod core;
mod daemon;
mod descriptors;
mod device_identity;
mod disk;
mod document;
mod file_limit;
mod foreign;
mod free_space;
mod gauge;
mod handed_over;
mod hooks;
pub mod hosts;
mod http;
mod hypervisor;
mod job_control;
mod jobs;
mod journal;
mod journal_file;
mod last_life;
mod lent_parts;
mod letting_go;
mod listeners;
mod location;
mod log;
mod loss_record;
mod machines;
mod metrics;
mod open_backend;
mod overlays;
mod persist;
mod places;
pub mod platform;
mod pools;
mod problem;
mod rates;
mod recover;
mod reject_all;
mod reload;
mod remote;
mod rescue;
mod run;
mod separate;
mod sockets;
mod stack;
mod state_dir;
mod surrogates;
mod volume;
mod workers;

pub use args::Args;
pub use backends::run_as_helper;
pub use clients::{Clients, MachineClient, MachineGate, SocketOwner};
pub use cold::{CopyOutcome, CopyReport, CopyRequest, CopyStep, copy};
pub use config::{Config, HostsConfig};
pub use core::{AtRest, Core};
pub use disk::Disk;
pub use document::{
    AdoptionDirection, AdoptionDocument, CacheLayer, CacheTrust, Committed, DOCUMENT_VERSION, DOCUMENT_VERSION_ARBITER,
    DOCUMENT_VERSION_CACHE, DOCUMENT_VERSION_CARRIED, DOCUMENT_VERSION_GROUPS, DOCUMENT_VERSION_LAYERS,
    DOCUMENT_VERSION_MACHINES, DOCUMENT_VERSION_MARKED, DOCUMENT_VERSION_OPENED, DOCUMENT_VERSION_OVERLAYS,
    DOCUMENT_VERSION_PLACES, DOCUMENT_VERSION_SHARED, DOCUMENT_VERSION_SURROGATE, GroupDocument, IncomingDocument,
    IncomingStage, JobDocument, LayerDocument, LayerKind, LayerState, OverlayLayer, RedirectLayer, ThrottleLayer,
    VolumeDocument,
};
pub use foreign::ForeignExport;
pub use hooks::{HookOutput, Hooks, NoHooks};
pub use hypervisor::{
    Convergence, Hypervisor, Hypervisors, Lane, Libvirt, MemoryFlow, MonitoredProcess, Monitors, NoHypervisors,
    OnStarted, OnStatus, Outlet, ServedDisk, started_with,
};
pub use jobs::{CommitRecord, GroupRecord, GroupState};
pub use location::{JobTarget, Location, RemoteVolume};
pub use machines::{IncomingMachine, MACHINE_VERSION, MachineDisk, MachineDocument, OutgoingMachine};
pub use open_backend::{BackendOpenOptions, CopyEnd, MovedRule, OpenBackend, QemuRule, TimesOfImage};
pub use rescue::rescue;
pub use run::main;
pub use stack::ArrivingCache;
pub use workers::Worker;

/// What [`Hypervisor`] speaks of.
pub mod machine_types {
    pub use vm::machine::{
        CpuFacts, FoundMachine, HostFacts, MachineDescription, MachineFacts, MemoryUse, MigrationOptions,
        MigrationPhase, MigrationStatus, TargetCommand, TargetDomain,
    };
    pub use vm::{DiskReport, QemuProcess, Version};
}
