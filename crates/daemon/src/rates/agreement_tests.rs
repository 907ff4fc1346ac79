//! Hosts whose counters are modelled, second by second.

use std::time::Duration;

use migrate::stream::MigrationCounters;

use super::*;

const GIGABIT: u64 = 125_000_000;

/// What frames add to payloads, as the counters have it.
const FRAMES: f64 = 1538.0 / 1448.0;

/// Two hosts with some links of a gigabit each, and a move over them, one stream a link.
struct World {
    second: u64,
    links: Vec<Link>,
    agreement: Agreement,
    mirrored: u64,
    agreed: Agreed,
}

#[derive(Default)]
struct Link {
    /// What others want to send over it, in bytes a second.
    wanted: f64,
    /// What they got in the last second, and what the move did.
    others: f64,
    ours: f64,
    carried: u64,
    stream: u64,
}

fn address(side: u8, link: usize) -> IpAddr {
    IpAddr::from([10, 0, link as u8, side])
}

/// What an interface has carried in the only direction in which anything goes.
#[derive(Clone, Copy, Default)]
struct Counted {
    all: u64,
    moves: u64,
    sharers: u32,
}

impl Counted {
    fn at(self, is_sent: bool, (interface, at_ns): (&str, u64), capacity: u64) -> LinkCounters {
        let way = |count: u64| if is_sent { (count, 0) } else { (0, count) };
        let ((sent, received), (moves_sent, moves_received)) = (way(self.all), way(self.moves));
        let (outgoing, incoming) = if is_sent { (self.sharers, 0) } else { (0, self.sharers) };
        let migrations = MigrationCounters { received: moves_received, sent: moves_sent, incoming, outgoing };
        LinkCounters { interface: interface.to_owned(), at_ns, received, sent, capacity, migrations }
    }
}

impl World {
    fn new(links: usize) -> Self {
        let links = (0..links).map(|_| Link::default()).collect();
        Self { second: 0, links, agreement: Agreement::default(), mirrored: 0, agreed: Agreed::default() }
    }

    fn counters(&self, side: u8, capacity: u64) -> BTreeMap<IpAddr, LinkCounters> {
        let counters = |(number, link): (usize, &Link)| {
            let at_ns = self.second * 1_000_000_000 + u64::from(side) * 77;
            let carried = Counted { all: link.carried, moves: link.stream, sharers: 1 };
            (address(side, number), carried.at(side == 1, (&format!("eth{number}"), at_ns), capacity))
        };
        self.links.iter().enumerate().map(counters).collect()
    }

    fn look(&self, capacity: u64) -> RateSample {
        let stream = |(number, link): (usize, &Link)| {
            let path = StreamPath { here: address(1, number), there: address(2, number) };
            Some(StreamSample { path, sent: link.stream, received: 0 })
        };
        RateSample {
            at: Moment(Duration::from_secs(self.second)),
            here: self.counters(1, capacity),
            there: self.counters(2, capacity),
            streams: self.links.iter().enumerate().map(stream).collect(),
            mirrored: self.mirrored,
        }
    }

    /// A second passes: TCP gives others half of a full link if they want that, and the move the rest that it may take.
    fn pass(&mut self, capacity: u64, reserve: u64) {
        let limits = self.agreed.streams.clone();
        for (number, link) in self.links.iter_mut().enumerate() {
            let may = limits.get(number).copied().flatten().map_or(1e12, |limit| limit as f64) * FRAMES;
            let full = GIGABIT as f64;
            link.others = link.wanted.min((full / 2.0).max(full - may));
            link.ours = may.min(full - link.others);
            link.carried += (link.others + link.ours) as u64;
            link.stream += (link.ours / FRAMES) as u64;
        }
        self.second += 1;
        self.agreed = self.agreement.step(self.look(capacity), reserve);
    }

    fn seconds(&mut self, count: u64, reserve: u64) {
        (0..count).for_each(|_| self.pass(GIGABIT, reserve));
    }
}

#[test]
fn a_busy_link_is_left_to_others_and_a_free_one_is_used_whole() {
    let mut world = World::new(2);
    world.links[0].wanted = 100e6;
    world.seconds(12, 0);
    assert!(world.links[0].others > 95e6, "others got {}", world.links[0].others);
    assert!(world.links[1].ours > 124e6, "the free link carried {}", world.links[1].ours);
    let [busy, free] = &*world.agreed.paths else { panic!("{:?}", world.agreed.paths) };
    assert_eq!((&*busy.interface, busy.other_interface.as_deref()), ("eth0", Some("eth0")));
    assert!(busy.limit.is_some_and(|limit| limit < 25_000_000) && busy.others_max > 90_000_000, "{busy:?}");
    assert_eq!((free.limit, free.others), (None, 0), "{free:?}");
    assert_eq!(world.agreed.limit, None, "one path has no limit, so all together have none");
}

#[test]
fn a_reserve_is_had_whatever_others_want_and_given_back_when_it_is_not_needed() {
    let mut world = World::new(1);
    world.links[0].wanted = 125e6;
    world.seconds(12, 0);
    assert!(world.links[0].ours < 30e6, "{}", world.links[0].ours);
    world.seconds(3, 60_000_000);
    assert!(world.links[0].ours >= 60e6, "{}", world.links[0].ours);
    world.seconds(3, 0);
    assert!(world.links[0].ours < 40e6, "{}", world.links[0].ours);
}

#[test]
fn a_speed_that_nobody_knows_is_no_limit_and_is_said() {
    let mut world = World::new(1);
    world.links[0].wanted = 100e6;
    (0..5).for_each(|_| world.pass(0, 0));
    assert_eq!((world.agreed.limit, &world.agreed.streams[..]), (None, &[None][..]));
    assert_eq!(world.agreed.unknown, ["eth0"]);
}

#[test]
fn a_host_that_says_nothing_of_itself_leaves_what_this_one_sees() {
    let mut world = World::new(1);
    world.links[0].wanted = 100e6;
    for _ in 0..8 {
        world.pass(GIGABIT, 0);
        let look = RateSample { there: BTreeMap::new(), ..world.look(GIGABIT) };
        world.second += 1;
        world.links[0].carried += (world.links[0].others + world.links[0].ours) as u64;
        world.links[0].stream += (world.links[0].ours / FRAMES) as u64;
        let look =
            RateSample { at: Moment(Duration::from_secs(world.second)), here: world.counters(1, GIGABIT), ..look };
        world.agreed = world.agreement.step(look, 0);
    }
    assert!(world.agreed.limit.is_some(), "{:?}", world.agreed);
    assert_eq!(world.agreed.paths[0].other_interface, None);
}

#[test]
fn an_answer_that_comes_late_is_no_traffic() {
    let mut world = World::new(1);
    world.seconds(4, 0);
    world.pass(GIGABIT, 0);
    let mut look = world.look(GIGABIT);
    world.second += 1;
    world.links[0].carried += GIGABIT;
    world.links[0].stream += (GIGABIT as f64 / FRAMES) as u64;
    look.streams[0].as_mut().expect("connected").sent = world.links[0].stream;
    look.at = Moment(Duration::from_secs(world.second));
    look.here = world.counters(1, GIGABIT);
    // The other host reads its counters a fifth of a second late, at the end of an equally long interval of its own.
    // All its counts include what came meanwhile.
    world.links[0].carried += GIGABIT / 5;
    world.links[0].stream += (GIGABIT as f64 / 5.0 / FRAMES) as u64;
    look.there = world.counters(2, GIGABIT);
    assert_eq!(world.agreement.step(look, 0).limit, None);
}

/// Hosts of a gigabit each that move to one more, where others want something, too.
struct Drain {
    second: u64,
    /// What others want to send to the target.
    wanted: f64,
    /// What they got in the last second.
    others: f64,
    target: Counted,
    moves: Vec<Move>,
}

/// A move from a host of its own.
#[derive(Default)]
struct Move {
    begins: u64,
    agreement: Agreement,
    agreed: Agreed,
    /// What it took in the last second, with all that frames add.
    took: f64,
    source: Counted,
}

/// What a link carries of those who want so much over so many connections: TCP gives each connection the same.
fn divided(capacity: f64, wanted: &[(f64, f64)]) -> Vec<f64> {
    let mut got = vec![None; wanted.len()];
    loop {
        let left = capacity - got.iter().flatten().sum::<f64>();
        let open = |number: &usize| got[*number].is_none();
        let connections: f64 = (0..got.len()).filter(open).map(|number| wanted[number].1).sum();
        let share = left / connections.max(1.0);
        let content = (0..got.len()).filter(open).find(|number| wanted[*number].0 <= share * wanted[*number].1);
        match content {
            Some(number) => got[number] = Some(wanted[number].0),
            None => return got.iter().zip(wanted).map(|(got, (_, count))| got.unwrap_or(share * count)).collect(),
        }
    }
}

impl Drain {
    fn new(begin: &[u64]) -> Self {
        let moves = begin.iter().map(|begins| Move { begins: *begins, ..Move::default() });
        Self { second: 0, wanted: 0.0, others: 0.0, target: Counted::default(), moves: moves.collect() }
    }

    fn pass(&mut self) {
        let wants = |one: &Move| match (one.begins <= self.second, one.agreed.limit) {
            (false, _) => (0.0, 4.0),
            (true, None) => (1e12, 4.0),
            (true, Some(limit)) => (limit as f64 * FRAMES, 4.0),
        };
        let wanted: Vec<(f64, f64)> = self.moves.iter().map(wants).chain([(self.wanted, 8.0)]).collect();
        let got = divided(GIGABIT as f64, &wanted);
        self.others = got[self.moves.len()];
        self.second += 1;
        let mut payload = 0;
        for (one, took) in self.moves.iter_mut().zip(&got) {
            one.took = *took;
            let own = (took / FRAMES) as u64;
            payload += own;
            one.source = Counted {
                all: one.source.all + *took as u64,
                moves: one.source.moves + own,
                sharers: (own > 0).into(),
            };
        }
        let sharers = self.moves.iter().filter(|one| one.took > 0.0).count() as u32;
        let all = self.target.all + got.iter().sum::<f64>() as u64;
        self.target = Counted { all, moves: self.target.moves + payload, sharers };
        let (at, at_ns) = (Moment(Duration::from_secs(self.second)), self.second * 1_000_000_000);
        for one in self.moves.iter_mut().filter(|one| one.begins < self.second) {
            let path = StreamPath { here: address(1, 0), there: address(2, 0) };
            one.agreed = one.agreement.step(
                RateSample {
                    at,
                    here: BTreeMap::from([(path.here, one.source.at(true, ("eth0", at_ns), GIGABIT))]),
                    there: BTreeMap::from([(path.there, self.target.at(false, ("eth0", at_ns), GIGABIT))]),
                    streams: vec![Some(StreamSample { path, sent: one.source.moves, received: 0 })],
                    mirrored: 0,
                },
                0,
            );
        }
    }

    fn seconds(&mut self, count: u64) {
        (0..count).for_each(|_| self.pass());
    }
}

#[test]
fn moves_from_several_hosts_into_one_are_not_each_other_s_others() {
    let mut drain = Drain::new(&[0, 4, 7]);
    for _ in 0..20 {
        drain.pass();
        let limits: Vec<Option<u64>> = drain.moves.iter().map(|one| one.agreed.limit).collect();
        assert_eq!(limits, [None; 3], "in second {}", drain.second);
    }
    let took: f64 = drain.moves.iter().map(|one| one.took).sum();
    assert!(took > GIGABIT as f64 * 0.999, "{took}");
}

#[test]
fn who_comes_late_has_its_part_of_what_a_web_server_leaves_within_seconds() {
    let mut drain = Drain::new(&[0, 20]);
    drain.wanted = GIGABIT as f64 * 0.4;
    drain.seconds(20);
    let alone = drain.moves[0].took;
    assert!(alone > GIGABIT as f64 * 0.5 && drain.others > drain.wanted * 0.98, "{alone} beside {}", drain.others);
    drain.seconds(6);
    let [first, late] = [0, 1].map(|number| drain.moves[number].took);
    assert!(late > first * 0.7, "after six seconds {late} of {first}");
    drain.seconds(4);
    let [first, late] = [0, 1].map(|number| drain.moves[number].took);
    assert!((late / first - 1.0).abs() < 0.1, "{late} and {first}");
    assert!(first + late > alone * 0.9 && drain.others > drain.wanted * 0.95, "beside {}", drain.others);
    drain.wanted = 0.0;
    drain.seconds(6);
    let limits = drain.moves.iter().map(|one| one.agreed.limit).collect::<Vec<_>>();
    assert_eq!(limits, [None; 2], "the web server has gone");
}

#[test]
fn a_host_that_is_drained_into_and_moves_away_itself_has_two_links() {
    let counters = |at: u64, sent, received| {
        let migrations = MigrationCounters { received, sent, incoming: 3, outgoing: 1 };
        LinkCounters {
            interface: "eth0".to_owned(),
            at_ns: at * 1_000_000_000,
            received,
            sent,
            capacity: 7,
            migrations,
        }
    };
    let seen = Seen::between(Some(&counters(1, 0, 0)), Some(&counters(2, 90, 60))).expect("they have grown");
    assert_eq!(seen.usage(true), EndUsage { capacity: 7, carried: 90, ours: 90, sharers: 1 });
    assert_eq!(seen.usage(false), EndUsage { capacity: 7, carried: 60, ours: 60, sharers: 3 });
}

#[test]
fn what_a_guest_writes_to_both_sides_is_let_through() {
    let mut world = World::new(1);
    world.links[0].wanted = 125e6;
    world.seconds(10, 0);
    let open_backend = world.agreed.streams[0].expect("it is held");
    world.mirrored += 50_000_000;
    world.seconds(1, 0);
    let free = world.agreed.streams[0].expect("it is held");
    assert!(free >= 75_000_000 && free > open_backend, "{open_backend} became {free}");
}

#[test]
fn counters_that_begin_anew_are_no_traffic() {
    let counters = |at_ns, all, moves| Counted { all, moves, sharers: 1 }.at(true, ("eth0", at_ns), 1);
    let seen = |before, now| Seen::between(Some(&before), Some(&now));
    assert!(seen(counters(1_000_000_000, 50, 0), counters(2_000_000_000, 10, 0)).is_none());
    assert!(seen(counters(2_000_000_000, 10, 0), counters(1_000_000_000, 50, 0)).is_none());
    assert!(seen(counters(1_000_000_000, 10, 5), counters(2_000_000_000, 50, 0)).is_none(), "a daemon was restarted");
    let seen = seen(counters(1_000_000_000, 10, 6), counters(3_000_000_000, 50, 16)).expect("they have grown");
    assert_eq!((seen.all.sent, seen.moves.sent), (20, 5));
}
