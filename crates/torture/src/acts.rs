//! `cargo xtask torture`: the real counterpart of the simulator. The real daemon with real clients is killed, cut,
//! throttled, frozen and filled, at random from a seed. Meanwhile it moves a volume again and again. After each cycle
//! nothing may be lost, left behind or unreported.
//!
//! ```text
//! act (a seed):  folder, places, daemon, clients ──▶ cycle ──▶ cycle ──▶ ... ──▶ clients finish ──▶ folder removed
//! cycle:         one volume's or both volumes' moves begin ──▶ blows ──▶ they end ──▶ clients read everything ──▶ checks
//! ```
//!
//! The order of what is done follows from the seed; how it meets the machine's own timing does not. So a seed that has
//! failed fails again often, not always, and a failure keeps its folder.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use transhume_guest::programs::{build_debug_programs, private_folder};

use crate::alone::{is_alone, is_root, run_alone, seed_of_clock};
use crate::checks;
use crate::client::{BESIDE, Client, VOLUME};
use crate::cycle::{self, Move, Outcome};
use crate::party::{Party, Whereabouts};
use crate::plan::{Cast, ClientKind, InjectedFault, Place, Plan, Rng};
use crate::tally::{STARTS_WITHOUT_SERVER, Tally};
use crate::testbed::{Testbed, tell_log, text};

/// Arguments of `cargo xtask torture`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Stop after so many minutes.
    #[arg(long, value_name = "M")]
    minutes: Option<f64>,
    /// Stop after so many cycles; 200 unless minutes are given.
    #[arg(long, value_name = "N")]
    cycles: Option<u32>,
    /// At most so many cycles of an act, for more acts in fewer cycles.
    #[arg(long, value_name = "N", default_value_t = u32::MAX, hide_default_value = true)]
    act_cycles: u32,
    /// The first act's seed; the next acts count on from it. Taken from the clock unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// Only this client: load, fio or guest.
    #[arg(long, value_parser = parse_kind)]
    client: Option<ClientKind>,
    /// A cache in the path of every volume that can have one, instead of one in three.
    #[arg(long)]
    cache: bool,
    /// The programs in this folder (transhumed, transhume, nbd-load), instead of building them.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// Where the volumes' folder is made, on a file system with direct IO; `target/` unless said otherwise.
    #[arg(long)]
    folder: Option<PathBuf>,
}

fn parse_kind(text: &str) -> Result<ClientKind, String> {
    match text {
        "load" => Ok(ClientKind::Load),
        "fio" => Ok(ClientKind::Fio),
        "guest" => Ok(ClientKind::Guest),
        _ => Err("it is load, fio or guest".into()),
    }
}

const CYCLES: u32 = 200;

/// Plays acts until there were enough.
pub(crate) fn play_all(arguments: &Arguments) -> anyhow::Result<()> {
    if is_root() && !is_alone() {
        return run_alone();
    }
    if !is_root() {
        println!("not root: no file systems of its own and no block devices");
    }
    let programs = match &arguments.programs {
        Some(programs) => programs.clone(),
        None => build_debug_programs()?,
    };
    let first = arguments.seed.unwrap_or_else(seed_of_clock);
    let end = arguments.minutes.map(|minutes| Instant::now() + Duration::from_secs_f64(minutes * 60.0));
    let cycles = arguments.cycles.unwrap_or(if end.is_some() { u32::MAX } else { CYCLES });
    let begun = Instant::now();
    let mut tally = Tally::default();
    let mut places = Vec::new();
    for seed in first.. {
        let is_time_over = end.is_some_and(|end| Instant::now() >= end);
        if tally.cycles >= cycles || is_time_over {
            break;
        }
        let limits = Limits { cycles: arguments.act_cycles.min(cycles - tally.cycles), end, cache: arguments.cache };
        let parent = arguments.folder.as_deref().unwrap_or(&programs);
        let before = tally.cycles;
        match act(seed, &programs, parent, arguments.client, &limits, &mut tally) {
            // Only our load goes to a server.
            Ok(mut there) => {
                there.retain(|place| {
                    *place != Place::Server || arguments.client.is_none_or(|it| it == ClientKind::Load)
                });
                places = there;
            }
            Err(error) => {
                let client =
                    arguments.client.map_or(String::new(), |kind| format!(" --client {kind:?}").to_lowercase());
                let cache = if arguments.cache { " --cache" } else { "" };
                eprintln!(
                    "\nagain: cargo xtask torture --seed {seed} --cycles {}{client}{cache}",
                    tally.cycles - before
                );
                return Err(error);
            }
        }
    }
    tally.tell(begun.elapsed());
    tally.fulfilled(&places)
}

/// When to stop, and what else a person has asked for.
struct Limits {
    cycles: u32,
    end: Option<Instant>,
    /// Every volume has a cache that can have one.
    cache: bool,
}

/// One act, in a folder that is removed unless something is wrong. Gives the places that there were.
fn act(
    seed: u64,
    programs: &Path,
    parent: &Path,
    client: Option<ClientKind>,
    limits: &Limits,
    tally: &mut Tally,
) -> anyhow::Result<Vec<Place>> {
    let folder = private_folder(parent)?;
    let mut rng = Rng::new(seed);
    let mut cast = rng.act();
    cast.kind = client.unwrap_or(cast.kind);
    let mut testbed = Testbed::set(programs, folder.path(), cast.bytes)?;
    tally.acts += 1;
    let beside = cast.beside.map_or(String::new(), |bytes| format!(", beside it one of {bytes} bytes"));
    println!("act {seed}: {:?} on a volume of {} bytes{beside}", cast.kind, cast.bytes);
    let outcome = play((cast, rng), programs, &mut testbed, limits, tally);
    let Err(error) = outcome else { return Ok(testbed.places()) };
    tell_log(&testbed.daemon);
    testbed.keep()?;
    drop(testbed);
    let kept = folder.keep();
    Err(error.context(format!("seed {seed}; everything is kept in {}", text(&kept))))
}

/// The volumes of an act, each with its client.
fn parties(cast: &Cast, rng: &mut Rng, programs: &Path, testbed: &Testbed) -> anyhow::Result<Vec<Party>> {
    let second = cast.beside.map(|bytes| (BESIDE, ClientKind::Load, bytes));
    let mut parties = Vec::new();
    for (name, kind, bytes) in [(VOLUME, cast.kind, cast.bytes)].into_iter().chain(second) {
        let path = testbed.path(Place::Disk, &format!("{name}-0.raw"));
        transhume_guest::create_filled(&path, bytes)?;
        let client = Client::start((kind, name), testbed, programs, &path, rng.seed())?;
        parties.push(Party { name, bytes, client, here: Whereabouts { place: Place::Disk, path, kept: None } });
    }
    Ok(parties)
}

fn play(
    (cast, mut rng): (Cast, Rng),
    programs: &Path,
    testbed: &mut Testbed,
    limits: &Limits,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let mut parties = parties(&cast, &mut rng, programs, testbed)?;
    for number in 1..=cast.cycles.min(limits.cycles) {
        if limits.end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
        // Two do not fit on the small file system, and there is one block device and one export.
        let is_free = |place: &Place| *place != parties[0].here.place || place.has_room();
        let places: Vec<Place> = testbed.places().into_iter().filter(is_free).collect();
        let mut plans = vec![rng.plan(cast.kind, &places)];
        if parties.len() > 1 && rng.moves_beside(number) {
            let roomy: Vec<Place> = testbed.places().into_iter().filter(|place| place.has_room()).collect();
            plans.push(rng.plan_beside(&roomy));
        }
        if limits.cache {
            plans.iter_mut().for_each(Plan::take_cache);
        }
        tally.cycles += 1;
        for (party, plan) in parties.iter().zip(&plans) {
            announce(number, party, plan, tally);
        }
        play_cycle(number, &mut parties, &plans, &mut rng, testbed, tally)
            .with_context(|| format!("cycle {number}, {plans:?}"))?;
    }
    for Party { name, client, .. } in parties {
        tally.note_requests(&client.finish(testbed, name)?);
    }
    Ok(())
}

fn announce(number: u32, party: &Party, plan: &Plan, tally: &mut Tally) {
    let faults: Vec<String> = plan.faults.iter().map(|(_, fault)| format!("{fault:?}")).collect();
    let strategy = plan.strategy_from(party.here.place);
    let surrogate = if plan.surrogate_from(party.here.place) { ", with a surrogate" } else { "" };
    let cache = plan.cache_from(party.here.place).map_or_else(String::new, |mode| format!(", with a {mode} cache"));
    println!(
        "  {number}: {} to {:?} by {strategy}{surrogate}{cache}, verify {}, {} MiB/s: {}",
        party.name,
        plan.place,
        plan.verify,
        plan.bandwidth,
        faults.join(", ")
    );
    *tally.strategies.entry(strategy).or_default() += 1;
    tally.note_size(party.bytes);
    if !cache.is_empty() {
        tally.note("kills of a daemon with a cache", plan.faults.iter().map(|(_, fault)| fault.kills()).sum());
    }
    if [plan.place, party.here.place].contains(&Place::Server) {
        let starts = plan.faults.iter().filter(|(_, fault)| matches!(fault, InjectedFault::StartWithoutServer(_)));
        tally.note(STARTS_WITHOUT_SERVER, starts.count() as u64);
    }
    for fault in faults {
        *tally.faults.entry(fault.split('(').next().unwrap_or_default().to_owned()).or_default() += 1;
    }
}

/// Moves the first of `parties` by the first of `plans`, and so on, and checks all of them.
fn play_cycle(
    number: u32,
    parties: &mut [Party],
    plans: &[Plan],
    rng: &mut Rng,
    testbed: &mut Testbed,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    for party in &mut *parties {
        party.client.begin_cycle(testbed, party.bytes, rng.seed())?;
    }
    let moves = parties.iter().zip(plans).map(|(party, plan)| Move::begin(testbed, party, plan, number));
    let moves = moves.collect::<anyhow::Result<Vec<_>>>()?;
    let outcomes = cycle::play(testbed, moves)?;
    for party in &mut *parties {
        party.client.verify().with_context(|| format!("the client of {}", party.name))?;
    }
    let mut told = Vec::new();
    for ((party, plan), outcome) in parties.iter_mut().zip(plans).zip(&outcomes) {
        let now =
            checks::check(testbed, party.name, plan, outcome).with_context(|| format!("the move of {}", party.name))?;
        let state = outcome.job["state"].as_str().unwrap_or_default();
        told.push(format!("{} {state}", party.name));
        if state == "done" {
            tally.note_arrival(now.place);
        }
        party.here = now;
    }
    checks::nothing_is_left(testbed, parties)?;
    if let [one, other] = &outcomes[..] {
        tally.note("cycles in which two volumes moved at once", u64::from(overlap(one, other)));
    }
    println!("     {} after {:.1} s", told.join(", "), begun.elapsed().as_secs_f64());
    if plans[0].readopt {
        parties[0].client.readopt(testbed)?;
    }
    Ok(())
}

/// Whether two moves were under way at the same time.
fn overlap(one: &Outcome, other: &Outcome) -> bool {
    let time = |outcome: &Outcome, what: &str| outcome.job[what].as_u64().unwrap_or_default();
    let (began, ended) = ("started_unix_ms", "finished_unix_ms");
    time(one, began).max(time(other, began)) < time(one, ended).min(time(other, ended))
}
