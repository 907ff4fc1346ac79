//! A whole machine on its way to another QEMU: how that one is started, whether it can take the machine, and QEMU's
//! own migration of memory and devices.
//!
//! ```text
//!  source QEMU ── MachineDescription ──for_target──▶ TargetCommand ──▶ target QEMU (-S -incoming defer)
//!       │              MachineFacts ── refusals(HostFacts)                  │
//!       └── prepare_outgoing, begin_outgoing ──── memory ────▶ prepare_incoming, begin_incoming
//!            wait_for(pre-switchover)                                       │
//!            switch_over ─────────────────────── devices ────▶ is_loaded ── start_guest
//!            cancel / resume: the guest goes on here, as long as the target's was not started
//! ```
//!
//! The disks are no part of this: both QEMUs reach them through exports of ours.

mod backends;
mod blocks;
mod description;
mod disks;
mod domain;
mod facts;
mod found;
mod memory;
mod migration;
mod networks;
mod prepare;
mod rewrite;
mod shared_memory;
mod status;
mod words;

pub use backends::MemoryBackend;
pub use description::{Change, MachineDescription, TargetCommand, TargetDisk, TargetMemory, TargetPlaces};
pub use domain::{DomainDefinition, TargetDomain, retarget_domain, untold_of_disks};
pub use facts::{CpuFacts, HostFacts, MachineFacts, Refusal, RefusalKind};
pub use found::FoundMachine;
pub use memory::{MemoryUse, memory_use};
pub use migration::{
    MigrationOptions, begin_incoming, begin_outgoing, cancel, is_loaded, is_stopped_for_switch, prepare_incoming,
    prepare_outgoing, quit, recover_incoming, recover_outgoing, refuse_state, resume, run_state, start_guest,
    start_postcopy, status, steer, stop_guest, switch_over, verify_stopped, wait_for,
};
pub use networks::NetworkBackend;
pub use shared_memory::{SharedMemory, direct_nodes, preload_socket, shared_memory};
pub use status::{MigrationPhase, MigrationStatus};
