//! Another order, without what the guest writes again and again: that is put off (ESX paper, section 2.3).

use std::sync::Arc;

use super::{Candidates, Choice, GuestListener, Schedule};

/// So many hot chunks are put off under one lock of the tracker.
const PUT_OFF_AT_ONCE: u32 = 1024;

/// What `inner` chooses, up to the first hot chunk. Hot ones on the way are put off; what becomes of them the pass knows.
#[derive(Debug)]
pub(crate) struct HotLast<S> {
    inner: S,
}

impl<S> HotLast<S> {
    pub(crate) const fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S: Schedule> Schedule for HotLast<S> {
    fn next(&mut self, candidates: &mut dyn Candidates, from: u64, chunks_max: u64) -> Choice {
        let mut from = from;
        for _ in 0..PUT_OFF_AT_ONCE {
            if !candidates.puts_off() {
                return self.inner.next(candidates, from, chunks_max);
            }
            let run = match self.inner.next(candidates, from, chunks_max) {
                Choice::Copy(run) => run,
                other => return other,
            };
            match run.clone().find(|index| candidates.is_hot(*index)) {
                None => return Choice::Copy(run),
                Some(first) if first > run.start => return Choice::Copy(run.start..first),
                Some(first) => {
                    candidates.put_off(first);
                    from = first + 1;
                }
            }
        }
        match candidates.passes_once() {
            true => Choice::GoOnAt(from),
            // One that is hot after so many others is copied: the guest has waited for long enough.
            false => self.inner.next(candidates, from, chunks_max),
        }
    }

    fn listener(&self) -> Option<Arc<dyn GuestListener>> {
        self.inner.listener()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::ascending::Ascending;
    use crate::schedule::fake::Waiting;

    #[test]
    fn what_is_hot_is_put_off_and_all_else_is_copied_in_order() {
        let mut waiting = Waiting::new(20, [0, 1, 5, 19]);
        let (mut schedule, mut from, mut runs) = (HotLast::new(Ascending), 0, Vec::new());
        while let Choice::Copy(run) = schedule.next(&mut waiting, from, 8) {
            run.clone().for_each(|index| _ = waiting.absent.remove(&index));
            from = run.end;
            runs.push((run.start, run.end));
        }
        assert_eq!(runs, [(2, 5), (6, 14), (14, 19)]);
        assert_eq!((waiting.put_off, waiting.absent.len()), (vec![0, 1, 5, 19], 0));
    }

    #[test]
    fn so_many_hot_chunks_are_not_put_off_under_one_lock() {
        let mut schedule = HotLast::new(Ascending);
        let mut waiting = Waiting::new(3000, 0..3000);
        assert_eq!(schedule.next(&mut waiting, 0, 8), Choice::Copy(1024..1032), "it is copied although it is hot");
        let mut waiting = Waiting { passes_once: true, ..Waiting::new(3000, 0..3000) };
        assert_eq!(schedule.next(&mut waiting, 0, 8), Choice::GoOnAt(1024));
    }

    #[test]
    fn without_anything_hot_it_is_the_order_below() {
        let mut waiting = Waiting::new(20, []);
        let mut schedule = HotLast::new(Ascending);
        assert_eq!(schedule.next(&mut waiting, 12, 100), Ascending.next(&mut waiting, 12, 100));
        assert_eq!(schedule.next(&mut waiting, 20, 8), Choice::Nothing);
    }
}
