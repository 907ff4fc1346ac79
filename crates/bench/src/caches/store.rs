//! The storage that both hosts reach: nbdkit in the network behind both, over a file in memory. What it answers goes through one bucket of the
//! kernel (`tbf`), for both hosts: nbdkit's own filter wakes every request that waits whenever one may go, which took most of a core here.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use transhume_guest::process::output_of;
use transhume_guest::{Side, TwoHosts};

use crate::server::path_word;
use crate::vm::place::Place;

/// Its address in the network of the guests, and those that the hosts get there.
const ADDRESS: &str = "10.88.0.1";
const HOST_ADDRESSES: [(Side, &str); 2] = [(Side::A, "10.88.0.2/24"), (Side::B, "10.88.0.3/24")];
const PORT: u16 = 10899;
/// What the answer to a read of 4 KiB takes on the wire, in bits: three packets.
const ANSWER_BITS: u64 = (4096 + 28 + 3 * 66) * 8;
/// For how long of idling it may catch up, and what may wait, in bytes: the answers to all that both hosts ask at a time.
const BURST_BYTES: u64 = 256 << 10;
const WAITING_BYTES: u64 = 32 << 20;
/// The store's interface in its network.
const INTERFACE: &str = "br0";
/// How long it may take to listen.
const START_LIMIT: Duration = Duration::from_secs(20);

/// The address by which both hosts know it.
pub(super) fn uri() -> String {
    format!("nbd://{ADDRESS}:{PORT}/")
}

/// A running store. Dropping it ends the server.
pub(super) struct Store {
    server: Child,
    file: PathBuf,
    namespace: String,
}

impl Store {
    /// A store of `bytes` in the network of the place's guest, which both hosts are made to reach.
    pub(super) fn start(place: &Place, bytes: u64) -> anyhow::Result<Self> {
        for (side, address) in HOST_ADDRESSES {
            let words = ["addr", "add", address, "dev", INTERFACE];
            let status = place.hosts.command(side, "ip").args(words).status().context("starting ip")?;
            ensure!(status.success(), "a host has no address in the network of the store");
        }
        let file = place.folder().join("store.raw");
        std::fs::File::create(&file).and_then(|made| made.set_len(bytes)).context("making the store's file")?;
        let log = std::fs::File::create(place.folder().join("store.log")).context("making the store's log")?;
        let server = place
            .network
            .command("nbdkit")
            .args(["--foreground", "--ipaddr", ADDRESS, "--port", &PORT.to_string(), "file"])
            .arg(&file)
            .stderr(log)
            .spawn()
            .context("starting nbdkit")?;
        let namespace = place.network.namespace().to_owned();
        let mut store = Self { server, file, namespace };
        store.wait_for(&place.hosts)?;
        Ok(store)
    }

    fn wait_for(&mut self, hosts: &TwoHosts) -> anyhow::Result<()> {
        let end = Instant::now() + START_LIMIT;
        loop {
            let asked =
                hosts.command(Side::A, "nbdinfo").args(["--size", &uri()]).output().context("starting nbdinfo")?;
            if asked.status.success() {
                return Ok(());
            }
            if self.server.try_wait().context("asking for a child")?.is_some() || Instant::now() > end {
                bail!("nbdkit does not come up: {}", String::from_utf8_lossy(&asked.stderr).trim());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Answers at most so many reads of 4 KiB a second from now on, to both hosts together; `None` as many as the machine can.
    pub(super) fn limit(&self, reads_per_second: Option<u64>) -> anyhow::Result<()> {
        let namespace = &self.namespace;
        let (change, bucket) = match reads_per_second {
            None => ("del", String::new()),
            Some(reads) => {
                let bits = reads * ANSWER_BITS;
                ("replace", format!(" tbf rate {bits}bit burst {BURST_BYTES} limit {WAITING_BYTES}"))
            }
        };
        let words = format!("-n {namespace} qdisc {change} dev {INTERFACE} root{bucket}");
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        match output_of(Path::new("tc"), &words) {
            // There is none to remove.
            Err(_) if reads_per_second.is_none() => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    /// Fails unless `export` reads as the store's file from beginning to end.
    pub(super) fn compare(&self, export: &str) -> anyhow::Result<()> {
        let words = ["compare", "-f", "raw", "-F", "raw"].map(str::to_owned);
        let words: Vec<String> = words.into_iter().chain([path_word(&self.file), export.to_owned()]).collect();
        output_of(Path::new("qemu-img"), &words).map(drop).context("the volume is not what the store has")
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
