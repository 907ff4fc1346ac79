//! Hand-overs of what both hosts reach: the guest hears of every loss at its source.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{World, options, outcome, until};
use block::{Device, Error, ErrorKind, Filter, IoFuture, Slot};
use migrate::{Control, Handover, HandoverContext, Outcome, Phase, UnderWay};

/// A source that tells of a loss once, as an export does whose server was lost.
#[derive(Default)]
struct Losses {
    has_lost: AtomicBool,
    /// So many flushes are over before one is slow.
    quick_flushes: AtomicU64,
}

struct Source {
    lower: Device,
    losses: Arc<Losses>,
    env: env::EnvRef,
}

impl Filter for Source {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let quick = &self.losses.quick_flushes;
            if quick.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
                quick.store(u64::MAX, Ordering::Relaxed);
                self.env.sleep(Duration::from_secs(20)).await;
            }
            match self.losses.has_lost.swap(false, Ordering::Relaxed) {
                true => Err(Error::new(ErrorKind::Disconnected, "what was answered is lost")),
                false => self.lower.flush().await,
            }
        })
    }
}

/// Hands a volume over whose source may have lost something, and slows down after so many flushes.
async fn begin(has_lost: bool, quick: u64) -> (World, Slot, Arc<Losses>, Control, tokio::task::JoinHandle<Outcome>) {
    let world = World::new(3, 1_000_000).await;
    let losses = Arc::new(Losses { has_lost: has_lost.into(), quick_flushes: quick.into() });
    let source =
        Source { lower: world.source_device.clone(), losses: Arc::clone(&losses), env: Arc::clone(&world.env) };
    let source = Device::new("source", source);
    let (slot, again) = (Slot::new(source.clone()), Arc::clone(&losses));
    let context = HandoverContext {
        env: Arc::clone(&world.env),
        slot: slot.clone(),
        source,
        target: world.target_device.clone(),
        phase: Phase::Preparing,
        under_way: UnderWay::new(Duration::ZERO, world.env.now()),
        journal: Arc::clone(&world.journal) as _,
        meter: None,
        let_go: Box::new(|| ()),
        flush_failed: Arc::new(move || again.has_lost.store(true, Ordering::Relaxed)),
    };
    let (control, work) = Handover::start(context, options()).expect("it starts");
    (world, slot, losses, control, tokio::spawn(work))
}

/// The guest's next flush says that something is lost, and the one after it that nothing more is.
async fn guest_is_told(slot: &Slot) {
    let guest = Device::new("guest", slot.lane());
    let error = guest.flush().await.expect_err("the guest does not hear of the loss");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{}", error.chain());
    guest.flush().await.expect("it was told");
}

#[tokio::test(start_paused = true)]
async fn a_loss_of_which_a_hand_over_hears_fails_it_and_the_guests_next_flush() {
    let (world, slot, _, _, work) = begin(true, u64::MAX).await;
    let ended = outcome(work).await;
    assert!(
        matches!(&ended, Outcome::Failed { error, .. } if error.chain().contains("flushing the source")),
        "{ended:?}"
    );
    assert!(!world.journal.committed.load(Ordering::Relaxed));
    guest_is_told(&slot).await;
}

#[tokio::test(start_paused = true)]
async fn a_loss_of_which_a_flush_tells_that_nobody_waits_for_any_more_reaches_the_guest_all_the_same() {
    // The flush with the guest held takes too long, so the hand-over is put off, and hears of the loss before its next attempt.
    let (_world, slot, losses, control, work) = begin(false, 1).await;
    until(&control, |progress| progress.phase == Phase::Quiescing).await;
    losses.has_lost.store(true, Ordering::Relaxed);
    let ended = outcome(work).await;
    assert!(matches!(ended, Outcome::Failed { .. }), "{ended:?}");
    guest_is_told(&slot).await;
}

#[tokio::test(start_paused = true)]
async fn a_hand_over_whose_source_has_lost_nothing_switches_over() {
    let (world, slot, _, _, work) = begin(false, u64::MAX).await;
    let ended = outcome(work).await;
    assert!(matches!(ended, Outcome::Switched(_)), "{ended:?}");
    assert!(world.journal.committed.load(Ordering::Relaxed) && slot.device().is_same(&world.target_device));
}
