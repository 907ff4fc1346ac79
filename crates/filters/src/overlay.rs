//! A snapshot: a filter that keeps every change of a volume in a delta of its own and leaves the base as it is.
//!
//! ```text
//!   read ──▶ map ── absent ──▶ base                write ──▶ delta, in the place that it has in the volume
//!             ├──── data ────▶ delta                 │       (the first write to a part of a grain takes the rest of
//!             └──── zero ────▶ zeroes                │        it along from the base)
//!                                                    └────▶ map: data, before the write is answered
//! ```
//!
//! The delta is any device, mostly a sparse file; a grain is where it is in the volume, so nothing is allocated and
//! nothing moves. Zeroes and discards hide the base and give the delta's space back. `docs/overlay.md` draws the bytes.
//! It says why a crash or a power loss at any moment leaves what a disk would have left. That is: each sector of the
//! volume is as some write since the last flush left it.
//!
//! An overlay is taken away while the guest writes by draining it into its base; `drain.rs` says how, and what is left at
//! each moment.
//!
//! Nothing is flushed that the guest did not ask for, except when the durable map is 16,384 sectors behind. Memory is
//! two bits a grain. With what depends on it, it takes at most 64 MiB, because the grain grows with the volume. While
//! flushes are outstanding it takes 8 MiB more.

mod drain;
mod format;
mod grain;
mod write;

use std::ops::Range;
use std::sync::Arc;

use block::{
    BlockDevice, Buffer, Bytes, ChunkIndex, Device, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Geometry,
    IoFuture, Mutation, MutationKind, RangeLock, Result,
};
use drain::Unlocked;
pub use format::OverlayHeader;
use grain::GrainState;

use crate::store::{Base, Layout, Placement, Record, STEP_BYTES, geometry_of_both};
use crate::translate::in_units;

/// An answer to the question for extents has so many pieces at most.
const PIECES_MAX: usize = 64;

/// So often a read begins anew because the map has changed meanwhile.
const READS_MAX: u32 = 3;

/// A volume that is a base and what was changed since.
pub struct Overlay {
    base: Arc<Base>,
    delta: Device,
    header: OverlayHeader,
    geometry: Geometry,
    record: Record<GrainState>,
    placement: Placement,
    /// Held by whoever changes states, over whole grains.
    grains: RangeLock,
    /// Writes that hold no lock: over data, until draining begins.
    unlocked: Unlocked,
}

/// What an overlay holds in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOrigin {
    /// Bytes that are read from the overlay.
    Data,
    /// Zeroes, which are written down nowhere.
    Zeroes,
}

impl Overlay {
    /// Makes an empty overlay of `delta`, whatever that held before. Done means durable.
    ///
    /// # Errors
    /// Invalid if the delta has not the size that [`OverlayHeader::delta_bytes`] says; otherwise what it says.
    pub async fn create(delta: &Device, header: &OverlayHeader) -> Result<()> {
        check_delta(delta, header)?;
        header.layout().create(delta, header.overhead_bytes(), header.encode()).await
    }

    /// What the overlay on `delta` is.
    ///
    /// # Errors
    /// Invalid if it is none, unsupported if it is of a later version, corrupt if it is damaged.
    pub async fn inspect(delta: &Device) -> Result<OverlayHeader> {
        if delta.size() < header_extent().length {
            return Err(Error::new(ErrorKind::Invalid, format!("{} is no overlay: it is too small", delta.name())));
        }
        let page = delta.read(Bytes::ZERO, Buffer::unpooled(header_extent().length.as_usize())).await?;
        let header = OverlayHeader::decode(&page, delta.name())?;
        check_delta(delta, &header)?;
        Ok(header)
    }

    /// Opens the overlay on `delta` over `base`, in the machine's boot `boot`. After a crash of the process within that
    /// boot it has all that was answered. After a power loss it has all that was flushed and, sector by sector, any
    /// part of the rest.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect), and invalid if it does not fit `base`.
    pub async fn open(base: Device, delta: Device, boot: [u8; 16]) -> Result<Self> {
        let header = Self::inspect(&delta).await?;
        check_base(&base, &header)?;
        let geometry = geometry_over(&base, &delta, &header)?;
        let base = Arc::new(Base::new(base));
        let record = Record::open(delta.clone(), header.layout(), boot, Arc::clone(&base)).await?;
        let placement = Placement::Identity { start: header.data_at() };
        let (grains, unlocked) = (RangeLock::new(), Unlocked::default());
        Ok(Self { base, delta, header, geometry, record, placement, grains, unlocked })
    }

    /// What it is.
    #[must_use]
    pub const fn header(&self) -> &OverlayHeader {
        &self.header
    }

    /// What it lies over now.
    #[must_use]
    pub fn base(&self) -> Device {
        self.base.device()
    }

    /// Lays it over another device, which holds the same bytes wherever the overlay holds none. Requests in flight end
    /// where they began.
    ///
    /// # Errors
    /// Invalid if the new base is of another size or takes less; busy once something was drained into the base that is
    /// there now.
    pub fn rebase(&self, device: Device) -> Result<()> {
        check_base(&device, &self.header)?;
        let (now, new) = (self.geometry, device.geometry());
        if new.request_alignment > now.request_alignment || new.transfer_bytes_max < now.transfer_bytes_max {
            let context = format!("{} does not take every request that {} takes", device.name(), self.base().name());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        self.base.replace(device)
    }

    /// How much of the volume has its bytes in the delta.
    #[must_use]
    pub fn data_bytes(&self) -> Bytes {
        self.bytes_in(GrainState::Data)
    }

    /// How much of the volume reads as zeroes because of the overlay.
    #[must_use]
    pub fn zero_bytes(&self) -> Bytes {
        self.bytes_in(GrainState::Zero)
    }

    /// The first run at or after `from` that hides the base, of at most `most` bytes or one grain.
    #[must_use]
    pub fn next_stored(&self, from: Bytes, most: Bytes) -> Option<(Extent, RunOrigin)> {
        let grain = self.header.grain;
        if from >= self.header.volume {
            return None;
        }
        self.record.look(|map| {
            let first = map.next_stored(grain.index_of(from).0)?;
            let limit = (first + (most.0 / grain.bytes()).max(1)).min(map.len());
            let (run, state) = map.run_at(first, limit);
            let held = if state == GrainState::Data { RunOrigin::Data } else { RunOrigin::Zeroes };
            Some((self.extent_of(&run), held))
        })
    }

    fn bytes_in(&self, state: GrainState) -> Bytes {
        let grains = self.record.look(|map| map.count(state));
        Bytes(grains * self.header.grain.bytes()).min(self.header.volume)
    }

    /// The bytes of the grains of `run`; the last grain of the volume may be short.
    fn extent_of(&self, run: &Range<u64>) -> Extent {
        let first = self.header.grain.extent_of(ChunkIndex(run.start), self.header.volume);
        let last = self.header.grain.extent_of(ChunkIndex(run.end - 1), self.header.volume);
        Extent::between(first.offset, last.end())
    }

    /// Where `offset` of the volume is in the delta.
    fn place_of(&self, offset: Bytes) -> Bytes {
        self.placement.place_of(offset)
    }

    /// The grains that `extent` covers wholly.
    fn whole_grains(&self, extent: Extent) -> Range<u64> {
        let unit = self.header.grain.bytes();
        let start = extent.offset.0.div_ceil(unit);
        let is_end = extent.end() == self.header.volume;
        let end = if is_end { self.header.grains() } else { extent.end().0 / unit };
        start..end.max(start)
    }

    /// `extent` in runs of one state.
    fn runs(&self, extent: Extent, most: usize) -> Vec<(Extent, GrainState)> {
        let grains = self.header.grain.indices_of(extent);
        let mut runs = Vec::new();
        let mut next = grains.start;
        self.record.look(|map| {
            while next < grains.end && runs.len() < most {
                let (run, state) = map.run_at(next, grains.end);
                let part = self.extent_of(&run).intersection(extent).expect("the run touches the extent");
                runs.push((part, state));
                next = run.end;
            }
        });
        runs
    }

    async fn read_run(&self, offset: Bytes, state: GrainState, mut buffer: Buffer) -> Result<Buffer> {
        match state {
            GrainState::Absent => self.base().read(offset, buffer).await,
            GrainState::Data => self.delta.read(self.place_of(offset), buffer).await,
            GrainState::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
        }
    }

    async fn read_runs(&self, extent: Extent, mut buffer: Buffer, runs: &[(Extent, GrainState)]) -> Result<Buffer> {
        if let [(_, state)] = *runs {
            return self.read_run(extent.offset, state, buffer).await;
        }
        for &(part, state) in runs {
            let bytes = self.read_run(part.offset, state, Buffer::unpooled(part.length.as_usize())).await?;
            let at = (part.offset - extent.offset).as_usize();
            buffer[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(buffer)
    }

    /// Reads what lies in the delta at least in part. While the delta is read its grains may become zeroes and be
    /// written again. What the map does not show yet must not be seen, or the next read would show what was there
    /// before. So the map is checked again, and after a few changes the grains are locked for the read.
    async fn read_data(&self, extent: Extent, mut buffer: Buffer) -> Result<Buffer> {
        for _ in 0..READS_MAX {
            let runs = self.runs(extent, usize::MAX);
            buffer = self.read_runs(extent, buffer, &runs).await?;
            if self.runs(extent, usize::MAX) == runs {
                return Ok(buffer);
            }
        }
        let _guard = self.grains.shared(self.extent_of(&self.header.grain.indices_of(extent))).await;
        self.read_runs(extent, buffer, &self.runs(extent, usize::MAX)).await
    }

    /// Makes durable all that was answered. After a flush of the base that may have lost what was drained, that is held again.
    async fn flush_all(&self) -> Result<()> {
        self.take_back().await?;
        let flushed = self.record.flush().await;
        if flushed.is_err() {
            self.take_back().await?;
        }
        flushed
    }

    async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        let mut pieces = Vec::new();
        for (part, state) in self.runs(extent, PIECES_MAX) {
            let state = match state {
                GrainState::Data => ExtentState::Data,
                GrainState::Zero => ExtentState::Hole,
                GrainState::Absent => {
                    let below = self.base().extents(part).await?;
                    pieces.extend(in_units(below, self.geometry.request_alignment.into(), self.header.volume));
                    match pieces.last() {
                        Some(last) if last.extent.end() >= part.end() => continue,
                        _ => break,
                    }
                }
            };
            pieces.push(ExtentStatus { extent: part, state });
        }
        Ok(pieces)
    }
}

impl BlockDevice for Overlay {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        Box::pin(async move {
            let run = self.header.grain.indices_of(extent);
            let (first, state) = self.record.look(|map| map.run_at(run.start, run.end));
            if first == run && state != GrainState::Data {
                return self.read_run(offset, state, buffer).await;
            }
            self.read_data(extent, buffer).await
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        match mutation.kind() {
            MutationKind::Data(_) => Box::pin(self.write_data(mutation)),
            MutationKind::Zeroes { .. } | MutationKind::Discard => Box::pin(self.clear(mutation)),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.flush_all())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.describe(extent))
    }
}

impl std::fmt::Debug for Overlay {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Overlay({} over {})", self.delta.name(), self.base.device().name())
    }
}

/// What the overlay takes: what both take.
fn geometry_over(base: &Device, delta: &Device, header: &OverlayHeader) -> Result<Geometry> {
    let geometry = geometry_of_both(header.volume, base, delta);
    // Maps go in pieces of 1 MiB, and parts of grains take the rest along.
    let least = header.grain.bytes().max(STEP_BYTES);
    if u64::from(geometry.transfer_bytes_max) < least {
        let context = format!("an overlay needs requests of {least} bytes; {} or its base takes none", delta.name());
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    Ok(geometry)
}

const fn header_extent() -> Extent {
    Extent::new(Bytes::ZERO, Layout::BOOT_AT)
}

fn check_delta(delta: &Device, header: &OverlayHeader) -> Result<()> {
    if delta.size() == header.delta_bytes() {
        return Ok(());
    }
    let (is, should) = (delta.size().0, header.delta_bytes().0);
    let context = format!("{} has {is} bytes; an overlay of {} bytes has {should}", delta.name(), header.volume.0);
    Err(Error::new(ErrorKind::Invalid, context))
}

fn check_base(base: &Device, header: &OverlayHeader) -> Result<()> {
    if base.size() == header.volume {
        return Ok(());
    }
    let (is, should) = (base.size().0, header.volume.0);
    let context = format!("the overlay is of a volume of {should} bytes, and {} has {is}", base.name());
    Err(Error::new(ErrorKind::Invalid, context))
}

#[cfg(test)]
mod tests;
