//! Version 1 of the API.

mod adoption;
mod error;
mod job;
mod volume;

pub use adoption::{AdoptRequest, AdoptedVm, CheckRequest, CheckedDisk, Monitor, ReleaseRequest};
pub use error::{Error, ErrorCode, Result};
pub use job::{
    Job, JobState, MoveRequest, Phase, Plan, PlanRequest, Progress, Report, SetRequest, Switchover, Verification,
    Verify,
};
pub use volume::{AttachRequest, GuestIo, Status, Version, Volume, VolumeState};
