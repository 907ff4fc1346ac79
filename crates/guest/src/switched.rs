//! Several hosts on one machine: a daemon each in a network namespace of its own, around a switch. Every cable carries
//! only so much in each direction, so that several hosts that send to one meet in its cable. Needs root and Debian's
//! `iproute2`.
//!
//! ```text
//!   namespace FOLDER-0                    namespace FOLDER-switch                    namespace FOLDER-1
//!   transhumed 10.78.0.1 ── tbf, veth, tbf ──── bridge ──── tbf, veth, tbf ── 10.78.0.2 transhumed
//!                                                  └── tbf, veth, tbf ── 10.78.0.3 ...
//! ```

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::Daemon;
use crate::two_hosts::{PORT, enter, ip, limit, words};

/// What the hosts call their interfaces.
const DEVICE: &str = "wire0";

/// Hosts around a switch, called `h0`, `h1` and so on. Dropping them kills their daemons and removes their networks.
#[derive(Debug)]
pub struct SwitchedHosts {
    hosts: Vec<Host>,
    /// The switch's namespace.
    switch: String,
}

#[derive(Debug)]
struct Host {
    daemon: Daemon,
    folder: PathBuf,
    namespace: String,
}

impl SwitchedHosts {
    /// `count` hosts whose cables carry so many bits a second, and whose daemons run; `more` are further lines for the
    /// section `[hosts]` of their configurations. The programs are in `programs`, everything else goes to folders below
    /// `folder`, whose name tells these hosts from others on this machine.
    ///
    /// # Errors
    /// The networks cannot be made, or a daemon does not come up.
    pub fn start(
        programs: &Path,
        folder: &Path,
        count: usize,
        bits_per_second: u64,
        more: &str,
    ) -> anyhow::Result<Self> {
        let all = folder.file_name().unwrap_or_default().to_string_lossy().replace('.', "");
        let mut hosts = Self { hosts: Vec::new(), switch: format!("{all}-switch") };
        ip(&format!("netns add {}", hosts.switch))?;
        ip(&format!("-n {} link add switch type bridge", hosts.switch))?;
        ip(&format!("-n {} link set switch up", hosts.switch))?;
        for number in 0..count {
            let own = folder.join(format!("h{number}"));
            std::fs::create_dir_all(own.join("incoming")).with_context(|| format!("creating {}", own.display()))?;
            let namespace = format!("{all}-{number}");
            let mut daemon = Daemon::new(programs, &own);
            let configuration = own.join("config.toml");
            daemon.arguments = vec!["--config".to_owned(), configuration.display().to_string()];
            daemon.launcher = words(&format!("ip netns exec {namespace}"));
            hosts.hosts.push(Host { daemon, folder: own.clone(), namespace });
            hosts.connect(number, bits_per_second)?;
            let text = format!(
                "log = \"info\"\n[hosts]\nname = \"h{number}\"\naddresses = [\"{}\"]\nincoming-dirs = [\"{}\"]\n\
                 interface-speeds-mbit = {{ {DEVICE} = {} }}\n{more}",
                hosts.machine(number),
                own.join("incoming").display(),
                bits_per_second / 1_000_000,
            );
            std::fs::write(configuration, text).context("writing a configuration")?;
            hosts.hosts[number].daemon.start()?;
        }
        Ok(hosts)
    }

    /// Lays the cable of one host.
    fn connect(&self, number: usize, bits_per_second: u64) -> anyhow::Result<()> {
        let (namespace, switch, port) = (&self.hosts[number].namespace, &self.switch, format!("port{number}"));
        ip(&format!("netns add {namespace}"))?;
        ip(&format!("-n {namespace} link set lo up"))?;
        ip(&format!("-n {namespace} link add {DEVICE} type veth peer name {port} netns {switch}"))?;
        ip(&format!("-n {namespace} addr add {}/24 dev {DEVICE}", self.machine(number)))?;
        ip(&format!("-n {namespace} link set {DEVICE} up"))?;
        ip(&format!("-n {switch} link set {port} master switch up"))?;
        limit(namespace, DEVICE, bits_per_second)?;
        limit(switch, &port, bits_per_second)
    }

    /// Pairs two hosts with a code, as two people would.
    ///
    /// # Errors
    /// They are not paired.
    pub fn pair(&self, one: usize, other: usize) -> anyhow::Result<()> {
        let code = self.daemon(one).json(&["trust", "--invite"])?["code"].as_str().unwrap_or_default().to_owned();
        self.daemon(other).json(&["trust", &format!("{}:{PORT}", self.machine(one)), &code]).map(|_| ())
    }

    /// The daemon of one host.
    #[must_use]
    pub fn daemon(&self, number: usize) -> &Daemon {
        &self.hosts[number].daemon
    }

    /// Where everything of one host is.
    #[must_use]
    pub fn folder(&self, number: usize) -> &Path {
        &self.hosts[number].folder
    }

    /// The address of one host.
    #[must_use]
    pub fn machine(&self, number: usize) -> String {
        format!("10.78.0.{}", number + 1)
    }

    /// Moves the calling thread into the network of one host, for good: sockets that it makes from now on are there.
    ///
    /// # Errors
    /// The kernel does not do it.
    pub fn enter(&self, number: usize) -> anyhow::Result<()> {
        enter(&self.hosts[number].namespace)
    }
}

impl Drop for SwitchedHosts {
    fn drop(&mut self) {
        self.hosts.iter_mut().for_each(|host| host.daemon.kill());
        for namespace in self.hosts.iter().map(|host| &host.namespace).chain([&self.switch]) {
            // The cables go with it. One that was never made cannot be removed.
            let _ = ip(&format!("netns del {namespace}"));
        }
    }
}
