//! A small QMP client: over a unix socket of QEMU's, or through libvirt.
//!
//! ```text
//!  connect ──greeting within 5 s──▶ capabilities ──▶ serving ──▶ ended (EOF, garbage, all handles dropped)
//!     │                                                │ commands in flight fail with Disconnected
//!     └─ no greeting: MonitorBusy, with the owner      └ events go to every listener
//!
//!  through_libvirt ──a QEMU of this host has the domain's UUID──▶ serving, a `virsh` a command ──▶ ended (QEMU is gone)
//! ```
//!
//! One task owns the way to QEMU; a [`Qmp`] is a handle to it. A command's future may be dropped at any time: the
//! command is carried out all the same.

mod owner;
mod socket;
mod virsh;
mod wire;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use env::EnvRef;
use serde_json::{Value, json};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::error::{Error, ErrorKind, Result};
use crate::options::LibvirtDomain;

pub use owner::{Owner, owner_of_socket};
use virsh::Domain;
pub(crate) use virsh::LOOK_AGAIN;
pub use virsh::{Virsh, qemu_of};
pub use wire::{Event, Version};

/// How long QEMU may take to greet. It greets at once, unless another client owns the monitor.
pub const GREETING_LIMIT: Duration = Duration::from_secs(5);

/// How long one command may take. Draining commands wait for the guest's requests in flight.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// Commands that may wait for their turn.
const REQUESTS_WAITING_MAX: usize = 16;

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
    name: String,
}

struct Request {
    command: String,
    arguments: Value,
    /// An open file that goes with it.
    file: Option<OwnedFd>,
    answer: oneshot::Sender<Result<Value>>,
}

/// A handle that does not keep the connection: for whoever shares it with those that use it.
#[derive(Clone)]
pub struct WeakQmp {
    requests: mpsc::WeakSender<Request>,
    /// Everything else of a handle.
    rest: Arc<Rest>,
}

struct Rest {
    events: broadcast::Sender<Arc<Event>>,
    ended: watch::Receiver<bool>,
    env: EnvRef,
    version: Version,
    process_id: Option<u32>,
    name: String,
}

impl WeakQmp {
    /// A handle again, unless the connection has ended.
    #[must_use]
    pub fn upgrade(&self) -> Option<Qmp> {
        let Rest { events, ended, env, version, process_id, name } = &*self.rest;
        let qmp = Qmp {
            requests: self.requests.upgrade()?,
            events: events.clone(),
            ended: ended.clone(),
            env: Arc::clone(env),
            version: *version,
            process_id: *process_id,
            name: name.clone(),
        };
        (!qmp.has_ended()).then_some(qmp)
    }
}

impl Qmp {
    /// A handle that does not keep the connection.
    #[must_use]
    pub fn downgrade(&self) -> WeakQmp {
        let rest = Rest {
            events: self.events.clone(),
            ended: self.ended.clone(),
            env: Arc::clone(&self.env),
            version: self.version,
            process_id: self.process_id,
            name: self.name.clone(),
        };
        WeakQmp { requests: self.requests.downgrade(), rest: Arc::new(rest) }
    }

    /// Connects to the monitor at `path` and negotiates.
    ///
    /// # Errors
    /// `NoMonitor` if nothing listens there, `MonitorBusy` without a greeting within five seconds, `Protocol` if what
    /// answers is no QMP.
    pub async fn connect(path: &Path, env: EnvRef) -> Result<Self> {
        let opened = socket::open(path, &env).await?;
        let (requests, receiver) = mpsc::channel(REQUESTS_WAITING_MAX);
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let (ended_sender, ended) = watch::channel(false);
        let server = socket::serve(opened.connection, receiver, events.clone());
        env.spawn(Box::pin(async move {
            server.await;
            // Nobody may be left to receive it.
            let _ = ended_sender.send(true);
        }));
        let name = format!("monitor {}", path.display());
        // A process that is not among those that are seen here has the number 0.
        let (version, process_id) = (opened.version, opened.process_id.filter(|pid| *pid != 0));
        let qmp = Self { requests, events, ended, env, version, process_id, name };
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Reaches the QEMU of a running libvirt domain through libvirt, whose monitor takes no second client. libvirt
    /// marks the domain as tainted (`custom-monitor`) until its next start.
    ///
    /// # Errors
    /// `NoMonitor` if the domain does not run on this host or virsh is missing, `LibvirtUnreachable` if libvirt does
    /// not answer.
    pub async fn through_libvirt(virsh: Virsh, domain: &LibvirtDomain, env: EnvRef) -> Result<Self> {
        let process_id = virsh::qemu_of(domain)?;
        let (requests, receiver) = mpsc::channel(REQUESTS_WAITING_MAX);
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let (ended_sender, ended) = watch::channel(false);
        let name = format!("libvirt domain {}", domain.name);
        let domain = Domain { virsh, uuid: domain.uuid.clone(), process_id };
        let server = virsh::serve(domain, receiver, events.clone(), Arc::clone(&env));
        env.spawn(Box::pin(async move {
            server.await;
            // Nobody may be left to receive it.
            let _ = ended_sender.send(true);
        }));
        let version = Version::default();
        let mut qmp = Self { requests, events, ended, env, version, process_id: Some(process_id), name };
        qmp.version = Version::parse(&qmp.execute("query-version", json!({})).await?);
        Ok(qmp)
    }

    /// Runs `command` and gives what it returns.
    ///
    /// # Errors
    /// `Qemu` with QEMU's own words; `Disconnected` and `TimedOut` leave open whether the command was carried out.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.run(command, arguments, None).await
    }

    /// [`Self::execute`] with an open file for QEMU, for `add-fd`.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub async fn execute_with_file(&self, command: &str, arguments: Value, file: OwnedFd) -> Result<Value> {
        self.run(command, arguments, Some(file)).await
    }

    async fn run(&self, command: &str, arguments: Value, file: Option<OwnedFd>) -> Result<Value> {
        tracing::debug!(monitor = self.name, command, %arguments, "qmp");
        let gone = || Error::new(ErrorKind::Disconnected, format!("QEMU went away during {command}"));
        let (answer, receiver) = oneshot::channel();
        let request = Request { command: command.to_owned(), arguments, file, answer };
        self.requests.send(request).await.map_err(|_| gone())?;
        match env::timeout(&*self.env, COMMAND_LIMIT, receiver).await {
            Some(Ok(answer)) => answer,
            Some(Err(_)) => Err(gone()),
            None => {
                let context = format!("QEMU did not answer {command} within {} s", COMMAND_LIMIT.as_secs());
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

    /// QEMU's process: the one that listens on the monitor (unless somebody passed it the socket), or that has the
    /// domain's UUID.
    #[must_use]
    pub fn process_id(&self) -> Option<u32> {
        self.process_id
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
        write!(out, "Qmp({})", self.name)
    }
}
