//! How many requests for blocks are in flight: as many as the other end answers without making them wait.

use std::time::Duration;

const START: u32 = 8;
const LEAST: u32 = 4;
/// A request that takes so many times the shortest has waited.
const WAITED_TIMES: u32 = 3;
/// And so much longer, at least.
const WAITED_AT_LEAST: Duration = Duration::from_millis(2);
/// Of so many answers the shortest is remembered.
const REMEMBERED: u32 = 4096;

/// A window that grows by one for each of its lengths, and shrinks when an answer took long.
pub(super) struct Window {
    size: u32,
    max: u32,
    shortest: Duration,
    answers: u32,
    since_change: u32,
}

impl Window {
    pub(super) fn new(max: u32) -> Self {
        let max = max.max(1);
        Self { size: START.min(max), max, shortest: Duration::MAX, answers: 0, since_change: 0 }
    }

    pub(super) const fn size(&self) -> u32 {
        self.size
    }

    /// An answer has come after `span`.
    pub(super) fn note(&mut self, span: Duration) {
        self.answers += 1;
        if self.answers >= REMEMBERED {
            (self.answers, self.shortest) = (0, Duration::MAX);
        }
        self.shortest = self.shortest.min(span);
        self.since_change += 1;
        if self.since_change < self.size {
            return;
        }
        self.since_change = 0;
        let has_waited = span > self.shortest.saturating_mul(WAITED_TIMES).max(self.shortest + WAITED_AT_LEAST);
        self.size = match has_waited {
            true => (self.size * 3 / 4).max(LEAST.min(self.max)),
            false => (self.size + 1 + self.size / 8).min(self.max),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_while_answers_are_quick_and_closes_when_they_wait() {
        let mut window = Window::new(128);
        let note = |window: &mut Window, times: u32, ms: u64| {
            (0..times).for_each(|_| window.note(Duration::from_millis(ms)));
        };
        note(&mut window, 3000, 1);
        assert_eq!(window.size(), 128);
        note(&mut window, 900, 20);
        assert_eq!(window.size(), 4);
        // It has got used to it.
        note(&mut window, 9000, 20);
        assert_eq!(window.size(), 128);
        assert_eq!(Window::new(1).size(), 1);
    }
}
