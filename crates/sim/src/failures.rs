//! Which failures of disks a guest may be told.
//!
//! A request of the guest may fail only if a request to the disk that holds the volume has failed for the same bytes.
//! That failure must be later than the moment when the request was first asked. While it is not decided which disk that
//! is, a failure of either counts. Disks that are slow, stuck or full of other data explain nothing.

use std::sync::Arc;

use block::{BLOCK_BYTES, Bytes, Extent};
use env::Moment;
use parking_lot::Mutex;

/// What was asked of a disk, and has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Read,
    Write,
    Flush,
}

#[derive(Clone, Copy, Debug)]
struct Failure {
    at: Moment,
    verb: Verb,
    extent: Extent,
}

/// Says of each side whether the guest may be told of its failures now.
type Judge = Box<dyn Fn() -> [bool; 2] + Send>;

#[derive(Default)]
struct State {
    judge: Option<Judge>,
    /// Told of every flush that has lost what it covered.
    when_lost: Option<Box<dyn Fn() + Send>>,
    /// There was one.
    has_lost: bool,
    /// Something that alone has a part of the volume has failed a request: whatever is over it may go on to fail.
    has_layer_failed: bool,
    /// In the order of their moments.
    failures: Vec<Failure>,
}

/// The failures that a guest may be told. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Failures {
    state: Arc<Mutex<State>>,
}

impl Failures {
    /// From now on `judge` says which sides' failures count.
    pub(crate) fn excused_by(&self, judge: impl Fn() -> [bool; 2] + Send + 'static) {
        self.state.lock().judge = Some(Box::new(judge));
    }

    /// From now on `told` is called whenever a flush of a disk that counts has lost for good what it covered.
    pub(crate) fn tell_losses(&self, told: impl Fn() + Send + 'static) {
        self.state.lock().when_lost = Some(Box::new(told));
    }

    /// The scenario is over.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        (state.judge, state.when_lost) = (None, None);
    }

    /// A flush has lost what it covered, and whoever has the disk open knows it.
    pub(crate) fn note_lost(&self) {
        if let Some(told) = &self.state.lock().when_lost {
            told();
        }
    }

    /// Whether the failure of any flush so far may have cost anything: those of disks that were only away have not.
    pub(crate) fn has_lost(&self) -> bool {
        self.state.lock().has_lost
    }

    /// A request to `side` fails, and nothing of what was answered before is lost by that.
    fn note_refused(&self, side: usize, verb: Verb, extent: Extent, at: Moment) {
        let has_lost = self.has_lost();
        self.note(side, verb, extent, at);
        self.state.lock().has_lost = has_lost;
    }

    /// A request to `side` fails.
    pub(crate) fn note(&self, side: usize, verb: Verb, extent: Extent, at: Moment) {
        let mut state = self.state.lock();
        state.has_lost |= verb == Verb::Flush;
        if state.judge.as_ref().is_none_or(|judge| judge()[side]) {
            state.failures.push(Failure { at, verb, extent });
        }
    }

    /// Whether a request of the guest for `extent` that was asked at `since` may fail. Whole blocks count, because a part of
    /// one may be read before it is written. A flush is about everything, and may fail
    /// later for one that has failed before.
    pub(crate) fn explain(&self, verb: Verb, extent: Extent, since: Moment) -> bool {
        let start = extent.offset.align_down(BLOCK_BYTES);
        let whole = Extent::between(start, extent.end().align_up(BLOCK_BYTES));
        let touches = |failure: &Failure| match (verb, failure.verb) {
            (Verb::Flush, found) => found == Verb::Flush,
            (Verb::Read, Verb::Read) | (Verb::Write, Verb::Read | Verb::Write) => {
                failure.extent.offset < whole.end() && whole.offset < failure.extent.end()
            }
            _ => false,
        };
        // A failed flush that nobody was told of is told to a flush that comes later, on another connection.
        let since = if verb == Verb::Flush { Moment::default() } else { since };
        let state = self.state.lock();
        state.has_layer_failed || state.failures.iter().rev().take_while(|failure| failure.at >= since).any(touches)
    }
}

/// A disk's way to say that it has failed.
#[derive(Clone)]
pub(crate) struct Reporter {
    pub(crate) failures: Failures,
    pub(crate) side: usize,
    /// What it holds lies elsewhere in the volume, and a request of anything may fail because of it.
    pub(crate) is_layer: bool,
}

impl Reporter {
    pub(crate) fn note(&self, verb: Verb, extent: Extent, at: Moment) {
        self.failures.note(self.side, verb, self.meant(extent), at);
    }

    /// What of the volume a request for `extent` is about.
    fn meant(&self, extent: Extent) -> Extent {
        self.failures.state.lock().has_layer_failed |= self.is_layer;
        extent
    }

    /// The same of a disk that is away.
    pub(crate) fn note_refused(&self, verb: Verb, extent: Extent, at: Moment) {
        self.failures.note_refused(self.side, verb, self.meant(extent), at);
    }
}

/// A flush is about all of a disk.
pub(crate) const EVERYTHING: Extent = Extent::new(Bytes::ZERO, Bytes::ZERO);

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const fn at(micros: u64) -> Moment {
        Moment(Duration::from_micros(micros))
    }

    const fn extent(offset: u64, length: u64) -> Extent {
        Extent::new(Bytes(offset), Bytes(length))
    }

    #[test]
    fn a_failure_explains_requests_for_the_same_bytes_that_were_asked_before_it() {
        let failures = Failures::default();
        failures.excused_by(|| [true, false]);
        failures.note(0, Verb::Write, extent(8192, 512), at(10));
        assert!(failures.explain(Verb::Write, extent(8704, 512), at(10)), "the same block");
        assert!(!failures.explain(Verb::Write, extent(12_288, 512), at(10)), "another block");
        assert!(!failures.explain(Verb::Write, extent(8192, 512), at(11)), "it was asked later");
        assert!(!failures.explain(Verb::Read, extent(8192, 512), at(10)), "no read has failed");
        assert!(!failures.explain(Verb::Flush, EVERYTHING, at(10)), "no flush has failed");
        failures.note(1, Verb::Flush, EVERYTHING, at(12));
        assert!(!failures.explain(Verb::Flush, EVERYTHING, at(0)), "another disk's");
        failures.note(0, Verb::Read, extent(0, 512), at(13));
        assert!(failures.explain(Verb::Write, extent(1024, 512), at(5)), "what a part of a block is written into");
    }
}
