//! Moves within a file system whose files can share blocks.

use std::path::{Path, PathBuf};

use crate::support::load::Load;
use crate::support::{World, tool};

/// An XFS in a file of the world's directory, gone when this is dropped.
struct Xfs(PathBuf);

impl Xfs {
    fn new(world: &World) -> Self {
        let (image, at) = (world.path("xfs.img"), world.path("xfs"));
        std::fs::File::create(&image).and_then(|file| file.set_len(400 << 20)).expect("created");
        std::fs::create_dir(&at).expect("created");
        tool("mkfs.xfs", &["-q", "-m", "reflink=1", &image.display().to_string()]);
        tool("mount", &["-o", "loop", &image.display().to_string(), &at.display().to_string()]);
        Self(at)
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        tool("umount", &["--lazy", &self.0.display().to_string()]);
    }
}

fn shared_bytes(path: &Path) -> u64 {
    let listed = tool("filefrag", &["-v", "-b4096", &path.display().to_string()]);
    let shared = listed.lines().filter(|line| line.contains("shared"));
    shared.filter_map(|line| line.split(':').nth(3)?.trim().parse::<u64>().ok()).sum::<u64>() * 4096
}

#[test]
fn a_move_within_a_file_system_that_shares_blocks_copies_none_and_is_compared_all_the_same() {
    for cache in ["direct", "page"] {
        let mut world = World::new();
        let xfs = Xfs::new(&world);
        let image = world.image("xfs/disk.img", (48 << 20) + 512, 1 << 18);
        let uri = format!("nbd+unix:///x?socket={}", world.text("x.sock"));
        let backend = format!("file:{},cache={cache}", image.display());
        world.json(&["volume", "attach", "x", "--backend", &backend, "--export", &uri]);
        let load = Load::start(&uri, &image, 40);
        let to = xfs.0.join("new.img");
        let target = format!("file:{},cache={cache}", to.display());
        // Slow enough for the guest to meet the copy.
        let report = world.json(&["move", "x", "--to", &target, "--verify", "full", "--bandwidth", "48MiB/s"]);
        assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
        let (copied, offloaded) = (report["bytes_copied"].as_u64(), report["bytes_offloaded"].as_u64());
        assert!(offloaded > copied.map(|copied| copied * 3 / 4), "{cache}: little was offloaded: {report}");
        let expected = load.finish();
        assert!(std::fs::read(&to).expect("read") == expected, "{cache}: the target is not what the guest wrote");
        assert!(shared_bytes(&to) > 4 << 20, "{cache}: the two files share next to nothing");
        world.terminate();
    }
}

#[test]
fn zeroes_that_are_skipped_are_not_shared_and_the_rest_is() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let world = World::new();
    let xfs = Xfs::new(&world);
    // Zeroes that were written behind 256 KiB of data in each MiB of the first half.
    let image = world.image("xfs/disk.img", 32 << 20, 1 << 20);
    let file = std::fs::OpenOptions::new().write(true).open(&image).expect("opened");
    let zeroes = vec![0; (1 << 20) - (256 << 10)];
    (0..16).for_each(|mib| file.write_all_at(&zeroes, (mib << 20) + (256 << 10)).expect("written"));
    file.sync_all().expect("synced");
    let expected = std::fs::read(&image).expect("read");
    world.attach("x", &image);
    let moved = |name: &str, flags: &[&str]| {
        let to = xfs.0.join(name);
        let target = format!("file:{}", to.display());
        let report = world.json(&[&["move", "x", "--to", &target, "--verify", "full"], flags].concat());
        assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
        assert!(report["bytes_offloaded"].as_u64() > Some(0), "nothing was shared: {report}");
        assert!(std::fs::read(&to).expect("read") == expected, "{name} is not what the image was");
        tool("sync", &["-f", &to.display().to_string()]);
        let skipped = report["skipped"]["zero"].as_u64().unwrap_or(0);
        (std::fs::metadata(&to).expect("it is there").blocks() * 512, skipped)
    };
    let ((without, nothing), (with, skipped)) = (moved("without.img", &[]), moved("with.img", &["--skip-zero"]));
    assert_eq!((nothing, skipped), (0, 16 * zeroes.len() as u64));
    assert!(with + skipped <= without, "{with} bytes are allocated, and {without} without skipping");
}
