//! A device in memory: the fastest there is, and the one that tests compare with.

use std::collections::BTreeMap;

use parking_lot::RwLock;

use crate::{
    BlockDevice, Buffer, Bytes, Extent, ExtentState, ExtentStatus, Geometry, IoFuture, Mutation, MutationKind, ready,
};

/// How much is allocated at once.
const PAGE: u64 = 65536;

/// A sparse volume in memory. It loses everything with the process, so flush has nothing to do.
pub struct MemDevice {
    geometry: Geometry,
    pages: RwLock<BTreeMap<u64, Box<[u8]>>>,
}

impl MemDevice {
    /// A volume of `size` bytes that reads as zeroes.
    #[must_use]
    pub fn new(size: Bytes) -> Self {
        Self { geometry: Geometry::of_size(size), pages: RwLock::new(BTreeMap::new()) }
    }

    /// The same, taking only requests of multiples of `bytes`.
    #[must_use]
    pub const fn with_request_alignment(mut self, bytes: u32) -> Self {
        self.geometry.request_alignment = bytes;
        self
    }

    /// The same, refusing mutations.
    #[must_use]
    pub const fn with_read_only(mut self) -> Self {
        self.geometry.read_only = true;
        self
    }

    /// How much memory holds data.
    #[must_use]
    pub fn allocated(&self) -> Bytes {
        Bytes(self.pages.read().len() as u64 * PAGE)
    }

    fn store(&self, mutation: &Mutation) {
        let extent = mutation.extent();
        let mut pages = self.pages.write();
        for piece in extent.split_at_multiples(PAGE) {
            let number = piece.offset.0 / PAGE;
            let within = (piece.offset.0 % PAGE) as usize;
            let length = piece.length.as_usize();
            match mutation.kind() {
                MutationKind::Data(data) => {
                    let from = (piece.offset - extent.offset).as_usize();
                    let page = pages.entry(number).or_insert_with(|| vec![0; PAGE as usize].into());
                    page[within..within + length].copy_from_slice(&data[from..from + length]);
                }
                MutationKind::Zeroes { may_unmap: true } | MutationKind::Discard if length == PAGE as usize => {
                    pages.remove(&number);
                }
                MutationKind::Zeroes { may_unmap: false } if length == PAGE as usize => {
                    pages.entry(number).or_insert_with(|| vec![0; PAGE as usize].into()).fill(0);
                }
                MutationKind::Zeroes { .. } | MutationKind::Discard => {
                    if let Some(page) = pages.get_mut(&number) {
                        page[within..within + length].fill(0);
                    }
                }
            }
        }
    }
}

impl BlockDevice for MemDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        let pages = self.pages.read();
        let extent = Extent::new(offset, buffer.len().into());
        for piece in extent.split_at_multiples(PAGE) {
            let to = (piece.offset - offset).as_usize();
            let within = (piece.offset.0 % PAGE) as usize;
            let length = piece.length.as_usize();
            match pages.get(&(piece.offset.0 / PAGE)) {
                Some(page) => buffer[to..to + length].copy_from_slice(&page[within..within + length]),
                None => buffer[to..to + length].fill(0),
            }
        }
        drop(pages);
        ready(Ok(buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        self.store(&mutation);
        ready(Ok(()))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        ready(Ok(()))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        let pages = self.pages.read();
        let mut pieces: Vec<ExtentStatus> = Vec::new();
        for piece in extent.split_at_multiples(PAGE) {
            let state = match pages.contains_key(&(piece.offset.0 / PAGE)) {
                true => ExtentState::Data,
                false => ExtentState::Hole,
            };
            match pieces.last_mut() {
                Some(last) if last.state == state => last.extent.length += piece.length,
                _ => pieces.push(ExtentStatus { extent: piece, state }),
            }
        }
        drop(pages);
        ready(Ok(pieces))
    }
}
