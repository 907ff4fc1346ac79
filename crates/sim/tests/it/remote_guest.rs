//! A guest at the other end of a link, a host that stops, slows down and has wrong clocks, and a move in the middle of
//! it: the real NBD client and server, slot, meter, mirror and driver, over modelled disks.

use std::sync::Arc;
use std::time::Duration;

use block::{BufferPool, Bytes, Device, IoFuture, Slot};
use filters::MeterState;
use migrate::{JobJournal, Migration, MigrationContext, MoveOptions, Outcome, Phase, UnderWay, Verify, VolumeMeter};
use nbd::{Export, Exports, Limits, NbdDevice, serve_connection};
use sim::clock;
use sim::link::{Link, LinkFigures};
use sim::log::Keep;
use sim::machine::Machine;
use sim::model::contents::Origin;
use sim::model::{Flash, FlashFigures, HardDisk, HardDiskFigures, Model, Volume};
use sim::player::Player;
use sim::workload::Oltp;
use sim::world::{Invariant, World};
use transhume_sim as sim;

const SIZE: Bytes = Bytes::mib(64);

/// Looks at both sides at the commit, for which the guest is held.
struct Journal {
    world: World,
    sides: [Volume; 2],
}

impl JobJournal for Journal {
    fn record(&self, _: Phase) -> IoFuture<'_, ()> {
        block::ready(Ok(()))
    }

    fn commit(&self) -> IoFuture<'_, ()> {
        let differs = self.sides[0].inspect(|source| self.sides[1].inspect(|target| source.first_difference(target)));
        if let Some(block) = differs {
            self.world.violate(Invariant::EqualAtSwitch, format!("block {block} differs at the commit"));
        }
        block::ready(Ok(()))
    }
}

/// A guest on its own host, reached through a link, whose volume lies on `host`.
struct Scene {
    world: World,
    link: Link,
    host: Machine,
    slot: Slot,
    meter: MeterState,
    volumes: [Volume; 2],
    player: Player,
}

impl Scene {
    async fn new(seed: u64, model: fn() -> Box<dyn Model>) -> Self {
        let world = World::new(seed, Keep::Tail);
        let link = Link::new(&world, "link", LinkFigures::GIGABIT);
        let host = Machine::start(&world, "host", 1);
        let guest = Machine::start(&world, "guest", 2);
        let source = Volume::new(&world, "source", SIZE, Origin::Filled, model());
        let target = Volume::new(&world, "target", SIZE, Origin::Empty, model());
        let (slot, meter) = (Slot::new(source.device()), MeterState::new(host.env()));
        let (lanes, meters) = (slot.clone(), meter.clone());
        let export = Export::new("volume", BufferPool::new(Bytes::mib(64)), move || {
            Device::new("meter", meters.metered(lanes.lane()))
        });
        let (near, far) = link.connect();
        let (exports, env) = (Arc::new(vec![Arc::new(export)]) as Arc<dyn Exports>, host.env());
        host.env().spawn(Box::pin(async move {
            // To look for a client's next request costs hundreds of polls on a clock that stands still meanwhile.
            let limits = Limits { busy_poll: Duration::ZERO, ..Limits::default() };
            serve_connection(far, exports, env, limits).await;
        }));
        let device = NbdDevice::over(near, "volume", &*guest.env()).await.expect("the server is there");
        let load = Oltp::iometer(SIZE.0);
        let player = Player::start(&world, "guest", Device::new("nbd", device), Origin::Filled, load, 4);
        Self { world, link, host, slot, meter, volumes: [source, target], player }
    }

    /// Moves the volume; gives how long that took in the world's time.
    async fn migrate(&self) -> Duration {
        let context = MigrationContext {
            env: self.host.env(),
            slot: self.slot.clone(),
            source: self.slot.device(),
            target: self.volumes[1].device(),
            medium: migrate::Medium::default(),
            copy_face: None,
            redirect: None,
            target_is_fresh: true,
            phase: Phase::Preparing,
            under_way: UnderWay::new(Duration::ZERO, self.host.env().now()),
            journal: Arc::new(Journal { world: self.world.clone(), sides: self.volumes.clone() }),
            progress_map: None,
            meter: Some(Arc::new(VolumeMeter::new(self.meter.clone()))),
            comparison: None,
            offload: None,
            pool: BufferPool::new(Bytes::mib(16)),
            snapshots: None,
        };
        let options = MoveOptions {
            verify: Verify::Full,
            bandwidth: Some(12_000_000),
            // A guest of a hard disk is slow anyway.
            guest_latency_us: 10_000_000,
            quiesce_ms: 10_000,
            ..MoveOptions::default()
        };
        let began = self.world.now();
        let (_control, work) = Migration::start(context, options).await.expect("nothing stands in the way");
        let outcome = env::spawn_with_result(&*self.host.env(), work).await.expect("the host lives");
        assert!(matches!(outcome, Outcome::Switched(_)), "{outcome:?}");
        self.world.now() - began
    }
}

#[test]
fn a_move_ends_well_on_a_host_that_stops_slows_down_and_has_wrong_clocks_behind_a_link_that_flaps() {
    for seed in 0..2 {
        clock::run(async {
            let scene = Scene::new(seed, || Box::new(HardDisk::new(HardDiskFigures::ST31000524AS))).await;
            let (world, host, link) = (scene.world.clone(), scene.host.clone(), scene.link.clone());
            let trouble = scene.world.spawn(async move {
                let rng = world.rng("trouble");
                host.set_clock_rate(200);
                for _ in 0..4 {
                    world.sleep(rng.up_to(Duration::from_millis(600))).await;
                    host.pause();
                    world.sleep(rng.up_to(Duration::from_secs(3))).await;
                    host.resume();
                    host.set_slow(Duration::from_micros(200));
                    host.step_wall_clock(Duration::from_secs(3600), rng.chance(0.5));
                    world.sleep(rng.up_to(Duration::from_millis(300))).await;
                    host.set_slow(Duration::ZERO);
                    link.set_up(false);
                    world.sleep(rng.up_to(Duration::from_secs(2))).await;
                    link.set_up(true);
                    host.set_clock_rate(-200);
                }
            });
            let took = scene.migrate().await;
            trouble.await.expect("no panic");
            let Scene { world, player, .. } = scene;
            world.sleep(Duration::from_secs(1)).await;
            let tally = player.take();
            player.stop().await;
            assert_eq!(world.violation(), None, "seed {seed}");
            assert!(took > Duration::from_secs(5) && took < Duration::from_secs(600), "{took:?}");
            assert!(tally.writes > 50 && world.faults()["host-pause"] >= 4, "nothing happened: {tally:?}");
        });
    }
}

#[test]
fn a_paused_host_answers_no_guest_until_it_goes_on() {
    clock::run(async {
        let scene = Scene::new(1, || Box::new(Flash::new(FlashFigures::SATA_80GB))).await;
        scene.world.sleep(Duration::from_millis(100)).await;
        scene.host.pause();
        scene.world.sleep(Duration::from_millis(10)).await;
        assert!(scene.player.take().requests() > 50);
        scene.world.sleep(Duration::from_secs(5)).await;
        assert_eq!(scene.player.take().requests(), 0, "a paused host answered");
        scene.host.resume();
        scene.world.sleep(Duration::from_millis(100)).await;
        assert!(scene.player.take().requests() > 50, "the host does not go on");
        scene.player.stop().await;
        assert_eq!(scene.world.violation(), None);
    });
}
