//! Everything that changes a volume, as one value.

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
    /// Nothing that the guest relies on. Reads afterwards may give anything, but always the same.
    Discard,
}

/// One change of a volume: data, zeroes or a discard, with forced unit access or without.
#[derive(Clone, Debug)]
pub struct Mutation {
    extent: Extent,
    kind: MutationKind,
    /// Durable before it is answered (forced unit access).
    pub fua: bool,
}

impl Mutation {
    /// Write `data` at `offset`.
    #[must_use]
    pub fn data(offset: crate::Bytes, data: Data) -> Self {
        Self { extent: Extent::new(offset, data.len().into()), kind: MutationKind::Data(data), fua: false }
    }

    /// Make `extent` read as zeroes, giving the space back if `may_unmap`.
    #[must_use]
    pub const fn zeroes(extent: Extent, may_unmap: bool) -> Self {
        Self { extent, kind: MutationKind::Zeroes { may_unmap }, fua: false }
    }

    /// Declare the contents of `extent` unneeded.
    #[must_use]
    pub const fn discard(extent: Extent) -> Self {
        Self { extent, kind: MutationKind::Discard, fua: false }
    }

    /// This mutation, durable before it is answered if `fua`.
    #[must_use]
    pub const fn with_fua(mut self, fua: bool) -> Self {
        self.fua = fua;
        self
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
        Self { extent: part, kind, fua: self.fua }
    }
}
