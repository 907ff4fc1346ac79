//! A QEMU's memory as the parallel engine copies it: from outside, through the file that QEMU has mapped. Here is what stands against
//! that at the source, and where the file is at the target.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use memory::{
    GuestMemory, MappedFile, ProcessMemory, RamFile, Region, TargetMemory, Tracking, foreign_mappings, mapped_files,
};
use uuid::Uuid;
use vm::Qmp;
use vm::machine::{self, MachineDescription, MachineFacts, SharedMemory};

use super::mapped;
use crate::clients::SocketOwner;
use crate::problem::{Result, of_state};

/// The unit of memory that is in no huge pages.
const PAGE_BYTES: u64 = memory::PAGE_BYTES;

fn refused(why: impl Into<String>) -> Error {
    Error::new(ErrorCode::VmRefused, why)
        .with_hint("`transhume vm prepare VM` prints what to change, or say --memory qemu")
}

pub(crate) fn of_memory(error: &memory::Error) -> Error {
    use memory::ErrorKind;
    let (code, hint) = match error.kind() {
        ErrorKind::Unsupported
        | ErrorKind::Denied
        | ErrorKind::NotTracked
        | ErrorKind::NotFound
        | ErrorKind::Invalid => {
            (ErrorCode::VmRefused, "`transhume vm prepare VM` prints what to change, or say --memory qemu")
        }
        ErrorKind::NoConvergence => {
            (ErrorCode::NoConvergence, "give it more time, bandwidth or links, or a longer --downtime-limit")
        }
        ErrorKind::DirtyAfterStop => {
            (ErrorCode::MoveFailed, "something writes to the guest's memory past QEMU: move it with --memory qemu")
        }
        _ => (ErrorCode::MoveFailed, "see whether both hosts reach each other, and move it again"),
    };
    Error::new(code, error.to_string()).with_hint(hint)
}

/// What a process has mapped of its guest's memory.
struct Found {
    pid: u32,
    socket: PathBuf,
    files: Vec<(SharedMemory, MappedFile)>,
}

/// The parts of the memory, if all of it can be copied.
pub(super) async fn regions(
    qmp: &Qmp,
    facts: &MachineFacts,
    description: &MachineDescription,
    is_adopted: bool,
) -> Result<Vec<Region>> {
    let backends = machine::shared_memory(facts, description).map_err(|error| refused(error.to_string()))?;
    if is_adopted {
        let direct = machine::direct_nodes(qmp).await.map_err(|error| refused(error.to_string()))?;
        if let Some(node) = direct.first() {
            return Err(refused(format!("the block node {node} reads past the page cache into the guest's memory")));
        }
    }
    let pid = process_of(qmp)?;
    blocking(move || {
        let found = find(pid, backends)?;
        let mut regions = Vec::new();
        for (backend, mapped) in &found.files {
            if let Some(other) = foreign_mappings(&mapped.identity, found.pid).first() {
                return Err(refused(format!("the process {other} has {} mapped, too", mapped.name)));
            }
            let page_bytes = page_bytes(Path::new(&backend.path)).unwrap_or(PAGE_BYTES);
            regions.push(Region { name: backend.id.clone(), bytes: backend.bytes, page_bytes });
        }
        // Whether the kernel and the library can do it is known only once it was done. It ends with this.
        found.track().map(|_| regions)
    })
    .await
}

/// The memory, tracked from now on.
pub(super) async fn open(qmp: &Qmp, regions: &[Region]) -> Result<Arc<dyn GuestMemory>> {
    let mut backends = Vec::new();
    for region in regions {
        let get = serde_json::json!({ "path": format!("/objects/{}", region.name), "property": "mem-path" });
        let path = qmp.execute("qom-get", get).await.map_err(|error| refused(error.to_string()))?;
        let path = path.as_str().unwrap_or_default().to_owned();
        backends.push(SharedMemory { id: region.name.clone(), path, bytes: region.bytes });
    }
    let pid = process_of(qmp)?;
    let opened = blocking(move || {
        let found = find(pid, backends)?;
        let tracking = found.track()?;
        let files = found.files.into_iter().map(|(backend, mapped)| (backend.id, mapped)).collect();
        ProcessMemory::open(pid, files, tracking).map_err(|error| of_memory(&error))
    });
    let memory = opened.await?;
    if memory.regions() != regions {
        return Err(refused("the memory is not what it was when the move was asked for"));
    }
    Ok(Arc::new(memory))
}

/// Waits for a process and its library on a thread that nobody else needs.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::new(ErrorCode::Internal, format!("looking at a VM's memory: {error}"))))
}

fn process_of(qmp: &Qmp) -> Result<u32> {
    qmp.process_id().ok_or_else(|| refused("the kernel does not say which process QEMU is"))
}

impl Found {
    fn track(&self) -> Result<Tracking> {
        let names: Vec<&str> = self.files.iter().map(|(_, mapped)| mapped.name.as_str()).collect();
        Tracking::begin(self.pid, &self.socket, &names).map_err(|error| of_memory(&error))
    }
}

/// Which mappings of the process are which parts.
fn find(pid: u32, backends: Vec<SharedMemory>) -> Result<Found> {
    let socket = machine::preload_socket(pid)
        .ok_or_else(|| refused("QEMU was started without the library that has the kernel track its memory"))?;
    let mapped = mapped_files(pid).map_err(|error| of_memory(&error))?;
    let files = mapped::find(&mapped, &backends).map_err(refused)?;
    let files = backends.into_iter().zip(files).collect();
    Ok(Found { pid, socket, files })
}

/// In which unit the file system at `path`, or at the folder that it would be in, has its pages, if it is memory.
fn page_bytes(path: &Path) -> Option<u64> {
    let about = rustix::fs::statfs(path).or_else(|_| rustix::fs::statfs(path.parent().unwrap_or(path))).ok()?;
    match about.f_type {
        0x9584_58f6 => u64::try_from(about.f_bsize).ok(),
        0x0102_1994 => Some(PAGE_BYTES),
        _ => None,
    }
}

/// Where the memory of a machine that comes is to lie.
pub(super) fn places(folder: &Path, id: Uuid, regions: &[Region]) -> Result<Vec<PathBuf>> {
    let place = |(number, region): (usize, &Region)| {
        let name = format!("transhume-{}-{number}.ram", id.simple());
        if region.page_bytes == PAGE_BYTES {
            if page_bytes(&folder.join(&name)) == Some(PAGE_BYTES) {
                return Ok(folder.join(name));
            }
            return Err(refused(format!("{} is on no tmpfs (`memory-dir`)", folder.display())));
        }
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        let mut folders =
            mounts.lines().filter(|line| line.contains(" hugetlbfs ")).filter_map(|line| line.split(' ').nth(1));
        let found = folders.find(|folder| page_bytes(Path::new(folder)) == Some(region.page_bytes));
        let found =
            found.ok_or_else(|| refused(format!("no hugetlbfs here has pages of {} bytes", region.page_bytes)))?;
        Ok(Path::new(found).join(name))
    };
    regions.iter().enumerate().map(place).collect()
}

/// Makes a memory of zeroes.
pub(super) fn make(
    regions: &[Region],
    places: &[PathBuf],
    owner: Option<SocketOwner>,
) -> Result<Arc<dyn TargetMemory>> {
    let mut made = RamFile::new();
    for (region, place) in regions.iter().zip(places) {
        made.create(region.clone(), place).map_err(|error| of_memory(&error))?;
        if let Some(owner) = owner {
            let given = std::os::unix::fs::lchown(place, Some(owner.uid), Some(owner.gid));
            given.map_err(|error| of_state(error, format!("giving {} to QEMU's user", place.display())))?;
        }
    }
    Ok(Arc::new(made))
}

pub(super) fn remove(places: &[PathBuf]) {
    for place in places {
        match std::fs::remove_file(place) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, place = %place.display(), "a VM's memory could not be removed");
            }
            _ => {}
        }
    }
}
