//! Whole machines: memory, device state and disks.

use serde::{Deserialize, Serialize};

use super::{CacheDeparture, CacheTransferRequest, Error, Job, JobState, Monitor, Rates, Schedule, Strategy, Verify};

/// Asks for a running machine to be known (`POST /v1/vms`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmAddRequest {
    /// What it is to be called.
    pub name: String,
    /// How its QEMU is reached.
    pub monitor: Monitor,
}

/// A machine that the daemon knows (`GET /v1/vms`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Whether it runs, and where.
    pub state: VmState,
    /// How its QEMU is reached.
    pub monitor: Monitor,
    /// QEMU's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// What QEMU says of it, as long as it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<VmFacts>,
    /// Its disks.
    pub disks: Vec<VmDisk>,
    /// The other host: where it moves to or has moved to, or comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its last move from here, or the one that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_move: Option<VmMove>,
    /// What is wrong with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A machine that runs on this host and is not known to the daemon (`GET /v1/found-vms`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundVm {
    /// What it could be called.
    pub name: String,
    /// QEMU's process; libvirt does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How it could be reached. Whether somebody else uses that monitor is not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<Monitor>,
    /// The command that adds it, or why it cannot be added.
    pub hint: String,
}

/// Whether a machine runs, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Its guest runs here.
    Running,
    /// It is here, and its guest is stopped.
    Paused,
    /// It is being moved to another host.
    Moving,
    /// It is being moved here.
    Arriving,
    /// It was moved to another host.
    Moved,
    /// Its QEMU has ended, or does not answer.
    Gone,
}

impl std::fmt::Display for VmState {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Moving => "moving",
            Self::Arriving => "arriving",
            Self::Moved => "moved",
            Self::Gone => "gone",
        })
    }
}

/// What QEMU says of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmFacts {
    /// QEMU's version.
    pub qemu: String,
    /// The machine type.
    pub machine: String,
    /// How much memory it has, in bytes.
    pub memory_bytes: u64,
    /// How many processors it has.
    pub vcpus: u32,
    /// `kvm` or `tcg`.
    pub accelerator: String,
}

/// A disk of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmDisk {
    /// QEMU's node.
    pub node: String,
    /// Where its bytes are.
    pub file: String,
    /// How large it is, in bytes.
    pub size_bytes: u64,
    /// Its format, as QEMU has it open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The volume that it is, if it goes through the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// In a plan: how it goes to the other host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handling: Option<DiskHandling>,
    /// In a plan, of one that is copied: why it cannot stay where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_shared: Option<String>,
}

/// How a disk goes to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskHandling {
    /// It is copied there.
    Copied,
    /// It stays on storage that both hosts reach, and the other host uses it there from the switchover on.
    Shared,
}

impl std::fmt::Display for DiskHandling {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Copied => "copied",
            Self::Shared => "shared",
        })
    }
}

/// How one disk is to go to another host, whatever is found of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmDiskChoice {
    /// QEMU's node.
    pub node: String,
    /// How it goes.
    pub handling: DiskHandling,
}

/// What copies the memory of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryEngine {
    /// The parallel one if the machine and both hosts allow it, QEMU's own otherwise.
    #[default]
    Auto,
    /// QEMU's own stream.
    Qemu,
    /// The daemon's parallel pre-copy, from outside of QEMU.
    Parallel,
}

impl std::fmt::Display for MemoryEngine {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Auto => "auto",
            Self::Qemu => "qemu",
            Self::Parallel => "parallel",
        })
    }
}

/// Asks for a machine to be moved to another host (`POST /v1/vms/NAME/move`), or for what that would be
/// (`POST /v1/vms/NAME/plan`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmMoveRequest {
    /// The host, as this daemon trusts it.
    pub to: String,
    /// How disks are to go. Of the others those are copied that the other host does not reach where they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<VmDiskChoice>,
    /// How many bytes a second memory and disks may take.
    #[serde(default)]
    pub bandwidth: Option<u64>,
    /// What is compared of the disks.
    #[serde(default)]
    pub verify: Verify,
    /// How the copy of a disk and what the guest writes meanwhile come together.
    #[serde(default)]
    pub strategy: Strategy,
    /// In which order the chunks of a disk are copied. With `mirror-paper` and `snapshot` only `sequential`.
    #[serde(default, skip_serializing_if = "Schedule::is_default")]
    pub schedule: Schedule,
    /// Of the schedule `follow`: how many guest requests are served before one run is copied, 1 to 4; 2 if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow_ratio: Option<u8>,
    /// How many bytes of memory keep chunks of each disk that is copied, as of a move of one volume; none if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_cache: Option<u64>,
    /// The surrogate that serves the popular data of each disk that is copied, and takes what the guest writes to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub surrogate: Option<String>,
    /// Of a move with a surrogate: from which request on a chunk is popular; 1, at the first, if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub popular_threshold: Option<u16>,
    /// The surrogate serves the guest also of a disk without a head, where it is not used otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub surrogate_on_flash: bool,
    /// A surrogate with one store may hold the only copy of what the guest has written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sole_copy: bool,
    /// The copies of disks yield to guest requests that take longer than this, in milliseconds; 40 if nothing is said.
    #[serde(default)]
    pub guest_latency_ms: Option<u64>,
    /// How many connections carry the memory; 1 is one stream of QEMU's. By its version and the processors if nothing is said.
    #[serde(default)]
    pub channels: Option<u8>,
    /// For how long QEMU may stop the guest for the rest of the memory, in milliseconds; 300 if nothing is said.
    #[serde(default)]
    pub downtime_limit_ms: Option<u64>,
    /// Slow the guest's processors down while its memory does not converge.
    #[serde(default)]
    pub auto_converge: bool,
    /// What copies the memory.
    #[serde(default)]
    pub memory: MemoryEngine,
    /// Of the parallel engine: for how much of the time its streams may use a processor, in percent, 1 to 100; 100 if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_cpu_percent: Option<u8>,
    /// Let the guest run at the target before all of its memory is there, if one pass over the memory leaves more than fits into
    /// the downtime limit. The memory goes over one connection then.
    #[serde(default)]
    pub postcopy: bool,
    /// The disks stay volumes of the other host's daemon. They are given back to its QEMU otherwise.
    #[serde(default)]
    pub keep_volumes: bool,
    /// How long after its start the move shall be over, in milliseconds; it is undone otherwise.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
    /// Delete the disks at the source once the move is committed, instead of renaming them `*.moved-EPOCH`.
    #[serde(default)]
    pub delete_source: bool,
    /// Nothing starts the machine at the source again: whoever asks has seen to that. Asked for where a block device that both hosts reach
    /// keeps its name, and no `vm-hook` is configured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_persist: bool,
    /// How the caches of shared disks go with it.
    #[serde(default)]
    pub caches: CacheTransferRequest,
}

/// What a move of a machine would be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmPlan {
    /// The machine.
    pub vm: String,
    /// The host.
    pub to: String,
    /// What stands against it; nothing does if this is empty.
    pub refusals: Vec<Error>,
    /// What QEMU is started with at the target.
    pub command: Vec<String>,
    /// What of that differs from the source's.
    pub changes: Vec<VmChange>,
    /// How much memory there is, in bytes.
    pub memory_bytes: u64,
    /// The disks, and how many bytes they have.
    pub disks: Vec<VmDisk>,
    /// How much of the memory exists, in bytes; the rest was never written. Nothing if that cannot be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_resident_bytes: Option<u64>,
    /// How fast the guest changes its memory, in bytes a second, if QEMU can tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_bytes_per_second: Option<u64>,
    /// How fast memory is expected to go, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes_per_second: Option<u64>,
    /// Whether the memory is expected to converge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub converges: Option<bool>,
    /// What would copy the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_engine: Option<MemoryEngine>,
    /// Why the parallel engine cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_parallel: Option<String>,
    /// What somebody should know before the move.
    #[serde(default)]
    pub notes: Vec<String>,
    /// How long it is expected to take, in seconds, if that can be told and it ends at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// How long the guest is expected to be stopped, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<f64>,
}

/// What to change so that the parallel engine can copy a machine's memory (`GET /v1/vms/NAME/prepare`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPreparation {
    /// The machine.
    pub vm: String,
    /// Why it cannot now; nothing if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_parallel: Option<String>,
    /// Options of its command line that are to differ.
    pub changes: Vec<VmChange>,
    /// What its QEMU's environment is to have.
    pub environment: Vec<String>,
}

/// An option that differs at the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmChange {
    /// The option.
    pub option: String,
    /// What it is at the source.
    pub from: String,
    /// What it is at the target.
    pub to: String,
    /// Why.
    pub why: String,
}

/// A move of a machine (`GET /v1/vms/NAME/move`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmMove {
    /// The move's identity, which both hosts know.
    pub id: String,
    /// The machine.
    pub vm: String,
    /// The host.
    pub to: String,
    /// How it stands.
    pub state: JobState,
    /// What is being done.
    pub phase: VmMovePhase,
    /// When it was asked for, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// How long it has taken, in milliseconds.
    pub elapsed_ms: u64,
    /// How long it was expected to take, in seconds: by its plan, or by what was seen when it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast_seconds: Option<f64>,
    /// How long its guest was expected to be stopped, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast_downtime_ms: Option<f64>,
    /// The memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<VmMemory>,
    /// How fast the memory went, in bytes a second, once all of it is sent and if no bandwidth was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes_per_second: Option<u64>,
    /// What the memory may take of the network beside others, as both hosts have agreed on last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_rates: Option<Rates>,
    /// How many connections carry the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u16>,
    /// What copies the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_engine: Option<MemoryEngine>,
    /// Why the parallel engine does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_parallel: Option<String>,
    /// The moves of its disks.
    #[serde(default)]
    pub disks: Vec<Job>,
    /// The caches of its shared disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<CacheDeparture>,
    /// How long the switchover has waited for them, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_wait_ms: Option<u64>,
    /// For how long the guest was stopped, in milliseconds, from when QEMU stopped it to when it ran at the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<f64>,
    /// Why it was undone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Error>,
}

/// What is being done in a move of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmMovePhase {
    /// The target makes itself ready.
    Preparing,
    /// The disks are copied.
    Disks,
    /// The memory is copied, and guest writes go to both sides.
    Memory,
    /// The guest is stopped.
    Switching,
    /// The guest runs at the target, and the rest of its memory follows.
    Postcopy,
    /// The target holds it.
    Finishing,
    /// It is over.
    Over,
}

impl std::fmt::Display for VmMovePhase {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Preparing => "preparing",
            Self::Disks => "copying disks",
            Self::Memory => "copying memory",
            Self::Switching => "switching over",
            Self::Postcopy => "running at the target, memory follows",
            Self::Finishing => "finishing",
            Self::Over => "over",
        })
    }
}

/// How far the memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmMemory {
    /// How much there is, in bytes.
    pub bytes_total: u64,
    /// How much was sent, in bytes.
    pub bytes_sent: u64,
    /// How much is left, in bytes.
    pub bytes_left: u64,
    /// How fast the guest writes to it, in bytes a second.
    pub dirty_bytes_per_second: u64,
    /// How often it was gone through.
    pub iterations: u64,
}
