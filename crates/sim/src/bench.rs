//! Loads against a bare model: no engine, no contents and no tasks, so millions of requests take a second.
//!
//! This is how models are tested and calibrated, and how a paper's hour of requests is played. Whatever needs the
//! engine goes through [`crate::player`] instead.

use std::collections::HashMap;
use std::time::Duration;

use env::Moment;
use filters::LatencyHistogram;

use crate::model::{Model, Ticket, Verb};
use crate::rng::Rng;
use crate::workload::{Step, Workload};

/// A load and how it is put on the model.
pub struct Client {
    workload: Box<dyn Workload>,
    outstanding: usize,
    think: Duration,
    waiting: Option<Step>,
    in_flight: usize,
    /// Not before this: it thinks.
    not_before: Moment,
    tally: Tally,
}

/// What a load has seen.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Reads answered.
    pub reads: u64,
    /// Writes answered.
    pub writes: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// How long each took.
    pub latency: LatencyHistogram,
    /// The sum of that, for a mean that no bucket rounds.
    pub latency_sum: Duration,
    /// The same of writes alone.
    pub write_latency_sum: Duration,
    /// How long the load ran.
    pub span: Duration,
}

impl Tally {
    /// Notes an answer.
    pub fn add(&mut self, verb: Verb, length: u64, took: Duration) {
        match verb {
            Verb::Read => (self.reads, self.bytes_read) = (self.reads + 1, self.bytes_read + length),
            Verb::Write => (self.writes, self.bytes_written) = (self.writes + 1, self.bytes_written + length),
            Verb::Flush => self.flushes += 1,
        }
        if verb == Verb::Write {
            self.write_latency_sum += took;
        }
        self.latency.add(took);
        self.latency_sum += took;
    }

    /// Requests answered.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.reads + self.writes + self.flushes
    }

    /// Reads and writes a second.
    #[must_use]
    pub fn iops(&self) -> f64 {
        (self.reads + self.writes) as f64 / self.span.as_secs_f64().max(1e-9)
    }

    /// Megabytes (10^6) a second, both ways.
    #[must_use]
    pub fn megabytes_a_second(&self) -> f64 {
        (self.bytes_read + self.bytes_written) as f64 / 1e6 / self.span.as_secs_f64().max(1e-9)
    }

    /// The mean latency of writes, in milliseconds.
    #[must_use]
    pub fn write_mean_ms(&self) -> f64 {
        self.write_latency_sum.as_secs_f64() * 1e3 / self.writes.max(1) as f64
    }

    /// The mean latency.
    #[must_use]
    pub fn latency_mean(&self) -> Duration {
        self.latency_sum.div_f64(self.requests().max(1) as f64)
    }
}

impl Client {
    /// `workload` with up to `outstanding` requests at once.
    #[must_use]
    pub fn new(workload: impl Workload + 'static, outstanding: usize) -> Self {
        Self {
            workload: Box::new(workload),
            outstanding,
            think: Duration::ZERO,
            waiting: None,
            in_flight: 0,
            not_before: Moment::default(),
            tally: Tally::default(),
        }
    }

    /// The same, waiting for `think` after every answer: what the way from the guest to the disk costs.
    #[must_use]
    pub const fn thinking(mut self, think: Duration) -> Self {
        self.think = think;
        self
    }

    /// When it wants to ask for something, if it does and may.
    fn wants(&mut self, rng: &Rng) -> Option<Moment> {
        if self.in_flight >= self.outstanding {
            return None;
        }
        if self.waiting.is_none() {
            self.waiting = self.workload.next(rng);
        }
        self.waiting.map(|step| Moment(step.at).max(self.not_before))
    }
}

/// Plays `clients` on `model` for `span`, or until they have no more requests; gives what each of them saw.
pub fn play(model: &mut dyn Model, clients: Vec<Client>, span: Duration, rng: &Rng) -> Vec<Tally> {
    let mut clients = clients;
    let mut under_way: HashMap<Ticket, (usize, Step, Moment)> = HashMap::new();
    let (mut count, mut now, mut done) = (0, Moment::default(), Vec::new());
    loop {
        let asked = clients.iter_mut().enumerate();
        let asked = asked.filter_map(|(index, client)| client.wants(rng).map(|at| (at.max(now), index))).min();
        let answered = model.next();
        let next = match (asked, answered) {
            (Some((at, _)), Some(done)) => at.min(done.max(now)),
            (Some((at, _)), None) => at,
            (None, Some(done)) => done.max(now),
            (None, None) => break,
        };
        if next.0 > span {
            now = Moment(span);
            break;
        }
        now = next;
        if let Some((_, index)) = asked.filter(|(at, _)| *at <= now) {
            let client = &mut clients[index];
            let step = client.waiting.take().expect("who wants something has it waiting");
            client.in_flight += 1;
            count += 1;
            under_way.insert(Ticket(count), (index, step, now));
            model.submit(now, Ticket(count), step.request);
        }
        model.advance(now, &mut done);
        for ticket in done.drain(..) {
            let (index, step, began) = under_way.remove(&ticket).expect("a model answers what it was asked, once");
            let client = &mut clients[index];
            client.in_flight -= 1;
            if !client.think.is_zero() {
                client.not_before = now + client.think;
            }
            client.tally.add(step.request.verb, step.request.length, now - began);
        }
    }
    clients.into_iter().map(|client| Tally { span: now.0, ..client.tally }).collect()
}
