//! The configuration file.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::v1::{Error, ErrorCode, Result};
use migrate::stream::Compression;
use parking_lot::RwLock;
use serde::Deserialize;

use ::hosts::HostName;
use ::hosts::address::check_all as check_addresses;

/// The other host waits for a hook: its own limit is a little longer.
const VM_HOOK_SECONDS_MAX: u64 = 25;

/// What may be configured; `docs/operations.md` lists it. The defaults suit most machines.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    /// Threads that serve volumes; 0 for one a core.
    pub workers: usize,
    /// Moves that run at once; the others wait in a queue.
    pub running_jobs_max: usize,
    /// Memory for guest requests in flight, in MiB.
    pub request_pool_mib: u64,
    /// Memory for copies in flight of one move, in MiB.
    pub copy_pool_mib: u64,
    /// How long to wait for the lock of a backend that a dead process still holds, in seconds.
    pub lock_wait_seconds: u64,
    /// Where the sockets of adopted disks are; the directory of the API's socket if nothing is said.
    pub socket_dir: Option<PathBuf>,
    /// What is run to tell an adopted VM's configuration of a disk's new place.
    pub persist_hook: Option<PathBuf>,
    /// How many seconds that program may take; what is left of its process group then is killed.
    pub persist_hook_seconds: u64,
    /// How many seconds QEMU waits for a daemon that is away before the guest sees errors.
    pub reconnect_delay_seconds: u32,
    /// How many seconds a request waits for an NBD server that holds a volume and is away, before its client sees an error.
    pub nbd_patience_seconds: u64,
    /// How many jobs that are over are remembered.
    pub history_max: usize,
    /// What is logged: error, warn, info, debug or trace, or a filter like `info,transhume_vm=debug`.
    pub log: String,
    /// How this host speaks to others; not at all if nothing is said.
    pub hosts: Option<HostsConfig>,
}

/// How this host speaks to others.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct HostsConfig {
    /// What this host is called by others, unless they choose another name; the kernel's name for the machine if nothing is
    /// said.
    pub name: Option<String>,
    /// Where it listens: `HOST:PORT`, or `HOST` with port 10810.
    pub listen: Vec<String>,
    /// Where others reach it, in the order in which streams take them; several for several network cards. If none is said,
    /// where it listens, or where others have seen it.
    pub addresses: Vec<String>,
    /// Where volumes of other hosts are put. Nowhere if nothing is said: then this host takes none.
    pub incoming_dirs: Vec<PathBuf>,
    /// Storage that this host and others reach: directories, and beginnings of addresses of NBD exports. Disks of VMs that come
    /// and lie there stay where they are.
    pub shared_storage: Vec<String>,
    /// How many volumes there may be in those directories; 0 for any number.
    pub incoming_volumes_max: usize,
    /// How large they may be together, in GiB; 0 for any size.
    pub incoming_gib_max: u64,
    /// How many connections a move to another host uses. With 0 it uses one a core up to four, and at least one for
    /// each pair of addresses.
    pub streams: u16,
    /// How the payloads of moves to other hosts are compressed.
    pub compression: CompressionConfig,
    /// The longest rest before a lost host is tried again, in seconds.
    pub resume_interval_seconds: u64,
    /// How long a lost host is tried again before somebody must say so, in seconds; 0 for ever.
    pub resume_limit_seconds: u64,
    /// Whether trusted hosts may move whole VMs here: then this daemon starts their QEMUs, by command lines that those hosts
    /// send.
    pub run_vms: bool,
    /// The programs that it starts for them, by their whole paths.
    pub vm_programs: Vec<PathBuf>,
    /// Which program it starts here for one that runs elsewhere, where that has another path or version: hosts of another
    /// distribution.
    pub vm_program_for: BTreeMap<PathBuf, PathBuf>,
    /// As which user it starts them; its own if nothing is said.
    pub vm_user: Option<String>,
    /// Where the memory of their guests lies that the parallel engine brings: a folder on tmpfs. Huge pages are on hugetlbfs.
    pub memory_dir: PathBuf,
    /// Whether trusted hosts may move domains of libvirt here: then this daemon lets them migrate to this host's libvirt.
    pub libvirt_vms: bool,
    /// The program that is run at each phase of a VM's move, from here and to here; docs/vm.md says what it is told.
    pub vm_hook: Option<PathBuf>,
    /// How many seconds that program may take; then it is killed, with its process group.
    pub vm_hook_seconds: u64,
    /// How fast network interfaces are, in Mbit/s, where the kernel does not know it or the network behind them is slower.
    pub interface_speeds_mbit: BTreeMap<String, u64>,
    /// No encryption, towards hosts that say so, too: for measurements only.
    pub plaintext: bool,
    /// The etcd cluster that decides who holds a volume while two hosts cannot speak with each other: `http://HOST:PORT` of
    /// its members. The hosts alone if nothing is said. Both hosts of a move need the same.
    pub arbiter: Vec<String>,
}

/// What makes payloads shorter on their way to another host.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum CompressionConfig {
    /// LZ4 or zstd, where it is measured to be faster than nothing.
    #[default]
    Auto,
    /// Nothing.
    Off,
    /// LZ4.
    Lz4,
    /// zstd at its level 1.
    Zstd,
}

impl From<CompressionConfig> for Compression {
    fn from(config: CompressionConfig) -> Self {
        match config {
            CompressionConfig::Auto => Self::Auto,
            CompressionConfig::Off => Self::Off,
            CompressionConfig::Lz4 => Self::Lz4,
            CompressionConfig::Zstd => Self::Zstd,
        }
    }
}

impl Default for HostsConfig {
    fn default() -> Self {
        Self {
            name: None,
            listen: vec!["0.0.0.0".to_owned()],
            addresses: Vec::new(),
            plaintext: false,
            arbiter: Vec::new(),
            incoming_dirs: Vec::new(),
            shared_storage: Vec::new(),
            run_vms: false,
            vm_program_for: BTreeMap::new(),
            vm_programs: ["/usr/bin/qemu-system-x86_64", "/usr/bin/qemu-system-aarch64", "/usr/bin/qemu-kvm"]
                .map(PathBuf::from)
                .to_vec(),
            vm_user: None,
            memory_dir: PathBuf::from("/dev/shm"),
            libvirt_vms: false,
            vm_hook: None,
            vm_hook_seconds: 10,
            incoming_volumes_max: 1000,
            incoming_gib_max: 0,
            streams: 0,
            compression: CompressionConfig::Auto,
            resume_interval_seconds: 2,
            resume_limit_seconds: 0,
            interface_speeds_mbit: BTreeMap::new(),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            workers: 0,
            running_jobs_max: 2,
            request_pool_mib: 256,
            copy_pool_mib: 64,
            lock_wait_seconds: 30,
            socket_dir: None,
            persist_hook: None,
            persist_hook_seconds: vm::PROGRAM_LIMIT.as_secs(),
            reconnect_delay_seconds: vm::RECONNECT_SECONDS,
            nbd_patience_seconds: 60,
            history_max: 1000,
            log: "info".to_owned(),
            hosts: None,
        }
    }
}

impl Config {
    /// Reads the file, or gives the defaults if there is none.
    ///
    /// # Errors
    /// It cannot be read, has an unknown key, or a value that makes no sense.
    pub fn load(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self::default()) };
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::new(ErrorCode::ConfigInvalid, format!("the configuration {shown} cannot be read: {error}"))
                .with_hint("name another file with --config, or leave it out")
        })?;
        let config: Self = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            Error::new(ErrorCode::ConfigInvalid, format!("{shown}:{line}: {}", error.message()))
                .with_hint("correct or remove that line; docs/operations.md lists the keys")
        })?;
        config.check().map_err(|line| {
            Error::new(ErrorCode::ConfigInvalid, format!("{shown}: {line}")).with_hint("correct that value")
        })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let within = |key: &str, value: u64, low: u64, high: u64| match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(format!("{key} is {value}, it must be between {low} and {high}")),
        };
        within("workers", self.workers as u64, 0, 1024)?;
        within("running-jobs-max", self.running_jobs_max as u64, 1, 1024)?;
        within("request-pool-mib", self.request_pool_mib, 64, 1 << 20)?;
        within("copy-pool-mib", self.copy_pool_mib, 8, 1 << 20)?;
        within("lock-wait-seconds", self.lock_wait_seconds, 0, 3600)?;
        within("reconnect-delay-seconds", self.reconnect_delay_seconds.into(), 1, u32::MAX.into())?;
        within("persist-hook-seconds", self.persist_hook_seconds, 1, 86_400)?;
        within("nbd-patience-seconds", self.nbd_patience_seconds, 1, 86_400)?;
        within("history-max", self.history_max as u64, 1, 1_000_000)?;
        self.hosts.as_ref().map_or(Ok(()), HostsConfig::check)
    }

    /// Takes over from `old` what counts only at a start, and gives the keys that were changed in vain.
    pub(crate) fn keep_fixed(&mut self, old: &Self) -> Vec<&'static str> {
        let mut changed = Vec::new();
        keep(&mut changed, "workers", &mut self.workers, &old.workers);
        keep(&mut changed, "request-pool-mib", &mut self.request_pool_mib, &old.request_pool_mib);
        keep(&mut changed, "socket-dir", &mut self.socket_dir, &old.socket_dir);
        keep(&mut changed, "history-max", &mut self.history_max, &old.history_max);
        match (&mut self.hosts, &old.hosts) {
            (Some(hosts), Some(old)) => hosts.keep_fixed(old, &mut changed),
            (None, None) => {}
            (hosts, old) => {
                changed.push("[hosts]");
                hosts.clone_from(old);
            }
        }
        changed
    }

    /// How many threads serve volumes.
    #[must_use]
    pub fn worker_count(&self) -> usize {
        match self.workers {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            count => count,
        }
    }

    /// How long a request waits for an NBD server that is away.
    #[must_use]
    pub const fn nbd_reconnect_limit(&self) -> Duration {
        Duration::from_secs(self.nbd_patience_seconds)
    }

    /// How long to wait for a dead process's lock.
    #[must_use]
    pub const fn lock_wait(&self) -> Duration {
        Duration::from_secs(self.lock_wait_seconds)
    }
}

impl HostsConfig {
    /// How fast network interfaces are by what is said here, in bytes a second.
    pub(crate) fn interface_speeds(&self) -> BTreeMap<String, u64> {
        self.interface_speeds_mbit.iter().map(|(interface, speed)| (interface.clone(), speed * 125_000)).collect()
    }

    fn keep_fixed(&mut self, old: &Self, changed: &mut Vec<&'static str>) {
        keep(changed, "name", &mut self.name, &old.name);
        keep(changed, "listen", &mut self.listen, &old.listen);
        keep(changed, "addresses", &mut self.addresses, &old.addresses);
        keep(changed, "plaintext", &mut self.plaintext, &old.plaintext);
        keep(changed, "arbiter", &mut self.arbiter, &old.arbiter);
        keep(changed, "interface-speeds-mbit", &mut self.interface_speeds_mbit, &old.interface_speeds_mbit);
    }

    fn check(&self) -> Result<(), String> {
        let shown = |error: Error| format!("[hosts]: {error}");
        if let Some(name) = &self.name {
            HostName::new(name).map_err(shown)?;
        }
        check_addresses(&self.addresses).map_err(shown)?;
        check_addresses(&self.listen).map_err(shown)?;
        crate::arbiter::check(&self.arbiter).map_err(shown)?;
        if let Some(hook) = self.vm_hook.as_ref().filter(|hook| !hook.is_absolute()) {
            return Err(format!("[hosts]: vm-hook is {}, it must be an absolute path", hook.display()));
        }
        if !(1..=VM_HOOK_SECONDS_MAX).contains(&self.vm_hook_seconds) {
            let (given, most) = (self.vm_hook_seconds, VM_HOOK_SECONDS_MAX);
            return Err(format!("[hosts]: vm-hook-seconds is {given}, it must be between 1 and {most}"));
        }
        if self.listen.is_empty() {
            return Err("[hosts]: listen names no address".to_owned());
        }
        if let Some((interface, speed)) =
            self.interface_speeds_mbit.iter().find(|(_, speed)| !(1..=10_000_000).contains(*speed))
        {
            return Err(format!(
                "[hosts]: interface-speeds-mbit of {interface} is {speed}, it must be between 1 and 10000000"
            ));
        }
        Ok(())
    }
}

fn keep<T: PartialEq + Clone>(changed: &mut Vec<&'static str>, key: &'static str, new: &mut T, old: &T) {
    if new != old {
        changed.push(key);
        new.clone_from(old);
    }
}

/// The configuration as it is now: the file may be read again while the daemon serves.
pub(crate) struct LiveConfig(RwLock<&'static Config>);

impl LiveConfig {
    /// Begins with `config`.
    pub(crate) fn new(config: Config) -> Self {
        Self(RwLock::new(Box::leak(Box::new(config))))
    }

    /// `config` counts from now on. The old one stays in memory, a KiB: anybody may be about to read it.
    pub(crate) fn replace(&self, config: Config) {
        if **self != config {
            *self.0.write() = Box::leak(Box::new(config));
        }
    }
}

impl Deref for LiveConfig {
    type Target = Config;

    fn deref(&self) -> &Config {
        *self.0.read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Config> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("config.toml");
        std::fs::write(&path, text).expect("written");
        Config::load(Some(&path))
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let error = load("workers = 2\nworkerz = 3\n").expect_err("accepted");
        assert_eq!(error.code, ErrorCode::ConfigInvalid);
        assert!(error.message.contains(":2: unknown field `workerz`"), "{}", error.message);
    }

    #[test]
    fn values_that_make_no_sense_are_refused_and_good_ones_kept() {
        assert!(load("running-jobs-max = 0").expect_err("accepted").message.contains("between 1 and"));
        assert!(load("workers = \"two\"").is_err());
        let config = load("workers = 3\nlog = \"debug\"").expect("good");
        assert_eq!((config.worker_count(), config.running_jobs_max), (3, 2));
    }

    #[test]
    fn what_is_read_again_counts_but_for_what_only_a_start_can_change() {
        let live = LiveConfig::new(load("workers = 2\nlock-wait-seconds = 5\n[hosts]\nname = \"a\"").expect("good"));
        let mut config =
            load("workers = 3\nlock-wait-seconds = 6\n[hosts]\nname = \"b\"\nrun-vms = true").expect("good");
        assert_eq!(config.keep_fixed(&live), ["workers", "name"]);
        live.replace(config);
        let hosts = live.hosts.as_ref().expect("a section");
        assert_eq!((live.workers, live.lock_wait_seconds, hosts.run_vms), (2, 6, true));
        assert_eq!(hosts.name.as_deref(), Some("a"));
        let mut config = load("workers = 2\nlock-wait-seconds = 6").expect("good");
        assert_eq!(config.keep_fixed(&live), ["[hosts]"]);
    }

    #[test]
    fn a_section_of_hosts_is_optional_and_looked_at_as_closely() {
        assert!(load("workers = 2").expect("good").hosts.is_none());
        let hosts = load("[hosts]\nname = \"a\"\naddresses = [\"10.0.0.1\", \"10.0.1.1:9\"]").expect("good").hosts;
        let hosts = hosts.expect("there is a section");
        assert_eq!((hosts.listen.len(), hosts.addresses.len(), hosts.plaintext), (1, 2, false));
        let hosts = load("[hosts]\ninterface-speeds-mbit = { eth0 = 1000 }").expect("good").hosts.expect("a section");
        assert_eq!(hosts.interface_speeds()["eth0"], 125_000_000);
        for wrong in [
            "plain = true",
            "name = \"a b\"",
            "listen = []",
            "listen = [\"a:b\"]",
            "addresses = [\":7\"]",
            "interface-speeds-mbit = { eth0 = 0 }",
            "vm-hook = \"hook\"",
            "vm-hook-seconds = 0",
            "vm-hook-seconds = 26",
        ] {
            let error = load(&format!("[hosts]\n{wrong}")).expect_err(wrong);
            assert_eq!(error.code, ErrorCode::ConfigInvalid, "{wrong}");
        }
    }
}
