//! What is known of every grain of a volume, in pages that are the bodies of map sectors. A page whose grains all have one
//! state is that one state.

use std::ops::Range;

use super::entry::{BODY_BYTES, Body, Entry};

enum Page<E> {
    Uniform(E),
    Mixed(Box<Body>),
}

/// The state of every grain.
pub(crate) struct StateMap<E> {
    grains: u64,
    pages: Vec<Page<E>>,
    /// Of each class.
    counts: Vec<u64>,
    /// How many pages are mixed.
    mixed: usize,
}

impl<E: Entry> StateMap<E> {
    /// `grains` grains of which nothing is recorded.
    pub(crate) fn new(grains: u64) -> Self {
        let pages = (0..grains.div_ceil(E::SECTOR_GRAINS)).map(|_| Page::Uniform(E::NOTHING)).collect();
        let mut counts = vec![0; E::CLASSES];
        counts[E::NOTHING.class()] = grains;
        Self { grains, pages, counts, mixed: 0 }
    }

    pub(crate) const fn len(&self) -> u64 {
        self.grains
    }

    /// How many grains are of the class of `state`.
    pub(crate) fn count(&self, state: E) -> u64 {
        self.counts[state.class()]
    }

    pub(crate) fn get(&self, grain: u64) -> E {
        match &self.pages[(grain / E::SECTOR_GRAINS) as usize] {
            Page::Uniform(state) => *state,
            Page::Mixed(body) => E::of(body, grain % E::SECTOR_GRAINS),
        }
    }

    /// Sets every grain of `run`.
    pub(crate) fn fill(&mut self, run: Range<u64>, state: E) {
        for index in E::sectors_of(&run) {
            let page = self.range_of(index);
            let part = run.start.max(page.start)..run.end.min(page.end);
            self.count_out(index, part.clone());
            self.counts[state.class()] += part.end - part.start;
            if part == page {
                self.replace(index, Page::Uniform(state));
                continue;
            }
            let mut body = self.body(index);
            state.fill(&mut body, part.start - page.start..part.end - page.start);
            self.put(index, body);
        }
    }

    /// The states of a map sector.
    pub(crate) fn body(&self, index: u64) -> Body {
        match &self.pages[index as usize] {
            Page::Uniform(state) => self.uniform(index, *state),
            Page::Mixed(body) => **body,
        }
    }

    /// What the durable map should say of a map sector.
    pub(crate) fn lasting_body(&self, index: u64) -> Body {
        E::lasting_body(&self.body(index))
    }

    /// The map sector whose grains are all in `state`.
    fn uniform(&self, index: u64, state: E) -> Body {
        let mut body = [0; BODY_BYTES];
        let page = self.range_of(index);
        state.fill(&mut body, 0..page.end - page.start);
        body
    }

    /// Takes the states of a whole map sector over; false if they make no sense.
    pub(crate) fn set_body(&mut self, index: u64, body: &Body) -> bool {
        let page = self.range_of(index);
        let length = page.end - page.start;
        let states = (0..E::SECTOR_GRAINS).map(|grain| (grain, E::decode(body, grain)));
        let mut counts = vec![0; E::CLASSES];
        for (grain, state) in states {
            match state {
                Some(state) if grain >= length && state == E::NOTHING => {}
                Some(state) if grain < length => counts[state.class()] += 1,
                _ => return false,
            }
        }
        self.count_out(index, page);
        self.counts.iter_mut().zip(counts).for_each(|(count, more)| *count += more);
        self.put(index, *body);
        true
    }

    /// The run of grains in one state that begins at `from`, not past `end`.
    pub(crate) fn run_at(&self, from: u64, end: u64) -> (Range<u64>, E) {
        let state = self.get(from);
        let mut next = from + 1;
        while next < end {
            let index = next / E::SECTOR_GRAINS;
            match &self.pages[index as usize] {
                Page::Uniform(other) if *other == state => next = self.range_of(index).end.min(end),
                Page::Mixed(body) if E::of(body, next % E::SECTOR_GRAINS) == state => next += 1,
                _ => break,
            }
        }
        (from..next, state)
    }

    /// How much memory it takes, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.pages.len() * size_of::<Page<E>>() + self.mixed * BODY_BYTES
    }

    /// The first grain at or after `from` that hides the base.
    pub(crate) fn next_stored(&self, from: u64) -> Option<u64> {
        let mut next = from;
        while next < self.grains {
            match self.run_at(next, self.grains) {
                (run, state) if !state.hides_base() => next = run.end,
                _ => return Some(next),
            }
        }
        None
    }

    /// Whether every grain of `run` is in `state`.
    pub(crate) fn is_all(&self, run: &Range<u64>, state: E) -> bool {
        let (found, first) = self.run_at(run.start, run.end);
        first == state && found.end == run.end
    }

    fn range_of(&self, index: u64) -> Range<u64> {
        index * E::SECTOR_GRAINS..((index + 1) * E::SECTOR_GRAINS).min(self.grains)
    }

    fn put(&mut self, index: u64, body: Body) {
        let first = E::of(&body, 0);
        let is_uniform = body == self.uniform(index, first);
        match &mut self.pages[index as usize] {
            _ if is_uniform => self.replace(index, Page::Uniform(first)),
            Page::Mixed(place) => **place = body,
            Page::Uniform(_) => self.replace(index, Page::Mixed(Box::new(body))),
        }
    }

    fn replace(&mut self, index: u64, page: Page<E>) {
        let is_mixed = |page: &Page<E>| usize::from(matches!(page, Page::Mixed(_)));
        let before = std::mem::replace(&mut self.pages[index as usize], page);
        self.mixed = self.mixed + is_mixed(&self.pages[index as usize]) - is_mixed(&before);
    }

    fn count_out(&mut self, index: u64, part: Range<u64>) {
        match &self.pages[index as usize] {
            Page::Uniform(state) => self.counts[state.class()] -= part.end - part.start,
            Page::Mixed(body) => {
                for grain in part {
                    self.counts[E::of(body, grain % E::SECTOR_GRAINS).class()] -= 1;
                }
            }
        }
    }
}
