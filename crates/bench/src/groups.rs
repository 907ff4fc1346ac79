//! Groups of rows: which are asked for, what they measure, and how that is told. One that cannot be measured does not keep
//! the others from it; it is named at the end and makes the command fail.

use std::path::Path;

use anyhow::bail;
use serde_json::{Value, json};

use crate::figures::{Row, table};
use crate::page::write_json;

/// The groups of one benchmark by name, in the order in which they are measured.
pub(crate) type Groups<Bench> = [(&'static str, fn(&Bench) -> anyhow::Result<Vec<Row>>)];

/// What was measured.
pub(crate) struct Measured {
    pub(crate) rows: Vec<Row>,
    /// What could not be, and why.
    failures: Vec<String>,
}

/// Refuses names that are no group's, before anything is built for them.
pub(crate) fn check<Bench>(groups: &Groups<Bench>, only: &[String]) -> anyhow::Result<()> {
    if let Some(unknown) = only.iter().find(|name| groups.iter().all(|(group, _)| group != name)) {
        let names: Vec<&str> = groups.iter().map(|(name, _)| *name).collect();
        bail!("there is no group {unknown}; there are {}", names.join(", "));
    }
    Ok(())
}

/// Measures those of the groups that are asked for: all, if none is named.
pub(crate) fn measure<Bench>(groups: &Groups<Bench>, only: &[String], bench: &Bench) -> Measured {
    let (mut rows, mut failures) = (Vec::new(), Vec::new());
    for (name, group) in groups {
        if !only.is_empty() && !only.iter().any(|only| only == name) {
            continue;
        }
        eprintln!("measuring {name}");
        match group(bench) {
            Ok(measured) => {
                measured.iter().for_each(Row::print);
                rows.extend(measured);
            }
            Err(error) => {
                eprintln!("{name} was not measured: {error:#}");
                failures.push(format!("{name}: {error:#}"));
            }
        }
    }
    Measured { rows, failures }
}

impl Measured {
    /// The table of all rows, in Markdown.
    pub(crate) fn table(&self) -> String {
        table(&self.rows)
    }

    /// Writes the figures to a file of their own in `folder`, and fails if not all were measured.
    pub(crate) fn write(self, folder: &Path, name: &str) -> anyhow::Result<()> {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        write_json(folder, name, json!({ "rows": rows, "not_measured": self.failures }))?;
        if self.failures.is_empty() {
            return Ok(());
        }
        bail!("not measured: {}", self.failures.join("; "))
    }
}
