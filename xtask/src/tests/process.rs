//! One process of tests: started, measured, bounded in time, and looked after for what it leaves.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::say;
use super::schedule::Task;
use super::verdict::Verdict;

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
    /// How many processors it and what it has started would keep busy, on average, if nobody else used them.
    pub(super) processors: f64,
    pub(super) is_good: bool,
    /// How many of its tests were not run: ignored ones, and those that say so.
    pub(super) not_run: usize,
}

impl Outcome {
    /// Of a task that could not even be started.
    pub(super) fn failed(name: &str) -> Self {
        Self { name: name.to_owned(), seconds: 0.0, processors: 0.0, is_good: false, not_run: 0 }
    }
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
    let child = match command.spawn().with_context(|| format!("running {}", task.path.display())) {
        Ok(child) => child,
        Err(error) => {
            group.map(Group::end);
            return Err(error);
        }
    };
    let process = child.id();
    let Ended { status, said, complained, hangs, is_held } = wait(child, began, task.limit, group.as_ref())?;
    let seconds = began.elapsed().as_secs_f64();
    let busy = group.as_ref().map_or(0.0, Group::busy_seconds);
    let waited = group.as_ref().map_or(0.0, Group::waiting_seconds);
    let mut left = group.map_or_else(|| end_process_group(process), Group::end);
    if is_held && left.is_empty() {
        left.push("one that is not found, which has its output open".to_owned());
    }
    let verdict = task.tests.map(|tests| Verdict::read(&said, tests));
    let is_good = status.success() && !hangs && left.is_empty() && verdict.as_ref().is_none_or(Verdict::is_complete);
    if !is_good {
        say(format_args!("--- {} has failed ({status}):\n{said}\n{complained}", task.name));
    }
    if hangs {
        say(format_args!("--- {} was ended after {:?}", task.name, task.limit));
    }
    if !left.is_empty() {
        say(format_args!("--- {} has left processes: {}", task.name, left.join("; ")));
    }
    if let Some(why) = verdict.as_ref().filter(|_| status.success() && !hangs).and_then(Verdict::lacks) {
        say(format_args!("--- {}: {why}", task.name));
    }
    let last = || said.lines().last().unwrap_or("it has said nothing").to_owned();
    let summary = verdict.as_ref().and_then(|verdict| verdict.summary.clone()).unwrap_or_else(last);
    say(format_args!("{} ({seconds:.1} s, {busy:.1} s of processors): {summary}", task.name));
    let processors = demand(busy, seconds, waited);
    let not_run = verdict.map_or(0, |verdict| verdict.not_run);
    Ok(Outcome { name: task.name.clone(), seconds, processors, is_good, not_run })
}

/// How many processors a task would keep busy that was `busy` for so long in `seconds`, and waited for a processor in `waited` of
/// them. Without that each crowded run would have the next one be more crowded.
fn demand(busy: f64, seconds: f64, waited: f64) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64);
    let undisturbed = (seconds - waited).max(busy / cores);
    if undisturbed > 0.0 { busy / undisturbed } else { 0.0 }
}

/// How a process came to its end.
struct Ended {
    status: ExitStatus,
    said: String,
    complained: String,
    hangs: bool,
    /// Somebody had its output open long after it.
    is_held: bool,
}

/// Waits for the end, and ends what hangs. A child that outlives the process may have its output open: nobody waits for that one.
fn wait(mut child: Child, began: Instant, limit: Duration, group: Option<&Group>) -> anyhow::Result<Ended> {
    let said = Reader::new(child.stdout.take().context("it was asked for")?);
    let complained = Reader::new(child.stderr.take().context("it was asked for")?);
    let (mut hangs, mut ended) = (false, None);
    loop {
        if ended.is_none() {
            ended = child.try_wait().context("waiting for a test")?.map(|status| (status, Instant::now()));
        }
        let are_read = said.thread.is_finished() && complained.thread.is_finished();
        if let Some((status, at)) = ended
            && (are_read || at.elapsed() > LEFT)
        {
            let (said, complained) = (said.text(), complained.text());
            return Ok(Ended { status, said, complained, hangs, is_held: !are_read });
        }
        if ended.is_none() && !hangs && began.elapsed() > limit {
            hangs = true;
            signal_group(child.id(), "-KILL");
            if let Some(group) = group {
                group.kill();
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads a pipe to its end. What has come is there before that.
struct Reader {
    thread: JoinHandle<()>,
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Reader {
    fn new(mut pipe: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let read = Arc::clone(&bytes);
        let thread = std::thread::spawn(move || {
            let mut part = vec![0; 1 << 16];
            while let Ok(length @ 1..) = pipe.read(&mut part) {
                read.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&part[..length]);
            }
        });
        Self { thread, bytes }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

/// Sends all processes of the group of `process` a signal. Says whether there was one.
fn signal_group(process: u32, signal: &str) -> bool {
    let sent = Command::new("kill").args([signal, "--", &format!("-{process}")]).stderr(Stdio::null()).status();
    sent.is_ok_and(|status| status.success())
}

/// Where there are no control groups, who is left is known as long as it has not left the group of processes. It is ended.
fn end_process_group(process: u32) -> Vec<String> {
    let began = Instant::now();
    while signal_group(process, "-0") {
        if began.elapsed() > LEFT {
            signal_group(process, "-KILL");
            return vec![format!("some of process group {process}")];
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Vec::new()
}

/// Ends what runs in the control groups of this runner when the runner has ended, however that was: tests are in groups of processes
/// of their own, where no Ctrl-C reaches them.
pub(super) struct Watch(Option<Child>);

/// Waits until nobody has its input open, and ends all in the groups whose names begin with `$0`.
const WATCH: &str = r#"cat > /dev/null
for group in "$0"*; do
    [ -d "$group" ] || continue
    echo 1 > "$group/cgroup.kill" || kill -KILL $(cat "$group/cgroup.procs")
    for i in 1 2 3 4 5 6 7 8 9 10; do rmdir "$group" && break; sleep 0.2; done
done"#;

impl Watch {
    /// None where there are no control groups.
    pub(super) fn new() -> anyhow::Result<Self> {
        let Some(top) = Group::top() else { return Ok(Self(None)) };
        let mut command = Command::new("sh");
        command.args(["-c", WATCH]).arg(Group::prefix(top)).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(Some(command.spawn().context("starting a shell")?)))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(mut watch) = self.0.take() {
            // It closes its input first.
            let _ = watch.wait();
        }
    }
}

/// A control group of one test. It counts the processor time of what left its parent, too, and knows who is left.
struct Group {
    path: PathBuf,
}

impl Group {
    fn top() -> Option<&'static str> {
        GROUPS.into_iter().find(|top| Path::new(top).join("cgroup.procs").exists())
    }

    /// What the names of all groups of this runner begin with.
    fn prefix(top: &str) -> String {
        format!("{top}/transhume-test-{}-", std::process::id())
    }

    /// A new one for the test `name`; none where this user may not make one. A test that runs several times at once has several.
    fn new(name: &str) -> Option<Self> {
        let top = Self::top()?;
        let name: String =
            name.chars().map(|letter| if letter.is_alphanumeric() { letter } else { '-' }).take(80).collect();
        let path = |number: u32| PathBuf::from(format!("{}{name}-{number}", Self::prefix(top)));
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

    /// How long one of it at least had something to do and no processor. None where the kernel does not say.
    fn waiting_seconds(&self) -> f64 {
        let text = fs::read_to_string(self.path.join("cpu.pressure")).unwrap_or_default();
        let some =
            text.lines().find_map(|line| line.strip_prefix("some ")?.split("total=").nth(1)?.parse::<f64>().ok());
        some.unwrap_or(0.0) / 1e6
    }

    /// Who is in it.
    fn members(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Ends all in it.
    fn kill(&self) {
        // One that has just ended, or whose kernel has no such file, is ended with its test's network or not at all.
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
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
        self.kill();
        while fs::remove_dir(&self.path).is_err() && began.elapsed() < 2 * LEFT {
            std::thread::sleep(Duration::from_millis(10));
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, script: &str, tests: Option<usize>) -> Task {
        let arguments = vec!["-c".to_owned(), script.to_owned()];
        Task { path: "/bin/sh".into(), folder: "/".into(), arguments, tests, ..Task::named(format!("own {name}")) }
    }

    #[test]
    fn one_that_ends_well_without_having_run_its_tests_has_failed() {
        let said = "echo; echo 'test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 4 filtered out'";
        let outcome = run(&shell("whole", said, Some(3))).expect("it runs");
        assert_eq!((outcome.is_good, outcome.not_run), (true, 1));
        assert!(!run(&shell("part", said, Some(4))).expect("it runs").is_good);
        assert!(!run(&shell("silent", "exit 0", Some(1))).expect("it runs").is_good);
        assert!(run(&shell("chore", "exit 0", None)).expect("it runs").is_good);
        assert!(!run(&shell("killed", "kill -KILL $$", None)).expect("it runs").is_good);
    }

    #[test]
    fn what_a_task_needs_is_told_apart_from_what_a_crowd_leaves_to_it() {
        assert_eq!(demand(10.0, 40.0, 0.0), 0.25, "it waits for something else");
        assert_eq!(demand(10.0, 40.0, 30.0), 1.0, "it waits for a processor");
        let cores = demand(10.0, 40.0, 40.0);
        assert_eq!(cores, std::thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64));
        assert_eq!(demand(0.0, 0.0, 0.0), 0.0);
    }

    #[test]
    fn one_that_hangs_is_ended_with_children_that_have_its_output_and_a_session_of_their_own() {
        let began = Instant::now();
        let task = Task { limit: Duration::from_millis(500), ..shell("hang", "setsid sleep 61 & sleep 62", None) };
        assert!(!run(&task).expect("it runs").is_good);
        assert!(!run(&shell("leaving", "sleep 63 &", None)).expect("it runs").is_good);
        assert!(began.elapsed() < Duration::from_secs(50), "it took {:?}", began.elapsed());
    }
}
