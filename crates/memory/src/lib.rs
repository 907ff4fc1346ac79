//! Parallel pre-copy of a guest's memory: "Parallelizing Live Migration of Virtual Machines" (PMigrate, VEE'13) from outside the VMM.
//!
//! ```text
//!   guest ─ writes ─▶ memory ◀─ dirty log ─ GuestMemory (a trait: ProcessMemory, EmulatedMemory, a VMM's own)
//!                       │
//!             Precopy: iterations, hot pages, stop rules
//!                       │ dirty map
//!                   the cutter: tasks of pages                                    TargetMemory (RamFile, EmulatedMemory)
//!                  ┌────┼────┐                                                          ▲
//!              consumer ×n: read, classify, encode ═══ n streams ═══▶ Receiver: check, decode, write
//!                  ▲                                                                    │
//!                  └──────────────── acknowledged once it is written ◀──────────────────┘
//! ```
//!
//! - **Data parallelism** (3.1): each stream has a consumer, which takes the next task when it has room. The producer is the cutter:
//!   it walks the dirty map and cuts tasks when they are asked for, so that no queue of them takes memory.
//! - **Pipeline parallelism** (3.1): while the kernel sends one frame, the next is read and encoded, and earlier ones are written.
//! - **Image-oriented iterations** (5): a round sends what was dirty when it began. A round is over when the receiver has
//!   confirmed each of its frames. So no older version of a page lands after a newer one.
//! - **The order that nothing is lost by**: a page's dirty bit is taken before its bytes are read. What is written meanwhile sets it again.
//! - **After the stop**: [`Precopy::finish`] sends what is left. [`Precopy::verify_clean`] fails if anything was written after that.
//!
//! Time, tasks and randomness come from `env`. The engine has no thread of its own: each [`Lane`] names the environment whose worker
//! its consumer runs on. Memory is bounded: a consumer's buffers ([`CONSUMER_BYTES`]), the version cache, one bit a page.

mod dirty_map;
mod emulated;
mod error;
mod guest_memory;
mod process;
mod ram_file;
mod receiver;
mod region;
mod send;
mod transport;
pub mod wire;

pub use dirty_map::{DirtyMap, PageRun};
pub use emulated::EmulatedMemory;
pub use error::{Error, ErrorKind, Result};
pub use guest_memory::{GuestMemory, TargetMemory};
pub use process::{MappedFile, Mapping, ProcessMemory, Tracking, foreign_mappings, mapped_files};
pub use ram_file::RamFile;
pub use receiver::{RECEIVING_BYTES, Receiver};
pub use region::{PAGE_BYTES, Region};
pub use send::{
    CONSUMER_BYTES, Compression, Lane, Pace, Precopy, PrecopyOptions, Progress, RateLimit, StopReason, StopRules,
    Unpaced,
};
pub use transport::{BoxTransport, Transport};
