//! What blocks of a large volume may hold: a register each.
//!
//! A read may give the value of a write `w` unless another write had replaced it. That means: the other write began
//! after `w` was answered, and was answered before the read began. Versions that no read in flight can see any more are
//! forgotten. A block of which only a part was written is not checked from then on.

use std::collections::BTreeSet;

use block::Extent;

use crate::model::contents::{BLOCK_BYTES, Origin};
use crate::numbers::{NumberMap, NumberSet};

/// A moment in the order of beginnings and ends.
pub(super) type Ticket = u64;

struct Version {
    /// Zero for what was there at the beginning.
    number: u64,
    began: Ticket,
    ended: Option<Ticket>,
}

/// See the module's head.
pub(super) struct Knowledge {
    origin: Origin,
    blocks: NumberMap<u64, Vec<Version>>,
    torn: NumberSet<u64>,
    in_flight: BTreeSet<Ticket>,
    clock: Ticket,
    writes: u64,
}

/// What write `number` puts in `block`.
pub(super) const fn word(number: u64, block: u64) -> u64 {
    number << 24 | block & 0xff_ffff
}

impl Knowledge {
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            origin,
            blocks: NumberMap::default(),
            torn: NumberSet::default(),
            in_flight: BTreeSet::new(),
            clock: 0,
            writes: 0,
        }
    }

    pub(super) fn begin(&mut self) -> Ticket {
        self.clock += 1;
        self.in_flight.insert(self.clock);
        self.clock
    }

    pub(super) fn end(&mut self, ticket: Ticket) {
        self.in_flight.remove(&ticket);
    }

    pub(super) fn begin_write(&mut self, extent: Extent) -> (Ticket, u64) {
        let ticket = self.begin();
        self.writes += 1;
        for piece in extent.split_at_multiples(BLOCK_BYTES) {
            let block = piece.offset.0 / BLOCK_BYTES;
            if piece.length.0 < BLOCK_BYTES {
                self.torn.insert(block);
                continue;
            }
            let original = || vec![Version { number: 0, began: 0, ended: Some(0) }];
            let versions = self.blocks.entry(block).or_insert_with(original);
            versions.push(Version { number: self.writes, began: ticket, ended: None });
        }
        (ticket, self.writes)
    }

    pub(super) fn end_write(&mut self, ticket: Ticket, number: u64, extent: Extent) {
        self.end(ticket);
        self.clock += 1;
        let (now, oldest) = (self.clock, self.in_flight.first().copied().unwrap_or(self.clock));
        for piece in extent.split_at_multiples(BLOCK_BYTES) {
            let Some(versions) = self.blocks.get_mut(&(piece.offset.0 / BLOCK_BYTES)) else { continue };
            if let Some(version) = versions.iter_mut().find(|version| version.number == number) {
                version.ended = Some(now);
            }
            // Newest beginning among what was answered before the oldest request in flight began.
            let settled = versions.iter().filter(|version| version.ended.is_some_and(|ended| ended < oldest));
            let settled = settled.map(|version| version.began).max().unwrap_or(0);
            versions.retain(|version| version.ended.is_none_or(|ended| ended >= settled));
        }
    }

    /// Whether a read that began with `ticket` may give `bytes` at `offset`.
    pub(super) fn check(&self, ticket: Ticket, offset: u64, bytes: &[u8]) -> Result<(), String> {
        let first = offset.next_multiple_of(BLOCK_BYTES);
        let whole = bytes.get((first - offset) as usize..).unwrap_or_default();
        for (index, bytes) in whole.chunks_exact(BLOCK_BYTES as usize).enumerate() {
            let block = first / BLOCK_BYTES + index as u64;
            if self.torn.contains(&block) {
                continue;
            }
            let words = bytes.as_chunks::<8>().0;
            if words.iter().any(|word| word != &words[0]) {
                return Err(format!("block {block} is torn, and nobody wrote it so"));
            }
            let found = u64::from_le_bytes(words[0]);
            if !self.allows(ticket, block, found) {
                return Err(format!(
                    "block {block} holds {found:#x}, which is older than it may be or was never there"
                ));
            }
        }
        Ok(())
    }

    fn allows(&self, ticket: Ticket, block: u64, found: u64) -> bool {
        let original = self.origin.word(block);
        let Some(versions) = self.blocks.get(&block) else { return found == original };
        let word_of = |version: &Version| if version.number == 0 { original } else { word(version.number, block) };
        let settled = versions.iter().filter(|version| version.ended.is_some_and(|ended| ended < ticket));
        let settled = settled.map(|version| version.began).max().unwrap_or(0);
        versions.iter().any(|version| word_of(version) == found && version.ended.is_none_or(|ended| ended >= settled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Bytes;

    fn reads(knowledge: &Knowledge, ticket: Ticket, number: u64) -> bool {
        let value = if number == 0 { Origin::Filled.word(3) } else { word(number, 3) };
        knowledge.check(ticket, 3 * BLOCK_BYTES, &value.to_le_bytes().repeat(512)).is_ok()
    }

    #[test]
    fn a_block_gives_what_a_register_could_give() {
        let block = Extent::new(Bytes(3 * BLOCK_BYTES), Bytes(BLOCK_BYTES));
        let mut knowledge = Knowledge::new(Origin::Filled);
        let early = knowledge.begin();
        assert!(reads(&knowledge, early, 0) && !reads(&knowledge, early, 1));
        let (first, one) = knowledge.begin_write(block);
        assert!(reads(&knowledge, early, 0) && reads(&knowledge, early, one), "either, while it is written");
        knowledge.end_write(first, one, block);
        let late = knowledge.begin();
        assert!(reads(&knowledge, early, 0), "it began before the write was answered");
        assert!(!reads(&knowledge, late, 0) && reads(&knowledge, late, one), "an answered write was lost");
        let (second, two) = knowledge.begin_write(block);
        let (third, three) = knowledge.begin_write(block);
        knowledge.end_write(second, two, block);
        knowledge.end_write(third, three, block);
        let last = knowledge.begin();
        assert!(reads(&knowledge, last, two) && reads(&knowledge, last, three), "they overlapped in time");
        assert!(!reads(&knowledge, last, one));
    }

    #[test]
    fn what_nobody_can_read_any_more_is_forgotten() {
        let block = Extent::new(Bytes(0), Bytes(BLOCK_BYTES));
        let mut knowledge = Knowledge::new(Origin::Empty);
        for _ in 0..100 {
            let (ticket, number) = knowledge.begin_write(block);
            knowledge.end_write(ticket, number, block);
        }
        assert!(knowledge.blocks[&0].len() <= 2, "{} versions are remembered", knowledge.blocks[&0].len());
    }
}
