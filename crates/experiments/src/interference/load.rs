//! What the guests of the scenes ask for: a trace of the user's, or a labelled generator in its place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::Result;
use sim::model::{Request, Verb};
use sim::rng::Rng;
use sim::workload::{Characteristics, Step, Synthetic, Workload};

use super::recording::Recording;

/// The unit in which requests are laid anew.
const SECTOR_BYTES: u64 = 512;

/// What a guest asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Load {
    /// SYNTHETIC, like Financial1. No trace.
    Financial1,
    /// SYNTHETIC, like Financial2. No trace.
    Financial2,
    /// SYNTHETIC, like WebSearch1. No trace.
    WebSearch1,
    /// SYNTHETIC, like WebSearch2. No trace.
    WebSearch2,
    /// SYNTHETIC, like WebSearch3. No trace.
    WebSearch3,
    /// A trace of the user's, once and as it is.
    Recorded(&'static Recording),
}

impl Load {
    /// What it is called wherever it is shown.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Financial1 => "synthetic Financial1",
            Self::Financial2 => "synthetic Financial2",
            Self::WebSearch1 => "synthetic WebSearch1",
            Self::WebSearch2 => "synthetic WebSearch2",
            Self::WebSearch3 => "synthetic WebSearch3",
            Self::Recorded(recording) => &recording.name,
        }
    }

    fn characteristics(self) -> Option<Characteristics> {
        Some(match self {
            Self::Financial1 => Characteristics::FINANCIAL1,
            Self::Financial2 => Characteristics::FINANCIAL2,
            Self::WebSearch1 => Characteristics::WEB_SEARCH1,
            Self::WebSearch2 => Characteristics::WEB_SEARCH2,
            Self::WebSearch3 => Characteristics::WEB_SEARCH3,
            Self::Recorded(_) => return None,
        })
    }

    /// Whether it ends by itself, as traces do.
    pub(crate) const fn is_recorded(self) -> bool {
        matches!(self, Self::Recorded(_))
    }
}

/// How a load is laid on an image and played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Laid {
    /// The image's bytes, here.
    pub(crate) image: u64,
    /// Whether its addresses are stretched over the whole image. What does not fit is laid closer in any case.
    pub(crate) is_stretched: bool,
    /// At its own times, whatever the disk does; otherwise as fast as answers come.
    pub(crate) is_open_loop: bool,
    /// Zipf's exponent of a generator, in hundredths of what the specification says.
    pub(crate) skew: u32,
    /// It ends after so many requests, if it has as many.
    pub(crate) requests_max: Option<u64>,
    /// How many times fewer bytes than the paper's a generator uses.
    pub(crate) scale: u64,
}

impl Laid {
    /// Plays `load` so; what is given beside it is set when the load has ended.
    ///
    /// # Errors
    /// A trace cannot be opened.
    pub(crate) fn start(self, load: Load, rng: &Rng) -> Result<(Box<dyn Workload>, Arc<AtomicBool>)> {
        let (inner, span): (Box<dyn Workload>, u64) = match load {
            Load::Recorded(recording) => (Box::new(recording.play()?), recording.end),
            _ => {
                let like = load.characteristics().expect("whatever is not recorded is generated");
                let smaller = |zones: u64| (zones / self.scale).max(4);
                let like = Characteristics {
                    zones: smaller(like.zones),
                    zones_active: smaller(like.zones_active),
                    zipf_exponent: like.zipf_exponent * f64::from(self.skew) / 100.0,
                    ..like
                };
                (Box::new(Synthetic::new(like, rng)), like.size())
            }
        };
        let is_over = Arc::new(AtomicBool::new(false));
        let anew = self.is_stretched || span > self.image;
        let laid = LaidLoad { inner, span: anew.then_some(span), laid: self, count: 0, is_over: Arc::clone(&is_over) };
        Ok((Box::new(laid), is_over))
    }
}

struct LaidLoad {
    inner: Box<dyn Workload>,
    /// What is laid over the image, if the addresses do not stay.
    span: Option<u64>,
    laid: Laid,
    count: u64,
    is_over: Arc<AtomicBool>,
}

impl Workload for LaidLoad {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let is_long_enough = self.laid.requests_max.is_some_and(|most| self.count >= most);
        self.count += 1;
        let Some(step) = self.inner.next(rng).filter(|_| !is_long_enough) else {
            self.is_over.store(true, Ordering::Relaxed);
            return None;
        };
        let image = self.laid.image;
        let mut request = step.request;
        if request.verb != Verb::Flush {
            if let Some(span) = self.span {
                let offset = u128::from(request.offset) * u128::from(image) / u128::from(span);
                request.offset = offset as u64 / SECTOR_BYTES * SECTOR_BYTES;
            }
            request.length = request.length.min(image);
            request.offset = request.offset.min(image - request.length);
        }
        Some(Step { at: if self.laid.is_open_loop { step.at } else { Duration::ZERO }, request })
    }
}

/// A neighbour: requests at random moments, so many a second in the mean, whatever the disk does.
pub(crate) struct Neighbour {
    start: u64,
    size: u64,
    figures: NeighbourFigures,
    now: f64,
}

/// What a neighbour does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeighbourFigures {
    rate: f64,
    length: u64,
    reads: f64,
}

impl NeighbourFigures {
    /// A file server: assumed, the paper names the benchmark and no rate.
    pub(crate) const FILE_SERVER: Self = Self { rate: 8.0, length: 64 << 10, reads: 0.5 };
    /// A web server: assumed as well.
    pub(crate) const WEB_SERVER: Self = Self { rate: 8.0, length: 16 << 10, reads: 0.95 };
}

impl Neighbour {
    /// Anywhere in `size` bytes from `start` on.
    pub(crate) const fn new(start: u64, size: u64, figures: NeighbourFigures) -> Self {
        Self { start, size, figures, now: 0.0 }
    }
}

impl Workload for Neighbour {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let NeighbourFigures { rate, length, reads } = self.figures;
        self.now -= rng.fraction().max(f64::MIN_POSITIVE).ln() / rate;
        let offset = self.start + rng.below(self.size / length) * length;
        let request = if rng.chance(reads) { Request::read(offset, length) } else { Request::write(offset, length) };
        Some(Step { at: Duration::from_secs_f64(self.now), request })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAID: Laid =
        Laid { image: 1 << 30, is_stretched: false, is_open_loop: false, skew: 100, requests_max: None, scale: 16 };

    fn ends(laid: Laid, load: Load) -> (u64, Duration) {
        let rng = Rng::new(1, "load");
        let (mut load, _) = laid.start(load, &rng).expect("a generator starts");
        let steps = (0..5000).map(|_| load.next(&rng).expect("it has no end"));
        steps.fold((0, Duration::ZERO), |(end, at), step| (end.max(step.request.end()), at.max(step.at)))
    }

    #[test]
    fn a_load_stays_where_it_is_or_is_stretched_and_never_leaves_the_image() {
        let (end, at) = ends(LAID, Load::Financial2);
        assert!(end <= 30 << 20 && at.is_zero(), "{end} at {at:?}");
        let (end, at) = ends(Laid { is_stretched: true, is_open_loop: true, ..LAID }, Load::Financial2);
        assert!((900 << 20..=1 << 30).contains(&end) && at > Duration::from_secs(10), "{end} at {at:?}");
        let (end, _) = ends(Laid { image: 500 << 20, ..LAID }, Load::WebSearch1);
        assert!((450 << 20..=500 << 20).contains(&end), "{end} of a load that is larger than the image");
    }
}
