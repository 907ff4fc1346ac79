//! One process of tests: started, measured, bounded in time, and looked after for what it leaves.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::schedule::Task;

/// What a test started may take so long to end after it.
const LEFT: Duration = Duration::from_secs(5);
/// Where version 2 of control groups is mounted: alone, or beside version 1.
const GROUPS: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
/// Puts itself into the control group `$0`, if it may, and becomes the program.
const ENTER: &str = r#"{ echo $$ > "$0/cgroup.procs"; } 2> /dev/null; exec "$@""#;

/// What came of a task.
pub(super) struct Outcome {
    pub(super) name: String,
    pub(super) seconds: f64,
    /// How many processors were busy with it and what it has started, on average.
    pub(super) processors: f64,
    pub(super) is_good: bool,
}

/// Runs `task` to its end, or until it hangs. All that it says is shown if it fails.
pub(super) fn run(task: &Task) -> anyhow::Result<Outcome> {
    let began = Instant::now();
    let group = Group::new(&task.name);
    let mut command = group.as_ref().map_or_else(|| Command::new(&task.path), |group| group.command(&task.path));
    command
        .args(&task.arguments)
        .current_dir(&task.folder)
        .env("CARGO_MANIFEST_DIR", &task.folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let child = command.spawn().with_context(|| format!("running {}", task.path.display()))?;
    let (output, hangs) = wait(child, began, task.limit)?;
    let seconds = began.elapsed().as_secs_f64();
    let busy = group.as_ref().map_or(0.0, Group::busy_seconds);
    let left = group.map(Group::end).unwrap_or_default();
    let is_good = output.status.success() && !hangs && left.is_empty();
    let said = String::from_utf8_lossy(&output.stdout);
    if !is_good {
        println!("--- {} has failed:\n{said}\n{}", task.name, String::from_utf8_lossy(&output.stderr));
    }
    if hangs {
        println!("--- {} was ended after {:?}", task.name, task.limit);
    }
    if !left.is_empty() {
        println!("--- {} has left processes: {}", task.name, left.join("; "));
    }
    let summary = said.lines().find_map(|line| line.strip_prefix("test result: ")?.split(';').next());
    let summary = summary.or_else(|| said.lines().last()).unwrap_or("it has said nothing");
    println!("{} ({seconds:.1} s, {busy:.1} s of processors): {summary}", task.name);
    let processors = if seconds > 0.0 { busy / seconds } else { 0.0 };
    Ok(Outcome { name: task.name.clone(), seconds, processors, is_good })
}

/// Waits for the end, and ends what hangs.
fn wait(child: Child, began: Instant, limit: Duration) -> anyhow::Result<(Output, bool)> {
    let process = child.id();
    std::thread::scope(|scope| {
        let output = scope.spawn(move || child.wait_with_output());
        let mut hangs = false;
        while !output.is_finished() {
            if began.elapsed() > limit && !hangs {
                hangs = true;
                // The whole group of processes: its children have the test's output open.
                Command::new("kill").args(["-KILL", "--", &format!("-{process}")]).status()?;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = output.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))?;
        Ok((output.context("waiting for a test")?, hangs))
    })
}

/// A control group of one test. It counts the processor time of what left its parent, too, and knows who is left.
struct Group {
    path: PathBuf,
}

impl Group {
    /// A new one for the test `name`; none where this user may not make one. A test that runs several times at once has several.
    fn new(name: &str) -> Option<Self> {
        let top = GROUPS.iter().find(|top| Path::new(top).join("cgroup.procs").exists())?;
        let name: String =
            name.chars().map(|letter| if letter.is_alphanumeric() { letter } else { '-' }).take(80).collect();
        let path = |number: u32| Path::new(top).join(format!("transhume-test-{}-{name}-{number}", std::process::id()));
        (0..100).map(path).find(|path| fs::create_dir(path).is_ok()).map(|path| Self { path })
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", ENTER]).arg(&self.path).arg(program);
        command
    }

    fn busy_seconds(&self) -> f64 {
        let text = fs::read_to_string(self.path.join("cpu.stat")).unwrap_or_default();
        let used = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse::<f64>().ok());
        used.unwrap_or(0.0) / 1e6
    }

    /// Who is in it.
    fn members(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Removes it. Gives the command lines of processes that outlive the test, which are ended.
    fn end(self) -> Vec<String> {
        let began = Instant::now();
        while !self.members().is_empty() && began.elapsed() < LEFT {
            std::thread::sleep(Duration::from_millis(10));
        }
        let command_line = |process: &String| {
            let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&words).replace('\0', " ")
        };
        let left = self.members().iter().map(command_line).collect();
        // One that has just ended, or whose kernel has no such file, is ended with its test's network or not at all.
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
        while fs::remove_dir(&self.path).is_err() && began.elapsed() < 2 * LEFT {
            std::thread::sleep(Duration::from_millis(10));
        }
        left
    }
}
