//! `cargo xtask record-fixtures`: what the programs of one version leave behind and say, kept as files that later programs
//! must read.
//!
//! ```text
//! fixtures/VERSION/STAGE.tar.gz      a folder in one stage: state directory, images, and `expected.img`, what the guest reads
//! fixtures/VERSION/api/ANSWER.json   what the API answers in a stage
//! fixtures/VERSION/wire.tar.gz       what crosses between two hosts: N.sent and N.answered of each connection
//! ```

mod hosts;
mod http;
mod local;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use transhume_guest::Daemon;

use transhume_guest::programs::build_debug_programs;

/// No stage takes longer, on the slowest machine.
const LIMIT: Duration = Duration::from_secs(120);
/// The size of a recorded volume: neither a multiple of a chunk nor of a block.
pub(crate) const VOLUME_BYTES: usize = (2 << 20) + 1536;

/// Arguments of `cargo xtask record-fixtures`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The programs in this folder (transhumed, transhume), instead of building them.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// Where the fixtures go, named after the version of the programs.
    #[arg(long, value_name = "FOLDER", default_value = "fixtures")]
    to: PathBuf,
}

/// Where a recording is made and kept.
pub(crate) struct Recorder {
    programs: PathBuf,
    to: PathBuf,
}

/// Records every stage.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let programs = match &arguments.programs {
        Some(programs) => programs.clone(),
        None => build_debug_programs()?,
    };
    let printed = Command::new(programs.join("transhumed")).arg("--version").output().context("starting transhumed")?;
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    let version = printed.split_whitespace().nth(1).context("transhumed prints its version")?;
    let recorder = Recorder { programs, to: arguments.to.join(version) };
    std::fs::create_dir_all(recorder.to.join("api")).context("creating the folder of fixtures")?;
    local::record(&recorder)?;
    hosts::record(&recorder)?;
    println!("recorded {}", recorder.to.display());
    Ok(())
}

impl Recorder {
    /// A folder for a stage, gone when it is dropped.
    fn stage(&self) -> anyhow::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix("th").tempdir().context("creating a folder")
    }

    fn daemon(&self, folder: &Path) -> Daemon {
        Daemon::new(&self.programs, folder)
    }

    /// Packs the folder of a stage, whose daemons are gone.
    fn pack(&self, stage: &str, folder: &Path, about: &Value) -> anyhow::Result<()> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("asking for this boot")?;
        let about = json!({ "root": text(folder), "boot": boot.trim(), "stage": about });
        std::fs::write(folder.join("about.json"), serde_json::to_string_pretty(&about)?)?;
        self.archive(stage, folder)
    }

    /// Packs a folder without sockets and logs.
    fn archive(&self, name: &str, folder: &Path) -> anyhow::Result<()> {
        let archive = text(&self.to.join(format!("{name}.tar.gz")));
        let mut words = vec!["--sort=name", "--numeric-owner", "-C"];
        let folder = text(folder);
        words.extend([&folder, "--exclude=*.sock", "--exclude=./*/api", "--exclude=./*/log", "-Sczf", &archive, "."]);
        tool("tar", &words)?;
        println!("{name}: {} bytes", std::fs::metadata(&archive)?.len());
        Ok(())
    }

    /// Keeps what the API answers to each of `paths`.
    fn keep_answers(&self, stage: &str, daemon: &Daemon, paths: &[&str]) -> anyhow::Result<()> {
        for path in paths {
            let answer: Value =
                serde_json::from_str(&http::get(&daemon.api(), path)?).context("the API speaks JSON")?;
            let name = format!("{stage}{}.json", path.trim_start_matches("/v1").replace('/', "-"));
            std::fs::write(self.to.join("api").join(name), serde_json::to_string_pretty(&answer)? + "\n")?;
        }
        Ok(())
    }
}

/// An image with data, zeroes and holes, that compresses well.
fn image(path: &Path, bytes: usize, seed: u8) -> anyhow::Result<()> {
    let mut contents = vec![0; bytes];
    for (number, block) in contents.chunks_mut(4096).enumerate().filter(|(number, _)| number % 5 != 0) {
        block.fill((number as u8).wrapping_mul(31).wrapping_add(seed) | 1);
    }
    std::fs::write(path, contents).with_context(|| format!("writing {}", path.display()))
}

/// Writes to an export as a guest does.
fn guest_writes(uri: &str, writes: &[(u8, &str, &str)]) -> anyhow::Result<()> {
    for (byte, offset, length) in writes {
        let command = format!("write -P {byte} {offset} {length}");
        tool("qemu-io", &["-f", "raw", "-c", &command, "-c", "flush", uri])?;
    }
    Ok(())
}

/// Keeps what a guest reads from an export.
fn expect(uri: &str, folder: &Path, name: &str) -> anyhow::Result<()> {
    tool("nbdcopy", &[uri, &text(&folder.join(name))])
}

/// Waits until the newest job is as `is` wants it.
fn wait_for_job(daemon: &Daemon, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
    let began = Instant::now();
    loop {
        let job = daemon.json(&["jobs", "--all"])?[0].clone();
        if is(&job) {
            return Ok(job);
        }
        ensure!(began.elapsed() < LIMIT, "never: {what}: {job}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn copied(job: &Value) -> u64 {
    job["progress"]["bytes_copied"].as_u64().unwrap_or_default()
}

fn uri(folder: &Path, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", text(&folder.join(format!("{name}.sock"))))
}

/// Serves the image `name`.img of `folder` as the volume `name`.
fn attach(daemon: &Daemon, folder: &Path, name: &str) -> anyhow::Result<String> {
    let (backend, uri) = (format!("file:{}", text(&folder.join(format!("{name}.img")))), uri(folder, name));
    daemon.json(&["volume", "attach", name, "--backend", &backend, "--export", &uri])?;
    Ok(uri)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn tool(program: &str, words: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(program).args(words).output().with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        bail!("{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
