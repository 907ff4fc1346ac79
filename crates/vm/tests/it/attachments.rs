//! Disks that hang on other buses, lie in block devices, or are one of several.

use crate::common::{Bus, Daemon, Given, KINDS, Kind, RARE, Server, Setup, USUAL, Vm, node_names, options_shown, run};
use transhume_vm::{
    Adoptability, AdoptionRequest, DiskState, Graph, Plan, Sources, adopt, disk_state, inventory, release,
};

async fn assert_adoptable(vm: &Vm, sources: &Sources) {
    let reports = inventory(&vm.qmp().await, sources).await.expect("reports");
    assert!(matches!(&reports[0].verdict, Adoptability::Adoptable { .. }), "{:?}: {}", vm.kind, reports[0]);
}

/// Adopted and released under load, with the same options afterwards.
async fn there_and_back(vm: Vm, what: &str) {
    vm.load_goes_on().await;
    assert_adoptable(&vm, &vm.sources()).await;
    let before = options_shown(&vm.qmp().await).await;
    let mut setup = Setup::adopted(vm).await;
    let graph = Graph::read(&setup.qmp).await.expect("QEMU answers");
    assert_eq!(disk_state(&setup.plan.disk, &graph), DiskState::Inside, "{what}");
    setup.vm.load_goes_on().await;
    assert_eq!(setup.server.export.connections(), 1, "{what}");
    setup.release().await;
    assert_eq!(options_shown(&setup.qmp).await, before, "{what}");
    drop(setup.server);
    setup.vm.load_goes_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_on_scsi_and_ide_controllers_are_adopted_and_released_under_load() {
    each_disks_on_scsi_and_ide_controllers_are_adopted_and_released_under_load(&USUAL).await;
}

async fn each_disks_on_scsi_and_ide_controllers_are_adopted_and_released_under_load(kinds: &[Kind]) {
    for kind in kinds.iter().copied() {
        for bus in [Bus::VirtioScsi, Bus::Ide] {
            // No IDE controller has an iothread.
            if bus == Bus::VirtioScsi || !kind.iothread {
                there_and_back(Vm::start_on_bus(kind, bus), &format!("{bus:?}, {kind:?}")).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_in_a_block_device_is_adopted_and_released_under_load() {
    for given in [Given::Blockdev, Given::Drive, Given::FileAlone] {
        let (vm, device) = Vm::start_on_block_device(Kind { given, format: "raw", iothread: false });
        there_and_back(vm, &format!("{given:?} of {}", device.0.display())).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_disks_of_one_vm_are_adopted_at_once_and_released_one_by_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let image = directory.path().join("second.raw");
    let shown = image.display().to_string();
    run("qemu-img", &["create", "-q", "-f", "raw", &shown, "16M"]);
    let file = format!("file,node-name=file1,filename={shown}");
    let second = ["-blockdev", &file, "-blockdev", "raw,node-name=disk1,file=file1"];
    let more = [&second[..], &["-device", "virtio-blk-pci,drive=disk1,id=vdb"]].concat();
    for kind in [KINDS[1], KINDS[2], KINDS[7]] {
        let vm = Vm::start_with(kind, &more);
        vm.load_goes_on().await;
        let before = options_shown(&vm.qmp().await).await;
        let names = node_names(&vm.qmp().await).await;
        let reports = inventory(&vm.qmp().await, &vm.sources()).await.expect("reports");
        let is_adoptable = |report: &transhume_vm::DiskReport| matches!(report.verdict, Adoptability::Adoptable { .. });
        assert!(reports.len() == 2 && reports.iter().all(is_adoptable), "{kind:?}: {reports:#?}");
        let mut first = Setup::adopted(vm).await;
        let server = Server::start_at(&image, &directory.path().join("nbd"), false).await;
        let request = AdoptionRequest { node: "disk1".into(), volume: "data".into(), ..first.vm.request(&server) };
        let plan = Plan::adopt(&first.qmp, &first.vm.sources(), &request).await.expect("a plan");
        let mut daemon = Daemon::new(&image);
        adopt(&first.qmp, &plan, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
        let graph = Graph::read(&first.qmp).await.expect("QEMU answers");
        for disk in [&first.plan.disk, &plan.disk] {
            assert_eq!(disk_state(disk, &graph), DiskState::Inside, "{kind:?}: {}", disk.volume);
        }
        first.vm.load_goes_on().await;
        first.release().await;
        let graph = Graph::read(&first.qmp).await.expect("QEMU answers");
        assert_eq!(disk_state(&plan.disk, &graph), DiskState::Inside, "{kind:?}: the other one was released, too");
        let back = Plan::release(&plan.disk, &image, None, true);
        release(&first.qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
        assert_eq!(options_shown(&first.qmp).await, before, "{kind:?}");
        if kind.given == Given::Blockdev {
            assert_eq!(node_names(&first.qmp).await, names, "{kind:?}");
        }
        first.vm.load_goes_on().await;
    }
}

/// The other kinds of disks in an iothread: a product of two axes that do not touch. [`USUAL`] decides on main, with one of each.
mod long {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn disks_on_scsi_and_ide_controllers_are_adopted_and_released_under_load() {
        each_disks_on_scsi_and_ide_controllers_are_adopted_and_released_under_load(&RARE).await;
    }
}
