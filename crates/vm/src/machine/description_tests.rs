//! What becomes of a command line.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::error::{Error, ErrorKind};
use crate::options::CommandLine;
use crate::plan::RECONNECT_SECONDS;

fn disk(node: &str, image: &str) -> TargetDisk {
    let export = ExportAddress { socket: "/run/t/a,b".into(), name: "web".to_owned() };
    TargetDisk { image: image.to_owned(), node: node.to_owned(), format: Some("raw".to_owned()), export }
}

fn places(disks: Vec<TargetDisk>) -> TargetPlaces {
    TargetPlaces { folder: "/run/vm".into(), disks, machine_type: None, memory: Vec::new() }
}

fn moved(words: &[&str], places: &TargetPlaces) -> Result<TargetCommand> {
    let words = words.iter().map(|word| (*word).to_owned()).collect();
    MachineDescription { program: "/usr/bin/qemu-system-x86_64".to_owned(), words }.for_target(places)
}

/// The words without those that every target has.
fn kept(command: &TargetCommand) -> Vec<String> {
    let ours = ["-S", "-incoming", "defer", "-qmp", "unix:/run/vm/transhume.qmp,server=on,wait=off"];
    let (kept, added) = command.words.split_at(command.words.len() - ours.len());
    assert_eq!(added, ours);
    kept.to_vec()
}

/// What becomes of words without disks; the display is none of theirs.
fn words(words: &[&str]) -> Vec<String> {
    let headless = [&["-display", "none"], words].concat();
    kept(&moved(&headless, &places(Vec::new())).expect("it can go"))[2..].to_vec()
}

fn refused(words: &[&str]) -> Error {
    let error = moved(words, &places(Vec::new())).expect_err("it went");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    error
}

fn blockdev(command: &TargetCommand, name: &str) -> Value {
    Value::Object(CommandLine::parse(&command.words).blockdev(name).expect("the node is there").clone())
}

#[test]
fn a_blockdev_is_opened_through_its_export_in_both_forms_and_keeps_what_an_export_has() {
    let file = json!({
        "driver": "file", "node-name": "f0", "filename": "/img/a", "aio": "native", "locking": "on",
        "discard": "unmap", "cache": { "direct": true }, "auto-read-only": true,
    });
    let format = "driver=qcow2,node-name=disk0,file=f0,discard=unmap";
    let given = [
        "-display",
        "none",
        "-blockdev",
        &file.to_string(),
        "-blockdev",
        format,
        "-blockdev",
        "file,node-name=f1,filename=/img/b,,c,cache.direct=on,locking=off",
    ];
    let other =
        TargetDisk { export: ExportAddress { socket: "/run/t/x".into(), name: "two".into() }, ..disk("f1", "") };
    let command = moved(&given, &places(vec![disk("disk0", "/img/a"), other])).expect("it can go");
    let expected = json!({
        "driver": "nbd", "node-name": "f0", "server": { "type": "unix", "path": "/run/t/a,b" }, "export": "web",
        "reconnect-delay": RECONNECT_SECONDS, "discard": "unmap", "cache": { "direct": true }, "auto-read-only": true,
    });
    assert_eq!(blockdev(&command, "f0"), expected);
    assert!(command.words.contains(&format.to_owned()), "{:?}", command.words);
    let expected = json!({
        "driver": "nbd", "node-name": "f1", "server": { "type": "unix", "path": "/run/t/x" }, "export": "two",
        "reconnect-delay": RECONNECT_SECONDS.to_string(), "cache": { "direct": "on" },
    });
    assert_eq!(blockdev(&command, "f1"), expected);
    let change = &command.changes[0];
    assert_eq!((change.option.as_str(), &change.from), ("-blockdev", &file.to_string()));
    assert!(change.why.contains("aio, locking"), "{change:?}");
}

#[test]
fn a_file_within_its_format_node_is_found_by_either_name_and_a_moved_disk_by_its_node() {
    let inline = json!({
        "driver": "raw", "node-name": "disk0",
        "file": { "driver": "file", "filename": "/img/a", "aio": "threads" },
    });
    let inline = inline.to_string();
    for named in [disk("disk0", ""), disk("", "/img/a"), disk("other", "/img/a"), disk("disk0", "/moved")] {
        let command = moved(&["-blockdev", &inline], &places(vec![named])).expect("it can go");
        let node = blockdev(&command, "disk0");
        assert_eq!((&node["driver"], &node["file"]["export"]), (&json!("raw"), &json!("web")));
        assert!(node["file"].get("filename").is_none() && node["file"].get("aio").is_none(), "{node}");
    }
    let missing = moved(&["-blockdev", &inline], &places(vec![disk("disk1", "/img/b")])).expect_err("found");
    assert!(missing.kind() == ErrorKind::NotFound && missing.to_string().contains("hook"), "{missing}");
    let twice =
        moved(&["-blockdev", &inline], &places(vec![disk("disk0", ""), disk("", "/img/a")])).expect_err("twice");
    assert_eq!(twice.kind(), ErrorKind::Invalid, "{twice}");
    // At the next move the command line has an export where the file was.
    let once = moved(&["-blockdev", &inline], &places(vec![disk("disk0", "")])).expect("it can go");
    let again = MachineDescription { program: once.program.clone(), words: once.words.clone() };
    let twice = again.for_target(&places(vec![disk("disk0", "/anything")])).expect("it can go again");
    assert_eq!(twice.words, once.words);
    let left = again.for_target(&places(Vec::new())).expect_err("the export is not there");
    assert_eq!(left.kind(), ErrorKind::Refused, "{left}");
}

#[test]
fn a_drive_keeps_all_but_its_file() {
    const NBD: &str = "file.driver=nbd,file.server.type=unix,file.server.path=/run/t/a,,b,file.export=web";
    let end = format!("{NBD},file.reconnect-delay={RECONNECT_SECONDS}");
    let cases = [
        ("file=/img/a,if=none,id=d0,aio=native,cache=none,format=raw", "if=none,id=d0,cache=none,format=raw,"),
        (
            "/img/a,if=virtio,file.locking=off,file.discard=unmap",
            "if=virtio,file.discard=unmap,format=raw,node-name=d0,",
        ),
        ("file.driver=file,file.filename=/img/a,id=d0,serial=x,,y", "id=d0,serial=x,,y,format=raw,"),
        ("file=/img/a,id=d0,driver=qcow2", "id=d0,driver=qcow2,"),
    ];
    for (given, rest) in cases {
        let command = moved(&["-nographic", "-drive", given], &places(vec![disk("d0", "/img/a")])).expect("it can go");
        assert_eq!(kept(&command)[2], format!("{rest}{end}"), "{given}");
    }
    for given in [&["-hdb", "/img/a"][..], &["--drive", "index=1,media=disk,file=/img/a"]] {
        let command = moved(given, &places(vec![disk("", "/img/a")])).expect("it can go");
        assert_eq!(
            kept(&command)[..2],
            ["-drive".to_owned(), format!("index=1,media=disk,format=raw,{end}")],
            "{given:?}"
        );
    }
    let command = moved(&["/img/a"], &places(vec![disk("", "/img/a")])).expect("an image alone is -hda");
    assert_eq!(kept(&command)[..2], ["-drive".to_owned(), format!("index=0,media=disk,format=raw,{end}")]);
}

/// What QEMU names has another name in each QEMU. By the name on record the disk is found when the machine moves on, or back.
#[test]
fn a_drive_that_nobody_has_named_has_the_name_on_record_at_the_target() {
    let given = ["-nographic", "-drive", "file=/img/a,if=virtio,format=qcow2"];
    let there = moved(&given, &places(vec![disk("th-web-fmt", "/img/a")])).expect("it can go");
    assert!(kept(&there)[2].contains("node-name=th-web-fmt"), "{:?}", there.words);
    let again = MachineDescription { program: there.program.clone(), words: there.words.clone() };
    let back = again.for_target(&places(vec![disk("th-web-fmt", "/elsewhere")])).expect("it is found by its name");
    assert_eq!(kept(&back)[2], kept(&there)[2]);
    for unnamed in ["#block12", "", "a name", "th-of-more-than-thirty-one-letters"] {
        let there = moved(&given, &places(vec![disk(unnamed, "/img/a")])).expect("it can go");
        assert!(!kept(&there)[2].contains("node-name"), "{unnamed}");
    }
    let named = ["-nographic", "-drive", "file=/img/a,id=d0,format=raw,node-name=own"];
    let there = moved(&named, &places(vec![disk("own", "/img/a")])).expect("it can go");
    assert_eq!(kept(&there)[2].matches("node-name").count(), 1, "{:?}", there.words);
}

#[test]
fn a_drive_whose_format_nobody_names_does_not_go() {
    let unnamed = TargetDisk { format: None, ..disk("d0", "/img/a") };
    for given in [&["-drive", "file=/img/a,if=virtio"][..], &["-hda", "/img/a"], &["/img/a"]] {
        let error =
            moved(given, &places(vec![unnamed.clone()])).expect_err("the target would look at the guest's bytes");
        assert!(error.kind() == ErrorKind::Refused && error.to_string().contains("format="), "{given:?}: {error}");
    }
    let named = ["-nographic", "-drive", "file=/img/a,if=virtio,format=raw"];
    moved(&named, &places(vec![unnamed])).expect("the command line names it");
}

#[test]
fn what_is_only_read_stays_and_what_is_written_is_not_left_behind() {
    let stay = [
        "-cdrom",
        "/iso/a",
        "-drive",
        "if=pflash,format=raw,readonly=on,file=/fw/code.fd",
        "-drive",
        "media=cdrom,file=/iso/b",
        "-drive",
        "if=none,id=empty",
        "-drive",
        "file=rbd:pool/image,if=virtio",
        "-blockdev",
        r#"{"driver":"file","node-name":"c","filename":"/iso/c","auto-read-only":true}"#,
        "-blockdev",
        "driver=raw,node-name=cd,read-only=on,file=c",
        "-blockdev",
        r#"{"driver":"qcow2","node-name":"q","read-only":true,"file":{"driver":"file","filename":"/d"},"backing":"b"}"#,
        "-blockdev",
        "file,node-name=b,filename=/base",
        "-blockdev",
        "null-co,node-name=n",
    ];
    assert_eq!(words(&stay), stay);
    for written in [
        &["-drive", "if=pflash,format=raw,file=/fw/vars.fd"][..],
        &["-hda", "/fw/vars.fd"],
        &["/fw/vars.fd"],
        &["-blockdev", "file,node-name=v,filename=/fw/vars.fd"],
        &["-blockdev", r#"{"driver":"raw","file":{"driver":"host_device","filename":"/fw/vars.fd"}}"#],
    ] {
        let error = refused(written);
        assert!(error.to_string().contains("/fw/vars.fd"), "{error}");
    }
    refused(&["-drive", "file=nbd+unix:///web?socket=/run/a,readonly=on"]);
    refused(&["-drive", "file=/img/a,snapshot=on"]);
}

#[test]
fn sockets_and_logs_are_in_the_machines_folder_and_nobody_is_at_the_terminal() {
    let cases = [
        (["-qmp", "unix:/a/qmp,server,nowait"], "unix:/run/vm/qmp,server,nowait"),
        (["-monitor", "unix:/a/m,,n,server=on"], "unix:/run/vm/m,,n,server=on,wait=off"),
        (["-chardev", "socket,id=c,path=/a/c,server=on,wait=on"], "socket,id=c,path=/run/vm/c,server=on,wait=off"),
        (["-chardev", "file,id=c,path=/a/log"], "file,id=c,path=/run/vm/log"),
        (["-chardev", "stdio,id=c,mux=on,signal=off"], "null,id=c,mux=on"),
        (["-chardev", "pty,id=c,logfile=/a/log"], "pty,id=c,logfile=/run/vm/log"),
        (["-chardev", "socket,id=c,host=::,port=1,server=on"], "socket,id=c,host=::,port=1,server=on"),
        (["-serial", "file:/a/serial"], "file:/run/vm/serial"),
        (["-serial", "mon:unix:/a/s,server=on,wait=off"], "mon:unix:/run/vm/s,server=on,wait=off"),
        (["-serial", "mon:stdio"], "null"),
        (["-monitor", "stdio"], "none"),
        (["-pidfile", "/a/pid"], "/run/vm/pid"),
        (["-D", "/a/log"], "/run/vm/log"),
        (["-vnc", "unix:/a/vnc,password=on"], "unix:/run/vm/vnc,password=on"),
        (["-vnc", ":1"], ":1"),
        (["-spice", "unix=on,addr=/a/s"], "unix=on,addr=/run/vm/s"),
        (["-display", "gtk,gl=on"], "none"),
        (["-append", "console=stdio unix:/a"], "console=stdio unix:/a"),
    ];
    for (given, expected) in cases {
        assert_eq!(words(&given), [given[0], expected], "{given:?}");
    }
    let same =
        ["-serial", "file:/a/log", "-serial", "file:/b/log", "-serial", "unix:/transhume.qmp,server=on,wait=off"];
    assert_eq!(
        words(&same)[1..],
        [
            "file:/run/vm/log",
            "-serial",
            "file:/run/vm/log-1",
            "-serial",
            "unix:/run/vm/transhume.qmp-1,server=on,wait=off"
        ]
    );
    assert_eq!(words(&["-qmp", "stdio"]), Vec::<String>::new());
    let nographic = ["-nographic", "-serial", "null", "-monitor", "none"];
    assert_eq!(kept(&moved(&["-nographic"], &places(Vec::new())).expect("it can go")), nographic);
    let bare = ["-nographic", "-nodefaults"];
    assert_eq!(kept(&moved(&bare, &places(Vec::new())).expect("it can go")), bare);
    assert_eq!(kept(&moved(&["-curses"], &places(Vec::new())).expect("it can go")), ["-display", "none"]);
    let long = TargetPlaces { folder: format!("/{}", "x".repeat(100)).into(), ..places(Vec::new()) };
    assert_eq!(moved(&[], &long).expect_err("too long").kind(), ErrorKind::Invalid);
}

#[test]
fn the_machine_waits_for_its_memory_and_has_its_versioned_type() {
    let begins = ["-S", "-daemonize", "-incoming", "tcp:0:1", "-loadvm", "x", "-m", "1G"];
    assert_eq!(words(&begins), ["-m", "1G"]);
    let versioned = TargetPlaces { machine_type: Some("pc-q35-7.2".to_owned()), ..places(Vec::new()) };
    for (given, expected) in [
        (&["-nographic", "-machine", "q35,accel=kvm"][..], "pc-q35-7.2,accel=kvm"),
        (&["-nographic", "-M", "accel=kvm,type=q35"], "accel=kvm,type=pc-q35-7.2"),
        (&["-nographic", "-machine", "pc-q35-7.2"], "pc-q35-7.2"),
    ] {
        assert_eq!(kept(&moved(given, &versioned).expect("it can go"))[2], expected);
    }
    let none = moved(&["-display", "none", "-machine", "accel=kvm"], &versioned).expect("it can go");
    assert_eq!(kept(&none)[2..], ["-machine", "accel=kvm", "-machine", "pc-q35-7.2"]);
    assert!(none.changes.iter().any(|change| change.to == "pc-q35-7.2" && change.from.is_empty()));
}

#[test]
fn what_only_this_process_has_is_refused_by_name() {
    for given in [
        ["-netdev", "tap,id=n,fds=3:4"],
        ["-netdev", r#"{"type":"tap","fd":"33","id":"n"}"#],
        ["-netdev", "tap,id=n,vhostfd=5"],
        ["-chardev", "socket,id=c,fd=7"],
        ["-chardev", "socket,id=c,path=/run/vhost-user"],
        ["-add-fd", "fd=3,set=2"],
        ["-object", "secret,id=s,file=/key"],
        ["-object", r#"{"qom-type":"tls-creds-x509","id":"t","dir":"/pki"}"#],
        ["-readconfig", "/a.cfg"],
    ] {
        let error = refused(&given).to_string();
        assert!(error.contains(given[0]) && error.contains("hook"), "{error}");
    }
    let libvirts = ["-object", "secret,id=s,file=/key", "-chardev", "socket,id=charmonitor,fd=22,server=on"];
    assert!(refused(&libvirts).to_string().contains("libvirt"));
    assert_eq!(words(&["-object", "secret,id=s,data=x"]), ["-object", "secret,id=s,data=x"]);
}

#[test]
fn a_memory_lies_where_the_target_has_made_its_file() {
    let memory = |id: &str| TargetMemory { id: id.to_owned(), path: "/dev/shm/there,1".into() };
    let places = |id: &str| TargetPlaces { memory: vec![memory(id)], ..places(Vec::new()) };
    let plain = "memory-backend-file,id=ram,size=1G,share=on,mem-path=/dev/shm/here";
    let command = moved(&["-display", "none", "-object", plain, "-object", "rng-random,id=ram"], &places("ram"))
        .expect("it can go");
    let expected = "memory-backend-file,id=ram,size=1G,share=on,mem-path=/dev/shm/there,,1";
    assert_eq!(kept(&command)[2..], ["-object", expected, "-object", "rng-random,id=ram"]);
    let object = json!({ "qom-type": "memory-backend-file", "id": "ram", "mem-path": "/dev/shm/here" }).to_string();
    let command = moved(&["-object", &object], &places("ram")).expect("it can go");
    let value: Value = serde_json::from_str(&kept(&command)[1]).expect("JSON");
    assert_eq!(value["mem-path"], "/dev/shm/there,1");
    assert_eq!(moved(&["-object", plain], &places("other")).expect_err("it is not there").kind(), ErrorKind::Refused);
    // QEMU's own stream carries it otherwise.
    assert_eq!(words(&["-object", plain]), ["-object", plain]);
}

proptest! {
    /// Nothing panics, and what differs is told.
    #[test]
    fn every_difference_is_told(
        values in proptest::collection::vec(
            ("blockdev|drive|chardev|qmp|serial|machine|display|device|hda|S|netdev", "[-{}\",=.:a-d/]{0,16}|unix:/[a-c],server|file:/[a-c]"),
            0..6,
        )
    ) {
        let given: Vec<String> = values.into_iter().flat_map(|(option, value)| [format!("-{option}"), value]).collect();
        let description = MachineDescription { program: "qemu".to_owned(), words: given.clone() };
        if let Ok(command) = description.for_target(&places(Vec::new())) {
            for word in command.words.iter().filter(|word| !given.contains(word)) {
                let is_told = |change: &Change| change.to == *word || change.option == *word;
                prop_assert!(command.changes.iter().any(is_told), "{word}: {:?}", command.changes);
            }
        }
    }
}
