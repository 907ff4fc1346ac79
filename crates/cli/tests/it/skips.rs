//! Moves that skip zeroes.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::support::{World, same, target, tool};
use serde_json::Value;

const SIZE: u64 = 48 << 20;
/// Where the image holds zeroes that were written.
const ZEROES: std::ops::Range<u64> = 16 << 20..40 << 20;

/// An image of data, zeroes that were written, and a hole.
fn image(world: &World, name: &str) -> PathBuf {
    let path = world.image(name, SIZE, 64 << 20);
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("opened");
    let data: Vec<u8> =
        (0..4_u32 << 18).flat_map(|word| (word | 1).wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    (0..4).for_each(|part| file.write_all_at(&data, part << 22).expect("written"));
    let zeroes = vec![0; 1 << 20];
    ZEROES.step_by(zeroes.len()).for_each(|at| file.write_all_at(&zeroes, at).expect("written"));
    file.sync_all().expect("synced");
    path
}

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).expect("it is there").blocks() * 512
}

fn skipped(report: &Value, why: &str) -> u64 {
    report["skipped"][why].as_u64().unwrap_or(0)
}

#[test]
fn zeroes_that_were_written_are_skipped_and_take_no_space_at_the_target() {
    let world = World::new();
    let image = image(&world, "disk.img");
    assert!(allocated(&image) >= ZEROES.end, "the zeroes are no holes");
    let expected = std::fs::read(&image).expect("read");
    world.attach("x", &image);
    let to = world.path("new.img");
    let report = world.json(&["move", "x", "--to", &target(&to), "--verify", "full", "--skip-zero"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    same(&to, &expected);
    let digest = tool("b3sum", &["--no-names", &to.display().to_string()]);
    assert_eq!(report["digest"], digest.trim(), "the digest is not that of the target");
    assert_eq!(skipped(&report, "zero"), ZEROES.end - ZEROES.start, "{report}");
    assert_eq!(skipped(&report, "hole"), SIZE - ZEROES.end, "{report}");
    assert!(allocated(&to) < 17 << 20, "{} are allocated", allocated(&to));
}

#[test]
fn zeroes_are_written_over_what_a_target_holds() {
    let world = World::new();
    let image = image(&world, "disk.img");
    let expected = std::fs::read(&image).expect("read");
    world.attach("x", &image);
    let to = world.path("new.img");
    std::fs::write(&to, vec![0xa5; SIZE as usize]).expect("written");
    let report = world.json(&["move", "x", "--to", &target(&to), "--verify", "full", "--skip-zero", "--overwrite"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    assert_eq!(skipped(&report, "zero"), ZEROES.end - ZEROES.start, "{report}");
    same(&to, &expected);
}
