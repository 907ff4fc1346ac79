//! The asynchronous mirror's two ends. The guest's writes wait for room in the buffer, but not for the target. The
//! other end writes to the target what is buffered.

use std::future::Future;
use std::pin::pin;

use block::{Buffer, BufferPool, Bytes, Data, Extent, Mutation, MutationKind, RangeGuard, RangeLock, Result};
use futures::StreamExt;
use futures::future::{Either, select};
use futures::stream::FuturesUnordered;
use tokio::sync::Notify;

use super::filter::{Finish, Shared, Writer};
use super::target_work::write_parts;
use super::tracker::Tracker;
use super::write_queue::{BufferPlan, Buffered};

/// So many buffered writes are on their way to the target at once. QEMU's NBD client has as many outstanding, so a far
/// target takes no less than from a mirror. With more of them a slow target leaves the copy little.
const WRITE_BACK_MAX: usize = 16;
/// One part of so many of the buffer is the longest write that is buffered, and never more than [`WRITE_BYTES_MAX`]. A
/// longer one is mirrored at once.
const WRITE_PART: u64 = 4;
const WRITE_BYTES_MAX: u64 = 1 << 20;
/// The smallest thing that takes room: a page.
const PAGE_BYTES: usize = block::PAGE_BYTES;

/// The buffer's memory, and who waits for what of it.
pub(crate) struct WriteBuffer {
    /// All of the buffer: a write's memory is its place.
    pub(crate) pool: BufferPool,
    /// Who may write an extent of the target: buffered writes in their order, and the copies between them.
    write_back: RangeLock,
    /// Something was buffered.
    filled: Notify,
    /// Something has landed, or the session has ended.
    written_back: Notify,
}

impl WriteBuffer {
    /// A buffer of `bytes`.
    pub(crate) fn new(bytes: Bytes) -> Self {
        let (filled, written_back) = (Notify::new(), Notify::new());
        Self { pool: BufferPool::new(bytes), write_back: RangeLock::new(), filled, written_back }
    }

    /// Wakes those who wait for something to land.
    pub(super) fn announce(&self) {
        self.written_back.notify_waiters();
    }

    /// How much room `mutation` takes, or `None` if it is too long to be buffered.
    fn needed(&self, mutation: &Mutation) -> Option<usize> {
        let bytes = match mutation.kind() {
            MutationKind::Data(data) => data.len().max(PAGE_BYTES),
            _ => PAGE_BYTES,
        };
        (bytes as u64 <= self.write_bytes_max()).then_some(bytes)
    }

    /// The most room that a write takes.
    pub(crate) fn write_bytes_max(&self) -> u64 {
        // Room is taken in powers of two.
        1 << (self.pool.limit().0 / WRITE_PART).clamp(1, WRITE_BYTES_MAX).ilog2()
    }
}

impl Shared {
    /// A guest write that is answered when the source has it; `None` if both sides are to have it first.
    pub(super) async fn buffered_write(&self, write_buffer: &WriteBuffer, mutation: &Mutation) -> Option<Result<()>> {
        let extent = mutation.extent();
        let needed = write_buffer.needed(mutation)?;
        let mut held: Option<Buffer> = None;
        let (plan, guard) = loop {
            if held.is_none() && self.tracker(|tracker| tracker.needs_buffer(extent)) {
                held = Some(self.reserve_buffer(write_buffer, needed).await?);
            }
            let guard = match self.lock.try_exclusive(extent) {
                Some(guard) => guard,
                None => self.lock.exclusive(extent).await,
            };
            match self.tracker(|tracker| tracker.plan_buffered(extent, held.is_some())) {
                BufferPlan::Through => return None,
                BufferPlan::Buffer(plan) => break (plan, guard),
                // A copy came in between. No lock is held while room is waited for.
                BufferPlan::NeedsBuffer => {}
            }
        };
        let mut finish = Finish { shared: self, plan: &plan, may_differ: true };
        if !plan.activate.is_empty()
            && let Err(error) = self.activate(&plan.activate, Writer::Guest).await
        {
            finish.may_differ = false;
            return Some(Err(error));
        }
        if let Err(error) = self.source.write(mutation.clone()).await {
            return Some(Err(error));
        }
        finish.may_differ = false;
        if let (true, Some(held)) = (plan.buffered, held) {
            let (mutation, room_of) = private(mutation, held);
            let may_answer = self.tracker(|tracker| tracker.buffer(&mutation, &room_of));
            write_buffer.filled.notify_one();
            drop(finish);
            if !may_answer {
                // The switchover has come near meanwhile: both sides must have what is answered from now on.
                self.written_back_or_lost(extent).await;
            }
        }
        drop(guard);
        let session = self.tracker(|tracker| tracker.session().cloned());
        match session {
            Some(session) if mutation.fua => Some(self.force_afterwards(&session, mutation.clone()).await),
            _ => Some(Ok(())),
        }
    }

    /// Waits for room in the buffer, which is what throttles the guest to the target's pace. `None` when writes are not
    /// buffered any more.
    async fn reserve_buffer(&self, write_buffer: &WriteBuffer, bytes: usize) -> Option<Buffer> {
        if let Some(buffer) = write_buffer.pool.try_acquire(bytes) {
            return Some(buffer);
        }
        let began = self.env.now();
        let over = self.wait_until(|tracker| !tracker.is_buffering());
        let write_buffer = self.or_fail_stalled(write_buffer.pool.acquire(bytes));
        let buffer = match select(pin!(write_buffer), pin!(over)).await {
            Either::Left((buffer, _)) => Some(buffer),
            Either::Right(_) => None,
        };
        let waited = self.env.now().since(began);
        self.tracker(|tracker| tracker.counts.throttled += waited);
        buffer
    }

    /// Waits until nothing of `extent` is on its way to the target. Whoever calls sees to it that nothing comes after.
    pub(crate) async fn written_back(&self, extent: Extent) {
        self.wait_written_back(|tracker| !tracker.is_pending(extent)).await;
    }

    /// The same, or until there is no target: a guest write then goes to the source alone.
    pub(super) async fn written_back_or_lost(&self, extent: Extent) {
        let written_back = self.wait_written_back(|tracker| tracker.session().is_none() || !tracker.is_pending(extent));
        self.or_fail_stalled(written_back).await;
    }

    /// Waits until everything that was buffered has landed.
    pub(crate) async fn drained(&self) {
        self.wait_written_back(Tracker::is_drained).await;
    }

    async fn wait_written_back(&self, is_over: impl Fn(&Tracker) -> bool) {
        let Some(write_buffer) = &self.write_buffer else { return };
        loop {
            let written_back = write_buffer.written_back.notified();
            if self.tracker(|tracker| is_over(tracker)) {
                return;
            }
            written_back.await;
        }
    }

    /// The right to write `extent` of the target between what is buffered before and after. Nothing of it may be pending.
    pub(crate) async fn lock_at_target(&self, extent: Extent) -> Option<RangeGuard> {
        match &self.write_buffer {
            Some(write_buffer) => Some(write_buffer.write_back.exclusive(extent).await),
            None => None,
        }
    }

    /// Writes what is buffered to the target, for as long as it is polled.
    pub(crate) async fn write_back_buffered(&self) {
        let Some(write_buffer) = &self.write_buffer else { return std::future::pending().await };
        let mut write_back = FuturesUnordered::new();
        loop {
            while write_back.len() < WRITE_BACK_MAX
                && let Some(entry) = self.tracker(Tracker::take_buffered)
            {
                // The place in the queue is taken here, in order.
                let turn = write_buffer.write_back.exclusive(entry.mutation.extent());
                write_back.push(self.write_back_one(write_buffer, entry, turn));
            }
            let filled = write_buffer.filled.notified();
            match write_back.is_empty() {
                true => filled.await,
                false => _ = select(write_back.next(), pin!(filled)).await,
            }
        }
    }

    async fn write_back_one(
        &self,
        write_buffer: &WriteBuffer,
        entry: Buffered,
        turn: impl Future<Output = RangeGuard>,
    ) {
        let guard = turn.await;
        let number = entry.session.number;
        let mut may_differ = true;
        if self.tracker(|tracker| tracker.is_current(number)) {
            let write = write_parts(entry.session.target.clone(), &[entry.mutation.extent()], &entry.mutation);
            let written = self.finish_target(write, number).await;
            may_differ = written.is_err();
            if let Err(error) = written {
                if self.bears_failure(number, &error) {
                    self.tracker(|tracker| tracker.counts.missed += 1);
                } else {
                    self.fail_target(number, error.wrap("writing to the target what the guest has written"));
                }
            }
        }
        self.tracker(|tracker| tracker.end_buffered(&entry, may_differ));
        drop(guard);
        // Its room goes to the next before anybody looks whether it has landed.
        drop(entry);
        write_buffer.announce();
    }
}

/// `mutation` over memory of the buffer's own, with that memory: the guest's may be needed for its next request.
fn private(mutation: &Mutation, mut held: Buffer) -> (Mutation, Data) {
    match mutation.kind() {
        MutationKind::Data(data) => {
            held.set_len(data.len());
            held.copy_from_slice(data);
            let write_buffer = held.freeze();
            (Mutation::data(mutation.extent().offset, write_buffer.clone()), write_buffer)
        }
        _ => (mutation.clone(), held.freeze()),
    }
}
