//! The host of a scene: its disks below its page cache, the machines that move, and their neighbours.

use std::time::Duration;

use block::{Bytes, Result};
use filters::RedirectStatus;
use migrate::{HeadPosition, Medium};
use sim::model::contents::Origin;
use sim::model::{Groups, Model, PageCache, Volume};
use sim::player::Player;
use sim::process::Process;
use sim::world::World;

use super::super::devices::{Disk, WithoutBarriers};
use super::super::load::{Neighbour, NeighbourFigures};
use super::machine::{Machine, Mover};
use super::{Scene, Seen, Sums, scaled};

/// Disks have this many addresses each: more than any has bytes.
const DISK_ADDRESSES: u64 = 1 << 42;
/// A guest that does not move is looked at for so long, at scale 1.
const STILL: Duration = Duration::from_secs(240);
/// The guest runs on after its move, for what it reads at the target is checked.
const AFTER: Duration = Duration::from_secs(4);
/// Steps in which the guest is looked at, at scale 1.
const STEP: Duration = Duration::from_secs(10);
/// A load or a move that has ended is noticed after so long, at scale 1.
const NOTICED: Duration = Duration::from_millis(200);
/// So many requests may be outstanding in an open loop: what does not fit waits.
const OPEN_OUTSTANDING: usize = 512;
const NEIGHBOUR_OUTSTANDING: usize = 16;
/// The system disk of the guest with two, assumed.
const SYSTEM_BYTES: u64 = 8_000_000_000;

/// The volumes of a host.
pub(super) struct Host {
    pub(super) world: World,
    pub(super) process: Process,
    pub(super) scene: Scene,
    /// Covers the disks, and is never read itself.
    ground: Volume,
    head: HeadPosition,
}

impl Host {
    fn new(world: &World, scene: Scene) -> Self {
        let surrogate = scene.surrogate.unwrap_or(Disk::NvmeFlash);
        let disks = [scene.source, surrogate, Disk::Hard].map(|disk| disk.model(scene.scale));
        let disks = Groups::new(disks.into(), DISK_ADDRESSES);
        let disks: Box<dyn Model> = match scene.cache.has_barriers() {
            true => Box::new(disks),
            false => Box::new(WithoutBarriers::new(disks)),
        };
        let model: Box<dyn Model> = match scene.cache.page_cache(scene.scale) {
            Some(figures) => Box::new(PageCache::new(figures, disks)),
            None => disks,
        };
        let ground = Volume::new(world, "ground", Bytes(DISK_ADDRESSES * 3), Origin::Empty, model);
        Self { world: world.clone(), process: Process::start(world, 0), scene, ground, head: HeadPosition::new() }
    }

    /// The image of machine `number`, the images one behind the other.
    pub(super) fn image(&self, number: u64) -> Volume {
        let size = self.scene.image_here();
        self.ground.beside("source", Bytes(size), Origin::Filled, number * size)
    }

    /// What machine `number`'s image is on. All of them have one head.
    pub(super) fn medium(&self, number: u64) -> Medium {
        let is_rotational = Some(matches!(self.scene.source, Disk::Hard | Disk::FourHard));
        Medium { is_rotational, head: self.head.of_part(Bytes(number * self.scene.image_here())) }
    }

    /// Where machine `number`'s popular chunks go.
    pub(super) fn partition(&self, number: u64, size: Bytes) -> Volume {
        self.ground.beside("surrogate", size, Origin::Empty, DISK_ADDRESSES + number * size.0)
    }

    fn system_disk(&self) -> Volume {
        let size = Bytes((SYSTEM_BYTES / self.scene.scale).next_multiple_of(super::CHUNK_BYTES));
        self.ground.beside("system", size, Origin::Filled, 2 * DISK_ADDRESSES)
    }

    /// The other host's disk, which belongs to the arriving image.
    pub(super) fn target(&self, size: Bytes) -> Volume {
        Volume::new(&self.world, "target", size, Origin::Empty, self.scene.target.model(self.scene.scale))
    }

    /// The two other guests, behind the images of those that move.
    fn neighbours(&self) -> Vec<Player> {
        if !self.scene.has_neighbours {
            return Vec::new();
        }
        let size = self.scene.image_here();
        let start = |(number, figures): (u64, NeighbourFigures)| {
            let at = (self.scene.machines + number) * size;
            let volume = self.ground.beside("neighbour", Bytes(size), Origin::Filled, at);
            let name = format!("neighbour {number}");
            let load = Neighbour::new(0, size, figures);
            Player::start(&self.world, &name, volume.device(), Origin::Filled, load, NEIGHBOUR_OUTSTANDING)
        };
        (0..).zip([NeighbourFigures::FILE_SERVER, NeighbourFigures::WEB_SERVER]).map(start).collect()
    }
}

/// Plays `scene` in `world`.
pub(super) async fn play(world: &World, scene: Scene) -> Result<Seen> {
    let host = Host::new(world, scene);
    let neighbours = host.neighbours();
    let mut machines = Vec::new();
    for number in 0..scene.machines {
        machines.push(Machine::start(&host, number).await?);
    }
    let mut watch = Watch::new(&host);
    let mut seen = Seen {
        outstanding: scene.outstanding as f64,
        image: scene.image_here() as f64 * scene.machines as f64,
        ..Seen::default()
    };
    if scene.order.is_none() {
        let until = world.now() + scaled(STILL, scene.scale);
        while world.now() < until && !machines.iter().all(Machine::is_over) {
            watch.step(&machines, &mut seen).await;
        }
    } else {
        if scene.has_system_disk {
            let mut mover = Mover::of(&host, &host.system_disk()).await?;
            while !mover.has_ended() {
                watch.step(&machines, &mut seen).await;
            }
            mover.settle()?;
            seen.system_seconds = watch.seconds();
        }
        move_all(&mut machines, &mut watch, &mut seen).await?;
    }
    watch.take(&machines, &mut seen);
    seen.seconds = watch.seconds() - seen.system_seconds;
    for machine in &machines {
        seen.copy.add(&machine.copied());
        seen.redirect = added(seen.redirect, machine.redirect_status());
    }
    if !seen.is_cut {
        world.sleep(scaled(AFTER, scene.scale)).await;
    }
    for machine in machines {
        machine.stop().await;
    }
    for neighbour in neighbours {
        neighbour.stop().await;
    }
    Ok(seen)
}

/// Moves all machines at once, until all have moved or no load is left.
async fn move_all(machines: &mut [Machine], watch: &mut Watch<'_>, seen: &mut Seen) -> Result<()> {
    let mut movers = Vec::new();
    for machine in &mut *machines {
        movers.push(machine.begin_move(watch.host).await?);
    }
    while !movers.iter_mut().all(Mover::has_ended) {
        watch.step(machines, seen).await;
        if machines.iter().all(Machine::is_over) && !seen.is_cut {
            seen.is_cut = true;
            movers.iter_mut().for_each(Mover::cancel);
        }
    }
    for mover in movers {
        // What the guest waited for while the last of it was copied says nothing of the disk's other user.
        let Some(report) = mover.settle()? else { continue };
        seen.guest.seconds -= report.stall_us_max as f64 / 1e6 * watch.host.scene.outstanding as f64;
        (seen.read_cache, seen.schedule) = (report.read_cache, Some(report.schedule));
    }
    Ok(())
}

/// Looks at the guests step by step.
struct Watch<'a> {
    host: &'a Host,
    began: env::Moment,
    window_began: env::Moment,
    window: Sums,
}

impl<'a> Watch<'a> {
    fn new(host: &'a Host) -> Self {
        let now = host.world.now();
        Self { host, began: now, window_began: now, window: Sums::default() }
    }

    /// Since the beginning, at the paper's scale.
    fn seconds(&self) -> f64 {
        (self.host.world.now() - self.began).as_secs_f64() * self.host.scene.scale as f64
    }

    /// Lets a moment pass.
    async fn step(&mut self, machines: &[Machine], seen: &mut Seen) {
        let [step, noticed] = [STEP, NOTICED].map(|span| scaled(span, self.host.scene.scale));
        self.host.world.sleep(noticed).await;
        if self.host.world.now() - self.window_began >= step {
            self.take(machines, seen);
        }
    }

    fn take(&mut self, machines: &[Machine], seen: &mut Seen) {
        for machine in machines {
            let tally = machine.take();
            self.window.add(&tally);
            seen.guest.add(&tally);
        }
        seen.windows.push((self.seconds(), std::mem::take(&mut self.window)));
        self.window_began = self.host.world.now();
    }
}

/// What several redirections did together.
fn added(sum: Option<RedirectStatus>, other: Option<RedirectStatus>) -> Option<RedirectStatus> {
    let (Some(sum), Some(other)) = (sum, other) else { return sum.or(other) };
    Some(RedirectStatus {
        reads_redirected: sum.reads_redirected + other.reads_redirected,
        reads_merged: sum.reads_merged + other.reads_merged,
        reads_at_source: sum.reads_at_source + other.reads_at_source,
        writes_redirected: sum.writes_redirected + other.writes_redirected,
        writes_at_source: sum.writes_at_source + other.writes_at_source,
        chunks_fetched: sum.chunks_fetched + other.chunks_fetched,
        fetched_bytes: sum.fetched_bytes + other.fetched_bytes,
        places: sum.places + other.places,
        places_free: sum.places_free + other.places_free,
        places_cached: sum.places_cached + other.places_cached,
        places_dirty: sum.places_dirty + other.places_dirty,
        index_bytes: sum.index_bytes + other.index_bytes,
        has_failed: sum.has_failed || other.has_failed,
    })
}

pub(super) const fn outstanding(scene: &Scene) -> usize {
    if scene.is_open_loop { OPEN_OUTSTANDING } else { scene.outstanding }
}
