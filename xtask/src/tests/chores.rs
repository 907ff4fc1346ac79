//! What is no program of tests and decides as they do: the simulator's seeds and some torture.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};

use super::schedule::Task;
use crate::programs::{SIMULATOR, TORTURE, cargo_itself, target_folder};
use crate::runs::root;
use crate::sim::{seeds_of_day, today};

/// The scenarios are played until they show what they must in so many turns, one a day; `make test-long` plays all.
const TURNS: u64 = 3;
/// What runs beside the tests waits for all of them, on a slow machine for half an hour.
const BESIDE_LIMIT: Duration = Duration::from_secs(3600);
/// No more seeds of one scenario than these.
const COVER_SEEDS: &str = "0..100";

/// Plays `seeds`, `fresh` ones of the day, and a part of the scenarios until they show what they must. All of them take only what
/// nobody else wants of the processors.
pub(super) fn seeds(seeds: &str, fresh: u64) -> anyhow::Result<Vec<Task>> {
    let programs = build()?;
    let of_day = seeds_of_day(today(), fresh);
    let turn = format!("{}/{TURNS}", today() % TURNS);
    let idle = |name: &str, arguments: &[&str]| {
        let idle = ["--idle", "0"].into_iter().map(str::to_owned).chain([text(&programs.join(SIMULATOR))]);
        let arguments = idle.chain(arguments.iter().map(|argument| (*argument).to_owned())).collect();
        Task { limit: BESIDE_LIMIT, ..task(name, "chrt".into(), arguments) }
    };
    let mut tasks = vec![idle(&format!("seeds {seeds}"), &["--seeds", seeds])];
    // The simulator refuses to play none.
    if fresh > 0 {
        println!("seeds of today: cargo xtask sim --seeds {of_day}");
        tasks.push(idle(&format!("seeds {of_day}"), &["--seeds", &of_day]));
    }
    tasks.push(idle(
        &format!("scenarios that show what they must, turn {turn}"),
        &["--covers", "--seeds", COVER_SEEDS, "--turn", &turn],
    ));
    Ok(tasks)
}

/// Five cycles of the real daemon.
pub(super) fn torture() -> anyhow::Result<Task> {
    let programs = build()?;
    let arguments = ["torture", "--programs", &text(&programs), "--seed", "100", "--cycles", "5", "--act-cycles", "2"];
    let arguments = arguments.map(str::to_owned).to_vec();
    Ok(Task { seconds: 13.0, ..task("torture of five cycles", programs.join(TORTURE), arguments) })
}

/// Builds the programs, as `make build` does, and gives their folder.
fn build() -> anyhow::Result<PathBuf> {
    let built =
        cargo_itself().args(["build", "--locked", "--workspace", "--bins"]).status().context("running cargo")?;
    ensure!(built.success(), "the programs could not be built: see above");
    Ok(target_folder()?.join("debug"))
}

fn task(name: &str, path: PathBuf, arguments: Vec<String>) -> Task {
    Task { path, folder: root(), arguments, ..Task::named(name.to_owned()) }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
