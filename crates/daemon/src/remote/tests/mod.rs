//! What two hosts make of a volume between them: two daemons in one process.

mod doubt;
mod fake_arbiter;
pub(crate) mod harness;
mod opened;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Decision, ErrorCode, JobState, MoveRequest, PlanRequest, ResolveRequest, SnapshotRequest};
use backends::{BackendSpec, PreparedTarget, TargetOrigin};
use block::{Bytes, Data, Mutation};

use crate::arbiter::Ruling;
use crate::document::{IncomingStage, VolumeDocument};
use crate::location::Location;
use fake_arbiter::FakeArbiter;
use harness::Pair;

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_taken_while_somebody_gives_it_back_has_one_holder() {
    let fake_arbiter = Arc::<FakeArbiter>::default();
    let pair = Pair::start_with(Some(Arc::clone(&fake_arbiter))).await;
    Box::pin(pair.given_up_untaken()).await;
    // What is put away cannot be given back.
    pair.a.disks.is_read_only.store(true, Ordering::Relaxed);
    // The first member is silent, and the second answers.
    fake_arbiter.delay_ms.store(5000, Ordering::Relaxed);
    let deciding = pair.a.core().resolve("x", ResolveRequest { decision: Some(Decision::GiveBack), at_risk: false });
    let mending = async {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        pair.between.mend();
    };
    let (decided, ()) = tokio::join!(deciding, mending);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let here = pair.a.document("x").backend.local_path().is_some();
    let there =
        pair.b.daemon().volume_if_any("x").expect("readable").and_then(|volume| volume.document().incoming.clone());
    let there = there.is_some_and(|incoming| matches!(incoming.stage, IncomingStage::Held { .. }));
    assert!(here != there, "here: {here}, there: {there}, decided: {decided:?}");
    if let Err(error) = decided {
        assert_eq!(error.code, ErrorCode::WrongState, "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_commit_is_on_record_is_not_given_back_before_its_requests_turn() {
    let pair = Pair::start().await;
    let volume = pair.attach().await;
    pair.a.core().start_move("x", slow("b")).await.expect("it begins");
    pair.wait("it arrives", || pair.b.daemon().volume("x").is_ok()).await;
    // On record, and the migration has not come to turn the guest's requests to the other host.
    volume.journal.update(VolumeDocument::commit).await.expect("stored");
    pair.between.close();
    let back = ResolveRequest { decision: Some(Decision::GiveBack), at_risk: false };
    let deciding = pair.a.core().resolve("x", back);
    let decided = tokio::time::timeout(Duration::from_millis(100), deciding).await;
    decided.expect_err("somebody has decided beside the switchover");
}

/// What two disks of a machine share is that both come back: a daemon that dies between them must not have the other host take one.
#[tokio::test(start_paused = true)]
async fn a_volume_that_is_to_come_back_is_taken_by_nobody_in_a_later_life_either() {
    let mut pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    let volume = pair.a.volume("x");
    let remote = match &volume.document().backend {
        Location::Remote(remote) => remote.clone(),
        other => panic!("it is given up, and not {other:?}"),
    };
    pair.a.daemon().decide_give_back("vm", &[volume], false).await.expect("it is decided");
    assert!(pair.a.daemon().has_aborted(&remote), "it is on record");
    pair.a.kill();
    pair.between.mend();
    pair.a.start().await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(!is_held(&pair.b.volume("x")), "the other host has taken it");
    assert!(pair.a.document("x").given_up().is_some(), "nobody has decided again");
    let back = ResolveRequest { decision: Some(Decision::GiveBack), at_risk: false };
    pair.a.core().resolve("x", back).await.expect("it is here again");
    assert_eq!(Pair::contents(&pair.a, "x").await[0], 7);
    let is_forgotten = || pair.b.daemon().volume_if_any("x").expect("readable").is_none();
    pair.wait("the other host forgets it", is_forgotten).await;
    pair.wait("nothing is left to tell", || !pair.a.daemon().has_aborted(&remote)).await;
}

/// A host that knows nothing of a volume may have held it, and let it go since with newer bytes.
#[tokio::test(start_paused = true)]
async fn a_volume_that_the_other_host_has_let_go_is_given_back_at_a_risk_only() {
    let mut pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    pair.a.kill();
    let take = ResolveRequest { decision: Some(Decision::Take), at_risk: true };
    pair.b.core().resolve("x", take).await.expect("a person takes it");
    let detached = pair.b.daemon().detach("x").await;
    detached.expect("it is let go there, under whatever name its file is used");
    pair.between.mend();
    pair.a.start().await;
    let decide = |at_risk| pair.a.core().resolve("x", ResolveRequest { decision: Some(Decision::GiveBack), at_risk });
    let found = pair.a.core().resolve("x", ResolveRequest { decision: None, at_risk: false }).await.expect("asked");
    assert!(found.risk.is_some_and(|risk| risk.contains("let it go")), "{}", found.verdict);
    let refused = decide(false).await.expect_err("its newest bytes may be there");
    assert!(refused.code == ErrorCode::WrongState && refused.to_string().contains("--risk"), "{refused}");
    assert!(pair.a.document("x").given_up().is_some());
    decide(true).await.expect("a person knows better");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_decided_about_disks_of_which_the_other_host_holds_one() {
    let pair = Pair::start().await;
    let held = Box::pin(pair.moved()).await;
    drop(held);
    let other = pair.attach_as("y").await;
    pair.between.has_one_session.store(true, Ordering::Relaxed);
    pair.a.begin_move("y", "b").await;
    pair.wait("it is given up", || pair.a.document("y").given_up().is_some()).await;
    let both = [pair.a.volume("x"), other];
    let refused = pair.a.daemon().decide_give_back("vm", &both, false).await.expect_err("one is there");
    assert!(refused.code == ErrorCode::WrongState && refused.to_string().contains("b holds x"), "{refused}");
    pair.between.mend();
    let is_taken = || pair.b.daemon().volume_if_any("y").is_ok_and(|volume| volume.is_some_and(|it| is_held(&it)));
    pair.wait("the other one is taken", is_taken).await;
}

fn is_held(volume: &crate::volume::Volume) -> bool {
    volume.document().incoming.as_ref().is_some_and(|incoming| incoming.is_held())
}

#[tokio::test(start_paused = true)]
async fn who_goes_away_while_he_decides_leaves_the_volume_to_be_taken() {
    let fake_arbiter = Arc::<FakeArbiter>::default();
    let pair = Pair::start_with(Some(Arc::clone(&fake_arbiter))).await;
    Box::pin(pair.given_up_untaken()).await;
    fake_arbiter.delay_ms.store(60_000, Ordering::Relaxed);
    let decision = ResolveRequest { decision: Some(Decision::GiveBack), at_risk: false };
    let deciding = pair.a.core().resolve("x", decision);
    tokio::time::timeout(Duration::from_secs(10), deciding).await.expect_err("it waits for the arbiter");
    pair.between.mend();
    let is_taken = || {
        let incoming = pair.b.document("x").incoming.clone();
        incoming.is_some_and(|incoming| matches!(incoming.stage, IncomingStage::Held { .. }))
    };
    pair.wait("it is taken", is_taken).await;
}

#[tokio::test(start_paused = true)]
async fn a_start_waits_for_a_target_that_somebody_has_and_takes_nothing_back() {
    let mut pair = Pair::start().await;
    pair.attach().await;
    pair.a.core().start_move("x", slow("file:/disks/y")).await.expect("it begins");
    pair.wait("it begins", || pair.a.volume("x").job().is_some_and(|job| job.has_begun())).await;
    pair.a.kill();
    pair.a.disks.locked.lock().insert("/disks/y".into());
    pair.a.start().await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let job = pair.a.core().jobs().remove(0);
    assert_eq!(job.state, JobState::Queued, "{:?}", job.error);
    assert!(job.error.is_some_and(|error| error.message.contains("somebody has it")));
    assert!(pair.a.disks.file(Path::new("/disks/y")).is_ok(), "what somebody has was removed");
    assert_eq!(Pair::contents(&pair.a, "x").await, vec![7; 1 << 20]);
    pair.a.disks.locked.lock().clear();
    pair.a.core().job_over("x").await;
    let job = pair.a.core().jobs().remove(0);
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
}

#[tokio::test(start_paused = true)]
async fn a_move_that_waits_for_its_target_after_a_start_is_cancelled_at_once() {
    let mut pair = Pair::start().await;
    pair.attach().await;
    pair.a.core().start_move("x", slow("file:/disks/y")).await.expect("it begins");
    pair.wait("it begins", || pair.a.volume("x").job().is_some_and(|job| job.has_begun())).await;
    pair.a.kill();
    pair.a.disks.locked.lock().insert("/disks/y".into());
    pair.a.start().await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    pair.a.core().steer("x", "cancel").await.expect("it may be cancelled");
    tokio::time::timeout(Duration::from_secs(1), pair.a.core().job_over("x")).await.expect("it ends at once");
    assert_eq!(pair.a.core().jobs().remove(0).state, JobState::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_image_somebody_has_comes_back_by_itself_or_is_detached() {
    let mut pair = Pair::start().await;
    for is_detached in [false, true] {
        pair.attach().await;
        pair.a.kill();
        pair.a.disks.locked.lock().insert("/disks/x".into());
        pair.a.start().await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(pair.a.volume("x").slot().is_none(), "it is served");
        if !is_detached {
            pair.a.disks.locked.lock().clear();
            pair.wait("it is served", || pair.a.volume("x").slot().is_some()).await;
            assert_eq!(Pair::contents(&pair.a, "x").await, vec![7; 1 << 20]);
        }
        pair.a.core().detach("x").await.expect("it is detached");
        pair.a.disks.locked.lock().clear();
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_another_host_s_guest_depends_on_is_neither_detached_nor_served_to_others() {
    let mut pair = Pair::start().await;
    let there = Box::pin(pair.moved()).await;
    assert!(pair.a.clients.may_come_to("x"), "its guest has lost its export");
    assert!(!pair.b.clients.may_come_to("x"), "two may write to it");
    pair.between.close();
    pair.between.cut();
    drop(there);
    pair.b.kill();
    pair.b.start().await;
    assert!(!pair.b.clients.may_come_to("x"), "two may write to it after a restart");
    let error = pair.b.core().detach("x").await.expect_err("the guest of the other host has lost its disk");
    assert_eq!(error.code, ErrorCode::InUse, "{error}");
    assert!(error.to_string().contains("resolve x --take"), "{error}");

    // The other host lets it go while nobody gets through, and says so later, over a restart of its own.
    pair.a.core().detach("x").await.expect("nobody is connected there");
    pair.a.kill();
    pair.a.start().await;
    pair.b.core().detach("x").await.expect_err("nobody has said that it is free");
    pair.between.mend();
    pair.wait("it is served", || pair.b.clients.may_come_to("x")).await;
    assert_eq!(pair.b.document("x").incoming, None);
    pair.b.core().detach("x").await.expect("nobody uses it");
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_told_that_a_volume_is_let_go_by_the_next_start_of_a_host_that_has_removed_it_and_died() {
    let mut pair = Pair::start().await;
    Box::pin(pair.moved()).await;
    let Location::Remote(remote) = pair.a.document("x").backend.clone() else { panic!("it has moved") };
    // Nobody is told of a volume that is still here.
    pair.a.daemon().note_release(&remote);
    pair.a.kill();
    pair.a.start().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(!pair.b.clients.may_come_to("x"), "its guest is at the other host");
    pair.b.core().detach("x").await.expect_err("its guest is at the other host");

    let here = pair.a.volume("x");
    pair.a.daemon().remove_volume(&here).await.expect("nobody is connected");
    drop(here);
    pair.a.kill();
    pair.a.start().await;
    pair.wait("it is served", || pair.b.clients.may_come_to("x")).await;
    assert_eq!(pair.b.document("x").incoming, None);
}

#[tokio::test(start_paused = true)]
async fn what_the_layers_of_a_volume_have_taken_is_there_when_its_host_lets_it_go() {
    let pair = Pair::start().await;
    let here = pair.attach().await;
    pair.a.core().add_snapshot("x", SnapshotRequest::default()).await.expect("taken");
    pair.a.begin_move("x", "b").await;
    pair.a.core().job_over("x").await;
    assert_eq!(pair.a.core().jobs().remove(0).state, JobState::Done);
    assert_eq!(pair.b.document("x").layers, [], "until then only their bytes are there");
    // Nobody flushes: the other machine has been booted at another time, and believes nothing that was not.
    let data = Data::copy_of(&[9; 64 << 10]);
    here.slot().expect("it is up").device().write(Mutation::data(Bytes::kib(64), data)).await.expect("written");
    let after = Pair::contents(&pair.a, "x").await;
    pair.between.close();
    pair.between.cut();
    let error = pair.a.core().detach("x").await.expect_err("the other host would miss what was not flushed");
    assert_eq!(error.code, ErrorCode::HostUnreachable, "{error}");
    assert!(pair.a.clients.may_come_to("x"), "it is not served any more");
    pair.between.mend();
    pair.a.core().detach("x").await.expect("nobody is connected there");
    pair.wait("it is served", || pair.b.clients.may_come_to("x")).await;
    assert_eq!(pair.b.document("x").layers.len(), 1);
    assert!(Pair::contents(&pair.b, "x").await == after, "the guest's disk is another");
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_its_source_has_kept_and_detached_was_not_given_up() {
    let pair = Pair::start().await;
    pair.attach().await;
    pair.a.core().start_move("x", slow("b")).await.expect("it begins");
    pair.wait("it arrives", || pair.b.daemon().volume("x").is_ok()).await;
    let there = pair.b.volume("x");
    pair.wait("it is copied", || pair.a.core().control("x").is_some_and(|control| control.snapshot().bytes_copied > 0))
        .await;
    // Prepared by a switchover that did not come about.
    let prepared = there.journal.update(|document| {
        let incoming = document.incoming.as_mut().expect("it arrives");
        incoming.stage = IncomingStage::Prepared { epoch: incoming.epoch + 1 };
    });
    prepared.await.expect("stored");
    pair.between.close();
    pair.between.cut();
    pair.a.core().steer("x", "cancel").await.expect("cancelled");
    pair.a.core().job_over("x").await;
    pair.a.core().detach("x").await.expect("it is idle");
    // Only the first host can be asked.
    pair.between.open_to(0);
    let found = pair.b.core().resolve("x", ResolveRequest::default()).await.expect("looked at");
    assert!(!found.in_doubt, "{found:?}");
    let take = ResolveRequest { decision: Some(Decision::Take), at_risk: false };
    let error = pair.b.core().resolve("x", take).await.expect_err("it took what its source has kept");
    assert_eq!(error.code, ErrorCode::WrongState, "{error}");
    let back = ResolveRequest { decision: Some(Decision::GiveBack), at_risk: false };
    pair.b.core().resolve("x", back).await.expect("it is not the volume");
    assert!(pair.b.daemon().volume_if_any("x").expect("readable").is_none());
}

#[tokio::test(start_paused = true)]
async fn a_note_that_was_left_deletes_neither_a_finished_disk_nor_another_s_file() {
    let mut pair = Pair::start().await;
    Box::pin(pair.moved()).await;
    // The note of its making could not be taken back.
    let note = r#"[{"volume":"x","path":"/incoming/x.raw"}]"#;
    let path = pair.b.state_dir().join("arriving.json");
    std::fs::write(&path, note).expect("written");
    pair.a.core().detach("x").await.expect("nobody is connected there");
    pair.wait("it is served", || pair.b.clients.may_come_to("x")).await;
    pair.b.core().detach("x").await.expect("nobody uses it");
    pair.b.kill();
    pair.b.start().await;
    assert!(pair.has_file("/incoming/x.raw"), "a finished disk is gone");

    // Somebody has the file that such a note names.
    std::fs::write(&path, note).expect("written");
    pair.b.disks.locked.lock().insert("/incoming/x.raw".into());
    pair.b.kill();
    pair.b.start().await;
    assert!(pair.has_file("/incoming/x.raw"), "a file in use is gone");

    // Another file has the name of the one that was made.
    pair.b.disks.locked.lock().clear();
    let spec = BackendSpec::file("/incoming/y.raw");
    let noted = pair.b.daemon().note_pending_file("y", &spec).await.expect("noted").expect("there is none");
    let number = pair.b.disks.make(spec.path(), Bytes::mib(1));
    let made = PreparedTarget::elsewhere(spec.clone(), TargetOrigin::Created, true, number);
    pair.b.daemon().note_made_file(&noted, &made);
    pair.b.disks.make(spec.path(), Bytes::mib(1));
    pair.b.kill();
    pair.b.start().await;
    assert!(pair.has_file("/incoming/y.raw"), "another's file is gone");
}

#[tokio::test(start_paused = true)]
async fn what_another_host_puts_here_has_a_limit_and_a_plan_says_so() {
    let mut pair = Pair::start().await;
    pair.b.hosts.incoming_volumes_max = 1;
    pair.b.kill();
    pair.b.start().await;
    Box::pin(pair.moved()).await;
    pair.a.core().detach("x").await.expect("nobody is connected there");
    pair.wait("it is served", || pair.b.clients.may_come_to("x")).await;
    pair.attach().await;
    let plan = pair.a.daemon().plan("x", planned()).await;
    let refusal = plan.expect("planned").refusal.expect("there is no place for it");
    assert!(refusal.to_string().contains("incoming-volumes-max"), "{refusal}");
    let error = pair.a.core().start_move("x", slow("b:y")).await.expect_err("it was let in");
    assert_eq!(error.code, ErrorCode::NoSpace, "{error}");
    // The same of bytes, and of a host that takes none.
    for (gib, directories, code) in [(1, vec!["/incoming".into()], None), (0, Vec::new(), Some(ErrorCode::HostRefused))]
    {
        pair.b.hosts.incoming_volumes_max = 0;
        (pair.b.hosts.incoming_gib_max, pair.b.hosts.incoming_dirs) = (gib, directories);
        pair.b.kill();
        pair.b.start().await;
        let plan = pair.a.daemon().plan("x", planned()).await;
        assert_eq!(plan.expect("planned").refusal.map(|refusal| refusal.code), code);
    }
}

#[tokio::test]
async fn files_are_made_and_removed_for_other_hosts_beside_the_threads_of_their_streams() {
    let mut pair = Pair::start().await;
    pair.b.has_threads = true;
    pair.b.kill();
    pair.b.start().await;
    pair.attach().await;
    pair.a.core().start_move("x", slow("b")).await.expect("it begins");
    pair.wait("it arrives", || pair.b.daemon().volume("x").is_ok()).await;
    pair.a.core().steer("x", "cancel").await.expect("cancelled");
    pair.a.core().job_over("x").await;
    pair.wait("it is removed", || !pair.has_file("/incoming/x.raw")).await;
    let threads = pair.b.disks.threads.lock().clone();
    assert_eq!(threads.into_iter().collect::<Vec<_>>(), ["arrivals"]);
}

#[tokio::test(start_paused = true)]
async fn a_take_that_hangs_keeps_nobody_from_the_others() {
    let fake_arbiter = Arc::<FakeArbiter>::default();
    let mut pair = Pair::start().await;
    pair.b.arbiter = Some(Arc::clone(&fake_arbiter));
    pair.b.kill();
    pair.b.start().await;
    pair.attach().await;
    pair.attach_as("y").await;
    for name in ["x", "y"] {
        pair.a.core().start_move(name, slow("b")).await.expect("it begins");
        pair.wait("it arrives", || pair.b.daemon().volume(name).is_ok()).await;
    }
    pair.between.close();
    pair.between.cut();
    for name in ["x", "y"] {
        let volume = pair.b.volume(name);
        let prepared = volume.journal.update(|document| {
            let incoming = document.incoming.as_mut().expect("it arrives");
            incoming.stage = IncomingStage::Prepared { epoch: incoming.epoch + 1 };
        });
        prepared.await.expect("stored");
        let job = volume.document().incoming.as_ref().expect("it arrives").job;
        fake_arbiter.set(job, Ruling::Committed);
        if name == "x" {
            fake_arbiter.hanging.lock().push(job);
        }
    }
    let stage = |name: &str| pair.b.document(name).incoming.as_ref().map(|incoming| incoming.stage);
    pair.wait("the other one is taken", || matches!(stage("y"), Some(IncomingStage::Held { .. }))).await;
    assert!(matches!(stage("x"), Some(IncomingStage::Prepared { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_volume_of_which_only_the_arbiter_knows_whether_it_was_given_up_is_not_detached() {
    let fake_arbiter = Arc::<FakeArbiter>::default();
    let mut pair = Pair::start_with(Some(Arc::clone(&fake_arbiter))).await;
    let volume = pair.attach().await;
    pair.a.core().start_move("x", slow("b")).await.expect("it begins");
    pair.wait("it arrives", || pair.b.daemon().volume("x").is_ok()).await;
    volume.journal.update_job(|job| job.asked = true).await.expect("stored");
    drop(volume);
    fake_arbiter.is_away.store(true, Ordering::Relaxed);
    pair.a.kill();
    pair.a.start().await;
    let error = pair.a.core().detach("x").await.expect_err("nobody knows who holds it");
    assert_eq!(error.code, ErrorCode::WrongState, "{error}");
    fake_arbiter.is_away.store(false, Ordering::Relaxed);
    pair.wait("it is served again", || pair.a.clients.may_come_to("x")).await;
}

/// A move that takes long.
fn slow(to: &str) -> MoveRequest {
    MoveRequest { to: to.to_owned(), bandwidth: Some(64 << 10), ..MoveRequest::default() }
}

fn planned() -> PlanRequest {
    PlanRequest { request: MoveRequest { to: "b:y".to_owned(), ..MoveRequest::default() } }
}

#[tokio::test(start_paused = true)]
async fn the_old_image_is_out_of_the_way_from_the_commit_on_and_back_once_the_volume_is_given_back() {
    let mut pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    let is_there = |pair: &Pair| pair.a.disks.file(Path::new("/disks/x")).is_ok();
    pair.wait("it is out of the way", || !is_there(&pair)).await;
    pair.between.close();
    pair.a.kill();
    // As a power failure right after the commit leaves it.
    let source =
        pair.a.disks.paths().into_iter().find(|path| path.display().to_string().contains("moved")).expect("kept");
    pair.a.disks.rename(&source, Path::new("/disks/x"));
    pair.a.start().await;
    pair.wait("it is out of the way again", || !is_there(&pair)).await;
    let back = ResolveRequest { decision: Some(Decision::GiveBack), at_risk: false };
    pair.a.core().resolve("x", back).await.expect("a person has said so");
    assert!(is_there(&pair), "it has not got its name back");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(is_there(&pair), "the image of a volume that is held here was put away");
    assert_eq!(Pair::contents(&pair.a, "x").await, vec![7; 1 << 20]);
}

#[tokio::test(start_paused = true)]
async fn a_give_back_that_fails_here_takes_nothing_from_the_other_host() {
    let pair = Pair::start().await;
    Box::pin(pair.given_up_untaken()).await;
    let moved = || pair.a.disks.paths().into_iter().find(|path| path.display().to_string().contains("moved"));
    pair.wait("the old image is out of the way", || moved().is_some()).await;
    let (image, away) = (moved().expect("it was found"), Path::new("/disks/away"));
    // Somebody has put it elsewhere.
    pair.a.disks.rename(&image, away);
    let back = ResolveRequest { decision: Some(Decision::GiveBack), at_risk: false };
    for reaches in [true, false] {
        if !reaches {
            pair.between.close();
        }
        pair.a.core().resolve("x", back).await.expect_err("the old image is not there");
        assert!(pair.has_file("/incoming/x.raw"), "the only copy is gone");
    }
    pair.between.mend();
    pair.wait("it is held there", || pair.b.document("x").incoming.as_ref().is_some_and(|incoming| incoming.is_held()))
        .await;
    assert_eq!(Pair::contents(&pair.b, "x").await, vec![7; 1 << 20]);
}
