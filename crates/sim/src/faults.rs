//! What may go wrong with a disk.

use std::time::Duration;

/// What may go wrong, as probabilities per request. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// A read fails.
    pub read_errors: f64,
    /// A read gives fewer bytes than it was asked for, which the checked device makes an error of.
    pub short_reads: f64,
    /// A write fails, having landed wholly, in part or not at all.
    pub write_errors: f64,
    /// A flush fails, and what it covered is never made durable by a later one.
    pub flush_errors: f64,
    /// A request is answered only after up to [`STUCK_MAX`].
    pub stuck: f64,
    /// A request begins a period of up to 50 ms in which the disk is 20 times slower.
    pub slow: f64,
    /// A part of a write is answered and never lands. Only a comparison can find this and the next two, so the host ends
    /// them when one begins.
    pub lost_writes: f64,
    /// A part of a write lands somewhere else on the same disk.
    pub misdirected_writes: f64,
    /// A part of a write lands with one bit that is wrong.
    pub flipped_bits: f64,
}

/// The longest that a stuck request takes.
pub const STUCK_MAX: Duration = Duration::from_secs(90);

impl Faults {
    /// Every one of them with its name, to be looked at or changed.
    pub fn each(&mut self) -> [(&'static str, &mut f64); 9] {
        [
            ("read-errors", &mut self.read_errors),
            ("short-reads", &mut self.short_reads),
            ("write-errors", &mut self.write_errors),
            ("flush-errors", &mut self.flush_errors),
            ("stuck", &mut self.stuck),
            ("slow", &mut self.slow),
            ("lost-writes", &mut self.lost_writes),
            ("misdirected-writes", &mut self.misdirected_writes),
            ("flipped-bits", &mut self.flipped_bits),
        ]
    }

    /// Whether some write may be answered without being what was asked for.
    #[must_use]
    pub fn lies(&self) -> bool {
        self.lost_writes > 0.0 || self.misdirected_writes > 0.0 || self.flipped_bits > 0.0
    }

    /// The same without the lies.
    #[must_use]
    pub const fn honest(self) -> Self {
        Self { lost_writes: 0.0, misdirected_writes: 0.0, flipped_bits: 0.0, ..self }
    }

    /// The names of those that may happen, with how often they do.
    #[must_use]
    pub fn describe(mut self) -> String {
        let some = self.each().into_iter().filter(|(_, probability)| **probability > 0.0);
        some.map(|(name, probability)| format!("{name} {probability:.4}")).collect::<Vec<_>>().join(", ")
    }
}
