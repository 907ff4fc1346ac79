//! How changes of the map get to the device: the running map before a write is answered, the durable one at flushes.
//!
//! ```text
//!   the data is written ──▶ announced ──▶ running map written ──▶ applied, seen by reads ──▶ the write is answered
//!                                                                     │
//!   a flush begins: what is applied now ──▶ data flushed ──▶ durable map written ──▶ flushed ──▶ the flush is answered
//! ```
//!
//! The durable map never names data that no flush has covered, in whatever order the disk carries its cache out. The
//! running map is trusted only in the boot that wrote it. There the caches are still those that were written to.
//!
//! | what a flush meets | what becomes of it |
//! |---|---|
//! | a base that cannot be reached | nothing has changed: the next flush tries again |
//! | a base that may have lost something | grains that have left the store since the last flush are *pinned*; no flush of the guest's succeeds any more |
//! | a store that may have lost something | the durable map stays as it is; the store takes nothing more |
//!
//! A pinned grain is recorded as the durable map has it: the store has its bytes still, and the base may have lost them. The policy takes it
//! back ([`Record::restore`]) as soon as nobody is at it. Until then no change of it is taken in the base ([`Record::change_below`]). What a
//! guest changes in the base of a grain that has left since the last flush, the policy changes in the store as well ([`Record::left`]): so
//! the store never has less than the base, whatever unit the guest writes.

mod live;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use block::{BLOCK_BYTES, Buffer, Bytes, Device, Error, ErrorKind, Extent, Mutation, Result};
use futures::future::join_all;
use futures::{StreamExt as _, TryFutureExt as _, TryStreamExt as _};
use parking_lot::Mutex;

use super::base::Base;
use super::entry::{BODY_BYTES, Body, Entry};
use super::layout::{Layout, Map, SECTOR_BYTES};
use super::map::StateMap;
use live::{Live, SECTORS_AT_ONCE};

/// A map is read and written in pieces of this many sectors.
const STEP_SECTORS: u64 = 2048;
/// The same in bytes.
pub(crate) const STEP_BYTES: u64 = STEP_SECTORS * SECTOR_BYTES as u64;
/// So many sectors between two of a map are written with them: on flash 16 KiB more take a tenth of what one more write takes.
const GAP_SECTORS_MAX: u64 = 32;
/// So many pieces of each map are read at a time.
const READS_MAX: usize = 4;
/// So many pieces of a map are written at a time.
const WRITES_MAX: usize = 64;
/// With so many sectors of the durable map behind, the store flushes by itself: 8 MiB of memory at most.
const BEHIND_MAX: usize = 16384;

/// Why nothing durable is promised any more.
struct Loss {
    cause: String,
    /// Whether it is the store that may have lost something, and not the base alone.
    is_store: bool,
}

/// Why a flush has failed.
pub(crate) struct FlushError {
    pub(crate) error: Error,
    /// Whether the base has failed it, and not the store.
    pub(crate) is_base: bool,
}

/// Why a change was not taken in the base.
pub(crate) enum BelowError {
    /// Some of it is pinned: it is to be taken back first, and then the change is tried again.
    Pinned,
    /// What the base says, or the store.
    Failed(Error),
}

impl From<Error> for BelowError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A change of the map whose data is written.
struct Change<E> {
    run: Range<u64>,
    state: E,
    /// How it went, once somebody has written it.
    outcome: Mutex<Option<Result<(), (ErrorKind, String)>>>,
}

/// The map of a store in memory and on the device, and beside it what the policy looks up together with it.
pub(crate) struct Record<E, X = ()> {
    /// What is below: flushed before the durable map leaves anything to it.
    base: Arc<Base>,
    device: Device,
    layout: Layout,
    live: Mutex<Live<E, X>>,
    announced: Mutex<Vec<Arc<Change<E>>>>,
    /// Who writes the running map, one at a time; whoever waits is served by the same write.
    turn: tokio::sync::Mutex<()>,
    /// How many flushes have begun.
    begun: AtomicU64,
    /// The number of the last flush that succeeded.
    flushed: tokio::sync::Mutex<u64>,
    /// Why nothing durable is promised any more.
    failure: Mutex<Option<Loss>>,
    /// Whether there is a reason.
    has_lost: AtomicBool,
    /// With so many sectors of the durable map behind, it flushes by itself.
    behind_max: usize,
    /// The same, after such a flush has failed: more than were behind then.
    behind_next: AtomicUsize,
    /// Whether something is pinned.
    has_pins: AtomicBool,
}

impl<E: Entry> Record<E> {
    /// The record that stands on `device`, over `base` and in the machine's boot `boot`. In the boot that wrote it the
    /// running map counts, after a reboot the durable one.
    pub(crate) async fn open(device: Device, layout: Layout, boot: [u8; 16], base: Arc<Base>) -> Result<Self> {
        let is_same_boot = layout.is_of_boot(&device, boot).await?;
        let mut live = Live {
            map: StateMap::new(layout.grains()),
            beside: (),
            behind: BTreeMap::new(),
            coming: BTreeMap::new(),
            last_held: BTreeMap::new(),
            pinned: BTreeMap::new(),
        };
        let reads = (0..layout.sectors()).step_by(STEP_SECTORS as usize).map(|first| {
            let count = STEP_SECTORS.min(layout.sectors() - first);
            let read = |map| read_sectors(&device, &layout, map, first, count);
            let both = futures::future::try_join(read(Map::Durable), read(Map::Running));
            both.map_ok(move |(durable, running)| (first, durable, running))
        });
        // What comes next is read meanwhile.
        let mut reads = futures::stream::iter(reads).buffered(READS_MAX);
        while let Some((first, durable, running)) = reads.try_next().await? {
            if is_same_boot {
                live.load_both(&layout, device.name(), first, &durable, &running)?;
            } else {
                live.load_durable(&layout, device.name(), first, &durable)?;
                if durable[..] != running[..] && !device.geometry().read_only {
                    let offset = layout.map_at(Map::Running) + Bytes(first * SECTOR_BYTES as u64);
                    device.write(Mutation::data(offset, durable.freeze())).await?;
                }
            }
        }
        drop(reads);
        let record = Self {
            base,
            device,
            layout,
            live: Mutex::new(live),
            announced: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            begun: AtomicU64::new(0),
            flushed: tokio::sync::Mutex::default(),
            failure: Mutex::default(),
            has_lost: AtomicBool::new(false),
            behind_max: BEHIND_MAX,
            behind_next: AtomicUsize::new(0),
            has_pins: AtomicBool::new(false),
        };
        if !record.device.geometry().read_only {
            if !is_same_boot {
                record.device.write(Mutation::data(Layout::BOOT_AT, layout.encode_boot(boot).freeze())).await?;
            }
            // An earlier process may have written the durable map without living to see it durable.
            record.device.flush().await?;
        }
        Ok(record)
    }

    /// The same record with `beside` beside its states.
    pub(crate) fn beside<X>(self, beside: X) -> Record<E, X> {
        let Self {
            base,
            device,
            layout,
            live,
            announced,
            turn,
            begun,
            flushed,
            failure,
            has_lost,
            behind_max,
            behind_next,
            has_pins,
        } = self;
        let Live { map, beside: (), behind, coming, last_held, pinned } = live.into_inner();
        let live = Mutex::new(Live { map, beside, behind, coming, last_held, pinned });
        Record {
            base,
            device,
            layout,
            live,
            announced,
            turn,
            begun,
            flushed,
            failure,
            has_lost,
            behind_max,
            behind_next,
            has_pins,
        }
    }
}

impl<E: Entry, X> Record<E, X> {
    /// Looks at the states.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&StateMap<E>) -> T) -> T {
        look(&self.live.lock().map)
    }

    /// Looks at the states and at what is kept beside them.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&StateMap<E>, &mut X) -> T) -> T {
        let live = &mut *self.live.lock();
        look(&live.map, &mut live.beside)
    }

    /// The grains that the durable map says the store has, and the running one does not.
    pub(crate) fn only_durable(&self) -> Vec<u64> {
        self.live.lock().only_durable()
    }

    /// What the durable map says of a grain.
    pub(crate) fn durable_state(&self, grain: u64) -> E {
        let body = self.live.lock().durable_body(grain / E::SECTOR_GRAINS);
        E::of(&body, grain % E::SECTOR_GRAINS)
    }

    /// The same record that flushes by itself when a share of its map is behind: its memory stays in proportion.
    pub(crate) fn with_behind_share(mut self, share: u64) -> Self {
        self.behind_max = ((self.layout.sectors() / share) as usize).clamp(64, BEHIND_MAX);
        self
    }

    /// How much memory the map takes, in bytes, with what it remembers of the durable one.
    pub(crate) fn memory_bytes(&self) -> usize {
        let live = self.live.lock();
        live.map.memory_bytes() + (live.behind.len() + live.coming.len()) * (BODY_BYTES + 4 * size_of::<usize>())
    }

    /// Strikes the boot record: whoever opens the store next, in this boot too, goes by the durable map.
    pub(crate) async fn strike_boot(&self) -> Result<()> {
        let boot = Extent::new(Layout::BOOT_AT, Bytes(BLOCK_BYTES));
        self.device.write(Mutation::zeroes(boot, false)).await
    }

    /// Whether the durable map says of every grain of `run` what is true now, and still says it after the flush under
    /// way.
    pub(crate) fn is_durable(&self, run: &Range<u64>) -> bool {
        let live = self.live.lock();
        let says_all = E::sectors_of(run).all(|index| {
            let first = index * E::SECTOR_GRAINS;
            let says_so = |body: &Body| {
                let mut part = run.start.max(first)..run.end.min(first + E::SECTOR_GRAINS);
                part.all(|grain| live.map.get(grain).lasting() == E::of(body, grain - first))
            };
            [&live.behind, &live.coming].into_iter().filter_map(|bodies| bodies.get(&index)).all(|body| says_so(body))
        });
        // A failure empties both, after it was noted.
        says_all && self.is_well()
    }

    /// Sets the grains of `run` to `state`. Done means that a crash of the process keeps it. Their data, if they have
    /// any, is written.
    pub(crate) async fn set(&self, run: Range<u64>, state: E) -> Result<()> {
        let step = STEP_SECTORS * E::SECTOR_GRAINS;
        let mut next = run.start;
        while next < run.end {
            let end = (next / step * step + step).min(run.end);
            self.set_some(next..end, state).await?;
            next = end;
            let behind = self.live.lock().behind.len();
            if behind > self.behind_max.max(self.behind_next.load(Ordering::Relaxed)) {
                // A failure is told to whoever asks for durability. Far more may be behind before this is tried again.
                let flushed = self.settle().await;
                if self.has_failed_store() {
                    // Nobody writes the durable map any more.
                    self.live.lock().behind.clear();
                }
                self.behind_next.store(if flushed.is_ok() { 0 } else { 2 * behind }, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    async fn set_some(&self, run: Range<u64>, state: E) -> Result<()> {
        let change = Arc::new(Change { run, state, outcome: Mutex::new(None) });
        self.announced.lock().push(Arc::clone(&change));
        let _turn = self.turn.lock().await;
        if change.outcome.lock().is_none() {
            let changes = self.announced.lock().clone();
            let outcome = self.write_running(&changes).await;
            if outcome.is_ok() {
                self.live.lock().apply(&changes);
            }
            let outcome = outcome.map_err(|error| (error.kind(), error.chain()));
            changes.iter().for_each(|change| *change.outcome.lock() = Some(outcome.clone()));
            self.announced.lock().retain(|change| change.outcome.lock().is_none());
        }
        let outcome = change.outcome.lock().clone().expect("set above or by whoever had the turn");
        outcome.map_err(|(kind, context)| Error::new(kind, format!("writing the map of what is stored: {context}")))
    }

    /// Writes the sectors of the running map that `changes` alter, as they will be.
    async fn write_running(&self, changes: &[Arc<Change<E>>]) -> Result<()> {
        let altered = changes.iter().flat_map(|change| E::sectors_of(&change.run)).collect();
        self.write_map(Map::Running, &self.with_neighbours(altered), |index| self.body_with(index, changes)).await
    }

    /// A write of a device with large sectors takes the neighbours along. What is between two sectors goes along, too, if that is less
    /// work than one more write.
    fn with_neighbours(&self, sectors: BTreeSet<u64>) -> Vec<u64> {
        let unit = u64::from(self.device.geometry().request_alignment).div_ceil(SECTOR_BYTES as u64);
        let all = self.layout.map_bytes().0 / SECTOR_BYTES as u64;
        let (mut taken, mut end) = (Vec::with_capacity(sectors.len()), 0);
        for index in sectors {
            let first = index / unit * unit;
            let is_near = end > 0 && first <= end + GAP_SECTORS_MAX;
            let from = if is_near { end } else { first };
            end = end.max((first + unit).min(all));
            taken.extend(from..end);
        }
        taken
    }

    /// The states of a map sector with `changes`, as they are recorded.
    fn body_with(&self, index: u64, changes: &[Arc<Change<E>>]) -> Body {
        let first = index * E::SECTOR_GRAINS;
        let live = self.live.lock();
        let mut body = live.map.body(index);
        for change in changes.iter().filter(|change| E::sectors_of(&change.run).contains(&index)) {
            let start = change.run.start.max(first) - first;
            let end = change.run.end.min(first + E::SECTOR_GRAINS) - first;
            change.state.fill(&mut body, start..end);
        }
        if let Some(pinned) = live.pinned.get(&index) {
            for grain in 0..E::SECTOR_GRAINS {
                if let Some(kept) = E::of(pinned, grain).taken_back(E::of(&body, grain))
                    && !E::LEAVES_CHANGED
                {
                    kept.fill(&mut body, grain..grain + 1);
                }
            }
        }
        body
    }

    /// Writes sectors of a map, neighbours together, in no order. Those behind the last one are zeroes.
    async fn write_map(&self, map: Map, indices: &[u64], body_of: impl Fn(u64) -> Body) -> Result<()> {
        let runs = indices.chunk_by(|one, next| *next == one + 1);
        let pieces: Vec<&[u64]> = runs.flat_map(|run| run.chunks(STEP_SECTORS as usize)).collect();
        for together in pieces.chunks(WRITES_MAX) {
            // All of them end, so that none is under way when somebody tries again.
            let writes = together.iter().map(|piece| {
                let mut buffer = Buffer::unpooled(piece.len() * SECTOR_BYTES);
                for (index, sector) in piece.iter().zip(buffer.chunks_exact_mut(SECTOR_BYTES)) {
                    if *index < self.layout.sectors() {
                        self.layout.encode_sector(*index, &body_of(*index), sector);
                    }
                }
                let offset = self.layout.map_at(map) + Bytes(piece[0] * SECTOR_BYTES as u64);
                self.device.write(Mutation::data(offset, buffer.freeze()))
            });
            join_all(writes).await.into_iter().collect::<Result<()>>()?;
        }
        Ok(())
    }

    /// Makes durable all that was answered before this was called, or says that this cannot be promised any more. Flushes that wait for
    /// another share the next one.
    pub(crate) async fn flush(&self) -> Result<()> {
        self.check()?;
        self.settle().await.map_err(|failed| failed.error)
    }

    /// The same without a promise: what was lost before stays lost. Afterwards the durable map says what was true when this was called.
    pub(crate) async fn settle(&self) -> Result<(), FlushError> {
        let seen = self.begun.load(Ordering::Acquire);
        let mut flushed = self.flushed.lock().await;
        let of_store = |error| FlushError { error, is_base: false };
        self.check_store().map_err(of_store)?;
        if *flushed > seen {
            return Ok(());
        }
        if self.first_pinned().is_some() {
            let context = format!("{} is taking back what its base may have lost", self.device.name());
            return Err(of_store(Error::new(ErrorKind::Busy, context)));
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        // First what the map is to say, then the base: what is drained in between is not in it.
        let (mut wanted, mut from) = (BTreeMap::new(), Some(0));
        self.live.lock().coming.clear();
        while let Some(next) = from {
            from = self.live.lock().begin_flush(next, &mut wanted);
        }
        if let Err(error) = self.base.flush().await {
            self.live.lock().coming.clear();
            if may_have_lost(&error) {
                self.fail(&error);
                self.pin().await;
            }
            return Err(FlushError { error, is_base: true });
        }
        if let Err(error) = self.device.flush().await {
            self.live.lock().coming.clear();
            if may_have_lost(&error) {
                self.fail_store(&error);
            }
            return Err(of_store(error));
        }
        if let Err(error) = self.write_durable(wanted).await {
            // Nobody knows what the durable map says.
            self.fail_store(&error);
            return Err(of_store(error));
        }
        *flushed = number;
        Ok(())
    }

    async fn write_durable(&self, wanted: BTreeMap<u64, Box<Body>>) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let indices = self.with_neighbours(wanted.keys().copied().collect());
        self.write_map(Map::Durable, &indices, |index| match wanted.get(&index) {
            Some(body) => **body,
            // A neighbour stays as it is on the disk.
            None => self.live.lock().durable_body(index),
        })
        .await?;
        self.device.flush().await?;
        let mut written = wanted.into_iter();
        while written.len() > 0 {
            self.live.lock().note_durable(written.by_ref().take(SECTORS_AT_ONCE));
        }
        self.live.lock().forget_held();
        Ok(())
    }

    /// A flush of the base that the policy has asked for by itself has failed with `error`.
    pub(crate) async fn note_base_failure(&self, error: &Error) {
        if may_have_lost(error) {
            let _no_other = self.flushed.lock().await;
            self.fail(error);
            self.pin().await;
        }
    }

    /// What has left the store since the last flush may be lost in the base. The store and the durable map still have what was flushed of
    /// it, and so has the running map from here on.
    async fn pin(&self) {
        let _turn = self.turn.lock().await;
        let sectors = {
            let mut live = self.live.lock();
            let sectors = live.pin();
            self.has_pins.store(!live.pinned.is_empty(), Ordering::Release);
            sectors
        };
        let written =
            self.write_map(Map::Running, &self.with_neighbours(sectors), |index| self.body_with(index, &[])).await;
        if let Err(error) = written {
            let (device, error) = (self.device.name(), error.chain());
            tracing::error!(device, error, "what the base may have lost is not on record as what the store has");
        }
    }

    /// Whether something is pinned.
    pub(crate) fn has_pins(&self) -> bool {
        self.has_pins.load(Ordering::Acquire)
    }

    /// The first grain that is pinned, and what becomes of it when it is taken back.
    pub(crate) fn first_pinned(&self) -> Option<(u64, E)> {
        let mut live = self.live.lock();
        let found = live.first_pinned();
        if found.is_none() {
            live.pinned.clear();
            self.has_pins.store(false, Ordering::Release);
        }
        found
    }

    /// The first grains that are pinned, one behind the other, with what becomes of all of them when they are taken back.
    pub(crate) fn first_pinned_run(&self) -> Option<(Range<u64>, E)> {
        self.first_pinned()?;
        self.live.lock().first_pinned_run()
    }

    /// What becomes of a grain when it is taken back, if it is pinned.
    pub(crate) fn pinned_state(&self, grain: u64) -> Option<E> {
        self.live.lock().pinned_state(grain)
    }

    /// The grains of `run` that have left the store since the last flush, and what the durable map says of them. What the guest changes of
    /// them in the base is to be changed in the store, too, and there first.
    pub(crate) fn left(&self, run: Range<u64>) -> Vec<(u64, E)> {
        self.live.lock().left(run)
    }

    /// The guest is about to change `run` in the base, of which the caller has all.
    ///
    /// # Errors
    /// Pinned if a flush of the base has failed, and some of it is not taken back yet.
    pub(crate) fn change_below(&self, run: Range<u64>) -> Result<(), BelowError> {
        let live = self.live.lock();
        let is_pinned = |grain| live.pinned_state(grain).is_some();
        if run.into_iter().any(is_pinned) { Err(BelowError::Pinned) } else { Ok(()) }
    }

    /// Takes pinned grains back: `state`, which is recorded, is true of them. The caller has them alone.
    pub(crate) async fn restore(&self, run: Range<u64>, state: E) -> Result<()> {
        self.set(run.clone(), state).await?;
        run.for_each(|grain| self.unpin(grain));
        Ok(())
    }

    /// `grain` is pinned no more. What is true of it is to be recorded, if that is anything else.
    pub(crate) fn unpin(&self, grain: u64) {
        self.live.lock().unpin(grain);
    }

    /// Whether what is durable is still promised.
    pub(crate) fn is_well(&self) -> bool {
        !self.has_lost.load(Ordering::Acquire)
    }

    /// Fails once nothing durable is promised any more.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.failure.lock() {
            None => Ok(()),
            Some(loss) => Err(self.of_loss(loss)),
        }
    }

    /// Fails once the store may have lost something: its durable map stays as it is.
    fn check_store(&self) -> Result<()> {
        match &*self.failure.lock() {
            Some(loss) if loss.is_store => Err(self.of_loss(loss)),
            _ => Ok(()),
        }
    }

    /// Whether the store may have lost something: its durable map stays as it is.
    pub(crate) fn has_failed_store(&self) -> bool {
        self.failure.lock().as_ref().is_some_and(|loss| loss.is_store)
    }

    fn of_loss(&self, loss: &Loss) -> Error {
        let (what, cause) = (if loss.is_store { "it" } else { "its base" }, &loss.cause);
        let name = self.device.name();
        Error::new(
            ErrorKind::Io,
            format!("{name} promises nothing durable any more since a flush of {what} failed ({cause})"),
        )
    }

    /// Remembers that the base may have lost what a flush was to make durable: a later one that succeeds proves nothing.
    fn fail(&self, error: &Error) {
        self.failure.lock().get_or_insert_with(|| Loss { cause: error.chain(), is_store: false });
        self.has_lost.store(true, Ordering::Release);
    }

    /// The same of the store.
    fn fail_store(&self, error: &Error) {
        *self.failure.lock() = Some(Loss { cause: error.chain(), is_store: true });
        self.has_lost.store(true, Ordering::Release);
        // Nobody writes the durable map any more.
        let mut live = self.live.lock();
        live.behind.clear();
        live.coming.clear();
    }
}

/// Whether a flush that has failed so may have lost what it was to make durable. Otherwise it has not reached the medium: what was
/// answered is where it was, and the next flush covers it.
pub(crate) fn may_have_lost(error: &Error) -> bool {
    use ErrorKind::{Busy, Invalid, PermissionDenied, TimedOut, Unsupported};
    !matches!(error.kind(), TimedOut | PermissionDenied | Unsupported | Invalid | Busy)
}

async fn read_sectors(device: &Device, layout: &Layout, map: Map, first: u64, count: u64) -> Result<Buffer> {
    let offset = layout.map_at(map) + Bytes(first * SECTOR_BYTES as u64);
    let length = Bytes(count * SECTOR_BYTES as u64).align_up(u64::from(device.geometry().request_alignment));
    device.read(offset, Buffer::unpooled(length.as_usize())).await
}
