//! The event log of one run: hashed whole, so that two runs can be compared, with its tail kept for whoever reads a
//! failure.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};

use env::Moment;

/// How many events of a run are kept for its failure's report.
const TAIL_EVENTS: usize = 60;

/// What becomes of the events of a run besides being hashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// The last ones are kept.
    #[default]
    Tail,
    /// All are kept.
    All,
}

/// The events of one run.
pub(crate) struct EventLog {
    keep: Keep,
    hasher: DefaultHasher,
    count: u64,
    lines: VecDeque<String>,
}

impl EventLog {
    pub(crate) fn new(keep: Keep) -> Self {
        // Made by `new`, this hasher has fixed keys: the hash is the same in every run.
        Self { keep, hasher: DefaultHasher::new(), count: 0, lines: VecDeque::new() }
    }

    pub(crate) fn add(&mut self, at: Moment, event: fmt::Arguments<'_>) {
        let mut line = match self.lines.len() >= TAIL_EVENTS && self.keep == Keep::Tail {
            true => self.lines.pop_front().unwrap_or_default(),
            false => String::new(),
        };
        line.clear();
        let microseconds = at.0.as_micros();
        fmt::Write::write_fmt(
            &mut line,
            format_args!("{:>6}.{:06} {event}", microseconds / 1_000_000, microseconds % 1_000_000),
        )
        .expect("a string takes any text");
        self.hasher.write(line.as_bytes());
        self.count += 1;
        self.lines.push_back(line);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hasher.finish()
    }

    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}
