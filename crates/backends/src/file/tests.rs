//! What only this module can reach: threads in the place of io_uring, and what becomes of requests whose waiter or
//! whose event loop is gone.

use std::fs::File;
use std::time::Duration;

use block::Device;
use block::testing::conformance;
use env::RealEnv;
use tempfile::NamedTempFile;

use super::*;
use crate::BackendSpec;
use crate::lock::{SERVER_BYTE, is_locked_by_others};

async fn open(path: &Path) -> FileBackend {
    let spec = BackendSpec::file(path).with_cache(crate::CacheMode::Direct);
    FileBackend::open(&spec, &OpenOptions::default(), &RealEnv::new()).await.expect("it opens")
}

fn file_of(size: u64) -> NamedTempFile {
    let file = NamedTempFile::new_in("/var/tmp").expect("a file on disk");
    file.as_file().set_len(size).expect("it is extended");
    file
}

#[tokio::test]
async fn without_io_uring_threads_do_its_work() {
    let make = async |size: Bytes| {
        let (_, path) = file_of(size.0).keep().expect("it is kept");
        let mut backend = open(&path).await;
        std::fs::remove_file(&path).expect("open files may be removed");
        backend.executor = Executor::threads();
        Device::new("file", backend)
    };
    conformance(1, make).await;
}

/// A backend with a helper that is asked for everything, or for what the kernel does not do at once.
async fn helped(size: u64, cache: crate::CacheMode, asks_rings: bool) -> FileBackend {
    let mut backend = helped_by(crate::Helpers::of_this_test(), size, cache).await;
    if !asks_rings {
        backend.executor.forget_rings();
    }
    backend
}

async fn helped_by(helpers: Arc<crate::Helpers>, size: u64, cache: crate::CacheMode) -> FileBackend {
    let (_, path) = file_of(size).keep().expect("it is kept");
    let spec = BackendSpec::file(&path).with_cache(cache);
    let options = OpenOptions { helpers: Some(helpers), ..OpenOptions::default() };
    let backend = FileBackend::open(&spec, &options, &RealEnv::new()).await.expect("it opens");
    std::fs::remove_file(&path).expect("open files may be removed");
    backend
}

#[tokio::test]
async fn where_no_helper_lives_long_enough_the_requests_are_carried_out_here() {
    let none = || crate::Helpers::of("/bin/false".into());
    for helpers in [none(), none().keeping_all()] {
        let backend = helped_by(helpers, 1 << 20, crate::CacheMode::Direct).await;
        use_all_of(&backend).await;
        // Whether one that has ended was in the middle of a sync is not known. That none could be asked is no answer.
        if let Err(error) = backend.flush().await {
            assert!([ErrorKind::Io, ErrorKind::TimedOut].contains(&error.kind()), "{error}");
        }
    }
}

/// All kinds of requests, in one half of a new backend.
async fn use_all_of(backend: &FileBackend) {
    let data = Buffer::copy_of(&[7; 65536]).freeze();
    backend.write(Mutation::data(Bytes(65536), data)).await.expect("written");
    let read = backend.read(Bytes(65536), Buffer::unpooled(65536)).await.expect("read");
    assert!(read.iter().all(|&byte| byte == 7));
    let zeroes = Extent::new(Bytes(131_072), Bytes(65536));
    backend.write(Mutation::zeroes(zeroes, true)).await.expect("zeroed");
    assert_eq!(backend.refresh_size().await.expect("looked"), Bytes(1 << 20));
    let found = backend.extents(Extent::new(Bytes::ZERO, Bytes(1 << 20))).await.expect("it is found");
    assert_eq!(found.len(), 3, "{found:?}");
}

#[tokio::test]
async fn files_that_only_helpers_keep_are_served_and_known_like_all_others() {
    for cache in [crate::CacheMode::Direct, crate::CacheMode::Page] {
        let make = async |size: Bytes| {
            let backend = helped_by(crate::Helpers::of_this_test().keeping_all(), size.0, cache).await;
            assert!(backend.file().descriptor().is_none());
            Device::new("file", backend)
        };
        conformance(1, make).await;
    }
    let file = file_of(1 << 20);
    let helpers = crate::Helpers::of_this_test().keeping_all();
    let options = OpenOptions { helpers: Some(helpers), ..OpenOptions::default() };
    let spec = BackendSpec::file(file.path());
    let backend = FileBackend::open(&spec, &options, &RealEnv::new()).await.expect("it opens");
    crate::mark::mark(file.as_file(), 7, "web1").expect("marked");
    assert_eq!(backend.marked_epoch(), Some(7));
    assert_eq!(backend.image().expect("looked"), crate::ImageIdentity::of(file.as_file()).expect("looked"));
    assert_eq!(backend.times(), file.as_file().metadata().ok().as_ref().and_then(crate::ImageTimes::of));
    // Its locks are held, QEMU's among them, and all of them are free as soon as it is closed.
    let locks = backend.keep(crate::QemuLocks::take(file.path()).expect("free"));
    let other = File::options().read(true).write(true).open(file.path()).expect("it opens");
    let are_held = || [SERVER_BYTE, 100].map(|byte| is_locked_by_others(&other, byte).expect("locks work here"));
    assert_eq!(are_held(), [true, true]);
    drop(locks);
    assert_eq!(are_held(), [true, false]);
    drop(backend);
    assert_eq!(are_held(), [false, false]);
}

#[tokio::test]
async fn what_helpers_may_still_take_of_the_descriptors_is_known_before_they_take_it() {
    let helpers = crate::Helpers::of_this_test();
    assert_eq!(helpers.descriptors_to_come(4), 0);
    let mut backend = helped_by(Arc::clone(&helpers), 1 << 20, crate::CacheMode::Direct).await;
    backend.executor.forget_rings();
    let all = crate::Helpers::descriptors_of_a_device(4);
    assert_eq!(helpers.descriptors_to_come(4), all);
    backend.flush().await.expect("flushed");
    assert_eq!(helpers.descriptors_to_come(4), all - 2, "its socket is there");
    backend.read(Bytes::ZERO, Buffer::unpooled(4096)).await.expect("read");
    assert_eq!(helpers.descriptors_to_come(4), 3, "three workers have not asked it yet");
    drop(backend);
    assert_eq!(helpers.descriptors_to_come(4), 0);
}

/// Says that this process is one of its own, for a test that changes what holds for all of a process.
const ALONE: &str = "TRANSHUME_TEST_ALONE";

#[test]
fn where_there_are_no_descriptors_for_a_ring_or_a_connection_requests_are_carried_out_all_the_same() {
    if std::env::var_os(ALONE).is_none() {
        let name = "file::tests::where_there_are_no_descriptors_for_a_ring_or_a_connection_requests_are_carried_out_all_the_same";
        let alone = std::process::Command::new("/proc/self/exe").args(["--exact", name]).env(ALONE, "1").output();
        let alone = alone.expect("it runs");
        let said = String::from_utf8_lossy(&alone.stdout);
        assert!(alone.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    runtime.block_on(async {
        let plain = open(file_of(1 << 20).path()).await;
        let mut others = Vec::new();
        for asks_rings in [true, false] {
            let backend = helped(1 << 20, crate::CacheMode::Direct, asks_rings).await;
            // It has a helper from here on.
            backend.flush().await.expect("flushed");
            others.push(backend);
        }
        let mut all = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            all.push(file);
        }
        let used = async {
            for backend in others.iter().chain([&plain]) {
                use_all_of(backend).await;
                backend.flush().await.expect("flushed");
            }
        };
        tokio::time::timeout(Duration::from_secs(3), used).await.expect("nothing is waited for in vain");
        all.clear();
        for backend in others.iter().chain([&plain]) {
            backend.read(Bytes(65536), Buffer::unpooled(4096)).await.expect("read");
        }
    });
}

#[tokio::test]
async fn helpers_do_all_that_may_wait() {
    for (cache, asks_rings) in
        [(crate::CacheMode::Direct, true), (crate::CacheMode::Direct, false), (crate::CacheMode::Page, true)]
    {
        conformance(1, async |size: Bytes| Device::new("file", helped(size.0, cache, asks_rings).await)).await;
    }
}

#[tokio::test]
async fn requests_that_are_larger_than_a_helpers_memory_come_in_pieces() {
    for cache in [crate::CacheMode::Direct, crate::CacheMode::Page] {
        let backend = helped(40 << 20, cache, false).await;
        let bytes: Vec<u8> = (0..19 << 20).map(|place: u32| (place / 4096) as u8).collect();
        let write = |at: u64| backend.write(Mutation::data(Bytes(at), Buffer::copy_of(&bytes).freeze()));
        let (one, other) = futures::join!(write(1 << 20), write(21 << 20));
        one.and(other).expect("written");
        for at in [1 << 20, 21 << 20] {
            let read = backend.read(Bytes(at), Buffer::unpooled(bytes.len())).await.expect("read");
            assert!(read[..] == bytes[..], "{cache:?}: what is read at {at} is not what was written");
        }
        let before = backend.read(Bytes::ZERO, Buffer::unpooled(1 << 20)).await.expect("read");
        assert!(before.iter().all(|&byte| byte == 0));
    }
}

#[tokio::test]
async fn a_write_that_nobody_waits_for_any_more_is_carried_out() {
    let file = file_of(1 << 20);
    let backend = open(file.path()).await;
    {
        let data = Buffer::copy_of(&[7; 65536]).freeze();
        let mut write = BlockDevice::write(&backend, Mutation::data(Bytes(4096), data));
        // Polled once: submitted. Then dropped.
        assert!(futures::poll!(&mut write).is_pending());
    }
    backend.flush().await.expect("flushed");
    drop(backend);
    // The lock is free when the requests are done.
    let again = open(file.path()).await;
    let read = again.read(Bytes(4096), Buffer::unpooled(65536)).await.expect("read");
    assert!(read.iter().all(|&byte| byte == 7));
}

#[test]
fn a_backend_outlives_the_event_loops_that_use_it() {
    let file = file_of(1 << 20);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    let backend = runtime().block_on(open(file.path()));
    for round in 1..=5 {
        let data = Buffer::copy_of(&[round; 8192]).freeze();
        let ending = runtime();
        ending.block_on(async {
            let mut write = BlockDevice::write(&backend, Mutation::data(Bytes::ZERO, data));
            assert!(futures::poll!(&mut write).is_pending());
        });
        drop(ending);
        let read = runtime().block_on(async { backend.read(Bytes::ZERO, Buffer::unpooled(8192)).await });
        assert!(read.expect("read").iter().all(|&byte| byte == round), "round {round} was lost with its event loop");
    }
}

#[tokio::test]
async fn once_a_sync_has_failed_nothing_durable_is_promised() {
    let file = file_of(1 << 20);
    let backend = open(file.path()).await;
    backend.flush().await.expect("all is well");
    drop(backend.sync_failed(std::io::Error::from_raw_os_error(libc::EIO)));
    let error = backend.flush().await.expect_err("a sync has failed");
    assert!(error.context().contains("move the volume to another place"), "{error}");
    let data = Buffer::copy_of(&[1; 4096]).freeze();
    let durable = Mutation::data(Bytes::ZERO, data.clone()).with_fua(true);
    backend.write(durable).await.expect_err("it would have to be durable");
    let zeroes = Mutation::zeroes(Extent::new(Bytes::ZERO, Bytes(4096)), true).with_fua(true);
    backend.write(zeroes).await.expect_err("they would have to be durable");
    backend.write(Mutation::data(Bytes::ZERO, data)).await.expect("nothing was promised of it");
}

/// Has all threads of `backend` wait, until what this gives is dropped.
async fn hold_all_threads(backend: &FileBackend) -> std::sync::mpsc::Sender<()> {
    let (release, held) = std::sync::mpsc::channel();
    let held = Arc::new(Mutex::new(held));
    for _ in 0..64 {
        let held = Arc::clone(&held);
        let mut wait = Box::pin(backend.executor.run(move || {
            // It fails when the other end is gone, and that is what is waited for.
            let _: std::result::Result<(), _> = held.lock().recv();
            Ok(())
        }));
        // Polled once: begun.
        assert!(futures::poll!(&mut wait).is_pending());
    }
    release
}

#[tokio::test]
async fn where_a_look_at_the_length_may_wait_it_is_a_thread_that_waits() {
    let file = file_of(1 << 20);
    let mut backend = open(file.path()).await;
    backend.length_waits = true;
    let data = Buffer::copy_of(&[7; 4096]).freeze();
    backend.write(Mutation::data(Bytes::ZERO, data.clone())).await.expect("nobody looks yet");
    backend.guard_length(true);
    let release = hold_all_threads(&backend).await;
    let mut write = BlockDevice::write(&backend, Mutation::data(Bytes(4096), data.clone()));
    assert!(futures::poll!(&mut write).is_pending());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(futures::poll!(&mut write).is_pending(), "no thread has looked");
    drop(release);
    write.await.expect("the file is as long as it was");
    backend.flush().await.expect("and still is");
}

#[tokio::test]
async fn a_target_that_was_cut_is_noticed_by_a_thread_before_a_write_could_hide_it() {
    let data = Buffer::copy_of(&[7; 4096]).freeze();
    let file = file_of(1 << 20);
    let mut backend = open(file.path()).await;
    backend.length_waits = true;
    backend.guard_length(true);
    backend.write(Mutation::data(Bytes::ZERO, data.clone())).await.expect("written");
    file.as_file().set_len(0).expect("cut");
    let end = Bytes((1 << 20) - 4096);
    let error = backend.write(Mutation::data(end, data.clone())).await.expect_err("it would be as long as before");
    assert!(error.context().contains("was made shorter"), "{error}");
    file.as_file().set_len(1 << 20).expect("extended");
    backend.write(Mutation::data(end, data)).await.expect_err("what was written before is lost for good");
    backend.flush().await.expect_err("nothing is promised of it");
}

#[tokio::test]
async fn a_sync_that_nobody_could_carry_out_has_lost_nothing() {
    let file = file_of(1 << 20);
    let backend = open(file.path()).await;
    let error = backend.sync_failed(crate::helper::unasked());
    assert_eq!(error.kind(), ErrorKind::TimedOut, "layers above would take it for a loss");
    assert!(!backend.has_failed_sync());
    backend.flush().await.expect("the next one covers it");
}

#[tokio::test]
async fn requests_deeper_than_the_ring_wait_their_turn() {
    let file = file_of(4 << 20);
    let device = Device::new("file", open(file.path()).await);
    let writes = (0..1024_u64).map(|number| {
        let data = Buffer::copy_of(&[(number % 251) as u8; 4096]).freeze();
        device.write(Mutation::data(Bytes(number * 4096), data))
    });
    let all = tokio::time::timeout(Duration::from_secs(60), futures::future::join_all(writes));
    assert!(all.await.expect("nothing hangs").iter().all(Result::is_ok));
    for number in 0..1024_u64 {
        let read = device.read(Bytes(number * 4096), Buffer::unpooled(4096)).await.expect("read");
        assert!(read.iter().all(|&byte| byte == (number % 251) as u8), "block {number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_that_wander_between_threads_are_all_answered() {
    let file = file_of(8 << 20);
    let device = Device::new("file", open(file.path()).await);
    let lanes: Vec<_> = (0..16_u64)
        .map(|lane| {
            let device = device.clone();
            tokio::spawn(async move {
                for round in 0..100_u64 {
                    let offset = Bytes((lane * 128 + round) * 4096);
                    let data = Buffer::copy_of(&[lane as u8 ^ round as u8; 4096]).freeze();
                    device.write(Mutation::data(offset, data)).await.expect("written");
                    tokio::task::yield_now().await;
                    let read = device.read(offset, Buffer::unpooled(4096)).await.expect("read");
                    assert!(read.iter().all(|&byte| byte == lane as u8 ^ round as u8));
                }
            })
        })
        .collect();
    let all = tokio::time::timeout(Duration::from_secs(60), futures::future::join_all(lanes));
    all.await.expect("nothing hangs").into_iter().for_each(|lane| lane.expect("no panic"));
}
