//! Which programs of tests cargo builds, and which tests are in them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::schedule::Task;
use super::{ALONE, LONG, SHARED, is_long};
use crate::programs::cargo_itself;

/// The program of a crate's tests in `tests/`. Its tests are processes of their own.
const INTEGRATION: &str = "it";

/// A program of tests.
pub(super) struct Program {
    /// Its crate without the project's name, with `(lib)` or `(bin NAME)` for unit tests.
    name: String,
    path: PathBuf,
    /// The folder of its package, where cargo would run it.
    folder: PathBuf,
    is_split: bool,
}

/// Builds those of `targets`, as cargo's flags name them.
pub(super) fn build(targets: &[&str]) -> anyhow::Result<Vec<Program>> {
    let built = cargo_itself()
        .args(["test", "--locked", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"])
        .args(targets)
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo")?;
    ensure!(built.status.success(), "the tests could not be built: see above");
    let messages = String::from_utf8(built.stdout).context("what cargo says is no text")?;
    Ok(messages.lines().filter_map(|line| program_in(&serde_json::from_str(line).ok()?)).collect())
}

/// The program that a message of cargo's is about, if it is one of tests.
fn program_in(message: &Value) -> Option<Program> {
    let is_test = message["profile"]["test"].as_bool()?;
    let path = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = folder.file_name()?.to_string_lossy().into_owned();
    let target = message["target"]["name"].as_str()?;
    let name = match message["target"]["kind"][0].as_str()? {
        "test" if target == INTEGRATION => package,
        "test" => format!("{package} {target}"),
        "bin" => format!("{package} (bin {target})"),
        kind => format!("{package} ({kind})"),
    };
    is_test.then_some(Program { name, path, folder, is_split: target == INTEGRATION })
}

impl Program {
    /// The paths of its tests.
    pub(super) fn tests(&self) -> anyhow::Result<Vec<String>> {
        let listed = Command::new(&self.path).args(["--list", "--format", "terse"]).output();
        let listed = listed.with_context(|| format!("starting {}", self.path.display()))?;
        ensure!(listed.status.success(), "{} lists no tests", self.path.display());
        let lines = String::from_utf8(listed.stdout).context("names of tests are UTF-8")?;
        Ok(lines.lines().filter_map(|line| line.strip_suffix(": test").map(str::to_owned)).collect())
    }

    /// What runs those of `tests` that are chosen by their whole names, `PROGRAM PATH`.
    pub(super) fn tasks(&self, tests: &[String], is_chosen: impl Fn(&str) -> bool) -> Vec<Task> {
        let whole = |test: &str| format!("{} {test}", self.name);
        let chosen: Vec<&String> = tests.iter().filter(|test| is_chosen(&whole(test))).collect();
        if self.is_split {
            let one = |test: &&String| self.task(whole(test), vec!["--exact".to_owned(), (*test).clone()]);
            return chosen.iter().map(one).collect();
        }
        if chosen.is_empty() {
            return Vec::new();
        }
        let are_usual = tests.iter().filter(|test| !is_long(&whole(test))).eq(chosen.iter().copied());
        let arguments = match are_usual {
            true => vec!["--skip".to_owned(), format!("::{LONG}::")],
            false => ["--exact".to_owned()].into_iter().chain(chosen.into_iter().cloned()).collect(),
        };
        vec![self.task(self.name.clone(), arguments)]
    }

    fn task(&self, name: String, arguments: Vec<String>) -> Task {
        let begins = |beginnings: &[&str]| beginnings.iter().any(|beginning| name.starts_with(beginning));
        let shared = SHARED.iter().find(|(_, users)| begins(users)).map(|(what, _)| *what);
        let is_alone = begins(&ALONE);
        let (path, folder) = (self.path.clone(), self.folder.clone());
        Task { path, folder, arguments, is_alone, shared, ..Task::named(name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(is_test: bool, kind: &str, target: &str) -> Value {
        serde_json::json!({
            "profile": { "test": is_test }, "executable": "/target/debug/deps/it-1", "manifest_path": "/crates/cli/Cargo.toml",
            "target": { "name": target, "kind": [kind] },
        })
    }

    #[test]
    fn a_program_of_tests_is_told_from_others_by_what_cargo_says() {
        let program = program_in(&message(true, "test", "it")).expect("it is one");
        assert_eq!((program.name.as_str(), program.folder.as_path()), ("cli", Path::new("/crates/cli")));
        assert!(program.is_split);
        let program = program_in(&message(true, "lib", "transhume_cli")).expect("it is one");
        assert_eq!((program.name.as_str(), program.is_split), ("cli (lib)", false));
        assert!(program_in(&message(false, "bin", "transhume")).is_none());
    }

    #[test]
    fn tests_of_a_crate_run_one_by_one_and_unit_tests_together_without_the_long_ones() {
        let tests = ["moves::one", "moves::long::two", "beside_others::long::three"].map(str::to_owned);
        let usual = |name: &str| !is_long(name);
        let split = program_in(&message(true, "test", "it")).expect("it is one");
        let shown = |is_chosen: &dyn Fn(&str) -> bool| {
            split.tasks(&tests, is_chosen).into_iter().map(|task| (task.name, task.is_alone)).collect::<Vec<_>>()
        };
        assert_eq!(shown(&usual), [("cli moves::one".to_owned(), false)]);
        let long = ["cli moves::long::two", "cli beside_others::long::three"].map(str::to_owned);
        assert_eq!(
            shown(&is_long),
            long.map(|name| {
                let is_alone = name.contains("beside");
                (name, is_alone)
            })
        );

        let unit = program_in(&message(true, "lib", "transhume_cli")).expect("it is one");
        let arguments = |is_chosen: &dyn Fn(&str) -> bool| {
            unit.tasks(&tests, is_chosen).into_iter().map(|task| task.arguments.join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(arguments(&usual), ["--skip ::long::"]);
        assert_eq!(arguments(&is_long), ["--exact moves::long::two beside_others::long::three"]);
        assert!(arguments(&|_| false).is_empty());
    }
}
