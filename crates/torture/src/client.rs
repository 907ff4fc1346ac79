//! Who uses the volume and knows what it must hold.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use transhume_guest::{Daemon, Disk, Event, Guest, GuestSpec, Load, LoadResult};

use crate::plan::ClientKind;
use crate::proxy::Proxy;
use crate::testbed::{Testbed, text};
use transhume_guest::process::guarded;

/// The volume's name.
pub(crate) const VOLUME: &str = "tortured";
/// The name of a second one.
pub(crate) const BESIDE: &str = "beside";
const NODE: &str = "data";
/// Nothing that a client waits for takes longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// Requests a second; an emulated guest and a small machine keep up with it.
pub(crate) const RATE: u32 = 1500;
/// Requests a second on a second volume.
const RATE_BESIDE: u32 = 500;
/// What fio writes at once.
const FIO_BYTES: u64 = 8192;
const RATE_GUEST: u32 = 400;

/// What a client has had answered of the less common requests, by name.
pub(crate) type Counted = BTreeMap<String, u64>;

/// A client of the volume.
pub(crate) enum Client {
    /// The load, and the proxy that it goes through.
    Load(NbdLoad, Proxy),
    /// fio, if it runs now.
    Fio(Option<Child>),
    /// A guest whose disk is adopted.
    Guest(Box<Guest>),
}

impl Client {
    /// Brings a client up on `file`, which holds generation 1, and gives it to the daemon as the volume `name`.
    pub(crate) fn start(
        (kind, name): (ClientKind, &str),
        testbed: &Testbed,
        programs: &Path,
        file: &Path,
        seed: u64,
    ) -> anyhow::Result<Self> {
        if kind == ClientKind::Guest {
            let guest = boot_guest(file, seed)?;
            adopt(&guest, &testbed.daemon)?;
            return Ok(Self::Guest(Box::new(guest)));
        }
        let socket = testbed.folder().join(format!("{name}.nbd"));
        attach(&testbed.daemon, name, file, &socket)?;
        if kind == ClientKind::Fio {
            return Ok(Self::Fio(None));
        }
        let front = testbed.folder().join(format!("{name}.front"));
        let proxy = Proxy::start(&front, &socket)?;
        let rate = if name == VOLUME { RATE } else { RATE_BESIDE };
        Ok(Self::Load(NbdLoad::start(programs, &front, (name, rate), seed)?, proxy))
    }

    /// Gets to work on a volume of `bytes`, if it does not work all the time.
    pub(crate) fn begin_cycle(&mut self, testbed: &Testbed, bytes: u64, seed: u64) -> anyhow::Result<()> {
        if let Self::Fio(running) = self {
            let uri = format!(
                "--uri=nbd+unix:///{VOLUME}?socket={}",
                testbed.folder().join(format!("{VOLUME}.nbd")).display()
            );
            let bytes = bytes / FIO_BYTES * FIO_BYTES;
            let child = guarded(Path::new("fio"))
                .args(["--name=torture", "--ioengine=nbd", &uri, "--rw=randwrite", "--bs=8k", "--iodepth=8"])
                .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--rate_iops=2500"])
                .args([format!("--size={bytes}"), format!("--randseed={seed}")])
                .current_dir(testbed.folder())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn();
            *running = Some(child.context("starting fio")?);
        }
        Ok(())
    }

    /// Reads everything, and fails if anything is not what it was acknowledged to be.
    pub(crate) fn verify(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Load(load, _) => load.verify(),
            Self::Guest(guest) => verify_guest(guest),
            Self::Fio(running) => {
                let Some(mut child) = running.take() else { return Ok(()) };
                let end = Instant::now() + PATIENCE;
                while child.try_wait().context("waiting for fio")?.is_none() {
                    if Instant::now() > end {
                        // It dies with its handle's process anyway.
                        let _ = child.kill();
                        bail!("fio does not end");
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
                let output = child.wait_with_output().context("waiting for fio")?;
                if !output.status.success() {
                    bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr).trim());
                }
                Ok(())
            }
        }
    }

    /// Ends it, and the daemon's service of the volume `name` for it; what it found all in all must be right.
    pub(crate) fn finish(self, testbed: &Testbed, name: &str) -> anyhow::Result<Counted> {
        match self {
            Self::Load(load, proxy) => {
                let counted = load.finish()?;
                drop(proxy);
                detach(&testbed.daemon, name)?;
                return Ok(counted);
            }
            Self::Fio(_) => detach(&testbed.daemon, name)?,
            Self::Guest(guest) => {
                testbed.daemon.json(&["release", VOLUME])?;
                finish_guest(*guest)?;
            }
        }
        Ok(Counted::new())
    }

    /// Of a guest: gives the disk to the daemon.
    pub(crate) fn adopt(&self, testbed: &Testbed) -> anyhow::Result<()> {
        let Self::Guest(guest) = self else { return Ok(()) };
        adopt(guest, &testbed.daemon)
    }

    /// Of a guest: gives the disk back to it, and to the daemon again.
    pub(crate) fn readopt(&self, testbed: &Testbed) -> anyhow::Result<()> {
        if let Self::Guest(_) = self {
            testbed.daemon.json(&["release", VOLUME])?;
            self.adopt(testbed)?;
        }
        Ok(())
    }

    /// Whether the volume is a running VM's disk.
    pub(crate) fn is_adopted(&self) -> bool {
        matches!(self, Self::Guest(_))
    }

    /// The proxy that it goes through, if it does.
    pub(crate) fn proxy(&self) -> Option<&Proxy> {
        match self {
            Self::Load(_, proxy) => Some(proxy),
            _ => None,
        }
    }

    /// Stops its process, or lets it go on.
    pub(crate) fn freeze(&self, is_frozen: bool) -> anyhow::Result<()> {
        let pid = match self {
            Self::Load(load, _) => load.child.id(),
            Self::Fio(Some(child)) => child.id(),
            Self::Fio(None) => return Ok(()),
            Self::Guest(guest) => guest.pid(),
        };
        let signal = if is_frozen { Signal::STOP } else { Signal::CONT };
        let pid = Pid::from_raw(pid.cast_signed()).context("a process has a number")?;
        // fio may have ended by itself.
        kill_process(pid, signal).or_else(|error| if matches!(self, Self::Fio(_)) { Ok(()) } else { Err(error) })?;
        Ok(())
    }
}

/// Boots a guest with its load on `file`, which holds generation 1.
pub(crate) fn boot_guest(file: &Path, seed: u64) -> anyhow::Result<Guest> {
    let load = Load { is_prefilled: true, rate: RATE_GUEST, workers: 6, read_percent: 50, seed, ..Load::default() };
    let mut guest = Guest::boot(GuestSpec::new().disk(Disk::raw(file, NODE)).load(load))?;
    guest.wait_for_load(PATIENCE)?;
    Ok(guest)
}

/// Gives a guest's disk to `daemon`.
pub(crate) fn adopt(guest: &Guest, daemon: &Daemon) -> anyhow::Result<()> {
    daemon.json(&["adopt", "--qmp", &text(&guest.qmp_socket()), "--node", NODE, "--name", VOLUME]).map(drop)
}

/// Ends a guest; what it found all in all must be right.
pub(crate) fn finish_guest(mut guest: Guest) -> anyhow::Result<()> {
    let load_result = guest.finish(PATIENCE)?;
    if !load_result.is_right() {
        bail!("the guest found what must not be: {load_result:?}");
    }
    Ok(())
}

/// Has `daemon` serve `file` as the volume `name` at `socket`.
pub(crate) fn attach(daemon: &Daemon, name: &str, file: &Path, socket: &Path) -> anyhow::Result<()> {
    let export = format!("nbd+unix:///{name}?socket={}", socket.display());
    let backend = format!("file:{}", file.display());
    daemon.json(&["volume", "attach", name, "--backend", &backend, "--export", &export]).map(drop)
}

/// Has a guest read everything, which must be what was acknowledged.
pub(crate) fn verify_guest(guest: &mut Guest) -> anyhow::Result<()> {
    guest.send("verify")?;
    guest.wait_until(PATIENCE, |event| matches!(event, Event::Verified { .. }))?;
    is_right_so_far(guest.load_result())
}

/// Has `daemon` forget the volume that nobody uses any more.
pub(crate) fn detach(daemon: &Daemon, name: &str) -> anyhow::Result<()> {
    // It may not have seen the end of the last connection yet.
    let end = Instant::now() + PATIENCE;
    loop {
        match daemon.ask(&["volume", "detach", name])? {
            Ok(_) => return Ok(()),
            Err((8, _)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
            Err((code, said)) => bail!("detaching: {code}: {said}"),
        }
    }
}

fn is_right_so_far(load_result: &LoadResult) -> anyhow::Result<()> {
    if load_result.wrong > 0 || !load_result.complaints.is_empty() {
        bail!("the client found what must not be: {load_result:?}");
    }
    Ok(())
}

/// The verifying load as a process; see crates/guest/nbd-load.
pub(crate) struct NbdLoad {
    child: Child,
    events: Receiver<Event>,
    load_result: LoadResult,
    counted: Counted,
}

impl NbdLoad {
    /// Starts it on the volume `name` at `socket`, with `rate` requests a second.
    pub(crate) fn start(programs: &Path, socket: &Path, (name, rate): (&str, u32), seed: u64) -> anyhow::Result<Self> {
        let mut child = guarded(&programs.join("nbd-load"))
            .args([format!("socket={}", socket.display()), format!("export={name}"), format!("seed={seed}")])
            .args([format!("rate={rate}"), "connections=2".into(), "read_percent=50".into()])
            .args(["verify=1", "flush_every=32", "zero_percent=15", "discard_percent=10", "forced_percent=2"])
            .args(["hot_slots=24", "reconnect_seconds=60"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting nbd-load")?;
        let output = child.stdout.take().expect("a pipe was asked for");
        let (sender, events) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.map(|line| Event::parse(&line)).try_for_each(|event| sender.send(event).ok())
        });
        Ok(Self { child, events, load_result: LoadResult::default(), counted: Counted::new() })
    }

    /// Reads everything.
    pub(crate) fn verify(&mut self) -> anyhow::Result<()> {
        self.order("verify")?;
        self.wait_until(|event| matches!(event, Event::Verified { .. }))?;
        is_right_so_far(&self.load_result)
    }

    /// Ends it, and says what it has had answered.
    pub(crate) fn finish(mut self) -> anyhow::Result<Counted> {
        self.order("stop")?;
        self.wait_until(|event| matches!(event, Event::Done { .. }))?;
        if !self.load_result.is_right() {
            bail!("the load found what must not be: {:?}", self.load_result);
        }
        Ok(std::mem::take(&mut self.counted))
    }

    fn order(&mut self, order: &str) -> anyhow::Result<()> {
        let input = self.child.stdin.as_mut().context("a pipe was asked for")?;
        // Without a load to tell, its last words tell more than the broken pipe.
        let _ = writeln!(input, "{order}");
        Ok(())
    }

    fn wait_until(&mut self, is_it: impl Fn(&Event) -> bool) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(event) => {
                    self.load_result.note(&event);
                    if let Event::Counted(counted) = &event {
                        self.counted.clone_from(counted);
                    }
                    if is_it(&event) {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Timeout) => bail!("the load hangs: {:?}", self.load_result),
                Err(RecvTimeoutError::Disconnected) => bail!("the load has ended: {:?}", self.load_result),
            }
        }
    }
}

impl Drop for NbdLoad {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
