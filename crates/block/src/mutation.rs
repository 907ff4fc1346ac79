//! Everything that changes a volume, as one value.

use std::sync::Arc;

use crate::{Data, Extent};

/// What a mutation leaves in its extent.
#[derive(Clone, Debug)]
pub enum MutationKind {
    /// These bytes. Shared and immutable, so that a mirror writes the same private buffer to both sides.
    Data(Data),
    /// Zeroes. With `may_unmap` the space may be given back (NBD's write-zeroes without `NO_HOLE`).
    Zeroes {
        /// Whether the space may be given back.
        may_unmap: bool,
    },
    /// Unneeded: the guest relies on nothing there. Reads afterwards may give anything, but always the same.
    Discard,
}

/// Checksums (xxh3 with 64 bits and seed 0) of parts of a mutation's data, made when the data came to be. A layer that
/// passes it on over something unreliable need not make them again. A comparison compares with the original data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checks(Vec<(Extent, u64)>);

impl Checks {
    /// Of these parts, in the order of the volume and apart from each other.
    ///
    /// # Panics
    /// If they are in another order, or overlap.
    #[must_use]
    pub fn new(parts: Vec<(Extent, u64)>) -> Self {
        let are_in_order = parts.is_sorted_by(|(one, _), (other, _)| one.end() <= other.offset);
        assert!(are_in_order, "checksums of parts in another order than the volume's");
        Self(parts)
    }

    /// The parts.
    #[must_use]
    pub fn parts(&self) -> &[(Extent, u64)] {
        &self.0
    }

    /// The checksum of exactly this part, if it was made.
    #[must_use]
    pub fn of(&self, part: Extent) -> Option<u64> {
        let found = self.0.binary_search_by_key(&part.offset, |(own, _)| own.offset).ok()?;
        let (own, check) = self.0[found];
        (own == part).then_some(check)
    }
}

/// One change of a volume: data, zeroes or a discard, with forced unit access or without.
#[derive(Clone, Debug)]
pub struct Mutation {
    extent: Extent,
    kind: MutationKind,
    checks: Option<Arc<Checks>>,
    /// Durable before it is answered (forced unit access).
    pub fua: bool,
}

impl Mutation {
    /// Write `data` at `offset`.
    #[must_use]
    pub fn data(offset: crate::Bytes, data: Data) -> Self {
        Self {
            extent: Extent::new(offset, data.len().into()),
            kind: MutationKind::Data(data),
            checks: None,
            fua: false,
        }
    }

    /// Make `extent` read as zeroes, giving the space back if `may_unmap`.
    #[must_use]
    pub const fn zeroes(extent: Extent, may_unmap: bool) -> Self {
        Self { extent, kind: MutationKind::Zeroes { may_unmap }, checks: None, fua: false }
    }

    /// Declare the contents of `extent` unneeded.
    #[must_use]
    pub const fn discard(extent: Extent) -> Self {
        Self { extent, kind: MutationKind::Discard, checks: None, fua: false }
    }

    /// This mutation, durable before it is answered if `fua`.
    #[must_use]
    pub const fn with_fua(mut self, fua: bool) -> Self {
        self.fua = fua;
        self
    }

    /// This mutation, whose data had these checksums when it came to be. Extents are the volume's.
    #[must_use]
    pub fn with_checks(mut self, checks: Arc<Checks>) -> Self {
        self.checks = Some(checks);
        self
    }

    /// What was noted of its data when it came to be.
    #[must_use]
    pub fn checks(&self) -> Option<&Checks> {
        self.checks.as_deref()
    }

    /// The bytes that it changes.
    #[must_use]
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// What it leaves there.
    #[must_use]
    pub const fn kind(&self) -> &MutationKind {
        &self.kind
    }

    /// The part of this mutation that lies within `part`.
    ///
    /// # Panics
    /// If `part` is not within this mutation's extent.
    #[must_use]
    pub fn slice(&self, part: Extent) -> Self {
        assert!(self.extent.contains(part), "{part:?} lies outside the mutation of {:?}", self.extent);
        let kind = match &self.kind {
            MutationKind::Data(data) => {
                let start = (part.offset - self.extent.offset).as_usize();
                MutationKind::Data(data.slice(start..start + part.length.as_usize()))
            }
            other => other.clone(),
        };
        Self { extent: part, kind, checks: self.checks.clone(), fua: self.fua }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;

    #[test]
    fn the_checksum_of_a_part_is_known_for_exactly_that_part_and_stays_with_what_is_cut_out() {
        let extent = |offset, length| Extent::new(Bytes(offset), Bytes(length));
        let checks = Checks::new(vec![(extent(0, 10), 1), (extent(10, 20), 2), (extent(40, 5), 3)]);
        assert_eq!(checks.of(extent(10, 20)), Some(2));
        for other in [extent(10, 19), extent(11, 19), extent(0, 30), extent(30, 10), extent(45, 1)] {
            assert_eq!(checks.of(other), None, "{other}");
        }
        let whole = Mutation::data(Bytes(0), Data::copy_of(&[7; 50])).with_checks(Arc::new(checks));
        let part = whole.slice(extent(10, 20));
        assert_eq!(part.checks().and_then(|checks| checks.of(part.extent())), Some(2));
        assert!(Mutation::zeroes(extent(0, 10), false).checks().is_none());
    }

    #[test]
    #[should_panic(expected = "in another order")]
    fn parts_that_overlap_are_a_defect() {
        let extent = |offset, length| Extent::new(Bytes(offset), Bytes(length));
        let _ = Checks::new(vec![(extent(0, 10), 1), (extent(9, 20), 2)]);
    }
}
