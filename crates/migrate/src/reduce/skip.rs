//! Skipping: which chunks need not be sent, and why.
//!
//! A skipped chunk reads as zeroes at the target. Where the target is known to do so it is left alone; otherwise zeroes that
//! may unmap are written there. So a skip can never be wrong about the target, only about the source. The source is
//! asked while nobody else may change the chunk:
//!
//! ```text
//!   look     a hint, without a lock, for the size of the next copy
//!   confirm  under the range's lock, before the source is read: a run that is skipped is not read
//!   judge    under the range's lock, of a chunk's data that was read
//! ```
//!
//! Where guest writes are tracked there is no lock, and a write meanwhile leaves the chunk dirty: it is copied again.
//!
//! [`SkipMap`](super::skip_map::SkipMap) records what was skipped. A write to a skipped chunk takes it out of the map: from then
//! on it is like any other that was copied.

use std::sync::Arc;

use block::{Bytes, Device, Extent, Result};
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::zeroes::{is_zero, zero_prefix};

/// Why a chunk was not sent. The names are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SkipReason {
    /// The source says, without being read, that it reads as zeroes.
    Hole,
    /// It was read, and is all zeroes.
    Zero,
}

impl SkipReason {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Hole, Self::Zero];

    /// The word for it in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hole => "hole",
            Self::Zero => "zero",
        }
    }
}

/// The part of an extent, from its start, of which one thing can be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    /// Where it ends.
    pub(crate) end: Bytes,
    /// Why it need not be sent; `None` if it must, or if that is not known yet.
    pub(crate) reason: Option<SkipReason>,
}

/// Says what need not be sent.
pub(crate) trait Skip: Send + Sync {
    /// What can be said of the first part of `extent` without reading it. Nothing keeps it from changing.
    fn look<'a>(&'a self, source: &'a Device, extent: Extent) -> BoxFuture<'a, Stretch>;

    /// Where the part of `extent`, from its start, ends that need not be sent, and need not be read to know that. The caller
    /// keeps it from changing.
    ///
    /// # Errors
    /// The source cannot tell.
    fn confirm<'a>(&'a self, source: &'a Device, extent: Extent) -> BoxFuture<'a, Result<Stretch>>;

    /// Why a chunk, or the part of one, that holds `data` need not be sent.
    fn judge(&self, data: &[u8]) -> Option<SkipReason>;

    /// Whether it must see the data: of a copy that somebody below makes by itself it would see none.
    fn needs_data(&self) -> bool;
}

/// Holes: the source is asked, not read.
pub(crate) struct Holes;

impl Skip for Holes {
    fn look<'a>(&'a self, source: &'a Device, extent: Extent) -> BoxFuture<'a, Stretch> {
        Box::pin(async move {
            // A source that cannot tell is read.
            let Ok(pieces) = source.extents(extent).await else { return Stretch { end: extent.end(), reason: None } };
            let is_hole = pieces[0].state.reads_zero();
            let last = pieces.iter().take_while(|piece| piece.state.reads_zero() == is_hole).last();
            let end = last.map_or(extent.end(), |piece| piece.extent.end());
            Stretch { end, reason: is_hole.then_some(SkipReason::Hole) }
        })
    }

    fn confirm<'a>(&'a self, source: &'a Device, extent: Extent) -> BoxFuture<'a, Result<Stretch>> {
        Box::pin(async move {
            let end = zero_prefix(source, extent).await?;
            Ok(Stretch { end, reason: Some(SkipReason::Hole) })
        })
    }

    fn judge(&self, _: &[u8]) -> Option<SkipReason> {
        None
    }

    fn needs_data(&self) -> bool {
        false
    }
}

/// Zeroes: what was read and holds nothing else. Beyond that it knows what `unread` does.
pub(crate) struct Zeroes<S> {
    pub(crate) unread: S,
}

impl<S: Skip> Skip for Zeroes<S> {
    fn look<'a>(&'a self, source: &'a Device, extent: Extent) -> BoxFuture<'a, Stretch> {
        self.unread.look(source, extent)
    }

    fn confirm<'a>(&'a self, source: &'a Device, extent: Extent) -> BoxFuture<'a, Result<Stretch>> {
        self.unread.confirm(source, extent)
    }

    fn judge(&self, data: &[u8]) -> Option<SkipReason> {
        self.unread.judge(data).or_else(|| is_zero(data).then_some(SkipReason::Zero))
    }

    fn needs_data(&self) -> bool {
        true
    }
}

/// What a move skips: holes always, and zeroes if that is asked for.
pub(crate) fn of(skip_zero: bool) -> Arc<dyn Skip> {
    match skip_zero {
        true => Arc::new(Zeroes { unread: Holes }),
        false => Arc::new(Holes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Data, MemDevice, Mutation};

    #[tokio::test]
    async fn holes_are_skipped_unread_and_zeroes_when_they_were_read() {
        let source = Device::new("source", MemDevice::new(Bytes::mib(1)));
        let zeroes = Data::copy_of(&[0; 65_536]);
        source.write(Mutation::data(Bytes::kib(256), zeroes)).await.expect("memory takes it");
        let whole = Extent::whole(Bytes::mib(1));
        for skip_zero in [false, true] {
            let skip = of(skip_zero);
            let hole = Stretch { end: Bytes::kib(256), reason: Some(SkipReason::Hole) };
            assert_eq!(skip.look(&source, whole).await, hole);
            assert_eq!(skip.confirm(&source, whole).await.expect("memory answers"), hole);
            let behind = Extent::between(hole.end, whole.end());
            assert_eq!(skip.look(&source, behind).await.reason, None, "it must be read first");
            assert_eq!(skip.confirm(&source, behind).await.expect("memory answers").end, behind.offset);
            assert_eq!(skip.judge(&[0; 4096]), skip_zero.then_some(SkipReason::Zero));
            assert_eq!((skip.judge(&[0, 0, 1]), skip.needs_data()), (None, skip_zero));
        }
    }

    #[test]
    fn the_names_of_reasons_are_those_of_the_record() {
        for reason in SkipReason::ALL {
            assert_eq!(serde_json::to_string(&reason).expect("a word"), format!("\"{}\"", reason.name()));
        }
    }
}
