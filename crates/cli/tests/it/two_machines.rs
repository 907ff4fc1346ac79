//! Two hosts in networks of their own, a Linux guest under QEMU on each, and their disks, which change places.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use transhume_guest::{Disk, Event, Guest, GuestSpec, Load, Side, TwoHosts, TwoHostsSpec, create_filled};

const DISK_BYTES: u64 = 32 << 20;
const HANG: Duration = Duration::from_secs(120);

/// A guest with a verifying load on a disk of its own, which its host's daemon has adopted.
fn machine(hosts: &TwoHosts, folder: &Path, side: Side) -> Guest {
    let file: PathBuf = folder.join(side.name()).join("disk.raw");
    create_filled(&file, DISK_BYTES).expect("filled");
    let load = Load {
        is_prefilled: true,
        rate: 300,
        workers: 4,
        read_percent: 50,
        seed: if side == Side::A { 1 } else { 2 },
        ..Load::default()
    };
    let spec = GuestSpec::new().disk(Disk::raw(&file, "data")).load(load);
    let mut guest = Guest::boot(spec).expect("QEMU starts; run `make setup`");
    guest.wait_for_load(HANG).expect("the load begins");
    let qmp = guest.qmp_socket().display().to_string();
    hosts.daemon(side).json(&["adopt", "--qmp", &qmp, "--node", "data", "--name", &volume(side)]).expect("adopted");
    guest
}

/// What the disk of a side's machine is called.
fn volume(side: Side) -> String {
    format!("disk-of-{}", side.name())
}

/// The guest reads its whole disk, and everything is as it was written.
fn verify(guest: &mut Guest) {
    guest.send("verify").expect("sent");
    guest.wait_until(HANG, |event| matches!(event, Event::Verified { .. })).expect("it reads everything");
    let load_result = guest.load_result();
    assert!(load_result.wrong == 0 && load_result.complaints.is_empty(), "{load_result:?}");
}

#[test]
fn two_machines_change_disks_over_links_that_are_cut_and_daemons_that_die_and_read_what_they_have_written() {
    let folder = tempfile::Builder::new().prefix("tm").tempdir().expect("a temporary directory");
    let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
    let spec = TwoHostsSpec { links: 2, link_bits_per_second: Some(200_000_000), ..TwoHostsSpec::default() };
    let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
    hosts.start().expect("both daemons start");
    hosts.pair().expect("paired");
    let mut guests = Side::BOTH.map(|side| machine(&hosts, folder.path(), side));

    let jobs = Side::BOTH.map(|side| {
        let words =
            ["move", &volume(side), "--to", side.other().name(), "--no-persist", "--verify", "full", "--detach"];
        let job = hosts.daemon(side).json(&words).expect("begun");
        job["id"].as_u64().expect("a number")
    });
    std::thread::sleep(Duration::from_millis(300));
    (0..2).for_each(|link| hosts.cut(link).expect("cut"));
    std::thread::sleep(Duration::from_secs(1));
    (0..2).for_each(|link| hosts.mend(link).expect("mended"));
    for (side, id) in Side::BOTH.into_iter().zip(jobs) {
        let job = hosts.daemon(side).wait_for_job(id).expect("over");
        assert_eq!((&job["state"], &job["report"]["equal"]), (&"done".into(), &Value::Bool(true)), "{job}");
    }
    guests.iter_mut().for_each(verify);

    // Each guest now works through its own host's daemon on the other one's disk, and both of those die.
    for side in Side::BOTH {
        hosts.daemon_mut(side).kill();
        std::thread::sleep(Duration::from_millis(200));
        hosts.daemon_mut(side).start().expect("it comes back");
    }
    guests.iter_mut().for_each(verify);
    for (side, mut guest) in Side::BOTH.into_iter().zip(guests) {
        let there = hosts.daemon(side.other()).json(&["volume", "show", &volume(side)]).expect("it is there");
        assert_eq!(there["state"], "serving", "{there}");
        let load_result = guest.finish(HANG).expect("the load ends");
        assert!(load_result.is_right(), "{load_result:?}");
    }
}
