//! The tools that people use: libnbd's, fio, and QEMU's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::common::{env, export_of, memory};
use block::{Bytes, Data, Device, MemDevice, Mutation};
use tokio::net::UnixListener;
use transhume_nbd::{Export, Exports, Limits, NbdUri, serve_connection};

/// A server in a thread of its own, on a socket in a directory of its own.
struct Server {
    folder: tempfile::TempDir,
    uri: String,
}

impl Server {
    fn of(export: Export) -> Self {
        let folder = tempfile::tempdir().expect("a scratch directory");
        let socket = folder.path().join("socket");
        let uri = NbdUri::unix(&socket, export.name()).to_string();
        let exports: Arc<dyn Exports> = Arc::new(vec![Arc::new(export)]);
        let (ready, is_ready) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = UnixListener::bind(&socket).expect("the path is free");
                ready.send(()).expect("the test waits");
                loop {
                    let (stream, _) = listener.accept().await.expect("the listener lives");
                    tokio::spawn(serve_connection(stream, Arc::clone(&exports), env(), Limits::default()));
                }
            });
        });
        is_ready.recv().expect("the server comes up");
        Self { folder, uri }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Runs a tool and gives what it printed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout").arg("60").arg(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("running {program}: {error}"));
    assert_ne!(output.status.code(), Some(127), "{program} is missing: run `make setup`");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{text}{errors}", output.status);
    text
}

fn text(path: &Path) -> &str {
    path.to_str().expect("scratch paths are text")
}

/// 8 MiB with data at 1 MiB and, of 5 bytes, at the end; and the same as bytes.
async fn patterned() -> (Device, Vec<u8>) {
    let device = memory(Bytes::mib(8));
    let mut expected = vec![0; 8 << 20];
    let pattern: Vec<u8> = (0..200_000_u32).map(|index| (index * 7 % 253) as u8).collect();
    for (offset, data) in [(1 << 20, &pattern[..]), ((8 << 20) - 5, b"tail!")] {
        device.write(Mutation::data(Bytes(offset), Data::copy_of(data))).await.expect("memory takes it");
        expected[offset as usize..offset as usize + data.len()].copy_from_slice(data);
    }
    (device, expected)
}

#[test]
fn nbdinfo_understands_all_that_is_offered() {
    let server = Server::of(export_of(memory(Bytes::mib(8))).with_description("a disk for tests"));
    let info: serde_json::Value = serde_json::from_str(&run("nbdinfo", &["--json", &server.uri])).expect("it is JSON");
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["description"], "a disk for tests");
    assert_eq!(export["export-size"], 8 << 20);
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
    for ability in ["can_cache", "can_df", "can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero"] {
        assert_eq!(export[ability], true, "{ability}");
    }
    for (key, value) in [("block_size_minimum", 1), ("block_size_preferred", 4096), ("block_size_maximum", 4 << 20)] {
        assert_eq!(export[key], value, "{key}");
    }
    let list: serde_json::Value =
        serde_json::from_str(&run("nbdinfo", &["--list", "--json", &server.uri])).expect("it is JSON");
    assert_eq!(list["exports"][0]["export-name"], "disk");
}

#[tokio::test(flavor = "current_thread")]
async fn nbdinfo_draws_the_map_of_data_and_holes() {
    let (device, _) = patterned().await;
    let server = Server::of(export_of(device));
    let map: serde_json::Value =
        serde_json::from_str(&run("nbdinfo", &["--map", "--json", &server.uri])).expect("it is JSON");
    let pieces = map.as_array().expect("it is a list").iter().map(|piece| {
        let number = |key: &str| piece[key].as_u64().expect("it is a number");
        (number("offset"), number("length"), number("type"))
    });
    let end = 8 << 20;
    let expected = [
        (0, 1 << 20, 3),
        (1 << 20, 262_144, 0),
        ((1 << 20) + 262_144, end - 65536 - (1 << 20) - 262_144, 3),
        (end - 65536, 65536, 0),
    ];
    assert_eq!(pieces.collect::<Vec<_>>(), expected);
}

#[tokio::test(flavor = "current_thread")]
async fn nbdcopy_copies_out_and_in_over_many_connections() {
    let (device, expected) = patterned().await;
    let server = Server::of(export_of(device));
    let out = server.path("out");
    run("nbdcopy", &["--connections=4", "--requests=64", &server.uri, text(&out)]);
    assert_eq!(std::fs::read(&out).expect("it was copied"), expected);
    let empty = Server::of(export_of(memory(Bytes::mib(8))));
    run("nbdcopy", &["--connections=4", "--flush", text(&out), &empty.uri]);
    let again = server.path("again");
    run("nbdcopy", &[&empty.uri, text(&again)]);
    assert_eq!(std::fs::read(&again).expect("it was copied"), expected);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let server = Server::of(export_of(memory(Bytes::mib(32))));
    for (depth, size) in [("16", "4k"), ("4", "300k"), ("1", "512")] {
        let arguments = [
            "--name=verify",
            "--ioengine=nbd",
            &format!("--uri={}", server.uri),
            "--rw=randrw",
            &format!("--bs={size}"),
            "--size=32M",
            "--io_size=8M",
            &format!("--iodepth={depth}"),
            "--verify=crc32c",
            "--verify_fatal=1",
        ];
        let report = run("fio", &arguments);
        assert!(report.contains("err= 0"), "{report}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn qemu_img_converts_maps_and_compares() {
    let (device, expected) = patterned().await;
    let server = Server::of(export_of(device));
    let out = server.path("out.raw");
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &server.uri, text(&out)]);
    assert_eq!(std::fs::read(&out).expect("it was converted"), expected);
    assert!(run("qemu-img", &["compare", "-f", "raw", "-F", "raw", text(&out), &server.uri]).contains("identical"));
    let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &server.uri]);
    let map: serde_json::Value = serde_json::from_str(&map).expect("it is JSON");
    let zero: u64 =
        map.as_array().expect("it is a list").iter().filter(|piece| piece["zero"] == true).map(length).sum();
    assert_eq!(zero, (8 << 20) - 262_144 - 65536);

    let target = Server::of(export_of(memory(Bytes::mib(8))));
    run("qemu-img", &["convert", "-n", "-W", "-f", "raw", "-O", "raw", text(&out), &target.uri]);
    assert!(run("qemu-img", &["compare", "-f", "raw", "-F", "raw", text(&out), &target.uri]).contains("identical"));
}

fn length(piece: &serde_json::Value) -> u64 {
    piece["length"].as_u64().expect("it is a number")
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes() {
    let device = Device::new("memory", MemDevice::new(Bytes::mib(8)).with_request_alignment(512));
    let server = Server::of(export_of(device));
    let commands = [
        "write -P 7 64k 192k",
        "read -P 7 64k 192k",
        "write -z 128k 4k",
        "read -P 0 128k 4k",
        "write -z -u 192k 64k",
        "read -P 0 192k 64k",
        "write -f -P 9 0 512",
        "read -P 9 0 512",
        "discard 64k 64k",
        "write -P 3 1M 6M",
        "read -P 3 1M 6M",
        "flush",
    ];
    let arguments: Vec<&str> = commands.iter().flat_map(|command| ["-c", command]).collect();
    let report = run("qemu-io", &[&["-f", "raw", "-t", "none"], &arguments[..], &[&server.uri]].concat());
    assert!(!report.contains("failed"), "{report}");
}

#[test]
fn a_qcow2_container_grows_in_an_export_that_shows_room() {
    // The device has the advertised room itself: this is about QEMU's view of it.
    let server = Server::of(export_of(memory(Bytes::mib(64))));
    run("qemu-img", &["create", "-f", "qcow2", &server.uri, "16M"]);
    let report = run("qemu-io", &["-f", "qcow2", "-c", "write -P 5 1M 4M", "-c", "read -P 5 1M 4M", &server.uri]);
    assert!(!report.contains("failed"), "{report}");
    assert!(run("qemu-img", &["check", "-f", "qcow2", &server.uri]).contains("No errors"));
}
