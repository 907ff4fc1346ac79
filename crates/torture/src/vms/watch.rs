//! Every QEMU of a VM, watched: which there are, and which of them run their guest.
//!
//! A QEMU is asked over and over. Between two answers of `running` it has run all the time. So two of them have run at once if
//! one has given an answer between two answers of the other; that is a failure, whatever comes of the move.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;
use transhume_guest::Qmp;

/// How often the processes are listed, and each QEMU is asked.
const LIST: Duration = Duration::from_millis(20);
const ASK: Duration = Duration::from_millis(10);
const CONNECT_LIMIT: Duration = Duration::from_millis(200);
/// How much of what was seen is told.
const TOLD: usize = 60;

/// A QEMU of the VM.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) pid: u32,
    /// Where its sockets are.
    pub(super) folder: PathBuf,
    /// What it says of its guest; empty before it has said anything.
    pub(super) status: String,
    /// Since when its answers were `running`, and the last of them.
    running: Option<(Instant, Instant)>,
}

/// Watches until it is dropped.
pub(super) struct Watcher {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    /// A word that only QEMUs of this VM have.
    mark: String,
    started: Instant,
    is_over: AtomicBool,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    qemus: BTreeMap<u32, Seen>,
    log: Vec<String>,
    /// When two have run at once.
    twice: Option<String>,
}

impl Watcher {
    /// Watches the QEMUs that have `mark` in their command lines.
    pub(super) fn start(mark: &Path) -> Self {
        let mark = mark.display().to_string();
        let shared =
            Arc::new(Shared { mark, started: Instant::now(), is_over: AtomicBool::default(), found: Mutex::default() });
        let watching = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !watching.is_over.load(Ordering::Acquire) {
                look(&watching);
                std::thread::sleep(LIST);
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// Every QEMU that there is now.
    pub(super) fn qemus(&self) -> Vec<Seen> {
        look(&self.shared);
        self.shared.lock().qemus.values().cloned().collect()
    }

    /// The QEMU whose sockets are in `folder`.
    pub(super) fn qemu_in(&self, folder: &Path) -> Option<Seen> {
        self.shared.lock().qemus.values().find(|seen| seen.folder == folder).cloned()
    }

    /// Notes something beside what was seen.
    pub(super) fn note(&self, what: &str) {
        self.shared.note(what);
    }

    /// Fails if two have run at once.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let twice = self.shared.lock().twice.clone();
        ensure!(twice.is_none(), "the guest ran twice: {}", twice.unwrap_or_default());
        Ok(())
    }

    /// What was seen of late.
    pub(super) fn tell(&self) -> String {
        let found = self.shared.lock();
        found.log[found.log.len().saturating_sub(TOLD)..].join("\n")
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // It has said why if it panicked.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, what: &str) {
        let at = self.started.elapsed().as_secs_f64();
        self.lock().log.push(format!("{at:9.3} {what}"));
    }

    /// A QEMU has answered.
    fn answered(&self, pid: u32, status: &str, (asked, at): (Instant, Instant)) {
        let mut found = self.lock();
        let Some(seen) = found.qemus.get_mut(&pid) else { return };
        let is_new = seen.status != status;
        status.clone_into(&mut seen.status);
        seen.running = match (status, seen.running) {
            ("running", Some((since, _))) => Some((since, asked)),
            ("running", None) => Some((at, at)),
            _ => None,
        };
        let own = seen.running;
        if is_new {
            let line = format!("{:9.3} QEMU {pid} is {status}", self.started.elapsed().as_secs_f64());
            found.log.push(line);
        }
        let Some((from, to)) = own else { return };
        let other = found.qemus.values().find(|other| {
            let together = |(since, last): (Instant, Instant)| from.max(since) < to.min(last);
            other.pid != pid && other.running.is_some_and(together)
        });
        if let (Some(other), None) = (other, &found.twice) {
            found.twice = Some(format!("in the processes {pid} and {}", other.pid));
        }
    }
}

/// Lists the QEMUs, and has new ones asked.
fn look(shared: &Arc<Shared>) {
    let listed: BTreeMap<u32, PathBuf> = processes(&shared.mark).into_iter().collect();
    let mut found = shared.lock();
    let gone: Vec<u32> = found.qemus.keys().filter(|pid| !listed.contains_key(pid)).copied().collect();
    for pid in gone {
        found.qemus.remove(&pid);
        let line = format!("{:9.3} QEMU {pid} is gone", shared.started.elapsed().as_secs_f64());
        found.log.push(line);
    }
    for (pid, folder) in listed {
        if found.qemus.contains_key(&pid) {
            continue;
        }
        let line =
            format!("{:9.3} QEMU {pid} is there, in {}", shared.started.elapsed().as_secs_f64(), folder.display());
        found.log.push(line);
        found.qemus.insert(pid, Seen { pid, folder: folder.clone(), status: String::new(), running: None });
        let shared = Arc::clone(shared);
        std::thread::spawn(move || ask(&shared, pid, &folder.join("qmp2.sock")));
    }
}

/// Asks one QEMU as long as there is one.
fn ask(shared: &Shared, pid: u32, socket: &Path) {
    let goes_on = || !shared.is_over.load(Ordering::Acquire) && shared.lock().qemus.contains_key(&pid);
    while goes_on() {
        let Ok(mut qmp) = Qmp::connect(socket, CONNECT_LIMIT) else { continue };
        while goes_on() {
            let asked = Instant::now();
            let Ok(answer) = qmp.execute("query-status", json!({})) else { break };
            let status = if answer["running"] == true { "running" } else { answer["status"].as_str().unwrap_or("?") };
            shared.answered(pid, status, (asked, Instant::now()));
            std::thread::sleep(ASK);
        }
    }
}

/// The QEMUs with `mark` in their command lines, and where their sockets are. One that has ended has no command line.
fn processes(mark: &str) -> Vec<(u32, PathBuf)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let seen = |pid: u32| {
        let line = String::from_utf8(std::fs::read(format!("/proc/{pid}/cmdline")).ok()?).ok()?;
        let words: Vec<&str> = line.split('\0').collect();
        let is_qemu = words.first().is_some_and(|program| program.ends_with("qemu-system-x86_64"));
        if !is_qemu || !words.contains(&mark) {
            return None;
        }
        let socket = words
            .iter()
            .filter_map(|word| word.strip_prefix("unix:")?.split(',').next())
            .find(|path| path.ends_with("/qmp2.sock"))?;
        Some((pid, Path::new(socket).parent()?.to_owned()))
    };
    pids.filter_map(seen).collect()
}
