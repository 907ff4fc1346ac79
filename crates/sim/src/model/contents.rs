//! What a large volume holds, without storing its bytes.
//!
//! Guests of big experiments write blocks of 4 KiB whose 512 words of eight bytes are all alike. Such a block is kept
//! as its word. A volume that nobody has written to is a rule that gives every block its word. Anything else (torn
//! blocks, small writes) is kept as the bytes that it is. So nothing is lost: this is a volume like any other, only
//! smaller.

use block::{Buffer, Bytes, Extent, ExtentState, ExtentStatus, Mutation, MutationKind};

use crate::numbers::NumberMap;

/// The unit of contents: a block.
pub const BLOCK_BYTES: u64 = block::BLOCK_BYTES;
/// Blocks of a page of the table.
const PAGE_BLOCKS: u64 = 1024;

/// What a volume holds before anybody has written to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nothing: it reads as zeroes, and no space is taken.
    Empty,
    /// Blocks that are all different.
    Filled,
}

impl Origin {
    /// What `block` holds.
    #[must_use]
    pub const fn word(self, block: u64) -> u64 {
        match self {
            Self::Empty => 0,
            // Odd, so never zero; the upper half is what no guest writes.
            Self::Filled => (0xf111_ed00 << 32 | block.wrapping_mul(0x9e37_79b9) & 0xffff_ffff) | 1,
        }
    }
}

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    /// Nothing, and no space is taken.
    Hole,
    /// This word all over.
    Clause(u64),
    /// See the bytes beside.
    Bytes,
}

/// The contents of a volume.
pub struct Contents {
    size: u64,
    origin: Origin,
    pages: NumberMap<u64, Box<[Block]>>,
    bytes: NumberMap<u64, Box<[u8]>>,
}

impl Contents {
    /// A volume of `size` bytes.
    #[must_use]
    pub fn new(size: Bytes, origin: Origin) -> Self {
        Self { size: size.0, origin, pages: NumberMap::default(), bytes: NumberMap::default() }
    }

    fn original(&self, block: u64) -> Block {
        match self.origin {
            Origin::Empty => Block::Hole,
            Origin::Filled => Block::Clause(self.origin.word(block)),
        }
    }

    fn block(&self, block: u64) -> Block {
        let page = self.pages.get(&(block / PAGE_BLOCKS));
        page.map_or_else(|| self.original(block), |page| page[(block % PAGE_BLOCKS) as usize])
    }

    fn set(&mut self, block: u64, to: Block) {
        let number = block / PAGE_BLOCKS;
        if !self.pages.contains_key(&number) {
            let first = number * PAGE_BLOCKS;
            let page = (first..first + PAGE_BLOCKS).map(|block| self.original(block)).collect();
            self.pages.insert(number, page);
        }
        let page = self.pages.get_mut(&number).expect("it was made above");
        let place = &mut page[(block % PAGE_BLOCKS) as usize];
        if *place == Block::Bytes && to != Block::Bytes {
            self.bytes.remove(&block);
        }
        *place = to;
    }

    /// Whether each block's word is `word`, if it has one.
    #[must_use]
    pub fn word(&self, block: u64) -> Option<u64> {
        match self.block(block) {
            Block::Hole => Some(0),
            Block::Clause(word) => Some(word),
            Block::Bytes => None,
        }
    }

    /// Fills `buffer` with the bytes at `offset`.
    pub fn read(&self, offset: Bytes, buffer: &mut Buffer) {
        let extent = Extent::new(offset, buffer.len().into());
        for piece in extent.split_at_multiples(BLOCK_BYTES) {
            let start = (piece.offset - offset).as_usize();
            let place = &mut buffer[start..start + piece.length.as_usize()];
            let within = piece.offset.0 % BLOCK_BYTES;
            match self.block(piece.offset.0 / BLOCK_BYTES) {
                Block::Hole => place.fill(0),
                Block::Clause(word) => fill(word, within, place),
                Block::Bytes => {
                    let bytes = &self.bytes[&(piece.offset.0 / BLOCK_BYTES)];
                    place.copy_from_slice(&bytes[within as usize..within as usize + place.len()]);
                }
            }
        }
    }

    /// Carries out `mutation`.
    pub fn apply(&mut self, mutation: &Mutation) {
        let extent = mutation.extent();
        for piece in extent.split_at_multiples(BLOCK_BYTES) {
            let block = piece.offset.0 / BLOCK_BYTES;
            let is_whole = piece.length.0 == BLOCK_BYTES || piece.length.0 == self.size - piece.offset.0;
            let is_whole = is_whole && piece.offset.is_multiple_of(BLOCK_BYTES);
            let from = (piece.offset - extent.offset).as_usize();
            match mutation.kind() {
                MutationKind::Data(data) => {
                    let data = &data[from..from + piece.length.as_usize()];
                    match word_of(data).filter(|_| is_whole && data.len() as u64 == BLOCK_BYTES) {
                        Some(word) => self.set(block, Block::Clause(word)),
                        None => self.overlay(piece, Some(data)),
                    }
                }
                MutationKind::Zeroes { may_unmap: true } | MutationKind::Discard if is_whole => {
                    self.set(block, Block::Hole);
                }
                MutationKind::Zeroes { .. } if is_whole => self.set(block, Block::Clause(0)),
                MutationKind::Zeroes { .. } => self.overlay(piece, None),
                MutationKind::Discard => {}
            }
        }
    }

    /// Makes `extent`, whole blocks or up to the end of the volume, what it is in `other`.
    ///
    /// # Panics
    /// If the extent begins within a block.
    pub fn copy_from(&mut self, other: &Self, extent: Extent) {
        assert!(extent.offset.is_multiple_of(BLOCK_BYTES), "copies are of whole blocks");
        for block in extent.offset.0 / BLOCK_BYTES..extent.end().0.div_ceil(BLOCK_BYTES) {
            let what = other.block(block);
            self.set(block, what);
            if what == Block::Bytes {
                self.bytes.insert(block, other.bytes[&block].clone());
            }
        }
    }

    /// Puts bytes (or zeroes) in a part of a block.
    fn overlay(&mut self, piece: Extent, data: Option<&[u8]>) {
        let block = piece.offset.0 / BLOCK_BYTES;
        let mut bytes = match self.block(block) {
            Block::Bytes => self.bytes.remove(&block).expect("a block of bytes has bytes"),
            Block::Hole if data.is_none() => return,
            Block::Hole => vec![0; BLOCK_BYTES as usize].into(),
            Block::Clause(word) => {
                let mut bytes: Box<[u8]> = vec![0; BLOCK_BYTES as usize].into();
                fill(word, 0, &mut bytes);
                bytes
            }
        };
        let within = (piece.offset.0 % BLOCK_BYTES) as usize;
        let place = &mut bytes[within..within + piece.length.as_usize()];
        match data {
            Some(data) => place.copy_from_slice(data),
            None => place.fill(0),
        }
        self.set(block, Block::Bytes);
        self.bytes.insert(block, bytes);
    }

    /// Describes `extent` in pieces of whole blocks.
    #[must_use]
    pub fn extents(&self, extent: Extent) -> Vec<ExtentStatus> {
        let mut pieces: Vec<ExtentStatus> = Vec::new();
        let mut offset = extent.offset;
        while offset < extent.end() {
            let block = offset.0 / BLOCK_BYTES;
            let page = block / PAGE_BLOCKS;
            let (state, end) = match (self.pages.contains_key(&page), self.origin) {
                (false, Origin::Empty) => (ExtentState::Hole, Bytes((page + 1) * PAGE_BLOCKS * BLOCK_BYTES)),
                (false, Origin::Filled) => (ExtentState::Data, Bytes((page + 1) * PAGE_BLOCKS * BLOCK_BYTES)),
                (true, _) => {
                    let state = match self.block(block) {
                        Block::Hole => ExtentState::Hole,
                        Block::Clause(0) => ExtentState::Zero,
                        Block::Clause(_) | Block::Bytes => ExtentState::Data,
                    };
                    (state, Bytes((block + 1) * BLOCK_BYTES))
                }
            };
            let end = end.min(extent.end());
            match pieces.last_mut() {
                Some(last) if last.state == state => last.extent.length += end - offset,
                _ => pieces.push(ExtentStatus { extent: Extent::between(offset, end), state }),
            }
            offset = end;
        }
        pieces
    }

    /// The first block that is not alike in both, if there is one.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<u64> {
        (0..self.size.div_ceil(BLOCK_BYTES)).find(|block| match (self.word(*block), other.word(*block)) {
            (Some(one), Some(another)) => one != another,
            (None, None) => self.bytes.get(block) != other.bytes.get(block),
            _ => true,
        })
    }
}

/// The word that `data` repeats, if it is nothing else.
fn word_of(data: &[u8]) -> Option<u64> {
    let (words, rest) = data.as_chunks::<8>();
    let first = *words.first()?;
    // One look at everything, eight bytes at a time and without a branch each.
    let difference = words.iter().fold(0, |sum, word| sum | (u64::from_le_bytes(*word) ^ u64::from_le_bytes(first)));
    (difference == 0 && rest.is_empty()).then(|| u64::from_le_bytes(first))
}

/// Fills `place`, which begins at byte `within` of a block, with `word`.
pub fn fill(word: u64, within: u64, place: &mut [u8]) {
    let word = word.rotate_right((within % 8 * 8) as u32).to_le_bytes();
    let (words, rest) = place.as_chunks_mut::<8>();
    words.fill(word);
    rest.copy_from_slice(&word[..rest.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Data;

    #[test]
    fn blocks_are_what_was_written_to_them_whole_torn_or_odd() {
        let size = Bytes(5 * BLOCK_BYTES + 100);
        let mut contents = Contents::new(size, Origin::Filled);
        let mut plain = Buffer::unpooled(size.as_usize());
        contents.read(Bytes::ZERO, &mut plain);
        let mut plain = plain.to_vec();
        for (offset, length, byte) in [(0, 4096, 7), (100, 9, 8), (4093, 10, 9), (8192, 8192, 1), (20480, 100, 3)] {
            contents.apply(&Mutation::data(Bytes(offset), Data::copy_of(&vec![byte; length])));
            plain[offset as usize..offset as usize + length].fill(byte);
        }
        contents.apply(&Mutation::zeroes(Extent::new(Bytes(10), Bytes(5000)), true));
        plain[10..5010].fill(0);
        for (offset, length) in [(0, plain.len()), (3, 5), (4090, 4200), (20000, 580)] {
            let mut read = Buffer::unpooled(length);
            contents.read(Bytes(offset), &mut read);
            assert!(read[..] == plain[offset as usize..offset as usize + length], "{length} bytes at {offset}");
        }
    }

    #[test]
    fn a_copied_extent_is_what_it_was_and_nothing_else_is() {
        let size = Bytes(BLOCK_BYTES * 5000 + 100);
        let (mut one, mut other) = (Contents::new(size, Origin::Filled), Contents::new(size, Origin::Empty));
        one.apply(&Mutation::data(Bytes(BLOCK_BYTES * 10 + 7), Data::copy_of(b"torn")));
        one.apply(&Mutation::discard(Extent::new(Bytes(BLOCK_BYTES * 20), Bytes(BLOCK_BYTES))));
        other.copy_from(&one, Extent::between(Bytes(BLOCK_BYTES * 2), size));
        assert_eq!(one.first_difference(&other), Some(0));
        other.copy_from(&one, Extent::new(Bytes::ZERO, Bytes(BLOCK_BYTES)));
        assert_eq!(one.first_difference(&other), Some(1));
        other.copy_from(&one, Extent::new(Bytes(BLOCK_BYTES), Bytes(BLOCK_BYTES)));
        assert_eq!(one.first_difference(&other), None);
    }

    #[test]
    fn a_volume_of_a_terabyte_takes_no_memory_and_still_tells_what_was_written() {
        let size = Bytes::gib(1024);
        let (mut one, other) = (Contents::new(size, Origin::Filled), Contents::new(size, Origin::Filled));
        let offset = Bytes(size.0 / 2);
        one.apply(&Mutation::data(offset, Data::copy_of(&[5; 4096])));
        assert_eq!((one.pages.len(), one.bytes.len()), (1, 0));
        assert_ne!(one.word(offset.0 / BLOCK_BYTES), other.word(offset.0 / BLOCK_BYTES));
        one.apply(&Mutation::data(offset, Data::copy_of(&[6; 512])));
        assert_eq!(one.word(offset.0 / BLOCK_BYTES), None);
        assert_eq!(one.extents(Extent::whole(size)).len(), 1);
    }

    #[test]
    fn a_difference_is_found_where_it_is() {
        let (mut one, mut other) =
            (Contents::new(Bytes::mib(4), Origin::Filled), Contents::new(Bytes::mib(4), Origin::Filled));
        assert_eq!(one.first_difference(&other), None);
        one.apply(&Mutation::data(Bytes(700), Data::copy_of(b"x")));
        assert_eq!(one.first_difference(&other), Some(0));
        other.apply(&Mutation::data(Bytes(700), Data::copy_of(b"x")));
        assert_eq!(one.first_difference(&other), None);
    }
}
