//! Random histories of a pair whose members and whose record fail, through crashes and power losses, sector by sector against a
//! list of what each may hold; and the life of a redirection over a pair.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::testing::Random;
use block::{
    BlockDevice, Buffer, Bytes, Data, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation,
};
use env::EnvRef;
use futures::future::{join_all, select};
use parking_lot::Mutex;

use super::{Notes, ReplicaPair};
use crate::cached_disk::{CachedDisk, SECTOR};
use crate::lives::{Layer, live};
use crate::{Redirect, Region};

const SECTORS: u64 = 40;
const SIZE: Bytes = Bytes(SECTORS * SECTOR as u64);

/// A disk that fails once in so many requests, or never (0). A write that fails is carried out in part, or whole, or not. A
/// flush that fails has lost all that was not flushed before.
struct FlakyDisk {
    disk: Arc<CachedDisk>,
    random: Mutex<Random>,
    reads: Mutex<u64>,
    changes: Mutex<u64>,
}

impl FlakyDisk {
    fn is_struck(&self, once_in: &Mutex<u64>) -> bool {
        let count = *once_in.lock();
        count > 0 && self.random.lock().one_in(count)
    }

    fn set(&self, reads: u64, changes: u64) {
        (*self.reads.lock(), *self.changes.lock()) = (reads, changes);
    }
}

fn failure<T>() -> Result<T, Error> {
    Err(Error::new(ErrorKind::Io, "a flaky disk failed"))
}

impl BlockDevice for FlakyDisk {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        if self.is_struck(&self.reads) { block::ready(failure()) } else { self.disk.read(offset, buffer) }
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        if !self.is_struck(&self.changes) {
            return self.disk.write(mutation);
        }
        let extent = mutation.extent();
        let sectors = self.random.lock().below(extent.length.get() / SECTOR as u64 + 1);
        Box::pin(async move {
            if sectors > 0 {
                let part = Extent::new(extent.offset, Bytes(sectors * SECTOR as u64));
                self.disk.write(mutation.slice(part).with_fua(false)).await?;
            }
            failure()
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        if !self.is_struck(&self.changes) {
            return self.disk.flush();
        }
        self.disk.lose_cache();
        block::ready(failure())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.disk.extents(extent)
    }
}

/// What a sector may be read as, and what a power loss may leave.
#[derive(Clone)]
struct Sector {
    now: Vec<u64>,
    unflushed: Vec<u64>,
}

/// How often what was to be tested has happened.
#[derive(Debug, Default)]
struct Seen {
    losses: u64,
    unsettled: u64,
    failed_notes: u64,
    reads_by_other: u64,
    crashes_with_both: u64,
    rebuilds: u64,
    rebuilds_failed: u64,
    crashes_in_rebuilds: u64,
}

struct History {
    random: Random,
    flaky: [Arc<FlakyDisk>; 2],
    notes: Arc<Notes>,
    pair: ReplicaPair,
    sectors: Vec<Sector>,
    next_tag: u64,
    what: String,
}

fn tag_of(bytes: &[u8], what: &str) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    assert!(bytes.chunks(8).all(|word| *word == first), "{what}: a sector is a mixture");
    u64::from_le_bytes(first)
}

fn sectors_of(extent: Extent) -> std::ops::Range<usize> {
    extent.offset.as_usize() / SECTOR..extent.end().as_usize() / SECTOR
}

async fn yield_times(count: u64) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

fn open(flaky: &[Arc<FlakyDisk>; 2], notes: &Arc<Notes>) -> ReplicaPair {
    let members = [0, 1].map(|at| Device::from_arc("member", Arc::clone(&flaky[at]) as _));
    let lost = notes.noted.lock().last().copied();
    ReplicaPair::new(members, lost, Arc::clone(notes) as _).expect("they are alike in size")
}

impl History {
    fn new(seed: u64) -> Self {
        let flaky = [1, 2].map(|member| {
            let disk = Arc::new(CachedDisk::new(seed * 3 + member, SIZE, SECTOR as u32));
            let random = Mutex::new(Random::new(seed * 7 + member));
            Arc::new(FlakyDisk { disk, random, reads: Mutex::default(), changes: Mutex::default() })
        });
        let notes = Notes::shared();
        let pair = open(&flaky, &notes);
        let sectors = vec![Sector { now: vec![0], unflushed: vec![0] }; SECTORS as usize];
        Self { random: Random::new(seed), flaky, notes, pair, sectors, next_tag: 1, what: String::new() }
    }

    fn device(&self) -> Device {
        Device::new("pair", self.pair.clone())
    }

    /// Has everything fail as this history's seed says, or nothing.
    fn set_failures(&mut self, seed: u64, fails: bool) {
        let record_fails = fails && seed.is_multiple_of(2) && self.random.one_in(3);
        self.notes.fails.store(record_fails, Ordering::Relaxed);
        for (member, flaky) in self.flaky.iter().enumerate() {
            let is_meant = fails && (seed / 2 % 3 == 2 || seed / 2 % 3 == member as u64);
            match seed / 6 % 3 {
                _ if !is_meant => flaky.set(0, 0),
                0 => flaky.set(3, 0),
                1 => flaky.set(0, 25),
                _ => flaky.set(10, 60),
            }
        }
    }

    fn mutations(&mut self) -> Vec<(Mutation, u64)> {
        let count = 1 + self.random.below(8);
        let mutations = (0..count).map(|_| {
            let first = self.random.below(SECTORS);
            let length = 1 + self.random.below((SECTORS - first).min(8));
            let extent = Extent::new(Bytes(first * SECTOR as u64), Bytes(length * SECTOR as u64));
            let tag = self.next_tag;
            self.next_tag += 1;
            let (mutation, tag) = match self.random.below(6) {
                0 => (Mutation::zeroes(extent, self.random.one_in(2)), 0),
                1 => (Mutation::discard(extent), 0),
                _ => {
                    let bytes: Vec<u8> = tag.to_le_bytes().into_iter().cycle().take(extent.length.as_usize()).collect();
                    (Mutation::data(extent.offset, Data::copy_of(&bytes)), tag)
                }
            };
            (mutation.with_fua(self.random.one_in(8)), tag)
        });
        mutations.collect()
    }

    /// Mutations that may overlap, beside reads and perhaps a rebuild of the lost member, for at most so many turns.
    async fn batch(&mut self, limit: u64, seen: &mut Seen) {
        let rebuilds = self.pair.status().lost.filter(|_| self.random.one_in(2));
        let (pair, flaky) = (self.pair.clone(), self.flaky.clone());
        let mutations = self.mutations();
        let delays: Vec<u64> = (0..12).map(|_| self.random.below(30)).collect();
        let device = self.device();
        let answers = Mutex::new(vec![None; mutations.len()]);
        let (sectors, what) = (&self.sectors, &self.what);
        let covering = |number: usize| {
            let covers = move |(mutation, _): &&(Mutation, u64)| sectors_of(mutation.extent()).contains(&number);
            mutations.iter().filter(covers).map(|(_, tag)| *tag)
        };
        let writes = join_all(mutations.iter().zip(&delays).enumerate().map(async |(at, ((mutation, _), delay))| {
            yield_times(*delay).await;
            let outcome = device.write(mutation.clone()).await;
            answers.lock()[at] = Some(outcome.is_ok());
        }));
        let reads = join_all(delays.iter().rev().take(4).map(async |delay| {
            yield_times(*delay).await;
            let Ok(all) = device.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())).await else { return };
            for (number, bytes) in all.chunks(SECTOR).enumerate() {
                let tag = tag_of(bytes, what);
                let is_right = sectors[number].now.contains(&tag) || covering(number).any(|new| new == tag);
                assert!(is_right, "{what}: sector {number} was seen with {tag}");
            }
        }));
        let mut rebuilt = None;
        let rebuild = async {
            let Some(member) = rebuilds else { return };
            // It has what it had when it was lost.
            let device = Device::from_arc("rebuilt", Arc::clone(&flaky[member]) as _);
            rebuilt = Some(pair.rebuild(device, || true).await.is_ok());
        };
        let work = async {
            futures::join!(writes, reads, rebuild);
        };
        select(pin!(work), pin!(yield_times(limit))).await;
        match (rebuilds, rebuilt) {
            (_, Some(true)) => seen.rebuilds += 1,
            (_, Some(false)) => seen.rebuilds_failed += 1,
            (Some(_), None) => seen.crashes_in_rebuilds += 1,
            (None, None) => {}
        }
        let answers = answers.into_inner();
        for number in 0..self.sectors.len() {
            let of_it: Vec<_> = mutations
                .iter()
                .zip(&answers)
                .filter(|((mutation, _), _)| sectors_of(mutation.extent()).contains(&number))
                .map(|((mutation, tag), answer)| (*tag, *answer == Some(true), mutation.fua))
                .collect();
            let sector = &mut self.sectors[number];
            if of_it.iter().any(|(_, is_answered, _)| *is_answered) {
                sector.now.clear();
            }
            if let [(_, true, true)] = of_it[..] {
                sector.unflushed.clear();
            }
            for (tag, _, _) in of_it {
                sector.now.push(tag);
                sector.unflushed.push(tag);
            }
        }
    }

    async fn flush(&mut self) {
        let is_flushed = self.device().flush().await.is_ok();
        for sector in &mut self.sectors {
            match is_flushed {
                true => sector.unflushed.clone_from(&sector.now),
                false => sector.now.extend_from_slice(&sector.unflushed),
            }
        }
    }

    /// Reads every sector: from then on each is what was read. With `must_answer` none may fail.
    async fn check(&mut self, must_answer: bool) {
        let device = self.device();
        for (number, sector) in self.sectors.iter_mut().enumerate() {
            let offset = Bytes((number * SECTOR) as u64);
            let what = &self.what;
            match device.read(offset, Buffer::unpooled(SECTOR)).await {
                Ok(bytes) => {
                    let (tag, now) = (tag_of(&bytes, what), &sector.now);
                    assert!(now.contains(&tag), "{what}: sector {number} holds {tag} of {now:?}");
                    sector.now = vec![tag];
                }
                Err(error) => assert!(!must_answer, "{what}: sector {number} is lost: {}", error.chain()),
            }
        }
    }

    /// The process has died, and perhaps the machine.
    async fn open_again(&mut self, loses_power: bool) {
        if loses_power {
            self.flaky.iter().for_each(|flaky| flaky.disk.lose_power());
            self.sectors.iter_mut().for_each(|sector| sector.now.clone_from(&sector.unflushed));
        }
        self.pair = open(&self.flaky, &self.notes);
        self.pair.copy_to_second(&[Extent::whole(SIZE)]).await.expect("nothing fails while it is opened");
    }

    async fn step(&mut self, seed: u64, seen: &mut Seen) {
        self.set_failures(seed, true);
        let dies = self.random.one_in(4);
        let limit = if dies { self.random.below(60) } else { u64::MAX };
        let had_both = self.notes.noted.lock().is_empty();
        self.batch(limit, seen).await;
        if !dies && self.random.one_in(2) {
            self.flush().await;
        }
        let status = self.pair.status();
        seen.unsettled += u64::from(status.unsettled_bytes > 0);
        seen.failed_notes += u64::from(status.suspect.is_some());
        if dies {
            seen.crashes_with_both += u64::from(self.notes.noted.lock().is_empty());
            seen.reads_by_other += status.reads_by_other;
            let loses_power = self.random.one_in(2);
            self.set_failures(seed, false);
            self.open_again(loses_power).await;
            self.check(true).await;
        } else if self.random.one_in(3) {
            self.set_failures(seed, false);
            self.check(true).await;
        } else {
            self.check(false).await;
        }
        let lost = self.notes.noted.lock().len();
        assert!(lost <= 1, "{}: only one can be lost", self.what);
        seen.losses += u64::from(had_both && lost == 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answered_write_is_never_lost_while_a_member_is_left_and_reads_never_go_back() {
    let mut seen = Seen::default();
    for seed in 0..200 {
        let mut history = History::new(seed);
        for step in 0..25 {
            history.what = format!("seed {seed}, step {step}");
            history.step(seed, &mut seen).await;
        }
        history.what = format!("seed {seed}, the end");
        history.set_failures(seed, false);
        history.check(true).await;
        seen.reads_by_other += history.pair.status().reads_by_other;
        let status = history.pair.status();
        if status.lost.is_none() && status.rebuilt.is_none() {
            let [one, other] =
                [0, 1].map(|at| history.flaky[at].disk.read(Bytes::ZERO, Buffer::unpooled(SIZE.as_usize())));
            let (one, other) = (one.await.expect("it is well"), other.await.expect("it is well"));
            assert!(one[..] == other[..], "seed {seed}: both are well and differ");
        }
    }
    let Seen { losses, unsettled, failed_notes, reads_by_other, crashes_with_both, .. } = seen;
    let rebuilds = [seen.rebuilds, seen.rebuilds_failed, seen.crashes_in_rebuilds];
    let others = [losses, unsettled, failed_notes, reads_by_other, crashes_with_both];
    let least = rebuilds.into_iter().chain(others).min();
    assert!(least > Some(10), "what was to be tested hardly happened: {seen:?}");
}

/// A redirection whose surrogate is a pair: each half of its own device is a member.
struct OverPair(Redirect);

impl OverPair {
    fn pair(own: &Device) -> ReplicaPair {
        let length = Redirect::own_bytes();
        let at = [Bytes::ZERO, length.align_up(4096)];
        let members = at.map(|offset| {
            Device::new("half", Region::new(own.clone(), Extent::new(offset, length)).expect("it lies within"))
        });
        ReplicaPair::new(members, None, Notes::shared()).expect("they are alike in size")
    }
}

impl Layer for OverPair {
    const SIZE: Bytes = <Redirect as Layer>::SIZE;

    fn own_bytes() -> Bytes {
        Redirect::own_bytes().align_up(4096) + Redirect::own_bytes()
    }

    async fn make(own: &Device) {
        Redirect::make(&Device::new("pair", Self::pair(own))).await;
    }

    async fn open_over(env: EnvRef, base: Device, own: Device, boot: [u8; 16]) -> Self {
        let pair = Self::pair(&own);
        pair.copy_to_second(&[Extent::whole(Redirect::own_bytes())]).await.expect("a good disk takes it");
        Self(Redirect::open_over(env, base, Device::new("pair", pair), boot).await)
    }

    fn views(&self) -> Vec<Device> {
        self.0.views()
    }

    async fn start_draining(&self) {
        self.0.start_draining().await;
    }

    async fn drain_some(&self, random: &mut Random) {
        self.0.drain_some(random).await;
    }

    async fn drain_all(&self) {
        self.0.drain_all().await;
    }

    fn holds_nothing(&self) -> bool {
        self.0.holds_nothing()
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_lives_through_crashes_and_power_losses_while_its_surrogate_is_a_pair() {
    live::<OverPair>(30, 25).await;
}
