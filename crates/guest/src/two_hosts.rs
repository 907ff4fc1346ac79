//! Two hosts on one machine: a daemon each in a network namespace of its own, joined by links that can be slowed down
//! and cut. Needs root and Debian's `iproute2`.
//!
//! ```text
//!   namespace FOLDER-a                         namespace FOLDER-b
//!   transhumed 10.77.0.1 ── veth, tbf ──────── 10.77.0.2 transhumed
//!              10.77.1.1 ── veth, tbf ──────── 10.77.1.2
//! ```

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::Daemon;

/// The port on which they listen.
pub(crate) const PORT: u16 = 10810;

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host called `a`.
    A,
    /// The host called `b`.
    B,
}

impl Side {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    /// What the host is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
        }
    }

    /// The other one.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    const fn number(self) -> usize {
        match self {
            Self::A => 0,
            Self::B => 1,
        }
    }
}

/// What the two are like.
#[derive(Clone, Copy, Debug)]
pub struct TwoHostsSpec<'a> {
    /// How many links join them; stream k takes the k-th in turn.
    pub links: usize,
    /// How fast each link is in each direction, in bits a second; as fast as the machine if nothing is said.
    pub link_bits_per_second: Option<u64>,
    /// Whether both leave encryption out.
    pub plaintext: bool,
    /// More lines for the section `[hosts]` of both configurations, each with its end.
    pub more: &'a str,
    /// What the configuration of the second says besides that.
    pub more_at_b: &'a str,
}

impl Default for TwoHostsSpec<'_> {
    fn default() -> Self {
        Self { links: 1, link_bits_per_second: None, plaintext: false, more: "", more_at_b: "" }
    }
}

/// Two hosts. Dropping them kills both daemons and removes their networks.
#[derive(Debug)]
pub struct TwoHosts {
    daemons: [Daemon; 2],
    folders: [PathBuf; 2],
    namespaces: [String; 2],
    links: usize,
}

impl TwoHosts {
    /// Two hosts whose daemons do not run yet. The programs are in `programs`, everything else goes to the folders `a`
    /// and `b` below `folder`. The folder's name tells this pair from others on this machine.
    ///
    /// # Errors
    /// The networks cannot be made.
    pub fn new(programs: &Path, folder: &Path, spec: TwoHostsSpec<'_>) -> anyhow::Result<Self> {
        let pair = folder.file_name().unwrap_or_default().to_string_lossy().replace('.', "");
        let namespaces = Side::BOTH.map(|side| format!("{pair}-{}", side.name()));
        let mut folders: [PathBuf; 2] = [PathBuf::new(), PathBuf::new()];
        for side in Side::BOTH {
            let own = folder.join(side.name());
            std::fs::create_dir_all(&own).with_context(|| format!("creating {}", own.display()))?;
            folders[side.number()] = own;
        }
        let daemons = Side::BOTH.map(|side| {
            let own = &folders[side.number()];
            let mut daemon = Daemon::new(programs, own);
            daemon.arguments = vec!["--config".to_owned(), own.join("config.toml").display().to_string()];
            daemon.launcher = words(&format!("ip netns exec {}", namespaces[side.number()]));
            daemon
        });
        let hosts = Self { daemons, folders, namespaces, links: spec.links };
        hosts.make_networks(spec)?;
        for side in Side::BOTH {
            let addresses: Vec<String> = (0..spec.links).map(|link| format!("\"{}\"", address(side, link))).collect();
            let text = format!(
                "log = \"info\"\n[hosts]\nname = \"{}\"\naddresses = [{}]\nplaintext = {}\n\
                 incoming-dirs = [\"{}\"]\n{}{}{}",
                side.name(),
                addresses.join(", "),
                spec.plaintext,
                hosts.incoming(side).display(),
                speeds(spec),
                spec.more,
                if side == Side::B { spec.more_at_b } else { "" }
            );
            std::fs::create_dir_all(hosts.incoming(side)).context("making a place for volumes")?;
            std::fs::write(hosts.folders[side.number()].join("config.toml"), text)
                .context("writing a configuration")?;
        }
        Ok(hosts)
    }

    fn make_networks(&self, spec: TwoHostsSpec<'_>) -> anyhow::Result<()> {
        let [a, b] = &self.namespaces;
        for namespace in [a, b] {
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        for link in 0..spec.links {
            // Made in one namespace, the other end in the other: nothing of it is ever seen outside.
            let device = device(link);
            ip(&format!("-n {a} link add {device} type veth peer name {device} netns {b}"))?;
            for side in Side::BOTH {
                let namespace = &self.namespaces[side.number()];
                ip(&format!("-n {namespace} addr add {}/24 dev {device}", address(side, link)))?;
                ip(&format!("-n {namespace} link set {device} up"))?;
            }
        }
        if let Some(rate) = spec.link_bits_per_second {
            self.limit(rate)?;
        }
        Ok(())
    }

    /// Makes every link carry at most so many bits a second in each direction.
    ///
    /// # Errors
    /// The kernel does not do it.
    pub fn limit(&self, bits_per_second: u64) -> anyhow::Result<()> {
        for namespace in &self.namespaces {
            (0..self.links).try_for_each(|link| limit(namespace, &device(link), bits_per_second))?;
        }
        Ok(())
    }

    /// How many bytes a host has sent to the other one over all links, with everything that goes around what is said.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn sent_bytes(&self, side: Side) -> anyhow::Result<u64> {
        let mut sum = 0;
        for link in 0..self.links {
            let file = format!("/sys/class/net/{}/statistics/tx_bytes", device(link));
            let output = self.command(side, "cat").arg(&file).output().context("starting ip: run `make setup`")?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            sum += text.trim().parse::<u64>().with_context(|| format!("{file} holds {text:?}"))?;
        }
        Ok(sum)
    }

    /// Starts both daemons.
    ///
    /// # Errors
    /// One does not come up.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.daemons.iter_mut().try_for_each(Daemon::start)
    }

    /// Pairs both with a code, as two people would.
    ///
    /// # Errors
    /// They are not paired.
    pub fn pair(&self) -> anyhow::Result<()> {
        let code = self.daemon(Side::A).json(&["trust", "--invite"])?["code"].as_str().unwrap_or_default().to_owned();
        self.daemon(Side::B).json(&["trust", &self.address(Side::A, 0), &code]).map(|_| ())
    }

    /// The daemon of one side.
    #[must_use]
    pub const fn daemon(&self, side: Side) -> &Daemon {
        &self.daemons[side.number()]
    }

    /// The same, to be started, killed and started again.
    pub const fn daemon_mut(&mut self, side: Side) -> &mut Daemon {
        &mut self.daemons[side.number()]
    }

    /// Where a host puts volumes that come from the other one.
    #[must_use]
    pub fn incoming(&self, side: Side) -> PathBuf {
        self.folders[side.number()].join("incoming")
    }

    /// Where a host is reached over one link.
    #[must_use]
    pub fn address(&self, side: Side, link: usize) -> String {
        format!("{}:{PORT}", address(side, link))
    }

    /// The same without the port.
    #[must_use]
    pub fn machine(&self, side: Side, link: usize) -> String {
        address(side, link)
    }

    /// A program on one of the hosts, not yet run; it dies with the thread that runs it.
    #[must_use]
    pub fn command(&self, side: Side, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", &self.namespaces[side.number()], program]);
        command.stdin(Stdio::null());
        command
    }

    /// What runs a program on one of the hosts, for [`GuestSpec::launcher`](crate::GuestSpec::launcher).
    #[must_use]
    pub fn launcher(&self, side: Side) -> Vec<String> {
        words(&format!("ip netns exec {}", self.namespaces[side.number()]))
    }

    /// The network namespace of one side.
    #[must_use]
    pub fn namespace(&self, side: Side) -> &str {
        &self.namespaces[side.number()]
    }

    /// Moves the calling thread into the network of one side, for good: sockets that it makes from now on are there.
    ///
    /// # Errors
    /// The kernel does not do it.
    pub fn enter(&self, side: Side) -> anyhow::Result<()> {
        enter(&self.namespaces[side.number()])
    }

    /// Cuts one link: nothing comes through, and nobody is told.
    ///
    /// # Errors
    /// The kernel does not do it.
    pub fn cut(&self, link: usize) -> anyhow::Result<()> {
        self.set(link, "down")
    }

    /// Mends a link that was cut.
    ///
    /// # Errors
    /// The kernel does not do it.
    pub fn mend(&self, link: usize) -> anyhow::Result<()> {
        self.set(link, "up")
    }

    fn set(&self, link: usize, state: &str) -> anyhow::Result<()> {
        ip(&format!("-n {} link set {} {state}", self.namespaces[Side::B.number()], device(link)))
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        self.daemons.iter_mut().for_each(Daemon::kill);
        for namespace in &self.namespaces {
            // The links go with it. One that was never made cannot be removed.
            let _ = ip(&format!("netns del {namespace}"));
        }
    }
}

fn address(side: Side, link: usize) -> String {
    format!("10.77.{link}.{}", side.number() + 1)
}

/// What a card of that speed tells the kernel.
fn speeds(spec: TwoHostsSpec<'_>) -> String {
    let Some(rate) = spec.link_bits_per_second else { return String::new() };
    let speed = |link| format!("{} = {}", device(link), rate / 1_000_000);
    let speeds: Vec<String> = (0..spec.links).map(speed).collect();
    format!("interface-speeds-mbit = {{ {} }}\n", speeds.join(", "))
}

fn device(link: usize) -> String {
    format!("wire{link}")
}

/// Makes a device send at most so many bits a second.
pub(crate) fn limit(namespace: &str, device: &str, bits_per_second: u64) -> anyhow::Result<()> {
    // What flows in 4 ms, and at least two of the largest packets that the kernel makes. At these rates a smaller
    // bucket cannot be filled and emptied in time.
    let burst = (bits_per_second / 8 / 250).max(128 << 10);
    let rate = format!("rate {bits_per_second}bit burst {burst} latency 20ms");
    run("tc", &format!("-n {namespace} qdisc replace dev {device} root tbf {rate}"))
}

/// Moves the calling thread into a namespace, for good.
pub(crate) fn enter(namespace: &str) -> anyhow::Result<()> {
    let path = Path::new("/run/netns").join(namespace);
    let namespace = std::fs::File::open(&path).with_context(|| format!("opening {}", path.display()))?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).context("entering a network")
}

pub(crate) fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

pub(crate) fn ip(arguments: &str) -> anyhow::Result<()> {
    run("ip", arguments)
}

fn run(program: &str, arguments: &str) -> anyhow::Result<()> {
    let output = Command::new(program).args(words(arguments)).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting {program}: run `make setup`"))?;
    if !output.status.success() {
        bail!("{program} {arguments}: {} (needs root)", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
