//! One cycle: a move, what is done to it, and its end.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::Signal;
use serde_json::Value;
use transhume_guest::Daemon;

use super::client::{Client, VOLUME};
use super::plan::{Blow, Place, Plan};
use super::stage::Stage;
use super::stall::Stalled;

/// What the command line exits with when a move is over already, or is not under way.
const WRONG_STATE: i32 = 9;

/// Where the volume is, and what earlier moves have left on purpose.
#[derive(Clone, Debug)]
pub(crate) struct Whereabouts {
    /// The place that holds it.
    pub(crate) place: Place,
    /// Its file or block device.
    pub(crate) path: PathBuf,
    /// The source of the last move, if it is a file that was kept.
    pub(crate) kept: Option<(Place, PathBuf)>,
}

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

/// Plays a cycle to the end of its job. `at` is where the volume is now.
pub(crate) fn play(
    stage: &mut Stage,
    client: &Client,
    plan: &Plan,
    at: &Whereabouts,
    number: u32,
) -> anyhow::Result<Outcome> {
    let fills = plan.blows.iter().any(|(_, blow)| *blow == Blow::Fill);
    let kept = at.kept.as_ref().filter(|(place, _)| plan.overwrite_kept && *place == plan.place && !fills);
    let target = match kept {
        Some((_, path)) => path.clone(),
        None => {
            if let Some((_, path)) = &at.kept {
                std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
            }
            stage.path(plan.place, &format!("{number}.raw"))
        }
    };
    let to = format!("file:{}", target.display());
    let bandwidth = format!("{}MiB/s", plan.bandwidth);
    let mut words = vec!["move", VOLUME, "--to", &to, "--detach", "--verify", plan.verify, "--bandwidth", &bandwidth];
    words.extend(["--strategy", plan.strategy_from(at.place)]);
    words.extend((kept.is_some() || plan.place == Place::Device).then_some("--overwrite"));
    words.extend(plan.delete_source.then_some("--delete-source"));
    words.extend(client.is_adopted().then_some("--no-persist"));
    let id = stage.daemon.json(&words)?["id"].as_u64().context("a job has a number")?;

    let mut outcome = Outcome {
        source: at.clone(),
        target,
        job: Value::Null,
        was_cancelled: false,
        was_restarted: false,
        was_filled: false,
    };
    for (pause, blow) in &plan.blows {
        std::thread::sleep(*pause);
        strike(stage, client, *blow, &mut outcome).with_context(|| format!("{blow:?}"))?;
    }
    steer(&stage.daemon, &["set", VOLUME, "--bandwidth", "0"])?;
    steer(&stage.daemon, &["resume", VOLUME])?;
    outcome.job = stage.daemon.wait_for_job(id)?;
    stage.empty();
    Ok(outcome)
}

fn strike(stage: &mut Stage, client: &Client, blow: Blow, outcome: &mut Outcome) -> anyhow::Result<()> {
    match blow {
        Blow::Kill => {
            stage.daemon.kill();
            outcome.was_restarted = true;
            stage.daemon.start()?;
        }
        Blow::KillAgain(after) => {
            stage.daemon.kill();
            outcome.was_restarted = true;
            stage.daemon.launch()?;
            std::thread::sleep(after);
            stage.daemon.kill();
            stage.daemon.start()?;
        }
        Blow::Restart => {
            stage.daemon.terminate()?;
            outcome.was_restarted = true;
            stage.daemon.start()?;
        }
        Blow::Freeze(length) => {
            stage.daemon.signal(Signal::STOP)?;
            std::thread::sleep(length);
            stage.daemon.signal(Signal::CONT)?;
        }
        Blow::FreezeClient(length) => {
            client.freeze(true)?;
            std::thread::sleep(length);
            client.freeze(false)?;
        }
        Blow::Cut(length) => {
            stage.daemon.signal(Signal::STOP)?;
            std::thread::sleep(length / 2);
            on_the_way(client, blow)?;
            std::thread::sleep(length / 2);
            stage.daemon.signal(Signal::CONT)?;
        }
        Blow::Stall(number, length) => {
            let daemon = stage.daemon.pid().context("the daemon runs")?;
            let stalled = Stalled::worker(daemon, number)?;
            std::thread::sleep(length / 8);
            on_the_way(client, blow)?;
            std::thread::sleep(length);
            drop(stalled);
        }
        Blow::Hold(_) | Blow::Trickle(..) => on_the_way(client, blow)?,
        Blow::Bandwidth(mib) => {
            steer(&stage.daemon, &["set", VOLUME, "--bandwidth", &format!("{mib}MiB/s")]).map(drop)?
        }
        Blow::Pause(length) => {
            steer(&stage.daemon, &["pause", VOLUME])?;
            std::thread::sleep(length);
            steer(&stage.daemon, &["resume", VOLUME])?;
        }
        Blow::Cancel => outcome.was_cancelled |= steer(&stage.daemon, &["cancel", VOLUME])?,
        Blow::Fill => {
            stage.fill()?;
            outcome.was_filled = true;
        }
    }
    Ok(())
}

fn on_the_way(client: &Client, blow: Blow) -> anyhow::Result<()> {
    let proxy = client.proxy().context("only who goes through the proxy is drawn this")?;
    let pause = |length: Duration| std::thread::sleep(length);
    match blow {
        Blow::Hold(length) => {
            proxy.hold(true);
            pause(length);
            proxy.hold(false);
        }
        Blow::Trickle(bytes_per_second, length) => {
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
