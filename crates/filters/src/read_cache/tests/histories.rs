//! Random histories: many requests at a time on a disk that takes its time, sector by sector against what was seen and answered before.

use std::pin::pin;
use std::sync::Arc;

use block::testing::Random;
use block::{Buffer, Bytes, Data, Device, ErrorKind, Extent, Mutation};
use env::testing::PausedEnv;
use futures::future::{Either, join_all, select};
use parking_lot::Mutex;

use super::{CHUNK, SIZE, chunk_size};
use crate::cached_disk::{CachedDisk, SECTOR};
use crate::lives::disk;
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen, ReadCache};

/// How many batches of requests a history has.
const BATCHES: u32 = 40;

/// What is known of a sector.
#[derive(Clone, Copy, Default)]
struct Sector {
    /// The newest write that somebody has seen or was told of.
    floor: u64,
    /// In this batch it was written in a way that leaves its order open: twice at once, or with zeroes, or without success.
    is_open: bool,
}

struct History {
    random: Random,
    disk: Device,
    fault: Fault,
    cache: ReadCache,
    sectors: Mutex<Vec<Sector>>,
    next_tag: u64,
    what: String,
}

/// A request of a batch.
enum Request {
    Read { extent: Extent, by_copy: bool },
    Write { mutation: Mutation, tag: u64 },
    Mark { chunks: std::ops::Range<u64>, is_sent: bool },
}

fn sectors_of(extent: Extent) -> std::ops::Range<usize> {
    extent.offset.as_usize() / SECTOR..extent.end().as_usize().div_ceil(SECTOR)
}

fn tag_of(sector: &[u8]) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&sector[..8]);
    u64::from_le_bytes(first)
}

impl History {
    fn new(seed: u64) -> Self {
        let cached = Arc::new(CachedDisk::new(seed, SIZE, 512));
        let disk = disk("disk", &cached);
        let fault = Fault::new(disk.clone(), PausedEnv::shared(seed));
        let source = Device::new("faulty", fault.clone());
        // The migration reads by another face, which never fails.
        let cache = ReadCache::new(source, disk.clone(), chunk_size(), Bytes((1 + seed % 12) * CHUNK));
        let sectors = Mutex::new(vec![Sector::default(); SIZE.as_usize() / SECTOR]);
        Self { random: Random::new(seed), disk, fault, cache, sectors, next_tag: 1, what: format!("seed {seed}") }
    }

    /// Sectors of a few chunks, so that requests meet; one read in three is of whole chunks.
    fn extent(&mut self) -> Extent {
        let sectors = SIZE.get() / SECTOR as u64;
        let (start, length) = match self.random.below(3) {
            0 => (self.random.below(9) * CHUNK / SECTOR as u64, (1 + self.random.below(3)) * CHUNK / SECTOR as u64),
            _ => (self.random.below(sectors), 1 + self.random.below(40)),
        };
        let end = (start + length).min(sectors);
        Extent::between(Bytes(start * SECTOR as u64), Bytes(end * SECTOR as u64))
    }

    fn request(&mut self) -> Request {
        let extent = self.extent();
        let extent =
            if self.random.one_in(3) { extent } else { Extent::new(extent.offset, extent.length.min(Bytes(4096))) };
        match self.random.below(10) {
            0..=3 => Request::Read { extent, by_copy: false },
            4..=5 => Request::Read {
                extent: chunk_size().extent_of(chunk_size().index_of(extent.offset), SIZE),
                by_copy: true,
            },
            6 => {
                let start = self.random.below(9);
                let chunks = start..(start + 1 + self.random.below(4)).min(9);
                Request::Mark { chunks, is_sent: self.random.one_in(2) }
            }
            7 if self.random.one_in(3) => Request::Write { mutation: Mutation::zeroes(extent, true), tag: 0 },
            _ => {
                let tag = self.next_tag;
                self.next_tag += 1;
                let bytes: Vec<u8> = tag.to_le_bytes().into_iter().cycle().take(extent.length.as_usize()).collect();
                Request::Write { mutation: Mutation::data(extent.offset, Data::copy_of(&bytes)), tag }
            }
        }
    }

    /// Writes that overlap another one, and zeroes, leave the order of their sectors open.
    fn note_open(&self, requests: &[Request]) {
        let mut sectors = self.sectors.lock();
        let mut writes = vec![0; sectors.len()];
        for request in requests {
            let Request::Write { mutation, tag } = request else { continue };
            for number in sectors_of(mutation.extent()) {
                writes[number] += if *tag == 0 { 2 } else { 1 };
            }
        }
        sectors.iter_mut().zip(writes).for_each(|(sector, writes)| sector.is_open = writes > 1);
    }

    /// Reads, and looks that nothing is older than what was known when it began.
    async fn read(&self, device: &Device, extent: Extent) {
        let floors: Vec<u64> = self.sectors.lock()[sectors_of(extent)].iter().map(|sector| sector.floor).collect();
        let Ok(read) = device.read(extent.offset, Buffer::unpooled(extent.length.as_usize())).await else { return };
        let mut sectors = self.sectors.lock();
        let known = sectors[sectors_of(extent)].iter_mut().zip(floors).zip(sectors_of(extent));
        for (((sector, floor), number), bytes) in known.zip(read.chunks(SECTOR)) {
            let tag = tag_of(bytes);
            if !sector.is_open {
                assert!(tag >= floor, "{}: sector {number} of {} holds {tag}, after {floor}", self.what, device.name());
                sector.floor = sector.floor.max(tag);
            }
        }
    }

    async fn write(&self, device: &Device, mutation: Mutation, tag: u64, limit: Option<u64>) {
        let extent = mutation.extent();
        let abandoned = async {
            match limit {
                Some(turns) => yield_times(turns).await,
                None => std::future::pending().await,
            }
        };
        let is_answered = match select(pin!(device.write(mutation)), pin!(abandoned)).await {
            Either::Left((answer, _)) => answer.is_ok(),
            Either::Right(_) => false,
        };
        for sector in &mut self.sectors.lock()[sectors_of(extent)] {
            sector.is_open |= !is_answered;
            sector.floor = if is_answered { sector.floor.max(tag) } else { sector.floor };
        }
    }

    /// Many requests at a time, and then what everybody sees is what the disk has.
    async fn batch(&mut self) {
        self.fault.clear();
        let action = [FaultAction::Fail(ErrorKind::Io), FaultAction::FailAfterwards(ErrorKind::Io)];
        if self.random.one_in(3) {
            let action = action[self.random.below(2) as usize];
            let verb = if self.random.one_in(2) { FaultVerb::Write } else { FaultVerb::Read };
            self.fault.add(FaultRule { verb, extent: None, when: FaultWhen::Probability(0.05), action });
        }
        let requests: Vec<Request> = (0..20).map(|_| self.request()).collect();
        self.note_open(&requests);
        let delays: Vec<(u64, Option<u64>)> = requests
            .iter()
            .map(|_| (self.random.below(30), self.random.one_in(100).then(|| self.random.below(8))))
            .collect();
        let (guest, copy, this) = (self.cache.guest(), self.cache.copy(), &*self);
        let (guest, copy) = (&guest, &copy);
        join_all(requests.into_iter().zip(delays).map(async |(request, (delay, limit))| {
            yield_times(delay).await;
            match request {
                Request::Read { extent, by_copy } => this.read(if by_copy { copy } else { guest }, extent).await,
                Request::Write { mutation, tag } => {
                    // An abandoned one leaves open what others see of its sectors from the moment that it begins.
                    if limit.is_some() {
                        this.sectors.lock()[sectors_of(mutation.extent())]
                            .iter_mut()
                            .for_each(|one| one.is_open = true);
                    }
                    this.write(guest, mutation, tag, limit).await;
                }
                Request::Mark { chunks, is_sent: true } => this.cache.mark_sent(chunks),
                Request::Mark { chunks, is_sent: false } => this.cache.mark_unsent(chunks),
            }
        }))
        .await;
        self.fault.clear();
        let all = |device: Device| async move {
            device.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())).await.expect("a good disk answers")
        };
        let (there, guest, copy) =
            (all(self.disk.clone()).await, all(self.cache.guest()).await, all(self.cache.copy()).await);
        let mut sectors = self.sectors.lock();
        for (number, sector) in sectors.iter_mut().enumerate() {
            let bytes = number * SECTOR..(number + 1) * SECTOR;
            let tag = tag_of(&there[bytes.clone()]);
            assert!(there[bytes.clone()] == guest[bytes.clone()], "{}: the guest's sector {number}", self.what);
            assert!(there[bytes.clone()] == copy[bytes], "{}: the copy's sector {number}", self.what);
            *sector = Sector { floor: tag, is_open: false };
        }
        let status = self.cache.status();
        assert!(status.bytes <= status.bytes_max, "{}: {status:?}", self.what);
    }
}

/// Lets others run so often.
async fn yield_times(count: u64) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_older_is_read_than_was_seen_or_answered_and_everybody_sees_what_the_disk_has() {
    let mut total = super::ReadCacheStatus::default();
    for seed in 0..60 {
        let mut history = History::new(seed);
        for batch in 0..BATCHES {
            history.what = format!("seed {seed}, batch {batch}");
            history.batch().await;
        }
        let status = history.cache.status();
        total.guest_hits += status.guest_hits;
        total.copy_hits += status.copy_hits;
        total.chunks_fetched += status.chunks_fetched;
        total.outdated += status.outdated;
        total.evictions += status.evictions;
    }
    let counts = [total.guest_hits, total.copy_hits, total.chunks_fetched, total.outdated, total.evictions];
    assert!(counts.iter().all(|count| *count > 100), "the histories try too little: {total:?}");
}
