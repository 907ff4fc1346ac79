//! Connections of workers with a helper, one for each worker that asks it: the answers come to the worker itself.
//!
//! ```text
//!   request ──▶ its slot, a message ──▶ connection ──▶ a thread of the helper ──▶ kernel
//!                                          │
//!   whoever waits ◀── the connection's task ◀── answer
//! ```
//!
//! This is what a ring is for requests that the kernel takes without waiting. As there, a request's slot belongs to it
//! until it is answered, whether anybody waits or not, and when a worker's event loop ends, its connections wait for
//! what is under way: a write that nobody has heard of must not come after one that was asked for later.

#![expect(unsafe_code, reason = "the event loop must be promised that a descriptor stays open")]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, socketpair};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot};

use super::memory::{Slot, Slots};
use super::message::{ANSWER_BYTES, Answer, Message, Verb, send_message};

/// The slot of a request, and what became of it.
pub(super) type Done = (Slot, io::Result<u64>);

/// The connections of one helper.
#[derive(Default)]
pub(super) struct Lines {
    slots: Mutex<Option<Arc<Slots>>>,
    lines: Mutex<Vec<(ThreadId, Arc<Line>)>>,
}

impl Lines {
    /// The helper's memory.
    pub(super) fn slots(&self) -> io::Result<Arc<Slots>> {
        let mut slots = self.slots.lock();
        if slots.is_none() {
            *slots = Some(Slots::new()?);
        }
        Ok(Arc::clone(slots.as_ref().expect("it was made")))
    }

    /// How many descriptors of this process all of it takes.
    pub(super) fn descriptors(&self) -> usize {
        let memory = usize::from(self.slots.lock().is_some());
        memory + self.lines.lock().len()
    }

    /// The connection of this worker. `introduce` gives the helper its other end.
    pub(super) fn of_this_worker(&self, introduce: impl FnOnce(&OwnedFd) -> io::Result<()>) -> io::Result<Arc<Line>> {
        let this = std::thread::current().id();
        let mut lines = self.lines.lock();
        lines.retain(|(_, line)| !line.is_orphaned.load(Ordering::Acquire));
        if let Some((_, line)) = lines.iter().find(|(thread, _)| *thread == this) {
            return Ok(Arc::clone(line));
        }
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let line = Line::start(ours)?;
        introduce(&theirs)?;
        lines.push((this, Arc::clone(&line)));
        Ok(line)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        for (_, line) in self.lines.lock().drain(..) {
            line.close();
        }
    }
}

/// One connection.
pub(super) struct Line {
    socket: AsyncFd<OwnedFd>,
    pending: Mutex<Pending>,
    /// The task has something to look at.
    wake: Notify,
    /// Nobody asks any more: the task ends when nothing is under way.
    is_closing: AtomicBool,
    /// Nobody would answer a new request: the helper or the task is gone. Set under the lock of what is pending.
    is_orphaned: AtomicBool,
}

#[derive(Default)]
struct Pending {
    next: u64,
    requests: HashMap<u64, (Slot, oneshot::Sender<Done>)>,
}

impl Line {
    fn start(socket: OwnedFd) -> io::Result<Arc<Self>> {
        // SAFETY: the socket is the registration's own, and open until that is dropped.
        let socket = unsafe { AsyncFd::register(socket)? };
        let line = Arc::new(Self {
            socket,
            pending: Mutex::default(),
            wake: Notify::new(),
            is_closing: AtomicBool::new(false),
            is_orphaned: AtomicBool::new(false),
        });
        tokio::spawn(serve(LastWill(Arc::clone(&line))));
        Ok(line)
    }

    /// Ends the task once nothing is under way.
    fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// Has `verb` carried out on `file`; `None` if the helper has ended before it had answered.
    pub(super) async fn perform(&self, file: u64, verb: Verb, slot: Slot) -> Option<Done> {
        let (answer, answered) = oneshot::channel();
        let id = self.begin(slot, answer)?;
        // Whoever waits may go before it is sent.
        let unsent = Unsent { line: self, id };
        let message = Message { id, file, verb };
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match send_message(self.socket.get_ref().as_fd(), &message, &[], flags) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => match self.socket.writable().await {
                    Ok(mut ready) => ready.clear_ready(),
                    Err(_) => return None,
                },
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        std::mem::forget(unsent);
        answered.await.ok()
    }

    fn begin(&self, slot: Slot, answer: oneshot::Sender<Done>) -> Option<u64> {
        let mut pending = self.pending.lock();
        if self.is_orphaned.load(Ordering::Acquire) {
            return None;
        }
        pending.next += 1;
        let id = pending.next;
        pending.requests.insert(id, (slot, answer));
        Some(id)
    }

    /// Forgets a request that was not sent.
    fn withdraw(&self, id: u64) {
        let withdrawn = self.pending.lock().requests.remove(&id);
        drop(withdrawn);
        if self.is_closing.load(Ordering::Acquire) {
            self.wake.notify_one();
        }
    }

    /// Takes the answers that are there; whether the helper may send more.
    fn take_answers(&self) -> bool {
        let mut bytes = [0; ANSWER_BYTES];
        loop {
            match recv(self.socket.get_ref(), &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, ANSWER_BYTES)) => self.note(Answer::parse(&bytes)),
                Ok(_) => return false,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return error == rustix::io::Errno::AGAIN,
            }
        }
    }

    fn note(&self, Answer { id, outcome }: Answer) {
        let waiting = self.pending.lock().requests.remove(&id);
        if let Some((slot, answer)) = waiting {
            // Nobody may wait any more: then the slot is free now.
            let _ = answer.send((slot, outcome));
        }
    }

    fn is_idle(&self) -> bool {
        self.pending.lock().requests.is_empty()
    }
}

/// A request that is not sent yet: nobody would ever answer it.
struct Unsent<'a> {
    line: &'a Line,
    id: u64,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        self.line.withdraw(self.id);
    }
}

async fn serve(last_will: LastWill) {
    let line = &last_will.0;
    loop {
        if !line.take_answers() || line.is_closing.load(Ordering::Acquire) && line.is_idle() {
            return;
        }
        tokio::select! {
            biased;
            () = line.wake.notified() => {}
            ready = line.socket.readable() => match ready {
                // An answer that has come meanwhile is taken next, or wakes the task again.
                Ok(mut ready) => ready.clear_ready(),
                // The event loop is ending; the drop handler waits for the rest.
                Err(_) => return,
            },
        }
    }
}

/// What to do when a connection's task ends, for whatever reason.
struct LastWill(Arc<Line>);

impl Drop for LastWill {
    fn drop(&mut self) {
        let line = &self.0;
        let pending = line.pending.lock();
        line.is_orphaned.store(true, Ordering::Release);
        drop(pending);
        while line.take_answers() && !line.is_idle() {
            let _ = poll(&mut [PollFd::new(line.socket.get_ref(), PollFlags::IN)], None);
        }
        // The helper has ended: with it all that it had under way. Whoever waits asks another one.
        line.pending.lock().requests.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_that_nobody_waits_for_any_more_before_it_is_sent_leaves_nothing_behind() {
        let mut theirs = None;
        let lines = Lines::default();
        let introduce = |socket: &OwnedFd| {
            theirs = Some(socket.try_clone()?);
            Ok(())
        };
        let line = lines.of_this_worker(introduce).expect("there is a connection");
        let message = Message { id: 0, file: 0, verb: Verb::Length };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // Nobody takes them.
        while send_message(line.socket.get_ref().as_fd(), &message, &[], flags).is_ok() {}
        let slots = lines.slots().expect("there is memory");
        for _ in 0..2 * super::super::memory::SLOTS {
            let slot = tokio::time::timeout(std::time::Duration::from_secs(5), slots.acquire(512)).await;
            let mut request = Box::pin(line.perform(1, Verb::Length, slot.expect("a slot is lost")));
            assert!(futures::poll!(&mut request).is_pending());
        }
        assert!(line.is_idle(), "the end of the event loop would wait for it");
    }
}
