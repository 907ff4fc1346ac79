//! Two hosts whose counters are modelled, second by second.

use std::time::Duration;

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

impl World {
    fn new(links: usize) -> Self {
        Self::of(1, links, &Arc::default())
    }

    fn of(job: u64, links: usize, shares: &Arc<Shares>) -> Self {
        let agreement = Agreement::new("b".to_owned(), job, Arc::clone(shares));
        let links = (0..links).map(|_| Link::default()).collect();
        Self { second: 0, links, agreement, mirrored: 0, agreed: Agreed::default() }
    }

    fn counters(&self, side: u8, capacity: u64) -> BTreeMap<IpAddr, LinkCounters> {
        let counters = |(number, link): (usize, &Link)| {
            let (sent, received) = if side == 1 { (link.carried, 0) } else { (0, link.carried) };
            let interface = format!("eth{number}");
            let at_ns = self.second * 1_000_000_000 + u64::from(side) * 77;
            (address(side, number), LinkCounters { interface, at_ns, received, sent, capacity })
        };
        self.links.iter().enumerate().map(counters).collect()
    }

    fn look(&self, capacity: u64) -> Look {
        let stream = |(number, link): (usize, &Link)| {
            let path = StreamPath { here: address(1, number), there: address(2, number) };
            Some(StreamLook { path, sent: link.stream, received: 0 })
        };
        Look {
            at: Moment(Duration::from_secs(self.second)),
            here: self.counters(1, capacity),
            there: self.counters(2, capacity),
            asked: Duration::ZERO,
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
        let look = Look { there: BTreeMap::new(), ..world.look(GIGABIT) };
        world.second += 1;
        world.links[0].carried += (world.links[0].others + world.links[0].ours) as u64;
        world.links[0].stream += (world.links[0].ours / FRAMES) as u64;
        let look = Look { at: Moment(Duration::from_secs(world.second)), here: world.counters(1, GIGABIT), ..look };
        world.agreed = world.agreement.step(look, 0);
    }
    assert!(world.agreed.limit.is_some(), "{:?}", world.agreed);
    assert_eq!(world.agreed.paths[0].other_interface, None);
}

#[test]
fn two_moves_over_one_link_are_not_each_other_s_others() {
    let shares = Arc::<Shares>::default();
    let (mut one, mut other) = (World::of(1, 1, &shares), World::of(2, 1, &shares));
    let (mut carried, mut streams) = (0_u64, [0_u64; 2]);
    for second in 1..8 {
        // Each takes half of the link, and nobody else is there.
        carried += GIGABIT * 98 / 100;
        for (world, stream) in [&mut one, &mut other].into_iter().zip(&mut streams) {
            *stream += (GIGABIT as f64 * 0.49 / FRAMES) as u64;
            world.second = second;
            world.links[0].carried = carried;
            world.links[0].stream = *stream;
            world.agreed = world.agreement.step(world.look(GIGABIT), 0);
        }
    }
    assert_eq!((one.agreed.limit, other.agreed.limit), (None, None), "{:?}", one.agreed.paths);
    // One ends: the other one is alone.
    drop(one);
    shares.leave(1);
    assert_eq!(shares.of(&End::Here("eth0".to_owned())).1, 1);
}

#[test]
fn what_the_other_host_has_counted_while_it_was_asked_is_nobody_s() {
    let limit_after_an_answer_of = |said: Duration| {
        let mut world = World::new(1);
        world.seconds(4, 0);
        world.pass(GIGABIT, 0);
        let mut look = world.look(GIGABIT);
        world.second += 1;
        world.links[0].carried += GIGABIT;
        world.links[0].stream += (GIGABIT as f64 / FRAMES) as u64;
        // It looks a fifth of a second late, at the end of as long a second of its own: what came meanwhile is there.
        let late = LinkCounters {
            received: world.links[0].carried + GIGABIT / 5,
            ..world.counters(2, GIGABIT)[&address(2, 0)].clone()
        };
        let stream = look.streams[0].as_mut().expect("connected");
        stream.sent = world.links[0].stream;
        look.at = Moment(Duration::from_secs(world.second));
        (look.here, look.asked) = (world.counters(1, GIGABIT), said);
        look.there = BTreeMap::from([(address(2, 0), late)]);
        world.agreement.step(look, 0).limit
    };
    assert_eq!(limit_after_an_answer_of(Duration::from_millis(250)), None);
    assert!(limit_after_an_answer_of(Duration::ZERO).is_some(), "the test sees nothing");
}

#[test]
fn what_a_guest_writes_to_both_sides_is_let_through() {
    let mut world = World::new(1);
    world.links[0].wanted = 125e6;
    world.seconds(10, 0);
    let held = world.agreed.streams[0].expect("it is held");
    world.mirrored += 50_000_000;
    world.seconds(1, 0);
    let free = world.agreed.streams[0].expect("it is held");
    assert!(free >= 75_000_000 && free > held, "{held} became {free}");
}

#[test]
fn counters_that_begin_anew_are_no_traffic() {
    let counters = |at_ns, sent| LinkCounters { interface: "eth0".to_owned(), at_ns, received: 0, sent, capacity: 1 };
    assert!(Seen::between(Some(&counters(1_000_000_000, 50)), Some(&counters(2_000_000_000, 10))).is_none());
    assert!(Seen::between(Some(&counters(2_000_000_000, 10)), Some(&counters(1_000_000_000, 50))).is_none());
    let seen = Seen::between(Some(&counters(1_000_000_000, 10)), Some(&counters(3_000_000_000, 50)));
    assert_eq!(seen.expect("they have grown").sent, 20);
}
