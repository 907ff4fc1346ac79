//! Two hosts that trust each other, and a volume that goes from one to the other and is taken back.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use anyhow::{Context, bail};
use transhume_guest::{Side, TwoHosts, TwoHostsSpec};

use super::WireBench;
use crate::server::Endpoint;
use transhume_guest::process::output_of;
use transhume_guest::programs::private_folder;

/// What is in a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// What nothing makes shorter.
    Random,
    /// By turns a MiB of zeroes and one of blocks whose second half is one byte again and again.
    Reducible,
}

/// Two running hosts.
pub(super) struct Pair {
    pub(super) hosts: TwoHosts,
    pub(super) source: PathBuf,
    pub(super) bytes: u64,
    folder: tempfile::TempDir,
    count: AtomicU32,
}

/// A volume that is served on the source.
pub(super) struct Attached {
    name: &'static str,
    pub(super) endpoint: Endpoint,
}

/// Every volume has it: the one before is gone.
const NAME: &str = "bench";

/// What a move took.
pub(super) struct Moved {
    /// From the order to the report.
    pub(super) seconds: f64,
    /// All that was given to the connections.
    pub(super) bytes_sent: u64,
    /// Of the volume, what was sent twice or more.
    pub(super) bytes_again: u64,
}

impl Pair {
    /// Two hosts and a volume of the usual size.
    pub(super) fn start(bench: &WireBench, spec: TwoHostsSpec<'_>, content: Content) -> anyhow::Result<Self> {
        Self::of(bench, spec, content, bench.bytes)
    }

    /// Two hosts and a volume of `bytes`.
    pub(super) fn of(bench: &WireBench, spec: TwoHostsSpec<'_>, content: Content, bytes: u64) -> anyhow::Result<Self> {
        let folder = private_folder(bench.memory.path())?;
        let source = folder.path().join("source.raw");
        fill(&source, bytes, content)?;
        let mut hosts = TwoHosts::new(&bench.programs, folder.path(), spec)?;
        hosts.start()?;
        hosts.pair()?;
        Ok(Self { hosts, source, bytes, folder, count: AtomicU32::new(0) })
    }

    /// Has both daemons use one core between them, or all there are.
    pub(super) fn on_one_core(&self, is_one: bool) -> anyhow::Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let list = if is_one { "0".to_owned() } else { format!("0-{}", cores - 1) };
        for side in Side::BOTH {
            let pid = self.hosts.daemon(side).pid().context("the daemon runs")?.to_string();
            output_of(Path::new("taskset"), &["-a", "-c", "-p", &list, &pid].map(str::to_owned))?;
        }
        Ok(())
    }

    /// Has the machine give as much memory as the target will take, and gives it back. The host of a virtual machine
    /// takes free memory away. The machine then waits up to 3 s for each GiB that it did not use, whoever writes to it.
    pub(super) fn warm(&self) -> anyhow::Result<()> {
        let path = self.path("warm");
        let mut file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        let block = vec![1; 1 << 20];
        for _ in 0..self.bytes.div_ceil(block.len() as u64) {
            file.write_all(&block).context("warming memory")?;
        }
        std::fs::remove_file(&path).context("giving memory back")
    }

    /// How many bytes the source's host has sent over a link, headers and all.
    pub(super) fn sent_over(&self, link: usize) -> anyhow::Result<u64> {
        let path = format!("/sys/class/net/wire{link}/statistics/tx_bytes");
        let output = self.hosts.command(Side::A, "cat").arg(&path).output().context("starting cat")?;
        String::from_utf8_lossy(&output.stdout).trim().parse().with_context(|| format!("reading {path}"))
    }

    /// A path in the pair's folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Serves the source file on the source host.
    pub(super) fn attach(&self) -> anyhow::Result<Attached> {
        let socket = self.path(&format!("nbd-{}", self.count.fetch_add(1, Ordering::Relaxed)));
        let backend = format!("file:{}", self.source.display());
        let export = format!("nbd+unix:///{NAME}?socket={}", socket.display());
        let daemon = self.hosts.daemon(Side::A);
        daemon.json(&["volume", "attach", NAME, "--backend", &backend, "--export", &export])?;
        Ok(Attached { name: NAME, endpoint: Endpoint { socket, export: NAME } })
    }

    /// Moves it.
    pub(super) fn order_move(&self, volume: &Attached) -> anyhow::Result<Moved> {
        let to = format!("{}:{}", Side::B.name(), volume.name);
        let started = Instant::now();
        let report = self.hosts.daemon(Side::A).json(&["move", volume.name, "--to", &to, "--verify", "off"])?;
        let seconds = started.elapsed().as_secs_f64();
        if report.get("error").is_some_and(|error| !error.is_null()) {
            bail!("the move failed: {report}");
        }
        let sent = |name: &str| report["stream"][name].as_u64();
        let bytes_sent = sent("bytes_sent").with_context(|| format!("the report tells what was sent: {report}"))?;
        Ok(Moved { seconds, bytes_sent, bytes_again: sent("bytes_again").unwrap_or(0) })
    }

    /// Forgets the volume on both hosts; the source file is as before.
    pub(super) fn take_back(&self, volume: Attached) -> anyhow::Result<()> {
        for side in Side::BOTH {
            detach(&self.hosts, side, volume.name)?;
        }
        let arrived = self.hosts.incoming(Side::B).join(format!("{}.raw", volume.name));
        std::fs::remove_file(&arrived).with_context(|| format!("removing {}", arrived.display()))?;
        for entry in std::fs::read_dir(self.folder.path()).context("looking for the old copy")? {
            let path = entry.context("looking for the old copy")?.path();
            if path.to_string_lossy().contains(".moved-") {
                std::fs::rename(&path, &self.source).context("giving the old copy its name back")?;
            }
        }
        Ok(())
    }

    /// A move of a volume that nobody uses.
    pub(super) fn move_over(&self) -> anyhow::Result<Moved> {
        let volume = self.attach()?;
        self.warm()?;
        let moved = self.order_move(&volume)?;
        self.take_back(volume)?;
        Ok(moved)
    }
}

/// A host whose client has just gone counts it for a while.
fn detach(hosts: &TwoHosts, side: Side, name: &str) -> anyhow::Result<()> {
    let mut last = None;
    for _ in 0..100 {
        match hosts.daemon(side).ask(&["volume", "detach", name])? {
            Ok(_) => return Ok(()),
            Err(refusal) => last = Some(refusal),
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    bail!("{name} cannot be detached on {}: {last:?}", side.name())
}

fn fill(path: &Path, bytes: u64, content: Content) -> anyhow::Result<()> {
    const STEP: usize = 1 << 20;
    let mut file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = vec![0_u8; STEP];
    for step in 0..bytes.div_ceil(STEP as u64) {
        if content == Content::Reducible && step % 2 == 1 {
            block.fill(0);
        } else {
            for word in block.as_chunks_mut::<8>().0 {
                // xorshift64: nothing that compresses sees through it.
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                *word = state.to_le_bytes();
            }
            if content == Content::Reducible {
                block.as_chunks_mut::<4096>().0.iter_mut().for_each(|page| page[2048..].fill(7));
            }
        }
        file.write_all(&block).with_context(|| format!("filling {}", path.display()))?;
    }
    file.set_len(bytes).context("sizing the source")
}
