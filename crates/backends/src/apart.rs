//! Threads for what may wait in the kernel for one device, with a table of files of their own: they have that device's files and no others.
//!
//! ```text
//!   a request that would wait ──▶ a thread of the event loop, which waits by a lock ──▶ a thread of the device: pread, pwrite
//! ```
//!
//! A device that hangs keeps whoever asked it in the kernel, and nobody can end that, not even `kill -9`. Files are let go of with the last
//! thread that has their table. So a thread that shared the daemon's would hold the lock of the state directory, the images and the sockets
//! of all volumes, for as long as one device hangs. These threads hold their own device's files alone.
//!
//! They use no file but those: what wakes an event loop is one, too, so the thread that asked wakes it.

#![expect(unsafe_code, reason = "closing files that others own is sound only in a table of one's own")]

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::thread::UnshareFlags;

/// How many threads one device keeps waiting at most.
const THREADS_MAX: usize = 32;
/// How long a thread without work stays.
const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// How long whoever ends them waits for those that are about to end.
const END_LIMIT: Duration = Duration::from_millis(50);
/// The first file that is none of the standard streams.
const FIRST_OTHER: u32 = 3;

type Work = Box<dyn FnOnce() + Send>;

/// The threads of one device. They end with this, but for those that the device keeps.
pub(crate) struct Apart {
    shared: Arc<Shared>,
    /// The device's files, which whoever has this keeps open.
    kept: Vec<u32>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// A thread is about to be gone.
    ended: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// How many threads there are, and how many of them wait for work.
    threads: usize,
    idle: usize,
    is_over: bool,
}

impl Apart {
    /// Of the device whose files these are: the caller keeps them open as long as this.
    pub(crate) fn new<'a>(files: impl IntoIterator<Item = &'a File>) -> Self {
        let kept = files.into_iter().filter_map(|file| u32::try_from(file.as_raw_fd()).ok()).collect();
        Self { shared: Arc::default(), kept, threads: Mutex::default() }
    }

    /// Has a thread of the device carry out `work`, which uses the device's files and no others, and waits for it. Where there are no threads to be had it is carried out here.
    pub(crate) fn perform<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, outcome) = sync_channel(1);
        let work = move || {
            let result = work();
            // Whoever asked waits, in whatever state.
            let _ = done.send(result);
        };
        let needs_thread = {
            let mut queue = self.shared.queue.lock();
            if queue.is_over && queue.threads == 0 {
                drop(queue);
                work();
                return outcome.recv().expect("it was carried out");
            }
            queue.work.push_back(Box::new(work));
            let needs_thread = queue.idle < queue.work.len() && queue.threads < THREADS_MAX;
            queue.threads += usize::from(needs_thread);
            needs_thread
        };
        if needs_thread {
            self.start_thread();
        }
        self.shared.wake.notify_one();
        outcome.recv().expect("whoever takes work carries it out")
    }

    fn start_thread(&self) {
        let (shared, kept) = (Arc::clone(&self.shared), self.kept.clone());
        let started = std::thread::Builder::new().name("device".to_owned()).spawn(move || serve(&shared, &kept));
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        match started {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                tracing::warn!(%error, "no thread for a device is to be had");
                let mut queue = self.shared.queue.lock();
                queue.threads -= 1;
                // Nobody else would come for it.
                let left = if queue.threads == 0 { std::mem::take(&mut queue.work) } else { VecDeque::new() };
                drop(queue);
                left.into_iter().for_each(|work| work());
            }
        }
    }

    /// Ends the threads: when this returns their files are let go of, unless the device keeps one of them. What is asked for later is carried
    /// out by whoever asks.
    pub(crate) fn end(&self) {
        self.shared.queue.lock().is_over = true;
        self.shared.wake.notify_all();
        let mut queue = self.shared.queue.lock();
        // One that has just answered is about to end.
        let _ = self.shared.ended.wait_while_for(&mut queue, |queue| queue.threads > 0, END_LIMIT);
        let have_ended = queue.threads == 0;
        drop(queue);
        if have_ended {
            self.threads.lock().drain(..).for_each(|thread| _ = thread.join());
        }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        self.end();
    }
}

/// A thread's life.
fn serve(shared: &Shared, kept: &[u32]) {
    close_others(kept);
    let mut queue = shared.queue.lock();
    loop {
        while let Some(work) = queue.work.pop_front() {
            parking_lot::MutexGuard::unlocked(&mut queue, work);
        }
        if queue.is_over {
            break;
        }
        queue.idle += 1;
        let waited = shared.wake.wait_for(&mut queue, IDLE_LIMIT);
        queue.idle -= 1;
        if waited.timed_out() && queue.work.is_empty() {
            break;
        }
    }
    queue.threads -= 1;
    shared.ended.notify_all();
}

/// Gives this thread a table of files of its own, and closes there all but those `kept` and the standard streams. Where that is forbidden it
/// goes on with all.
fn close_others(kept: &[u32]) {
    // SAFETY: no file that this thread closes below is used by it: work comes with the files that it uses, which are kept.
    if unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FILES) }.is_err() {
        return;
    }
    let mut kept = kept.to_vec();
    kept.sort_unstable();
    let mut first = FIRST_OTHER;
    for file in kept {
        if file > first {
            close_range(first, file - 1);
        }
        first = first.max(file + 1);
    }
    close_range(first, u32::MAX);
}

fn close_range(first: u32, last: u32) {
    // SAFETY: the table is this thread's own, so nobody loses a file.
    let _ = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_a_device_has_its_files_and_no_others_and_lets_go_of_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| Arc::new(File::create_new(folder.path().join(name)).expect("a file"));
        let (own, other) = (file("own"), file("other"));
        let descriptors = [own.as_raw_fd(), other.as_raw_fd()];
        let has = |descriptor: i32| std::fs::read_link(format!("/proc/thread-self/fd/{descriptor}"));
        let threads = Apart::new([&*own]);
        let look = move || descriptors.map(|descriptor| has(descriptor).is_ok());
        assert_eq!(threads.perform(look), [true, false]);
        assert!(descriptors.iter().all(|descriptor| has(*descriptor).is_ok()), "the process has lost a file");
        rustix::fs::flock(&*own, rustix::fs::FlockOperation::LockExclusive).expect("locked");
        drop((threads, own));
        let again = File::open(folder.path().join("own")).expect("there");
        let locked = rustix::fs::flock(&again, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        locked.expect("the lock went with the last file");
    }

    #[test]
    fn many_requests_are_carried_out_at_once_and_each_gets_its_own_answer() {
        let threads = Arc::new(Apart::new([]));
        let askers: Vec<_> = (0..100_u64)
            .map(|number| {
                let threads = Arc::clone(&threads);
                std::thread::spawn(move || {
                    let work = move || {
                        std::thread::sleep(Duration::from_millis(5));
                        number
                    };
                    threads.perform(work) == number
                })
            })
            .collect();
        assert!(askers.into_iter().all(|asker| asker.join().expect("no panic")));
    }
}
