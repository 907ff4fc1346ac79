//! Tests of the map of chunk states: it is a vector, and fast.

use super::*;
use proptest::prelude::*;
use std::cell::Cell;

thread_local! {
    /// How many words searches of this thread have looked at.
    pub(super) static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number(u8);

impl PackedState for Number {
    fn to_bits(self) -> u8 {
        self.0
    }
    fn from_bits(bits: u8) -> Self {
        Self(bits)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Set(u64, u8),
    SetRange(u64, u64, u8),
    Replace(u8, u8),
}

fn steps() -> impl Strategy<Value = (u64, Vec<Step>)> {
    let chunks = prop_oneof![1_u64..200, 4000_u64..4200, 8100_u64..13_000];
    chunks.prop_flat_map(|chunks| {
        let step = prop_oneof![
            3 => (0..chunks, 0_u8..4).prop_map(|(index, state)| Step::Set(index, state)),
            3 => (0..=chunks, 0..=chunks, 0_u8..4).prop_map(|(a, b, state)| Step::SetRange(a.min(b), a.max(b), state)),
            1 => (0_u8..4, 0_u8..4).prop_map(|(from, to)| Step::Replace(from, to)),
        ];
        (Just(chunks), prop::collection::vec(step, 0..20))
    })
}

proptest! {
    #[test]
    fn the_map_is_a_vector_that_is_searched_fast((chunks, steps) in steps(), probes in prop::collection::vec(any::<u64>(), 5)) {
        let mut map = ChunkMap::new(chunks, Number(1));
        let mut model = vec![1_u8; chunks as usize];
        for step in steps {
            match step {
                Step::Set(index, state) => {
                    let before = map.set(index, Number(state));
                    prop_assert_eq!(before.0, model[index as usize]);
                    model[index as usize] = state;
                }
                Step::SetRange(start, end, state) => {
                    map.set_range(start..end, Number(state));
                    model[start as usize..end as usize].fill(state);
                }
                Step::Replace(from, to) => {
                    map.replace(Number(from), Number(to));
                    model.iter_mut().filter(|state| **state == from).for_each(|state| *state = to);
                }
            }
            for state in 0..4 {
                let count = model.iter().filter(|other| **other == state).count() as u64;
                prop_assert_eq!(map.count(Number(state)), count);
                for probe in &probes {
                    let from = probe % (chunks + 1);
                    let next = (from..chunks).find(|index| model[*index as usize] == state);
                    prop_assert_eq!(map.next(Number(state), from), next);
                    let previous = (0..=from.min(chunks - 1)).rev().find(|index| model[*index as usize] == state);
                    prop_assert_eq!(map.previous(Number(state), from), previous);
                    let both = previous.into_iter().chain(next);
                    let nearest = both.map(|index| index.abs_diff(from)).min();
                    let found = map.nearest(Number(state), from);
                    prop_assert_eq!(found.map(|index| index.abs_diff(from)), nearest);
                    prop_assert!(found.is_none_or(|index| model[index as usize] == state));
                    let run = map.next_run(Number(state), from, 5000);
                    let expected = next.map(|start| {
                        let end = (start..chunks).find(|index| model[*index as usize] != state).unwrap_or(chunks);
                        start..end.min(start + 5000)
                    });
                    prop_assert_eq!(run, expected);
                    if let Some(first) = model.get(from as usize).copied() {
                        let end = (from..chunks).find(|index| model[*index as usize] != first).unwrap_or(chunks);
                        prop_assert_eq!(map.run_at(from, from + 5000), (from..end.min(from + 5000), Number(first)));
                    }
                }
            }
        }
        for (index, state) in model.iter().enumerate() {
            prop_assert_eq!(map.get(index as u64).0, *state);
        }
    }

    #[test]
    fn a_summary_is_a_set(count in 1_u64..300_000, full in any::<bool>(), changes in prop::collection::vec((any::<u64>(), any::<bool>()), 0..50)) {
        let mut summary = Summary::new(count, full);
        let mut model: std::collections::BTreeSet<u64> = if full { (0..count).collect() } else { Default::default() };
        for (number, value) in changes {
            let number = number % count;
            summary.set(number, value);
            if value { model.insert(number); } else { model.remove(&number); }
            for from in [0, number.saturating_sub(70), number, number + 1, count - 1, count] {
                prop_assert_eq!(summary.next(from), model.range(from..).next().copied());
                let from = from.min(count - 1);
                prop_assert_eq!(summary.previous(from), model.range(..=from).next_back().copied());
            }
        }
    }
}

#[test]
fn a_volume_of_2_to_the_30_chunks_is_walked_and_stays_small() {
    let chunks = 1 << 30;
    let mut map = ChunkMap::new(chunks, Number(0));
    let marks: Vec<u64> = (0..1000).map(|step| step * 1_073_000 + 77).collect();
    marks.iter().for_each(|mark| _ = map.set(*mark, Number(3)));
    let mut found = Vec::new();
    let mut next = 0;
    while let Some(index) = map.next(Number(3), next) {
        found.push(index);
        next = index + 1;
    }
    assert_eq!(found, marks);
    assert!(map.memory_bytes() < 8 << 20, "{} bytes", map.memory_bytes());
    map.set_range(0..chunks, Number(1));
    assert_eq!((map.count(Number(1)), map.next(Number(3), 0)), (chunks, None));
}

#[test]
fn the_nearest_of_2_to_the_30_chunks_is_found_in_a_few_hundred_words() {
    let chunks: u64 = 1 << 30;
    let mut map = ChunkMap::new(chunks, Number(0));
    // One chunk in each third page, and the ends.
    let marks: Vec<u64> =
        (0..chunks / PAGE_CHUNKS / 3).map(|step| step * 3 * PAGE_CHUNKS + step % PAGE_CHUNKS).collect();
    marks.iter().for_each(|mark| _ = map.set(*mark, Number(3)));
    let sparse =
        [0, 1, chunks / 2 + 77, chunks - 1].into_iter().chain(marks.iter().step_by(501).map(|mark| mark + 5000));
    for at in sparse {
        let next = marks.partition_point(|mark| *mark < at);
        let beside = marks[next.saturating_sub(1)..(next + 1).min(marks.len())].iter();
        let expected = beside.map(|mark| mark.abs_diff(at)).min();
        LOOKED_AT.set(0);
        let found = map.nearest(Number(3), at);
        assert_eq!(found.map(|index| index.abs_diff(at)), expected, "nearest to {at}");
        // Both ways: at most two pages of 128 words, and two words on each of three levels.
        let looked_at = LOOKED_AT.get();
        assert!(looked_at <= 2 * (2 * 128 + 2 * 3), "{looked_at} words were looked at near {at}");
    }
    map.replace(Number(3), Number(0));
    map.set(7, Number(3));
    LOOKED_AT.set(0);
    assert_eq!(map.nearest(Number(3), chunks - 1), Some(7));
    assert!(LOOKED_AT.get() <= 140, "{} words for one chunk at the other end", LOOKED_AT.get());
}
