//! The QEMU process of a guest: started, read from, and never left behind.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::command_line::{KERNEL_WORDS, WORKLOAD_SOCKET, arguments_of};
use crate::event::{Event, Interval};
use crate::initramfs;
use crate::load_result::LoadResult;
use crate::spec::{GuestSpec, TrackedMemory};
use crate::workload_line::WorkloadLine;

/// A running guest. Dropping it kills it and removes its files.
pub struct Guest {
    qemu: Arc<Mutex<Process>>,
    waiter: Option<std::thread::JoinHandle<()>>,
    pid: u32,
    line: WorkloadLine,
    /// Events that were read while waiting for another one.
    passed: VecDeque<(Instant, Event)>,
    intervals: Vec<(Instant, Interval)>,
    load_result: LoadResult,
    folder: PathBuf,
    /// The folder of the QEMU that has the guest now, if that is another one.
    followed: Option<PathBuf>,
    arguments: Vec<String>,
}

/// What a guest is booted from.
#[derive(Clone, Debug)]
pub struct BootFiles {
    /// Its kernel.
    pub kernel: PathBuf,
    /// Its first root.
    pub initramfs: PathBuf,
    /// Its kernel's command line.
    pub command_line: String,
}

enum Process {
    Running(Child),
    Ended(Option<ExitStatus>),
}

const POLL: Duration = Duration::from_millis(20);
/// How long a QEMU that was just started may take to listen.
const CONNECT_LIMIT: Duration = Duration::from_secs(120);

impl Guest {
    /// Starts QEMU. The guest is not up yet: see [`Guest::wait_for_load`] and [`Guest::wait_until`].
    ///
    /// # Errors
    /// Something is missing on this machine, or QEMU does not start.
    pub fn boot(spec: GuestSpec) -> anyhow::Result<Self> {
        let (kernel, modules) = initramfs::kernel()?;
        let folder = private_folder()?;
        let archive = initramfs::build(&modules, &spec)?;
        std::fs::write(folder.join("initramfs"), archive).context("writing the guest's first root")?;
        let arguments = arguments_of(&spec, &kernel, &folder);
        let log = std::fs::File::create(folder.join("qemu.log")).context("creating QEMU's log")?;
        // A test that is killed must not leave QEMU behind. So QEMU dies with the thread that started it, and that
        // thread lives as long as QEMU does.
        let (sender, started) = mpsc::channel();
        let mut words = spec.launcher.clone();
        words.extend(spec.tracked_memory.iter().flat_map(TrackedMemory::environment));
        words.push("qemu-system-x86_64".into());
        words.extend(arguments.iter().cloned());
        let pipe = if spec.has_workload_socket { Stdio::null } else { Stdio::piped };
        let waiter = std::thread::spawn(move || {
            let child = Command::new("setpriv")
                .args(["--pdeathsig", "KILL"])
                .args(words)
                .stdin(pipe())
                .stdout(pipe())
                .stderr(log)
                .spawn();
            let mut child = match child {
                Ok(child) => child,
                Err(error) => return drop(sender.send(Err(error))),
            };
            let pipes = (child.stdin.take(), child.stdout.take(), child.id());
            let process = Arc::new(Mutex::new(Process::Running(child)));
            if sender.send(Ok((pipes, Arc::clone(&process)))).is_ok() {
                wait_for_end(&process);
            }
        });
        let ((input, output, pid), qemu) =
            started.recv().context("the thread that starts QEMU")?.context("starting qemu-system-x86_64 by setpriv")?;
        let line = match (input, output) {
            (Some(input), Some(output)) => WorkloadLine::over_pipes(input, output),
            _ => WorkloadLine::disconnected(),
        };
        let mut guest = Self {
            qemu,
            waiter: Some(waiter),
            pid,
            line,
            passed: VecDeque::new(),
            intervals: Vec::new(),
            load_result: LoadResult::default(),
            folder,
            followed: None,
            arguments,
        };
        guest.wait_for_qmp()?;
        if spec.has_workload_socket {
            guest.line.follow(&guest.folder.join(WORKLOAD_SOCKET), CONNECT_LIMIT)?;
        }
        Ok(guest)
    }

    /// A guest that somebody else starts, from files that are put into `boot`: its console is its first serial port, and its
    /// second one is the socket `workload.sock` of the folder where it is [followed](Self::follow) to.
    ///
    /// # Errors
    /// Something is missing on this machine.
    pub fn started_elsewhere(spec: &GuestSpec, boot: &Path) -> anyhow::Result<(Self, BootFiles)> {
        let (kernel, modules) = initramfs::kernel()?;
        let files = BootFiles {
            kernel: boot.join("kernel"),
            initramfs: boot.join("initramfs"),
            command_line: KERNEL_WORDS.to_owned(),
        };
        std::fs::copy(&kernel, &files.kernel).context("copying the kernel")?;
        std::fs::write(&files.initramfs, initramfs::build(&modules, spec)?)
            .context("writing the guest's first root")?;
        let guest = Self {
            qemu: Arc::new(Mutex::new(Process::Ended(None))),
            waiter: None,
            pid: 0,
            line: WorkloadLine::disconnected(),
            passed: VecDeque::new(),
            intervals: Vec::new(),
            load_result: LoadResult::default(),
            folder: private_folder()?,
            followed: None,
            arguments: Vec::new(),
        };
        Ok((guest, files))
    }

    /// Where QEMU's monitor listens.
    #[must_use]
    pub fn qmp_socket(&self) -> PathBuf {
        self.folder.join("qmp.sock")
    }

    /// A second monitor, for whoever watches what happens on the first.
    #[must_use]
    pub fn second_qmp_socket(&self) -> PathBuf {
        self.folder.join("qmp2.sock")
    }

    /// A private folder that lives as long as the guest.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// QEMU's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The words of QEMU's command line, its name not among them.
    #[must_use]
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// The words of another QEMU that takes the guest, its files and sockets in `folder`; kernel and first root stay
    /// where they are. Whoever starts it adds `-incoming`.
    #[must_use]
    pub fn arguments_in(&self, folder: &Path) -> Vec<String> {
        let (own, other) = (format!("{}/", self.folder.display()), format!("{}/", folder.display()));
        let first_root = self.folder.join("initramfs").display().to_string();
        let word = |word: &String| if *word == first_root { word.clone() } else { word.replace(&own, &other) };
        self.arguments.iter().map(word).collect()
    }

    /// Follows the guest to the QEMU that has it now, or will have it, whose workload socket is in `folder`. What the
    /// guest says is read from there, and from the former QEMU for as long as that lives. [`Guest::send`] goes there at
    /// once, so it is called when the guest runs there. The new QEMU is no child of this process: it outlives this
    /// handle, and [`Guest::wait_for_exit`] waits until it closes the socket.
    ///
    /// Call it before the guest is moved: the new QEMU listens from its start. Then only the line that the move cuts in
    /// two is lost. What the guest says while nobody is connected is lost, but the totals of [`Event::Done`] hold
    /// everything.
    ///
    /// # Errors
    /// Nobody listens there, for 20 s; told with the last lines of the console there. The guest is then followed where it
    /// was.
    pub fn follow(&mut self, folder: &Path) -> anyhow::Result<()> {
        let followed = self.line.follow(&folder.join(WORKLOAD_SOCKET), CONNECT_LIMIT);
        followed.with_context(|| last_words_in(folder))?;
        self.followed = Some(folder.to_owned());
        Ok(())
    }

    /// Disconnects from the workload's sockets. Everything that came before stays; from now on the guest speaks to
    /// nobody, until [`Guest::follow`]. A guest without [`GuestSpec::workload_socket`] cannot be left.
    pub fn leave(&mut self) {
        self.line.close();
        let is_left = Instant::now() + Duration::from_secs(1);
        // What had come is read to its end, where the channel is disconnected.
        while let Ok(event) = self.receive(is_left.saturating_duration_since(Instant::now())) {
            self.passed.push_back(event);
        }
    }

    /// Whether the QEMU that booted the guest runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(*lock(&self.qemu), Process::Running(_))
    }

    /// Sends a line to the guest's workload.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn send(&mut self, line: &str) -> anyhow::Result<()> {
        self.line.send(line).context("writing to the guest")
    }

    /// The next event, with when it came; `None` if none comes within `limit` or none will ever come.
    pub fn next_event(&mut self, limit: Duration) -> Option<(Instant, Event)> {
        self.passed.pop_front().or_else(|| self.receive(limit).ok())
    }

    /// Waits until an event fulfils `is_it` and returns it. Events before it stay for [`Guest::next_event`].
    ///
    /// # Errors
    /// It does not come within `limit`, or QEMU ends; told with the last lines of the console.
    pub fn wait_until(&mut self, limit: Duration, is_it: impl Fn(&Event) -> bool) -> anyhow::Result<Event> {
        if let Some(position) = self.passed.iter().position(|(_, event)| is_it(event)) {
            return Ok(self.passed.remove(position).expect("it was just found").1);
        }
        let end = Instant::now() + limit;
        loop {
            match self.receive(end.saturating_duration_since(Instant::now())) {
                Ok((_, event)) if is_it(&event) => return Ok(event),
                Ok(passed) => self.passed.push_back(passed),
                Err(RecvTimeoutError::Timeout) => bail!("the guest did not do it in {limit:?}\n{}", self.last_words()),
                Err(RecvTimeoutError::Disconnected) => bail!("the line to the guest has ended\n{}", self.last_words()),
            }
        }
    }

    /// Waits until the guest's init runs and returns how long its kernel took.
    ///
    /// # Errors
    /// As [`Guest::wait_until`].
    pub fn wait_until_booted(&mut self, limit: Duration) -> anyhow::Result<Duration> {
        match self.wait_until(limit, |event| matches!(event, Event::Booted(_)))? {
            Event::Booted(uptime) => Ok(uptime),
            other => bail!("waited for the boot, not for {other:?}"),
        }
    }

    /// Waits until the load runs.
    ///
    /// # Errors
    /// As [`Guest::wait_until`].
    pub fn wait_for_load(&mut self, limit: Duration) -> anyhow::Result<()> {
        self.wait_until(limit, |event| *event == Event::LoadStarted).map(drop)
    }

    /// Every interval that the load has reported, with when its report came.
    pub fn intervals(&mut self) -> &[(Instant, Interval)] {
        while let Ok(event) = self.receive(Duration::ZERO) {
            self.passed.push_back(event);
        }
        &self.intervals
    }

    /// What the load has found so far.
    pub fn load_result(&mut self) -> &LoadResult {
        self.intervals();
        &self.load_result
    }

    /// Stops the load, waits until it has verified the whole disk and the guest has powered off.
    ///
    /// # Errors
    /// It takes longer than `limit`, or QEMU ends before.
    pub fn finish(&mut self, limit: Duration) -> anyhow::Result<LoadResult> {
        let end = Instant::now() + limit;
        self.send("stop")?;
        self.wait_until(limit, |event| matches!(event, Event::Done { .. }))?;
        self.wait_for_exit(end.saturating_duration_since(Instant::now()))?;
        Ok(self.load_result().clone())
    }

    /// Waits until QEMU has ended. Of a QEMU that was followed nobody learns the status.
    ///
    /// # Errors
    /// It takes longer than `limit`.
    pub fn wait_for_exit(&mut self, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
        let end = Instant::now() + limit;
        loop {
            if self.followed.is_none() {
                if let Process::Ended(status) = &*lock(&self.qemu) {
                    return Ok(*status);
                }
            } else if self.line.is_closed() {
                return Ok(None);
            }
            if Instant::now() >= end {
                bail!("QEMU still runs after {limit:?}\n{}", self.last_words());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Kills QEMU as `kill -9` does.
    pub fn kill(&mut self) {
        if let Process::Running(child) = &mut *lock(&self.qemu) {
            // It may have ended just now.
            let _ = child.kill();
        }
        if let Some(waiter) = self.waiter.take() {
            // The waiter does nothing that panics; it ends because QEMU does.
            let _ = waiter.join();
        }
    }

    /// The end of the guest's console and of what QEMU said, for error messages.
    #[must_use]
    pub fn last_words(&self) -> String {
        last_words_in(self.followed.as_ref().unwrap_or(&self.folder))
    }

    fn receive(&mut self, limit: Duration) -> Result<(Instant, Event), RecvTimeoutError> {
        let (at, event) = self.line.events().recv_timeout(limit)?;
        if let Event::Interval(interval) = &event {
            self.intervals.push((at, *interval));
        }
        self.load_result.note(&event);
        Ok((at, event))
    }

    fn wait_for_qmp(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + Duration::from_secs(20);
        while !self.qmp_socket().exists() {
            if !self.is_running() || Instant::now() >= end {
                bail!("QEMU did not start\n{}", self.last_words());
            }
            std::thread::sleep(POLL / 4);
        }
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
        // What cannot be removed is in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Polls: a caller that blocks in `wait` holds the child that others must be able to kill.
fn wait_for_end(process: &Mutex<Process>) {
    loop {
        {
            let mut process = lock(process);
            let Process::Running(child) = &mut *process else { return };
            match child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => return *process = Process::Ended(Some(status)),
                Err(_) => return *process = Process::Ended(None),
            }
        }
        std::thread::sleep(POLL);
    }
}

fn lock(process: &Mutex<Process>) -> std::sync::MutexGuard<'_, Process> {
    process.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A folder with a short path (a socket's path has 108 bytes) that only this user can enter.
fn private_folder() -> anyhow::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let own = std::process::id();
    for attempt in 0_u32.. {
        let folder = std::env::temp_dir().join(format!("guest-{own}-{attempt}"));
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| format!("creating {}", folder.display())),
        }
    }
    bail!("no free name for a folder in {}", std::env::temp_dir().display())
}

/// The end of what QEMU said in `folder`, and of its guest's console.
fn last_words_in(folder: &Path) -> String {
    let tail = |name: &str| {
        let text = std::fs::read(folder.join(name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        format!("{name}:\n{}\n", lines[lines.len().saturating_sub(15)..].join("\n"))
    };
    format!("{}{}", tail("qemu.log"), tail("console.log"))
}
