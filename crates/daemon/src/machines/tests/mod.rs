//! What a start of the source's daemon makes of a machine that was moving: the record of its group says what became of that.

mod fake_qemu;

use std::time::Duration;

use api::v1::{Decision, ErrorCode, JobState, ResolveRequest};
use block::{Bytes, Data, Mutation};
use uuid::Uuid;

use super::document::{self, IncomingMachine, LastWord, MachineDisk, MachineDocument, MemoryFate, OutgoingMachine};
use crate::daemon::Daemon;
use crate::jobs::CommitRecord;
use crate::location::Location;
use crate::remote::tests::harness::Pair;
use fake_qemu::FakeQemu;

const NAME: &str = "vm";

/// A move that an earlier life of the first host's daemon has begun.
fn outgoing(commit: CommitRecord) -> OutgoingMachine {
    OutgoingMachine {
        id: Uuid::from_u128(7),
        host: "b".to_owned(),
        volumes: vec!["x".to_owned()],
        ran: true,
        stopped: Some(true),
        commit,
        adopted: Vec::new(),
        started_unix_ms: 0,
        domain: None,
        autostart: false,
        description: None,
        postcopy: false,
    }
}

/// Two hosts; the first knows the machine, whose QEMU is this.
async fn with_machine() -> (Pair, FakeQemu) {
    let mut pair = Pair::start().await;
    let qemu = FakeQemu::stopped();
    pair.a.hypervisors = std::sync::Arc::new(qemu.clone());
    pair.a.kill();
    pair.a.start().await;
    pair.a.core().add_machine_of(NAME, "/run/vm.qmp", Vec::new()).await.expect("added");
    (pair, qemu)
}

/// Two hosts; the second knows the machine, with these disks, and its QEMU is this.
async fn with_machine_that_comes(disks: Vec<MachineDisk>) -> (Pair, FakeQemu) {
    let mut pair = Pair::start().await;
    let qemu = FakeQemu::stopped();
    pair.b.hypervisors = std::sync::Arc::new(qemu.clone());
    pair.b.kill();
    pair.b.start().await;
    pair.b.core().add_machine_of(NAME, "/run/vm.qmp", disks).await.expect("added");
    (pair, qemu)
}

/// Stores what moves leave on record, however they have come there.
fn put_on_record(daemon: &Daemon, change: impl FnOnce(&mut MachineDocument)) {
    let mut document = daemon.machine(NAME).expect("known").document();
    change(&mut document);
    document::store(&daemon.layout, &document).expect("stored");
}

/// The daemon of the first host dies with this on record, and is started again.
async fn restarted_with(pair: &mut Pair, change: impl FnOnce(&mut MachineDocument)) {
    put_on_record(pair.a.daemon(), change);
    pair.a.kill();
    pair.between.mend();
    pair.a.start().await;
}

fn document(pair: &Pair) -> MachineDocument {
    pair.a.daemon().machine(NAME).expect("known").document()
}

fn problem(pair: &Pair) -> Option<String> {
    let machine = pair.a.daemon().machine(NAME).expect("known");
    machine.problem.lock().as_ref().map(ToString::to_string)
}

async fn a_while() {
    tokio::time::sleep(Duration::from_secs(5)).await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_another_host_holds_does_not_commit_its_machine() {
    let (mut pair, qemu) = with_machine().await;
    Box::pin(pair.moved()).await;
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(CommitRecord::NotBegun))).await;
    pair.wait("it is undone", || document(&pair).outgoing.is_none()).await;
    assert!(qemu.state().killed.is_empty(), "a guest that runs here was killed");
    assert_eq!(qemu.state().gone_on, [true]);
    assert_eq!(document(&pair).last_move.expect("there was one").state, JobState::Failed);
}

#[tokio::test(start_paused = true)]
async fn a_record_of_an_earlier_version_decides_nothing_while_a_disk_is_elsewhere() {
    let (mut pair, qemu) = with_machine().await;
    Box::pin(pair.moved()).await;
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(CommitRecord::Unnamed))).await;
    a_while().await;
    assert_eq!((qemu.state().killed, qemu.state().gone_on), (Vec::<u32>::new(), Vec::<bool>::new()));
    assert!(document(&pair).outgoing.is_some());
    assert!(problem(&pair).is_some_and(|problem| problem.contains("earlier version")));
}

#[tokio::test(start_paused = true)]
async fn a_record_of_an_earlier_version_is_undone_while_all_disks_are_here() {
    let (mut pair, qemu) = with_machine().await;
    pair.attach().await;
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(CommitRecord::Unnamed))).await;
    pair.wait("it is undone", || document(&pair).outgoing.is_none()).await;
    assert_eq!((qemu.state().killed, qemu.state().gone_on), (Vec::<u32>::new(), vec![true]));
}

#[tokio::test(start_paused = true)]
async fn a_group_whose_record_is_gone_decides_nothing() {
    let (mut pair, qemu) = with_machine().await;
    pair.attach().await;
    let commit = CommitRecord::Group(Uuid::from_u128(9));
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(commit))).await;
    a_while().await;
    assert_eq!((qemu.state().killed, qemu.state().gone_on), (Vec::<u32>::new(), Vec::<bool>::new()));
    assert!(problem(&pair).is_some_and(|problem| problem.contains("journal")));
}

#[tokio::test(start_paused = true)]
async fn the_record_of_the_group_outlives_the_disks_and_decides() {
    for is_committed in [false, true] {
        let (mut pair, qemu) = with_machine().await;
        let record = pair.a.daemon().record_group(NAME, is_committed).await;
        let commit = CommitRecord::Group(record);
        restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(commit))).await;
        a_while().await;
        match is_committed {
            // The other host does not know it: nothing goes on here.
            true => assert_eq!((qemu.state().killed, qemu.state().gone_on), (vec![1], Vec::<bool>::new())),
            false => assert_eq!((qemu.state().killed, qemu.state().gone_on), (Vec::<u32>::new(), vec![true])),
        }
        assert_eq!(document(&pair).outgoing.is_some(), is_committed);
        assert_eq!(
            pair.a.daemon().groups.lock().contains_key(&record),
            is_committed,
            "the record is of no use any more"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_qemu_that_cannot_be_ended_is_told_and_tried_again() {
    let (mut pair, qemu) = with_machine().await;
    qemu.set(|state| state.is_immortal = true);
    let commit = CommitRecord::Group(pair.a.daemon().record_group(NAME, true).await);
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(commit))).await;
    pair.wait("it is told", || problem(&pair).is_some_and(|problem| problem.contains("cannot be ended"))).await;
    assert!(document(&pair).outgoing.is_some());
    qemu.set(|state| state.is_immortal = false);
    pair.wait("it has ended", || qemu.state().pid.is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_process_that_has_the_monitor_since_is_not_the_one_that_moved() {
    let (mut pair, qemu) = with_machine().await;
    let commit = CommitRecord::Group(pair.a.daemon().record_group(NAME, true).await);
    qemu.set(|state| state.pid = Some(2));
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(commit))).await;
    a_while().await;
    assert_eq!((qemu.state().pid, qemu.state().killed), (Some(2), Vec::<u32>::new()), "another machine was ended");
}

#[tokio::test(start_paused = true)]
async fn a_guest_is_told_to_go_on_until_its_monitor_is_free() {
    let (mut pair, qemu) = with_machine().await;
    pair.attach().await;
    qemu.set(|state| state.is_held = true);
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(CommitRecord::NotBegun))).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(document(&pair).outgoing.is_some(), "its guest is stopped, and nobody looks after it");
    assert!(problem(&pair).is_some_and(|problem| problem.contains("another client")));
    qemu.set(|state| state.is_held = false);
    pair.wait("it goes on", || document(&pair).outgoing.is_none()).await;
    assert_eq!(qemu.state().gone_on, [true]);
    assert_eq!(problem(&pair), None);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_was_not_stopped_for_the_switch_is_left_as_it_is() {
    for (stopped, run_state, goes_on) in [
        (Some(false), "paused", false),
        (Some(false), "finish-migrate", true),
        (Some(true), "paused", true),
        (None, "paused", true),
    ] {
        let (mut pair, qemu) = with_machine().await;
        pair.attach().await;
        qemu.set(|state| state.run_state = run_state.to_owned());
        let outgoing = OutgoingMachine { stopped, ..outgoing(CommitRecord::NotBegun) };
        restarted_with(&mut pair, |document| document.outgoing = Some(outgoing)).await;
        pair.wait("it is undone", || document(&pair).outgoing.is_none()).await;
        assert_eq!(qemu.state().gone_on, [goes_on], "{stopped:?} {run_state}");
    }
}

/// Its disk is the volume `x`.
fn disk() -> MachineDisk {
    MachineDisk {
        volume: "x".to_owned(),
        node: "disk0".to_owned(),
        image: "/images/0".to_owned(),
        shared: None,
        grows: false,
        cache: None,
        format: None,
    }
}

/// A move here that has begun.
fn incoming(host: &str) -> IncomingMachine {
    IncomingMachine {
        id: Uuid::from_u128(8),
        host: host.to_owned(),
        folder: "/run/vm/vm".into(),
        runs: true,
        domain: None,
        memory: Vec::new(),
        keeps_volumes: false,
    }
}

/// The volume has moved, and the second host holds it with the machine.
async fn came_with_machine(pair: &Pair) {
    let volume = Box::pin(pair.moved()).await;
    let stored = volume.journal.update(|document| {
        document.incoming.as_mut().expect("it has come").machine = Some(NAME.to_owned());
    });
    stored.await.expect("stored");
}

#[tokio::test(start_paused = true)]
async fn a_machine_whose_qemu_has_ended_after_the_commit_is_lost_for_both_hosts() {
    let (mut pair, qemu) = with_machine_that_comes(vec![disk()]).await;
    pair.between.mend();
    came_with_machine(&pair).await;
    put_on_record(pair.b.daemon(), |document| document.incoming = Some(incoming("a")));
    qemu.set(|state| state.pid = None);
    pair.b.kill();
    pair.between.mend();
    pair.b.start().await;
    let found = || pair.b.daemon().machine(NAME).expect("known").document();
    pair.wait("it is known to be lost", || found().lost.is_some()).await;
    assert_eq!((found().incoming, found().process), (None, None));
    let error = pair.b.daemon().run_arrival("a", Uuid::from_u128(8)).await.expect_err("nothing runs");
    assert_eq!(error.code, ErrorCode::VmLost, "{error}");
    pair.b.daemon().remove_machine(NAME).await.expect("its name is free");
    assert!(pair.b.daemon().volume("x").is_ok(), "the disk stays");
}

#[tokio::test(start_paused = true)]
async fn a_machine_of_which_only_some_disks_have_come_is_forgotten_once_its_qemu_has_ended() {
    let disks = vec![disk(), MachineDisk { volume: "y".to_owned(), ..disk() }];
    let (mut pair, qemu) = with_machine_that_comes(disks).await;
    pair.between.mend();
    came_with_machine(&pair).await;
    put_on_record(pair.b.daemon(), |document| document.incoming = Some(incoming("a")));
    pair.b.kill();
    pair.between.mend();
    pair.b.start().await;
    a_while().await;
    let refused = pair.b.daemon().remove_machine(NAME).await.expect_err("its QEMU may have the guest");
    assert_eq!((refused.code, qemu.state().killed), (ErrorCode::Busy, Vec::new()), "{refused}");
    qemu.set(|state| (state.pid, state.beside) = (None, Some(2)));
    pair.b.daemon().remove_machine(NAME).await.expect_err("one that is not on record has its monitor");
    qemu.set(|state| state.beside = None);
    pair.b.daemon().remove_machine(NAME).await.expect("nothing is left of it");
    assert!(pair.b.daemon().machine(NAME).is_err() && qemu.state().killed.is_empty());
    assert!(matches!(pair.b.document("x").backend, Location::Local(_)), "the disk that has come stays");
}

#[tokio::test(start_paused = true)]
async fn nobody_decides_about_one_disk_of_a_machine_that_is_on_its_way() {
    let (mut pair, _qemu) = with_machine().await;
    pair.attach().await;
    let commit = CommitRecord::Group(Uuid::from_u128(9));
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(commit))).await;
    let decide = |decision| pair.a.core().resolve("x", ResolveRequest { decision, at_risk: true });
    for decision in [Decision::GiveBack, Decision::Take] {
        let refused = decide(Some(decision)).await.expect_err("its other disks would go another way");
        assert!(refused.code == ErrorCode::WrongState && refused.to_string().contains("vm resolve vm"), "{refused}");
    }
    decide(None).await.expect("it is told what is on record");
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_has_come_with_its_machine_takes_no_writes_from_where_it_was() {
    let pair = Pair::start().await;
    came_with_machine(&pair).await;
    // The sessions of a host are opened anew after any trouble.
    pair.between.cut();
    pair.between.mend();
    let slot = pair.a.volume("x").slot().expect("it is up");
    let device = slot.device();
    let write = device.write(Mutation::data(Bytes(0), Data::copy_of(&[9; 4096])));
    let written = tokio::time::timeout(Duration::from_secs(30), write).await;
    assert!(!matches!(written, Ok(Ok(()))), "a guest that is not there any more was answered");
    assert_eq!(Pair::contents(&pair.b, "x").await[0], 7);
}

#[tokio::test(start_paused = true)]
async fn a_volume_of_the_name_of_a_disk_is_not_the_disk() {
    let (mut pair, qemu) = with_machine().await;
    pair.attach().await;
    let change = |document: &mut MachineDocument| {
        (document.disks, document.incoming) = (vec![disk()], Some(incoming("b")));
    };
    restarted_with(&mut pair, change).await;
    // Its QEMU is on record, and does not come to its disk.
    pair.wait("it is given up", || pair.a.daemon().machine(NAME).is_err()).await;
    assert_eq!(qemu.state().killed, [1]);
    assert!(pair.a.daemon().volume("x").is_ok(), "the other volume stays");
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_somebody_lets_run_while_its_commit_is_asked_for_is_stopped() {
    let qemu = FakeQemu::stopped();
    for (run_state, ran, then) in [
        ("postmigrate", false, "postmigrate"),
        ("finish-migrate", false, "finish-migrate"),
        ("running", true, "paused"),
    ] {
        qemu.set(|state| state.run_state = run_state.to_owned());
        assert_eq!(super::still::stop_if_it_runs(&qemu).await.expect("it answers"), ran, "{run_state}");
        assert_eq!(qemu.state().run_state, then);
    }
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_has_come_says_so_after_a_restart_too_and_one_that_has_not_does_not() {
    let (mut pair, _qemu) = with_machine_that_comes(Vec::new()).await;
    let id = Uuid::from_u128(8);
    let error = pair.b.daemon().run_arrival("a", id).await.expect_err("nothing has come");
    assert_eq!(error.code, ErrorCode::NotFound, "{error}");
    let known = pair.b.daemon().machine(NAME).expect("known");
    let word = LastWord { id, host: "a".to_owned(), memory: MemoryFate::Whole };
    pair.b.daemon().update_machine(&known, |document| document.last_word = Some(word)).expect("stored");
    pair.b.kill();
    pair.b.start().await;
    pair.b.daemon().run_arrival("a", id).await.expect("it has run");
    pair.b.daemon().run_arrival("c", id).await.expect_err("it came from another host");
}

#[tokio::test(start_paused = true)]
async fn a_host_that_knows_nothing_of_a_machine_does_not_count_as_one_that_runs_it() {
    let (mut pair, qemu) = with_machine().await;
    let commit = CommitRecord::Group(pair.a.daemon().record_group(NAME, true).await);
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(commit))).await;
    pair.wait("it is over", || document(&pair).outgoing.is_none()).await;
    assert_eq!(qemu.state().killed, [1]);
    let over = document(&pair).last_move.expect("there was one");
    assert_eq!(over.state, JobState::Failed, "it counts as one that runs there");
    assert_eq!(over.error.map(|error| error.code), Some(ErrorCode::VmLost));
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_was_started_here_again_after_its_commit_is_not_told_to_run_there() {
    let (mut pair, qemu) = with_machine().await;
    let commit = CommitRecord::Group(pair.a.daemon().record_group(NAME, true).await);
    qemu.set(|state| state.beside = Some(2));
    restarted_with(&mut pair, |document| document.outgoing = Some(outgoing(commit))).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(document(&pair).outgoing.is_some(), "its guest runs twice");
    assert!(problem(&pair).is_some_and(|problem| problem.contains("another QEMU (process 2)")), "{:?}", problem(&pair));
    assert_eq!(qemu.state().killed, [1], "another machine was ended");
    qemu.set(|state| state.beside = None);
    pair.wait("it is over", || document(&pair).outgoing.is_none()).await;
}
