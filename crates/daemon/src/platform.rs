//! What the daemon stands on: clock and tasks, its own files, the places where volumes are, the network, threads.
//!
//! ```text
//!   jobs, recover, volume, journal, state_dir      decide; the same everywhere
//!        │          │          │
//! Backends, Hosts  Network    Files, Env            say what there is: the machine, or the simulator's world
//! ```
//!
//! `Platform::real` is the machine. The simulator makes one of its own and runs the same code on it.

mod aliases;
mod image_looks;
mod overlay_files;
mod real_backends;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use backends::{
    Alias, BackendSpec, ImageIdentity, ImageState, Obstacle, PreparedTarget, Retired, Retiring, TargetError,
    TargetRequest,
};
use block::{Bytes, Device, Offload};
use env::{Env, EnvRef, FilesRef, RealFiles};
use futures::future::BoxFuture;
use migrate::DiskPiece;
use migrate::stream::{BoxTransport, Dialer, LinkCounters, StreamPath};
use nbd::NbdUri;
use nbd::server::Export;
use uuid::Uuid;

use crate::arbiter::Arbiter;
use crate::clients::Clients;
use crate::disk::Disk;
use crate::hooks::{HookPrograms, Hooks};
use crate::hosts::{HostName, Reception};
use crate::hypervisor::{Hypervisors, Monitors, Qemus};
use crate::open_backend::{BackendOpenOptions, CopyEnd, OpenBackend};
use crate::problem::{Result, of_state};
use crate::workers::Worker;

pub use overlay_files::FreeSpace;
pub(crate) use overlay_files::path_of as overlay_path;
pub(crate) use real_backends::RealBackends;

/// All that the daemon stands on.
#[derive(Clone)]
pub struct Platform {
    /// Clock, tasks and randomness.
    pub env: EnvRef,
    /// The files of the state directory.
    pub files: FilesRef,
    /// Where volumes are and go.
    pub backends: Arc<dyn Backends>,
    /// How clients come.
    pub network: Arc<dyn Network>,
    /// How other hosts are reached, and reach this one.
    pub hosts: Arc<dyn Hosts>,
    /// Where copies run.
    pub spawner: Arc<dyn WorkerSpawner>,
    /// The connections to the monitors of QEMUs.
    pub monitors: Arc<Monitors>,
    /// What runs machines.
    pub hypervisors: Arc<dyn Hypervisors>,
    /// What runs the operator's hooks.
    pub hooks: Arc<dyn Hooks>,
    /// This boot of the machine.
    pub boot: [u8; 16],
    /// How many chunks a page of a progress map stands for: [`migrate::ProgressMap::PAGE_CHUNKS`] but in tests.
    pub map_page_chunks: u64,
}

/// A file of the state directory that is written as a device.
pub struct StoreFile {
    /// The device.
    pub device: Device,
    /// Takes back that a sync has failed: who calls it relies on nothing that was not synced.
    pub forget_failed_sync: Box<dyn Fn() + Send + Sync>,
}

/// The files and block devices that hold volumes.
pub trait Backends: OverlayBackends {
    /// How many descriptors of this process are still to be taken for the devices of what is open, where so many
    /// `workers` ask each.
    fn descriptors_to_come(&self, _workers: usize) -> usize {
        0
    }

    /// How many are taken for a device.
    fn descriptors_of_a_device(&self, _workers: usize) -> usize {
        0
    }

    /// Opens a file of the state directory.
    ///
    /// # Errors
    /// What the store says.
    fn open_store<'a>(&'a self, path: &'a Path, env: &'a dyn Env) -> BoxFuture<'a, block::Result<StoreFile>>;

    /// Opens and locks what `spec` names.
    ///
    /// # Errors
    /// Busy if somebody else has it; what the place says.
    fn open_backend<'a>(
        &'a self,
        spec: &'a BackendSpec,
        open_options: &'a BackendOpenOptions,
        env: &'a dyn Env,
    ) -> BoxFuture<'a, block::Result<OpenBackend>>;

    /// What copies from `source` to `target` without reading the bytes, if they can do that.
    fn offload(&self, _source: CopyEnd, _target: CopyEnd) -> BoxFuture<'_, Option<Arc<dyn Offload>>> {
        Box::pin(std::future::ready(None))
    }

    /// The disk that `path`, or the directory that it is to be in, lies on; none if nobody knows.
    fn disk_of(&self, _path: &Path) -> Option<Disk> {
        None
    }

    /// How the file at `path` is, as far as every change of it is told by that; none if nobody knows.
    ///
    /// # Errors
    /// Timed out if the place does not answer: nothing is known of the file then.
    fn image_state<'a>(&'a self, _path: &'a Path) -> BoxFuture<'a, block::Result<Option<ImageState>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Where the bytes of the file or block device `path` lie, in bytes of what it lies on; none if nobody knows.
    fn pieces_of(&self, _path: &Path) -> Option<Vec<DiskPiece>> {
        None
    }

    /// Makes a target ready; see [`backends::prepare_target`].
    ///
    /// # Errors
    /// Why it cannot be one.
    fn prepare<'a>(
        &'a self,
        request: &'a TargetRequest<'a>,
        env: &'a dyn Env,
    ) -> BoxFuture<'a, Result<PreparedTarget, TargetError>>;

    /// Whether a target could be made ready; see [`backends::check_target`].
    ///
    /// # Errors
    /// Why it cannot be one.
    fn check_request(&self, _request: &TargetRequest<'_>) -> Result<(), TargetError> {
        Ok(())
    }

    /// See [`PreparedTarget::check`].
    ///
    /// # Errors
    /// If the target is another by now.
    fn check(&self, target: &PreparedTarget) -> Result<(), TargetError>;

    /// See [`PreparedTarget::discard_once_free`].
    ///
    /// # Errors
    /// Somebody else has it; what the place says.
    fn discard<'a>(&'a self, target: &'a PreparedTarget, env: &'a dyn Env) -> BoxFuture<'a, Result<(), TargetError>>;

    /// See [`PreparedTarget::reserve`].
    ///
    /// # Errors
    /// There is no such space; what the place says.
    fn reserve(&self, _target: &PreparedTarget, _length: Bytes) -> Result<(), TargetError> {
        Ok(())
    }

    /// See [`PreparedTarget::mark`].
    ///
    /// # Errors
    /// What the place says.
    fn mark(&self, _target: &PreparedTarget, _epoch: u64, _volume: &str) -> Result<(), TargetError> {
        Ok(())
    }

    /// See [`backends::mark_layers_of`].
    ///
    /// # Errors
    /// What the place says.
    fn mark_layers(&self, _image: &Path, _known: Option<&ImageIdentity>, _generation: u64) -> block::Result<()> {
        Ok(())
    }

    /// Whether a move was committed to it since it was prepared, whatever the record of that says.
    fn is_taken(&self, _target: &PreparedTarget) -> bool {
        false
    }

    /// See [`PreparedTarget::committed_epoch`]. None too while the place does not answer.
    fn committed_epoch<'a>(&'a self, _target: &'a PreparedTarget) -> BoxFuture<'a, Option<u64>> {
        Box::pin(std::future::ready(None))
    }

    /// See [`backends::retire_source`].
    ///
    /// # Errors
    /// What the place says.
    fn retire(&self, source: &Retiring<'_>, keep: &Path) -> Result<Retired, TargetError>;

    /// The same of a file that may be needed once more; nothing of a block device.
    ///
    /// # Errors
    /// What the place says.
    fn put_away(&self, _source: &Retiring<'_>, _keep: &Path) -> Result<(), TargetError> {
        Ok(())
    }

    /// The processes of this host that write to what held a volume, but for its own daemons.
    fn writers_of(&self, _source: &Retiring<'_>) -> Vec<u32> {
        Vec::new()
    }

    /// See [`backends::bring_back`].
    ///
    /// # Errors
    /// What the place says.
    fn bring_back(&self, _source: &Retiring<'_>) -> Result<(), TargetError> {
        Ok(())
    }

    /// See [`Retiring::obstacle`].
    fn obstacle(&self, _source: &Retiring<'_>) -> Option<Obstacle> {
        None
    }

    /// See [`backends::is_deleted`].
    ///
    /// # Errors
    /// What the place says.
    fn is_deleted(&self, source: &Retiring<'_>) -> Result<bool, TargetError>;

    /// See [`Retiring::is_proved`].
    fn is_proved(&self, _source: &Retiring<'_>, _retired: &Retired) -> bool {
        true
    }

    /// See [`Retired::delete`].
    ///
    /// # Errors
    /// What the place says.
    fn delete(&self, retired: &Retired) -> Result<(), TargetError>;

    /// Removes a file for good, if there is one.
    ///
    /// # Errors
    /// What the place says.
    fn remove(&self, path: &Path) -> std::io::Result<()>;

    /// The same, unless somebody else has it locked.
    ///
    /// # Errors
    /// Somebody has; what the place says.
    fn remove_unless_used(&self, path: &Path) -> Result<(), TargetError> {
        let failed = |error| block::Error::from_os(error, format!("removing {}", path.display()));
        self.remove(path).map_err(|error| TargetError::Os(failed(error)))
    }

    /// Where `path` leads, with whatever links there are on the way.
    ///
    /// # Errors
    /// What the place says.
    fn resolve(&self, path: &Path) -> std::io::Result<PathBuf> {
        Ok(path.to_owned())
    }

    /// Puts a file called by `mark` beside `image`, where whoever shares that storage sees it.
    ///
    /// # Errors
    /// What the place says.
    fn leave_mark(&self, _image: &Path, _mark: Uuid) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Whether it is there.
    ///
    /// # Errors
    /// What the place says.
    fn has_mark(&self, _image: &Path, _mark: Uuid) -> std::io::Result<bool> {
        Ok(false)
    }

    /// Removes it.
    ///
    /// # Errors
    /// What the place says.
    fn remove_mark(&self, _image: &Path, _mark: Uuid) -> std::io::Result<()> {
        Ok(())
    }

    /// What the block device at `path` is, whatever host looks at it. None of what is no block device.
    ///
    /// # Errors
    /// What the place says.
    fn device_identity(&self, _path: &Path) -> std::io::Result<Option<String>> {
        Ok(None)
    }

    /// The first of `others` that has bytes in common with `path`, whatever both are called. Of those that are locked only block devices
    /// are looked at: two names of one file are told by its locks. One that does not answer in time is left out.
    fn sharing<'a>(&'a self, _path: &'a Path, _others: Vec<(PathBuf, bool)>) -> BoxFuture<'a, Option<PathBuf>> {
        Box::pin(std::future::ready(None))
    }

    /// The first of `images` that the file at `path` is, or that nobody can tell it from, whatever both are called; see
    /// [`backends::Alias`]. A file called by `mark` is beside it meanwhile. None too if there is no file with bytes.
    ///
    /// # Errors
    /// What the place of `path` says.
    fn alias_of<'a>(
        &'a self,
        _path: &'a Path,
        _images: Vec<PathBuf>,
        _mark: Uuid,
    ) -> BoxFuture<'a, block::Result<Option<(PathBuf, Alias)>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Has this host forget what it has read of the file or block device at `path`, which another host has written.
    ///
    /// # Errors
    /// What the place says.
    fn drop_page_cache<'a>(&'a self, path: &'a Path) -> BoxFuture<'a, std::io::Result<()>>;

    /// How long a file or block device is.
    ///
    /// # Errors
    /// What the place says.
    fn size(&self, path: &Path) -> std::io::Result<Bytes>;
}

/// The files that a snapshot move keeps beside source and target; `image` is either of them, and `number` says which of
/// its overlays.
pub trait OverlayBackends: Send + Sync {
    /// Makes an overlay of `length` bytes of zeroes, that nobody else may read, in the place of any that was there, and opens
    /// it. Done means that a crash keeps it.
    ///
    /// # Errors
    /// What the place says.
    fn make_overlay<'a>(
        &'a self,
        image: &'a Path,
        number: u32,
        length: Bytes,
        opening: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>>;

    /// Opens and locks an overlay.
    ///
    /// # Errors
    /// Not found if there is none; invalid if it is another file; busy if somebody else has it; what the place says.
    fn open_overlay<'a>(
        &'a self,
        image: &'a Path,
        number: u32,
        opening: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>>;

    /// Which file an overlay is; none if nobody knows.
    fn overlay_identity(&self, _image: &Path, _number: u32) -> Option<ImageIdentity> {
        None
    }

    /// Removes an overlay, if there is one.
    ///
    /// # Errors
    /// What the place says.
    fn remove_overlay(&self, image: &Path, number: u32) -> std::io::Result<()>;

    /// The same of one that is on no record: it stays if somebody has it locked.
    ///
    /// # Errors
    /// Busy if somebody has; what the place says.
    fn sweep_overlay(&self, image: &Path, number: u32) -> std::io::Result<()> {
        self.remove_overlay(image, number)
    }

    /// The numbers of the overlays that lie there.
    ///
    /// # Errors
    /// What the place says.
    fn overlays(&self, image: &Path) -> std::io::Result<Vec<u32>>;

    /// What room there is for overlays; none if `image` is no file and has no place beside it.
    ///
    /// # Errors
    /// What the place says.
    fn free_space(&self, image: &Path) -> std::io::Result<Option<FreeSpace>>;
}

/// How an overlay is opened.
#[derive(Clone, Copy)]
pub struct OverlayOpening<'a> {
    /// How long a dead process's locks are waited for.
    pub lock_wait: Duration,
    /// Of one that is made: its space is its own from then on, where the place can do that.
    pub reserve: bool,
    /// Of one that is opened: which file it must be, if that is on record.
    pub known: Option<&'a ImageIdentity>,
    /// Clock and tasks.
    pub env: &'a dyn Env,
}

/// How clients come to exports.
pub trait Network: Send + Sync {
    /// Lets clients come to `export` at `uri`.
    ///
    /// # Errors
    /// If that address is not to be had.
    fn offer<'a>(&'a self, uri: &'a NbdUri, export: Arc<Export>, clients: Clients) -> BoxFuture<'a, Result<()>>;

    /// Lets nobody come there any more.
    fn withdraw<'a>(&'a self, uri: &'a NbdUri) -> BoxFuture<'a, ()>;

    /// Lets nobody come anywhere any more; clients wait for the next daemon.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// The network interfaces of this machine.
pub trait Interfaces: Send + Sync {
    /// What the interface has carried that has each of these addresses; none where there is no such interface.
    fn look(&self, addresses: &[IpAddr]) -> Vec<Option<LinkCounters>>;
}

/// One connection to another host, as whoever shares the network out sees it.
pub trait Carried: Send + Sync {
    /// Between which addresses it is.
    fn path(&self) -> StreamPath;

    /// What it has carried since it was made, in bytes: sent, and received. Nothing once it is closed.
    fn bytes(&self) -> Option<(u64, u64)>;
}

/// A connection for memory, and what it carries where somebody counts.
pub type MemoryConnection = (BoxTransport, Option<Arc<dyn Carried>>);

/// How this daemon reaches others, and is reached.
pub trait Hosts: Send + Sync {
    /// Connections to `host`, which is trusted.
    ///
    /// # Errors
    /// If no host of that name is trusted.
    fn dialer(&self, host: &HostName) -> Result<Arc<dyn Dialer>>;

    /// A connection to `host` that is about a machine; its addresses are those of the stream with this number.
    ///
    /// # Errors
    /// If no host of that name is trusted, or it is not reached.
    fn machine_connection<'a>(&'a self, host: &'a HostName, _number: u16) -> BoxFuture<'a, Result<BoxTransport>> {
        let error = crate::hosts::no_hosts(format!("{host} takes no machines from here"));
        Box::pin(std::future::ready(Err(error)))
    }

    /// The same for memory of the move `id`: it counts as that move's part of the network, where somebody counts.
    ///
    /// # Errors
    /// As above.
    fn memory_connection<'a>(
        &'a self,
        host: &'a HostName,
        number: u16,
        _id: Uuid,
    ) -> BoxFuture<'a, Result<MemoryConnection>> {
        Box::pin(async move { Ok((self.machine_connection(host, number).await?, None)) })
    }

    /// Where the streams to other hosts run, so that encrypting them takes several processors; none: beside whoever asks for
    /// them.
    fn stream_workers(&self) -> Vec<EnvRef> {
        Vec::new()
    }

    /// Whoever decides while this host and another cannot speak with each other, if that is anybody.
    fn arbiter(&self) -> Option<Arc<dyn Arbiter>> {
        None
    }

    /// The interfaces that streams go through; none where nothing is known of them.
    fn interfaces(&self) -> Option<Arc<dyn Interfaces>> {
        None
    }

    /// Whether the streams' workers give way to others, as they do from the beginning.
    fn give_way(&self, _gives_way: bool) {}

    /// Lets `reception` serve the streams of trusted hosts from now on.
    ///
    /// # Errors
    /// If nobody can come.
    fn listen(&self, reception: Arc<dyn Reception>) -> BoxFuture<'_, Result<()>>;
}

/// Whoever runs the daemon's copies.
pub trait WorkerSpawner: Send + Sync {
    /// A worker for the copies of one job.
    ///
    /// # Errors
    /// If there is none to be had.
    fn spawn_worker(&self, name: &str) -> Result<Worker>;

    /// A migration has panicked: ends the process, whose successor resumes what a half-dead one cannot.
    fn abort_process(&self);
}

impl Platform {
    /// The machine; its clients come by `network`, and other hosts by `hosts`.
    ///
    /// # Errors
    /// If the kernel does not say which boot this is.
    pub(crate) fn real(env: EnvRef, network: Arc<dyn Network>, hosts: Arc<dyn Hosts>) -> Result<Self> {
        let boot = boot_identity()?;
        let (backends, spawner) = (Arc::new(RealBackends::with_helpers()), Arc::new(Threads));
        let map_page_chunks = migrate::ProgressMap::PAGE_CHUNKS;
        let monitors: Arc<Monitors> = Arc::default();
        let hypervisors = Arc::new(Qemus::new(Arc::clone(&env), Arc::clone(&monitors)));
        let (files, hooks) = (RealFiles::shared(), Arc::new(HookPrograms));
        Ok(Self { env, files, backends, network, hosts, spawner, monitors, hypervisors, hooks, boot, map_page_chunks })
    }
}

/// Copies run on threads of their own, which give way.
struct Threads;

impl WorkerSpawner for Threads {
    fn spawn_worker(&self, name: &str) -> Result<Worker> {
        Worker::start_yielding(name)
    }

    fn abort_process(&self) {
        std::process::abort();
    }
}

/// This boot of the machine.
pub(crate) fn boot_identity() -> Result<[u8; 16]> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(|error| of_state(error, "asking the kernel for this boot's identity"))?;
    let boot: Uuid = boot.trim().parse().map_err(|_| Error::new(ErrorCode::Internal, "no boot identity"))?;
    Ok(*boot.as_bytes())
}
