//! Memory that is rewritten at a stated rate and checked. Every page holds its number and its generation, and a body
//! that follows from both and that no compression shortens. A page that a move lost, mixed up or left old is found.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::pattern::{self, BLOCK_BYTES};
use crate::say;
use crate::tools::{Aligned, Random};

const FAULTS_TOLD_MAX: u64 = 20;
/// How often pages are rewritten.
const TICK: Duration = Duration::from_millis(10);
/// More pages than are due in so many ticks are never made up for.
const BACKLOG_TICKS: u64 = 10;

/// The pages of the load.
pub(crate) struct Memory {
    pages: Mutex<Pages>,
    count: usize,
    /// The first of them, which alone are rewritten.
    hot: u64,
    pages_per_second: u64,
    rewritten: AtomicU64,
    wrong: AtomicU64,
}

struct Pages {
    bytes: Aligned,
    generations: Vec<u32>,
    random: Random,
}

/// What there is and was found.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) pages: usize,
    pub(crate) wrong: u64,
    pub(crate) rewritten: u64,
}

impl Memory {
    /// As many pages as the options want, all of generation 1; none if they want none.
    pub(crate) fn new(options: &Options) -> Option<Self> {
        let count = (options.memory_mib << 20) as usize / BLOCK_BYTES;
        if count == 0 {
            return None;
        }
        let mut bytes = Aligned::new(count * BLOCK_BYTES);
        for (page, bytes) in (0..).zip(bytes.bytes().chunks_exact_mut(BLOCK_BYTES)) {
            pattern::fill(bytes, page, 1);
        }
        let random = Random(options.seed.max(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Some(Self {
            pages: Mutex::new(Pages { bytes, generations: vec![1; count], random }),
            count,
            hot: (count as u64 * options.hot_percent / 100).max(1),
            pages_per_second: (options.rewrite_mib_per_second << 20) / BLOCK_BYTES as u64,
            rewritten: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
        })
    }

    /// Rewrites random pages at the stated rate, each checked first.
    pub(crate) fn rewrite_until(&self, is_stopping: &AtomicBool) {
        let backlog_max = (self.pages_per_second * BACKLOG_TICKS * TICK.as_millis() as u64 / 1000).max(1);
        let begun = Instant::now();
        let mut done = 0;
        while !is_stopping.load(Ordering::Relaxed) && self.pages_per_second > 0 {
            std::thread::sleep(TICK);
            let due = (begun.elapsed().as_micros() * u128::from(self.pages_per_second) / 1_000_000) as u64;
            // What was due before that is given up, so that a slow guest does not rewrite without end.
            let count = due.saturating_sub(done).min(backlog_max);
            done = due.max(done);
            let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
            for _ in 0..count {
                let page = pages.random.below(self.hot) as usize;
                self.check(&mut pages, page);
                let generation = pages.generations[page] + 1;
                pages.generations[page] = generation;
                pattern::fill(pages.page(page), page as u64, u64::from(generation));
            }
            self.rewritten.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Checks every page.
    pub(crate) fn verify(&self) {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        (0..self.count).for_each(|page| self.check(&mut pages, page));
    }

    /// Tells the totals.
    pub(crate) fn tell(&self) {
        let Totals { pages, wrong, rewritten } = self.totals();
        say(&format!("memory pages={pages} wrong={wrong} rewritten={rewritten}"));
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals {
            pages: self.count,
            wrong: self.wrong.load(Ordering::Relaxed),
            rewritten: self.rewritten.load(Ordering::Relaxed),
        }
    }

    fn check(&self, pages: &mut Pages, page: usize) {
        let expected = pages.generations[page];
        let Err(fault) = pattern::check(pages.page(page), page as u64, u64::from(expected)) else { return };
        if self.wrong.fetch_add(1, Ordering::Relaxed) < FAULTS_TOLD_MAX {
            say(&format!("fault page={page} expected={expected} {fault:?}"));
        }
    }
}

impl Pages {
    fn page(&mut self, page: usize) -> &mut [u8] {
        &mut self.bytes.bytes()[page * BLOCK_BYTES..(page + 1) * BLOCK_BYTES]
    }
}
