//! The monitor: who owns it, what becomes of commands when QEMU dies, and what it says meanwhile.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::{Given, HANG, KINDS, Kind, Setup, Vm, real_env};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use transhume_vm::{
    DiskState, ErrorKind, Graph, Outcome, Plan, Qmp, RecoveryGoal, VmEvent, VmEvents, adopt, disk_state,
    owner_of_socket, recover,
};

/// A process that is killed when the test is done with it.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Killing fails only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const PLAIN: Kind = Kind { given: Given::Blockdev, format: "raw", iothread: false };

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANG, work).await.expect("it hangs")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_client_is_told_after_five_seconds_who_owns_the_monitor() {
    let vm = Vm::start_with(PLAIN, &["-S"]);
    // QEMU takes one client at a time; this one is of another process.
    drop(vm.qmp().await);
    let socket = format!("socket,id=chardev0,path={}", vm.monitor.display());
    let other = Command::new("qemu-storage-daemon").args(["--chardev", &socket]).stdin(Stdio::null()).spawn();
    let mut other = Killed(other.expect("qemu-storage-daemon runs: run `make setup`"));
    let mut owner = None;
    for _ in 0..200 {
        owner = owner_of_socket(&vm.monitor, Some(vm.child.id()));
        if owner.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(owner.expect("the owner is found").pid, other.0.id());
    let started = std::time::Instant::now();
    let error = within(Qmp::connect(&vm.monitor, real_env())).await.expect_err("two clients were greeted");
    assert_eq!(error.kind(), ErrorKind::MonitorBusy, "{error}");
    assert!(started.elapsed() >= Duration::from_secs(5));
    let said = error.to_string();
    let words = "no greeting within 5 s: another client owns this monitor \u{2014} ";
    assert!(said.contains(words) && said.ends_with(&format!("pid {}", other.0.id())), "{said}");
    other.0.kill().expect("killed");
    vm.qmp().await;
}

#[tokio::test]
async fn a_monitor_of_a_dead_qemu_or_of_something_else_is_said_to_be_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("monitor");
    let connect = async |path: &Path| within(Qmp::connect(path, real_env())).await.expect_err("connected").kind();
    assert_eq!(connect(&path).await, ErrorKind::NoMonitor);
    drop(UnixListener::bind(&path).expect("bound"));
    assert_eq!(connect(&path).await, ErrorKind::NoMonitor);
    std::fs::remove_file(&path).expect("removed");
    let listener = UnixListener::bind(&path).expect("bound");
    std::thread::spawn(move || {
        for answer in [&b"SSH-2.0-OpenSSH\r\n"[..], b"{\"return\":{}}\n", b""] {
            let (mut stream, _) = listener.accept().expect("accepted");
            // The client may have gone.
            let _ = stream.write_all(answer);
        }
    });
    assert_eq!(connect(&path).await, ErrorKind::Protocol);
    assert_eq!(connect(&path).await, ErrorKind::Protocol);
    assert_eq!(connect(&path).await, ErrorKind::Disconnected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_before_the_greeting_are_passed_over() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("monitor");
    let listener = UnixListener::bind(&path).expect("bound");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accepted");
        let event = b"{\"timestamp\":{\"seconds\":1,\"microseconds\":2},\"event\":\"RESUME\"}\n";
        stream.write_all(event).expect("written");
        stream.write_all(b"{\"QMP\":{\"version\":{}}}\n").expect("written");
        let mut bytes = [0; 4096];
        assert!(stream.read(&mut bytes).expect("read") > 0);
        stream.write_all(b"{\"return\":{},\"id\":1}\n").expect("written");
    });
    within(Qmp::connect(&path, real_env())).await.expect("greeted");
    server.join().expect("served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monitor_that_answers_garbage_ends_the_connection_and_fails_what_is_pending() {
    let directory = tempfile::tempdir().expect("a directory");
    for seed in 0..50 {
        let path = directory.path().join(format!("monitor-{seed}"));
        let listener = UnixListener::bind(&path).expect("bound");
        let server = std::thread::spawn(move || {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let (mut stream, _) = listener.accept().expect("accepted");
            stream.write_all(b"{\"QMP\":{\"version\":{}}}\n").expect("written");
            let mut bytes = [0; 4096];
            let mut count = stream.read(&mut bytes).expect("read");
            assert!(count > 0);
            stream.write_all(b"{\"return\":{},\"id\":1}\n").expect("written");
            count = stream.read(&mut bytes).expect("read");
            assert!(count > 0);
            let letters = b"{}[]\":,0123456789retunidvQMP\\\n\xff";
            for _ in 0..random.random_range(1..2000) {
                let letter = letters[random.random_range(0..letters.len())];
                if stream.write_all(&[letter]).is_err() {
                    return;
                }
            }
        });
        let qmp = within(Qmp::connect(&path, real_env())).await.expect("greeted");
        let answer = within(qmp.execute("query-status", json!({}))).await;
        assert_eq!(answer.expect_err("garbage was an answer").kind(), ErrorKind::Disconnected, "seed {seed}");
        within(qmp.ended()).await;
        server.join().expect("the server does not panic");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_happens_to_the_vm_is_told_with_what_follows() {
    let Setup { qmp, plan, vm, server: _server, .. } = Setup::adopted_under_load(PLAIN).await;
    let mut events = VmEvents::watch(&qmp, &plan.disk).await;
    let graph = Graph::read(&qmp).await.expect("QEMU answers");
    assert_eq!(events.compare(&graph), []);

    qmp.execute("stop", json!({})).await.expect("stopped");
    assert_eq!(within(events.next()).await, Some(VmEvent::Stopped));
    qmp.execute("cont", json!({})).await.expect("goes on");
    assert_eq!(within(events.next()).await, Some(VmEvent::Resumed));
    qmp.execute("system_reset", json!({})).await.expect("reset");
    let reset = within(events.next()).await.expect("an event");
    assert_eq!(reset, VmEvent::Reset { by_guest: false });
    assert_eq!(reset.outcome(), Outcome::GoOn);
    // SeaBIOS, which then resets the machine once more itself, boots again, through us.
    vm.load_goes_on().await;

    // A raw disk cannot be resized while it is adopted: QEMU refuses, the guest is never told of a size that is not so.
    let resize = json!({ "node-name": "disk0", "size": 32 << 20 });
    let error = qmp.execute("block_resize", resize).await.expect_err("an NBD node was grown");
    assert_eq!(error.kind(), ErrorKind::Qemu, "{error}");

    qmp.execute("quit", json!({})).await.expect("quits");
    let mut off = within(events.next()).await.expect("an event");
    while off == (VmEvent::Reset { by_guest: true }) {
        off = within(events.next()).await.expect("an event");
    }
    assert!(matches!(&off, VmEvent::Poweroff { reason } if reason == "host-qmp-quit"), "{off:?}");
    assert_eq!(off.outcome(), Outcome::FinishCold);
    assert_eq!(within(events.next()).await, Some(VmEvent::QemuGone));
    assert_eq!(within(events.next()).await, None);
    let error = qmp.execute("query-status", json!({})).await.expect_err("QEMU is gone");
    assert_eq!(error.kind(), ErrorKind::Disconnected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_qemu_ends_the_events_and_fails_the_commands() {
    let setup = Setup::planned(Vm::start_with(PLAIN, &["-S"])).await;
    let Setup { qmp, plan, mut daemon, mut vm, server: _server } = setup;
    let mut events = VmEvents::watch(&qmp, &plan.disk).await;
    vm.child.kill().expect("killed");
    assert_eq!(within(events.next()).await, Some(VmEvent::QemuGone));
    let error = adopt(&qmp, &plan, &mut daemon).await.expect_err("QEMU is gone");
    assert!(error.leaves_doubt(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_qcow2_disk_grows_in_its_container_while_it_is_adopted() {
    for kind in [KINDS[2], KINDS[7]] {
        let Setup { qmp, plan, vm, server: _server, .. } = Setup::adopted_under_load(kind).await;
        let mut events = VmEvents::watch(&qmp, &plan.disk).await;
        let resize = json!({ "node-name": plan.disk.nodes.format, "size": 32 << 20 });
        qmp.execute("block_resize", resize).await.expect("grown");
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        let resized = VmEvent::Resized { from_bytes: 16 << 20, to_bytes: 32 << 20 };
        assert_eq!(events.compare(&graph), std::slice::from_ref(&resized), "{kind:?}");
        assert_eq!(events.compare(&graph), [], "{kind:?}: it was told twice");
        assert_eq!(resized.outcome(), Outcome::GoOn);
        vm.load_goes_on().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unplugged_disk_is_noticed_and_our_nodes_are_taken_away() {
    for kind in [KINDS[0], KINDS[4], KINDS[7], KINDS[8]] {
        let setup = Setup::adopted(Vm::start_with(kind, &["-S"])).await;
        let Setup { qmp, plan, mut daemon, vm: _vm, server: _server } = setup;
        let mut events = VmEvents::watch(&qmp, &plan.disk).await;
        // Without a guest that answers the first request, a reset carries the unplugging out.
        qmp.execute("device_del", json!({ "id": "vda" })).await.expect("asked for");
        qmp.execute("system_reset", json!({})).await.expect("reset");
        loop {
            let event = within(events.next()).await.expect("an event");
            if event == VmEvent::DiskUnplugged {
                assert_eq!(event.outcome(), Outcome::FinishCold);
                break;
            }
        }
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        assert_eq!(disk_state(&plan.disk, &graph), DiskState::DeviceGone, "{kind:?}");
        assert_eq!(events.compare(&graph), [VmEvent::DiskUnplugged], "{kind:?}");
        let now = recover(&qmp, &plan, RecoveryGoal::Forward, &mut daemon).await.expect("recovered");
        assert_eq!(now, DiskState::DeviceGone, "{kind:?}");
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        assert!(graph.nodes.iter().all(|node| !node.name.starts_with("th-")), "{kind:?}: {graph:#?}");
        assert!(daemon.locks.is_none(), "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_with_a_block_job_is_refused_and_a_job_begun_later_is_told() {
    let Setup { qmp, plan, mut daemon, server, vm } = Setup::planned(Vm::start_with(PLAIN, &["-S"])).await;
    let target = json!({ "driver": "null-co", "node-name": "target", "size": crate::common::DISK_BYTES });
    qmp.execute("blockdev-add", target).await.expect("added");
    let mirror = json!({ "job-id": "mine", "device": "disk0", "target": "target", "sync": "none", "speed": 1 });
    qmp.execute("blockdev-mirror", mirror.clone()).await.expect("begun");
    let error = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.expect_err("a job runs");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("block job"), "{error}");
    qmp.execute("block-job-cancel", json!({ "device": "mine", "force": true })).await.expect("cancelled");
    for _ in 0..100 {
        if Graph::read(&qmp).await.expect("QEMU answers").jobs.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    adopt(&qmp, &plan, &mut daemon).await.expect("adopted");
    let mut events = VmEvents::watch(&qmp, &plan.disk).await;
    qmp.execute("blockdev-mirror", mirror).await.expect("begun");
    let event = within(events.next()).await.expect("an event");
    assert_eq!(event.outcome(), Outcome::Inspection, "{event:?}");
    let graph = Graph::read(&qmp).await.expect("QEMU answers");
    let found = events.compare(&graph);
    assert_eq!(found, [VmEvent::BlockJob { id: "mine".to_owned(), kind: "mirror".to_owned() }]);
    assert_eq!(found[0].outcome(), Outcome::Cancel);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_that_puts_its_filter_above_the_disk_is_told() {
    let Setup { qmp, plan, mut daemon, server: _server, vm: _vm } =
        Setup::planned(Vm::start_with(PLAIN, &["-S"])).await;
    adopt(&qmp, &plan, &mut daemon).await.expect("adopted");
    let target = json!({ "driver": "null-co", "node-name": "target", "size": crate::common::DISK_BYTES });
    qmp.execute("blockdev-add", target).await.expect("added");
    let mut events = VmEvents::watch(&qmp, &plan.disk).await;
    let backup = json!({ "job-id": "nightly", "device": "disk0", "target": "target", "sync": "full", "speed": 1 });
    qmp.execute("blockdev-backup", backup).await.expect("begun");
    let event = within(events.next()).await.expect("an event");
    assert_eq!(event.outcome(), Outcome::Inspection, "{event:?}");
    let found = events.compare(&Graph::read(&qmp).await.expect("QEMU answers"));
    assert!(found.contains(&VmEvent::BlockJob { id: "nightly".to_owned(), kind: "backup".to_owned() }), "{found:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_of_qemu_itself_is_told_whether_it_begins_before_or_after_somebody_listens() {
    for begins_before in [false, true] {
        let vm = Vm::start_with(PLAIN, &["-S"]);
        let Setup { qmp, plan, vm, server: _server, .. } = Setup::adopted(vm).await;
        // One that never ends by itself: nobody reads what it sends.
        let away = vm.directory.path().join("away");
        let _listener = std::os::unix::net::UnixListener::bind(&away).expect("bound");
        let begin = json!({ "uri": format!("unix:{}", away.display()) });
        if begins_before {
            qmp.execute("migrate", begin.clone()).await.expect("begun");
        }
        let mut events = VmEvents::watch(&qmp, &plan.disk).await;
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        let told = if begins_before {
            events.compare(&graph).pop().expect("it is in the graph")
        } else {
            assert_eq!(events.compare(&graph), []);
            qmp.execute("migrate", begin).await.expect("begun");
            within(events.next()).await.expect("an event")
        };
        assert!(matches!(&told, VmEvent::VmMigration { .. }), "{told:?}");
        assert_eq!(told.outcome(), Outcome::Cancel);
        qmp.execute("migrate_cancel", json!({})).await.expect("cancelled");
        let started = std::time::Instant::now();
        while Graph::read(&qmp).await.expect("QEMU answers").migration_under_way().is_some() {
            assert!(started.elapsed() < crate::common::HANG, "the migration is not over");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(events.compare(&Graph::read(&qmp).await.expect("QEMU answers")), [], "it has come to nothing");
    }
}
