//! The redirection against a plain model, through crashes and power losses, and with surrogates that are full or fail.

use block::testing::{Random, conformance};
use block::{Buffer, Bytes, ChunkSize, Data, Device, ErrorKind, Extent, MemDevice, Mutation};
use env::EnvRef;
use env::testing::PausedEnv;

use super::{AccessCounts, Redirect, RedirectHeader, RedirectStatus};
use crate::ReadCache;
use crate::lives::{Layer, live};
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen};

const CHUNK: u64 = 64 << 10;
/// Six chunks, the last one short, and its last sector too.
const SIZE: Bytes = Bytes(5 * CHUNK + 3 * 4096 + 3 * 512 + 100);
/// Fewer than there are chunks.
const PLACES: u64 = 3;

fn header(volume: Bytes, places: u64) -> RedirectHeader {
    let chunk = ChunkSize::new(CHUNK).expect("a chunk size");
    RedirectHeader { volume, chunk, places, id: [7; 16] }
}

fn counts(volume: Bytes, threshold: u16) -> Box<AccessCounts> {
    Box::new(AccessCounts::new(header(volume, 1).chunks(), threshold))
}

fn memory(size: Bytes) -> Device {
    Device::new("memory", MemDevice::new(size))
}

/// An empty redirection of `base` with so many places in `partition`.
async fn over(base: &Device, partition: Device, places: u64, threshold: u16) -> Redirect {
    Redirect::create(&partition, &header(base.size(), places)).await.expect("it takes it");
    let popularity = counts(base.size(), threshold);
    let env = PausedEnv::shared(1);
    Redirect::open(env, base.clone(), partition, [1; 16], popularity).await.expect("it opens")
}

async fn in_memory(places: u64, threshold: u16) -> (Device, Redirect, Device) {
    let base = memory(SIZE);
    let partition = memory(header(SIZE, places).partition_bytes());
    let redirect = over(&base, partition, places, threshold).await;
    let guest = Device::new("guest", redirect.clone());
    (base, redirect, guest)
}

async fn byte_at(device: &Device, at: u64) -> u8 {
    device.read(Bytes(at), Buffer::unpooled(1)).await.expect("it answers")[0]
}

async fn write(device: &Device, at: u64, bytes: &[u8]) {
    device.write(Mutation::data(Bytes(at), Data::copy_of(bytes))).await.expect("it takes it");
}

async fn yield_often() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

impl Layer for Redirect {
    const SIZE: Bytes = SIZE;

    fn own_bytes() -> Bytes {
        header(SIZE, PLACES).partition_bytes()
    }

    async fn make(own: &Device) {
        Self::create(own, &header(SIZE, PLACES)).await.expect("a good disk takes it");
    }

    async fn open_over(env: EnvRef, base: Device, own: Device, boot: [u8; 16]) -> Self {
        Self::open(env, base, own, boot, counts(SIZE, 2)).await.expect("a good disk holds a redirection")
    }

    fn views(&self) -> Vec<Device> {
        vec![Device::new("guest", self.clone()), self.copy("copy")]
    }

    async fn start_draining(&self) {
        self.begin_drain().await;
    }

    async fn drain_some(&self, random: &mut Random) {
        self.drain_next(random.below(PLACES)).await.expect("good disks take it");
    }

    async fn drain_all(&self) {
        let mut next = 0;
        while let Some((behind, _)) = self.drain_next(next).await.expect("good disks take it") {
            next = behind;
        }
    }

    fn holds_nothing(&self) -> bool {
        self.is_empty()
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_lives_through_crashes_and_power_losses_while_it_is_redirected_and_drained() {
    live::<Redirect>(100, 25).await;
}

#[tokio::test(start_paused = true)]
async fn a_redirection_conforms_with_room_for_all_and_for_little() {
    for (seed, places) in [(1, 100), (2, 2)] {
        conformance(seed, async |size| {
            let (base, partition) = (memory(size), memory(header(size, places).partition_bytes()));
            Device::new("guest", over(&base, partition, places, 2).await)
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_popular_is_fetched_once_and_read_from_the_surrogate_and_a_migration_makes_nothing_popular() {
    let (base, redirect, guest) = in_memory(4, 2).await;
    write(&base, CHUNK, &[5; 4096]).await;
    let copy = redirect.copy("copy");
    for _ in 0..5 {
        assert_eq!(byte_at(&copy, CHUNK).await, 5);
    }
    assert_eq!(
        redirect.status(),
        RedirectStatus {
            index_bytes: redirect.status().index_bytes,
            places: 4,
            places_free: 4,
            ..RedirectStatus::default()
        }
    );
    for _ in 0..2 {
        assert_eq!(byte_at(&guest, CHUNK).await, 5);
    }
    yield_often().await;
    let status = redirect.status();
    assert_eq!((status.reads_at_source, status.chunks_fetched, status.fetched_bytes), (2, 1, CHUNK));
    assert_eq!((status.places_cached, status.places_dirty, status.places_free), (1, 0, 3));
    assert_eq!(byte_at(&guest, CHUNK + 4095).await, 5);
    assert_eq!(redirect.status().reads_redirected, 1);
    let refused = copy.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[1]))).await.expect_err("it only reads");
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
}

#[tokio::test(start_paused = true)]
async fn what_the_guest_writes_is_in_the_surrogate_alone_until_it_is_drained() {
    let (base, redirect, guest) = in_memory(4, 100).await;
    write(&base, 0, &[1; 8192]).await;
    write(&guest, 100, &[2; 10]).await;
    write(&guest, CHUNK - 1, &[3; 2]).await;
    let copy = redirect.copy("copy");
    for (at, byte) in [(99, 1), (100, 2), (109, 2), (110, 1), (5000, 1), (CHUNK - 1, 3), (CHUNK, 3), (CHUNK + 1, 0)] {
        assert_eq!((byte_at(&guest, at).await, byte_at(&copy, at).await), (byte, byte), "at {at}");
    }
    assert_eq!((byte_at(&base, 100).await, byte_at(&base, CHUNK).await), (1, 0));
    let status = redirect.status();
    assert_eq!((status.writes_redirected, status.places_dirty), (3, 2));
    assert!(status.reads_merged == 0 && status.reads_at_source > 0, "{status:?}");
    let across = guest.read(Bytes(0), Buffer::unpooled(8192)).await.expect("it answers");
    assert_eq!((across[99], across[100], across[4096]), (1, 2, 1));
    assert_eq!(redirect.status().reads_merged, 1);

    redirect.begin_drain().await;
    write(&guest, 5000, &[4]).await;
    assert_eq!(byte_at(&base, 5000).await, 4, "its chunk is drained first");
    assert_eq!(byte_at(&base, 100).await, 2);
    let moved = redirect.drain_next(0).await.expect("it takes it").expect("one chunk is left");
    // The sector before the border is whole and is in the first chunk, which is drained.
    assert_eq!(moved.1, Bytes(4096));
    assert_eq!(redirect.drain_next(0).await.expect("nothing is asked of it"), None);
    assert!(redirect.is_empty());
    assert_eq!((byte_at(&base, CHUNK - 1).await, byte_at(&base, CHUNK).await), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn a_full_surrogate_gives_up_what_is_only_cached_and_then_writes_go_to_the_source() {
    let (base, redirect, guest) = in_memory(2, 1).await;
    for chunk in [0, 1] {
        assert_eq!(byte_at(&guest, chunk * CHUNK).await, 0);
        yield_often().await;
    }
    assert_eq!(redirect.status().places_cached, 2);
    for chunk in [2, 3, 4] {
        write(&guest, chunk * CHUNK, &[9]).await;
    }
    let status = redirect.status();
    assert_eq!((status.places_dirty, status.places_cached, status.writes_at_source), (2, 0, 1));
    assert_eq!((byte_at(&base, 4 * CHUNK).await, byte_at(&base, 3 * CHUNK).await), (9, 0));
    // Nothing is given up that the source lacks.
    for _ in 0..3 {
        assert_eq!(byte_at(&guest, 0).await, 0);
        yield_often().await;
    }
    assert_eq!((byte_at(&guest, 2 * CHUNK).await, redirect.status().places_dirty), (9, 2));
    // Zeroes over a whole chunk make room, after a flush: until then a power loss could bring its name back.
    guest.write(Mutation::zeroes(Extent::new(Bytes(2 * CHUNK), Bytes(CHUNK)), true)).await.expect("it takes it");
    write(&guest, 0, &[8]).await;
    assert_eq!(byte_at(&base, 0).await, 8);
    guest.flush().await.expect("it flushes");
    write(&guest, CHUNK, &[8]).await;
    assert_eq!(
        (byte_at(&base, CHUNK).await, byte_at(&guest, CHUNK).await, byte_at(&guest, 2 * CHUNK).await),
        (0, 8, 0)
    );
}

/// A redirection over a surrogate that fails `verb` from now on.
async fn failing(verb: FaultVerb) -> (Device, Redirect, Device) {
    let base = memory(SIZE);
    let partition = memory(header(SIZE, 4).partition_bytes());
    let fault = Fault::new(partition, PausedEnv::shared(2));
    let redirect = over(&base, Device::new("surrogate", fault.clone()), 4, 1).await;
    let guest = Device::new("guest", redirect.clone());
    write(&base, 0, &[1; CHUNK as usize]).await;
    write(&guest, CHUNK, &[2; 4096]).await;
    assert_eq!(byte_at(&guest, 0).await, 1);
    yield_often().await;
    assert_eq!(redirect.status().places_cached, 1);
    let action = FaultAction::Fail(ErrorKind::Io);
    fault.add(FaultRule { verb, extent: None, when: FaultWhen::Always, action });
    (base, redirect, guest)
}

#[tokio::test(start_paused = true)]
async fn a_surrogate_that_fails_reads_serves_nothing_stale() {
    let (_, redirect, guest) = failing(FaultVerb::Read).await;
    assert_eq!(byte_at(&guest, 0).await, 1, "what was only cached is in the source");
    let lost = guest.read(Bytes(CHUNK), Buffer::unpooled(1)).await.expect_err("the source has older bytes");
    assert!(lost.chain().contains("only the surrogate has it"), "{}", lost.chain());
    assert!(redirect.status().has_failed);
    // The rest of that chunk is in the source.
    assert_eq!(byte_at(&guest, CHUNK + 4096).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_surrogate_that_fails_writes_takes_no_more_and_the_guest_goes_on_at_the_source() {
    let (base, redirect, guest) = failing(FaultVerb::Write).await;
    write(&guest, 3 * CHUNK, &[3]).await;
    write(&guest, 0, &[3]).await;
    assert_eq!((byte_at(&base, 3 * CHUNK).await, byte_at(&base, 0).await, byte_at(&guest, 0).await), (3, 3, 3));
    guest.write(Mutation::data(Bytes(CHUNK), Data::copy_of(&[4]))).await.expect_err("the surrogate alone has the rest");
    assert_eq!(byte_at(&guest, CHUNK).await, 2);
    // What the source lacks can still be taken out of it.
    assert!(redirect.status().has_failed && redirect.status().places_dirty == 1);
}

#[tokio::test(start_paused = true)]
async fn the_index_of_a_tebibyte_takes_no_more_than_is_stated() {
    let (volume, chunk) = (Bytes::gib(1024), ChunkSize::new(1 << 20).expect("a chunk size"));
    let header = RedirectHeader::new(volume, chunk, Bytes::gib(100), [7; 16]).expect("it fits");
    let base = Device::new("base", MemDevice::new(volume));
    let partition = memory(header.partition_bytes());
    Redirect::create(&partition, &header).await.expect("memory takes it");
    let popularity = Box::new(AccessCounts::new(header.chunks(), 2));
    let redirect = Redirect::open(PausedEnv::shared(1), base, partition, [1; 16], popularity).await.expect("it opens");
    let guest = Device::new("guest", redirect.clone());
    // A sector of every eleventh place's chunk: every map sector has something of its own.
    for place in 0..header.places / 11 {
        write(&guest, place * (1 << 20), &[1; 4096]).await;
    }
    let status = redirect.status();
    assert!(status.index_bytes <= 40 << 20, "{} bytes", status.index_bytes);
}

#[tokio::test]
async fn below_a_redirection_a_read_cache_serves_copies_and_hears_of_every_change_of_the_source() {
    let (base, redirect, guest) = in_memory(1, 1).await;
    let chunk = ChunkSize::new(CHUNK).expect("a chunk size");
    let cache = ReadCache::new(redirect.source().clone(), redirect.source().clone(), chunk, Bytes(6 * CHUNK));
    redirect.reach_source_by(cache.guest(), cache.copy());
    let (copy, comparison) = (redirect.copy("copy"), redirect.comparison("comparison"));
    for at in (0..SIZE.get()).step_by(CHUNK as usize) {
        let length = CHUNK.min(SIZE.get() - at);
        copy.read(Bytes(at), Buffer::unpooled(length as usize)).await.expect("it answers");
    }
    assert_eq!(cache.status().copy_misses, 6);
    // The one place takes the first; the second goes to the source, past the surrogate and not past the cache.
    write(&guest, 0, &[1; 512]).await;
    write(&guest, 2 * CHUNK, &[2; 512]).await;
    assert_eq!([byte_at(&base, 0).await, byte_at(&base, 2 * CHUNK).await], [0, 2]);
    for device in [&guest, &copy, &comparison] {
        assert_eq!([byte_at(device, 0).await, byte_at(device, 2 * CHUNK).await], [1, 2]);
    }
    assert!(cache.status().copy_hits > 0 && cache.status().guest_hits > 0);
    // What changes the disk past all of them is what a comparison is there to find.
    write(&base, 4 * CHUNK, &[3; 512]).await;
    assert_eq!([byte_at(&copy, 4 * CHUNK).await, byte_at(&comparison, 4 * CHUNK).await], [0, 3]);
    cache.close();
    assert_eq!([byte_at(&copy, 4 * CHUNK).await, byte_at(&guest, 4 * CHUNK).await], [3, 3]);
}

#[tokio::test]
async fn a_place_is_another_chunks_only_after_a_flush_that_the_durable_map_forgets_it_with() {
    let (base, redirect, guest) = in_memory(1, u16::MAX).await;
    write(&guest, 0, &[1; 512]).await;
    guest.flush().await.expect("it flushes");
    // The source has all of the chunk again, and the durable map still names its place.
    guest.write(Mutation::zeroes(Extent::new(Bytes::ZERO, Bytes(CHUNK)), false)).await.expect("it takes it");
    write(&guest, CHUNK, &[2; 512]).await;
    assert_eq!((redirect.status().writes_at_source, byte_at(&base, CHUNK).await), (1, 2));
    guest.flush().await.expect("it flushes");
    write(&guest, 2 * CHUNK, &[3; 512]).await;
    assert_eq!((redirect.status().writes_at_source, byte_at(&base, 2 * CHUNK).await), (1, 0));
}

#[tokio::test]
async fn a_discard_that_the_source_ignores_brings_nothing_older_back() {
    let lower = memory(SIZE);
    write(&lower, 0, &[5; 512]).await;
    let base = Device::new("base", Keeping(lower));
    let redirect = over(&base, memory(header(SIZE, 2).partition_bytes()), 2, u16::MAX).await;
    let guest = Device::new("guest", redirect);
    write(&guest, 0, &[6; 512]).await;
    guest.write(Mutation::discard(Extent::new(Bytes::ZERO, Bytes(CHUNK)))).await.expect("it takes it");
    assert_ne!(byte_at(&guest, 0).await, 5, "fives are older than sixes");
}

#[tokio::test(start_paused = true)]
async fn what_is_discarded_does_not_come_back_from_the_surrogate_where_the_source_reads_as_zeroes() {
    let (base, redirect, guest) = in_memory(4, 2).await;
    write(&guest, 0, &[9; 8192]).await;
    assert_eq!(redirect.status().places_dirty, 1);
    guest.write(Mutation::discard(Extent::new(Bytes::ZERO, Bytes(4096)))).await.expect("it takes it");
    assert_eq!((byte_at(&guest, 0).await, byte_at(&guest, 4096).await), (0, 9));
    redirect.start_draining().await;
    redirect.drain_all().await;
    assert!(redirect.holds_nothing());
    assert_eq!((byte_at(&base, 0).await, byte_at(&base, 4096).await), (0, 9));
}

/// A device that keeps what it has in spite of a discard.
struct Keeping(Device);

impl block::Filter for Keeping {
    fn lower(&self) -> &Device {
        &self.0
    }

    fn write(&self, mutation: Mutation) -> block::IoFuture<'_, ()> {
        match mutation.kind() {
            block::MutationKind::Discard => block::ready(Ok(())),
            _ => Box::pin(self.0.write(mutation)),
        }
    }
}

/// A redirection over a source that can be told to fail.
async fn over_failing_source(places: u64) -> (Device, Fault, Device, Redirect, Device) {
    let (plain, partition) = (memory(SIZE), memory(header(SIZE, places).partition_bytes()));
    let fault = Fault::new(plain.clone(), PausedEnv::shared(2));
    let redirect = over(&Device::new("source", fault.clone()), partition.clone(), places, u16::MAX).await;
    let guest = Device::new("guest", redirect.clone());
    (plain, fault, partition, redirect, guest)
}

async fn open_again(source: &Fault, partition: &Device) -> Device {
    let source = Device::new("source", source.clone());
    let opened = Redirect::open(PausedEnv::shared(1), source, partition.clone(), [1; 16], counts(SIZE, u16::MAX)).await;
    Device::new("again", opened.expect("it opens, whatever the source says"))
}

fn flushes_fail(fault: &Fault, kind: ErrorKind) {
    let action = FaultAction::Fail(kind);
    fault.add(FaultRule { verb: FaultVerb::Flush, extent: None, when: FaultWhen::Always, action });
}

async fn drain(redirect: &Redirect) {
    let mut next = 0;
    while let Some((behind, _)) = redirect.drain_next(next).await.expect("memory takes it") {
        next = behind;
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_is_away_changes_nothing_of_a_surrogate() {
    let (_, fault, partition, redirect, guest) = over_failing_source(4).await;
    write(&guest, 0, &[5; 4096]).await;
    guest.flush().await.expect("it flushes");
    guest.write(Mutation::zeroes(Extent::new(Bytes::ZERO, Bytes(CHUNK)), false)).await.expect("it takes it");
    write(&guest, CHUNK, &[6; 4096]).await;
    flushes_fail(&fault, ErrorKind::TimedOut);
    guest.flush().await.expect_err("the source is away");
    let again = open_again(&fault, &partition).await;
    assert_eq!([byte_at(&again, 0).await, byte_at(&again, CHUNK).await], [0, 6], "a restart has lost something");
    fault.clear();
    guest.flush().await.expect("nothing was lost");
    write(&guest, 2 * CHUNK, &[7; 4096]).await;
    assert_eq!(redirect.status().places_dirty, 2, "it takes nothing any more");
}

#[tokio::test(start_paused = true)]
async fn what_was_moved_to_the_source_and_may_be_lost_there_is_the_surrogates_again() {
    let (plain, fault, partition, redirect, guest) = over_failing_source(4).await;
    for chunk in [0, 1] {
        write(&guest, chunk * CHUNK, &[5; 8192]).await;
    }
    guest.flush().await.expect("it flushes");
    redirect.begin_drain().await;
    drain(&redirect).await;
    // The guest changes one of them in the source.
    write(&guest, CHUNK, &[6; 512]).await;
    // It has lost all of that by the time it says so, and whoever asks it later reads what was there before.
    for at in [0, CHUNK] {
        write(&plain, at, &[1; 8192]).await;
    }
    flushes_fail(&fault, ErrorKind::Io);
    redirect.settle().await.expect_err("the source has failed");
    assert!(!redirect.is_empty(), "what was flushed is lost");
    let bytes = async |device: &Device| {
        [byte_at(device, 0).await, byte_at(device, CHUNK).await, byte_at(device, CHUNK + 4096).await]
    };
    assert_eq!(bytes(&guest).await, [5, 6, 5]);
    assert_eq!(bytes(&open_again(&fault, &partition).await).await, [5, 6, 5], "a restart has lost something");
    fault.clear();
    drain(&redirect).await;
    assert!(redirect.settle().await.expect("the source is well again"), "it cannot be taken out");
    assert_eq!(bytes(&plain).await, [5, 6, 5]);
}

#[tokio::test(start_paused = true)]
async fn what_the_source_may_have_lost_is_the_surrogates_again_and_is_drained_once_more() {
    let (plain, fault, partition, redirect, guest) = over_failing_source(4).await;
    write(&guest, 0, &[5; 8192]).await;
    write(&guest, CHUNK, &[5; 4096]).await;
    guest.flush().await.expect("it flushes");
    // Both leave the surrogate; the first chunk comes back to it in part.
    for chunk in [0, 1] {
        guest
            .write(Mutation::zeroes(Extent::new(Bytes(chunk * CHUNK), Bytes(CHUNK)), false))
            .await
            .expect("it takes it");
    }
    write(&guest, 0, &[6; 4096]).await;
    for at in [0, CHUNK] {
        write(&plain, at, &[1; 8192]).await;
    }
    flushes_fail(&fault, ErrorKind::Io);
    guest.flush().await.expect_err("the source has failed");
    let bytes =
        async |device: &Device| [byte_at(device, 0).await, byte_at(device, 4096).await, byte_at(device, CHUNK).await];
    assert_eq!(bytes(&guest).await, [6, 0, 0], "what was answered is lost");
    // What is written now goes where a restart finds it.
    write(&guest, 3 * CHUNK, &[7; 4096]).await;
    assert_eq!(byte_at(&plain, 3 * CHUNK).await, 7);
    let again = open_again(&fault, &partition).await;
    assert_eq!((bytes(&again).await, byte_at(&again, 3 * CHUNK).await), ([6, 0, 0], 7));
    fault.clear();
    guest.flush().await.expect_err("a later flush proves nothing of what the guest has written");
    redirect.begin_drain().await;
    drain(&redirect).await;
    assert!(redirect.settle().await.expect("the source is well again"), "it cannot be taken out");
    assert_eq!(bytes(&plain).await, [6, 0, 0]);
}
