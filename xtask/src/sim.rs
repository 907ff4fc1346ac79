//! `cargo xtask sim`: plays seeds of the simulator. The arguments are those of the program in `crates/sim`.

use std::process::Command;

use anyhow::{Context, bail};

/// What the simulator is asked to do; see `cargo xtask sim --help`.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Passed on to the simulator.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds the simulator and runs it. It is a program of its own, so that no other chore waits for the engine to build.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["run", "--quiet", "--package", "transhume-sim", "--bin", "transhume-sim", "--"])
        .args(&arguments.arguments)
        .status()
        .context("running cargo")?;
    if !status.success() {
        bail!("the simulator has found something that does not hold, or could not run");
    }
    Ok(())
}
