//! Two daemons in two networks: how they come to trust each other, and what is said when they do not.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::{World, check_refusal, same};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;
use transhume_guest::{Side, TwoHosts, TwoHostsSpec};

/// Two running hosts that do not know each other, and where everything of theirs is.
fn two_hosts(spec: TwoHostsSpec<'_>) -> (TwoHosts, tempfile::TempDir) {
    let folder = tempfile::Builder::new().prefix("th").tempdir().expect("a temporary directory");
    let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
    let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
    hosts.start().expect("both daemons start");
    (hosts, folder)
}

fn refused(hosts: &TwoHosts, side: Side, arguments: &[&str], code: i32, part: &str) {
    let output = hosts.daemon(side).run(arguments).expect("the program runs");
    check_refusal(&format!("{arguments:?}"), &output, code, part);
}

/// What the daemon whose API is at `socket` counts.
fn metrics(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).expect("connected");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("text");
    text
}

#[test]
fn two_hosts_are_paired_with_a_code_and_remember_each_other() {
    let (mut hosts, _folder) = two_hosts(TwoHostsSpec { links: 2, ..TwoHostsSpec::default() });
    let a = hosts.daemon(Side::A).json(&["host"]).expect("it has an identity");
    assert_eq!(a["name"], "a");
    let at = hosts.address(Side::A, 0);
    refused(&hosts, Side::B, &["trust", &at, "K7QM-3XWD"], 55, "has given out no code");
    hosts.pair().expect("paired");
    let trusted = hosts.daemon(Side::B).json(&["trust", "--list"]).expect("listed");
    assert_eq!(trusted[0]["name"], "a");
    assert_eq!(trusted[0]["fingerprint"], a["fingerprint"]);
    assert_eq!(trusted[0]["addresses"], serde_json::json!([at, hosts.address(Side::A, 1)]));
    let listed = hosts.daemon(Side::A).run(&["trust", "--list"]).expect("the program runs");
    assert!(String::from_utf8_lossy(&listed.stdout).contains("10.77.0.2:10810, 10.77.1.2:10810"), "{listed:?}");

    // The code was good once.
    refused(&hosts, Side::B, &["trust", &at, "K7QM-3XWD"], 55, "has given out no code, or it was used already");

    for side in Side::BOTH {
        hosts.daemon_mut(side).kill();
        hosts.daemon_mut(side).start().expect("it starts again");
    }
    let again = hosts.daemon(Side::A).json(&["host"]).expect("it has an identity");
    assert_eq!(again["fingerprint"], a["fingerprint"], "the identity was not kept");
    assert_eq!(hosts.daemon(Side::A).json(&["trust", "--list"]).expect("listed")[0]["name"], "b");

    let change = ["trust", "--change", "a", "--address", "10.77.1.1"];
    assert_eq!(hosts.daemon(Side::B).json(&change).expect("changed")["addresses"][0], "10.77.1.1:10810");
    hosts.daemon(Side::B).json(&["trust", "--remove", "a"]).expect("removed");
    refused(&hosts, Side::B, &["trust", "--remove", "a"], 50, "trusts no host called a");

    let log = std::fs::read_to_string(hosts.daemon(Side::B).state().join("audit.jsonl")).expect("there is one");
    for action in ["host.pair", "host.change", "host.remove"] {
        assert!(log.contains(action), "{action} is not in {log}");
    }
    assert!(!log.contains("K7QM"), "a code is in the audit log");
}

#[test]
fn a_wrong_code_an_unknown_host_and_a_daemon_without_hosts_are_told_what_to_do() {
    let (hosts, _folder) = two_hosts(TwoHostsSpec::default());
    let at = hosts.address(Side::A, 0);
    let code = hosts.daemon(Side::A).json(&["trust", "--invite"]).expect("a code")["code"].clone();
    let wrong = if code == "2222-2222" { "3333-3333" } else { "2222-2222" };
    refused(&hosts, Side::B, &["trust", &at, wrong], 55, "tries left: 2");
    refused(&hosts, Side::B, &["trust", &at, "2222"], 55, "cannot be a code");
    refused(&hosts, Side::B, &["trust", "10.77.0.1:9", wrong], 51, "cannot be reached at 10.77.0.1:9");
    hosts.cut(0).expect("cut");
    refused(&hosts, Side::B, &["trust", &at, wrong], 51, "cannot be reached");
    hosts.mend(0).expect("mended");

    let text = metrics(&hosts.daemon(Side::A).api());
    assert!(text.contains("transhume_host_refusals_total 1\n"), "{text}");

    let alone = World::new();
    alone.refused(&["host"], 2, "give its configuration a section [hosts]");
    alone.refused(&["trust", "--invite"], 2, "speaks to no other hosts");
}

/// Waits until the only job of a host is as `is` wants it.
fn wait_for_job(hosts: &TwoHosts, what: &str, is: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
    let start = Instant::now();
    loop {
        let jobs = hosts.daemon(Side::A).json(&["jobs", "--all"]).expect("listed");
        if is(&jobs[0]) {
            return jobs[0].clone();
        }
        assert!(start.elapsed() < crate::support::HANG, "never {what}: {jobs}\n{}", hosts.daemon(Side::A).log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_volume_moves_to_another_host_under_load_while_the_link_is_cut_and_mended() {
    const LINK: u64 = 160_000_000;
    let spec = TwoHostsSpec { links: 2, link_bits_per_second: Some(LINK), ..TwoHostsSpec::default() };
    let (hosts, folder) = two_hosts(spec);
    hosts.pair().expect("paired");
    let image = folder.path().join("disk.img");
    let mut bytes = vec![0; 64 << 20];
    ChaCha12Rng::seed_from_u64(7).fill(&mut bytes[..]);
    std::fs::write(&image, &bytes).expect("written");
    let uri = format!("nbd+unix:///x?socket={}", folder.path().join("x.sock").display());
    let backend = crate::support::target(&image);
    let a = hosts.daemon(Side::A);
    a.json(&["volume", "attach", "x", "--backend", &backend, "--export", &uri]).expect("attached");
    let load = Load::start(&uri, &image, 7);

    let job = a.json(&["move", "x", "--to", "b:x", "--detach"]).expect("it begins");
    let percent = |job: &serde_json::Value| job["progress"]["percent"].as_f64().unwrap_or(0.0);
    let cut_at = percent(&wait_for_job(&hosts, "a tenth", |job| percent(job) > 10.0));
    for link in 0..2 {
        hosts.cut(link).expect("cut");
    }
    load.goes_on();
    // Longer than it takes to notice, and far shorter than the kernel would take to give a connection up.
    std::thread::sleep(Duration::from_secs(4));
    load.goes_on();
    let now = a.json(&["jobs", "--all"]).expect("listed")[0].clone();
    assert!(percent(&now) < 100.0, "it was done although nothing came through: from {cut_at} %, {now}");
    for link in 0..2 {
        hosts.mend(link).expect("mended");
    }
    let over = a.wait_for_job(job["id"].as_u64().expect("a number")).expect("it ends");
    assert_eq!(over["state"], "done", "{over}\n{}", a.log());
    load.goes_on();
    let promised = load.finish();
    assert!(!image.exists(), "the source was not put out of the way");
    same(&hosts.incoming(Side::B).join("x.raw"), &promised);

    // The source lets the volume go and says so: the target does not wait for it to come back, which would be a minute.
    a.json(&["volume", "detach", "x"]).expect("nobody uses it any more");
    let start = Instant::now();
    while let Err((_, said)) = hosts.daemon(Side::B).ask(&["volume", "detach", "x"]).expect("it answers") {
        assert!(start.elapsed() < Duration::from_secs(20), "{said}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
