//! The change of authority, and what follows from a commit that nobody can be sure of.
//!
//! Before the guest is held: guest flushes go to both sides, then the target is flushed. While it is held: one record in
//! the journal, and the swap. Nothing else happens there.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, Error, ErrorKind, Extent};
use futures::future::{Either, select};
use std::pin::pin;

use super::{Driver, TICK};
use crate::strategy::mirror::skipped::first_not_zero;
use crate::strategy::mirror::tracker::Mode;
use crate::{Event, Verify};

/// How long to wait before the guest is held again; it doubles.
const QUIESCE_PAUSE: Duration = Duration::from_millis(50);
/// How long to wait before a store is tried again; it doubles.
const STORE_PAUSE: Duration = Duration::from_millis(100);
/// Neither grows beyond this.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long the guest is watched after the swap, so that the requests that were held are counted.
pub(crate) const STALL_TAIL: Duration = Duration::from_millis(20);
/// The digest reads the frozen source in pieces of this size.
const DIGEST_BYTES: u64 = 1 << 20;

impl Driver {
    pub(super) async fn pre_switch(&mut self) -> Event {
        // The guest gets some air after an attempt that had to let it go.
        let retries = u32::try_from(self.statistics.switchover.quiesce_retries).unwrap_or(u32::MAX);
        let mut air = self.env.now();
        if retries > 0 {
            air = air + doubled(QUIESCE_PAUSE, retries);
        }
        loop {
            self.tick();
            if let Some(event) = self.demand() {
                return event;
            }
            let now = self.env.now();
            if self.machine.paused() {
                self.wait(TICK).await;
            } else if now < air {
                self.wait(air.since(now).min(TICK)).await;
            } else {
                break;
            }
        }
        let began = self.env.now();
        let mirror = Arc::clone(&self.mirror);
        let flushed = self.with_target(async move { mirror.flush_target().await }).await;
        let took = self.env.now().since(began);
        self.statistics.switchover.flush_us = micros(took);
        if let Some(tracking) = &mut self.tracking {
            tracking.convergence.rates().note_flush(took);
        }
        match (flushed, self.demand()) {
            (_, Some(event)) => event,
            (Ok(()), None) if self.may_hold() => match self.ask_target().await {
                Event::Flushed if self.journal.is_of_group() => self.wait_for_others().await,
                event => event,
            },
            (Ok(()), None) => Event::Missing,
            (Err(error), None) => {
                self.error = Some(error);
                Event::TargetFailed
            }
        }
    }

    /// Asks whether the target can be what the volume's record will name. The mirror is on meanwhile.
    async fn ask_target(&mut self) -> Event {
        let limit = self.options.target_limit();
        let (env, journal) = (Arc::clone(&self.env), Arc::clone(&self.journal));
        let asked = async move { env::timeout(&*env, limit, journal.may_commit()).await };
        let answer = match self.meanwhile(pin!(asked)).await {
            Ok(answer) => answer,
            Err(event) => return event,
        };
        let answer = answer.unwrap_or_else(|| {
            let context = format!("the target did not say within {limit:?} whether it can hold the volume");
            Err(Error::new(ErrorKind::TimedOut, context))
        });
        let Err(error) = answer else { return Event::Flushed };
        let is_lost = matches!(error.kind(), ErrorKind::Disconnected | ErrorKind::TimedOut);
        self.error = Some(error);
        if is_lost { Event::TargetFailed } else { Event::Broken }
    }

    /// Waits until those that switch over with it are as far. What is not mirrored gets behind meanwhile, and is copied again.
    async fn wait_for_others(&mut self) -> Event {
        let journal = Arc::clone(&self.journal);
        let mut turn = journal.turn();
        let mut flushed = self.env.now();
        loop {
            let is_turn = matches!(select(&mut turn, pin!(self.wait(TICK))).await, Either::Left(_));
            if is_turn {
                return self.demand().unwrap_or(Event::Flushed);
            }
            self.tick();
            if let Some(event) = self.demand() {
                return event;
            }
            if self.machine.paused() {
                // It waits at the beginning of this phase.
                return Event::Flushed;
            }
            if !self.may_hold() {
                return Event::Missing;
            }
            if self.env.now().since(flushed) >= self.options.flush_interval() {
                // So that little is left to flush once the others are there.
                let mirror = Arc::clone(&self.mirror);
                if let Err(error) = self.with_target(async move { mirror.flush_target().await }).await {
                    self.error = Some(error);
                    return self.demand().unwrap_or(Event::TargetFailed);
                }
                flushed = self.env.now();
            }
        }
    }

    /// Whether the guest may be held: everything is in step, or what is not can be copied meanwhile.
    fn may_hold(&mut self) -> bool {
        match self.fits_hold() {
            Some(fits) => fits,
            None => self.mirror.tracker(|tracker| tracker.is_complete()),
        }
    }

    pub(super) async fn quiesce(&mut self) -> Event {
        if let Some(meter) = &self.meter {
            meter.begin_stall();
        }
        let began = self.env.now();
        if let Some(tracking) = &mut self.tracking {
            tracking.held_since = began;
        }
        let limit = self.hold.limit();
        self.note_hold_limit(limit);
        let quiesced = env::timeout(&*self.env, limit, self.slot.quiesce()).await;
        self.statistics.switchover.quiesce_us = micros(self.env.now().since(began));
        self.statistics.switchover.window_us = self.statistics.switchover.quiesce_us;
        let Some(quiesced) = quiesced else {
            self.hold.note_failure();
            return self.not_quiesced();
        };
        self.hold.note_success();
        self.quiesced = Some(quiesced);
        // Nothing is in flight any more, so what is true now stays true until the guest is let go.
        if let Some(event) = self.demand() {
            return event;
        }
        let (is_complete, is_flushed) =
            self.mirror.tracker(|tracker| (tracker.is_complete() && tracker.is_drained(), !tracker.has_unflushed()));
        match (self.tracking.is_some(), is_complete) {
            (_, true) if !self.is_settled() => self.not_quiesced(),
            // The guest's flushes went to both sides since before the last flush.
            (false, true) => self.settle_target().await,
            (false, false) => Event::Missing,
            (true, true) if is_flushed => self.settle_target().await,
            (true, _) => Event::Behind,
        }
    }

    /// The target is as the commit needs it, while the guest is held. One that takes long is given the time while the guest
    /// works: there is less to do then the next time.
    pub(super) async fn settle_target(&mut self) -> Event {
        let began = self.env.now();
        let limit = self.settle_limit();
        let settled = env::timeout(&*self.env, limit, self.journal.before_commit()).await;
        self.statistics.switchover.window_us += micros(self.env.now().since(began));
        match settled {
            Some(Ok(())) => self.demand().unwrap_or(Event::Quiesced),
            Some(Err(error)) if error.kind() == ErrorKind::Busy => self.not_quiesced(),
            Some(Err(error)) => {
                self.error = Some(error.wrap("making the target durable before the commit"));
                Event::TargetFailed
            }
            None => self.not_quiesced(),
        }
    }

    /// The guest is let go, and held again later.
    fn not_quiesced(&mut self) -> Event {
        self.statistics.switchover.quiesce_retries += 1;
        self.note_stall();
        Event::NotQuiesced
    }

    /// Whether nothing that the target was not waited for is under way there, or has yet to be made durable.
    pub(super) fn is_settled(&self) -> bool {
        !self.mirror.has_outliving_writes() && self.mirror.tracker(|tracker| tracker.covers_guest_flushes())
    }

    pub(super) async fn commit(&mut self) -> Event {
        let journal = Arc::clone(&self.journal);
        let mut store: futures::future::BoxFuture<'static, _> = Box::pin(async move { journal.commit().await });
        let began = self.env.now();
        let stored = env::timeout(&*self.env, self.options.commit_limit(), &mut store).await;
        let took = micros(self.env.now().since(began));
        self.statistics.switchover.commit_us = took;
        self.statistics.switchover.window_us += took;
        match stored {
            Some(Ok(())) => Event::CommitStored,
            Some(Err(error)) => {
                self.error = Some(error.wrap("storing the commit"));
                Event::CommitFailed
            }
            None => {
                let context = format!("the commit record is not stored after {:?}", self.options.commit_limit());
                self.error = Some(Error::new(ErrorKind::TimedOut, context));
                *self.pending_commit.get_mut() = Some(store);
                Event::CommitFailed
            }
        }
    }

    /// Nobody knows what the disk holds: the guest runs on both sides, and the commit is stored again, elsewhere.
    pub(super) async fn settle_doubt(&mut self) -> Event {
        self.note_stall();
        let mut attempts = 0;
        loop {
            let pending = self.pending_commit.get_mut().take();
            let mut store = match pending {
                Some(store) => store,
                None => {
                    attempts += 1;
                    let until = self.env.now() + doubled(STORE_PAUSE, attempts);
                    while self.env.now() < until {
                        self.publish();
                        if let Some(event) = self.demand() {
                            return event;
                        }
                        self.wait(until.since(self.env.now())).await;
                    }
                    if let Some(event) = self.settle_target_in_doubt().await {
                        return event;
                    }
                    let journal = Arc::clone(&self.journal);
                    Box::pin(async move { journal.commit().await })
                }
            };
            loop {
                self.publish();
                if let Some(event) = self.demand() {
                    // Whatever this store says later, the next one settles it.
                    *self.pending_commit.get_mut() = Some(store);
                    return event;
                }
                let stored = match select(&mut store, pin!(self.wait(TICK * 20))).await {
                    Either::Left((stored, _)) => stored,
                    Either::Right(_) => continue,
                };
                match stored {
                    Ok(()) => return Event::CommitStored,
                    Err(error) if error.kind() == ErrorKind::Fenced => {
                        self.error = Some(error.wrap("storing the commit"));
                        return Event::Broken;
                    }
                    Err(error) => self.error = Some(error.wrap("storing the commit again")),
                }
                break;
            }
        }
    }

    /// The target is as the commit needs it, while the guest works on both sides.
    async fn settle_target_in_doubt(&mut self) -> Option<Event> {
        let journal = Arc::clone(&self.journal);
        let mut settling = journal.before_commit();
        loop {
            let settled = match select(&mut settling, pin!(self.wait(TICK * 20))).await {
                Either::Left((settled, _)) => Some(settled),
                Either::Right(_) => None,
            };
            match settled {
                Some(Ok(())) => return None,
                Some(Err(error)) => {
                    self.error = Some(error.wrap("making the target durable before the commit"));
                    return Some(Event::TargetFailed);
                }
                None => self.publish(),
            }
            if let Some(event) = self.demand() {
                return Some(event);
            }
        }
    }

    /// Takes a commit in doubt back.
    pub(super) async fn revert(&mut self) -> Event {
        if let Some(store) = self.pending_commit.get_mut().take() {
            // It began earlier, so it ends earlier; the record after it counts.
            let _ = store.await;
        }
        match self.journal.revert().await {
            Ok(true) => Event::Reverted,
            Ok(false) => Event::CommitCounts,
            Err(error) => {
                self.error = Some(error.wrap("taking the commit back"));
                self.publish();
                self.wait(STORE_PAUSE).await;
                Event::NotReverted
            }
        }
    }

    /// The target holds the volume: the guest goes there. The slot is not quiesced yet if the commit came late. Then it
    /// is quiesced now, in as many attempts as that takes: both sides are in step, and the target answers.
    pub(super) async fn swap(&mut self) -> Event {
        let began = self.env.now();
        let mut pause = QUIESCE_PAUSE;
        let quiesced = loop {
            if let Some(quiesced) = self.quiesced.take() {
                break quiesced;
            }
            if let Some(meter) = &self.meter {
                meter.begin_stall();
            }
            let limit = self.hold.limit();
            self.note_hold_limit(limit);
            self.quiesced = env::timeout(&*self.env, limit, self.slot.quiesce()).await;
            if self.quiesced.is_none() {
                self.hold.note_failure();
                self.statistics.switchover.quiesce_retries += 1;
                self.env.sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        };
        quiesced.swap(self.target.clone());
        drop(quiesced);
        let now = self.env.now();
        self.statistics.switchover.window_us += micros(now.since(began));
        self.statistics.switched(now);
        self.mirror.set_mode(Mode::Detached);
        self.mirror.close_read_cache();
        Event::Swapped
    }

    /// After the switchover: how long the guest was held, and what the frozen source holds.
    pub(super) async fn finish(&mut self) -> Event {
        // Who was held is under way still, or was answered since. Where nobody was there is nothing to be seen.
        if self.meter.as_ref().is_some_and(|meter| !meter.stall().is_zero()) {
            self.env.sleep(STALL_TAIL).await;
        }
        self.note_stall();
        self.publish();
        if self.options.verify == Verify::Full {
            let began = self.env.now();
            match self.digest().await {
                Ok(digest) => self.statistics.digest = Some(digest),
                Err(error) => self.error = Some(error.wrap("computing the digest of the frozen source")),
            }
            self.statistics.verification.digest_seconds = self.env.now().since(began).as_secs_f64();
        }
        Event::Finished
    }

    async fn digest(&mut self) -> block::Result<String> {
        let mut hasher = blake3::Hasher::new();
        let size = self.mirror.size;
        let mut next = Bytes::ZERO;
        let mut next_tick = self.env.now() + TICK;
        while next < size {
            let length = (size - next).min(Bytes(DIGEST_BYTES));
            let buffer = self.pool.acquire(length.as_usize()).await;
            let data = self.mirror.comparison_face.read(next, buffer).await?;
            let extent = Extent::new(next, length);
            let skipped = self.mirror.tracker(|tracker| tracker.skipped_in(extent));
            if let Some(at) = first_not_zero(extent, &skipped, &data) {
                let context = format!("the frozen source holds data at {}, which was skipped", next + Bytes::from(at));
                return Err(Error::new(ErrorKind::Corrupt, context));
            }
            hasher.update(&data);
            next += length;
            crate::pace::yield_now().await;
            if self.env.now() >= next_tick {
                next_tick = self.env.now() + TICK;
                self.tick();
            }
        }
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// The guest is held for its requests in flight, for as long as `limit`.
    pub(super) fn note_hold_limit(&mut self, limit: Duration) {
        let known = &mut self.statistics.switchover.quiesce_limit_us;
        *known = micros(limit).max(*known);
    }

    pub(super) fn note_stall(&mut self) {
        if let Some(meter) = &self.meter {
            self.statistics.stall = self.statistics.stall.max(meter.stall());
        }
    }
}

/// `pause`, doubled for every attempt after the first.
fn doubled(pause: Duration, attempts: u32) -> Duration {
    pause.saturating_mul(1 << attempts.saturating_sub(1).min(16)).min(PAUSE_MAX)
}

pub(crate) fn micros(span: Duration) -> u64 {
    span.as_micros() as u64
}
