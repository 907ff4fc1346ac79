//! S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main one for what was asked for again, and a memory of what the
//! small one let go.
//!
//! ```text
//!   new ──▶ small, a tenth ──▶ asked for more than once ──▶ main ──▶ asked for ──▶ main again
//!               │                                            ▲          ╰─▶ not ──▶ gone
//!               ╰──▶ gone, its number in the ghost ──▶ new ──╯
//! ```
//!
//! The ghost is a table of fingerprints with the moment of each, counted in blocks that went. It forgets what is as old as the main queue
//! is long, and what another block overwrites.

use super::lists::{Links, List};
use super::order::Order;
use super::{LOOKS_MAX, Policy, set_length};

/// How often a block was asked for is counted up to this.
const USES_MAX: u8 = 3;
/// More uses than this bring a block from the small queue into the main one.
const USES_TO_STAY: u8 = 1;
const IS_MAIN: u8 = 4;
/// A ghost's fingerprint has so many bits, and the moment the rest of 32.
const FINGERPRINT_BITS: u32 = 12;

#[derive(Default)]
pub(super) struct S3Fifo {
    links: Links,
    small: List,
    main: List,
    /// How often a place was asked for, and whether it is in the main queue.
    states: Vec<u8>,
    ghost: Ghost,
}

impl S3Fifo {
    /// How long the small queue may be.
    fn small_max(&self) -> usize {
        (self.states.len() / 10).max(1)
    }

    fn is_main(&self, place: u32) -> bool {
        self.states[place as usize] & IS_MAIN != 0
    }

    fn uses(&self, place: u32) -> u8 {
        self.states[place as usize] & USES_MAX
    }

    /// Puts the last of the small queue into the main one.
    fn promote(&mut self, place: u32) {
        self.small.remove(&mut self.links, place);
        self.main.push_front(&mut self.links, place);
        self.states[place as usize] = IS_MAIN;
    }
}

impl Policy for S3Fifo {
    fn places(&self) -> usize {
        self.states.len()
    }

    fn resize(&mut self, places: usize) {
        self.links.resize(places);
        set_length(&mut self.states, places, 0);
        self.ghost.resize(places);
    }

    fn insert(&mut self, place: u32, block: u64) {
        if self.ghost.takes_out(block) {
            self.main.push_front(&mut self.links, place);
            self.states[place as usize] = IS_MAIN;
        } else {
            self.small.push_front(&mut self.links, place);
            self.states[place as usize] = 0;
        }
    }

    fn insert_last(&mut self, place: u32, _block: u64) {
        // It was worth its place at the other host: it is not new.
        self.main.push_back(&mut self.links, place);
        self.states[place as usize] = IS_MAIN;
    }

    fn touch(&mut self, place: u32) {
        if self.uses(place) < USES_MAX {
            self.states[place as usize] += 1;
        }
    }

    fn remove(&mut self, place: u32, block: u64, was_evicted: bool) {
        if self.is_main(place) {
            self.main.remove(&mut self.links, place);
        } else {
            self.small.remove(&mut self.links, place);
            if was_evicted {
                self.ghost.put(block);
            }
        }
    }

    fn choose(&mut self, _random: u64, may_go: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        // Each place is moved on at most as often as it was used.
        let looks = LOOKS_MAX.min(self.small.len() + self.main.len()) * (1 + USES_MAX as usize);
        let mut refused = 0;
        for _ in 0..looks {
            let is_small_due = self.small.len() > self.small_max() || self.main.len() <= refused;
            if let Some(place) = self.small.last().filter(|_| is_small_due) {
                if self.uses(place) <= USES_TO_STAY {
                    if may_go(place) {
                        return Some(place);
                    }
                    refused += 1;
                }
                self.promote(place);
                continue;
            }
            let Some(place) = self.main.last() else { break };
            if self.uses(place) > 0 {
                self.states[place as usize] -= 1;
            } else if may_go(place) {
                return Some(place);
            } else {
                refused += 1;
            }
            self.main.move_to_front(&mut self.links, place);
        }
        None
    }

    fn order(&self) -> Order {
        let uses = self.states.iter().map(|state| state & USES_MAX).collect();
        Order::Lists { firsts: vec![self.main.first(), self.small.first()], behind: self.links.behind(), uses }
    }

    fn memory_bytes(&self) -> usize {
        self.links.memory_bytes() + self.states.capacity() + self.ghost.slots.capacity() * size_of::<u32>()
    }
}

/// Blocks that the small queue let go lately.
#[derive(Default)]
struct Ghost {
    /// A fingerprint and a moment each; 0 for none.
    slots: Vec<u32>,
    /// How many were put.
    clock: u64,
}

impl Ghost {
    fn resize(&mut self, places: usize) {
        // What it knows stands elsewhere in a table of another length, so it is forgotten in effect.
        set_length(&mut self.slots, places, 0);
    }

    /// How far the clock goes on for one tick of a slot's moment, so that twice the table's length fits.
    fn tick(&self) -> u64 {
        ((2 * self.slots.len() as u64) >> (32 - FINGERPRINT_BITS)) + 1
    }

    /// Where a block stands and as what.
    fn slot_of(&self, block: u64) -> (usize, u32) {
        let hash = (block ^ block >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let slot = ((u128::from(hash) * self.slots.len() as u128) >> 64) as usize;
        let fingerprint = (hash.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> (64 - FINGERPRINT_BITS)) as u32;
        (slot, fingerprint.max(1))
    }

    fn moment(&self) -> u32 {
        (self.clock / self.tick()) as u32 & (u32::MAX >> FINGERPRINT_BITS)
    }

    fn put(&mut self, block: u64) {
        let (slot, fingerprint) = self.slot_of(block);
        self.slots[slot] = fingerprint << (32 - FINGERPRINT_BITS) | self.moment();
        self.clock += 1;
    }

    /// Whether it is there; it is not afterwards.
    fn takes_out(&mut self, block: u64) -> bool {
        if self.clock == 0 {
            // Of a cache that is being opened. To look would touch all of the table's memory.
            return false;
        }
        let (slot, fingerprint) = self.slot_of(block);
        let found = self.slots[slot];
        if found >> (32 - FINGERPRINT_BITS) != fingerprint {
            return false;
        }
        self.slots[slot] = 0;
        let moments = u32::MAX >> FINGERPRINT_BITS;
        let age = u64::from(self.moment().wrapping_sub(found & moments) & moments) * self.tick();
        age <= self.slots.len() as u64 * 9 / 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(places: u32) -> S3Fifo {
        let mut policy = S3Fifo::default();
        policy.resize(places as usize);
        (0..places).for_each(|place| policy.insert(place, u64::from(place)));
        policy
    }

    #[test]
    fn what_is_read_once_goes_before_what_is_read_again() {
        let mut policy = filled(20);
        for place in [0, 1] {
            policy.touch(place);
            policy.touch(place);
        }
        let mut gone = Vec::new();
        while gone.len() < 16 {
            let place = policy.choose(0, &mut |_| true).expect("some are left");
            policy.remove(place, place.into(), true);
            gone.push(place);
        }
        assert_eq!(gone, (2..18).collect::<Vec<u32>>());
        assert_eq!(policy.hottest(9), [1, 0, 19, 18]);
    }

    #[test]
    fn what_comes_back_soon_stays_and_what_comes_back_late_does_not() {
        let mut policy = filled(20);
        let place = policy.choose(0, &mut |_| true).expect("all may go");
        policy.remove(place, place.into(), true);
        policy.insert(place, place.into());
        assert!(policy.is_main(place), "it was let go a moment ago");
        policy.remove(place, place.into(), true);
        policy.insert(place, place.into());
        assert!(!policy.is_main(place), "it was let go by the main queue");

        let mut ghost = Ghost::default();
        ghost.resize(100);
        ghost.put(7);
        (1000..1200).for_each(|block| ghost.put(block));
        assert!(!ghost.takes_out(7));
        let found = (1100..1200).filter(|block| ghost.takes_out(*block)).count();
        // A table without chains loses some of them.
        assert!((40..100).contains(&found), "{found}");
    }

    #[test]
    fn a_scan_leaves_what_is_hot() {
        let mut policy = S3Fifo::default();
        policy.resize(100);
        let mut block_of = vec![u64::MAX; 100];
        let mut free: Vec<u32> = (0..100).collect();
        let mut ask = |policy: &mut S3Fifo, block: u64| {
            if let Some(place) = block_of.iter().position(|found| *found == block) {
                policy.touch(place as u32);
                return true;
            }
            let place = free.pop().unwrap_or_else(|| {
                let place = policy.choose(0, &mut |_| true).expect("all may go");
                policy.remove(place, block_of[place as usize], true);
                place
            });
            policy.insert(place, block);
            block_of[place as usize] = block;
            false
        };
        for _ in 0..5 {
            for block in 0..50 {
                ask(&mut policy, block);
            }
        }
        for block in 1000..3000 {
            ask(&mut policy, block);
        }
        let hits = (0..50).filter(|block| ask(&mut policy, *block)).count();
        assert!(hits >= 45, "{hits} of 50");
    }
}
