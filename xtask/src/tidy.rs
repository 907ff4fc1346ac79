//! `cargo xtask tidy`: the house rules that no compiler knows. Every ban carries its reason.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

/// A file longer than this has outgrown its idea.
const FILE_LINES_MAX: usize = 650;

/// Words that may not stand in Rust code, where they may stand all the same, and why.
const BANS: &[Ban] = &[
    Ban {
        word: concat!("Instant::", "now"),
        allowed: &[
            "crates/env/src/real.rs",
            "crates/env/src/testing.rs",
            "crates/sim/src/clock.rs",
            "xtask/",
            "crates/bench/",
            "crates/torture/",
            "crates/cli/",
            "crates/guest/",
            "/tests/",
            "/examples/",
            "/benches/",
        ],
        reason: "time comes from env, so that the simulator can turn the clock",
    },
    Ban {
        word: concat!("tokio::time::", "sleep"),
        allowed: &[
            "crates/env/src/real.rs",
            "crates/env/src/testing.rs",
            "xtask/",
            "crates/bench/",
            "crates/torture/",
            "crates/cli/",
            "crates/guest/",
            "crates/sim/",
            "/tests/",
            "/examples/",
            "tests.rs",
            "testing/",
        ],
        reason: "waiting goes through env, so that the simulator can turn the clock",
    },
    Ban {
        word: concat!("rand::", "rng"),
        allowed: &["crates/env/src/real.rs", "crates/torture/", "crates/guest/"],
        reason: "randomness comes from env, so that a seed repeats a run",
    },
    Ban {
        word: concat!("thread::", "sleep"),
        allowed: &[
            "crates/env/src/real.rs",
            "xtask/",
            "crates/bench/",
            "crates/torture/",
            "crates/guest/",
            "/tests/",
            "/examples/",
        ],
        reason: "a worker thread is never put to sleep; waiting goes through env",
    },
    Ban {
        word: concat!("watch::", "Sender"),
        allowed: &[
            "crates/migrate/src/control.rs",
            "crates/sim/src/host.rs",
            "crates/daemon/",
            "crates/hosts/",
            "crates/vm/",
        ],
        reason: "it wakes those who wait in a random order, and a seed would not repeat a run: a Notify keeps their order",
    },
    Ban { word: concat!("FIX", "ME"), allowed: &[], reason: "what is left to do is an issue, not a comment" },
    Ban { word: concat!("XX", "X"), allowed: &[], reason: "what is left to do is an issue, not a comment" },
    Ban { word: concat!("#[ign", "ore"), allowed: &[], reason: "a test that does not run tests nothing" },
    Ban {
        word: concat!("as_", "any"),
        allowed: &[],
        reason: "a layer that asks what is below it is in the wrong layer",
    },
    Ban { word: concat!("lazy_", "static"), allowed: &[], reason: "no global state" },
    Ban { word: concat!("static ", "mut"), allowed: &[], reason: "no global state" },
];

/// The code that runs in the simulator.
const SIMULATED: &[&str] = &[
    "crates/block/src/",
    "crates/filters/src/",
    "crates/memory/src/",
    "crates/migrate/src/",
    "crates/nbd/src/",
    "crates/sim/src/",
    "crates/experiments/src/",
];

struct Ban {
    word: &'static str,
    /// Parts of paths where the word may stand.
    allowed: &'static [&'static str],
    reason: &'static str,
}

/// What each crate may import of ours: the map of ARCHITECTURE.md as a check.
const IMPORTS: &[(&str, &[&str])] = &[
    ("block", &[]),
    ("env", &[]),
    ("filters", &["block", "env"]),
    ("preload", &[]),
    ("memory", &["block", "env", "filters"]),
    ("backends", &["block", "env"]),
    ("nbd", &["block", "env"]),
    ("migrate", &["block", "env", "filters"]),
    ("vm", &["block", "env"]),
    ("api", &[]),
    ("hosts", &["env", "api"]),
    ("daemon", &["block", "env", "filters", "backends", "nbd", "migrate", "memory", "vm", "api", "hosts"]),
    ("cli", &["api", "daemon"]),
    // What is for development only.
    ("sim", &["block", "env", "filters", "backends", "nbd", "migrate", "memory", "api", "daemon"]),
    ("experiments", &["block", "env", "filters", "memory", "migrate", "sim"]),
    ("guest", &[]),
    ("bench", &[]),
    ("torture", &[]),
];

/// Arguments of `cargo xtask tidy`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Draw which top-level module of each crate imports which, those below first.
    #[arg(long)]
    draw: bool,
}

/// Checks every rule and lists every breach.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let files = tracked_files()?;
    let mut breaches = Vec::new();
    for path in files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs")) {
        check_source(path, &mut breaches)?;
    }
    check_imports(&mut breaches)?;
    crate::modules::check(arguments.draw, &mut breaches)?;
    check_links(&files, &mut breaches)?;
    check_patches(&files, &mut breaches)?;
    if let Err(stale) = crate::runs::draw(true) {
        breaches.push(format!("{stale:#}"));
    }
    if breaches.is_empty() {
        println!("tidy: {} files, no breach", files.len());
        return Ok(());
    }
    for breach in &breaches {
        eprintln!("{breach}");
    }
    bail!("tidy found {} breaches", breaches.len());
}

fn tracked_files() -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new("git").args(["ls-files", "-z"]).output().context("running git ls-files")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && !output.stdout.is_empty(), "git names no files here: {}", complaint.trim());
    let names = String::from_utf8(output.stdout).context("file names are UTF-8")?;
    Ok(names.split_terminator('\0').map(PathBuf::from).filter(|path| path.exists()).collect())
}

fn check_source(path: &Path, breaches: &mut Vec<String>) -> anyhow::Result<()> {
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {shown}"))?;
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        breaches.push(format!("{shown}: {lines} lines: split it, it holds more than one idea"));
    }
    check_select(&text, &shown, breaches);
    for ban in BANS.iter().filter(|ban| !ban.allowed.iter().any(|allowed| shown.contains(allowed))) {
        for (number, line) in code_lines(&text, &shown).filter(|(_, line)| line.contains(ban.word)) {
            breaches.push(format!("{shown}:{number}: {}: {} ({})", ban.word, ban.reason, line.trim()));
        }
    }
    Ok(())
}

/// A mistake of the mutation tests that does not apply any more proves nothing, and one that applies by a part of its context may be
/// another one.
fn check_patches(files: &[PathBuf], breaches: &mut Vec<String>) -> anyhow::Result<()> {
    for patch in files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "patch")) {
        if !crate::mutations::refresh::applies(Path::new("."), patch)? {
            breaches.push(format!("{}: does not apply: `cargo xtask mutations --refresh`", patch.display()));
        } else if let Some(why) = crate::mutations::refresh::is_unclear(Path::new("."), patch)? {
            breaches.push(format!("{}: {why}", patch.display()));
        }
    }
    Ok(())
}

/// What the simulator runs chooses among what is ready in the order in which it is written down, not by chance.
fn check_select(text: &str, shown: &str, breaches: &mut Vec<String>) {
    let is_simulated = SIMULATED.iter().any(|place| shown.starts_with(place));
    let mut lines = code_lines(text, shown).filter(|_| is_simulated).peekable();
    while let Some((number, line)) = lines.next() {
        let is_biased = lines.peek().is_none_or(|(_, next)| next.trim() == "biased;");
        if line.trim_end().ends_with("select! {") && !is_biased {
            breaches.push(format!("{shown}:{number}: select! without `biased;`: a seed would not repeat a run"));
        }
    }
}

/// The numbered lines of a file up to its unit tests, which may sleep and measure as they like.
fn code_lines<'a>(text: &'a str, _path: &str) -> impl Iterator<Item = (usize, &'a str)> {
    let numbered = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    numbered.take_while(|(_, line)| !line.starts_with("#[cfg(test)]"))
}

fn check_imports(breaches: &mut Vec<String>) -> anyhow::Result<()> {
    let ours: Vec<&str> = IMPORTS.iter().map(|(name, _)| *name).collect();
    for (name, allowed) in IMPORTS {
        let path = format!("crates/{name}/Cargo.toml");
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let dependencies = text.split("[dependencies]").nth(1).unwrap_or_default();
        let dependencies = dependencies.split("\n[").next().unwrap_or_default();
        for line in dependencies.lines() {
            let import = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if ours.contains(&import) && !allowed.contains(&import) {
                breaches.push(format!("{path}: {name} may not import {import}: see the map in ARCHITECTURE.md"));
            }
        }
    }
    // Whoever wants to know whether the house rules hold does not wait for the engine to build.
    let own = std::fs::read_to_string("xtask/Cargo.toml").context("reading xtask/Cargo.toml")?;
    if let Some(line) = own.lines().find(|line| line.contains("../crates") || line.starts_with("transhume")) {
        breaches.push(format!("xtask/Cargo.toml: {line}: what takes the engine is a program of its own"));
    }
    Ok(())
}

/// Relative links of the Markdown pages lead somewhere.
fn check_links(files: &[PathBuf], breaches: &mut Vec<String>) -> anyhow::Result<()> {
    for path in files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "md")) {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap_or_default();
            let is_local = !target.is_empty() && !target.contains("://") && !target.contains(' ');
            if is_local && !folder.join(target).exists() {
                breaches.push(format!("{}: the link to {target} leads nowhere", path.display()));
            }
        }
    }
    Ok(())
}
