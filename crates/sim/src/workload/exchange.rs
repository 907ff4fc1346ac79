//! A mail server like the ESX paper's Exchange: small writes that come back to the same places by Zipf's law.
//!
//! The paper shows that the writes to every disk of its Exchange 2003 are distributed like Zipf's law (figure 2). It
//! says that more of them fall towards the end of the disk (2.3.4), and that "several hundred megabytes" are hot. It
//! gives no rates. So the users of this load choose the exponent, how many pages are written at all, and the requests a
//! second; see the callers. Requests come at random times, whatever the disk does: a mail server's users do not wait.

use std::time::Duration;

use super::{Step, Workload, read_or_write};
use crate::rng::Rng;

/// What a mail server's disk sees.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeFigures {
    /// The disk, in bytes.
    pub size: u64,
    /// Bytes of a page, which is what a request is of.
    pub page_bytes: u64,
    /// How many pages are ever asked for.
    pub pages: u64,
    /// Of Zipf's law.
    pub exponent: f64,
    /// The part of the requests that read.
    pub reads: f64,
    /// Requests a second.
    pub rate: f64,
}

/// See the module's head.
#[derive(Clone, Debug)]
pub struct Exchange {
    figures: ExchangeFigures,
    /// Up to which part of all requests the ranks up to this one take.
    shares: Vec<f64>,
    at: f64,
}

impl Exchange {
    /// The load of `figures`.
    #[must_use]
    pub fn new(figures: ExchangeFigures) -> Self {
        let mut sum = 0.0;
        let weights = (1..=figures.pages.max(1)).map(|rank| {
            sum += (rank as f64).powf(-figures.exponent);
            sum
        });
        let mut shares: Vec<f64> = weights.collect();
        shares.iter_mut().for_each(|share| *share /= sum);
        Self { figures, shares, at: 0.0 }
    }

    /// Where the page of `rank` lies: anywhere, but twice as likely at the end of the disk as in its middle.
    fn place(&self, rank: usize) -> u64 {
        // A fixed scramble of the rank (SplitMix64), so that no table of places is needed.
        let mut word = (rank as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let part = ((word ^ word >> 31) >> 11) as f64 / (1_u64 << 53) as f64;
        let places = self.figures.size / self.figures.page_bytes;
        ((places as f64 * part.sqrt()) as u64).min(places - 1)
    }
}

impl Workload for Exchange {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        self.at -= (1.0 - rng.fraction()).ln() / self.figures.rate;
        let throw = rng.fraction();
        let rank = self.shares.partition_point(|share| *share <= throw).min(self.shares.len() - 1);
        let offset = self.place(rank) * self.figures.page_bytes;
        let request = read_or_write(self.figures.reads, offset, self.figures.page_bytes, rng);
        Some(Step { at: Duration::from_secs_f64(self.at), request })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_requests_come_back_to_few_places_more_often_at_the_end_and_at_the_stated_rate() {
        let size = 1 << 30;
        let figures = ExchangeFigures { size, page_bytes: 8192, pages: 10_000, exponent: 1.0, reads: 0.0, rate: 500.0 };
        let (mut load, rng) = (Exchange::new(figures), Rng::new(1, "exchange"));
        let mut counts = std::collections::BTreeMap::<u64, u64>::new();
        let mut last = Duration::ZERO;
        for _ in 0..50_000 {
            let step = load.next(&rng).expect("it never ends");
            assert!(step.at >= last && step.request.end() <= size);
            last = step.at;
            *counts.entry(step.request.offset).or_default() += 1;
        }
        assert!((95.0..105.0).contains(&last.as_secs_f64()), "{last:?} for 50,000 at 500 a second");
        let most = counts.values().max().copied().unwrap_or_default();
        assert!((4000..7000).contains(&most), "the hottest of 10,000 has {most} of 50,000, 5,100 by the law");
        let late = counts.keys().filter(|offset| **offset >= size / 2).count() as f64 / counts.len() as f64;
        assert!((0.7..0.8).contains(&late), "{late} of the pages lie in the second half");
    }
}
