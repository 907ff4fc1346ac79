//! One migration of the evaluation: a guest, a host with processors and ports, and either the engine of `crates/memory` or a model of
//! what the paper compares itself with.

use std::sync::Arc;
use std::time::Duration;

use block::{Error, ErrorKind, Result};
use memory::{BoxTransport, Compression, Lane, Precopy, PrecopyOptions, Receiver, StopRules, TargetMemory};
use sim::clock;
use sim::log::Keep;
use sim::process::Process;
use sim::world::{Invariant, World};

use super::guest::{Arrived, DISK, Guest, GuestFigures, MEMORY, Writes};
use super::host::{Costs, Host, MIB, PORT_BYTES_PER_SECOND};
use super::vanilla::{Copied, Source};

const GIB: u64 = 1 << 30;
/// How much of its memory KVM's idle guest has filled (table 6), in bytes.
const IDLE_FILLED: u64 = 396 << 20;
/// The sockets of the simulated connections hold so much.
const SOCKET_BYTES: usize = 64 << 10;
const SESSION: [u8; 16] = *b"pmigrate's guest";

/// Whose guest migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Load {
    /// Xen's, which sends its memory alone.
    XenIdle,
    XenPostgres,
    XenMemcached,
    /// The guest that vanilla's column of table 5 needs.
    XenFasterMemcached,
    /// KVM's, with a disk of 16 GiB.
    KvmIdle,
    KvmMemcached,
    KvmDbench,
    /// The one with 4 GiB whose pages are compressed (6.4).
    KvmCompressed,
}

impl Load {
    pub(super) const fn is_xen(self) -> bool {
        matches!(self, Self::XenIdle | Self::XenPostgres | Self::XenMemcached | Self::XenFasterMemcached)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::XenIdle => "an idle guest on Xen",
            Self::XenPostgres => "PostgreSQL on Xen",
            Self::XenMemcached => "memcached on Xen",
            Self::XenFasterMemcached => "memcached on Xen, which writes faster",
            Self::KvmIdle => "an idle guest on KVM",
            Self::KvmMemcached => "memcached on KVM",
            Self::KvmDbench => "dbench on KVM",
            Self::KvmCompressed => "an idle guest on KVM, compressed",
        }
    }

    /// What it is. What the paper does not state is chosen by what its tables say is sent, and said in the page.
    fn figures(self) -> GuestFigures {
        const POSTGRES: &[Writes] = &[Writes { region: MEMORY, set_bytes: 42 << 20, bytes_per_second: 250.0 * MIB }];
        const HOT_ITEMS: Writes = Writes { region: MEMORY, set_bytes: 28 << 20, bytes_per_second: 450.0 * MIB };
        const MEMCACHED: &[Writes] =
            &[Writes { region: MEMORY, set_bytes: 9_700 << 20, bytes_per_second: 55.0 * MIB }, HOT_ITEMS];
        const FASTER_MEMCACHED: &[Writes] =
            &[Writes { region: MEMORY, set_bytes: 11_200 << 20, bytes_per_second: 189.0 * MIB }, HOT_ITEMS];
        const DBENCH: &[Writes] = &[
            Writes { region: DISK, set_bytes: 16 << 30, bytes_per_second: 20.0 * MIB },
            Writes { region: MEMORY, set_bytes: 80 << 20, bytes_per_second: 90.0 * MIB },
        ];
        const IDLE: &[Writes] = &[Writes { region: MEMORY, set_bytes: 2 << 20, bytes_per_second: 0.5 * MIB }];
        let xen = |writes| GuestFigures {
            bytes: [16 * GIB + GIB / 5, 0],
            filled_bytes: [16 * GIB + GIB / 5, 0],
            compressed: [1.0; 2],
            writes,
        };
        let kvm = |filled, writes| GuestFigures {
            bytes: [16 * GIB, 16 * GIB],
            filled_bytes: [filled, 16 * GIB],
            compressed: [1.0; 2],
            writes,
        };
        match self {
            Self::XenIdle => xen(IDLE),
            Self::XenPostgres => xen(POSTGRES),
            Self::XenMemcached => xen(MEMCACHED),
            Self::XenFasterMemcached => xen(FASTER_MEMCACHED),
            Self::KvmIdle => kvm(IDLE_FILLED, IDLE),
            Self::KvmMemcached => kvm(16 * GIB, MEMCACHED),
            Self::KvmDbench => kvm(IDLE_FILLED, DBENCH),
            Self::KvmCompressed => GuestFigures {
                bytes: [4 * GIB, 16 * GIB],
                filled_bytes: [438 << 20, 16 * GIB],
                compressed: [0.28, 0.1],
                writes: IDLE,
            },
        }
    }

    fn costs(self) -> Costs {
        match self {
            // 409.9 s of processor time for 16.2 GByte (table 3), and 149.3 s with four consumers (6.2.3).
            _ if self.is_xen() => {
                Costs { of_byte_sent: 0.0247 / MIB, wait_of_byte_sent: 0.0028 / MIB, ..Costs::default() }
            }
            // 41.5 s of compression for 16.4 GByte, and what vanilla KVM takes beside that (table 10).
            Self::KvmCompressed => Costs { of_byte_read: COMPRESSED_BYTE_READ, ..KVM_COSTS },
            // 242.1 MByte/s with four consumers (table 8): the disk that they read is dbench's, too (6.2.2).
            Self::KvmDbench => Costs { wait_of_byte_sent: 0.0080 / MIB, ..KVM_COSTS },
            _ => KVM_COSTS,
        }
    }
}

/// 294.7 MByte/s with four consumers (table 6).
const KVM_COSTS: Costs =
    Costs { of_byte_read: 0.0, of_byte_sent: 0.0, wait_of_byte_sent: 0.0051 / MIB, lock_of_page: 0.0 };
/// What is left may take PMigrate-KVM so long: assumed, by what it sends while the guest is stopped (tables 7 and 8).
const KVM_DOWNTIME_MS: u64 = 120;
/// What a byte costs that is read, compressed and written: 2.5 ms a MByte for the compression, 3.2 for the rest.
const COMPRESSED_BYTE_READ: f64 = 0.0057 / MIB;

/// Which way of mapping the guest's pages holds the address space for how long (table 9, idle), in seconds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mapping {
    /// What this project does: the memory is mapped once.
    Once,
    /// `mmap`, the guest's mapping and `munmap` under one lock.
    Unoptimised,
    /// The guest's mapping beside others.
    ReadLock,
    /// The tree of areas alone.
    RangeLock,
}

impl Mapping {
    pub(super) const PAPERS: [Self; 3] = [Self::Unoptimised, Self::ReadLock, Self::RangeLock];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Once => "mapped once",
            Self::Unoptimised => "no optimisation",
            Self::ReadLock => "read lock",
            Self::RangeLock => "range lock",
        }
    }

    const fn lock_of_page(self) -> f64 {
        match self {
            Self::Once => 0.0,
            Self::Unoptimised => (1.39 + 18.1 + 7.27) * 1e-6,
            Self::ReadLock => (1.80 + 6.22) * 1e-6,
            Self::RangeLock => (0.05 + 0.75) * 1e-6,
        }
    }
}

/// Who copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// The tools that the paper compares itself with.
    Vanilla,
    /// The engine by the paper's rules: nothing is deferred, nothing sent as a difference.
    Paper,
    /// The engine as a move uses it.
    Ours,
}

/// A migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Scene {
    pub(super) load: Load,
    pub(super) way: Way,
    pub(super) consumers: u16,
    pub(super) cores: usize,
    pub(super) ports: usize,
    pub(super) mapping: Mapping,
    /// A consumer gets no more than 40 MByte/s of the network (figures 6 and 7).
    pub(super) is_limited: bool,
    /// The first port is also a web server's (6.3).
    pub(super) has_web_server: bool,
    /// Sizes are so many times smaller than the paper's.
    pub(super) scale: u64,
}

impl Scene {
    /// As the paper's tables have it: eight consumers on four processors with Xen, four with KVM; four ports.
    pub(super) const fn of_table(load: Load, way: Way, scale: u64) -> Self {
        let (consumers, cores) = if load.is_xen() { (8, 4) } else { (4, 12) };
        let (mapping, is_limited) = (Mapping::Once, false);
        Self { load, way, consumers, cores, ports: 4, mapping, is_limited, has_web_server: false, scale }
    }

    fn costs(&self) -> Costs {
        let costs = Costs { lock_of_page: self.mapping.lock_of_page(), ..self.load.costs() };
        // 40 MByte/s together with the port, and processors enough.
        let rest = 1.0 / (40.0 * MIB) - 1.0 / PORT_BYTES_PER_SECOND;
        if self.is_limited { Costs { of_byte_sent: 0.0, wait_of_byte_sent: rest, ..costs } } else { costs }
    }

    fn options(&self) -> PrecopyOptions {
        let scaled = |milliseconds: u64| Duration::from_millis(milliseconds) / self.scale as u32;
        let compression = if self.load == Load::KvmCompressed { Compression::Lz4 } else { Compression::Off };
        let papers =
            PrecopyOptions { compression, version_cache_bytes: 0, defers_hot_pages: false, ..Default::default() };
        match (self.way, self.load.is_xen()) {
            (Way::Ours, _) => PrecopyOptions {
                rules: StopRules { downtime_limit: scaled(300), ..StopRules::default() },
                compression,
                version_cache_bytes: ((32 << 20) / self.scale) as usize,
                defers_hot_pages: true,
            },
            // Xen's: nothing is left, or 29 iterations do not make it less, or three times the memory was sent.
            (_, true) => {
                let rules = StopRules {
                    downtime_limit: Duration::ZERO,
                    rounds_without_less: 25,
                    sent_factor_max: 3.0,
                    goes_on_while_less: false,
                };
                PrecopyOptions { rules, ..papers }
            }
            (_, false) => {
                let rules = StopRules {
                    downtime_limit: scaled(KVM_DOWNTIME_MS),
                    rounds_without_less: 29,
                    sent_factor_max: 10.0,
                    goes_on_while_less: false,
                };
                PrecopyOptions { rules, ..papers }
            }
        }
    }

    /// What a stop takes beside the rest of the memory: devices, and the target's start. Fitted to the idle guests of tables 3 and 6.
    pub(super) const fn overhead_seconds(&self) -> f64 {
        match (self.load.is_xen(), self.way) {
            (true, Way::Vanilla) => 0.264,
            (true, _) => 0.396,
            (false, Way::Vanilla) => 0.508,
            (false, _) => 0.0087,
        }
    }
}

impl std::fmt::Display for Scene {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let load = self.load.name();
        match self.way {
            Way::Vanilla => return write!(out, "{load}, vanilla"),
            Way::Paper => write!(out, "{load}, {} consumers by the paper's rules", self.consumers)?,
            Way::Ours => write!(out, "{load}, {} consumers", self.consumers)?,
        }
        write!(out, ", {} processors, {} ports, {}", self.cores, self.ports, self.mapping.name())
    }
}

/// What came of a migration, at the paper's scale.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) seconds: f64,
    pub(super) downtime_ms: f64,
    pub(super) iterations: f64,
    pub(super) downtime_mib: f64,
    pub(super) memory_mib: f64,
    pub(super) disk_mib: f64,
    pub(super) wire_mib: f64,
    pub(super) cpu_seconds: f64,
    /// What went through each port, and what the web server beside it sent, in MByte/s.
    pub(super) port_rates: Vec<f64>,
    pub(super) web_rate: f64,
}

impl Seen {
    /// MByte that are sent in a second.
    pub(super) fn rate(&self) -> f64 {
        self.wire_mib / self.seconds
    }
}

impl crate::runs::Scene for Scene {
    type Seen = Seen;

    fn weight(&self) -> u64 {
        let figures = self.load.figures();
        figures.filled_bytes.iter().sum::<u64>() * if self.way == Way::Vanilla { 1 } else { 4 }
    }

    fn play(&self, seed: u64) -> Result<Seen> {
        clock::run(async {
            let world = World::new(seed, Keep::Tail);
            let seen = play_in(&world, *self).await;
            match world.violation() {
                Some(violation) => Err(Error::new(ErrorKind::Internal, format!("{violation} in {self}"))),
                None => seen,
            }
        })
    }

    fn ending(seen: &Seen) -> String {
        format!("{:.0} s, stopped for {:.0} ms", seen.seconds, seen.downtime_ms)
    }
}

async fn play_in(world: &World, scene: Scene) -> Result<Seen> {
    let figures = scene.load.figures();
    let guest = Guest::new(world, &figures, scene.scale);
    let target = Arrived::of(&guest);
    guest.start(world, &figures, scene.scale);
    let began = world.now();
    let mut seen = match scene.way {
        Way::Vanilla => play_vanilla(world, scene, &guest, &target).await,
        Way::Paper | Way::Ours => play_engine(world, scene, &guest, &target).await?,
    };
    let scale = scene.scale as f64;
    if let Some((region, page)) = guest.first_difference(&target) {
        let what = format!("page {page} of region {region} differs when the guest goes on at the target");
        world.violate(Invariant::EqualAtSwitch, what);
    }
    let took = world.now().since(began).as_secs_f64();
    let [memory, disk] = guest.sent_bytes().map(|bytes| bytes as f64 / MIB * scale);
    if scene.way == Way::Vanilla {
        seen.wire_mib = memory * figures.compressed[MEMORY] + disk * figures.compressed[DISK];
    }
    seen.port_rates.iter_mut().for_each(|bytes| *bytes /= MIB * took);
    seen.web_rate /= MIB * took;
    (seen.memory_mib, seen.disk_mib) = (memory, disk);
    seen.seconds = took * scale + scene.overhead_seconds();
    seen.downtime_ms = (seen.downtime_ms * scale / 1e3 + scene.overhead_seconds()) * 1e3;
    Ok(seen)
}

async fn play_vanilla(world: &World, scene: Scene, guest: &Arc<Guest>, target: &Arc<Arrived>) -> Seen {
    let (world, guest, target) = (world.clone(), Arc::clone(guest), Arc::clone(target));
    let figures = scene.load.figures();
    let (bytes_per_second, of_byte_cpu) = match scene.load.is_xen() {
        // 16.2 GByte at 39.3 MByte/s with 378.9 s of processor time (table 3).
        true => (39.3 * MIB, 0.0228 / MIB),
        false => (PORT_BYTES_PER_SECOND, 0.0),
    };
    let of_byte_read = scene.load.costs().of_byte_read;
    if scene.load == Load::KvmMemcached {
        // Its requests wait for the thread that migrates: it loses 86.8 % of them (table 7).
        guest.slow_down(1.0 - 0.868);
    }
    let (compressed, scale) = (figures.compressed, scene.scale);
    let source = Source { world, guest, target, bytes_per_second, of_byte_read, compressed, scale };
    let Copied { iterations, downtime_bytes, downtime_seconds } = match scene.load.is_xen() {
        true => source.copy_as_xen().await,
        false => source.copy_as_kvm().await,
    };
    let sent: u64 = source.guest.sent_bytes().iter().sum();
    let all = scene.scale as f64;
    Seen {
        iterations: if scene.load.is_xen() { iterations as f64 } else { iterations as f64 * all },
        downtime_mib: downtime_bytes as f64 / MIB * all,
        downtime_ms: downtime_seconds * 1e3,
        cpu_seconds: sent as f64 * of_byte_cpu * all,
        ..Seen::default()
    }
}

async fn play_engine(world: &World, scene: Scene, guest: &Arc<Guest>, target: &Arc<Arrived>) -> Result<Seen> {
    let failed = |error: memory::Error| Error::new(ErrorKind::Internal, format!("{scene}: {error}"));
    let process = Process::start(world, 0);
    let host = Host::new(&process.env(), guest, scene.costs(), (scene.cores, scene.ports));
    if scene.has_web_server {
        host.share_with_web_server(world);
    }
    let receiver = Arc::new(Receiver::new(Arc::clone(target) as Arc<dyn TargetMemory>, SESSION));
    let lane = |_| {
        let (near, far) = tokio::io::duplex(SOCKET_BYTES);
        let receiver = Arc::clone(&receiver);
        process.env().spawn(Box::pin(async move {
            // The sender hears of it.
            let _ = receiver.serve(Box::new(far)).await;
        }));
        Lane { transport: Box::new(near) as BoxTransport, env: process.env() }
    };
    let (env, memory) = (process.env(), Arc::clone(guest) as _);
    let mut precopy = Precopy::new(env, memory, scene.options(), (SESSION, Arc::clone(&host) as _)).map_err(failed)?;
    precopy.connect((0..scene.consumers).map(lane).collect()).await.map_err(failed)?;
    precopy.converge().await.map_err(failed)?;
    guest.stop();
    let (before, stopped) = (precopy.watch()(), world.now());
    precopy.finish().await.map_err(failed)?;
    precopy.verify_clean().map_err(failed)?;
    let after = precopy.watch()();
    let all = scene.scale as f64;
    Ok(Seen {
        iterations: before.rounds as f64,
        downtime_mib: (after.wire_bytes - before.wire_bytes) as f64 / MIB * all,
        downtime_ms: world.now().since(stopped).as_secs_f64() * 1e3,
        wire_mib: after.wire_bytes as f64 / MIB * all,
        cpu_seconds: host.cpu_seconds() * all,
        port_rates: host.sent_bytes().into_iter().map(|bytes| bytes as f64).collect(),
        web_rate: host.web_bytes() as f64,
        ..Seen::default()
    })
}
