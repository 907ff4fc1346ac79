//! What each test took, so that the longest begin first and the processors are neither idle nor crowded.
//!
//! This machine's own figures are in the target folder. A machine that has run no test takes those of the repository, which
//! `cargo xtask test --keep` writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::process::Outcome;
use super::schedule::Task;
use crate::programs::target_folder;
use crate::runs::root;

const KEPT: &str = "xtask/test-durations.json";
const OWN: &str = "test-durations.json";
/// Tests that take less are not worth a line in the repository.
const KEPT_SECONDS_MIN: f64 = 1.0;

/// Seconds, and how many processors it keeps busy meanwhile on average.
type Measured = (f64, f64);

/// What tests took, by their names.
pub(super) struct Durations {
    own: PathBuf,
    measured: BTreeMap<String, Measured>,
}

impl Durations {
    pub(super) fn read() -> anyhow::Result<Self> {
        let own = target_folder()?.join(OWN);
        let mut measured = read(&root().join(KEPT));
        measured.extend(read(&own));
        Ok(Self { own, measured })
    }

    /// Says what `task` is expected to take; a test that nobody has measured is taken for a short one.
    pub(super) fn fill_in(&self, task: &mut Task) {
        if let Some((seconds, processors)) = self.measured.get(&task.name) {
            (task.seconds, task.processors) = (*seconds, *processors);
        }
    }

    /// Keeps what was measured now; in the repository, too, if that is wanted.
    pub(super) fn write(mut self, outcomes: &[Outcome], is_kept: bool) -> anyhow::Result<()> {
        let now = outcomes.iter().map(|outcome| (outcome.name.clone(), (outcome.seconds, outcome.processors)));
        self.measured.extend(now);
        write(&self.own, &self.measured)?;
        if is_kept {
            self.measured.retain(|name, (seconds, _)| {
                *seconds >= KEPT_SECONDS_MIN && outcomes.iter().any(|outcome| outcome.name == *name)
            });
            write(&root().join(KEPT), &self.measured)?;
        }
        Ok(())
    }
}

fn read(path: &Path) -> BTreeMap<String, Measured> {
    let text = std::fs::read(path).unwrap_or_default();
    let known: BTreeMap<String, Value> = serde_json::from_slice(&text).unwrap_or_default();
    let measured = |value: &Value| Some((value[0].as_f64()?, value[1].as_f64()?));
    known.into_iter().filter_map(|(name, value)| Some((name, measured(&value)?))).collect()
}

/// One line a test.
fn write(path: &Path, measured: &BTreeMap<String, Measured>) -> anyhow::Result<()> {
    let round = |figure: f64| (figure * 10.0).round() / 10.0;
    let line = |(name, (seconds, processors)): (&String, &Measured)| {
        format!("{}: {}", json!(name), json!([round(*seconds), round(*processors)]))
    };
    let lines: Vec<String> = measured.iter().map(line).collect();
    let text = format!("{{\n{}\n}}\n", lines.join(",\n"));
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
