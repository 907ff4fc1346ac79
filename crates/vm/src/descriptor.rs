//! Images that QEMU may not open by their names: the daemon passes them open.
//!
//! ```text
//!  add_node ──by its name──▶ there
//!      │ QEMU's user may not
//!      └──add-fd, twice──▶ /dev/fdset/N ──blockdev-add──▶ there ── forget: blockdev-del, remove-fd
//! ```
//!
//! A set has the file open twice, for reading and for writing: QEMU opens a node for reading first, and takes from the
//! set what fits. The set stays for as long as the node: QEMU opens the node again by its name (`/dev/fdset/N`)
//! whenever it goes from reading to writing or back. It goes with the node, because the open files hold QEMU's locks on
//! the image.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::access::QemuUser;
use crate::error::{Error, ErrorKind, Result};
use crate::graph::Node;
use crate::qmp::Qmp;

/// What QEMU calls its sets.
const SETS: &str = "/dev/fdset/";

/// `blockdev-add`. An image that QEMU may not open is handed over open.
///
/// # Errors
/// `Denied` if QEMU may not reach what the node is about; otherwise what QMP says.
pub(crate) async fn add_node(qmp: &Qmp, options: &Value) -> Result<()> {
    let driver = options["driver"].as_str().unwrap_or_default();
    let user = || qmp.process_id().and_then(QemuUser::of_process);
    let by_name = async || qmp.execute("blockdev-add", options.clone()).await.map(drop);
    match (driver, options["filename"].as_str(), options["server"]["path"].as_str()) {
        ("file" | "host_device", Some(image), _) => {
            let image = Path::new(image);
            let user = user();
            let obstacle = user.as_ref().and_then(|user| user.obstacle(image));
            if obstacle.is_none() {
                match by_name().await {
                    Err(error) if is_refusal(&error) => {}
                    outcome => return outcome,
                }
            }
            let Err(second) = hand_over(qmp, image, options).await else { return Ok(()) };
            if second.leaves_doubt() {
                return Err(second);
            }
            let why = user.map(|user| user.explain("the image", image, obstacle.as_ref()));
            let why = why.unwrap_or_else(|| format!("QEMU was refused the image {}", image.display()));
            Err(Error::new(ErrorKind::Denied, format!("{why} (nor could it be handed over open: {second})")))
        }
        ("nbd", _, Some(socket)) => {
            let socket = Path::new(socket);
            by_name().await.map_err(|error| match user().filter(|_| is_refusal(&error)) {
                Some(user) => {
                    let obstacle = user.obstacle(socket);
                    Error::new(ErrorKind::Denied, user.explain("our socket", socket, obstacle.as_ref()))
                }
                None => error,
            })
        }
        _ => by_name().await,
    }
}

/// Whether QEMU itself was refused something by the system; a name that it does not see is one more way of that.
fn is_refusal(error: &Error) -> bool {
    const REFUSALS: [&str; 3] = ["Permission denied", "Operation not permitted", "No such file or directory"];
    error.qemu().is_some_and(|said| REFUSALS.iter().any(|refusal| said.description.contains(refusal)))
}

async fn hand_over(qmp: &Qmp, image: &Path, options: &Value) -> Result<()> {
    let open = |writing: bool| {
        let opened = OpenOptions::new().read(true).write(writing).open(image).map(OwnedFd::from);
        let cannot = |error: io::Error| {
            Error::new(ErrorKind::Denied, format!("the daemon cannot open {}", image.display())).with_source(error)
        };
        opened.map_err(cannot)
    };
    let (for_reading, for_writing) = (open(false)?, open(true)?);
    let opaque = format!("transhume:{}", image.display());
    let first = qmp.execute_with_file("add-fd", json!({ "opaque": opaque }), for_writing).await?;
    let set = first["fdset-id"].as_u64().unwrap_or_default();
    let second = json!({ "fdset-id": set, "opaque": opaque });
    let mut by_set = options.clone();
    by_set["filename"] = format!("{SETS}{set}").into();
    let outcome = match qmp.execute_with_file("add-fd", second, for_reading).await {
        Ok(_) => qmp.execute("blockdev-add", by_set).await.map(drop),
        Err(error) => Err(error),
    };
    match outcome {
        Err(error) if !error.leaves_doubt() => {
            remove(qmp, set).await?;
            Err(error)
        }
        outcome => outcome,
    }
}

/// Closes what a node that is gone was opened by.
///
/// # Errors
/// What QMP says, but for a set that is not there any more.
pub(crate) async fn forget(qmp: &Qmp, node: Option<&Node>) -> Result<()> {
    match node.and_then(|node| set_of(&node.filename)) {
        Some(set) => remove(qmp, set).await,
        None => Ok(()),
    }
}

async fn remove(qmp: &Qmp, set: u64) -> Result<()> {
    match qmp.execute("remove-fd", json!({ "fdset-id": set })).await {
        Err(error) if error.leaves_doubt() => Err(error),
        _ => Ok(()),
    }
}

fn set_of(filename: &str) -> Option<u64> {
    filename.strip_prefix(SETS)?.parse().ok()
}

/// The image behind a `/dev/fdset/N`, if it still goes by the name that QEMU's process has it open by.
///
/// # Errors
/// What QMP says.
pub(crate) async fn image_of(qmp: &Qmp, filename: &str) -> Result<Option<PathBuf>> {
    let (Some(set), Some(pid)) = (set_of(filename), qmp.process_id()) else { return Ok(None) };
    let sets = qmp.execute("query-fdsets", json!({})).await?;
    let found = sets.as_array().into_iter().flatten().find(|found| found["fdset-id"] == set);
    let files = found.and_then(|found| found["fds"].as_array()).into_iter().flatten();
    let paths = files.filter_map(|file| named(pid, file["fd"].as_u64()?));
    Ok(paths.into_iter().next())
}

fn named(pid: u32, descriptor: u64) -> Option<PathBuf> {
    let link = format!("/proc/{pid}/fd/{descriptor}");
    let path = fs::read_link(&link).ok()?;
    let identity = |file: fs::Metadata| (file.dev(), file.ino());
    let opened = identity(fs::metadata(&link).ok()?);
    let now = identity(File::open(&path).ok()?.metadata().ok()?);
    (opened == now).then_some(path)
}
