//! A disk that answers nothing for a while: a server that is stopped.

use std::time::Duration;

use super::Disk;

impl Disk {
    /// Answers nothing for `span`, whatever it is asked and was asked before. What is written lands no earlier.
    pub fn be_silent(&self, span: Duration) {
        let until = self.shared.world.now() + span;
        self.shared.world.fault("silent", format_args!("{} for {span:?}", self.shared.name));
        self.state().silent_until = until;
    }

    /// Answers again.
    pub fn end_silence(&self) {
        self.state().silent_until = self.shared.world.now();
        self.shared.settled.notify_waiters();
    }

    /// Waits until it answers.
    pub(crate) async fn heard(&self) {
        loop {
            let ended = self.shared.settled.notified();
            let until = self.state().silent_until;
            if self.shared.world.now() >= until {
                return;
            }
            tokio::select! {
                biased;
                () = self.shared.world.sleep_until(until) => {}
                () = ended => {}
            }
        }
    }
}
