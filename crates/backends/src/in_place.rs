//! Calls that a file system may take its time with, or never answer.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Carries out `work`, which may block for long. Where several threads share the tasks of this runtime, others take
/// over this thread's tasks meanwhile. So a file system that hangs delays only its caller.
pub fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}
