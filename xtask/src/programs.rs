//! The chores that take the engine, or real guests: each is a program in a crate of its own, built and run when somebody
//! asks for it, so that no other chore waits for that.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};

/// Plays seeds.
pub(crate) const SIMULATOR: &str = "transhume-sim";
/// Repeats papers.
pub(crate) const EXPERIMENTS: &str = "transhume-experiments";
/// Measures, shows and records the real programs.
pub(crate) const BENCH: &str = "transhume-bench";
/// Kills, cuts and fills the real daemon.
pub(crate) const TORTURE: &str = "transhume-torture";

/// What is passed on to a program, which explains its own arguments.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// The program's: `--help` tells them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<String>,
}

/// Builds `package`, runs its program of the same name with `chore` and `arguments`, and fails as it does.
pub(crate) fn run_chore(package: &str, chore: &str, arguments: &Arguments) -> anyhow::Result<()> {
    let words: Vec<String> = [chore.to_owned()].into_iter().chain(arguments.arguments.iter().cloned()).collect();
    run(package, &words)
}

/// Builds the programs, the guest's load and the demos at once, so that nothing is built twice, and runs one with them.
pub(crate) fn demo(chore: &str, arguments: &Arguments) -> anyhow::Result<()> {
    let packages = [BENCH, "transhume-cli", "transhume-guest"].map(|package| ["--package", package]);
    let built = cargo_itself()
        .args(["build", "--locked", "--profile", "demo", "--bins"])
        .args(packages.iter().flatten())
        .status()
        .context("running cargo")?;
    ensure!(built.success(), "the programs could not be built: see above");
    let programs = target_folder()?.join("demo");
    let shown = Command::new(programs.join(BENCH))
        .args([chore, "--programs"])
        .arg(&programs)
        .args(&arguments.arguments)
        .status()
        .context("running the demo")?;
    ensure!(shown.success(), "{BENCH}: something does not hold, or could not be done: see above");
    Ok(())
}

/// Where cargo puts what it builds, this program among it.
pub(crate) fn target_folder() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("asking where this program is")?;
    let target = own.parent().and_then(Path::parent).context("this program is not in a target folder")?;
    Ok(target.to_owned())
}

/// The same with all of its arguments.
pub(crate) fn run(package: &str, arguments: &[String]) -> anyhow::Result<()> {
    let status = command(package)?.args(arguments).status().context("running it")?;
    if !status.success() {
        bail!("{package}: something does not hold, or could not be done: see above");
    }
    Ok(())
}

/// The same, for what it prints.
pub(crate) fn output(package: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let printed = command(package)?.args(arguments).stderr(Stdio::inherit()).output().context("running it")?;
    ensure!(printed.status.success(), "{package} {}: {}", arguments.join(" "), printed.status);
    String::from_utf8(printed.stdout).with_context(|| format!("{package} prints UTF-8"))
}

pub(crate) fn cargo_itself() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Builds the program that `package` is named after. The whole workspace is named and one program of it chosen: cargo builds the
/// dependencies of a package that is named alone a second time, because they have fewer features then.
fn command(package: &str) -> anyhow::Result<Command> {
    let built = cargo_itself().args(["build", "--locked", "--workspace", "--bin", package]).status();
    ensure!(built.context("running cargo")?.success(), "{package} could not be built: see above");
    Ok(Command::new(target_folder()?.join("debug").join(package)))
}
