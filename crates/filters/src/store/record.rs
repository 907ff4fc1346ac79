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

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{BLOCK_BYTES, Buffer, Bytes, Device, Error, ErrorKind, Extent, Mutation, Result};
use parking_lot::Mutex;

use super::base::Base;
use super::entry::{BODY_BYTES, Body, Entry};
use super::layout::{Layout, Map, SECTOR_BYTES};
use super::map::StateMap;

/// A map is read and written in pieces of this many sectors.
const STEP_SECTORS: u64 = 2048;
/// The same in bytes.
pub(crate) const STEP_BYTES: u64 = STEP_SECTORS * SECTOR_BYTES as u64;
/// With so many sectors of the durable map behind, the store flushes by itself: 8 MiB of memory at most.
const BEHIND_MAX: usize = 16384;

/// What is true of the grains now, and how the durable map differs.
pub(crate) struct Live<E, X> {
    pub(crate) map: StateMap<E>,
    /// What the policy keeps beside the map, under the same lock.
    beside: X,
    /// The sectors in which the durable map differs, and what stands there.
    behind: BTreeMap<u64, Box<Body>>,
    /// What the flush under way is going to write there.
    coming: BTreeMap<u64, Box<Body>>,
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
    failure: Mutex<Option<String>>,
    /// With so many sectors of the durable map behind, it flushes by itself.
    behind_max: usize,
}

impl<E: Entry> Record<E> {
    /// The record that stands on `device`, over `base` and in the machine's boot `boot`. In the boot that wrote it the
    /// running map counts, after a reboot the durable one.
    pub(crate) async fn open(device: Device, layout: Layout, boot: [u8; 16], base: Arc<Base>) -> Result<Self> {
        let boot_record = layout.encode_boot(boot);
        let found = device.read(Layout::BOOT_AT, Buffer::unpooled(boot_record.len())).await?;
        let is_same_boot = found[..] == boot_record[..];
        let mut live =
            Live { map: StateMap::new(layout.grains()), beside: (), behind: BTreeMap::new(), coming: BTreeMap::new() };
        for first in (0..layout.sectors()).step_by(STEP_SECTORS as usize) {
            let count = STEP_SECTORS.min(layout.sectors() - first);
            let durable = read_sectors(&device, &layout, Map::Durable, first, count).await?;
            let running = read_sectors(&device, &layout, Map::Running, first, count).await?;
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
            behind_max: BEHIND_MAX,
        };
        if !record.device.geometry().read_only {
            if !is_same_boot {
                record.device.write(Mutation::data(Layout::BOOT_AT, boot_record.freeze())).await?;
            }
            // An earlier process may have written the durable map without living to see it durable.
            if let Err(error) = record.device.flush().await {
                record.fail(&error);
            }
        }
        Ok(record)
    }

    /// The same record with what `make` makes of its states beside them.
    pub(crate) fn beside<X>(self, make: impl FnOnce(&StateMap<E>) -> Result<X>) -> Result<Record<E, X>> {
        let Self { base, device, layout, live, announced, turn, begun, flushed, failure, behind_max } = self;
        let Live { map, beside: (), behind, coming } = live.into_inner();
        let beside = make(&map)?;
        let live = Mutex::new(Live { map, beside, behind, coming });
        Ok(Record { base, device, layout, live, announced, turn, begun, flushed, failure, behind_max })
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
        says_all && self.failure.lock().is_none()
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
            if self.live.lock().behind.len() > self.behind_max {
                // A failure is remembered, and told to whoever asks for durability.
                if self.flush().await.is_err() {
                    self.live.lock().behind.clear();
                }
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
        // A write of a device with large sectors takes the neighbours along.
        let unit = u64::from(self.device.geometry().request_alignment).div_ceil(SECTOR_BYTES as u64);
        let mut wanted = BTreeSet::new();
        for change in changes {
            wanted.extend(E::sectors_of(&change.run).map(|index| index / unit));
        }
        let all = self.layout.map_bytes().0 / SECTOR_BYTES as u64;
        let wanted: Vec<u64> =
            wanted.into_iter().flat_map(|group| group * unit..((group + 1) * unit).min(all)).collect();
        self.write_map(Map::Running, &wanted, |index| self.body_with(index, changes)).await
    }

    /// The states of a map sector with `changes`.
    fn body_with(&self, index: u64, changes: &[Arc<Change<E>>]) -> Body {
        let first = index * E::SECTOR_GRAINS;
        let mut body = self.live.lock().map.body(index);
        for change in changes.iter().filter(|change| E::sectors_of(&change.run).contains(&index)) {
            let start = change.run.start.max(first) - first;
            let end = change.run.end.min(first + E::SECTOR_GRAINS) - first;
            change.state.fill(&mut body, start..end);
        }
        body
    }

    /// Writes sectors of a map, neighbours together. Those behind the last one are zeroes.
    async fn write_map(&self, map: Map, indices: &[u64], body_of: impl Fn(u64) -> Body) -> Result<()> {
        for run in indices.chunk_by(|one, next| *next == one + 1) {
            for piece in run.chunks(STEP_SECTORS as usize) {
                let mut buffer = Buffer::unpooled(piece.len() * SECTOR_BYTES);
                for (index, sector) in piece.iter().zip(buffer.chunks_exact_mut(SECTOR_BYTES)) {
                    if *index < self.layout.sectors() {
                        self.layout.encode_sector(*index, &body_of(*index), sector);
                    }
                }
                let offset = self.layout.map_at(map) + Bytes(piece[0] * SECTOR_BYTES as u64);
                self.device.write(Mutation::data(offset, buffer.freeze())).await?;
            }
        }
        Ok(())
    }

    /// Makes durable all that was answered before this was called. Flushes that wait for another share the next one.
    pub(crate) async fn flush(&self) -> Result<()> {
        let seen = self.begun.load(Ordering::Acquire);
        let mut flushed = self.flushed.lock().await;
        self.check()?;
        if *flushed > seen {
            return Ok(());
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        if let Err(error) = self.flush_all().await {
            self.fail(&error);
            return Err(error);
        }
        *flushed = number;
        Ok(())
    }

    async fn flush_all(&self) -> Result<()> {
        // First what the map is to say, then the base: what is drained in between is not in it.
        let wanted = self.live.lock().begin_flush();
        if let Err(error) = self.base.flush().await {
            self.distrust_running_map().await;
            return Err(error);
        }
        self.device.flush().await?;
        if wanted.is_empty() {
            return Ok(());
        }
        let unit = u64::from(self.device.geometry().request_alignment).div_ceil(SECTOR_BYTES as u64);
        if unit == 1 {
            let indices: Vec<u64> = wanted.keys().copied().collect();
            self.write_map(Map::Durable, &indices, |index| *wanted[&index]).await?;
        } else {
            let all = self.layout.map_bytes().0 / SECTOR_BYTES as u64;
            let groups: BTreeSet<u64> = wanted.keys().map(|index| index / unit).collect();
            let indices: Vec<u64> =
                groups.into_iter().flat_map(|group| group * unit..((group + 1) * unit).min(all)).collect();
            self.write_map(Map::Durable, &indices, |index| match wanted.get(&index) {
                Some(body) => **body,
                // A neighbour stays as it is on the disk.
                None => self.live.lock().durable_body(index),
            })
            .await?;
        }
        self.device.flush().await?;
        self.live.lock().note_durable(wanted);
        Ok(())
    }

    /// Called after a failed flush of the base. What was drained into it may be lost, while the device and the durable
    /// map still have what was flushed of it. Whoever opens the store next, in this boot too, goes by the durable map.
    async fn distrust_running_map(&self) {
        if !self.live.lock().has_drained() {
            return;
        }
        if let Err(error) = self.strike_boot().await {
            tracing::error!(device = self.device.name(), error = error.chain(), "the boot record could not be struck");
        }
    }

    /// Fails once nothing durable is promised any more.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.failure.lock() {
            None => Ok(()),
            Some(cause) => {
                let context =
                    format!("{} promises nothing durable any more since a flush failed ({cause})", self.device.name());
                Err(Error::new(ErrorKind::Io, context))
            }
        }
    }

    /// Remembers that a flush has failed: what it covered may be lost, and a later one that succeeds proves nothing.
    pub(crate) fn fail(&self, error: &Error) {
        self.failure.lock().get_or_insert_with(|| error.chain());
        // Nobody writes the durable map any more.
        let mut live = self.live.lock();
        live.behind.clear();
        live.coming.clear();
    }
}

impl<E: Entry, X> Live<E, X> {
    fn load_durable(&mut self, layout: &Layout, name: &str, first: u64, durable: &[u8]) -> Result<()> {
        for (index, sector) in
            (first..).zip(durable.chunks_exact(SECTOR_BYTES)).take_while(|(index, _)| *index < layout.sectors())
        {
            if let Some(body) = layout.decode_sector(index, sector, name)? {
                self.take(index, &body, name)?;
            }
        }
        Ok(())
    }

    fn load_both(&mut self, layout: &Layout, name: &str, first: u64, durable: &[u8], running: &[u8]) -> Result<()> {
        self.load_durable(layout, name, first, durable)?;
        let sectors = durable.chunks_exact(SECTOR_BYTES).zip(running.chunks_exact(SECTOR_BYTES));
        for (index, (durable, running)) in (first..layout.sectors()).zip(sectors) {
            if durable == running {
                continue;
            }
            let before = self.map.body(index);
            let body = layout.decode_sector(index, running, name)?.unwrap_or([0; BODY_BYTES]);
            self.take(index, &body, name)?;
            if before != self.map.lasting_body(index) {
                self.behind.insert(index, Box::new(before));
            }
        }
        Ok(())
    }

    fn take(&mut self, index: u64, body: &Body, name: &str) -> Result<()> {
        if self.map.set_body(index, body) {
            return Ok(());
        }
        let context = format!("{name} is damaged: sector {index} of its map has states that do not exist");
        Err(Error::new(ErrorKind::Corrupt, context))
    }

    fn apply(&mut self, changes: &[Arc<Change<E>>]) {
        let Self { map, behind, .. } = self;
        for change in changes {
            let known = E::sectors_of(&change.run).filter(|index| !behind.contains_key(index));
            let before: Vec<(u64, Body)> = known.map(|index| (index, map.lasting_body(index))).collect();
            map.fill(change.run.clone(), change.state);
            for (index, body) in before {
                if body != map.lasting_body(index) {
                    behind.insert(index, Box::new(body));
                }
            }
        }
    }

    /// What the durable map should say, where it does not.
    fn begin_flush(&mut self) -> BTreeMap<u64, Box<Body>> {
        let map = &self.map;
        self.behind.retain(|index, durable| **durable != map.lasting_body(*index));
        self.coming = self.behind.keys().map(|index| (*index, Box::new(map.lasting_body(*index)))).collect();
        self.coming.clone()
    }

    /// Whether a grain is in the base now that the durable map says is not.
    fn has_drained(&self) -> bool {
        self.behind.iter().any(|(index, durable)| {
            let now = self.map.body(*index);
            let hides = |body: &Body, grain| E::of(body, grain).hides_base();
            (0..E::SECTOR_GRAINS).any(|grain| hides(durable, grain) && !hides(&now, grain))
        })
    }

    fn durable_body(&self, index: u64) -> Body {
        self.behind.get(&index).map_or_else(|| self.map.lasting_body(index), |body| **body)
    }

    fn note_durable(&mut self, written: BTreeMap<u64, Box<Body>>) {
        self.coming.clear();
        for (index, body) in written {
            if *body == self.map.lasting_body(index) {
                self.behind.remove(&index);
            } else {
                self.behind.insert(index, body);
            }
        }
    }
}

async fn read_sectors(device: &Device, layout: &Layout, map: Map, first: u64, count: u64) -> Result<Buffer> {
    let offset = layout.map_at(map) + Bytes(first * SECTOR_BYTES as u64);
    let length = Bytes(count * SECTOR_BYTES as u64).align_up(u64::from(device.geometry().request_alignment));
    device.read(offset, Buffer::unpooled(length.as_usize())).await
}
