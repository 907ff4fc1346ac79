//! What must hold once a move is over.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::Value;
use transhume_guest::pattern::{self, BLOCK_BYTES, Fault};

use super::act::{Act, VM};

impl Act {
    /// What is not as it must be yet. `at` is where the VM should be.
    pub(super) fn unsettled(&mut self) -> anyhow::Result<Option<String>> {
        let (here, there) = (self.at, self.at.other());
        let shown = self.daemon(here).json(&["vm", "show", VM])?;
        let qemus = self.watcher.qemus();
        let wrong = |what: String| Ok(Some(what));
        if self.has_crashed && qemus.is_empty() {
            if shown["state"] != "gone" {
                return wrong(format!("{} does not know that its QEMU has ended: {shown}", here.name()));
            }
        } else {
            let state = if self.is_stopped { "paused" } else { "running" };
            if shown["state"] != state || !shown["problem"].is_null() {
                return wrong(format!("it is not {state} at {}: {shown}", here.name()));
            }
            let [qemu] = &qemus[..] else { return wrong(format!("these QEMUs are there: {qemus:?}")) };
            if shown["pid"] != qemu.pid || qemu.status != state {
                return wrong(format!("{qemu:?} is not what {} says: {shown}", here.name()));
            }
            // The source's QEMU was to be killed, and the guest was at the target already.
            self.has_crashed = false;
        }
        let others = self.daemon(there).json(&["vm", "ls"])?;
        let stays = |vm: &Value| vm["state"] != "moved" || vm["host"] != here.name();
        if let Some(vm) = others.as_array().into_iter().flatten().find(|vm| stays(vm)) {
            return wrong(format!("{} says something else of it: {vm}", there.name()));
        }
        let volumes = self.daemon(here).json(&["volume", "ls"])?;
        let is_here = |volume: &Value| volume["backend"].as_str().is_some_and(|backend| backend.starts_with("file:"));
        let volumes = volumes.as_array().cloned().unwrap_or_default();
        // A QEMU that has ended opens no file: what was not given back to it by then stays a volume.
        let expected = match self.has_crashed {
            true => 0..=self.disks,
            false if self.is_released => 0..=0,
            // A machine that never moved has its disks adopted only since its first move.
            false => self.disks..=self.disks,
        };
        if !expected.contains(&volumes.len()) || !volumes.iter().all(is_here) {
            return wrong(format!("these of its disks are volumes at {}: {volumes:?}", here.name()));
        }
        let disks = shown["disks"].as_array().map_or(0, Vec::len);
        if !self.has_crashed && disks != self.disks {
            return wrong(format!("its disks are not at {}: {shown}", here.name()));
        }
        // The name of a memory that has come is taken away once its guest runs.
        let memories = std::fs::read_dir(self.memory_folder.path()).context("reading the memories' folder")?.flatten();
        let is_made = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("transhume-");
        if let Some(left) = memories.into_iter().find(is_made) {
            return wrong(format!("the file of a memory is left: {}", left.path().display()));
        }
        let left = self.daemon(there).json(&["volume", "ls"])?;
        if left != Value::Array(Vec::new()) {
            return wrong(format!("volumes are left at {}: {left}", there.name()));
        }
        let incoming = self.hosts.incoming(there);
        let left: Vec<_> = std::fs::read_dir(&incoming)?.flatten().map(|entry| entry.file_name()).collect();
        if !left.is_empty() {
            return wrong(format!("files are left at {}: {left:?}", there.name()));
        }
        let shared: Vec<_> = std::fs::read_dir(&self.shared)?.flatten().map(|entry| entry.file_name()).collect();
        if shared.len() != usize::from(self.shares) {
            return wrong(format!("what both hosts reach is not as it was: {shared:?}"));
        }
        let folder = self.folder_at(there);
        if folder.exists() {
            return wrong(format!("sockets are left at {}: {}", there.name(), folder.display()));
        }
        Ok(None)
    }
}

/// Fails unless every block of a disk is one that its guest has written there, or tried to as it crashed.
pub(super) fn check_disk(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut bytes = vec![0; BLOCK_BYTES];
    for block in 0..super::act::DISK_BYTES / BLOCK_BYTES as u64 {
        input.read_exact(&mut bytes).with_context(|| format!("reading {}", path.display()))?;
        let mut generation = 1;
        if let Err(Fault::Newer { found }) = pattern::check(&bytes, block, generation) {
            generation = found;
        }
        let checked = pattern::check(&bytes, block, generation);
        ensure!(checked.is_ok(), "block {block} of {}: {checked:?}", path.display());
    }
    Ok(())
}
