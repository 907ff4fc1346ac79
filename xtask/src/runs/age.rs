//! How old a record is: how many commits have changed the code that it covers since its own.

use anyhow::ensure;
use serde_json::Value;

use super::{read_from, records};

/// What plays in the simulator.
const ENGINE: &[&str] = &[
    "crates/block",
    "crates/env",
    "crates/filters",
    "crates/migrate",
    "crates/memory",
    "crates/nbd",
    "crates/daemon",
    "crates/sim",
];
/// What runs besides when the real daemon is tortured.
const PROGRAMS: &[&str] = &["crates/backends", "crates/cli", "crates/torture"];
/// What runs besides when VMs go from one host to another.
const MACHINES: &[&str] = &["crates/vm", "crates/hosts", "crates/preload", "crates/guest"];
/// What nobody runs in production, and covers itself alone.
const EVERYTHING: &[&str] = &["crates"];

/// What every program is built with: what it takes from others changes there.
const BUILT_WITH: &[&str] = &["Cargo.toml", "Cargo.lock", ".cargo"];

/// What a run of `command` covers.
pub(super) fn covered_by(command: &str) -> Vec<&'static str> {
    match command {
        command if command.contains("torture-") => [ENGINE, PROGRAMS, MACHINES].concat(),
        command if command.contains("torture") => [ENGINE, PROGRAMS].concat(),
        command if command.contains("xtask sim") || command.contains("xtask mutations") => ENGINE.to_vec(),
        _ => EVERYTHING.to_vec(),
    }
}

/// Shows each record that is older than the code that it covers, and fails if one is older than `commits_max` commits.
pub(super) fn show(commits_max: u64) -> anyhow::Result<()> {
    let mut outdated = Vec::new();
    for (name, record) in records()? {
        if record["held"] != true {
            println!("{name}: it did not hold");
        }
        let commits = commits_since(&record)?;
        let commit = record["commit"].as_str().unwrap_or_default();
        match commits {
            Some(0) => {}
            Some(commits) => println!("{name}: {commits} commits since {commit} change what it covers"),
            None => println!("{name}: its commit {commit} is not in the history of this one"),
        }
        if commits.is_none_or(|commits| commits > commits_max) {
            outdated.push(name);
        }
    }
    ensure!(outdated.is_empty(), "these prove little of today's code: {}", outdated.join(", "));
    Ok(())
}

/// How many commits have changed what `record` covers since its commit; none if that is unknown here.
fn commits_since(record: &Value) -> anyhow::Result<Option<u64>> {
    let Some(commit) = record["commit"].as_str() else { return Ok(None) };
    // One of another branch may have had what this one never had.
    if read_from("git", &["merge-base", "--is-ancestor", commit, "HEAD"]).is_err() {
        return Ok(None);
    }
    let command = record["command"].as_str().unwrap_or_default();
    let stated: Vec<&str> = record["covers"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let covers = if stated.is_empty() { covered_by(command) } else { stated };
    let range = format!("{commit}..HEAD");
    let words = [&["rev-list", "--count", &range, "--"], &covers[..], BUILT_WITH].concat();
    Ok(Some(read_from("git", &words)?.parse()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_covers_what_it_runs() {
        assert!(covered_by("cargo xtask sim --seeds 0..9").contains(&"crates/migrate"));
        assert!(!covered_by("cargo xtask sim --seeds 0..9").contains(&"crates/vm"));
        assert!(!covered_by("cargo xtask torture --cycles 9").contains(&"crates/vm"));
        assert!(covered_by("cargo xtask torture-vms --cycles 9").contains(&"crates/vm"));
        assert_eq!(covered_by("make test-long"), ["crates"]);
    }
}
