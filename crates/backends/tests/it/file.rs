//! Files in memory and on disk through one body of tests.

use std::sync::Arc;

use block::testing::conformance;
use block::{Buffer, Bytes, Data, Device, ErrorKind, Extent, Mutation};
use env::RealEnv;
use tempfile::{TempDir, tempdir_in};
use transhume_backends::{BackendSpec, CacheMode, Engine, FileBackend, FileOffload, OpenOptions};

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
async fn zeroes_are_written_where_the_file_system_clears_nothing_by_itself() {
    let memory = in_memory();
    let backend = create(&memory, CacheMode::Auto, Bytes::mib(4)).await;
    let file = std::fs::File::options().write(true).open(backend.path()).expect("opened");
    let flags = rustix::fs::FallocateFlags::ZERO_RANGE;
    assert_eq!(rustix::fs::fallocate(&file, flags, 0, 4096), Err(rustix::io::Errno::OPNOTSUPP), "it can by now");
    let device = device(&backend);
    // In place, and by a thread.
    for length in [4096, 2 << 20] {
        device.write(Mutation::data(Bytes::ZERO, Data::copy_of(&vec![7; 4 << 20]))).await.expect("written");
        device.write(Mutation::zeroes(Extent::whole(Bytes(length)), false)).await.expect("zeroed");
        let read = device.read(Bytes::ZERO, Buffer::unpooled(4 << 20)).await.expect("read");
        let (zeroes, rest) = read.split_at(length as usize);
        assert!(zeroes.iter().all(|&byte| byte == 0) && rest.iter().all(|&byte| byte == 7), "{length} bytes");
    }
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
async fn a_file_system_that_shares_no_blocks_is_not_asked_to_copy() {
    let (memory, disk) = (in_memory(), on_disk());
    let size = Bytes(1 << 20);
    let (source, target) = (create(&memory, CacheMode::Auto, size).await, create(&disk, CacheMode::Auto, size).await);
    assert!(FileOffload::between(&source, &target).await.is_none(), "two file systems share blocks");
    let other = create(&memory, CacheMode::Auto, size).await;
    assert!(FileOffload::between(&source, &other).await.is_none(), "memory shares blocks");
}
