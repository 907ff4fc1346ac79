//! The processor time that a move takes from the hosts.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use transhume_guest::process::{cpu_of, cpu_of_thread};
use transhume_guest::{Qmp, Side};

use crate::vm::place::Place;

/// How often a QEMU is looked at that may end.
const LOOK: Duration = Duration::from_millis(20);
const CONNECT_LIMIT: Duration = Duration::from_secs(20);

/// What the processes have used, watched from before a move.
pub(super) struct Watch {
    daemons: [(u32, Duration); 2],
    is_stopping: Arc<AtomicBool>,
    source: JoinHandle<Duration>,
}

impl Watch {
    /// Begins with the guest's present QEMU and both daemons.
    pub(super) fn start(place: &Place) -> anyhow::Result<Self> {
        let daemon = |side| {
            let pid = place.hosts.daemon(side).pid().context("the daemon runs")?;
            anyhow::Ok((pid, cpu_of(pid)?))
        };
        let daemons = [daemon(Side::A)?, daemon(Side::B)?];
        let pid = place.guest.pid();
        let processor = processor_of(place.guest.folder())?;
        let is_stopping = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&is_stopping);
        let before = beside_guest(pid, processor)?;
        let source = std::thread::spawn(move || {
            let mut last = before;
            // It ends when the guest is gone, or is there until the end.
            while let Ok(used) = beside_guest(pid, processor) {
                last = used;
                if is_over.load(Ordering::Acquire) {
                    break;
                }
                std::thread::sleep(LOOK);
            }
            last.saturating_sub(before)
        });
        Ok(Self { daemons, is_stopping, source })
    }

    /// What the daemons and both QEMUs have used since, without what runs the guest. At the source that is two threads, the processor's and
    /// the devices'. At the target it is the processor's alone. The target's QEMU is `pid`, and its sockets are in `folder`.
    pub(super) fn finish(self, pid: u32, folder: &Path) -> anyhow::Result<Duration> {
        self.is_stopping.store(true, Ordering::Release);
        let mut used = cpu_of(pid)?.saturating_sub(cpu_of_thread(pid, processor_of(folder)?)?);
        for (daemon, before) in self.daemons {
            used += cpu_of(daemon)?.saturating_sub(before);
        }
        let source = self.source.join().map_err(|_| anyhow::anyhow!("the watch of QEMU panicked"))?;
        Ok(used + source)
    }
}

/// What a QEMU has used beside the threads that run the guest's processor and its devices.
fn beside_guest(pid: u32, processor: u32) -> anyhow::Result<Duration> {
    let guest = cpu_of_thread(pid, processor)? + cpu_of_thread(pid, pid)?;
    Ok(cpu_of(pid)?.saturating_sub(guest))
}

/// The thread that runs the only processor of the guest whose QEMU has its sockets in `folder`.
fn processor_of(folder: &Path) -> anyhow::Result<u32> {
    let mut qmp = Qmp::connect(&folder.join("qmp2.sock"), CONNECT_LIMIT)?;
    let processors = qmp.execute("query-cpus-fast", json!({}))?;
    let thread = processors[0]["thread-id"].as_u64().context("QEMU tells the threads of processors")?;
    u32::try_from(thread).context("threads have small numbers")
}
