//! What a migration is put together from. Whoever assembles the stack provides all of it.

use std::sync::Arc;
use std::time::Duration;

use block::{BufferPool, Device, Error, IoFuture, Offload, Slot};
use env::{EnvRef, Moment};
use filters::Redirect;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::{Medium, MoveOptions, Phase, ProgressMap, Snapshots};

/// Everything that a migration works with.
pub struct MigrationContext {
    /// Clock, tasks, randomness.
    pub env: EnvRef,
    /// The joint of the guest's stack. Its device now is [`source`](Self::source); after the switchover it is
    /// [`target`](Self::target).
    pub slot: Slot,
    /// What holds the volume now.
    pub source: Device,
    /// What the migration reads the source by, if that is not [`source`](Self::source) itself: the same bytes, by a face of a
    /// layer that does not take these reads for the guest's.
    pub copy_face: Option<Device>,
    /// The redirection that [`source`](Self::source) is, if it is one. A read cache goes below it.
    pub redirect: Option<Redirect>,
    /// What the source is on, for a schedule that follows the head of its disk.
    pub medium: Medium,
    /// What shall hold it. At least as large as the source; opened for this migration alone.
    pub target: Device,
    /// Whether nobody has written to the target since it was last made durable. Then what it reads as zeroes stays
    /// zeroes, and is not written. Otherwise it may read zeroes that a failed flush has lost. Such targets are a block
    /// device, what an undone move has left, and the target of a job that an earlier process began.
    pub target_is_fresh: bool,
    /// What the job's record says when an earlier session has left it; [`Phase::Preparing`] for a new one. A move that was
    /// being undone ([`Phase::Cancelling`]) is undone: since then nobody has kept track of what the guest wrote.
    pub phase: Phase,
    /// Since when the move has been under way, in whichever processes: its deadline counts from there.
    pub under_way: UnderWay,
    /// Where the job's phase and the commit are made durable.
    pub journal: Arc<dyn JobJournal>,
    /// Which chunks are copied, for a restart within this boot. `None`: a restart begins anew.
    pub progress_map: Option<ProgressMap>,
    /// What the guest feels. `None`: the copy does not yield and no stall is reported.
    pub meter: Option<Arc<dyn GuestMeter>>,
    /// Devices that read source and target past the page cache. `None`: comparisons read through it, and the report
    /// says so.
    pub comparison: Option<Comparison>,
    /// Copies from source to target below us, where that is cheap. `None`: every byte is read and written.
    pub offload: Option<Arc<dyn Offload>>,
    /// Where the copy's buffers come from; at least 4 MiB, and not the pool that guest requests wait for.
    pub pool: BufferPool,
    /// Of the snapshot strategy: the overlays that an earlier session has left between slot and source, or none yet.
    /// When they are not empty, the slot's device is the highest of them. Whoever holds another handle may fold them
    /// back when the migration does not start.
    pub snapshots: Option<Arc<tokio::sync::Mutex<Snapshots>>>,
}

/// Since when a move has been under way, over restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnderWay {
    before: Duration,
    since: Moment,
}

impl UnderWay {
    /// It has been under way for `age` now: zero for one that begins.
    #[must_use]
    pub const fn new(age: Duration, now: Moment) -> Self {
        Self { before: age, since: now }
    }

    /// How long that is at `now`.
    #[must_use]
    pub const fn age(self, now: Moment) -> Duration {
        self.before.saturating_add(now.since(self.since))
    }
}

/// Devices over the same bytes as source and target that read past the page cache.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Reads the source.
    pub source: Device,
    /// Reads the target.
    pub target: Device,
}

/// The durable memory of one job. Its document is the only authority on who holds the volume.
///
/// Stores are carried out one after another in the order of the calls. After a store has failed nobody knows whether
/// the disk has it. The next store settles that: it must have a higher sequence, and must not overwrite the last good
/// one. [`Journal`](crate::Journal) does that.
pub trait JobJournal: Send + Sync {
    /// Records durably that the *source* holds the volume and the job is in `phase`.
    fn record(&self, phase: Phase) -> IoFuture<'_, ()>;

    /// Told that the migration ends because of `error`, or of a difference that a comparison found. The call comes
    /// before [`Phase::Cancelling`] is recorded, so that whoever finds that record knows the reason, too.
    fn failed(&self, _error: &Error, _is_unequal: bool) {}

    /// The commit point: records durably that the *target* holds the volume. The guest is held meanwhile, so this is
    /// one small durable write and nothing else. An error means that the commit is in doubt and is asked for again. An
    /// error of the kind fenced means that the commit can never succeed: then [`revert`](Self::revert) settles the
    /// doubt.
    fn commit(&self) -> IoFuture<'_, ()>;

    /// Settles a commit in doubt, against it if that is possible still: records durably that the source holds the volume.
    /// Gives `false` if the commit counts: then the target holds it, and that is on record.
    ///
    /// # Errors
    /// The doubt is as it was.
    fn revert(&self) -> IoFuture<'_, bool> {
        Box::pin(async { self.record(Phase::Reverting).await.map(|()| true) })
    }

    /// Asked right before each store of the commit: before the first one the guest is held, and nothing of it is in
    /// flight. A target that the guest could lose without being told, because it may lose its power alone, makes durable
    /// here what the guest was answered.
    ///
    /// # Errors
    /// Busy: others that switch over with it are not held, so the guest is let go, and held again later. Any other: the target
    /// is lost. Nothing was stored.
    fn before_commit(&self) -> IoFuture<'_, ()> {
        block::ready(Ok(()))
    }

    /// Told once the commit counts, before any of the guest's requests goes to the target alone.
    fn committed(&self) {}

    /// Asked when the target is complete and flushed, right before the guest is held: whether the target can be what the
    /// volume's record will name. Whoever is to hold it may make itself ready here. If it could not be asked (the error
    /// is disconnected or timed out), the target is lost. Any other error ends the migration with the guest on the
    /// source.
    ///
    /// # Errors
    /// What stands against it, for people.
    fn may_commit(&self) -> IoFuture<'_, ()> {
        block::ready(Ok(()))
    }

    /// Whether others switch over with it, in one commit.
    fn is_of_group(&self) -> bool {
        false
    }

    /// Awaited right before the guest is held, if others switch over with it: ends when they are as far.
    fn turn(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Told that no switchover is under way any more, and that another attempt may follow: the others need not wait for it.
    fn put_off(&self) {}
}

/// What a job's record in the journal says of the migration itself; the daemon's document embeds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// Where the job was when it was last recorded.
    pub phase: Phase,
    /// How the move was asked for.
    pub options: MoveOptions,
    /// How many times a process has begun to work on it.
    pub sessions: u32,
    /// When it was asked for, in milliseconds of the wall clock since 1970.
    pub started_unix_ms: u64,
}

/// What the guest felt in a window of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestWindow {
    /// How many requests were answered.
    pub requests: u64,
    /// The 99th percentile of their latency.
    pub latency_p99: Duration,
    /// The longest of them.
    pub latency_max: Duration,
}

/// Tells what the guest feels. The meters of a volume's connections implement it.
pub trait GuestMeter: Send + Sync {
    /// What was felt since this was last called. The copy's controller is the only caller.
    fn take_window(&self) -> GuestWindow;

    /// Begins to watch for the longest request; those in flight count from when they were asked.
    fn begin_stall(&self);

    /// The longest request since [`begin_stall`](Self::begin_stall), those still in flight included.
    fn stall(&self) -> Duration;
}
