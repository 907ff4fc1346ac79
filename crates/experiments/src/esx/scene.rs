//! One move of the evaluation: a guest, two volumes, and the real engine between them.
//!
//! The disks of the paper are one volume here: the system disk of 6 GB, which nobody touches, in front of the data disk.
//! The guest runs for a while, the move begins, and the guest runs for a while after it. At the commit both sides are
//! compared block by block, and every block that the guest reads is checked on the way.

use std::sync::Arc;
use std::time::Duration;

use block::{BufferPool, Bytes, Device, Error, ErrorKind, Extent, IoFuture, Offload, Result, Slot};
use filters::MeterState;
use migrate::{
    Migration, MigrationContext, MoveOptions, Outcome, Phase, Report, Snapshots, UnderWay, Verify, VolumeMeter,
};

use super::load::Load;
use super::overlay_disks::MoveOverlays;
use super::way::Way;
use crate::journal::MoveJournal;
use sim::bench::Tally;
use sim::clock;
use sim::log::Keep;
use sim::model::contents::Origin;
use sim::model::{Array, ArrayFigures, Model, Nfs, NfsFigures, Traffic, Volume};
use sim::player::Player;
use sim::process::Process;
use sim::workload::Workload;
use sim::world::World;

/// The system disk that moves with every data disk (section 3).
pub(super) const SYSTEM_GIB: u64 = 6;
/// How long the guest runs before the move, and after it, at scale 1.
const AROUND: Duration = Duration::from_secs(24);
/// Groups of disks on one array begin at multiples of this.
const GROUP_BYTES: u64 = 1 << 30;
/// So long at least, whatever the scale.
const AROUND_MIN: Duration = Duration::from_secs(4);

/// What an array reads that reads faster, in bytes a second.
pub(super) const FASTER_READ_RATE: u64 = 280_000_000;

/// Where a volume lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Place {
    /// An array of its own behind Fibre Channel.
    Array,
    /// The same array, which reads nothing ahead. Only where it is asked for.
    NothingAhead,
    /// The same array, which reads faster. Only where it is asked for.
    FasterReads,
    /// The array of the Exchange runs: both volumes on it, each on disks of its own.
    ExchangeArray,
    /// The slow volume on NFS.
    SlowNfs,
}

/// One move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Scene {
    /// How it is carried out.
    pub(super) way: Way,
    /// What the guest does.
    pub(super) load: Load,
    /// The data disk.
    pub(super) data_gib: u64,
    /// The disk that moves with it.
    pub(super) system_gib: u64,
    pub(super) from: Place,
    pub(super) to: Place,
    /// Sizes, caches and limits of time are so many times smaller than the paper's.
    pub(super) scale: u64,
}

impl Scene {
    /// The paper's usual move: a data disk and the system disk from one array to another.
    pub(super) const fn between_arrays(way: Way, load: Load, data_gib: u64, scale: u64) -> Self {
        Self { way, load, data_gib, system_gib: SYSTEM_GIB, from: Place::Array, to: Place::Array, scale }
    }

    /// How many bytes move, here.
    pub(super) const fn bytes(&self) -> u64 {
        ((self.data_gib + self.system_gib) << 30) / self.scale
    }

    pub(super) const fn system_bytes(&self) -> u64 {
        (self.system_gib << 30) / self.scale
    }

    pub(super) fn around(&self) -> Duration {
        (AROUND / self.scale as u32).max(AROUND_MIN)
    }

    /// An array for volumes of this scale. The cache has the same proportion to the volume as the array's cache has to
    /// the paper's volume. A larger one would hold much of the volume. Data read ahead takes no larger part of it than
    /// in the paper's.
    fn scaled(&self, figures: ArrayFigures) -> ArrayFigures {
        let cache = figures.cache / self.scale;
        ArrayFigures { cache, read_ahead: figures.read_ahead.min(cache / 4), ..figures }
    }

    /// Where the addresses of a second group of disks begin, far from the first volume's end.
    const fn group_bytes(&self) -> u64 {
        self.bytes().next_multiple_of(GROUP_BYTES) + GROUP_BYTES
    }

    /// Source and target.
    fn volumes(&self, world: &World) -> [Volume; 2] {
        let size = Bytes(self.bytes());
        let source = Volume::new(world, "source", size, Origin::Filled, self.model(self.from));
        let target = match self.to {
            Place::ExchangeArray => source.beside("target", size, Origin::Empty, self.group_bytes()),
            place => Volume::new(world, "target", size, Origin::Empty, self.model(place)),
        };
        [source, target]
    }

    pub(super) fn model(&self, place: Place) -> Box<dyn Model> {
        let array = |figures| Box::new(Array::new(self.scaled(figures))) as Box<dyn Model>;
        match place {
            Place::Array => array(ArrayFigures::CX4_120),
            Place::NothingAhead => array(ArrayFigures { read_ahead: 0, ..ArrayFigures::CX4_120 }),
            Place::FasterReads => array(ArrayFigures { read_rate: FASTER_READ_RATE, ..ArrayFigures::CX4_120 }),
            Place::ExchangeArray => {
                Box::new(Array::with_two_groups(self.scaled(ArrayFigures::CX3_40), self.group_bytes()))
            }
            Place::SlowNfs => Box::new(Nfs::new(NfsFigures::ESX_SLOW)),
        }
    }
}

impl std::fmt::Display for Scene {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let to = if self.to == Place::SlowNfs { ", to NFS" } else { "" };
        let from = match self.from {
            Place::NothingAhead => ", nothing read ahead",
            Place::FasterReads => ", read faster",
            _ => "",
        };
        write!(out, "{}, {}, {} GB{from}{to}", self.way.name(), self.load, self.data_gib)
    }
}

/// What came of a move. Times are those of the paper's scale.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// Whether the guest is on the target in the end.
    pub(super) switched: bool,
    /// Why not, in the engine's words.
    pub(super) error: Option<String>,
    /// From the start to the switchover or the failure, in seconds.
    pub(super) seconds: f64,
    /// The longest that a request of the guest's waited around the switchover, in seconds.
    pub(super) downtime: f64,
    pub(super) before: Tally,
    pub(super) during: Tally,
    pub(super) after: Tally,
    pub(super) report: Report,
    /// What source and target were asked for, second by second of the world's own time.
    pub(super) traffic: [Vec<Traffic>; 2],
}

impl Seen {
    /// Which part of its requests the guest lost during the move.
    pub(super) fn penalty(&self) -> f64 {
        1.0 - self.during.iops() / self.before.iops()
    }

    /// The requests lost, in seconds of the undisturbed guest: time times penalty.
    pub(super) fn cost(&self) -> f64 {
        self.seconds * self.penalty()
    }
}

/// The data mover below the engine, as ESX has one: the devices take their time, and no buffer holds the bytes.
struct Mover {
    source: Volume,
    target: Volume,
}

impl Offload for Mover {
    fn copy(&self, extent: Extent) -> IoFuture<'_, Bytes> {
        Box::pin(async move {
            self.source.copy_to(&self.target, extent).await;
            Ok(extent.length)
        })
    }
}

impl crate::runs::Scene for Scene {
    type Seen = Seen;

    fn weight(&self) -> u64 {
        let requests = match self.load {
            Load::Idle => 1,
            Load::Oltp { outstanding } => 1 + outstanding as u64 / 4,
            Load::Exchange { intensity } => 1 + intensity,
            Load::MailServer | Load::HotMailServer => 3,
        };
        let slow = matches!(self.to, Place::SlowNfs) as u64 * 20;
        (self.bytes() >> 20) * (requests + slow)
    }

    /// A move that fails as it may is [seen](Seen::switched).
    fn play(&self, seed: u64) -> Result<Seen> {
        clock::run(async {
            let world = World::new(seed, Keep::Tail);
            let seen = play_in(&world, *self).await;
            match world.violation() {
                Some(violation) => Err(Error::new(ErrorKind::Internal, format!("{violation} in {self:?}"))),
                None => seen,
            }
        })
    }

    fn ending(seen: &Seen) -> String {
        format!("{} in {:.0} s", if seen.switched { "moved" } else { "failed" }, seen.seconds)
    }
}

async fn play_in(world: &World, scene: Scene) -> Result<Seen> {
    let size = Bytes(scene.bytes());
    let [source, target] = scene.volumes(world);
    let process = Process::start(world, 0);
    let device = source.device();
    let slot = Slot::new(device.clone());
    let meter = MeterState::new(process.env());
    let port = Device::new("meter", meter.metered(slot.lane()));
    let data = scene.system_bytes()..size.0;
    let player = scene.load.start(data, scene.scale).map(|(load, outstanding)| {
        Player::start(world, "guest", port, Origin::Filled, load as Box<dyn Workload>, outstanding)
    });
    let take = || player.as_ref().map(Player::take).unwrap_or_default();
    if player.is_some() {
        world.sleep(scene.around()).await;
    }
    let before = take();
    let shelf =
        MoveOverlays::new(world, [&source, &target], size, scene.way.overlay_files().map(|costs| (costs, scene.scale)));
    let context = MigrationContext {
        env: process.env(),
        slot: slot.clone(),
        source: device,
        target: target.device(),
        medium: migrate::Medium::default(),
        copy_face: None,
        redirect: None,
        target_is_fresh: true,
        phase: Phase::Preparing,
        under_way: UnderWay::new(Duration::ZERO, process.env().now()),
        journal: Arc::new(MoveJournal { world: world.clone(), compared: Some([source.clone(), target.clone()]) }),
        progress_map: None,
        meter: Some(Arc::new(VolumeMeter::new(meter))),
        comparison: None,
        offload: Some(Arc::new(Mover { source: source.clone(), target: target.clone() })),
        pool: BufferPool::new(Bytes::mib(64)),
        snapshots: scene
            .way
            .takes_snapshots()
            .then(|| Arc::new(tokio::sync::Mutex::new(Snapshots::none(Arc::new(shelf), process.env())))),
    };
    let began = world.now();
    let options = MoveOptions { verify: Verify::Off, ..scene.way.options(size.0, scene.scale) };
    let (_control, work) = Migration::start(context, options).await?;
    let outcome = process.run(work).await;
    let ended = world.now();
    let during = take();
    if player.is_some() {
        world.sleep(scene.around()).await;
    }
    let after = take();
    if let Some(player) = player {
        player.stop().await;
    }
    let outcome = outcome.map_err(|_| Error::new(ErrorKind::Internal, "the process died"))?;
    let (switched, error) = match &outcome {
        Outcome::Switched(_) => (true, None),
        Outcome::Failed { error, .. } => (false, Some(error.chain().to_string())),
        Outcome::Cancelled(_) => return Err(Error::new(ErrorKind::Internal, "nobody cancelled the move")),
    };
    let report = outcome.report().clone();
    Ok(Seen {
        switched,
        error,
        seconds: (ended - began).as_secs_f64() * scene.scale as f64,
        downtime: downtime(&report, scene.scale),
        before,
        during,
        after,
        report,
        traffic: [source.traffic(), target.traffic()],
    })
}

/// The longest that the guest was held, at the paper's scale. The last copy of a tracking move grows with the disk, and
/// so does the last snapshot. What a mirror's guest waits for does not grow.
fn downtime(report: &Report, scale: u64) -> f64 {
    let held = report.iterations.iter().filter(|pass| pass.held).map(|pass| pass.seconds);
    report.stall_us_max as f64 / 1e6 + held.fold(0.0, f64::max) * (scale - 1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::Scene as _;

    const SMALL: Scene = Scene {
        way: Way::Mirror,
        load: Load::Oltp { outstanding: 16 },
        data_gib: 32,
        system_gib: 6,
        from: Place::Array,
        to: Place::Array,
        scale: 128,
    };

    #[test]
    fn the_mirror_moves_a_modelled_volume_under_a_checked_load_and_repeats_itself() {
        let seen = SMALL.play(1).expect("nothing is violated");
        assert!(seen.switched, "{:?}", seen.error);
        assert!(seen.during.writes > 100 && seen.after.reads > 1000, "the guest did nothing");
        assert!(seen.penalty() > 0.02, "a copy costs nothing");
        let again = SMALL.play(1).expect("nothing was the first time");
        assert_eq!((seen.seconds, seen.during.reads), (again.seconds, again.during.reads), "a seed is not a run");
    }

    #[test]
    fn the_mirror_converges_on_a_volume_ten_times_slower() {
        let seen = Scene { to: Place::SlowNfs, scale: 512, ..SMALL }.play(1).expect("nothing is violated");
        assert!(seen.switched, "{:?}", seen.error);
        assert!(seen.after.iops() < seen.before.iops() / 6.0, "{} and {}", seen.before.iops(), seen.after.iops());
    }
}
