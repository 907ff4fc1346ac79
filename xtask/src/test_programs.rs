//! All tests: the programs that cargo builds of them, several at a time, the longest first.
//!
//! `cargo test` runs one program after the other, and most of them wait: for QEMU, for a guest, for a limit to pass. Beside each
//! other they take half of the time. Those run beside nobody that measure how moves share a network, or whose guests have no time to
//! lose.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::programs::{cargo_itself, target_folder};

/// What shares a network with others by rates that it measures. What libvirt migrates, in the time that it gives. What has a limit for each
/// request of the guest.
const ALONE: [&str; 4] = ["beside_others", "silent_targets", "vm_beside_others", "whole_domains"];
/// Where what each took last is kept, so that the longest begin first.
const TIMES: &str = "test-times.json";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// How many programs run at once.
    #[arg(long, default_value_t = 2)]
    at_once: usize,
    /// Only programs whose names contain this.
    #[arg(long)]
    only: Option<String>,
}

/// One program of tests.
struct Program {
    name: String,
    path: PathBuf,
    /// The folder of its package, where cargo would run it.
    folder: PathBuf,
}

/// What came of one.
struct Outcome {
    name: String,
    seconds: f64,
    is_good: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut programs = build()?;
    programs.retain(|program| arguments.only.as_ref().is_none_or(|only| program.name.contains(only)));
    ensure!(!programs.is_empty(), "no program of tests is called so");
    let times = target_folder()?.join(TIMES);
    let known = read_times(&times);
    let expected = |program: &Program| known.get(&program.name).copied().unwrap_or(60.0);
    programs.sort_by(|one, other| expected(one).total_cmp(&expected(other)));
    let (alone, together): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| ALONE.contains(&program.name.as_str()));
    let count = alone.len() + together.len();
    let mut outcomes = run_all(together, arguments.at_once.max(1), count)?;
    for program in alone {
        outcomes.push(run_one(&program, (outcomes.len() + 1, count))?);
    }
    write_times(&times, known, &outcomes)?;
    if arguments.only.is_none() {
        let documented = cargo_itself().args(["test", "--locked", "--workspace", "--doc", "--quiet"]).status();
        let is_good = documented.context("running cargo")?.success();
        outcomes.push(Outcome { name: "the examples of the documentation".to_owned(), seconds: 0.0, is_good });
    }
    let failed: Vec<_> =
        outcomes.iter().filter(|outcome| !outcome.is_good).map(|outcome| outcome.name.as_str()).collect();
    ensure!(failed.is_empty(), "tests have failed in {}: see above", failed.join(", "));
    Ok(())
}

/// Builds all of them.
fn build() -> anyhow::Result<Vec<Program>> {
    let built = cargo_itself()
        .args(["test", "--locked", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo")?;
    ensure!(built.status.success(), "the tests could not be built: see above");
    let messages = String::from_utf8(built.stdout).context("what cargo says is no text")?;
    Ok(messages.lines().filter_map(|line| program_in(&serde_json::from_str(line).ok()?)).collect())
}

/// The program that a message of cargo's is about, if it is one of tests.
fn program_in(message: &Value) -> Option<Program> {
    let is_test = message["profile"]["test"].as_bool()?;
    let path = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let name = if kind == "test" { target.to_owned() } else { format!("{target} ({kind})") };
    is_test.then_some(Program { name, path, folder })
}

/// Runs `programs`, the last first, so many at once.
fn run_all(programs: Vec<Program>, at_once: usize, count: usize) -> anyhow::Result<Vec<Outcome>> {
    let waiting = Mutex::new(programs);
    let outcomes = Mutex::new(Vec::new());
    let begun = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once)
            .map(|_| {
                scope.spawn(|| -> anyhow::Result<()> {
                    loop {
                        let next = waiting.lock().ok().and_then(|mut waiting| waiting.pop());
                        let Some(program) = next else { return Ok(()) };
                        let number = begun.fetch_add(1, Ordering::Relaxed) + 1;
                        let outcome = run_one(&program, (number, count))?;
                        outcomes.lock().map_err(|_| anyhow::anyhow!("a thread has panicked"))?.push(outcome);
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))??;
        }
        anyhow::Ok(())
    })?;
    outcomes.into_inner().map_err(|_| anyhow::anyhow!("a thread has panicked"))
}

/// Runs one; all that it says is shown if it fails.
fn run_one(program: &Program, (number, count): (usize, usize)) -> anyhow::Result<Outcome> {
    let began = Instant::now();
    let ran = Command::new(&program.path)
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running {}", program.path.display()))?;
    let (seconds, is_good) = (began.elapsed().as_secs_f64(), ran.status.success());
    let said = String::from_utf8_lossy(&ran.stdout);
    if !is_good {
        println!("--- {} has failed:\n{said}\n{}", program.name, String::from_utf8_lossy(&ran.stderr));
    }
    let summary = said.lines().find_map(|line| line.strip_prefix("test result: ")).unwrap_or("it has said no result");
    println!("{number} of {count}: {} ({seconds:.1} s): {summary}", program.name);
    Ok(Outcome { name: program.name.clone(), seconds, is_good })
}

fn read_times(path: &Path) -> BTreeMap<String, f64> {
    std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

fn write_times(path: &Path, mut times: BTreeMap<String, f64>, outcomes: &[Outcome]) -> anyhow::Result<()> {
    times.extend(outcomes.iter().map(|outcome| (outcome.name.clone(), outcome.seconds)));
    let text = serde_json::to_string_pretty(&times).context("times as JSON")?;
    if let Err(error) = std::fs::write(path, text) {
        bail!("{} could not be written: {error}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_tests_is_told_from_others_by_what_cargo_says() {
        let message = |is_test: bool, kind: &str| {
            serde_json::json!({
                "profile": { "test": is_test }, "executable": "/target/debug/deps/moves-1", "manifest_path": "/crates/cli/Cargo.toml",
                "target": { "name": "moves", "kind": [kind] },
            })
        };
        let program = program_in(&message(true, "test")).expect("it is one");
        assert_eq!((program.name.as_str(), program.folder.as_path()), ("moves", Path::new("/crates/cli")));
        assert_eq!(program_in(&message(true, "lib")).expect("it is one").name, "moves (lib)");
        assert!(program_in(&message(false, "bin")).is_none());
    }
}
