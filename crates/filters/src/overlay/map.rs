//! What is known of every grain of a volume: two bits each, in pages that are the bodies of map sectors. A page whose
//! grains all have one state is that one state.

use std::ops::Range;

/// How many bytes of states a map sector has.
pub(super) const BODY_BYTES: usize = 496;
/// How many grains a map sector speaks of.
pub(super) const SECTOR_GRAINS: u64 = BODY_BYTES as u64 * 4;

/// The states of the grains of one map sector.
pub(super) type Body = [u8; BODY_BYTES];

/// Where a grain's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrainState {
    /// In the base.
    Absent = 0,
    /// Nowhere: it reads as zeroes, whatever the base holds.
    Zero = 1,
    /// In the delta.
    Data = 2,
}

impl GrainState {
    const fn of(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::Absent),
            1 => Some(Self::Zero),
            2 => Some(Self::Data),
            _ => None,
        }
    }
}

enum Page {
    Uniform(GrainState),
    Mixed(Box<Body>),
}

/// The state of every grain.
pub(super) struct StateMap {
    grains: u64,
    pages: Vec<Page>,
    counts: [u64; 3],
}

impl StateMap {
    /// `grains` grains, all absent.
    pub(super) fn new(grains: u64) -> Self {
        let pages = (0..grains.div_ceil(SECTOR_GRAINS)).map(|_| Page::Uniform(GrainState::Absent)).collect();
        Self { grains, pages, counts: [grains, 0, 0] }
    }

    pub(super) const fn len(&self) -> u64 {
        self.grains
    }

    /// How many grains are in `state`.
    pub(super) const fn count(&self, state: GrainState) -> u64 {
        self.counts[state as usize]
    }

    pub(super) fn get(&self, grain: u64) -> GrainState {
        match &self.pages[(grain / SECTOR_GRAINS) as usize] {
            Page::Uniform(state) => *state,
            Page::Mixed(body) => state_in(body, grain % SECTOR_GRAINS),
        }
    }

    /// Sets every grain of `run`.
    pub(super) fn fill(&mut self, run: Range<u64>, state: GrainState) {
        for index in sectors_of(&run) {
            let page = self.range_of(index);
            let part = run.start.max(page.start)..run.end.min(page.end);
            self.count_out(index, part.clone());
            self.counts[state as usize] += part.end - part.start;
            if part == page {
                self.pages[index as usize] = Page::Uniform(state);
                continue;
            }
            let mut body = self.body(index);
            fill(&mut body, part.start - page.start..part.end - page.start, state);
            self.put(index, body);
        }
    }

    /// The states of a map sector.
    pub(super) fn body(&self, index: u64) -> Body {
        match &self.pages[index as usize] {
            Page::Uniform(state) => self.uniform(index, *state),
            Page::Mixed(body) => **body,
        }
    }

    /// The map sector whose grains are all in `state`.
    fn uniform(&self, index: u64, state: GrainState) -> Body {
        let mut body = [0; BODY_BYTES];
        let page = self.range_of(index);
        fill(&mut body, 0..page.end - page.start, state);
        body
    }

    /// Takes the states of a whole map sector over; false if they make no sense.
    pub(super) fn set_body(&mut self, index: u64, body: &Body) -> bool {
        let page = self.range_of(index);
        let length = page.end - page.start;
        let states = (0..SECTOR_GRAINS).map(|grain| (grain, GrainState::of(bits_in(body, grain))));
        let mut counts = [0; 3];
        for (grain, state) in states {
            match state {
                Some(GrainState::Absent) if grain >= length => {}
                Some(state) if grain < length => counts[state as usize] += 1,
                _ => return false,
            }
        }
        self.count_out(index, page);
        self.counts.iter_mut().zip(counts).for_each(|(count, more)| *count += more);
        self.put(index, *body);
        true
    }

    /// The run of grains in one state that begins at `from`, not past `end`.
    pub(super) fn run_at(&self, from: u64, end: u64) -> (Range<u64>, GrainState) {
        let state = self.get(from);
        let mut next = from + 1;
        while next < end {
            let index = next / SECTOR_GRAINS;
            match &self.pages[index as usize] {
                Page::Uniform(other) if *other == state => next = self.range_of(index).end.min(end),
                Page::Mixed(body) if state_in(body, next % SECTOR_GRAINS) == state => next += 1,
                _ => break,
            }
        }
        (from..next, state)
    }

    /// The first grain at or after `from` that the overlay holds.
    pub(super) fn next_stored(&self, from: u64) -> Option<u64> {
        let mut next = from;
        while next < self.grains {
            match self.run_at(next, self.grains) {
                (run, GrainState::Absent) => next = run.end,
                _ => return Some(next),
            }
        }
        None
    }

    /// Whether every grain of `run` is in `state`.
    pub(super) fn is_all(&self, run: &Range<u64>, state: GrainState) -> bool {
        let (found, first) = self.run_at(run.start, run.end);
        first == state && found.end == run.end
    }

    fn range_of(&self, index: u64) -> Range<u64> {
        index * SECTOR_GRAINS..((index + 1) * SECTOR_GRAINS).min(self.grains)
    }

    fn put(&mut self, index: u64, body: Body) {
        let first = state_in(&body, 0);
        let is_uniform = body == self.uniform(index, first);
        let page = &mut self.pages[index as usize];
        match page {
            _ if is_uniform => *page = Page::Uniform(first),
            Page::Mixed(place) => **place = body,
            Page::Uniform(_) => *page = Page::Mixed(Box::new(body)),
        }
    }

    fn count_out(&mut self, index: u64, part: Range<u64>) {
        match &self.pages[index as usize] {
            Page::Uniform(state) => self.counts[*state as usize] -= part.end - part.start,
            Page::Mixed(body) => {
                for grain in part {
                    self.counts[state_in(body, grain % SECTOR_GRAINS) as usize] -= 1;
                }
            }
        }
    }
}

/// The numbers of the map sectors that speak of `run`.
pub(super) const fn sectors_of(run: &Range<u64>) -> Range<u64> {
    run.start / SECTOR_GRAINS..run.end.div_ceil(SECTOR_GRAINS)
}

const fn bits_in(body: &Body, grain: u64) -> u8 {
    (body[(grain / 4) as usize] >> (grain % 4 * 2)) & 3
}

/// The state of the grain with this number in its sector.
pub(super) fn state_in(body: &Body, grain: u64) -> GrainState {
    GrainState::of(bits_in(body, grain)).expect("bodies are checked when they are read")
}

/// Sets the grains of `run`, counted from the sector's first.
pub(super) fn fill(body: &mut Body, run: Range<u64>, state: GrainState) {
    let bits = state as u8;
    let mut next = run.start;
    while next < run.end {
        let byte = &mut body[(next / 4) as usize];
        if next.is_multiple_of(4) && run.end - next >= 4 {
            *byte = bits * 0b0101_0101;
            next += 4;
            continue;
        }
        let shift = next % 4 * 2;
        *byte = *byte & !(3 << shift) | bits << shift;
        next += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::testing::Random;

    #[test]
    fn the_map_agrees_with_a_plain_list_of_states() {
        const STATES: [GrainState; 3] = [GrainState::Absent, GrainState::Zero, GrainState::Data];
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let grains = 1 + random.below(3 * SECTOR_GRAINS);
            let mut map = StateMap::new(grains);
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
            let mut copy = StateMap::new(grains);
            for index in 0..grains.div_ceil(SECTOR_GRAINS) {
                assert!(copy.set_body(index, &map.body(index)));
            }
            for (grain, state) in list.iter().enumerate() {
                assert_eq!((map.get(grain as u64), copy.get(grain as u64)), (*state, *state), "seed {seed}");
            }
            for state in STATES {
                let count = list.iter().filter(|other| **other == state).count() as u64;
                assert_eq!((map.count(state), copy.count(state)), (count, count), "seed {seed}");
            }
        }
    }

    #[test]
    fn states_that_nobody_wrote_are_refused() {
        let mut map = StateMap::new(5);
        assert!(!map.set_body(0, &[0xff; BODY_BYTES]));
        let mut beyond = [0; BODY_BYTES];
        fill(&mut beyond, 5..6, GrainState::Data);
        assert!(!map.set_body(0, &beyond), "a grain behind the end was accepted");
    }
}
