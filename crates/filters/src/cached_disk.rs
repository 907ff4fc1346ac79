//! A disk with a write cache in memory, for tests. A power loss keeps of every sector any of what was written since the
//! last flush. A request takes some turns of the executor, and one that is dropped midway is carried out in part.

use block::testing::Random;
use block::{
    BlockDevice, Buffer, Bytes, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Geometry, IoFuture, Mutation,
    MutationKind, ready,
};
use parking_lot::Mutex;

pub(crate) const SECTOR: usize = 512;

/// What a sector held since some moment, oldest first, each with the number of its write.
type Versions = Vec<(u64, [u8; SECTOR])>;

pub(crate) struct CachedDisk {
    geometry: Geometry,
    state: Mutex<State>,
}

struct State {
    random: Random,
    sectors: Vec<Versions>,
    writes: u64,
    fails_flushes: bool,
}

impl CachedDisk {
    pub(crate) fn new(seed: u64, size: Bytes, unit: u32) -> Self {
        let sectors = vec![vec![(0, [0; SECTOR])]; size.as_usize().div_ceil(SECTOR)];
        let state = State { random: Random::new(seed), sectors, writes: 1, fails_flushes: false };
        let geometry = Geometry { request_alignment: unit, ..Geometry::of_size(size) };
        Self { geometry, state: Mutex::new(state) }
    }

    /// Keeps any version of every sector.
    pub(crate) fn lose_power(&self) {
        let State { random, sectors, .. } = &mut *self.state.lock();
        for versions in sectors {
            let kept = versions[random.below(versions.len() as u64) as usize];
            *versions = vec![kept];
        }
    }

    /// Keeps the oldest version of every sector: nothing that is not flushed.
    pub(crate) fn lose_cache(&self) {
        self.state.lock().sectors.iter_mut().for_each(|versions| versions.truncate(1));
    }

    pub(crate) fn fail_flushes(&self) {
        self.state.lock().fails_flushes = true;
    }

    async fn wait(&self) {
        let turns = self.state.lock().random.below(5);
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
    }

    /// Leaves in the sectors of `part` what `mutation` says.
    fn store(&self, mutation: &Mutation, part: Extent) {
        let mut state = self.state.lock();
        let number = state.writes;
        state.writes += 1;
        for piece in part.split_at_multiples(SECTOR as u64) {
            let garbage = (state.random.number() | 1 << 63).to_le_bytes();
            let versions = &mut state.sectors[piece.offset.as_usize() / SECTOR];
            let mut bytes = versions.last().expect("a sector holds something").1;
            let start = piece.offset.as_usize() % SECTOR;
            let place = &mut bytes[start..start + piece.length.as_usize()];
            match mutation.kind() {
                MutationKind::Data(data) => {
                    let from = (piece.offset - mutation.extent().offset).as_usize();
                    place.copy_from_slice(&data[from..from + piece.length.as_usize()]);
                }
                MutationKind::Zeroes { .. } => place.fill(0),
                // After a discard a disk may hold anything.
                MutationKind::Discard => {
                    place.iter_mut().zip(garbage.iter().cycle()).for_each(|(byte, garbage)| *byte = *garbage);
                }
            }
            versions.push((number, bytes));
        }
    }

    /// Forgets what sectors held before the last write with a number below `number`.
    fn settle(&self, sectors: std::ops::Range<usize>, number: u64) {
        for versions in &mut self.state.lock().sectors[sectors] {
            let last = versions.iter().rposition(|(write, _)| *write < number).unwrap_or(0);
            versions.drain(..last);
        }
    }
}

impl BlockDevice for CachedDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.wait().await;
            let state = self.state.lock();
            let extent = Extent::new(offset, buffer.len().into());
            for piece in extent.split_at_multiples(SECTOR as u64) {
                let bytes = &state.sectors[piece.offset.as_usize() / SECTOR].last().expect("it holds something").1;
                let (start, length) = (piece.offset.as_usize() % SECTOR, piece.length.as_usize());
                let at = (piece.offset - offset).as_usize();
                buffer[at..at + length].copy_from_slice(&bytes[start..start + length]);
            }
            drop(state);
            Ok(buffer)
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.wait().await;
            let extent = mutation.extent();
            let sectors = extent.length.0.div_ceil(SECTOR as u64);
            let first = Bytes(self.state.lock().random.below(sectors + 1) * SECTOR as u64);
            let middle = (extent.offset + first).align_down(SECTOR as u64).max(extent.offset).min(extent.end());
            self.store(&mutation, Extent::between(extent.offset, middle));
            self.wait().await;
            self.store(&mutation, Extent::between(middle, extent.end()));
            let written = self.state.lock().writes;
            self.wait().await;
            if mutation.fua {
                self.settle(extent.offset.as_usize() / SECTOR..extent.end().as_usize().div_ceil(SECTOR), written);
            }
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let (written, sectors) = {
                let state = self.state.lock();
                (state.writes, state.sectors.len())
            };
            // Long enough for others to do several things meanwhile.
            for _ in 0..12 {
                self.wait().await;
            }
            if self.state.lock().fails_flushes {
                return Err(Error::new(ErrorKind::Io, "the cache was lost"));
            }
            self.settle(0..sectors, written);
            Ok(())
        })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        ready(Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]))
    }
}
