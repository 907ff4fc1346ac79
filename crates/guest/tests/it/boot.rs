//! The guest itself: it boots, its load runs and verifies, and its load finds what is wrong.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use transhume_guest::{Bus, Disk, Event, Guest, GuestSpec, Load, create_filled};

const PATIENCE: Duration = Duration::from_secs(120);
const SIZE: u64 = 16 << 20;

fn short_load() -> Load {
    Load { is_prefilled: true, interval_ms: 100, ..Load::default() }
}

#[test]
fn a_guest_boots_runs_its_load_verifies_its_disk_and_powers_off() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    create_filled(&path, SIZE).unwrap();
    let mut guest = Guest::boot(GuestSpec::new().disk(Disk::raw(&path, "data")).load(short_load())).unwrap();
    let private = guest.folder().to_owned();
    guest.wait_until_booted(PATIENCE).unwrap();
    guest.wait_for_load(PATIENCE).unwrap();
    guest.wait_until(PATIENCE, |event| matches!(event, Event::Interval(interval) if interval.writes > 0)).unwrap();
    let load_result = guest.finish(PATIENCE).unwrap();
    assert!(load_result.is_right(), "{load_result:?}");
    assert_eq!(load_result.blocks, SIZE / 4096);
    assert!(load_result.slots_rewritten > 0, "the load wrote nothing");
    assert!(!guest.is_running());
    drop(guest);
    assert!(!private.exists(), "the guest left files behind");
}

#[test]
fn a_block_that_changes_behind_the_guests_back_is_found_by_the_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    create_filled(&path, SIZE).unwrap();
    let load = Load { read_percent: 100, ..short_load() };
    let mut guest = Guest::boot(GuestSpec::new().disk(Disk::raw(&path, "data")).load(load)).unwrap();
    guest.wait_for_load(PATIENCE).unwrap();
    let disk = std::fs::File::options().write(true).open(&path).unwrap();
    disk.write_all_at(&[0; 4096], 5 * 4096).unwrap();
    let load_result = guest.finish(PATIENCE).unwrap();
    assert!(!load_result.is_right());
    let complaint = "block=5 expected=1 Zeroes";
    assert!(load_result.complaints.iter().any(|found| found == complaint), "{load_result:?}");
}

#[test]
fn disks_attach_by_drive_by_scsi_and_with_an_iothread() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("a.raw"), folder.path().join("b.raw"));
    create_filled(&first, SIZE).unwrap();
    create_filled(&second, SIZE).unwrap();
    let spec = GuestSpec::new()
        .iothread()
        .disk(Disk::raw(&first, "one").with_drive("cache=none,discard=unmap"))
        .disk(Disk::raw(&second, "two").bus(Bus::VirtioScsi))
        .script("ls /dev/vda /dev/sda && echo both; read word; echo \"got $word\"");
    let mut guest = Guest::boot(spec).unwrap();
    guest.wait_until(PATIENCE, |event| *event == Event::Line("both".into())).unwrap();
    guest.send("hello").unwrap();
    guest.wait_until(PATIENCE, |event| *event == Event::Line("got hello".into())).unwrap();
    guest.wait_for_exit(PATIENCE).unwrap();
}
