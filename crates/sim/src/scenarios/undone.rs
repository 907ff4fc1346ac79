//! Moves that are undone while requests hang: what was given up comes back late, and the process dies before the end.

use std::time::Duration;

use super::{common, sparse};
use crate::dice::Dice;
use crate::disk::Faults;
use crate::guest::Load;
use crate::story::{Happening, Story};
use crate::words::{operator, process};

/// Copies of many pieces hang when the move is cancelled, and come back when the target is nobody's or another move's.
pub(super) fn target_given_up(dice: &Dice) -> Story {
    let load = Load {
        requests: 300,
        outstanding: dice.pick(&[1, 4]),
        reads: 0.3,
        think: Duration::from_millis(200),
        ..Load::default()
    };
    let stuck = Faults { stuck: dice.pick(&[0.01, 0.05]), ..Faults::default() };
    let story = common(dice).guest(load).dirty_target(true).filled(dice.pick(&[0.0, 0.5])).target(stuck);
    story.with(Happening::Cancel, dice.within(1..=2))
}

/// A guest request that hangs keeps a long move from being undone. The guest writes on meanwhile, and nobody keeps track
/// of it any more; then the process dies. The progress map is written every five seconds: what it says of the time before
/// the cancel, it must not say of the time after.
pub(super) fn crashed(dice: &Dice) -> Story {
    let stuck = Faults { stuck: dice.pick(&[0.01, 0.03]), ..Faults::default() };
    let load = Load { think: Duration::from_secs(dice.pick(&[1, 3])), ..sparse(dice) };
    let cancel = Duration::from_millis(3000 + 500 * dice.below(16));
    let death = cancel + Duration::from_millis(500 * dice.below(40));
    common(dice)
        .guest(load)
        .filled(dice.pick(&[0.0, 0.5, 1.0]))
        .source(stuck)
        .and(operator().cancels_after(cancel))
        .and(process().killed_after(death))
        .within(Duration::from_secs(30))
        .options(|options| options.bandwidth = Some(300 << 10))
}
