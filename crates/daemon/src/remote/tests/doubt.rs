//! Commits of which only the arbiter knows, and one that has forgotten, or never answers again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Decision, ErrorCode, JobState, Resolution, ResolveRequest};

use super::fake_arbiter::FakeArbiter;
use super::harness::Pair;
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
    let volume = pair.b.daemon().volume_if_any("x").expect("readable");
    let incoming = volume.and_then(|volume| volume.document().incoming.clone());
    incoming.is_some_and(|incoming| matches!(incoming.stage, IncomingStage::Held { .. }))
}

fn is_held_here(pair: &Pair) -> bool {
    pair.a.document("x").backend.local_path().is_some()
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
