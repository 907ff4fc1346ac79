//! Moves between hosts with etcd as the arbiter: whatever answer is lost and whoever dies, one host holds the volume, and nobody
//! has to be asked.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use crate::support::load::Load;
use crate::support::pair::{Pair, TAKES, wait_until};
use crate::support::qemu::Qemu;
use crate::support::same;
use serde_json::Value;
use transhume_guest::Etcd;

const SIZE: u64 = 8 << 20;

/// What becomes of requests on their way to the cluster.
#[derive(Clone, Copy)]
enum Way {
    Open = 0,
    /// Nothing gets through.
    Closed = 1,
    /// What asks for a decision does not.
    NoDecisions = 2,
    /// What asks for a decision does, and its answer gets lost.
    NoAnswers = 3,
}

/// The way from one host to the cluster.
struct Road {
    port: u16,
    way: Arc<AtomicU8>,
}

impl Road {
    fn to(etcd: &Etcd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (port, far) = (listener.local_addr().expect("it has one").port(), etcd.port());
        let way = Arc::new(AtomicU8::new(Way::Open as u8));
        let current = Arc::clone(&way);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let current = Arc::clone(&current);
                std::thread::spawn(move || pass(stream, far, &current));
            }
        });
        Self { port, way }
    }

    fn set(&self, way: Way) {
        self.way.store(way as u8, Ordering::SeqCst);
    }

    fn config(&self) -> String {
        format!("{TAKES}arbiter = [\"http://127.0.0.1:{}\"]\n", self.port)
    }
}

/// One request and its answer: whoever is called has one a connection.
fn pass(mut near: TcpStream, far: u16, way: &AtomicU8) {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    while !is_whole(&request) {
        match near.read(&mut buffer) {
            Ok(length @ 1..) => request.extend(&buffer[..length]),
            _ => return,
        }
    }
    // Who announces a move makes its key.
    let makes = request.windows(8).any(|word| word == b"\"CREATE\"");
    let decides = !makes && request.windows(7).any(|word| word == b"/kv/txn");
    let way = way.load(Ordering::SeqCst);
    if way == Way::Closed as u8 || (decides && way == Way::NoDecisions as u8) {
        return;
    }
    let mut far = TcpStream::connect(("127.0.0.1", far)).expect("the cluster is there");
    far.write_all(&request).expect("written");
    let length = far.read(&mut buffer).expect("an answer");
    if !(decides && way == Way::NoAnswers as u8) {
        // Who has asked may have gone.
        let _ = near.write_all(&buffer[..length]);
    }
    let _ = near.shutdown(Shutdown::Write);
}

fn is_whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_ascii_lowercase();
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    body.len() >= length.unwrap_or(0)
}

/// Two hosts with a volume `x` at the first under load, and their ways to the same cluster.
struct ArbiterCluster {
    pair: Pair,
    roads: [Road; 2],
    load: Load,
    image: std::path::PathBuf,
    _etcd: Etcd,
    _folder: tempfile::TempDir,
}

impl ArbiterCluster {
    fn new(number: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let etcd = Etcd::start(folder.path()).expect("etcd runs");
        let roads = [Road::to(&etcd), Road::to(&etcd)];
        let [a, b] = roads.each_ref().map(Road::config);
        let (pair, _) = Pair::with([&a, &b]);
        let image = pair.a.image("disk.img", SIZE, 65536);
        let uri = pair.a.attach("x", &image);
        let load = Load::start(&uri, &image, number);
        Self { pair, roads, load, image, _etcd: etcd, _folder: folder }
    }

    fn begin_move(&self) {
        self.pair.a.json(&["move", "x", "--to", "b", "--detach"]);
    }

    /// Begins a move whose commit the arbiter gets, without an answer. Who waits at the target hears of it and tells the source, so
    /// it is kept from the arbiter until the doubt has been seen.
    fn begin_move_to_doubt(&self) {
        self.roads[0].set(Way::NoAnswers);
        self.roads[1].set(Way::Closed);
        self.begin_move();
        self.wait_for_phase("in-doubt");
    }

    fn wait_for_phase(&self, phase: &str) {
        self.pair.wait_for_move(phase, |job| job["progress"]["phase"] == phase);
    }

    fn wait_for_stage(&self, stage: &str) {
        wait_until(stage, || {
            let volumes = self.pair.volumes_at_b();
            (!volumes.is_empty() && self.pair.at_b("x")["arrival"]["stage"] == stage).then_some(())
        });
    }
}

#[test]
fn a_move_that_nothing_comes_in_between_of_asks_the_arbiter_and_leaves_nothing_there() {
    let cluster = ArbiterCluster::new(40);
    let pair = &cluster.pair;
    let report = pair.a.json(&["move", "x", "--to", "b"]);
    assert_eq!(report["state"], "done", "{report}");
    cluster.load.goes_on();
    same(&pair.arrived("x"), &cluster.load.finish());
    let left = wait_until("the verdict is forgotten", || {
        let left = keys(&cluster.roads[0]);
        (left == 0).then_some(left)
    });
    assert_eq!(left, 0);
}

#[test]
fn a_source_that_dies_after_it_was_committed_leaves_the_volume_to_a_target_that_hears_of_it_from_the_arbiter() {
    let mut cluster = ArbiterCluster::new(41);
    cluster.begin_move_to_doubt();
    cluster.pair.a.kill();
    cluster.pair.network.cut();
    cluster.roads[1].set(Way::Open);
    cluster.wait_for_stage("held");
    // The first host comes back, finds out, and passes its guest's requests on.
    cluster.roads[0].set(Way::Open);
    cluster.pair.network.mend();
    cluster.pair.a.start();
    cluster.load.goes_on();
    wait_until("the move is over", || {
        let job = cluster.pair.a.json(&["jobs", "--all"])[0].clone();
        (job["state"] == "done").then_some(())
    });
    assert_eq!(cluster.pair.at_a("x")["backend"], "b:x");
    same(&cluster.pair.arrived("x"), &cluster.load.finish());
}

#[test]
fn a_source_that_dies_before_it_was_committed_holds_the_volume_and_its_guest_waits_for_the_arbiter_to_say_so() {
    let mut cluster = ArbiterCluster::new(42);
    cluster.roads[0].set(Way::NoDecisions);
    cluster.begin_move();
    cluster.wait_for_phase("in-doubt");
    cluster.pair.a.kill();
    cluster.pair.a.refused(&["rescue", "x", "--state-dir", &cluster.pair.a.text("state")], 9, "only the arbiter knows");
    cluster.roads[0].set(Way::Closed);
    cluster.pair.network.cut();
    cluster.pair.a.start();
    let shown = cluster.pair.at_a("x");
    assert!(shown["problem"].as_str().is_some_and(|problem| problem.contains("arbiter")), "{shown}");
    cluster.roads[0].set(Way::Open);
    cluster.load.goes_on();
    assert_eq!(cluster.pair.at_b("x")["arrival"]["stage"], "prepared");
    // What was taken back once is committed later.
    cluster.pair.network.mend();
    let over = cluster.pair.wait_for_move("it is over", |job| job["state"] == "done");
    assert_eq!(over["state"], "done");
    cluster.load.goes_on();
    same(&cluster.pair.arrived("x"), &cluster.load.finish());
}

#[test]
fn a_move_in_doubt_that_is_cancelled_ends_as_the_arbiter_has_it() {
    // The commit has reached it: there is nothing to cancel any more.
    let cluster = ArbiterCluster::new(43);
    cluster.begin_move_to_doubt();
    let cancelling = std::thread::scope(|scope| {
        let cancelling = scope.spawn(|| cluster.pair.a.run(&["cancel", "x"]));
        cluster.wait_for_phase("reverting");
        cluster.roads.iter().for_each(|road| road.set(Way::Open));
        cancelling.join().expect("it ends")
    });
    let over = cluster.pair.wait_for_move("it is over", |job| job["state"] == "done");
    assert_eq!(over["state"], "done", "{over} {cancelling:?}");
    cluster.load.goes_on();
    same(&cluster.pair.arrived("x"), &cluster.load.finish());

    // It has not: the guest is on the source, and nothing is left on the target.
    let cluster = ArbiterCluster::new(44);
    cluster.roads[0].set(Way::NoDecisions);
    cluster.begin_move();
    cluster.wait_for_phase("in-doubt");
    std::thread::scope(|scope| {
        let cancelling = scope.spawn(|| cluster.pair.a.run(&["cancel", "x"]));
        cluster.wait_for_phase("reverting");
        cluster.roads[0].set(Way::Open);
        cancelling.join().expect("it ends");
    });
    let over = cluster.pair.wait_for_move("it is over", |job| job["state"] == "cancelled");
    assert_eq!(over["state"], "cancelled", "{over}");
    wait_until("nothing is left", || cluster.pair.volumes_at_b().is_empty().then_some(()));
    cluster.load.goes_on();
    same(&cluster.image, &cluster.load.finish());
}

#[test]
fn a_target_that_gives_up_waiting_is_never_committed_to() {
    let mut cluster = ArbiterCluster::new(45);
    cluster.roads[0].set(Way::NoDecisions);
    cluster.begin_move();
    cluster.wait_for_phase("in-doubt");
    cluster.pair.network.cut();
    let resolution = cluster.pair.b.json(&["resolve", "x"]);
    assert_eq!(resolution["arbiter"], "the volume has not been given up", "{resolution}");
    let given_back = cluster.pair.b.json(&["resolve", "x", "--give-back"]);
    assert!(given_back["done"].is_string(), "{given_back}");
    assert!(cluster.pair.volumes_at_b().is_empty());
    cluster.roads[0].set(Way::Open);
    cluster.load.goes_on();
    cluster.pair.network.mend();
    let over = cluster.pair.wait_for_move("it is over", |job| job["state"] == "failed");
    assert!(over["error"]["message"].as_str().is_some_and(|message| message.contains("nothing any more")), "{over}");

    // The other way round: what was committed cannot be given back.
    cluster.begin_move_to_doubt();
    cluster.pair.a.kill();
    cluster.pair.b.refused(&["resolve", "x", "--give-back"], 56, "arbiter");
    cluster.roads[1].set(Way::Open);
    cluster.wait_for_stage("held");
    cluster.pair.b.refused(&["resolve", "x", "--give-back"], 9, "holds the volume");
    cluster.roads[0].set(Way::Open);
    cluster.pair.a.start();
    cluster.load.goes_on();
    same(&cluster.pair.arrived("x"), &cluster.load.finish());
}

#[test]
fn a_volume_that_is_given_back_by_hand_is_not_taken_by_a_target_that_hears_of_the_commit_later() {
    let cluster = ArbiterCluster::new(46);
    cluster.roads[1].set(Way::Closed);
    cluster.pair.give_up_untaken();
    // A host that can still be asked over an old connection is told itself, without the arbiter.
    cluster.pair.network.cut();
    cluster.roads[0].set(Way::Closed);
    cluster.pair.a.refused(&["resolve", "x", "--give-back"], 56, "arbiter");
    cluster.roads[0].set(Way::Open);
    cluster.pair.a.json(&["resolve", "x", "--give-back"]);
    cluster.load.goes_on();
    cluster.roads[1].set(Way::Open);
    // It is asked every three seconds.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(cluster.pair.at_b("x")["arrival"]["stage"], "prepared");
    cluster.pair.network.mend();
    wait_until("the other host forgets it", || cluster.pair.volumes_at_b().is_empty().then_some(()));
    cluster.load.goes_on();
    assert_eq!(cluster.pair.at_a("x")["state"], "serving");
    same(&cluster.image, &cluster.load.finish());
}

#[test]
fn an_arbiter_that_is_away_puts_the_switchover_off_and_costs_the_guest_nothing() {
    let cluster = ArbiterCluster::new(46);
    cluster.roads[0].set(Way::Closed);
    cluster.begin_move();
    let waiting = cluster.pair.wait_for_move("it waits", |job| job["progress"]["target_losses"].as_u64() > Some(0));
    let said = waiting["progress"]["last_error"].as_str().unwrap_or_default();
    assert!(said.contains("the arbiter cannot be asked"), "{waiting}");
    cluster.load.goes_on();
    cluster.roads[0].set(Way::Open);
    let over = cluster.pair.wait_for_move("it is over", |job| job["state"] == "done");
    assert_eq!(over["state"], "done");
    cluster.load.goes_on();
    same(&cluster.pair.arrived("x"), &cluster.load.finish());
}

/// A QEMU at `a` whose two disks move to `b`, with no answer to the decision.
fn all_disks_in_doubt(cluster: &ArbiterCluster) -> (Qemu, Vec<u64>) {
    let qemu = Qemu::with_two_disks(&cluster.pair.a);
    cluster.roads[0].set(Way::NoAnswers);
    cluster.roads[1].set(Way::Closed);
    let jobs = cluster.pair.a.json(&["move", "system", "--all-disks", "--to", "b", "--no-persist", "--detach"]);
    let ids = jobs.as_array().expect("a list").iter().map(|job| job["id"].as_u64().expect("a number")).collect();
    wait_until("the commit of both is in doubt", || {
        let jobs = cluster.pair.a.json(&["jobs"]);
        let jobs = jobs.as_array().expect("a list");
        (jobs.len() == 2 && jobs.iter().all(|job| job["progress"]["phase"] == "in-doubt")).then_some(())
    });
    cluster.roads[1].set(Way::Open);
    (qemu, ids)
}

fn stages(cluster: &ArbiterCluster) -> Vec<Value> {
    ["system", "data"].iter().map(|name| cluster.pair.at_b(name)["arrival"]["stage"].clone()).collect()
}

#[test]
fn all_disks_of_a_machine_have_one_verdict() {
    let mut cluster = ArbiterCluster::new(47);
    let (qemu, ids) = all_disks_in_doubt(&cluster);
    assert_eq!(keys(&cluster.roads[1]), 1, "there is more than one verdict");
    cluster.pair.a.kill();
    cluster.pair.network.cut();
    wait_until("both are held there", || (stages(&cluster) == ["held", "held"]).then_some(()));
    cluster.roads[0].set(Way::Open);
    cluster.pair.network.mend();
    cluster.pair.a.start();
    for id in ids {
        assert_eq!(cluster.pair.a.wait_for_job(id)["state"], "done");
    }
    qemu.write_to("vda", 0x41);
    qemu.write_to("vdb", 0x42);
    assert_eq!(["system", "data"].map(|name| cluster.pair.at_a(name)["backend"].clone()), ["b:system", "b:data"]);
}

#[test]
fn all_disks_in_doubt_that_are_cancelled_end_as_the_arbiter_has_it() {
    let cluster = ArbiterCluster::new(48);
    let (qemu, ids) = all_disks_in_doubt(&cluster);
    let asked = std::thread::scope(|scope| {
        let cancel = scope.spawn(|| cluster.pair.a.run(&["cancel", "data"]).status.success());
        std::thread::sleep(Duration::from_millis(500));
        cluster.roads[0].set(Way::Open);
        cancel.join().expect("it answers")
    });
    // The decision had been made: a cancel comes too late.
    assert!(!asked, "what was committed was cancelled");
    for id in ids {
        assert_eq!(cluster.pair.a.wait_for_job(id)["state"], "done");
    }
    qemu.write_to("vda", 0x51);
    qemu.write_to("vdb", 0x52);
    assert_eq!(stages(&cluster), ["held", "held"]);
}

/// How many verdicts are kept.
fn keys(road: &Road) -> u64 {
    let body = r#"{"key":"L3RyYW5zaHVtZS8=","range_end":"L3RyYW5zaHVtZTA=","count_only":true}"#;
    let mut stream = TcpStream::connect(("127.0.0.1", road.port)).expect("the road is there");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("set");
    let head = "POST /v3/kv/range HTTP/1.1\r\nhost: etcd\r\ncontent-type: application/json\r\nconnection: close";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("read");
    let json = answer.split_once("\r\n\r\n").expect("a body").1;
    let json: Value = serde_json::from_str(json.trim()).unwrap_or_else(|error| panic!("{error}: {answer}"));
    json["count"].as_str().map_or(0, |count| count.parse().expect("a number"))
}
