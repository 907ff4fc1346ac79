//! What is this host's own is nobody else's place, by whatever file system or device it is reached.

use std::path::Path;

use crate::support::fuse::{self, FuseDevice};
use crate::support::{World, target, tool};

const BYTES: u64 = 1 << 20;

/// The names of what is in the folder.
fn names_in(folder: &Path) -> Vec<String> {
    let found = std::fs::read_dir(folder).expect("a folder").map(|file| file.expect("read").file_name());
    let mut names: Vec<String> = found.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn an_image_is_not_written_over_under_its_name_in_another_file_system() {
    if let Some(why) = fuse::is_missing() {
        eprintln!("left out: {why}");
        return;
    }
    let world = World::new();
    let far = FuseDevice::new(&world, BYTES);
    let folder = far.file.parent().expect("in a folder").to_owned();
    std::fs::write(&far.file, vec![7; BYTES as usize]).expect("written");
    world.attach("x", &far.through());
    let other = world.image("other.img", BYTES, 65536);
    world.attach("y", &other);
    let itself = target(&far.file);
    world.refused(&["move", "x", "--to", &itself, "--overwrite"], 12, "is the source itself");
    let plan = world.json(&["plan", "x", "--to", &itself, "--overwrite"]);
    assert!(plan["refusal"].to_string().contains("is the source itself"), "{plan}");
    world.refused(&["move", "y", "--to", &itself, "--overwrite"], 8, "where the volume x is");
    world.refused(&["cache", "create", "ssd", "--store", &itself], 8, "where the volume x is");
    // Where the folder shows no mark, what is not known is not tried.
    tool("chattr", &["+i", &folder.display().to_string()]);
    let refused = world.run(&["move", "y", "--to", &itself, "--overwrite"]);
    tool("chattr", &["-i", &folder.display().to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(8) && said.contains("is not known: no file can be made"), "{said}");
    assert!(std::fs::read(&far.file).expect("read").iter().all(|byte| *byte == 7), "the volume was written over");
    // Another file of that folder is one that may be written over.
    let free = folder.join("free.img");
    std::fs::write(&free, vec![8; BYTES as usize]).expect("written");
    assert_eq!(world.json(&["move", "y", "--to", &target(&free), "--overwrite"])["state"], "done");
    assert_eq!(names_in(&folder), ["far.img", "free.img"], "a mark is left");
    world.json(&["volume", "detach", "x"]);
}

#[test]
fn a_store_and_a_target_on_one_file_are_refused_whichever_comes_first() {
    let world = World::new();
    let store = world.path("store");
    std::fs::File::create(&store).and_then(|file| file.set_len(8 << 20)).expect("made");
    let device = tool("losetup", &["--find", "--show", &store.display().to_string()]);
    let device = device.trim();
    let image = world.image("disk.img", BYTES, 65536);
    world.attach("x", &image);
    let refused = |words: &[&str], part: &str| world.refused(words, 8, part);
    let (of_store, of_device) = (target(&store), format!("file:{device}"));
    let both = ["surrogate", "create", "fast", "--store", &of_store, "--store", &of_device];
    refused(&both, "a store of a surrogate");
    world.json(&["cache", "create", "ssd", "--store", &of_store]);
    for place in [&of_store, &of_device] {
        refused(&["move", "x", "--to", place, "--overwrite"], "a store of a cache");
        let uri = format!("nbd+unix:///z?socket={}", world.text("z.sock"));
        refused(&["volume", "attach", "z", "--backend", place, "--export", &uri], "a store of a cache");
    }
    refused(&["surrogate", "create", "fast", "--store", &of_device], "a store of a cache");
    tool("losetup", &["--detach", device]);
}

#[test]
fn of_two_moves_at_once_to_one_file_by_two_devices_one_is_refused() {
    let world = World::new();
    let blank = world.path("blank");
    std::fs::File::create(&blank).and_then(|file| file.set_len(BYTES)).expect("made");
    let devices = [(); 2].map(|()| tool("losetup", &["--find", "--show", &blank.display().to_string()]));
    for name in ["x", "y"] {
        world.attach(name, &world.image(&format!("{name}.img"), BYTES, 65536));
    }
    let codes = std::thread::scope(|scope| {
        let moves = ["x", "y"].into_iter().zip(&devices).map(|(name, device)| {
            let to = format!("file:{}", device.trim());
            let world = &world;
            scope.spawn(move || world.run(&["move", name, "--to", &to]).status.code())
        });
        let moves: Vec<_> = moves.collect();
        let mut codes: Vec<_> = moves.into_iter().map(|one| one.join().expect("it ends")).collect();
        codes.sort_unstable();
        codes
    });
    assert_eq!(codes, [Some(0), Some(8)], "both have come to one file");
    for device in &devices {
        tool("losetup", &["--detach", device.trim()]);
    }
}
