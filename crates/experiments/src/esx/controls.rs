//! Control experiments. Each is a move that differs from an evaluation's move in one thing only. That thing is assumed
//! to be why one of our numbers differs from the paper's. If the experiment shows that, the difference is explained;
//! otherwise it stays unexplained.

use super::Runs;
use super::grid::{Setup, percent};
use super::load::Load;
use super::scene::{FASTER_READ_RATE, Place, Scene, Seen};
use super::way::{LONG_HOLD_SECONDS, Way};
use crate::figure::Experiment;

/// By so many points more than on the usual array a guest must cost the copy for this to be the reason.
const POINTS: f64 = 0.02;

/// Whether the number of a control shows why ours is not the paper's: at least half of the difference is gone.
fn closes(paper: f64, ours: f64, control: f64) -> bool {
    (control - paper).abs() <= (ours - paper).abs() / 2.0
}

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

/// Snapshotting and mirroring from an array that reads faster than the one that was fitted to what mirroring costs.
pub(super) struct FasterReads;

impl FasterReads {
    pub(super) const WHY: &str = "How fast the paper's array reads is not stated. The model's rate was fitted to what mirroring costs the \
         guest in the mean over all loads, so mirroring costs a guest with few requests more than the paper's.";
    const WAYS: [Way; 2] = [Way::PaperMirror, Way::Snapshot];

    fn of_way(setup: &Setup, way: Way, load: usize) -> Scene {
        Scene { from: Place::FasterReads, ..setup.under_load(way, load) }
    }

    pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
        let over = |way: Way| setup.loads.iter().map(move |load| Self::of_way(setup, way, *load));
        Self::WAYS.into_iter().flat_map(over).collect()
    }

    /// What comes of the claim that snapshotting costs more at every load.
    pub(super) fn of(setup: &Setup, runs: &Runs) -> Experiment {
        let cost = |way: Way, load: usize| runs.get(&Self::of_way(setup, way, load)).cost();
        let over_mirror = |load: &usize| cost(Way::Snapshot, *load) / cost(Way::PaperMirror, *load);
        let times: Vec<f64> = setup.loads.iter().map(over_mirror).collect();
        let told = times.iter().map(|times| format!("{times:.2}")).collect::<Vec<_>>().join(", ");
        let rate = FASTER_READ_RATE / 1_000_000;
        let seen = format!("from an array that reads {rate} MB/s it costs {told} times as much");
        Experiment { seen, shows: times.iter().all(|times| *times > 1.0) }
    }
}

/// Snapshotting into overlays that are files in which blocks are allocated ([`super::allocated`]).
pub(super) struct AllocatedOverlays;

impl AllocatedOverlays {
    pub(super) const WHY: &str = "The paper's snapshots allocate what is written to them in files, and maintain indirections; a \
         block of our overlay is where it is in the volume, and costs a sector of a map.";
    const WITH: &str = "with overlays that are files, in which one block after another is allocated in 2.15 ms,";

    const fn of_way(way: Way) -> Way {
        match way {
            Way::Snapshot => Way::SnapshotAllocated,
            other => other,
        }
    }

    pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
        setup.loads.iter().map(|load| setup.under_load(Way::SnapshotAllocated, *load)).collect()
    }

    /// What becomes of a number of the paper's that `value` gives for both ways to snapshot.
    pub(super) fn number(what: &str, unit: &str, paper: f64, value: impl Fn(Way) -> f64) -> Experiment {
        let [usual, control] = [Way::Snapshot, Way::SnapshotAllocated].map(value);
        let seen = format!("{} {what} is {control:.2} {unit}, not {usual:.2} {unit}", Self::WITH);
        Experiment { seen, shows: closes(paper, usual, control) }
    }

    /// What becomes of a shape, where `holds` says of both whether it is there, and `value` what is seen.
    pub(super) fn shape(
        what: &str,
        seen: impl Fn(Way) -> String,
        holds: impl Fn(fn(Way) -> Way) -> bool,
    ) -> Experiment {
        let seen = format!("{} {what} is {}", Self::WITH, seen(Way::SnapshotAllocated));
        Experiment { seen, shows: holds(Self::of_way) }
    }
}

/// DBT with Exchange that is content with a longer downtime.
pub(super) struct LongHold;

impl LongHold {
    pub(super) const WHY: &str = "The paper's logic forces a downtime of more than 5 s on a guest whose move converges too slowly, if \
         it is short enough, and does not state when; ours goes on until what is left fits 5 s.";

    pub(super) const fn of_way(way: Way) -> Option<Way> {
        match way {
            Way::Dbt => Some(Way::DbtLongHold),
            Way::IncrementalDbt => Some(Way::IncrementalDbtLongHold),
            _ => None,
        }
    }

    /// What comes of `control`, whose downtime is `paper` seconds in the paper, instead of `usual`.
    pub(super) fn of(control: &Seen, usual: &Seen, paper: f64) -> Experiment {
        let told = match control.switched {
            true => format!("moves in {:.0} s and holds the guest for {:.1} s", control.seconds, control.downtime),
            false => format!("fails after {:.0} s", control.seconds),
        };
        let seen = format!("where {LONG_HOLD_SECONDS} s are short enough it {told}, not {:.1} s", usual.downtime);
        Experiment { seen, shows: control.switched && closes(paper, usual.downtime, control.downtime) }
    }
}

/// Our mirror without regard to the guest.
pub(super) struct Unpaced;

impl Unpaced {
    pub(super) const WHY: &str = "Ours gives way to the guest, which costs time.";

    pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
        setup.loads.iter().map(|load| setup.under_load(Way::MirrorUnpaced, *load)).collect()
    }

    /// What came of it at the load at which ours takes the longest, against an offline copy of `offline` seconds of
    /// which it is to take no more than `times`.
    pub(super) fn of(setup: &Setup, runs: &Runs, offline: f64, times: f64) -> Experiment {
        let longest = |way: Way| {
            let seconds = setup.loads.iter().map(|load| (setup.seen(runs, way, *load).seconds / offline, *load));
            seconds.fold((0.0, 0), |one, other| if other.0 > one.0 { other } else { one })
        };
        let (paced, load) = longest(Way::Mirror);
        let (unpaced, _) = longest(Way::MirrorUnpaced);
        let penalty = |way| percent(setup.seen(runs, way, load).penalty());
        let seen = format!(
            "without regard to the guest it takes {unpaced:.3} x at most, not {paced:.3} x, and the guest loses {} with {load} \
             outstanding, not {}",
            penalty(Way::MirrorUnpaced),
            penalty(Way::Mirror)
        );
        Experiment { seen, shows: unpaced <= times }
    }
}

/// The mail server with fewer pages that are ever written.
pub(super) struct FewerPages;

impl FewerPages {
    pub(super) const WHY: &str = "By Zipf's law most of what a pass leaves dirty was written once: that must be copied, and only what \
         is hot need not be. How many pages the paper's server writes to is not stated.";

    pub(super) const fn of_scene(scene: Scene) -> Scene {
        Scene { load: Load::HotMailServer, ..scene }
    }

    /// What comes of it: the passes of plain DBT and of DBT with both optimisations, which are to be `most` at most.
    pub(super) fn of([plain, optimised]: [f64; 2], most: f64) -> Experiment {
        let seen = format!(
            "where the server writes as often to a fifth of the pages DBT takes {plain:.0} passes, and {optimised:.0} with both \
             optimisations"
        );
        Experiment { seen, shows: optimised <= most && plain > most }
    }
}

/// Other disk sizes under a lighter load than figure 5's.
pub(super) struct LighterLoad;

impl LighterLoad {
    pub(super) const WHY: &str = "How many requests the paper's guest has outstanding is not stated.";
    /// What is outstanding.
    const OUTSTANDING: usize = 2;

    pub(super) const fn of_scene(scene: Scene) -> Scene {
        Scene { load: Load::Oltp { outstanding: Self::OUTSTANDING }, ..scene }
    }

    /// What becomes of a number of the paper's, in per cent, which is `usual` in the evaluation's load and `control` here.
    pub(super) fn number(paper: f64, usual: f64, control: f64) -> Experiment {
        let seen = format!("with {} outstanding it is {control:.1} %, not {usual:.1} %", Self::OUTSTANDING);
        Experiment { seen, shows: closes(paper, usual, control) }
    }
}

/// Snapshotting into overlays that are looked up, for longer the larger they are.
pub(super) struct LookedUpOverlays;

impl LookedUpOverlays {
    pub(super) const WHY: &str = "The paper's snapshots fragment, and are looked up in more and more indirections as they grow; a \
         block of our overlay is where it is in the volume, and its map is in memory.";

    pub(super) const fn of_scene(scene: Scene) -> Scene {
        Scene { way: Way::SnapshotLookedUp, ..scene }
    }

    /// What becomes of a number of the paper's, in per cent, which is `usual` with our overlays and `control` here.
    pub(super) fn number(paper: f64, usual: f64, control: f64) -> Experiment {
        let seen = format!(
            "with overlays that are files in which a lookup takes 1 ms for every GiB that they hold, one at a time, it is \
             {control:.1} %, not {usual:.1} %"
        );
        Experiment { seen, shows: closes(paper, usual, control) }
    }
}

/// DBT that tracks blocks of the guest's size.
pub(super) struct FineTracking;

impl FineTracking {
    pub(super) const WHY: &str = "A write of 8 KiB has a chunk of 64 KiB copied again; how large the blocks are that the paper \
         tracks is not stated.";

    pub(super) const fn of_way(way: Way) -> Way {
        match way {
            Way::Dbt => Way::FineDbt,
            Way::IncrementalDbt => Way::FineIncrementalDbt,
            other => other,
        }
    }

    pub(super) fn scenes(setup: &Setup, loads: &[usize]) -> Vec<Scene> {
        let of_load =
            |load: &usize| Way::TRACKING.iter().map(|way| setup.under_load(Self::of_way(*way), *load)).collect();
        loads.iter().flat_map(|load| -> Vec<Scene> { of_load(load) }).collect()
    }

    /// What comes of it: `seen`, and whether it `shows` the shape.
    pub(super) fn shape(seen: &str, shows: bool) -> Experiment {
        Experiment { seen: format!("where DBT tracks blocks of 8 KiB: {seen}"), shows }
    }
}
