//! The real NBD client against the real NBD server over a simulated link, and what the link does to them.

use std::sync::Arc;
use std::time::Duration;

use block::testing::conformance;
use block::{Buffer, BufferPool, Bytes, Data, Device, ErrorKind, MemDevice, Mutation};
use futures::future::join_all;
use nbd::{Export, Exports, Limits, NbdDevice, serve_connection};
use sim::clock;
use sim::disk::{Disk, Timing};
use sim::link::{Link, LinkFaults, LinkFigures, Side};
use sim::log::Keep;
use sim::process::Process;
use sim::world::World;
use transhume_sim as sim;

const FIGURES: LinkFigures = LinkFigures { rate: 100_000_000, latency: Duration::from_micros(200), window: 1 << 20 };
const BLOCK: usize = 4096;

/// A server with one export, and a client's process, at two ends of a link.
struct Pair {
    world: World,
    link: Link,
    server: Process,
    client: Process,
    exports: Arc<Vec<Arc<Export>>>,
}

impl Pair {
    fn new(seed: u64, device: impl FnOnce(&World) -> Device) -> Self {
        let world = World::new(seed, Keep::Tail);
        let device = device(&world);
        let export = Export::new("volume", BufferPool::new(Bytes::mib(64)), move || device.clone());
        Self {
            link: Link::new(&world, "link", FIGURES),
            server: Process::start(&world, 1),
            client: Process::start(&world, 2),
            exports: Arc::new(vec![Arc::new(export)]),
            world,
        }
    }

    async fn connect(&self) -> block::Result<Device> {
        let (near, far) = self.link.connect();
        let (exports, env) = (Arc::clone(&self.exports) as Arc<dyn Exports>, self.server.env());
        self.server.env().spawn(Box::pin(async move {
            serve_connection(far, exports, env, Limits::default()).await;
        }));
        NbdDevice::over(near, "volume", &*self.client.env()).await.map(|device| Device::new("nbd", device))
    }
}

fn block_of(byte: u8) -> Data {
    Data::copy_of(&[byte; BLOCK])
}

#[test]
fn the_client_conforms_over_a_link() {
    for seed in 0..2 {
        clock::run(async {
            let make = async |size| {
                let pair = Pair::new(seed, |_| Device::new("memory", MemDevice::new(size)));
                pair.connect().await.expect("the server is there")
            };
            conformance(seed, make).await;
        });
    }
}

#[test]
fn a_stream_of_reads_is_as_fast_as_its_link() {
    clock::run(async {
        let pair = Pair::new(1, |_| Device::new("memory", MemDevice::new(Bytes::mib(64))));
        let device = pair.connect().await.expect("the server is there");
        let began = pair.world.now();
        let reads = (0..64).map(|index| device.read(Bytes::mib(index), Buffer::unpooled(1 << 20)));
        join_all(reads).await.into_iter().for_each(|read| drop(read.expect("nothing goes wrong")));
        let rate = (64 << 20) as f64 / (pair.world.now() - began).as_secs_f64() / 1e6;
        assert!((92.0..=100.0).contains(&rate), "{rate} MB/s over a link of 100");
    });
}

#[test]
fn a_cut_fails_what_is_in_flight_and_the_next_connection_finds_what_was_answered() {
    for seed in 0..20 {
        clock::run(async {
            let pair =
                Pair::new(seed, |world| Disk::new(world, "disk", Bytes::mib(1), 1, Timing::FLASH).open_at_once(0));
            let device = pair.connect().await.expect("the server is there");
            let cutter = (pair.world.clone(), pair.link.clone());
            let cutting = pair.world.spawn(async move {
                cutter.0.sleep(Duration::from_micros(cutter.0.rng("cut").within(300..=6000))).await;
                cutter.1.cut();
            });
            let mut answered = Vec::new();
            let mut lost = 0;
            for round in 0..8_u8 {
                let writes = (0..16_u8).map(|index| {
                    let block = u64::from(round) * 16 + u64::from(index);
                    device.write(Mutation::data(Bytes(block * BLOCK as u64), block_of(block as u8 + 1)))
                });
                for (index, outcome) in join_all(writes).await.into_iter().enumerate() {
                    match outcome {
                        Ok(()) => answered.push(round * 16 + index as u8),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Disconnected, "{}", error.chain());
                            lost += 1;
                        }
                    }
                }
            }
            cutting.await.expect("no panic");
            assert!(lost > 0, "the cut came too late to be seen");
            let again = pair.connect().await.expect("the server is there");
            for block in answered {
                let read = again.read(Bytes(u64::from(block) * BLOCK as u64), Buffer::unpooled(BLOCK)).await;
                assert!(
                    read.expect("the new one works").iter().all(|byte| *byte == block + 1),
                    "block {block} is lost"
                );
            }
            assert_eq!(pair.world.violation(), None);
        });
    }
}

#[test]
fn a_flap_is_a_pause() {
    clock::run(async {
        let pair = Pair::new(3, |_| Device::new("memory", MemDevice::new(Bytes::mib(4))));
        let device = pair.connect().await.expect("the server is there");
        let flapping = (pair.world.clone(), pair.link.clone());
        let flaps = pair.world.spawn(async move {
            for _ in 0..5 {
                flapping.0.sleep(Duration::from_millis(1)).await;
                flapping.1.set_up(false);
                flapping.0.sleep(Duration::from_secs(2)).await;
                flapping.1.set_up(true);
            }
        });
        for block in 0..100_u8 {
            let offset = Bytes(u64::from(block) * BLOCK as u64);
            device.write(Mutation::data(offset, block_of(block))).await.expect("a flap is no error");
            let read = device.read(offset, Buffer::unpooled(BLOCK)).await.expect("a flap is no error");
            assert!(read.iter().all(|byte| *byte == block));
        }
        flaps.await.expect("no panic");
        assert!(pair.world.now().0 > Duration::from_secs(10), "it went on while the link was down");
    });
}

#[test]
fn a_client_whose_server_is_not_heard_waits_and_a_new_connection_is_served_all_the_same() {
    clock::run(async {
        let pair = Pair::new(4, |_| Device::new("memory", MemDevice::new(Bytes::mib(4))));
        let device = pair.connect().await.expect("the server is there");
        pair.link.silence(Side::Server);
        let stuck = pair.world.spawn(async move { device.write(Mutation::data(Bytes::ZERO, block_of(1))).await });
        pair.world.sleep(Duration::from_secs(60)).await;
        assert!(!stuck.is_finished(), "an answer came over a silent connection");
        let again = pair.connect().await.expect("the server is there");
        let read = again.read(Bytes::ZERO, Buffer::unpooled(BLOCK)).await.expect("the new one works");
        assert!(read.iter().all(|byte| *byte == 1), "the server did not carry out what it was asked");
        pair.link.cut();
        let error = stuck.await.expect("no panic").expect_err("nobody could answer");
        assert_eq!(error.kind(), ErrorKind::Disconnected);
    });
}

#[test]
fn wrong_bits_never_hang_and_never_panic_though_nbd_cannot_always_see_them() {
    let (mut seen, mut unseen) = (0, 0);
    for seed in 0..60 {
        let (saw, differs) = clock::run(async {
            let pair = Pair::new(seed, |_| Device::new("memory", MemDevice::new(Bytes::mib(1))));
            let device = pair.connect().await.expect("the server is there");
            pair.link.set_faults(LinkFaults { corrupt: 0.008, ..LinkFaults::default() });
            let (mut saw, mut differs) = (false, false);
            for block in 0..30_u8 {
                let offset = Bytes(u64::from(block) * BLOCK as u64);
                let work = async {
                    device.write(Mutation::data(offset, block_of(block))).await?;
                    device.read(offset, Buffer::unpooled(BLOCK)).await
                };
                // A length or a cookie that is wrong may leave a request without an answer: nothing may spin or panic.
                match env::timeout(&*pair.client.env(), Duration::from_secs(10), work).await {
                    Some(Ok(read)) => differs |= read.iter().any(|byte| *byte != block),
                    Some(Err(_)) | None => saw = true,
                }
            }
            assert_eq!(pair.world.violation(), None, "seed {seed}");
            (saw, differs)
        });
        seen += u32::from(saw);
        unseen += u32::from(differs && !saw);
    }
    assert!(seen > 5 && unseen > 5, "{seen} seeds with an error, {unseen} with wrong bytes only");
}

#[test]
fn a_seed_is_a_run() {
    let play = |seed| {
        clock::run(async {
            let pair =
                Pair::new(seed, |world| Disk::new(world, "disk", Bytes::mib(1), 1, Timing::SLOW).open_at_once(0));
            pair.link.set_faults(LinkFaults { reorder: Duration::from_millis(1), ..LinkFaults::default() });
            let device = pair.connect().await.expect("the server is there");
            let writes = (0..64).map(|block| device.write(Mutation::data(Bytes(block * 4096), block_of(block as u8))));
            join_all(writes).await.into_iter().for_each(|outcome| outcome.expect("nothing goes wrong"));
            (pair.world.now(), pair.world.log_hash(), pair.link.arrived())
        })
    };
    assert_eq!(play(5), play(5));
    assert_ne!(play(5).0, play(6).0);
}
