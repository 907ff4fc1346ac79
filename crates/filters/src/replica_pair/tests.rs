//! The pair with members that fail: what is told to whom, in which order, and what is read afterwards. `histories.rs` has the
//! random part.

mod histories;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::testing::{Random, conformance};
use block::{
    Buffer, Bytes, Data, Device, Error, ErrorKind, Extent, ExtentState, IoFuture, MemDevice, Mutation, Result,
};
use env::testing::PausedEnv;
use futures::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::{MemberLoss, ReplicaPair, ReplicaStatus};
use crate::cached_disk::CachedDisk;
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};

const SIZE: Bytes = Bytes(256 << 10);

/// Notes losses, as long as it has permits and does not fail.
struct Notes {
    noted: Mutex<Vec<usize>>,
    asked: Mutex<u64>,
    fails: AtomicBool,
    permits: Semaphore,
}

impl Notes {
    fn shared() -> Arc<Self> {
        let permits = Semaphore::new(Semaphore::MAX_PERMITS);
        Arc::new(Self { noted: Mutex::default(), asked: Mutex::default(), fails: AtomicBool::new(false), permits })
    }
}

impl MemberLoss for Notes {
    fn note<'a>(&'a self, member: usize, _error: &'a Error) -> IoFuture<'a, ()> {
        Box::pin(async move {
            *self.asked.lock() += 1;
            let _permit = self.permits.acquire().await.expect("it is never closed");
            // Others go on meanwhile.
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            if self.fails.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::NoSpace, "the record is full"));
            }
            let mut noted = self.noted.lock();
            // After one that was to be whole it may be there still.
            if !noted.contains(&member) {
                noted.push(member);
            }
            Ok(())
        })
    }

    fn note_whole<'a>(&'a self, member: usize, _device: &'a Device) -> IoFuture<'a, ()> {
        Box::pin(async move {
            let _permit = self.permits.acquire().await.expect("it is never closed");
            tokio::task::yield_now().await;
            let fails = self.fails.load(Ordering::Relaxed);
            let mut asked = self.asked.lock();
            *asked += 1;
            // Whoever is told that it has failed does not know whether it has.
            if !fails || asked.is_multiple_of(2) {
                self.noted.lock().retain(|lost| *lost != member);
            }
            if fails { Err(Error::new(ErrorKind::NoSpace, "the record is full")) } else { Ok(()) }
        })
    }
}

/// A pair in memory whose members fail as they are told to.
struct Scene {
    memory: [Device; 2],
    faults: [Fault; 2],
    notes: Arc<Notes>,
    pair: ReplicaPair,
    device: Device,
}

impl Scene {
    fn new() -> Self {
        Self::over([0, 1].map(|_| Device::new("memory", MemDevice::new(SIZE))), None)
    }

    fn over(memory: [Device; 2], lost: Option<usize>) -> Self {
        let faults = memory.clone().map(|lower| Fault::new(lower, PausedEnv::shared(3)));
        let [first, second] = &faults;
        let members = [Device::new("first", first.clone()), Device::new("second", second.clone())];
        let notes = Notes::shared();
        let pair = ReplicaPair::new(members, lost, Arc::clone(&notes) as _).expect("they are alike in size");
        let device = Device::new("pair", pair.clone());
        Self { memory, faults, notes, pair, device }
    }

    /// From now on `member` fails every `verb`.
    fn fail(&self, member: usize, verb: FaultVerb) {
        self.act(member, verb, FaultAction::Fail(ErrorKind::Io));
    }

    fn act(&self, member: usize, verb: FaultVerb, action: FaultAction) {
        self.faults[member].add(FaultRule { verb, extent: None, when: FaultWhen::Always, action });
    }

    async fn write(&self, at: u64, byte: u8) -> Result<()> {
        write(&self.device, at, byte).await
    }

    async fn read(&self, at: u64) -> Result<u8> {
        read(&self.device, at).await
    }

    /// What the members have at `at`.
    async fn both(&self, at: u64) -> [u8; 2] {
        let [first, second] = &self.memory;
        [read(first, at).await.expect("it is memory"), read(second, at).await.expect("it is memory")]
    }

    fn noted(&self) -> Vec<usize> {
        self.notes.noted.lock().clone()
    }
}

async fn write(device: &Device, at: u64, byte: u8) -> Result<()> {
    device.write(Mutation::data(Bytes(at), Data::copy_of(&[byte; 4096]))).await
}

async fn read(device: &Device, at: u64) -> Result<u8> {
    Ok(device.read(Bytes(at), Buffer::unpooled(4096)).await?[0])
}

fn cached(seed: u64, size: Bytes, unit: u32) -> Device {
    Device::new("disk", CachedDisk::new(seed, size, unit))
}

fn pair_of(members: [Device; 2], lost: Option<usize>) -> Device {
    Device::new("pair", ReplicaPair::new(members, lost, Notes::shared()).expect("it is a pair"))
}

#[tokio::test(start_paused = true)]
async fn a_pair_conforms_with_both_members_with_one_and_when_one_is_lost_at_once() {
    // These disks hold different garbage after a discard.
    conformance(1, async |size| pair_of([cached(1, size, 512), cached(2, size, 1)], None)).await;
    for lost in [0, 1] {
        conformance(2, async |size| {
            let mut members = [0, 1].map(|_| Device::new("left", MemDevice::new(size)));
            members[lost] = Device::new("gone", MemDevice::new(Bytes(1)));
            pair_of(members, Some(lost))
        })
        .await;
    }
    conformance(3, async |size| {
        let scene = Scene::over([0, 1].map(|_| Device::new("memory", MemDevice::new(size))), None);
        scene.fail(0, FaultVerb::Any);
        scene.device
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_answered_that_a_member_lacks_before_its_loss_is_on_record_and_it_is_noted_once() {
    for verb in [FaultVerb::Write, FaultVerb::Flush] {
        let scene = Scene::new();
        scene.fail(1, verb);
        scene.notes.permits.forget_permits(Semaphore::MAX_PERMITS);
        let answered = Mutex::new(0);
        let count = |outcome: Result<()>| {
            outcome.expect("one member has it");
            *answered.lock() += 1;
        };
        let work = async {
            futures::join!(
                async { count(scene.write(0, 1).await) },
                async { count(scene.write(8192, 2).await) },
                async { count(scene.device.flush().await) },
            )
        };
        let mut work = std::pin::pin!(work);
        for _ in 0..20 {
            assert!(futures::poll!(&mut work).is_pending(), "a request needs the note");
        }
        let needs_none = if verb == FaultVerb::Write { 1 } else { 2 };
        assert!(*answered.lock() <= needs_none, "a request was answered before the loss was on record");
        assert_eq!((scene.noted(), scene.pair.status().suspect), (vec![], Some(1)));
        scene.notes.permits.add_permits(10);
        work.await;
        assert_eq!((scene.noted(), *scene.notes.asked.lock(), *answered.lock()), (vec![1], 1, 3));
        let status = scene.pair.status();
        assert_eq!((status.lost, status.suspect), (Some(1), None));
        assert!(status.cause.is_some_and(|cause| cause.contains("injected fault of memory")), "it says why");
        scene.faults[1].clear();
        scene.write(0, 3).await.expect("one is left");
        assert_eq!((scene.both(0).await[0], scene.read(0).await.expect("one is left")), (3, 3));
        assert_ne!(scene.both(0).await[1], 3, "the lost one is asked for nothing");
        // The only one that is left.
        scene.fail(0, verb);
        let failed = if verb == FaultVerb::Write { scene.write(0, 4).await } else { scene.device.flush().await };
        assert_eq!(failed.expect_err("nobody has done it").kind(), ErrorKind::Io);
        assert_eq!((scene.noted(), scene.pair.status().lost), (vec![1], Some(1)));
    }
}

#[tokio::test(start_paused = true)]
async fn while_a_loss_cannot_be_put_on_record_nothing_is_answered_and_the_next_request_tries_again() {
    let scene = Scene::new();
    scene.write(0, 1).await.expect("both are well");
    scene.fail(0, FaultVerb::Write);
    scene.notes.fails.store(true, Ordering::Relaxed);
    let failed = scene.write(0, 2).await.expect_err("its loss is not on record");
    assert!(failed.kind() == ErrorKind::NoSpace && failed.chain().contains("putting on record"), "{}", failed.chain());
    scene.read(0).await.expect_err("either byte might be unread later");
    scene.read(8192).await.expect_err("after a flush that it has failed it might lack anything");
    scene.device.extents(Extent::whole(SIZE)).await.expect_err("the same");
    scene.device.flush().await.expect_err("the same");
    assert_eq!((*scene.notes.asked.lock(), scene.pair.status().suspect, scene.pair.status().lost), (5, Some(0), None));
    scene.notes.fails.store(false, Ordering::Relaxed);
    assert_eq!(scene.read(0).await.expect("its loss is on record"), 2);
    assert_eq!((scene.noted(), scene.pair.status().lost, scene.both(0).await), (vec![0], Some(0), [1, 2]));
}

#[tokio::test(start_paused = true)]
async fn when_each_member_has_failed_another_write_one_is_lost_and_the_write_that_it_alone_has_is_an_error() {
    let mut lost = [0; 2];
    for seed in 0..20 {
        // Both writes are under way before either fails.
        let scene = Scene::over([1, 2].map(|member| cached(seed * 3 + member, SIZE, 512)), None);
        for (member, place) in [(0, 0), (1, 8192)] {
            let (verb, action) = (FaultVerb::Write, FaultAction::FailAfterwards(ErrorKind::Io));
            let extent = Some(Extent::new(Bytes(place), Bytes(4096)));
            scene.faults[member].add(FaultRule { verb, extent, when: FaultWhen::Always, action });
        }
        let (one, other) = futures::join!(scene.write(0, 1), scene.write(8192, 2));
        let first = usize::from(one.is_err());
        assert_ne!(one.is_ok(), other.is_ok(), "seed {seed}: the member that is left has failed one of the two");
        assert_eq!((scene.noted(), scene.pair.status().lost), (vec![first], Some(first)), "seed {seed}");
        scene.read(0).await.expect("one is left");
        lost[first] += 1;
    }
    assert!(lost.iter().all(|count| *count > 0), "one of the two was never lost: {lost:?}");
}

#[tokio::test(start_paused = true)]
async fn a_write_that_failed_on_both_is_read_as_old_or_new_and_then_always_as_that() {
    // What each member does with the write, which member cannot be read first, and what is read.
    let (not, done) = (FaultAction::Fail(ErrorKind::Io), FaultAction::FailAfterwards(ErrorKind::Io));
    let cases = [
        ([not, not], None, 1),
        ([done, not], None, 2),
        ([not, done], None, 1),
        ([not, done], Some(0), 2),
        ([done, not], Some(0), 1),
        ([done, not], Some(1), 2),
    ];
    for (actions, unreadable, expected) in cases {
        let scene = Scene::new();
        scene.write(0, 1).await.expect("both are well");
        (0..2).for_each(|member| scene.act(member, FaultVerb::Write, actions[member]));
        assert_eq!(scene.write(0, 2).await.expect_err("neither has it for sure").kind(), ErrorKind::Io);
        scene.faults.iter().for_each(Fault::clear);
        let status = scene.pair.status();
        assert_eq!((status.lost, status.suspect, status.unsettled_bytes, scene.noted()), (None, None, 4096, vec![]));
        let told = scene.device.extents(Extent::new(Bytes::ZERO, Bytes(4096))).await.expect("nothing is asked for it");
        assert_eq!(told[0].state, ExtentState::Data);
        unreadable.into_iter().for_each(|member| scene.fail(member, FaultVerb::Read));
        for failing in [unreadable, Some(0), Some(1)] {
            scene.faults.iter().for_each(Fault::clear);
            failing.into_iter().for_each(|member| scene.fail(member, FaultVerb::Read));
            assert_eq!(scene.read(0).await.expect("one can be read"), expected, "{actions:?} {failing:?}");
        }
        assert_eq!((scene.both(0).await, scene.pair.status().unsettled_bytes), ([expected; 2], 0));
        assert_eq!(scene.pair.status().lost, None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_flush_that_failed_on_both_leaves_everything_to_be_compared() {
    let disks = [1, 2].map(|seed| Arc::new(CachedDisk::new(seed, SIZE, 512)));
    let scene = Scene::over([0, 1].map(|at| Device::from_arc("disk", Arc::clone(&disks[at]) as _)), None);
    scene.write(0, 1).await.expect("both are well");
    scene.device.flush().await.expect("both are well");
    scene.write(0, 2).await.expect("both are well");
    disks.iter().for_each(|disk| disk.fail_flushes());
    scene.device.flush().await.expect_err("neither is durable");
    disks[0].lose_cache();
    assert_eq!((scene.pair.status().unsettled_bytes, scene.pair.status().lost), (SIZE.get(), None));
    assert_eq!(scene.read(0).await.expect("it answers"), 1, "the first has lost it");
    scene.fail(0, FaultVerb::Read);
    assert_eq!(scene.read(0).await.expect("the second answers"), 1, "it was seen as that");
    assert_eq!(scene.pair.status().unsettled_bytes, SIZE.get() - 4096);
    assert_eq!(scene.pair.status().reads_by_other, 1);
}

#[tokio::test(start_paused = true)]
async fn reads_that_fail_are_answered_by_the_other_member_and_counted() {
    let scene = Scene::new();
    scene.write(0, 7).await.expect("both are well");
    scene.fail(0, FaultVerb::Read);
    scene.fail(0, FaultVerb::Extents);
    assert_eq!(scene.read(0).await.expect("the second answers"), 7);
    scene.device.extents(Extent::whole(SIZE)).await.expect("the second answers");
    scene.fail(1, FaultVerb::Read);
    scene.read(0).await.expect_err("neither answers");
    let expected = ReplicaStatus { failed_reads: [3, 1], reads_by_other: 2, ..ReplicaStatus::default() };
    assert_eq!(scene.pair.status(), expected);
    // A member that lacks something answers for nobody.
    scene.faults[1].clear();
    scene.fail(1, FaultVerb::Write);
    scene.write(0, 8).await.expect("the first has it");
    scene.read(0).await.expect_err("the second has older bytes");
}

#[tokio::test(start_paused = true)]
async fn a_pair_is_opened_again_without_the_member_that_is_lost() {
    for lost in [0, 1] {
        let memory = [0, 1].map(|_| Device::new("memory", MemDevice::new(SIZE)));
        write(&memory[1 - lost], 0, 2).await.expect("memory takes it");
        write(&memory[lost], 0, 1).await.expect("memory takes it");
        write(&memory[lost], 128 << 10, 1).await.expect("memory takes it");
        let scene = Scene::over(memory, Some(lost));
        assert_eq!(scene.read(0).await.expect("it has all"), 2);
        let told = scene.device.extents(Extent::new(Bytes(128 << 10), Bytes(4096))).await.expect("it has all");
        assert_eq!(told[0].state, ExtentState::Hole);
        scene.fail(lost, FaultVerb::Any);
        scene.write(0, 3).await.expect("it has all");
        scene.device.flush().await.expect("it has all");
        scene.pair.copy_to_second(&[Extent::whole(SIZE)]).await.expect("there is nothing to copy to");
        let mut expected = [3; 2];
        expected[lost] = 1;
        assert_eq!((scene.both(0).await, scene.noted()), (expected, vec![]));
        assert_eq!((scene.pair.status().lost, scene.pair.status().cause), (Some(lost), None));
        scene.fail(1 - lost, FaultVerb::Read);
        scene.read(0).await.expect_err("the other one is never asked");
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_waits_for_a_write_that_only_one_member_has_and_others_do_not() {
    let scene = Scene::new();
    let env = PausedEnv::shared(1);
    scene.act(1, FaultVerb::Write, FaultAction::Delay(std::time::Duration::from_secs(1)));
    let began = env.now();
    let elsewhere = async {
        let read = scene.read(8192).await;
        (read, env.now() - began)
    };
    let read = async {
        tokio::task::yield_now().await;
        // Whoever would see the first member's byte now, and ask the second in a moment, would read backwards.
        assert_eq!(scene.both(0).await, [1, 0]);
        let read = scene.read(0).await;
        (read, env.now() - began)
    };
    let (written, (read, waited), (other, at_once)) = futures::join!(scene.write(0, 1), read, elsewhere);
    assert!(written.is_ok() && read.is_ok_and(|byte| byte == 1) && other.is_ok(), "all are answered");
    assert!(waited.as_secs() == 1 && at_once.is_zero(), "{waited:?} {at_once:?}");
}

#[tokio::test(start_paused = true)]
async fn overlapping_writes_and_discards_leave_both_members_alike() {
    let mut random = Random::new(5);
    let disks = [1, 2].map(|seed| cached(seed, SIZE, 512));
    let pair = pair_of(disks.clone(), None);
    for round in 0..100 {
        let mutations = (0..12).map(|_| {
            let extent = Extent::new(Bytes(random.below(16) * 512), Bytes((1 + random.below(16)) * 512));
            match random.below(4) {
                0 => Mutation::discard(extent),
                1 => Mutation::zeroes(extent, random.one_in(2)),
                _ => Mutation::data(extent.offset, Data::copy_of(&random.bytes(extent.length.as_usize()))),
            }
        });
        let mutations: Vec<Mutation> = mutations.collect();
        let written = join_all(mutations.into_iter().map(|mutation| pair.write(mutation))).await;
        assert!(written.iter().all(Result::is_ok), "good disks take all");
        let [one, other] = [0, 1].map(|at| disks[at].read(Bytes::ZERO, Buffer::unpooled(32 << 9)));
        let (one, other) = (one.await.expect("it answers"), other.await.expect("it answers"));
        assert!(one[..] == other[..], "round {round}: they differ");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_forced_or_flushed_is_durable_on_both() {
    let disks = [1, 2].map(|seed| Arc::new(CachedDisk::new(seed, SIZE, 512)));
    let scene = Scene::over([0, 1].map(|at| Device::from_arc("disk", Arc::clone(&disks[at]) as _)), None);
    let forced = Mutation::data(Bytes::ZERO, Data::copy_of(&[1; 4096])).with_fua(true);
    scene.device.write(forced).await.expect("good disks take it");
    scene.write(8192, 2).await.expect("good disks take it");
    disks.iter().for_each(|disk| disk.lose_cache());
    assert_eq!((scene.both(0).await, scene.both(8192).await), ([1; 2], [0; 2]));
    scene.write(8192, 2).await.expect("good disks take it");
    scene.device.flush().await.expect("good disks flush");
    disks.iter().for_each(|disk| disk.lose_cache());
    assert_eq!(scene.both(8192).await, [2; 2]);
}

#[tokio::test(start_paused = true)]
async fn the_second_member_is_made_like_the_first_where_that_is_asked_and_nowhere_else() {
    let scene = Scene::new();
    for (at, bytes) in [(0, [1, 2]), (8192, [3, 3]), (16_384, [4, 5])] {
        write(&scene.memory[0], at, bytes[0]).await.expect("memory takes it");
        write(&scene.memory[1], at, bytes[1]).await.expect("memory takes it");
    }
    let extent = |offset, length| Extent::new(Bytes(offset), Bytes(length));
    scene.pair.copy_to_second(&[extent(0, 12_288)]).await.expect("both are well");
    assert_eq!((scene.both(0).await, scene.both(16_384).await), ([1; 2], [4, 5]));
    // Where they are alike nothing is written.
    scene.fail(1, FaultVerb::Write);
    scene.pair.copy_to_second(&[extent(0, 4096), extent(8192, 100)]).await.expect("nothing is to be done");
    assert_eq!(scene.pair.status().lost, None);
    scene.faults[1].clear();
    // What the first cannot give is taken from the second.
    scene.fail(0, FaultVerb::Read);
    scene.pair.copy_to_second(&[extent(16_384, 4096)]).await.expect("the second can be read");
    assert_eq!(scene.both(16_384).await, [5; 2]);
    scene.fail(1, FaultVerb::Read);
    scene.pair.copy_to_second(&[extent(0, 1)]).await.expect_err("neither can be read");
    assert_eq!((scene.pair.status().unsettled_bytes, scene.pair.status().failed_reads), (1, [2, 1]));
    scene.faults.iter().for_each(Fault::clear);
    // A second member that cannot be written is lost, on record.
    write(&scene.memory[0], 0, 9).await.expect("memory takes it");
    scene.fail(1, FaultVerb::Write);
    scene.pair.copy_to_second(&[extent(0, 4096)]).await.expect("the first has all");
    assert_eq!((scene.noted(), scene.read(0).await.expect("the first has all")), (vec![1], 9));
    let beyond = scene.pair.copy_to_second(&[extent(SIZE.get(), 1)]).await.expect_err("it lies outside");
    assert_eq!(beyond.kind(), ErrorKind::OutOfRange);
}

#[tokio::test(start_paused = true)]
async fn a_pair_takes_what_both_take_and_what_is_no_pair_is_refused() {
    let fine = Device::new("fine", MemDevice::new(Bytes(10_000)));
    let coarse = Device::new("coarse", MemDevice::new(Bytes(10_000)).with_request_alignment(4096).with_read_only());
    let notes = || Notes::shared() as Arc<dyn MemberLoss>;
    for members in [[fine.clone(), coarse.clone()], [coarse.clone(), fine.clone()]] {
        let pair = ReplicaPair::new(members, None, notes()).expect("they are alike in size");
        let geometry = Device::new("pair", pair.clone()).geometry();
        assert_eq!((geometry.size, geometry.request_alignment, geometry.read_only), (Bytes(10_000), 4096, true));
        let refused = pair.copy_to_second(&[Extent::whole(Bytes(1))]).await.expect_err("one cannot be written");
        assert_eq!(refused.kind(), ErrorKind::ReadOnly);
    }
    let longer = Device::new("longer", MemDevice::new(Bytes(10_001)));
    for (members, lost) in [([&fine, &longer], None), ([&fine, &fine], None), ([&fine, &coarse], Some(2))] {
        let refused = ReplicaPair::new(members.map(Device::clone), lost, notes()).expect_err("it is no pair");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_is_being_rebuilt_until_it_is_on_record_that_it_is_not_lost() {
    let scene = Scene::new();
    scene.fail(0, FaultVerb::Write);
    scene.write(0, 1).await.expect("one is left");
    let new = Device::new("new", MemDevice::new(SIZE));
    scene.notes.permits.forget_permits(Semaphore::MAX_PERMITS);
    {
        let mut rebuilt = std::pin::pin!(scene.pair.rebuild(new.clone(), || true));
        for _ in 0..1000 {
            assert!(futures::poll!(&mut rebuilt).is_pending(), "it is not on record");
            tokio::task::yield_now().await;
        }
        // Whoever asks now is not told that it is lost still: that would be a rebuild that has failed.
        let status = scene.pair.status();
        assert_eq!((status.unsettled_bytes, status.rebuilt, scene.noted()), (0, Some(0), vec![0]));
        scene.notes.permits.add_permits(10);
        rebuilt.await.expect("it is on record");
    }
    assert_eq!((scene.noted(), scene.pair.status().rebuilt), (vec![], None));
}

#[tokio::test(start_paused = true)]
async fn a_lost_member_comes_back_as_another_device_and_is_trusted_once_it_has_everything() {
    for lost in [0, 1] {
        let scene = Scene::new();
        scene.write(0, 1).await.expect("both are well");
        scene.fail(lost, FaultVerb::Write);
        scene.write(8192, 2).await.expect("one is left");
        assert_eq!(scene.noted(), vec![lost]);
        let new = Device::new("new", MemDevice::new(SIZE));
        let small = Device::new("small", MemDevice::new(Bytes(4096)));
        scene.pair.rebuild(small, || true).await.expect_err("it is too small");
        let unwanted = scene.pair.rebuild(new.clone(), || false).await.expect_err("it is not wanted");
        assert_eq!((unwanted.kind(), scene.pair.status().lost), (ErrorKind::Cancelled, Some(lost)));
        // Whatever the other one cannot give is an error, and is not made up.
        scene.fail(1 - lost, FaultVerb::Read);
        scene.pair.rebuild(new.clone(), || true).await.expect_err("nobody has what it lacks");
        scene.read(0).await.expect_err("nobody has it");
        scene.faults[1 - lost].clear();
        scene.pair.rebuild(new.clone(), || true).await.expect("the other one has everything");
        assert_eq!((scene.noted(), scene.pair.status().lost, scene.pair.status().rebuilt), (vec![], None, None));
        for (at, byte) in [(0, 1), (8192, 2), (16_384, 0)] {
            assert_eq!(read(&new, at).await.expect("it is memory"), byte, "{lost}");
        }
        scene.pair.rebuild(new.clone(), || true).await.expect_err("none is lost");
        scene.fail(1 - lost, FaultVerb::Any);
        scene.write(0, 3).await.expect("the new one takes it");
        assert_eq!((scene.read(0).await.expect("it has it"), scene.noted()), (3, vec![1 - lost]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_is_not_read_before_it_has_everything_and_one_that_fails_then_is_lost_as_before() {
    let scene = Scene::new();
    scene.fail(0, FaultVerb::Write);
    scene.write(0, 1).await.expect("one is left");
    let failing = Fault::new(Device::new("new", MemDevice::new(SIZE)), PausedEnv::shared(3));
    let rule = FaultRule {
        verb: FaultVerb::Flush,
        extent: None,
        when: FaultWhen::Always,
        action: FaultAction::Fail(ErrorKind::Io),
    };
    failing.add(rule);
    scene.pair.rebuild(Device::new("new", failing.clone()), || true).await.expect_err("nothing of it is durable");
    assert_eq!((scene.pair.status().lost, scene.noted()), (Some(0), vec![0]));
    failing.clear();
    scene.notes.fails.store(true, Ordering::Relaxed);
    scene.pair.rebuild(Device::new("new", failing.clone()), || true).await.expect_err("it is not on record");
    // Whether it is nobody knows, so nothing is answered before it is on record as lost.
    scene.write(0, 2).await.expect_err("that fails, too");
    scene.notes.fails.store(false, Ordering::Relaxed);
    scene.write(0, 3).await.expect("it is lost, on record");
    assert_eq!(
        (scene.pair.status().lost, scene.noted().last(), scene.read(0).await.expect("one is left")),
        (Some(0), Some(&0), 3)
    );
}

#[tokio::test(start_paused = true)]
async fn a_member_that_is_expelled_is_lost_on_record() {
    let scene = Scene::new();
    scene.pair.expel(1).await.expect("both are well");
    assert_eq!((scene.pair.status().lost, scene.noted()), (Some(1), vec![1]));
    scene.pair.expel(1).await.expect("it is lost already");
    scene.pair.expel(0).await.expect_err("it alone is left");
    assert_eq!(scene.noted(), vec![1]);
}

#[tokio::test(start_paused = true)]
async fn what_was_read_after_a_power_loss_stays_when_the_member_is_lost_that_it_was_read_of() {
    for knows in [false, true] {
        let scene = Scene::new();
        for (memory, byte) in scene.memory.iter().zip([1, 2]) {
            write(memory, 8192, byte).await.expect("memory takes it");
        }
        if knows {
            scene.pair.expect_unlike(&[Extent::new(Bytes(4096), Bytes(16_384))]);
        }
        let read = async || scene.device.read(Bytes(8192), Buffer::unpooled(512)).await.map(|read| read[0]);
        assert_eq!(read().await.expect("both are well"), 1);
        scene.fail(0, FaultVerb::Any);
        scene.write(0, 7).await.expect("one member is left");
        assert_eq!(read().await.expect("one member is left"), if knows { 1 } else { 2 });
    }
}
