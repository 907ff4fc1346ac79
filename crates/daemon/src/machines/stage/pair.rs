//! Every pair of records that a move of a machine can leave at its two hosts, found by search.
//!
//! What happens is one step at a time, in any order: each store, each thing that QEMU does, a person's word, a process that ends.
//! The daemons act from what is on record alone, so that a crash between any two steps is in it: whoever comes back does one
//! of the same steps next. The steps ask what the daemon asks, [`Stage::may_become`] and [`judge`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Stage;
use crate::machines::tending::{DiskHere, Judged, judge};

/// What the record of the group says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    None,
    Open,
    Committed,
}

/// A QEMU of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Qemu {
    None,
    /// Its guest runs.
    Runs,
    /// The source's: the guest is stopped, and sent.
    Sent,
    /// The target's: it waits for the machine.
    Waits,
    /// The target's: it has all of the machine.
    Loaded,
}

/// Both hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Hosts {
    source: Stage,
    group: Group,
    /// The source's journal says that the target holds the disk.
    is_given_up: bool,
    source_qemu: Qemu,
    /// None: the target has no record.
    target: Option<Stage>,
    disk: Disk,
    target_qemu: Qemu,
    /// The target is to be told that the move does not count.
    owes_abandon: bool,
    /// The source may still have the target take the disk.
    moves: u8,
}

/// The disk at the target, as [`DiskHere`] without what other volumes add.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Disk {
    Missing,
    Coming,
    Held,
}

const BEFORE: Hosts = Hosts {
    source: Stage::Rests,
    group: Group::None,
    is_given_up: false,
    source_qemu: Qemu::Runs,
    target: None,
    disk: Disk::Missing,
    target_qemu: Qemu::None,
    owes_abandon: false,
    moves: 2,
};

/// Who takes a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// A daemon, sooner or later.
    Daemon,
    /// A documented command.
    Person,
    /// Nobody who must: a fault, or somebody else.
    Chance,
}

type Step = (&'static str, By, fn(Hosts) -> Option<Hosts>);

fn becomes(stage: Stage, next: Stage) -> Stage {
    assert!(stage.may_become(next), "{stage:?} becomes {next:?}");
    next
}

fn judged(hosts: Hosts) -> Option<Judged> {
    let disk = match hosts.disk {
        Disk::Missing => DiskHere::Missing,
        Disk::Coming => DiskHere::Coming,
        Disk::Held => DiskHere::Held,
    };
    judge(&[disk], hosts.target == Some(Stage::Loading))
}

fn is_going(hosts: Hosts) -> bool {
    matches!(hosts.source, Stage::GoesUnbegun | Stage::Goes)
}

/// By the record of the group, and by nothing that is missing.
fn is_committed(hosts: Hosts) -> bool {
    hosts.source == Stage::Goes && hosts.group == Group::Committed
}

fn is_not_committed(hosts: Hosts) -> bool {
    hosts.source == Stage::GoesUnbegun || hosts.source == Stage::Goes && hosts.group == Group::Open
}

const STEPS: [Step; 21] = [
    ("vm move", By::Person, |it| {
        let may_move = it.source == Stage::Rests && it.source_qemu == Qemu::Runs && it.moves > 0 && !it.owes_abandon;
        may_move.then(|| Hosts { source: becomes(it.source, Stage::GoesUnbegun), moves: it.moves - 1, ..it })
    }),
    ("the target has it on record", By::Chance, |it| {
        let is_asked = it.source == Stage::GoesUnbegun && it.target.is_none() && it.disk == Disk::Missing;
        is_asked.then_some(Hosts { target: Some(Stage::Coming), ..it })
    }),
    ("the group is on record", By::Chance, |it| {
        let is_next = it.source == Stage::GoesUnbegun && it.target.is_some() && it.group == Group::None;
        is_next.then_some(Hosts { group: Group::Open, ..it })
    }),
    ("the machine's record names it", By::Chance, |it| {
        let is_next = it.source == Stage::GoesUnbegun && it.group == Group::Open;
        is_next.then(|| Hosts { source: becomes(it.source, Stage::Goes), ..it })
    }),
    ("the target makes a place for the disk", By::Chance, |it| {
        let is_asked = is_not_committed(it) && it.group == Group::Open && it.disk == Disk::Missing && !it.owes_abandon;
        (is_asked && it.target.is_some()).then_some(Hosts { disk: Disk::Coming, ..it })
    }),
    ("the target starts QEMU", By::Chance, |it| {
        let is_asked = is_not_committed(it) && it.target == Some(Stage::Coming) && it.disk == Disk::Coming;
        let target = is_asked.then(|| becomes(Stage::Coming, Stage::Loading))?;
        Some(Hosts { target: Some(target), target_qemu: Qemu::Waits, ..it })
    }),
    ("the guest is stopped and sent", By::Chance, |it| {
        let is_sent = it.source == Stage::Goes && it.group == Group::Open && it.source_qemu == Qemu::Runs;
        (is_sent && it.target_qemu == Qemu::Waits).then_some(Hosts {
            source_qemu: Qemu::Sent,
            target_qemu: Qemu::Loaded,
            ..it
        })
    }),
    ("somebody lets the sent guest go on", By::Chance, |it| {
        let is_possible = it.source_qemu == Qemu::Sent && it.group != Group::Committed;
        is_possible.then_some(Hosts { source_qemu: Qemu::Runs, ..it })
    }),
    ("the commit", By::Chance, |it| {
        let is_ready = it.source == Stage::Goes && it.group == Group::Open && it.disk == Disk::Coming;
        let is_loaded = it.source_qemu == Qemu::Sent && it.target_qemu == Qemu::Loaded;
        (is_ready && is_loaded).then_some(Hosts { group: Group::Committed, ..it })
    }),
    ("the source's journal follows the group", By::Daemon, |it| {
        (is_committed(it) && !it.is_given_up).then_some(Hosts { is_given_up: true, ..it })
    }),
    ("the source's QEMU is ended", By::Daemon, |it| {
        (is_committed(it) && it.source_qemu != Qemu::None).then_some(Hosts { source_qemu: Qemu::None, ..it })
    }),
    ("the target takes the disk", By::Daemon, |it| {
        (it.is_given_up && it.disk == Disk::Coming).then_some(Hosts { disk: Disk::Held, ..it })
    }),
    ("the target's guest runs", By::Daemon, |it| {
        let runs =
            it.target == Some(Stage::Loading) && judged(it) == Some(Judged::All) && it.target_qemu == Qemu::Loaded;
        let target = runs.then(|| becomes(Stage::Loading, Stage::Rests))?;
        Some(Hosts { target: Some(target), target_qemu: Qemu::Runs, ..it })
    }),
    ("the target notes that its QEMU has ended", By::Daemon, |it| {
        let is_lost =
            it.target == Some(Stage::Loading) && judged(it) == Some(Judged::All) && it.target_qemu == Qemu::None;
        let target = is_lost.then(|| becomes(Stage::Loading, Stage::Lost))?;
        Some(Hosts { target: Some(target), ..it })
    }),
    ("the target gives it up", By::Daemon, |it| {
        let is_gone = it.target == Some(Stage::Loading) && judged(it) == Some(Judged::Gone);
        let is_unstarted = it.target == Some(Stage::Coming) && it.disk == Disk::Missing && it.owes_abandon;
        (is_gone || is_unstarted).then_some(Hosts { target: None, target_qemu: Qemu::None, ..it })
    }),
    ("the move is over, the machine there", By::Daemon, |it| {
        let has_arrived = matches!(it.target, None | Some(Stage::Rests | Stage::Lost)) && it.disk != Disk::Coming;
        let is_over = is_committed(it) && it.is_given_up && it.source_qemu == Qemu::None && has_arrived;
        is_over.then(|| Hosts { source: becomes(it.source, Stage::Rests), group: Group::None, ..it })
    }),
    ("the source's guest goes on", By::Daemon, |it| {
        (is_not_committed(it) && it.source_qemu == Qemu::Sent).then_some(Hosts { source_qemu: Qemu::Runs, ..it })
    }),
    ("the move is over, the machine here", By::Daemon, |it| {
        let is_over = is_not_committed(it) && it.source_qemu != Qemu::Sent;
        is_over.then(|| Hosts {
            source: becomes(it.source, Stage::Rests),
            group: Group::None,
            owes_abandon: true,
            ..it
        })
    }),
    ("the target hears that it does not count", By::Daemon, |it| {
        let disk = if it.disk == Disk::Held { Disk::Held } else { Disk::Missing };
        let is_heard = it.owes_abandon && !is_going(it);
        let is_done = is_heard && it.target.is_none() && it.disk == disk;
        is_heard.then_some(Hosts { disk, owes_abandon: !is_done, ..it })
    }),
    ("the target's QEMU ends by itself", By::Chance, |it| {
        let lives = matches!(it.target_qemu, Qemu::Waits | Qemu::Loaded);
        lives.then_some(Hosts { target_qemu: Qemu::None, ..it })
    }),
    ("the source's QEMU ends by itself", By::Chance, |it| {
        (it.source_qemu != Qemu::None).then_some(Hosts { source_qemu: Qemu::None, ..it })
    }),
];

/// What a daemon must not do, whoever asks: each of them ends a story badly.
const MISTAKES: [Step; 5] = [
    ("the guest goes on because its QEMU waits", By::Daemon, |it| {
        (it.source_qemu == Qemu::Sent).then_some(Hosts { source_qemu: Qemu::Runs, ..it })
    }),
    ("QEMU is ended because the move is old", By::Daemon, |it| {
        (it.source == Stage::Goes && !it.is_given_up).then_some(Hosts { is_given_up: true, ..it })
    }),
    ("the target runs what it has loaded", By::Daemon, |it| {
        (it.target_qemu == Qemu::Loaded).then_some(Hosts { target_qemu: Qemu::Runs, ..it })
    }),
    ("the commit is asked for without a look at the guest", By::Chance, |it| {
        let is_ready = it.source == Stage::Goes && it.group == Group::Open && it.disk == Disk::Coming;
        (is_ready && it.target_qemu == Qemu::Loaded).then_some(Hosts { group: Group::Committed, ..it })
    }),
    ("the target forgets what it holds", By::Daemon, |it| {
        (it.owes_abandon || it.disk == Disk::Held).then_some(Hosts { disk: Disk::Missing, target: None, ..it })
    }),
];

/// All that can follow from `steps`, with those that lead to it.
fn search(steps: &[Step]) -> BTreeMap<Hosts, (Option<Hosts>, &'static str)> {
    let mut found = BTreeMap::from([(BEFORE, (None, "the machine runs"))]);
    let mut open = VecDeque::from([BEFORE]);
    while let Some(hosts) = open.pop_front() {
        for (what, _, step) in steps {
            if let Some(next) = step(hosts).filter(|next| *next != hosts && !found.contains_key(next)) {
                found.insert(next, (Some(hosts), what));
                open.push_back(next);
            }
        }
    }
    found
}

fn story(found: &BTreeMap<Hosts, (Option<Hosts>, &'static str)>, end: Hosts) -> String {
    let (mut told, mut at) = (vec![format!("{end:?}")], Some(end));
    while let Some(hosts) = at {
        let (before, what) = found[&hosts];
        told.push(what.to_owned());
        at = before;
    }
    told.reverse();
    told.join("\n  ")
}

/// Whether nothing is under way, as both hosts have it on record.
fn is_at_rest(hosts: Hosts) -> bool {
    let rests = matches!(hosts.target, None | Some(Stage::Rests | Stage::Lost));
    hosts.source == Stage::Rests && rests && hosts.disk != Disk::Coming && !hosts.owes_abandon
}

/// What is wrong with a pair of records, if anything is.
fn wrong(hosts: Hosts) -> Option<&'static str> {
    let [runs_here, runs_there] = [hosts.source_qemu, hosts.target_qemu].map(|qemu| qemu == Qemu::Runs);
    let is_held = hosts.disk == Disk::Held;
    match hosts {
        _ if runs_here && runs_there => Some("two guests"),
        _ if runs_here && is_held => Some("a guest without its disk"),
        _ if runs_there && !is_held => Some("a guest before its disk"),
        _ if is_held && !hosts.is_given_up => Some("a disk is held that was not given up"),
        _ if hosts.is_given_up && hosts.disk == Disk::Missing => Some("the disk is at neither host"),
        _ if hosts.is_given_up && hosts.group == Group::Open => Some("a disk is given up without a commit"),
        _ => None,
    }
}

#[test]
fn no_pair_of_records_has_the_guest_at_both_hosts_or_its_disk_at_neither() {
    let found = search(&STEPS);
    assert!(found.len() > 80, "only {} pairs were found", found.len());
    for hosts in found.keys() {
        let what = wrong(*hosts);
        assert!(what.is_none(), "{what:?}:\n  {}", story(&found, *hosts));
    }
}

#[test]
fn each_mistake_is_seen_in_some_pair_of_records() {
    for mistake in MISTAKES {
        let steps: Vec<Step> = STEPS.into_iter().chain([mistake]).collect();
        let found = search(&steps);
        assert!(found.keys().any(|hosts| wrong(*hosts).is_some()), "nobody sees that {}", mistake.0);
    }
}

#[test]
fn the_daemons_alone_bring_every_pair_of_records_to_rest() {
    let found = search(&STEPS);
    for hosts in found.keys() {
        let (mut seen, mut open) = (BTreeSet::from([*hosts]), vec![*hosts]);
        let mut rests = false;
        while let Some(next) = open.pop() {
            rests |= is_at_rest(next);
            let steps = STEPS.iter().filter(|(_, by, _)| *by == By::Daemon);
            open.extend(steps.filter_map(|(_, _, step)| step(next)).filter(|next| seen.insert(*next)));
        }
        assert!(rests, "nothing leads out of this:\n  {}", story(&found, *hosts));
    }
}

#[test]
fn a_move_can_end_at_either_host_and_with_a_loss_and_nothing_else() {
    let ends: BTreeSet<_> = search(&STEPS).into_keys().filter(|hosts| is_at_rest(*hosts)).collect();
    let at = |hosts: &Hosts| (hosts.is_given_up, hosts.target);
    let kinds: BTreeSet<_> = ends.iter().map(at).collect();
    let expected = [(false, None), (true, Some(Stage::Rests)), (true, Some(Stage::Lost))];
    assert_eq!(kinds, BTreeSet::from(expected));
}

#[test]
fn a_record_becomes_what_the_head_of_the_module_draws_and_nothing_else() {
    use Stage::{Coming, Following, Goes, GoesUnbegun, Loading, Lost, Rests};
    let every = [Rests, GoesUnbegun, Goes, Coming, Loading, Following, Lost];
    let drawn = [
        (Rests, GoesUnbegun),
        (GoesUnbegun, Goes),
        (GoesUnbegun, Rests),
        (Goes, Rests),
        (Coming, Loading),
        (Loading, Rests),
        (Loading, Following),
        (Loading, Lost),
        (Following, Rests),
    ];
    for from in every {
        for to in every {
            assert_eq!(from.may_become(to), from == to || drawn.contains(&(from, to)), "{from:?} {to:?}");
        }
        assert!(from.may_become(Rests) || from.may_be_forgotten(), "nothing leads out of {from:?}");
    }
}
