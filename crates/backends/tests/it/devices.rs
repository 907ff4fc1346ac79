//! Block devices, full file systems, and files that change size.

use std::path::Path;
use std::sync::Arc;

use crate::support::{Loop, Mount, SmallFileSystem, directory, file_of, run};
use block::testing::conformance;
use block::{BlockDevice, Buffer, Bytes, Data, Device, ErrorKind, Extent, ExtentState, Mutation};
use env::RealEnv;
use transhume_backends::{BackendSpec, CacheMode, Engine, FileBackend, OpenOptions};

async fn open(path: &Path, cache: CacheMode, options: &OpenOptions) -> Arc<FileBackend> {
    let spec = BackendSpec::file(path).with_cache(cache);
    Arc::new(FileBackend::open(&spec, options, &RealEnv::new()).await.expect("it opens"))
}

fn device(backend: &Arc<FileBackend>) -> Device {
    Device::from_arc("file", Arc::clone(backend) as _)
}

async fn read(device: &Device, offset: u64, length: usize) -> block::Result<Vec<u8>> {
    device.read(Bytes(offset), Buffer::unpooled(length)).await.map(|buffer| buffer.to_vec())
}

fn data(offset: u64, length: usize, byte: u8) -> Mutation {
    Mutation::data(Bytes(offset), Data::copy_of(&vec![byte; length]))
}

#[tokio::test]
async fn block_devices_conform() {
    let directory = directory();
    for (sector, cache) in [("512", CacheMode::Auto), ("4096", CacheMode::Auto), ("512", CacheMode::Page)] {
        let backing = directory.path().join("backing");
        let mut loops = Vec::new();
        let loops = std::cell::RefCell::new(&mut loops);
        let make = async |size: Bytes| {
            file_of(&backing, size.align_up(4096).0);
            let over = Loop::over(&backing, &["--sector-size", sector]);
            let backend = open(&over.path, cache, &OpenOptions::default()).await;
            assert!(backend.is_block_device());
            if cache == CacheMode::Auto {
                assert_eq!(backend.engine(), Engine::Direct);
                assert_eq!(backend.geometry().request_alignment.to_string(), sector);
            }
            std::fs::remove_file(&backing).expect("it stays while it is in use");
            loops.borrow_mut().push(over);
            device(&backend)
        };
        conformance(1, make).await;
    }
}

#[tokio::test]
async fn a_full_file_system_is_told_from_a_failing_one_and_loses_nothing() {
    for (small, cache) in [
        (SmallFileSystem::in_memory(), CacheMode::Auto),
        (SmallFileSystem::ext4(), CacheMode::Direct),
        (SmallFileSystem::ext4(), CacheMode::Page),
    ] {
        let path = small.directory.path().join("disk.raw");
        file_of(&path, 64 << 20);
        let backend = open(&path, cache, &OpenOptions::default()).await;
        let device = device(&backend);
        let mut written = 0;
        let error = loop {
            match device.write(data(written, 1 << 20, 7).with_fua(true)).await {
                Ok(()) => written += 1 << 20,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
        assert!(written >= 4 << 20, "only {written} bytes fit");
        for offset in (0..written).step_by(1 << 20) {
            assert!(read(&device, offset, 1 << 20).await.expect("read").iter().all(|&byte| byte == 7));
        }
        // Room is made, and the same request succeeds.
        device.write(Mutation::discard(Extent::new(Bytes::ZERO, Bytes(written / 2)))).await.expect("discarded");
        device.write(data(written, 1 << 20, 8).with_fua(true)).await.expect("there is room again");
        device.flush().await.expect("running out of space is no failed sync");
        assert!(read(&device, written, 1 << 20).await.expect("read").iter().all(|&byte| byte == 8));
    }
}

#[tokio::test]
async fn a_container_grows_by_writes_and_not_by_what_is_advertised() {
    let (disk, memory) = (directory(), tempfile::tempdir_in("/dev/shm").expect("a directory in memory"));
    for (directory, cache) in [(&disk, CacheMode::Direct), (&disk, CacheMode::Page), (&memory, CacheMode::Auto)] {
        let path = directory.path().join(cache.name());
        std::fs::write(&path, vec![1; 197_120]).expect("written");
        let backend = open(&path, cache, &OpenOptions::growing(Bytes::gib(1))).await;
        let device = device(&backend);
        let length = || std::fs::metadata(&path).expect("there").len();
        assert_eq!(device.size(), Bytes::gib(1));
        assert_eq!(length(), 197_120);

        let around_the_end = read(&device, 196_608, 4096).await.expect("read");
        assert!(around_the_end[..512].iter().all(|&byte| byte == 1));
        assert!(around_the_end[512..].iter().all(|&byte| byte == 0));
        assert!(read(&device, 512 << 20, 4096).await.expect("read").iter().all(|&byte| byte == 0));
        let whole = Extent::whole(Bytes::gib(1));
        let pieces = device.extents(whole).await.expect("described");
        assert_eq!(
            pieces.last().map(|piece| (piece.extent.end(), piece.state)),
            Some((whole.end(), ExtentState::Hole))
        );

        // Nothing is trimmed, neither within the container nor behind it.
        device.write(Mutation::discard(whole)).await.expect("ignored");
        assert_eq!(length(), 197_120);
        assert!(read(&device, 0, 4096).await.expect("read").iter().all(|&byte| byte == 1));

        device.write(data(1 << 20, 65536, 2).with_fua(true)).await.expect("extended");
        assert_eq!(length(), (1 << 20) + 65536);
        assert!(read(&device, 1 << 20, 65536).await.expect("read").iter().all(|&byte| byte == 2));
        assert!(read(&device, 512 << 10, 4096).await.expect("read").iter().all(|&byte| byte == 0));
        let zeroes = Mutation::zeroes(Extent::new(Bytes::mib(2), Bytes(65536)), true);
        device.write(zeroes).await.expect("extended by zeroes");
        assert_eq!(length(), (2 << 20) + 65536);
        let zeroes = Mutation::zeroes(Extent::new(Bytes::ZERO, Bytes(65536)), true);
        device.write(zeroes).await.expect("zeroed");
        assert!(read(&device, 0, 65536).await.expect("read").iter().all(|&byte| byte == 0));
        assert_eq!(length(), (2 << 20) + 65536);
    }
}

#[tokio::test]
async fn a_file_that_grows_is_a_larger_volume_when_asked_and_one_that_shrinks_fails() {
    let directory = directory();
    for cache in [CacheMode::Direct, CacheMode::Page] {
        let path = directory.path().join(cache.name());
        std::fs::write(&path, vec![1; 10_001]).expect("written");
        let backend = open(&path, cache, &OpenOptions::default()).await;
        let device = device(&backend);
        device.write(data(9_728, 273, 2)).await.expect("written at the odd end");
        let file = std::fs::File::options().write(true).open(&path).expect("it opens");
        file.set_len(30_003).expect("extended");
        assert_eq!(device.size(), Bytes(10_001));
        assert_eq!(backend.refresh_size().await.expect("looked"), Bytes(30_003));
        device.write(data(8192, 8192, 3)).await.expect("written over the old end");
        device.write(data(29_696, 307, 4)).await.expect("written at the new end");
        let bytes = read(&device, 0, 30_003).await.expect("read");
        let of = |range: std::ops::Range<usize>, byte| bytes[range].iter().all(|&found| found == byte);
        assert!(of(0..8192, 1) && of(8192..16384, 3) && of(16384..29_696, 0) && of(29_696..30_003, 4));

        file.set_len(20_000).expect("truncated");
        assert_eq!(backend.refresh_size().await.expect("looked"), Bytes(30_003));
        let error = read(&device, 16_384, 8192).await.expect_err("its end is gone");
        assert!(error.context().contains("made shorter"), "{error}");
    }
}

#[tokio::test]
async fn a_volume_may_end_before_its_block_device_does() {
    let directory = directory();
    let backing = directory.path().join("backing");
    file_of(&backing, 4 << 20);
    let over = Loop::over(&backing, &[]);
    let options = OpenOptions { size_limit: Some(Bytes::mib(3)), ..OpenOptions::default() };
    let device = device(&open(&over.path, CacheMode::Auto, &options).await);
    assert_eq!(device.size(), Bytes::mib(3));
    let error = device.write(data(3 << 20, 512, 1)).await.expect_err("it lies behind the end");
    assert_eq!(error.kind(), ErrorKind::OutOfRange);
}

#[tokio::test]
async fn holes_are_found_and_dirty_pages_are_data() {
    let (disk, memory) = (directory(), tempfile::tempdir_in("/dev/shm").expect("a directory in memory"));
    for (directory, cache) in [(&disk, CacheMode::Direct), (&disk, CacheMode::Page), (&memory, CacheMode::Auto)] {
        let path = directory.path().join(cache.name());
        file_of(&path, 16 << 20);
        let device = device(&open(&path, cache, &OpenOptions::default()).await);
        let whole = Extent::whole(Bytes::mib(16));
        let states = async || {
            let pieces = device.extents(whole).await.expect("described");
            pieces.iter().map(|piece| (piece.extent.offset.0 >> 20, piece.state.reads_zero())).collect::<Vec<_>>()
        };
        assert_eq!(states().await, [(0, true)]);
        device.write(data(4 << 20, 1 << 20, 1)).await.expect("written");
        assert_eq!(states().await, [(0, true), (4, false), (5, true)]);
        device.write(Mutation::discard(Extent::new(Bytes::mib(4), Bytes::mib(1)))).await.expect("discarded");
        assert_eq!(states().await, [(0, true)]);
    }
}

#[tokio::test]
async fn a_file_without_holes_is_data_until_one_is_punched() {
    let (disk, memory) = (directory(), tempfile::tempdir_in("/dev/shm").expect("a directory in memory"));
    for (directory, cache) in [(&disk, CacheMode::Direct), (&memory, CacheMode::Auto)] {
        let path = directory.path().join(cache.name());
        file_of(&path, 4 << 20);
        let device = device(&open(&path, cache, &OpenOptions::default()).await);
        let hole_bytes = async || {
            let pieces = device.extents(Extent::whole(Bytes::mib(4))).await.expect("described");
            pieces.iter().filter(|piece| piece.state.reads_zero()).map(|piece| piece.extent.length.0).sum::<u64>()
        };
        device.write(data(0, 4 << 20, 1)).await.expect("written");
        assert_eq!(hole_bytes().await, 0);
        device.write(Mutation::discard(Extent::new(Bytes::mib(1), Bytes::mib(2)))).await.expect("discarded");
        assert_eq!(hole_bytes().await, 2 << 20);
    }
}

#[tokio::test]
async fn containers_that_grow_conform() {
    let (disk, memory) = (directory(), tempfile::tempdir_in("/dev/shm").expect("a directory in memory"));
    for (directory, cache) in [(&disk, CacheMode::Direct), (&disk, CacheMode::Page), (&memory, CacheMode::Auto)] {
        let number = std::cell::Cell::new(0);
        let make = async |size: Bytes| {
            number.set(number.get() + 1);
            let path = directory.path().join(format!("{}-{}", cache.name(), number.get()));
            file_of(&path, 513);
            device(&open(&path, cache, &OpenOptions::growing(size)).await)
        };
        conformance(2, make).await;
    }
}

#[tokio::test]
async fn a_medium_that_fails_is_told_from_a_full_one_and_its_failed_sync_is_remembered() {
    let small = SmallFileSystem::in_memory();
    let backing = small.directory.path().join("backing");
    file_of(&backing, 64 << 20);
    let over = Loop::over(&backing, &[]);
    let backend = open(&over.path, CacheMode::Page, &OpenOptions::default()).await;
    let through_the_cache = device(&backend);
    // The page cache takes it; the medium behind it cannot.
    for offset in 0..16 {
        through_the_cache.write(data(offset << 20, 1 << 20, 7)).await.expect("the page cache takes it");
    }
    let error = through_the_cache.flush().await.expect_err("the medium is full");
    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace), "{}", error.chain());
    for _ in 0..2 {
        let error = through_the_cache.flush().await.expect_err("what was lost is not found again");
        assert!(error.context().contains("nothing durable"), "{error}");
    }
    drop((through_the_cache, backend));

    let past_the_cache = device(&open(&over.path, CacheMode::Direct, &OpenOptions::default()).await);
    std::fs::File::options().write(true).open(&backing).and_then(|file| file.set_len(0)).expect("truncated");
    let error = read(&past_the_cache, 0, 4096).await.expect_err("the medium is gone");
    assert_eq!(error.kind(), ErrorKind::Io, "{}", error.chain());
}

#[tokio::test]
async fn coarser_requests_than_the_file_needs_may_be_asked_for_where_the_size_is_a_multiple() {
    let directory = directory();
    let options = OpenOptions { request_alignment_min: 512, ..OpenOptions::default() };
    for (size, limit, alignment) in [(8192, None, 512), (8292, None, 1), (8292, Some(8192), 512), (8192, Some(100), 1)]
    {
        let path = directory.path().join("file");
        std::fs::write(&path, vec![1; size]).expect("written");
        let options = OpenOptions { size_limit: limit.map(Bytes), ..options.clone() };
        let backend = open(&path, CacheMode::Page, &options).await;
        assert_eq!(backend.geometry().request_alignment, alignment, "{size} bytes up to {limit:?}");
        let written = device(&backend).write(data(0, 3, 2)).await;
        assert_eq!(written.is_ok(), alignment == 1, "{written:?}");
    }
}

#[tokio::test]
async fn a_device_with_coarser_sectors_than_were_promised_is_refused_and_a_file_goes_through_the_page_cache() {
    let directory = directory();
    let (backing, mounted) = (directory.path().join("backing"), directory.path().join("mounted"));
    std::fs::create_dir(&mounted).expect("a directory");
    file_of(&backing, 16 << 20);
    let over = Loop::over(&backing, &["--sector-size", "4096"]);
    let promised = OpenOptions { request_alignment_max: Some(512), ..OpenOptions::default() };
    let failed = async |path: &Path, cache| {
        let spec = BackendSpec::file(path).with_cache(cache);
        FileBackend::open(&spec, &promised, &RealEnv::new()).await.expect_err("its sectors are too coarse")
    };
    let error = failed(&over.path, CacheMode::Auto).await;
    assert!(
        error.kind() == ErrorKind::Misaligned && error.to_string().contains("sectors of 4096 bytes now"),
        "{error}"
    );
    run("mkfs.ext4", &["-q", "-F", over.path.to_str().expect("a plain name")]);
    let mount = Mount::of(&over, &mounted, "rw");
    let image = mounted.join("image");
    file_of(&image, 1 << 20);
    assert_eq!(open(&image, CacheMode::Auto, &OpenOptions::default()).await.engine(), Engine::Direct);
    assert_eq!(failed(&image, CacheMode::Direct).await.kind(), ErrorKind::Misaligned);
    let backend = open(&image, CacheMode::Auto, &promised).await;
    assert_eq!(backend.engine(), Engine::PageCache);
    let device = device(&backend);
    device.write(data(512, 512, 7)).await.expect("a sector as promised");
    let expected = [vec![0; 512], vec![7; 512], vec![0; 3072]].concat();
    assert_eq!(read(&device, 0, 4096).await.expect("read"), expected);
    drop((device, backend));
    drop(mount);
}

#[tokio::test]
async fn what_lies_behind_the_end_of_a_file_that_was_cut_is_no_hole() {
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let disk = directory();
    for (cache, place) in
        [(CacheMode::Direct, disk.path()), (CacheMode::Page, disk.path()), (CacheMode::Auto, memory.path())]
    {
        for length in [0, 4096, (1 << 20) + 512, 3 << 20] {
            let path = place.join(format!("{}-{length}", cache.name()));
            file_of(&path, 4 << 20);
            let backend = open(&path, cache, &OpenOptions::default()).await;
            let device = device(&backend);
            device.write(data(2 << 20, 65536, 1)).await.expect("written");
            device.flush().await.expect("flushed");
            let file = std::fs::File::options().write(true).open(&path).expect("it opens");
            file.set_len(length).expect("cut");
            let mut at = Bytes::ZERO;
            while at < Bytes::mib(4) {
                let pieces = device.extents(Extent::between(at, Bytes::mib(4))).await.expect("described");
                for piece in pieces {
                    let is_lost = piece.extent.end().0 > length;
                    assert!(!is_lost || piece.state == ExtentState::Data, "{piece:?} is none of {length} bytes");
                    at = piece.extent.end();
                }
            }
            read(&device, 3 << 20, 65536).await.expect_err("it is lost");
            let error = device.flush().await.expect_err("what was written is lost");
            assert!(error.context().contains("was made shorter"), "{error}");
            // What is written to its end does not bring back what was before.
            file.set_len(4 << 20).expect("extended");
            backend.forget_failed_sync();
            device.flush().await.expect_err("what was written is lost for good");
        }
    }
}

#[tokio::test]
async fn a_target_that_was_cut_takes_no_write_that_would_hide_it() {
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let disk = directory();
    for (cache, place) in
        [(CacheMode::Direct, disk.path()), (CacheMode::Page, disk.path()), (CacheMode::Auto, memory.path())]
    {
        let path = place.join(cache.name());
        file_of(&path, 4 << 20);
        let backend = open(&path, cache, &OpenOptions::default()).await;
        let device = device(&backend);
        backend.guard_length(true);
        device.write(data(0, 65536, 1)).await.expect("written");
        let file = std::fs::File::options().write(true).open(&path).expect("it opens");
        file.set_len(0).expect("cut");
        let end = (4 << 20) - 65536;
        let error = device.write(data(end, 65536, 1)).await.expect_err("it would be as long as before");
        assert!(error.context().contains("was made shorter"), "{error}");
        file.set_len(4 << 20).expect("extended");
        device.write(data(end, 65536, 1)).await.expect_err("what was written before is lost for good");
    }
}
