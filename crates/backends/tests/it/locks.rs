//! Locks against other servers and against QEMU's own programs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use block::{Bytes, ErrorKind};
use env::RealEnv;
use tempfile::{TempDir, tempdir_in};
use transhume_backends::{BackendSpec, FileBackend, OpenOptions, QemuLocks};

/// A tool, or what to do when it is missing.
fn tool(name: &str) -> Command {
    assert!(
        std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(name).exists())),
        "{name} is missing: run `make setup`"
    );
    Command::new(name)
}

fn image() -> (TempDir, PathBuf) {
    let directory = tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("disk.raw");
    std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("an image");
    (directory, path)
}

/// Whether qemu-io can write to the image, and what it said.
fn qemu_io_writes(path: &Path) -> (bool, String) {
    let output = tool("qemu-io").args(["-f", "raw", "-c", "write 0 4096"]).arg(path).output().expect("qemu-io runs");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn qemu_refuses_an_image_while_its_locks_are_held_and_takes_it_afterwards() {
    let (_directory, path) = image();
    assert!(qemu_io_writes(&path).0);
    let locks = QemuLocks::take(&path).expect("nobody has it");
    let (written, words) = qemu_io_writes(&path);
    assert!(!written && words.contains("lock"), "qemu-io wrote to a locked image: {words}");
    let output = tool("qemu-img").args(["resize", "-f", "raw"]).arg(&path).arg("2M").output().expect("it runs");
    assert!(!output.status.success(), "qemu-img resized a locked image");
    drop(locks);
    // A process that another test is just starting holds the lock until it runs.
    let mut attempts = (0..50).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        qemu_io_writes(&path)
    });
    assert!(attempts.any(|(written, _)| written), "qemu-io never got the image back");
}

#[test]
fn an_image_that_qemu_has_is_refused_and_its_holder_named() {
    let (_directory, path) = image();
    let mut daemon = tool("qemu-storage-daemon");
    let node = format!("driver=file,node-name=disk,filename={}", path.display());
    let socket = path.with_extension("sock");
    let export = "type=nbd,id=one,node-name=disk,writable=on,name=disk";
    daemon.args(["--blockdev", &node, "--nbd-server"]).arg(format!("addr.type=unix,addr.path={}", socket.display()));
    // Written once everything before it is in place. Trying the lock instead would now and then keep it from the
    // daemon.
    let ready = path.with_extension("pid");
    let mut daemon = daemon.args(["--export", export, "--pidfile"]).arg(&ready).spawn().expect("it runs");
    while !ready.exists() {
        assert!(daemon.try_wait().expect("it is ours").is_none(), "qemu-storage-daemon ended by itself");
        std::thread::sleep(Duration::from_millis(10));
    }
    let error = QemuLocks::take(&path).expect_err("QEMU has it");
    let beside = QemuLocks::take_beside(&path);
    daemon.kill().and_then(|()| daemon.wait()).expect("it ends");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.context().contains(&format!("process {}", daemon.id())), "{error}");
    beside.expect("shared locks do not mind each other");
}

#[tokio::test]
async fn a_file_is_served_once_and_read_only_servers_share_it() {
    let (_directory, path) = image();
    let env = RealEnv::new();
    let spec = BackendSpec::file(&path);
    // Long enough for a process that another test is just starting, which holds what is open here until it runs.
    let quick = |options: OpenOptions| OpenOptions { lock_wait: Some(Duration::from_millis(300)), ..options };
    let first = FileBackend::open(&spec, &OpenOptions::default(), &env).await.expect("nobody has it");
    let error = FileBackend::open(&spec, &quick(OpenOptions::default()), &env).await.expect_err("it is served");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.context().contains(&format!("process {}", std::process::id())), "{error}");
    let unlocked = OpenOptions { lock_wait: None, ..OpenOptions::read_only() };
    FileBackend::open(&spec, &unlocked, &env).await.expect("whoever takes no lock may look");
    drop(first);
    let reader = FileBackend::open(&spec, &quick(OpenOptions::read_only()), &env).await.expect("nobody has it");
    FileBackend::open(&spec, &quick(OpenOptions::read_only()), &env).await.expect("readers share");
    FileBackend::open(&spec, &quick(OpenOptions::default()), &env).await.expect_err("a reader has it");
    assert_eq!(block::BlockDevice::geometry(&reader).size, Bytes::mib(1));
}

#[tokio::test]
async fn whoever_waits_gets_the_lock_when_its_holder_lets_go() {
    let (_directory, path) = image();
    let env = RealEnv::new();
    let spec = BackendSpec::file(&path);
    let first = FileBackend::open(&spec, &OpenOptions::default(), &env).await.expect("nobody has it");
    let letting_go = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(first);
    };
    let options = OpenOptions::default();
    let (second, ()) = tokio::join!(FileBackend::open(&spec, &options, &env), letting_go);
    second.expect("the holder let go within the limit");
}

/// Set in a process that serves the file named here, as hard as it can, until it is killed.
const SERVED: &str = "TRANSHUME_TEST_SERVED";

/// No test by itself: the other process of the next one.
#[tokio::test]
async fn serve_until_killed() {
    let Some(path) = std::env::var_os(SERVED) else { return };
    let spec = BackendSpec::file(path);
    let backend = FileBackend::open(&spec, &OpenOptions::default(), &RealEnv::new()).await.expect("nobody has it");
    let device = block::Device::new("served", backend);
    let writers = (0..64_u64).map(async |lane| {
        for byte in 1.. {
            let data = block::Data::copy_of(&vec![byte as u8; 256 << 10]);
            device.write(block::Mutation::data(Bytes(lane * (256 << 10)), data)).await.expect("written");
        }
    });
    futures::future::join_all(writers).await;
}

#[tokio::test]
async fn whoever_gets_the_lock_of_a_killed_server_sees_no_late_write() {
    let (_directory, path) = image();
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(16 << 20)).expect("extended");
    for _ in 0..5 {
        let this = std::env::current_exe().expect("it has a name");
        let mut server = Command::new(this);
        let server = server.args(["--exact", "locks::serve_until_killed"]).env(SERVED, &path);
        let mut server = server.stdout(std::process::Stdio::null()).spawn().expect("it runs");
        let written = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).expect("there")) >= 32768;
        while !written() {
            assert!(server.try_wait().expect("it is ours").is_none(), "the server ended by itself");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        server.kill().and_then(|()| server.wait()).expect("it dies");
        let backend = FileBackend::open(&BackendSpec::file(&path), &OpenOptions::default(), &RealEnv::new()).await;
        let device = block::Device::new("served", backend.expect("the lock comes free"));
        let read = async || device.read(Bytes::ZERO, block::Buffer::unpooled(16 << 20)).await.expect("read");
        let first = read().await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(first[..] == read().await[..], "a dead server's write landed after its lock came free");
        device.write(block::Mutation::discard(block::Extent::whole(Bytes::mib(16)))).await.expect("emptied");
    }
}
