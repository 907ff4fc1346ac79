//! Which QEMUs run with a monitor.
//!
//! A path is a part of many command lines: another VM's name may begin with it, a log may lie beside it, and a word may only mention it.
//! So a process has a monitor only if it was started to listen at exactly that path.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vm::QemuProcess;
use vm::machine::{FoundMachine, MachineDescription};

/// A QEMU, and the unix sockets of the QMP monitors that it was started with.
#[derive(Clone, Debug)]
pub struct MonitoredProcess {
    /// The process.
    pub process: QemuProcess,
    /// The monitors.
    pub monitors: Vec<PathBuf>,
}

impl MonitoredProcess {
    /// Every QEMU that this process may look at.
    pub(super) fn all() -> Vec<Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter_map(Self::of).collect()
    }

    fn of(pid: u32) -> Option<Self> {
        let description = MachineDescription::of_process(pid).ok().flatten()?;
        let folder = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_else(|_| PathBuf::from("/"));
        // What has the number now had it when its words were read: they name no monitor of a process that came since.
        let process = QemuProcess::of(pid)?;
        Some(Self { process, monitors: FoundMachine::monitors_of(&description, &folder) })
    }
}

/// Those of `processes` that were started with the monitor at `path` of this process's file systems. A container's may be called the same,
/// and is another one: `folder_of` says which folder a path is in, as a process or this one (`None`) sees it. Of a folder that is gone
/// on both sides only its name is left.
#[must_use]
pub fn started_with(
    processes: &[MonitoredProcess],
    path: &Path,
    folder_of: impl Fn(Option<&QemuProcess>, &Path) -> Option<(u64, u64)>,
) -> Vec<QemuProcess> {
    let here = folder_of(None, path);
    let is_it = |process: &QemuProcess, monitor: &Path| match (folder_of(Some(process), monitor), here) {
        (Some(there), Some(here)) => there == here && monitor.file_name() == path.file_name(),
        (None, None) => monitor == path,
        (Some(_), None) | (None, Some(_)) => false,
    };
    let has_it = |found: &&MonitoredProcess| found.monitors.iter().any(|monitor| is_it(&found.process, monitor));
    processes.iter().filter(has_it).map(|found| found.process.clone()).collect()
}

/// Every QEMU that has the monitor at `path`.
pub(crate) fn listening_at(path: &Path) -> Vec<QemuProcess> {
    started_with(&MonitoredProcess::all(), path, |process, path| {
        let root = process.map_or_else(|| PathBuf::from("/"), |process| format!("/proc/{}/root", process.pid).into());
        folder_of(&root, path)
    })
}

/// The folder that `path` is in, below `root`. Processes with mounts of their own may share it.
fn folder_of(root: &Path, path: &Path) -> Option<(u64, u64)> {
    let folder = path.parent()?;
    let found = std::fs::metadata(root.join(folder.strip_prefix("/").unwrap_or(folder))).ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn process(pid: u32) -> QemuProcess {
        QemuProcess { pid, started: u64::from(pid), boot: "boot".to_owned() }
    }

    fn monitor(name: &str) -> PathBuf {
        Path::new("/run/transhume/vm").join(name).join("transhume.qmp")
    }

    proptest! {
        /// Names that begin with each other, end with each other, or contain each other.
        #[test]
        fn only_who_listens_at_exactly_that_path_has_it(
            names in proptest::collection::vec("[ab]{1,3}", 1..8),
            wanted in "[ab]{1,3}",
            affixes in proptest::collection::vec(("[ab.-]{0,2}", "[ab.-]{0,2}"), 0..4),
        ) {
            let mut processes: Vec<_> = (1..).zip(&names).map(|(pid, name)| {
                MonitoredProcess { process: process(pid), monitors: vec![PathBuf::from("/run/own.qmp"), monitor(name)] }
            }).collect();
            let path = monitor(&wanted);
            for (pid, (before, after)) in (100..).zip(&affixes).filter(|(_, (before, after))| !(before.clone() + after).is_empty()) {
                let other = PathBuf::from(format!("{before}{}{after}", path.display()));
                processes.push(MonitoredProcess { process: process(pid), monitors: vec![other] });
            }
            let expected: Vec<_> = (1..).zip(&names).filter(|(_, name)| **name == wanted).map(|(pid, _)| process(pid)).collect();
            prop_assert_eq!(started_with(&processes, &path, |_, _| None), expected);
        }
    }
}
