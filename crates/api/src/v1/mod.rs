//! Version 1 of the API.

mod adoption;
mod error;
mod host;
mod job;
mod layer;
mod volume;

pub use adoption::{AdoptRequest, AdoptedVm, CheckRequest, CheckedDisk, Monitor, ReleaseRequest};
pub use error::{Error, ErrorCode, Result};
pub use host::{Host, HostAddresses, Invitation, InviteRequest, PairRequest, TrustedHost};
pub use job::{
    Estimate, Iteration, Job, JobState, MoveRequest, OnNoConverge, PathRate, Phase, Plan, PlanRequest, Prediction,
    Progress, Rates, Report, SetRequest, Strategy, StreamReport, Switchover, Verification, Verify,
};
pub use layer::{Layer, LayerKind, LayerRequest, LayerState, RevertRequest, SnapshotRequest};
pub use volume::{
    Arrival, ArrivalStage, AttachRequest, Decision, GuestIo, Resolution, ResolveRequest, Status, Version, Volume,
    VolumeState,
};
