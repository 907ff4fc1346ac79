//! The paper's numbers (section 5.3.3), in milliseconds, and what is common to the figures.

use crate::figure::Experiment;
use crate::interference::load::Load;
use crate::interference::scene::{CHUNK_BYTES, IMAGE_BYTES};

use super::Runs;
use super::replayer::{CopyOrder, Replayed};

/// A trace: the response of the guest alone, beside the standard migration and beside IOFollow, and that of both migrations.
pub(super) struct Trace {
    pub(super) load: Load,
    pub(super) alone: f64,
    pub(super) guest: [f64; 2],
    pub(super) copy: [f64; 2],
}

pub(super) const TRACES: [Trace; 4] = [
    Trace { load: Load::Financial2, alone: 35.0, guest: [60.0, 42.0], copy: [172.0, 129.0] },
    Trace { load: Load::WebSearch1, alone: 22.0, guest: [52.0, 31.0], copy: [166.0, 107.0] },
    Trace { load: Load::WebSearch2, alone: 25.0, guest: [68.0, 45.0], copy: [185.0, 99.0] },
    Trace { load: Load::WebSearch3, alone: 37.0, guest: [62.0, 49.0], copy: [169.0, 112.0] },
];

/// Bytes of the whole disk.
const DISK_BYTES: u64 = 1_000_000_000_000;

/// Standard and IOFollow.
pub(super) const BOTH: [CopyOrder; 2] = [CopyOrder::Sequential, CopyOrder::Follow];

/// As section 5.3.3 has it: 1 MiB, 2:1, one guest.
pub(super) const fn replayed(load: Load, order: CopyOrder) -> Replayed {
    Replayed {
        load,
        order,
        ratio: 2,
        chunk_bytes: CHUNK_BYTES,
        outstanding: 1,
        copies: 1,
        machines: 1,
        image: IMAGE_BYTES,
        is_stretched: true,
        is_open_loop: false,
        is_cached: false,
    }
}

/// Something that the paper does not state, changed, and what that is called.
pub(super) type Otherwise = (&'static str, fn(Replayed) -> Replayed);
/// One by one and both at once.
pub(super) const OTHERWISE: &[Otherwise] =
    &[("images over the whole disk", over_disk), ("a page cache of 5 GB", cached), BOTH_OTHERWISE];
/// Both at once, where much is played already.
pub(super) const AT_ONCE: &[Otherwise] = &[BOTH_OTHERWISE];
const BOTH_OTHERWISE: Otherwise =
    ("images over the whole disk and a page cache of 5 GB", |replayed| cached(over_disk(replayed)));

/// The image takes the whole disk and the trace all of the image: seeks are as long as the disk's.
const fn over_disk(replayed: Replayed) -> Replayed {
    Replayed { image: DISK_BYTES / replayed.machines, ..replayed }
}

/// The host's page cache keeps what was copied for the guest.
const fn cached(replayed: Replayed) -> Replayed {
    Replayed { is_cached: true, ..replayed }
}

/// `replayed` in both orders, and the same otherwise.
pub(super) fn with_otherwise(replayed: Replayed, changes: &'static [Otherwise]) -> impl Iterator<Item = Replayed> {
    let orders = BOTH.map(|order| Replayed { order, ..replayed });
    let otherwise = changes.iter().flat_map(move |(_, change)| orders.map(change));
    orders.into_iter().chain(otherwise)
}

/// What part of the standard's response is left by following, of the guest's and of the copies'.
pub(super) fn normalised(runs: &Runs, replayed: Replayed) -> [f64; 2] {
    let [standard, follow] = BOTH.map(|order| runs.replayed(Replayed { order, ..replayed }));
    [follow.guest.mean_ms() / standard.guest.mean_ms(), follow.copy.mean_ms() / standard.copy.mean_ms()]
}

pub(super) const WHY: &str = "Following saves seeks, and over an image of 15 GB a seek of this disk takes 2.6 ms by its \
     data sheet, of 13 ms with the turn of the platter and a MiB. How far the paper's images were spread is not stated, nor \
     whether its replayer read through the host's page cache, which keeps for the guest what a copy has read near it.";

/// What is tried where the part that is left of the standard's response, of the guest's (0) or the copies' (1), is `ours` and not
/// the paper's.
pub(super) fn otherwise(
    runs: &Runs,
    (replayed, changes): (Replayed, &'static [Otherwise]),
    which: usize,
    (paper, ours): (f64, f64),
) -> Experiment {
    let seen: Vec<(&str, f64)> =
        changes.iter().map(|(what, change)| (*what, normalised(runs, change(replayed))[which])).collect();
    let closes = |other: f64| {
        let is_between = ours.min(other) <= paper && paper <= ours.max(other);
        is_between || (other - paper).abs() <= (ours - paper).abs() / 2.0
    };
    let words = seen.iter().map(|(what, other)| format!("{what}: {:.0} % left", other * 100.0));
    let words = words.collect::<Vec<_>>().join(", ");
    Experiment { seen: words, shows: seen.iter().any(|(_, other)| closes(*other)) }
}
