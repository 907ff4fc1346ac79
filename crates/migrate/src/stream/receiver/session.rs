//! What the connections of one session share, and how they are ended.
//!
//! ```text
//!   join ──▶ a member: serves requests ──told to stop──▶ finishes what is in flight ──▶ gone
//!              │                                              ▲
//!              └──────── end of the connection ───────────────┘
//! ```
//! Retiring is telling members to stop and waiting until they are gone. A stream's connection enters only when every
//! earlier one of that stream is gone, and never when its generation was retired. A sender repeats requests after an
//! answer to a retirement, or after a new connection of the same stream. So what it repeats comes after all that went
//! before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use block::{Device, Error, ErrorKind, RangeLock, Result};
use futures::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::memory_share::Share;
use super::{Opened, PeerName, welcome};
use crate::stream::protocol::{Opening, SessionRequest};

/// One session of one sender.
pub(super) struct Session {
    pub(super) peer: PeerName,
    pub(super) request: SessionRequest,
    pub(super) sender: [u8; 16],
    pub(super) number: u64,
    pub(super) device: Device,
    /// Writes of the same bytes are carried out one after another, in the order in which they came.
    pub(super) ranges: RangeLock,
    /// The answer to the first frame of each of its streams.
    pub(super) welcome: Vec<u8>,
    /// Memory for what it is told,
    pub(super) received: Share,
    /// and for what it answers.
    pub(super) answered: Share,
    members: Arc<Members>,
}

#[derive(Default)]
struct Members {
    state: Mutex<State>,
    /// Somebody has gone.
    changed: Notify,
    /// How often the last one has gone.
    desertions: AtomicU64,
}

#[derive(Default)]
struct State {
    is_over: bool,
    list: Vec<Member>,
    /// Connections of a stream up to this generation are not let in.
    retired: BTreeMap<u16, u32>,
}

struct Member {
    stream: u16,
    generation: u32,
    stop: Arc<Stop>,
}

/// Tells a connection to stop.
#[derive(Default)]
struct Stop {
    is_told: AtomicBool,
    waker: AtomicWaker,
}

/// A connection's place in its session. Dropping it says that nothing of it is in flight.
pub(super) struct Membership {
    members: Arc<Members>,
    stop: Arc<Stop>,
    pub(super) stream: u16,
    pub(super) generation: u32,
}

impl Membership {
    /// Whether the connection is to stop. If not, `waker` is woken when it is.
    pub(super) fn is_stopped(&self, waker: &Waker) -> bool {
        self.stop.waker.register(waker);
        self.stop.is_told.load(Ordering::Acquire)
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut state = self.members.state.lock();
        state.list.retain(|member| !Arc::ptr_eq(&member.stop, &self.stop));
        if state.list.is_empty() {
            self.members.desertions.fetch_add(1, Ordering::Relaxed);
        }
        drop(state);
        self.members.changed.notify_waiters();
    }
}

impl Members {
    /// Tells those whom `is_meant` means to stop, and waits until they are gone.
    async fn stop(&self, is_meant: impl Fn(&Member) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From now on no change is missed.
            changed.as_mut().enable();
            let mut stopping = false;
            for member in self.state.lock().list.iter().filter(|member| is_meant(member)) {
                member.stop.is_told.store(true, Ordering::Release);
                member.stop.waker.wake();
                stopping = true;
            }
            if !stopping {
                return;
            }
            changed.await;
        }
    }
}

impl Session {
    pub(super) fn new(
        peer: PeerName,
        opening: &Opening,
        opened: Opened,
        (received, answered): (Share, Share),
    ) -> Result<Self> {
        let welcome = welcome(&opened)?;
        Ok(Self {
            peer,
            request: opening.request.clone(),
            sender: opening.sender,
            number: opening.session,
            device: opened.device,
            ranges: RangeLock::new(),
            welcome,
            received,
            answered,
            members: Arc::default(),
        })
    }

    /// Makes a connection a part of the session, when those of the same stream before it are gone.
    pub(super) async fn join(&self, stream: u16, generation: u32) -> Result<Membership> {
        self.retire(stream, generation - 1).await;
        let mut state = self.members.state.lock();
        let is_late = state.retired.get(&stream).is_some_and(|retired| *retired >= generation)
            || state.list.iter().any(|member| member.stream == stream);
        if state.is_over || is_late {
            let context = format!("connection {generation} of stream {stream} comes too late");
            return Err(Error::new(ErrorKind::Fenced, context));
        }
        let stop = Arc::<Stop>::default();
        state.list.push(Member { stream, generation, stop: Arc::clone(&stop) });
        Ok(Membership { members: Arc::clone(&self.members), stop, stream, generation })
    }

    /// Ends the connections of a stream up to a generation, for good. When this returns nothing of them is in flight.
    pub(super) async fn retire(&self, stream: u16, generation: u32) {
        {
            let mut state = self.members.state.lock();
            let retired = state.retired.entry(stream).or_default();
            *retired = generation.max(*retired);
        }
        self.members.stop(|member| member.stream == stream && member.generation <= generation).await;
    }

    /// Lets nobody in any more, ends all connections but one, and waits until nothing of them is in flight.
    pub(super) async fn leave(&self, but: &Membership) {
        self.members.state.lock().is_over = true;
        self.members.stop(|member| !Arc::ptr_eq(&member.stop, &but.stop)).await;
    }

    /// Lets nobody in any more, ends all connections, and waits until nothing of them is in flight.
    pub(super) async fn end(&self) {
        self.members.state.lock().is_over = true;
        self.members.stop(|_| true).await;
    }

    pub(super) fn is_over(&self) -> bool {
        self.members.state.lock().is_over
    }

    /// Whether it has no connection.
    pub(super) fn is_deserted(&self) -> bool {
        self.members.state.lock().list.is_empty()
    }

    /// How often its last connection has gone.
    pub(super) fn desertions(&self) -> u64 {
        self.members.desertions.load(Ordering::Relaxed)
    }
}
