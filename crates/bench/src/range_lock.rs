//! `cargo xtask bench-range-lock`: what a lock on an extent costs, and which requests it lets run in parallel. It
//! measures 1, 2, 4 and 8 threads. Beside them it shows the figures of the PMigrate paper (section 6.2.3, figures 6 and
//! 7, table 9). The program that measures is crates/block/examples/range_lock.rs.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::figures::Samples;
use transhume_guest::process::output_of;

/// Arguments of `cargo xtask bench-range-lock`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// How often each figure is measured; its median is what counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Milliseconds of one measurement.
    #[arg(long, default_value_t = 150)]
    millis: u64,
    /// Microseconds of an operation that waits.
    #[arg(long, default_value_t = 300)]
    wait: u64,
    /// Where the JSON goes.
    #[arg(long, default_value = "bench-results")]
    results: PathBuf,
    /// Put the tables into docs/benchmarks.md.
    #[arg(long)]
    document: bool,
}

const BEGIN: &str = "<!-- range lock -->\n";
const END: &str = "<!-- end of range lock -->";

/// The lock that the others are compared with where something is done inside.
const BASELINE: &str = "no optimisation";

/// One lock under one load, by the number of threads.
struct Line {
    load: String,
    lock: String,
    by_threads: Vec<(u64, Samples)>,
}

/// Measures, prints the tables and writes JSON.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let program = build()?;
    let words = [arguments.runs.max(1).to_string(), arguments.millis.to_string(), arguments.wait.to_string()];
    let lines = parse(&output_of(&program, &words)?)?;
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let mut page =
        format!("Medians of {} runs of {} ms (least .. most), on {cores} cores.\n", arguments.runs, arguments.millis);
    let wait = format!("Around an operation that waits {} us for a device, ns each", arguments.wait);
    for (load, heading) in [
        ("alone", "Asking and letting go, one chunk of 64 KiB at a time in a part of the volume of its own, ns each"),
        ("migration", "The same with 256 requests held or waiting, copiers' and guests' by turns, ns each"),
        ("one-mebibyte", "The same with 64 of 4 to 16 KiB held or waiting in one and the same MiB, ns each"),
        ("copy", "Around an operation that copies 64 KiB in memory, ns each"),
        ("wait", wait.as_str()),
    ] {
        table(&mut page, heading, lines.iter().filter(|line| line.load == load))?;
    }
    page += PAPER;
    print!("{page}");
    if arguments.document {
        crate::page::write_between(BEGIN, END, &page)?;
    }
    crate::page::write_json(
        &arguments.results,
        "range-lock",
        json!({ "lines": lines.iter().map(Line::json).collect::<Vec<_>>() }),
    )
}

fn build() -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words = ["build", "--locked", "--release", "--package", "transhume-block", "--example", "range_lock"];
    output_of(Path::new(&cargo), &words.map(str::to_owned))?;
    Ok(transhume_guest::programs::target_folder()?.join("release/examples/range_lock"))
}

fn parse(printed: &str) -> anyhow::Result<Vec<Line>> {
    let mut lines: Vec<Line> = Vec::new();
    for text in printed.lines() {
        let told: Value = serde_json::from_str(text).with_context(|| format!("not JSON: {text}"))?;
        let word = |name: &str| told[name].as_str().map(str::to_owned).with_context(|| format!("no {name}: {text}"));
        let (load, lock) = (word("load")?, word("lock")?);
        let threads = told["threads"].as_u64().with_context(|| format!("no threads: {text}"))?;
        let mut samples = Samples::default();
        told["ns"].as_array().into_iter().flatten().filter_map(Value::as_f64).for_each(|ns| samples.push(ns));
        match lines.iter_mut().find(|line| line.load == load && line.lock == lock) {
            Some(line) => line.by_threads.push((threads, samples)),
            None => lines.push(Line { load, lock, by_threads: vec![(threads, samples)] }),
        }
    }
    if lines.is_empty() {
        bail!("the program that measures has printed nothing");
    }
    Ok(lines)
}

fn table<'a>(page: &mut String, heading: &str, lines: impl Iterator<Item = &'a Line>) -> anyhow::Result<()> {
    let lines: Vec<_> = lines.collect();
    let first = lines.first().with_context(|| format!("not measured: {heading}"))?;
    let baseline = lines.iter().find(|line| line.lock == BASELINE);
    write!(page, "\n{heading}:\n\n| |")?;
    first.by_threads.iter().try_for_each(|(threads, _)| write!(page, " {threads} thread{} |", plural(*threads)))?;
    write!(page, "\n|---|{}\n", "---|".repeat(first.by_threads.len()))?;
    for line in &lines {
        write!(page, "| {} |", line.lock)?;
        for (threads, ns) in &line.by_threads {
            write!(page, " {:.0} ({:.0} .. {:.0})", ns.median(), ns.least(), ns.most())?;
            let slower = baseline.and_then(|baseline| baseline.at(*threads));
            match slower {
                Some(slower) if line.lock != BASELINE => write!(page, ", {:.2} x |", slower.paired_ratio(ns))?,
                _ => write!(page, " |")?,
            }
        }
        writeln!(page)?;
    }
    Ok(())
}

const fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

impl Line {
    fn at(&self, threads: u64) -> Option<&Samples> {
        self.by_threads.iter().find(|(count, _)| *count == threads).map(|(_, samples)| samples)
    }

    fn json(&self) -> Value {
        let by_threads = self.by_threads.iter().map(|(threads, ns)| json!({ "threads": threads, "ns": ns.json() }));
        json!({ "load": self.load, "lock": self.lock, "by_threads": by_threads.collect::<Vec<_>>() })
    }
}

/// What the paper has measured, on 12 cores and with another operation: it maps a guest's memory.
const PAPER: &str = "
The paper's table 9: one operation on the address space while a VM migrates, in us (12 cores; idle VM / memcached VM):

| | no optimisation | read lock | range lock |
|---|---|---|---|
| mmap | 1.39 / 1.10 | 1.80 / 1.26 | 0.05 / 0.18 |
| guest map | 18.1 / 16.8 | 16.3 / 15.5 | 14.8 / 15.2 |
| munmap | 7.27 / 5.57 | 6.22 / 5.30 | 0.75 / 0.85 |
| all three | 26.8 / 23.5 | 24.3 / 22.1, 1.10 x / 1.06 x | 15.6 / 16.2, 1.72 x / 1.45 x |

Its figures 6 and 7: with the range lock a whole migration is 2.06 to 3.05 times as fast as without.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_lock_and_says_how_much_faster_than_without_it_is() {
        let printed = r#"{"load":"copy","lock":"no optimisation","threads":1,"ns":[10,20,30]}
{"load":"copy","lock":"range lock","threads":1,"ns":[5,10,15]}
{"load":"copy","lock":"no optimisation","threads":2,"ns":[10,20,30]}
{"load":"copy","lock":"range lock","threads":2,"ns":[4,8,12]}"#;
        let lines = parse(printed).expect("it is what the program prints");
        let mut page = String::new();
        table(&mut page, "Copies", lines.iter()).expect("there are lines");
        assert!(page.contains("| | 1 thread | 2 threads |\n|---|---|---|\n"), "{page}");
        assert!(page.contains("| range lock | 10 (5 .. 15), 2.00 x | 8 (4 .. 12), 2.50 x |"), "{page}");
        assert!(table(&mut page, "Waits", std::iter::empty()).is_err());
        assert!(parse("").is_err());
    }
}
