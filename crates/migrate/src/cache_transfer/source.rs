//! The host that a cache leaves.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::{Buffer, Error, ErrorKind, Result};
use env::EnvRef;
use filters::Cache;
use futures::future::{Either, select};
use parking_lot::Mutex;
use tokio::io::BufReader;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::wire::{Frame, Kind, NAMED_MAX, receive, send_all};
use super::{Blocks, CacheTransferOptions, Watched};
use crate::stream::BoxTransport;

/// How often the target is told of changes while it asks for nothing.
const TELL_INTERVAL: Duration = Duration::from_millis(20);
/// So many changed blocks are kept between two times.
const CHANGED_MAX: usize = 1 << 20;
/// With fewer hits it is the share of the blocks that counts.
const HITS_MIN: usize = 64;
/// More requests at a time are no target of ours.
const ASKED_MAX: usize = 4096;
/// What the cache has taken since the list was made is listed so often at most, one time after the other, and then after so many times of
/// telling changes: a second.
const MORE_LISTS_MAX: u32 = 16;
const MORE_LISTS_TICKS: u32 = 50;
/// And only if it is more than such a part of the list.
const MORE_PART: u64 = 200;
/// What the paper's copy of a GB takes, 10 GiB in 30 s (section 4.2), less a tenth: its guest waits for the last of it, ours for the list, too.
const WAIT_OF_GB: Duration = Duration::from_millis(2500);
const GB: u64 = 1_000_000_000;
/// The switchover waits so long for little, and no longer for much.
const WAIT_LEAST: Duration = Duration::from_secs(5);
const WAIT_MOST: Duration = Duration::from_secs(60);
/// How long the target may take at most to do what it was told before the seal.
const SEAL_LIMIT: Duration = Duration::from_secs(5);

/// A cache whose volume is on its way to another host. Clones are the same.
#[derive(Clone)]
pub struct CacheDeparture {
    inner: Arc<Departing>,
}

struct Departing {
    env: EnvRef,
    cache: Cache,
    options: CacheTransferOptions,
    /// What the target has, if every change that it was told is done.
    sent: Mutex<Blocks>,
    /// Held while something is sent whose order counts.
    link: Mutex<Option<UnboundedSender<Frame>>>,
    may_copy: AtomicBool,
    state: Watched<State>,
}

#[derive(Clone, Copy, Default)]
struct State {
    is_linked: bool,
    listed: u64,
    /// How often more was listed, one time after the other.
    lists_more: u32,
    /// The number of the last seal that the target has answered.
    sealed: u64,
    is_whole: bool,
    is_enough: bool,
    /// The share of hits when the guest was held.
    share_held: Option<f64>,
    seal: Option<CacheSeal>,
}

/// What came of the last seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSeal {
    /// How long the guest was held for it.
    pub took: Duration,
    /// Whether the target has answered that it believes what it has. Otherwise its cache may begin empty.
    pub is_answered: bool,
}

impl CacheDeparture {
    /// The transfer of `cache` begins: from here on it is kept what the guest changes.
    #[must_use]
    pub fn new(env: EnvRef, cache: Cache, options: CacheTransferOptions) -> Self {
        let header = cache.header();
        let blocks = header.block.count(header.volume);
        cache.watch_invalidations(CHANGED_MAX);
        let may_copy = options.way == super::CacheWay::Hybrid;
        let inner = Departing {
            env,
            cache,
            options,
            sent: Mutex::new(Blocks::new(blocks)),
            link: Mutex::new(None),
            may_copy: AtomicBool::new(may_copy),
            state: Watched::new(State::default()),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Serves the target over `transport`, until it has enough or the connection is lost. Another connection may follow then.
    ///
    /// # Errors
    /// What the connection says.
    pub async fn run(&self, transport: BoxTransport) -> std::io::Result<()> {
        let inner = &self.inner;
        let (reader, writer) = tokio::io::split(transport);
        let (link, frames) = unbounded_channel();
        inner.connect(&link);
        let _linked = Linked(inner);
        let answering = inner.answer(BufReader::new(reader), link.clone());
        let telling = async {
            for tick in 1_u32.. {
                inner.env.sleep(TELL_INTERVAL).await;
                let _ = inner.tell_changes(&link);
                if tick % MORE_LISTS_TICKS == 0 && inner.state.get().is_whole {
                    inner.state.change(|state| state.lists_more = 0);
                    let is_whole = !inner.lists_more(&link);
                    inner.state.change(|state| state.is_whole = is_whole);
                }
            }
            std::future::pending().await
        };
        let sending = send_all(frames, writer);
        let (sending, telling) = (pin!(sending), pin!(telling));
        let beside = pin!(select(sending, telling));
        match select(pin!(answering), beside).await {
            Either::Left((served, _)) => served,
            Either::Right((Either::Left((sent, _)), _)) => sent,
            Either::Right((Either::Right((never, _)), _)) => never,
        }
    }

    /// Lets the target copy. With [`Hybrid`](super::CacheWay::Hybrid) it may from the beginning.
    pub fn begin_copy(&self) {
        self.inner.may_copy.store(true, Ordering::SeqCst);
        self.send(Frame::new(Kind::Copy, 0));
    }

    fn send(&self, frame: Frame) {
        // Whoever connects later is told then.
        if let Some(link) = &*self.inner.link.lock() {
            let _ = link.send(frame);
        }
    }

    /// The hit rate that the guest would have at the target now, as a share of what it has here (0 to 1). Once it was held, that of then.
    #[must_use]
    pub fn share_there(&self) -> f64 {
        let inner = &self.inner;
        let state = inner.state.get();
        if let Some(share) = state.share_held {
            return share;
        }
        if !state.is_linked {
            return 0.0;
        }
        if state.is_whole {
            return 1.0;
        }
        let mut hits = inner.cache.last_hits();
        // What was written since it was hit would be a hit on neither host.
        hits.retain(|block| inner.cache.has(*block));
        let sent = inner.sent.lock();
        if hits.len() < HITS_MIN {
            return if state.listed == 0 { 1.0 } else { sent.count as f64 / state.listed as f64 };
        }
        hits.iter().filter(|block| sent.contains(**block)).count() as f64 / hits.len() as f64
    }

    /// How many blocks the target has of those in the list.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        (self.inner.sent.lock().count, self.inner.state.get().listed)
    }

    /// How long the switchover of [`Hybrid`](super::CacheWay::Hybrid) waits at most if nothing is said: somewhat shorter than the paper
    /// copies what the list has, 5 to 60 s.
    #[must_use]
    pub fn wait_max(&self) -> Duration {
        self.wait_max_of(1)
    }

    /// The same if each block stands for `scale` of them, as in a simulation of fewer.
    #[must_use]
    pub fn wait_max_of(&self, scale: u64) -> Duration {
        let block_bytes = self.inner.cache.header().block.bytes();
        let bytes = self.inner.state.get().listed.saturating_mul(block_bytes).saturating_mul(scale);
        WAIT_OF_GB.mul_f64(bytes as f64 / GB as f64).clamp(WAIT_LEAST, WAIT_MOST)
    }

    /// Waits until all of the list is at the target.
    pub async fn whole(&self) {
        self.until(|state| state.is_whole).await;
    }

    /// Waits until the target wants nothing more.
    pub async fn enough(&self) {
        self.until(|state| state.is_enough).await;
    }

    /// Whether the target wants nothing more.
    #[must_use]
    pub fn is_enough(&self) -> bool {
        self.inner.state.get().is_enough
    }

    async fn until(&self, is_so: impl Fn(&State) -> bool) {
        self.inner.state.until(is_so).await;
    }

    /// The guest is held, and is never let go here unless nobody takes the volume at the target: has the target drop what was changed, and
    /// believe the rest. It has `limit` for that, and never more than 5 s.
    ///
    /// # Errors
    /// It is not connected or does not answer. It believes nothing then.
    pub async fn seal(&self, limit: Duration) -> Result<()> {
        let inner = &self.inner;
        let began = inner.env.now();
        let sealed = self.seal_within(limit.min(SEAL_LIMIT)).await;
        let seal = CacheSeal { took: inner.env.now().since(began), is_answered: sealed.is_ok() };
        inner.state.change(|state| state.seal = Some(seal));
        sealed
    }

    /// What came of the seal, once there was one.
    #[must_use]
    pub fn last_seal(&self) -> Option<CacheSeal> {
        self.inner.state.get().seal
    }

    async fn seal_within(&self, limit: Duration) -> Result<()> {
        let inner = &self.inner;
        let (number, share) = (inner.state.get().sealed + 1, self.share_there());
        inner.state.change(|state| state.share_held = Some(share));
        let link = inner.link.lock().clone();
        let lost = || Error::new(ErrorKind::Disconnected, "the target of a cache is not connected");
        let link = link.ok_or_else(lost)?;
        inner.tell_changes(&link).and_then(|()| link.send(Frame::new(Kind::Seal, number)).ok()).ok_or_else(lost)?;
        let sealed = self.until(|state| state.sealed == number || !state.is_linked);
        let answered = env::timeout(&*inner.env, limit, sealed).await;
        match answered {
            Some(()) if inner.state.get().sealed == number => Ok(()),
            _ => Err(lost()),
        }
    }
}

/// A connection. It is none any more when this is dropped, also if nobody waits for its end.
struct Linked<'a>(&'a Departing);

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        *self.0.link.lock() = None;
        // Before the seal the target drops all that it has.
        self.0.state.change(|state| (state.is_linked, state.is_whole) = (false, false));
    }
}

impl Departing {
    /// Sends what a target needs first. What it had of an earlier connection it drops.
    fn connect(&self, link: &UnboundedSender<Frame>) {
        {
            let mut now = self.link.lock();
            *now = None;
            // What was changed before the list is made is not in it as it was. Without a connection the rest is told later.
            drop(self.cache.invalidations());
            self.sent.lock().clear();
        }
        let list = match self.options.way {
            super::CacheWay::None => Vec::new(),
            _ => self.cache.hottest(usize::MAX),
        };
        let mut now = self.link.lock();
        for blocks in list.chunks(NAMED_MAX) {
            let _ = link.send(Frame::naming(Kind::List, blocks));
        }
        let _ = link.send(Frame::new(Kind::ListEnd, list.len() as u64));
        if self.may_copy.load(Ordering::SeqCst) {
            let _ = link.send(Frame::new(Kind::Copy, 0));
        }
        *now = Some(link.clone());
        self.state.change(|state| (state.is_linked, state.listed, state.is_whole) = (true, list.len() as u64, false));
    }

    async fn answer(
        self: &Arc<Self>,
        mut reader: impl tokio::io::AsyncRead + Unpin,
        link: UnboundedSender<Frame>,
    ) -> std::io::Result<()> {
        loop {
            let frame = receive(&mut reader).await?;
            match frame.kind {
                Kind::Ask if Arc::strong_count(self) < ASKED_MAX => {
                    let (inner, link) = (Arc::clone(self), link.clone());
                    let reading = async move { inner.send_block(frame.number, &link).await };
                    self.env.spawn(Box::pin(reading));
                }
                Kind::Sealed => self.state.change(|state| state.sealed = frame.number),
                Kind::Whole if self.lists_more(&link) => {}
                Kind::Whole => self.state.change(|state| state.is_whole = true),
                Kind::Enough => {
                    self.state.change(|state| state.is_enough = true);
                    return Ok(());
                }
                _ => {
                    let message = format!("the target of a cache sends {:?}", frame.kind);
                    return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, message));
                }
            }
        }
    }

    /// The target has all of the list, and the guest has gone on meanwhile: lists what the cache has taken since, unless that is little.
    fn lists_more(&self, link: &UnboundedSender<Frame>) -> bool {
        if self.options.way != super::CacheWay::Hybrid || self.state.get().sealed > 0 {
            return false;
        }
        let mut more = self.cache.cached();
        {
            let sent = self.sent.lock();
            more.retain(|block| !sent.contains(*block));
        }
        let State { lists_more, listed, .. } = self.state.get();
        if lists_more >= MORE_LISTS_MAX || more.len() as u64 <= listed / MORE_PART {
            return false;
        }
        self.state.change(|state| state.lists_more += 1);
        for blocks in more.chunks(NAMED_MAX) {
            let _ = link.send(Frame::naming(Kind::List, blocks));
        }
        let _ = link.send(Frame::new(Kind::ListEnd, more.len() as u64));
        true
    }

    /// Sends a block while no write to it begins: one that came between would be told of first, and its target would have what is older.
    async fn send_block(&self, block: u64, link: &UnboundedSender<Frame>) {
        let send = |read: Result<Option<Buffer>>| {
            let bytes = read.unwrap_or_else(|error| {
                tracing::debug!(block, error = error.chain(), "a block of a cache cannot be sent");
                None
            });
            let now = self.link.lock();
            if !now.as_ref().is_some_and(|now| now.same_channel(link)) {
                // What is told here would be lost to the next connection.
                return;
            }
            // First what was changed before it was read: the target drops that, and then has this.
            self.tell_changes_in_order(link);
            self.sent.lock().set(block, bytes.is_some());
            let frame = bytes.map_or_else(|| Frame::new(Kind::Absent, block), |bytes| Frame::block(block, &bytes));
            let _ = link.send(frame);
        };
        self.cache.peek_then(block, send).await;
    }

    /// Tells the target what the guest has changed. None if it is not connected any more.
    fn tell_changes(&self, link: &UnboundedSender<Frame>) -> Option<()> {
        let now = self.link.lock();
        if !now.as_ref().is_some_and(|now| now.same_channel(link)) {
            return None;
        }
        self.tell_changes_in_order(link);
        Some(())
    }

    /// The same by who holds the order.
    fn tell_changes_in_order(&self, link: &UnboundedSender<Frame>) {
        let changed = self.cache.invalidations();
        let mut sent = self.sent.lock();
        if changed.overflowed {
            sent.clear();
            let _ = link.send(Frame::new(Kind::InvalidAll, 0));
            return;
        }
        let mut blocks = changed.blocks;
        blocks.sort_unstable();
        blocks.dedup();
        blocks.iter().for_each(|block| sent.set(*block, false));
        for some in blocks.chunks(NAMED_MAX) {
            let _ = link.send(Frame::naming(Kind::Invalid, some));
        }
    }
}

impl Drop for Departing {
    fn drop(&mut self) {
        self.cache.watch_invalidations(0);
    }
}
