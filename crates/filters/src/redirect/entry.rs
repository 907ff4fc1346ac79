//! What a redirection records of a place of its surrogate: whose it is, and what of it the source lacks.

use std::ops::Range;

use crate::store::{Body, Entry};

/// How many sectors a chunk has, each with a bit that tells whether it is dirty.
pub(super) const SECTORS: u64 = 256;

/// The dirty sectors of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DirtySectors([u64; 4]);

impl DirtySectors {
    /// Whether there are none.
    pub(super) fn is_empty(self) -> bool {
        self.0 == [0; 4]
    }

    pub(super) fn contains(self, sector: u64) -> bool {
        self.0[(sector / 64) as usize] >> (sector % 64) & 1 == 1
    }

    /// Whether all of `run` are dirty.
    pub(super) fn contains_all(self, mut run: Range<u64>) -> bool {
        run.all(|sector| self.contains(sector))
    }

    /// Whether one of `run` is dirty.
    pub(super) fn contains_any(self, mut run: Range<u64>) -> bool {
        run.any(|sector| self.contains(sector))
    }

    /// With those of `run`, too.
    pub(super) fn with(mut self, run: Range<u64>) -> Self {
        run.for_each(|sector| self.0[(sector / 64) as usize] |= 1 << (sector % 64));
        self
    }

    /// Those of `sectors` that are dirty, in runs.
    pub(super) fn dirty_runs(self, sectors: Range<u64>) -> Vec<Range<u64>> {
        runs(sectors.filter(|sector| self.contains(*sector)))
    }

    /// Those of `sectors` that are clean, in runs.
    pub(super) fn clean_runs(self, sectors: Range<u64>) -> Vec<Range<u64>> {
        runs(sectors.filter(|sector| !self.contains(*sector)))
    }
}

/// Ascending numbers in runs.
fn runs(numbers: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == number => run.end = number + 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

/// What is recorded of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SurrogateEntry {
    /// Nothing that the source lacks.
    Clean,
    /// Some sectors of a chunk, which the source lacks.
    Dirty {
        /// Which chunk of the volume.
        chunk: u32,
        /// Of two places of one chunk the one with the higher number counts: a power loss in the middle of a flush may leave both.
        serial: u32,
        /// Which of its sectors; at least one.
        sectors: DirtySectors,
    },
}

impl SurrogateEntry {
    /// The sectors that the source lacks.
    pub(super) const fn sectors(self) -> DirtySectors {
        match self {
            Self::Clean => DirtySectors([0; 4]),
            Self::Dirty { sectors, .. } => sectors,
        }
    }
}

/// The bytes of a place in a map sector: its chunk and one more, its serial, its sectors.
const ENTRY_BYTES: usize = 40;
const SERIAL_AT: usize = 4;
const SECTORS_AT: usize = 8;

impl Entry for SurrogateEntry {
    const BITS: u32 = ENTRY_BYTES as u32 * 8;
    const NOTHING: Self = Self::Clean;
    const CLASSES: usize = 2;

    fn class(self) -> usize {
        usize::from(self != Self::Clean)
    }

    fn hides_base(self) -> bool {
        self != Self::Clean
    }

    fn decode(body: &Body, grain: u64) -> Option<Self> {
        let start = grain as usize * ENTRY_BYTES;
        let bytes = &body[start..start + ENTRY_BYTES];
        let chunk = u32::from_le_bytes(bytes[..SERIAL_AT].try_into().ok()?);
        let serial = u32::from_le_bytes(bytes[SERIAL_AT..SECTORS_AT].try_into().ok()?);
        let mut sectors = DirtySectors::default();
        for (word, bytes) in sectors.0.iter_mut().zip(bytes[SECTORS_AT..].chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        match (chunk.checked_sub(1), sectors.is_empty()) {
            (None, true) if serial == 0 => Some(Self::Clean),
            (Some(chunk), false) => Some(Self::Dirty { chunk, serial, sectors }),
            _ => None,
        }
    }

    fn fill(self, body: &mut Body, run: Range<u64>) {
        let mut bytes = [0; ENTRY_BYTES];
        if let Self::Dirty { chunk, serial, sectors } = self {
            bytes[..SERIAL_AT].copy_from_slice(&(chunk + 1).to_le_bytes());
            bytes[SERIAL_AT..SECTORS_AT].copy_from_slice(&serial.to_le_bytes());
            for (place, word) in bytes[SECTORS_AT..].chunks_exact_mut(8).zip(sectors.0) {
                place.copy_from_slice(&word.to_le_bytes());
            }
        }
        for grain in run {
            let start = grain as usize * ENTRY_BYTES;
            body[start..start + ENTRY_BYTES].copy_from_slice(&bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_back_and_leaves_its_neighbours_alone() {
        let mut body = [0; crate::store::BODY_BYTES];
        let sectors = DirtySectors::default().with(0..1).with(63..66).with(255..256);
        let state = SurrogateEntry::Dirty { chunk: 0, serial: 9, sectors };
        state.fill(&mut body, 3..4);
        assert_eq!(SurrogateEntry::decode(&body, 3), Some(state));
        for other in [0, 2, 4, SurrogateEntry::SECTOR_GRAINS - 1] {
            assert_eq!(SurrogateEntry::decode(&body, other), Some(SurrogateEntry::Clean));
        }
        SurrogateEntry::Clean.fill(&mut body, 3..4);
        assert_eq!(body, [0; crate::store::BODY_BYTES]);
        // Sectors of no chunk, and a chunk without sectors.
        body[SECTORS_AT] = 1;
        assert_eq!(SurrogateEntry::decode(&body, 0), None);
        body[SECTORS_AT] = 0;
        body[0] = 1;
        assert_eq!(SurrogateEntry::decode(&body, 0), None);
    }

    #[test]
    fn sectors_come_in_runs() {
        let sectors = DirtySectors::default().with(2..4).with(5..6);
        assert_eq!(sectors.dirty_runs(1..6), [2..4, 5..6]);
        assert_eq!(sectors.clean_runs(1..6), [1..2, 4..5]);
        assert!(sectors.contains_all(2..4) && !sectors.contains_all(2..5));
        assert!(sectors.contains_any(0..3) && !sectors.contains_any(0..2));
    }
}
