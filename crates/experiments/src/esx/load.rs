//! What the guests of the evaluation do.

use std::ops::Range;

use sim::workload::{Exchange, ExchangeFigures, Merged, Oltp, Shifted, Workload};

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
    /// The older mail server of figures 2 and 3, with its three disks one behind the other.
    MailServer,
    /// The same, which writes as often to a fifth of the pages. Only where it is asked for.
    HotMailServer,
}

/// A disk of the mail server: how much of it is ever written, how, and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct MailDisk {
    pub(super) name: &'static str,
    pub(super) gib: u64,
    /// Pages of 8 KiB that are ever written.
    pub(super) pages: u64,
    /// Of Zipf's law.
    pub(super) exponent: f64,
    /// A second, in figure 2.
    pub(super) writes: f64,
}

const fn mail_disk(name: &'static str, gib: u64, pages: u64, exponent: f64, writes: f64) -> MailDisk {
    MailDisk { name, gib, pages, exponent, writes }
}

/// Exchange 2003 with 100 users (2.3.2): the sizes are the paper's, all else is assumed.
pub(super) const MAIL_DISKS: [MailDisk; 3] = [
    mail_disk("system disk, 12 GB", 12, 20_000, 1.1, 30.0),
    mail_disk("mailbox disk, 20 GB", 20, 150_000, 0.9, 250.0),
    mail_disk("log disk, 10 GB", 10, 12_000, 0.6, 120.0),
];
/// A page of the mail server.
pub(super) const MAIL_PAGE_BYTES: u64 = 8192;
/// In figure 3 it writes so many times as often as in figure 2. With this factor plain tracking takes about as many
/// passes as the paper's.
const MAIL_INTENSITY: f64 = 1.3;

/// The mail server with hotter blocks has so many times fewer pages.
const HOT_PART: u64 = 5;

/// All disks together, in GB.
pub(super) const fn mail_gib() -> u64 {
    MAIL_DISKS[0].gib + MAIL_DISKS[1].gib + MAIL_DISKS[2].gib
}

/// The three disks at once, with so many times fewer pages.
fn mail_server(start: u64, scale: u64, fewer: u64) -> Box<dyn Workload> {
    let mut next = start;
    let loads = MAIL_DISKS.map(|disk| {
        let size = (disk.gib << 30) / scale;
        let figures = ExchangeFigures {
            size,
            page_bytes: MAIL_PAGE_BYTES,
            pages: disk.pages / fewer / scale,
            exponent: disk.exponent,
            reads: 0.0,
            rate: disk.writes * MAIL_INTENSITY,
        };
        let load = Shifted::new(next, Exchange::new(figures));
        next += size;
        Box::new(load) as Box<dyn Workload>
    });
    Box::new(Merged::new(loads.into()))
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
            Self::MailServer => Some((mail_server(data.start, scale, 1), EXCHANGE_OUTSTANDING)),
            Self::HotMailServer => Some((mail_server(data.start, scale, HOT_PART), EXCHANGE_OUTSTANDING)),
            Self::Exchange { intensity } => {
                let size = data.end - data.start;
                let figures = ExchangeFigures {
                    size,
                    page_bytes: 32 << 10,
                    pages: 3_000_000 / scale,
                    exponent: 0.7,
                    reads: 0.4,
                    rate: 500.0 * intensity as f64,
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
            Self::MailServer => out.write_str("a mail server with three disks"),
            Self::HotMailServer => out.write_str("a mail server with a fifth of the pages"),
            Self::Exchange { intensity } => write!(out, "Exchange x{intensity}"),
            Self::Oltp { outstanding } => write!(out, "OLTP with {outstanding} outstanding"),
        }
    }
}
