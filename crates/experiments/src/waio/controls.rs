//! What is played to show why a number differs: the same pair of scenes with one thing changed that the paper does not state.

use crate::figure::Experiment;
use crate::interference::devices::CacheMode;
use crate::interference::scene::{CHUNK_BYTES, Scene};

use super::Runs;

/// Requests of the shorter replays, at the paper's scale: 70 s, three minutes and seven minutes of `WebSearch1`'s.
const SHORT: [u64; 3] = [8_000, 20_000, 50_000];

/// A thing that is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// The two other guests are idle.
    NoNeighbours,
    /// The move has one chunk outstanding instead of what its rate allows within 100 ms.
    OneChunk,
    /// A write is answered when the disk has it in its cache.
    NoBarriers,
    /// The addresses are stretched over the image, as section 3.8 does it.
    Stretched,
    /// The replay ends after so many requests.
    Short(u64),
}

impl Control {
    /// What may make the guest's writes faster or slower.
    pub(super) const OF_WRITES: &[Self] = &[Self::NoNeighbours, Self::OneChunk, Self::NoBarriers];
    /// What may change how much is admitted, and whether that pays for itself.
    pub(super) const OF_SPACE: &[Self] =
        &[Self::Stretched, Self::Short(SHORT[0]), Self::Short(SHORT[1]), Self::Short(SHORT[2])];

    /// What is left where writes wait for nobody.
    pub(super) const OF_OTHERS: &[Self] =
        &[Self::NoNeighbours, Self::OneChunk, Self::Stretched, Self::Short(SHORT[0]), Self::Short(SHORT[1])];

    pub(super) const fn of(self, scene: Scene) -> Scene {
        match self {
            Self::NoNeighbours => Scene { has_neighbours: false, ..scene },
            Self::OneChunk => Scene { window_bytes: CHUNK_BYTES, ..scene },
            Self::NoBarriers => Scene { cache: CacheMode::NoBarriers, ..scene },
            Self::Stretched => Scene { is_stretched: true, ..scene },
            Self::Short(requests) => Scene { requests_max: Some(requests), ..scene },
        }
    }

    fn words(self) -> String {
        match self {
            Self::NoNeighbours => "without neighbours".to_owned(),
            Self::OneChunk => "with one chunk outstanding".to_owned(),
            Self::NoBarriers => "on a file system without barriers".to_owned(),
            Self::Stretched => "with addresses stretched over the image".to_owned(),
            Self::Short(requests) => format!("after {requests} requests"),
        }
    }
}

/// `scenes` with each of `controls` changed.
pub(super) fn controlled<'a>(controls: &'a [Control], scenes: &'a [Scene]) -> impl Iterator<Item = Scene> + 'a {
    controls.iter().flat_map(move |control| scenes.iter().map(move |scene| control.of(*scene)))
}

/// What `measure` gives with each of `controls` changed. It shows why `ours` is not the paper's if one of them takes away half of
/// the difference, or the paper's lies between ours and one of them.
pub(super) fn tried(
    runs: &Runs,
    controls: &[Control],
    unit: &str,
    (paper, ours): (f64, f64),
    measure: impl Fn(&Runs, &dyn Fn(Scene) -> Scene) -> f64,
) -> Experiment {
    let seen: Vec<(Control, f64)> =
        controls.iter().map(|control| (*control, measure(runs, &|scene| control.of(scene)))).collect();
    let closes = |other: f64| {
        let is_between = (ours.min(other)..=ours.max(other)).contains(&paper);
        is_between || (other - paper).abs() <= (ours - paper).abs() / 2.0
    };
    let words: Vec<String> =
        seen.iter().map(|(control, other)| format!("{} {other:.2}{unit}", control.words())).collect();
    Experiment { seen: words.join(", "), shows: seen.iter().any(|(_, other)| closes(*other)) }
}

pub(super) const WHY_WRITES: &str = "A write that must be durable waits for the head between the move's reads, and DBT's \
     guest waits for little else. How long that is hangs on three things that are not stated: what the neighbours do, how \
     much the move has outstanding, and whether a write waits for the platter at all.";
pub(super) const WHY_SPACE: &str = "How the trace was laid on the image, and how much of it was replayed, is not stated. \
     Each chunk is read whole once, which pays for itself only after some requests.";
