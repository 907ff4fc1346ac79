//! What is counted on the way, and what is made of it: progress and the report.

use std::collections::BTreeMap;
use std::time::Duration;

use block::Bytes;
use env::Moment;
use filters::TokenBucket;

use super::Driver;
use super::eta::{Eta, EtaSample};
use super::switchover::micros;
use crate::{Failure, MoveOptions, Phase, Progress, Report, ScheduleReport, Switchover, Verification, Verify};

/// How long the rate looks back.
const RATE_SPAN: Duration = Duration::from_secs(2);

pub(crate) struct Statistics {
    began: Moment,
    /// When the guest was on the target, or it was over.
    ended: Option<Moment>,
    phase_since: Moment,
    phases: BTreeMap<Phase, Duration>,
    size: Bytes,
    bytes_resumed: Bytes,
    bytes_done: u64,
    /// The current phase's work at an earlier moment, for the rate.
    rate_from: (Moment, Phase, u64),
    rate: u64,
    bandwidth: Option<u64>,
    eta: Eta,
    pub(crate) bytes_to_verify: u64,
    /// What a target that was away had was compared of it,
    pub(crate) bytes_rechecked: u64,
    /// and what of that it had not.
    pub(crate) bytes_different: u64,
    pub(crate) retries: u64,
    pub(crate) target_losses: u64,
    pub(crate) stall: Duration,
    pub(crate) verified: bool,
    pub(crate) equal: Option<bool>,
    pub(crate) digest: Option<String>,
    pub(crate) verification: Verification,
    pub(crate) switchover: Switchover,
}

impl Statistics {
    pub(crate) fn new(
        now: Moment,
        size: Bytes,
        bytes_resumed: Bytes,
        options: &MoveOptions,
        past_page_cache: bool,
    ) -> Self {
        let verification = Verification {
            mode: options.verify,
            past_page_cache,
            checksum: "xxh3-64".to_owned(),
            ..Verification::default()
        };
        Self {
            began: now,
            ended: None,
            phase_since: now,
            phases: BTreeMap::new(),
            size,
            bytes_resumed,
            bytes_done: 0,
            rate_from: (now, Phase::Preparing, 0),
            rate: 0,
            bandwidth: options.bandwidth,
            eta: Eta::default(),
            bytes_to_verify: 0,
            bytes_rechecked: 0,
            bytes_different: 0,
            retries: 0,
            target_losses: 0,
            stall: Duration::ZERO,
            verified: false,
            equal: None,
            digest: None,
            verification,
            switchover: Switchover::default(),
        }
    }

    /// `before` ends now.
    pub(crate) fn enter(&mut self, now: Moment, before: Phase) {
        *self.phases.entry(before).or_default() += now.since(self.phase_since);
        self.phase_since = now;
    }

    /// The time that the report gives ends now, if it has not yet.
    pub(crate) fn stop(&mut self, now: Moment, phase: Phase) {
        self.enter(now, phase);
        self.ended.get_or_insert(now);
    }

    /// The guest is on the target.
    pub(crate) fn switched(&mut self, now: Moment) {
        self.ended.get_or_insert(now);
    }

    pub(crate) fn set_bandwidth(&mut self, wanted: Option<u64>, bucket: &TokenBucket) {
        if self.bandwidth != wanted {
            self.bandwidth = wanted;
            bucket.set_rate(wanted);
        }
    }

    /// Whether there is a bandwidth.
    pub(crate) const fn is_limited(&self) -> bool {
        self.bandwidth.is_some()
    }

    pub(crate) const fn set_past_page_cache(&mut self, past: bool) {
        self.verification.past_page_cache = past;
    }

    /// The recent rate of copies or comparisons, in bytes a second.
    pub(crate) const fn rate(&self) -> u64 {
        self.rate
    }

    /// How long the move has taken so far.
    pub(crate) fn age(&self, now: Moment) -> Duration {
        self.ended.unwrap_or(now).since(self.began)
    }

    /// What is compared in all, as far as that is known: before it begins, everything or as good as nothing.
    fn to_verify(&self) -> u64 {
        match (self.bytes_to_verify, self.verification.mode) {
            (0, Verify::Full) => self.size.0,
            (known, _) => known,
        }
    }

    fn seconds(&self, now: Moment) -> f64 {
        self.age(now).as_secs_f64()
    }

    fn update_rate(&mut self, now: Moment, phase: Phase, done: u64) {
        let (since, of, from) = self.rate_from;
        if of != phase || done < from {
            self.rate_from = (now, phase, done);
            self.rate = 0;
            return;
        }
        let span = now.since(since);
        if span < Duration::from_millis(200) {
            return;
        }
        self.rate = ((done - from) as f64 / span.as_secs_f64()) as u64;
        if span > RATE_SPAN {
            self.rate_from = (now, phase, done);
        }
    }
}

impl Driver {
    pub(crate) fn publish(&mut self) {
        let now = self.env.now();
        let phase = self.machine.phase();
        let (counts, had, dirty, buffered) = self.mirror.tracker(|tracker| {
            let dirty = tracker.bytes_dirty().0.max(tracker.bytes_passed_and_deferred().1);
            (tracker.counts, tracker.bytes_in_step().0, dirty.0, tracker.bytes_buffered())
        });
        let statistics = &mut self.statistics;
        let verified = statistics.verification.bytes;
        let done = if phase == Phase::Verifying { verified } else { counts.copied + counts.zero };
        statistics.update_rate(now, phase, done);
        statistics.bytes_done = statistics.bytes_done.max(had);
        let is_moving = matches!(phase, Phase::Copying | Phase::Verifying) && !self.machine.paused();
        let look = EtaSample {
            now,
            age: statistics.age(now),
            is_moving,
            is_verifying: phase == Phase::Verifying,
            size: statistics.size.0,
            had,
            had_most: statistics.bytes_done,
            verified,
            to_verify: statistics.to_verify(),
        };
        let (percent, expected) = statistics.eta.look(look);
        let percent = if phase.is_committed() { statistics.eta.finish() } else { percent };
        let seconds = |seconds: f64| seconds.ceil().min(1e15) as u64;
        let progress = Progress {
            phase,
            paused: self.machine.paused(),
            bytes_total: statistics.size.0,
            bytes_done: statistics.bytes_done,
            bytes_left: statistics.size.0.saturating_sub(had),
            bytes_copied: counts.copied,
            bytes_again: counts.again,
            bytes_zero: counts.zero,
            bytes_mirrored: counts.mirrored,
            bytes_buffered: buffered.0,
            throttled_us: micros(counts.throttled),
            bytes_verified: verified,
            bytes_to_verify: statistics.bytes_to_verify,
            rate: if is_moving { statistics.rate } else { 0 },
            iteration: self.passes.number(),
            bytes_dirty: dirty,
            percent,
            eta_seconds: expected.map(|expected| seconds(expected.seconds)),
            eta_seconds_min: expected.map(|expected| expected.between.0 as u64),
            eta_seconds_max: expected.map(|expected| seconds(expected.between.1)),
            stall_us_max: statistics.stall.as_micros() as u64,
            seconds: statistics.seconds(now),
            target_losses: statistics.target_losses,
            error: self.error.as_ref().map(Failure::from),
        };
        self.control.shared.progress.send_if_modified(|known| {
            let changed = *known != progress;
            *known = progress;
            changed
        });
    }

    pub(crate) fn report(&self) -> Report {
        let statistics = &self.statistics;
        let (counts, proved, buffered) =
            self.mirror.tracker(|tracker| (tracker.counts, tracker.bytes_proved().0, tracker.bytes_buffered()));
        let has_suspects = self.mirror.tracker(|tracker| tracker.has_suspects());
        let is_there = self.machine.phase().is_committed();
        let phases = statistics.phases.iter().map(|(phase, span)| (phase.name().to_owned(), span.as_secs_f64()));
        Report {
            phase: self.machine.phase(),
            strategy: self.options.strategy,
            schedule: ScheduleReport { asked: self.options.schedule, ..self.schedule.report() },
            read_cache: self.mirror.read_cache.as_ref().map(|cache| cache.status().into()),
            seconds: statistics.seconds(self.env.now()),
            age_seconds: self.under_way.age(statistics.ended.unwrap_or_else(|| self.env.now())).as_secs_f64(),
            bytes_total: statistics.size.0,
            bytes_copied: counts.copied,
            bytes_zero: counts.zero,
            bytes_offloaded: counts.offloaded,
            skipped: self.mirror.tracker(|tracker| tracker.bytes_skipped()),
            bytes_unskipped: counts.unskipped,
            bytes_mirrored: counts.mirrored,
            bytes_buffered_max: buffered.1,
            throttled_us: micros(counts.throttled),
            bytes_resumed: statistics.bytes_resumed.0,
            bytes_rechecked: statistics.bytes_rechecked,
            bytes_different: statistics.bytes_different,
            bytes_again: counts.again,
            stall_us_max: statistics.stall.as_micros() as u64,
            verified: match statistics.verification.mode {
                Verify::Off => false,
                Verify::Sample => statistics.verified && !has_suspects,
                // All of it means what was copied last, too.
                Verify::Full => statistics.verified && proved == statistics.size.0,
            },
            equal: statistics.equal,
            digest: statistics.digest.clone(),
            verification: Verification { bytes_proved: proved, ..statistics.verification.clone() },
            switchover: statistics.switchover,
            phases: phases.collect(),
            iterations: self.passes.done().to_vec(),
            redos: counts.redos,
            retries: statistics.retries,
            missed_writes: counts.missed,
            estimates: statistics.eta.kept(is_there.then(|| statistics.seconds(self.env.now()))),
            target_losses: statistics.target_losses,
            window_bytes: self.window.bytes(),
            error: self.error.as_ref().map(Failure::from),
        }
    }
}
