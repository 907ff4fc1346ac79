//! IOPS over time, as figures 10 and 11 show them.

use super::scene::Seen;
use crate::figure::Series;

/// What source and target were asked for, with time at the paper's scale.
pub(super) fn series(seen: &Seen, scale: u64) -> Vec<Series> {
    let [source, target] = &seen.traffic;
    let lines = [
        ("source, reads", 0, source.iter().map(|second| second.reads).collect::<Vec<_>>()),
        ("source, writes", 2, source.iter().map(|second| second.writes).collect()),
        ("target, reads", 6, target.iter().map(|second| second.reads).collect()),
        ("target, writes", 1, target.iter().map(|second| second.writes).collect()),
    ];
    let ends = source.len().max(target.len()).saturating_sub(1);
    lines
        .into_iter()
        .map(|(name, colour, counts)| {
            let at = |second: usize| counts.get(second).copied().unwrap_or(0) as f64;
            let points = (0..ends).map(|second| [second as f64 * scale as f64, at(second)]);
            Series { name: name.to_owned(), colour, points: points.collect() }
        })
        .collect()
}
