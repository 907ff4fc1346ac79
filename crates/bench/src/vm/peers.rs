//! What QEMU does by itself: a migration with a shared disk, and the recipe for one that takes its disk with it.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use transhume_guest::{Authority, GOOD_YEARS, Qmp, Side};

use super::felt::Ended;
use super::moment::{now_unix_ms, unix_ms};
use super::place::{MEMORY_FILE, NODE, PATIENCE, Place};

const MIGRATION_PORT: u16 = 10811;
const NBD_PORT: u16 = 10812;
/// As fast as the links are.
const UNLIMITED_BYTES: u64 = 1 << 40;
/// What QEMU calls its certificates.
const TLS: &str = "tls0";
const CONNECT_LIMIT: Duration = Duration::from_secs(20);

/// The QEMU that has the guest now. Dropping it kills that.
pub(super) struct Peer(Child);

impl Peer {
    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How memory is migrated.
#[derive(Clone, Copy)]
pub(super) struct How {
    pub(super) channels: u8,
    pub(super) downtime_limit_ms: u64,
    pub(super) is_encrypted: bool,
}

/// Both QEMUs.
struct Pair {
    source: Qmp,
    target: Qmp,
    peer: Peer,
    machine: String,
    how: How,
    /// When the memory began to be copied.
    began_unix_ms: f64,
}

impl Pair {
    /// Starts a QEMU on the other host that waits for the guest, its disk in `disk`.
    fn start(place: &Place, disk: &Path, how: How, words: &[&str]) -> anyhow::Result<Self> {
        let folder = place.folder().join("peer");
        std::fs::create_dir(&folder).context("making a folder for the other QEMU")?;
        let log = std::fs::File::create(folder.join("qemu.log")).context("creating QEMU's log")?;
        let (own, other) = (place.disk.display().to_string(), disk.display().to_string());
        // A memory in a file is another file there.
        let memory_in = |folder: &Path| format!("mem-path={}", folder.join(MEMORY_FILE).display());
        let (memory, elsewhere) = (memory_in(place.folder()), memory_in(&folder));
        let arguments = place.guest.arguments_in(&folder).into_iter();
        let arguments = arguments.map(|word| word.replace(&own, &other).replace(&memory, &elsewhere));
        let mut command = place.hosts.command(Side::B, "qemu-system-x86_64");
        command.args(arguments).args(["-incoming", "defer"]).args(words).stdout(Stdio::null()).stderr(log);
        let peer = Peer(command.spawn().context("starting qemu-system-x86_64")?);
        let target = Qmp::connect(&folder.join("qmp.sock"), CONNECT_LIMIT)?;
        let source = Qmp::connect(&place.guest.qmp_socket(), CONNECT_LIMIT)?;
        let mut pair = Self { source, target, peer, machine: place.hosts.machine(Side::B, 0), how, began_unix_ms: 0.0 };
        if how.is_encrypted {
            pair.trust(&folder.join("tls"))?;
        }
        Ok(pair)
    }

    /// Gives both certificates of one authority.
    fn trust(&mut self, folder: &Path) -> anyhow::Result<()> {
        let authority = Authority::new("migration")?;
        authority.write(folder)?;
        authority.write_server(folder, &[&self.machine], GOOD_YEARS, 1)?;
        authority.write_client(folder, GOOD_YEARS)?;
        for (qmp, endpoint) in [(&mut self.target, "server"), (&mut self.source, "client")] {
            let credentials = json!({ "qom-type": "tls-creds-x509", "id": TLS, "endpoint": endpoint, "dir": folder });
            qmp.execute("object-add", credentials)?;
        }
        Ok(())
    }

    /// Adds the certificates to what names them.
    fn with_tls(&self, mut arguments: Value) -> Value {
        if self.how.is_encrypted {
            arguments["tls-creds"] = TLS.into();
        }
        arguments
    }

    /// Sets both up, and begins the migration.
    fn begin(&mut self, capabilities: &[&str]) -> anyhow::Result<()> {
        let how = self.how;
        let mut common = vec!["events"];
        let limits = json!({ "max-bandwidth": UNLIMITED_BYTES, "downtime-limit": how.downtime_limit_ms });
        let (mut parameters, mut incoming) = (self.with_tls(limits), self.with_tls(json!({})));
        if how.channels > 1 {
            common.push("multifd");
            parameters["multifd-channels"] = how.channels.into();
            incoming["multifd-channels"] = how.channels.into();
        }
        let on = |names: &[&str]| -> Value {
            let on = names.iter().map(|name| json!({ "capability": name, "state": true }));
            json!({ "capabilities": on.collect::<Vec<_>>() })
        };
        self.target.execute("migrate-set-capabilities", on(&common))?;
        self.source.execute("migrate-set-capabilities", on(&[&common, capabilities].concat()))?;
        self.target.execute("migrate-set-parameters", incoming)?;
        self.source.execute("migrate-set-parameters", parameters)?;
        let uri = format!("tcp:{}:{MIGRATION_PORT}", self.machine);
        self.target.execute("migrate-incoming", json!({ "uri": uri }))?;
        self.began_unix_ms = now_unix_ms();
        self.source.execute("migrate", json!({ "uri": uri })).map(drop)
    }

    /// Waits until QEMU's migration is in this phase.
    fn wait_for(qmp: &mut Qmp, phase: &str) -> anyhow::Result<()> {
        loop {
            let event = qmp.wait_for_event("MIGRATION", PATIENCE)?;
            match event["data"]["status"].as_str().unwrap_or_default() {
                status if status == phase => return Ok(()),
                "failed" | "cancelled" => {
                    bail!("QEMU's migration failed: {}", qmp.execute("query-migrate", json!({}))?)
                }
                _ => {}
            }
        }
    }

    /// The guest runs at the target.
    fn ended(mut self, began_unix_ms: f64) -> anyhow::Result<Ended> {
        let ran = unix_ms(&self.target.wait_for_event("RESUME", PATIENCE)?)?;
        let stopped = unix_ms(&self.source.wait_for_event("STOP", PATIENCE)?)?;
        let seconds = (now_unix_ms() - began_unix_ms) / 1e3;
        let memory_seconds = (ran - self.began_unix_ms) / 1e3;
        let told = self.source.execute("query-migrate", json!({}))?;
        let rounds = told["ram"]["dirty-sync-count"].as_u64().unwrap_or_default();
        let stopped_ms = ran - stopped;
        Ok(Ended { seconds, stopped_ms, memory_seconds, rounds, forecast: None, keeps: Some(self.peer) })
    }
}

/// QEMU's own migration to another QEMU on the same file.
pub(super) fn shared_disk(place: &mut Place, how: How) -> anyhow::Result<Ended> {
    let began = now_unix_ms();
    let disk = place.disk.clone();
    let mut pair = Pair::start(place, &disk, how, &[])?;
    place.guest.follow(&place.folder().join("peer"))?;
    pair.begin(&[])?;
    Pair::wait_for(&mut pair.source, "completed")?;
    pair.ended(began)
}

/// QEMU's recipe: the disk is mirrored to an export of the target's QEMU, then the memory migrates, and the mirror ends while
/// the guest is stopped.
pub(super) fn recipe(place: &mut Place, how: How) -> anyhow::Result<Ended> {
    let began = now_unix_ms();
    let disk = blank(place)?;
    let mut pair = Pair::start(place, &disk, how, &["-S"])?;
    place.guest.follow(&place.folder().join("peer"))?;
    let address = |machine: &str| json!({ "host": machine, "port": NBD_PORT.to_string() });
    let server = json!({ "type": "inet", "data": address(&pair.machine) });
    pair.target.execute("nbd-server-start", pair.with_tls(json!({ "addr": server })))?;
    let export = json!({ "type": "nbd", "id": "export", "node-name": NODE, "name": NODE, "writable": true });
    pair.target.execute("block-export-add", export)?;
    let mut server = address(&pair.machine);
    server["type"] = "inet".into();
    let node = json!({ "driver": "nbd", "node-name": "mirrored", "export": NODE, "server": server });
    pair.source.execute("blockdev-add", pair.with_tls(node))?;
    let job = json!({
        "job-id": "mirror", "device": NODE, "target": "mirrored", "sync": "full", "copy-mode": "write-blocking",
    });
    pair.source.execute("blockdev-mirror", job)?;
    pair.source.wait_for_event("BLOCK_JOB_READY", PATIENCE)?;
    pair.begin(&["pause-before-switchover"])?;
    Pair::wait_for(&mut pair.source, "pre-switchover")?;
    pair.source.execute("block-job-cancel", json!({ "device": "mirror" }))?;
    let over = pair.source.wait_for_event("BLOCK_JOB_COMPLETED", PATIENCE)?;
    if let Some(error) = over["data"]["error"].as_str() {
        bail!("QEMU's mirror failed: {error}");
    }
    pair.source.execute("migrate-continue", json!({ "state": "pre-switchover" }))?;
    Pair::wait_for(&mut pair.source, "completed")?;
    pair.target.execute("nbd-server-stop", json!({}))?;
    pair.target.execute("cont", json!({}))?;
    pair.ended(began)
}

/// An empty file of the disk's size at the other host.
fn blank(place: &Place) -> anyhow::Result<PathBuf> {
    let path = place.folder().join("peer.raw");
    let bytes = std::fs::metadata(&place.disk).context("asking for the disk's size")?.len();
    let file = std::fs::File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    file.set_len(bytes).context("sizing the peer's disk")?;
    Ok(path)
}
