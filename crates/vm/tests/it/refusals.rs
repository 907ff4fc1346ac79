//! What is not adopted is refused with the reason, and what is adopted replays every option.

use crate::common::{Given, Kind, Server, Vm, run};
use serde_json::{Value, json};
use transhume_vm::machine::{MachineDescription, TargetDisk, TargetPlaces};
use transhume_vm::{Adoptability, ErrorKind, Graph, LibvirtDomain, Origin, Plan, Sources, Step, inventory};

const PLAIN: Kind = Kind { given: Given::Blockdev, format: "raw", iothread: false };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_disk_that_cannot_be_adopted_is_reported_in_one_line_with_the_reason() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    for name in ["base.raw", "cd.raw", "ro.raw", "scsi.raw", "lazy.raw", "cor.raw", "share.raw"] {
        run("qemu-img", &["create", "-q", "-f", "raw", &path(name), "1M"]);
    }
    let (base, overlay) = (path("base.raw"), path("overlay.qcow2"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &overlay]);
    let lazy = path("lazy.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", &lazy, "1M"]);
    let vmdk = path("disk.vmdk");
    run("qemu-img", &["create", "-q", "-f", "vmdk", &vmdk, "1M"]);
    let drive = |name: &str, more: &str| format!("file={},if=none,id={name}{more}", path(name));
    let drives = [
        format!("file={overlay},if=none,id=overlay,format=qcow2"),
        drive("cd.raw", ",format=raw,media=cdrom"),
        drive("ro.raw", ",format=raw,readonly=on"),
        drive("scsi.raw", ",format=raw"),
        format!("file={lazy},if=none,id=lazy,format=qcow2"),
        format!("file={vmdk},if=none,id=vmdk,format=vmdk"),
        drive("cor.raw", ",format=raw,copy-on-read=on"),
        "driver=null-co,if=none,id=null,size=1M".to_owned(),
        drive("share.raw", ",format=raw"),
    ];
    let mut arguments = vec!["-S".to_owned(), "-device".to_owned(), "virtio-scsi-pci,id=scsi0".to_owned()];
    for drive in &drives {
        arguments.extend(["-drive".to_owned(), drive.clone()]);
    }
    for device in [
        "virtio-blk-pci,drive=overlay,id=backed",
        "scsi-cd,drive=cd.raw,id=cd",
        "virtio-blk-pci,drive=ro.raw,id=readonly",
        "scsi-hd,drive=scsi.raw,id=scsi",
        "virtio-blk-pci,drive=lazy,id=lazy0",
        "virtio-blk-pci,drive=vmdk,id=vmdk0",
        "virtio-blk-pci,drive=cor.raw,id=cor0",
        "virtio-blk-pci,drive=null,id=null0",
        "virtio-blk-pci,drive=share.raw,id=share0,share-rw=on",
    ] {
        arguments.extend(["-device".to_owned(), device.to_owned()]);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let vm = Vm::start_with(PLAIN, &arguments);
    let qmp = vm.qmp().await;
    let reports = inventory(&qmp, &vm.sources()).await.expect("reports");
    let expected = [
        ("overlay", Some("backing chain")),
        ("cd.raw", Some("removable")),
        ("ro.raw", Some("read-only")),
        ("scsi.raw", None),
        ("lazy", Some("lazy refcounts")),
        ("vmdk", Some("its format is vmdk")),
        ("cor.raw", Some("copy-on-read")),
        ("null", Some("null-co")),
        ("share.raw", Some("share-rw=on")),
        ("vda", None),
    ];
    for (device, reason) in expected {
        let report = reports.iter().find(|report| report.device == device);
        let report = report.unwrap_or_else(|| panic!("{device} is not reported: {reports:#?}"));
        let line = report.to_string();
        assert!(!line.contains('\n'), "{line}");
        match (reason, &report.verdict) {
            (None, Adoptability::Adoptable { .. }) => {}
            (Some(reason), Adoptability::Refused { .. } | Adoptability::LosesOptions { .. }) => {
                assert!(line.contains(reason), "{line}");
            }
            _ => panic!("{line}"),
        }
    }
}

/// The options that a plan gives the nodes when it adopts and when it releases.
fn replayed(plan: &Plan) -> Vec<Value> {
    let back = Plan::release(&plan.disk, &plan.image, None, true);
    let options = |step: &Step| match step {
        Step::AddNode { options, .. } | Step::Reopen { options, .. } => Some(options.clone()),
        _ => None,
    };
    plan.steps.iter().chain(&back.steps).filter_map(options).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_that_qmp_does_not_tell_are_replayed_from_the_command_line() {
    for (given, detect) in [(Given::Blockdev, "unmap"), (Given::Drive, "on")] {
        let vm = Vm::start_with(Kind { given, format: "qcow2", iothread: false }, &["-S"]);
        let qmp = vm.qmp().await;
        let server = Server::start(&vm).await;
        let plan = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.expect("a plan");
        assert_eq!(plan.disk.options.origin, Origin::CommandLine);
        let all = replayed(&plan);
        let of = |driver: &str| all.iter().filter(|options| options["driver"] == driver).collect::<Vec<_>>();
        assert_eq!(of("qcow2").len(), 2, "{given:?}: one when adopted, one when released");
        for format in of("qcow2") {
            assert_eq!(format["discard"], "unmap", "{given:?}");
            assert_eq!(format["detect-zeroes"], detect, "{given:?}");
            assert_eq!(format["cache"], json!({ "direct": false, "no-flush": true }), "{given:?}");
            assert_eq!(format["backing"], Value::Null, "{given:?}");
            if given == Given::Blockdev {
                assert_eq!(format["l2-cache-size"], 1_048_576);
                assert_eq!(format["pass-discard-other"], true);
            }
        }
        let [file] = of("file")[..] else { panic!("{given:?}: one file node, when it is released") };
        assert_eq!(file["discard"], "unmap", "{given:?}");
        assert_eq!(file["filename"], vm.image.display().to_string(), "{given:?}");
        if given == Given::Blockdev {
            assert_eq!(file["aio"], "threads");
            assert_eq!(file["auto-read-only"], true);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_was_plugged_in_later_takes_its_options_from_libvirt() {
    let vm = Vm::start_with(PLAIN, &["-S", "-device", "pcie-root-port,id=port1,chassis=2"]);
    let qmp = vm.qmp().await;
    let image = vm.directory.path().join("later.raw").display().to_string();
    run("qemu-img", &["create", "-q", "-f", "raw", &image, "16M"]);
    let file = json!({
        "driver": "file", "node-name": "libvirt-2-storage", "filename": image, "discard": "unmap", "aio": "threads",
    });
    let format = json!({
        "driver": "raw", "node-name": "libvirt-2-format", "file": "libvirt-2-storage", "discard": "unmap",
        "detect-zeroes": "unmap",
    });
    for node in [file, format] {
        qmp.execute("blockdev-add", node).await.expect("added");
    }
    let device = json!({ "driver": "virtio-blk-pci", "drive": "libvirt-2-format", "id": "vdb", "bus": "port1" });
    qmp.execute("device_add", device).await.expect("plugged in");
    let server = Server::start(&vm).await;
    let mut request = vm.request(&server);
    request.node = "libvirt-2-format".to_owned();
    let error = Plan::adopt(&qmp, &vm.sources(), &request).await.expect_err("nobody knows its options");
    assert_eq!(error.kind(), ErrorKind::OptionLoss, "{error}");
    let xml = format!(
        "<domain><devices><disk type='file'><driver name='qemu' type='raw' io='threads' discard='unmap' \
         detect_zeroes='unmap'/><source file='{image}'/><target dev='vdb'/></disk></devices></domain>"
    );
    let libvirt = Some(LibvirtDomain::parse(&xml).expect("well formed"));
    let sources = Sources { libvirt, ..vm.sources() };
    let plan = Plan::adopt(&qmp, &sources, &request).await.expect("a plan");
    assert_eq!(plan.disk.options.origin, Origin::Libvirt);
    assert_eq!(plan.disk.options.format["discard"], "unmap");
    assert_eq!(plan.disk.options.file["aio"], "threads");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_that_were_changed_since_the_start_are_not_taken_from_the_command_line() {
    let vm = Vm::start_with(PLAIN, &["-S"]);
    let qmp = vm.qmp().await;
    let server = Server::start(&vm).await;
    let options = json!({ "driver": "raw", "node-name": "disk0", "file": "file0", "discard": "ignore" });
    qmp.execute("blockdev-reopen", json!({ "options": [options] })).await.expect("reopened");
    let error = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.expect_err("the command line is stale");
    assert_eq!(error.kind(), ErrorKind::OptionLoss, "{error}");
    assert!(error.to_string().contains("detect-zeroes was"), "{error}");
    assert!(Graph::read(&qmp).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_remembered_of_another_qemu_does_not_outrank_the_command_line() {
    let vm = Vm::start_with(PLAIN, &["-S"]);
    let qmp = vm.qmp().await;
    let server = Server::start(&vm).await;
    let plan = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.expect("a plan");
    let mut own = Plan::release(&plan.disk, &vm.image, None, true).remembered();
    own.options.format.insert("offset".to_owned(), 4096.into());
    let gather = async |known: &transhume_vm::Remembered, sources: Sources| {
        let sources = Sources { remembered: vec![known.clone()], ..sources };
        Plan::adopt(&qmp, &sources, &vm.request(&server)).await
    };
    let options = gather(&own, vm.sources()).await.expect("a plan").disk.options;
    assert_eq!((options.origin, &options.format["offset"]), (Origin::Remembered, &4096.into()), "its own");

    let mut other = own.clone();
    other.process.as_mut().expect("its process is known").started += 1;
    let options = gather(&other, vm.sources()).await.expect("a plan").disk.options;
    assert_eq!((options.origin, options.format.get("offset")), (Origin::CommandLine, None), "another QEMU's");
    let alone = Sources { command_line: None, ..vm.sources() };
    let error = gather(&other, alone.clone()).await.expect_err("nobody knows its options");
    assert_eq!(error.kind(), ErrorKind::OptionLoss, "{error}");

    // What an earlier version has noted without its process is never taken without a word.
    let noted = transhume_vm::Remembered { process: None, ..own };
    let options = gather(&noted, vm.sources()).await.expect("a plan").disk.options;
    assert_eq!(options.origin, Origin::CommandLine);
    let error = gather(&noted, alone).await.expect_err("nobody knows whose options they are");
    assert!(error.kind() == ErrorKind::OptionLoss && error.to_string().contains("was not noted"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_node_within_its_format_node_discards_after_a_release_as_before() {
    let directory = tempfile::tempdir().expect("a directory");
    let image = directory.path().join("inline.raw");
    std::fs::write(&image, vec![1; 4 << 20]).expect("written");
    let blockdev =
        format!("driver=raw,node-name=inline0,discard=unmap,file.driver=file,file.filename={}", image.display());
    let device = "virtio-blk-pci,drive=inline0,id=inline";
    let vm = Vm::start_with(PLAIN, &["-S", "-blockdev", &blockdev, "-device", device]);
    let qmp = vm.qmp().await;
    let allocated = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&image).expect("there"));
    let discard = async |mib: u32| {
        let line = format!("qemu-io -d /machine/peripheral/inline/virtio-backend \"discard {mib}M 1M\"");
        let said = qmp.execute("human-monitor-command", json!({ "command-line": line })).await.expect("run");
        assert_eq!(said, "", "the guest could not discard");
    };
    let (before, mib) = (allocated(), (1 << 20) / 512);
    discard(0).await;
    assert_eq!(allocated(), before - mib, "this file system does not discard: the test says nothing");
    let socket = directory.path().join("nbd");
    let server = Server::start_at(&image, &socket, false).await;
    let mut request = vm.request(&server);
    request.node = "inline0".to_owned();
    let plan = Plan::adopt(&qmp, &vm.sources(), &request).await.expect("a plan");
    let mut daemon = crate::common::Daemon::new(&image);
    transhume_vm::adopt(&qmp, &plan, &mut daemon).await.expect("adopted");
    discard(1).await;
    let back = Plan::release(&plan.disk, &image, None, false);
    transhume_vm::release(&qmp, &back, &mut daemon).await.expect("released");
    let held = allocated();
    discard(2).await;
    assert_eq!(allocated(), held - mib, "the file node does not discard any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raw_disk_whose_format_was_probed_is_adopted_only_by_who_names_it_and_its_guest_cannot_change_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (image, secret, header) = (path("probed.raw"), path("secret.raw"), path("header.qcow2"));
    run("qemu-img", &["create", "-q", "-f", "raw", &image, "4M"]);
    run("qemu-img", &["create", "-q", "-f", "raw", &secret, "4M"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &secret, "-F", "raw", &header]);
    let drive = format!("file={image},if=none,id=probed");
    let vm = Vm::start_with(PLAIN, &["-S", "-drive", &drive, "-device", "virtio-blk-pci,drive=probed,id=p0"]);
    let qmp = vm.qmp().await;
    let reports = inventory(&qmp, &vm.sources()).await.expect("reports");
    let report = reports.iter().find(|report| report.device == "probed").expect("it is reported");
    assert!(report.is_probed && matches!(report.verdict, Adoptability::Refused { .. }), "{report}");
    let socket = directory.path().join("nbd");
    let server = Server::start_at(directory.path().join("probed.raw").as_path(), &socket, false).await;
    let mut request = transhume_vm::AdoptionRequest { node: "probed".to_owned(), ..vm.request(&server) };
    let error = Plan::adopt(&qmp, &vm.sources(), &request).await.expect_err("its guard would be lost");
    assert!(error.kind() == ErrorKind::Refused && error.to_string().contains("--format raw"), "{error}");
    request.format = Some("raw".to_owned());
    let plan = Plan::adopt(&qmp, &vm.sources(), &request).await.expect("a plan");
    let mut daemon = crate::common::Daemon::new(directory.path().join("probed.raw").as_path());
    transhume_vm::adopt(&qmp, &plan, &mut daemon).await.expect("adopted");
    let line = format!("qemu-io -d /machine/peripheral/p0/virtio-backend \"write -s {header} 0 64k\"");
    let said = qmp.execute("human-monitor-command", json!({ "command-line": line })).await.expect("run");
    assert_eq!(said, "", "what the guest writes is data");
    // A QEMU that is started by the words of a move has the same disk, and not what its first bytes name.
    let source = MachineDescription::of_process(vm.child.id()).expect("QEMU lives").expect("a QEMU");
    let target = |node: &str, image: &str| TargetDisk {
        image: image.to_owned(),
        node: node.to_owned(),
        format: Some("raw".to_owned()),
        export: server.address.clone(),
    };
    let boot = vm.image.display().to_string();
    let disks = vec![target("disk0", &boot), target("probed", &image)];
    let places = TargetPlaces { folder: directory.path().to_owned(), disks, machine_type: None, memory: Vec::new() };
    let command = source.for_target(&places).expect("it can go");
    let mut words = command.words.iter();
    let drive = words.find(|word| word.contains("id=probed")).expect("the drive is there");
    assert!(drive.contains("format=raw"), "{drive}");
}
