//! Which chunks the target has, for a process that comes after a crash of this one.
//!
//! Two bitmaps on a small device. *Had*: chunks that were in step and flushed at the target. *Active*: extents of 4 MiB
//! in which a mirrored write may be in flight, unflushed, or the source may have changed alone; the bit is there before
//! such a write is issued. After a crash a chunk counts as copied if it is had and its extent is not active.
//!
//! Nothing here is flushed: within one boot the page cache outlives the process. The boot's identity is on record, and
//! after a reboot everything is absent again. `docs/journal.md` draws the bytes.

use block::{Buffer, Bytes, ChunkSize, Device, Error, ErrorKind, Mutation, Result};

/// The first bytes of the map.
const MAGIC: [u8; 8] = *b"TRANSHUP";
/// The version of the layout.
const VERSION: u32 = 1;
/// The map is written in pages of this many bytes.
pub(crate) const PAGE_BYTES: usize = 4096;
/// How many bits a page has.
pub(crate) const PAGE_BITS: u64 = PAGE_BYTES as u64 * 8;
/// What one bit of the activity log stands for.
pub(crate) const ACTIVE_EXTENT: Bytes = Bytes::mib(4);

/// What a map belongs to. One of another job, boot or volume is begun anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapIdentity {
    /// This boot of the machine (`/proc/sys/kernel/random/boot_id`).
    pub boot: [u8; 16],
    /// The job.
    pub job: [u8; 16],
    /// The size of the volume.
    pub volume: Bytes,
    /// The unit of copying.
    pub chunk: ChunkSize,
}

/// The map on its device.
pub struct ProgressMap {
    device: Device,
    identity: MapIdentity,
    /// Whether an earlier session of the same job and boot has left it.
    known: bool,
    writer: tokio::sync::Mutex<Pages>,
}

/// What the device holds, as far as it is not zeroes.
pub(crate) struct Pages {
    had: Vec<Option<Box<[u8; PAGE_BYTES]>>>,
    active: Vec<Box<[u8; PAGE_BYTES]>>,
}

impl ProgressMap {
    /// How large the device must be. Whoever creates its file allocates all of it beforehand.
    #[must_use]
    pub fn bytes_needed(volume: Bytes, chunk: ChunkSize) -> Bytes {
        Bytes((1 + had_pages(volume, chunk) + active_pages(volume)) * PAGE_BYTES as u64)
    }

    /// Opens the map of `identity` on `device`: what is there if it is of the same job, boot and volume, otherwise an
    /// empty one.
    ///
    /// # Errors
    /// What the device says, or invalid if it is too small.
    pub async fn open(device: Device, identity: MapIdentity) -> Result<Self> {
        let needed = Self::bytes_needed(identity.volume, identity.chunk);
        if device.size() < needed {
            let context = format!("the progress map {} has {} instead of {needed}", device.name(), device.size());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let header = encode_header(&identity);
        let found = device.read(Bytes::ZERO, Buffer::unpooled(PAGE_BYTES)).await?;
        let known = found[..] == header[..];
        if !known {
            // The old header goes first and the new one comes last, so that no crash leaves it over another's bits.
            device.write(Mutation::zeroes(block::Extent::whole(needed), false)).await?;
            device.write(Mutation::data(Bytes::ZERO, header.freeze())).await?;
        }
        let mut pages = Pages {
            had: vec![None; had_pages(identity.volume, identity.chunk) as usize],
            active: vec![Box::new([0; PAGE_BYTES]); active_pages(identity.volume) as usize],
        };
        if known {
            pages.load(&device).await?;
        }
        Ok(Self { device, identity, known, writer: tokio::sync::Mutex::new(pages) })
    }

    /// What it belongs to.
    #[must_use]
    pub const fn identity(&self) -> &MapIdentity {
        &self.identity
    }

    /// Whether an earlier session of the same job and boot has left it.
    pub(crate) const fn is_known(&self) -> bool {
        self.known
    }

    /// The runs of chunks that a session before this one has copied, in order.
    pub(crate) async fn had_runs(&self) -> Vec<std::ops::Range<u64>> {
        let pages = self.writer.lock().await;
        let chunk = self.identity.chunk;
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for (number, page) in pages.had.iter().enumerate() {
            let Some(page) = page else { continue };
            let first = number as u64 * PAGE_BITS;
            let end = (first + PAGE_BITS).min(chunk.count(self.identity.volume));
            for index in first..end {
                let extent = chunk.extent_of(block::ChunkIndex(index), self.identity.volume);
                if !bit(&page[..], index - first) || active_of(extent).any(|number| pages.is_active(number)) {
                    continue;
                }
                match runs.last_mut() {
                    Some(last) if last.end == index => last.end += 1,
                    _ => runs.push(index..index + 1),
                }
            }
        }
        runs
    }

    /// Forgets all that earlier sessions did: the target has nothing of it.
    pub(crate) async fn forget(&self) -> Result<()> {
        let mut pages = self.writer.lock().await;
        let length = Bytes((pages.had.len() + pages.active.len()) as u64 * PAGE_BYTES as u64);
        self.device.write(Mutation::zeroes(block::Extent::new(Bytes::from(PAGE_BYTES), length), false)).await?;
        pages.had.fill(None);
        pages.active.iter_mut().for_each(|page| page.fill(0));
        Ok(())
    }

    /// Writes down that the extents with these numbers are active. Done means that a crash of the process keeps it.
    /// Whoever waits meanwhile is served by the same write.
    pub(crate) async fn activate(&self, numbers: &[u64]) -> Result<()> {
        let mut writer = self.lock().await;
        let fresh: Vec<u64> = numbers.iter().copied().filter(|number| !writer.pages.is_active(*number)).collect();
        writer.set_active(&fresh, true).await
    }

    /// The right to change the map, one at a time in the order of asking.
    pub(crate) async fn lock(&self) -> MapWriter<'_> {
        MapWriter { map: self, pages: self.writer.lock().await }
    }
}

/// The right to change the map.
pub(crate) struct MapWriter<'a> {
    map: &'a ProgressMap,
    pages: tokio::sync::MutexGuard<'a, Pages>,
}

impl MapWriter<'_> {
    /// Changes the page of the had bits that has bit `number` times [`PAGE_BITS`] first, by `change`.
    pub(crate) async fn update_had(
        &mut self,
        number: usize,
        change: impl FnOnce(&mut [u8; PAGE_BYTES]) + Send,
    ) -> Result<()> {
        let known = self.pages.had[number].as_deref();
        let mut page = Box::new(known.copied().unwrap_or([0; PAGE_BYTES]));
        change(&mut page);
        if known.is_some_and(|known| *known == *page) || (known.is_none() && page.iter().all(|byte| *byte == 0)) {
            return Ok(());
        }
        self.write(1 + number, &page[..]).await?;
        self.pages.had[number] = Some(page);
        Ok(())
    }

    /// Sets or clears the bits of extents, with one write a page.
    pub(crate) async fn set_active(&mut self, numbers: &[u64], active: bool) -> Result<()> {
        let mut changed: Vec<usize> = Vec::new();
        for number in numbers {
            let page = (number / PAGE_BITS) as usize;
            set_bit(&mut self.pages.active[page][..], number % PAGE_BITS, active);
            if !changed.contains(&page) {
                changed.push(page);
            }
        }
        for page in changed {
            let contents = self.pages.active[page].clone();
            if let Err(error) = self.write(1 + self.pages.had.len() + page, &contents[..]).await {
                // What the device holds is unknown now; believing in fewer bits costs one write more and no data.
                numbers.iter().for_each(|number| {
                    set_bit(&mut self.pages.active[(number / PAGE_BITS) as usize][..], number % PAGE_BITS, false);
                });
                return Err(error);
            }
        }
        Ok(())
    }

    async fn write(&self, page: usize, contents: &[u8]) -> Result<()> {
        let data = block::Data::copy_of(contents);
        let write = Mutation::data(Bytes::from(page * PAGE_BYTES), data);
        self.map.device.write(write).await.map_err(|error| error.wrap("writing the progress map"))
    }
}

impl Pages {
    async fn load(&mut self, device: &Device) -> Result<()> {
        const STEP_PAGES: usize = 256;
        let (had, total) = (self.had.len(), self.had.len() + self.active.len());
        for first in (0..total).step_by(STEP_PAGES) {
            let count = STEP_PAGES.min(total - first);
            let buffer = Buffer::unpooled(count * PAGE_BYTES);
            let bytes = device.read(Bytes::from((1 + first) * PAGE_BYTES), buffer).await?;
            for (page, contents) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
                if contents.iter().all(|byte| *byte == 0) {
                    continue;
                }
                let contents: Box<[u8; PAGE_BYTES]> = Box::new(contents.try_into().expect("a page"));
                match page.checked_sub(had) {
                    None => self.had[page] = Some(contents),
                    Some(page) => self.active[page] = contents,
                }
            }
        }
        Ok(())
    }

    fn is_active(&self, number: u64) -> bool {
        bit(&self.active[(number / PAGE_BITS) as usize][..], number % PAGE_BITS)
    }
}

/// The numbers of the activity log's extents that `extent` touches.
pub(crate) fn active_of(extent: block::Extent) -> std::ops::RangeInclusive<u64> {
    extent.offset.0 / ACTIVE_EXTENT.0..=(extent.end().0.max(1) - 1) / ACTIVE_EXTENT.0
}

pub(crate) fn bit(bytes: &[u8], number: u64) -> bool {
    bytes[(number / 8) as usize] & (1 << (number % 8)) != 0
}

pub(crate) fn set_bit(bytes: &mut [u8], number: u64, value: bool) {
    let mask = 1 << (number % 8);
    let byte = &mut bytes[(number / 8) as usize];
    *byte = if value { *byte | mask } else { *byte & !mask };
}

fn had_pages(volume: Bytes, chunk: ChunkSize) -> u64 {
    chunk.count(volume).div_ceil(PAGE_BITS).max(1)
}

fn active_pages(volume: Bytes) -> u64 {
    volume.0.div_ceil(ACTIVE_EXTENT.0).div_ceil(PAGE_BITS).max(1)
}

fn encode_header(identity: &MapIdentity) -> Buffer {
    let mut header = Buffer::unpooled(PAGE_BYTES);
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(identity.chunk.bytes() as u32).to_le_bytes());
    header[16..24].copy_from_slice(&identity.volume.0.to_le_bytes());
    header[24..40].copy_from_slice(&identity.boot);
    header[40..56].copy_from_slice(&identity.job);
    let crc = crc32fast::hash(&header[..56]);
    header[56..60].copy_from_slice(&crc.to_le_bytes());
    header
}

impl std::fmt::Debug for ProgressMap {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "ProgressMap({})", self.device.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::MemDevice;

    fn identity() -> MapIdentity {
        MapIdentity { boot: [1; 16], job: [2; 16], volume: Bytes::mib(40), chunk: ChunkSize::default() }
    }

    fn device() -> Device {
        Device::new("map", MemDevice::new(ProgressMap::bytes_needed(identity().volume, identity().chunk)))
    }

    async fn had(device: &Device, identity: MapIdentity) -> Vec<(u64, u64)> {
        let runs = ProgressMap::open(device.clone(), identity).await.expect("opens").had_runs().await;
        runs.into_iter().map(|run| (run.start, run.end)).collect()
    }

    async fn with_had(device: &Device, chunks: std::ops::Range<u64>) -> ProgressMap {
        let map = ProgressMap::open(device.clone(), identity()).await.expect("opens");
        let change = |page: &mut [u8; PAGE_BYTES]| chunks.for_each(|chunk| set_bit(&mut page[..], chunk, true));
        map.lock().await.update_had(0, change).await.expect("memory takes it");
        map
    }

    #[tokio::test]
    async fn chunks_that_are_had_survive_the_process_and_not_the_boot() {
        let device = device();
        let _ = with_had(&device, 3..200).await;
        assert_eq!(had(&device, identity()).await, [(3, 200)]);
        let after_reboot = MapIdentity { boot: [9; 16], ..identity() };
        assert_eq!(had(&device, after_reboot).await, []);
        assert_eq!(had(&device, identity()).await, [], "what another boot had cleared came back");
    }

    #[tokio::test]
    async fn chunks_of_active_extents_do_not_count() {
        let device = device();
        let map = with_had(&device, 0..640).await;
        map.activate(&[1, 3]).await.expect("memory takes it");
        assert_eq!(had(&device, identity()).await, [(0, 64), (128, 192), (256, 640)]);
        map.lock().await.set_active(&[3], false).await.expect("memory takes it");
        assert_eq!(had(&device, identity()).await, [(0, 64), (128, 640)]);
        map.forget().await.expect("memory takes it");
        assert_eq!(had(&device, identity()).await, []);
    }

    #[tokio::test]
    async fn a_map_of_another_job_or_volume_is_begun_anew() {
        let device = device();
        let _ = with_had(&device, 0..10).await;
        assert_eq!(had(&device, MapIdentity { job: [7; 16], ..identity() }).await, []);
    }
}
