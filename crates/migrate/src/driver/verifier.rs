//! Comparing source and target while the mirror is on.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use env::Moment;
use futures::StreamExt;
use futures::future::{BoxFuture, Either, select};
use futures::stream::FuturesUnordered;
use std::pin::pin;

use super::copier::COPY_BYTES_MAX;
use super::{Driver, TICK};
use crate::strategy::mirror::compare::{CompareError, Compared, difference};
use crate::strategy::mirror::verify_state::Uncompared;
use crate::{Event, Verify};

/// So often comparisons that cannot read are tried again before verification gives up.
const RETRIES_MAX: u32 = 10;
/// Before the first retry; it grows by as much with every one.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// What a comparison under way ends with.
struct Ended {
    run: Range<u64>,
    bytes: u64,
    was_wanted: bool,
    began: Moment,
    outcome: Result<Compared, CompareError>,
}

impl Driver {
    pub(super) async fn verify(&mut self) -> Event {
        let began = self.env.now();
        let event = self.compare_all().await;
        self.statistics.verification.seconds += self.env.now().since(began).as_secs_f64();
        match event {
            Event::Verified => self.drain().await.unwrap_or(event),
            event => event,
        }
    }

    /// Says what is to be compared: everything, or what is wanted. `None` if that is nothing at all.
    fn begin_comparison(&mut self) -> Option<bool> {
        let full = match self.options.verify {
            Verify::Off => return None,
            Verify::Sample => {
                self.draw_sample();
                false
            }
            Verify::Full => true,
        };
        let is_compared = self.tracking.as_ref().is_some_and(|tracking| tracking.is_compared);
        if is_compared && !self.mirror.tracker(|tracker| tracker.has_suspects()) {
            // Once is enough: what the guest changes while this goes on is copied again without, or there would be no end.
            return None;
        }
        let waiting = self.mirror.tracker(|tracker| {
            tracker.begin_comparison();
            tracker.uncompared(full)
        });
        let verification = &self.statistics.verification;
        self.statistics.bytes_to_verify =
            (verification.bytes + waiting * self.options.chunk_bytes).min(self.mirror.size.0.max(verification.bytes));
        Some(full)
    }

    async fn compare_all(&mut self) -> Event {
        let Some(full) = self.begin_comparison() else { return self.end_verify() };
        let chunk = self.options.chunk_bytes;
        let mut in_flight: FuturesUnordered<BoxFuture<'static, Ended>> = FuturesUnordered::new();
        let mut bytes = 0;
        let mut stop = None;
        let mut failures = 0;
        let mut next_tick = self.env.now();
        let mut not_before = Moment::default();
        loop {
            let now = self.env.now();
            if now >= next_tick {
                next_tick = now + TICK;
                self.tick();
            }
            self.look_for_end(&mut stop);
            while stop.is_none() && !self.machine.paused() && self.env.now() >= not_before {
                let allowed = (self.window.bytes() as f64 * self.latency_controller.share()) as u64;
                // A comparison needs two buffers at once.
                let room = self.pool.limit().0.saturating_sub(self.pool.in_use().0) >= 4 * COPY_BYTES_MAX;
                if bytes > 0 && (bytes >= allowed || !room) || self.mirror.is_target_stalled() {
                    break;
                }
                let chunks = (allowed / 4).clamp(chunk, COPY_BYTES_MAX.max(chunk)) / chunk;
                let (run, was_wanted) = match self.mirror.tracker(|tracker| tracker.take_uncompared(full, chunks)) {
                    Uncompared::Run(run, was_wanted) => (run, was_wanted),
                    Uncompared::NothingYet => {
                        crate::pace::yield_now().await;
                        continue;
                    }
                    Uncompared::Nothing => break,
                };
                let length = self.mirror.tracker(|tracker| tracker.run_extent(&run)).length.0;
                bytes += length;
                in_flight.push(self.begin_compare(run, length, was_wanted));
            }
            if in_flight.is_empty() {
                if let Some(event) = stop {
                    return event;
                }
                let is_done = self.mirror.tracker(|tracker| tracker.is_compared(full));
                if is_done && !self.machine.paused() {
                    return self.end_verify();
                }
            }
            let now = self.env.now();
            let mut limit = next_tick.since(now).max(Duration::from_micros(100));
            if not_before > now {
                limit = limit.min(not_before.since(now));
            }
            let ended = if in_flight.is_empty() {
                self.wait(limit).await;
                None
            } else {
                match select(in_flight.next(), pin!(self.wait(limit))).await {
                    Either::Left((ended, _)) => ended,
                    Either::Right(_) => None,
                }
            };
            let Some(ended) = ended else { continue };
            bytes -= ended.bytes;
            self.yield_cpu();
            let now = self.env.now();
            not_before =
                not_before.max(now + self.duty_cycle.record(ended.began, now, self.latency_controller.duty_cycle()));
            let retried = matches!(ended.outcome, Err(CompareError::Source(_)) | Err(CompareError::Target(..)));
            if let Some(event) = self.take_compared(ended, &mut failures) {
                stop.get_or_insert(event);
            } else if retried {
                not_before = not_before.max(now + RETRY_PAUSE * failures);
            }
        }
    }

    fn begin_compare(&self, run: Range<u64>, bytes: u64, was_wanted: bool) -> BoxFuture<'static, Ended> {
        let mirror = Arc::clone(&self.mirror);
        let (comparison, pool) = (self.comparison.clone(), self.pool.clone());
        let began = self.env.now();
        Box::pin(async move {
            crate::pace::yield_now().await;
            let outcome = mirror.compare(run.clone(), comparison.as_ref(), &pool).await;
            Ended { run, bytes, was_wanted, began, outcome }
        })
    }

    fn take_compared(&mut self, ended: Ended, failures: &mut u32) -> Option<Event> {
        let equal = matches!(ended.outcome, Ok(Compared::Equal(_)));
        self.mirror.tracker(|tracker| tracker.end_compare(ended.run.clone(), equal));
        let chunks = ended.run.end - ended.run.start;
        match ended.outcome {
            Ok(Compared::Equal(effort)) => {
                let now = self.env.now();
                self.window.record(now, ended.bytes, now.since(ended.began), false);
                let verification = &mut self.statistics.verification;
                verification.chunks += chunks;
                verification.bytes += ended.bytes;
                verification.suspects += if ended.was_wanted { chunks } else { 0 };
                verification.conflicts += effort.conflicts;
                verification.locked += if effort.locked { chunks } else { 0 };
                self.statistics.equal.get_or_insert(true);
                None
            }
            Ok(Compared::Different(extent)) => {
                self.statistics.equal = Some(false);
                let error = difference(extent);
                tracing::error!(error = error.chain(), "the copy is not equal");
                self.error = Some(error);
                Some(Event::Broken)
            }
            // The guest has written there, and it will be copied again.
            Ok(Compared::NotHad) if self.tracking.is_some() => None,
            Ok(Compared::NotHad) => Some(Event::Missing),
            // It is compared when the target answers again.
            Err(CompareError::Silent) => None,
            Err(error) => {
                self.mirror.tracker(|tracker| tracker.compare_again(ended.run));
                *failures += 1;
                let is_borne = *failures <= RETRIES_MAX
                    && match &error {
                        CompareError::Source(_) => true,
                        CompareError::Target(session, error) => self.mirror.bears_failure(*session, error),
                        CompareError::Silent => true,
                    };
                if is_borne {
                    self.statistics.retries += 1;
                    return None;
                }
                match error {
                    CompareError::Source(error) => {
                        self.error = Some(error.wrap("the source cannot be read"));
                        Some(Event::Broken)
                    }
                    CompareError::Target(session, error) => {
                        self.mirror.fail_target(session, error);
                        None
                    }
                    CompareError::Silent => None,
                }
            }
        }
    }

    fn draw_sample(&mut self) {
        let chunks = self.mirror.tracker(|tracker| tracker.chunks());
        if self.statistics.verification.chunks > 0 {
            return;
        }
        if chunks <= self.options.sample_chunks {
            self.mirror.tracker(|tracker| tracker.want_comparison(0..chunks));
            return;
        }
        for _ in 0..self.options.sample_chunks {
            let index = self.env.random() % chunks;
            self.mirror.tracker(|tracker| tracker.want_comparison(index..index + 1));
        }
    }

    fn end_verify(&mut self) -> Event {
        match &mut self.tracking {
            Some(tracking) => tracking.is_compared = true,
            None if !self.mirror.tracker(|tracker| tracker.is_complete()) => return Event::Missing,
            None => {}
        }
        self.statistics.verified = true;
        Event::Verified
    }
}
