//! The handshake with clients that are right, wrong, slow and hostile.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Raw, connect, env, export_of, memory, only, serve};
use block::{BufferPool, Bytes};
use tokio::io::AsyncWriteExt;
use transhume_nbd::protocol::{
    BlockSizes, ExportInfo, GoRequest, InfoReply, MetaContextRequest, export_flag, info, option, option_reply,
    parse_info, parse_meta_context, parse_server, write_option,
};
use transhume_nbd::server::End;
use transhume_nbd::{Export, Exports, Limits};

fn exports() -> Arc<dyn Exports> {
    only(export_of(memory(Bytes::mib(1))).with_description("for tests"))
}

fn protocol(end: &End) -> &str {
    match end {
        End::Protocol(what) => what,
        other => panic!("ended with {other:?}"),
    }
}

#[tokio::test]
async fn go_tells_size_flags_and_block_sizes() {
    let (mut raw, _server) = connect(&exports()).await;
    raw.greet(3).await;
    raw.structured().await;
    let request = GoRequest { name: "disk", items: vec![info::NAME, info::DESCRIPTION, 99] }.to_bytes();
    for option in [option::INFO, option::GO] {
        let replies = raw.option(option, &request).await;
        let items: Vec<_> = replies.iter().filter(|reply| reply.0 == option_reply::INFO).collect();
        let items: Vec<_> = items.iter().map(|item| parse_info(&item.1).expect("it is an item")).collect();
        let flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::SEND_TRIM
            | export_flag::SEND_WRITE_ZEROES
            | export_flag::SEND_DF
            | export_flag::CAN_MULTI_CONN
            | export_flag::SEND_CACHE;
        assert_eq!(
            items,
            [
                InfoReply::Export(ExportInfo { size: Bytes::mib(1), flags }),
                InfoReply::BlockSizes(BlockSizes { minimum: 1, preferred: 4096, maximum: 4 << 20 }),
                InfoReply::Name("disk".to_owned()),
                InfoReply::Description("for tests".to_owned()),
            ]
        );
        assert_eq!(replies.last().expect("there is one").0, option_reply::ACK);
    }
    assert_eq!(raw.read(0, 10).await, [0; 10]);
}

#[tokio::test]
async fn a_read_only_export_says_so_and_offers_no_mutations() {
    let (mut raw, _server) = connect(&only(export_of(memory(Bytes::mib(1))).with_read_only(true))).await;
    raw.greet(3).await;
    let replies = raw.option(option::GO, &GoRequest { name: "", items: vec![] }.to_bytes()).await;
    let Ok(InfoReply::Export(told)) = parse_info(&replies[0].1) else { panic!("no size was told") };
    assert_ne!(told.flags & export_flag::READ_ONLY, 0);
    assert_eq!(told.flags & (export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES | export_flag::SEND_DF), 0);
}

#[tokio::test]
async fn the_maximum_fits_the_pool_and_the_minimum_is_the_devices() {
    let device = block::Device::new("memory", block::MemDevice::new(Bytes::mib(1)).with_request_alignment(512));
    let export = Export::new("disk", BufferPool::new(Bytes::kib(100)), move || device.clone());
    let (mut raw, _server) = connect(&only(export)).await;
    raw.greet(3).await;
    let replies = raw.option(option::GO, &GoRequest { name: "disk", items: vec![] }.to_bytes()).await;
    let sizes = BlockSizes { minimum: 512, preferred: 4096, maximum: 64 << 10 };
    assert_eq!(parse_info(&replies[1].1), Ok(InfoReply::BlockSizes(sizes)));
}

#[tokio::test]
async fn the_old_way_to_choose_an_export_works_with_and_without_its_zeroes() {
    for (flags, length) in [(3, 10), (1, 134), (0, 134)] {
        let (mut raw, _server) = connect(&exports()).await;
        raw.greet(flags).await;
        raw.say(&write_option(option::EXPORT_NAME, b"disk")).await;
        let reply = raw.hear(length).await;
        assert_eq!(reply[..8], (1_u64 << 20).to_be_bytes());
        assert!(reply[10..].iter().all(|byte| *byte == 0));
        assert_eq!(raw.ask(transhume_nbd::protocol::Command::Flush, 0, 0, 0).await, None);
        raw.leave().await;
    }
}

#[tokio::test]
async fn exports_are_listed_with_their_descriptions() {
    let pool = BufferPool::new(Bytes::mib(1));
    let export = |name: &str| Export::new(name, pool.clone(), || memory(Bytes(512))).with_description("words");
    let exports: Arc<dyn Exports> = Arc::new(vec![Arc::new(export("a")), Arc::new(export("ü"))]);
    let (mut raw, server) = connect(&exports).await;
    raw.greet(3).await;
    let replies = raw.option(option::LIST, &[]).await;
    let named: Vec<_> = replies.iter().filter(|reply| reply.0 == option_reply::SERVER).collect();
    let named: Vec<_> = named.iter().map(|reply| parse_server(&reply.1).expect("it is an export")).collect();
    assert_eq!(named, [("a", "words"), ("ü", "words")]);
    assert_eq!(raw.outcome(option::LIST, b"x").await, option_reply::ERR_INVALID);
    // With two exports the empty name means neither.
    assert_eq!(raw.go("").await, option_reply::ERR_UNKNOWN);
    assert_eq!(raw.outcome(option::ABORT, b"ignored").await, option_reply::ACK);
    raw.assert_closed().await;
    assert!(matches!(server.await.expect("no panic").end, End::Aborted));
}

#[tokio::test]
async fn what_is_unknown_or_malformed_is_answered_and_the_handshake_goes_on() {
    let (mut raw, server) = connect(&exports()).await;
    raw.greet(3).await;
    assert_eq!(raw.outcome(1234, b"anything").await, option_reply::ERR_UNSUP);
    assert_eq!(raw.outcome(option::STARTTLS, &[]).await, option_reply::ERR_UNSUP);
    assert_eq!(raw.outcome(option::STARTTLS, b"x").await, option_reply::ERR_INVALID);
    assert_eq!(raw.outcome(option::STRUCTURED_REPLY, b"x").await, option_reply::ERR_INVALID);
    assert_eq!(raw.go("nobody").await, option_reply::ERR_UNKNOWN);
    for malformed in [&b""[..], &[0, 0, 0, 9, b'd'], &[0, 0, 0, 1, 0xff, 0, 0], &[0, 0, 0, 0, 0, 0, 1], &[255; 4]] {
        assert_eq!(raw.outcome(option::GO, malformed).await, option_reply::ERR_INVALID, "{malformed:?}");
    }
    assert_eq!(raw.outcome(1234, &vec![0; 100_000]).await, option_reply::ERR_TOO_BIG);
    assert_eq!(raw.go("disk").await, option_reply::ACK);
    drop(raw);
    assert!(matches!(server.await.expect("no panic").end, End::HungUp));
}

#[tokio::test]
async fn metadata_contexts_are_listed_and_chosen_as_the_protocol_has_it() {
    let (mut raw, _server) = connect(&exports()).await;
    raw.greet(3).await;
    let request = |queries: &[&'static str]| MetaContextRequest { name: "disk", queries: queries.to_vec() }.to_bytes();
    let base = request(&["base:allocation"]);
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(raw.outcome(option, &base).await, option_reply::ERR_INVALID, "before structured replies");
    }
    raw.structured().await;
    let mut contexts = async |option, queries: &[&'static str]| {
        let replies = raw.option(option, &request(queries)).await;
        let named = replies.iter().filter(|reply| reply.0 == option_reply::META_CONTEXT);
        named.map(|reply| parse_meta_context(&reply.1).expect("it is a context").1.to_owned()).collect::<Vec<_>>()
    };
    let allocation = ["base:allocation"];
    assert_eq!(contexts(option::LIST_META_CONTEXT, &[]).await, allocation);
    assert_eq!(contexts(option::LIST_META_CONTEXT, &["base:"]).await, allocation);
    assert_eq!(contexts(option::LIST_META_CONTEXT, &["qemu:", "base:other"]).await, [""; 0]);
    assert_eq!(contexts(option::SET_META_CONTEXT, &["qemu:x", "base:allocation"]).await, allocation);
    assert_eq!(contexts(option::SET_META_CONTEXT, &["base:"]).await, [""; 0]);
    assert_eq!(contexts(option::SET_META_CONTEXT, &[]).await, [""; 0]);
    let lying = [&[0, 0, 0, 4][..], b"disk", &[0xff; 4], &[0; 12]].concat();
    assert_eq!(raw.outcome(option::SET_META_CONTEXT, &lying).await, option_reply::ERR_INVALID);
    let unknown = MetaContextRequest { name: "nobody", queries: vec![] }.to_bytes();
    assert_eq!(raw.outcome(option::SET_META_CONTEXT, &unknown).await, option_reply::ERR_UNKNOWN);
}

#[tokio::test]
async fn what_cannot_be_answered_ends_the_connection() {
    let longer = write_option(1234, &vec![0; 1 << 20]);
    let too_long = [&longer[..12], &(2_u32 << 20).to_be_bytes()].concat();
    let cases: [(u32, &[u8], &str); 6] = [
        (4, &[], "flags that were not offered"),
        (3, &[0; 16], "does not begin with IHAVEOPT"),
        (0, &write_option(option::GO, &[]), "may only name an export"),
        (3, &write_option(option::EXPORT_NAME, b"nobody"), "no export of the name"),
        (3, &write_option(option::EXPORT_NAME, &[0xff]), "not UTF-8"),
        (3, &too_long, "longer than anybody needs"),
    ];
    for (flags, bytes, words) in cases {
        let (mut raw, server) = connect(&exports()).await;
        raw.greet(flags).await;
        let _ = raw.stream.write_all(bytes).await;
        raw.assert_closed().await;
        let summary = server.await.expect("no panic");
        assert!(protocol(&summary.end).contains(words), "{:?} instead of {words}", summary.end);
    }
}

#[tokio::test]
async fn a_flood_of_options_ends_the_connection() {
    let (mut raw, server) = connect(&exports()).await;
    raw.greet(3).await;
    for _ in 0..Limits::default().options_max {
        assert_eq!(raw.outcome(99, &[]).await, option_reply::ERR_UNSUP);
    }
    raw.assert_closed().await;
    assert!(protocol(&server.await.expect("no panic").end).contains("more options"));
}

#[tokio::test(start_paused = true)]
async fn a_handshake_is_limited_in_time_however_the_client_dawdles() {
    let (mut raw, server) = connect(&exports()).await;
    raw.greet(3).await;
    let dawdling = tokio::spawn(async move {
        for byte in write_option(option::GO, &[0; 4096]) {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if raw.stream.write_all(&[byte]).await.is_err() {
                return;
            }
        }
        panic!("the server waited for all of it");
    });
    let summary = tokio::time::timeout(Duration::from_secs(40), server).await.expect("it is limited");
    assert!(matches!(summary.expect("no panic").end, End::HandshakeTimedOut));
    dawdling.await.expect("no panic");
}

#[tokio::test]
async fn garbage_instead_of_a_client_ends_without_harm() {
    for garbage in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0; 4096], &[0xff; 4096], b"\x16\x03\x01\x02\x00"] {
        let (mut stream, server) = serve(exports(), Limits::default());
        let _ = stream.write_all(garbage).await;
        stream.shutdown().await.expect("a pipe can be shut down");
        let summary = server.await.expect("no panic");
        assert!(matches!(summary.end, End::Protocol(_) | End::HungUp), "{:?}", summary.end);
    }
}

/// A stream that counts the writes that reach it.
struct Counting<S> {
    stream: S,
    writes: Arc<std::sync::atomic::AtomicUsize>,
}

impl<S: tokio::io::AsyncRead + Unpin> tokio::io::AsyncRead for Counting<S> {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: tokio::io::AsyncWrite + Unpin> tokio::io::AsyncWrite for Counting<S> {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        self.writes.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        std::pin::Pin::new(&mut self.stream).poll_write(context, bytes)
    }
    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_flush(context)
    }
    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[tokio::test]
async fn go_is_answered_in_one_write() {
    let writes = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (near, far) = tokio::io::duplex(64 << 10);
    let counting = Counting { stream: far, writes: Arc::clone(&writes) };
    tokio::spawn(transhume_nbd::serve_connection(counting, exports(), env(), Limits::default()));
    let mut raw = Raw { stream: near };
    raw.greet(3).await;
    let before = writes.load(std::sync::atomic::Ordering::SeqCst);
    let request = GoRequest { name: "disk", items: vec![info::NAME, info::DESCRIPTION, info::BLOCK_SIZE] };
    assert_eq!(raw.option(option::GO, &request.to_bytes()).await.len(), 5);
    assert_eq!(writes.load(std::sync::atomic::Ordering::SeqCst) - before, 1);
}
