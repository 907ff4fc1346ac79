//! Where results go: a file of JSON each time, and docs/benchmarks.md if that is asked for.

use std::path::Path;

use anyhow::Context;
use serde_json::{Value, json};
use transhume_guest::process::output_of;

/// The page with the results.
const PAGE: &str = "docs/benchmarks.md";

/// The day, in UTC.
pub(crate) fn today() -> anyhow::Result<String> {
    Ok(output_of(Path::new("date"), &["--utc".into(), "+%Y-%m-%d".into()])?.trim().to_owned())
}

/// Replaces what stands between two marks on the page.
pub(crate) fn write_between(begin: &str, end: &str, text: &str) -> anyhow::Result<()> {
    let page = std::fs::read_to_string(PAGE).with_context(|| format!("reading {PAGE}"))?;
    let (before, rest) = page.split_once(begin).with_context(|| format!("{PAGE} has no {begin}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("{PAGE} has no {end}"))?;
    let page = format!("{before}{begin}\n{text}\n{end}{after}");
    std::fs::write(PAGE, page).with_context(|| format!("writing {PAGE}"))
}

/// Writes `figures`, with what machine they are of, to a file of its own.
pub(crate) fn write_json(folder: &Path, name: &str, mut figures: Value) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let now = std::time::SystemTime::now();
    let seconds = now.duration_since(std::time::UNIX_EPOCH).context("the clock is before 1970")?.as_secs();
    let path = folder.join(format!("{name}-{seconds}.json"));
    figures["unix_seconds"] = json!(seconds);
    figures["kernel"] = json!(std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim());
    figures["cores"] = json!(std::thread::available_parallelism().map_or(0, std::num::NonZero::get));
    let text = serde_json::to_string_pretty(&figures).context("writing JSON")?;
    std::fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    println!("written to {}", path.display());
    Ok(())
}
