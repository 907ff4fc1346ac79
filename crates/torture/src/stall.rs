//! One thread of the daemon stops while the others run on, as one that the kernel does not schedule does.
//!
//! Signals stop whole processes, so the thread is traced. It stops at the next instruction, or at the end of the system
//! call that it is in.

use anyhow::{Context, ensure};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// The daemon's threads that serve connections are called so, and a number.
const WORKER: &str = "data-";

/// A thread that does not run. Dropping this lets it go on.
pub(super) struct Stalled {
    thread: Pid,
}

impl Stalled {
    /// Stops the worker number `number` (counted round and round) of the process `daemon`. Must be dropped by the thread
    /// that has called this.
    pub(super) fn worker(daemon: u32, number: usize) -> anyhow::Result<Self> {
        let mut workers = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{daemon}/task")).context("listing the daemon's threads")? {
            let path = task.context("listing the daemon's threads")?.path();
            let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
            let id = path.file_name().and_then(|id| id.to_str()?.parse::<i32>().ok());
            workers.extend(id.filter(|_| name.starts_with(WORKER)));
        }
        workers.sort_unstable();
        ensure!(!workers.is_empty(), "no thread of the daemon is called {WORKER}...");
        let thread = Pid::from_raw(workers[number % workers.len()]);
        ptrace::seize(thread, ptrace::Options::empty()).context("tracing a worker")?;
        let stalled = Self { thread };
        ptrace::interrupt(thread).context("stopping a worker")?;
        waitpid(thread, Some(WaitPidFlag::__WALL)).context("waiting for a worker to stop")?;
        Ok(stalled)
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        // The whole process may have ended.
        let _ = ptrace::detach(self.thread, None);
    }
}
