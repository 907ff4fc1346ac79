//! Programs that are started for a measurement and never outlive it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// A program that is killed when this is dropped, or when this process dies.
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts it; what it says on its error output goes to `log`.
    ///
    /// # Errors
    /// It cannot be started, or there is no such place for the log.
    pub fn start(program: &Path, words: &[String], log: &Path) -> anyhow::Result<Self> {
        let name = program.display().to_string();
        let out = std::fs::File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let child = guarded(program)
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(out)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        Ok(Self { child, name })
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `path` exists, 20 s at most.
    ///
    /// # Errors
    /// It ended before that, and what it said in `log`.
    pub fn wait_for(&mut self, path: &Path, log: &Path) -> anyhow::Result<()> {
        let end = Instant::now() + Duration::from_secs(20);
        while !path.exists() {
            if self.child.try_wait().context("asking for a child")?.is_some() || Instant::now() > end {
                let said = std::fs::read_to_string(log).unwrap_or_default();
                bail!("{} did not come up: {}", self.name, said.trim());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Processor time that it has used.
    ///
    /// # Errors
    /// It is gone.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        cpu_of(self.pid())
    }

    /// Kills it as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A command whose process dies with the thread that starts it.
#[must_use]
pub fn guarded(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// User and system time of a process, with that of its threads that have ended: their sum is what the scheduler counted,
/// told in hundredths of a second.
///
/// # Errors
/// It is gone.
pub fn cpu_of(pid: u32) -> anyhow::Result<Duration> {
    cpu_in(&format!("/proc/{pid}/stat"))
}

/// The same of one of its threads alone.
///
/// # Errors
/// The process or the thread is gone.
pub fn cpu_of_thread(pid: u32, thread: u32) -> anyhow::Result<Duration> {
    cpu_in(&format!("/proc/{pid}/task/{thread}/stat"))
}

fn cpu_in(path: &str) -> anyhow::Result<Duration> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{path}: the process is gone"))?;
    // The name of the program may hold anything, so fields are counted from behind it.
    let fields = text.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).sum::<u64>();
    Ok(Duration::from_millis(ticks * 10))
}

/// The most memory that a process ever had, in bytes.
///
/// # Errors
/// It is gone.
pub fn memory_peak_of(pid: u32) -> anyhow::Result<u64> {
    memory_in(pid, "VmHWM:")
}

/// The memory that a process has now, in bytes.
///
/// # Errors
/// It is gone.
pub fn memory_now_of(pid: u32) -> anyhow::Result<u64> {
    memory_in(pid, "VmRSS:")
}

fn memory_in(pid: u32, name: &str) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).context("reading a process's status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let line = line.with_context(|| format!("the kernel tells no {name}"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().with_context(|| format!("{name} is a number"))?;
    Ok(kib << 10)
}

/// Runs a program to its end and returns what it printed.
///
/// # Errors
/// It cannot be started, or it fails: with what it said.
pub fn output_of(program: &Path, words: &[String]) -> anyhow::Result<String> {
    let name = program.display();
    let output =
        guarded(program).args(words).stdin(Stdio::null()).output().with_context(|| format!("starting {name}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{name} {}: {}: {}", words.join(" "), output.status, said.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{name} prints UTF-8"))
}
