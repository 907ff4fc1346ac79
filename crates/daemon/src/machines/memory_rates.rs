//! What the memory of a machine may take of the network: its part of what others leave, as disks have it (PMigrate, section 3.2).
//!
//! ```text
//!   hypervisor ─▶ carrier ─▶ bucket ─▶ connection ─▶ the other host
//!                              ▲           │ what it has carried
//!             once a second    │           ▼
//!   deadline, --bandwidth ─▶ agreement ◀── counters of both hosts' interfaces
//! ```
//!
//! The hypervisor knows nothing of it: a connection that takes less is one that it writes to more slowly. Once the guest is stopped, or
//! runs at the target, it waits for the rest of its memory, and every limit is lifted.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use api::v1::Rates;
use env::{EnvRef, Moment};
use filters::TokenBucket;
use migrate::stream::{BoxTransport, LinkCounters, Pace, USAGE_INTERVAL, needed_rate};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::attempt::MachineMove;
use super::channel::{Answer, Ask};
use super::outgoing::call;
use crate::daemon::Daemon;
use crate::platform::{Carried, Interfaces};
use crate::rates::{Agreed, Agreement, RateSample, StreamSample, addresses, found};

/// How long the other host may take to say what its interfaces have carried.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// A bandwidth that guests' writes to their disks use up leaves the memory this part of it: without it the move would never end.
const LEAST_PART: u64 = 10;

/// What the connections of one memory may take.
pub(super) struct MemoryRates {
    env: EnvRef,
    connections: Mutex<Vec<Connection>>,
    is_lifted: AtomicBool,
    said: Mutex<Option<Rates>>,
}

struct Connection {
    bucket: Arc<TokenBucket>,
    /// Nothing where nobody counts.
    carried: Option<Arc<dyn Carried>>,
}

impl MemoryRates {
    /// No connection, and no limit.
    pub(super) fn new(env: &EnvRef) -> Self {
        Self {
            env: Arc::clone(env),
            connections: Mutex::default(),
            is_lifted: AtomicBool::new(false),
            said: Mutex::default(),
        }
    }

    /// The same connection, which takes no more than it may.
    pub(super) fn admit(&self, far: BoxTransport, carried: Option<Arc<dyn Carried>>) -> BoxTransport {
        let bucket = Arc::new(TokenBucket::new(Arc::clone(&self.env), None));
        let mut connections = self.connections.lock();
        // Those that were lost have no part any more.
        connections.retain(|one| one.carried.as_ref().is_none_or(|carried| carried.bytes().is_some()));
        connections.push(Connection { bucket: Arc::clone(&bucket), carried });
        drop(connections);
        Box::new(Limited { far, env: Arc::clone(&self.env), bucket, pace: Pace::default() })
    }

    /// The guest waits from now on: nothing is limited any more.
    pub(super) fn lift(&self) {
        self.is_lifted.store(true, Ordering::Release);
        self.limit(&[]);
    }

    /// What was agreed on last, if anything was.
    pub(super) fn shown(&self) -> Option<Rates> {
        self.said.lock().clone()
    }

    /// What each connection may take in bytes a second; those that are not named have no limit.
    fn limit(&self, rates: &[Option<u64>]) {
        let rates = rates.iter().copied().chain(std::iter::repeat(None));
        for (connection, rate) in self.connections.lock().iter().zip(rates) {
            connection.bucket.set_rate(rate);
        }
    }

    fn samples(&self) -> Vec<Option<StreamSample>> {
        let sample = |connection: &Connection| {
            let carried = connection.carried.as_ref()?;
            let (sent, received) = carried.bytes()?;
            Some(StreamSample { path: carried.path(), sent, received })
        };
        self.connections.lock().iter().map(sample).collect()
    }
}

/// Keeps the memory of `moving` within its part of the network for as long as it is driven.
pub(super) async fn keep(daemon: &Daemon, moving: &MachineMove) -> Infallible {
    let mut keeper = Keeper {
        daemon,
        moving,
        interfaces: daemon.hosts.interfaces(),
        agreement: Agreement::default(),
        usage: Usage::Unasked,
        mirrored: None,
    };
    loop {
        daemon.env.sleep(USAGE_INTERVAL).await;
        keeper.look().await;
    }
}

struct Keeper<'a> {
    daemon: &'a Daemon,
    moving: &'a MachineMove,
    interfaces: Option<Arc<dyn Interfaces>>,
    agreement: Agreement,
    usage: Usage,
    /// What guests had written to both sides at the last look, in bytes.
    mirrored: Option<(Moment, u64)>,
}

/// Whether the other host says what its interfaces have carried.
enum Usage {
    Unasked,
    Answers(BoxTransport),
    /// It is too old for the question.
    Unknown,
}

impl Keeper<'_> {
    async fn look(&mut self) {
        let rates = &self.moving.rates;
        let needed = self.needed();
        let agreed = match self.interfaces.clone() {
            Some(interfaces) => {
                let sample = self.sample(&*interfaces).await;
                self.agreement.step(sample, needed.unwrap_or(0))
            }
            None => Agreed::default(),
        };
        let own = self.own_limit();
        // A guest that was stopped meanwhile waits for no look.
        if rates.is_lifted.load(Ordering::Acquire) {
            return;
        }
        let connections = rates.connections.lock().len();
        rates.limit(&limits(&agreed.streams, own, connections));
        if agreed.paths.is_empty() && needed.is_none() {
            return;
        }
        let request = &self.moving.request;
        let said = Rates {
            limit: agreed.limit.into_iter().chain(own).min(),
            needed,
            deadline_ms: request.deadline_ms,
            paths: agreed.paths,
            ..Rates::default()
        };
        *rates.said.lock() = Some(said);
    }

    /// What the deadline asks for, in bytes a second.
    fn needed(&self) -> Option<u64> {
        let (left, age) = self.moving.memory_left(self.daemon)?;
        let deadline = Duration::from_millis(self.moving.request.deadline_ms?);
        // Who aims at the last moment is late by whatever comes in between.
        Some(needed_rate(left, Some((deadline * 7 / 8).saturating_sub(age)), 0))
    }

    /// What is left to the memory of the bandwidth that was asked for: guests' writes to their disks go first.
    fn own_limit(&mut self) -> Option<u64> {
        let now = (self.daemon.env.now(), self.moving.bytes_mirrored());
        let before = self.mirrored.replace(now);
        let bandwidth = self.moving.request.bandwidth?;
        let mirrored = before.map_or(0, |(at, bytes)| {
            let seconds = now.0.since(at).as_secs_f64().max(0.1);
            (now.1.saturating_sub(bytes) as f64 / seconds) as u64
        });
        Some(bandwidth.saturating_sub(mirrored).max(bandwidth / LEAST_PART).max(1))
    }

    async fn sample(&mut self, interfaces: &dyn Interfaces) -> RateSample {
        let paths = |streams: &[Option<StreamSample>]| -> Vec<_> {
            streams.iter().map(|stream| stream.map(|stream| stream.path)).collect()
        };
        let [_, there] = addresses(&paths(&self.moving.rates.samples()));
        let answered = self.ask(&there).await;
        let at = self.daemon.env.now();
        let streams = self.moving.rates.samples();
        let [here, _] = addresses(&paths(&streams));
        RateSample {
            at,
            here: found(&here, interfaces.look(&here)),
            there: found(&there, answered),
            streams,
            // They go over other connections, which are not limited here.
            mirrored: 0,
        }
    }

    /// What the other host's interfaces have carried; nothing if it does not say.
    async fn ask(&mut self, addresses: &[IpAddr]) -> Vec<Option<LinkCounters>> {
        if addresses.is_empty() || matches!(self.usage, Usage::Unknown) {
            return Vec::new();
        }
        let host = self.moving.host();
        let ask = Ask::Usage { addresses: addresses.to_vec() };
        let usage = std::mem::replace(&mut self.usage, Usage::Unasked);
        let was_asked = matches!(usage, Usage::Answers(_));
        let asked = async {
            let mut channel = match usage {
                Usage::Answers(channel) => channel,
                _ => self.daemon.machine_channel(host).await.ok()?,
            };
            let answer = call(&mut channel, host, ask).await;
            Some((channel, answer))
        };
        match env::timeout(&*self.daemon.env, ANSWER_MAX, asked).await.flatten() {
            Some((channel, Ok(Answer::Usage { counters }))) => {
                self.usage = Usage::Answers(channel);
                counters
            }
            // Whoever has answered once is only away.
            Some(_) if !was_asked => {
                self.usage = Usage::Unknown;
                Vec::new()
            }
            _ => Vec::new(),
        }
    }
}

/// What each of so many connections may take: what was agreed on for it, within its part of the bandwidth that was asked for.
fn limits(agreed: &[Option<u64>], own: Option<u64>, connections: usize) -> Vec<Option<u64>> {
    let part = own.map(|own| (own / connections.max(1) as u64).max(1));
    (0..connections).map(|number| agreed.get(number).copied().flatten().into_iter().chain(part).min()).collect()
}

/// A connection to the other host that is written to no faster than it may be.
struct Limited {
    far: BoxTransport,
    env: EnvRef,
    bucket: Arc<TokenBucket>,
    pace: Pace,
}

impl AsyncRead for Limited {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.far).poll_read(context, into)
    }
}

impl AsyncWrite for Limited {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        let Self { far, env, bucket, pace } = self.get_mut();
        if !pace.is_ready(bucket, &**env, context) {
            return Poll::Pending;
        }
        let written = Pin::new(far).poll_write(context, bytes);
        if let Poll::Ready(Ok(count)) = &written {
            pace.take(bucket, *count);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.far).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.far).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use env::testing::PausedEnv;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn a_connection_has_what_was_agreed_on_within_its_part_of_the_bandwidth() {
        assert_eq!(limits(&[], None, 2), [None, None]);
        assert_eq!(limits(&[Some(7)], None, 2), [Some(7), None]);
        assert_eq!(limits(&[Some(7), None], Some(20), 2), [Some(7), Some(10)]);
        assert_eq!(limits(&[Some(70)], Some(20), 1), [Some(20)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_holds_until_the_guest_waits_for_its_memory() {
        let env: EnvRef = PausedEnv::shared(1);
        let rates = MemoryRates::new(&env);
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let mut connection = rates.admit(Box::new(near), None);
        rates.limit(&[Some(100_000)]);
        let swallowed = tokio::spawn(async move {
            let mut all = Vec::new();
            far.read_to_end(&mut all).await.map(|_| all.len())
        });
        let began = env.now();
        for _ in 0..20 {
            connection.write_all(&[7; 50_000]).await.expect("taken");
        }
        let span = env.now().since(began);
        assert!((Duration::from_secs(9)..Duration::from_secs(11)).contains(&span), "a megabyte took {span:?}");
        rates.lift();
        let began = env.now();
        connection.write_all(&[7; 1_000_000]).await.expect("taken");
        assert!(env.now().since(began) < Duration::from_secs(1), "it is lifted");
        connection.shutdown().await.expect("closed");
        drop(connection);
        assert_eq!(swallowed.await.expect("no panic").expect("read"), 2_000_000);
    }
}
