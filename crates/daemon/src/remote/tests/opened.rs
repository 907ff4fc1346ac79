//! A volume that a person opens at its new host, while its guest at the old one is not heard of.

use api::v1::{Decision, ErrorCode, JobState, Resolution, ResolveRequest, SnapshotRequest};
use block::{Buffer, Bytes, Data, Device, Mutation};

use super::harness::{Machine, Pair};
use crate::document::{DOCUMENT_VERSION_OPENED, VolumeDocument};
use crate::location::Location;

const AT: Bytes = Bytes::kib(64);

async fn resolve(machine: &Machine, decision: Option<Decision>) -> Result<Resolution, api::v1::Error> {
    machine.core().resolve("x", ResolveRequest { decision, at_risk: false }).await
}

fn device(machine: &Machine) -> Device {
    machine.volume("x").slot().expect("it is up").device()
}

fn write_of(byte: u8) -> Mutation {
    Mutation::data(AT, Data::copy_of(&[byte; 4096]))
}

async fn read(machine: &Machine) -> u8 {
    device(machine).read(AT, Buffer::unpooled(4096)).await.expect("read")[0]
}

fn is_taken(document: &VolumeDocument) -> bool {
    document.backend.local_path().is_none() && document.given_up().is_none()
}

#[tokio::test(start_paused = true)]
async fn what_a_guest_waits_to_write_does_not_land_over_what_was_written_since_at_the_new_host() {
    let mut pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    pair.between.close();
    pair.between.cut();
    let (guest, late) = (device(&pair.a), write_of(1));
    let late = tokio::spawn(async move { guest.write(late).await });
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    resolve(&pair.b, Some(Decision::Take)).await.expect("somebody has decided");
    assert_eq!(pair.b.document("x").version, DOCUMENT_VERSION_OPENED, "an earlier version would let that guest in");
    device(&pair.b).write(write_of(2)).await.expect("written");
    device(&pair.b).flush().await.expect("flushed");
    pair.between.mend();
    pair.wait("its move is over", || is_taken(&pair.a.document("x"))).await;
    pair.a.core().job_over("x").await;
    assert_eq!(pair.a.core().jobs().remove(0).state, JobState::Done);
    let found = resolve(&pair.a, None).await.expect("looked at");
    assert!(found.verdict.contains("resolve x --give-back"), "{found:?}");
    assert!(pair.b.clients.may_come_to("x"), "those who use it have lost it");

    // Nor after either of them was started again.
    pair.b.kill();
    pair.b.start().await;
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(!late.is_finished() && pair.b.clients.may_come_to("x"));
    assert_eq!(read(&pair.b).await, 2);
    let again = resolve(&pair.b, Some(Decision::Take)).await.expect("it is open");
    assert_eq!(again.done.as_deref(), Some("it is open already"));

    // Its guest is over.
    pair.a.core().detach("x").await.expect("nobody is connected");
    assert!(late.await.expect("it ends").is_err());
    pair.wait("it is let go", || pair.b.document("x").incoming.is_none()).await;
    assert_eq!((read(&pair.b).await, pair.b.document("x").opened.clone()), (2, None));
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_was_kept_out_of_its_volume_comes_back_when_a_person_says_so_and_nobody_uses_it() {
    let pair = Pair::start().await;
    let there = Box::pin(pair.moved()).await;
    let error = resolve(&pair.b, Some(Decision::Take)).await.expect_err("its guest is there");
    assert_eq!(error.code, ErrorCode::WrongState, "{error}");
    pair.between.close();
    pair.between.cut();
    pair.wait("its guest is not heard of", || !there.is_used_from_afar()).await;
    let found = resolve(&pair.b, None).await.expect("looked at");
    assert!(found.risk.is_some() && !found.in_doubt, "{found:?}");
    resolve(&pair.b, Some(Decision::Take)).await.expect("somebody has decided");
    assert!(pair.b.clients.may_come_to("x"));
    pair.between.mend();
    let guest = device(&pair.a);
    let waiting = tokio::spawn(async move { guest.read(AT, Buffer::unpooled(4096)).await.map(|read| read[0]) });
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(!waiting.is_finished() && pair.b.clients.may_come_to("x"), "its guest has driven others out");
    let found = resolve(&pair.b, None).await.expect("looked at");
    assert!(found.risk.is_some() && found.verdict.contains("--give-back"), "{found:?}");
    resolve(&pair.b, Some(Decision::GiveBack)).await.expect("nobody uses it there");
    assert_eq!(waiting.await.expect("it ends").expect("read"), 7);
    assert!(there.is_used_from_afar() && !pair.b.clients.may_come_to("x"), "two may write to it");
    pair.b.core().detach("x").await.expect_err("its guest is back");
}

#[tokio::test(start_paused = true)]
async fn a_volume_with_layers_that_a_person_has_opened_ends_its_move_and_is_let_go_at_its_old_host() {
    let pair = Pair::start().await;
    pair.attach().await;
    pair.a.core().add_snapshot("x", SnapshotRequest::default()).await.expect("taken");
    pair.between.has_one_session.store(true, std::sync::atomic::Ordering::Relaxed);
    pair.a.begin_move("x", "b").await;
    pair.wait("it is given up", || pair.a.document("x").backend.local_path().is_none()).await;
    pair.between.close();
    pair.between.cut();
    resolve(&pair.b, Some(Decision::Take)).await.expect("somebody has decided");
    device(&pair.b).write(write_of(2)).await.expect("written");
    pair.between.mend();
    pair.wait("its move is over", || is_taken(&pair.a.document("x"))).await;
    tokio::time::sleep(std::time::Duration::from_secs(10)).await;
    assert!(resolve(&pair.b, Some(Decision::GiveBack)).await.is_err(), "its layers are built");
    let found = resolve(&pair.a, None).await.expect("looked at");
    assert!(found.verdict.contains("volume detach x"), "{found:?}");
    pair.a.core().detach("x").await.expect("its layers are another's");
    assert_eq!(read(&pair.b).await, 2);
}

#[tokio::test(start_paused = true)]
async fn another_volume_of_the_name_is_not_taken_for_the_one_that_was_given_up() {
    let mut pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    pair.between.close();
    pair.between.cut();
    pair.b.kill();
    pair.b.start().await;
    let other = pair.b.volume("x");
    // As a state directory from a backup has it.
    let stored = other.journal.update(|document| {
        document.epoch = 9;
        document.incoming = None;
    });
    stored.await.expect("stored");
    pair.between.mend();
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(pair.a.document("x").given_up().is_some(), "its source would be removed");
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_refused_because_the_volume_is_down_does_not_count_as_kept_out() {
    let mut pair = Pair::start().await;
    pair.attach().await;
    pair.a.core().add_snapshot("x", SnapshotRequest::default()).await.expect("taken");
    pair.a.begin_move("x", "b").await;
    pair.a.core().job_over("x").await;
    device(&pair.a).write(write_of(1)).await.expect("written, and not flushed");
    let file = pair.b.document("x").backend.local_path().expect("it is here").to_owned();
    pair.b.kill();
    pair.b.disks.locked.lock().insert(file);
    pair.b.start().await;
    tokio::time::sleep(std::time::Duration::from_secs(30)).await;
    let error = pair.a.core().detach("x").await.expect_err("the other host lacks what was not flushed");
    assert_eq!(error.code, ErrorCode::HostUnreachable, "{error}");
    pair.b.disks.locked.lock().clear();
    pair.wait("it is up again", || pair.b.volume("x").slot().is_some()).await;
    pair.a.core().detach("x").await.expect("it is flushed");
    pair.wait("it is served", || pair.b.clients.may_come_to("x")).await;
    assert_eq!(read(&pair.b).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_give_back_that_was_interrupted_and_overtaken_ends_when_a_person_looks() {
    let pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    pair.between.close();
    pair.between.cut();
    let Location::Remote(remote) = pair.a.document("x").backend.clone() else { panic!("it was given up") };
    // As a daemon leaves it that is killed between the two stores.
    pair.a.daemon().decide_abort(std::slice::from_ref(&remote)).expect("stored");
    resolve(&pair.b, Some(Decision::Take)).await.expect("a person takes the risk");
    pair.between.mend();
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(pair.a.document("x").given_up().is_some(), "it is told of a volume that is to come back");
    let found = resolve(&pair.a, None).await.expect("looked at");
    assert!(found.verdict.contains("b holds the volume"), "{found:?}");
    pair.wait("its move is over", || is_taken(&pair.a.document("x"))).await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_being_given_back_is_not_said_to_be_given_up() {
    let pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    let Location::Remote(remote) = pair.a.document("x").backend.clone() else { panic!("it was given up") };
    pair.a.daemon().decide_abort(std::slice::from_ref(&remote)).expect("stored");
    // Only the first host can be asked.
    pair.between.open_to(0);
    let error = resolve(&pair.b, Some(Decision::Take)).await.expect_err("its old host has it back in a moment");
    assert_eq!(error.code, ErrorCode::WrongState, "{error}");
}
