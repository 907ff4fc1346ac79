//! Where the overlays of a snapshot move are, and how a volume is put together from them.
//!
//! All lie beside the source, as `.NAME.overlay-N`, because together with it they are the guest's disk. So trouble in
//! the target's file system does not affect the guest. Their space is reserved when they are made, where the file
//! system can do that. The volume's journal says which of them count. The volume is its backend with these over it, the
//! lowest first. A file that is not listed counts for nothing and is removed when the job ends.
//!
//! Earlier versions put all but the first beside the target, where they are found.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use backends::ImageIdentity;
use block::{BufferPool, Bytes, Device, IoFuture};
use env::EnvRef;
use migrate::{SnapshotStore, Snapshots};

use crate::caches::Caches;
use crate::daemon::Daemon;
use crate::document::{JobDocument, VolumeDocument};
use crate::free_space::Needs;
use crate::journal::VolumeJournal;
use crate::lent_parts::LentParts;
use crate::location::Location;
use crate::open_backend::BackendOpenOptions;
use crate::platform::{Backends, FreeSpace, OverlayBackends, OverlayOpening};
use crate::problem::{Result, of_backend, of_state};
use crate::surrogates::Surrogates;
use crate::volume::Volume;

/// How long an overlay that is to go may be in use, and how often that is tried.
const SWEEP_WAIT: Duration = Duration::from_secs(2);
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// The overlays of one volume's move, shared with the migration.
pub(crate) type SharedSnapshots = Arc<tokio::sync::Mutex<Snapshots>>;

/// What a volume with overlays is put together on.
#[derive(Clone)]
pub(crate) struct OverlayContext {
    /// Where the overlays are.
    pub(crate) backends: Arc<dyn Backends>,
    /// Where the parts of surrogates are.
    pub(crate) surrogates: Arc<Surrogates>,
    /// Where the parts of caches are.
    pub(crate) caches: Arc<Caches>,
    /// Which of those somebody works at who is no volume.
    pub(crate) lent_parts: LentParts,
    /// Clock, tasks and randomness.
    pub(crate) env: EnvRef,
    /// This boot of the machine.
    pub(crate) boot: [u8; 16],
}

/// Opens and makes overlay files, and lists them in the volume's journal.
struct OverlayFiles {
    journal: Arc<VolumeJournal>,
    overlay_context: OverlayContext,
    lock_wait: Duration,
    source: PathBuf,
    target: PathBuf,
}

impl OverlayFiles {
    /// # Errors
    /// Source or target is no file of this host.
    fn new(volume: &Volume, overlay_context: &OverlayContext, lock_wait: Duration, job: &JobDocument) -> Result<Self> {
        let (source, target) = (volume.document().backend.clone(), job.target.location());
        Ok(Self {
            journal: Arc::clone(&volume.journal),
            overlay_context: overlay_context.clone(),
            lock_wait,
            source: file_of(&source)?.to_owned(),
            target: file_of(&target)?.to_owned(),
        })
    }

    /// Beside what overlay `number` lies. The target is looked at only for one that is not beside the source.
    fn image(&self, number: u32) -> &Path {
        let is_beside =
            |image: &Path| self.overlay_context.backends.overlays(image).is_ok_and(|found| found.contains(&number));
        if !is_beside(&self.source) && is_beside(&self.target) { &self.target } else { &self.source }
    }

    /// Which file overlay `number`, which is open, is.
    fn identity(&self, number: u32) -> Option<ImageIdentity> {
        let document = self.journal.document();
        let known = document.job.as_ref().and_then(|job| job.overlay_files.get(&number)).cloned();
        known.or_else(|| self.overlay_context.backends.overlay_identity(self.image(number), number))
    }

    fn opening(&self) -> OverlayOpening<'_> {
        OverlayOpening { lock_wait: self.lock_wait, reserve: true, known: None, env: &*self.overlay_context.env }
    }
}

impl SnapshotStore for OverlayFiles {
    fn boot(&self) -> [u8; 16] {
        self.overlay_context.boot
    }

    fn recorded(&self) -> Vec<u32> {
        self.journal.document().job.as_ref().map_or_else(Vec::new, |job| job.overlays.clone())
    }

    fn create(&self, number: u32, length: Bytes) -> IoFuture<'_, Device> {
        self.overlay_context.backends.make_overlay(&self.source, number, length, self.opening())
    }

    fn open(&self, number: u32) -> IoFuture<'_, Device> {
        Box::pin(async move {
            let document = self.journal.document();
            let known = document.job.as_ref().and_then(|job| job.overlay_files.get(&number));
            let opening = OverlayOpening { known, ..self.opening() };
            self.overlay_context.backends.open_overlay(self.image(number), number, opening).await
        })
    }

    fn record(&self, numbers: Vec<u32>) -> IoFuture<'_, ()> {
        let recorded = self.recorded();
        let holds_more = numbers.iter().any(|number| !recorded.contains(number));
        Box::pin(async move {
            let found: BTreeMap<u32, ImageIdentity> =
                numbers.iter().filter_map(|number| Some((*number, self.identity(*number)?))).collect();
            let change = move |document: &mut VolumeDocument| {
                if let Some(job) = document.job.as_deref_mut() {
                    (job.overlays, job.overlay_files) = (numbers, found);
                }
            };
            match holds_more {
                true => self.journal.begin_holding(change).await,
                false => self.journal.update(change).await,
            }
        })
    }

    fn remove(&self, number: u32) -> IoFuture<'_, ()> {
        let image = self.image(number);
        let removed = self.overlay_context.backends.remove_overlay(image, number);
        block::ready(removed.map_err(|error| {
            block::Error::from_os(error, format!("removing overlay {number} beside {}", image.display()))
        }))
    }
}

/// The overlays that the volume's job has, over `source`; none yet if none is listed.
///
/// # Errors
/// One of them is not there, or not what it was.
pub(crate) async fn open(
    volume: &Volume,
    job: &JobDocument,
    source: &Device,
    overlay_context: &OverlayContext,
    lock_wait: Duration,
) -> Result<SharedSnapshots> {
    let env = &overlay_context.env;
    let files = Arc::new(OverlayFiles::new(volume, overlay_context, lock_wait, job)?);
    let snapshots = match job.overlays.is_empty() {
        true => Snapshots::none(files, Arc::clone(env)),
        false => Snapshots::open(files, Arc::clone(env), source.clone()).await.map_err(|error| {
            let error = of_backend(&error, "an overlay of the move under way");
            Error::new(ErrorCode::BackendUnusable, error.message)
                .with_hint("the volume is its backend with the overlays beside it: put back what is missing")
        })?,
    };
    Ok(Arc::new(tokio::sync::Mutex::new(snapshots)))
}

/// Folds what the overlays of a move that cannot go on hold into the source, as often as it takes.
pub(crate) async fn fold_back(daemon: &Daemon, volume: &Volume) {
    let Some(snapshots) = volume.snapshots() else { return };
    let Some((slot, source)) = volume.slot().zip(volume.with_backend(|open_backend| open_backend.device.clone()))
    else {
        return;
    };
    let pool = BufferPool::new(Bytes::mib(daemon.config.copy_pool_mib));
    let mut snapshots = snapshots.lock().await;
    snapshots.fold_back(&slot, &source, &pool).await;
}

/// Removes the overlay files of a job that is over: none of them is listed. Their names say no more than beside what they
/// lie, so what somebody has locked stays: it may be another volume's.
pub(crate) async fn sweep(daemon: &Daemon, source: &Path, target: &Path) {
    for image in [source, target] {
        for number in daemon.backends.overlays(image).unwrap_or_default() {
            if let Err(error) = sweep_once_free(daemon, image, number).await {
                tracing::warn!(%error, number, image = %image.display(), "an overlay could not be removed");
            }
        }
    }
}

/// Our own last requests keep the lock of an overlay for a moment.
async fn sweep_once_free(daemon: &Daemon, image: &Path, number: u32) -> std::io::Result<()> {
    let begun = daemon.env.now();
    loop {
        match daemon.backends.sweep_overlay(image, number) {
            Err(error)
                if error.kind() == std::io::ErrorKind::ResourceBusy && daemon.env.now().since(begun) < SWEEP_WAIT =>
            {
                daemon.env.sleep(SWEEP_INTERVAL).await;
            }
            swept => return swept,
        }
    }
}

/// Adds to `needs` what a snapshot move may take, and refuses one that has no place for overlays.
pub(crate) fn add_needs(
    backends: &dyn OverlayBackends,
    volume: &VolumeDocument,
    size: Bytes,
    target: &Path,
    needs: &mut Needs,
) -> Result<()> {
    if volume.room_to_grow().is_some() {
        return refuse(format!(
            "{} is a container that grows, and a snapshot move has overlays of a fixed size",
            volume.name
        ));
    }
    if volume.read_only {
        // Nothing is written that a snapshot would hold.
        return Ok(());
    }
    let source = file_of(&volume.backend)?;
    let (at_source, at_target) = (space_beside(backends, source)?, space_beside(backends, target)?);
    let overlay = header_bytes(size) + size;
    // Two at once beside the source, for the first is gone when the third is made; at the target what is copied.
    needs.add(source, at_source, Bytes(2 * overlay.0));
    needs.add(target, at_target, size);
    Ok(())
}

/// The file beside which overlays lie.
pub(crate) fn file_of(place: &Location) -> Result<&Path> {
    match place {
        Location::Local(spec) => Ok(spec.path()),
        Location::Remote(remote) => {
            refuse(format!("{remote} is on another host: a snapshot move keeps overlays beside source and target"))
        }
        Location::Foreign(export) => refuse(format!(
            "{} is on a server that is not ours: a snapshot move keeps overlays beside source and target",
            export.nbd
        )),
    }
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorCode::Invalid, message).with_hint("leave --strategy out"))
}

fn space_beside(backends: &dyn OverlayBackends, image: &Path) -> Result<FreeSpace> {
    let space = backends.free_space(image);
    let space =
        space.map_err(|error| of_state(error, format!("asking how much is free beside {}", image.display())))?;
    match space {
        Some(space) => Ok(space),
        None => {
            refuse(format!("{} is no file: a snapshot move keeps overlays beside source and target", image.display()))
        }
    }
}

fn header_bytes(size: Bytes) -> Bytes {
    filters::OverlayHeader::new(size, [0; 16], [0; 16]).overhead_bytes()
}

/// Brings a volume up over `held` with the overlays that its job has.
pub(crate) async fn over(
    volume: &Volume,
    source: &Device,
    overlay_context: &OverlayContext,
    open_options: &BackendOpenOptions,
) -> Result<Option<(SharedSnapshots, Device)>> {
    let document = volume.document();
    let Some(job) = document.job.as_ref().filter(|job| !job.overlays.is_empty()) else { return Ok(None) };
    let snapshots = open(volume, job, source, overlay_context, open_options.lock_wait).await?;
    let top = snapshots.lock().await.top();
    Ok(top.map(|top| (snapshots, top)))
}
