//! The NBD servers that are compared, each serving one file on a unix socket.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use transhume_guest::Qmp;

use transhume_guest::process::{Process, guarded, output_of};

/// The volume's name at all servers that name theirs.
pub(crate) const VOLUME: &str = "bench";

/// Which program serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Transhume,
    Nbdkit,
    StorageDaemon,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Transhume => "transhume",
            Self::Nbdkit => "nbdkit",
            Self::StorageDaemon => "qemu-storage-daemon",
        }
    }
}

/// Where a server serves, and under which name.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    pub(crate) socket: PathBuf,
    pub(crate) export: &'static str,
}

impl Endpoint {
    /// The URI by which libnbd's programs and fio call it.
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.export, self.socket.display())
    }
}

/// A running server.
pub(crate) struct Server {
    process: Process,
    pub(crate) endpoint: Endpoint,
}

impl Server {
    /// Serves `file` from `folder`, which is this server's own.
    pub(crate) fn start(kind: Kind, programs: &Path, file: &Path, folder: &Path) -> anyhow::Result<Self> {
        match kind {
            Kind::Transhume => {
                let daemon = Transhumed::start(programs, folder)?;
                daemon.attach(VOLUME, file, &folder.join("nbd.sock"), "")?;
                let endpoint = Endpoint { socket: folder.join("nbd.sock"), export: VOLUME };
                Ok(Self { process: daemon.process, endpoint })
            }
            Kind::Nbdkit => Self::start_nbdkit(file, folder),
            Kind::StorageDaemon => Ok(StorageDaemon::start(file, folder, false)?.server),
        }
    }

    fn start_nbdkit(file: &Path, folder: &Path) -> anyhow::Result<Self> {
        let (socket, log) = (folder.join("nbd.sock"), folder.join("nbdkit.log"));
        let words = ["-f".into(), "-U".into(), path_word(&socket), "file".into(), path_word(file)];
        let mut process = Process::start(Path::new("nbdkit"), &words, &log)?;
        process.wait_for(&socket, &log)?;
        Ok(Self { process, endpoint: Endpoint { socket, export: "" } })
    }

    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        self.process.cpu()
    }
}

/// QEMU's storage daemon with a monitor, which mirrors by `blockdev-mirror`.
pub(crate) struct StorageDaemon {
    pub(crate) server: Server,
    pub(crate) qmp: Qmp,
}

impl StorageDaemon {
    /// Serves `file`, past the page cache if `is_direct`.
    pub(crate) fn start(file: &Path, folder: &Path, is_direct: bool) -> anyhow::Result<Self> {
        let (socket, monitor, log) = (folder.join("nbd.sock"), folder.join("qmp.sock"), folder.join("storage.log"));
        let node = json!({
            "driver": "file", "node-name": "source", "filename": file, "discard": "unmap",
            "cache": { "direct": is_direct }, "aio": if is_direct { "native" } else { "threads" },
        });
        let export = json!({ "type": "nbd", "id": "export", "node-name": "source", "name": VOLUME, "writable": true });
        let words = [
            ("--blockdev", node.to_string()),
            ("--chardev", format!("socket,id=monitor,path={},server=on,wait=off", monitor.display())),
            ("--monitor", "chardev=monitor".into()),
            ("--nbd-server", format!("addr.type=unix,addr.path={}", socket.display())),
            ("--export", export.to_string()),
        ];
        let words: Vec<String> = words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
        let mut process = Process::start(Path::new("qemu-storage-daemon"), &words, &log)?;
        process.wait_for(&socket, &log)?;
        let qmp = Qmp::connect(&monitor, Duration::from_secs(10))?;
        Ok(Self { server: Server { process, endpoint: Endpoint { socket, export: VOLUME } }, qmp })
    }

    /// Mirrors to `target`, a file that is created, and leaves the export on it.
    pub(crate) fn mirror(
        qmp: &mut Qmp,
        target: &Path,
        size: u64,
        copy_mode: &str,
        is_direct: bool,
    ) -> anyhow::Result<()> {
        let file = std::fs::File::create(target).context("creating the mirror's target")?;
        file.set_len(size).context("sizing the mirror's target")?;
        qmp.execute(
            "blockdev-add",
            json!({
                "driver": "file", "node-name": "target", "filename": target, "discard": "unmap",
                "cache": { "direct": is_direct }, "aio": if is_direct { "native" } else { "threads" },
            }),
        )?;
        qmp.execute(
            "blockdev-mirror",
            json!({
                "job-id": "mirror", "device": "source", "target": "target", "sync": "full", "copy-mode": copy_mode,
            }),
        )?;
        qmp.wait_for_event("BLOCK_JOB_READY", Duration::from_secs(120))?;
        qmp.execute("job-complete", json!({ "id": "mirror" }))?;
        let end = qmp.wait_for_event("BLOCK_JOB_COMPLETED", Duration::from_secs(120))?;
        match end["data"]["error"].as_str() {
            None => Ok(()),
            Some(error) => bail!("QEMU's mirror failed: {error}"),
        }
    }
}

/// Our daemon and its command line client.
pub(crate) struct Transhumed {
    pub(crate) process: Process,
    client: PathBuf,
    api: PathBuf,
}

impl Transhumed {
    /// Starts it with its state in `folder`.
    pub(crate) fn start(programs: &Path, folder: &Path) -> anyhow::Result<Self> {
        let (api, log) = (folder.join("api.sock"), folder.join("transhumed.log"));
        let state = folder.join("state");
        std::fs::create_dir_all(&state).context("creating the daemon's state folder")?;
        let listen = format!("unix:{}", api.display());
        let words = ["--state-dir".into(), path_word(&state), "--listen".into(), listen];
        let mut process = Process::start(&programs.join("transhumed"), &words, &log)?;
        process.wait_for(&api, &log)?;
        Ok(Self { process, client: programs.join("transhume"), api })
    }

    /// Runs the client and returns what it printed.
    pub(crate) fn run(&self, words: &[&str]) -> anyhow::Result<String> {
        let api = ["--api".to_owned(), format!("unix:{}", self.api.display())];
        let words: Vec<String> = api.into_iter().chain(words.iter().map(|word| (*word).to_owned())).collect();
        output_of(&self.client, &words)
    }

    /// Attaches a file as a volume; `options` follow its path (`,cache=direct`).
    pub(crate) fn attach(&self, name: &str, file: &Path, socket: &Path, options: &str) -> anyhow::Result<()> {
        let backend = format!("file:{}{options}", file.display());
        let export = format!("nbd+unix:///{name}?socket={}", socket.display());
        self.run(&["volume", "attach", name, "--backend", &backend, "--export", &export]).map(drop)
    }

    /// Runs the client with `--json` and returns the document, whether what was asked for came true or not.
    pub(crate) fn document(&self, words: &[&str]) -> anyhow::Result<Value> {
        let mut command = guarded(&self.client);
        command.args(["--api", &format!("unix:{}", self.api.display())]).args(words).arg("--json");
        let output = command.stdin(Stdio::null()).output().context("starting the client")?;
        let printed = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(printed.trim()).with_context(|| {
            format!("{words:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
        })
    }

    /// Moves a volume and returns the report.
    pub(crate) fn move_to(&self, name: &str, target: &Path, words: &[&str]) -> anyhow::Result<Value> {
        let target = format!("file:{}", target.display());
        let words = [&["move", name, "--to", &target, "--json"], words].concat();
        let printed = self.run(&words)?;
        let last = printed.trim().lines().last().unwrap_or_default();
        serde_json::from_str(printed.trim())
            .or_else(|_| serde_json::from_str(last))
            .with_context(|| format!("the report is no JSON: {printed}"))
    }
}

pub(crate) fn path_word(path: &Path) -> String {
    path.display().to_string()
}

/// The words by which `qemu-img` copies a raw file.
pub(crate) fn convert_words(options: &[&str], source: String, target: String) -> Vec<String> {
    let words = [&["convert", "-f", "raw", "-O", "raw"], options].concat();
    words.into_iter().map(str::to_owned).chain([source, target]).collect()
}
