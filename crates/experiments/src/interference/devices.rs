//! The disks and caches of the scenes. Figures are the data sheets' (`sim::model`); nothing here was fitted to a result.

use env::Moment;
use sim::model::{
    Flash, FlashFigures, HardDisk, HardDiskFigures, Model, PageCacheFigures, Raid0, Request, Ticket, Verb,
};

/// Stripes of the RAID-0: what `mdadm` of 2012 makes if nothing is said.
const STRIPE_BYTES: u64 = 512 << 10;
/// The host's 8 GB less the two guests' memory and its own.
const PAGE_CACHE_BYTES: u64 = 5_000_000_000;

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Disk {
    /// Seagate ST31000524AS, the hard disk of tables 3.4 and 5.1.
    Hard,
    /// Intel SSDSA2CW080, the flash device of table 3.4.
    SataFlash,
    /// A flash device of today.
    NvmeFlash,
    /// Four of the hard disks.
    FourHard,
}

impl Disk {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Hard => "a hard disk",
            Self::SataFlash => "SATA flash",
            Self::NvmeFlash => "NVMe flash",
            Self::FourHard => "a RAID-0 of four hard disks",
        }
    }

    /// Its model for images `scale` times smaller. A hard disk is smaller as well, so that a seek over an image stays as long.
    pub(crate) fn model(self, scale: u64) -> Box<dyn Model> {
        let hard = || {
            let figures = HardDiskFigures::ST31000524AS;
            HardDisk::new(HardDiskFigures { capacity: figures.capacity / scale, ..figures })
        };
        match self {
            Self::Hard => Box::new(hard()),
            Self::SataFlash => Box::new(Flash::new(FlashFigures::SATA_80GB)),
            Self::NvmeFlash => Box::new(Flash::new(FlashFigures::NVME_512GB)),
            Self::FourHard => {
                let members = (0..4).map(|_| Box::new(hard()) as Box<dyn Model>);
                Box::new(Raid0::new(members.collect(), STRIPE_BYTES))
            }
        }
    }
}

/// How QEMU opens the image, by the names of its cache modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CacheMode {
    /// Past the host's page cache; writes may stay in the disk's.
    Off,
    /// Through the page cache; a write is answered when it is on the platter.
    WriteThrough,
    /// The same on a file system without barriers: a write is answered when the disk has it, which may hold it in its cache. Only
    /// where it is asked for.
    NoBarriers,
    /// Through the page cache; a write is answered when it is there.
    WriteBack,
}

impl CacheMode {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Off => "none",
            Self::WriteThrough => "writethrough",
            Self::NoBarriers => "writethrough without barriers",
            Self::WriteBack => "writeback",
        }
    }

    /// Whether every write is followed by a flush.
    pub(crate) const fn writes_through(self) -> bool {
        matches!(self, Self::WriteThrough | Self::NoBarriers)
    }

    /// Whether a flush of the page cache goes on to the disk.
    pub(crate) const fn has_barriers(self) -> bool {
        !matches!(self, Self::NoBarriers)
    }

    /// The host's page cache, if it has a part in this.
    pub(crate) fn page_cache(self, scale: u64) -> Option<PageCacheFigures> {
        (self != Self::Off).then(|| PageCacheFigures::of(PAGE_CACHE_BYTES / scale))
    }
}

/// A device that answers flushes at once: nothing tells it to empty its cache.
pub(crate) struct WithoutBarriers<M> {
    lower: M,
    flushes: Vec<(Moment, Ticket)>,
}

impl<M: Model> WithoutBarriers<M> {
    pub(crate) const fn new(lower: M) -> Self {
        Self { lower, flushes: Vec::new() }
    }
}

impl<M: Model> Model for WithoutBarriers<M> {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        match request.verb {
            Verb::Flush => self.flushes.push((now, ticket)),
            Verb::Read | Verb::Write => self.lower.submit(now, ticket, request),
        }
    }

    fn next(&self) -> Option<Moment> {
        self.flushes.first().map(|(at, _)| *at).into_iter().chain(self.lower.next()).min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        self.lower.advance(now, done);
        done.extend(self.flushes.drain(..).map(|(_, ticket)| ticket));
    }
}
