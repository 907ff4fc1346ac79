//! Which programs of tests cargo builds, and which tests are in them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::schedule::Task;
use super::{ALONE, SHARED};
use crate::programs::cargo_itself;

/// The program of a crate's tests in `tests/`.
const INTEGRATION: &str = "it";

/// A program of tests.
pub(super) struct Program {
    /// Its crate without the project's name, with `(lib)` or `(bin NAME)` for unit tests.
    name: String,
    path: PathBuf,
    /// The folder of its package, where cargo would run it.
    folder: PathBuf,
    /// Each test is a process of its own.
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

/// The tests that a program lists; none if it says something else, as a program without a harness does.
fn listed_in(lines: &str) -> Option<Vec<String>> {
    let tests: Vec<_> = lines.lines().filter_map(|line| line.strip_suffix(": test").map(str::to_owned)).collect();
    let count: usize = lines.lines().rev().find_map(|line| line.split_once(" test")?.0.parse().ok())?;
    (count == tests.len()).then_some(tests)
}

/// The program that a message of cargo's is about, if it is one of tests.
fn program_in(message: &Value) -> Option<Program> {
    let is_test = message["profile"]["test"].as_bool()?;
    let path = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = folder.file_name()?.to_string_lossy().into_owned();
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let name = match kind {
        "test" if target == INTEGRATION => package,
        "test" => format!("{package} {target}"),
        "bin" => format!("{package} (bin {target})"),
        kind => format!("{package} ({kind})"),
    };
    is_test.then_some(Program { name, path, folder, is_split: kind == "test" })
}

impl Program {
    /// The paths of its tests.
    pub(super) fn tests(&self) -> anyhow::Result<Vec<String>> {
        let listed = Command::new(&self.path).arg("--list").output();
        let listed = listed.with_context(|| format!("starting {}", self.path.display()))?;
        ensure!(listed.status.success(), "{} lists no tests", self.path.display());
        let lines = String::from_utf8(listed.stdout).context("names of tests are UTF-8")?;
        listed_in(&lines).with_context(|| format!("{} does not list its tests: has it a harness?", self.path.display()))
    }

    /// What runs those of `tests` that are chosen by their whole names, `PROGRAM PATH`.
    pub(super) fn tasks(&self, tests: &[String], mut is_chosen: impl FnMut(&str) -> bool) -> Vec<Task> {
        let whole = |test: &str| format!("{} {test}", self.name);
        let chosen: Vec<&String> = tests.iter().filter(|test| is_chosen(&whole(test))).collect();
        if self.is_split {
            // What it says shows whether it did nothing here, too.
            let flags = ["--show-output", "--exact"].map(str::to_owned);
            let one = |test: &&String| self.task(whole(test), [&flags[..], &[(*test).clone()]].concat(), 1);
            return chosen.iter().map(one).collect();
        }
        if chosen.is_empty() {
            return Vec::new();
        }
        let count = chosen.len();
        let arguments = ["--exact".to_owned()].into_iter().chain(chosen.into_iter().cloned()).collect();
        vec![self.task(self.name.clone(), arguments, count)]
    }

    fn task(&self, name: String, arguments: Vec<String>, tests: usize) -> Task {
        let begins = |beginnings: &[&str]| beginnings.iter().any(|beginning| name.starts_with(beginning));
        let shared = SHARED.iter().find(|(_, users)| begins(users)).map(|(what, _)| *what);
        let is_alone = begins(&ALONE);
        let (path, folder) = (self.path.clone(), self.folder.clone());
        Task { path, folder, arguments, is_alone, shared, tests: Some(tests), ..Task::named(name) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::is_long;
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
        let program = program_in(&message(true, "test", "fixtures")).expect("it is one");
        assert_eq!((program.name.as_str(), program.is_split), ("cli fixtures", true));
        let program = program_in(&message(true, "lib", "transhume_cli")).expect("it is one");
        assert_eq!((program.name.as_str(), program.is_split), ("cli (lib)", false));
        assert!(program_in(&message(false, "bin", "transhume")).is_none());
    }

    #[test]
    fn a_program_that_does_not_list_its_tests_has_not_none() {
        assert_eq!(listed_in("a::b: test\nc: test\n\n2 tests, 0 benchmarks\n"), Some(vec!["a::b".into(), "c".into()]));
        assert_eq!(listed_in("a: test\n\n1 test, 0 benchmarks\n").map(|tests| tests.len()), Some(1));
        assert_eq!(listed_in("0 tests, 0 benchmarks\n"), Some(Vec::new()));
        assert_eq!(listed_in(""), None);
        assert_eq!(listed_in("all is well\n"), None);
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
        assert_eq!(arguments(&usual), ["--exact moves::one"]);
        assert_eq!(arguments(&is_long), ["--exact moves::long::two beside_others::long::three"]);
        assert!(arguments(&|_| false).is_empty());
    }
}
