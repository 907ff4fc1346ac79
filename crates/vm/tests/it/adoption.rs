//! Adoption and release of a real QEMU's disk while the guest reads and writes it.

use std::path::Path;

use crate::common::{Daemon, Given, Kind, RARE, Server, Setup, USUAL, Vm, node_names, options_shown, run};
use serde_json::json;
use transhume_vm::{
    Adoptability, AdoptionRequest, DiskState, ErrorKind, Graph, Plan, Sources, Step, adopt, disk_state, inventory,
    release,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_is_adopted_and_released_under_load_and_its_options_are_the_same_afterwards() {
    each_a_disk_is_adopted_and_released_under_load_and_its_options_are_the_same_afterwards(&USUAL).await;
}

async fn each_a_disk_is_adopted_and_released_under_load_and_its_options_are_the_same_afterwards(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        let vm = Vm::start(kind);
        let qmp = vm.qmp().await;
        vm.load_goes_on().await;
        let server = Server::start(&vm).await;
        let plan =
            Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.unwrap_or_else(|e| panic!("{kind:?}: {e}"));
        let before = options_shown(&qmp).await;
        let mut daemon = Daemon::new(&vm.image);
        adopt(&qmp, &plan, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));

        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        assert_eq!(disk_state(&plan.disk, &graph), DiskState::Inside, "{kind:?}");
        assert!(graph.is_running, "{kind:?}: the guest was left stopped");
        assert_eq!(server.export.connections(), 1, "{kind:?}");
        assert!(graph.nodes.iter().all(|node| node.filename.contains("nbd+unix")), "{kind:?}: {graph:#?}");
        vm.load_goes_on().await;
        let image = vm.image.display().to_string();
        let foreign =
            std::process::Command::new("qemu-io").args(["-f", kind.format, "-c", "write 0 512", &image]).output();
        let foreign = foreign.expect("qemu-io runs: run `make setup`");
        assert!(!foreign.status.success(), "{kind:?}: a foreign qemu-io could open the adopted image");

        let back = Plan::release(&plan.disk, &vm.image, None, true);
        release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        assert_eq!(disk_state(&plan.disk, &graph), DiskState::Outside, "{kind:?}");
        assert_eq!(options_shown(&qmp).await, before, "{kind:?}");
        vm.load_goes_on().await;
        drop(server);
        vm.load_goes_on().await;

        // Once more: a released disk is adoptable again, by the same or by its new names.
        let server = Server::start(&vm).await;
        let sources = Sources { remembered: vec![back.remembered()], ..vm.sources() };
        let request = AdoptionRequest { node: back.disk.nodes.format.clone(), ..vm.request(&server) };
        let request = if kind.given == Given::FileAlone { vm.request(&server) } else { request };
        let again = Plan::adopt(&qmp, &sources, &request).await.unwrap_or_else(|e| panic!("{kind:?}: {e}"));
        adopt(&qmp, &again, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        let back = Plan::release(&again.disk, &vm.image, None, true);
        release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        assert_eq!(options_shown(&qmp).await, before, "{kind:?}");
        vm.load_goes_on().await;
        qmp.execute("quit", json!({})).await.expect("QEMU quits");
        qmp.ended().await;
        if kind.format == "qcow2" {
            drop(server);
            wait_for_lock(&image);
            run("qemu-img", &["check", "-f", "qcow2", &image]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_is_stopped_or_started_while_a_plan_waits_is_left_as_its_owner_wants_it() {
    each_a_guest_that_is_stopped_or_started_while_a_plan_waits_is_left_as_its_owner_wants_it(&USUAL).await;
}

async fn each_a_guest_that_is_stopped_or_started_while_a_plan_waits_is_left_as_its_owner_wants_it(kinds: &[Kind]) {
    for kind in kinds.iter().copied().filter(|kind| kind.format == "qcow2") {
        let vm = Vm::start(kind);
        let qmp = vm.qmp().await;
        vm.load_goes_on().await;
        let server = Server::start(&vm).await;
        let mut daemon = Daemon::new(&vm.image);
        let (mut sources, mut request) = (vm.sources(), vm.request(&server));
        for runs in [false, true] {
            let (before, now) = if runs { ("stop", "cont") } else { ("cont", "stop") };
            qmp.execute(before, json!({})).await.expect("as planned for");
            let plan = Plan::adopt(&qmp, &sources, &request).await.expect("a plan");
            qmp.execute(now, json!({})).await.expect("as run for");
            let pause = adopt(&qmp, &plan, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            assert_eq!(Graph::read(&qmp).await.expect("QEMU answers").is_running, runs, "{kind:?}: adoption");
            let is_paused = plan.steps.contains(&Step::Pause);
            assert_eq!(pause.is_some(), runs && is_paused, "{kind:?}: {pause:?}");

            qmp.execute(before, json!({})).await.expect("as planned for");
            let back = Plan::release(&plan.disk, &vm.image, None, !runs);
            qmp.execute(now, json!({})).await.expect("as run for");
            let pause = release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            assert_eq!(Graph::read(&qmp).await.expect("QEMU answers").is_running, runs, "{kind:?}: release");
            assert_eq!(pause.is_some(), runs, "{kind:?}: {pause:?}");
            sources.remembered = vec![back.remembered()];
            request.node.clone_from(&back.disk.nodes.format);
        }
        vm.load_goes_on().await;
    }
}

fn wait_for_lock(image: &str) {
    for _ in 0..100 {
        let output = std::process::Command::new("qemu-img").args(["info", image]).output().expect("qemu-img runs");
        if output.status.success() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("QEMU does not let go of {image}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_is_released_to_another_image_than_it_was_adopted_from() {
    for given in [Given::Blockdev, Given::Drive, Given::FileAlone] {
        let vm = Vm::start_with(Kind { given, format: "raw", iothread: true }, &["-S"]);
        let Setup { qmp, plan, mut daemon, vm, server: _server } = Setup::adopted(vm).await;
        let target = vm.directory.path().join("moved.raw");
        std::fs::copy(&vm.image, &target).expect("the image is copied");
        let back = Plan::release(&plan.disk, &target, None, true);
        release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{given:?}: {error}: {}", vm.log()));
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        let shown = target.display().to_string();
        assert!(graph.nodes.iter().all(|node| node.filename == shown), "{given:?}: {graph:#?}");
        qmp.execute("cont", json!({})).await.expect("the guest starts");
        vm.load_goes_on().await;
        assert!(!is_open(&vm, &vm.image), "{given:?}: QEMU still has the old image open");
        assert!(is_open(&vm, &target), "{given:?}");
    }
}

fn is_open(vm: &Vm, path: &Path) -> bool {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", vm.child.id())).expect("QEMU lives");
    descriptors.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_release_keeps_the_disk_inside_with_the_locks_held_and_the_vm_alive() {
    each_a_failed_release_keeps_the_disk_inside_with_the_locks_held_and_the_vm_alive(&USUAL).await;
}

async fn each_a_failed_release_keeps_the_disk_inside_with_the_locks_held_and_the_vm_alive(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        // The guest's driver runs: with an iothread the disk's nodes are there now.
        let Setup { qmp, plan, mut daemon, vm, server: _server } = Setup::adopted_under_load(kind).await;
        let names = node_names(&qmp).await;
        // Somebody else has the image: QEMU cannot lock it.
        let foreign = backends::QemuLocks::take_beside(&vm.image).expect("shared locks");
        let back = Plan::release(&plan.disk, &vm.image, None, true);
        let error = release(&qmp, &back, &mut daemon).await.expect_err("QEMU took a locked image");
        assert_eq!(error.kind(), ErrorKind::Qemu, "{kind:?}: {error}: {}", vm.log());
        assert!(daemon.locks.is_some(), "{kind:?}: the locks were not taken again");
        assert_eq!(node_names(&qmp).await, names, "{kind:?}");
        drop(foreign);
        release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        vm.load_goes_on().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_adoption_leaves_nothing_behind() {
    each_a_failed_adoption_leaves_nothing_behind(&USUAL).await;
}

async fn each_a_failed_adoption_leaves_nothing_behind(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        let vm = Vm::start(kind);
        let qmp = vm.qmp().await;
        let names = node_names(&qmp).await;
        // An export of the wrong size is not put below the guest.
        let other = vm.directory.path().join("other");
        std::fs::write(&other, vec![0; 65536]).expect("written");
        let server = Server::start_at(&other, &vm.directory.path().join("nbd"), false).await;
        let plan = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.expect("a plan");
        let mut daemon = Daemon::new(&vm.image);
        let error = adopt(&qmp, &plan, &mut daemon).await.expect_err("an export of the wrong size was taken");
        assert_eq!(error.kind(), ErrorKind::Refused, "{kind:?}: {error}");
        assert_eq!(node_names(&qmp).await, names, "{kind:?}");
        assert!(daemon.locks.is_none(), "{kind:?}");
        // So is an export that is not there.
        drop(server);
        let error = adopt(&qmp, &plan, &mut daemon).await.expect_err("nobody serves");
        assert_eq!(error.kind(), ErrorKind::Qemu, "{kind:?}: {error}");
        assert_eq!(node_names(&qmp).await, names, "{kind:?}");
        vm.load_goes_on().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_options_are_refused_by_name_and_accepted_on_request() {
    each_unknown_options_are_refused_by_name_and_accepted_on_request(&USUAL).await;
}

async fn each_unknown_options_are_refused_by_name_and_accepted_on_request(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        let vm = Vm::start_with(kind, &["-S"]);
        let qmp = vm.qmp().await;
        let server = Server::start(&vm).await;
        let mut request = vm.request(&server);
        let error = Plan::adopt(&qmp, &Sources::default(), &request).await.expect_err("options were lost silently");
        assert_eq!(error.kind(), ErrorKind::OptionLoss, "{kind:?}: {error}");
        assert!(error.to_string().contains("discard"), "{kind:?}: {error}");
        request.accept_option_loss = true;
        request.format = Some(kind.format.to_owned());
        Plan::adopt(&qmp, &Sources::default(), &request).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
        let reports = inventory(&qmp, &Sources::default()).await.expect("reports");
        assert!(matches!(&reports[0].verdict, Adoptability::LosesOptions { .. }), "{kind:?}: {}", reports[0]);
        let reports = inventory(&qmp, &vm.sources()).await.expect("reports");
        assert_eq!(reports.len(), 1, "{kind:?}");
        assert!(matches!(&reports[0].verdict, Adoptability::Adoptable { .. }), "{kind:?}: {}", reports[0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_is_found_by_node_by_device_and_by_drive_and_by_nothing_else() {
    each_a_disk_is_found_by_node_by_device_and_by_drive_and_by_nothing_else(&USUAL).await;
}

async fn each_a_disk_is_found_by_node_by_device_and_by_drive_and_by_nothing_else(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        let vm = Vm::start_with(kind, &["-S"]);
        let qmp = vm.qmp().await;
        let graph = Graph::read(&qmp).await.expect("QEMU answers");
        let root = graph.frontends[0].root.clone().expect("a root");
        for name in ["disk0", "vda", "/machine/peripheral/vda/virtio-backend", &root] {
            let disk = transhume_vm::Disk::find(&qmp, &graph, name).await;
            let disk = disk.unwrap_or_else(|error| panic!("{kind:?}: {name}: {error}"));
            assert_eq!(disk.image(), vm.image, "{kind:?}: {name}");
            assert_eq!(disk.iothread.as_deref(), kind.iothread.then_some("io0"), "{kind:?}");
        }
        let error = transhume_vm::Disk::find(&qmp, &graph, "nosuch").await.expect_err("found what is not there");
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains(&root), "{error}");
    }
}

/// The other kinds of disks in an iothread: a product of two axes that do not touch. [`USUAL`] decides on main, with one of each.
mod long {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_disk_is_adopted_and_released_under_load_and_its_options_are_the_same_afterwards() {
        each_a_disk_is_adopted_and_released_under_load_and_its_options_are_the_same_afterwards(&RARE).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_guest_that_is_stopped_or_started_while_a_plan_waits_is_left_as_its_owner_wants_it() {
        each_a_guest_that_is_stopped_or_started_while_a_plan_waits_is_left_as_its_owner_wants_it(&RARE).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_failed_release_keeps_the_disk_inside_with_the_locks_held_and_the_vm_alive() {
        each_a_failed_release_keeps_the_disk_inside_with_the_locks_held_and_the_vm_alive(&RARE).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_failed_adoption_leaves_nothing_behind() {
        each_a_failed_adoption_leaves_nothing_behind(&RARE).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn unknown_options_are_refused_by_name_and_accepted_on_request() {
        each_unknown_options_are_refused_by_name_and_accepted_on_request(&RARE).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_disk_is_found_by_node_by_device_and_by_drive_and_by_nothing_else() {
        each_a_disk_is_found_by_node_by_device_and_by_drive_and_by_nothing_else(&RARE).await;
    }
}
