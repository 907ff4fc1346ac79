//! `cargo xtask paper-esx`: repeats the ESX paper's evaluation in the simulator and writes its report.

pub(crate) mod real;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};

/// How large, what of it, and where to.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Sizes, caches and limits of time are so many times smaller than the paper's.
    #[arg(long, default_value_t = 4)]
    scale: u64,
    /// Repeat these figures and tables only, such as figure-4,table-1.
    #[arg(long, value_name = "NAMES")]
    only: Option<String>,
    /// Where all randomness is from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many moves are played at once; otherwise one a core.
    #[arg(long)]
    jobs: Option<usize>,
    /// Where the report goes.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/paper-esx")]
    out: PathBuf,
}

/// Builds the simulator and has it repeat the evaluation.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let [scale, seed] = [arguments.scale, arguments.seed].map(|number| number.to_string());
    let jobs = arguments.jobs.map(|jobs| jobs.to_string());
    let mut words = vec!["--paper-esx".as_ref(), arguments.out.as_os_str()];
    words.extend(["--scale", &scale, "--seed", &seed].map(OsStr::new));
    if let Some(only) = &arguments.only {
        words.extend(["--only", only].map(OsStr::new));
    }
    if let Some(jobs) = &jobs {
        words.extend(["--jobs", jobs].map(OsStr::new));
    }
    run_simulator(&words)
}

fn run_simulator(words: &[&OsStr]) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["run", "--package", "transhume-sim", "--bin", "transhume-sim", "--"]).args(words);
    if !command.status().context("running cargo")?.success() {
        bail!("the evaluation could not be carried out, or something in it did not hold that must");
    }
    Ok(())
}
