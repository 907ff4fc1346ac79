//! The places of a policy as they stood at one moment. A copy is made of them under the cache's lock, which takes some milliseconds for
//! millions of places. To go along a list takes a hundred times as long, and is done without it.

use super::lists::NONE;

/// Which places hold a block, and which of their blocks would go last.
pub(in crate::cache) enum Order {
    /// In lists, one after the other: the first of each, the place behind each, and how often it was used, if that goes before its position.
    Lists { firsts: Vec<u32>, behind: Vec<u32>, uses: Vec<u8> },
    /// A bit for each place, without any order.
    Bits(Vec<u64>),
}

impl Order {
    /// At most `max` places, those first whose blocks would go last.
    pub(in crate::cache) fn hottest(&self, max: usize) -> Vec<u32> {
        match self {
            Self::Lists { firsts, behind, uses } if uses.is_empty() => in_lists(firsts, behind).take(max).collect(),
            Self::Lists { firsts, behind, uses } => {
                let mut by_uses: Vec<Vec<u32>> = Vec::new();
                for place in in_lists(firsts, behind) {
                    let used = usize::from(uses[place as usize]);
                    by_uses.resize_with(by_uses.len().max(used + 1), Vec::new);
                    by_uses[used].push(place);
                }
                by_uses.into_iter().rev().flatten().take(max).collect()
            }
            Self::Bits(words) => (0..words.len() as u32 * 64)
                .filter(|place| words[*place as usize / 64] >> (place % 64) & 1 == 1)
                .take(max)
                .collect(),
        }
    }
}

fn in_lists<'a>(firsts: &'a [u32], behind: &'a [u32]) -> impl Iterator<Item = u32> + use<'a> {
    let some = |place: u32| (place != NONE).then_some(place);
    firsts.iter().flat_map(move |first| std::iter::successors(some(*first), move |place| some(behind[*place as usize])))
}
