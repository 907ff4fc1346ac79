//! The load generator as a process: see crates/guest/nbd-load.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context, bail};
use transhume_guest::{Event, Interval};

use crate::server::Endpoint;
use transhume_guest::process::guarded;

/// What to offer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Offer {
    /// Requests per second, whatever the server does.
    Rate(u32),
    /// Requests in flight.
    Depth(u32),
}

/// A running load.
pub(crate) struct NbdLoad {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl NbdLoad {
    /// Starts 8 KiB requests, 70 % reads, random: the ESX paper's OLTP mix.
    pub(crate) fn start(programs: &Path, server: &Endpoint, offer: Offer) -> anyhow::Result<Self> {
        Self::start_with(programs, server, offer, &[])
    }

    /// Starts another mix; see crates/guest/nbd-load/options.rs.
    pub(crate) fn start_with(programs: &Path, server: &Endpoint, offer: Offer, words: &[&str]) -> anyhow::Result<Self> {
        let offer = match offer {
            Offer::Rate(rate) => format!("rate={rate}"),
            Offer::Depth(depth) => format!("depth={depth}"),
        };
        let mut child = guarded(&programs.join("nbd-load"))
            .arg(format!("socket={}", server.socket.display()))
            .arg(format!("export={}", server.export))
            .arg(offer)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting nbd-load")?;
        let input = child.stdin.take().expect("a pipe was asked for");
        let output = BufReader::new(child.stdout.take().expect("a pipe was asked for"));
        let mut load = Self { child, input, output };
        match load.next()? {
            Event::LoadStarted => Ok(load),
            other => bail!("the load did not start: {other:?}"),
        }
    }

    /// What was since the last mark.
    pub(crate) fn mark(&mut self) -> anyhow::Result<Interval> {
        self.order("mark")?;
        match self.next()? {
            Event::Interval(interval) if interval.errors == 0 => Ok(interval),
            Event::Interval(interval) => bail!("{} requests failed", interval.errors),
            other => bail!("the load does not answer a mark: {other:?}"),
        }
    }

    fn order(&mut self, order: &str) -> anyhow::Result<()> {
        writeln!(self.input, "{order}").context("the load is gone")
    }

    fn next(&mut self) -> anyhow::Result<Event> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("reading from the load")?;
        Ok(Event::parse(&line))
    }
}

impl Drop for NbdLoad {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
