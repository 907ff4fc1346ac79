//! QEMUs that run on the host and are not known are shown with the command that adds them.

use std::path::Path;

use serde_json::Value;
use transhume_guest::{Daemon, Disk, Guest, GuestSpec, create_filled};

#[test]
fn a_qemu_that_nobody_has_added_is_found_with_the_command_that_adds_it() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
    let mut daemon = Daemon::new(programs, folder.path());
    daemon.start().expect("it starts");
    let file = folder.path().join("disk0.raw");
    create_filled(&file, 1 << 20).expect("filled");
    let name = format!("found-{}", std::process::id());
    let spec = GuestSpec::new().disk(Disk::raw(&file, "disk0")).arguments(["-name", &name]).script("sleep 1000");
    let guest = Guest::boot(spec).expect("QEMU starts; run `make setup`");
    let find = || {
        let found = daemon.json(&["vm", "ls", "--found"]).expect("it answers");
        let all = found.as_array().cloned().unwrap_or_default();
        all.into_iter().find(|one| one["name"].as_str().is_some_and(|found| found.starts_with(&name)))
    };
    let found = find().expect("it is found");
    let own = guest.qmp_socket().parent().expect("in a folder").display().to_string();
    let command = found["hint"].as_str().expect("there is a command").to_owned();
    assert!(command.starts_with(&format!("transhume vm add {name} --qmp {own}/")), "{found}");
    assert!(found["pid"].as_u64().is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists()), "{found}");

    let words: Vec<&str> = command.split(' ').skip(1).collect();
    let added = daemon.json(&words).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.log()));
    assert_eq!((&added["name"], &added["disks"].as_array().map(Vec::len)), (&Value::from(name.as_str()), &Some(1)));
    assert_eq!(find(), None, "it is known by now");
}
