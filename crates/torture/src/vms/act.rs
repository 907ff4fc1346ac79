//! Two hosts and a VM that goes back and forth between them: how it is set up, and one move of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use transhume_guest::programs::{preload_library, private_folder};
use transhume_guest::{
    ClientSpec, Daemon, Disk, Event, Guest, GuestNetwork, GuestSpec, Load, MemoryLoad, Network, NetworkClient, Side,
    TwoHosts, TwoHostsSpec, create_filled,
};

use super::plan::{Blow, End, Rng, Timed};
use super::watch::Watcher;
use crate::testbed::{run, text};

/// The VM.
pub(super) const VM: &str = "web1";
pub(super) const DISK_BYTES: u64 = 32 << 20;
/// Room for what comes, beside the disks.
const SPARE_BYTES: u64 = 8 << 20;
/// Room for the state of one daemon.
const STATE_BYTES: u64 = 64 << 20;
const LINK_BITS_PER_SECOND: u64 = 400_000_000;
/// Nothing takes longer, on the slowest machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);

/// An act under way.
pub(super) struct Act {
    pub(super) client: Option<NetworkClient>,
    pub(super) watcher: Watcher,
    pub(super) guest: Guest,
    /// What the client is in, which outlives the client.
    _network: GuestNetwork,
    pub(super) hosts: TwoHosts,
    pub(super) disks: usize,
    /// The storage that both hosts reach, and whether the first disk is there.
    pub(super) shared: PathBuf,
    pub(super) shares: bool,
    /// Who copies the memory, and over how many connections.
    pub(super) memory: String,
    pub(super) channels: u8,
    /// Where all memory lies that the parallel engine copies.
    pub(super) memory_folder: tempfile::TempDir,
    /// Where the VM is.
    pub(super) at: Side,
    /// The QEMU that has it.
    pub(super) home: PathBuf,
    /// Whether its disks are its QEMU's own after the last move, and no volumes.
    pub(super) is_released: bool,
    /// Whether the guest has crashed as it was told to: nothing of it runs any more.
    pub(super) has_crashed: bool,
    /// Its operator's monitor where it was started first.
    pub(super) first_monitor: PathBuf,
    /// Whether its operator's last word was to stop it.
    pub(super) is_stopped: bool,
}

impl Act {
    pub(super) fn set(
        programs: &Path,
        folder: &Path,
        (memory, channels): (&str, u8),
        (rng, is_restarted): (&mut Rng, bool),
    ) -> anyhow::Result<Self> {
        let disks = 1 + rng.number(2) as usize;
        // The first disk stays where both hosts reach it, or goes along.
        let shared = folder.join("shared");
        std::fs::create_dir(&shared).context("making the storage that both hosts reach")?;
        let shares = rng.number(2) == 0;
        let memory_folder = private_folder(Path::new("/dev/shm"))?;
        let more = format!("run-vms = true\nshared-storage = [{shared:?}]\nmemory-dir = {:?}\n", memory_folder.path());
        let spec =
            TwoHostsSpec { more: &more, link_bits_per_second: Some(LINK_BITS_PER_SECOND), ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder, spec)?;
        let room = DISK_BYTES * disks as u64 + SPARE_BYTES;
        for side in Side::BOTH {
            run("mount", &["-t", "tmpfs", "-o", &format!("size={room}"), "none", &text(&hosts.incoming(side))])?;
            let state = hosts.daemon(side).state();
            std::fs::create_dir_all(&state).with_context(|| format!("making {}", state.display()))?;
            run("mount", &["-t", "tmpfs", "-o", &format!("size={STATE_BYTES}"), "none", &text(&state)])?;
        }
        hosts.start()?;
        hosts.pair()?;
        let network = GuestNetwork::new(&hosts, ["guest0"])?;
        let load =
            Load { is_prefilled: true, rate: 100, workers: 4, read_percent: 50, seed: rng.seed(), ..Load::default() };
        let third = format!("unix:{},server=on,wait=off", folder.join("qmp3.sock").display());
        let mut spec = GuestSpec::new()
            .memory_mib(160)
            .network(Network::default())
            .workload_socket()
            .load(load)
            .memory_load(MemoryLoad { mib: 48, rewrite_mib_per_second: 4, ..MemoryLoad::default() })
            .arguments(["-qmp", third.as_str()]);
        if memory == "parallel" {
            let (file, socket) = (memory_folder.path().join("ram"), folder.join("memory.sock"));
            spec = spec.tracked_memory(&file, &preload_library(programs), &socket);
        }
        for number in 0..disks {
            let home = if shares && number == 0 { &shared } else { folder };
            let file = home.join(format!("disk{number}.raw"));
            create_filled(&file, DISK_BYTES)?;
            spec = spec.disk(Disk::raw(&file, &format!("disk{number}")));
        }
        let mut guest = Guest::boot(spec.launcher(hosts.launcher(Side::A)))?;
        guest.wait_for_load(PATIENCE)?;
        let watcher = Watcher::start(&guest.folder().join("initramfs"));
        let probes = ClientSpec { udp_per_second: 50, http_per_second: 10, tcp_per_second: 10 };
        let client = NetworkClient::start(network.namespace(), Network::default().host(), probes, PATIENCE)?;
        let home = guest.folder().to_owned();
        match is_restarted {
            true => super::others::add_restarted(&hosts, folder, &guest.qmp_socket())?,
            false => _ = hosts.daemon(Side::A).json(&["vm", "add", VM, "--qmp", &text(&guest.qmp_socket())])?,
        }
        let client = Some(client);
        Ok(Self {
            client,
            watcher,
            guest,
            _network: network,
            hosts,
            disks,
            shared,
            shares,
            memory: memory.to_owned(),
            channels,
            memory_folder,
            at: Side::A,
            home,
            is_released: false,
            has_crashed: false,
            first_monitor: folder.join("qmp3.sock"),
            is_stopped: false,
        })
    }

    pub(super) fn daemon(&self, side: Side) -> &Daemon {
        self.hosts.daemon(side)
    }

    /// The side of an end of the move that is under way.
    pub(super) const fn side(&self, end: End) -> Side {
        match end {
            End::Source => self.at,
            End::Target => self.at.other(),
        }
    }

    /// Where the sockets of the VM are at a host that it comes to.
    pub(super) fn folder_at(&self, side: Side) -> PathBuf {
        self.daemon(side).api().parent().unwrap_or(Path::new("/")).join("vm").join(VM)
    }

    /// One move, after which its disks stay volumes if it `keeps` them, and what must hold after it. Gives how it ended.
    pub(super) fn cycle(&mut self, blows: &[Timed], keeps: bool) -> anyhow::Result<String> {
        let (from, to) = (self.at, self.at.other());
        self.watcher.note(&format!("move from {} to {}", from.name(), to.name()));
        let channels = self.channels.to_string();
        let own = ["--memory", &self.memory, "--channels", &channels];
        let words = [&["vm", "move", VM, "--to", to.name(), "--delete-source", "--detach"], &own[..]].concat();
        let keeping: &[&str] = if keeps { &["--keep-volumes"] } else { &[] };
        let id = self.daemon(from).json(&[&words[..], keeping].concat())?["id"]
            .as_str()
            .context("a move has an identity")?
            .to_owned();
        for timed in blows {
            self.wait_for_stage(timed.stage);
            std::thread::sleep(timed.rest);
            self.watcher.note(&format!("{:?}", timed.blow));
            self.strike(timed.blow).with_context(|| format!("{:?}", timed.blow))?;
        }
        let over = self.wait_for_end(from, &id)?;
        self.watcher.note(&format!("over: {over}"));
        let _ = std::fs::remove_file(self.hosts.incoming(to).join(super::strike::FILLER));
        self.empty_states();
        let state = over["state"].as_str().unwrap_or_default().to_owned();
        let is_expected = match state.as_str() {
            "done" => true,
            "cancelled" => blows.iter().any(|timed| timed.blow == Blow::Cancel),
            "failed" => {
                let code = over["error"]["code"].as_str().unwrap_or_default();
                self.watcher.note(&format!("failed by {code}"));
                blows.iter().any(|timed| timed.blow.codes().contains(&code))
            }
            _ => false,
        };
        ensure!(is_expected, "nobody wanted that: {over}");
        (self.at, self.is_released) = if state == "done" { (to, !keeps) } else { (from, false) };
        self.settle()?;
        self.resume_if_stopped()?;
        if self.has_crashed {
            self.autopsy()?;
            return Ok(format!("{state}, and crashed"));
        }
        self.verify()?;
        Ok(state)
    }

    /// The move `id` once it is over.
    fn wait_for_end(&self, from: Side, id: &str) -> anyhow::Result<Value> {
        let end = Instant::now() + PATIENCE;
        loop {
            self.watcher.check()?;
            let shown = self.daemon(from).json(&["vm", "show", VM])?;
            if shown["state"] != "moving" && shown["last_move"]["id"] == id {
                return Ok(shown["last_move"].clone());
            }
            ensure!(Instant::now() < end, "the move does not end: {shown}");
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until everything is as it must be.
    fn settle(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            self.watcher.check()?;
            match self.unsettled()? {
                None => return Ok(()),
                Some(why) => ensure!(Instant::now() < end, "the move is over, and {why}"),
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The guest answers, its disk and its memory are what they should be.
    fn verify(&mut self) -> anyhow::Result<()> {
        let home = self.watcher.qemus().first().context("a QEMU runs")?.folder.clone();
        if home != self.home {
            self.guest.leave();
            self.guest.follow(&home)?;
            self.home = home;
        }
        let client = self.client.as_ref().context("a client asks")?;
        let before = client.report().udp.answered();
        let end = Instant::now() + PATIENCE;
        while client.report().udp.answered() < before + 20 {
            ensure!(Instant::now() < end, "the guest does not answer");
            std::thread::sleep(LOOK);
        }
        self.guest.send("verify")?;
        self.guest.wait_until(PATIENCE, |event| matches!(event, Event::Verified { .. }))?;
        let errors = self.guest.intervals().iter().map(|(_, interval)| interval.errors + interval.faults).max();
        let found = self.guest.load_result();
        let is_right = found.wrong == 0 && found.complaints.is_empty() && errors.unwrap_or_default() == 0;
        ensure!(is_right && found.memory.pages > 0 && found.memory.wrong == 0, "{errors:?} {found:?}");
        let report = self.client.as_ref().context("a client asks")?.report();
        ensure!(report.http_backwards == 0, "the guest went back in time: {report}");
        ensure!(report.tcp_broken.is_none(), "a connection broke: {report}");
        self.watcher.check()
    }

    /// Ends what would outlive this.
    pub(super) fn clear(mut self) -> anyhow::Result<()> {
        self.end();
        let folders = Side::BOTH.map(|side| [self.hosts.incoming(side), self.daemon(side).state()]);
        let folders = folders.concat();
        drop(self);
        folders.iter().try_for_each(|folder| run("umount", &["-l", &text(folder)]))
    }

    /// Ends every QEMU of the VM: those of the daemons outlive them.
    pub(super) fn end(&mut self) {
        self.client = None;
        for side in Side::BOTH {
            self.hosts.daemon_mut(side).kill();
        }
        for seen in self.watcher.qemus() {
            super::strike::signal(seen.pid, rustix::process::Signal::KILL);
        }
    }

    /// The guest has crashed: its disks are whole, and another guest boots on them.
    fn autopsy(&mut self) -> anyhow::Result<()> {
        let at = self.at;
        let volumes = self.daemon(at).json(&["volume", "ls"])?;
        let mut files = Vec::new();
        for volume in volumes.as_array().into_iter().flatten() {
            let backend = volume["backend"].as_str().unwrap_or_default();
            let (_, path) = backend.split_once("file:").with_context(|| format!("a file holds it: {volume}"))?;
            let path = path.split_once(',').map_or(path, |(path, _)| path);
            files.push(PathBuf::from(path));
        }
        // What was given back to its QEMU is no volume any more.
        for folder in [self.hosts.incoming(at), self.shared.clone()] {
            let found = std::fs::read_dir(&folder)?.flatten().map(|entry| entry.path());
            files.extend(found.filter(|file| !files.contains(file)).collect::<Vec<_>>());
        }
        ensure!(files.len() == self.disks, "the disks are not all there: {volumes}");
        self.end();
        for file in &files {
            super::check::check_disk(file)?;
        }
        let load = Load { workers: 4, rate: 100, ..Load::default() };
        let disk = Disk::raw(&files[0], "disk0");
        let mut guest = Guest::boot(GuestSpec::new().memory_mib(128).disk(disk).load(load))?;
        guest.wait_for_load(PATIENCE)?;
        let found = guest.finish(PATIENCE)?;
        if !found.is_right() {
            bail!("a new guest on the disk of the one that crashed: {found:?}");
        }
        Ok(())
    }
}

impl Drop for Act {
    fn drop(&mut self) {
        self.end();
    }
}
