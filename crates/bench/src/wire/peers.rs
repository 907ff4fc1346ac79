//! What others make of the same bytes over the same link.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::json;
use transhume_guest::{Qmp, Side};

use super::pair::Pair;
use crate::server::{Endpoint, VOLUME};

const PORT: u16 = 10809;

/// A program that is killed when this is dropped.
pub(super) struct Running(Child);

impl Running {
    /// Starts it; what it says goes to the file `log`.
    pub(super) fn start(mut command: Command, log: &std::path::Path) -> anyhow::Result<Self> {
        let out = std::fs::File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let child = command.stdout(Stdio::null()).stderr(out).spawn();
        Ok(Self(child.with_context(|| format!("starting {command:?}: run `make setup`"))?))
    }

    fn wait_for(&mut self, path: &std::path::Path, log: &std::path::Path) -> anyhow::Result<()> {
        let end = Instant::now() + Duration::from_secs(20);
        while !path.exists() {
            if self.0.try_wait().context("asking for a child")?.is_some() || Instant::now() > end {
                bail!("it did not come up: {}", std::fs::read_to_string(log).unwrap_or_default().trim());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An empty file of the source's size on the target host's side.
fn target(pair: &Pair) -> anyhow::Result<PathBuf> {
    let path = pair.path("peer.raw");
    let file = std::fs::File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    file.set_len(pair.bytes).context("sizing the peer's target")?;
    Ok(path)
}

/// `nbdcopy` to `nbdkit file` on the other host, in seconds.
pub(super) fn nbdcopy(pair: &Pair) -> anyhow::Result<f64> {
    let (file, pid, log) = (target(pair)?, pair.path("nbdkit.pid"), pair.path("nbdkit.log"));
    // It may not be there.
    let _ = std::fs::remove_file(&pid);
    let mut command = pair.hosts.command(Side::B, "nbdkit");
    command.args(["-f", "-p", &PORT.to_string(), "-P"]).arg(&pid).arg("file").arg(&file);
    let mut server = Running::start(command, &log)?;
    server.wait_for(&pid, &log)?;
    let uri = format!("nbd://{}:{PORT}", pair.hosts.machine(Side::B, 0));
    pair.warm()?;
    let started = Instant::now();
    let mut command = pair.hosts.command(Side::A, "nbdcopy");
    let output = command.arg("--flush").arg(&pair.source).arg(&uri).output().context("starting nbdcopy")?;
    let seconds = started.elapsed().as_secs_f64();
    if !output.status.success() {
        bail!("nbdcopy: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    drop(server);
    std::fs::remove_file(&file).context("removing the peer's target")?;
    Ok(seconds)
}

/// QEMU's storage daemon on both hosts: one serves the volume and mirrors it to an export of the other.
pub(super) struct Mirror {
    pub(super) endpoint: Endpoint,
    qmp: Qmp,
    _servers: [Running; 2],
    target: PathBuf,
    machine: String,
}

impl Mirror {
    pub(super) fn start(pair: &Pair) -> anyhow::Result<Self> {
        let file = target(pair)?;
        let machine = pair.hosts.machine(Side::B, 0);
        let there = Self::storage_daemon(
            pair,
            (Side::B, "there"),
            json!({ "driver": "file", "node-name": "source", "filename": file, "discard": "unmap" }),
            &format!("addr.type=inet,addr.host={machine},addr.port={PORT}"),
        )?;
        let socket = pair.path("qemu.sock");
        // It may not be there.
        let _ = std::fs::remove_file(&socket);
        let here = Self::storage_daemon(
            pair,
            (Side::A, "here"),
            json!({ "driver": "file", "node-name": "source", "filename": pair.source, "discard": "unmap" }),
            &format!("addr.type=unix,addr.path={}", socket.display()),
        )?;
        let qmp = Qmp::connect(&pair.path("here.qmp"), Duration::from_secs(10))?;
        let endpoint = Endpoint { socket, export: VOLUME };
        Ok(Self { endpoint, qmp, _servers: [here, there], target: file, machine })
    }

    fn storage_daemon(
        pair: &Pair,
        (side, name): (Side, &str),
        node: serde_json::Value,
        server: &str,
    ) -> anyhow::Result<Running> {
        let (pid, log) = (pair.path(&format!("{name}.pid")), pair.path(&format!("{name}.log")));
        // It may not be there.
        let _ = std::fs::remove_file(&pid);
        let export = json!({ "type": "nbd", "id": "export", "node-name": "source", "name": VOLUME, "writable": true });
        let monitor =
            format!("socket,id=monitor,path={},server=on,wait=off", pair.path(&format!("{name}.qmp")).display());
        let mut command = pair.hosts.command(side, "qemu-storage-daemon");
        command.args(["--blockdev", &node.to_string(), "--chardev", &monitor, "--monitor", "chardev=monitor"]);
        command.args(["--nbd-server", server, "--export", &export.to_string(), "--pidfile"]).arg(&pid);
        let mut running = Running::start(command, &log)?;
        running.wait_for(&pid, &log)?;
        Ok(running)
    }

    /// Mirrors, and leaves the export on the target; gives the seconds from the order to the end.
    pub(super) fn mirror(&mut self) -> anyhow::Result<f64> {
        let started = Instant::now();
        self.qmp.execute(
            "blockdev-add",
            json!({
                "driver": "nbd", "node-name": "target", "export": VOLUME,
                "server": { "type": "inet", "host": self.machine, "port": PORT.to_string() },
            }),
        )?;
        self.qmp.execute(
            "blockdev-mirror",
            json!({ "job-id": "mirror", "device": "source", "target": "target", "sync": "full", "copy-mode": "background" }),
        )?;
        self.qmp.wait_for_event("BLOCK_JOB_READY", Duration::from_secs(120))?;
        self.qmp.execute("job-complete", json!({ "id": "mirror" }))?;
        let end = self.qmp.wait_for_event("BLOCK_JOB_COMPLETED", Duration::from_secs(120))?;
        if let Some(error) = end["data"]["error"].as_str() {
            bail!("QEMU's mirror failed: {error}");
        }
        Ok(started.elapsed().as_secs_f64())
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // What cannot be removed goes with the folder.
        let _ = std::fs::remove_file(&self.target);
    }
}
