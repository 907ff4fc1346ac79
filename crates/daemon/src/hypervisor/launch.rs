//! Starts the QEMU of a machine that comes from another host. It outlives the daemon: it is in a scope of its own under
//! systemd, and in a process group of its own everywhere.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use env::EnvRef;
use vm::machine::TargetCommand;
use vm::{QemuProcess, Qmp};

use super::{Monitors, OnStarted};
use crate::clients::SocketOwner;
use crate::problem::{Result, of_state};
use crate::workers::start_as_equal;

/// How long QEMU may take until its monitor answers.
const START_LIMIT: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(10);
/// How much of QEMU's log an error shows.
const LOG_BYTES_SHOWN: usize = 400;
/// The library that a QEMU is started with whose memory is in files (`crates/preload`), and how it is told where to listen.
const LIBRARY: &str = "libtranshume_preload.so";
const PRELOAD_VARIABLE: &str = "LD_PRELOAD";
const SOCKET_VARIABLE: &str = "TRANSHUME_PRELOAD_SOCKET";
const MEMORY_SOCKET: &str = "memory.sock";
/// What is there where systemd runs the machine.
const SYSTEMD: &str = "/run/systemd/system";

/// Makes the folder of a machine's sockets, for nobody but QEMU's user.
pub(super) fn make_folder(folder: &Path, owner: Option<SocketOwner>) -> Result<()> {
    let failed = |error: std::io::Error| of_state(error, format!("making {}", folder.display()));
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    std::fs::create_dir_all(folder).map_err(failed)?;
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(folder, private).map_err(failed)?;
    match owner {
        Some(owner) => std::os::unix::fs::chown(folder, Some(owner.uid), Some(owner.gid)).map_err(failed),
        None => Ok(()),
    }
}

/// Starts QEMU by `command`, and connects to its monitor. `started` hears of the process before anything is asked of it.
///
/// # Errors
/// It cannot be started, ends, or does not answer; with the end of what it said. `started` refuses. Nothing of it runs then.
pub(super) async fn launch(
    name: &str,
    command: &TargetCommand,
    (folder, owner, started): (&Path, Option<SocketOwner>, OnStarted<'_>),
    (monitors, env): (&Monitors, &EnvRef),
) -> Result<Qmp> {
    let log = folder.join("qemu.log");
    let failed = |error: std::io::Error| of_state(error, format!("starting {}", command.program));
    let output = File::create(&log).map_err(failed)?;
    let mut process = starter(name, command, (folder, owner));
    process.process_group(0).stdin(Stdio::null()).stdout(output.try_clone().map_err(failed)?).stderr(output);
    let mut process = tokio::process::Command::from(process);
    let mut child = start_as_equal(|| process.kill_on_drop(false).spawn()).map_err(failed)?;
    let process = child.id().and_then(QemuProcess::of);
    // One that has ended already is found out below.
    if let Some(process) = &process
        && let Err(error) = started(process.clone()).await
    {
        // It may have ended by itself.
        let _ = child.kill().await;
        return Err(error);
    }
    let began = env.now();
    let refuse = |why: &str| {
        let said = last_words(&log);
        let said = if said.is_empty() { String::new() } else { format!(": {said}") };
        Error::new(ErrorCode::VmRefused, format!("the QEMU of {name} {why}{said}"))
            .with_hint(format!("`transhume vm plan {name} --to HOST --show-command` shows how it is started"))
    };
    let qmp = loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Err(refuse(&format!("has ended ({status})")));
        }
        if command.monitor.exists()
            && let Ok(qmp) = monitors.connect(&command.monitor, env).await
        {
            let is_another =
                |pid: &u32| process.as_ref().is_some_and(|process| process.lives() && !process.has_started(*pid));
            if let Some(pid) = qmp.process_id().filter(is_another) {
                let _ = child.start_kill();
                return Err(refuse(&format!("is not the one that answers at its monitor (process {pid} does)")));
            }
            break qmp;
        }
        if env.now().since(began) > START_LIMIT {
            // It may hang for good.
            let _ = child.start_kill();
            return Err(refuse("does not answer"));
        }
        env.sleep(LOOK).await;
    };
    // Somebody must take its exit status.
    tokio::spawn(async move { child.wait().await });
    Ok(qmp)
}

fn starter(name: &str, command: &TargetCommand, (folder, owner): (&Path, Option<SocketOwner>)) -> Command {
    // Its memory can be copied from outside then, when it moves on.
    let environment = match has_memory_file(command) {
        true => memory_environment(&folder.join(MEMORY_SOCKET)),
        false => Vec::new(),
    };
    if Path::new(SYSTEMD).exists() {
        let mut scope = Command::new("systemd-run");
        scope.args(["--scope", "--quiet", "--collect", "--unit", &format!("transhume-vm-{name}")]);
        if let Some(owner) = owner {
            scope.args([format!("--uid={}", owner.uid), format!("--gid={}", owner.gid)]);
        }
        scope.arg("--");
        if !environment.is_empty() {
            // For QEMU alone: what becomes it need not load the library.
            scope.arg("/usr/bin/env").args(environment);
        }
        scope.arg(&command.program).args(&command.words);
        return scope;
    }
    let mut process = Command::new(&command.program);
    process.args(&command.words);
    process.envs(environment.iter().filter_map(|entry| entry.split_once('=')));
    if let Some(owner) = owner {
        process.uid(owner.uid).gid(owner.gid);
    }
    process
}

/// What a QEMU's environment is to have so that its memory can be copied from outside: it listens at `socket` then. Nothing if the
/// library is not installed.
pub(crate) fn memory_environment(socket: &Path) -> Vec<String> {
    let Some(library) = library() else { return Vec::new() };
    vec![format!("{PRELOAD_VARIABLE}={}", library.display()), format!("{SOCKET_VARIABLE}={}", socket.display())]
}

/// Whether a part of the guest's memory is in a file.
fn has_memory_file(command: &TargetCommand) -> bool {
    command.words.iter().any(|word| word.contains("memory-backend-file"))
}

/// The library that has the kernel track a QEMU's memory, where it is installed beside this program.
fn library() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let folder = own.parent()?;
    let places =
        [folder.join(LIBRARY), folder.join("../lib/transhume").join(LIBRARY), folder.join("deps").join(LIBRARY)];
    places.into_iter().find(|place| place.exists()).and_then(|place| place.canonicalize().ok())
}

/// The end of what QEMU has said.
fn last_words(log: &PathBuf) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(LOG_BYTES_SHOWN)..]).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
