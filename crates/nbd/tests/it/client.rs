//! The client: against our server, against servers that are not ours, and against hostile ones.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Recorder, device_of, env, export_of, memory, only, serve};
use block::testing::conformance;
use block::{Buffer, Bytes, Data, Device, ErrorKind, Extent, ExtentState, MemDevice, Mutation};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use transhume_nbd::protocol::{Chunk, Greeting, OptionReplyWriter, structured_header};
use transhume_nbd::{Limits, NbdDevice, NbdUri};

/// Our client over our server over `device`.
async fn over(device: Device) -> Device {
    let (stream, _server) = serve(only(export_of(device)), Limits::default());
    let client = NbdDevice::over(stream, "disk", &*env()).await.expect("the server agrees");
    Device::new("client", client)
}

#[tokio::test]
async fn client_and_server_together_conform() {
    for seed in 0..2 {
        conformance(seed, async |size| over(memory(size)).await).await;
        let make = async |size| over(Device::new("m", MemDevice::new(size).with_request_alignment(512))).await;
        conformance(seed, make).await;
    }
}

#[tokio::test]
async fn errors_come_back_as_what_they_were() {
    let recorder = Arc::new(Recorder::over(memory(Bytes::mib(1))));
    let device = over(device_of(&recorder)).await;
    for kind in [ErrorKind::NoSpace, ErrorKind::Io, ErrorKind::Unsupported, ErrorKind::Fenced] {
        *recorder.failure.lock() = Some(kind);
        let error = device.write(Mutation::data(Bytes(0), Data::copy_of(&[1]))).await.expect_err("it was ordered");
        assert_eq!(error.kind(), kind);
        assert!(error.chain().contains("as ordered"), "the server's words are lost: {}", error.chain());
        assert_eq!(device.read(Bytes(0), Buffer::unpooled(1)).await.expect_err("it was ordered").kind(), kind);
        assert_eq!(device.flush().await.expect_err("it was ordered").kind(), kind);
    }
}

#[tokio::test]
async fn holes_are_seen_through_the_wire() {
    let device = over(memory(Bytes::mib(1))).await;
    let data = Mutation::data(Bytes(65536), Data::copy_of(&[1; 512])).with_fua(true);
    device.write(data).await.expect("memory takes it");
    let pieces = device.extents(Extent::whole(Bytes::mib(1))).await.expect("memory knows");
    let states: Vec<_> = pieces.iter().map(|piece| (piece.extent.length.get(), piece.state)).collect();
    let hole = ExtentState::Hole;
    assert_eq!(states, [(65536, hole), (65536, ExtentState::Data), ((1 << 20) - 131_072, hole)]);
}

#[tokio::test]
async fn an_export_that_is_not_there_is_not_found() {
    let (stream, _server) = serve(only(export_of(memory(Bytes(512)))), Limits::default());
    let error = NbdDevice::over(stream, "nobody", &*env()).await.err().expect("there is no such export");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let uri = NbdUri::unix("/nonexistent/socket", "disk");
    let error = NbdDevice::connect(&uri, &env()).await.err().expect("there is no such socket");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.chain().contains("nbd+unix:///disk?socket=/nonexistent/socket"), "{}", error.chain());
}

#[tokio::test]
async fn a_lost_connection_fails_everything_in_flight_and_later() {
    let recorder = Arc::new(Recorder::over(memory(Bytes::mib(1))).held());
    let (stream, server) = serve(only(export_of(device_of(&recorder))), Limits::default());
    let device = Device::new("client", NbdDevice::over(stream, "disk", &*env()).await.expect("the server agrees"));
    let writing: Vec<_> = (0..20)
        .map(|_| {
            let device = device.clone();
            tokio::spawn(async move { device.write(Mutation::data(Bytes(0), Data::copy_of(&[1]))).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(20)).await;
    server.abort();
    for write in writing {
        let error = write.await.expect("no panic").expect_err("nobody answered");
        assert_eq!(error.kind(), ErrorKind::Disconnected);
    }
    let error = device.read(Bytes(0), Buffer::unpooled(1)).await.expect_err("nobody is there");
    assert_eq!(error.kind(), ErrorKind::Disconnected);
}

#[tokio::test]
async fn dropping_the_device_takes_leave() {
    let (stream, server) = serve(only(export_of(memory(Bytes(512)))), Limits::default());
    drop(NbdDevice::over(stream, "disk", &*env()).await.expect("the server agrees"));
    let summary = server.await.expect("no panic");
    assert!(matches!(summary.end, transhume_nbd::server::End::Disconnected), "{summary:?}");
}

/// A server that does the handshake and then says `answer` to the first read.
async fn liar(answer: Vec<u8>) -> Device {
    let (near, mut far) = tokio::io::duplex(64 << 10);
    tokio::spawn(async move {
        far.write_all(&Greeting { flags: 3 }.to_bytes()).await?;
        let mut heard = vec![0; 4 + 16];
        far.read_exact(&mut heard).await?;
        far.write_all(&OptionReplyWriter::new(8).acknowledge()).await?;
        far.read_exact(&mut [0; 16 + 4 + 4 + 4 + 4 + 15]).await?;
        far.write_all(&OptionReplyWriter::new(10).acknowledge()).await?;
        far.read_exact(&mut [0; 16 + 4 + 4 + 2 + 2]).await?;
        let mut replies = OptionReplyWriter::new(7);
        replies.export(transhume_nbd::protocol::ExportInfo { size: Bytes(4096), flags: 1 });
        far.write_all(&replies.acknowledge()).await?;
        far.read_exact(&mut [0; 28]).await?;
        far.write_all(&answer).await?;
        // Stays, so that the client must notice by itself.
        std::future::pending::<std::io::Result<()>>().await
    });
    Device::new("liar", NbdDevice::over(near, "disk", &*env()).await.expect("the handshake is honest"))
}

#[tokio::test]
async fn answers_that_make_no_sense_are_errors_and_never_wrong_data() {
    let chunk = |chunk, cookie, offset: u64, data: &[u8]| {
        let header = structured_header(chunk, cookie, data.len() as u32 + 8);
        [&header[..], &offset.to_be_bytes(), data].concat()
    };
    let cases: Vec<(&str, Vec<u8>, ErrorKind)> = vec![
        ("no reply", vec![0xaa; 64], ErrorKind::Disconnected),
        ("another's reply", chunk(Chunk::OffsetData, 99, 0, &[1; 512]), ErrorKind::Disconnected),
        ("data before the request", chunk(Chunk::OffsetData, 0, 0, &[1; 512]), ErrorKind::Disconnected),
        ("data after the request", chunk(Chunk::OffsetData, 0, 1500, &[1; 512]), ErrorKind::Disconnected),
        ("too little data", chunk(Chunk::OffsetData, 0, 1024, &[1; 511]), ErrorKind::Invalid),
        ("too much data", chunk(Chunk::OffsetData, 0, 1024, &[1; 513]), ErrorKind::Disconnected),
        ("no data", structured_header(Chunk::None, 0, 0).to_vec(), ErrorKind::Invalid),
        ("extents for a read", structured_header(Chunk::BlockStatus, 0, 12).to_vec(), ErrorKind::Disconnected),
        ("a huge error", structured_header(Chunk::Error, 0, u32::MAX).to_vec(), ErrorKind::Disconnected),
        ("an unknown chunk", structured_header(Chunk::Unknown(77), 0, 0).to_vec(), ErrorKind::Disconnected),
        ("a simple reply", [&[0x67, 0x44, 0x66, 0x98][..], &[0; 12]].concat(), ErrorKind::Disconnected),
    ];
    for (what, answer, kind) in cases {
        let device = liar(answer).await;
        let outcome = tokio::time::timeout(Duration::from_secs(10), device.read(Bytes(1024), Buffer::unpooled(512)));
        let error = outcome.await.unwrap_or_else(|_| panic!("{what}: hangs")).expect_err(what);
        assert_eq!(error.kind(), kind, "{what}");
    }
    let hole = [&structured_header(Chunk::OffsetHole, 0, 12)[..], &1024_u64.to_be_bytes(), &512_u32.to_be_bytes()];
    let device = liar(hole.concat()).await;
    let mut dirty = Buffer::unpooled(512);
    dirty.fill(7);
    assert_eq!(device.read(Bytes(1024), dirty).await.expect("a hole is an answer")[..], [0; 512]);
}

struct Nbdkit(Child);

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn nbdkit(socket: &Path, arguments: &[&str]) -> Nbdkit {
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(socket).args(arguments);
    let server = Nbdkit(command.stdin(Stdio::null()).spawn().expect("nbdkit is missing: run `make setup`"));
    for _ in 0..500 {
        // The file is there before anybody listens.
        if std::os::unix::net::UnixStream::connect(socket).is_ok() {
            return server;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("nbdkit does not come up");
}

#[tokio::test]
async fn a_server_that_is_not_ours_conforms_through_our_client() {
    for arguments in [&["memory"][..], &["--no-sr", "memory"]] {
        let make = async |size: Bytes| {
            let folder = tempfile::tempdir().expect("a scratch directory");
            let socket = folder.path().join("s");
            let server = nbdkit(&socket, &[arguments, &[&format!("{}", size.get())]].concat());
            let client = NbdDevice::connect(&NbdUri::unix(&socket, ""), &env()).await.expect("nbdkit agrees");
            // The server lives as long as the device.
            Device::new("nbdkit", Held { lower: Device::new("client", client), _server: server, _folder: folder })
        };
        conformance(1, make).await;
    }
}

struct Held {
    lower: Device,
    _server: Nbdkit,
    _folder: tempfile::TempDir,
}

impl block::Filter for Held {
    fn lower(&self) -> &Device {
        &self.lower
    }
}
