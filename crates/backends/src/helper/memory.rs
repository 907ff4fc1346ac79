//! Memory that a process shares with a helper: a file in memory that both have mapped, cut into slots.
//!
//! ```text
//!   0 ┌────────┬────────┬─ ─ ┬──────────────────┬─ ─ ┐
//!     │ small  │ small  │    │      large       │    │     a slot belongs to one request from before it is sent
//!     └────────┴────────┴─ ─ ┴──────────────────┴─ ─ ┘     until its answer has come, whether anybody waits or not
//! ```
//!
//! It is the helper's alone. A device that hangs keeps no memory of the process that has asked, but for this.
#![expect(unsafe_code, reason = "the other process changes this memory, of which the compiler knows nothing")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A small slot: most requests of a guest.
const SMALL_BYTES: usize = 64 << 10;
const SMALL_COUNT: usize = 64;
/// A large slot: requests of more are carried out in pieces of this.
pub(super) const LARGE_BYTES: usize = 1 << 20;
const LARGE_COUNT: usize = 16;
const TOTAL_BYTES: usize = SMALL_BYTES * SMALL_COUNT + LARGE_BYTES * LARGE_COUNT;

/// How many requests have a slot at once.
pub(super) const SLOTS: usize = SMALL_COUNT + LARGE_COUNT;

/// The memory, mapped here.
pub(super) struct Shared {
    file: File,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is reached through slots only, each of which has one owner at a time.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// New memory, whose pages come when they are first used.
    fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("transhume-requests", flags)?);
        file.set_len(TOTAL_BYTES as u64)?;
        // Nobody may make it shorter than what is mapped of it.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file)
    }

    /// The memory that has come from another process.
    pub(super) fn of(file: OwnedFd) -> io::Result<Self> {
        Self::map(File::from(file))
    }

    fn map(file: File) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a place that nothing else has.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file, start: start.cast(), bytes })
    }

    fn place(&self, at: usize, length: usize) -> Option<*mut u8> {
        let is_within = at.checked_add(length).is_some_and(|end| end <= self.bytes);
        // SAFETY: the place is within the mapping.
        is_within.then(|| unsafe { self.start.add(at) })
    }

    /// The bytes of a request's slot, in the process that carries it out; `None` if there are none such.
    ///
    /// To be called once for a request: the slot is its own until it is answered.
    #[expect(clippy::mut_from_ref, reason = "a slot belongs to one request, which one thread carries out")]
    pub(super) fn slot(&self, at: u64, length: u64) -> Option<&mut [u8]> {
        let (at, length) = (usize::try_from(at).ok()?, usize::try_from(length).ok()?);
        let start = self.place(at, length)?;
        // SAFETY: it is within the mapping, and whoever has sent the request leaves its slot alone until it is answered.
        Some(unsafe { std::slice::from_raw_parts_mut(start, length) })
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; slots keep it alive.
        unsafe {
            libc::munmap(self.start.cast(), self.bytes);
        }
    }
}

/// The slots of a helper's memory.
pub(super) struct Slots {
    shared: Shared,
    small: Class,
    large: Class,
}

struct Class {
    bytes: usize,
    free: Mutex<Vec<usize>>,
    permits: Arc<Semaphore>,
}

impl Class {
    fn new(first: usize, bytes: usize, count: usize) -> Self {
        // The first ones are taken first: what is never used at once takes no memory.
        let free = (0..count).rev().map(|index| first + index * bytes).collect();
        Self { bytes, free: Mutex::new(free), permits: Arc::new(Semaphore::new(count)) }
    }
}

impl Slots {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let small = Class::new(0, SMALL_BYTES, SMALL_COUNT);
        let large = Class::new(SMALL_BYTES * SMALL_COUNT, LARGE_BYTES, LARGE_COUNT);
        Ok(Arc::new(Self { shared: Shared::new()?, small, large }))
    }

    /// A slot for `length` bytes, or for as many of them as a large one has.
    pub(super) async fn acquire(self: &Arc<Self>, length: usize) -> Slot {
        let is_small = length <= SMALL_BYTES;
        let class = if is_small { &self.small } else { &self.large };
        let waiting = Arc::clone(&class.permits).acquire_owned();
        let permit = waiting.await.expect("the semaphore is never closed");
        let at = class.free.lock().pop().expect("there are as many permits as slots");
        Slot { slots: Arc::clone(self), at, length: length.min(class.bytes), is_small, _permit: permit }
    }
}

/// The memory of one request. It is free again when this is dropped.
pub(super) struct Slot {
    slots: Arc<Slots>,
    at: usize,
    length: usize,
    is_small: bool,
    // Given back after the slot is among the free ones: it is dropped when `drop` has returned.
    _permit: OwnedSemaphorePermit,
}

impl Slot {
    /// Where it is in the memory.
    pub(super) const fn at(&self) -> u64 {
        self.at as u64
    }

    /// The memory that it is a part of.
    pub(super) fn memory(&self) -> BorrowedFd<'_> {
        self.slots.shared.as_fd()
    }

    /// Puts `bytes` at its start.
    pub(super) fn fill(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length, "{} bytes do not fit a slot of {}", bytes.len(), self.length);
        let start = self.slots.shared.place(self.at, bytes.len()).expect("a slot is within its memory");
        // SAFETY: the place is within the mapping and belongs to this slot, which nobody else has now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) }
    }

    /// Fills `into` from its start.
    pub(super) fn copy_to(&self, into: &mut [u8]) {
        assert!(into.len() <= self.length, "a slot of {} bytes has no {}", self.length, into.len());
        let start = self.slots.shared.place(self.at, into.len()).expect("a slot is within its memory");
        // SAFETY: as in `fill`.
        unsafe { std::ptr::copy_nonoverlapping(start, into.as_mut_ptr(), into.len()) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let class = if self.is_small { &self.slots.small } else { &self.slots.large };
        class.free.lock().push(self.at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn slots_do_not_overlap_and_come_back() {
        let slots = Slots::new().expect("there is memory");
        let theirs =
            Shared::of(slots.shared.as_fd().try_clone_to_owned().expect("a descriptor")).expect("it is mapped");
        for _ in 0..2 {
            let mut all = Vec::new();
            for number in 0..SLOTS {
                let mut slot = slots.acquire(if number < SMALL_COUNT { 4096 } else { 5 << 20 }).await;
                slot.fill(&vec![number as u8; slot.length]);
                all.push(slot);
            }
            for (number, slot) in all.iter().enumerate() {
                let seen = theirs.slot(slot.at(), slot.length as u64).expect("it is there");
                assert!(seen.iter().all(|&byte| byte == number as u8), "slot {number} is another's, too");
                seen.fill(7);
                let mut back = vec![0; slot.length];
                slot.copy_to(&mut back);
                assert!(back.iter().all(|&byte| byte == 7));
            }
            let more = tokio::time::timeout(std::time::Duration::from_millis(1), slots.acquire(1)).await;
            assert!(more.is_err(), "there is one too many");
        }
        assert!(theirs.slot(TOTAL_BYTES as u64 - 1, 2).is_none() && theirs.slot(u64::MAX, 2).is_none());
    }
}
