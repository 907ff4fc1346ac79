//! A daemon that dies between any two steps of an adoption or a release finds its way from QEMU's graph.

use crate::common::{Daemon, Given, KINDS, Kind, RARE, Server, Setup, USUAL, Vm, node_names, options_shown};
use serde_json::json;
use transhume_vm::{DiskState, ErrorKind, Graph, Plan, Qmp, RecoveryGoal, Step, adopt, disk_state, recover, release};

/// What the journal gives back after a restart.
fn journalled(plan: &Plan) -> Plan {
    let text = serde_json::to_string(plan).expect("a plan is data");
    serde_json::from_str(&text).expect("a plan comes back")
}

async fn assert_stands(qmp: &Qmp, plan: &Plan, expected: DiskState, context: &str) {
    let graph = Graph::read(qmp).await.expect("QEMU answers");
    assert_eq!(disk_state(&plan.disk, &graph), expected, "{context}");
    assert!(graph.is_running, "{context}: the guest was left stopped");
}

/// A VM under load, its export, and the plan to adopt its disk.
async fn planned(kind: Kind) -> (Vm, Server, Plan, Vec<String>) {
    let vm = Vm::start(kind);
    vm.load_goes_on().await;
    let Setup { qmp, plan, server, vm, .. } = Setup::planned(vm).await;
    let names = node_names(&qmp).await;
    (vm, server, plan, names)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adoption_killed_before_any_step_is_finished_or_undone() {
    each_an_adoption_killed_before_any_step_is_finished_or_undone(&USUAL).await;
}

async fn each_an_adoption_killed_before_any_step_is_finished_or_undone(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        let (mut vm, mut server, mut plan, mut names) = planned(kind).await;
        let is_decisive = |step: &Step| matches!(step, Step::Reopen { .. } | Step::SetDrive { .. });
        let decisive = plan.steps.iter().position(is_decisive).expect("a plan has a decisive step");
        // One step more than there are: killed after the last, before the journal heard of it.
        for (step, goal) in
            (0..=plan.steps.len()).flat_map(|step| [(step, RecoveryGoal::Forward), (step, RecoveryGoal::Back)])
        {
            let context = format!("{kind:?}, killed before step {step}, {goal:?}");
            let qmp = vm.qmp().await;
            let shown = options_shown(&qmp).await;
            let mut dying = Daemon::dying_before(&vm.image, step);
            let died = adopt(&qmp, &plan, &mut dying).await;
            assert_eq!(died.is_err(), step < plan.steps.len(), "{context}: {died:?}: {}", vm.log());
            drop((dying, qmp));

            let qmp = vm.qmp().await;
            let mut daemon = Daemon::new(&vm.image);
            let now = recover(&qmp, &journalled(&plan), goal, &mut daemon).await;
            let now = now.unwrap_or_else(|error| panic!("{context}: {error}: {}", vm.log()));
            let expected =
                if goal == RecoveryGoal::Forward || step > decisive { DiskState::Inside } else { DiskState::Outside };
            assert_eq!(now, expected, "{context}");
            assert_stands(&qmp, &plan, expected, &context).await;
            assert_eq!(daemon.locks.is_some(), expected == DiskState::Inside, "{context}: locks");
            if expected == DiskState::Outside {
                assert_eq!(node_names(&qmp).await, names, "{context}: something was left behind");
                continue;
            }
            let back = Plan::release(&plan.disk, &vm.image, None, true);
            release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{context}: {error}: {}", vm.log()));
            assert_eq!(options_shown(&qmp).await, shown, "{context}");
            vm.load_goes_on().await;
            if kind.given == Given::Drive {
                // Its nodes have names now: the next adoption would be another one.
                (vm, server, plan, names) = planned(kind).await;
            }
        }
        vm.load_goes_on().await;
        drop(server);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_killed_before_any_step_is_finished_or_undone() {
    each_a_release_killed_before_any_step_is_finished_or_undone(&USUAL).await;
}

async fn each_a_release_killed_before_any_step_is_finished_or_undone(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        let vm = Vm::start(kind);
        vm.load_goes_on().await;
        let shown = options_shown(&vm.qmp().await).await;
        let Setup { qmp, plan, daemon, server, vm } = Setup::adopted(vm).await;
        let names = node_names(&qmp).await;
        let back = Plan::release(&plan.disk, &vm.image, None, true);
        let is_decisive = |step: &Step| matches!(step, Step::Reopen { .. } | Step::SetDrive { .. });
        let decisive = back.steps.iter().position(is_decisive).expect("a plan has a decisive step");
        drop((qmp, daemon));
        // While it is undone or not begun the disk stays inside, so one VM serves all of these.
        for step in 0..=decisive {
            let context = format!("{kind:?}, killed before step {step}, back");
            let qmp = vm.qmp().await;
            let mut dying = Daemon::dying_before(&vm.image, step);
            dying.locks = Some(backends::QemuLocks::take_beside(&vm.image).expect("shared locks"));
            release(&qmp, &back, &mut dying).await.expect_err("it was killed");
            drop((dying, qmp));
            let qmp = vm.qmp().await;
            let mut daemon = Daemon::new(&vm.image);
            let now = recover(&qmp, &journalled(&back), RecoveryGoal::Back, &mut daemon).await;
            let now = now.unwrap_or_else(|error| panic!("{context}: {error}: {}", vm.log()));
            assert_eq!(now, DiskState::Inside, "{context}");
            assert_stands(&qmp, &back, DiskState::Inside, &context).await;
            assert_eq!(node_names(&qmp).await, names, "{context}: something was left behind");
            assert!(daemon.locks.is_some(), "{context}: the locks were not taken again");
        }
        // Forward it ends outside; an adoption by the nodes' names of then brings it back inside.
        let mut disk = plan.disk.clone();
        let mut image_known = vec![back.remembered()];
        for step in 0..=back.steps.len() {
            let context = format!("{kind:?}, killed before step {step}, forward");
            let qmp = vm.qmp().await;
            let back = Plan::release(&disk, &vm.image, None, true);
            let mut dying = Daemon::dying_before(&vm.image, step);
            let died = release(&qmp, &back, &mut dying).await;
            assert_eq!(died.is_err(), step < back.steps.len(), "{context}: {died:?}");
            drop((dying, qmp));
            let qmp = vm.qmp().await;
            let mut daemon = Daemon::new(&vm.image);
            let now = recover(&qmp, &journalled(&back), RecoveryGoal::Forward, &mut daemon).await;
            let now = now.unwrap_or_else(|error| panic!("{context}: {error}: {}", vm.log()));
            assert_eq!(now, DiskState::Outside, "{context}");
            assert_stands(&qmp, &back, DiskState::Outside, &context).await;
            assert!(daemon.locks.is_none(), "{context}: the locks are still held");
            assert_eq!(options_shown(&qmp).await, shown, "{context}");
            image_known.push(back.remembered());
            let sources = transhume_vm::Sources { remembered: image_known.clone(), ..vm.sources() };
            let request = transhume_vm::AdoptionRequest { node: "vda".to_owned(), ..vm.request(&server) };
            let again = Plan::adopt(&qmp, &sources, &request).await.unwrap_or_else(|e| panic!("{context}: {e}"));
            adopt(&qmp, &again, &mut daemon).await.unwrap_or_else(|e| panic!("{context}: {e}: {}", vm.log()));
            disk = again.disk;
        }
        vm.load_goes_on().await;
    }
}

/// QEMU looks at a file's size when it opens it and reads zeroes past that. The load allocates a cluster of the
/// container every 128 rounds. If it ran, it would do so between the opening and the reopen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_does_not_grow_between_the_opening_of_its_file_and_the_reopen() {
    for kind in [KINDS[2], KINDS[3]] {
        let mut setup = Setup::adopted_under_load(kind).await;
        setup.vm.load_goes_on().await;
        setup.daemon.dawdles = std::time::Duration::from_secs(2);
        let stopped_for = setup.release().await;
        assert!(stopped_for.is_some_and(|span| span.as_secs() >= 2), "{kind:?}: {stopped_for:?}");
        for _ in 0..10 {
            setup.vm.load_goes_on().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_draining_command_is_sent_while_the_export_is_gone_and_the_guest_goes_on_when_it_is_back() {
    for kind in [KINDS[1], KINDS[2], KINDS[7]] {
        let Setup { qmp, plan, mut daemon, server, vm } = Setup::adopted_under_load(kind).await;
        server.stop();
        daemon.is_connected = false;
        let back = Plan::release(&plan.disk, &vm.image, None, true);
        let error = release(&qmp, &back, &mut daemon).await.expect_err("it would block the guest");
        assert_eq!(error.kind(), ErrorKind::ExportDisconnected, "{kind:?}: {error}");
        // QEMU still answers, and at once.
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        assert_eq!(disk_state(&plan.disk, &graph), DiskState::Inside, "{kind:?}");
        drop(server);
        let server = Server::start(&vm).await;
        vm.load_goes_on().await;
        assert_eq!(server.export.connections(), 1, "{kind:?}");
        daemon.is_connected = true;
        release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        vm.load_goes_on().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_the_server_comes_to_count_late_is_waited_for() {
    let vm = Vm::start(KINDS[1]);
    let mut setup = Setup::planned(vm).await;
    setup.daemon.counts_late = 5;
    setup.adopt().await;
    assert_eq!(setup.daemon.counts_late, 0, "nobody asked");
    setup.vm.load_goes_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graph_that_somebody_has_changed_is_an_error_and_not_guessed_at() {
    let kind = Kind { given: Given::Blockdev, format: "raw", iothread: false };
    let Setup { qmp, plan, mut daemon, vm, server: _server } = Setup::planned(Vm::start(kind)).await;
    // Somebody puts another file node below the format node meanwhile.
    let image = vm.directory.path().join("other").display().to_string();
    std::fs::copy(&vm.image, &image).expect("copied");
    let other = json!({ "driver": "file", "node-name": "other", "filename": image });
    qmp.execute("blockdev-add", other).await.expect("a second node");
    let options = json!({ "driver": "raw", "node-name": "disk0", "file": "other" });
    qmp.execute("blockdev-reopen", json!({ "options": [options] })).await.expect("reopened");
    let error = adopt(&qmp, &plan, &mut daemon).await.expect_err("the graph was another");
    assert_eq!(error.kind(), ErrorKind::UnexpectedGraph, "{error}");
    assert!(daemon.locks.is_none());
    assert!(node_names(&qmp).await.iter().all(|name| !name.starts_with("th-")));
}

/// A daemon dies between `stop` and `cont`, and QEMU has lost its export. The guest goes on before anything is asked of
/// the export. It makes its container grow meanwhile, so the file node that was opened while it was stopped is not used
/// any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_a_dead_daemon_has_left_stopped_goes_on_before_the_export_is_back() {
    for kind in [KINDS[2], KINDS[7]] {
        let Setup { qmp, plan, server, vm, .. } = Setup::adopted_under_load(kind).await;
        let back = Plan::release(&plan.disk, &vm.image, None, true);
        let decisive = back.steps.iter().position(|step| matches!(step, Step::Reopen { .. })).expect("a release");
        let mut dying = Daemon::dying_before(&vm.image, decisive);
        dying.locks = Some(backends::QemuLocks::take_beside(&vm.image).expect("shared locks"));
        release(&qmp, &back, &mut dying).await.expect_err("it was killed");
        drop(dying);
        assert!(!Graph::read(&qmp).await.expect("QEMU answers").is_running, "{kind:?}: it was not killed midway");
        server.stop();
        let left = journalled(&back);
        let mut daemon = Daemon::new(&vm.image);
        daemon.is_connected = false;
        let error = recover(&qmp, &left, RecoveryGoal::Forward, &mut daemon).await.expect_err("the export is gone");
        assert_eq!(error.kind(), ErrorKind::ExportDisconnected, "{kind:?}: {error}");
        assert_stands(&qmp, &left, DiskState::Inside, "the export is gone").await;
        drop(server);
        let server = Server::start(&vm).await;
        vm.load_goes_on().await;
        assert_eq!(server.export.connections(), 1, "{kind:?}");
        daemon.is_connected = true;
        let now = recover(&qmp, &left, RecoveryGoal::Forward, &mut daemon).await.expect("recovered");
        assert_eq!(now, DiskState::Outside, "{kind:?}");
        assert_stands(&qmp, &left, DiskState::Outside, "released").await;
        vm.load_goes_on().await;
    }
}

/// The other kinds of disks in an iothread: a product of two axes that do not touch. [`USUAL`] decides on main, with one of each.
mod long {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_adoption_killed_before_any_step_is_finished_or_undone() {
        each_an_adoption_killed_before_any_step_is_finished_or_undone(&RARE).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_release_killed_before_any_step_is_finished_or_undone() {
        each_a_release_killed_before_any_step_is_finished_or_undone(&RARE).await;
    }
}
