//! A whole machine moved to another QEMU while its guest reads and writes its disk through one export.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Given, HANG, Kind, Setup, Vm, real_env};
use serde_json::json;
use tempfile::TempDir;
use transhume_vm::machine::{
    HostFacts, MachineDescription, MachineFacts, MigrationOptions, MigrationPhase, RefusalKind, TargetCommand,
    TargetDisk, TargetPlaces, begin_incoming, begin_outgoing, cancel, is_loaded, prepare_incoming, prepare_outgoing,
    resume, start_guest, status, steer, switch_over, wait_for,
};
use transhume_vm::{ErrorKind, Qmp};

const KIND: Kind = Kind { given: Given::Blockdev, format: "raw", iothread: false };

/// The QEMU that a machine is moved to.
struct Target {
    folder: TempDir,
    child: Child,
    qmp: Qmp,
    command: TargetCommand,
}

impl Drop for Target {
    fn drop(&mut self) {
        // Killing fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Target {
    async fn start(setup: &Setup) -> Self {
        Self::start_with(setup, &[]).await
    }

    /// With more words than the source has.
    async fn start_with(setup: &Setup, more: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("vm-target-").tempdir().expect("a temporary directory");
        let source = MachineDescription::of_process(setup.vm.child.id()).expect("QEMU lives").expect("it is a QEMU");
        let facts = MachineFacts::read(&setup.qmp).await.expect("QEMU answers");
        let disk = TargetDisk {
            image: setup.vm.image.display().to_string(),
            node: "disk0".to_owned(),
            format: Some("raw".to_owned()),
            export: setup.server.address.clone(),
        };
        let places = TargetPlaces {
            folder: folder.path().to_owned(),
            disks: vec![disk],
            machine_type: Some(facts.machine_type),
            memory: Vec::new(),
        };
        let command = source.for_target(&places).expect("it can go");
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let child =
            Command::new(&command.program).args(&command.words).args(more).stdin(Stdio::null()).stderr(log).spawn();
        let child = child.expect("QEMU runs");
        let qmp = connect(&command.monitor, folder.path()).await;
        Self { folder, child, qmp, command }
    }

    fn console(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("console")).unwrap_or_default()
    }

    /// Waits until the guest works here, and fails if it saw an error.
    async fn guest_works(&self) {
        let before = self.console().len();
        let started = Instant::now();
        while self.console().len() < before + 20 {
            assert!(started.elapsed() < HANG, "the guest stands still at the target: {}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(self.console().chars().all(|letter| letter == '.'), "{}: {}", self.console(), self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("memory")
    }

    /// Begins the move and goes on until the source waits for the switch.
    async fn move_until_switchover(&self, source: &Qmp, options: &MigrationOptions) {
        prepare_incoming(&self.qmp, options).await.unwrap_or_else(|error| panic!("{error}: {}", self.log()));
        begin_incoming(&self.qmp, &self.socket()).await.expect("it listens");
        prepare_outgoing(source, options).await.expect("the source can");
        begin_outgoing(source, &self.socket()).await.expect("it begins");
        let waits = wait_for(source, |now| now.phase == MigrationPhase::PreSwitchover, Some(HANG)).await;
        let waits = waits.unwrap_or_else(|error| panic!("{options:?}: {error}: {}", self.log()));
        assert!(waits.bytes_transferred > 0 && waits.bytes_total > 0 && waits.iterations > 0, "{waits:?}");
    }

    /// The rest: the target has everything and does not run.
    async fn load(&self, source: &Qmp) {
        assert!(!is_loaded(&self.qmp).await.expect("QEMU answers"));
        switch_over(source).await.expect("the source goes on");
        let done = wait_for(source, |now| now.phase == MigrationPhase::Completed, Some(HANG)).await;
        let done = done.unwrap_or_else(|error| panic!("{error}: {}", self.log()));
        assert!(done.downtime.is_some() && done.total_time.is_some(), "{done:?}");
        let loaded = wait_for(&self.qmp, |now| now.phase == MigrationPhase::Completed, Some(HANG)).await;
        loaded.unwrap_or_else(|error| panic!("{error}: {}", self.log()));
        assert!(is_loaded(&self.qmp).await.expect("QEMU answers"));
        assert_eq!(run_state(&self.qmp).await, "paused");
        // QEMU calls the migration completed a moment before it leaves `finish-migrate`.
        let started = Instant::now();
        while run_state(source).await == "finish-migrate" {
            assert!(started.elapsed() < HANG, "the source does not end its migration");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(run_state(source).await, "postmigrate");
    }
}

async fn connect(monitor: &Path, folder: &Path) -> Qmp {
    let started = Instant::now();
    loop {
        match Qmp::connect(monitor, real_env()).await {
            Ok(qmp) => return qmp,
            Err(error) => {
                let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
                assert!(started.elapsed() < HANG, "{error}: {log}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn run_state(qmp: &Qmp) -> String {
    let said = qmp.execute("query-status", json!({})).await.expect("QEMU answers");
    said["status"].as_str().expect("a state").to_owned()
}

fn options(channels: u8) -> MigrationOptions {
    let downtime_limit = Duration::from_millis(500);
    MigrationOptions {
        channels,
        bandwidth_bytes_max: 1 << 30,
        downtime_limit,
        auto_converge: channels == 0,
        postcopy: false,
        ignores_shared: false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_moves_with_one_stream_and_with_several_and_its_guest_goes_on() {
    let kinds = [
        (KIND, 0),
        (KIND, 2),
        (Kind { given: Given::Drive, format: "qcow2", iothread: true }, 2),
        (Kind { given: Given::FileAlone, ..KIND }, 0),
    ];
    for (kind, channels) in kinds {
        let setup = Setup::adopted_under_load(kind).await;
        let target = Target::start(&setup).await;
        target.move_until_switchover(&setup.qmp, &options(channels)).await;
        target.load(&setup.qmp).await;
        let said = setup.vm.console();
        assert_eq!(target.console(), "", "{kind:?}: the guest ran before it was started");
        start_guest(&target.qmp).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", target.log()));
        // Once more: it runs already.
        start_guest(&target.qmp).await.expect("it runs");
        target.guest_works().await;
        assert_eq!(run_state(&setup.qmp).await, "postmigrate", "{kind:?}");
        assert_eq!(setup.vm.console(), said, "{kind:?}: the guest still runs at the source");
        assert!(said.chars().all(|letter| letter == '.'), "{kind:?}: {said}");
        cancel(&setup.qmp).await.expect("nothing is under way");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_has_moved_moves_on_by_the_words_it_was_started_with() {
    let setup = Setup::adopted_under_load(KIND).await;
    let first = Target::start(&setup).await;
    first.move_until_switchover(&setup.qmp, &options(0)).await;
    first.load(&setup.qmp).await;
    start_guest(&first.qmp).await.expect("it runs");
    first.guest_works().await;
    let again = MachineDescription::of_process(first.child.id()).expect("it lives").expect("a QEMU");
    assert_eq!((&again.program, &again.words), (&first.command.program, &first.command.words));
    let second = tempfile::tempdir().expect("a folder");
    let export = setup.server.address.clone();
    let disk = TargetDisk { image: "elsewhere".to_owned(), node: "disk0".to_owned(), format: None, export };
    let places =
        TargetPlaces { folder: second.path().to_owned(), disks: vec![disk], machine_type: None, memory: Vec::new() };
    let command = again.for_target(&places).expect("it can go again");
    let monitors = command.words.iter().filter(|word| word.contains("transhume.qmp")).count();
    assert_eq!(monitors, 1, "{:?}", command.words);
    assert_eq!(command.words.len(), first.command.words.len(), "words gather: {:?}", command.words);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_that_is_cancelled_leaves_the_guest_running_and_can_be_begun_again() {
    let setup = Setup::adopted_under_load(KIND).await;
    for channels in [0, 2] {
        let target = Target::start(&setup).await;
        target.move_until_switchover(&setup.qmp, &options(channels)).await;
        assert_ne!(run_state(&setup.qmp).await, "running");
        let refused = resume(&setup.qmp).await.expect_err("resumed a guest whose migration waits");
        assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
        let refused = start_guest(&target.qmp).await.expect_err("started a guest without its devices");
        assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
        cancel(&setup.qmp).await.expect("cancelled");
        resume(&setup.qmp).await.expect("it runs again");
        assert_eq!(status(&setup.qmp).await.expect("QEMU answers").phase, MigrationPhase::Cancelled);
        setup.vm.load_goes_on().await;
    }
    // While memory is copied, too.
    let target = Target::start(&setup).await;
    let slow = MigrationOptions { bandwidth_bytes_max: 1 << 20, ..options(0) };
    prepare_incoming(&target.qmp, &slow).await.expect("it can");
    begin_incoming(&target.qmp, &target.socket()).await.expect("it listens");
    prepare_outgoing(&setup.qmp, &slow).await.expect("it can");
    begin_outgoing(&setup.qmp, &target.socket()).await.expect("it begins");
    let active = wait_for(&setup.qmp, |now| now.phase == MigrationPhase::Active, Some(HANG)).await;
    active.expect("it is active");
    steer(&setup.qmp, Some(2 << 20), Some(Duration::from_millis(100))).await.expect("steered");
    let late =
        wait_for(&setup.qmp, |now| now.phase == MigrationPhase::Completed, Some(Duration::from_millis(300))).await;
    assert_eq!(late.expect_err("it cannot be done").kind(), ErrorKind::TimedOut);
    cancel(&setup.qmp).await.expect("cancelled");
    resume(&setup.qmp).await.expect("it runs");
    setup.vm.load_goes_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_whose_target_has_everything_and_never_ran_goes_on_at_the_source() {
    let kinds = [(Given::Blockdev, "raw", false), (Given::Blockdev, "qcow2", true), (Given::Drive, "qcow2", false)];
    for (given, format, iothread) in kinds {
        let setup = Setup::adopted_under_load(Kind { given, format, iothread }).await;
        let target = Target::start(&setup).await;
        target.move_until_switchover(&setup.qmp, &options(0)).await;
        target.load(&setup.qmp).await;
        drop(target);
        resume(&setup.qmp).await.unwrap_or_else(|error| panic!("{error}: {}", setup.vm.log()));
        setup.vm.load_goes_on().await;
        resume(&setup.qmp).await.expect("it runs already");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_to_a_target_that_dies_fails_with_qemus_words_and_the_guest_goes_on() {
    let setup = Setup::adopted_under_load(KIND).await;
    let target = Target::start(&setup).await;
    let slow = MigrationOptions { bandwidth_bytes_max: 1 << 20, ..options(0) };
    prepare_incoming(&target.qmp, &slow).await.expect("it can");
    begin_incoming(&target.qmp, &target.socket()).await.expect("it listens");
    prepare_outgoing(&setup.qmp, &slow).await.expect("it can");
    begin_outgoing(&setup.qmp, &target.socket()).await.expect("it begins");
    wait_for(&setup.qmp, |now| now.phase == MigrationPhase::Active, Some(HANG)).await.expect("it is active");
    drop(target);
    let failed = wait_for(&setup.qmp, |now| now.phase == MigrationPhase::Completed, Some(HANG)).await;
    assert_eq!(failed.expect_err("the target is dead").kind(), ErrorKind::Migration);
    resume(&setup.qmp).await.expect("it runs");
    setup.vm.load_goes_on().await;
    // At the last moment, when only the devices' state is missing. One stream: QEMU 7.2 may wait for ever with multifd.
    let target = Target::start(&setup).await;
    target.move_until_switchover(&setup.qmp, &options(0)).await;
    drop(target);
    switch_over(&setup.qmp).await.expect("it goes on");
    let failed = wait_for(&setup.qmp, |now| now.phase == MigrationPhase::Completed, Some(HANG)).await;
    assert_eq!(failed.expect_err("the target is dead").kind(), ErrorKind::Migration);
    resume(&setup.qmp).await.expect("it runs");
    setup.vm.load_goes_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_came_or_went_since_the_start_is_told_before_the_move() {
    let vm = Vm::start_with(KIND, &["-device", "pcie-root-port,id=port1,chassis=1"]);
    vm.load_goes_on().await;
    let setup = Setup::adopted(vm).await;
    let same = Target::start(&setup).await;
    let here = MachineFacts::read(&setup.qmp).await.expect("QEMU answers");
    assert_eq!(here.differences(&MachineFacts::read(&same.qmp).await.expect("QEMU answers")), []);
    assert!(!here.cpu_features.is_empty(), "QEMU does not say what its processors can do");
    drop(same);
    let poorer = Target::start_with(&setup, &["-cpu", "qemu64,-sse3"]).await;
    let there = MachineFacts::read(&poorer.qmp).await.expect("QEMU answers");
    let found: Vec<String> = here.differences(&there).iter().map(ToString::to_string).collect();
    assert!(found.len() == 1 && found[0].contains("CPUID 0x1.ECX bits 0"), "{found:?}");
    drop(poorer);
    let late = json!({ "driver": "virtio-rng-pci", "id": "late", "bus": "port1" });
    setup.qmp.execute("device_add", late).await.expect("plugged");
    let target = Target::start_with(&setup, &["-device", "isa-serial,id=more"]).await;
    let here = MachineFacts::read(&setup.qmp).await.expect("QEMU answers");
    let there = MachineFacts::read(&target.qmp).await.expect("QEMU answers");
    let found: Vec<String> = here.differences(&there).iter().map(ToString::to_string).collect();
    assert!(found.len() == 2 && found[0].contains("late") && found[1].contains("more"), "{found:?}");
    // QEMU says so as well, but only when the guest is stopped already.
    target.move_until_switchover(&setup.qmp, &options(0)).await;
    switch_over(&setup.qmp).await.expect("it goes on");
    let failed = wait_for(&setup.qmp, |now| now.phase == MigrationPhase::Completed, Some(HANG)).await;
    assert_eq!(failed.expect_err("the target lacks a device").kind(), ErrorKind::Migration);
    assert!(target.log().contains("Unknown"), "{}", target.log());
    resume(&setup.qmp).await.expect("it runs");
    setup.vm.load_goes_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn facts_are_those_of_the_running_machine_and_of_this_host() {
    let uuid = "11111111-2222-3333-4444-555555555555";
    let vm = Vm::start_with(KIND, &["-S", "-name", "web", "-uuid", uuid, "-m", "96", "-smp", "2"]);
    let facts = MachineFacts::read(&vm.qmp().await).await.expect("QEMU answers");
    assert_eq!((facts.name.as_deref(), facts.uuid.as_deref()), (Some("web"), Some(uuid)));
    assert_eq!((facts.memory_bytes, facts.vcpus), (96 << 20, 2));
    assert!(facts.machine_type.starts_with("pc-q35-"), "{facts:?}");
    assert_eq!((facts.accelerator.as_str(), facts.run_state.as_str()), ("tcg", "prelaunch"));
    let description = MachineDescription::of_process(vm.child.id()).expect("it lives").expect("a QEMU");
    let host = HostFacts::read(Path::new(&description.program)).await.expect("it tells");
    assert_eq!(host.version, facts.version);
    assert_eq!(facts.refusals(&host), []);
    let small = HostFacts { memory_available_bytes: 96 << 20, ..host };
    assert_eq!(facts.refusals(&small)[0].kind, RefusalKind::Memory);
    assert_eq!(MachineDescription::of_process(std::process::id()).expect("it lives"), None);
}
