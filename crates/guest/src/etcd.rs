//! etcd as the distribution packages it: a cluster of one member.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// How long a member may take to come up.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A running member, gone when this is dropped.
pub struct Etcd {
    process: Child,
    port: u16,
}

impl Etcd {
    /// Starts a member that keeps its data in `folder`, and waits until it answers.
    ///
    /// # Errors
    /// etcd is not installed, or does not come up.
    pub fn start(folder: &Path) -> anyhow::Result<Self> {
        let [clients, peers] = [free_port()?, free_port()?];
        let [own, peer] = [clients, peers].map(|port| format!("http://127.0.0.1:{port}"));
        let log = std::fs::File::create(folder.join("etcd.log")).context("creating its log")?;
        let process = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--listen-client-urls", &own, "--advertise-client-urls", &own])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("sharing its log")?)
            .stderr(log)
            .spawn()
            .context("etcd does not start: run `make setup`")?;
        let mut member = Self { process, port: clients };
        let started = Instant::now();
        // It listens when it has elected itself.
        while std::net::TcpStream::connect(("127.0.0.1", clients)).is_err() {
            if member.process.try_wait().context("looking at etcd")?.is_some() || started.elapsed() > START_LIMIT {
                bail!("etcd does not come up: see {}", folder.join("etcd.log").display());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(member)
    }

    /// The port of its clients, on this machine.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// How it is named in a configuration.
    #[must_use]
    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // Killing fails only if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A port of this machine that nobody listens on.
///
/// # Errors
/// There is none.
pub fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("looking for a free port")?;
    Ok(listener.local_addr().context("asking for its number")?.port())
}
