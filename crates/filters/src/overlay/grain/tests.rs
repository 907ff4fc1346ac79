//! The map of an overlay's states against a plain list.

use block::testing::Random;

use super::*;
use crate::store::{BODY_BYTES, StateMap};

const SECTOR_GRAINS: u64 = GrainState::SECTOR_GRAINS;

#[test]
fn the_map_agrees_with_a_plain_list_of_states() {
    const STATES: [GrainState; 3] = [GrainState::Absent, GrainState::Zero, GrainState::Data];
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let grains = 1 + random.below(3 * SECTOR_GRAINS);
        let mut map = StateMap::<GrainState>::new(grains);
        let mut list = vec![GrainState::Absent; grains as usize];
        for _ in 0..200 {
            let start = random.below(grains);
            let length = if random.one_in(3) { grains } else { random.below(40) + 1 };
            let run = start..(start + length).min(grains);
            let state = STATES[random.below(3) as usize];
            map.fill(run.clone(), state);
            list[run.start as usize..run.end as usize].fill(state);
            let from = random.below(grains);
            let same = list[from as usize..].iter().take_while(|other| **other == list[from as usize]).count();
            assert_eq!(map.run_at(from, grains), (from..from + same as u64, list[from as usize]), "seed {seed}");
            let held = list[from as usize..].iter().position(|state| *state != GrainState::Absent);
            assert_eq!(map.next_stored(from), held.map(|at| from + at as u64), "seed {seed}");
        }
        let mut copy = StateMap::<GrainState>::new(grains);
        for index in 0..grains.div_ceil(SECTOR_GRAINS) {
            assert!(copy.set_body(index, &map.body(index)));
        }
        for (grain, state) in list.iter().enumerate() {
            assert_eq!((map.get(grain as u64), copy.get(grain as u64)), (*state, *state), "seed {seed}");
        }
        assert_eq!(map.memory_bytes(), copy.memory_bytes(), "seed {seed}: a mixed page is not counted");
        for state in STATES {
            let count = list.iter().filter(|other| **other == state).count() as u64;
            assert_eq!((map.count(state), copy.count(state)), (count, count), "seed {seed}");
        }
    }
}

#[test]
fn states_that_nobody_wrote_are_refused() {
    let mut map = StateMap::<GrainState>::new(5);
    assert!(!map.set_body(0, &[0xff; BODY_BYTES]));
    let mut beyond = [0; BODY_BYTES];
    GrainState::Data.fill(&mut beyond, 5..6);
    assert!(!map.set_body(0, &beyond), "a grain behind the end was accepted");
}
