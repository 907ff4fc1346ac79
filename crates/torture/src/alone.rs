//! What both tortures need to begin: mounts of their own, and a seed.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};

/// Set for the process that has mounts of its own.
const ALONE: &str = "TRANSHUME_TORTURE_ALONE";

/// A first seed for whoever has said none.
pub(crate) fn seed_of_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Runs this program once more with mounts of its own, so that nothing stays mounted whatever ends it.
pub(crate) fn run_alone() -> anyhow::Result<()> {
    let own = std::env::current_exe().context("asking where this program is")?;
    let status = Command::new("unshare")
        .args(["--mount", "--"])
        .arg(own)
        .args(std::env::args_os().skip(1))
        .env(ALONE, "1")
        .status()
        .context("running unshare")?;
    if !status.success() {
        bail!("the torture has found something");
    }
    Ok(())
}

/// Whether it may mount, and make networks.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether this process has mounts of its own.
pub(crate) fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}
