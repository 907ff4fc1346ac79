//! The wire between two hosts over simulated links, and what links and processes do to it. Whatever happens, every block
//! of the volume is a register: what is read was written, and is not older than what was answered or read before.

use std::sync::Arc;
use std::time::Duration;

use block::testing::conformance;
use block::{Buffer, Bytes, Data, Device, Error, ErrorKind, MemDevice, Mutation, Result};
use env::Moment;
use futures::future::{BoxFuture, join_all};
use futures::stream::{self, StreamExt};
use migrate::stream::{
    Answer, Ask, BoxTransport, Compression, Dialer, Opened, PeerName, Receiver, ReceiverLimits, Remote, Role,
    SessionHandler, SessionRequest, StreamOptions,
};
use parking_lot::Mutex;
use sim::clock;
use sim::disk::{Disk, Faults, Timing};
use sim::link::{Link, LinkFaults, LinkFigures, Side};
use sim::log::Keep;
use sim::process::Process;
use sim::rng::Rng;
use sim::world::World;
use transhume_sim as sim;
use uuid::Uuid;

/// What a disk writes at once or not at all, and so the unit of what is checked.
const BLOCK: usize = 512;
const FIGURES: LinkFigures = LinkFigures { rate: 100_000_000, latency: Duration::from_micros(200), window: 1 << 20 };

/// What the receiving host serves.
#[derive(Clone)]
enum Volume {
    Ready(Device),
    /// Opened anew for each session, when nothing of a dead process is on its way any more; or, by mistake, at once.
    Disk(Disk, bool),
}

struct Holder {
    volume: Volume,
    instance: u32,
}

impl SessionHandler for Holder {
    fn check(&self, _: &PeerName, _: &SessionRequest) -> Result<()> {
        Ok(())
    }

    fn open(&self, _: &PeerName, request: &SessionRequest) -> BoxFuture<'_, Result<Opened>> {
        let epoch = request.epoch;
        Box::pin(async move {
            let device = match &self.volume {
                Volume::Ready(device) => device.clone(),
                Volume::Disk(disk, true) => disk.open(epoch).await,
                Volume::Disk(disk, false) => disk.open_at_once(epoch),
            };
            Ok(Opened { device, instance: [self.instance as u8; 16], boot: [1; 16], earlier: None })
        })
    }

    fn ask(&self, _: &PeerName, _: &SessionRequest, _: Ask) -> BoxFuture<'_, Result<Answer>> {
        Box::pin(async { Ok(Answer::Done) })
    }
}

/// The receiving host's program, in one of its lives.
struct ReceiverRun {
    process: Process,
    receiver: Arc<Receiver>,
}

/// Two hosts, and links between them.
struct Pair {
    world: World,
    links: Vec<Link>,
    run: Mutex<ReceiverRun>,
    volume: Volume,
    client: Process,
    lives: Mutex<u32>,
}

impl Pair {
    fn new(seed: u64, links: usize, figures: LinkFigures, volume: impl FnOnce(&World) -> Volume) -> Arc<Self> {
        let world = World::new(seed, Keep::Tail);
        let volume = volume(&world);
        let names = ["link 0", "link 1", "link 2", "link 3"];
        Arc::new(Self {
            links: names[..links].iter().map(|name| Link::new(&world, name, figures).with_late_resets()).collect(),
            run: Mutex::new(Self::run(&world, 1, &volume)),
            client: Process::bystander(&world, "sender", 1),
            volume,
            lives: Mutex::new(1),
            world,
        })
    }

    fn run(world: &World, number: u32, volume: &Volume) -> ReceiverRun {
        let process = Process::bystander(world, "receiver", number);
        let gate = Arc::new(Holder { volume: volume.clone(), instance: number });
        let receiver = Receiver::new(process.env(), gate, ReceiverLimits::default());
        ReceiverRun { process, receiver }
    }

    /// The receiving program is killed and started again.
    async fn restart(&self) {
        let process = self.run.lock().process.clone();
        self.world.fault("kill", format_args!("the receiver"));
        process.kill().await;
        self.links.iter().for_each(Link::cut);
        let number = {
            let mut lives = self.lives.lock();
            *lives += 1;
            *lives
        };
        *self.run.lock() = Self::run(&self.world, number, &self.volume);
    }

    async fn connect(self: &Arc<Self>, role: Role, size: Bytes, options: StreamOptions) -> Arc<Remote> {
        let request = SessionRequest {
            volume: "disk".to_owned(),
            job: Uuid::from_u128(1),
            role,
            epoch: 1,
            size,
            request_alignment: 512,
            origin: "disk".to_owned(),
            layers: None,
            stays: false,
        };
        let dialer = Arc::clone(self) as Arc<dyn Dialer>;
        Remote::connect(self.client.env(), dialer, request, options).await.expect("the receiver lets it in")
    }
}

impl Dialer for Pair {
    fn dial(&self, stream: u16) -> BoxFuture<'_, Result<BoxTransport>> {
        Box::pin(async move {
            let (near, far) = self.links[usize::from(stream) % self.links.len()].connect();
            let run = self.run.lock();
            if run.process.is_dead() {
                return Err(Error::new(ErrorKind::Disconnected, "nobody listens"));
            }
            let receiver = Arc::clone(&run.receiver);
            run.process.env().spawn(Box::pin(async move {
                // How a connection ends is the sender's story here.
                let _ = receiver.serve(Box::new(far), PeerName("north".to_owned())).await;
            }));
            Ok(Box::new(near) as BoxTransport)
        })
    }
}

fn memory(size: Bytes) -> impl FnOnce(&World) -> Volume {
    move |_| Volume::Ready(Device::new("memory", MemDevice::new(size)))
}

fn streams(streams: u16) -> StreamOptions {
    StreamOptions { streams, ..StreamOptions::default() }
}

#[test]
fn a_remote_volume_conforms_over_a_link() {
    for seed in 0..2 {
        clock::run(async {
            let make = async |size| {
                let pair = Pair::new(seed, 2, FIGURES, memory(size));
                pair.links[0].set_faults(LinkFaults { reorder: Duration::from_millis(1), corrupt: 0.0 });
                let remote = pair.connect(Role::Copy, size, streams(3)).await;
                Device::from_arc("remote", remote)
            };
            conformance(seed, make).await;
        });
    }
}

/// Writes `count` MiB of data that does not compress, 32 of them at a time, and says at how many MB/s.
async fn rate(pair: &Pair, device: &Device, count: u64) -> f64 {
    let noise: Vec<u8> = {
        let rng = Rng::new(1, "noise");
        (0..(1 << 17)).flat_map(|_| rng.any().to_le_bytes()).collect()
    };
    let data = Data::copy_of(&noise);
    let began = pair.world.now();
    let write = |number| device.write(Mutation::data(Bytes::mib(number % (device.size().0 >> 20)), data.clone()));
    let mut writes = stream::iter((0..count).map(write)).buffer_unordered(32);
    while let Some(outcome) = writes.next().await {
        outcome.expect("nothing goes wrong");
    }
    (count << 20) as f64 / (pair.world.now() - began).as_secs_f64() / 1e6
}

#[test]
fn four_links_carry_four_times_what_one_does_and_one_stream_fills_its_link() {
    let of = |links: usize| {
        clock::run(async {
            let pair = Pair::new(1, links, FIGURES, memory(Bytes::mib(64)));
            let remote = pair.connect(Role::Copy, Bytes::mib(64), streams(links as u16)).await;
            let device = Device::from_arc("remote", remote);
            rate(&pair, &device, 256).await
        })
    };
    let (one, four) = (of(1), of(4));
    assert!((95.0..=100.0).contains(&one), "{one} MB/s over a link of 100");
    assert!(four > 3.8 * one, "{four} MB/s over four links and {one} over one");
}

#[test]
fn a_slow_stream_takes_less_of_the_work_and_holds_nobody_up() {
    clock::run(async {
        let pair = Pair::new(1, 2, FIGURES, memory(Bytes::mib(256)));
        pair.links[1].set_rate(10_000_000);
        let remote = pair.connect(Role::Copy, Bytes::mib(256), streams(2)).await;
        let device = Device::from_arc("remote", Arc::clone(&remote) as Arc<_>);
        let rate = rate(&pair, &device, 256).await;
        assert!(rate > 85.0, "{rate} MB/s over links of 100 and 10");
        let sent = remote.statistics().streams;
        assert!(sent[0].bytes_sent > 6 * sent[1].bytes_sent, "{sent:?}");
    });
}

#[test]
fn a_short_request_does_not_wait_behind_megabytes_of_a_copy() {
    clock::run(async {
        let pair = Pair::new(1, 1, FIGURES, memory(Bytes::mib(64)));
        let remote = pair.connect(Role::Copy, Bytes::mib(64), streams(1)).await;
        let device = Device::from_arc("remote", remote);
        let noise =
            Data::copy_of(&(0..1 << 17).flat_map(|number: u64| (number * number).to_le_bytes()).collect::<Vec<_>>());
        let copies = join_all((0..60).map(|number| device.write(Mutation::data(Bytes::mib(number), noise.clone()))));
        let guest = async {
            let mut longest = Duration::ZERO;
            for round in 0..40_u64 {
                pair.world.sleep(Duration::from_millis(5)).await;
                let began = pair.world.now();
                let data = Data::copy_of(&[round as u8 + 1; BLOCK]);
                device.write(Mutation::data(Bytes::mib(62), data)).await.expect("nothing goes wrong");
                longest = longest.max(pair.world.now() - began);
            }
            longest
        };
        let (_, longest) = futures::join!(copies, guest);
        // The link's own window of 1 MiB is 10 ms, what waits for it at most 512 KiB more; the copies are 600 ms.
        assert!(longest < Duration::from_millis(25), "a guest's write took {longest:?}");
    });
}

#[test]
fn compression_is_chosen_where_the_link_is_slow_and_halves_the_time() {
    let of = |compression| {
        clock::run(async {
            let pair = Pair::new(1, 1, LinkFigures { rate: 20_000_000, ..FIGURES }, memory(Bytes::mib(64)));
            let options = StreamOptions { compression, ..streams(1) };
            let remote = pair.connect(Role::Copy, Bytes::mib(64), options).await;
            let device = Device::from_arc("remote", remote);
            let text: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7 % 251) as u8 ^ (at >> 9) as u8).collect();
            let text = Data::copy_of(&text);
            let began = pair.world.now();
            for number in 0..64 {
                device.write(Mutation::data(Bytes::mib(number), text.clone())).await.expect("nothing goes wrong");
            }
            (pair.world.now() - began).as_secs_f64()
        })
    };
    let (off, auto) = (of(Compression::Off), of(Compression::Auto));
    assert!(auto < off / 2.0, "{auto} s instead of {off} s");
}

/// One write or read of a block, from when it was asked for to when it was answered.
#[derive(Clone, Copy, Debug)]
struct Event {
    tag: u64,
    asked: Moment,
    /// `None`: not yet. A failed write counts as answered when the next session was open: it lands before that or never.
    answered: Option<Moment>,
    /// Whether it was carried out for sure.
    is_certain: bool,
}

/// What happened to a block.
#[derive(Clone, Debug, Default)]
struct History {
    writes: Vec<Event>,
    reads: Vec<Event>,
}

impl History {
    /// What cannot be, if every write happens at one moment between asking and answering.
    fn check(&self) -> std::result::Result<(), String> {
        let end = |event: &Event| event.answered.unwrap_or(Moment(Duration::MAX));
        for (number, read) in self.reads.iter().enumerate() {
            let nothing =
                Event { tag: 0, asked: Moment::default(), answered: Some(Moment::default()), is_certain: true };
            let known = self.writes.iter().find(|write| write.tag == read.tag);
            let source = match (read.tag, known) {
                (0, _) => &nothing,
                (_, Some(write)) => write,
                _ => return Err(format!("{read:?} of what nobody wrote")),
            };
            if source.asked > end(read) {
                return Err(format!("{read:?} of what was written later: {source:?}"));
            }
            let is_over = |write: &&Event| write.is_certain && write.asked > end(source) && end(write) < read.asked;
            if let Some(newer) = self.writes.iter().find(is_over) {
                return Err(format!("{read:?} of {source:?}, after {newer:?}"));
            }
            for earlier in self.reads[..number].iter().filter(|earlier| end(earlier) < read.asked) {
                let seen = self.writes.iter().find(|write| write.tag == earlier.tag);
                if seen.is_some_and(|seen| seen.asked > end(source)) {
                    return Err(format!("{read:?} of {source:?}, after {earlier:?} of {seen:?}"));
                }
            }
        }
        Ok(())
    }
}

const BLOCKS: u64 = 256;

struct Players {
    role: Role,
    histories: Mutex<Vec<History>>,
    next_tag: Mutex<u64>,
    recovering: tokio::sync::Mutex<()>,
}

fn block_of(tag: u64) -> Vec<u8> {
    tag.to_le_bytes().repeat(BLOCK / 8)
}

fn tag_of(bytes: &[u8]) -> std::result::Result<u64, String> {
    let (tag, _) = bytes.split_first_chunk::<8>().ok_or("a block has eight bytes")?;
    match bytes.chunks(8).all(|piece| piece == tag) {
        true => Ok(u64::from_le_bytes(*tag)),
        false => Err("a block is torn, or not what anybody wrote".to_owned()),
    }
}

/// One of several who write and read the same blocks at once.
async fn play(pair: Arc<Pair>, remote: Arc<Remote>, players: Arc<Players>, number: u64, act: Act) {
    let device = Device::from_arc("remote", Arc::clone(&remote) as Arc<_>);
    let rng = pair.world.rng(&format!("player {number}"));
    for _ in 0..act.rounds {
        pair.world.sleep(rng.up_to(act.think)).await;
        let count = if rng.chance(0.1) { rng.within(70..=200) } else { rng.within(1..=16) };
        let first = rng.below((BLOCKS - count + 1).min(act.places));
        let (offset, asked) = (Bytes(first * BLOCK as u64), pair.world.now());
        if rng.chance(0.4) {
            let read = device.read(offset, Buffer::unpooled(count as usize * BLOCK)).await;
            let Ok(bytes) = read else {
                recover(&pair, &remote, &players).await;
                continue;
            };
            let answered = Some(pair.world.now());
            for (index, block) in bytes.chunks(BLOCK).enumerate() {
                let tag = tag_of(block).expect("every block is whole");
                let event = Event { tag, asked, answered, is_certain: true };
                players.histories.lock()[first as usize + index].reads.push(event);
            }
        } else {
            let mut bytes = Vec::new();
            let mut tags = Vec::new();
            for block in first..first + count {
                let tag = {
                    let mut next = players.next_tag.lock();
                    *next += 1;
                    *next
                };
                bytes.extend(block_of(tag));
                tags.push((block as usize, tag));
                let event = Event { tag, asked, answered: None, is_certain: false };
                players.histories.lock()[block as usize].writes.push(event);
            }
            let outcome = device.write(Mutation::data(offset, Data::copy_of(&bytes)).with_fua(rng.chance(0.1))).await;
            if outcome.is_err() {
                recover(&pair, &remote, &players).await;
            }
            let now = pair.world.now();
            for (block, tag) in tags {
                let mut histories = players.histories.lock();
                let write = histories[block].writes.iter_mut().find(|write| write.tag == tag).expect("it was noted");
                (write.answered, write.is_certain) = (Some(now), outcome.is_ok());
            }
        }
        if rng.chance(0.05) && device.flush().await.is_err() {
            recover(&pair, &remote, &players).await;
        }
    }
}

/// Connects again after a loss, once for everybody.
async fn recover(pair: &Arc<Pair>, remote: &Arc<Remote>, players: &Arc<Players>) {
    assert_eq!(players.role, Role::Copy, "a forwarded guest was told of an outage");
    let _turn = players.recovering.lock().await;
    while !remote.is_live() {
        if let Err(error) = remote.reconnect().await {
            pair.world.event(format_args!("no new session: {}", error.chain()));
            pair.world.sleep(Duration::from_millis(100)).await;
        }
    }
}

/// What can go wrong, one after the other, until `until`.
async fn storm(pair: Arc<Pair>, until: Moment) {
    let rng = pair.world.rng("storm");
    while pair.world.now() < until {
        pair.world.sleep(Duration::from_millis(rng.within(20..=300))).await;
        let link = &pair.links[rng.below(pair.links.len() as u64) as usize];
        let while_it_lasts = Duration::from_millis(rng.pick(&[5, 100, 1500, 4000]));
        match rng.below(9) {
            0 => link.cut(),
            1 => pair.links.iter().for_each(Link::cut),
            2 => {
                link.set_up(false);
                pair.world.sleep(while_it_lasts).await;
                link.set_up(true);
            }
            3 => link.silence(Side::Client),
            4 => link.silence(Side::Server),
            5 => {
                link.set_faults(LinkFaults { corrupt: 0.2, reorder: Duration::from_millis(3) });
                pair.world.sleep(while_it_lasts).await;
                link.set_faults(LinkFaults::default());
            }
            6 => {
                let side = rng.pick(&[Side::Client, Side::Server]);
                link.set_reading(side, false);
                pair.world.sleep(while_it_lasts).await;
                link.set_reading(side, true);
            }
            7 => link.set_faults(LinkFaults { reorder: Duration::from_millis(5), corrupt: 0.0 }),
            _ => pair.restart().await,
        }
    }
    pair.links.iter().for_each(|link| link.set_faults(LinkFaults::default()));
}

/// What a run leaves: what was found wrong, and what tells it from other runs.
#[derive(Debug, PartialEq)]
struct Played {
    wrong: Option<String>,
    ended: Moment,
    log: (u64, u64),
    arrived: Vec<[u64; 2]>,
    sessions: u64,
    again: u64,
    damaged: u64,
    deaths: u64,
}

/// What is played.
#[derive(Clone, Copy)]
struct Act {
    role: Role,
    /// The volume is not opened while a dead process has something on its way to it.
    waits_for_the_dead: bool,
    /// For how long links and processes are in trouble.
    storm: Duration,
    /// The receiving host's disk answers some requests after a minute, whoever still waits for that.
    hangs: bool,
    players: u64,
    rounds: u64,
    think: Duration,
    /// Requests begin at one of so many blocks.
    places: u64,
}

impl Act {
    /// Players who meet seldom, and work fast.
    const fn busy(role: Role) -> Self {
        let (storm, think) = (Duration::from_secs(20), Duration::from_millis(4));
        Self { role, waits_for_the_dead: true, storm, hangs: false, players: 6, rounds: 150, think, places: BLOCKS }
    }

    /// Players who meet often, and are there as long as the storm.
    const fn crowded(role: Role) -> Self {
        let (storm, think) = (Duration::from_secs(90), Duration::from_millis(200));
        Self { storm, hangs: true, players: 20, rounds: 100, think, places: 24, ..Self::busy(role) }
    }
}

fn play_through(seed: u64, act: Act) -> Played {
    clock::run(async move {
        let size = Bytes(BLOCKS * BLOCK as u64);
        let timing = if seed.is_multiple_of(2) { Timing::FLASH } else { Timing::SLOW };
        let pair = Pair::new(seed, 2, FIGURES, |world| {
            Volume::Disk(Disk::new(world, "disk", size, 1, timing), act.waits_for_the_dead)
        });
        if let (true, Volume::Disk(disk, _)) = (act.hangs, &pair.volume) {
            disk.set_faults(Faults { stuck: 0.01, ..Faults::default() });
        }
        let compression = [Compression::Auto, Compression::Lz4, Compression::Zstd][seed as usize % 3];
        let reconnect_limit = Duration::from_secs(3600);
        let options = StreamOptions { compression, frame_bytes: 32 << 10, reconnect_limit, ..streams(3) };
        let remote = pair.connect(act.role, size, options).await;
        let players = Arc::new(Players {
            role: act.role,
            histories: Mutex::new(vec![History::default(); BLOCKS as usize]),
            next_tag: Mutex::new(0),
            recovering: tokio::sync::Mutex::new(()),
        });
        let storming = (act.storm > Duration::ZERO).then(|| {
            let until = pair.world.now() + act.storm;
            pair.world.spawn(storm(Arc::clone(&pair), until))
        });
        let playing = (0..act.players).map(|number| {
            let player = play(Arc::clone(&pair), Arc::clone(&remote), Arc::clone(&players), number, act);
            pair.world.spawn(player)
        });
        let all = env::timeout(&*pair.client.env(), Duration::from_secs(7200), join_all(playing)).await;
        let mut wrong = None;
        match all {
            Some(outcomes) => outcomes.into_iter().for_each(|outcome| outcome.expect("no panic")),
            None => wrong = Some("somebody was never answered".to_owned()),
        }
        if let Some(storming) = storming {
            storming.await.expect("no panic");
        }
        let histories = players.histories.lock().clone();
        for (block, history) in histories.iter().enumerate() {
            if let Err(what) = history.check() {
                wrong = wrong.or(Some(format!("block {block}: {what}")));
            }
        }
        wrong = wrong.or(pair.world.violation().map(|violation| violation.to_string()));
        let statistics = remote.statistics();
        Played {
            wrong,
            ended: pair.world.now(),
            log: pair.world.log_hash(),
            arrived: pair.links.iter().map(Link::arrived).collect(),
            sessions: statistics.sessions,
            again: statistics.bytes_again,
            damaged: statistics.damaged,
            deaths: statistics.streams.iter().map(|stream| stream.deaths).sum(),
        }
    })
}

#[test]
fn a_forwarded_guest_sees_a_disk_whatever_happens_between_the_hosts() {
    let (mut sessions, mut again, mut damaged, mut deaths) = (0, 0, 0, 0);
    for seed in 0..24 {
        let played = play_through(seed, Act::busy(Role::Forward));
        assert_eq!(played.wrong, None, "seed {seed}");
        sessions += played.sessions - 1;
        again += played.again;
        damaged += played.damaged;
        deaths += played.deaths;
    }
    assert!(
        sessions > 10 && deaths > 100 && again > 1 << 20,
        "{sessions} sessions, {deaths} deaths, {again} bytes again"
    );
    assert!(damaged > 10, "{damaged} damaged frames");
}

#[test]
fn what_hangs_at_the_other_host_never_lands_over_what_was_written_after_it() {
    let (mut sessions, mut deaths) = (0, 0);
    for seed in 300..324 {
        let played = play_through(seed, Act::crowded(Role::Forward));
        assert_eq!(played.wrong, None, "seed {seed}");
        sessions += played.sessions - 1;
        deaths += played.deaths;
    }
    assert!(sessions > 40 && deaths > 200, "{sessions} sessions, {deaths} deaths");
}

#[test]
fn a_copy_never_loses_what_was_answered_and_nothing_late_lands_after_a_reconnect() {
    let (mut sessions, mut deaths) = (0, 0);
    for seed in 100..124 {
        let played = play_through(seed, Act::busy(Role::Copy));
        assert_eq!(played.wrong, None, "seed {seed}");
        sessions += played.sessions - 1;
        deaths += played.deaths;
    }
    assert!(sessions > 10 && deaths > 100, "{sessions} sessions, {deaths} deaths");
}

#[test]
fn opening_the_volume_over_a_dead_processs_writes_would_be_seen() {
    let hasty = Act { waits_for_the_dead: false, ..Act::busy(Role::Forward) };
    let seen = (0..60).any(|seed| play_through(2 * seed + 1, hasty).wrong.is_some());
    assert!(seen, "no seed shows the mistake that the others are there to find");
}

#[test]
fn a_seed_is_a_run() {
    let play = |seed| play_through(seed, Act::busy(Role::Forward));
    assert_eq!(play(7), play(7));
    assert_ne!(play(7).log, play(8).log);
    let calm = play_through(7, Act { storm: Duration::ZERO, ..Act::busy(Role::Copy) });
    assert_eq!((calm.wrong, calm.sessions, calm.deaths, calm.again), (None, 1, 0, 0));
}
