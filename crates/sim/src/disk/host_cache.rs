//! The page cache that one host has of a disk which another host writes, too.
//!
//! A page that was read stays, whatever is written elsewhere. What this host writes, through the cache or past it, takes its pages along,
//! and those that are being read then are not kept: its own pages are right. Somebody on the host looks at the disk now and then, as
//! whoever looks for partitions does, and nobody is told.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use block::{Buffer, Bytes, Device, Filter, IoFuture, Mutation};
use parking_lot::Mutex;

/// The unit of the cache.
const PAGE_BYTES: u64 = 4096;
/// How much somebody reads who looks for partitions.
const LOOK_BYTES: u64 = 256 << 10;

/// The pages, and how often some were forgotten: what was being read then is not kept.
#[derive(Default)]
struct Pages {
    kept: BTreeMap<u64, Vec<u8>>,
    generation: u64,
}

/// The page cache.
#[derive(Clone, Default)]
pub(crate) struct HostCache(Arc<Mutex<Pages>>);

impl HostCache {
    /// `lower` through the cache.
    pub(crate) fn over(&self, lower: Device) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Cached { pages: self.clone(), reads_pages: true, lower })
    }

    /// `lower` past the cache.
    pub(crate) fn past(&self, lower: Device) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Cached { pages: self.clone(), reads_pages: false, lower })
    }

    /// Those pages are forgotten.
    fn forget(&self, numbers: &Range<u64>) {
        let mut pages = self.0.lock();
        pages.kept.retain(|number, _| !numbers.contains(number));
        pages.generation += 1;
    }

    /// All that was read is forgotten.
    pub(crate) fn drop_all(&self) {
        let mut pages = self.0.lock();
        pages.kept.clear();
        pages.generation += 1;
    }

    /// Somebody reads the beginning of `lower` through the cache.
    pub(crate) async fn look(self, lower: Device) {
        let cached = self.over(lower);
        let length = cached.size().0.min(LOOK_BYTES) / PAGE_BYTES * PAGE_BYTES;
        for offset in (0..length).step_by(PAGE_BYTES as usize) {
            // One that cannot be read is not cached.
            let _ = cached.read(Bytes(offset), Buffer::unpooled(PAGE_BYTES as usize)).await;
        }
    }
}

struct Cached {
    pages: HostCache,
    /// Whether a read is answered from the pages.
    reads_pages: bool,
    lower: Device,
}

impl Filter for Cached {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        if !self.reads_pages {
            return Box::pin(self.lower.read(offset, buffer));
        }
        Box::pin(async move {
            let began = self.pages.0.lock().generation;
            let mut buffer = self.lower.read(offset, buffer).await?;
            let mut pages = self.pages.0.lock();
            let is_kept = pages.generation == began;
            let end = offset.0 + buffer.len() as u64;
            for number in offset.0 / PAGE_BYTES..end.div_ceil(PAGE_BYTES) {
                let (first, last) = (offset.0.max(number * PAGE_BYTES), end.min((number + 1) * PAGE_BYTES));
                let there = (first - offset.0) as usize..(last - offset.0) as usize;
                let here = (first - number * PAGE_BYTES) as usize..(last - number * PAGE_BYTES) as usize;
                match pages.kept.get(&number) {
                    Some(page) => buffer[there].copy_from_slice(&page[here]),
                    None if is_kept && here.len() as u64 == PAGE_BYTES => {
                        pages.kept.insert(number, buffer[there].to_vec());
                    }
                    None => {}
                }
            }
            drop(pages);
            Ok(buffer)
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let extent = mutation.extent();
        let written = extent.offset.0 / PAGE_BYTES..(extent.offset.0 + extent.length.0).div_ceil(PAGE_BYTES);
        Box::pin(async move {
            let outcome = self.lower.write(mutation).await;
            self.pages.forget(&written);
            outcome
        })
    }
}
