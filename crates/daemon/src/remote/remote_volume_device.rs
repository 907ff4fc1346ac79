//! A volume of another host as a device of this one. First it is the target that a copy fills. Then the guest's
//! requests are passed on to it.
//!
//! ```text
//!              connect            the link is lost
//!    down ─────────────▶ copying ──────────────────▶ down      requests fail: the migration loses its target
//!      │                    │
//!      │       turn: the commit is on record             close
//!      ▼                    ▼                    ╭──────────────────▶ closed      requests fail
//!   waiting ◀───────────────╯                    │
//!      │  ▲                                      │
//!      │  │ the link is lost                     │             requests wait
//!      ▼  │                                      │
//!   forwarding ──────────────────────────────────╯             requests are passed on
//!
//!   waiting ◀──▶ deciding ──▶ given back      requests go to the old source: somebody has decided that it holds the volume
//!   waiting ───▶ kept out ──▶ forwarding      the other host holds it, and a person has opened it there: requests wait
//! ```
//!
//! *Waiting* leads to *forwarding* when the other host has answered that it holds the volume and that is on record
//! here. Nothing leads back from there: after `turn` the device never copies again.
//!
//! What was passed on and not flushed yet is kept here, [`UNFLUSHED_BYTES_MAX`] at most. A host that loses its power loses
//! what its disks had not made durable, and this guest, which runs on another machine, would not know. So if the other
//! host has been booted since, it is written again, in the order in which it was carried out, and flushed. Nothing else
//! reaches that host before. To keep that order, a write blocks other requests for its bytes until it is answered and
//! kept.
//!
//! Nobody has kept what an earlier process of this daemon has passed on. A new process has the other host flush before
//! its guest reads anything. So what has been read stays.

mod requests;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::{BlockDevice, Bytes, Device, Error, ErrorKind, Extent, RangeLock, Result, Unflushed};
use env::{EnvRef, Moment};
use futures::future::{BoxFuture, Either, select};
use migrate::Digests;
use migrate::stream::protocol::feature;
use migrate::stream::{
    Answer, Ask, BoxTransport, Dialer, Remote, Role, SessionRequest, StreamOptions, StreamPath, StreamStatistics,
};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::hosts::HostName;
use crate::location::RemoteVolume;
use crate::platform::Hosts;

/// How much is kept that was passed on and not flushed. Beyond that the device flushes by itself.
const UNFLUSHED_BYTES_MAX: Bytes = Bytes::mib(32);

/// A forward whose guest asks nothing for so long has one stream: others have the places.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// The first rest before a host that could not be reached is tried again.
const REST_MIN: Duration = Duration::from_millis(100);
/// A rest is one of so many parts of how long the host has been away.
const REST_PART: u32 = 16;

/// A device over a volume of another host. It is shared by the guest's stack, the migration and whoever shows it.
pub(crate) struct RemoteVolumeDevice {
    env: EnvRef,
    hosts: Arc<dyn Hosts>,
    place: RemoteVolume,
    /// What the volume is called here.
    origin: String,
    options: StreamOptions,
    /// The longest rest before a host is tried again.
    rest_max: Duration,
    state: Mutex<State>,
    /// Told of every change of the state. Those who wait are told in the order in which they came.
    changed: Notify,
    unflushed: Mutex<Unflushed>,
    /// Keeps the order of what is kept.
    ranges: RangeLock,
    /// What earlier sessions sent.
    sent: Mutex<StreamStatistics>,
    /// Why the host was not reached when that was last tried.
    problem: Mutex<Option<String>>,
    kicked: AtomicBool,
    /// The boot of the other host that what is unflushed was written to.
    boot: Mutex<Option<[u8; 16]>>,
    /// The process of the other host's daemon that is known to hold what is recorded of the copy. Either it made the
    /// place, or its copy was compared.
    trusted: Mutex<Option<[u8; 16]>>,
    /// There was a connection to the other host.
    reached: Arc<AtomicBool>,
    /// How often what waited was failed.
    failed: AtomicU64,
    /// Held while the other host is told to hold the volume, and while somebody decides otherwise.
    telling: Arc<tokio::sync::Mutex<()>>,
    /// A copy's writes are kept, too: the other host may be asked to take the volume at any moment.
    keeps_copy: AtomicBool,
}

#[derive(Clone)]
enum State {
    /// There is no session.
    Down,
    Copying(Arc<Remote>),
    /// The other host holds the volume under this epoch, or is to.
    Waiting(u64),
    /// The same, and somebody decides whether it is to: meanwhile nobody tells it so.
    Deciding(u64),
    Forwarding(u64, Arc<Remote>),
    /// The other host holds the volume, and lets nobody from here in: a person has opened it there.
    KeptOut(u64),
    /// This host holds the volume after all, as somebody has decided.
    GivenBack(Device),
    Closed,
}

impl State {
    /// Whether it copies no more: its requests are the other host's, or this one's again.
    const fn has_turned(&self) -> bool {
        !matches!(self, Self::Down | Self::Copying(_))
    }
}

/// What a new session of a copy has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing: the volume was made just now, and reads as zeroes.
    Nothing,
    /// What earlier sessions of the same job have written and flushed.
    Earlier,
}

/// What is done, durably, when the other host has answered that it holds the volume, before any request goes there.
pub(crate) type NoteTaken = Box<dyn Fn() -> BoxFuture<'static, Result<()>> + Send + Sync>;

/// Why the other host is not to be told now that it holds the volume, if it is not; asked whether it was told in vain before.
pub(crate) type Refuses = Box<dyn Fn(bool) -> Option<String> + Send + Sync>;

impl RemoteVolumeDevice {
    /// A device without a session, whose sessions are opened as `options` say.
    pub(crate) fn new(
        env: &EnvRef,
        hosts: &Arc<dyn Hosts>,
        (place, origin): (&RemoteVolume, &str),
        options: StreamOptions,
        rest_max: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            env: Arc::clone(env),
            hosts: Arc::clone(hosts),
            place: place.clone(),
            origin: origin.to_owned(),
            options,
            rest_max,
            state: Mutex::new(State::Down),
            changed: Notify::new(),
            unflushed: Mutex::default(),
            ranges: RangeLock::new(),
            sent: Mutex::default(),
            problem: Mutex::default(),
            kicked: AtomicBool::new(false),
            boot: Mutex::default(),
            trusted: Mutex::default(),
            reached: Arc::default(),
            failed: AtomicU64::new(0),
            telling: Arc::default(),
            keeps_copy: AtomicBool::new(false),
        })
    }

    /// The volume.
    pub(crate) const fn place(&self) -> &RemoteVolume {
        &self.place
    }

    /// Why the host is not reached, if it is not.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    /// The session that fills the volume, if there is one.
    pub(crate) fn copying(&self) -> Option<Arc<Remote>> {
        match &*self.state.lock() {
            State::Copying(remote) => Some(Arc::clone(remote)),
            _ => None,
        }
    }

    /// What compares the other host's copy, if that may have changed since its content was last known. While that
    /// host's daemon was away, nobody kept others from the copy. `None` too if that host cannot say what it holds.
    pub(crate) fn unverified(self: &Arc<Self>) -> Option<Arc<dyn Digests>> {
        let session = self.copying()?.session();
        if *self.trusted.lock() == Some(session.instance) {
            return None;
        }
        if session.features & feature::DIGESTS == 0 {
            tracing::warn!(place = %self.place, "its host is of an older version: what it has is not compared");
            return None;
        }
        Some(Arc::new(Compared { remote_device: Arc::clone(self), instance: session.instance }))
    }

    /// What all sessions have sent.
    pub(crate) fn statistics(&self) -> StreamStatistics {
        let mut sum = self.sent.lock().clone();
        if let State::Copying(remote) | State::Forwarding(_, remote) = &*self.state.lock() {
            add(&mut sum, &remote.statistics());
        }
        sum
    }

    /// Opens a session that fills the volume, whose source holds it under `epoch`. What the session before has under way
    /// is over then.
    ///
    /// # Errors
    /// The host cannot be reached, or refuses.
    pub(crate) async fn connect(&self, epoch: u64) -> Result<Found> {
        self.leave_copy();
        let connected = self.open(Role::Copy, epoch, self.options.clone()).await;
        let remote = self.noting(connected)?;
        // What earlier sessions did not flush is copied again.
        self.keeps_copy.store(false, Ordering::Relaxed);
        self.unflushed.lock().clear();
        *self.boot.lock() = Some(remote.session().boot);
        let found = if remote.session().earlier.is_some() { Found::Earlier } else { Found::Nothing };
        if found == Found::Nothing {
            *self.trusted.lock() = Some(remote.session().instance);
        }
        let mut state = self.state.lock();
        match *state {
            State::Down => *state = State::Copying(remote),
            _ => return Err(Error::new(ErrorKind::Cancelled, "the move is over")),
        }
        drop(state);
        self.announce();
        Ok(found)
    }

    /// Whether there ever was a connection to the other host, which therefore may know of the volume.
    pub(crate) fn was_reached(&self) -> bool {
        self.reached.load(Ordering::Relaxed)
    }

    /// Has the other host be durably prepared to hold the volume under `epoch`.
    ///
    /// # Errors
    /// It cannot be reached, or is not ready to.
    pub(crate) async fn prepare(&self, epoch: u64) -> Result<()> {
        let state = self.state.lock().clone();
        match state {
            State::Copying(remote) => {
                // Whatever is answered from here on is durable there or kept here.
                self.keeps_copy.store(true, Ordering::Relaxed);
                remote.flush().await?;
                done(remote.call(Ask::Prepare { epoch }).await?)
            }
            _ => Err(self.unreachable()),
        }
    }

    /// The other host is to hold the volume under `epoch`: from here on every request waits until it does, and goes there.
    pub(crate) fn turn(&self, epoch: u64) {
        let mut state = self.state.lock();
        if state.has_turned() {
            return;
        }
        if let State::Copying(remote) = &*state {
            add(&mut self.sent.lock(), &remote.statistics());
        }
        *state = State::Waiting(epoch);
        drop(state);
        self.announce();
    }

    /// Somebody decides who holds the volume: until what this gives is dropped, the other host is not told to hold it. An
    /// attempt that is under way is given up, or has ended.
    pub(crate) async fn decide(self: &Arc<Self>) -> Deciding {
        // Whoever decides may go away while this waits: then it is as before.
        let mut deciding = Deciding { remote_device: Arc::clone(self), turn: None };
        {
            let mut state = self.state.lock();
            if let State::Waiting(epoch) = *state {
                *state = State::Deciding(epoch);
            }
        }
        self.announce();
        deciding.turn = Some(Arc::clone(&self.telling).lock_owned().await);
        deciding
    }

    /// This host holds the volume after all: requests that wait, and those that come, go to `device`.
    pub(crate) fn give_back(&self, device: Device) {
        *self.state.lock() = State::GivenBack(device);
        self.announce();
    }

    /// Ends it: nobody's requests are passed on any more. One that was given back goes on.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        if !matches!(*state, State::GivenBack(_)) {
            *state = State::Closed;
        }
        drop(state);
        self.announce();
    }

    /// Whether there is a session, or one is kept.
    pub(crate) fn is_connected(&self) -> bool {
        !matches!(*self.state.lock(), State::Down | State::Closed)
    }

    /// Waits until the other host has taken the volume and that is on record; false if the device was closed before.
    pub(crate) async fn taken(&self) -> bool {
        loop {
            let changed = self.changed.notified();
            match *self.state.lock() {
                State::Forwarding(..) | State::KeptOut(_) => return true,
                State::Closed | State::GivenBack(_) => return false,
                State::Down | State::Copying(_) | State::Waiting(_) | State::Deciding(_) => {}
            }
            changed.await;
        }
    }

    /// Fails what waits for a host that lets nobody from here in: whoever is still there to hear it may go.
    pub(crate) fn fail_waiting(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.announce();
    }

    /// Whether the other host holds the volume and lets nobody from here in.
    pub(crate) fn is_kept_out(&self) -> bool {
        matches!(*self.state.lock(), State::KeptOut(_))
    }

    /// Tries the other host at once, if it is being waited for.
    pub(crate) fn kick(&self) {
        self.kicked.store(true, Ordering::Relaxed);
        self.announce();
    }

    /// Whether somebody has [kicked](Self::kick) it since this was last asked.
    pub(crate) fn was_kicked(&self) -> bool {
        self.kicked.swap(false, Ordering::Relaxed)
    }

    /// Waits for `span`, or until somebody [kicks](Self::kick) it.
    pub(crate) async fn rest(&self, span: Duration) {
        let changed = self.changed.notified();
        select(pin!(changed), self.env.sleep(span)).await;
    }

    /// How long to rest after a failed attempt, when the host has been away since `lost`. The delay that this rest adds
    /// is a small part of the outage.
    pub(crate) fn rest_since(&self, lost: Moment) -> Duration {
        (self.env.now().since(lost) / REST_PART).max(REST_MIN).min(self.rest_max)
    }

    /// Keeps the sessions of a device after [`turn`](Self::turn), until it is closed. It runs on the caller's worker,
    /// which must outlive every job.
    ///
    /// Before the other host is told `refuses` is asked, and says more after a session that was lost, or did not come about: somebody may
    /// use the volume here meanwhile.
    pub(crate) async fn keep(self: Arc<Self>, note_taken: NoteTaken, refuses: Refuses) {
        let mut lost = None;
        loop {
            let changed = self.changed.notified();
            let state = self.state.lock().clone();
            match state {
                State::Closed | State::GivenBack(_) => return,
                State::Down | State::Copying(_) | State::Deciding(_) | State::Forwarding(..) => {
                    changed.await;
                }
                State::Waiting(epoch) | State::KeptOut(epoch) => {
                    let outcome = match refuses(lost.is_some()) {
                        Some(why) => Err(Error::new(ErrorKind::Busy, why)),
                        None => self.forward(epoch, &note_taken).await,
                    };
                    match self.noting(outcome) {
                        Ok(()) => lost = None,
                        Err(error) => {
                            if error.kind() == ErrorKind::KeptOut {
                                tracing::info!(place = %self.place, "the guest here is kept out");
                            } else {
                                tracing::warn!(place = %self.place, error = error.chain(), "the volume's host is not reached");
                            }
                            let lost = *lost.get_or_insert_with(|| self.env.now());
                            self.rest(self.rest_since(lost)).await;
                        }
                    }
                }
            }
        }
    }

    async fn forward(&self, epoch: u64, note_taken: &NoteTaken) -> Result<()> {
        let _turn = self.telling.lock().await;
        let options = StreamOptions { idle_max: Some(IDLE_MAX), ..self.options.clone() };
        let opening = self.open(Role::Forward, epoch, options);
        let remote = match select(pin!(opening), pin!(self.waits_no_more())).await {
            Either::Left((Ok(opened), _)) => opened,
            Either::Left((Err(error), _)) => {
                self.note_kept_out((epoch, &error), note_taken).await?;
                return Err(error);
            }
            Either::Right(_) => return Ok(()),
        };
        let now = remote.session().boot;
        let before = *self.boot.lock();
        if before != Some(now) {
            self.bring_up_to_date(&remote, before.is_some()).await?;
        }
        *self.boot.lock() = Some(now);
        note_taken().await.map_err(|error| error.wrap("recording that the volume was taken"))?;
        let mut state = self.state.lock();
        if let State::Waiting(_) | State::KeptOut(_) = *state {
            *state = State::Forwarding(epoch, remote);
        }
        drop(state);
        self.announce();
        Ok(())
    }

    /// The other host has refused a session for `error`. If that says that it holds the volume all the same, that is on record when this
    /// returns.
    async fn note_kept_out(&self, (epoch, error): (u64, &Error), note_taken: &NoteTaken) -> Result<()> {
        let is_kept_out = error.kind() == ErrorKind::KeptOut;
        if is_kept_out {
            note_taken().await.map_err(|error| error.wrap("recording that the volume was taken"))?;
        }
        let mut state = self.state.lock();
        match &*state {
            State::Waiting(_) if is_kept_out => *state = State::KeptOut(epoch),
            State::KeptOut(_) if !is_kept_out => *state = State::Waiting(epoch),
            _ => {}
        }
        drop(state);
        self.announce();
        Ok(())
    }

    /// Returns when the other host is not to be told any more that it holds the volume.
    async fn waits_no_more(&self) {
        loop {
            let changed = self.changed.notified();
            if !matches!(*self.state.lock(), State::Waiting(_) | State::KeptOut(_)) {
                return;
            }
            changed.await;
        }
    }

    /// The other host was booted since the last session, or nobody knows whether it was: what was answered is there, and
    /// durable, when this returns.
    async fn bring_up_to_date(&self, remote: &Remote, was_booted: bool) -> Result<()> {
        let (again, mark) = {
            let unflushed = self.unflushed.lock();
            (unflushed.to_replay(), unflushed.mark())
        };
        if was_booted {
            tracing::warn!(place = %self.place, writes = again.len(), "its host was booted: what was not flushed is written again");
            for mutation in again {
                remote.write(mutation).await?;
            }
        }
        remote.flush().await?;
        self.unflushed.lock().flushed(mark);
        Ok(())
    }

    async fn open(&self, role: Role, epoch: u64, options: StreamOptions) -> Result<Arc<Remote>> {
        let host = HostName::new(&self.place.host).and_then(|host| self.hosts.dialer(&host));
        let dialer = host.map_err(|error| Error::new(ErrorKind::PermissionDenied, error.to_string()))?;
        let dialer = Arc::new(Noting { dialer, reached: Arc::clone(&self.reached) });
        Remote::connect(Arc::clone(&self.env), dialer, self.request(role, epoch), options).await
    }

    fn request(&self, role: Role, epoch: u64) -> SessionRequest {
        SessionRequest {
            volume: self.place.volume.clone(),
            job: self.place.job,
            role,
            epoch,
            size: Bytes(self.place.size),
            request_alignment: self.place.request_alignment,
            origin: self.origin.clone(),
            // Its guest goes through the layers here.
            layers: self.place.layers.clone().filter(|_| role == Role::Copy),
            stays: self.place.shared,
        }
    }

    fn noting<T>(&self, outcome: Result<T>) -> Result<T> {
        *self.problem.lock() = outcome.as_ref().err().map(Error::chain);
        outcome
    }

    fn leave_copy(&self) {
        let mut state = self.state.lock();
        if let State::Copying(remote) = &*state {
            add(&mut self.sent.lock(), &remote.statistics());
            *state = State::Down;
        }
    }

    /// The session over `remote` is lost.
    fn lose(&self, remote: &Arc<Remote>, error: &Error) {
        let mut state = self.state.lock();
        let epoch = match &*state {
            State::Forwarding(epoch, current) if Arc::ptr_eq(current, remote) => *epoch,
            _ => return,
        };
        add(&mut self.sent.lock(), &remote.statistics());
        *self.problem.lock() = Some(error.chain());
        *state = State::Waiting(epoch);
        drop(state);
        self.announce();
    }

    fn announce(&self) {
        self.changed.notify_waiters();
    }

    fn unreachable(&self) -> Error {
        let why = self.problem().map_or_else(String::new, |problem| format!(": {problem}"));
        Error::new(ErrorKind::Disconnected, format!("{} is not connected{why}", self.place.host))
    }
}

/// Notes that the other host was reached.
struct Noting {
    dialer: Arc<dyn Dialer>,
    reached: Arc<AtomicBool>,
}

impl Dialer for Noting {
    fn dial(&self, stream: u16) -> BoxFuture<'_, Result<BoxTransport>> {
        Box::pin(async move {
            let transport = self.dialer.dial(stream).await?;
            self.reached.store(true, Ordering::Relaxed);
            Ok(transport)
        })
    }

    fn pairs(&self) -> usize {
        self.dialer.pairs()
    }

    fn opened(&self, stream: u16, request: &SessionRequest) {
        self.dialer.opened(stream, request);
    }

    fn path(&self, stream: u16) -> Option<StreamPath> {
        self.dialer.path(stream)
    }
}

/// What one process of the other host's daemon holds of the copy.
struct Compared {
    remote_device: Arc<RemoteVolumeDevice>,
    instance: [u8; 16],
}

impl Digests for Compared {
    fn digests<'a>(&'a self, extents: &'a [Extent]) -> BoxFuture<'a, Result<Vec<[u8; 32]>>> {
        Box::pin(async move {
            let remote = self.remote_device.copying().filter(|remote| remote.session().instance == self.instance);
            let remote = remote.ok_or_else(|| self.remote_device.unreachable())?;
            let unknown = || Error::new(ErrorKind::Unsupported, "the other host does not say what it holds");
            remote.digests(extents).await?.ok_or_else(unknown)
        })
    }

    fn compared(&self) {
        *self.remote_device.trusted.lock() = Some(self.instance);
    }
}

/// Somebody decides who holds a volume that was given up.
pub(crate) struct Deciding {
    remote_device: Arc<RemoteVolumeDevice>,
    /// Nobody else tells the other host anything.
    turn: Option<tokio::sync::OwnedMutexGuard<()>>,
}

impl Drop for Deciding {
    fn drop(&mut self) {
        drop(self.turn.take());
        let mut state = self.remote_device.state.lock();
        if let State::Deciding(epoch) = *state {
            *state = State::Waiting(epoch);
        }
        drop(state);
        self.remote_device.announce();
    }
}

/// A device that is closed when whoever holds the volume lets it go.
pub(crate) struct RemoteDeviceGuard(pub(crate) Arc<RemoteVolumeDevice>);

impl Drop for RemoteDeviceGuard {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn done(answer: Answer) -> Result<()> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(Error::new(ErrorKind::Invalid, format!("the other host answered {other:?}"))),
    }
}

fn add(sum: &mut StreamStatistics, more: &StreamStatistics) {
    sum.bytes_raw += more.bytes_raw;
    sum.bytes_payload += more.bytes_payload;
    sum.bytes_zero += more.bytes_zero;
    sum.bytes_compressed += more.bytes_compressed;
    sum.bytes_again += more.bytes_again;
    sum.damaged += more.damaged;
    sum.sessions += more.sessions;
    sum.streams.resize(sum.streams.len().max(more.streams.len()), Default::default());
    for (sum, more) in sum.streams.iter_mut().zip(&more.streams) {
        sum.requests += more.requests;
        sum.bytes_sent += more.bytes_sent;
        sum.bytes_received += more.bytes_received;
        sum.deaths += more.deaths;
    }
}
