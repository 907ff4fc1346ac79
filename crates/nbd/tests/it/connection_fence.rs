//! Reconnects: no write of a dead connection may take effect after its repetition on a new one.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Raw, Recorder, connect, device_of, enter, env, export_of, memory, only, serve};
use block::{Bytes, Device, Mutation};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::{sleep, timeout};
use transhume_nbd::protocol::{Command, Request, option_reply};
use transhume_nbd::server::{End, serve_socket};
use transhume_nbd::{Exports, Limits};

fn held() -> (Arc<Recorder>, Arc<dyn Exports>) {
    let recorder = Arc::new(Recorder::over(memory(Bytes::mib(1))).held());
    let exports = only(export_of(device_of(&recorder)));
    (recorder, exports)
}

#[tokio::test(start_paused = true)]
async fn a_new_connection_waits_for_the_requests_of_a_dead_one() {
    let (recorder, exports) = held();
    let (mut first, dead) = enter(&exports).await;
    first.send(Command::Write, 0, 0, 1).await;
    first.say(&[1]).await;
    sleep(Duration::from_secs(1)).await;
    drop(first);

    let (mut second, _living) = enter(&exports).await;
    // The client repeats what was not answered, and goes on.
    second.send(Command::Write, 0, 0, 1).await;
    second.say(&[1]).await;
    sleep(Duration::from_secs(3600)).await;
    assert!(!dead.is_finished(), "a dead connection gave up a request in flight");
    assert_eq!(recorder.in_flight.load(std::sync::atomic::Ordering::SeqCst), 1, "the repetition overtook the original");

    recorder.release(1);
    assert!(matches!(dead.await.expect("no panic").end, End::HungUp));
    recorder.release(2);
    assert_eq!(second.answer(0).await.error, None);
    assert_eq!(second.write(0, &[2]).await, None);
    assert_eq!(second.read(0, 1).await, [2]);
    assert_eq!(recorder.take_log(), ["0+1 data 1", "0+1 data 1", "0+1 data 2"]);
}

#[tokio::test(start_paused = true)]
async fn a_living_connection_blocks_others_only_until_what_it_had_begun_before_is_done() {
    let (recorder, exports) = held();
    let (mut first, _server) = enter(&exports).await;
    for _ in 0..4 {
        first.send(Command::Trim, 0, 0, 512).await;
        sleep(Duration::from_secs(1)).await;
        let (mut other, server) = enter(&exports).await;
        let mut flush = Box::pin(other.ask(Command::Flush, 0, 0, 0));
        let early = timeout(Duration::from_secs(60), &mut flush).await;
        assert!(early.is_err(), "entered beside a request whose client may be gone");
        // What comes later is not waited for.
        first.send(Command::Trim, 0, 4096, 512).await;
        sleep(Duration::from_secs(1)).await;
        recorder.release(1);
        let flushed = timeout(Duration::from_secs(1), &mut flush).await;
        assert_eq!(flushed.expect("a living connection blocked another"), None);
        drop(flush);
        other.leave().await;
        server.await.expect("no panic");
        recorder.release(1);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(recorder.in_flight.load(std::sync::atomic::Ordering::SeqCst), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_connection_has_received_and_not_begun_is_waited_for() {
    let (recorder, exports) = held();
    let (mut first, _server) = enter(&exports).await;
    first.send(Command::Write, 0, 0, 1).await;
    first.say(&[1]).await;
    sleep(Duration::from_secs(1)).await;
    let (mut second, _server) = enter(&exports).await;
    // It is not admitted, so its request is received and not begun; and then a third one comes.
    second.send(Command::Write, 0, 0, 1).await;
    second.say(&[2]).await;
    sleep(Duration::from_secs(1)).await;
    let (mut third, _server) = enter(&exports).await;
    third.send(Command::Write, 0, 0, 1).await;
    third.say(&[3]).await;
    for _ in 0..3 {
        sleep(Duration::from_secs(60)).await;
        assert_eq!(recorder.in_flight.load(std::sync::atomic::Ordering::SeqCst), 1, "two were let in at once");
        recorder.release(1);
    }
    assert_eq!(third.answer(0).await.error, None);
    assert_eq!(recorder.take_log(), ["0+1 data 1", "0+1 data 2", "0+1 data 3"]);
}

#[tokio::test(start_paused = true)]
async fn an_end_that_is_not_read_yet_counts_as_dead() {
    let (recorder, exports) = held();
    // One request at a time: the second write and the end stay in the stream.
    let limits = Limits { requests_in_flight_max: 1, ..Limits::default() };
    let (stream, dead) = serve(Arc::clone(&exports), limits);
    let mut first = Raw { stream };
    first.greet(3).await;
    assert_eq!(first.go("disk").await, option_reply::ACK);
    for byte in [1, 2] {
        first.send(Command::Write, 0, 0, 1).await;
        first.say(&[byte]).await;
    }
    sleep(Duration::from_secs(1)).await;
    drop(first);

    let (mut second, _living) = enter(&exports).await;
    second.send(Command::Write, 0, 0, 1).await;
    second.say(&[3]).await;
    sleep(Duration::from_secs(60)).await;
    recorder.release(1);
    sleep(Duration::from_secs(60)).await;
    recorder.release(9);
    assert_eq!(second.answer(0).await.error, None);
    dead.await.expect("no panic");
    let log = recorder.take_log();
    assert_eq!(log.last().map(String::as_str), Some("0+1 data 3"), "{log:?}");
    assert_eq!(second.read(0, 1).await, [3]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_while_it_waits_leaves_nothing_behind() {
    let (recorder, exports) = held();
    let export = exports.find("disk").expect("it is there");
    let (mut first, _dead) = enter(&exports).await;
    first.send(Command::Write, 0, 0, 1).await;
    first.say(&[1]).await;
    sleep(Duration::from_secs(1)).await;
    drop(first);
    for _ in 0..3 {
        let (mut waiting, server) = enter(&exports).await;
        waiting.send(Command::Write, 0, 0, 1).await;
        waiting.say(&[9]).await;
        sleep(Duration::from_secs(1)).await;
        drop(waiting);
        let summary = timeout(Duration::from_secs(1), server).await.expect("a waiting connection hangs");
        assert_eq!(summary.expect("no panic").requests, 0, "a request passed the gate");
    }
    assert_eq!(export.connections(), 1);
    recorder.release(9);
    let (mut last, _server) = enter(&exports).await;
    assert_eq!(last.write(0, &[2]).await, None);
    assert_eq!(recorder.take_log(), ["0+1 data 1", "0+1 data 2"]);
}

#[tokio::test(start_paused = true)]
async fn exports_do_not_wait_for_each_other() {
    let (_recorder, exports) = held();
    let (mut first, _dead) = enter(&exports).await;
    first.send(Command::Trim, 0, 0, 512).await;
    sleep(Duration::from_secs(1)).await;
    drop(first);
    let (mut other, _server) = enter(&only(export_of(memory(Bytes::mib(1))))).await;
    let flushed = timeout(Duration::from_secs(1), other.ask(Command::Flush, 0, 0, 0)).await;
    assert_eq!(flushed.expect("another export's gate was shut"), None);
}

#[tokio::test(start_paused = true)]
async fn looking_at_an_export_does_not_enter_its_gate() {
    let (_recorder, exports) = held();
    let export = exports.find("disk").expect("it is there");
    let (mut raw, _server) = connect(&exports).await;
    raw.greet(3).await;
    let request = transhume_nbd::protocol::GoRequest { name: "disk", items: vec![] }.to_bytes();
    assert_eq!(raw.outcome(6, &request).await, option_reply::ACK);
    assert_eq!(export.connections(), 0);
}

async fn enter_over(stream: UnixStream) -> Raw<UnixStream> {
    let mut raw = Raw { stream };
    raw.greet(3).await;
    raw.structured().await;
    assert_eq!(raw.go("disk").await, option_reply::ACK);
    raw
}

/// A client of `exports` over a unix socket.
async fn enter_socket(exports: &Arc<dyn Exports>) -> Raw<UnixStream> {
    let (near, far) = UnixStream::pair().expect("a pair of sockets");
    let exports = Arc::clone(exports);
    tokio::spawn(async move { serve_socket(far, None, exports, env(), Limits::default()).await });
    enter_over(near).await
}

#[tokio::test]
async fn over_a_unix_socket_no_client_that_lives_keeps_another_out_and_a_dead_one_does() {
    let (recorder, exports) = held();
    let mut stopped = enter_socket(&exports).await;
    // It fetches no replies, has a request under way that does not end, and has sent more than the server takes.
    stopped.send(Command::Write, 0, 0, 1).await;
    stopped.say(&[1]).await;
    for _ in 0..64 {
        stopped.send(Command::Read, 0, 0, 1 << 20).await;
    }
    sleep(Duration::from_millis(50)).await;
    let mut other = enter_socket(&exports).await;
    let read = timeout(Duration::from_secs(5), other.read(4096, 1)).await;
    assert_eq!(read.expect("a client that lives keeps another out"), [0]);

    drop(stopped);
    let mut third = enter_socket(&exports).await;
    third.send(Command::Read, 0, 4096, 1).await;
    let early = timeout(Duration::from_millis(300), third.answer(0)).await;
    assert!(early.is_err(), "entered beside a request of a dead client");
    recorder.release(1);
    let answer = timeout(Duration::from_secs(5), third.answer(0)).await;
    assert_eq!(answer.expect("the dead one's requests are over").error, None);
}

#[tokio::test]
async fn over_tcp_a_client_with_a_deep_queue_keeps_another_out_only_for_what_it_had_sent_before() {
    let exports = only(export_of(Device::new("slow", Slow(memory(Bytes::mib(1))))));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve_socket(stream, None, Arc::clone(&exports), env(), Limits::default()));
        }
    });
    let come = async || {
        let mut raw = Raw { stream: TcpStream::connect(address).await.expect("the server is there") };
        raw.greet(3).await;
        assert_eq!(raw.go("disk").await, option_reply::ACK);
        raw.stream
    };
    let (mut answers, mut requests) = come().await.into_split();
    // More than a connection may have under way, always: its socket is never empty.
    tokio::spawn(async move { tokio::io::copy(&mut answers, &mut tokio::io::sink()).await });
    tokio::spawn(async move {
        let write = Request { flags: 0, command: Command::Write, cookie: 1, offset: Bytes::ZERO, length: 512 };
        let write = [&write.to_bytes()[..], &[0; 512]].concat();
        while requests.write_all(&write).await.is_ok() {}
    });
    sleep(Duration::from_millis(200)).await;
    let mut other = Raw { stream: come().await };
    other.send(Command::Read, 0, 4096, 1).await;
    let answer = timeout(Duration::from_secs(60), other.answer(1)).await;
    assert_eq!(answer.expect("it never comes in").error, None);
}

/// The real thing: sockets, and a thread and a runtime for every connection. Clients die in the middle of writes of
/// numbers that only grow.
#[tokio::test]
async fn numbers_only_grow_over_many_deaths_on_real_sockets() {
    let folder = tempfile::tempdir().expect("a scratch directory");
    let socket = folder.path().join("s");
    let exports = only(export_of(Device::new("slow", Slow(memory(Bytes::mib(1))))));
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("the path is free");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, exports) = (stream.expect("the listener lives"), Arc::clone(&exports));
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("a runtime").block_on(async {
                    stream.set_nonblocking(true).expect("a socket can be");
                    let stream = UnixStream::from_std(stream).expect("it is nonblocking");
                    serve_socket(stream, None, exports, env(), Limits::default()).await
                });
            });
        }
    });
    let come = async || {
        let mut raw = Raw { stream: UnixStream::connect(&socket).await.expect("the server is there") };
        raw.greet(3).await;
        raw.structured().await;
        assert_eq!(raw.go("disk").await, option_reply::ACK);
        raw
    };
    for round in 0..60_u8 {
        let mut raw = come().await;
        raw.send(Command::Write, 0, 0, 1).await;
        raw.say(&[round * 2]).await;
        // Dies in the middle of the write, comes again, writes a later number.
        sleep(Duration::from_micros(u64::from(round) * 41 % 900)).await;
        drop(raw);
        let mut raw = come().await;
        assert_eq!(raw.write(0, &[round * 2 + 1]).await, None);
        sleep(Duration::from_millis(5)).await;
        assert_eq!(raw.read(0, 1).await, [round * 2 + 1], "round {round}: a late write undid a later one");
    }
}

/// Takes a few milliseconds over every write.
struct Slow(Device);

impl block::Filter for Slow {
    fn lower(&self) -> &Device {
        &self.0
    }
    fn write(&self, mutation: Mutation) -> block::IoFuture<'_, ()> {
        Box::pin(async move {
            sleep(Duration::from_millis(3)).await;
            self.0.write(mutation).await
        })
    }
}
