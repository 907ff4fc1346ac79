//! Two hosts, a guest on the first whose disk and memory are checked, and a client of that guest.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;
use transhume_guest::programs::preload_library;
use transhume_guest::{
    ClientSpec, Disk, Event, Guest, GuestNetwork, GuestSpec, Interval, Network, NetworkClient, Side, TwoHosts,
    TwoHostsSpec, create_filled,
};

use crate::reserve::Reserve;
use crate::server::path_word;

/// How long anything may take that is no move.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);
/// What the guest is called.
pub(crate) const NAME: &str = "web1";
/// The disk's node in QEMU.
pub(crate) const NODE: &str = "disk0";
/// The disk's volume, once it is adopted.
const DISK_VOLUME: &str = "web1-disk";
/// A line of both hosts' configurations.
pub(crate) const RUNS_VMS: &str = "run-vms = true\n";

/// The file of a tracked guest's memory, in the folder of its QEMU.
pub(crate) const MEMORY_FILE: &str = "memory";

const TAP: &str = "guest0";

/// How much of a guest's memory its load may have. The rest is its system's.
pub(crate) const fn fillable_mib(memory_mib: u32) -> u32 {
    memory_mib - memory_mib / 8 - 64
}

/// The place of one move. Dropping it ends every QEMU in it.
pub(crate) struct Place {
    pub(crate) guest: Guest,
    pub(crate) network: GuestNetwork,
    pub(crate) hosts: TwoHosts,
    pub(crate) disk: PathBuf,
    folder: tempfile::TempDir,
    /// Its memory and its disk: what a move writes anew at the other host.
    moved_bytes: u64,
}

impl Place {
    /// Makes two paired hosts and boots `guest` on the first, with a network card and a filled disk of so many bytes.
    pub(crate) fn new(
        places: (&Path, &Path),
        hosts: TwoHostsSpec<'_>,
        guest: GuestSpec,
        disk_bytes: u64,
    ) -> anyhow::Result<Self> {
        Self::with_memory(places, hosts, (guest, false), disk_bytes)
    }

    /// The same, where the parallel engine can copy the memory if the guest `is_tracked`.
    pub(crate) fn with_memory(
        places: (&Path, &Path),
        hosts: TwoHostsSpec<'_>,
        guest: (GuestSpec, bool),
        disk_bytes: u64,
    ) -> anyhow::Result<Self> {
        Self::with_disk(places, hosts, guest, |disk| create_filled(disk, disk_bytes))
    }

    /// The same, where the disk is what `make_disk` puts into a file of the name that it is given.
    pub(crate) fn with_disk(
        (programs, parent): (&Path, &Path),
        hosts: TwoHostsSpec<'_>,
        (guest, is_tracked): (GuestSpec, bool),
        make_disk: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        // Sockets of QEMU are below it, and their paths are short.
        let folder = tempfile::Builder::new().prefix("vm").tempdir_in(parent).context("creating a folder")?;
        let mut hosts = TwoHosts::new(programs, folder.path(), hosts)?;
        hosts.start()?;
        hosts.pair()?;
        let network = GuestNetwork::new(&hosts, [TAP])?;
        let disk = folder.path().join("disk.raw");
        make_disk(&disk)?;
        let moved_bytes = std::fs::metadata(&disk).context("asking for the disk's size")?.len() + guest.memory_bytes();
        let guest = guest.disk(Disk::raw(&disk, NODE)).network(Network::default()).workload_socket();
        let [memory, socket] = [MEMORY_FILE, "memory.sock"].map(|name| folder.path().join(name));
        let guest = if is_tracked { guest.tracked_memory(&memory, &preload_library(programs), &socket) } else { guest };
        let mut guest = Guest::boot(guest.launcher(hosts.launcher(Side::A)))?;
        guest.wait_for_load(PATIENCE)?;
        Ok(Self { guest, network, hosts, disk, folder, moved_bytes })
    }

    /// Makes the guest known to the daemon of its host.
    pub(crate) fn add(&self) -> anyhow::Result<()> {
        let qmp = self.guest.qmp_socket().display().to_string();
        self.hosts.daemon(Side::A).json(&["vm", "add", NAME, "--qmp", &qmp]).map(drop)
    }

    /// Puts a cache in memory into the path of the guest's disk, and makes one at the other host. The disk goes through the daemon then.
    pub(crate) fn add_cache(&self, mib: u64) -> anyhow::Result<()> {
        for side in Side::BOTH {
            let store = self.folder().join(format!("flash-{}", side.name()));
            let store = format!("file:{},size={}MiB", path_word(&store), 2 * mib);
            self.hosts.daemon(side).json(&["cache", "create", "flash", "--store", &store])?;
        }
        let size = format!("{mib}MiB");
        let words = ["volume", "layer", "add", DISK_VOLUME, "cache", "--cache", "flash", "--size", &size];
        self.hosts.daemon(Side::A).json(&words).map(drop)
    }

    /// Has the guest's disk go through the daemon of its host.
    pub(crate) fn adopt(&self) -> anyhow::Result<()> {
        let qmp = self.guest.qmp_socket().display().to_string();
        let words = ["adopt", "--qmp", &qmp, "--node", NODE, "--name", DISK_VOLUME];
        self.hosts.daemon(Side::A).json(&words).map(drop)
    }

    /// Memory at hand for a move, whoever moves the guest: otherwise the first of two moves waits for the host that takes free memory
    /// back, and the second one finds what the first has left.
    pub(crate) fn reserve(&self) -> anyhow::Result<Reserve> {
        Reserve::create(self.folder(), self.moved_bytes + self.moved_bytes / 8)
    }

    /// Where everything of this place is.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where the sockets of the QEMU are that the other host starts for the guest.
    pub(crate) fn folder_there(&self) -> anyhow::Result<PathBuf> {
        self.folder_at(Side::B)
    }

    /// Where they are at a host to which the guest comes.
    pub(crate) fn folder_at(&self, side: Side) -> anyhow::Result<PathBuf> {
        let api = self.hosts.daemon(side).api();
        Ok(api.parent().context("the API is in a folder")?.join("vm").join(NAME))
    }

    /// A client of the guest.
    pub(crate) fn client(&self, spec: ClientSpec) -> anyhow::Result<NetworkClient> {
        NetworkClient::start(self.network.namespace(), Network::default().host(), spec, PATIENCE)
    }

    /// What both daemons have logged.
    pub(crate) fn logs(&self) -> String {
        Side::BOTH.map(|side| format!("--- {}\n{}", side.name(), self.hosts.daemon(side).log())).concat()
    }

    /// Has the guest read its whole disk and memory again.
    ///
    /// # Errors
    /// Something is not as it was written.
    pub(crate) fn verify(&mut self) -> anyhow::Result<()> {
        self.guest.send("verify")?;
        self.guest.wait_until(PATIENCE, |event| matches!(event, Event::Verified { .. }))?;
        let found = self.guest.load_result();
        if found.wrong + found.memory.wrong == 0 && found.blocks > 0 && found.complaints.is_empty() {
            return Ok(());
        }
        bail!("the moved guest is not as it was: {found:?}")
    }

    /// What the guest's load has told between two moments.
    pub(crate) fn intervals(&mut self, from: Instant, to: Instant) -> Vec<Interval> {
        let all = self.guest.intervals().iter();
        all.filter(|(at, _)| (from..=to).contains(at)).map(|(_, interval)| *interval).collect()
    }

    fn started_by_daemons(&self) -> Vec<u64> {
        let ask = |side| self.hosts.daemon(side).json(&["vm", "ls"]).unwrap_or_default();
        let shown = Side::BOTH.map(ask);
        let pids = shown.iter().filter_map(Value::as_array).flatten().filter_map(|vm| vm["pid"].as_u64());
        // One that has ended may have left its number to somebody else.
        pids.filter(|pid| self.is_of_this_place(*pid)).collect()
    }

    fn is_of_this_place(&self, pid: u64) -> bool {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let places = [self.folder.path(), self.guest.folder()].map(|place| place.display().to_string());
        let words = String::from_utf8_lossy(&words);
        words.contains("qemu-system") && places.iter().any(|place| words.contains(place))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for pid in self.started_by_daemons() {
            // QEMUs that a daemon has started outlive it. One may have ended by itself.
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    }
}
