//! `cargo xtask test`: all tests, many at a time.
//!
//! Most tests wait: for QEMU, for a guest, for a limit to pass. Beside each other they keep the processors busy, and the
//! simulator's seeds take what is left. Each test in `tests/` is a process of its own, so a test that hangs is known by
//! name, and one that ends the process ends nobody else's. Unit tests run one program a crate.
//!
//! cargo-nextest does the same, and builds for six minutes on a fresh machine with two cores: a fifth of what all tests take.
//!
//! A test whose path has a module `long` is slow and rare: it runs in `make test-long` alone. Its module says what of the same
//! kind still decides on main.

mod chores;
mod discover;
mod durations;
mod process;
mod schedule;
mod verdict;

use std::fmt::Display;
use std::io::Write;
use std::time::Instant;

use anyhow::{Context, ensure};

use crate::programs::cargo_itself;
use durations::Durations;
use process::{Outcome, Watch};

/// The module of tests that are slow and rare.
const LONG: &str = "long";

/// Tests that measure how moves share a link: what else the processors do is in their figures. Nothing else runs beside them.
const ALONE: [&str; 2] = ["cli beside_others::long::", "cli vm_beside_others::long::"];

/// What several tests use one at a time: huge pages are the whole machine's.
const SHARED: [(&str, &[&str]); 1] =
    [("huge pages", &["cli vm_parallel::a_vm_in_huge_pages", "memory process::a_memory_in_huge_pages"])];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// How many tests run at once, at most.
    #[arg(long, default_value_t = 6)]
    at_once: usize,
    /// Only tests whose names contain one of these, as `cli moves::`; slow and rare ones, too. Each must name a test.
    #[arg(long, value_name = "TEXT", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new())]
    only: Vec<String>,
    /// Only the tests that are slow and rare.
    #[arg(long, conflicts_with = "only")]
    long: bool,
    /// Only unit tests: nothing but libraries and programs is built.
    #[arg(long, conflicts_with_all = ["only", "long"])]
    unit: bool,
    /// Run each test so many times.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    times: u32,
    /// List the tests and what each took, and run none.
    #[arg(long)]
    list: bool,
    /// Keep what each test took in `xtask/test-durations.json`, for machines that have run none.
    #[arg(long, conflicts_with_all = ["only", "long", "unit"])]
    keep: bool,
    /// Play these of the simulator's seeds beside the tests, with what the tests leave of the processors; then some of the day's,
    /// scenarios until they show what they must, and some torture.
    #[arg(long, value_name = "A..B", conflicts_with_all = ["only", "long", "times", "unit"])]
    seeds: Option<String>,
    /// So many of the day's seeds.
    #[arg(long, value_name = "N", default_value_t = 100, requires = "seeds", conflicts_with_all = ["only", "long", "times", "unit"])]
    fresh: u64,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let durations = Durations::read()?;
    let (mut tasks, mut unmatched) = (Vec::new(), arguments.only.clone());
    let targets: &[&str] = if arguments.unit { &["--lib", "--bins"] } else { &["--lib", "--bins", "--tests"] };
    for program in discover::build(targets)? {
        let tests = program.tests()?;
        tasks.extend(program.tasks(&tests, |name| {
            unmatched.retain(|only| !name.contains(only.as_str()));
            is_chosen(arguments, name)
        }));
    }
    // One of several that names nothing any more would never be missed.
    ensure!(unmatched.is_empty(), "no test is called so: {}: `cargo xtask test --list`", unmatched.join(", "));
    for task in &mut tasks {
        durations.fill_in(task);
    }
    if arguments.list {
        tasks.iter().for_each(|task| println!("{task}"));
        return Ok(());
    }
    ensure!(!tasks.is_empty(), "there is no such test: `cargo xtask test --list`");
    let beside = match &arguments.seeds {
        Some(seeds) => {
            tasks.push(chores::torture()?);
            chores::seeds(seeds, arguments.fresh)?
        }
        None => Vec::new(),
    };
    let tasks = (0..arguments.times).flat_map(|_| tasks.iter().cloned()).collect();
    let watch = Watch::new()?;
    let mut outcomes = schedule::run_all(tasks, beside, arguments.at_once.max(1))?;
    drop(watch);
    if arguments.only.is_empty() && !arguments.long && !arguments.unit {
        outcomes.push(examples()?);
    }
    let written = durations.write(&outcomes, arguments.keep);
    report(&outcomes)?;
    written
}

/// Whether the test `name`, as `cli moves::NAME`, is to run.
fn is_chosen(arguments: &Arguments, name: &str) -> bool {
    if !arguments.only.is_empty() {
        return arguments.only.iter().any(|only| name.contains(only.as_str()));
    }
    is_long(name) == arguments.long
}

/// Whether a test is slow and rare.
fn is_long(name: &str) -> bool {
    let path = name.rsplit_once(' ').map_or(name, |(_, path)| path);
    let modules = path.rsplit_once("::").map_or("", |(modules, _)| modules);
    modules.split("::").any(|module| module == LONG)
}

/// Prints a line. Whoever has stopped reading, or has no room for it, changes nothing about what the tests say: the outcome is in the
/// exit code.
fn say(line: impl Display) {
    if cfg!(test) {
        // This way the harness holds it back.
        println!("{line}");
    } else {
        let _ = writeln!(std::io::stdout().lock(), "{line}");
    }
}

/// The examples of the documentation.
fn examples() -> anyhow::Result<Outcome> {
    let began = Instant::now();
    let documented = cargo_itself().args(["test", "--locked", "--workspace", "--doc", "--quiet"]).status();
    let is_good = documented.context("running cargo")?.success();
    let seconds = began.elapsed().as_secs_f64();
    say(format_args!("the examples of the documentation ({seconds:.1} s)"));
    Ok(Outcome { name: "the examples of the documentation".to_owned(), seconds, processors: 2.0, is_good, not_run: 0 })
}

/// Says what came of all, and fails if one has failed.
fn report(outcomes: &[Outcome]) -> anyhow::Result<()> {
    let failed: Vec<_> =
        outcomes.iter().filter(|outcome| !outcome.is_good).map(|outcome| outcome.name.as_str()).collect();
    say(format_args!("{} passed, {} failed", outcomes.len() - failed.len(), failed.len()));
    let not_run: usize = outcomes.iter().map(|outcome| outcome.not_run).sum();
    if not_run > 0 {
        say(format_args!("{not_run} of their tests were not run here: see above"));
    }
    ensure!(failed.is_empty(), "tests have failed: {}: see above", failed.join(", "));
    Ok(())
}

#[cfg(test)]
mod names {
    use super::*;

    #[test]
    fn slow_and_rare_is_what_a_module_says_and_no_test_s_own_name() {
        assert!(is_long("cli moves::long::one") && is_long("api fixtures long::one") && is_long("cli long::one"));
        assert!(!is_long("cli moves::long") && !is_long("cli long") && !is_long("cli moves::longer::one"));
    }
}
