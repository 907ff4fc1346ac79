//! The state of every chunk of a volume, packed.
//!
//! Two bits a chunk in pages of 4096 chunks; a page whose chunks all have one state is that one state. Above the pages
//! there is, for each state, a bitmap of the pages that have a chunk in it. Above that are bitmaps of its nonzero
//! words, up to a single word. So finding the next chunk in a state reads one page and a word a level, whatever the
//! size of the volume. 2^30 chunks of one state take about 5 MiB, the worst mixture 260 MiB. The worst mixture of 16
//! TiB in chunks of 64 KiB takes 66 MiB.

use std::marker::PhantomData;
use std::ops::Range;

/// How many chunks a page has.
const PAGE_CHUNKS: u64 = 4096;
/// How many chunks a word has.
const WORD_CHUNKS: u64 = 32;
/// One bit for every chunk of a word.
const LANES: u64 = 0x5555_5555_5555_5555;

/// A state that fits two bits.
pub trait PackedState: Copy + PartialEq + Eq {
    /// The state as a number below 4.
    fn to_bits(self) -> u8;
    /// The state of a number that [`to_bits`](Self::to_bits) gave.
    fn from_bits(bits: u8) -> Self;
}

/// The state of every chunk of a volume.
pub struct ChunkMap<S> {
    chunks: u64,
    pages: Vec<Page>,
    /// How many chunks are in each state.
    counts: [u64; 4],
    /// For each state, which pages have a chunk in it.
    summaries: [Summary; 4],
    state: PhantomData<S>,
}

enum Page {
    Uniform(u8),
    Mixed(Box<Mixed>),
}

struct Mixed {
    words: [u64; (PAGE_CHUNKS / WORD_CHUNKS) as usize],
    counts: [u16; 4],
}

impl<S: PackedState> ChunkMap<S> {
    /// A map of `chunks` chunks, all in `state`.
    #[must_use]
    pub fn new(chunks: u64, state: S) -> Self {
        let page_count = chunks.div_ceil(PAGE_CHUNKS);
        let bits = state.to_bits();
        let mut counts = [0; 4];
        counts[usize::from(bits)] = chunks;
        let summaries = std::array::from_fn(|other| Summary::new(page_count, other == usize::from(bits)));
        let pages = (0..page_count).map(|_| Page::Uniform(bits)).collect();
        Self { chunks, pages, counts, summaries, state: PhantomData }
    }

    /// How many chunks there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.chunks
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks == 0
    }

    /// How many chunks are in `state`.
    #[must_use]
    pub fn count(&self, state: S) -> u64 {
        self.counts[usize::from(state.to_bits())]
    }

    /// The state of chunk `index`.
    ///
    /// # Panics
    /// If there is no such chunk.
    #[must_use]
    pub fn get(&self, index: u64) -> S {
        assert!(index < self.chunks, "chunk {index} of {}", self.chunks);
        let bits = match &self.pages[(index / PAGE_CHUNKS) as usize] {
            Page::Uniform(bits) => *bits,
            Page::Mixed(mixed) => mixed.get(index % PAGE_CHUNKS),
        };
        S::from_bits(bits)
    }

    /// Sets chunk `index` to `state` and gives what it was.
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn set(&mut self, index: u64, state: S) -> S {
        let before = self.get(index);
        if before != state {
            let number = index / PAGE_CHUNKS;
            let within = index % PAGE_CHUNKS;
            self.alter(number, |mixed| mixed.fill(within..within + 1, state.to_bits()));
        }
        before
    }

    /// Sets every chunk of `range` to `state`.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn set_range(&mut self, range: Range<u64>, state: S) {
        assert!(range.end <= self.chunks, "chunks {range:?} of {}", self.chunks);
        let bits = state.to_bits();
        let mut next = range.start;
        while next < range.end {
            let number = next / PAGE_CHUNKS;
            let page = self.page_range(number);
            let end = range.end.min(page.end);
            if next == page.start && end == page.end {
                self.replace_page(number, Page::Uniform(bits));
            } else if !matches!(self.pages[number as usize], Page::Uniform(known) if known == bits) {
                self.alter(number, |mixed| mixed.fill(next - page.start..end - page.start, bits));
            }
            next = end;
        }
    }

    /// Sets every chunk that is in `from` to `to`.
    pub fn replace(&mut self, from: S, to: S) {
        let (from, to) = (from.to_bits(), to.to_bits());
        let mut next = 0;
        while from != to
            && let Some(number) = self.summaries[usize::from(from)].next(next)
        {
            match &self.pages[number as usize] {
                Page::Uniform(_) => self.replace_page(number, Page::Uniform(to)),
                Page::Mixed(_) => self.alter(number, |mixed| mixed.replace(from, to)),
            }
            next = number + 1;
        }
    }

    /// The first chunk in `state` at or after `from`.
    #[must_use]
    pub fn next(&self, state: S, from: u64) -> Option<u64> {
        if from >= self.chunks {
            return None;
        }
        let bits = state.to_bits();
        let number = from / PAGE_CHUNKS;
        if let Some(within) = self.next_in_page(number, bits, from % PAGE_CHUNKS) {
            return Some(number * PAGE_CHUNKS + within);
        }
        let number = self.summaries[usize::from(bits)].next(number + 1)?;
        let within = self.next_in_page(number, bits, 0).expect("the summary says that the page has one");
        Some(number * PAGE_CHUNKS + within)
    }

    /// The last chunk in `state` at or before `from`.
    #[must_use]
    pub fn previous(&self, state: S, from: u64) -> Option<u64> {
        let from = from.min(self.chunks.checked_sub(1)?);
        let bits = state.to_bits();
        let number = from / PAGE_CHUNKS;
        if let Some(within) = self.previous_in_page(number, bits, from % PAGE_CHUNKS) {
            return Some(number * PAGE_CHUNKS + within);
        }
        let number = self.summaries[usize::from(bits)].previous(number.checked_sub(1)?)?;
        let within = self.previous_in_page(number, bits, PAGE_CHUNKS - 1);
        Some(number * PAGE_CHUNKS + within.expect("the summary says that the page has one"))
    }

    /// The chunk in `state` that is nearest to `at`, in either direction; of two the one behind it.
    #[must_use]
    pub fn nearest(&self, state: S, at: u64) -> Option<u64> {
        match (self.previous(state, at), self.next(state, at)) {
            (Some(before), Some(behind)) if at - before < behind - at => Some(before),
            (before, behind) => behind.or(before),
        }
    }

    /// The first run of chunks in `state` at or after `from`, of at most `chunks_max` chunks.
    #[must_use]
    pub fn next_run(&self, state: S, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        let start = self.next(state, from)?;
        Some(start..self.run_end(state.to_bits(), start, start.saturating_add(chunks_max)))
    }

    /// The run of chunks in one state that begins at `from`, not past `limit`.
    ///
    /// # Panics
    /// If there is no such chunk.
    #[must_use]
    pub fn run_at(&self, from: u64, limit: u64) -> (Range<u64>, S) {
        let state = self.get(from);
        (from..self.run_end(state.to_bits(), from, limit), state)
    }

    /// The first chunk after `from` that is not in the state `bits`, as `from` is, or `limit`. Reads a word at a time.
    fn run_end(&self, bits: u8, from: u64, limit: u64) -> u64 {
        let limit = self.chunks.min(limit);
        let mut end = from;
        while end < limit {
            let page = self.page_range(end / PAGE_CHUNKS);
            let found = match &self.pages[(end / PAGE_CHUNKS) as usize] {
                Page::Uniform(known) if *known == bits => page.end,
                Page::Uniform(_) => end,
                Page::Mixed(mixed) => page.start + mixed.run_end(bits, end - page.start),
            };
            end = found;
            if found < page.end {
                break;
            }
        }
        end.min(limit)
    }

    /// How much memory it takes, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let mixed = self.pages.iter().filter(|page| matches!(page, Page::Mixed(_))).count();
        let summaries: usize = self.summaries.iter().map(Summary::memory_bytes).sum();
        self.pages.capacity() * size_of::<Page>() + mixed * size_of::<Mixed>() + summaries
    }

    fn page_range(&self, number: u64) -> Range<u64> {
        number * PAGE_CHUNKS..((number + 1) * PAGE_CHUNKS).min(self.chunks)
    }

    fn next_in_page(&self, number: u64, bits: u8, from: u64) -> Option<u64> {
        match &self.pages[number as usize] {
            Page::Uniform(known) => (*known == bits).then_some(from),
            Page::Mixed(mixed) => mixed.next(bits, from),
        }
    }

    fn previous_in_page(&self, number: u64, bits: u8, from: u64) -> Option<u64> {
        match &self.pages[number as usize] {
            Page::Uniform(known) => {
                let range = self.page_range(number);
                (*known == bits).then(|| from.min(range.end - range.start - 1))
            }
            Page::Mixed(mixed) => mixed.previous(bits, from),
        }
    }

    /// Lets `change` alter a page, and brings counts, summaries and the page's form up to date.
    fn alter(&mut self, number: u64, change: impl FnOnce(&mut Mixed)) {
        let range = self.page_range(number);
        let length = (range.end - range.start) as u16;
        let slot = &mut self.pages[number as usize];
        if let Page::Uniform(bits) = slot {
            *slot = Page::Mixed(Box::new(Mixed::uniform(*bits, length)));
        }
        let Page::Mixed(mixed) = slot else { unreachable!("made so above") };
        let before = mixed.counts;
        change(mixed);
        let after = mixed.counts;
        if let Some(bits) = after.iter().position(|count| *count == length) {
            *slot = Page::Uniform(bits as u8);
        }
        self.account(number, before, after);
    }

    fn replace_page(&mut self, number: u64, page: Page) {
        let range = self.page_range(number);
        let length = (range.end - range.start) as u16;
        let counts_of = |page: &Page| match page {
            Page::Uniform(bits) => Mixed::uniform_counts(*bits, length),
            Page::Mixed(mixed) => mixed.counts,
        };
        let before = counts_of(&self.pages[number as usize]);
        let after = counts_of(&page);
        self.pages[number as usize] = page;
        self.account(number, before, after);
    }

    fn account(&mut self, number: u64, before: [u16; 4], after: [u16; 4]) {
        for state in 0..4 {
            self.counts[state] = self.counts[state] - u64::from(before[state]) + u64::from(after[state]);
            if (before[state] == 0) != (after[state] == 0) {
                self.summaries[state].set(number, after[state] != 0);
            }
        }
    }
}

impl<S> std::fmt::Debug for ChunkMap<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "ChunkMap({} chunks, {:?} by state)", self.chunks, self.counts)
    }
}

impl Mixed {
    /// Lanes past the end of a short last page repeat the page's first state; nobody looks at them.
    fn uniform(bits: u8, length: u16) -> Self {
        let words = [LANES * u64::from(bits); (PAGE_CHUNKS / WORD_CHUNKS) as usize];
        Self { words, counts: Self::uniform_counts(bits, length) }
    }

    fn uniform_counts(bits: u8, length: u16) -> [u16; 4] {
        std::array::from_fn(|state| if state == usize::from(bits) { length } else { 0 })
    }

    fn length(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    fn get(&self, within: u64) -> u8 {
        (self.words[(within / WORD_CHUNKS) as usize] >> (within % WORD_CHUNKS * 2) & 3) as u8
    }

    /// One bit, at its lane, for every chunk of `word` that is in the state.
    fn matches(word: u64, bits: u8) -> u64 {
        let differs = word ^ (LANES * u64::from(bits));
        !(differs | differs >> 1) & LANES
    }

    fn fill(&mut self, range: Range<u64>, bits: u8) {
        let mut next = range.start;
        while next < range.end {
            let end = range.end.min((next / WORD_CHUNKS + 1) * WORD_CHUNKS);
            let mask = lanes_from(next % WORD_CHUNKS) & !lanes_from(end - next / WORD_CHUNKS * WORD_CHUNKS);
            self.write((next / WORD_CHUNKS) as usize, mask, bits);
            next = end;
        }
    }

    fn replace(&mut self, from: u8, to: u8) {
        let length = self.length();
        for at in 0..length.div_ceil(WORD_CHUNKS) {
            let valid = !lanes_from((length - at * WORD_CHUNKS).min(WORD_CHUNKS));
            let mask = Self::matches(self.words[at as usize], from) & valid;
            self.write(at as usize, mask, to);
        }
    }

    /// Sets the chunks of a word that have their lane's bit in `mask`.
    fn write(&mut self, at: usize, mask: u64, bits: u8) {
        let mask = mask & LANES;
        let word = self.words[at];
        for state in 0..4 {
            self.counts[usize::from(state)] -= (Self::matches(word, state) & mask).count_ones() as u16;
        }
        self.counts[usize::from(bits)] += mask.count_ones() as u16;
        self.words[at] = (word & !(mask * 3)) | (mask * u64::from(bits));
    }

    fn next(&self, bits: u8, from: u64) -> Option<u64> {
        if self.counts[usize::from(bits)] == 0 {
            return None;
        }
        let first = from / WORD_CHUNKS;
        let mut mask = lanes_from(from % WORD_CHUNKS);
        let length = self.length();
        for at in first..length.div_ceil(WORD_CHUNKS) {
            note_look();
            let found = Self::matches(self.words[at as usize], bits) & mask;
            if found != 0 {
                let within = at * WORD_CHUNKS + u64::from(found.trailing_zeros() / 2);
                return (within < length).then_some(within);
            }
            mask = u64::MAX;
        }
        None
    }

    /// The first chunk at or after `from` that is not in the state, or the end of the page.
    fn run_end(&self, bits: u8, from: u64) -> u64 {
        let mut mask = lanes_from(from % WORD_CHUNKS);
        let length = self.length();
        for at in from / WORD_CHUNKS..length.div_ceil(WORD_CHUNKS) {
            let others = !Self::matches(self.words[at as usize], bits) & LANES & mask;
            if others != 0 {
                return length.min(at * WORD_CHUNKS + u64::from(others.trailing_zeros() / 2));
            }
            mask = u64::MAX;
        }
        length
    }

    fn previous(&self, bits: u8, from: u64) -> Option<u64> {
        if self.counts[usize::from(bits)] == 0 {
            return None;
        }
        let from = from.min(self.length() - 1);
        let mut mask = !lanes_from(from % WORD_CHUNKS + 1);
        for at in (0..=from / WORD_CHUNKS).rev() {
            note_look();
            let found = Self::matches(self.words[at as usize], bits) & mask;
            if found != 0 {
                return Some(at * WORD_CHUNKS + u64::from(found.ilog2() / 2));
            }
            mask = u64::MAX;
        }
        None
    }
}

/// The lanes of a word from the `lane`th on; none from the 32nd.
const fn lanes_from(lane: u64) -> u64 {
    if lane >= WORD_CHUNKS { 0 } else { u64::MAX << (lane * 2) }
}

/// A set of page numbers in levels: a bit of a level says whether a word of the level below has a bit.
struct Summary {
    levels: Vec<Vec<u64>>,
}

impl Summary {
    fn new(count: u64, full: bool) -> Self {
        let mut levels = Vec::new();
        let mut bits = count.max(1);
        let mut set = if full { count } else { 0 };
        loop {
            let words = bits.div_ceil(64);
            let level = (0..words).map(|at| low_bits(set.saturating_sub(at * 64))).collect();
            levels.push(level);
            if words == 1 {
                return Self { levels };
            }
            set = set.div_ceil(64);
            bits = words;
        }
    }

    fn set(&mut self, number: u64, value: bool) {
        let mut number = number;
        for level in &mut self.levels {
            let word = &mut level[(number / 64) as usize];
            let before = *word != 0;
            match value {
                true => *word |= 1 << (number % 64),
                false => *word &= !(1 << (number % 64)),
            }
            if before == (*word != 0) {
                return;
            }
            number /= 64;
        }
    }

    /// The first number in the set at or after `from`.
    fn next(&self, from: u64) -> Option<u64> {
        let mut from = from;
        for (height, level) in self.levels.iter().enumerate() {
            note_look();
            let at = (from / 64) as usize;
            let word = level.get(at).copied().unwrap_or(0) & (u64::MAX << (from % 64));
            if word != 0 {
                let mut found = at as u64 * 64 + u64::from(word.trailing_zeros());
                for below in self.levels[..height].iter().rev() {
                    note_look();
                    found = found * 64 + u64::from(below[found as usize].trailing_zeros());
                }
                return Some(found);
            }
            from = from / 64 + 1;
        }
        None
    }

    /// The last number in the set at or before `from`.
    fn previous(&self, from: u64) -> Option<u64> {
        let mut from = from;
        for (height, level) in self.levels.iter().enumerate() {
            note_look();
            let at = from / 64;
            let word = level.get(at as usize).copied().unwrap_or(0) & low_bits(from % 64 + 1);
            if word != 0 {
                let mut found = at * 64 + u64::from(word.ilog2());
                for below in self.levels[..height].iter().rev() {
                    note_look();
                    found = found * 64 + u64::from(below[found as usize].ilog2());
                }
                return Some(found);
            }
            from = at.checked_sub(1)?;
        }
        None
    }

    fn memory_bytes(&self) -> usize {
        self.levels.iter().map(|level| level.capacity() * 8).sum()
    }
}

/// A word with its lowest `count` bits set.
const fn low_bits(count: u64) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// A word was looked at; tests count them.
fn note_look() {
    #[cfg(test)]
    tests::LOOKED_AT.with(|count| count.set(count.get() + 1));
}

#[cfg(test)]
mod tests;
