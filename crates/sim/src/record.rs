//! The host's durable memory: the journal's document, and what the engine asks to have written into it.

use std::time::Duration;

use block::{IoFuture, Result};
use filters::{MeterSnapshot, MeterState, StallWatch};
use migrate::{GuestMeter, GuestWindow, JobJournal, JobRecord, Journal, Phase};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::host::Host;
use crate::world::{Invariant, World};

/// What the journal says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Document {
    /// Which side holds the volume.
    pub(crate) holder: usize,
    /// Grows when that changes.
    pub(crate) epoch: u64,
    /// How many documents were stored before it.
    pub(crate) stores: u64,
    /// How many jobs there were.
    pub(crate) jobs: u64,
    /// The job under way.
    pub(crate) job: Option<Job>,
}

/// A job on record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) from: usize,
    /// Changes when the progress map must not be believed any more.
    pub(crate) identity: u64,
    /// Whether the target was not written to before this job.
    pub(crate) target_is_fresh: bool,
    /// The overlays over the volume, the lowest first.
    #[serde(default)]
    pub(crate) overlays: Vec<u32>,
    pub(crate) record: JobRecord,
}

/// The journal of one life of the process.
pub(crate) struct Record {
    world: World,
    host: Host,
    journal: Journal<Document>,
    document: Mutex<Document>,
}

impl Record {
    pub(crate) fn new(world: &World, journal: Journal<Document>, found: Option<Document>, host: Host) -> Result<Self> {
        let (epoch, stores) = host.newest_stored();
        let document = found.unwrap_or_default();
        if document.epoch < epoch || document.stores < stores {
            let found = format!("epoch {}, document {}", document.epoch, document.stores);
            let what = format!("the journal says {found}, but epoch {epoch}, document {stores} was acknowledged");
            world.violate(Invariant::CrashResume, what);
        }
        Ok(Self { world: world.clone(), host, journal, document: Mutex::new(document) })
    }

    pub(crate) fn document(&self) -> Document {
        self.document.lock().clone()
    }

    async fn store(&self, change: impl FnOnce(&mut Document)) -> Result<()> {
        let document = {
            let mut document = self.document.lock();
            change(&mut document);
            document.stores += 1;
            document.clone()
        };
        let stored = self.journal.store(&document).await;
        let word = if stored.is_ok() { "durable" } else { "in doubt" };
        self.world.event(format_args!("journal {word}: holder {} epoch {}", document.holder, document.epoch));
        if stored.is_ok() {
            self.host.note_stored(&document);
        }
        stored
    }

    /// Stores a change of the host's own until that has succeeded.
    async fn insist(&self, change: impl Fn(&mut Document)) {
        while self.store(&change).await.is_err() {
            self.world.sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn begin_job(&self, record: JobRecord, target_is_fresh: bool) {
        let jobs = self.document.lock().jobs + 1;
        self.insist(|document| {
            document.jobs = jobs;
            let (from, identity) = (document.holder, jobs << 32);
            document.job = Some(Job { from, identity, target_is_fresh, overlays: Vec::new(), record: record.clone() });
        })
        .await;
    }

    pub(crate) async fn end_job(&self) {
        self.insist(|document| document.job = None).await;
    }

    /// Lists the overlays of the job.
    pub(crate) async fn set_overlays(&self, overlays: Vec<u32>) -> Result<()> {
        self.store(move |document| {
            if let Some(job) = &mut document.job {
                job.overlays = overlays;
            }
        })
        .await
    }

    pub(crate) async fn forget_map(&self) {
        let identity = self.document.lock().job.as_ref().map_or(0, |job| job.identity) + 1;
        self.insist(|document| {
            if let Some(job) = &mut document.job {
                job.identity = identity;
            }
        })
        .await;
    }
}

impl JobJournal for Record {
    fn record(&self, phase: Phase) -> IoFuture<'_, ()> {
        Box::pin(self.store(move |document| {
            if let Some(job) = &mut document.job {
                document.holder = job.from;
                job.record.phase = phase;
            }
        }))
    }

    fn commit(&self) -> IoFuture<'_, ()> {
        let from = self.document.lock().job.as_ref().map_or(0, |job| job.from);
        self.host.check_commit(from);
        Box::pin(self.store(move |document| {
            document.holder = 1 - from;
            document.epoch += 1;
        }))
    }
}

/// What the guest feels, as the engine asks for it.
pub(crate) struct StallMeter {
    state: MeterState,
    last: Mutex<MeterSnapshot>,
    watch: Mutex<Option<StallWatch>>,
}

impl StallMeter {
    pub(crate) fn new(state: MeterState) -> Self {
        let last = state.snapshot();
        Self { state, last: Mutex::new(last), watch: Mutex::default() }
    }
}

impl GuestMeter for StallMeter {
    fn take_window(&self) -> GuestWindow {
        let now = self.state.snapshot();
        let window = now.since(&self.last.lock());
        *self.last.lock() = now;
        let latency = window.latency();
        GuestWindow { requests: latency.count(), latency_p99: latency.quantile(0.99), latency_max: latency.longest() }
    }

    fn begin_stall(&self) {
        *self.watch.lock() = Some(self.state.watch_stall());
    }

    fn stall(&self) -> Duration {
        self.watch.lock().as_ref().map_or(Duration::ZERO, StallWatch::longest)
    }
}
