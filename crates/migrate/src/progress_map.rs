//! Which chunks the target has, for a process that comes after a crash of this one.
//!
//! Bitmaps on a small device. *Had*: chunks that were in step and flushed at the target. *Active*: extents of 4 MiB in
//! which a mirrored write may be in flight or unflushed, or in which the source alone may have changed. The bit is set
//! before such a write is issued. After a crash a chunk counts as copied if its bit is set and its extent is not
//! active.
//!
//! *Skipped*, where that is kept: of chunks that are copied, those that were not sent, in a bitmap for each reason. Of other chunks
//! it says nothing. It is written before the copied bits of the same chunks. A chunk that is not skipped any more keeps
//! its extent active until this says so.
//!
//! Nothing here is flushed: within one boot the page cache outlives the process. The boot's identity is on record, and
//! after a reboot everything is absent again. `docs/journal.md` draws the bytes.

use std::ops::Range;
use std::sync::Arc;

use block::{Buffer, Bytes, ChunkSize, Device, Error, ErrorKind, Mutation, Result};

use parking_lot::Mutex;

use crate::digests::Digests;
use crate::reduce::skip::SkipReason;

/// The first bytes of the map.
const MAGIC: [u8; 8] = *b"TRANSHUP";
/// The version of the layout.
const VERSION: u32 = 1;
/// The map is written in pages of this many bytes.
pub(crate) const PAGE_BYTES: usize = 4096;
/// How many bits a page has at most.
const PAGE_BITS: u64 = PAGE_BYTES as u64 * 8;
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
    /// How many chunks a page of the copied bits stands for: [`ProgressMap::PAGE_CHUNKS`], or fewer in tests, so that small
    /// volumes have many pages.
    pub page_chunks: u64,
    /// Whether it says why chunks were not sent, too.
    pub skips: bool,
}

/// The map on its device.
pub struct ProgressMap {
    device: Device,
    identity: MapIdentity,
    /// Whether an earlier session of the same job and boot has left it.
    known: bool,
    /// What compares what an earlier session has copied, before that counts.
    unverified: Mutex<Option<Arc<dyn Digests>>>,
    writer: tokio::sync::Mutex<Pages>,
}

/// What the device holds, as far as it is not zeroes.
pub(crate) struct Pages {
    copied: Vec<Option<Box<[u8; PAGE_BYTES]>>>,
    active: Vec<Box<[u8; PAGE_BYTES]>>,
    /// Which chunks were skipped: a bitmap like the copied bits for each reason, in the order of [`SkipReason::ALL`]. Empty if
    /// that is not kept.
    skipped: Vec<Option<Box<[u8; PAGE_BYTES]>>>,
}

/// What an earlier session of the same job and boot has left on record.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// The runs of chunks that it has copied, in order.
    pub(crate) copied: Vec<Range<u64>>,
    /// Those of them that were skipped, and why.
    pub(crate) skipped: Vec<(Range<u64>, SkipReason)>,
    /// Pages with copied bits of chunks that do not count, because their extents are active.
    pub(crate) stale_pages: Vec<u64>,
    /// The extents that are active.
    pub(crate) active: Vec<u64>,
}

impl ProgressMap {
    /// How many chunks a page of the copied bits stands for, unless a test says otherwise.
    pub const PAGE_CHUNKS: u64 = PAGE_BITS;

    /// How large the device must be, with pages of so many chunks. Whoever creates its file allocates all of it beforehand.
    #[must_use]
    pub fn bytes_needed(volume: Bytes, chunk: ChunkSize, page_chunks: u64) -> Bytes {
        Bytes((1 + copied_pages(volume, chunk, page_chunks) + active_pages(volume)) * PAGE_BYTES as u64)
    }

    /// The same of a map that says why chunks were not sent, too.
    #[must_use]
    pub fn bytes_needed_with_skips(volume: Bytes, chunk: ChunkSize, page_chunks: u64) -> Bytes {
        let skipped = copied_pages(volume, chunk, page_chunks) * SkipReason::ALL.len() as u64;
        Self::bytes_needed(volume, chunk, page_chunks) + Bytes(skipped * PAGE_BYTES as u64)
    }

    /// Opens the map of `identity` on `device`: what is there if it is of the same job, boot and volume, otherwise an
    /// empty one.
    ///
    /// # Errors
    /// What the device says, or invalid if it is too small or its pages cannot be of that size.
    pub async fn open(device: Device, identity: MapIdentity) -> Result<Self> {
        if !(1..=PAGE_BITS).contains(&identity.page_chunks) {
            let context = format!("a page of the progress map cannot stand for {} chunks", identity.page_chunks);
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let needed_of = if identity.skips { Self::bytes_needed_with_skips } else { Self::bytes_needed };
        let needed = needed_of(identity.volume, identity.chunk, identity.page_chunks);
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
        let copied = copied_pages(identity.volume, identity.chunk, identity.page_chunks) as usize;
        let mut pages = Pages {
            copied: vec![None; copied],
            active: vec![Box::new([0; PAGE_BYTES]); active_pages(identity.volume) as usize],
            skipped: vec![None; if identity.skips { copied * SkipReason::ALL.len() } else { 0 }],
        };
        if known {
            pages.load(&device).await?;
        }
        Ok(Self { device, identity, known, unverified: Mutex::default(), writer: tokio::sync::Mutex::new(pages) })
    }

    /// Has what an earlier session has copied be compared by `digests` before it counts: somebody may have changed source or
    /// target since it was written down.
    #[must_use]
    pub fn compared_by(self, digests: Arc<dyn Digests>) -> Self {
        *self.unverified.lock() = Some(digests).filter(|_| self.known);
        self
    }

    /// What compares what an earlier session has copied, once.
    pub(crate) fn take_unverified(&self) -> Option<Arc<dyn Digests>> {
        self.unverified.lock().take()
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

    /// What a session before this one has left on record.
    pub(crate) async fn found(&self) -> Found {
        let pages = self.writer.lock().await;
        let MapIdentity { chunk, volume, page_chunks, .. } = self.identity;
        let mut found = Found { active: pages.active_extents(), ..Found::default() };
        for (number, page) in (0..).zip(&pages.copied) {
            let Some(page) = page else { continue };
            let first = number * page_chunks;
            let end = (first + page_chunks).min(chunk.count(volume));
            let mut is_stale = false;
            let mut index = first;
            while index < end {
                let within = index - first;
                // A chunk is no larger than an extent and lies within one.
                let extent = index * chunk.bytes() / ACTIVE_EXTENT.0;
                let next = (index + 1).max(((extent + 1) * ACTIVE_EXTENT.0 / chunk.bytes()).min(end));
                if pages.is_active(extent) {
                    is_stale |= (within..next - first).any(|within| bit(&page[..], within));
                    index = next;
                    continue;
                }
                while let Some(run) = next_run_of_bits(&page[..], index - first..next - first) {
                    let run = first + run.start..first + run.end;
                    index = run.end;
                    pages.skipped_among(number as usize, first, run.clone(), &mut found.skipped);
                    match found.copied.last_mut() {
                        Some(last) if last.end == run.start => last.end = run.end,
                        _ => found.copied.push(run),
                    }
                }
                index = next;
            }
            if is_stale {
                found.stale_pages.push(number);
            }
        }
        found
    }

    /// Forgets what earlier sessions have copied: the target has nothing of it. Extents that are active stay so: writes to
    /// them may be under way, and whoever counts on an extent's being on record goes on to.
    pub(crate) async fn forget(&self) -> Result<()> {
        let mut pages = self.writer.lock().await;
        let length = Bytes(pages.copied.len() as u64 * PAGE_BYTES as u64);
        self.device.write(Mutation::zeroes(block::Extent::new(Bytes::from(PAGE_BYTES), length), false)).await?;
        pages.copied.fill(None);
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
    pub(crate) async fn lock(&self) -> MapWriteGuard<'_> {
        MapWriteGuard { map: self, pages: self.writer.lock().await }
    }
}

/// The right to change the map.
pub(crate) struct MapWriteGuard<'a> {
    map: &'a ProgressMap,
    pages: tokio::sync::MutexGuard<'a, Pages>,
}

impl MapWriteGuard<'_> {
    /// Page `number` of the copied bits as it is on record.
    pub(crate) fn copied_page(&self, number: usize) -> Box<[u8; PAGE_BYTES]> {
        self.pages.copied[number].clone().unwrap_or_else(zero_page)
    }

    /// Puts page `number` of the copied bits on record, if it is not what is there.
    pub(crate) async fn set_copied_page(&mut self, number: usize, page: Box<[u8; PAGE_BYTES]>) -> Result<()> {
        if *page != *self.copied_page(number) {
            self.write(1 + number, &page[..]).await?;
            self.pages.copied[number] = Some(page);
        }
        Ok(())
    }

    /// Page `number` of the bits of what was skipped, for each reason, as it is on record. None if that is not kept.
    pub(crate) fn skipped_pages(&self, number: usize) -> Vec<Box<[u8; PAGE_BYTES]>> {
        let page = |reason: usize| self.pages.skipped.get(reason * self.pages.copied.len() + number);
        (0..SkipReason::ALL.len()).map_while(page).map(|page| page.clone().unwrap_or_else(zero_page)).collect()
    }

    /// Puts page `number` of the bits of what was skipped on record, where it is not what is there.
    pub(crate) async fn set_skipped_pages(&mut self, number: usize, pages: Vec<Box<[u8; PAGE_BYTES]>>) -> Result<()> {
        let known = self.skipped_pages(number);
        for (reason, (page, known)) in pages.into_iter().zip(known).enumerate() {
            if page != known {
                let at = reason * self.pages.copied.len() + number;
                self.write(1 + self.pages.copied.len() + self.pages.active.len() + at, &page[..]).await?;
                self.pages.skipped[at] = Some(page);
            }
        }
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
            if let Err(error) = self.write(1 + self.pages.copied.len() + page, &contents[..]).await {
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
        let (copied, active) = (self.copied.len(), self.active.len());
        let total = copied + active + self.skipped.len();
        for first in (0..total).step_by(STEP_PAGES) {
            let count = STEP_PAGES.min(total - first);
            let buffer = Buffer::unpooled(count * PAGE_BYTES);
            let bytes = device.read(Bytes::from((1 + first) * PAGE_BYTES), buffer).await?;
            for (page, contents) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
                if contents.iter().all(|byte| *byte == 0) {
                    continue;
                }
                let contents: Box<[u8; PAGE_BYTES]> = Box::new(contents.try_into().expect("a page"));
                match page.checked_sub(copied) {
                    None => self.copied[page] = Some(contents),
                    Some(page) if page < active => self.active[page] = contents,
                    Some(page) => self.skipped[page - active] = Some(contents),
                }
            }
        }
        Ok(())
    }

    fn is_active(&self, number: u64) -> bool {
        bit(&self.active[(number / PAGE_BITS) as usize][..], number % PAGE_BITS)
    }

    /// Adds those of a `run` of chunks on page `number`, whose first chunk is `first`, that were skipped.
    fn skipped_among(&self, number: usize, first: u64, run: Range<u64>, found: &mut Vec<(Range<u64>, SkipReason)>) {
        for (reason, at) in SkipReason::ALL.into_iter().zip((number..).step_by(self.copied.len())) {
            let Some(Some(page)) = self.skipped.get(at) else { continue };
            let mut from = run.start - first;
            while let Some(skipped) = next_run_of_bits(&page[..], from..run.end - first) {
                from = skipped.end;
                found.push((first + skipped.start..first + skipped.end, reason));
            }
        }
    }

    /// The numbers of all extents that are active.
    fn active_extents(&self) -> Vec<u64> {
        let mut extents = Vec::new();
        for (number, page) in (0..).zip(&self.active) {
            let mut from = 0;
            while let Some(run) = next_run_of_bits(&page[..], from..PAGE_BITS) {
                from = run.end;
                extents.extend(number * PAGE_BITS + run.start..number * PAGE_BITS + run.end);
            }
        }
        extents
    }
}

fn zero_page() -> Box<[u8; PAGE_BYTES]> {
    Box::new([0; PAGE_BYTES])
}

/// The numbers of the activity log's extents that `extent` touches.
pub(crate) fn active_of(extent: block::Extent) -> std::ops::RangeInclusive<u64> {
    extent.offset.0 / ACTIVE_EXTENT.0..=(extent.end().0.max(1) - 1) / ACTIVE_EXTENT.0
}

pub(crate) fn bit(bytes: &[u8], number: u64) -> bool {
    bytes[(number / 8) as usize] & (1 << (number % 8)) != 0
}

/// The first run of bits within `range` that are set.
fn next_run_of_bits(bytes: &[u8], range: Range<u64>) -> Option<Range<u64>> {
    /// The first bit from `from` on that is `value`; whole bytes of the other value are passed over at once.
    fn next(bytes: &[u8], from: u64, end: u64, value: bool) -> u64 {
        let other = if value { 0 } else { 0xff };
        let mut at = from;
        while at < end {
            if at.is_multiple_of(8) && bytes[(at / 8) as usize] == other {
                at += 8;
            } else if bit(bytes, at) == value {
                return at;
            } else {
                at += 1;
            }
        }
        end
    }
    let start = next(bytes, range.start, range.end, true);
    (start < range.end).then(|| start..next(bytes, start, range.end, false))
}

pub(crate) fn set_bit(bytes: &mut [u8], number: u64, value: bool) {
    let mask = 1 << (number % 8);
    let byte = &mut bytes[(number / 8) as usize];
    *byte = if value { *byte | mask } else { *byte & !mask };
}

/// Sets every bit of `range`: those of whole bytes a byte at a time.
pub(crate) fn set_bits(bytes: &mut [u8], range: Range<u64>, value: bool) {
    let whole = range.start.next_multiple_of(8)..range.end / 8 * 8;
    if whole.start >= whole.end {
        return range.for_each(|number| set_bit(bytes, number, value));
    }
    (range.start..whole.start).chain(whole.end..range.end).for_each(|number| set_bit(bytes, number, value));
    bytes[(whole.start / 8) as usize..(whole.end / 8) as usize].fill(if value { 0xff } else { 0 });
}

fn copied_pages(volume: Bytes, chunk: ChunkSize, page_chunks: u64) -> u64 {
    chunk.count(volume).div_ceil(page_chunks).max(1)
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
    if identity.page_chunks != ProgressMap::PAGE_CHUNKS {
        // Only in tests; the map that everybody else has says nothing here.
        header[60..64].copy_from_slice(&(identity.page_chunks as u32).to_le_bytes());
    }
    // A map without them is what it has always been.
    header[64] = u8::from(identity.skips);
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
        let page_chunks = ProgressMap::PAGE_CHUNKS;
        let (volume, chunk) = (Bytes::mib(40), ChunkSize::default());
        MapIdentity { boot: [1; 16], job: [2; 16], volume, chunk, page_chunks, skips: false }
    }

    fn device() -> Device {
        let MapIdentity { volume, chunk, .. } = identity();
        Device::new("map", MemDevice::new(ProgressMap::bytes_needed_with_skips(volume, chunk, 1)))
    }

    async fn found(device: &Device, identity: MapIdentity) -> Found {
        ProgressMap::open(device.clone(), identity).await.expect("opens").found().await
    }

    async fn copied(device: &Device, identity: MapIdentity) -> Vec<(u64, u64)> {
        let runs = found(device, identity).await.copied;
        runs.into_iter().map(|run| (run.start, run.end)).collect()
    }

    async fn with_copied(device: &Device, chunks: std::ops::Range<u64>) -> ProgressMap {
        let map = ProgressMap::open(device.clone(), identity()).await.expect("opens");
        for chunk in chunks {
            set_copied(&map, chunk, ProgressMap::PAGE_CHUNKS).await;
        }
        map
    }

    async fn set_copied(map: &ProgressMap, chunk: u64, page_chunks: u64) {
        let mut writer = map.lock().await;
        let number = (chunk / page_chunks) as usize;
        let mut page = writer.copied_page(number);
        set_bit(&mut page[..], chunk % page_chunks, true);
        writer.set_copied_page(number, page).await.expect("memory takes it");
    }

    #[tokio::test]
    async fn chunks_that_are_had_survive_the_process_and_not_the_boot() {
        let device = device();
        let _ = with_copied(&device, 3..200).await;
        assert_eq!(copied(&device, identity()).await, [(3, 200)]);
        let after_reboot = MapIdentity { boot: [9; 16], ..identity() };
        assert_eq!(copied(&device, after_reboot).await, []);
        assert_eq!(copied(&device, identity()).await, [], "what another boot had cleared came back");
    }

    #[tokio::test]
    async fn chunks_of_active_extents_do_not_count() {
        let device = device();
        let map = with_copied(&device, 0..640).await;
        map.activate(&[1, 3]).await.expect("memory takes it");
        assert_eq!(copied(&device, identity()).await, [(0, 64), (128, 192), (256, 640)]);
        map.lock().await.set_active(&[3], false).await.expect("memory takes it");
        let expected = Found { copied: vec![0..64, 128..640], stale_pages: vec![0], active: vec![1], skipped: vec![] };
        assert_eq!(found(&device, identity()).await, expected);
        map.forget().await.expect("memory takes it");
        let expected = Found { active: vec![1], ..Found::default() };
        assert_eq!(found(&device, identity()).await, expected, "a write there may be under way");
    }

    #[tokio::test]
    async fn pages_of_any_size_say_the_same_and_which_of_them_say_too_much() {
        for page_chunks in [1, 5, 64, 100, 639] {
            let (device, identity) = (device(), MapIdentity { page_chunks, ..identity() });
            let map = ProgressMap::open(device.clone(), identity).await.expect("opens");
            for chunk in 50..400_u64 {
                set_copied(&map, chunk, page_chunks).await;
            }
            map.activate(&[1, 3, 9]).await.expect("memory takes it");
            let pages = (64..128_u64).chain(192..256).map(|chunk| chunk / page_chunks);
            let stale_pages = pages.collect::<std::collections::BTreeSet<_>>().into_iter().collect();
            let copied = vec![50..64, 128..192, 256..400];
            assert_eq!(
                found(&device, identity).await,
                Found { copied, stale_pages, active: vec![1, 3, 9], skipped: vec![] }
            );
        }
    }

    #[tokio::test]
    async fn a_map_says_what_it_has_said_since_there_are_maps() {
        let header = encode_header(&identity());
        assert!(header[60..].iter().all(|byte| *byte == 0), "the programs of before would begin it anew");
    }

    #[tokio::test]
    async fn what_was_skipped_survives_the_process_as_far_as_it_is_copied() {
        for page_chunks in [7, 64, ProgressMap::PAGE_CHUNKS] {
            let (device, identity) = (device(), MapIdentity { page_chunks, skips: true, ..identity() });
            let map = ProgressMap::open(device.clone(), identity).await.expect("opens");
            for chunk in 40..140_u64 {
                set_copied(&map, chunk, page_chunks).await;
            }
            for (chunk, reason) in [(39, 0), (41, 0), (42, 1), (43, 1), (70, 0), (139, 1), (140, 1)] {
                let mut writer = map.lock().await;
                let number = (chunk / page_chunks) as usize;
                let mut pages = writer.skipped_pages(number);
                set_bit(&mut pages[reason][..], chunk % page_chunks, true);
                writer.set_skipped_pages(number, pages).await.expect("memory takes it");
            }
            map.activate(&[1]).await.expect("memory takes it");
            let mut found = found(&device, identity).await;
            found.skipped.sort_by_key(|(run, _)| run.start);
            let singles = found.skipped.iter().flat_map(|(run, reason)| run.clone().map(|index| (index, *reason)));
            let expected =
                [(41, SkipReason::Hole), (42, SkipReason::Zero), (43, SkipReason::Zero), (139, SkipReason::Zero)];
            assert_eq!(singles.collect::<Vec<_>>(), expected, "pages of {page_chunks}");
            let without = MapIdentity { skips: false, ..identity };
            assert_eq!(copied(&device, without).await, [], "it is another map");
        }
    }

    #[tokio::test]
    async fn a_map_of_another_job_or_volume_is_begun_anew() {
        let device = device();
        let _ = with_copied(&device, 0..10).await;
        assert_eq!(copied(&device, MapIdentity { job: [7; 16], ..identity() }).await, []);
    }
}
