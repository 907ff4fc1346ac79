//! A blocking QMP client: enough for tests and for driving the peers of benchmarks.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};

/// A connection to a QMP monitor, capabilities negotiated.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    events: VecDeque<Value>,
    /// The start of a line whose end has not come yet.
    partial: String,
}

impl Qmp {
    /// Connects, waiting until the socket is there.
    ///
    /// # Errors
    /// Nobody answers within `limit`.
    pub fn connect(path: &Path, limit: Duration) -> anyhow::Result<Self> {
        let end = Instant::now() + limit;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= end => {
                    return Err(error).with_context(|| format!("connecting to {}", path.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut qmp = Self { reader: BufReader::new(stream), events: VecDeque::new(), partial: String::new() };
        qmp.message(end)?.context("the monitor does not greet")?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns what it returns.
    ///
    /// # Errors
    /// QEMU refuses, or does not answer within a minute.
    pub fn execute(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        self.reader.get_mut().write_all(line.as_bytes()).with_context(|| format!("sending {command}"))?;
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let message = self.message(end)?.with_context(|| format!("no answer to {command} in a minute"))?;
            if let Some(answer) = message.get("return") {
                return Ok(answer.clone());
            }
            if let Some(error) = message.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or("an error without a description"));
            }
            self.events.push_back(message);
        }
    }

    /// Waits for the event of this name and returns it whole; events of other names stay for later.
    ///
    /// # Errors
    /// It does not come within `limit`.
    pub fn wait_for_event(&mut self, name: &str, limit: Duration) -> anyhow::Result<Value> {
        let end = Instant::now() + limit;
        loop {
            if let Some(position) = self.events.iter().position(|event| event["event"] == name) {
                return Ok(self.events.remove(position).expect("it was just found"));
            }
            let message = self.message(end)?.with_context(|| format!("no event {name} in {limit:?}"))?;
            self.events.push_back(message);
        }
    }

    fn message(&mut self, end: Instant) -> anyhow::Result<Option<Value>> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.reader.get_ref().set_read_timeout(Some(left)).context("limiting the wait")?;
            match self.reader.read_line(&mut self.partial) {
                Ok(0) => bail!("the monitor has closed the connection"),
                Ok(_) => {
                    let line = std::mem::take(&mut self.partial);
                    return serde_json::from_str(&line).map(Some).with_context(|| format!("not JSON: {line}"));
                }
                Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                }
                Err(error) => return Err(error).context("reading from the monitor"),
            }
        }
    }
}
