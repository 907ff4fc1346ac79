//! An hour of the evaluation (section 4.2): a VM without a cache, with one from 400 s on, and at another host from 2,000 s on.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, ChunkSize, Device, Error, ErrorKind, MemDevice, Result};
use env::{EnvRef, Moment};
use filters::{Cache, CacheHeader, CacheIdentity, CacheMode, CacheOptions, CachePolicy};
use migrate::{CacheArrival, CacheDeparture, CacheTransferOptions, CacheTransferStatus, CacheWay, WarmStart};
use parking_lot::Mutex;
use sim::clock;
use sim::link::{Link, LinkFigures};
use sim::log::Keep;
use sim::model::FlashFigures;
use sim::process::Process;
use sim::world::World;

use super::devices::{BLOCK_BYTES, Ceiling, CopierEnv, Costs, Counts, Paced, as_copier};
use super::guest::Guest;
use super::host::{Class, Host};

/// When the cache is attached, when the move begins, and when all ends, in seconds.
pub(super) const ATTACH: usize = 400;
pub(super) const MOVE: usize = 2000;
pub(super) const END: usize = 3600;
/// How long the VM stands still for its memory, in seconds.
pub(super) const PAUSE: u64 = 3;
/// The switchover of [`CacheWay::Hybrid`] waits for this share of the hits.
pub(super) const SHARE_ENOUGH: f64 = 0.95;
/// The VMs beside the one that moves, on either host.
pub(super) const NEIGHBOURS: u32 = 3;

const FILE_BYTES: u64 = 5 << 30;
const GIB: u64 = 1 << 30;
/// Bytes of a VM's part of the shared storage (section 4.1).
const STORAGE_PARTITION: u64 = 50_000_000_000;
const IDENTITY: CacheIdentity = CacheIdentity { volume: [1; 16], layer: [2; 16], epoch: 1 };
/// More tasks at once than this are an unbounded queue: those of 128 requests and of 4,096 blocks that are asked for.
const TASKS_MAX: usize = 20_000;

/// A storage request's cost is fitted to 8,000 reads a second of a VM without a cache, beside three others; a hit's to 15,000 with a warm
/// one; a copied block's to 10 GB in 30 s. A VM with an empty cache has 8,000 as well (4.2), so to admit a block costs its host nothing.
pub(super) const COSTS: Costs = Costs { storage: 25.0e-6, hit: 4.85e-6, admission: 0.0, copy: 2.25e-6 };

/// How the cache goes with its VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    None,
    Cachemior,
    /// The same beside the memory, as Successor.
    CachemiorEarly,
    Firepan,
    FirepanIf,
    RemoteRead,
    Hybrid,
}

impl Way {
    /// The paper's, in its order.
    pub(super) const PAPERS: [Self; 4] = [Self::None, Self::Cachemior, Self::Firepan, Self::FirepanIf];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cachemior => "cachemior",
            Self::CachemiorEarly => "cachemior beside the memory",
            Self::Firepan => "firepan",
            Self::FirepanIf => "firepan-if",
            Self::RemoteRead => "remote-read",
            Self::Hybrid => "hybrid",
        }
    }

    const fn of_engine(self) -> CacheWay {
        match self {
            Self::None => CacheWay::None,
            Self::Cachemior | Self::CachemiorEarly => CacheWay::Cachemior,
            Self::Firepan => CacheWay::Firepan,
            Self::FirepanIf => CacheWay::FirepanIf,
            Self::RemoteRead => CacheWay::RemoteRead,
            Self::Hybrid => CacheWay::Hybrid,
        }
    }
}

/// What is otherwise than in the evaluation, to show why something comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Control {
    /// Nothing.
    Standard,
    /// What all VMs share is the storage, and no host has a path of its own.
    OneStorage,
    /// A copied block costs the hosts nothing but the network.
    FreeCopies,
    /// The warmer asks its host for itself, and takes nothing of its VM's part.
    WarmerApart,
    /// 128 requests outstanding, of whose misses the engine admits 64 at a time.
    Outstanding128,
}

/// An hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Scene {
    pub(super) way: Way,
    /// The cache's size in GB.
    pub(super) cache_gb: u64,
    pub(super) control: Control,
    /// Sizes and requests are so many times fewer than the paper's.
    pub(super) scale: u64,
}

/// What was counted from the start up to a second. Requests are those of the run: each stands for the scale.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) reads: f64,
    pub(super) writes: f64,
    /// Reads of either host's flash and of the storage, by the guest.
    pub(super) flash_reads: f64,
    pub(super) storage_reads: f64,
    /// Writes of either host's flash for the guest.
    pub(super) admissions: f64,
    /// Reads of the storage by the warmer.
    pub(super) warmer_reads: f64,
    /// Reads of the guest's that the other host's cache has answered.
    pub(super) remote_reads: f64,
    pub(super) hits: f64,
    pub(super) misses: f64,
    /// What a neighbour at the source and one at the target has got of its host's time, in seconds.
    pub(super) neighbour_seconds: [f64; 2],
}

/// What came of it.
pub(super) struct Seen {
    /// One for each second, the first at zero.
    pub(super) samples: Vec<Sample>,
    pub(super) scale: f64,
    /// When the guest was held at the source, in seconds.
    pub(super) held: f64,
    /// When it ran at the target.
    pub(super) resumed: f64,
    /// When the transfer was over, if it was before the end.
    pub(super) over: Option<f64>,
    pub(super) share_at_hold: f64,
    pub(super) status: CacheTransferStatus,
}

/// The two hosts, what is between them, and the VM.
struct Stage {
    scene: Scene,
    world: World,
    process: Process,
    hosts: [Host; 2],
    storage: Device,
    storage_ceiling: Arc<Ceiling>,
    storage_counts: Arc<Counts>,
    warmer_counts: Arc<Counts>,
    flash_counts: Arc<Counts>,
    caches: Arc<Mutex<Vec<Cache>>>,
    guest: Guest,
}

/// When things happened.
#[derive(Default)]
struct Moments {
    held: f64,
    resumed: f64,
    share_at_hold: f64,
    over: Arc<Mutex<Option<f64>>>,
}

impl Scene {
    pub(super) const fn of_paper(way: Way, cache_gb: u64, scale: u64) -> Self {
        Self { way, cache_gb, control: Control::Standard, scale }
    }

    const fn file_bytes(&self) -> u64 {
        FILE_BYTES / self.scale / BLOCK_BYTES * BLOCK_BYTES
    }

    const fn costs(&self) -> Costs {
        match self.control {
            Control::Standard | Control::Outstanding128 | Control::WarmerApart => COSTS,
            // So that each of seven VMs has what each of four has.
            Control::OneStorage => {
                let part = 4.0 / 7.0;
                let Costs { storage, hit, admission, copy } = COSTS;
                Costs { storage: storage * part, hit: hit * part, admission: admission * part, copy }
            }
            Control::FreeCopies => Costs { copy: 0.0, ..COSTS },
        }
    }

    async fn hour(&self, seed: u64) -> Result<Seen> {
        let stage = Stage::new(*self, seed);
        let sampled = stage.sample();
        stage.guest.run_on(stage.storage_of(0, Class::GuestStorage));
        stage.until(ATTACH as u64).await;
        stage.guest.hold().await;
        let source = stage.new_cache(0).await?;
        stage.guest.run_on(Device::new("guest", source.clone()));
        stage.until(MOVE as u64).await;
        let (arrival, moments) = stage.go(source).await?;
        stage.until(END as u64).await;
        let status = arrival.status();
        let over = *moments.over.lock();
        stage.world.sleep(Duration::from_millis(1)).await;
        let samples = std::mem::take(&mut *sampled.lock());
        if let Some(violation) = stage.world.violation() {
            return Err(Error::new(ErrorKind::Internal, format!("{self}: {violation}")));
        }
        let Moments { held, resumed, share_at_hold, .. } = moments;
        Ok(Seen { samples, scale: self.scale as f64, held, resumed, over, share_at_hold, status })
    }
}

impl Stage {
    fn new(scene: Scene, seed: u64) -> Self {
        let world = World::new(seed, Keep::Tail);
        let process = Process::bystander(&world, "hosts", 1).with_tasks_max(TASKS_MAX);
        let hosts = match scene.control {
            Control::OneStorage => {
                let all = Host::new(&world, 2 * NEIGHBOURS);
                [all.clone(), all]
            }
            _ => [(); 2].map(|()| Host::new(&world, NEIGHBOURS)),
        };
        let volume = Bytes(4 * scene.file_bytes());
        let ceiling = Ceiling::new(FlashFigures::NVME_480GB, STORAGE_PARTITION, scene.scale as u32);
        let guest = Guest::new(&world, scene.file_bytes(), scene.control != Control::Outstanding128);
        Self {
            scene,
            process,
            hosts,
            storage: Device::new("storage", MemDevice::new(volume)),
            storage_ceiling: Arc::new(ceiling),
            storage_counts: Arc::default(),
            warmer_counts: Arc::default(),
            flash_counts: Arc::default(),
            caches: Arc::default(),
            guest,
            world,
        }
    }

    async fn until(&self, second: u64) {
        self.world.sleep_until(Moment(Duration::from_secs(second))).await;
    }

    fn seconds(&self) -> f64 {
        self.world.now().0.as_secs_f64()
    }

    fn paced(&self, inner: Device, host: usize, class: Class) -> Paced {
        Paced {
            world: self.world.clone(),
            inner,
            host: self.hosts[host].clone(),
            class,
            costs: self.scene.costs(),
            scale: self.scene.scale as u32,
            ceiling: Arc::clone(&self.storage_ceiling),
            counts: Arc::clone(&self.storage_counts),
            data_start: 0,
        }
    }

    /// The shared storage as `host` reaches it.
    fn storage_of(&self, host: usize, class: Class) -> Device {
        let paced = self.paced(self.storage.clone(), host, class);
        let counts = if class == Class::GuestStorage { &self.storage_counts } else { &self.warmer_counts };
        Device::new("storage", Paced { counts: Arc::clone(counts), ..paced })
    }

    /// An empty cache on the flash of `host`.
    async fn new_cache(&self, host: usize) -> Result<Cache> {
        let scene = &self.scene;
        let block = ChunkSize::new(BLOCK_BYTES).expect("a size of blocks");
        let places = scene.cache_gb * GIB / scene.scale / BLOCK_BYTES;
        let header = CacheHeader {
            volume: self.storage.size(),
            block,
            capacity: places,
            places,
            id: [3 + host as u8; 16],
            identity: IDENTITY,
        };
        let memory = Device::new("flash", MemDevice::new(header.partition_bytes()));
        let ceiling = Ceiling::new(FlashFigures::NVME_512GB, scene.cache_gb * GIB, scene.scale as u32);
        let partition = Paced {
            ceiling: Arc::new(ceiling),
            counts: Arc::clone(&self.flash_counts),
            data_start: header.partition_bytes().get() - places * BLOCK_BYTES,
            ..self.paced(memory, host, Class::GuestFlash)
        };
        let partition = Device::new("flash", partition);
        Cache::create(&partition, &header).await?;
        let options = CacheOptions { mode: CacheMode::ReadOnly, policy: CachePolicy::Lru, ..CacheOptions::default() };
        let base = self.storage_of(host, Class::GuestStorage);
        let cache = Cache::open(self.process.env(), base, partition, [4; 16], options, IDENTITY).await?;
        self.caches.lock().push(cache.clone());
        Ok(cache)
    }

    /// Counts at each second.
    fn sample(&self) -> Arc<Mutex<Vec<Sample>>> {
        let sampled: Arc<Mutex<Vec<Sample>>> = Arc::default();
        let (samples, world, guest) = (Arc::clone(&sampled), self.world.clone(), self.guest.clone());
        let [flash, storage, warmer] = [&self.flash_counts, &self.storage_counts, &self.warmer_counts].map(Arc::clone);
        let (caches, hosts) = (Arc::clone(&self.caches), self.hosts.clone());
        self.world.spawn(async move {
            for second in 0..=END as u64 {
                world.sleep_until(Moment(Duration::from_secs(second))).await;
                let [reads, writes] = guest.answered().map(|count| count as f64);
                let mut sample = Sample {
                    reads,
                    writes,
                    flash_reads: flash.reads() as f64,
                    storage_reads: storage.reads() as f64,
                    admissions: flash.writes() as f64,
                    warmer_reads: warmer.reads() as f64,
                    neighbour_seconds: [0, 1].map(|host: usize| hosts[host].neighbour_seconds()),
                    ..Sample::default()
                };
                for cache in &*caches.lock() {
                    let status = cache.status();
                    sample.hits += status.hits as f64;
                    sample.misses += status.misses as f64;
                    sample.remote_reads += cache.transfer_status().read_from_other as f64;
                }
                samples.lock().push(sample);
            }
        });
        sampled
    }

    /// The VM goes to the other host, and its cache with it.
    async fn go(&self, source: Cache) -> Result<(CacheArrival, Moments)> {
        let (way, scale) = (self.scene.way, self.scene.scale);
        let warm_start = if way == Way::CachemiorEarly { WarmStart::WithMemory } else { WarmStart::AfterSwitchover };
        let time_ms_max = 1000 * (END - MOVE) as u64 / scale;
        let options =
            CacheTransferOptions { way: way.of_engine(), warm_start, time_ms_max, ..CacheTransferOptions::default() };
        let env: EnvRef = Arc::new(CopierEnv { inner: self.process.env(), scale: scale as u32 });
        let target = self.new_cache(1).await?;
        let departure = CacheDeparture::new(Arc::clone(&env), source, options.clone());
        let arrival = CacheArrival::new(env, target.clone(), options);
        self.connect(&departure, &arrival);
        let apart = self.scene.control == Control::WarmerApart;
        let warmer = self.storage_of(1, if apart { Class::WarmerApart } else { Class::Warmer });
        let mut moments = Moments::default();
        if way == Way::Hybrid {
            // The engine's own limit, of a cache that has so many times fewer blocks.
            let limit = || MOVE as f64 + departure.wait_max_of(scale).as_secs_f64();
            while departure.share_there() < SHARE_ENOUGH && self.seconds() < limit() {
                self.world.sleep(Duration::from_millis(100)).await;
            }
        }
        (moments.held, moments.share_at_hold) = (self.seconds(), departure.share_there());
        let memory = self.world.now() + Duration::from_secs(PAUSE);
        self.guest.hold().await;
        if way == Way::CachemiorEarly {
            let (arrival, warmer) = (arrival.clone(), warmer.clone());
            self.world.spawn(as_copier(async move { arrival.warm_before(warmer).await }));
        }
        self.world.sleep_until(memory).await;
        if way == Way::Firepan {
            departure.begin_copy();
            departure.whole().await;
        }
        departure.seal(Duration::MAX).await?;
        arrival.guest_is_here(warmer);
        self.guest.run_on(Device::new("guest", target));
        moments.resumed = self.seconds();
        self.watch_end(&arrival, &moments);
        Ok((arrival, moments))
    }

    fn connect(&self, departure: &CacheDeparture, arrival: &CacheArrival) {
        let scale = self.scene.scale;
        let figures = LinkFigures::TEN_GIGABIT;
        let link = Link::new(
            &self.world,
            "between the hosts",
            LinkFigures {
                rate: figures.rate / scale,
                latency: figures.latency * scale as u32,
                window: (figures.window / scale as usize).max(64 << 10),
            },
        );
        let (near, far) = link.connect();
        let (departure, arrival) = (departure.clone(), arrival.clone());
        self.world.spawn(as_copier(async move {
            let ended = futures::future::join(departure.run(Box::new(near)), arrival.run(Box::new(far))).await;
            drop(ended);
        }));
    }

    fn watch_end(&self, arrival: &CacheArrival, moments: &Moments) {
        let (world, arrival, over) = (self.world.clone(), arrival.clone(), Arc::clone(&moments.over));
        self.world.spawn(async move {
            arrival.over().await;
            *over.lock() = Some(world.now().0.as_secs_f64());
        });
    }
}

impl std::fmt::Display for Scene {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}, {} GB", self.way.name(), self.cache_gb)?;
        match self.control {
            Control::Standard => Ok(()),
            Control::OneStorage => out.write_str(", all VMs share the storage alone"),
            Control::FreeCopies => out.write_str(", copies cost the hosts nothing"),
            Control::WarmerApart => out.write_str(", the warmer asks for itself"),
            Control::Outstanding128 => out.write_str(", 128 outstanding"),
        }
    }
}

impl crate::runs::Scene for Scene {
    type Seen = Seen;

    fn weight(&self) -> u64 {
        self.cache_gb
    }

    fn play(&self, seed: u64) -> Result<Seen> {
        clock::run(self.hour(seed))
    }

    fn ending(seen: &Seen) -> String {
        let iops = |from, to| seen.reads_a_second(from, to) / 1e3;
        format!(
            "{:.1}k, {:.1}k warm ({:.1} % hits), {:.1}k in the 400 s after the move, {:.1}k in all; held at {:.1} s with {:.3} there, runs at {:.1} \
             s, over at {:.1} s: {} of {} blocks copied, {} warmed, {} read remotely",
            iops(100, ATTACH),
            iops(1400, MOVE),
            seen.hit_rate(1400, MOVE) * 100.0,
            iops(MOVE, MOVE + 400),
            iops(MOVE, END),
            seen.held,
            seen.share_at_hold,
            seen.resumed,
            seen.over.unwrap_or(f64::NAN),
            seen.status.from_source,
            seen.status.listed,
            seen.status.from_storage,
            seen.status.read_remotely
        )
    }
}

impl Seen {
    /// By how much something grew within seconds, a second, at the paper's scale.
    pub(super) fn rate(&self, from: usize, to: usize, of: impl Fn(&Sample) -> f64) -> f64 {
        (of(&self.samples[to]) - of(&self.samples[from])) / (to - from) as f64 * self.scale
    }

    /// The guest's reads a second.
    pub(super) fn reads_a_second(&self, from: usize, to: usize) -> f64 {
        self.rate(from, to, |sample| sample.reads)
    }

    /// What is read for the VM in MB/s, of storage and flash: by the guest, and by the warmer.
    pub(super) fn megabytes(&self, from: usize, to: usize) -> [f64; 2] {
        let guest = self.rate(from, to, |sample| sample.flash_reads + sample.storage_reads + sample.remote_reads);
        let warmer = self.rate(from, to, |sample| sample.warmer_reads);
        [guest, warmer].map(|rate| rate * BLOCK_BYTES as f64 / 1e6)
    }

    /// The share of the guest's reads that the flash answers.
    pub(super) fn hit_rate(&self, from: usize, to: usize) -> f64 {
        let [hits, misses] = [self.rate(from, to, |sample| sample.hits), self.rate(from, to, |sample| sample.misses)];
        hits / (hits + misses)
    }

    /// How long the copy of `FirepanIF` has taken after the VM ran again, in seconds.
    pub(super) fn copy_seconds(&self) -> f64 {
        self.over.unwrap_or(f64::NAN) - self.resumed
    }

    /// What a VM that is warm reads a second, before the move.
    pub(super) fn plateau(&self) -> f64 {
        self.reads_a_second(1400, MOVE)
    }

    /// What a neighbour reads a second: the same VM with a warm cache, which has a quarter of its host before the move.
    pub(super) fn neighbour(&self, host: usize, from: usize, to: usize) -> f64 {
        let part = self.rate(from, to, |sample| sample.neighbour_seconds[host]);
        let part_of_vm = self.rate(1400, MOVE, |sample| sample.neighbour_seconds[0]);
        self.plateau() * part / part_of_vm
    }
}
