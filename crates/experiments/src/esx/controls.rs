//! Control experiments. Each is a move that differs from an evaluation's move in one thing only. That thing is assumed
//! to be why one of our numbers differs from the paper's. If the experiment shows that, the difference is explained;
//! otherwise it stays unexplained.

use super::Runs;
use super::grid::{Setup, percent};
use super::scene::{Place, Scene};
use super::way::Way;
use crate::figure::Experiment;

/// By so many points more than on the usual array a guest must cost the copy for this to be the reason.
const POINTS: f64 = 0.02;

/// DBT at the heaviest load, where any downtime may be forced on the guest.
pub(super) struct UnlimitedDowntime;

impl UnlimitedDowntime {
    pub(super) const WHY: &str = "What is left would hold the guest for longer than is forced on it; which limit the paper has is \
         not stated.";

    const fn unlimited(way: Way) -> Option<Way> {
        match way {
            Way::Dbt => Some(Way::DbtUnlimited),
            Way::IncrementalDbt => Some(Way::IncrementalDbtUnlimited),
            _ => None,
        }
    }

    pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
        let ways = Way::TRACKING.iter().filter_map(|way| Self::unlimited(*way));
        ways.map(|way| setup.under_load(way, setup.load_ends().1)).collect()
    }

    /// What came of it; nothing for what is no DBT.
    pub(super) fn of(setup: &Setup, runs: &Runs, way: Way) -> Option<Experiment> {
        let (least, most) = setup.load_ends();
        let seen = setup.seen(runs, Self::unlimited(way)?, most);
        let growth = seen.seconds / setup.seen(runs, way, least).seconds;
        let told = if seen.switched {
            format!(
                "it moves, after {growth:.2} times what it takes with {least}, and holds the guest for {:.0} s",
                seen.downtime
            )
        } else {
            "it fails as well".to_owned()
        };
        let what = format!("where any downtime may be forced, with {most} outstanding {told}");
        Some(Experiment { seen: what, shows: seen.switched })
    }
}

/// Mirroring from an array that reads nothing ahead of the copy.
pub(super) struct NothingAhead;

impl NothingAhead {
    pub(super) const WHY: &str = "The modelled array reads streams ahead in large pieces, so a guest with few requests costs the \
         copy nothing; the paper's copy loses something to it at any load.";

    const fn of_scene(scene: Scene) -> Scene {
        Scene { from: Place::NothingAhead, ..scene }
    }

    pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
        let (least, most) = setup.load_ends();
        let loads = [least, most].map(|load| setup.under_load(Way::PaperMirror, load));
        loads.into_iter().chain([setup.offline(Way::PaperMirror)]).map(Self::of_scene).collect()
    }

    /// What came of it, beside the usual array with its offline copy of `offline` seconds.
    pub(super) fn of(setup: &Setup, runs: &Runs, offline: f64) -> Experiment {
        let own = runs.get(&Self::of_scene(setup.offline(Way::PaperMirror))).seconds;
        let (least, most) = setup.load_ends();
        let longer = |load| {
            let scene = setup.under_load(Way::PaperMirror, load);
            (runs.get(&scene).seconds / offline - 1.0, runs.get(&Self::of_scene(scene)).seconds / own - 1.0)
        };
        let (low, high) = (longer(least), longer(most));
        let seen = format!(
            "from an array that reads nothing ahead mirroring takes {} ({least} outstanding) and {} ({most}) longer than its \
             offline copy of {own:.0} s, not {} and {}",
            percent(low.1),
            percent(high.1),
            percent(low.0),
            percent(high.0)
        );
        Experiment { shows: [low, high].iter().all(|(usual, without)| *without > usual + POINTS), seen }
    }
}
