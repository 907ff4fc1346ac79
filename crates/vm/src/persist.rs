//! The configuration hook: after a move, the next start of the VM must open the new image.
//!
//! Either libvirt's inactive XML is rewritten through `virsh`, or a script of the operator's is run. Without one of
//! them a move of an adopted VM's disk is not finished, unless the operator says that it need not be.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use futures::future::BoxFuture;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, Writer};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStderr, ChildStdin, ChildStdout, Command};

use crate::error::{Error, ErrorKind, Result};
use crate::options::attributes;

/// How the new place is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "persist", rename_all = "kebab-case")]
pub enum Persist {
    /// Rewrite the inactive XML of a libvirt domain.
    Libvirt {
        /// The domain's name or UUID.
        domain: String,
    },
    /// Run a script; [`Moved`] says with which environment variables.
    Script {
        /// The program.
        program: PathBuf,
    },
    /// The operator takes care of it (`--no-persist`).
    No,
}

/// What has moved, for the hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// `TRANSHUME_VOLUME`: the volume's name.
    pub volume: String,
    /// `TRANSHUME_SOURCE`: the image's path before.
    pub source: PathBuf,
    /// `TRANSHUME_TARGET`: the image's path now.
    pub target: PathBuf,
    /// `TRANSHUME_FORMAT`: `raw` or `qcow2`.
    pub format: String,
    /// `TRANSHUME_NODE`: the format node's name in QEMU.
    pub node: String,
    /// `TRANSHUME_DEVICE`: the guest's device.
    pub device: String,
    /// `TRANSHUME_QEMU_PID`: QEMU's process, or empty.
    pub process_id: Option<u32>,
    /// `TRANSHUME_TARGET_KIND`: `file` or `block`.
    pub target_is_block_device: bool,
}

/// What the hook did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum PersistOutcome {
    /// The configuration names the new place.
    Done {
        /// In words: what was changed.
        what: String,
    },
    /// It had named the new place already: the hook had run before.
    AlreadyDone,
    /// Nothing was asked for.
    Skipped,
}

/// What a program that was run left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOutput {
    /// Whether it ended with code 0.
    pub success: bool,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Runs programs; tests have their own.
pub trait Runner: Send + Sync {
    /// Runs `program` with `arguments`, more environment, and `stdin`.
    fn run<'a>(
        &'a self,
        program: &'a Path,
        arguments: &'a [String],
        environment: &'a [(String, String)],
        stdin: &'a str,
    ) -> BoxFuture<'a, io::Result<RunOutput>>;
}

/// How long a program may take.
pub const PROGRAM_LIMIT: Duration = Duration::from_secs(300);

/// How long what a program has printed is waited for once it has ended: what it left running may keep its pipes open.
const PIPES_LIMIT: Duration = Duration::from_secs(1);

/// The machine's own programs. Each is the head of a process group, which ends with it.
#[derive(Clone, Copy, Debug)]
pub struct SystemRunner {
    /// How long one may take before it is killed.
    pub limit: Duration,
    /// Whether a program gets nothing of this process's environment but `PATH`.
    pub only_path: bool,
}

/// The `PATH` of a program if this process has none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Default for SystemRunner {
    fn default() -> Self {
        Self { limit: PROGRAM_LIMIT, only_path: false }
    }
}

impl Runner for SystemRunner {
    fn run<'a>(
        &'a self,
        program: &'a Path,
        arguments: &'a [String],
        environment: &'a [(String, String)],
        stdin: &'a str,
    ) -> BoxFuture<'a, io::Result<RunOutput>> {
        Box::pin(async move {
            let mut command = Command::new(program);
            if self.only_path {
                command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_else(|| PATH.into()));
            }
            command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
            let mut child = command.process_group(0).spawn()?;
            let group = Group(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
            let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
            let mut printed = (Vec::new(), Vec::new());
            let outcome = {
                let talking = talk(pipes, stdin, &mut printed);
                tokio::pin!(talking);
                let ended = async {
                    let mut is_silent = false;
                    loop {
                        tokio::select! {
                            status = child.wait() => break status.map(|status| (status, is_silent)),
                            () = &mut talking, if !is_silent => is_silent = true,
                        }
                    }
                };
                let ended = tokio::time::timeout(self.limit, ended).await;
                if let Ok(Ok((_, false))) = &ended {
                    // Whatever still holds the pipes is not waited for.
                    let _ = tokio::time::timeout(PIPES_LIMIT, &mut talking).await;
                }
                ended
            };
            drop(group);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            match outcome {
                Ok(ended) => {
                    let (success, stdout, stderr) = (ended?.0.success(), text(&printed.0), text(&printed.1));
                    Ok(RunOutput { success, stdout, stderr })
                }
                Err(_) => {
                    let words = format!("it did not end within {} s and was killed", self.limit.as_secs_f64());
                    Err(io::Error::new(io::ErrorKind::TimedOut, words))
                }
            }
        })
    }
}

type Pipes = (Option<ChildStdin>, Option<ChildStdout>, Option<ChildStderr>);

/// Gives a program its input and gathers what it prints.
async fn talk((input, output, errors): Pipes, stdin: &str, printed: &mut (Vec<u8>, Vec<u8>)) {
    let give = async {
        if let Some(mut pipe) = input {
            // A program that reads no input may have closed it.
            let _ = pipe.write_all(stdin.as_bytes()).await;
        }
    };
    let (out, err) = (&mut printed.0, &mut printed.1);
    // Unreadable output counts as none.
    let gather = async move {
        if let Some(mut pipe) = output {
            let _ = pipe.read_to_end(out).await;
        }
    };
    let gather_errors = async move {
        if let Some(mut pipe) = errors {
            let _ = pipe.read_to_end(err).await;
        }
    };
    futures::join!(give, gather, gather_errors);
}

/// The process group of a program. Dropping it kills the rest of the group: it would go on with a configuration that
/// nobody waits for any more.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // A group that is gone is what is wanted.
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
    }
}

/// Writes the new place down. May be run again.
///
/// # Errors
/// `Hook`, with what the program said and what to do by hand.
pub async fn persist(how: &Persist, moved: &Moved, runner: &dyn Runner) -> Result<PersistOutcome> {
    match how {
        Persist::No => Ok(PersistOutcome::Skipped),
        Persist::Script { program } => run_script(program, moved, runner).await,
        Persist::Libvirt { domain } => redefine(domain, moved, runner).await,
    }
}

async fn run_script(program: &Path, moved: &Moved, runner: &dyn Runner) -> Result<PersistOutcome> {
    let variables = [
        ("TRANSHUME_VOLUME", moved.volume.clone()),
        ("TRANSHUME_SOURCE", moved.source.display().to_string()),
        ("TRANSHUME_TARGET", moved.target.display().to_string()),
        ("TRANSHUME_FORMAT", moved.format.clone()),
        ("TRANSHUME_NODE", moved.node.clone()),
        ("TRANSHUME_DEVICE", moved.device.clone()),
        ("TRANSHUME_QEMU_PID", moved.process_id.map(|pid| pid.to_string()).unwrap_or_default()),
        ("TRANSHUME_TARGET_KIND", if moved.target_is_block_device { "block" } else { "file" }.to_owned()),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value));
    expect(program, runner.run(program, &[], &variables, "").await)?;
    Ok(PersistOutcome::Done { what: format!("{} has run", program.display()) })
}

async fn redefine(domain: &str, moved: &Moved, runner: &dyn Runner) -> Result<PersistOutcome> {
    let virsh = Path::new("virsh");
    let arguments = |arguments: &[&str]| arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>();
    let dump = arguments(&["dumpxml", "--inactive", "--security-info", "--", domain]);
    let xml = expect(virsh, runner.run(virsh, &dump, &[], "").await)?;
    let rewritten = rewrite_domain(&xml, &moved.source, &moved.target, moved.target_is_block_device)?;
    if rewritten.changed == 0 {
        if rewritten.already > 0 {
            return Ok(PersistOutcome::AlreadyDone);
        }
        let context = format!(
            "libvirt's domain {domain} has no disk {}: edit it by hand (virsh edit), its disk is {} now",
            moved.source.display(),
            moved.target.display()
        );
        return Err(Error::new(ErrorKind::Hook, context));
    }
    let define = arguments(&["define", "--validate", "--", "/dev/stdin"]);
    expect(virsh, runner.run(virsh, &define, &[], &rewritten.xml).await)?;
    Ok(PersistOutcome::Done { what: format!("libvirt's domain {domain} names {} now", moved.target.display()) })
}

fn expect(program: &Path, output: io::Result<RunOutput>) -> Result<String> {
    let shown = program.display();
    let output =
        output.map_err(|error| Error::new(ErrorKind::Hook, format!("{shown} could not be run")).with_source(error))?;
    if output.success {
        return Ok(output.stdout);
    }
    let said = output.stderr.trim().lines().last().unwrap_or("without a word").to_owned();
    Err(Error::new(ErrorKind::Hook, format!("{shown} failed: {said}")))
}

/// A domain's XML after a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewritten {
    /// The XML.
    pub xml: String,
    /// How many disks were changed.
    pub changed: usize,
    /// How many disks named the target already.
    pub already: usize,
}

/// Names `target` wherever a disk of the domain names `source`, and leaves everything else as it was.
///
/// # Errors
/// `Invalid` if it is not XML.
pub fn rewrite_domain(xml: &str, source: &Path, target: &Path, target_is_block_device: bool) -> Result<Rewritten> {
    let broken = |error: &dyn std::fmt::Display| Error::new(ErrorKind::Invalid, format!("domain XML: {error}"));
    // The type of a disk stands before its source: so the disks to change are found in a first pass.
    let (matching, already) = find_disks(xml, source, target)?;
    let mut reader = Reader::from_str(xml);
    let mut writer = Writer::new(Vec::new());
    let mut path: Vec<String> = Vec::new();
    let mut disk = 0_usize;
    loop {
        let event = reader.read_event().map_err(|error| broken(&error))?;
        let (element, is_empty) = match &event {
            Event::Start(element) => (Some(element), false),
            Event::Empty(element) => (Some(element), true),
            _ => (None, false),
        };
        let mut replaced = None;
        if let Some(element) = element {
            path.push(String::from_utf8_lossy(element.name().as_ref()).into_owned());
            if is_at(&path, &["domain", "devices", "disk"]) {
                disk += 1;
                if matching.contains(&disk) {
                    let kind = if target_is_block_device { "block" } else { "file" };
                    replaced = Some(with(element, &["type"], "type", kind));
                }
            } else if is_at(&path, &["domain", "devices", "disk", "source"]) && matching.contains(&disk) {
                let name = if target_is_block_device { "dev" } else { "file" };
                replaced = Some(with(element, &["file", "dev"], name, &target.display().to_string()));
            }
            if is_empty {
                path.pop();
            }
        }
        if matches!(event, Event::End(_)) {
            path.pop();
        }
        let event = match (event, replaced) {
            (Event::Eof, _) => break,
            (Event::Start(_), Some(element)) => Event::Start(element),
            (Event::Empty(_), Some(element)) => Event::Empty(element),
            (event, _) => event,
        };
        writer.write_event(event).map_err(|error| broken(&error))?;
    }
    let xml = String::from_utf8(writer.into_inner()).map_err(|error| broken(&error))?;
    Ok(Rewritten { xml, changed: matching.len(), already })
}

fn is_at(path: &[String], expected: &[&str]) -> bool {
    path.iter().map(String::as_str).eq(expected.iter().copied())
}

/// The numbers, from 1, of the disks of `source`, and how many are of `target`.
fn find_disks(xml: &str, source: &Path, target: &Path) -> Result<(Vec<usize>, usize)> {
    let mut reader = Reader::from_str(xml);
    let mut path: Vec<String> = Vec::new();
    let (mut disk, mut matching, mut already) = (0_usize, Vec::new(), 0_usize);
    loop {
        let event =
            reader.read_event().map_err(|error| Error::new(ErrorKind::Invalid, format!("domain XML: {error}")))?;
        match &event {
            Event::Start(element) | Event::Empty(element) => {
                path.push(String::from_utf8_lossy(element.name().as_ref()).into_owned());
                if is_at(&path, &["domain", "devices", "disk"]) {
                    disk += 1;
                } else if is_at(&path, &["domain", "devices", "disk", "source"]) {
                    let named = attributes(element).into_iter().find(|(name, _)| name == "file" || name == "dev");
                    let named = named.map(|(_, value)| PathBuf::from(value)).unwrap_or_default();
                    if named == source {
                        matching.push(disk);
                    } else if named == target {
                        already += 1;
                    }
                }
                if matches!(event, Event::Empty(_)) {
                    path.pop();
                }
            }
            Event::End(_) => drop(path.pop()),
            Event::Eof => return Ok((matching, already)),
            _ => {}
        }
    }
}

/// `element` with the attribute `name` in the place of the first of `old`.
fn with(element: &BytesStart<'_>, old: &[&str], name: &str, value: &str) -> BytesStart<'static> {
    let mut changed = BytesStart::new(String::from_utf8_lossy(element.name().as_ref()).into_owned());
    let mut is_placed = false;
    for (key, kept) in attributes(element) {
        if old.contains(&key.as_str()) {
            if !is_placed {
                changed.push_attribute((name, value));
                is_placed = true;
            }
        } else {
            changed.push_attribute((key.as_str(), kept.as_str()));
        }
    }
    if !is_placed {
        changed.push_attribute((name, value));
    }
    changed
}
