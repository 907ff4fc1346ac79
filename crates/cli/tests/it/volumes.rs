//! Volumes: served to real clients, refused when something is wrong, back after a restart.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::support::{World, check_refusal, tool};

#[test]
fn a_file_is_served_to_nbdinfo_and_nbdcopy_and_forgotten_when_detached() {
    let world = World::new();
    let image = world.image("disk.img", (8 << 20) + 512, 300_000);
    let uri = world.attach("web1", &image);
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), ((8 << 20) + 512).to_string());
    let copy = world.text("copy.img");
    tool("nbdcopy", &[&uri, &copy]);
    assert!(std::fs::read(&copy).expect("read") == std::fs::read(&image).expect("read"), "the copy differs");

    let listed = world.json(&["volume", "ls"]);
    assert_eq!(listed[0]["name"], "web1");
    assert_eq!(world.json(&["volume", "show", "web1"])["size_bytes"], (8 << 20) + 512);
    world.json(&["volume", "detach", "web1"]);
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0));
    assert!(!world.path("web1.sock").exists(), "the socket was left behind");
    assert!(image.exists());
}

#[test]
fn what_cannot_be_served_is_refused_with_a_code_of_its_own_and_nothing_is_left() {
    let world = World::new();
    let image = world.image("disk.img", 1 << 20, 65536);
    let backend = format!("file:{}", image.display());
    let export = |name: &str| format!("nbd+unix:///{name}?socket={}", world.text(&format!("{name}.sock")));
    let attach = |name: &str, backend: &str, export: &str, code: i32, part: &str| {
        world.refused(&["volume", "attach", name, "--backend", backend, "--export", export], code, part);
    };
    attach("a/b", &backend, &export("x"), 2, "cannot be the name");
    attach("x", &backend, "http://x", 2, "no address of an export");
    attach("x", "file:/nonexistent/disk.img", &export("x"), 16, "/nonexistent/disk.img");
    attach("x", "qcow2:/a", &export("x"), 2, "names no backend");
    attach("x", &format!("file:{}", world.text("")), &export("x"), 18, "neither a file nor a block device");
    std::fs::write(world.path("empty"), "").expect("written");
    attach("x", &format!("file:{}", world.text("empty")), &export("x"), 18, "is empty");
    let taken = std::os::unix::net::UnixListener::bind(world.path("x.sock")).expect("bound");
    attach("x", &backend, &export("x"), 20, "somebody listens");
    drop(taken);

    world.attach("x", &image);
    attach("x", &backend, &export("y"), 6, "there is a volume x already");
    attach("y", &backend, &export("y"), 6, "is the volume x already");
    world.refused(&["volume", "show", "nobody"], 5, "there is no volume nobody");
    world.refused(&["pause", "x"], 9, "is not being moved");
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(1));
    assert!(!world.path("y.sock").exists() && !world.path("state/volumes/y").exists());
}

#[test]
fn a_backend_of_another_daemon_or_of_a_qemu_program_is_refused() {
    let (world, other) = (World::new(), World::new());
    let image = world.image("disk.img", 1 << 20, 65536);
    world.attach("x", &image);
    let backend = format!("file:{}", image.display());
    let export = format!("nbd+unix:///x?socket={}", other.text("x.sock"));
    other.refused(&["volume", "attach", "x", "--backend", &backend, "--export", &export], 15, "transhumed");
    let output = std::process::Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(&image).output();
    let output = output.expect("qemu-io is there: run `make setup`");
    assert!(!output.status.success(), "qemu-io wrote to a volume that is served");
}

#[test]
fn a_volume_in_use_is_not_detached() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = crate::support::load::Load::start(&uri, &image, 1);
    load.answers(10);
    world.refused(&["volume", "detach", "x"], 8, "connected to x");
    let expected = load.finish();
    assert!(std::fs::read(&image).expect("read") == expected);
}

#[test]
fn volumes_come_back_on_their_sockets_after_a_polite_upgrade() {
    let mut world = World::new();
    let image = world.image("disk.img", 12 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = crate::support::load::Load::start(&uri, &image, 2);
    for _ in 0..3 {
        load.answers(50);
        world.terminate();
        assert!(world.path("x.sock").exists(), "the socket's file went away: clients would give up");
        world.start();
    }
    load.answers(50);
    let expected = load.finish();
    assert!(std::fs::read(&image).expect("read") == expected, "an acknowledged write is lost");
}

#[test]
fn a_volume_whose_journal_cannot_be_read_is_shown_as_down_and_the_others_are_served() {
    let mut world = World::new();
    let broken = world.image("broken.img", 1 << 20, 65536);
    let whole = world.image("whole.img", 1 << 20, 65536);
    world.attach("broken", &broken);
    let uri = world.attach("whole", &whole);
    world.terminate();
    let journal = world.path("state").join("volumes/broken/journal");
    let length = std::fs::metadata(&journal).expect("the journal").len();
    std::fs::write(&journal, vec![0x5a; usize::try_from(length).expect("small")]).expect("spoilt");
    world.start();

    let listed = world.json(&["volume", "ls"]);
    assert_eq!((&listed[0]["name"], &listed[0]["state"]), (&"broken".into(), &"down".into()), "{listed}");
    let problem = listed[0]["problem"].as_str().expect("what is wrong");
    assert!(problem.contains(&journal.display().to_string()), "{problem}");
    assert_eq!(listed[1]["state"], "serving", "{listed}");
    world.refused(&["move", "broken", "--to", "file:/nowhere"], 32, "cannot be read");
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), (1 << 20).to_string());
}

#[test]
fn tcp_exports_are_served_and_a_taken_port_is_refused() {
    let world = World::new();
    let image = world.image("disk.img", 1 << 20, 65536);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let export = format!("nbd://127.0.0.1:{port}/x");
    let backend = format!("file:{}", image.display());
    let arguments = ["volume", "attach", "x", "--backend", &backend, "--export", &export];
    world.refused(&arguments, 20, "somebody listens");
    drop(taken);
    world.json(&arguments);
    assert_eq!(tool("nbdinfo", &["--size", &export]).trim(), (1 << 20).to_string());
}

#[test]
fn an_unknown_key_a_wrong_socket_and_a_second_daemon_are_refused() {
    let mut world = World::without_daemon();
    std::fs::write(world.path("config.toml"), "workers = 1\nwrokers = 2\n").expect("written");
    world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
    check_refusal("config", &world.start_in_vain(), 30, "unknown field `wrokers`");
    std::fs::write(world.path("config.toml"), "workers = 1\nlog = \"debug\"\n").expect("written");
    world.start();
    check_refusal("second", &world.start_in_vain(), 31, "another transhumed");
    world.daemon.arguments.extend(["--state-dir".to_owned(), world.text("other")]);
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_transhumed"))
        .args(["--state-dir", &world.text("other"), "--listen", &format!("unix:{}", world.text("api"))])
        .output()
        .expect("runs");
    check_refusal("socket", &second, 20, "somebody listens");
    world.refused(&["--api", "/nonexistent", "status"], 3, "no daemon answers");
}

#[test]
fn garbage_on_the_api_socket_harms_nobody() {
    let world = World::new();
    let image = world.image("disk.img", 1 << 20, 65536);
    let uri = world.attach("x", &image);
    let mut state = 7_u64;
    for round in 0..200_usize {
        let mut stream = UnixStream::connect(world.path("api")).expect("connects");
        stream.set_read_timeout(Some(std::time::Duration::from_millis(20))).expect("set");
        let mut bytes: Vec<u8> = (0..round * 7 % 600)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        if round % 3 == 0 {
            let paths =
                ["/v1/volumes", "/v1/volumes/x/move", "/v1/volumes/%00%ff/job/pause", "/v1/adoptions", "/v1/jobs/-1"];
            let path = paths[round % paths.len()];
            let body = if round % 2 == 0 { "{\"to\": [".repeat(round) } else { "null".to_owned() };
            let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
            bytes = [head.as_bytes(), body.as_bytes()].concat();
        }
        // The daemon may hang up at any moment: that is an answer, too.
        let _ = stream.write_all(&bytes);
        let _ = stream.read(&mut [0; 256]);
    }
    assert_eq!(world.json(&["volume", "show", "x"])["state"], "serving");
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), (1 << 20).to_string());
}

#[test]
fn who_asked_for_what_is_on_record_and_metrics_are_there() {
    let world = World::new();
    let image = world.image("disk.img", 1 << 20, 65536);
    let uri = world.attach("x", &image);
    world.refused(&["cancel", "x"], 9, "not being moved");
    tool("nbdcopy", &[&uri, "null:"]);
    let audit = std::fs::read_to_string(world.path("state/audit.jsonl")).expect("read");
    let lines: Vec<serde_json::Value> =
        audit.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    assert_eq!((&lines[0]["action"], &lines[0]["outcome"]), (&"volume.attach".into(), &"ok".into()));
    assert_eq!((&lines[1]["action"], &lines[1]["outcome"]), (&"move.cancel".into(), &"wrong-state".into()));
    assert!(lines.iter().all(|line| line["uid"].is_u64() && line["pid"].is_u64()), "{audit}");

    let mut stream = UnixStream::connect(world.path("api")).expect("connects");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("sent");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("answered");
    assert!(metrics.contains("transhume_volume_bytes_total{volume=\"x\",verb=\"read\"} 1048576"), "{metrics}");
    assert!(metrics.contains("transhume_volume_request_seconds_bucket{volume=\"x\",verb=\"read\",le=\"+Inf\"}"));
}

#[test]
fn every_command_has_help_with_an_example() {
    let world = World::without_daemon();
    let commands: [&[&str]; 27] = [
        &[],
        &["volume", "attach"],
        &["volume", "ls"],
        &["volume", "show"],
        &["volume", "detach"],
        &["volume", "layer", "add"],
        &["volume", "layer", "set"],
        &["volume", "layer", "rm"],
        &["cache", "create"],
        &["cache", "ls"],
        &["cache", "show"],
        &["cache", "resize"],
        &["cache", "drain"],
        &["cache", "rm"],
        &["adopt"],
        &["release"],
        &["move"],
        &["status"],
        &["watch"],
        &["pause"],
        &["resume"],
        &["cancel"],
        &["set"],
        &["plan"],
        &["jobs"],
        &["rescue"],
        &["version"],
    ];
    for command in commands {
        let output = world.run(&[command, &["--help"]].concat());
        let help = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && help.contains("Example"), "{command:?}: {help}");
        assert!(help.contains("--json"), "{command:?} has no --json: {help}");
    }
}
