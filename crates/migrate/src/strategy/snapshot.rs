//! Snapshotting (ESX paper, section 2.2): the guest writes to an overlay while the base below it is copied.
//!
//! ```text
//!   guest ─▶ slot ─▶ overlay n+1 ─▶ overlay n ─▶ mirror ─┬─▶ source
//!                    (all writes)   (read-only)          └─▶ target
//!
//!   snapshot 1 │ copy the base │ snapshot 2 │ fold 1 │ snapshot 3 │ fold 2 │ ... │ guest held: fold the last │ mirror alone
//! ```
//!
//! Below the overlays is a mirror that no guest writes to. It copies the base. To fold an overlay is to write what it
//! holds to the mirror, which puts it on both sides. So at every moment the guest's disk is *the source with the
//! overlays that the journal lists*, whatever becomes of the target. To undo the move, what is left is folded into the
//! source. The paper folds into the target only. When its move is cancelled, its snapshots and disks are spread over
//! two volumes. An overlay that the guest writes to is folded while the guest is held, and only then.
//!
//! A fold does not write to the mirror as the guest would. When the progress map cannot be written, a guest's write to
//! the mirror waits for the end of the job. The job does not end before its folds have, so both would wait for each
//! other. So the mirror has an entry for the job ([`JobEntry`]). It refuses such a write while it still holds the
//! extent and before either side has been asked for anything. So nothing of the write can land later, over what the
//! guest has written since. To drop the write of a fold would not be enough, because a side may have it already. A fold
//! ends only when every piece that it has begun has ended. A fold that ended early is done again from its beginning.
//!
//! [`JobEntry`]: super::mirror::device::JobEntry
//!
//! An overlay is listed durably before the guest can write to it. It is struck off durably when all that it holds is
//! flushed on what lies below. Listed or not, an overlay that is empty or folded changes nothing that anybody reads.

mod fold;
pub(crate) mod rounds;

use std::sync::Arc;
use std::time::Duration;

use block::{BufferPool, Bytes, Device, Error, ErrorKind, IoFuture, Result, Slot};
use env::EnvRef;
use filters::{Overlay, OverlayHeader};

use crate::pace::PauseLimit;

pub(crate) use fold::{Fold, Last, Pace};

/// Before the guest is held once more for a snapshot.
const ENTER_PAUSE: Duration = Duration::from_millis(20);

/// Where the overlays of one move are kept, and the record of which there are.
pub trait SnapshotStore: Send + Sync {
    /// The identity of this boot of the machine; overlays are told by it whether caches were lost.
    fn boot(&self) -> [u8; 16];

    /// The numbers of the overlays that are on record, the lowest first.
    fn recorded(&self) -> Vec<u32>;

    /// Makes the device of overlay `number`, `length` bytes of zeroes, in the place of any of that number. Where its space can
    /// be reserved, it is: an overlay that is full fails the guest. Done means that a crash keeps it.
    fn create(&self, number: u32, length: Bytes) -> IoFuture<'_, Device>;

    /// Opens the device of overlay `number`.
    fn open(&self, number: u32) -> IoFuture<'_, Device>;

    /// Puts durably on record that the volume is the source with these overlays, the lowest first. An error means in
    /// doubt; the next call settles it.
    fn record(&self, numbers: Vec<u32>) -> IoFuture<'_, ()>;

    /// Removes the device of an overlay that is not on record any more, if there is one.
    fn remove(&self, number: u32) -> IoFuture<'_, ()>;
}

/// One overlay.
#[derive(Clone)]
pub(crate) struct Snapshot {
    pub(crate) number: u32,
    pub(crate) overlay: Arc<Overlay>,
    pub(crate) device: Device,
}

/// The overlays of a volume, between its slot and its source.
pub struct Snapshots {
    store: Arc<dyn SnapshotStore>,
    env: EnvRef,
    /// The lowest first.
    stack: Vec<Snapshot>,
    /// Listed, and not in the guest's path yet: the next snapshot.
    prepared: Option<Snapshot>,
    /// Their removal waits for a record without them.
    obsolete: Vec<u32>,
    next: u32,
}

impl Snapshots {
    /// None so far.
    #[must_use]
    pub fn none(store: Arc<dyn SnapshotStore>, env: EnvRef) -> Self {
        Self { store, env, stack: Vec::new(), prepared: None, obsolete: Vec::new(), next: 1 }
    }

    /// Those that are on record, over `source`.
    ///
    /// # Errors
    /// One of them cannot be opened, or is not what it was.
    pub async fn open(store: Arc<dyn SnapshotStore>, env: EnvRef, source: Device) -> Result<Self> {
        let mut snapshots = Self::none(store, env);
        let mut base = source;
        for number in snapshots.store.recorded() {
            let device = snapshots.store.open(number).await?;
            let snapshot = snapshots.lay(number, base, device).await?;
            base = snapshot.device.clone();
            snapshots.stack.push(snapshot);
            snapshots.next = number + 1;
        }
        // A crash may have come between a record and a removal.
        let first = snapshots.stack.first().map_or(1, |lowest| lowest.number);
        snapshots.obsolete.extend(1..first);
        Ok(snapshots)
    }

    /// What the guest reads and writes: the highest overlay, if there is one.
    #[must_use]
    pub fn top(&self) -> Option<Device> {
        self.stack.last().map(|snapshot| snapshot.device.clone())
    }

    /// Whether none is in the guest's path.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stack.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.stack.len()
    }

    /// What the highest overlay holds as data.
    pub(crate) fn top_bytes(&self) -> Bytes {
        self.stack.last().map_or(Bytes::ZERO, |snapshot| snapshot.overlay.data_bytes())
    }

    pub(crate) fn lowest(&self) -> Option<&Snapshot> {
        self.stack.first()
    }

    /// Lays the lowest overlay over another device with the same bytes.
    pub(crate) fn rebase(&self, base: &Device) -> Result<()> {
        self.stack.first().map_or(Ok(()), |lowest| lowest.overlay.rebase(base.clone()))
    }

    async fn lay(&self, number: u32, base: Device, delta: Device) -> Result<Snapshot> {
        let overlay = Arc::new(Overlay::open(base, delta, self.store.boot()).await?);
        let device = Device::from_arc(&format!("overlay {number}"), Arc::clone(&overlay) as _);
        Ok(Snapshot { number, overlay, device })
    }

    fn numbers(&self) -> Vec<u32> {
        self.stack.iter().map(|snapshot| snapshot.number).collect()
    }

    /// Takes a snapshot of what the slot shows, `below` if there is no overlay yet: from here on the guest writes to a new
    /// overlay. The guest's requests have `limit` to drain.
    pub(crate) async fn take(&mut self, slot: &Slot, below: &Device, limit: Duration) -> Result<()> {
        if self.prepared.is_none() {
            self.prepare(below).await?;
        }
        let quiesced = env::timeout(&*self.env, limit, slot.quiesce())
            .await
            .ok_or_else(|| Error::new(ErrorKind::Busy, format!("the guest's requests did not drain in {limit:?}")))?;
        let snapshot = self.prepared.take().expect("prepared above");
        quiesced.swap(snapshot.device.clone());
        self.stack.push(snapshot);
        Ok(())
    }

    /// The same, as often as it takes, up to `limit` in all. Gives how long the guest was held, and how often it was let go.
    pub(crate) async fn take_within(
        &mut self,
        slot: &Slot,
        below: &Device,
        hold: &mut PauseLimit,
        limit: Duration,
    ) -> Result<(Duration, u64)> {
        let until = self.env.now() + limit;
        let (mut held, mut retries) = (Duration::ZERO, 0);
        loop {
            // What the guest need not be held for.
            if self.prepared.is_none() {
                self.prepare(below).await?;
            }
            let began = self.env.now();
            let outcome = self.take(slot, below, hold.limit()).await;
            held += self.env.now().since(began);
            match outcome {
                Err(error) if error.kind() == ErrorKind::Busy && self.env.now() < until => {
                    hold.note_failure();
                    retries += 1;
                    self.env.sleep(ENTER_PAUSE).await;
                }
                outcome => {
                    hold.note_success();
                    return outcome.map(|()| (held, retries));
                }
            }
        }
    }

    /// Folds everything into `source` and leaves the guest there, as often as it takes: the end of a move that cannot go
    /// on. Failures are logged.
    pub async fn fold_back(&mut self, slot: &Slot, source: &Device, pool: &BufferPool) {
        let env = Arc::clone(&self.env);
        let (below, into, durable) = (source.clone(), source.clone(), source.clone());
        let in_flight_bytes_max = pool.limit().0 / 2;
        let mut fold = Fold { snapshots: self, slot, env: &env, pool, below, into, durable, in_flight_bytes_max };
        fold.fold_all(|_| {}).await;
    }

    /// Makes the next overlay and puts it on record: empty, it changes nothing whether it is listed or not.
    async fn prepare(&mut self, below: &Device) -> Result<()> {
        let number = self.next;
        self.next += 1;
        let base = self.top().unwrap_or_else(|| below.clone());
        let id = env::random_id(&*self.env);
        let parent = self.stack.last().map_or([0; 16], |snapshot| snapshot.overlay.header().id);
        let header = OverlayHeader::new(base.size(), id, parent);
        let attempt = async {
            let delta = self.store.create(number, header.delta_bytes()).await?;
            Overlay::create(&delta, &header).await?;
            let snapshot = self.lay(number, base, delta).await?;
            let mut numbers = self.numbers();
            numbers.push(number);
            self.store.record(numbers).await?;
            Ok::<_, Error>(snapshot)
        };
        match attempt.await {
            Ok(snapshot) => {
                self.prepared = Some(snapshot);
                Ok(())
            }
            Err(error) => {
                // It may be on record or not, and must stay until that is settled.
                self.obsolete.push(number);
                Err(Error::new(error.kind(), format!("taking a snapshot: {}", error.chain())))
            }
        }
    }

    /// Puts durably on record which overlays are left without the lowest `folded` ones, which hold nothing any more that
    /// is not on what lies below.
    async fn strike(&mut self, folded: usize) -> Result<()> {
        let numbers = self.stack[folded..].iter().map(|snapshot| snapshot.number);
        let prepared = self.prepared.as_ref().map(|snapshot| snapshot.number);
        self.store.record(numbers.chain(prepared).collect()).await.map_err(|error| {
            Error::new(error.kind(), format!("recording that a snapshot is folded: {}", error.chain()))
        })
    }

    /// Removes what is not on record any more. What cannot be removed is tried again the next time.
    async fn sweep(&mut self) {
        let mut left = Vec::new();
        for number in std::mem::take(&mut self.obsolete) {
            if let Err(error) = self.store.remove(number).await {
                tracing::warn!(number, error = error.chain(), "an overlay could not be removed");
                left.push(number);
            }
        }
        self.obsolete = left;
    }
}

impl std::fmt::Debug for Snapshots {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Snapshots({:?})", self.numbers())
    }
}
