//! The handle with which people and programs steer a migration, and where it publishes its progress.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, Device, Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::digests::Digests;
use crate::{Comparison, MoveOptions, Progress};

/// Steers one migration. Clones steer the same one.
#[derive(Clone)]
pub struct Control {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    requests: Mutex<ControlRequests>,
    /// Something has changed that the driver should look at: a wish, a lost target.
    pub(crate) signal: Arc<Notify>,
    pub(crate) progress: watch::Sender<Progress>,
}

/// What has been asked of the migration and not been taken up yet.
#[derive(Clone, Default)]
pub(crate) struct ControlRequests {
    pub(crate) paused: bool,
    pub(crate) cancel: bool,
    pub(crate) target: Option<TargetResumption>,
    pub(crate) bandwidth: Option<u64>,
    pub(crate) deadline: Option<Duration>,
}

/// With which target a migration that has lost its own goes on.
#[derive(Clone)]
pub(crate) enum TargetResumption {
    /// The same device, which is thought to work again.
    Same,
    /// The same device, after what it is thought to have was compared.
    Compared(Arc<dyn Digests>),
    /// Another session with the same bytes; or, if `empty`, a target that has nothing of the copy.
    Other { device: Device, comparison: Option<Comparison>, empty: bool },
}

impl Control {
    pub(crate) fn new(progress: Progress, options: &MoveOptions) -> Self {
        let deadline = options.deadline_ms.map(Duration::from_millis);
        let requests = ControlRequests { bandwidth: options.bandwidth, deadline, ..ControlRequests::default() };
        let shared =
            Shared { requests: Mutex::new(requests), signal: Arc::default(), progress: watch::Sender::new(progress) };
        Self { shared: Arc::new(shared) }
    }

    /// Stops copying and comparing; the guest's writes are mirrored all the same, and no switchover begins.
    pub fn pause(&self) {
        self.request(|requests| requests.paused = true);
    }

    /// Goes on after a pause, and with the same target after that was lost.
    pub fn resume(&self) {
        self.request(|requests| {
            requests.paused = false;
            requests.target.get_or_insert(TargetResumption::Same);
        });
    }

    /// Goes on with the same target after that was lost. First what the target is thought to have is compared by
    /// digests, and what differs is copied again. The guest works on the source meanwhile.
    pub fn resume_after_comparing(&self, digests: Arc<dyn Digests>) {
        self.request(|requests| {
            requests.paused = false;
            requests.target = Some(TargetResumption::Compared(digests));
        });
    }

    /// Goes on with a new session to the same target after that was lost: what had been flushed there counts.
    pub fn resume_session(&self, device: Device, comparison: Option<Comparison>) {
        self.request(|requests| requests.target = Some(TargetResumption::Other { device, comparison, empty: false }));
    }

    /// Goes on with another target after the first was lost: everything is copied again.
    pub fn resume_with(&self, device: Device, comparison: Option<Comparison>) {
        self.request(|requests| requests.target = Some(TargetResumption::Other { device, comparison, empty: true }));
    }

    /// Undoes the migration: the guest stays on the source.
    ///
    /// # Errors
    /// Invalid once the commit has begun. A commit that begins at this very moment wins; the outcome tells.
    pub fn cancel(&self) -> Result<()> {
        let phase = self.shared.progress.borrow().phase;
        if !phase.can_cancel() && phase != crate::Phase::Committing {
            let context = format!("the migration is {phase}: it can no longer be cancelled");
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        self.request(|requests| requests.cancel = true);
        Ok(())
    }

    /// Limits copying to so many bytes a second, or lifts the limit. Mirrored writes do not count.
    pub fn set_bandwidth(&self, rate: Option<Bytes>) {
        self.request(|requests| requests.bandwidth = rate.map(Bytes::get));
    }

    /// How many bytes a second copying is limited to, as was said last.
    #[must_use]
    pub fn bandwidth(&self) -> Option<u64> {
        self.requests().bandwidth
    }

    /// It shall be over so long after its start, or whenever it is. Of strategies that iterate the next decision knows it.
    pub fn set_deadline(&self, deadline: Option<Duration>) {
        self.request(|requests| requests.deadline = deadline);
    }

    /// Where the migration stands.
    #[must_use]
    pub fn snapshot(&self) -> Progress {
        self.shared.progress.borrow().clone()
    }

    /// Where the migration stands, every time that changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Progress> {
        self.shared.progress.subscribe()
    }

    fn request(&self, change: impl FnOnce(&mut ControlRequests)) {
        change(&mut self.shared.requests.lock());
        self.shared.signal.notify_one();
    }

    pub(crate) fn requests(&self) -> ControlRequests {
        self.shared.requests.lock().clone()
    }

    /// Takes the wish for a target, so that it is granted once.
    pub(crate) fn take_target(&self) -> Option<TargetResumption> {
        self.shared.requests.lock().target.take()
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Control({})", self.shared.progress.borrow().phase)
    }
}
