//! Memory, connections, time: every limit holds, whoever is at the other end.

use std::sync::Arc;
use std::time::Duration;

use block::{
    BlockDevice, Buffer, Bytes, Device, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, MemDevice, Mutation,
    Result,
};
use env::EnvRef;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use transhume_migrate::stream::protocol::{
    CHOICE_BYTES, Coding, HEADER_BYTES, Header, Hello, Kind, Opening, Status, feature,
};
use transhume_migrate::stream::{Compression, PeerName, ReceiverLimits, Role, StreamOptions};

use crate::wire::harness::{Pair, noise, read, write};

/// Takes its time.
struct Lazy(MemDevice, EnvRef, Duration);

impl BlockDevice for Lazy {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.1.sleep(self.2).await;
            self.0.read(offset, buffer).await
        })
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.1.sleep(self.2).await;
            self.0.write(mutation).await
        })
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        self.0.flush()
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.0.extents(extent)
    }
}

fn lazy_pair(limits: ReceiverLimits, takes: Duration) -> Pair {
    let device = Lazy(MemDevice::new(Bytes::mib(128)), env::testing::PausedEnv::shared(1), takes);
    Pair::with_limits(1, Device::new("lazy", device), limits)
}

#[tokio::test(start_paused = true)]
async fn the_receivers_pool_is_never_exceeded_and_everybody_is_served_in_the_end() {
    for compression in [Compression::Off, Compression::Lz4] {
        let limits = ReceiverLimits { pool: Bytes::mib(3), share: Bytes::mib(2), ..ReceiverLimits::default() };
        let pair = lazy_pair(limits, Duration::from_millis(40));
        let options = StreamOptions { streams: 4, compression, ..StreamOptions::default() };
        let remote = pair.connect(Role::Copy, options).await.expect("it is let in");
        let device = Device::from_arc("remote", Arc::clone(&remote) as Arc<_>);
        let text = block::Data::copy_of(&b"wool and milk ".repeat(40_000)[..512 << 10]);
        let data = if compression == Compression::Off { noise(1, 512 << 10) } else { text };
        let writes = join_all((0..100_u64).map(|number| device.write(write(number << 20, &data))));
        let reads = join_all((0..30_u64).map(|number| device.read(Bytes::mib(number), Buffer::unpooled(1 << 20))));
        let receiver = pair.receiver();
        let mut most = Bytes::ZERO;
        let mut work = Box::pin(async { futures::join!(writes, reads) });
        let (written, fetched) = loop {
            let tick = env::timeout(&*pair.env, Duration::from_millis(1), &mut work).await;
            most = most.max(receiver.pool_in_use());
            if let Some(outcomes) = tick {
                break outcomes;
            }
        };
        written.into_iter().for_each(|outcome| outcome.expect("it is served in its time"));
        fetched.into_iter().for_each(|outcome| drop(outcome.expect("it is served in its time")));
        assert!(most <= Bytes::mib(7) && most >= Bytes::mib(4), "{most} of 3 MiB and two shares of 2 were in use");
        assert_eq!(read(&device, 99 << 20, 512 << 10).await, data[..]);
        assert_eq!(
            remote.statistics().streams.iter().map(|stream| stream.deaths).sum::<u64>(),
            0,
            "waiting is not dying"
        );
        remote.close().await.expect("it works");
        pair.settle().await;
        assert_eq!(receiver.pool_in_use(), Bytes::ZERO, "a buffer is lost");
    }
}

/// A sender that says what it likes.
struct Raw {
    transport: DuplexStream,
    serving: tokio::task::JoinHandle<Result<()>>,
}

impl Raw {
    fn connect(pair: &Pair) -> Self {
        Self::connect_as(pair, "south")
    }

    fn connect_as(pair: &Pair, peer: &str) -> Self {
        let (transport, far) = tokio::io::duplex(64 << 10);
        let (receiver, peer) = (pair.receiver(), PeerName(peer.to_owned()));
        let serving = tokio::spawn(async move { receiver.serve(Box::new(far), peer).await });
        Self { transport, serving }
    }

    async fn open_of(pair: &Pair, peer: &str) -> Self {
        let request = pair.request(Role::Copy);
        let opening = Opening { sender: [2; 16], session: 1, stream: 0, generation: 1, joins: false, request };
        let mut raw = Self::connect_as(pair, peer);
        assert_eq!(raw.introduce(&opening).await, Status::Done);
        raw
    }

    async fn open(pair: &Pair) -> Self {
        Self::open_stream(pair, 0).await
    }

    async fn open_stream(pair: &Pair, stream: u16) -> Self {
        let request = pair.request(Role::Copy);
        let joins = stream > 0;
        let opening = Opening { sender: [2; 16], session: 1, stream, generation: 1, joins, request };
        let (raw, status) = Self::ask(pair, &opening).await;
        assert_eq!(status, Status::Done);
        raw
    }

    async fn ask(pair: &Pair, opening: &Opening) -> (Self, Status) {
        let mut raw = Self::connect(pair);
        let status = raw.introduce(opening).await;
        (raw, status)
    }

    async fn introduce(&mut self, opening: &Opening) -> Status {
        self.transport.write_all(&Hello::default().to_bytes()).await.expect("it is read");
        let mut choice = [0; CHOICE_BYTES];
        self.transport.read_exact(&mut choice).await.expect("it is answered");
        let message = opening.to_bytes(feature::KNOWN).expect("it is short");
        self.say(&Header::request(Kind::Open, 0).with_payload(&message), &message).await;
        let (header, _) = self.hear().await;
        assert_eq!(header.kind, Kind::Open);
        header.status
    }

    async fn say(&mut self, header: &Header, payload: &[u8]) {
        // A closed connection is found out by what is heard.
        let _ = self.transport.write_all(&header.to_bytes()).await;
        let _ = self.transport.write_all(payload).await;
    }

    async fn hear(&mut self) -> (Header, Vec<u8>) {
        loop {
            let mut bytes = [0; HEADER_BYTES];
            self.transport.read_exact(&mut bytes).await.expect("there is an answer");
            let header = Header::parse(&bytes).expect("it is well formed");
            let mut payload = vec![0; header.payload_bytes as usize];
            self.transport.read_exact(&mut payload).await.expect("it is whole");
            if header.kind != Kind::Beat {
                return (header, payload);
            }
        }
    }

    /// How the connection ends by itself.
    async fn end(self) -> Result<()> {
        let _open = self.transport;
        tokio::time::timeout(Duration::from_secs(120), self.serving).await.expect("it ends").expect("no panic")
    }
}

fn memory_pair() -> Pair {
    Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(1))))
}

#[tokio::test(start_paused = true)]
async fn frames_that_cannot_be_end_the_connection_with_a_reason() {
    let request = |kind| Header::request(kind, 1);
    let wrong = [
        ("no bytes", Header { length: 0, ..request(Kind::Read) }),
        ("too many bytes", Header { length: 2 << 20, ..request(Kind::Read) }),
        (
            "a payload beyond the limit",
            Header { payload_bytes: 2 << 20, length: 2 << 20, payload_check: 1, ..request(Kind::Write) },
        ),
        ("zeroes beyond all numbers", Header { offset: u64::MAX, length: 9, ..request(Kind::Zeroes) }),
        ("a reply", request(Kind::Flush).reply()),
        ("a second opening", request(Kind::Open).with_payload(b"x")),
        ("a flag without meaning", Header { flags: 2, ..request(Kind::Flush) }),
        ("zeroes as a coding", Header { coding: Coding::Zero, length: 512, ..request(Kind::Write) }),
    ];
    for (what, header) in wrong {
        let pair = memory_pair();
        let mut raw = Raw::open(&pair).await;
        raw.say(&header, &[]).await;
        let error = raw.end().await.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{what}: {}", error.chain());
        pair.settle().await;
        assert_eq!(pair.receiver().pool_in_use(), Bytes::ZERO, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_that_do_not_fit_the_volume_are_answered_and_the_connection_goes_on() {
    let pair = memory_pair();
    let mut raw = Raw::open(&pair).await;
    let wrong = [
        (Header { offset: 1 << 20, length: 1, ..Header::request(Kind::Zeroes, 1) }, ErrorKind::OutOfRange),
        (Header { offset: 1 << 62, length: 1 << 62, ..Header::request(Kind::Discard, 2) }, ErrorKind::OutOfRange),
        (Header { offset: 1 << 40, length: 512, ..Header::request(Kind::Read, 3) }, ErrorKind::OutOfRange),
        (Header { offset: 0, length: 1, ..Header::request(Kind::Retire, 4) }, ErrorKind::Invalid),
        (Header::request(Kind::Control, 5).with_payload(&[200, 200]), ErrorKind::Unsupported),
    ];
    for (header, kind) in wrong {
        let payload: &[u8] = if header.kind == Kind::Control { &[200, 200] } else { &[] };
        raw.say(&header, payload).await;
        let (answer, words) = raw.hear().await;
        assert_eq!((answer.id, answer.status), (header.id, Status::Failed(kind)));
        assert!(!words.is_empty(), "an error without words");
    }
    raw.say(&Header::request(Kind::Flush, 6), &[]).await;
    assert_eq!(raw.hear().await.0.status, Status::Done);
}

#[tokio::test(start_paused = true)]
async fn a_payload_that_is_not_what_its_checksum_says_changes_nothing() {
    let pair = memory_pair();
    let mut raw = Raw::open(&pair).await;
    let good = [5; 4096];
    let header = Header::request(Kind::Write, 1).with_payload(&good);
    let mut bad = good;
    bad[4000] ^= 1;
    raw.say(&header, &bad).await;
    assert_eq!(raw.hear().await.0.status, Status::Damaged);
    let text = [9; 4096];
    let short = lz4_flex::block::compress(&text);
    let compressed = Header {
        coding: Coding::Lz4,
        payload_bytes: short.len() as u32,
        id: 2,
        ..Header::request(Kind::Write, 2).with_payload(&text)
    };
    raw.say(&compressed, &vec![0xff; short.len()]).await;
    assert_eq!(raw.hear().await.0.status, Status::Damaged, "a payload that is no LZ4 block was written");
    assert_eq!(read(&pair.handler.device, 0, 4096).await, [0; 4096]);
    raw.say(&compressed, &short).await;
    assert_eq!(raw.hear().await.0.status, Status::Done);
    assert_eq!(read(&pair.handler.device, 0, 4096).await, text);
    raw.say(&header, &good).await;
    assert_eq!(raw.hear().await.0.status, Status::Done);
}

#[tokio::test(start_paused = true)]
async fn who_says_nothing_or_only_a_part_is_not_waited_for_for_ever() {
    let pair = memory_pair();
    let error = Raw::connect(&pair).end().await.expect_err("it said nothing");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let mut raw = Raw::open(&pair).await;
    raw.say(&Header::request(Kind::Write, 1).with_payload(&[1; 65536]), &[1; 1000]).await;
    pair.settle().await;
    assert!(pair.receiver().pool_in_use() > Bytes::ZERO);
    let error = raw.end().await.expect_err("the rest never came");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(pair.receiver().pool_in_use(), Bytes::ZERO, "it still holds memory");
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_there_cannot_be_ends_nobodys_session() {
    let pair = memory_pair();
    let mut first = Raw::open(&pair).await;
    let request = pair.request(Role::Copy);
    let beyond = Opening { sender: [3; 16], session: 1, stream: 64, generation: 1, joins: false, request };
    let (_second, status) = Raw::ask(&pair, &beyond).await;
    assert_eq!(status, Status::Failed(ErrorKind::Invalid));
    first.say(&Header::request(Kind::Flush, 1), &[]).await;
    let (header, _) = first.hear().await;
    assert_eq!((header.kind, header.status, pair.receiver().sessions()), (Kind::Flush, Status::Done, 1));
}

#[tokio::test(start_paused = true)]
async fn there_are_only_so_many_connections() {
    let limits = ReceiverLimits { connections_max: 3, connections_max_first: 4, ..ReceiverLimits::default() };
    let pair = lazy_pair(limits, Duration::ZERO);
    let (remote, device) = pair.device(Role::Copy, 4).await;
    assert_eq!(pair.receiver().connections(), 3, "a fourth stream was let in");
    // The first stream of another session finds a place, and its second one none.
    let first = Raw::open(&pair).await;
    let request = pair.request(Role::Copy);
    let joining = Opening { sender: [2; 16], session: 1, stream: 1, generation: 1, joins: true, request };
    let (second, status) = Raw::ask(&pair, &joining).await;
    assert_eq!(status, Status::Failed(ErrorKind::Busy), "a second stream was let in");
    let error = second.end().await.expect_err("it was refused");
    assert!(error.chain().contains("4 connections"), "{}", error.chain());
    let third = Opening { sender: [3; 16], joins: false, stream: 0, ..joining };
    let (_third, status) = Raw::ask(&pair, &third).await;
    assert_eq!(status, Status::Failed(ErrorKind::Busy), "there is no limit");
    device.flush().await.expect("the others are not disturbed");
    drop((first, remote));
}

#[tokio::test(start_paused = true)]
async fn streams_of_an_idle_forward_leave_but_one_and_are_back_when_much_is_asked() {
    let pair = lazy_pair(ReceiverLimits::default(), Duration::from_millis(5));
    let idle_max = Some(Duration::from_secs(30));
    let options = StreamOptions { streams: 3, idle_max, reconnect_limit: Duration::ZERO, ..StreamOptions::default() };
    let remote = pair.connect(Role::Forward, options).await.expect("it is let in");
    let device = Device::from_arc("remote", Arc::clone(&remote) as Arc<_>);
    let data = noise(1, 512 << 10);
    for _ in 0..3 {
        let burst = join_all((0..60_u64).map(|number| device.write(write(number << 20, &data)))).await;
        burst.into_iter().for_each(|outcome| outcome.expect("written"));
        assert_eq!(pair.receiver().connections(), 3, "a burst is not spread over the streams");
        // A request now and then keeps the first one only.
        for _ in 0..20 {
            pair.env.sleep(Duration::from_secs(3)).await;
            device.flush().await.expect("flushed");
        }
        assert_eq!(pair.receiver().connections(), 1, "an idle forward keeps its streams");
    }
    let statistics = remote.statistics();
    assert_eq!((statistics.sessions, statistics.streams.iter().map(|stream| stream.deaths).sum::<u64>()), (1, 0));
    assert!(pair.lines.ends.lock().iter().all(Result::is_ok), "{:?}", pair.lines.ends.lock());
}

/// Writes to the second half never end.
struct HalfHung(MemDevice);

impl BlockDevice for HalfHung {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.0.read(offset, buffer)
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        if mutation.extent().offset >= Bytes::mib(64) {
            // What is under way keeps its buffer.
            return Box::pin(async move {
                let () = std::future::pending().await;
                drop(mutation);
                Ok(())
            });
        }
        self.0.write(mutation)
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        self.0.flush()
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.0.extents(extent)
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_hangs_or_takes_no_answers_leaves_memory_to_the_others() {
    let limits = ReceiverLimits { pool: Bytes::mib(8), ..ReceiverLimits::default() };
    let pair = Pair::with_limits(1, Device::new("half", HalfHung(MemDevice::new(Bytes::mib(128)))), limits);
    let data = noise(1, 1 << 20);
    for number in 0..16 {
        pair.handler.device.write(write(number << 20, &data)).await.expect("written");
    }
    // One whose disk hangs, and one whose sender takes no answers.
    let mut hung = Raw::open(&pair).await;
    let mut deaf = Raw::open_of(&pair, "west").await;
    let hanging = async {
        for number in 0..16 {
            let header = Header { offset: (64 + number) << 20, ..Header::request(Kind::Write, 1 + number) };
            hung.say(&header.with_payload(&data), &data).await;
        }
    };
    let asking = async {
        for number in 0..16 {
            let length = 1 << 20;
            deaf.say(&Header { offset: number << 20, length, ..Header::request(Kind::Read, 1 + number) }, &[]).await;
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(5), async { futures::join!(hanging, asking) }).await;
    assert!(pair.receiver().pool_in_use() >= Bytes::mib(8), "the common memory is not used up");
    let (remote, device) = pair.device(Role::Copy, 2).await;
    let work = async {
        for number in 0..20 {
            device.write(write(number << 20, &data)).await.expect("written");
            assert_eq!(read(&device, number << 20, 1 << 20).await, data[..]);
            remote.call(transhume_migrate::stream::Ask::Status).await.expect("answered");
        }
    };
    tokio::time::timeout(Duration::from_secs(10), work).await.expect("a session waits for another one's memory");
}

#[tokio::test(start_paused = true)]
async fn options_out_of_range_are_refused() {
    let pair = memory_pair();
    for options in [
        StreamOptions { streams: 0, ..StreamOptions::default() },
        StreamOptions { streams: 65, ..StreamOptions::default() },
        StreamOptions { frame_bytes: 2 << 20, ..StreamOptions::default() },
        StreamOptions { frame_bytes: 5000, ..StreamOptions::default() },
        StreamOptions { beat: Duration::from_secs(2), ..StreamOptions::default() },
    ] {
        let refused = pair.connect(Role::Copy, options).await;
        assert_eq!(refused.err().expect("it was accepted").kind(), ErrorKind::Invalid);
    }
    let for_two = StreamOptions::for_machine(2, 1).streams;
    assert_eq!(
        (for_two, StreamOptions::for_machine(64, 1).streams, StreamOptions::for_machine(1, 6).streams),
        (2, 4, 6)
    );
}

#[tokio::test(start_paused = true)]
async fn connections_that_wait_for_each_others_end_do_not_wait_for_ever() {
    let waits: [fn(u64) -> Header; 2] = [
        |other| Header { offset: other, length: 1, ..Header::request(Kind::Retire, 1) },
        |_| Header::request(Kind::Leave, 1),
    ];
    for wait in waits {
        let pair = memory_pair();
        let mut first = Raw::open_stream(&pair, 0).await;
        let mut second = Raw::open_stream(&pair, 1).await;
        let (one, other) = (wait(1), wait(0));
        futures::join!(first.say(&one, &[]), second.say(&other, &[]));
        pair.settle().await;
        drop((first, second));
        pair.env.sleep(Duration::from_secs(70)).await;
        assert_eq!(pair.receiver().sessions(), 0, "the session is never over");
        // And the volume can be opened again.
        Raw::open(&pair).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_device_that_is_dropped_gives_the_volume_up_at_once() {
    let pair = memory_pair();
    let (remote, device) = pair.device(Role::Copy, 3).await;
    device.flush().await.expect("it works");
    drop((remote, device));
    pair.settle().await;
    assert_eq!(pair.receiver().sessions(), 0);
}
