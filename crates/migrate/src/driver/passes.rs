//! The passes of a copy over what is not in step: how long each took and what it left.

use env::Moment;

use crate::Iteration;

/// So many are kept for the report.
const KEPT_MAX: usize = 512;

/// The passes so far and the one under way.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    done: Vec<Iteration>,
    current: Option<Current>,
    /// How many there were, those included that are not kept any more.
    count: u32,
}

/// The pass under way.
#[derive(Clone, Copy, Debug)]
struct Current {
    began: Moment,
    /// What was not in step when it began.
    bytes: u64,
    /// What had been copied before it.
    copied_before: u64,
    held: bool,
}

/// What a pass has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PassResult {
    /// What all passes together have copied as data.
    pub(crate) copied: u64,
    /// What is not in step now.
    pub(crate) dirty: u64,
    /// Of that, what was put off.
    pub(crate) deferred: u64,
}

impl Passes {
    /// A pass over `bytes` begins, unless one is under way already: a copy that was interrupted goes on with its pass.
    pub(crate) fn begin(&mut self, now: Moment, bytes: u64, copied_before: u64, held: bool) {
        if self.current.is_none() {
            self.count += 1;
            self.current = Some(Current { began: now, bytes, copied_before, held });
        }
    }

    /// The pass under way has come to its end.
    pub(crate) fn end(&mut self, now: Moment, left: PassResult, decision: String) {
        let Some(Current { began, bytes, copied_before, held }) = self.current.take() else { return };
        if self.done.len() == KEPT_MAX {
            // The first tells of the whole volume; the oldest after it goes.
            self.done.remove(1);
        }
        self.done.push(Iteration {
            number: self.count,
            bytes,
            bytes_copied: left.copied.saturating_sub(copied_before),
            seconds: now.since(began).as_secs_f64(),
            bytes_dirty: left.dirty,
            bytes_deferred: left.deferred,
            held,
            decision,
        });
    }

    /// The number of the pass under way, or of the last one.
    pub(crate) const fn number(&self) -> u32 {
        self.count
    }

    /// Whether one is under way.
    pub(crate) const fn is_under_way(&self) -> bool {
        self.current.is_some()
    }

    /// What the pass under way began with.
    pub(crate) fn bytes(&self) -> u64 {
        self.current.map_or(0, |current| current.bytes)
    }

    /// The passes that are over.
    pub(crate) fn done(&self) -> &[Iteration] {
        &self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    #[test]
    fn a_pass_that_was_interrupted_goes_on() {
        let mut passes = Passes::default();
        passes.begin(at(1), 100, 0, false);
        passes.begin(at(5), 60, 40, false);
        passes.end(at(9), PassResult { copied: 110, dirty: 7, deferred: 0 }, "go on".to_owned());
        let [pass] = passes.done() else { panic!("{passes:?}") };
        assert_eq!((pass.number, pass.bytes, pass.bytes_copied, pass.seconds, pass.bytes_dirty), (1, 100, 110, 8.0, 7));
    }

    #[test]
    fn of_very_many_passes_the_first_and_the_last_are_kept() {
        let mut passes = Passes::default();
        for second in 0..2000 {
            passes.begin(at(second), 1, 0, false);
            passes.end(at(second + 1), PassResult::default(), String::new());
        }
        let numbers: Vec<u32> = passes.done().iter().map(|pass| pass.number).collect();
        assert_eq!((numbers.len(), numbers[0], numbers[1], numbers[KEPT_MAX - 1]), (KEPT_MAX, 1, 1490, 2000));
    }
}
