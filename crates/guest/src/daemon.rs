//! Our own daemon in a folder of its own, for everything that starts it, kills it and starts it again.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// No daemon takes longer to come up or to end, nor a move of a small disk, on the slowest machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(5);

/// A daemon whose state, socket and log are in one folder. Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    programs: PathBuf,
    folder: PathBuf,
    child: Option<Child>,
    /// More arguments for the next start.
    pub arguments: Vec<String>,
    /// A program and its arguments that become the daemon, if any.
    pub launcher: Vec<String>,
}

impl Daemon {
    /// A daemon that does not run yet: `transhumed` and `transhume` are in `programs`, everything else goes to
    /// `folder`.
    #[must_use]
    pub fn new(programs: &Path, folder: &Path) -> Self {
        Self {
            programs: programs.into(),
            folder: folder.into(),
            child: None,
            arguments: Vec::new(),
            launcher: Vec::new(),
        }
    }

    /// Its next start is one of the programs in another folder: another version of them.
    pub fn use_programs(&mut self, programs: &Path) {
        self.programs = programs.into();
    }

    /// Its state directory.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// The socket of its API.
    #[must_use]
    pub fn api(&self) -> PathBuf {
        self.folder.join("api")
    }

    /// Everything that it has logged, of all starts.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Its process, if it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// The command that starts it, not yet run. It dies with the thread that runs the command.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).args(&self.launcher).arg(self.programs.join("transhumed"));
        command.arg("--state-dir").arg(self.state());
        command.arg("--listen").arg(format!("unix:{}", self.api().display()));
        command.args(&self.arguments).stdin(Stdio::null());
        command
    }

    /// Starts it and waits for nothing.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn launch(&mut self) -> anyhow::Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log"));
        let child = self.command().stderr(log.context("opening the daemon's log")?).spawn();
        self.child = Some(child.context("starting transhumed")?);
        Ok(())
    }

    /// Starts it and waits until it answers.
    ///
    /// # Errors
    /// It ends instead, or does not answer.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.launch()?;
        let pid = self.pid().map(u64::from);
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = self.run(&["version", "--json"])?;
            let answer: Value = serde_json::from_slice(&answer.stdout).unwrap_or_default();
            // Only the API of the daemon that was just started counts.
            if answer["daemon"]["pid"].as_u64() == pid {
                return Ok(());
            }
            let child = self.child.as_mut().context("it was just started")?;
            if child.try_wait().context("asking for a child")?.is_some() || Instant::now() > end {
                bail!("the daemon does not come up:\n{}", self.log());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It does not run.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let child = self.child.as_ref().context("no daemon runs")?;
        kill_process(Pid::from_child(child), signal).context("signalling the daemon")
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// SIGTERM, and waits for the end.
    ///
    /// # Errors
    /// It does not end, or not well.
    pub fn terminate(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::TERM)?;
        let end = Instant::now() + PATIENCE;
        let child = self.child.as_mut().context("no daemon runs")?;
        let status = loop {
            match child.try_wait().context("asking for a child")? {
                Some(status) => break status,
                None if Instant::now() > end => bail!("the daemon does not end:\n{}", self.log()),
                None => std::thread::sleep(POLL),
            }
        };
        self.child = None;
        if !status.success() {
            bail!("the daemon did not end well ({status}):\n{}", self.log());
        }
        Ok(())
    }

    /// The command line for this daemon, not yet run.
    #[must_use]
    pub fn client(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("transhume"));
        command.args(words).env("TRANSHUME_API", self.api()).stdin(Stdio::null());
        command
    }

    /// Runs the command line.
    ///
    /// # Errors
    /// The program cannot be run; what it says and exits with is not looked at.
    pub fn run(&self, words: &[&str]) -> anyhow::Result<Output> {
        self.client(words).output().context("starting transhume")
    }

    /// Runs the command line, which must succeed, with `--json`.
    ///
    /// # Errors
    /// It fails, or prints no JSON.
    pub fn json(&self, words: &[&str]) -> anyhow::Result<Value> {
        match self.ask(words)? {
            Ok(answer) => Ok(answer),
            Err((code, said)) => bail!("{words:?} exits with {code}: {said}\n{}", self.log()),
        }
    }

    /// Runs the command line with `--json`; a refusal is its exit code and what it says.
    ///
    /// # Errors
    /// The program cannot be run, or prints no JSON.
    pub fn ask(&self, words: &[&str]) -> anyhow::Result<Result<Value, (i32, String)>> {
        let output = self.run(&[words, &["--json"]].concat())?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            return Ok(Err((output.status.code().unwrap_or(-1), err.trim().to_owned())));
        }
        serde_json::from_str(&out).map(Ok).with_context(|| format!("{words:?} printed {out}"))
    }

    /// Job `id` once it is over.
    ///
    /// # Errors
    /// It does not end, or there is none.
    pub fn wait_for_job(&self, id: u64) -> anyhow::Result<Value> {
        let end = Instant::now() + PATIENCE;
        loop {
            let jobs = self.json(&["jobs", "--all"])?;
            let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == id).cloned());
            match job {
                Some(job) if ["done", "failed", "cancelled"].iter().any(|over| job["state"] == *over) => {
                    return Ok(job);
                }
                job if Instant::now() > end => bail!("job {id} does not end: {job:?}\n{}", self.log()),
                _ => std::thread::sleep(10 * POLL),
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}
