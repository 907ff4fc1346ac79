//! The passes of the strategy that chooses for itself: what they rest on, and what follows each.

use std::time::Duration;

use env::Moment;

use super::Driver;
use crate::Event;
use crate::strategy::auto::write_policy::PassRuling;

/// How often it is said again which chunks are hot.
const LOOK: Duration = Duration::from_millis(250);

/// When the guest's writes were looked at last, and how many there had been.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heeded {
    at: Moment,
    writes: u64,
}

impl Driver {
    pub(super) fn begin_auto_pass(&mut self) {
        if self.mirror.tracker(|tracker| tracker.begin_auto_pass()) {
            self.cursor = 0;
        }
    }

    /// Looks at what the guest writes, if it is time to.
    pub(super) fn heed(&mut self) {
        let now = self.env.now();
        let rate = self.statistics.rate();
        if now < self.heeded.at + LOOK || rate == 0 || !self.mirror.tracker(|tracker| tracker.auto_passes()) {
            return;
        }
        let span = now.since(self.heeded.at);
        let writes = self.mirror.tracker(|tracker| {
            let left = (tracker.size() - tracker.bytes_in_step()).0 as f64 / rate as f64;
            tracker.tune_auto_pass(Duration::from_secs_f64(left.min(1e9)), self.heeded.writes, span)
        });
        self.heeded = Heeded { at: now, writes };
    }

    /// Whether the pass under way has copied all that it was to copy.
    pub(super) fn is_pass_over(&self) -> bool {
        self.mirror.tracker(|tracker| tracker.is_pass_over() || tracker.is_auto_pass_over(self.cursor))
    }

    /// A pass is over. Says how the move goes on; `None` is with the next pass.
    pub(super) async fn end_auto_pass(&mut self) -> Option<Event> {
        let rate = self.statistics.rate();
        let (ruling, decision) = self.mirror.tracker(|tracker| tracker.decide_auto_pass(rate))?;
        tracing::info!(pass = self.passes.number(), ?ruling, decision, "a pass is over");
        self.end_pass(decision);
        if ruling == PassRuling::Done {
            return Some(Event::Copied);
        }
        self.begin_pass(false).await;
        None
    }
}
