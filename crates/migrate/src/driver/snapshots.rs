//! The snapshot strategy's part of the driver. It does what comes between the copy of the base and the mirror alone,
//! and undoes a move with snapshots.

use std::time::Duration;

use block::{Bytes, Device, Error, ErrorKind, Result};
use env::Moment;

use super::passes::PassResult;
use super::{Driver, TICK};
use crate::strategy::mirror::device::JobEntry;
use crate::strategy::snapshot::rounds::{Decision, Rounds};
use crate::strategy::snapshot::{Fold, Last, Pace};
use crate::{Event, OnNoConverge, Snapshots};

/// How long a snapshot may take to come into the guest's path.
const TAKE_LIMIT: Duration = Duration::from_secs(30);
/// So often is a fold that fails tried again, before the move is undone.
const RETRIES_MAX: u32 = 3;
/// Before that.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

fn lowest_bytes(snapshots: &Snapshots) -> u64 {
    snapshots.lowest().map_or(0, |lowest| lowest.overlay.data_bytes().0)
}

impl Driver {
    /// Folds the snapshots into the mirror until so little is left that the guest is held for the last of it. Ends with
    /// `Copied` when the guest is on the mirror.
    pub(super) async fn consolidate(&mut self) -> Event {
        let Some(snapshots) = self.snapshots.clone() else { return Event::Copied };
        let mut snapshots = snapshots.lock().await;
        let mut rounds = Rounds::default();
        while !snapshots.is_empty() {
            if let Some(event) = self.demand() {
                return event;
            }
            if self.machine.paused() {
                self.wait(TICK).await;
                continue;
            }
            let began = self.env.now();
            let mut stop = None;
            let (outcome, why) = match self.decide_fold(&snapshots, &mut rounds) {
                Decision::GiveUp(why) => {
                    self.error = Some(Error::new(ErrorKind::NoConvergence, why));
                    return Event::Broken;
                }
                Decision::Hold(why, hold) => (self.fold_held(&mut snapshots, &mut rounds, hold).await, why),
                Decision::Another(why) => {
                    if snapshots.len() == 1
                        && let Err(error) = self.take_another(&mut snapshots).await
                    {
                        self.error = Some(error);
                        return Event::Broken;
                    }
                    (self.fold_beside_guest(&mut snapshots, rounds.folded, &mut stop).await, why)
                }
            };
            match outcome {
                Ok(Some(bytes)) => {
                    let now = self.env.now();
                    rounds.note(bytes.0, now.since(began), snapshots.top_bytes().0);
                    let left = PassResult { copied: rounds.folded, dirty: snapshots.top_bytes().0, deferred: 0 };
                    self.passes.end(now, left, why);
                }
                Ok(None) => {}
                // What stopped it says more than the pieces that it broke.
                Err(_) if stop.is_some() => {}
                Err(error) => {
                    rounds.failures += 1;
                    self.statistics.retries += 1;
                    tracing::warn!(error = error.chain(), "a snapshot could not be folded");
                    self.error = Some(error);
                    if rounds.failures > RETRIES_MAX {
                        return Event::Broken;
                    }
                    self.env.sleep(RETRY_PAUSE * (1 << rounds.failures)).await;
                }
            }
            if let Some(event) = stop {
                return event;
            }
        }
        Event::Copied
    }

    fn decide_fold(&self, snapshots: &Snapshots, rounds: &mut Rounds) -> Decision {
        if snapshots.len() > 1 {
            return Decision::Another("an earlier session had taken it".to_owned());
        }
        let longest = Duration::from_millis(self.options.forced_downtime_ms_max);
        let limit = Duration::from_millis(self.options.downtime_limit_ms);
        rounds.decide(lowest_bytes(snapshots), limit, longest, self.options.on_no_converge == OnNoConverge::Abort)
    }

    fn mirror(&self) -> Device {
        Device::new("mirror", self.mirror_device.clone())
    }

    fn mirror_for_folds(&self) -> Device {
        Device::new("mirror", JobEntry(self.mirror_device.clone()))
    }

    /// Lays another snapshot over the one that the guest writes to.
    async fn take_another(&mut self, snapshots: &mut Snapshots) -> Result<()> {
        if let Some(meter) = &self.meter {
            meter.begin_stall();
        }
        let below = self.mirror();
        let taken = snapshots.take_within(&self.slot, &below, &mut self.hold, TAKE_LIMIT).await;
        self.note_stall();
        let (_, retries) = taken?;
        self.statistics.switchover.quiesce_retries += retries;
        Ok(())
    }

    /// Folds the last snapshot while the guest is held, for as long as `hold`. `None` if it was let go as it was.
    async fn fold_held(
        &mut self,
        snapshots: &mut Snapshots,
        rounds: &mut Rounds,
        hold: Duration,
    ) -> Result<Option<Bytes>> {
        let (began, bytes) = (self.env.now(), lowest_bytes(snapshots));
        self.passes.begin(began, bytes, rounds.folded, true);
        if let Some(meter) = &self.meter {
            meter.begin_stall();
        }
        let (below, into, durable) = (self.mirror(), self.mirror_for_folds(), self.source.clone());
        let in_flight_bytes_max = self.window_bytes_max();
        let (slot, env, pool) = (&self.slot, &self.env, &self.pool);
        let mut fold = Fold { snapshots, slot, env, pool, below, into, durable, in_flight_bytes_max };
        let drain = self.hold.limit();
        let outcome = fold.fold_last(drain, Some(hold)).await;
        self.note_stall();
        self.note_hold_limit(drain);
        match outcome? {
            Last::Folded(bytes) => {
                self.hold.note_success();
                Ok(Some(bytes))
            }
            Last::NotHeld => {
                self.statistics.switchover.quiesce_retries += 1;
                self.hold.note_failure();
                self.wait(TICK).await;
                Ok(None)
            }
            Last::LetGo(folded) => {
                rounds.note_miss(folded.0, hold, Duration::from_millis(self.options.forced_downtime_ms_max));
                let left = PassResult { copied: rounds.folded + folded.0, dirty: bytes, deferred: 0 };
                let why =
                    format!("{folded} of {} were folded after {hold:.0?}, and the guest was let go", Bytes(bytes));
                self.passes.end(self.env.now(), left, format!("go on: {why}"));
                Ok(None)
            }
        }
    }

    /// Folds the lowest snapshot while the guest writes to the one above. `None` if `stop` says why it ended early.
    async fn fold_beside_guest(
        &mut self,
        snapshots: &mut Snapshots,
        folded: u64,
        stop: &mut Option<Event>,
    ) -> Result<Option<Bytes>> {
        let began = self.env.now();
        self.passes.begin(began, lowest_bytes(snapshots), folded, false);
        let (slot, env, pool) = (self.slot.clone(), self.env.clone(), self.pool.clone());
        let (below, into, durable) = (self.mirror(), self.mirror_for_folds(), self.source.clone());
        let in_flight_bytes_max = self.window_bytes_max();
        let (slot, env, pool) = (&slot, &env, &pool);
        let mut fold = Fold { snapshots, slot, env, pool, below, into, durable, in_flight_bytes_max };
        let mut next_tick = began;
        let pace = |under_way, length| self.fold_pace((under_way, length), stop, &mut next_tick);
        fold.fold_lowest(pace).await
    }

    /// What the next piece of a fold waits for.
    fn fold_pace(&mut self, (under_way, length): (u64, u64), stop: &mut Option<Event>, next_tick: &mut Moment) -> Pace {
        let now = self.env.now();
        if now >= *next_tick {
            *next_tick = now + TICK;
            self.tick();
        }
        *stop = stop.or_else(|| self.demand());
        if stop.is_some() {
            return Pace::Stop;
        }
        if self.machine.paused() {
            return Pace::Wait(TICK);
        }
        let rest = self.bucket.wait();
        if !rest.is_zero() {
            // Somebody may change the bandwidth meanwhile.
            return Pace::Wait(rest.min(TICK));
        }
        let allowed = (self.window.bytes() as f64 * self.latency_controller.share()) as u64;
        if under_way > 0 && under_way + length > allowed {
            return Pace::Wait(TICK);
        }
        let _ = self.bucket.take(length);
        Pace::Go
    }

    /// Folds what the snapshots hold into the source, as often as it takes, and puts the guest there.
    pub(super) async fn fold_back(&mut self) {
        let Some(snapshots) = self.snapshots.clone() else { return };
        let mut snapshots = snapshots.lock().await;
        let (slot, env, pool, source) = (self.slot.clone(), self.env.clone(), self.pool.clone(), self.source.clone());
        let mut fold = Fold {
            snapshots: &mut snapshots,
            slot: &slot,
            env: &env,
            pool: &pool,
            below: source.clone(),
            into: source.clone(),
            durable: source,
            in_flight_bytes_max: self.window_bytes_max(),
        };
        fold.fold_all(|error| {
            // What ended the move is what its report is to tell, unless nothing did.
            self.error.get_or_insert(error);
            self.publish();
        })
        .await;
    }
}
