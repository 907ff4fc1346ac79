//! What the stack costs while nothing migrates: processor per request on a device in memory, with the stack and without.

use std::path::Path;

use anyhow::Context;
use serde_json::Value;

use super::Bench;
use super::figures::{Goal, Row, Samples};
use super::process::output_of;

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words =
        ["build", "--quiet", "--locked", "--release", "--package", "transhume-guest", "--example", "idle_stack"];
    output_of(Path::new(&cargo), &words.map(str::to_owned))?;
    let program = bench.programs.join("examples/idle_stack");
    let mut rows = Vec::new();
    let printed = output_of(&program, &[bench.runs.max(5).to_string()])?;
    for line in printed.lines() {
        let measured: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        let samples = |name: &str| {
            let mut samples = Samples::default();
            measured[name].as_array().into_iter().flatten().filter_map(Value::as_f64).for_each(|ns| samples.push(ns));
            samples
        };
        let what = format!("{} of 4 KiB on a device in memory", measured["what"].as_str().unwrap_or("?"));
        let goal = if measured["has_goal"] == true { Goal::RatioAtMost(1.1) } else { Goal::None };
        rows.push(Row::new(what, "ns CPU", samples("stack"), goal).against("bare backend", samples("bare")));
    }
    Ok(rows)
}
