//! `cargo xtask sim`: plays seeds of the simulator. The arguments are those of the program in `crates/sim`, and `--fresh N`:
//! N seeds of the day on top, which nobody has played before. They are printed, so that any of them can be played again.

use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};

/// So many seeds has a day.
const SEEDS_A_DAY: u64 = 1_000_000;

/// What the simulator is asked to do; see `cargo xtask sim --help`.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Passed on to the simulator, but for `--fresh N`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds the simulator and runs it. It is a program of its own, so that no other chore waits for the engine to build.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let (rest, fresh) = without_fresh(&arguments.arguments)?;
    if rest.iter().any(|argument| argument == "--help" || argument == "-h") {
        println!("cargo xtask sim --fresh N ... plays N seeds of the day, too; the rest is the simulator's:\n");
    }
    if fresh.is_none() || !rest.is_empty() {
        simulate(&rest)?;
    }
    let Some(count) = fresh.filter(|count| *count > 0) else { return Ok(()) };
    let days = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() / 86_400;
    let seeds = seeds_of_day(days, count);
    println!("seeds of today: cargo xtask sim --seeds {seeds}");
    simulate(&["--seeds".to_owned(), seeds])
}

fn simulate(arguments: &[String]) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["run", "--package", "transhume-sim", "--bin", "transhume-sim", "--"])
        .args(arguments)
        .status()
        .context("running cargo")?;
    if !status.success() {
        bail!("the simulator has found something that does not hold, or could not run");
    }
    Ok(())
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

/// The first `count` seeds of day number `days` since 1970.
fn seeds_of_day(days: u64, count: u64) -> String {
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
