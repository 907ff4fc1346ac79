//! Files in memory and on disk through one body of tests.

use std::sync::Arc;

use block::testing::conformance;
use block::{BlockDevice, Buffer, Bytes, Data, Device, ErrorKind, Extent, Mutation};
use env::RealEnv;
use tempfile::{TempDir, tempdir_in};
use transhume_backends::{BackendSpec, CacheMode, CopyOffload, Engine, FileBackend, OpenOptions, copy_extent};

fn in_memory() -> TempDir {
    tempdir_in("/dev/shm").expect("a directory in memory")
}

fn on_disk() -> TempDir {
    tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory on disk")
}

async fn create(directory: &TempDir, cache: CacheMode, size: Bytes) -> Arc<FileBackend> {
    let (_, path) = tempfile::Builder::new().tempfile_in(directory).expect("a file").keep().expect("it is kept");
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(size.0)).expect("it is extended");
    let spec = BackendSpec::file(path).with_cache(cache);
    Arc::new(FileBackend::open(&spec, &OpenOptions::default(), &RealEnv::new()).await.expect("it opens"))
}

fn device(backend: &Arc<FileBackend>) -> Device {
    Device::from_arc("file", Arc::clone(backend) as _)
}

#[tokio::test]
async fn the_engine_follows_the_file_system() {
    let (memory, disk) = (in_memory(), on_disk());
    assert_eq!(create(&memory, CacheMode::Auto, Bytes::mib(1)).await.engine(), Engine::Memory);
    assert_eq!(create(&memory, CacheMode::Page, Bytes::mib(1)).await.engine(), Engine::Memory);
    assert_eq!(create(&disk, CacheMode::Auto, Bytes::mib(1)).await.engine(), Engine::Direct);
    assert_eq!(create(&disk, CacheMode::Page, Bytes::mib(1)).await.engine(), Engine::PageCache);
    let path = memory.path().join("lie");
    std::fs::write(&path, [1]).expect("written");
    let spec = BackendSpec::file(path).with_cache(CacheMode::Direct);
    let refused = FileBackend::open(&spec, &OpenOptions::default(), &RealEnv::new()).await;
    assert_eq!(refused.expect_err("direct IO in memory is a lie").kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn what_is_written_is_read_on_every_engine() {
    let (memory, disk) = (in_memory(), on_disk());
    for (directory, cache) in [(&memory, CacheMode::Auto), (&disk, CacheMode::Page), (&disk, CacheMode::Direct)] {
        let backend = create(directory, cache, Bytes(1_000_001)).await;
        let device = device(&backend);
        let end = Extent::between(Bytes(999_936), Bytes(1_000_001));
        let data = Data::copy_of(&vec![7; end.length.as_usize()]);
        device.write(Mutation::data(end.offset, data).with_fua(true)).await.expect("written");
        device.flush().await.expect("flushed");
        let read = device.read(Bytes(999_424), Buffer::unpooled(577)).await.expect("read");
        assert!(read[..512].iter().all(|&byte| byte == 0) && read[512..].iter().all(|&byte| byte == 7));
        device.write(Mutation::zeroes(Extent::whole(Bytes(1_000_001)), true)).await.expect("zeroed");
        let read = device.read(Bytes(0), Buffer::unpooled(1_000_001)).await.expect("read");
        assert!(read.iter().all(|&byte| byte == 0));
        assert_eq!(std::fs::metadata(backend.path()).expect("there").len(), 1_000_001);
    }
}

async fn conforms(directory: &TempDir, cache: CacheMode) {
    for seed in 0..2 {
        conformance(seed, async |size| device(&create(directory, cache, size).await)).await;
    }
}

#[tokio::test]
async fn files_in_memory_conform() {
    conforms(&in_memory(), CacheMode::Auto).await;
}

#[tokio::test]
async fn files_past_the_page_cache_conform() {
    conforms(&on_disk(), CacheMode::Direct).await;
}

#[tokio::test]
async fn files_through_the_page_cache_conform() {
    conforms(&on_disk(), CacheMode::Page).await;
}

#[tokio::test]
async fn the_file_system_copies_within_itself_and_refuses_between_two() {
    let (memory, disk) = (in_memory(), on_disk());
    let size = Bytes(1_000_001);
    let bytes: Vec<u8> = (0..size.0).map(|number| (number % 249) as u8).collect();
    for (directory, cache) in [(&memory, CacheMode::Auto), (&disk, CacheMode::Page), (&disk, CacheMode::Direct)] {
        let (source, target) = (create(directory, cache, size).await, create(directory, cache, size).await);
        device(&source).write(Mutation::data(Bytes::ZERO, Data::copy_of(&bytes))).await.expect("written");
        let extent = Extent::between(Bytes(65536), size);
        let outcome = copy_extent(&source, &target, extent).await.expect("copied");
        let CopyOffload::Copied(copied) = outcome else { panic!("{cache:?} refused") };
        assert!(copied >= extent.length.align_down(4096) - Bytes(4096), "only {copied} were copied");
        let rest = (extent.offset + copied).as_usize();
        if rest < bytes.len() {
            let by_hand = Mutation::data(Bytes::from(rest), Data::copy_of(&bytes[rest..]));
            device(&target).write(by_hand).await.expect("written");
        }
        let read = device(&target).read(Bytes::ZERO, Buffer::unpooled(size.as_usize())).await.expect("read");
        assert!(read[..65536].iter().all(|&byte| byte == 0) && read[65536..] == bytes[65536..]);
    }
    let (source, target) = (create(&memory, CacheMode::Auto, size).await, create(&disk, CacheMode::Auto, size).await);
    let outcome = copy_extent(&source, &target, Extent::whole(source.geometry().size)).await;
    assert_eq!(outcome.expect("no failure"), CopyOffload::Unsupported);
}
