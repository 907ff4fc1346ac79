//! One migration by libvirt: `virsh migrate`, whose connections all go through this process.
//!
//! ```text
//!   virsh ── gate ──▶ libvirt here ── memory.sock ──▶ outlet ═══▶ the other host's QEMU
//!     └───── rpc.sock ──────────────────────────────▶ outlet ═══▶ the other host's libvirt
//! ```
//!
//! Libvirt's steps are Begin (here), Prepare (there), Perform (here: the memory), Finish (there: loaded, and left stopped) and
//! Confirm (here: the domain is ended, or goes on). Confirm waits at the gate for the verdict. If this process dies, Confirm is
//! never said: libvirt leaves the domain stopped here, and the next start of the daemon decides.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use futures::future::BoxFuture;
use migrate::stream::BoxTransport;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use vm::machine::{MigrationOptions, TargetDomain};

use super::instance::Instance;
use super::rpc::{self, Verdict};
use crate::hypervisor::{Lane, Outlet};
use crate::problem::{Result, of_state};

/// Bandwidths from here on are no limit.
const UNLIMITED_BYTES: u64 = 1 << 40;
const BUFFER_BYTES: usize = 64 << 10;

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Libvirt works.
    Sending,
    /// The other host has all of the domain, stopped. Confirm waits.
    Sent,
    /// virsh has ended, with what it said if that was an error.
    Over(Option<String>),
}

/// A migration under way.
pub(super) struct Outgoing {
    verdict: watch::Sender<Verdict>,
    progress: watch::Receiver<Progress>,
    /// Dropping it cuts the connection to the other host's libvirt.
    cut: parking_lot::Mutex<Option<watch::Sender<()>>>,
    /// Dropping it kills virsh.
    _virsh: oneshot::Sender<()>,
}

/// The sockets by which libvirt leaves this host.
struct Sockets {
    rpc: UnixListener,
    memory: UnixListener,
    is_cut: watch::Receiver<()>,
    _places: Places,
}

/// Files that go with a migration.
struct Places {
    folder: PathBuf,
    memory: PathBuf,
}

impl Drop for Places {
    fn drop(&mut self) {
        // What is gone is gone. Of a domain that had come here more may be in the folder of its memory.
        let _ = std::fs::remove_dir_all(&self.folder);
        let _ = std::fs::remove_file(&self.memory);
        let _ = self.memory.parent().map(std::fs::remove_dir);
    }
}

impl Outgoing {
    /// Begins to migrate `domain`, with its sockets in `folder`, which is made anew.
    pub(super) async fn begin(
        domain: &str,
        options: &MigrationOptions,
        target: &TargetDomain,
        folder: &Path,
    ) -> Result<(Self, Box<dyn Outlet>)> {
        let instance = Instance::find().await?;
        let places = Places { folder: folder.to_owned(), memory: target.socket.clone() };
        make_folder(folder)?;
        let files = write_definitions(folder, target)?;
        let memory_folder = target.socket.parent().unwrap_or(folder);
        std::fs::create_dir_all(memory_folder)
            .map_err(|error| of_state(error, format!("making {}", memory_folder.display())))?;
        let (gate, rpc) = (folder.join("gate"), folder.join("rpc"));
        let gate_listener = listen(&gate)?;
        let (cut, is_cut) = watch::channel(());
        let sockets = Sockets { rpc: listen(&rpc)?, memory: listen(&target.socket)?, is_cut, _places: places };

        let (verdict, decided) = watch::channel(Verdict::Open);
        let (progressed, progress) = watch::channel(Progress::Sending);
        let progressed = Arc::new(progressed);
        let (virsh, kill) = oneshot::channel();
        let mut words: Vec<String> = ["--keepalive-interval", "0", "--connect"].map(str::to_owned).to_vec();
        words.push(Instance::uri(&instance.name, &gate));
        words.extend(migrate_words(domain, options, target, (&Instance::uri(&target.instance, &rpc), &files)));
        let child = tokio::process::Command::new("virsh")
            .args(words)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| of_state(error, "starting virsh (package libvirt-clients)"))?;
        tokio::spawn(run(
            child,
            kill,
            Arc::clone(&progressed),
            keep_gate(gate_listener, instance, decided, progressed),
        ));
        let outgoing = Self { verdict, progress, cut: parking_lot::Mutex::new(Some(cut)), _virsh: virsh };
        Ok((outgoing, Box::new(sockets)))
    }

    /// How far it is, from now on.
    pub(super) fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.clone()
    }

    /// Decides what becomes of the domain. The first decision counts.
    pub(super) fn decide(&self, verdict: Verdict) {
        self.verdict.send_if_modified(|decided| {
            let is_first = *decided == Verdict::Open;
            if is_first {
                *decided = verdict;
            }
            is_first
        });
    }

    /// Cuts the connection to the other host's libvirt: nobody waits for it any more.
    pub(super) fn cut(&self) {
        *self.cut.lock() = None;
    }

    /// Waits until virsh has ended.
    pub(super) async fn over(&self) -> Option<String> {
        let mut progress = self.progress();
        let over = progress.wait_for(|progress| matches!(progress, Progress::Over(_))).await;
        match over.as_deref() {
            Ok(Progress::Over(why)) => why.clone(),
            _ => Some("virsh is gone".to_owned()),
        }
    }
}

/// Runs virsh to its end, with the gate for it.
async fn run(
    child: tokio::process::Child,
    kill: oneshot::Receiver<()>,
    progressed: Arc<watch::Sender<Progress>>,
    gate: impl Future<Output = ()>,
) {
    let ended = async {
        match child.wait_with_output().await {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(last_words(&output.stderr)),
            Err(error) => Some(error.to_string()),
        }
    };
    let why = tokio::select! {
        why = ended => why,
        () = gate => Some("the gate is gone".to_owned()),
        _ = kill => Some("it was given up".to_owned()),
    };
    progressed.send_replace(Progress::Over(why));
}

/// Takes virsh's connections to this host's libvirt, for ever.
async fn keep_gate(
    listener: UnixListener,
    instance: Instance,
    decided: watch::Receiver<Verdict>,
    progressed: Arc<watch::Sender<Progress>>,
) {
    while let Ok((client, _)) = listener.accept().await {
        let libvirt = match instance.connect().await {
            Ok(libvirt) => libvirt,
            Err(error) => {
                tracing::warn!(%error, "libvirt is away");
                continue;
            }
        };
        let (decided, progressed) = (decided.clone(), Arc::clone(&progressed));
        tokio::spawn(async move {
            let sent = || _ = progressed.send_replace(Progress::Sent);
            if let Err(error) = rpc::gate(client, libvirt, decided, sent).await {
                tracing::warn!(%error, "virsh's connection to libvirt is closed");
            }
        });
    }
}

fn migrate_words(
    domain: &str,
    options: &MigrationOptions,
    target: &TargetDomain,
    (destination, (live, persistent)): (&str, &(PathBuf, Option<PathBuf>)),
) -> Vec<String> {
    // What libvirt calls unsafe is that the disks are not shared. They are copied by us.
    let mut words: Vec<String> =
        ["migrate", "--live", "--suspend", "--unsafe", "--undefinesource"].map(str::to_owned).into();
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    option("--domain", domain.to_owned());
    option("--desturi", destination.to_owned());
    option("--migrateuri", format!("unix://{}", target.socket.display()));
    option("--xml", live.display().to_string());
    if let Some(persistent) = persistent {
        option("--persistent-xml", persistent.display().to_string());
    }
    if (1..UNLIMITED_BYTES).contains(&options.bandwidth_bytes_max) {
        option("--bandwidth", options.bandwidth_bytes_max.div_ceil(1 << 20).to_string());
    }
    if persistent.is_some() {
        words.push("--persistent".to_owned());
    }
    if options.auto_converge {
        words.push("--auto-converge".to_owned());
    }
    words
}

/// A folder for nobody else: the definitions may have secrets.
fn make_folder(folder: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = |error: std::io::Error| of_state(error, format!("making {}", folder.display()));
    // What an earlier process has left.
    env::unless_missing(std::fs::remove_dir_all(folder)).map_err(failed)?;
    // What is above it is others', too.
    folder.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
    std::fs::DirBuilder::new().mode(0o700).create(folder).map_err(failed)
}

fn write_definitions(folder: &Path, target: &TargetDomain) -> Result<(PathBuf, Option<PathBuf>)> {
    let write = |name: &str, xml: &str| {
        let path = folder.join(name);
        let written = std::fs::write(&path, xml);
        written.map_err(|error| of_state(error, format!("writing {}", path.display()))).map(|()| path)
    };
    let persistent = target.persistent.as_ref().map(|xml| write("persistent.xml", xml)).transpose()?;
    Ok((write("live.xml", &target.live)?, persistent))
}

/// A socket for nobody else: libvirt itself connects, as root or as this user.
fn listen(path: &Path) -> Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |error: std::io::Error| of_state(error, format!("listening on {}", path.display()));
    env::unless_missing(std::fs::remove_file(path)).map_err(failed)?;
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// What virsh says of its end.
fn last_words(stderr: &[u8]) -> String {
    let said = String::from_utf8_lossy(stderr);
    let errors: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
    if errors.is_empty() { "virsh failed without a word".to_owned() } else { errors.join(": ") }
}

impl Outlet for Sockets {
    fn accept(&self) -> BoxFuture<'_, std::io::Result<(Lane, BoxTransport)>> {
        Box::pin(async {
            tokio::select! {
                rpc = self.rpc.accept() => Ok((Lane::Control, self.until_cut(rpc?.0))),
                memory = self.memory.accept() => Ok((Lane::Memory, Box::new(memory?.0) as _)),
            }
        })
    }
}

impl Sockets {
    /// The connection, which ends when it is cut.
    fn until_cut(&self, mut stream: UnixStream) -> BoxTransport {
        let (near, mut far) = tokio::io::duplex(BUFFER_BYTES);
        let mut is_cut = self.is_cut.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut stream, &mut far) => {}
                // Only its end is told.
                _ = is_cut.changed() => {}
            }
        });
        Box::new(near)
    }
}

/// That a migration has failed.
pub(super) fn failed(domain: &str, why: &str) -> Error {
    Error::new(ErrorCode::MoveFailed, format!("libvirt could not migrate {domain}: {why}"))
        .with_hint("see libvirt's log on both hosts, and move it again")
}
