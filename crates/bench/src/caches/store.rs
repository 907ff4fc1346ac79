//! The storage that both hosts reach: nbdkit in the network behind both, over a file in memory, as fast as it is told to be.

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
/// What a request reads or writes, in bits.
const REQUEST_BITS: u64 = 4096 * 8;
/// As fast as the machine.
const UNLIMITED: u64 = 1 << 40;
/// For how long of idling it may catch up, in seconds.
const BURST_SECONDS: &str = "0.1";
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
    rate: PathBuf,
}

impl Store {
    /// A store of `bytes` in the network of the place's guest, which both hosts are made to reach.
    pub(super) fn start(place: &Place, bytes: u64) -> anyhow::Result<Self> {
        for (side, address) in HOST_ADDRESSES {
            let words = ["addr", "add", address, "dev", "br0"];
            let status = place.hosts.command(side, "ip").args(words).status().context("starting ip")?;
            ensure!(status.success(), "a host has no address in the network of the store");
        }
        let (file, rate) = (place.folder().join("store.raw"), place.folder().join("store.rate"));
        std::fs::File::create(&file).and_then(|made| made.set_len(bytes)).context("making the store's file")?;
        let log = std::fs::File::create(place.folder().join("store.log")).context("making the store's log")?;
        let server = place
            .network
            .command("nbdkit")
            .args(["--foreground", "--ipaddr", ADDRESS, "--port", &PORT.to_string(), "--filter=rate", "file"])
            .args([path_word(&file), format!("rate={UNLIMITED}"), format!("rate-file={}", path_word(&rate))])
            .arg(format!("burstiness={BURST_SECONDS}"))
            .stderr(log)
            .spawn()
            .context("starting nbdkit")?;
        let mut store = Self { server, file, rate };
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

    /// Answers at most so many reads of 4 KiB a second from now on, and as many writes; `None` as many as the machine can.
    pub(super) fn limit(&self, reads_per_second: Option<u64>) -> anyhow::Result<()> {
        let bits = reads_per_second.map_or(UNLIMITED, |reads| reads * REQUEST_BITS);
        // It may be read at any moment.
        let new = self.rate.with_extension("new");
        std::fs::write(&new, format!("{bits}\n")).context("writing the store's rate")?;
        std::fs::rename(&new, &self.rate).context("setting the store's rate")
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
