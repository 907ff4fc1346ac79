//! Commits of which only the arbiter knows, and one that has forgotten, or never answers again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Decision, ErrorCode, JobState, MoveRequest, Resolution, ResolveRequest};

use super::fake_arbiter::FakeArbiter;
use super::harness::Pair;
use crate::audit::Peer;
use crate::document::IncomingStage;

/// Two hosts with one arbiter, and a volume at the first.
async fn judged() -> (Pair, Arc<FakeArbiter>) {
    let fake_arbiter = Arc::<FakeArbiter>::default();
    let mut pair = Pair::start_with(Some(Arc::clone(&fake_arbiter))).await;
    pair.b.arbiter = Some(Arc::clone(&fake_arbiter));
    pair.b.kill();
    pair.b.start().await;
    pair.attach().await;
    (pair, fake_arbiter)
}

fn is_held_there(pair: &Pair) -> bool {
    stage_there(pair, "x").is_some_and(|stage| matches!(stage, IncomingStage::Held { .. }))
}

fn stage_there(pair: &Pair, name: &str) -> Option<IncomingStage> {
    let volume = pair.b.daemon().volume_if_any(name).expect("readable");
    volume.and_then(|volume| volume.document().incoming.as_ref().map(|incoming| incoming.stage))
}

fn is_held_here(pair: &Pair) -> bool {
    pair.a.document("x").backend.local_path().is_some()
}

/// The arbiter decides for the commit of what `begin` moves, and is away before anybody hears of it.
async fn committed_unheard(pair: &Pair, fake_arbiter: &FakeArbiter, begin: impl Future<Output = ()>) {
    fake_arbiter.is_unheard.store(true, Ordering::Relaxed);
    begin.await;
    pair.wait("it is decided", || fake_arbiter.has_committed()).await;
    fake_arbiter.is_away.store(true, Ordering::Relaxed);
    assert!(is_asked(pair) && !is_held_there(pair));
}

/// Nothing passes any more from when the target removes what it has of a volume.
fn cut_at_discard(pair: &Pair) {
    let between = Arc::clone(&pair.between);
    *pair.b.disks.on_discard.lock() = Some(Box::new(move || {
        between.close();
        between.cut();
    }));
}

/// Moves both volumes in one commit.
async fn begin_both(pair: &Pair) {
    let volumes = [pair.a.volume("x"), pair.a.volume("y")];
    let request = || MoveRequest { to: "b".to_owned(), ..MoveRequest::default() };
    let requests = vec![request(), request()];
    let daemon = pair.a.daemon();
    Box::pin(daemon.start_together(&Peer::daemon(), &volumes, requests, None, |_, _| ())).await.expect("it begins");
}

fn is_asked(pair: &Pair) -> bool {
    pair.a.document("x").job.as_ref().is_some_and(|job| job.is_for_the_arbiter())
}

async fn give_back(pair: &Pair, at_risk: bool) -> Result<Resolution, api::v1::Error> {
    pair.a.core().resolve("x", ResolveRequest { decision: Some(Decision::GiveBack), at_risk }).await
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_a_restored_arbiter_has_forgotten_counts_where_the_target_has_taken_it() {
    let (pair, fake_arbiter) = judged().await;
    fake_arbiter.is_unheard.store(true, Ordering::Relaxed);
    pair.a.begin_move("x", "b").await;
    pair.wait("it is asked", || is_asked(&pair)).await;
    pair.between.close();
    pair.wait("the target takes it", || is_held_there(&pair)).await;
    fake_arbiter.restore();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(is_asked(&pair), "the source has gone on by what the arbiter does not know");
    pair.between.mend();
    pair.wait("the source has heard of it", || !is_held_here(&pair)).await;
    assert!(is_held_there(&pair), "nobody holds it");
    pair.a.core().job_over("x").await;
    let job = pair.a.core().jobs().remove(0);
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_a_restored_arbiter_has_forgotten_is_taken_back_where_the_target_has_not_taken_it() {
    let (pair, fake_arbiter) = judged().await;
    fake_arbiter.is_deaf.store(true, Ordering::Relaxed);
    pair.a.begin_move("x", "b").await;
    pair.wait("it is asked", || is_asked(&pair)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    fake_arbiter.restore();
    fake_arbiter.is_deaf.store(false, Ordering::Relaxed);
    pair.a.core().job_over("x").await;
    let job = pair.a.core().jobs().remove(0);
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
    assert!(is_held_there(&pair) && !is_held_here(&pair));
}

#[tokio::test(start_paused = true)]
async fn a_doubt_is_shown_and_ends_by_the_target_s_word_without_the_arbiter() {
    let (pair, fake_arbiter) = judged().await;
    fake_arbiter.is_deaf.store(true, Ordering::Relaxed);
    pair.a.begin_move("x", "b").await;
    pair.wait("it is asked", || is_asked(&pair)).await;
    fake_arbiter.is_away.store(true, Ordering::Relaxed);
    let shown = pair.a.core().resolve("x", ResolveRequest::default()).await.expect("it is shown");
    assert!(shown.in_doubt && shown.verdict.contains("asked of the arbiter"), "{shown:?}");
    let done = give_back(&pair, false).await.expect("the target does not hold it");
    assert!(done.done.is_some(), "{done:?}");
    pair.a.core().job_over("x").await;
    let job = pair.a.core().jobs().remove(0);
    assert_eq!(job.state, JobState::Failed);
    assert!(is_held_here(&pair) && !is_asked(&pair));
    assert!(pair.b.daemon().volume_if_any("x").expect("readable").is_none(), "the target may still take it");
    assert_eq!(Pair::contents(&pair.a, "x").await, vec![7; 1 << 20]);
}

#[tokio::test(start_paused = true)]
async fn a_doubt_about_a_silent_target_ends_at_a_person_s_risk_alone() {
    let (mut pair, fake_arbiter) = judged().await;
    fake_arbiter.is_deaf.store(true, Ordering::Relaxed);
    pair.a.begin_move("x", "b").await;
    pair.wait("it is asked", || is_asked(&pair)).await;
    fake_arbiter.is_away.store(true, Ordering::Relaxed);
    pair.between.close();
    pair.between.cut();
    pair.a.kill();
    pair.a.start().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(pair.a.volume("x").slot().is_none(), "its guest is served, and nobody knows who holds it");
    let refused = give_back(&pair, false).await.expect_err("the target may hold it");
    assert_eq!(refused.code, ErrorCode::HostUnreachable, "{refused}");
    assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains("--risk")), "{refused}");
    give_back(&pair, true).await.expect("a person has said so");
    pair.wait("its guest is served", || pair.a.volume("x").slot().is_some()).await;
    assert_eq!(Pair::contents(&pair.a, "x").await, vec![7; 1 << 20]);
    // The target is told as soon as it answers.
    pair.between.mend();
    pair.wait("nothing is left there", || pair.b.daemon().volume_if_any("x").expect("readable").is_none()).await;
    assert!(is_held_here(&pair));
}

#[tokio::test(start_paused = true)]
async fn a_move_that_the_target_has_forgotten_unheard_is_not_given_up_by_a_later_ruling() {
    for is_killed in [false, true] {
        let (mut pair, fake_arbiter) = judged().await;
        committed_unheard(&pair, &fake_arbiter, pair.a.begin_move("x", "b")).await;
        cut_at_discard(&pair);
        give_back(&pair, false).await.expect_err("the answer is lost");
        assert_eq!(stage_there(&pair, "x"), None, "the target has not forgotten it");
        if is_killed {
            pair.a.kill();
            pair.a.start().await;
        }
        fake_arbiter.is_back();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(is_held_here(&pair) && is_asked(&pair), "nobody has said that the target has it");
        pair.between.mend();
        pair.wait("the target has said so", || !is_asked(&pair)).await;
        pair.wait("its job is back", || !pair.a.core().jobs().is_empty()).await;
        pair.a.core().job_over("x").await;
        let job = pair.a.core().jobs().remove(0);
        assert_eq!(job.state, JobState::Failed);
        assert!(job.error.as_ref().is_some_and(|error| error.message.contains("taken back")), "{:?}", job.error);
        assert!(is_held_here(&pair), "nobody holds it");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(stage_there(&pair, "x"), None, "both hold it");
        assert_eq!(Pair::contents(&pair.a, "x").await, vec![7; 1 << 20]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_has_taken_the_volume_wins_over_a_move_that_is_being_taken_back() {
    let (pair, fake_arbiter) = judged().await;
    committed_unheard(&pair, &fake_arbiter, pair.a.begin_move("x", "b")).await;
    pair.between.close();
    pair.between.cut();
    // As a crash before the target was asked leaves it.
    pair.a.volume("x").journal.update_job(|job| job.abandoning = true).await.expect("stored");
    fake_arbiter.is_back();
    pair.wait("the target takes it", || is_held_there(&pair)).await;
    assert!(is_held_here(&pair) && is_asked(&pair), "the ruling was followed");
    pair.between.mend();
    pair.wait("the source has heard of it", || !is_held_here(&pair)).await;
    pair.a.core().job_over("x").await;
    assert!(is_held_there(&pair), "nobody holds it");
}

#[tokio::test(start_paused = true)]
async fn a_target_forgets_all_disks_of_a_commit_or_none() {
    let (mut pair, fake_arbiter) = judged().await;
    pair.attach_as("y").await;
    committed_unheard(&pair, &fake_arbiter, begin_both(&pair)).await;
    cut_at_discard(&pair);
    give_back(&pair, false).await.expect_err("the answer is lost");
    let left: Vec<_> = ["x", "y"].into_iter().filter(|name| stage_there(&pair, name).is_some()).collect();
    assert_eq!(left.len(), 1, "one of them is forgotten, the other one not yet");
    // A target that comes back hears of the ruling first.
    pair.b.kill();
    pair.b.start().await;
    fake_arbiter.is_back();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let is_held = |name: &str| matches!(stage_there(&pair, name), Some(IncomingStage::Held { .. }));
    assert!(!is_held(left[0]), "a disk is taken whose other one is forgotten");
    *pair.b.disks.on_discard.lock() = None;
    pair.between.mend();
    for name in ["x", "y"] {
        pair.a.core().job_over(name).await;
        assert!(pair.a.document(name).backend.local_path().is_some(), "nobody holds {name}");
        assert_eq!(stage_there(&pair, name), None, "both hold {name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_has_taken_one_disk_of_a_commit_forgets_none() {
    let (pair, fake_arbiter) = judged().await;
    pair.attach_as("y").await;
    committed_unheard(&pair, &fake_arbiter, begin_both(&pair)).await;
    let y = pair.b.volume("y");
    let incoming = y.document().incoming.clone().expect("it comes");
    let IncomingStage::Prepared { epoch } = incoming.stage else { panic!("{incoming:?}") };
    pair.b.daemon().take_incoming(&y, &incoming, epoch).await.expect("taken");
    let x = pair.b.volume("x").document().incoming.clone().expect("it comes");
    pair.b.daemon().undo_arrivals(&x).await.expect_err("the other disk is held");
    // Nor if a person says so: what is held proves that all were given up.
    pair.b.daemon().drop_unless_committed(&pair.b.volume("x"), &x).await.expect_err("the other disk is held");
    fake_arbiter.is_back();
    for name in ["x", "y"] {
        pair.a.core().job_over(name).await;
        assert!(pair.a.document(name).backend.local_path().is_none(), "both hold {name}");
        assert!(matches!(stage_there(&pair, name), Some(IncomingStage::Held { .. })), "nobody holds {name}");
    }
}
