//! The host that a cache comes to.
//!
//! ```text
//!   list ─▶ next block, hottest first ─┬─▶ asked of the source, as many at a time as it answers quickly ──┬─▶ taken
//!                    ▲                 └─▶ read of shared storage, while the guest asks nothing of it ────┘
//!          changed at the source
//! ```

mod remote;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use block::{Buffer, Device};
use env::EnvRef;
use filters::{Admission, Cache};
use futures::future::{Either, join_all, select};
use parking_lot::Mutex;
use tokio::io::BufReader;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot};

use self::remote::Remote;
use super::list::List;
use super::wire::{Frame, Kind, receive, send_all};
use super::{CacheTransferOptions, CacheTransferStatus, CacheWay, WarmStart, Watched};
use crate::stream::BoxTransport;

/// How long the source may be gone, with the guest here, before the transfer is over.
const GONE_LIMIT: Duration = Duration::from_secs(10);
/// How long the warmer of [`CacheWay::Hybrid`] lets the guest have the storage alone.
const YIELD_SPAN: Duration = Duration::from_millis(2);
/// So many blocks the warmer of [`CacheWay::Hybrid`] reads at a time.
const WARM_IN_FLIGHT: u32 = 8;
/// How often it is looked whether a transfer without an end of its own is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// A cache that comes from another host. Clones are the same.
#[derive(Clone)]
pub struct CacheArrival {
    inner: Arc<Arriving>,
}

struct Arriving {
    env: EnvRef,
    cache: Cache,
    options: CacheTransferOptions,
    blocks: u64,
    list: Mutex<List>,
    link: Mutex<Option<UnboundedSender<Frame>>>,
    /// The guest's reads that wait for a block.
    awaited: Mutex<BTreeMap<u64, Vec<oneshot::Sender<Buffer>>>>,
    state: Watched<State>,
    /// Told when the copier may have something to do.
    wake: Notify,
    /// Held while a connection is used: those of before have ended.
    running: tokio::sync::Mutex<()>,
    /// How many reads of the guest's the source has not answered in time, since it answered the last time.
    unanswered: AtomicU64,
    from_source: AtomicU64,
    from_storage: AtomicU64,
    refused: AtomicU64,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// How many connections there were.
    connections: u64,
    is_linked: bool,
    may_copy: bool,
    is_sealed: bool,
    guest_is_here: bool,
    /// How many blocks are being taken.
    taking: u32,
    /// All of the list has come.
    is_whole: bool,
    /// Nothing comes any more.
    is_gone: bool,
    is_over: bool,
}

impl CacheArrival {
    /// A transfer into `cache`, which is empty, and which nobody uses.
    #[must_use]
    pub fn new(env: EnvRef, cache: Cache, options: CacheTransferOptions) -> Self {
        let header = cache.header();
        let blocks = header.block.count(header.volume);
        cache.begin_transfer(options.way.withholds(), options.changed_max as usize);
        let list = List::new(blocks, options.in_flight);
        let inner = Arriving {
            env,
            cache,
            options,
            blocks,
            list: Mutex::new(list),
            link: Mutex::new(None),
            awaited: Mutex::default(),
            state: Watched::new(State::default()),
            wake: Notify::new(),
            running: tokio::sync::Mutex::default(),
            unanswered: AtomicU64::new(0),
            from_source: AtomicU64::new(0),
            from_storage: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Works over one connection to the source until the transfer is over, the connection is lost, or another one follows.
    ///
    /// # Errors
    /// What the connection says, or the cache's flash.
    pub async fn run(&self, transport: BoxTransport) -> std::io::Result<()> {
        let inner = &self.inner;
        let mut number = 0;
        inner.change(|state| {
            state.connections += 1;
            number = state.connections;
        });
        let replaced = inner.until(|state| state.connections > number);
        let work = async {
            // The one before has ended: nothing of it is taken for an answer to this one.
            let _running = inner.running.lock().await;
            inner.use_connection(transport).await
        };
        match select(pin!(work), pin!(replaced)).await {
            Either::Left((ended, _)) => ended,
            Either::Right(((), _)) => Err(std::io::Error::other("the source of a cache has connected again")),
        }
    }

    /// Whether every change at the source was told: what has come is what the volume has. Otherwise nothing of it may be used.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.inner.state.get().is_sealed
    }

    /// The volume is held here, and its guest goes through the cache from now on, over `base`. The rest of the transfer is done aside.
    pub fn guest_is_here(&self, base: Device) {
        let inner = &self.inner;
        assert!(inner.state.get().is_sealed, "the guest goes through a cache of which every change was told");
        if inner.options.way.reads_remotely() {
            inner.cache.reach_other_by(Some(Arc::new(Remote::new(inner))));
        }
        inner.change(|state| state.guest_is_here = true);
        let arriving = Arc::clone(inner);
        inner.env.spawn(Box::pin(arriving.finish(base)));
    }

    /// Warms the cache from `base` beside the memory, before the guest comes, if that is how it was asked for.
    pub async fn warm_before(&self, base: Device) {
        let inner = &self.inner;
        if inner.options.way == CacheWay::Cachemior && inner.options.warm_start == WarmStart::WithMemory {
            let listed = async {
                inner.until(|state| state.is_linked).await;
                while !inner.list.lock().is_complete && !inner.state.get().is_sealed {
                    inner.env.sleep(LOOK_INTERVAL).await;
                }
            };
            if env::timeout(&*inner.env, inner.options.time_max(), listed).await.is_none() {
                // Nothing comes, and nobody says so.
                return;
            }
            // Of a block that was changed at the source nobody knows here when the storage has that.
            inner.warm(&base, false, |state| !state.is_sealed).await;
        }
    }

    /// Waits until the transfer is over.
    pub async fn over(&self) {
        self.inner.until(|state| state.is_over).await;
    }

    /// What it has done.
    #[must_use]
    pub fn status(&self) -> CacheTransferStatus {
        let inner = &self.inner;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = inner.state.get();
        let transfer = inner.cache.transfer_status();
        CacheTransferStatus {
            listed: inner.list.lock().blocks.len() as u64,
            from_source: read(&inner.from_source),
            from_storage: read(&inner.from_storage),
            read_remotely: transfer.read_from_other,
            refused: read(&inner.refused),
            is_withheld: transfer.is_withheld,
            is_sealed: state.is_sealed,
            is_over: state.is_over,
        }
    }
}

/// A connection. It is none any more when this is dropped, also if nobody waits for its end.
struct Linked<'a>(&'a Arriving);

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        *self.0.link.lock() = None;
        self.0.awaited.lock().clear();
        self.0.list.lock().give_up_asked();
        self.0.change(|state| state.is_linked = false);
    }
}

impl Arriving {
    async fn use_connection(self: &Arc<Self>, transport: BoxTransport) -> std::io::Result<()> {
        self.begin_again().await.map_err(std::io::Error::other)?;
        let (reader, writer) = tokio::io::split(transport);
        let (link, frames) = unbounded_channel();
        *self.link.lock() = Some(link);
        self.unanswered.store(0, Ordering::Relaxed);
        self.change(|state| state.is_linked = true);
        let _linked = Linked(self);
        let hearing = self.hear(BufReader::new(reader));
        let sending = send_all(frames, writer);
        let copying = self.copy();
        let (sending, copying) = (pin!(sending), pin!(copying));
        let working = pin!(select(sending, copying));
        match select(pin!(hearing), working).await {
            Either::Left((heard, _)) => heard,
            Either::Right((Either::Left((sent, _)), _)) => sent,
            Either::Right((Either::Right(((), sending)), _)) => {
                // What was said last is to be heard.
                *self.link.lock() = None;
                sending.await
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.state.change(change);
        self.wake.notify_waiters();
        self.wake.notify_one();
    }

    async fn until(&self, is_so: impl Fn(&State) -> bool) {
        self.state.until(is_so).await;
    }

    fn send(&self, frame: Frame) {
        if let Some(link) = &*self.link.lock() {
            let _ = link.send(frame);
        }
    }

    /// A new connection: what has come is dropped unless every change was told.
    async fn begin_again(&self) -> block::Result<()> {
        if self.state.get().is_sealed {
            return Ok(());
        }
        // What has come over the last connection may still be on its way into the flash.
        self.until(|state| state.taking == 0).await;
        self.drop_all().await?;
        let mut list = self.list.lock();
        (list.blocks, list.next, list.is_complete) = (Vec::new(), 0, false);
        list.known.clear();
        list.changed.clear();
        list.again.clear();
        list.asked.clear();
        Ok(())
    }

    async fn drop_all(&self) -> block::Result<()> {
        for block in self.cache.cached() {
            self.cache.invalidate(block).await?;
        }
        Ok(())
    }

    /// Does what the source says, in its order.
    async fn hear(self: &Arc<Self>, mut reader: impl tokio::io::AsyncRead + Unpin) -> std::io::Result<()> {
        // After the seal the list is the one that there is.
        let lists_anew = !self.state.get().is_sealed;
        loop {
            let frame = receive(&mut reader).await?;
            match frame.kind {
                Kind::List if lists_anew => self.list.lock().add(&frame.named()),
                Kind::List => {}
                Kind::ListEnd => {
                    self.list.lock().is_complete = true;
                    // More may be listed when all of this has come: that is said once more, then.
                    self.change(|state| state.is_whole &= !lists_anew);
                }
                Kind::Block => self.take_aside(frame),
                Kind::Absent => {
                    self.awaited.lock().remove(&frame.number);
                    self.list.lock().asked.remove(&frame.number);
                    self.wake.notify_one();
                }
                Kind::Invalid => {
                    self.until(|state| state.taking == 0).await;
                    for block in frame.named() {
                        let is_listed = {
                            let mut list = self.list.lock();
                            let is_listed = list.known.contains(block);
                            if is_listed {
                                // Before it is dropped: nobody reads it of the storage from here on.
                                list.changed.set(block, true);
                            }
                            is_listed
                        };
                        self.cache.invalidate(block).await.map_err(std::io::Error::other)?;
                        if is_listed {
                            self.list.lock().again.insert(block);
                        }
                    }
                    self.wake.notify_one();
                }
                Kind::InvalidAll => {
                    self.until(|state| state.taking == 0).await;
                    self.drop_all().await.map_err(std::io::Error::other)?;
                    {
                        let list = &mut *self.list.lock();
                        list.blocks.iter().for_each(|block| list.changed.set(*block, true));
                        list.next = 0;
                    }
                    self.wake.notify_one();
                }
                Kind::Copy => self.change(|state| state.may_copy = true),
                Kind::Seal => {
                    self.until(|state| state.taking == 0).await;
                    self.change(|state| state.is_sealed = true);
                    self.send(Frame::new(Kind::Sealed, frame.number));
                }
                Kind::Ask | Kind::Sealed | Kind::Whole | Kind::Enough => {
                    let message = format!("the source of a cache sends {:?}", frame.kind);
                    return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, message));
                }
            }
        }
    }

    /// A block has come: whoever waits for it has it, and the cache takes it.
    fn take_aside(self: &Arc<Self>, frame: Frame) {
        let (block, bytes) = (frame.number, copy_of(&frame.payload));
        self.unanswered.store(0, Ordering::Relaxed);
        let awaited = self.awaited.lock().remove(&block).unwrap_or_default();
        // Those who wait have it taken themselves.
        for waiting in awaited {
            let _ = waiting.send(copy_of(&bytes));
        }
        let (asked, is_used) = {
            let list = self.list.lock();
            (list.asked.get(&block).copied(), list.changed.contains(block))
        };
        let Some(asked) = asked else { return };
        self.state.change(|state| state.taking += 1);
        let inner = Arc::clone(self);
        self.env.spawn(Box::pin(async move {
            let taken = match is_used {
                true => inner.cache.take_used(block, bytes.freeze()).await,
                false => inner.cache.take(block, bytes.freeze()).await,
            };
            match taken {
                Ok(Admission::Admitted) => inner.from_source.fetch_add(1, Ordering::Relaxed),
                Ok(_) => inner.refused.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    tracing::debug!(block, error = error.chain(), "a block that has come is not cached");
                    inner.refused.fetch_add(1, Ordering::Relaxed)
                }
            };
            {
                let mut list = inner.list.lock();
                list.asked.remove(&block);
                list.window.note(inner.env.now().since(asked));
            }
            inner.change(|state| state.taking -= 1);
        }));
    }

    /// Whether blocks are copied now.
    fn copies_now(&self) -> bool {
        let state = self.state.get();
        match state.guest_is_here {
            true => self.options.way.copies_after(),
            false => self.options.way.copies() && state.may_copy && !state.is_sealed,
        }
    }

    /// Asks for one block after the other until the transfer is over.
    async fn copy(&self) {
        loop {
            let woken = self.wake.notified();
            if self.state.get().is_over {
                self.send(Frame::new(Kind::Enough, 0));
                return;
            }
            if self.copies_now() {
                self.ask_some();
                self.see_whole();
            }
            woken.await;
        }
    }

    fn ask_some(&self) {
        loop {
            let block = {
                let mut list = self.list.lock();
                if list.asked.len() >= list.window.size() as usize {
                    return;
                }
                let Some(block) = list.next(self.blocks, true) else { return };
                if self.cache.has(block) {
                    continue;
                }
                list.asked.insert(block, self.env.now());
                block
            };
            self.send(Frame::new(Kind::Ask, block));
        }
    }

    /// Says so when everything has come.
    fn see_whole(&self) {
        let is_whole = self.list.lock().is_through() && self.state.get().taking == 0;
        if is_whole != self.state.get().is_whole {
            self.state.change(|state| state.is_whole = is_whole);
            if is_whole {
                self.send(Frame::new(Kind::Whole, 0));
            }
        }
    }

    /// What is left once the guest is here, and the end.
    async fn finish(self: Arc<Self>, base: Device) {
        let work = async {
            match self.options.way {
                CacheWay::None | CacheWay::Firepan => {}
                CacheWay::Cachemior => {
                    // The list must have come. A source that was lost before that sends none.
                    if self.unless_gone(self.listed()).await {
                        self.warm(&base, true, |_| true).await;
                    }
                }
                CacheWay::RemoteRead => _ = self.unless_gone(self.full()).await,
                CacheWay::FirepanIf => _ = self.unless_gone(self.until(|state| state.is_whole)).await,
                CacheWay::Hybrid => {
                    let copied = self.unless_gone(self.until(|state| state.is_whole));
                    let warmed = self.warm(&base, true, |state| !state.is_whole);
                    futures::future::join(copied, warmed).await;
                }
            }
        };
        if env::timeout(&*self.env, self.options.time_max(), work).await.is_none() {
            tracing::info!("the transfer of a cache has taken too long: what has not come is read of the storage");
        }
        while let Err(error) = self.cache.end_transfer().await {
            tracing::warn!(error = error.chain(), "the end of a cache's transfer is tried again");
            self.env.sleep(YIELD_SPAN * 500).await;
        }
        self.change(|state| state.is_over = true);
    }

    async fn listed(&self) {
        while !self.list.lock().is_complete {
            self.env.sleep(LOOK_INTERVAL).await;
        }
    }

    /// Waits until the cache has room for nothing more, or has everything.
    async fn full(&self) {
        self.listed().await;
        let is_done = |block: &u64| self.cache.has(*block) || self.cache.has_changed(*block);
        let has_all = || self.list.lock().blocks.iter().all(is_done);
        while self.cache.status().places_free > 0 && !has_all() {
            self.env.sleep(LOOK_INTERVAL * 10).await;
        }
    }

    /// Does `work` as long as the source is there. Gives whether it was done.
    async fn unless_gone(&self, work: impl Future<Output = ()>) -> bool {
        let gone = async {
            loop {
                self.until(|state| !state.is_linked).await;
                let back = self.until(|state| state.is_linked);
                if env::timeout(&*self.env, GONE_LIMIT, back).await.is_none() {
                    return;
                }
            }
        };
        match select(pin!(work), pin!(gone)).await {
            Either::Left(((), _)) => true,
            Either::Right(((), _)) => {
                tracing::warn!("the source of a cache is gone: what has not come is read of the storage");
                self.change(|state| state.is_gone = true);
                false
            }
        }
    }

    /// Reads of `base` what is next, as long as `goes_on` says so.
    async fn warm(&self, base: &Device, with_changed: bool, goes_on: impl Fn(&State) -> bool) {
        if !self.options.way.warms() {
            return;
        }
        let yields = self.options.way == CacheWay::Hybrid;
        let lanes = if yields { WARM_IN_FLIGHT.min(self.options.in_flight) } else { self.options.in_flight };
        let goes_on = || goes_on(&self.state.get());
        let one_lane = async || {
            while goes_on() {
                if yields && self.cache.serves_base() {
                    self.env.sleep(YIELD_SPAN).await;
                    continue;
                }
                let next = self.list.lock().next(self.blocks, with_changed);
                match next {
                    Some(block) => self.warm_one(base, block).await,
                    // Of the source's cache some may still come, or be asked for in vain.
                    None if yields && !self.state.get().is_gone => {
                        self.wake.notify_one();
                        self.env.sleep(YIELD_SPAN * 5).await;
                    }
                    None => return,
                }
            }
        };
        join_all((0..lanes).map(|_| one_lane())).await;
        self.wake.notify_one();
    }

    async fn warm_one(&self, base: &Device, block: u64) {
        if self.cache.has(block) {
            return;
        }
        let token = self.cache.token(block);
        let extent = self.cache.extent_of(block);
        let warmed = async {
            let bytes = base.read(extent.offset, Buffer::unpooled(extent.length.as_usize())).await?;
            self.cache.warm(block, bytes.freeze(), token).await
        };
        match warmed.await {
            Ok(Admission::Admitted) => self.from_storage.fetch_add(1, Ordering::Relaxed),
            Ok(_) => self.refused.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                tracing::debug!(block, error = error.chain(), "a block could not be warmed");
                self.refused.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

fn copy_of(bytes: &[u8]) -> Buffer {
    let mut copy = Buffer::unpooled(bytes.len());
    copy.copy_from_slice(bytes);
    copy
}
