//! A client of a guest, in a network of its own: what it feels while the guest moves.
//!
//! ```no_run
//! use std::time::Duration;
//! use transhume_guest::{ClientSpec, GuestNetwork, NetworkClient};
//!
//! # fn main() {}
//! # fn watch(network: &GuestNetwork) -> anyhow::Result<()> {
//! let client = NetworkClient::start(network.namespace(), "10.88.0.10", ClientSpec::default(), Duration::from_secs(60))?;
//! // The guest moves.
//! let report = client.finish();
//! println!("{} of {} lost, {:?} without an answer", report.udp.lost(), report.udp.made(), report.udp.longest_gap());
//! # Ok(())
//! # }
//! ```

mod http;
mod tcp;
mod udp;

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};

use crate::probe_series::{ProbeSeries, Recorder};
use crate::two_hosts::enter;

/// How long answers are waited for at the end.
const LINGER: Duration = Duration::from_secs(2);
/// How long one try to reach the guest takes at most.
const ATTEMPT: Duration = Duration::from_millis(200);

/// What the client does; a rate of 0 leaves that part out.
#[derive(Clone, Copy, Debug)]
pub struct ClientSpec {
    /// UDP requests to port 7 a second.
    pub udp_per_second: u32,
    /// HTTP requests to port 80 a second, each on a connection of its own.
    pub http_per_second: u32,
    /// Messages a second on the TCP connection to port 8 that lasts all the time.
    pub tcp_per_second: u32,
}

impl Default for ClientSpec {
    /// 1,000 UDP requests, 100 HTTP requests and 100 TCP messages a second.
    fn default() -> Self {
        Self { udp_per_second: 1000, http_per_second: 100, tcp_per_second: 100 }
    }
}

/// What a client felt.
#[derive(Clone, Debug)]
pub struct NetworkReport {
    /// When it started; every other time counts from here.
    pub started: Instant,
    /// Requests by UDP, from when they were sent. They are never repeated.
    pub udp: ProbeSeries,
    /// Pages by HTTP, from when they were due. A try without an answer is given up after half a second and repeated.
    pub http: ProbeSeries,
    /// Tries that were given up.
    pub http_retries: u64,
    /// Pages whose counter was not beyond that of a page that had been answered before they were asked for: the guest
    /// went back in time.
    pub http_backwards: u64,
    /// Messages on the TCP connection, from when they were sent. None is lost while the connection lives.
    pub tcp: ProbeSeries,
    /// Why the TCP connection broke, if it did.
    pub tcp_broken: Option<String>,
}

/// A client that works until it is told to finish, or dropped.
pub struct NetworkClient {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// What its threads share.
struct Shared {
    namespace: String,
    guest: IpAddr,
    spec: ClientSpec,
    started: Instant,
    is_stopping: AtomicBool,
    is_over: AtomicBool,
    udp: Recorder,
    http: Recorder,
    pages: http::Pages,
    tcp: Recorder,
    tcp_broken: std::sync::Mutex<Option<String>>,
}

impl NetworkClient {
    /// Waits until the guest at this address serves, and starts.
    ///
    /// # Errors
    /// It does not serve within `limit`, or the namespace cannot be entered.
    pub fn start(namespace: &str, guest: &str, spec: ClientSpec, limit: Duration) -> anyhow::Result<Self> {
        let guest: IpAddr = guest.parse().with_context(|| format!("{guest} is no address"))?;
        let stream = within(namespace, move || connect(SocketAddr::new(guest, tcp::PORT), limit))?;
        let socket = within(namespace, move || udp::open(guest))?;
        let started = Instant::now();
        let shared = Arc::new(Shared {
            namespace: namespace.into(),
            guest,
            spec,
            started,
            is_stopping: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            udp: Recorder::new(started),
            http: Recorder::new(started),
            pages: http::Pages::default(),
            tcp: Recorder::new(started),
            tcp_broken: std::sync::Mutex::new(None),
        });
        let mut client = Self { shared: Arc::clone(&shared), workers: Vec::new() };
        if spec.udp_per_second > 0 {
            client.workers.extend(udp::start(&shared, socket)?);
        }
        if spec.http_per_second > 0 {
            client.workers.extend(http::start(&shared));
        }
        if spec.tcp_per_second > 0 {
            client.workers.extend(tcp::start(&shared, stream)?);
        }
        Ok(client)
    }

    /// What it felt so far. Requests that wait for their answers count as lost.
    #[must_use]
    pub fn report(&self) -> NetworkReport {
        self.shared.report(self.shared.started.elapsed())
    }

    /// Stops asking, waits two seconds for answers and returns what it felt.
    #[must_use]
    pub fn finish(mut self) -> NetworkReport {
        let end = self.shared.started.elapsed();
        self.shared.is_stopping.store(true, Ordering::Release);
        let limit = Instant::now() + LINGER;
        while Instant::now() < limit && self.shared.report(end).is_waiting() {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.end();
        self.shared.report(end)
    }

    fn end(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.is_over.store(true, Ordering::Release);
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so.
            let _ = worker.join();
        }
    }
}

impl Drop for NetworkClient {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Display for NetworkReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "UDP: {}", self.udp)?;
        writeln!(out, "HTTP: {}, {} repeated, {} backwards", self.http, self.http_retries, self.http_backwards)?;
        write!(out, "TCP: {}, {}", self.tcp, self.tcp_broken.as_deref().unwrap_or("not broken"))
    }
}

impl NetworkReport {
    fn is_waiting(&self) -> bool {
        self.udp.lost() + self.http.lost() + self.tcp.lost() > 0
    }
}

impl Shared {
    fn report(&self, end: Duration) -> NetworkReport {
        NetworkReport {
            started: self.started,
            udp: self.udp.series(end),
            http: self.http.series(end),
            http_retries: self.pages.retries(),
            http_backwards: self.pages.backwards(),
            tcp: self.tcp.series(end),
            tcp_broken: self.tcp_broken.lock().expect("no holder panics").clone(),
        }
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

/// Does something in a namespace, by a thread that enters it. Sockets stay where they were made.
pub(crate) fn within<T: Send + 'static>(
    namespace: &str,
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let namespace = namespace.to_owned();
    let worker = std::thread::spawn(move || {
        enter(&namespace)?;
        work()
    });
    worker.join().map_err(|_| anyhow!("a thread of the client panicked"))?
}

pub(crate) fn connect(address: SocketAddr, limit: Duration) -> anyhow::Result<TcpStream> {
    let end = Instant::now() + limit;
    loop {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= end => bail!("the guest does not serve {address} after {limit:?}: {error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Calls `act` at a rate until told to stop. What a sleeping machine missed is left out.
fn pace(shared: &Shared, per_second: u32, mut act: impl FnMut()) {
    let period = Duration::from_secs(1) / per_second.max(1);
    let mut due = Instant::now();
    while !shared.is_stopping() {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        act();
        due += period;
        if due.elapsed() > 100 * period {
            due = Instant::now();
        }
    }
}
