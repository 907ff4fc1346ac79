//! One cycle: a move, what is done to it, and its end.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::Signal;
use serde_json::Value;
use transhume_guest::Daemon;

use crate::client::Client;
use crate::party::{Party, Whereabouts};
use crate::plan::{InjectedFault, Plan};
use crate::stall::Stalled;
use crate::testbed::{SURROGATE, Testbed};

/// What the command line exits with when a move is over already, or is not under way.
const WRONG_STATE: i32 = 9;

/// What a cycle was, for those who check it.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Where the volume was before.
    pub(crate) source: Whereabouts,
    /// Where it was to go.
    pub(crate) target: PathBuf,
    /// The job, when it was over.
    pub(crate) job: Value,
    /// Whether the daemon said that it has cancelled the move.
    pub(crate) was_cancelled: bool,
    /// Whether the daemon was killed or restarted meanwhile.
    pub(crate) was_restarted: bool,
    /// Whether the target's file system was full.
    pub(crate) was_filled: bool,
}

/// A move under way.
pub(crate) struct Move<'a> {
    party: &'a Party,
    plan: &'a Plan,
    id: u64,
    outcome: Outcome,
}

impl<'a> Move<'a> {
    /// Begins to move a volume as `plan` says, in cycle `number`.
    pub(crate) fn begin(testbed: &Testbed, party: &'a Party, plan: &'a Plan, number: u32) -> anyhow::Result<Self> {
        let at = &party.here;
        let fills = plan.faults.iter().any(|(_, fault)| *fault == InjectedFault::Fill);
        let kept = at.kept.as_ref().filter(|(place, _)| plan.overwrite_kept && *place == plan.place && !fills);
        let target = match kept {
            Some((_, path)) => path.clone(),
            None => {
                if let Some((_, path)) = &at.kept {
                    std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
                }
                testbed.path(plan.place, &format!("{}-{number}.raw", party.name))
            }
        };
        let to = testbed.address(plan.place, &target);
        let bandwidth = format!("{}MiB/s", plan.bandwidth);
        let mut words = vec!["move", party.name, "--to", &to, "--detach", "--verify", plan.verify];
        words.extend(["--bandwidth", &bandwidth, "--strategy", plan.strategy_from(at.place)]);
        words.extend((kept.is_some() || !plan.place.is_file()).then_some("--overwrite"));
        words.extend(plan.delete_source.then_some("--delete-source"));
        words.extend(party.client.is_adopted().then_some("--no-persist"));
        if plan.surrogate_from(at.place) {
            words.extend(["--surrogate", SURROGATE]);
        }
        if let Some(mode) = plan.cache_from(at.place) {
            testbed.add_cache(party.name, mode)?;
        }
        let id = testbed.daemon.json(&words)?["id"].as_u64().context("a job has a number")?;
        let outcome = Outcome {
            source: at.clone(),
            target,
            job: Value::Null,
            was_cancelled: false,
            was_restarted: false,
            was_filled: false,
        };
        Ok(Self { party, plan, id, outcome })
    }
}

/// Plays what happens to `moves` until all of them are over, and gives how each went.
pub(crate) fn play(testbed: &mut Testbed, mut moves: Vec<Move<'_>>) -> anyhow::Result<Vec<Outcome>> {
    let mut faults = Vec::new();
    for (index, it) in moves.iter().enumerate() {
        let mut at = Duration::ZERO;
        for (pause, fault) in &it.plan.faults {
            at += *pause;
            faults.push((at, index, *fault));
        }
    }
    faults.sort_by_key(|(at, ..)| *at);
    let mut before = Duration::ZERO;
    for (at, index, fault) in faults {
        std::thread::sleep(at - before);
        before = at;
        strike(testbed, &mut moves[index], fault).with_context(|| format!("{fault:?}"))?;
        if fault.restarts() {
            moves.iter_mut().for_each(|it| it.outcome.was_restarted = true);
        }
    }
    for Move { party, .. } in &moves {
        steer(&testbed.daemon, &["set", party.name, "--bandwidth", "0"])?;
        steer(&testbed.daemon, &["resume", party.name])?;
    }
    for it in &mut moves {
        it.outcome.job = testbed.daemon.wait_for_job(it.id)?;
    }
    testbed.wait_for_surrogate()?;
    testbed.take_caches_out()?;
    testbed.empty();
    Ok(moves.into_iter().map(|it| it.outcome).collect())
}

fn strike(testbed: &mut Testbed, it: &mut Move<'_>, fault: InjectedFault) -> anyhow::Result<()> {
    let (client, name, outcome) = (&it.party.client, it.party.name, &mut it.outcome);
    match fault {
        InjectedFault::Kill => {
            testbed.daemon.kill();
            testbed.daemon.start()?;
        }
        InjectedFault::KillAgain(after) => {
            testbed.daemon.kill();
            testbed.daemon.launch()?;
            std::thread::sleep(after);
            testbed.daemon.kill();
            testbed.daemon.start()?;
        }
        InjectedFault::Restart => {
            testbed.daemon.terminate()?;
            testbed.daemon.start()?;
        }
        InjectedFault::Freeze(length) => {
            testbed.daemon.signal(Signal::STOP)?;
            std::thread::sleep(length);
            testbed.daemon.signal(Signal::CONT)?;
        }
        InjectedFault::FreezeClient(length) => {
            client.freeze(true)?;
            std::thread::sleep(length);
            client.freeze(false)?;
        }
        InjectedFault::Cut(length) => {
            testbed.daemon.signal(Signal::STOP)?;
            std::thread::sleep(length / 2);
            on_the_way(client, fault)?;
            std::thread::sleep(length / 2);
            testbed.daemon.signal(Signal::CONT)?;
        }
        InjectedFault::Stall(number, length) => {
            let daemon = testbed.daemon.pid().context("the daemon runs")?;
            let stalled = Stalled::worker(daemon, number)?;
            std::thread::sleep(length / 8);
            on_the_way(client, fault)?;
            std::thread::sleep(length);
            drop(stalled);
        }
        InjectedFault::Hold(_) | InjectedFault::Trickle(..) => on_the_way(client, fault)?,
        InjectedFault::Bandwidth(mib) => {
            steer(&testbed.daemon, &["set", name, "--bandwidth", &format!("{mib}MiB/s")]).map(drop)?
        }
        InjectedFault::Pause(length) => {
            steer(&testbed.daemon, &["pause", name])?;
            std::thread::sleep(length);
            steer(&testbed.daemon, &["resume", name])?;
        }
        InjectedFault::Cancel => outcome.was_cancelled |= steer(&testbed.daemon, &["cancel", name])?,
        InjectedFault::StartWithoutServer(length) => testbed.start_without_server(length)?,
        InjectedFault::Fill => {
            testbed.fill()?;
            outcome.was_filled = true;
        }
    }
    Ok(())
}

fn on_the_way(client: &Client, fault: InjectedFault) -> anyhow::Result<()> {
    let proxy = client.proxy().context("only who goes through the proxy is drawn this")?;
    let pause = |length: Duration| std::thread::sleep(length);
    match fault {
        InjectedFault::Hold(length) => {
            proxy.hold(true);
            pause(length);
            proxy.hold(false);
        }
        InjectedFault::Trickle(bytes_per_second, length) => {
            proxy.slow_down(bytes_per_second);
            pause(length);
            proxy.slow_down(0);
        }
        _ => proxy.cut(),
    }
    Ok(())
}

/// Steers the move; says whether there was one to steer.
pub(crate) fn steer(daemon: &Daemon, words: &[&str]) -> anyhow::Result<bool> {
    match daemon.ask(words)? {
        Ok(_) => Ok(true),
        Err((WRONG_STATE, _)) => Ok(false),
        Err((code, said)) => bail!("{words:?}: {code}: {said}"),
    }
}
