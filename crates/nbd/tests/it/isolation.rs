//! Clients that ask for much and fetch nothing: what they keep is bounded for each export and in time, and other
//! exports work on. The clock is virtual, so rates are exact.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Raw, enter, memory, only};
use block::{Buffer, BufferPool, Bytes, Device, Filter, IoFuture, MemDevice, Mutation};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use transhume_nbd::protocol::{Command, Request};
use transhume_nbd::server::{End, Summary};
use transhume_nbd::{Export, Exports};

const LARGE: u32 = 4 << 20;
const POOL: Bytes = Bytes::mib(256);

/// Takes its time for everything.
struct Slow {
    lower: Device,
    takes: Duration,
}

impl Filter for Slow {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            tokio::time::sleep(self.takes).await;
            self.lower.read(offset, buffer).await
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            tokio::time::sleep(self.takes).await;
            self.lower.write(mutation).await
        })
    }
}

fn export_over(pool: &BufferPool, takes: Duration) -> Arc<dyn Exports> {
    let device = Device::new("slow", Slow { lower: Device::new("memory", MemDevice::new(Bytes::mib(64))), takes });
    only(Export::new("disk", pool.clone(), move || device.clone()))
}

type Connection = (Raw<DuplexStream>, JoinHandle<Summary>);

/// So many connections that have proved themselves alive: the fence holds none of them back any more.
async fn enter_all(exports: &Arc<dyn Exports>, count: usize) -> Vec<Connection> {
    let mut connections = Vec::new();
    for _ in 0..count {
        let (mut raw, server) = enter(exports).await;
        assert_eq!(raw.ask(Command::Flush, 0, 0, 0).await, None);
        connections.push((raw, server));
    }
    connections
}

/// Connections that ask for 4 MiB again and again and read no answer.
async fn greedy(exports: &Arc<dyn Exports>, count: usize) -> Vec<Connection> {
    let mut connections = enter_all(exports, count).await;
    for (raw, _server) in &mut connections {
        for index in 0..16 {
            raw.send(Command::Read, 0, index * u64::from(LARGE), LARGE).await;
        }
    }
    connections
}

/// How many requests of `length` bytes four connections have answered in a second, over so many `rounds` of a read and
/// a write.
async fn rate(exports: &Arc<dyn Exports>, length: u32, rounds: u32) -> f64 {
    let began = Instant::now();
    let clients = (0..4_u64).map(|client| async move {
        let (mut raw, _server) = enter(exports).await;
        for _ in 0..rounds {
            raw.read(client * u64::from(length), length).await;
            assert_eq!(raw.write(client * u64::from(length), &vec![1; length as usize]).await, None);
        }
    });
    let asking = futures::future::join_all(clients);
    tokio::time::timeout(Duration::from_secs(60), asking).await.expect("the others stand still");
    f64::from(8 * rounds) / began.elapsed().as_secs_f64()
}

#[tokio::test(start_paused = true)]
async fn a_hundred_and_twenty_connections_that_fetch_nothing_leave_another_export_its_rate() {
    // One tenant with many connections, and one for every few of them.
    for (takes, tenants) in [(1, 1), (20, 1), (1, 6), (20, 6)] {
        let pool = BufferPool::new(POOL);
        let takes = Duration::from_millis(takes);
        let honest = export_over(&pool, takes);
        let before = [rate(&honest, 4096, 100).await, rate(&honest, 1 << 20, 5).await];
        let mut greedy_ones = Vec::new();
        for _ in 0..tenants {
            let export = export_over(&pool, takes);
            greedy_ones.push((greedy(&export, 120 / tenants).await, export));
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let limit = (POOL.get() / 4 * tenants as u64).min(POOL.get());
        assert!(pool.in_use() <= Bytes(limit) && pool.in_use() >= Bytes(limit / 2), "{} are kept", pool.in_use());
        let during = [rate(&honest, 4096, 100).await, rate(&honest, 1 << 20, 5).await];
        for (before, during) in before.into_iter().zip(during) {
            assert!(during >= 0.9 * before, "{takes:?}, {tenants} tenants: {before} before and {during} during it");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_fetches_nothing_is_hung_up_on_and_what_he_kept_is_free_again() {
    let pool = BufferPool::new(POOL);
    let exports = export_over(&pool, Duration::from_millis(1));
    let connections = greedy(&exports, 40).await;
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert!(pool.in_use() > Bytes::mib(32) && connections.iter().all(|(_, server)| !server.is_finished()));
    // Those whose turn it is when buffers are free again have a time of their own.
    tokio::time::sleep(Duration::from_secs(1800)).await;
    for (_raw, server) in connections {
        assert!(matches!(server.await.expect("no panic").end, End::Stalled));
    }
    assert_eq!(pool.in_use(), Bytes::ZERO);
}

#[tokio::test(start_paused = true)]
async fn whoever_announces_a_payload_and_does_not_send_it_is_hung_up_on() {
    let pool = BufferPool::new(POOL);
    let (mut raw, server) = enter(&export_over(&pool, Duration::from_millis(1))).await;
    raw.send(Command::Write, 0, 0, LARGE).await;
    raw.say(&[1; 100_000]).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(pool.in_use() > Bytes::ZERO && !server.is_finished());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(matches!(server.await.expect("no panic").end, End::Stalled));
    assert_eq!(pool.in_use(), Bytes::ZERO);
}

#[tokio::test(start_paused = true)]
async fn whoever_is_slow_or_idle_is_not_hung_up_on() {
    let pool = BufferPool::new(POOL);
    let exports = export_over(&pool, Duration::from_millis(1));
    let (mut idle, _server) = enter(&exports).await;
    let (mut slow, _other) = enter(&exports).await;
    for round in 0..3_u64 {
        slow.send(Command::Read, 0, round * u64::from(LARGE), LARGE).await;
        let mut left = LARGE as usize + 28;
        let mut piece = vec![0; 32 << 10];
        while left > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let length = left.min(piece.len());
            slow.stream.read_exact(&mut piece[..length]).await.expect("it is patient with those who move");
            left -= length;
        }
        tokio::time::sleep(Duration::from_secs(300)).await;
    }
    assert_eq!(idle.read(0, 512).await, [0; 512]);
    assert_eq!(slow.read(0, 512).await, [0; 512]);
}

#[tokio::test(start_paused = true)]
async fn an_export_with_as_many_requests_as_it_may_have_still_serves_a_connection_without_any() {
    let pool = BufferPool::new(POOL);
    let exports = export_over(&pool, Duration::from_secs(20));
    let mut connections = enter_all(&exports, 13).await;
    let (mut idle, _server) = connections.pop().expect("there are thirteen");
    let began = Instant::now();
    for (raw, _server) in &mut connections {
        for index in 0..128 {
            raw.send(Command::Read, 0, index * 512, 512).await;
        }
    }
    assert_eq!(idle.read(0, 512).await, [0; 512]);
    assert!(began.elapsed() < Duration::from_secs(21), "it has waited for others' requests");
    for (raw, _server) in &mut connections {
        for _ in 0..128 {
            assert_eq!(raw.answer(0).await.error, None);
        }
    }
    assert!(began.elapsed() >= Duration::from_secs(40), "all of them were served at once");
}

#[tokio::test]
async fn a_pool_of_one_page_serves_requests_of_a_page() {
    let device = memory(Bytes::mib(1));
    let (mut raw, _server) =
        enter(&only(Export::new("disk", BufferPool::new(Bytes(4096)), move || device.clone()))).await;
    assert_eq!(raw.write(0, &[3; 4096]).await, None);
    assert_eq!(raw.read(0, 4096).await, [3; 4096]);
}

/// A write whose payload is all here waits while replies fill what the connection sends: nothing is read for it then.
#[tokio::test(start_paused = true)]
async fn large_reads_and_writes_beside_each_other_are_all_answered() {
    const LENGTH: u32 = 1 << 20;
    let (raw, _server) = enter(&export_over(&BufferPool::new(POOL), Duration::from_millis(2))).await;
    let (mut reader, mut writer) = tokio::io::split(raw.stream);
    let saying = tokio::spawn(async move {
        for cookie in 0..100_u64 {
            let command = if cookie % 2 == 0 { Command::Read } else { Command::Write };
            let offset = Bytes(cookie / 2 % 32 * u64::from(LENGTH));
            let request = Request { flags: 0, command, cookie, offset, length: LENGTH };
            writer.write_all(&request.to_bytes()).await.expect("the server listens");
            if command == Command::Write {
                for piece in vec![cookie as u8; LENGTH as usize].chunks(64 << 10) {
                    writer.write_all(piece).await.expect("the server listens");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        writer
    });
    let mut listener = Raw { stream: tokio::io::join(&mut reader, tokio::io::sink()) };
    for _ in 0..100 {
        // Slower than the requests come.
        tokio::time::sleep(Duration::from_millis(40)).await;
        assert_eq!(listener.answer(0).await.error, None);
    }
    saying.await.expect("no panic");
}
