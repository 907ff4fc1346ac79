//! What the guests of the evaluation do.

use std::ops::Range;

use crate::workload::{Exchange, ExchangeFigures, Oltp, Shifted, Workload};

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Load {
    /// None: the offline copy.
    Idle,
    /// Iometer's OLTP with so many requests outstanding.
    Oltp {
        /// How many.
        outstanding: usize,
    },
    /// A mail server at so many times its normal load; see `exchange`.
    Exchange {
        /// How many times.
        intensity: u64,
    },
}

/// More requests than this of a mail server are not under way at once: its page cache and threads are finite.
const EXCHANGE_OUTSTANDING: usize = 64;

impl Load {
    /// The requests on the bytes `data`, and how many may be outstanding.
    pub(super) fn start(self, data: Range<u64>, scale: u64) -> Option<(Box<dyn Workload>, usize)> {
        match self {
            Self::Idle => None,
            Self::Oltp { outstanding } => {
                let load = Shifted::new(data.start, Oltp::iometer(data.end - data.start));
                Some((Box::new(load), outstanding))
            }
            Self::Exchange { intensity } => {
                let size = data.end - data.start;
                let figures = ExchangeFigures {
                    size,
                    page_bytes: 32 << 10,
                    pages: 3_000_000 / scale,
                    exponent: 0.7,
                    reads: 0.4,
                    rate: 600.0 * intensity as f64,
                };
                Some((Box::new(Shifted::new(data.start, Exchange::new(figures))), EXCHANGE_OUTSTANDING))
            }
        }
    }
}

impl std::fmt::Display for Load {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Idle => out.write_str("no guest"),
            Self::Exchange { intensity } => write!(out, "Exchange x{intensity}"),
            Self::Oltp { outstanding } => write!(out, "OLTP with {outstanding} outstanding"),
        }
    }
}
