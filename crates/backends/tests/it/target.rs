//! Where a volume may move to, and what becomes of where it was.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use block::{Bytes, ErrorKind};
use env::RealEnv;
use rustix::thread::CapabilitySet;
use transhume_backends::{
    Alias, BackendSpec, FileBackend, MarkedFile, OpenOptions, PreparedTarget, QemuLocks, Retiring, TargetError,
    TargetOrigin, TargetRequest, check_target, prepare_target, retire_source,
};

use crate::support::{Attribute, Fuse, Loop, Mount, SmallFileSystem, directory, file_of, run, without};

async fn prepare(path: &Path, source: Option<&Path>, overwrite: bool) -> Result<PreparedTarget, TargetError> {
    let spec = BackendSpec::file(path);
    let size = Bytes(1 << 20);
    let request = TargetRequest { spec: &spec, source, size, guest_alignment: 512, overwrite };
    prepare_target(&request, &RealEnv::new()).await
}

#[tokio::test]
async fn a_new_target_is_sparse_and_has_the_owner_and_mode_of_the_source() {
    let directory = directory();
    let (source, target) = (directory.path().join("source"), directory.path().join("target"));
    file_of(&source, 1 << 20);
    std::fs::set_permissions(&source, std::fs::Permissions::from_mode(0o640)).expect("chmod");
    std::os::unix::fs::chown(&source, Some(1234), Some(2345)).expect("chown, as root");
    // Its owner may read and write, and so may user 77; group and others may not.
    let entries: [(u16, u16, u32); 5] = [(1, 6, !0), (2, 6, 77), (4, 0, !0), (16, 6, !0), (32, 0, !0)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, allowed, user) in entries {
        list.extend(tag.to_le_bytes().into_iter().chain(allowed.to_le_bytes()).chain(user.to_le_bytes()));
    }
    let name = "system.posix_acl_access";
    rustix::fs::setxattr(&source, name, &list, rustix::fs::XattrFlags::empty()).expect("the file system keeps lists");
    let prepared = prepare(&target, Some(&source), false).await.expect("a good target");
    let made = std::fs::metadata(&target).expect("it is there");
    assert_eq!((made.len(), made.blocks(), made.mode() & 0o777), (1 << 20, 0, 0o660));
    let mut copied = [0; 256];
    let length = rustix::fs::getxattr(&target, name, &mut copied).expect("a list");
    assert_eq!(copied[..length], list);
    assert_eq!((made.uid(), made.gid()), (1234, 2345));
    assert_eq!((prepared.origin, prepared.reads_zero), (TargetOrigin::Created, true));

    let json = serde_json::to_string(&prepared).expect("a record");
    let prepared: PreparedTarget = serde_json::from_str(&json).expect("the same");
    prepared.discard().expect("removed");
    assert!(!target.exists());
    prepared.discard().expect("removing twice does no harm");
    file_of(&target, 7);
    prepared.discard().expect("somebody else's file is left alone");
    assert!(target.exists());
}

#[tokio::test]
async fn a_target_that_holds_something_is_overwritten_only_when_asked() {
    let directory = directory();
    let target = directory.path().join("target");
    std::fs::write(&target, b"precious").expect("written");
    let error = prepare(&target, None, false).await.expect_err("it holds something");
    assert!(matches!(error, TargetError::NotEmpty { .. }) && error.to_string().contains("--overwrite"), "{error}");
    assert_eq!(std::fs::read(&target).expect("still there"), b"precious");

    let prepared = prepare(&target, None, true).await.expect("it may be overwritten");
    assert_eq!(prepared.origin, TargetOrigin::Overwritten);
    let bytes = std::fs::read(&target).expect("there");
    assert!(bytes.len() == 1 << 20 && bytes.iter().all(|&byte| byte == 0));
    prepared.discard().expect("emptied");
    assert_eq!(std::fs::metadata(&target).expect("there").len(), 0);
    assert_eq!(prepare(&target, None, false).await.expect("empty files may be used").origin, TargetOrigin::WasEmpty);
}

#[test]
fn a_file_is_recognised_by_a_server_that_gives_it_other_numbers() {
    let directory = directory();
    let (behind, side) = (directory.path().join("behind"), directory.path().join("side"));
    std::fs::create_dir(&behind).expect("a directory");
    std::fs::create_dir(&side).expect("a directory");
    let fuse = Fuse::of(&behind, &directory.path().join("shown"));
    for name in ["a", "b", "c"] {
        std::fs::write(behind.join(name), name.repeat(8192)).expect("written");
    }
    let alias = |target: &Path, name: &str| {
        let marked = MarkedFile::new(target, ".mark").expect("looked").expect("it has bytes");
        marked.alias_of(&fuse.at.join(name), ".a.overlay-").expect("looked")
    };
    assert_eq!(alias(&behind.join("a"), "a"), Alias::Same);
    assert_eq!(alias(&behind.join("b"), "a"), Alias::Apart);
    let beside = behind.join(".a.overlay-1");
    std::fs::write(&beside, b"layer").expect("written");
    assert_eq!(alias(&beside, "a"), Alias::Same, "it belongs to the image");
    // A server that follows links shows them as files of their own.
    std::fs::copy(behind.join("a"), behind.join("copy")).expect("copied");
    let through = |name: &str| alias(&fuse.at.join(name), "a");
    assert_eq!((through("copy"), through("b"), through("a")), (Alias::Names, Alias::Apart, Alias::Same));
    // By a name in another folder, or mounted there.
    let (linked, mounted) = (side.join("linked"), side.join("mounted"));
    std::fs::hard_link(behind.join("b"), &linked).expect("linked");
    assert_eq!((alias(&linked, "b"), alias(&linked, "a")), (Alias::Names, Alias::Apart));
    std::fs::write(&mounted, b"").expect("written");
    let names = [behind.join("c"), mounted.clone()].map(|path| path.to_str().expect("a plain name").to_owned());
    run("mount", &["--bind", &names[0], &names[1]]);
    let found = (alias(&mounted, "c"), alias(&mounted, "a"));
    run("umount", &[&names[1]]);
    assert_eq!(found, (Alias::Names, Alias::Apart));
    // Where nothing can be made, only other bytes tell.
    let _attribute = Attribute::of(&behind, 'i');
    assert_eq!((alias(&behind.join("c"), "c"), alias(&behind.join("c"), "a")), (Alias::Unmarked, Alias::Apart));
}

#[tokio::test]
async fn the_source_is_recognised_under_every_name() {
    let directory = directory();
    let source = directory.path().join("source");
    file_of(&source, 1 << 20);
    let (soft, hard) = (directory.path().join("soft"), directory.path().join("hard"));
    symlink(&source, &soft).expect("a symlink");
    std::fs::hard_link(&source, &hard).expect("a hard link");
    let device = Loop::over(&source, &[]);
    for name in [&source, &soft, &hard, &device.path] {
        let error = prepare(name, Some(&source), true).await.expect_err("it is the source");
        assert!(matches!(error, TargetError::SameAsSource { .. }), "{}: {error}", name.display());
    }
    let error = prepare(&source, Some(&device.path), true).await.expect_err("it is behind the source");
    assert!(matches!(error, TargetError::SameAsSource { .. }), "{error}");
}

#[tokio::test]
async fn the_source_is_recognised_through_every_device_that_shows_its_bytes() {
    const MIB: u64 = 1 << 20;
    let directory = directory();
    let backing = directory.path().join("backing");
    file_of(&backing, 4 * MIB);
    let window = |offset: u64, size: u64| {
        let [offset, size] = [offset, size].map(|number| number.to_string());
        Loop::over(&backing, &["--offset", &offset, "--sizelimit", &size])
    };
    let (source, beside) = (window(0, MIB), window(MIB, 2 * MIB));
    let (twin, overlapping, whole) = (window(0, MIB), window(MIB / 2, MIB), Loop::over(&backing, &[]));
    let over_whole = Loop::over(&whole.path, &[]);
    for device in [&twin, &overlapping, &whole, &over_whole] {
        let error = prepare(&device.path, Some(&source.path), true).await.expect_err("it has bytes of the source");
        assert!(matches!(error, TargetError::SameAsSource { .. }), "{}: {error}", device.path.display());
        let retiring = Retiring { holder: Some(&device.path), ..Retiring::by_name(&source.path, 7) };
        let error = retire_source(&retiring, directory.path()).expect_err("a tombstone in the volume");
        assert!(matches!(error, TargetError::OtherSource { .. }), "{error}");
    }
    assert!(std::fs::read(&backing).expect("there").iter().all(|byte| *byte == 0), "something was written");
    prepare(&beside.path, Some(&source.path), true).await.expect("it lies behind the source");
    let retiring = Retiring { holder: Some(&beside.path), ..Retiring::by_name(&source.path, 7) };
    retire_source(&retiring, directory.path()).expect("marked");
}

#[tokio::test]
async fn the_disk_below_the_file_system_of_the_source_is_refused() {
    let directory = directory();
    let (image, mounted) = (directory.path().join("image"), directory.path().join("mounted"));
    std::fs::create_dir(&mounted).expect("a directory");
    file_of(&image, 16 << 20);
    run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", image.to_str().expect("a plain name")]);
    let (device, path) = (Loop::over(&image, &[]), Loop::over(&image, &[]));
    let mount = Mount::of(&device, &mounted, "rw");
    let source = mounted.join("source");
    file_of(&source, 1 << 20);
    let error = prepare(&path.path, Some(&source), true).await.expect_err("the source is in it");
    assert!(matches!(error, TargetError::SameAsSource { .. }), "{error}");
    prepare(&mounted.join("target"), Some(&source), false).await.expect("two files of one file system are separate");
    let error =
        prepare(&mounted.join("new"), Some(&image), false).await.expect_err("it would be written into the image");
    assert!(matches!(error, TargetError::SameAsSource { .. }), "{error}");
    drop(mount);
}

#[tokio::test]
async fn a_file_that_a_loop_device_shows_is_no_target() {
    let directory = directory();
    let target = directory.path().join("target");
    std::fs::write(&target, vec![1; 1 << 20]).expect("written");
    let spec = BackendSpec::file(&target);
    let size = Bytes(1 << 20);
    let request = TargetRequest { spec: &spec, source: None, size, guest_alignment: 512, overwrite: true };
    {
        let device = Loop::over(&target, &[]);
        let error = prepare(&target, None, true).await.expect_err("somebody may have it mounted");
        let hint = format!("losetup -d {}", device.path.display());
        assert!(error.kind() == ErrorKind::Busy && error.to_string().contains(&hint), "{error}");
        assert_eq!(check_target(&request).expect_err("it is told before").kind(), ErrorKind::Busy);
    }
    check_target(&request).expect("nobody has it");
    assert_eq!(std::fs::read(&target).expect("there"), vec![1; 1 << 20], "it was only looked at");
    prepare(&target, None, true).await.expect("nobody has it");
}

#[tokio::test]
async fn targets_that_can_never_be_are_refused_with_nothing_left_behind() {
    let directory = directory();
    let error = prepare(&directory.path().join("no/target"), None, false).await.expect_err("no directory");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let error = prepare(directory.path(), None, true).await.expect_err("a directory");
    assert!(matches!(error, TargetError::NoFile { .. }), "{error}");
    let link = directory.path().join("link");
    symlink("nowhere", &link).expect("a symlink");
    let error = prepare(&link, None, true).await.expect_err("a link to nothing");
    assert!(matches!(error, TargetError::DanglingLink { .. }), "{error}");
    assert_eq!(std::fs::read_dir(directory.path()).expect("readable").count(), 1);
}

#[tokio::test]
async fn a_file_system_that_is_full_or_read_only_is_refused() {
    let small = SmallFileSystem::in_memory();
    let source = directory().path().join("source");
    std::fs::create_dir_all(source.parent().expect("it has one")).expect("a directory");
    std::fs::write(&source, vec![1; 9 << 20]).expect("9 MiB");
    let target = small.directory.path().join("target");
    let spec = BackendSpec::file(&target);
    let size = Bytes(9 << 20);
    let request = TargetRequest { spec: &spec, source: Some(&source), size, guest_alignment: 512, overwrite: false };
    let error = prepare_target(&request, &RealEnv::new()).await.expect_err("it does not fit");
    assert!(matches!(error, TargetError::NoSpace { .. }), "{error}");
    assert!(!target.exists(), "a target that cannot be used was left behind");

    // Holes need no room.
    file_of(&source, 9 << 20);
    prepare_target(&request, &RealEnv::new()).await.expect("it fits").discard().expect("removed");
    small.remount("ro");
    let error = prepare_target(&request, &RealEnv::new()).await.expect_err("it is read-only");
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
    std::fs::remove_dir_all(source.parent().expect("it has one")).expect("removed");
}

#[tokio::test]
async fn a_target_is_reserved_whole_or_not_at_all() {
    let small = SmallFileSystem::ext4();
    let path = small.directory.path().join("store");
    let spec = BackendSpec::file(&path);
    let size = Bytes(4 << 20);
    let request = TargetRequest { spec: &spec, source: None, size, guest_alignment: 512, overwrite: false };
    let made = prepare_target(&request, &RealEnv::new()).await.expect("it fits");
    let blocks = || std::fs::metadata(&path).expect("it is there").blocks();
    assert_eq!(blocks(), 0, "a target is sparse");
    made.reserve(size).expect("there is room");
    assert!(blocks() * 512 >= size.get(), "{} blocks", blocks());
    let error = made.reserve(Bytes(64 << 20)).expect_err("the file system has 16 MiB");
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    made.discard().expect("removed");
    assert!(made.reserve(size).is_err() && !path.exists(), "a file that is gone is not made again");
}

#[tokio::test]
async fn a_target_in_use_is_refused_and_keeps_its_bytes() {
    let directory = directory();
    let target = directory.path().join("target");
    std::fs::write(&target, vec![1; 1 << 20]).expect("written");
    let spec = BackendSpec::file(&target);
    let served = FileBackend::open(&spec, &OpenOptions::default(), &RealEnv::new()).await.expect("it opens");
    assert_eq!(prepare(&target, None, true).await.expect_err("it is served").kind(), ErrorKind::Busy);
    drop(served);
    let locks = QemuLocks::take(&target).expect("nobody has it");
    let error = prepare(&target, None, true).await.expect_err("QEMU has it");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("QEMU"), "{error}");
    drop(locks);
    assert_eq!(std::fs::read(&target).expect("there"), vec![1; 1 << 20]);
}

#[tokio::test]
async fn block_devices_are_checked_before_they_are_overwritten() {
    let directory = directory();
    let backing = directory.path().join("backing");
    file_of(&backing, 2 << 20);
    {
        let device = Loop::over(&backing, &[]);
        let prepared = prepare(&device.path, None, false).await.expect("an empty block device");
        assert_eq!((prepared.origin, prepared.reads_zero), (TargetOrigin::BlockDevice, false));
        let spec = BackendSpec::file(&device.path);
        let size = Bytes(3 << 20);
        let request = TargetRequest { spec: &spec, source: None, size, guest_alignment: 512, overwrite: true };
        let error = prepare_target(&request, &RealEnv::new()).await.expect_err("it is too small");
        assert!(matches!(error, TargetError::TooSmall { .. }), "{error}");
        std::fs::OpenOptions::new()
            .write(true)
            .open(&device.path)
            .and_then(|file| std::os::unix::fs::FileExt::write_all_at(&file, b"x", (2 << 20) - 1))
            .expect("written");
        let error = prepare(&device.path, None, false).await.expect_err("it holds something");
        assert!(matches!(error, TargetError::NotEmpty { .. }), "{error}");
        prepare(&device.path, None, true).await.expect("it may be overwritten");
    }
    {
        let device = Loop::over(&backing, &["--read-only"]);
        let error = prepare(&device.path, None, true).await.expect_err("it is read-only");
        assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
    }
    {
        let device = Loop::over(&backing, &["--sector-size", "4096"]);
        let error = prepare(&device.path, None, true).await.expect_err("its sectors are too large");
        assert!(matches!(error, TargetError::Sectors { target: 4096, guest: 512, .. }), "{error}");
    }
}

#[tokio::test]
async fn another_file_or_block_device_under_the_name_of_a_target_is_not_taken_for_it() {
    let directory = directory();
    let (target, aside) = (directory.path().join("target"), directory.path().join("aside"));
    let prepared = prepare(&target, None, false).await.expect("a good target");
    prepared.check().expect("it is the one");
    std::fs::rename(&target, &aside).expect("renamed");
    file_of(&target, 1 << 20);
    let error = prepared.check().expect_err("another file");
    assert!(matches!(error, TargetError::Replaced { .. }), "{error}");
    let open = async |path: &Path| {
        FileBackend::open(&BackendSpec::file(path), &OpenOptions::default(), &RealEnv::new()).await.expect("opened")
    };
    open(&target).await.check_is(&prepared).expect_err("another file is open");
    open(&aside).await.check_is(&prepared).expect("it is the one, under another name");

    let (one, other) = (directory.path().join("one"), directory.path().join("other"));
    for path in [&one, &other] {
        file_of(path, 1 << 20);
    }
    let device = Loop::over(&one, &[]);
    let prepared = prepare(&device.path, None, false).await.expect("an empty block device");
    let json = serde_json::to_string(&prepared).expect("a record");
    let prepared: PreparedTarget = serde_json::from_str(&json).expect("the same");
    prepared.check().expect("it is the one");
    let name = device.path.display().to_string();
    run("losetup", &["--detach", &name]);
    // A test beside this one may be given the number in between, and lets it go soon.
    let reattach = || std::process::Command::new("losetup").arg(&name).arg(&other).status().expect("losetup runs");
    let begun = std::time::Instant::now();
    while !reattach().success() {
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{name} is not to be had again");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let error = prepared.check().expect_err("another block device");
    assert!(matches!(error, TargetError::Replaced { .. }), "{error}");
    open(&device.path).await.check_is(&prepared).expect_err("another one is open");
}

#[test]
fn a_target_that_cannot_be_given_the_owner_of_the_source_says_so() {
    let directory = directory();
    let (source, target) = (directory.path().join("source"), directory.path().join("target"));
    file_of(&source, 1 << 20);
    std::os::unix::fs::chown(&source, Some(1234), Some(2345)).expect("chown, as root");
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let error = without(CapabilitySet::CHOWN, || runtime().block_on(prepare(&target, Some(&source), false)));
    let error = error.expect_err("its owner cannot be changed");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("owner 1234 and group 2345") && !target.exists(), "{error}");
    file_of(&target, 0);
    let prepared = without(CapabilitySet::CHOWN, || runtime().block_on(prepare(&target, Some(&source), false)));
    assert_eq!(prepared.expect("as the error says").origin, TargetOrigin::WasEmpty);
}

#[tokio::test]
async fn what_cannot_be_written_because_of_an_attribute_says_how_to_take_it_off() {
    let directory = directory();
    let target = directory.path().join("target");
    file_of(&target, 1 << 20);
    {
        let _immutable = Attribute::of(&target, 'i');
        let hint = format!("chattr -i {}", target.display());
        let opened = FileBackend::open(&BackendSpec::file(&target), &OpenOptions::default(), &RealEnv::new()).await;
        let error = opened.expect_err("it cannot be written").to_string();
        assert!(error.contains(&hint), "{error}");
        let error = prepare(&target, None, true).await.expect_err("it cannot be written").to_string();
        assert!(error.contains(&hint), "{error}");
    }
    let _immutable = Attribute::of(directory.path(), 'i');
    let error = prepare(&directory.path().join("new"), None, false).await.expect_err("nothing can be made there");
    assert!(error.to_string().contains(&format!("chattr -i {}", directory.path().display())), "{error}");
}

#[tokio::test]
async fn a_target_that_somebody_has_locked_is_not_taken_back() {
    let directory = directory();
    for (name, is_there) in [("created", false), ("overwritten", true)] {
        let target = directory.path().join(name);
        if is_there {
            std::fs::write(&target, b"old").expect("written");
        }
        let prepared = prepare(&target, None, true).await.expect("a good target");
        // What `qemu-img convert` and a VM do, while the daemon is away: the same inode, with other bytes.
        std::fs::write(&target, vec![7; 1 << 20]).expect("written");
        let locks = QemuLocks::take(&target).expect("nobody has it");
        let error = prepared.discard().expect_err("a VM runs on it");
        assert!(matches!(error, TargetError::InUse { .. }), "{error}");
        assert!(prepared.discard_once_free(&RealEnv::new()).await.is_err(), "a VM runs on it still");
        drop(locks);
        let served = FileBackend::open(&BackendSpec::file(&target), &OpenOptions::default(), &RealEnv::new()).await;
        let served = served.expect("it opens");
        assert!(matches!(prepared.discard(), Err(TargetError::InUse { .. })), "another daemon serves it");
        assert_eq!(std::fs::read(&target).expect("there"), vec![7; 1 << 20]);
        drop(served);
        prepared.discard().expect("nobody has it");
        assert_eq!(std::fs::metadata(&target).ok().map(|found| found.len()), is_there.then_some(0));
    }
}

#[tokio::test]
async fn of_two_moves_to_one_target_the_loser_leaves_it_to_the_winner() {
    let directory = directory();
    let target = directory.path().join("target");
    std::fs::write(&target, b"old").expect("written");
    let (winner, loser) = (prepare(&target, None, true).await, prepare(&target, None, true).await);
    let (winner, loser) = (winner.expect("a good target"), loser.expect("nobody has opened it yet"));
    let served = FileBackend::open(&winner.spec, &OpenOptions::default(), &RealEnv::new()).await.expect("it opens");
    served.check_is(&winner).expect("it is the winner's");
    std::fs::write(&target, vec![7; 1 << 20]).expect("copied");
    assert!(matches!(loser.discard_once_free(&RealEnv::new()).await, Err(TargetError::InUse { .. })));
    assert_eq!(std::fs::read(&target).expect("there"), vec![7; 1 << 20]);
}

#[tokio::test]
async fn a_target_that_is_not_there_was_deleted_only_if_its_directory_is() {
    let directory = directory();
    let (mounted, away) = (directory.path().join("mounted"), directory.path().join("away"));
    std::fs::create_dir(&mounted).expect("a directory");
    let target = mounted.join("target");
    let prepared = prepare(&target, None, false).await.expect("a good target");
    std::fs::rename(&mounted, &away).expect("unmounted");
    assert!(matches!(prepared.check(), Err(TargetError::Away { .. })));
    // What lies under a mount point.
    std::fs::create_dir(&mounted).expect("a directory");
    assert!(matches!(prepared.check(), Err(TargetError::Away { .. })));
    std::fs::write(&target, b"other").expect("written");
    assert!(matches!(prepared.check(), Err(TargetError::Away { .. })));
    prepared.discard().expect("another file is left alone");
    assert_eq!(std::fs::read(&target).expect("there"), b"other");
    std::fs::remove_dir_all(&mounted).expect("removed");
    std::fs::rename(&away, &mounted).expect("mounted");
    prepared.check().expect("it is there again");
    std::fs::remove_file(&target).expect("deleted");
    assert!(matches!(prepared.check(), Err(TargetError::Replaced { .. })));
}

#[tokio::test]
async fn a_target_stays_the_same_when_its_file_system_is_mounted_again_under_another_number() {
    let directory = directory();
    let (image, mounted) = (directory.path().join("image"), directory.path().join("mounted"));
    let beside = directory.path().join("beside");
    std::fs::create_dir(&mounted).expect("a directory");
    std::fs::create_dir(&beside).expect("a directory");
    file_of(&image, 16 << 20);
    // Inodes as large as this say when a file was made.
    let image_name = image.to_str().expect("a plain name");
    run("mkfs.ext4", &["-q", "-F", "-I", "256", "-O", "^has_journal", image_name]);
    let first = Loop::over(&image, &[]);
    let mount = Mount::of(&first, &mounted, "rw");
    let target = mounted.join("target");
    let prepared = prepare(&target, None, false).await.expect("a good target");
    let number = std::fs::metadata(&target).expect("it is there").dev();
    drop(mount);
    assert!(matches!(prepared.check(), Err(TargetError::Away { .. })), "what is under the mount point is believed");
    // The first is still attached, so this is another one.
    let second = Loop::over(&image, &[]);
    let mount = Mount::of(&second, &mounted, "rw");
    assert_ne!(std::fs::metadata(&target).expect("it is there").dev(), number);
    prepared.check().expect("it is the same file");
    drop(mount);
    let (one, other) = (Mount::of(&first, &beside, "ro"), Mount::of(&second, &mounted, "ro"));
    assert!(matches!(prepared.check(), Err(TargetError::Away { .. })), "a copy beside the file system is believed");
    drop(one);
    prepared.check().expect("it is the only one");
    drop(other);
    drop((first, second));
}

#[tokio::test]
async fn a_target_that_holds_a_volume_by_now_is_not_taken_back() {
    let directory = directory();
    let target = directory.path().join("target");
    let prepared = prepare(&target, None, false).await.expect("a good target");
    assert_eq!(prepared.committed_epoch(), None);
    prepared.mark(8, "web1").expect("marked");
    assert_eq!(prepared.committed_epoch(), Some(8));
    prepared.discard().expect("it is left alone");
    assert!(target.exists());
    let again = prepare(&target, None, true).await.expect("it may be overwritten");
    assert_eq!(again.committed_epoch(), None, "the mark of an earlier move is believed");
}
