//! `cargo xtask record`: runs a command, and keeps what came of it as a file in `docs/runs`; `cargo xtask runs` draws the
//! table of all of them in `docs/reliability.md`. Nobody writes into that table by hand, so it says only what was run.

mod age;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

/// Where the records are, one file a name.
const RECORDS: &str = "docs/runs";
/// The page that shows them, and what stands around the table there.
const PAGE: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- runs: made by `cargo xtask runs` -->\n";
const END: &str = "<!-- end of runs -->\n";

/// Arguments of `cargo xtask record`.
#[derive(clap::Args)]
pub(crate) struct RecordArguments {
    /// The record's name; an older one of that name is replaced.
    #[arg(long)]
    name: String,
    /// Keep the lines of what is printed that begin with one of these, without colours; otherwise the last line.
    #[arg(long, value_name = "TEXT")]
    keep: Vec<String>,
    /// What of the repository the command covers, if that is not told by its name.
    #[arg(long, value_name = "PATH")]
    covers: Vec<String>,
    /// The command.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<String>,
}

/// Arguments of `cargo xtask runs`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only say whether the table is what the records say, and which records are older than the code that they cover; exit with 1 if
    /// the table is not, or a record is outdated.
    #[arg(long)]
    check: bool,
    /// A record is outdated after so many commits to the code that it covers.
    #[arg(long, value_name = "N", default_value_t = 50)]
    commits_max: u64,
}

/// Runs a command and keeps what came of it.
pub(crate) fn record(arguments: &RecordArguments) -> anyhow::Result<()> {
    let root = root();
    let name = &arguments.name;
    let is_plain = name.chars().all(|letter| letter.is_alphanumeric() || letter == '-') && !name.is_empty();
    ensure!(is_plain, "`{name}` is no name of a record: letters, digits and `-`");
    let changed = changed()?;
    ensure!(changed.is_empty(), "a record names a commit: commit first. Changed: {}", changed.join(", "));
    let commit = head()?;
    let date = read_from("date", &["--utc", "+%F"])?;
    let began = Instant::now();
    let (program, words) = arguments.command.split_first().context("a command is given")?;
    let mut child = Command::new(program)
        .args(words)
        .current_dir(&root)
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {program}"))?;
    let stdout = BufReader::new(child.stdout.take().context("it was asked for")?);
    // Nobody may be reading any more, and not all that is printed is text: neither changes what comes of the command.
    let mut shown = std::io::stdout();
    let (mut kept, mut last) = (Vec::new(), String::new());
    for line in stdout.split(b'\n') {
        let line = line.context("reading what the command prints")?;
        let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
        let _ = writeln!(shown, "{line}");
        if arguments.keep.iter().any(|text| line.starts_with(text.as_str())) {
            kept.push(line.clone());
        }
        if !line.trim().is_empty() {
            last = line;
        }
    }
    let status = child.wait().context("waiting for the command")?;
    if status.success() {
        let since = changed_since(&commit)?;
        ensure!(since.is_empty(), "nothing is on record: the sources changed while it ran: {}", since.join(", "));
    }
    if kept.is_empty() {
        kept.push(last);
    }
    let command = arguments.command.join(" ");
    let known = || age::covered_by(&command).into_iter().map(str::to_owned).collect();
    let covers = if arguments.covers.is_empty() { known() } else { arguments.covers.clone() };
    let record = json!({
        "command": command,
        "commit": commit,
        "date": date,
        "seconds": began.elapsed().as_secs(),
        "held": status.success(),
        "said": kept,
        "covers": covers,
    });
    std::fs::create_dir_all(root.join(RECORDS))?;
    let path = root.join(RECORDS).join(format!("{}.json", arguments.name));
    std::fs::write(&path, serde_json::to_string_pretty(&record)? + "\n")?;
    draw(false)?;
    ensure!(status.success(), "the command failed ({status}); that is on record in {}", path.display());
    Ok(())
}

/// What of the checkout is not committed, without what only documents it. A new file may be built, too.
fn changed() -> anyhow::Result<Vec<String>> {
    let changed = read_from("git", &["status", "--porcelain", "--", ".", ":(exclude)docs"])?;
    Ok(changed.lines().map(str::to_owned).collect())
}

/// What was changed, or checked out, since `commit` was.
fn changed_since(commit: &str) -> anyhow::Result<Vec<String>> {
    let mut changed = changed()?;
    let head = head()?;
    if head != commit {
        changed.push(format!("{head} is checked out, not {commit}"));
    }
    Ok(changed)
}

fn head() -> anyhow::Result<String> {
    read_from("git", &["rev-parse", "--short=9", "HEAD"])
}

/// Draws the table of all records.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    draw(arguments.check)?;
    if arguments.check { age::show(arguments.commits_max) } else { Ok(()) }
}

/// Draws the table, or fails if it is not drawn as the records say.
pub(crate) fn draw(is_check: bool) -> anyhow::Result<()> {
    let root = root();
    let page = std::fs::read_to_string(root.join(PAGE)).with_context(|| format!("reading {PAGE}"))?;
    let (before, rest) = page.split_once(BEGIN).with_context(|| format!("{PAGE} has no line {BEGIN}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("{PAGE} has no line {END}"))?;
    let drawn = format!("{before}{BEGIN}{}{END}{after}", table()?);
    match is_check {
        true if drawn != page => bail!("the table of runs in {PAGE} is not what {RECORDS} says: `cargo xtask runs`"),
        true => Ok(()),
        false => std::fs::write(root.join(PAGE), drawn).with_context(|| format!("writing {PAGE}")),
    }
}

/// All records by their names.
fn records() -> anyhow::Result<BTreeMap<String, Value>> {
    // Before the first record there is no folder.
    let entries = std::fs::read_dir(root().join(RECORDS)).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|kind| kind == "json"));
    let read = |path: PathBuf| {
        let record = serde_json::from_slice(&std::fs::read(&path)?).with_context(|| path.display().to_string())?;
        Ok((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), record))
    };
    paths.map(read).collect()
}

fn table() -> anyhow::Result<String> {
    let mut table = "| command | when | commit | took | held | what it said |\n|---|---|---|---|---|---|\n".to_owned();
    for record in records()?.into_values() {
        let text = |key: &str| record[key].as_str().unwrap_or_default().replace('|', "\\|");
        let said: Vec<&str> = record["said"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let held = if record["held"] == true { "yes" } else { "**no**" };
        let (command, date, commit) = (text("command"), text("date"), text("commit"));
        let (seconds, said) = (&record["seconds"], said.join("; ").replace('|', "\\|"));
        table += &format!("| `{command}` | {date} | {commit} | {seconds} s | {held} | {said} |\n");
    }
    Ok(table)
}

/// The checkout that `cargo xtask` was called in. Where it was compiled says nothing: a target directory may serve several checkouts.
pub(crate) fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    xtask.parent().expect("xtask lies in the checkout").to_owned()
}

fn read_from(program: &str, words: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(words).current_dir(root()).output();
    let output = output.with_context(|| format!("starting {program}"))?;
    ensure!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
