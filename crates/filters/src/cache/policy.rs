//! Which block goes when a place is needed: plain structures, without locks and without time.

mod lists;
mod order;
mod s3_fifo;

use lists::{Links, List};
pub(super) use order::Order;
use s3_fifo::S3Fifo;

use super::options::CachePolicy;

/// So many places are looked at for one that may go.
const LOOKS_MAX: usize = 64;

/// The order in which blocks go. It knows the places that hold a block, and nothing of what they hold.
pub(super) trait Policy: Send {
    /// How many places there are.
    fn places(&self) -> usize;

    /// There are `places` places from now on. Those that are taken away hold no block.
    fn resize(&mut self, places: usize);

    /// `place` holds `block` now.
    fn insert(&mut self, place: u32, block: u64);

    /// The same of a block that goes before those that are there: blocks come from another cache in the order of their worth.
    fn insert_last(&mut self, place: u32, block: u64) {
        self.insert(place, block);
    }

    /// The guest has asked for the block in `place`.
    fn touch(&mut self, place: u32);

    /// `place` holds `block` no more: it had to go for another, or it was dropped.
    fn remove(&mut self, place: u32, block: u64, was_evicted: bool);

    /// The first place in its order whose block may go. Of those that may not, each is put last, so that the next search finds others.
    fn choose(&mut self, random: u64, may_go: &mut dyn FnMut(u32) -> bool) -> Option<u32>;

    /// The places that hold a block, as they stand.
    fn order(&self) -> Order;

    /// At most `max` places that hold a block, those first whose blocks would go last.
    #[cfg(test)]
    fn hottest(&self, max: usize) -> Vec<u32> {
        self.order().hottest(max)
    }

    /// How much memory it takes, in bytes.
    fn memory_bytes(&self) -> usize;
}

/// The policy of that name over `places` places.
pub(super) fn policy_of(policy: CachePolicy, places: usize) -> Box<dyn Policy> {
    let mut made: Box<dyn Policy> = match policy {
        CachePolicy::Lru => Box::new(Queue { moves_on_touch: true, ..Queue::default() }),
        CachePolicy::Fifo => Box::new(Queue::default()),
        CachePolicy::Random => Box::new(Random::default()),
        CachePolicy::S3Fifo => Box::new(S3Fifo::default()),
    };
    made.resize(places);
    made
}

/// Changes the length of a table to exactly `length`.
fn set_length<T: Clone>(table: &mut Vec<T>, length: usize, empty: T) {
    table.reserve_exact(length.saturating_sub(table.len()));
    table.resize(length, empty);
    table.shrink_to_fit();
}

/// One queue: first in, first out, or by the last use.
#[derive(Default)]
struct Queue {
    links: Links,
    list: List,
    moves_on_touch: bool,
}

impl Policy for Queue {
    fn places(&self) -> usize {
        self.links.len()
    }

    fn resize(&mut self, places: usize) {
        self.links.resize(places);
    }

    fn insert(&mut self, place: u32, _block: u64) {
        self.list.push_front(&mut self.links, place);
    }

    fn insert_last(&mut self, place: u32, _block: u64) {
        self.list.push_back(&mut self.links, place);
    }

    fn touch(&mut self, place: u32) {
        if self.moves_on_touch {
            self.list.move_to_front(&mut self.links, place);
        }
    }

    fn remove(&mut self, place: u32, _block: u64, _was_evicted: bool) {
        self.list.remove(&mut self.links, place);
    }

    fn choose(&mut self, _random: u64, may_go: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        for _ in 0..LOOKS_MAX.min(self.list.len()) {
            let place = self.list.last()?;
            if may_go(place) {
                return Some(place);
            }
            self.list.move_to_front(&mut self.links, place);
        }
        None
    }

    fn order(&self) -> Order {
        Order::Lists { firsts: vec![self.list.first()], behind: self.links.behind(), uses: Vec::new() }
    }

    fn memory_bytes(&self) -> usize {
        self.links.memory_bytes()
    }
}

/// Any block.
#[derive(Default)]
struct Random {
    holds: Vec<u64>,
    places: usize,
}

impl Random {
    fn set(&mut self, place: u32, holds: bool) {
        let (word, bit) = (place as usize / 64, place % 64);
        self.holds[word] = self.holds[word] & !(1 << bit) | u64::from(holds) << bit;
    }

    fn holds(&self, place: u32) -> bool {
        self.holds[place as usize / 64] >> (place % 64) & 1 == 1
    }
}

impl Policy for Random {
    fn places(&self) -> usize {
        self.places
    }

    fn resize(&mut self, places: usize) {
        set_length(&mut self.holds, places.div_ceil(64), 0);
        self.places = places;
    }

    fn insert(&mut self, place: u32, _block: u64) {
        self.set(place, true);
    }

    fn touch(&mut self, _place: u32) {}

    fn remove(&mut self, place: u32, _block: u64, _was_evicted: bool) {
        self.set(place, false);
    }

    fn choose(&mut self, random: u64, may_go: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        // One random number and steps from there that come by every place: an odd stride over a power of two.
        let wrap = self.places.next_power_of_two() as u64;
        let stride = (random >> 32) | 1;
        (0..4 * LOOKS_MAX as u64)
            .map(|step| random.wrapping_add(step.wrapping_mul(stride)) % wrap)
            .filter(|place| *place < self.places as u64)
            .map(|place| place as u32)
            .find(|place| self.holds(*place) && may_go(*place))
    }

    fn order(&self) -> Order {
        Order::Bits(self.holds.clone())
    }

    fn memory_bytes(&self) -> usize {
        self.holds.capacity() * size_of::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A policy over four places, three of which hold the blocks 10, 11 and 12, in this order.
    fn with_three(policy: CachePolicy) -> Box<dyn Policy> {
        let mut policy = policy_of(policy, 4);
        (0..3).for_each(|place| policy.insert(place, u64::from(place) + 10));
        policy
    }

    fn choose(policy: &mut dyn Policy) -> Option<u32> {
        policy.choose(12345, &mut |_| true)
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut policy = with_three(CachePolicy::Lru);
        policy.touch(0);
        assert_eq!((choose(&mut *policy), policy.hottest(9)), (Some(1), vec![0, 2, 1]));
        policy.remove(1, 11, true);
        assert_eq!((choose(&mut *policy), policy.hottest(1)), (Some(2), vec![0]));
    }

    #[test]
    fn the_first_in_goes_first_whatever_is_used() {
        let mut policy = with_three(CachePolicy::Fifo);
        policy.touch(0);
        assert_eq!((choose(&mut *policy), policy.hottest(2)), (Some(0), vec![2, 1]));
    }

    #[test]
    fn what_may_not_go_is_passed_over_and_left_out_of_the_next_search() {
        for name in [CachePolicy::Lru, CachePolicy::Fifo, CachePolicy::S3Fifo] {
            let mut policy = with_three(name);
            let mut asked = Vec::new();
            let found = policy.choose(0, &mut |place| {
                asked.push(place);
                place == 2
            });
            assert_eq!((found, asked), (Some(2), vec![0, 1, 2]), "{name}");
            assert_eq!(policy.choose(0, &mut |_| false), None, "{name}");
            assert_eq!(policy.hottest(9).len(), 3, "{name}");
        }
    }

    #[test]
    fn any_place_that_holds_a_block_is_chosen_sooner_or_later() {
        let mut policy = with_three(CachePolicy::Random);
        let mut seen = [0; 4];
        let mut random = block::testing::Random::new(1);
        (0..300)
            .for_each(|_| seen[policy.choose(random.number(), &mut |_| true).expect("three hold one") as usize] += 1);
        assert!(seen[..3].iter().all(|count| *count > 50) && seen[3] == 0, "{seen:?}");
        (0..3).for_each(|place| policy.remove(place, 0, false));
        assert_eq!(choose(&mut *policy), None);
    }

    #[test]
    fn what_comes_in_the_order_of_its_worth_keeps_that_order() {
        for name in [CachePolicy::Lru, CachePolicy::Fifo, CachePolicy::S3Fifo] {
            let mut policy = policy_of(name, 5);
            [3, 1, 4].into_iter().for_each(|place| policy.insert_last(place, u64::from(place)));
            assert_eq!((policy.hottest(9), choose(&mut *policy)), (vec![3, 1, 4], Some(4)), "{name}");
        }
    }

    #[test]
    fn policies_over_more_and_fewer_places_keep_what_they_hold() {
        for name in [CachePolicy::Lru, CachePolicy::Fifo, CachePolicy::Random, CachePolicy::S3Fifo] {
            let mut policy = with_three(name);
            policy.resize(3);
            policy.resize(9);
            policy.insert(8, 80);
            let mut held = policy.hottest(9);
            held.sort_unstable();
            assert_eq!(held, [0, 1, 2, 8], "{name}");
            (0..3).for_each(|place| policy.remove(place, 0, false));
            assert_eq!(choose(&mut *policy), Some(8), "{name}");
        }
    }
}
