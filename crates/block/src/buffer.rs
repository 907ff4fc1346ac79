//! Owned, page-aligned buffers from a bounded pool.
//!
//! The operation owns its buffer until completion, so a kernel that still writes into a buffer never meets a reader.
//! Buffers are aligned for direct IO. The pool has a stated limit and keeps it: further requests wait, in their order.

#![expect(unsafe_code, reason = "aligned memory comes from the allocator's raw interface")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Bytes;

/// The alignment of every buffer and the granule of the pool's accounts.
pub const PAGE_BYTES: usize = 4096;

/// The largest single buffer: 32 MiB.
const BUFFER_BYTES_MAX: usize = 32 << 20;

/// Classes of 4 KiB, 8 KiB, ... 32 MiB.
const CLASS_COUNT: usize = (BUFFER_BYTES_MAX / PAGE_BYTES).ilog2() as usize + 1;

/// A piece of page-aligned memory, zeroed when it was first allocated.
struct Memory {
    start: NonNull<u8>,
    capacity: usize,
}

// SAFETY: `Memory` owns its allocation alone, like a `Box<[u8]>`.
unsafe impl Send for Memory {}
// SAFETY: shared references give read access only, like a `Box<[u8]>`.
unsafe impl Sync for Memory {}

impl Memory {
    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, PAGE_BYTES).expect("pool classes are valid layouts")
    }

    fn allocate(capacity: usize) -> Self {
        assert!(capacity >= PAGE_BYTES, "a pool class is at least a page");
        let layout = Self::layout(capacity);
        // SAFETY: the layout's size is not zero, asserted above.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, capacity }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc_zeroed` with this very layout and is freed once.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.capacity)) }
    }
}

/// A bounded supply of buffers. Clones share one supply.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Shared>,
    /// What it may have in use of a larger supply.
    share: Option<Share>,
}

/// A part of a supply.
#[derive(Clone)]
struct Share {
    limit: Bytes,
    /// One permit a page in use.
    pages: Arc<Semaphore>,
}

/// What a buffer takes of the supply, and of its share of it.
struct Permits {
    pool: OwnedSemaphorePermit,
    share: Option<OwnedSemaphorePermit>,
}

struct Shared {
    limit: Bytes,
    /// One permit a page in use.
    pages: Arc<Semaphore>,
    idle: Mutex<Idle>,
}

/// Idle memory, kept for the next user.
struct Idle {
    classes: [Vec<Memory>; CLASS_COUNT],
    bytes: usize,
    bytes_max: usize,
}

impl BufferPool {
    /// A pool that has at most `limit` bytes in use (rounded up to pages) and keeps at most a quarter of that idle.
    ///
    /// # Panics
    /// If `limit` is smaller than a page.
    #[must_use]
    pub fn new(limit: Bytes) -> Self {
        let pages = limit.as_usize().div_ceil(PAGE_BYTES);
        assert!(pages > 0, "a buffer pool needs at least one page");
        let idle = Idle { classes: std::array::from_fn(|_| Vec::new()), bytes: 0, bytes_max: limit.as_usize() / 4 };
        let shared = Shared { limit, pages: Arc::new(Semaphore::new(pages)), idle: Mutex::new(idle) };
        Self { shared: Arc::new(shared), share: None }
    }

    /// The same supply for one of its users, who has at most `limit` bytes of it in use (rounded up to pages).
    ///
    /// # Panics
    /// If `limit` is smaller than a page or larger than this pool's, or if this is a share itself.
    #[must_use]
    pub fn share(&self, limit: Bytes) -> Self {
        assert!(self.share.is_none() && limit <= self.limit(), "a share of {limit} of a pool of {}", self.limit());
        let pages = limit.as_usize().div_ceil(PAGE_BYTES);
        assert!(pages > 0, "a share needs at least one page");
        Self { shared: Arc::clone(&self.shared), share: Some(Share { limit, pages: Arc::new(Semaphore::new(pages)) }) }
    }

    /// How many bytes may be in use at once.
    #[must_use]
    pub fn limit(&self) -> Bytes {
        self.share.as_ref().map_or(self.shared.limit, |share| share.limit)
    }

    /// How many bytes are in use now.
    #[must_use]
    pub fn in_use(&self) -> Bytes {
        let total = self.limit().as_usize().div_ceil(PAGE_BYTES);
        let pages = self.share.as_ref().map_or(&self.shared.pages, |share| &share.pages);
        Bytes::from((total - pages.available_permits()) * PAGE_BYTES)
    }

    /// A buffer of `length` bytes, waiting until the pool can spare it. Its contents are whatever was there before.
    ///
    /// # Panics
    /// If `length` is more than 32 MiB or more than the pool's limit: such a request would wait forever.
    pub async fn acquire(&self, length: usize) -> Buffer {
        let capacity = self.capacity_for(length);
        let permit = self.permit(capacity / PAGE_BYTES).await;
        self.take(length, capacity, permit)
    }

    /// Two buffers of `length` bytes, both at once. A task that holds one and waits for another could deadlock with one
    /// that does the same.
    ///
    /// # Panics
    /// Like [`acquire`](Self::acquire), and if the pool's limit is less than both.
    pub async fn acquire_two(&self, length: usize) -> (Buffer, Buffer) {
        let capacity = self.capacity_for(length);
        assert!(
            Bytes::from(2 * capacity) <= self.limit(),
            "two buffers of {length} bytes can never come from a pool of {}",
            self.limit()
        );
        let pages = capacity / PAGE_BYTES;
        let mut both = self.permit(2 * pages).await;
        let second = both.split(pages).expect("it is for twice as many");
        (self.take(length, capacity, both), self.take(length, capacity, second))
    }

    /// Whoever waits for the supply has its share of it already, so that no unusable memory is held.
    async fn permit(&self, pages: usize) -> Permits {
        let share = match &self.share {
            Some(share) => Some(permit_of(&share.pages, pages).await),
            None => None,
        };
        Permits { pool: permit_of(&self.shared.pages, pages).await, share }
    }

    /// A buffer of `length` bytes if the pool can spare it at once.
    ///
    /// # Panics
    /// Like [`acquire`](Self::acquire).
    #[must_use]
    pub fn try_acquire(&self, length: usize) -> Option<Buffer> {
        let capacity = self.capacity_for(length);
        let permit =
            |pages: &Arc<Semaphore>| Arc::clone(pages).try_acquire_many_owned((capacity / PAGE_BYTES) as u32).ok();
        let share = match &self.share {
            Some(share) => Some(permit(&share.pages)?),
            None => None,
        };
        let permits = Permits { pool: permit(&self.shared.pages)?, share };
        Some(self.take(length, capacity, permits))
    }

    fn capacity_for(&self, length: usize) -> usize {
        let capacity = length.max(PAGE_BYTES).next_power_of_two();
        assert!(
            capacity <= BUFFER_BYTES_MAX && Bytes::from(capacity) <= self.limit(),
            "a buffer of {length} bytes can never come from a pool of {:?}",
            self.limit()
        );
        capacity
    }

    fn take(&self, length: usize, capacity: usize, permits: Permits) -> Buffer {
        let idle = self.shared.idle.lock().take(capacity);
        let memory = idle.unwrap_or_else(|| Memory::allocate(capacity));
        Buffer { memory: Some(memory), length, home: Some((Arc::clone(&self.shared), permits)) }
    }
}

async fn permit_of(semaphore: &Arc<Semaphore>, pages: usize) -> OwnedSemaphorePermit {
    match Arc::clone(semaphore).try_acquire_many_owned(pages as u32) {
        Ok(permit) => permit,
        Err(_) => {
            let waiting = Arc::clone(semaphore).acquire_many_owned(pages as u32);
            waiting.await.expect("the pool's semaphore is never closed")
        }
    }
}

impl Permits {
    /// Takes so many pages out of it.
    fn split(&mut self, pages: usize) -> Option<Self> {
        let share = self.share.as_mut().map(|share| share.split(pages));
        Some(Self { pool: self.pool.split(pages)?, share: share.flatten() })
    }
}

impl Idle {
    fn class_of(capacity: usize) -> usize {
        (capacity / PAGE_BYTES).ilog2() as usize
    }

    fn take(&mut self, capacity: usize) -> Option<Memory> {
        let memory = self.classes[Self::class_of(capacity)].pop()?;
        self.bytes -= capacity;
        Some(memory)
    }

    /// Keeps `memory` if there is room for it, otherwise hands it back to be freed outside the lock.
    fn put(&mut self, memory: Memory) -> Option<Memory> {
        if self.bytes + memory.capacity > self.bytes_max {
            return Some(memory);
        }
        self.bytes += memory.capacity;
        self.classes[Self::class_of(memory.capacity)].push(memory);
        None
    }
}

/// A page-aligned buffer that one owner holds at a time. It goes back to its pool when it is dropped.
pub struct Buffer {
    /// `None` only while it is being dropped.
    memory: Option<Memory>,
    length: usize,
    home: Option<(Arc<Shared>, Permits)>,
}

impl Buffer {
    /// A zeroed buffer that belongs to no pool, for tests and for control paths that run once.
    #[must_use]
    pub fn unpooled(length: usize) -> Self {
        let memory = Memory::allocate(length.max(1).next_multiple_of(PAGE_BYTES));
        Self { memory: Some(memory), length, home: None }
    }

    /// A buffer outside any pool with a copy of `bytes`.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::unpooled(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("a buffer has its memory until it is dropped")
    }

    /// How many bytes the memory behind it has: its length rounded up at least to a page.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.memory().capacity
    }

    /// Changes how many of its bytes count.
    ///
    /// # Panics
    /// If `length` is more than its capacity.
    pub fn set_len(&mut self, length: usize) {
        assert!(length <= self.capacity(), "{length} bytes do not fit a buffer of {}", self.capacity());
        self.length = length;
    }

    /// The buffer as bytes that may be shared and no longer changed.
    #[must_use]
    pub fn freeze(self) -> Data {
        let range = 0..self.length;
        Data { buffer: Arc::new(self), range }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let memory = self.memory();
        // SAFETY: `length <= capacity` always, and all of the memory has been initialised (it was allocated zeroed).
        unsafe { std::slice::from_raw_parts(memory.start.as_ptr(), self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.memory().start.as_ptr();
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(start, self.length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let (Some(memory), Some((shared, permits))) = (self.memory.take(), self.home.take()) else { return };
        // The permits are returned after the memory, so that whoever gets them finds the memory idle.
        let surplus = shared.idle.lock().put(memory);
        drop(surplus);
        let Permits { pool, share } = permits;
        drop(pool);
        drop(share);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Buffer({} bytes)", self.length)
    }
}

/// Bytes that many may read and nobody may change: a frozen buffer, or a part of one. Clones are cheap.
#[derive(Clone)]
pub struct Data {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl Data {
    /// A copy of `bytes` outside any pool.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        Buffer::copy_of(bytes).freeze()
    }

    /// The bytes of `range`, counted from the start of this.
    ///
    /// # Panics
    /// If `range` reaches past the end.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.range.len(), "{range:?} of {} bytes", self.range.len());
        let start = self.range.start + range.start;
        Self { buffer: Arc::clone(&self.buffer), range: start..start + range.len() }
    }

    /// The buffer itself again, if nobody else shares it; otherwise the data as it was.
    ///
    /// # Errors
    /// The data, when it is shared.
    pub fn try_into_buffer(self) -> Result<Buffer, Self> {
        let range = self.range;
        Arc::try_unwrap(self.buffer).map_err(|buffer| Self { buffer, range })
    }
}

impl Deref for Data {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

impl std::fmt::Debug for Data {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Data({} bytes)", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn buffers_are_aligned_and_as_long_as_asked() {
        let pool = BufferPool::new(Bytes::mib(1));
        for length in [0, 1, 511, 4096, 4097, 65536, 300_000] {
            let buffer = pool.try_acquire(length).expect("the pool is idle");
            assert_eq!(buffer.len(), length);
            assert_eq!(buffer.as_ptr() as usize % PAGE_BYTES, 0);
        }
        assert_eq!(pool.in_use(), Bytes::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_holds_and_waiters_are_served_when_a_buffer_comes_back() {
        let pool = BufferPool::new(Bytes::kib(64));
        let first = pool.acquire(40_000).await;
        assert_eq!(pool.in_use(), Bytes::kib(64));
        assert!(pool.try_acquire(1).is_none());
        let waiting = tokio::time::timeout(Duration::from_secs(1), pool.acquire(1)).await;
        assert!(waiting.is_err(), "a buffer came from an exhausted pool");
        drop(first);
        assert_eq!(pool.acquire(1).await.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn many_who_want_two_get_them_one_after_another_and_nobody_spins() {
        let pool = BufferPool::new(Bytes::kib(64));
        let held = pool.acquire_two(16 << 10).await;
        assert_eq!(pool.in_use(), Bytes::kib(32));
        let wants = (0..5).map(|_| async {
            let two = pool.acquire_two(16 << 10).await;
            // A waiter that polls again and again would never let the clock reach this.
            tokio::time::sleep(Duration::from_secs(1)).await;
            two.0.len() + two.1.len()
        });
        let all = futures::future::join_all(wants);
        let lengths = tokio::time::timeout(Duration::from_secs(10), all).await.expect("everybody gets them");
        assert_eq!(lengths, [32 << 10; 5]);
        drop(held);
        assert_eq!(pool.in_use(), Bytes::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_user_of_a_share_leaves_the_rest_to_others_and_waits_for_his_own() {
        let pool = BufferPool::new(Bytes::kib(64));
        let share = pool.share(Bytes::kib(16));
        assert_eq!(share.limit(), Bytes::kib(16));
        let held = share.acquire_two(8 << 10).await;
        assert_eq!((share.in_use(), pool.in_use()), (Bytes::kib(16), Bytes::kib(16)));
        assert!(share.try_acquire(1).is_none() && pool.try_acquire(32 << 10).is_some());
        let waiting = tokio::time::timeout(Duration::from_secs(1), share.acquire(1)).await;
        assert!(waiting.is_err(), "a buffer came from an exhausted share");
        drop(held.0);
        assert_eq!(share.acquire(8 << 10).await.len(), 8 << 10);
        drop(held.1);
        assert_eq!((share.in_use(), pool.in_use()), (Bytes::ZERO, Bytes::ZERO));
        let all = pool.acquire(64 << 10).await;
        assert!(share.try_acquire(1).is_none(), "a share is no supply of its own");
        drop(all);
        assert!(share.try_acquire(1).is_some());
    }

    #[test]
    #[should_panic(expected = "can never come from a pool")]
    fn a_buffer_larger_than_the_pool_is_a_defect_and_not_a_hang() {
        let _ = BufferPool::new(Bytes::kib(64)).try_acquire(65537);
    }

    #[test]
    fn data_is_shared_without_copies() {
        let data = Data::copy_of(b"abcdefgh");
        let part = data.slice(2..6).slice(1..3);
        assert_eq!(&part[..], b"de");
        assert!(data.try_into_buffer().is_err(), "a shared buffer was given back");
        assert_eq!(part.try_into_buffer().expect("the last owner gets it").len(), 8);
    }
}
