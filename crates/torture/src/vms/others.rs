//! What others do to a VM's QEMUs: its operator, another client of a monitor. No daemon is told.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;
use transhume_guest::{Qmp, Side, TwoHosts};

use super::act::{Act, PATIENCE, VM};
use super::plan::End;
use super::watch::Seen;
use crate::testbed::text;

/// What fills a state directory.
const FILLER: &str = "filler";
/// The operator's monitor of a QEMU, and the one that the daemon of a host that a VM has come to uses.
const OPERATOR: &str = "qmp3.sock";
const DAEMONS: &str = "transhume.qmp";
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(5);
/// How long a guest is waited for that QEMU is to stop.
const STOPPED_LIMIT: Duration = Duration::from_secs(5);

impl Act {
    /// Somebody connects to the daemon's monitor of a QEMU, which serves one client at a time: whoever comes next waits for the whole
    /// `span`. The daemon of that host is killed, and starts again.
    pub(super) fn hold_monitor(&mut self, end: End, span: Duration) -> anyhow::Result<()> {
        let socket = match end {
            End::Source if self.home == self.guest.folder() => self.guest.qmp_socket(),
            End::Source => self.home.join(DAEMONS),
            End::Target => self.folder_at(self.at.other()).join(DAEMONS),
        };
        let Ok(client) = UnixStream::connect(&socket) else { return Ok(()) };
        let side = self.side(end);
        self.hosts.daemon_mut(side).kill();
        self.hosts.daemon_mut(side).start()?;
        std::thread::sleep(span);
        drop(client);
        Ok(())
    }

    /// The operator's monitor of a QEMU: one that was started here has it in the folder of the act.
    fn monitor_of(&self, qemu: &Seen) -> PathBuf {
        if qemu.folder == self.guest.folder() { self.first_monitor.clone() } else { qemu.folder.join(OPERATOR) }
    }

    /// The operator stops the guest, if it runs at the source.
    pub(super) fn stop_guest(&mut self) -> anyhow::Result<()> {
        let Some(source) = self.source_qemu() else { return Ok(()) };
        let mut qmp = Qmp::connect(&self.monitor_of(&source), CONNECT_LIMIT)?;
        if qmp.execute("query-status", json!({}))?["running"] == true {
            qmp.execute("stop", json!({}))?;
            self.is_stopped = true;
        }
        Ok(())
    }

    /// Somebody lets the source's guest go on as soon as it is stopped and QEMU takes that: it refuses while it sends.
    pub(super) fn resume_guest(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + STOPPED_LIMIT;
        while let Some(source) = self.source_qemu().filter(|_| Instant::now() < end) {
            if self.is_resumed(&source)? {
                self.is_stopped = false;
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
        self.watcher.note("nothing takes it");
        Ok(())
    }

    fn is_resumed(&self, source: &Seen) -> anyhow::Result<bool> {
        // A QEMU may end meanwhile.
        let Ok(mut qmp) = Qmp::connect(&self.monitor_of(source), CONNECT_LIMIT) else { return Ok(false) };
        let Ok(answer) = qmp.execute("query-status", json!({})) else { return Ok(false) };
        let status = answer["status"].as_str().unwrap_or_default();
        if !["paused", "postmigrate"].contains(&status) || qmp.execute("cont", json!({})).is_err() {
            return Ok(false);
        }
        self.watcher.note(&format!("the guest goes on, which was {status}"));
        Ok(true)
    }

    /// The operator lets a guest go on that he has stopped, once its move is over.
    pub(super) fn resume_if_stopped(&mut self) -> anyhow::Result<()> {
        if !std::mem::take(&mut self.is_stopped) {
            return Ok(());
        }
        let qemus = self.watcher.qemus();
        let qemu = qemus.first().context("a QEMU has the guest")?;
        Qmp::connect(&self.monitor_of(qemu), CONNECT_LIMIT)?.execute("cont", json!({}))?;
        Ok(())
    }

    pub(super) fn fill_state(&mut self, end: End) -> anyhow::Result<()> {
        crate::testbed::fill(&self.daemon(self.side(end)).state().join(FILLER))
    }

    /// The state directories have room again.
    pub(super) fn empty_states(&self) {
        for side in Side::BOTH {
            // There is one where it was filled.
            let _ = std::fs::remove_file(self.daemon(side).state().join(FILLER));
        }
    }
}

/// Adds the VM while another QEMU is behind its monitor, which ends then: to the daemon the VM was started again since it was added.
pub(super) fn add_restarted(hosts: &TwoHosts, folder: &Path, monitor: &Path) -> anyhow::Result<()> {
    let (earlier, link) = (folder.join("earlier.sock"), folder.join("monitor.sock"));
    let listening = format!("unix:{},server=on,wait=off", earlier.display());
    let mut qemu = Command::new("qemu-system-x86_64")
        .args(["-S", "-nodefaults", "-display", "none", "-m", "16", "-qmp", &listening])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("starting an earlier QEMU")?;
    let point_to = |socket: &Path| {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(socket, &link).context("pointing the VM's monitor to a QEMU")
    };
    let end = Instant::now() + PATIENCE;
    while !earlier.exists() {
        ensure!(Instant::now() < end, "the earlier QEMU does not listen");
        std::thread::sleep(LOOK);
    }
    point_to(&earlier)?;
    let added = hosts.daemon(Side::A).json(&["vm", "add", VM, "--qmp", &text(&link)]);
    qemu.kill().context("ending the earlier QEMU")?;
    qemu.wait().context("waiting for the earlier QEMU")?;
    added?;
    point_to(monitor)
}
