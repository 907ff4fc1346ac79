//! Several loads at once, each request at its time.

use super::{Step, Workload};
use crate::rng::Rng;

/// Loads beside each other.
pub struct Merged {
    /// Each with its next request, if that was drawn.
    loads: Vec<(Box<dyn Workload>, Option<Step>)>,
}

impl Merged {
    /// All of `loads`.
    #[must_use]
    pub fn new(loads: Vec<Box<dyn Workload>>) -> Self {
        Self { loads: loads.into_iter().map(|load| (load, None)).collect() }
    }
}

impl Workload for Merged {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        for (load, next) in &mut self.loads {
            *next = next.take().or_else(|| load.next(rng));
        }
        let earliest =
            self.loads.iter_mut().filter(|(_, next)| next.is_some()).min_by_key(|(_, next)| next.map(|step| step.at));
        earliest?.1.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Exchange, ExchangeFigures, Shifted};
    use std::time::Duration;

    #[test]
    fn requests_of_all_loads_come_in_the_order_of_their_times() {
        let load = |start: u64, rate: f64| {
            let figures =
                ExchangeFigures { size: 1 << 20, page_bytes: 4096, pages: 10, exponent: 1.0, reads: 0.0, rate };
            Box::new(Shifted::new(start, Exchange::new(figures))) as Box<dyn Workload>
        };
        let (mut merged, rng) = (Merged::new(vec![load(0, 100.0), load(1 << 20, 300.0)]), Rng::new(1, "merged"));
        let steps: Vec<Step> = (0..4000).map(|_| merged.next(&rng).expect("it never ends")).collect();
        assert!(steps.windows(2).all(|pair| pair[0].at <= pair[1].at));
        let first = steps.iter().filter(|step| step.request.offset < 1 << 20).count();
        assert!((850..1150).contains(&first), "{first} of 4000");
        assert!((Duration::from_secs(9)..Duration::from_secs(11)).contains(&steps[3999].at));
    }
}
