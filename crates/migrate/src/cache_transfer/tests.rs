//! Both ends over a connection in memory, with a guest on either side.

use std::sync::Arc;
use std::time::Duration;

use block::testing::Random;
use block::{Buffer, Bytes, ChunkSize, Data, Device, MemDevice, Mutation};
use env::EnvRef;
use env::testing::PausedEnv;
use filters::{
    Cache, CacheHeader, CacheIdentity, CacheMode, CacheOptions, CachePolicy, Fault, FaultAction, FaultRule, FaultVerb,
    FaultWhen,
};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;

use super::*;
use crate::stream::BoxTransport;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const SIZE: Bytes = Bytes(BLOCK * BLOCKS);

/// A volume on shared storage with a cache on each of two hosts.
struct Two {
    env: EnvRef,
    base: Device,
    source: Cache,
    target: Cache,
    guest_there: Device,
    guest_here: Device,
    /// What the volume has, by blocks: a guest writes whole ones.
    model: Mutex<Vec<u8>>,
}

async fn cache(env: &EnvRef, base: &Device, places: u64) -> Cache {
    cache_on(env, base, places, |flash| flash).await
}

/// The same on what `over` makes of its flash.
async fn cache_on(env: &EnvRef, base: &Device, places: u64, over: impl FnOnce(Device) -> Device) -> Cache {
    let block = ChunkSize::new(BLOCK).expect("a size of blocks");
    let identity = CacheIdentity { volume: [1; 16], layer: [2; 16], epoch: 1 };
    let header = CacheHeader { volume: SIZE, block, capacity: places, places, id: [3; 16], identity };
    let partition = over(Device::new("flash", MemDevice::new(header.partition_bytes())));
    Cache::create(&partition, &header).await.expect("it takes it");
    let options = CacheOptions { mode: CacheMode::WriteThrough, policy: CachePolicy::Lru, ..CacheOptions::default() };
    Cache::open(Arc::clone(env), base.clone(), partition, [4; 16], options, identity).await.expect("it opens")
}

impl Two {
    async fn new(seed: u64) -> Arc<Self> {
        let env = PausedEnv::shared(seed);
        let base = Device::new("storage", MemDevice::new(SIZE));
        let (source, target) = (cache(&env, &base, BLOCKS).await, cache(&env, &base, BLOCKS).await);
        let (guest_there, guest_here) = (Device::new("there", source.clone()), Device::new("here", target.clone()));
        let model = Mutex::new(vec![0; BLOCKS as usize]);
        Arc::new(Self { env, base, source, target, guest_there, guest_here, model })
    }

    async fn write(&self, guest: &Device, block: u64, byte: u8) {
        // Of a write that is not answered a read may find either; nobody reads meanwhile.
        let data = Data::copy_of(&[byte; BLOCK as usize]);
        guest.write(Mutation::data(Bytes(block * BLOCK), data)).await.expect("it takes it");
        self.model.lock()[block as usize] = byte;
    }

    async fn read(&self, guest: &Device, block: u64) -> u8 {
        let read = guest.read(Bytes(block * BLOCK), Buffer::unpooled(BLOCK as usize)).await.expect("it answers");
        assert!(read.iter().all(|byte| *byte == read[0]));
        read[0]
    }

    async fn check(&self, guest: &Device, block: u64, what: &str) {
        let expected = self.model.lock()[block as usize];
        assert_eq!(self.read(guest, block).await, expected, "block {block}, {what}");
    }

    fn both(&self, options: &CacheTransferOptions) -> (CacheDeparture, CacheArrival) {
        (
            CacheDeparture::new(Arc::clone(&self.env), self.source.clone(), options.clone()),
            CacheArrival::new(Arc::clone(&self.env), self.target.clone(), options.clone()),
        )
    }

    /// Joins both ends. Whoever drops what is given has cut it.
    fn connect(&self, departure: &CacheDeparture, arrival: &CacheArrival) -> tokio::task::JoinHandle<()> {
        let (near, far) = tokio::io::duplex(64 << 10);
        let (near, far): (BoxTransport, BoxTransport) = (Box::new(near), Box::new(far));
        let (departure, arrival) = (departure.clone(), arrival.clone());
        tokio::spawn(async move {
            drop(futures::future::join(departure.run(near), arrival.run(far)).await);
        })
    }

    async fn rest(&self, ms: u64) {
        self.env.sleep(Duration::from_millis(ms)).await;
    }

    /// Fills the source's cache with `blocks`, each with other bytes.
    async fn warm_source(&self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            self.write(&self.guest_there, block, block as u8 + 1).await;
            self.read(&self.guest_there, block).await;
            self.rest(1).await;
        }
    }
}

fn by(way: CacheWay) -> CacheTransferOptions {
    CacheTransferOptions { way, ..CacheTransferOptions::default() }
}

#[tokio::test(start_paused = true)]
async fn each_way_brings_what_it_says_and_ends() {
    for (way, from_source, from_storage) in [
        (CacheWay::None, 0, 0),
        (CacheWay::Cachemior, 0, 20),
        (CacheWay::Firepan, 20, 0),
        (CacheWay::FirepanIf, 20, 0),
        (CacheWay::RemoteRead, 0, 0),
        (CacheWay::Hybrid, 20, 0),
    ] {
        let two = Two::new(1).await;
        two.warm_source(0..20).await;
        let (departure, arrival) = two.both(&CacheTransferOptions { time_ms_max: 60_000, ..by(way) });
        let joined = two.connect(&departure, &arrival);
        two.rest(200).await;
        if way == CacheWay::Firepan {
            assert_eq!(arrival.status().from_source, 0, "the guest runs");
            departure.begin_copy();
            departure.whole().await;
        }
        if way == CacheWay::Hybrid {
            assert!(departure.share_there() >= 0.95, "{}", departure.share_there());
        }
        departure.seal(Duration::MAX).await.expect("it answers");
        assert!(arrival.is_sealed());
        arrival.guest_is_here(two.base.clone());
        if way == CacheWay::FirepanIf {
            assert!(arrival.status().is_withheld);
        }
        if way == CacheWay::RemoteRead {
            two.check(&two.guest_here, 3, "read at the source").await;
            two.rest(1).await;
            assert_eq!(arrival.status().read_remotely, 1);
        }
        arrival.over().await;
        let status = arrival.status();
        assert_eq!((status.from_source, status.from_storage), (from_source, from_storage), "{way}: {status:?}");
        assert!(!status.is_withheld && status.is_over, "{way}");
        departure.enough().await;
        for block in 0..20 {
            two.check(&two.guest_here, block, way.name()).await;
        }
        if from_source + from_storage > 0 {
            assert_eq!(two.target.status().hits, 20, "{way}");
        }
        joined.await.expect("it ends");
    }
}

#[tokio::test(start_paused = true)]
async fn the_hottest_come_first_and_the_share_of_hits_is_foreseen() {
    let two = Two::new(2).await;
    two.warm_source(0..60).await;
    let (departure, arrival) = two.both(&CacheTransferOptions { in_flight: 1, ..by(CacheWay::Hybrid) });
    assert!(departure.share_there() < 1e-9, "nobody is connected");
    // Nine reads of ten are of six blocks.
    for number in 0..300_u64 {
        let block = if number % 10 < 9 { number % 6 } else { 6 + number % 54 };
        two.read(&two.guest_there, block).await;
    }
    let hottest = two.source.hottest(6);
    let joined = two.connect(&departure, &arrival);
    while arrival.status().from_source < 12 {
        tokio::task::yield_now().await;
    }
    assert!(hottest.iter().all(|block| two.target.has(*block)), "{hottest:?}");
    let (share, (sent, listed)) = (departure.share_there(), departure.progress());
    assert!(share > 0.85 && (sent as f64) < 0.5 * listed as f64, "{share} with {sent} of {listed}");
    joined.abort();
}

#[tokio::test(start_paused = true)]
async fn what_the_source_takes_after_the_list_was_made_comes_as_well() {
    let two = Two::new(6).await;
    two.warm_source(0..20).await;
    let (departure, arrival) = two.both(&by(CacheWay::Hybrid));
    let joined = two.connect(&departure, &arrival);
    departure.whole().await;
    two.warm_source(20..40).await;
    two.rest(3000).await;
    assert!((20..40).all(|block| two.target.has(block)), "{:?}", arrival.status());
    two.warm_source(40..60).await;
    departure.seal(Duration::MAX).await.expect("it answers");
    arrival.guest_is_here(two.base.clone());
    arrival.over().await;
    for block in 0..60 {
        two.check(&two.guest_here, block, "after the move").await;
    }
    joined.await.expect("it ends");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_was_not_sealed_drops_what_it_has_of_an_earlier_connection() {
    let two = Two::new(3).await;
    two.warm_source(0..20).await;
    let (departure, arrival) = two.both(&by(CacheWay::Hybrid));
    let joined = two.connect(&departure, &arrival);
    two.rest(200).await;
    assert!(two.target.has(5));
    joined.abort();
    drop(joined.await);
    // Nobody tells the target of this.
    two.write(&two.guest_there, 5, 99).await;
    assert!(departure.seal(Duration::MAX).await.is_err(), "nobody is connected");
    let seal = departure.last_seal().expect("there was one");
    assert!(!seal.is_answered && seal.took.is_zero(), "{seal:?}");
    let joined = two.connect(&departure, &arrival);
    departure.whole().await;
    departure.seal(Duration::MAX).await.expect("it answers");
    arrival.guest_is_here(two.base.clone());
    for block in 0..20 {
        two.check(&two.guest_here, block, "after two connections").await;
    }
    arrival.over().await;
    joined.await.expect("it ends");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_guest_waits_for_a_seal_no_longer_than_is_said() {
    for (limit, most) in [(300, 300), (60_000, 5_000)] {
        let two = Two::new(5).await;
        let (departure, _) = two.both(&by(CacheWay::Hybrid));
        // The target takes what it is told, and answers nothing.
        let (near, far) = tokio::io::duplex(64 << 10);
        let served = departure.clone();
        let joined = tokio::spawn(async move { served.run(Box::new(near)).await });
        two.rest(100).await;
        assert!(departure.seal(Duration::from_millis(limit)).await.is_err(), "nobody answers");
        let seal = departure.last_seal().expect("there was one");
        assert_eq!((seal.took, seal.is_answered), (Duration::from_millis(most), false));
        joined.abort();
        drop(far);
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_is_lost_with_the_guest_here_ends_the_transfer() {
    for way in [CacheWay::FirepanIf, CacheWay::Hybrid, CacheWay::RemoteRead, CacheWay::Cachemior] {
        let two = Two::new(4).await;
        two.warm_source(0..40).await;
        let (departure, arrival) = two.both(&CacheTransferOptions { in_flight: 1, ..by(way) });
        let joined = two.connect(&departure, &arrival);
        tokio::task::yield_now().await;
        while departure.seal(Duration::MAX).await.is_err() {
            two.rest(1).await;
        }
        arrival.guest_is_here(two.base.clone());
        joined.abort();
        drop(joined.await);
        two.write(&two.guest_here, 7, 200).await;
        let began = two.env.now();
        arrival.over().await;
        assert!(two.env.now().since(began) < Duration::from_secs(30), "{way}");
        for block in 0..40 {
            two.check(&two.guest_here, block, way.name()).await;
        }
        if way == CacheWay::Hybrid {
            assert!(two.target.status().places_free <= BLOCKS - 40, "the storage has the rest");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_changes_of_a_guest_that_writes_until_it_is_held_are_never_read_as_before() {
    for seed in 0..150 {
        let mut random = Random::new(seed);
        let way = CacheWay::ALL[random.below(6) as usize];
        let warm_start = if random.one_in(2) { WarmStart::WithMemory } else { WarmStart::AfterSwitchover };
        let two = Two::new(seed).await;
        two.warm_source((0..BLOCKS).filter(|_| random.one_in(2)).collect::<Vec<_>>()).await;
        let options = CacheTransferOptions {
            warm_start,
            in_flight: 1 + random.below(20) as u32,
            changed_max: random.below(20) as u32,
            ..by(way)
        };
        let (departure, arrival) = two.both(&options);
        let mut joined = two.connect(&departure, &arrival);
        let warming = (arrival.clone(), two.base.clone());
        let warming = tokio::spawn(async move { warming.0.warm_before(warming.1).await });
        let mut guest_here = false;
        for step in 0..400_u64 {
            let guest = if guest_here { &two.guest_here } else { &two.guest_there };
            let block = random.below(BLOCKS);
            match random.below(12) {
                0..=3 => two.check(guest, block, &format!("seed {seed}, step {step}, {way}")).await,
                4..=7 => two.write(guest, block, step as u8).await,
                8 => two.rest(random.below(30)).await,
                9 => {
                    for _ in 0..random.below(20) {
                        tokio::task::yield_now().await;
                    }
                }
                10 if random.one_in(8) => {
                    joined.abort();
                    drop((&mut joined).await);
                    joined = two.connect(&departure, &arrival);
                }
                11 if !guest_here && step > 150 => {
                    // It is held: nobody writes until the target has it.
                    departure.begin_copy();
                    guest_here = departure.seal(Duration::MAX).await.is_ok();
                    if guest_here {
                        arrival.guest_is_here(two.base.clone());
                    }
                }
                _ => {}
            }
        }
        if guest_here {
            arrival.over().await;
            for block in 0..BLOCKS {
                two.check(&two.guest_here, block, &format!("seed {seed} at the end, {way}")).await;
            }
        }
        warming.abort();
        joined.abort();
    }
}

/// Hands on what comes while there is a permit, and never closes.
async fn hand_on(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, permits: Arc<Semaphore>) {
    let mut bytes = vec![0; 4096];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        let _permit = permits.acquire().await.expect("it is never closed");
        if to.write_all(&bytes[..length]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_hangs_holds_no_read_of_the_guest_up_for_long_and_is_soon_not_asked_any_more() {
    let two = Two::new(5).await;
    two.warm_source(0..40).await;
    let (departure, arrival) = two.both(&by(CacheWay::RemoteRead));
    let permits = Arc::new(Semaphore::new(2));
    let ((near, one), (other, far)) = (tokio::io::duplex(64 << 10), tokio::io::duplex(64 << 10));
    let ((one_reader, one_writer), (other_reader, other_writer)) = (tokio::io::split(one), tokio::io::split(other));
    tokio::spawn(hand_on(one_reader, other_writer, Arc::clone(&permits)));
    tokio::spawn(hand_on(other_reader, one_writer, Arc::clone(&permits)));
    let (leaving, coming) = (departure.clone(), arrival.clone());
    tokio::spawn(async move { drop(leaving.run(Box::new(near)).await) });
    tokio::spawn(async move { drop(coming.run(Box::new(far)).await) });
    two.rest(200).await;
    departure.seal(Duration::MAX).await.expect("it answers");
    arrival.guest_is_here(two.base.clone());
    two.check(&two.guest_here, 39, "read at the source").await;
    let held = permits.acquire_many(2).await.expect("it is never closed");
    let mut longest = Duration::ZERO;
    for block in 0..20 {
        let began = two.env.now();
        two.check(&two.guest_here, block, "while the source hangs").await;
        longest = longest.max(two.env.now().since(began));
        assert!(block < 8 || two.env.now().since(began) < Duration::from_millis(5), "it is asked again and again");
    }
    assert!(longest <= Duration::from_millis(150), "a read has waited for {longest:?}");
    // What was asked is answered late: the source is asked again.
    drop(held);
    two.rest(50).await;
    let before = arrival.status().read_remotely;
    two.check(&two.guest_here, 30, "once the source goes on").await;
    two.rest(10).await;
    assert_eq!(arrival.status().read_remotely, before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_block_that_was_on_its_way_into_the_flash_when_the_connection_was_lost_is_not_believed() {
    for wait in [1, 20, 100] {
        let mut two = Two::new(6).await;
        let (env, base) = (Arc::clone(&two.env), two.base.clone());
        let mut slow = None;
        let target = cache_on(&env, &base, BLOCKS, |flash| {
            let fault = Fault::new(flash, PausedEnv::shared(7));
            slow = Some(fault.clone());
            Device::new("slow flash", fault)
        });
        let target = target.await;
        let stand = Arc::get_mut(&mut two).expect("nobody else has it yet");
        (stand.guest_here, stand.target) = (Device::new("here", target.clone()), target);
        two.warm_source(0..4).await;
        let action = FaultAction::Delay(Duration::from_millis(500));
        let rule = FaultRule { verb: FaultVerb::Write, extent: None, when: FaultWhen::Always, action };
        slow.expect("it was made").add(rule);
        let (departure, arrival) = two.both(&by(CacheWay::Hybrid));
        let joined = two.connect(&departure, &arrival);
        two.rest(50).await;
        joined.abort();
        let _ = joined.await;
        // The guest changes at the source what is on its way here.
        for block in 0..4 {
            two.write(&two.guest_there, block, 200 + block as u8).await;
        }
        two.rest(wait).await;
        let joined = two.connect(&departure, &arrival);
        two.rest(5_000).await;
        departure.seal(Duration::MAX).await.expect("it answers");
        arrival.guest_is_here(two.base.clone());
        arrival.over().await;
        for block in 0..4 {
            two.check(&two.guest_here, block, "after a connection was lost").await;
        }
        joined.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_warmer_beside_the_memory_waits_for_the_list_and_believes_nothing_that_is_changed_meanwhile() {
    let two = Two::new(8).await;
    two.warm_source(0..20).await;
    let options = CacheTransferOptions { warm_start: WarmStart::WithMemory, ..by(CacheWay::Cachemior) };
    let (departure, arrival) = two.both(&options);
    let warming = {
        let (arrival, base) = (arrival.clone(), two.base.clone());
        tokio::spawn(async move { arrival.warm_before(base).await })
    };
    two.rest(10).await;
    let joined = two.connect(&departure, &arrival);
    for block in 0..5 {
        two.write(&two.guest_there, block, 100 + block as u8).await;
        two.rest(1).await;
    }
    two.rest(500).await;
    assert!(arrival.status().from_storage >= 15, "{:?}: it has not waited for the list", arrival.status());
    departure.seal(Duration::MAX).await.expect("it answers");
    warming.await.expect("it ends");
    arrival.guest_is_here(two.base.clone());
    arrival.over().await;
    for block in 0..20 {
        two.check(&two.guest_here, block, "warmed beside the memory").await;
    }
    joined.abort();
}
