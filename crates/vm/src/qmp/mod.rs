//! A small QMP client over a unix socket.
//!
//! ```text
//!  connect ──greeting within 5 s──▶ capabilities ──▶ serving ──▶ ended (EOF, garbage, all handles dropped)
//!     │                                                │ commands in flight fail with Disconnected
//!     └─ no greeting: MonitorBusy, with the owner      └ events go to every listener
//! ```
//!
//! One task owns the connection; a [`Qmp`] is a handle to it. A command's future may be dropped at any time: the command
//! is carried out all the same.

mod owner;
mod wire;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use env::EnvRef;
use futures::future::{Either, select};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::error::{Error, ErrorKind, QemuError, Result};
use wire::{Lines, Message};

pub use owner::{Owner, owner_of_socket};
pub use wire::{Event, Version};

/// How long QEMU may take to greet. It greets at once, unless another client owns the monitor.
pub const GREETING_LIMIT: Duration = Duration::from_secs(5);

/// How long one command may take. Draining commands wait for the guest's requests in flight.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// Events that a slow listener may fall behind.
const EVENTS_KEPT: usize = 1024;

/// A handle to a connection to one QEMU.
#[derive(Clone)]
pub struct Qmp {
    requests: mpsc::Sender<Request>,
    events: broadcast::Sender<Arc<Event>>,
    ended: watch::Receiver<bool>,
    env: EnvRef,
    version: Version,
    process_id: Option<u32>,
    path: PathBuf,
}

struct Request {
    command: String,
    arguments: Value,
    answer: oneshot::Sender<Answer>,
}

type Answer = std::result::Result<Value, QemuError>;

impl Qmp {
    /// Connects to the monitor at `path` and negotiates.
    ///
    /// # Errors
    /// `NoMonitor` if nothing listens there, `MonitorBusy` without a greeting within five seconds, `Protocol` if what
    /// answers is no QMP.
    pub async fn connect(path: &Path, env: EnvRef) -> Result<Self> {
        let shown = path.display();
        let stream = UnixStream::connect(path).await.map_err(|error| {
            let hint = match error.kind() {
                std::io::ErrorKind::ConnectionRefused => "nobody listens on it any more: QEMU is dead",
                std::io::ErrorKind::NotFound => "there is no such socket",
                std::io::ErrorKind::PermissionDenied => "run as root or as QEMU's user",
                _ => "no connection",
            };
            Error::new(ErrorKind::NoMonitor, format!("monitor {shown}: {hint}")).with_source(error)
        })?;
        let process_id = stream.peer_cred().ok().and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok());
        let mut connection = Connection { stream, lines: Lines::default() };
        let greeting = env::timeout(&*env, GREETING_LIMIT, connection.next()).await;
        let version = match greeting {
            Some(Ok(Message::Greeting(version))) => version,
            Some(Ok(other)) => {
                return Err(Error::new(ErrorKind::Protocol, format!("monitor {shown}: no greeting but {other:?}")));
            }
            Some(Err(error)) => return Err(error),
            None => return Err(busy(path, process_id)),
        };
        let (requests, receiver) = mpsc::channel(16);
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let (ended_sender, ended) = watch::channel(false);
        let server = serve(connection, receiver, events.clone());
        env.spawn(Box::pin(async move {
            server.await;
            // Nobody may be left who wants to know.
            let _ = ended_sender.send(true);
        }));
        let qmp = Self { requests, events, ended, env, version, process_id, path: path.to_owned() };
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Runs `command` and gives what it returns.
    ///
    /// # Errors
    /// `Qemu` with QEMU's own words; `Disconnected` and `TimedOut` leave open whether the command was carried out.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.execute_within(COMMAND_LIMIT, command, arguments).await
    }

    /// [`Self::execute`] with a limit of its own.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub async fn execute_within(&self, limit: Duration, command: &str, arguments: Value) -> Result<Value> {
        tracing::debug!(monitor = %self.path.display(), command, %arguments, "qmp");
        let gone = || Error::new(ErrorKind::Disconnected, format!("QEMU went away during {command}"));
        let (answer, receiver) = oneshot::channel();
        let request = Request { command: command.to_owned(), arguments, answer };
        self.requests.send(request).await.map_err(|_| gone())?;
        match env::timeout(&*self.env, limit, receiver).await {
            Some(Ok(Ok(value))) => Ok(value),
            Some(Ok(Err(error))) => Err(Error::of_qemu(command, error)),
            Some(Err(_)) => Err(gone()),
            None => {
                let context = format!("QEMU did not answer {command} within {} s", limit.as_secs());
                Err(Error::new(ErrorKind::TimedOut, context))
            }
        }
    }

    /// Every event from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Arc<Event>> {
        self.events.subscribe()
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The process that listens on the monitor: QEMU, unless somebody (libvirt) passed it the socket.
    #[must_use]
    pub fn process_id(&self) -> Option<u32> {
        self.process_id
    }

    /// The monitor's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }

    /// Waits for the connection's end: QEMU is gone, or has closed it.
    pub async fn ended(&self) {
        let mut ended = self.ended.clone();
        // An error means that the task is gone, and with it the connection.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// The environment that it was given.
    #[must_use]
    pub fn env(&self) -> &EnvRef {
        &self.env
    }
}

impl std::fmt::Debug for Qmp {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Qmp({})", self.path.display())
    }
}

fn busy(path: &Path, qemu: Option<u32>) -> Error {
    let owner = owner_of_socket(path, qemu).map(|owner| format!(" \u{2014} {owner}")).unwrap_or_default();
    let context = format!(
        "monitor {}: no greeting within {} s: another client owns this monitor{owner}",
        path.display(),
        GREETING_LIMIT.as_secs()
    );
    Error::new(ErrorKind::MonitorBusy, context)
}

struct Connection {
    stream: UnixStream,
    lines: Lines,
}

impl Connection {
    /// The next message. May be dropped while it waits: what was read stays.
    async fn next(&mut self) -> Result<Message> {
        let broken = |what: String| Error::new(ErrorKind::Protocol, format!("the monitor does not speak QMP: {what}"));
        loop {
            if let Some(line) = self.lines.next().map_err(broken)? {
                return wire::parse(&line).map_err(broken);
            }
            let count = self.stream.read_buf(&mut self.lines.bytes).await.unwrap_or(0);
            if count == 0 {
                return Err(Error::new(ErrorKind::Disconnected, "QEMU closed the monitor"));
            }
        }
    }
}

/// Carries requests out and answers back until one side is gone; what is pending then fails by being dropped.
async fn serve(
    mut connection: Connection,
    mut requests: mpsc::Receiver<Request>,
    events: broadcast::Sender<Arc<Event>>,
) {
    let mut pending: HashMap<u64, oneshot::Sender<Answer>> = HashMap::new();
    let mut last_id = 0_u64;
    loop {
        let next = {
            let message = std::pin::pin!(connection.next());
            let request = std::pin::pin!(requests.recv());
            match select(message, request).await {
                Either::Left((message, _)) => Either::Left(message),
                Either::Right((request, _)) => Either::Right(request),
            }
        };
        match next {
            Either::Left(Ok(Message::Answer { id, result })) => {
                // QEMU leaves the id out only when it could not read the command at all; then the oldest is meant.
                let id = id.or_else(|| pending.keys().min().copied());
                if let Some(waiting) = id.and_then(|id| pending.remove(&id)) {
                    // Whoever asked may have given up.
                    let _ = waiting.send(result);
                }
            }
            Either::Left(Ok(Message::Event(event))) => {
                tracing::debug!(event = event.name, data = %event.data, "qmp");
                // Without listeners nobody misses it.
                let _ = events.send(Arc::new(event));
            }
            Either::Left(Ok(Message::Greeting(_) | Message::Unknown)) => {}
            Either::Left(Err(error)) => {
                tracing::debug!(%error, "the monitor's connection ends");
                return;
            }
            Either::Right(None) => return,
            Either::Right(Some(request)) => {
                last_id += 1;
                let line = wire::request(last_id, &request.command, &request.arguments);
                pending.insert(last_id, request.answer);
                if connection.stream.write_all(&line).await.is_err() {
                    return;
                }
            }
        }
    }
}
