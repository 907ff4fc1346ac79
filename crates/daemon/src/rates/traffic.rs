//! What this host's moves carry over each of its addresses, to and from other hosts.
//!
//! ```text
//!   accepted or dialled ──▶ counts ──opened, for a copy or memory──▶ in the ledger ──dropped──▶ its bytes stay in the ledger
//!                             └────opened, for a forward──▶ never there
//! ```
//!
//! Moves are no strangers to each other, whatever hosts they are between: they share a link in equal parts. So each host says
//! of its own interfaces what all moves have carried and how many they are, and nobody has to know the others. What passes a
//! guest's requests on is no move: somebody waits for it, and moves give way to it as to any other traffic.

use std::collections::BTreeMap;
use std::io::{ErrorKind, IoSlice, Result};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use env::{EnvRef, Moment};
use migrate::stream::{MigrationCounters, Role, SessionRequest, USAGE_INTERVAL};
use parking_lot::Mutex;
use rustix::io::ioctl_fionread;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use uuid::Uuid;

/// A move that carries less than this over an interface, in bytes a second, has no part of it. Such a move is paused,
/// or waits for its switchover. It would halve the rate of another move for as long as its session is open. A move that
/// is held back as far as possible carries twice as much, and so is never taken for one that rests.
const ACTIVE_RATE: u64 = 128 << 10;

/// Bytes in either direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Flow {
    received: u64,
    sent: u64,
}

impl Flow {
    fn add(&mut self, more: Self) {
        self.received += more.received;
        self.sent += more.sent;
    }

    const fn since(self, before: Self) -> Self {
        Self { received: self.received.saturating_sub(before.received), sent: self.sent.saturating_sub(before.sent) }
    }
}

/// What moves have carried.
pub(crate) struct MigrationTraffic {
    env: EnvRef,
    table: Mutex<TrafficTable>,
}

#[derive(Default)]
struct TrafficTable {
    connections: Vec<Entry>,
    /// What those have carried that are no more, by this host's addresses: what is counted never goes back.
    ended: BTreeMap<IpAddr, Flow>,
}

/// A connection of a move.
struct Entry {
    job: Uuid,
    meter: Arc<Meter>,
    /// What it had carried an interval ago or two, and an interval ago at most.
    marks: [(Moment, Flow); 2],
}

/// What a connection has carried.
pub(crate) struct Meter {
    here: IpAddr,
    received: AtomicU64,
    sent: AtomicU64,
    /// The connection once more: the kernel has counted what has come, whether it was read or not.
    socket: OwnedFd,
    is_severed: AtomicBool,
}

impl Meter {
    fn flow(&self) -> Flow {
        // In this order nothing counts twice that is read meanwhile.
        let read = self.received.load(Ordering::Relaxed);
        let unread = ioctl_fionread(&self.socket).unwrap_or(0);
        Flow { received: read + unread, sent: self.sent.load(Ordering::Relaxed) }
    }

    /// What it has carried so far, in bytes: sent, and received.
    pub(crate) fn carried(&self) -> (u64, u64) {
        let flow = self.flow();
        (flow.sent, flow.received)
    }

    /// Ends the connection: nothing is read or written any more, not even what has come already. Whoever serves it finds out
    /// and ends what it has begun.
    pub(crate) fn sever(&self) {
        self.is_severed.store(true, Ordering::Release);
        // This wakes who waits for it. A connection that is closed already does so by itself.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    fn check(&self) -> Result<()> {
        match self.is_severed.load(Ordering::Acquire) {
            true => Err(ErrorKind::ConnectionAborted.into()),
            false => Ok(()),
        }
    }
}

impl MigrationTraffic {
    /// Nothing yet.
    pub(crate) fn new(env: &EnvRef) -> Arc<Self> {
        Arc::new(Self { env: Arc::clone(env), table: Mutex::default() })
    }

    /// The same connection, which counts from now on.
    ///
    /// # Errors
    /// The connection is closed, or this process has too many files open.
    pub(crate) fn count(self: &Arc<Self>, stream: TcpStream) -> Result<Counted> {
        let meter = Meter {
            here: stream.local_addr()?.ip().to_canonical(),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            socket: stream.as_fd().try_clone_to_owned()?,
            is_severed: AtomicBool::new(false),
        };
        Ok(Counted { inner: stream, meter: Arc::new(meter), carried: Arc::clone(self) })
    }

    /// The connection of `meter` is a stream of a session about `request`.
    pub(crate) fn opened(&self, meter: &Arc<Meter>, request: &SessionRequest) {
        if request.role == Role::Copy {
            self.opened_for(meter, request.job);
        }
    }

    /// The connection of `meter` is a part of the move `job`.
    pub(crate) fn opened_for(&self, meter: &Arc<Meter>, job: Uuid) {
        let mark = (self.env.now(), meter.flow());
        let entry = Entry { job, meter: Arc::clone(meter), marks: [mark; 2] };
        self.table.lock().connections.push(entry);
    }

    fn ended(&self, meter: &Arc<Meter>) {
        let mut table = self.table.lock();
        let place = table.connections.iter().position(|entry| Arc::ptr_eq(&entry.meter, meter));
        if let Some(place) = place {
            table.connections.swap_remove(place);
            table.ended.entry(meter.here).or_default().add(meter.flow());
        }
    }

    /// What moves have carried over an interface that has these addresses, and how many do now.
    pub(super) fn over(&self, addresses: &[IpAddr]) -> MigrationCounters {
        let now = self.env.now();
        let mut table = self.table.lock();
        let TrafficTable { connections, ended } = &mut *table;
        let mut sum = Flow::default();
        addresses.iter().filter_map(|address| ended.get(address)).for_each(|flow| sum.add(*flow));
        let mut rates: BTreeMap<Uuid, Flow> = BTreeMap::new();
        for entry in connections.iter_mut().filter(|entry| addresses.contains(&entry.meter.here)) {
            let flow = entry.meter.flow();
            sum.add(flow);
            rates.entry(entry.job).or_default().add(entry.rate((now, flow)));
        }
        let active = rates.values().filter(|rate| rate.received.max(rate.sent) >= ACTIVE_RATE);
        // Each direction is a link of its own. What goes the other way of a move are answers.
        let (incoming, outgoing): (Vec<&Flow>, Vec<&Flow>) = active.partition(|rate| rate.received > rate.sent);
        MigrationCounters {
            received: sum.received,
            sent: sum.sent,
            incoming: incoming.len() as u32,
            outgoing: outgoing.len() as u32,
        }
    }
}

impl Entry {
    /// Bytes a second, over an interval or two: whoever asks does so once an interval, and they are many.
    fn rate(&mut self, (now, flow): (Moment, Flow)) -> Flow {
        let [earlier, later] = &mut self.marks;
        if now.since(later.0) >= USAGE_INTERVAL {
            *earlier = std::mem::replace(later, (now, flow));
        }
        let (span, more) = (now.since(earlier.0).max(USAGE_INTERVAL), flow.since(earlier.1));
        let rate = |bytes: u64| (bytes as f64 / span.as_secs_f64()) as u64;
        Flow { received: rate(more.received), sent: rate(more.sent) }
    }
}

/// A connection that counts.
pub(crate) struct Counted {
    inner: TcpStream,
    meter: Arc<Meter>,
    carried: Arc<MigrationTraffic>,
}

impl Counted {
    /// The connection below.
    pub(crate) const fn inner(&self) -> &TcpStream {
        &self.inner
    }

    /// What it counts with.
    pub(crate) const fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    fn sent(&self, outcome: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if let Poll::Ready(Ok(count)) = outcome {
            self.meter.sent.fetch_add(count as u64, Ordering::Relaxed);
        }
        outcome
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.carried.ended(&self.meter);
    }
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, target: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        self.meter.check()?;
        let before = target.filled().len();
        let outcome = Pin::new(&mut self.inner).poll_read(context, target);
        let count = target.filled().len() - before;
        self.meter.received.fetch_add(count as u64, Ordering::Relaxed);
        outcome
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        self.meter.check()?;
        let outcome = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.sent(outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        self.meter.check()?;
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(context, pieces);
        self.sent(outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use block::Bytes;
    use env::testing::PausedEnv;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn request(job: u128, role: Role) -> SessionRequest {
        SessionRequest {
            volume: "x".to_owned(),
            job: Uuid::from_u128(job),
            role,
            epoch: 1,
            size: Bytes::mib(1),
            request_alignment: 512,
            origin: "x".to_owned(),
            layers: None,
            stays: false,
        }
    }

    /// One end that counts, and the other that does not.
    async fn connection(carried: &Arc<MigrationTraffic>) -> (Counted, TcpStream) {
        let listener = TcpListener::bind(SocketAddr::from((HERE, 0))).await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (far, near) = tokio::join!(TcpStream::connect(address), listener.accept());
        (carried.count(near.expect("accepted").0).expect("it counts"), far.expect("connected"))
    }

    async fn send(from: &mut (impl AsyncWrite + Unpin), to: &mut (impl AsyncRead + Unpin), count: usize) {
        let (sent, mut received) = (vec![7; count], vec![0; count]);
        let (sending, receiving) = tokio::join!(from.write_all(&sent), to.read_exact(&mut received));
        sending.expect("it is read");
        receiving.expect("it comes");
    }

    #[tokio::test(start_paused = true)]
    async fn all_that_copies_carry_counts_in_either_direction_and_nothing_of_a_forward_does() {
        let carried = MigrationTraffic::new(&PausedEnv::shared(1));
        let (mut copy, mut its_end) = connection(&carried).await;
        let (mut forward, mut other_end) = connection(&carried).await;
        carried.opened(copy.meter(), &request(1, Role::Copy));
        carried.opened(forward.meter(), &request(1, Role::Forward));
        send(&mut its_end, &mut copy, 300_000).await;
        send(&mut copy, &mut its_end, 7000).await;
        send(&mut other_end, &mut forward, 50_000).await;
        its_end.write_all(&[0; 500]).await.expect("it is kept by the kernel");
        let now = carried.over(&[HERE]);
        assert_eq!((now.received, now.sent), (300_500, 7000), "with what nobody has read yet");
        assert_eq!(carried.over(&[]), MigrationCounters::default(), "of another interface");
        drop((copy, forward));
        let now = carried.over(&[HERE]);
        assert_eq!((now.received, now.sent, now.incoming), (300_500, 7000, 0), "what has been is not forgotten");
    }

    #[tokio::test]
    async fn of_a_connection_that_is_severed_nothing_is_read_that_has_come_and_whoever_waits_is_told() {
        let carried = MigrationTraffic::new(&PausedEnv::shared(1));
        let (mut waiting, _far) = connection(&carried).await;
        let meter = Arc::clone(waiting.meter());
        let (read, ()) = tokio::join!(waiting.read_u8(), async { meter.sever() });
        assert_eq!(read.expect_err("nothing comes").kind(), ErrorKind::ConnectionAborted);
        let (mut full, mut far) = connection(&carried).await;
        far.write_all(&[7; 100]).await.expect("it is kept by the kernel");
        full.meter().sever();
        assert_eq!(full.read_u8().await.expect_err("it counts no more").kind(), ErrorKind::ConnectionAborted);
        assert_eq!(full.write_u8(7).await.expect_err("nor is it told").kind(), ErrorKind::ConnectionAborted);
    }

    #[tokio::test(start_paused = true)]
    async fn moves_are_counted_and_not_streams_in_the_direction_they_go_while_they_do() {
        let carried = MigrationTraffic::new(&PausedEnv::shared(1));
        let mut ends = Vec::new();
        for job in [1, 1, 2, 3] {
            let ends_of_one = connection(&carried).await;
            carried.opened(ends_of_one.0.meter(), &request(job, Role::Copy));
            ends.push(ends_of_one);
        }
        let sharers = || {
            let now = carried.over(&[HERE]);
            (now.incoming, now.outgoing)
        };
        assert_eq!(sharers(), (0, 0), "none has carried anything");
        for second in 0..5 {
            for (number, (near, far)) in ends.iter_mut().enumerate() {
                match number {
                    // Two streams that are too slow each, and are fast enough together.
                    0 | 1 => send(far, near, 100_000).await,
                    2 => send(near, far, 500_000).await,
                    // It only says that it is there.
                    _ => send(far, near, 100).await,
                }
            }
            tokio::time::advance(USAGE_INTERVAL).await;
            assert_eq!(sharers(), (1, 1), "in second {second}");
        }
        let (near, far) = &mut ends[2];
        for _ in 0..3 {
            tokio::time::advance(USAGE_INTERVAL).await;
            send(near, far, 5000).await;
            sharers();
        }
        assert_eq!(sharers(), (0, 0), "they are paused");
    }
}
