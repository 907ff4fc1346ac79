//! The snapshot strategy's part of the driver: what comes between the copy of the base and the mirror alone, and how a
//! move with snapshots is undone.

use std::time::Duration;

use block::{Bytes, Device, Error, ErrorKind, Result};
use env::Moment;

use super::passes::Left;
use super::{Driver, TICK};
use crate::strategy::mirror::filter::JobEntry;
use crate::strategy::snapshot::{Fold, Pace};
use crate::{Event, OnNoConverge, Snapshots};

/// How long a snapshot may take to come into the guest's path.
const TAKE_LIMIT: Duration = Duration::from_secs(30);
/// A snapshot that is at least this much of the one before shows that they get no smaller.
const SHRINKS: f64 = 0.9;
/// So often in a row, and the guest is held for what there is.
const STUBBORN_MAX: u32 = 2;
/// So often is a fold that fails tried again, before the move is undone.
const RETRIES_MAX: u32 = 3;
/// Before that.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// What the rounds so far have shown.
#[derive(Clone, Copy, Debug, Default)]
struct Rounds {
    /// How fast snapshots are folded, in bytes a second.
    rate: Option<f64>,
    /// What the one before held.
    last: Option<u64>,
    /// How often in a row they got no smaller.
    stubborn: u32,
    failures: u32,
    /// How many bytes were folded.
    folded: u64,
}

/// What is to be done with the snapshot that the guest writes to.
#[derive(Clone, Debug, PartialEq)]
enum Decision {
    /// Another one is taken and this one folded meanwhile.
    Another(String),
    /// The guest is held and this one folded.
    Hold(String),
    /// It would take too long.
    GiveUp(String),
}

impl Rounds {
    /// Decides about a snapshot of `bytes`, `volume` being that large.
    fn decide(&mut self, bytes: u64, limit: Duration, longest: Duration, aborts: bool) -> Decision {
        let expected = match (self.rate, bytes) {
            (_, 0) => Some(Duration::ZERO),
            (Some(rate), _) => Some(Duration::from_secs_f64(bytes as f64 / rate.max(1.0))),
            (None, _) => None,
        };
        let said = Bytes(bytes);
        let Some(expected) = expected else {
            return Decision::Another(format!("{said} were written, and how fast they are folded is not known yet"));
        };
        if expected <= limit {
            return Decision::Hold(format!("{said} are folded in {expected:.1?}, within {limit:?}: the guest is held"));
        }
        if self.stubborn < STUBBORN_MAX {
            return Decision::Another(format!("{said} would take {expected:.1?}, more than {limit:?}: one more"));
        }
        if aborts || expected > longest {
            return Decision::GiveUp(format!(
                "the snapshots get no smaller: to fold {said} the guest would be held for {expected:.1?}"
            ));
        }
        Decision::Hold(format!("the snapshots get no smaller: the guest is held for {said} and {expected:.1?}"))
    }

    /// A snapshot of `bytes` was folded in `span`, and the guest wrote `next` meanwhile.
    fn note(&mut self, bytes: u64, span: Duration, next: u64) {
        self.folded += bytes;
        self.failures = 0;
        if bytes > 0 {
            let rate = bytes as f64 / span.as_secs_f64().max(1e-6);
            // The slower of two neighbours: what is small is folded slower than what is large.
            self.rate = Some(self.rate.map_or(rate, |before| rate.min((rate + before) / 2.0)));
        }
        let is_smaller = self.last.is_none_or(|_| (next as f64) < bytes as f64 * SHRINKS);
        self.stubborn = if is_smaller { 0 } else { self.stubborn + 1 };
        self.last = Some(bytes);
    }
}

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
                    self.error = Some(Error::new(ErrorKind::TimedOut, why));
                    return Event::Broken;
                }
                Decision::Hold(why) => (self.fold_held(&mut snapshots, rounds.folded).await, why),
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
                    let left = Left { copied: rounds.folded, dirty: snapshots.top_bytes().0, deferred: 0 };
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
    async fn take_another(&self, snapshots: &mut Snapshots) -> Result<()> {
        let limit = self.options.quiesce_limit();
        snapshots.take_within(&self.slot, &self.mirror(), limit, TAKE_LIMIT).await
    }

    /// Folds the last snapshot while the guest is held. `None` if the guest could not be held in time.
    async fn fold_held(&mut self, snapshots: &mut Snapshots, folded: u64) -> Result<Option<Bytes>> {
        self.passes.begin(self.env.now(), lowest_bytes(snapshots), folded, true);
        if let Some(meter) = &self.meter {
            meter.begin_stall();
        }
        let (below, into, durable) = (self.mirror(), self.mirror_for_folds(), self.source.clone());
        let in_flight_bytes_max = self.window_bytes_max();
        let (slot, env, pool) = (&self.slot, &self.env, &self.pool);
        let mut fold = Fold { snapshots, slot, env, pool, below, into, durable, in_flight_bytes_max };
        let outcome = fold.fold_last(self.options.quiesce_limit()).await;
        if matches!(outcome, Ok(None)) {
            self.statistics.switchover.quiesce_retries += 1;
            self.wait(TICK).await;
        }
        self.note_stall();
        outcome
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
        let (mut not_before, mut next_tick) = (Moment::default(), began);
        let pace = |under_way, length| self.fold_pace((under_way, length), stop, &mut not_before, &mut next_tick);
        fold.fold_lowest(pace).await
    }

    /// What the next piece of a fold waits for.
    fn fold_pace(
        &mut self,
        (under_way, length): (u64, u64),
        stop: &mut Option<Event>,
        not_before: &mut Moment,
        next_tick: &mut Moment,
    ) -> Pace {
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
        if now < *not_before {
            return Pace::Wait(not_before.since(now));
        }
        let allowed = (self.window.bytes() as f64 * self.governor.share()) as u64;
        if under_way > 0 && under_way + length > allowed {
            return Pace::Wait(TICK);
        }
        *not_before = now + self.bucket.take(length);
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

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);
    const LONGEST: Duration = Duration::from_secs(30);

    fn is_hold(decision: &Decision) -> bool {
        matches!(decision, Decision::Hold(_))
    }

    #[test]
    fn the_guest_is_held_once_what_is_left_takes_no_longer_than_the_limit() {
        let mut rounds = Rounds::default();
        assert!(is_hold(&rounds.decide(0, LIMIT, LONGEST, false)), "nothing was written");
        assert!(!is_hold(&rounds.decide(1, LIMIT, LONGEST, false)), "nothing is known of the rate");
        rounds.note(1_000_000_000, Duration::from_secs(10), 30_000_000);
        assert!(!is_hold(&rounds.decide(30_000_000, LIMIT, LONGEST, false)), "it takes 300 ms");
        assert!(is_hold(&rounds.decide(20_000_000, LIMIT, LONGEST, false)), "it takes 200 ms");
    }

    #[test]
    fn snapshots_that_get_no_smaller_end_in_a_hold_or_not_at_all() {
        let mut rounds = Rounds::default();
        for _ in 0..2 {
            rounds.note(100_000_000, Duration::from_secs(1), 100_000_000);
            assert!(matches!(rounds.decide(100_000_000, LIMIT, LONGEST, false), Decision::Another(_)));
        }
        rounds.note(100_000_000, Duration::from_secs(1), 100_000_000);
        assert!(is_hold(&rounds.decide(100_000_000, LIMIT, LONGEST, false)));
        assert!(matches!(rounds.decide(100_000_000, LIMIT, LONGEST, true), Decision::GiveUp(_)));
        let far = Duration::from_millis(500);
        assert!(matches!(rounds.decide(100_000_000, LIMIT, far, false), Decision::GiveUp(_)));
    }
}
