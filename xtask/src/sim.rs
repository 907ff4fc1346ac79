//! `cargo xtask sim`: plays seeds of the simulator. The arguments are those of the program in `crates/sim`, and `--fresh N`:
//! N seeds of the day on top, which nobody has played before. They are printed, so that any of them can be played again.
//! `--experiment NAME` and `--replay FILE` are carried out by the program in `crates/experiments`.

use std::time::{Duration, SystemTime};

use anyhow::Context;

use crate::programs::{self, Arguments, EXPERIMENTS, SIMULATOR};

/// So many seeds has a day.
const SEEDS_A_DAY: u64 = 1_000_000;

/// Builds the simulator, or the experiments, and runs it.
pub(crate) fn run(given: &Arguments) -> anyhow::Result<()> {
    let has = |names: &[&str]| given.arguments.iter().any(|argument| is_one_of(argument, names));
    if has(&["--experiment", "--replay"]) {
        return programs::run_chore(EXPERIMENTS, "sim", given);
    }
    let (rest, fresh) = without_fresh(&given.arguments)?;
    if has(&["--help", "-h"]) {
        println!(
            "cargo xtask sim --fresh N ... plays N seeds of the day, too. --experiment NAME carries out an experiment of a \
             paper, --replay FILE --format FORMAT replays a trace (--list names them). The rest is the simulator's:\n"
        );
    }
    if fresh.is_none() || !rest.is_empty() {
        programs::run(SIMULATOR, &rest)?;
    }
    if has(&["--list"]) {
        return programs::run(EXPERIMENTS, &["list".to_owned()]);
    }
    let Some(count) = fresh.filter(|count| *count > 0) else { return Ok(()) };
    let seeds = seeds_of_day(today(), count);
    println!("seeds of today: cargo xtask sim --seeds {seeds}");
    programs::run(SIMULATOR, &["--seeds".to_owned(), seeds])
}

/// Whether `argument` is one of these options, with its value behind `=` or without.
fn is_one_of(argument: &str, names: &[&str]) -> bool {
    names.contains(&argument.split_once('=').map_or(argument, |(name, _)| name))
}

/// The arguments without `--fresh N`, and the N.
fn without_fresh(arguments: &[String]) -> anyhow::Result<(Vec<String>, Option<u64>)> {
    let Some(place) = arguments.iter().position(|argument| argument == "--fresh") else {
        return Ok((arguments.to_vec(), None));
    };
    let count = arguments.get(place + 1).context("`--fresh` takes a number of seeds")?;
    let count = count.parse().with_context(|| format!("`{count}` is no number of seeds"))?;
    Ok(([&arguments[..place], &arguments[place + 2..]].concat(), Some(count)))
}

/// The number of this day since 1970.
pub(crate) fn today() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() / 86_400
}

/// The first `count` seeds of day number `days` since 1970.
pub(crate) fn seeds_of_day(days: u64, count: u64) -> String {
    let first = days * SEEDS_A_DAY;
    format!("{first}..{}", first + count.min(SEEDS_A_DAY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_seeds_are_taken_out_and_no_two_days_have_the_same() {
        let given = ["--seeds", "0..5", "--fresh", "7", "--jobs", "1"].map(str::to_owned);
        let (rest, fresh) = without_fresh(&given).expect("they are sound");
        assert_eq!((rest.join(" ").as_str(), fresh), ("--seeds 0..5 --jobs 1", Some(7)));
        assert!(without_fresh(&["--fresh".to_owned()]).is_err());
        assert_eq!(seeds_of_day(20_000, 7), "20000000000..20000000007");
        assert_eq!(seeds_of_day(20_000, u64::MAX), format!("20000000000..{}", 20_001 * SEEDS_A_DAY));
    }
}
