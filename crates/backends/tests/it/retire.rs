//! What becomes of the source of a move.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use env::RealEnv;
use rustix::thread::CapabilitySet;
use transhume_backends::{
    BackendSpec, FileBackend, ImageIdentity, OpenOptions, QemuLocks, Retired, Retiring, SourceIdentity, TargetError,
    bring_back, is_deleted, retire_source,
};

use crate::support::{Attribute, Fuse, Loop, SmallFileSystem, directory, file_of, run, without};

#[test]
fn a_retired_file_is_found_under_no_old_name_and_can_be_restored_or_deleted() {
    let directory = directory();
    let (source, link) = (directory.path().join("source"), directory.path().join("link"));
    std::fs::write(&source, b"disk").expect("written");
    symlink("source", &link).expect("a symlink");
    let retired = retire_source(&Retiring::by_name(&link, 7), directory.path()).expect("renamed");
    assert!(!source.exists() && !link.exists());
    let moved = directory.path().join("source.moved-7");
    assert_eq!(std::fs::read(&moved).expect("kept"), b"disk");
    assert_eq!(retire_source(&Retiring::by_name(&link, 7), directory.path()).expect("again does no harm"), retired);

    retired.restore().expect("restored");
    assert_eq!(std::fs::read(&link).expect("back"), b"disk");
    std::fs::write(&moved, b"something else").expect("written");
    retire_source(&Retiring::by_name(&source, 7), directory.path()).expect_err("the name is taken");
    assert_eq!(std::fs::read(&source).expect("untouched"), b"disk");
    std::fs::remove_file(&moved).expect("removed");
    let retired = retire_source(&Retiring::by_name(&link, 8), directory.path()).expect("renamed");
    assert!(!is_deleted(&Retiring::by_name(&link, 8)).expect("looked"), "it is kept");
    retired.delete().expect("deleted");
    retired.delete().expect("deleting twice does no harm");
    assert!(is_deleted(&Retiring::by_name(&link, 8)).expect("looked"));
    assert!(!directory.path().join("source.moved-8").exists());
}

#[test]
fn a_retired_file_gets_its_name_back_unless_something_else_has_it() {
    let directory = directory();
    let (source, moved) = (directory.path().join("source"), directory.path().join("source.moved-7"));
    std::fs::write(&source, b"disk").expect("written");
    let identity = SourceIdentity::of(&std::fs::File::open(&source).expect("opened"), &source).expect("looked at");
    let retiring = Retiring { identity: Some(&identity), ..Retiring::by_name(&source, 7) };
    assert!(retiring.is_file());
    bring_back(&retiring).expect("it was not retired");
    retire_source(&retiring, directory.path()).expect("renamed");
    assert!(!retiring.is_file());
    bring_back(&retiring).expect("restored");
    bring_back(&retiring).expect("again does no harm");
    assert_eq!((std::fs::read(&source).expect("back"), moved.exists()), (b"disk".to_vec(), false));
    retire_source(&retiring, directory.path()).expect("renamed");
    std::fs::write(&source, b"other").expect("written");
    let error = bring_back(&retiring).expect_err("its name is taken");
    assert!(matches!(error, TargetError::OtherSource { .. }), "{error}");
    assert_eq!(
        (std::fs::read(&source).expect("there"), std::fs::read(&moved).expect("kept")),
        (b"other".to_vec(), b"disk".to_vec())
    );
}

#[test]
fn a_source_is_put_away_where_the_file_system_cannot_rename_without_overwriting() {
    let directory = directory();
    let behind = directory.path().join("behind");
    std::fs::create_dir(&behind).expect("a directory");
    let fuse = Fuse::of(&behind, &directory.path().join("shown"));
    let source = fuse.at.join("source");
    std::fs::write(&source, b"disk").expect("written");
    std::fs::write(fuse.at.join("source.moved-6"), b"other").expect("written");
    retire_source(&Retiring::by_name(&source, 6), directory.path()).expect_err("the name is taken");
    assert_eq!(std::fs::read(fuse.at.join("source.moved-6")).expect("there"), b"other");
    let retired = retire_source(&Retiring::by_name(&source, 7), directory.path()).expect("renamed");
    assert!(!behind.join("source").exists());
    assert_eq!(std::fs::read(behind.join("source.moved-7")).expect("kept"), b"disk");
    retired.restore().expect("restored");
    assert_eq!(std::fs::read(&source).expect("back"), b"disk");
}

#[test]
fn a_source_that_a_server_may_have_replaced_is_not_proved_to_be_what_was_moved() {
    let directory = directory();
    let behind = directory.path().join("behind");
    std::fs::create_dir(&behind).expect("a directory");
    let fuse = Fuse::of(&behind, &directory.path().join("shown"));
    for (folder, is_proved) in [(&fuse.at, false), (&behind, true)] {
        let source = folder.join("source");
        std::fs::write(&source, b"disk").expect("written");
        let held = std::fs::File::open(&source).expect("opened");
        let image = ImageIdentity::of(&held).expect("looked");
        let identity = image.as_source(SourceIdentity::of(&held, &source).expect("looked"));
        let retiring = Retiring { identity: Some(&identity), ..Retiring::by_name(&source, 7) };
        let retired = retire_source(&retiring, directory.path()).expect("renamed");
        assert_eq!(retiring.is_proved(&retired), is_proved, "{}", folder.display());
        retired.delete().expect("deleted");
        assert!(retiring.is_proved(&retired), "what is gone is nobody else's");
        // Another one gets its name, and the server tells its numbers of the open file, too.
        let source = folder.join("second");
        std::fs::write(&source, b"disk").expect("written");
        let held = std::fs::File::open(&source).expect("opened");
        let image = ImageIdentity::of(&held).expect("looked");
        std::fs::write(behind.join("other"), b"other").expect("written");
        std::fs::rename(behind.join("other"), behind.join("second")).expect("replaced");
        std::thread::sleep(std::time::Duration::from_millis(1100));
        let identity = image.as_source(SourceIdentity::of(&held, &source).expect("looked"));
        let retiring = Retiring { identity: Some(&identity), ..Retiring::by_name(&source, 7) };
        let error = retire_source(&retiring, directory.path()).expect_err("it is another one");
        assert!(matches!(error, TargetError::OtherSource { .. }), "{error}");
        assert_eq!(std::fs::read(&source).expect("untouched"), b"other");
        std::fs::remove_file(&source).expect("removed");
    }
}

#[test]
fn what_keeps_a_source_from_being_put_away_is_told_before() {
    let directory = directory();
    let source = directory.path().join("source");
    std::fs::write(&source, b"disk").expect("written");
    let retiring = Retiring::by_name(&source, 7);
    let is_refused = |part: &str| {
        let obstacle = retiring.obstacle().expect("something is in the way").to_string();
        assert!(obstacle.contains(part), "{obstacle}");
        let error = retire_source(&retiring, directory.path()).expect_err("it cannot be renamed");
        assert!(!part.contains("chattr") || error.to_string().contains(part), "{error}");
    };
    assert_eq!(retiring.obstacle(), None);
    for (path, name) in [(&source, 'i'), (&source, 'a'), (&directory.path().to_owned(), 'i')] {
        let _attribute = Attribute::of(path, name);
        is_refused(&format!("chattr -{name} {}", path.display()));
    }
    let path = source.to_str().expect("a plain name");
    run("mount", &["--bind", path, path]);
    is_refused("mount point");
    run("umount", &[path]);
    std::fs::write(directory.path().join("source.moved-7"), b"other").expect("written");
    is_refused("source.moved-7 already");
    let small = SmallFileSystem::in_memory();
    let long = small.directory.path().join("n".repeat(250));
    std::fs::write(&long, b"disk").expect("written");
    let obstacle = Retiring::by_name(&long, 7).obstacle().expect("the name is too long");
    assert!(obstacle.what().contains("longer than 255"), "{obstacle}");
    small.remount("ro");
    let source = small.directory.path().join("source");
    assert_eq!(Retiring::by_name(&source, 7).obstacle(), None, "it is not there");
}

#[test]
fn a_sticky_directory_of_another_user_is_told_before() {
    let directory = directory();
    let source = directory.path().join("source");
    std::fs::write(&source, b"disk").expect("written");
    let owned_by_other = |path: &Path| std::os::unix::fs::chown(path, Some(1234), None).expect("chown, as root");
    owned_by_other(&source);
    owned_by_other(directory.path());
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o1777)).expect("chmod");
    let retiring = Retiring::by_name(&source, 7);
    assert_eq!(retiring.obstacle(), None, "root may");
    without(CapabilitySet::FOWNER, || {
        let obstacle = retiring.obstacle().expect("it is another user's");
        assert!(obstacle.what().contains("sticky"), "{obstacle}");
        retire_source(&retiring, directory.path()).expect_err("it cannot be renamed");
    });
    owned_by_other(directory.path());
}

#[test]
fn a_source_is_known_by_its_identity_whatever_its_name_leads_to_by_then() {
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    let (source, target, link) = (path("source"), path("target"), path("link"));
    std::fs::write(&source, b"old").expect("written");
    std::fs::write(&target, b"live").expect("written");
    symlink("source", &link).expect("a symlink");
    let identity = SourceIdentity::of(&std::fs::File::open(&link).expect("opened"), &link).expect("looked");
    let known = Retiring { path: &link, identity: Some(&identity), holder: Some(&target), epoch: 7, volume: None };

    // What a configuration hook does.
    std::fs::remove_file(&link).expect("removed");
    symlink("target", &link).expect("a symlink");
    let by_name = Retiring { identity: None, ..known };
    let error = retire_source(&by_name, directory.path()).expect_err("put the live target away");
    assert!(matches!(error, TargetError::OtherSource { .. }), "{error}");
    retire_source(&known, directory.path()).expect("renamed").delete().expect("deleted");
    assert!(is_deleted(&known).expect("looked") && !source.exists());
    assert_eq!(std::fs::read(&target).expect("the target stays"), b"live");

    // A VM that runs on it keeps it.
    let identity = SourceIdentity::of(&std::fs::File::open(&target).expect("opened"), &target).expect("looked");
    let used = Retiring { path: &target, identity: Some(&identity), holder: None, epoch: 7, volume: None };
    let locks = QemuLocks::take(&target).expect("free");
    let error = retire_source(&used, directory.path()).expect_err("put a running VM's image away");
    assert!(matches!(error, TargetError::InUse { .. }), "{error}");
    drop(locks);

    // Another file has the source's own name: it is left, and what was renamed before is found all the same.
    std::fs::write(&source, b"old").expect("written");
    let identity = SourceIdentity::of(&std::fs::File::open(&source).expect("opened"), &source).expect("looked");
    let known = Retiring { path: &source, identity: Some(&identity), holder: Some(&target), epoch: 8, volume: None };
    std::fs::rename(&source, path("elsewhere")).expect("renamed");
    symlink("target", &source).expect("a symlink");
    let error = retire_source(&known, directory.path()).expect_err("put another file away");
    assert!(matches!(error, TargetError::OtherSource { .. }), "{error}");
    std::fs::rename(path("elsewhere"), path("source.moved-8")).expect("renamed");
    assert!(matches!(retire_source(&known, directory.path()), Ok(Retired::File { .. })), "it was done before");
    assert_eq!(std::fs::read(&source).expect("the link stays"), b"live");
}

#[test]
fn deleting_a_large_retired_file_leaves_nothing_but_what_has_another_name() {
    let directory = directory();
    let (source, other) = (directory.path().join("source"), directory.path().join("other"));
    file_of(&source, 100 << 20);
    retire_source(&Retiring::by_name(&source, 1), directory.path()).expect("renamed").delete().expect("deleted");
    assert!(is_deleted(&Retiring::by_name(&source, 1)).expect("looked"));

    file_of(&source, 100 << 20);
    std::fs::hard_link(&source, &other).expect("linked");
    retire_source(&Retiring::by_name(&source, 2), directory.path()).expect("renamed").delete().expect("deleted");
    assert!(is_deleted(&Retiring::by_name(&source, 2)).expect("looked"));
    assert_eq!(std::fs::metadata(&other).expect("there").len(), 100 << 20, "the other name has lost its bytes");
}

#[tokio::test]
async fn what_a_tombstone_says_is_read_from_the_device() {
    let directory = directory();
    let backing = directory.path().join("backing");
    file_of(&backing, 1 << 20);
    let device = Loop::over(&backing, &[]);
    for (epoch, volume) in [(7, None), (8, Some("web1"))] {
        let source = Retiring { volume, ..Retiring::by_name(&device.path, epoch) };
        let retired = retire_source(&source, directory.path()).expect("marked");
        let opened =
            FileBackend::open(&BackendSpec::file(&device.path), &OpenOptions::default(), &RealEnv::new()).await;
        let opened = opened.expect("it opens");
        let found = opened.tombstone().await.expect("read").expect("it carries one");
        assert_eq!((found.epoch, found.volume.as_deref()), (epoch, volume));
        let own = opened.device_names().expect("known");
        assert_eq!(found.is_of(&own), Some(true), "{own:?}");
        let other = directory.path().join("other");
        file_of(&other, 1 << 20);
        let other = Loop::over(&other, &[]);
        let other = FileBackend::open(&BackendSpec::file(&other.path), &OpenOptions::default(), &RealEnv::new()).await;
        assert_eq!(found.is_of(&other.expect("it opens").device_names().expect("known")), Some(false));
        retired.restore().expect("restored");
    }
    let opened = FileBackend::open(&BackendSpec::file(&device.path), &OpenOptions::default(), &RealEnv::new()).await;
    assert_eq!(opened.expect("it opens").tombstone().await.expect("read"), None);
}

#[test]
fn a_retired_block_device_has_a_tombstone_and_can_be_restored() {
    let directory = directory();
    let backing = directory.path().join("backing");
    let bytes: Vec<u8> = (0..1 << 20).map(|number: u32| (number % 251) as u8).collect();
    std::fs::write(&backing, &bytes).expect("written");
    let device = Loop::over(&backing, &[]);
    let retired = retire_source(&Retiring::by_name(&device.path, 7), directory.path()).expect("marked");
    let now = std::fs::read(&device.path).expect("readable");
    assert!(now.starts_with(b"TRANSHUME MOVED\n\x07\0\0\0\0\0\0\0") && now[4096..] != bytes[4096..]);
    assert_eq!(now[4096..(1 << 20) - 4096], bytes[4096..(1 << 20) - 4096]);
    assert_eq!(
        retire_source(&Retiring::by_name(&device.path, 7), directory.path()).expect("again does no harm"),
        retired
    );
    assert!(matches!(retired, Retired::BlockDevice { .. }));
    retired.restore().expect("restored");
    assert_eq!(std::fs::read(&device.path).expect("readable"), bytes);
}
