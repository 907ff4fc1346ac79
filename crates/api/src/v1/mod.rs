//! Version 1 of the API.

mod adoption;
mod cache;
mod error;
mod host;
mod job;
mod layer;
mod pool;
mod report;
mod surrogate;
mod vm;
mod volume;

pub use adoption::{AdoptRequest, AdoptedVm, CheckRequest, CheckedDisk, Monitor, ReleaseRequest};
pub use cache::{
    Cache, CacheArrival, CacheDeparture, CacheMode, CachePartition, CachePolicy, CacheRequest, CacheResizeRequest,
    CacheTransfer, CacheTransferRequest, CacheUse, CacheWarmStart, LayerChangeRequest,
};
pub use error::{Error, ErrorCode, Result};
pub use host::{Host, HostAddresses, Invitation, InviteRequest, PairRequest, TrustedHost};
pub use job::{
    Job, JobState, MoveRequest, OnNoConverge, Phase, Plan, PlanRequest, Prediction, Progress, Schedule, SetRequest,
    Strategy, Verify,
};
pub use layer::{Layer, LayerKind, LayerRequest, LayerState, RevertRequest, SnapshotRequest};
pub use pool::{PoolStore, StoreRequest};
pub use report::{
    Estimate, Iteration, PathRate, Rates, ReadCache, Report, ScheduleReport, StreamReport, Switchover, Verification,
};
pub use surrogate::{Redirection, Surrogate, SurrogatePartition, SurrogateRepairRequest, SurrogateRequest};
pub use vm::{
    DiskHandling, FoundVm, MemoryEngine, Vm, VmAddRequest, VmChange, VmDisk, VmDiskChoice, VmFacts, VmMemory, VmMove,
    VmMovePhase, VmMoveRequest, VmPlan, VmPreparation, VmState,
};
pub use volume::{
    AcceptRequest, Arrival, ArrivalStage, AttachRequest, Decision, GuestIo, Resolution, ResolveRequest, Status,
    Version, Volume, VolumeState,
};
