//! `cargo xtask paper-esx`: repeats the ESX paper's evaluation in the simulator and writes its report.

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
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["run", "--quiet", "--package", "transhume-sim", "--bin", "transhume-sim", "--"]);
    command.arg("--paper-esx").arg(&arguments.out);
    command.args(["--scale", &arguments.scale.to_string(), "--seed", &arguments.seed.to_string()]);
    if let Some(only) = &arguments.only {
        command.args(["--only", only]);
    }
    if let Some(jobs) = arguments.jobs {
        command.args(["--jobs", &jobs.to_string()]);
    }
    if !command.status().context("running cargo")?.success() {
        bail!("the evaluation could not be carried out, or something in it did not hold that must");
    }
    Ok(())
}
