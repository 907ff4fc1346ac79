//! Where the overlays of a snapshot move are, and how a volume is put together from them.
//!
//! The first lies beside the source, the others beside the target, as `.NAME.overlay-N`. Which of them count is in the
//! volume's journal: the volume is its backend with these over it, the lowest first. A file that is not listed counts
//! for nothing and is removed when the job ends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use backends::{BackendSpec, CacheMode, FileBackend, OpenOptions};
use block::{BufferPool, Bytes, Device, IoFuture, Slot};
use env::EnvRef;
use migrate::{SnapshotStore, Snapshots};

use crate::daemon::Daemon;
use crate::document::{JobDocument, VolumeDocument};
use crate::held::HoldOptions;
use crate::journal::VolumeJournal;
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// The overlays of one volume's move, shared with the migration.
pub(crate) type SharedSnapshots = Arc<tokio::sync::Mutex<Snapshots>>;

/// Opens and makes overlay files, and lists them in the volume's journal.
struct OverlayFiles {
    journal: Arc<VolumeJournal>,
    env: EnvRef,
    boot: [u8; 16],
    lock_wait: std::time::Duration,
    source: PathBuf,
    target: PathBuf,
}

impl OverlayFiles {
    fn new(volume: &Volume, env: &EnvRef, boot: [u8; 16], lock_wait: std::time::Duration, job: &JobDocument) -> Self {
        Self {
            journal: Arc::clone(&volume.journal),
            env: Arc::clone(env),
            boot,
            lock_wait,
            source: volume.document().backend.path().to_owned(),
            target: job.target.spec.path().to_owned(),
        }
    }

    fn path(&self, number: u32) -> PathBuf {
        overlay_path(if number == 1 { &self.source } else { &self.target }, number)
    }

    async fn open_file(&self, path: &Path) -> block::Result<Device> {
        // Through the page cache: byte by byte where the volume is served so, and small writes of the map cost little.
        let spec = BackendSpec::file(path).with_cache(CacheMode::Page);
        let options = OpenOptions { lock_wait: Some(self.lock_wait), ..OpenOptions::default() };
        let backend = FileBackend::open(&spec, &options, &*self.env).await?;
        Ok(Device::new(&path.display().to_string(), backend))
    }
}

impl SnapshotStore for OverlayFiles {
    fn boot(&self) -> [u8; 16] {
        self.boot
    }

    fn recorded(&self) -> Vec<u32> {
        self.journal.document().job.as_ref().map_or_else(Vec::new, |job| job.overlays.clone())
    }

    fn create(&self, number: u32, length: Bytes) -> IoFuture<'_, Device> {
        let path = self.path(number);
        Box::pin(async move {
            make_file(&path, length)
                .map_err(|error| block::Error::from_os(error, format!("making the overlay {}", path.display())))?;
            self.open_file(&path).await
        })
    }

    fn open(&self, number: u32) -> IoFuture<'_, Device> {
        Box::pin(async move { self.open_file(&self.path(number)).await })
    }

    fn record(&self, numbers: Vec<u32>) -> IoFuture<'_, ()> {
        Box::pin(self.journal.update(move |document| {
            let mut document = document.clone();
            document.set_overlays(numbers);
            document
        }))
    }

    fn remove(&self, number: u32) -> IoFuture<'_, ()> {
        let path = self.path(number);
        let removed = match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        block::ready(
            removed.map_err(|error| block::Error::from_os(error, format!("removing the overlay {}", path.display()))),
        )
    }
}

/// Where overlay `number` of a move lies beside `image`.
fn overlay_path(image: &Path, number: u32) -> PathBuf {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    image.with_file_name(format!(".{name}.overlay-{number}"))
}

/// A file of `length` bytes without space, that nobody else may read, in the place of any that was there.
fn make_file(path: &Path, length: Bytes) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(length.get())?;
    file.sync_all()?;
    File::open(path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
}

/// The overlays that the volume's job has, over `source`; none yet if none is listed.
///
/// # Errors
/// One of them is not there, or not what it was.
pub(crate) async fn open(
    volume: &Volume,
    job: &JobDocument,
    source: &Device,
    (env, boot): (&EnvRef, [u8; 16]),
    lock_wait: std::time::Duration,
) -> Result<SharedSnapshots> {
    let files = Arc::new(OverlayFiles::new(volume, env, boot, lock_wait, job));
    let snapshots = match job.overlays.is_empty() {
        true => Snapshots::none(files, Arc::clone(env)),
        false => Snapshots::open(files, Arc::clone(env), source.clone()).await.map_err(|error| {
            let error = of_backend(&error, "an overlay of the move under way");
            Error::new(ErrorCode::BackendUnusable, error.message).with_hint(
                "the volume is its backend with the overlays beside source and target: put back what is missing",
            )
        })?,
    };
    Ok(Arc::new(tokio::sync::Mutex::new(snapshots)))
}

/// Folds what the overlays of a move that cannot go on hold into the source, as often as it takes.
pub(crate) async fn fold_back(daemon: &Daemon, volume: &Volume) {
    let Some(snapshots) = volume.snapshots() else { return };
    let Some((slot, source)) = volume.slot().zip(volume.with_held(|held| held.device.clone())) else { return };
    let pool = BufferPool::new(Bytes::mib(daemon.config.copy_pool_mib));
    let mut snapshots = snapshots.lock().await;
    snapshots.fold_back(&slot, &source, &pool).await;
}

/// Removes the overlay files of a job that is over: none of them is listed.
pub(crate) fn sweep(source: &Path, target: &Path) {
    for image in [source, target] {
        let Some(name) = image.file_name().map(|name| format!(".{}.overlay-", name.to_string_lossy())) else {
            continue;
        };
        let Some(Ok(entries)) = image.parent().map(std::fs::read_dir) else { continue };
        for entry in entries.flatten() {
            let found = entry.file_name().to_string_lossy().into_owned();
            if found.strip_prefix(&name).is_some_and(|number| number.parse::<u32>().is_ok())
                && let Err(error) = std::fs::remove_file(entry.path())
            {
                tracing::warn!(%error, path = %entry.path().display(), "an overlay could not be removed");
            }
        }
    }
}

/// Refuses a snapshot move that has no place for overlays, or too little.
pub(crate) fn check_room(volume: &VolumeDocument, slot: &Slot, target: &Path, target_allocates: Bytes) -> Result<()> {
    let refuse = |message: String, hint: &str| Err(Error::new(ErrorCode::Invalid, message).with_hint(hint));
    if volume.adoption.as_ref().is_some_and(|adoption| adoption.size_advertised.is_some()) {
        return refuse(
            format!("{} is a container that grows, and a snapshot move has overlays of a fixed size", volume.name),
            "leave --strategy out",
        );
    }
    if volume.read_only {
        // Nothing is written that a snapshot would hold.
        return Ok(());
    }
    let source = volume.backend.path();
    for path in [source, target] {
        if path.exists() && !path.is_file() {
            return refuse(
                format!("{} is no file: a snapshot move keeps overlays beside source and target", path.display()),
                "leave --strategy out",
            );
        }
    }
    let header = migrate_header(slot.device().size());
    let overlay = header + slot.device().size();
    // The first beside the source; at the target what is copied, and two at once.
    let beside_target = Bytes(2 * overlay.0) + target_allocates;
    let (source_folder, target_folder) = (folder_of(source), folder_of(target));
    let is_same = same_file_system(&source_folder, &target_folder);
    // All three are never there at once: the first is gone when the third is made.
    let needs = match is_same {
        true => vec![(target_folder, beside_target)],
        false => vec![(source_folder, overlay), (target_folder, beside_target)],
    };
    for (folder, needed) in needs {
        let free = free_bytes(&folder)?;
        if free < needed {
            let message = format!(
                "a snapshot move may need {needed} in {} if the guest writes all of the volume, and {free} are free",
                folder.display()
            );
            return Err(Error::new(ErrorCode::NoSpace, message).with_hint("make room, or leave --strategy out"));
        }
    }
    Ok(())
}

fn migrate_header(size: Bytes) -> Bytes {
    filters::OverlayHeader::new(size, [0; 16], [0; 16]).overhead_bytes()
}

fn folder_of(path: &Path) -> PathBuf {
    path.parent().unwrap_or_else(|| Path::new("/")).to_owned()
}

fn same_file_system(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(one), Ok(other)) => one.dev() == other.dev(),
        _ => false,
    }
}

fn free_bytes(folder: &Path) -> Result<Bytes> {
    let found = rustix::fs::statvfs(folder).map_err(|error| {
        crate::problem::of_state(error.into(), format!("asking how much is free in {}", folder.display()))
    })?;
    Ok(Bytes(found.f_bavail.saturating_mul(found.f_frsize)))
}

/// Brings a volume up over `held` with the overlays that its job has.
pub(crate) async fn over(
    volume: &Volume,
    source: &Device,
    boot: (&EnvRef, [u8; 16]),
    hold: &HoldOptions,
) -> Result<Option<(SharedSnapshots, Device)>> {
    let document = volume.document();
    let Some(job) = document.job.as_ref().filter(|job| !job.overlays.is_empty()) else { return Ok(None) };
    let snapshots = open(volume, job, source, boot, hold.lock_wait).await?;
    let top = snapshots.lock().await.top();
    Ok(top.map(|top| (snapshots, top)))
}
