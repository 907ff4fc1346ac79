//! The machine's file systems and block devices.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use backends::{
    Alias, BackendSpec, CacheMode, FileBackend, FileOffload, Helpers, ImageIdentity, ImageState, Obstacle, OpenOptions,
    PreparedTarget, Retired, Retiring, TargetError, TargetRequest, bring_back, check_target, in_place, is_deleted,
    mark_layers_of, prepare_target, remove_unless_used, retire_source,
};
use block::{Bytes, Device, Offload};
use env::{Env, RealFiles};
use futures::future::BoxFuture;
use migrate::DiskPiece;
use uuid::Uuid;

use super::image_looks::ImageLooks;
use super::{Backends, FreeSpace, OverlayBackends, OverlayOpening, StoreFile, aliases, boot_identity, overlay_files};
use crate::device_identity;
use crate::disk::Disk;
use crate::open_backend::{BackendOpenOptions, CopyEnd, OpenBackend, file_size};

/// How long a start waits for a target to say whether a move was committed to it.
const MARK_LIMIT: Duration = Duration::from_secs(1);

/// The machine's file systems and block devices.
#[derive(Default)]
pub(crate) struct RealBackends {
    /// What carries out the calls that a device may hold for ever, so that it holds nothing else of this process.
    helpers: Option<Arc<Helpers>>,
    /// Looks at images that may be on their way.
    looks: ImageLooks,
}

impl RealBackends {
    /// With a process for each device, which is this program again.
    pub(crate) fn with_helpers() -> Self {
        let helpers = Helpers::of_this_program();
        if let Err(error) = &helpers {
            tracing::warn!(%error, "a device that hangs may keep this process from ending");
        }
        Self { helpers: helpers.ok(), looks: ImageLooks::default() }
    }
}

impl Backends for RealBackends {
    fn descriptors_to_come(&self, workers: usize) -> usize {
        self.helpers.as_ref().map_or(0, |helpers| helpers.descriptors_to_come(workers))
    }

    fn descriptors_of_a_device(&self, workers: usize) -> usize {
        self.helpers.as_ref().map_or(0, |_| Helpers::descriptors_of_a_device(workers))
    }

    fn open_store<'a>(&'a self, path: &'a Path, env: &'a dyn Env) -> BoxFuture<'a, block::Result<StoreFile>> {
        Box::pin(async move {
            // Through the page cache: a forced write of a few KiB, on every file system.
            let spec = BackendSpec::file(path).with_cache(CacheMode::Page);
            let backend = Arc::new(FileBackend::open(&spec, &OpenOptions::default(), env).await?);
            let device = Device::from_arc(&path.display().to_string(), Arc::clone(&backend) as _);
            Ok(StoreFile { device, forget_failed_sync: Box::new(move || backend.forget_failed_sync()) })
        })
    }

    fn open_backend<'a>(
        &'a self,
        spec: &'a BackendSpec,
        open_options: &'a BackendOpenOptions,
        env: &'a dyn Env,
    ) -> BoxFuture<'a, block::Result<OpenBackend>> {
        Box::pin(OpenBackend::open(spec, open_options, self.helpers.as_ref(), env))
    }

    fn offload(&self, source: CopyEnd, target: CopyEnd) -> BoxFuture<'_, Option<Arc<dyn Offload>>> {
        Box::pin(async move {
            let (source, target) = source.backend.zip(target.backend)?;
            FileOffload::between(&source, &target).await.map(|offload| Arc::new(offload) as _)
        })
    }

    fn disk_of(&self, path: &Path) -> Option<Disk> {
        crate::disk::disk_of(path)
    }

    fn image_state<'a>(&'a self, path: &'a Path) -> BoxFuture<'a, block::Result<Option<ImageState>>> {
        Box::pin(self.looks.look(path, ImageState::of))
    }

    fn pieces_of(&self, path: &Path) -> Option<Vec<DiskPiece>> {
        crate::disk::pieces_of(path)
    }

    fn prepare<'a>(
        &'a self,
        request: &'a TargetRequest<'a>,
        env: &'a dyn Env,
    ) -> BoxFuture<'a, Result<PreparedTarget, TargetError>> {
        Box::pin(prepare_target(request, env))
    }

    fn check_request(&self, request: &TargetRequest<'_>) -> Result<(), TargetError> {
        in_place(|| check_target(request))
    }

    fn check(&self, target: &PreparedTarget) -> Result<(), TargetError> {
        in_place(|| target.check())
    }

    fn discard<'a>(&'a self, target: &'a PreparedTarget, env: &'a dyn Env) -> BoxFuture<'a, Result<(), TargetError>> {
        Box::pin(target.discard_once_free(env))
    }

    fn reserve(&self, target: &PreparedTarget, length: Bytes) -> Result<(), TargetError> {
        in_place(|| target.reserve(length))
    }

    fn mark(&self, target: &PreparedTarget, epoch: u64, volume: &str) -> Result<(), TargetError> {
        in_place(|| target.mark(epoch, volume))
    }

    fn mark_layers(&self, image: &Path, known: Option<&ImageIdentity>, generation: u64) -> block::Result<()> {
        in_place(|| mark_layers_of(image, known, generation))
    }

    fn is_taken(&self, target: &PreparedTarget) -> bool {
        in_place(|| target.committed_epoch().is_some())
    }

    fn committed_epoch<'a>(&'a self, target: &'a PreparedTarget) -> BoxFuture<'a, Option<u64>> {
        let target = target.clone();
        Box::pin(async move {
            let looking = tokio::task::spawn_blocking(move || target.committed_epoch());
            tokio::time::timeout(MARK_LIMIT, looking).await.ok()?.ok()?
        })
    }

    fn retire(&self, source: &Retiring<'_>, keep: &Path) -> Result<Retired, TargetError> {
        in_place(|| retire_source(source, keep))
    }

    fn put_away(&self, source: &Retiring<'_>, keep: &Path) -> Result<(), TargetError> {
        in_place(|| if source.is_file() { retire_source(source, keep).map(drop) } else { Ok(()) })
    }

    fn writers_of(&self, source: &Retiring<'_>) -> Vec<u32> {
        in_place(|| source.candidate().map(|found| vm::writers_of(&found)).unwrap_or_default())
    }

    fn bring_back(&self, source: &Retiring<'_>) -> Result<(), TargetError> {
        in_place(|| bring_back(source))
    }

    fn obstacle(&self, source: &Retiring<'_>) -> Option<Obstacle> {
        in_place(|| source.obstacle())
    }

    fn is_deleted(&self, source: &Retiring<'_>) -> Result<bool, TargetError> {
        in_place(|| is_deleted(source))
    }

    fn is_proved(&self, source: &Retiring<'_>, retired: &Retired) -> bool {
        in_place(|| source.is_proved(retired))
    }

    fn delete(&self, retired: &Retired) -> Result<(), TargetError> {
        in_place(|| retired.delete())
    }

    fn remove(&self, path: &Path) -> std::io::Result<()> {
        in_place(|| match std::fs::remove_file(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed.and_then(|()| RealFiles::shared().sync_directory(path.parent().unwrap_or(path))),
        })
    }

    fn remove_unless_used(&self, path: &Path) -> Result<(), TargetError> {
        in_place(|| remove_unless_used(path))
    }

    fn resolve(&self, path: &Path) -> std::io::Result<PathBuf> {
        in_place(|| path.canonicalize())
    }

    fn leave_mark(&self, image: &Path, mark: Uuid) -> std::io::Result<()> {
        in_place(|| std::fs::OpenOptions::new().write(true).create_new(true).open(mark_beside(image, mark)).map(drop))
    }

    fn has_mark(&self, image: &Path, mark: Uuid) -> std::io::Result<bool> {
        in_place(|| mark_beside(image, mark).try_exists())
    }

    fn remove_mark(&self, image: &Path, mark: Uuid) -> std::io::Result<()> {
        self.remove(&mark_beside(image, mark))
    }

    fn sharing<'a>(&'a self, path: &'a Path, others: Vec<(PathBuf, bool)>) -> BoxFuture<'a, Option<PathBuf>> {
        Box::pin(aliases::sharing(&self.looks, path, others))
    }

    fn alias_of<'a>(
        &'a self,
        path: &'a Path,
        images: Vec<PathBuf>,
        mark: Uuid,
    ) -> BoxFuture<'a, block::Result<Option<(PathBuf, Alias)>>> {
        Box::pin(aliases::find(&self.looks, path, images, mark_name(mark)))
    }

    fn device_identity(&self, path: &Path) -> std::io::Result<Option<String>> {
        in_place(|| {
            let found = rustix::fs::stat(path)?;
            let number = (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
            let is_device = rustix::fs::FileType::from_raw_mode(found.st_mode) == rustix::fs::FileType::BlockDevice;
            if !is_device {
                return Ok(None);
            }
            let boot = boot_identity().map_err(std::io::Error::other)?;
            Ok(Some(device_identity::of(Path::new("/sys"), &boot, number)))
        })
    }

    fn drop_page_cache<'a>(&'a self, path: &'a Path) -> BoxFuture<'a, std::io::Result<()>> {
        Box::pin(backends::drop_page_cache(path))
    }

    fn size(&self, path: &Path) -> std::io::Result<Bytes> {
        in_place(|| file_size(path))
    }
}

impl OverlayBackends for RealBackends {
    fn make_overlay<'a>(
        &'a self,
        image: &'a Path,
        number: u32,
        length: Bytes,
        opening: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>> {
        Box::pin(overlay_files::make(image, number, length, opening, self.helpers.as_ref()))
    }

    fn open_overlay<'a>(
        &'a self,
        image: &'a Path,
        number: u32,
        opening: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>> {
        Box::pin(overlay_files::open(image, number, opening, self.helpers.as_ref()))
    }

    fn overlay_identity(&self, image: &Path, number: u32) -> Option<ImageIdentity> {
        in_place(|| overlay_files::identity(image, number))
    }

    fn remove_overlay(&self, image: &Path, number: u32) -> std::io::Result<()> {
        in_place(|| overlay_files::remove(image, number))
    }

    fn sweep_overlay(&self, image: &Path, number: u32) -> std::io::Result<()> {
        in_place(|| overlay_files::remove_unless_used(image, number))
    }

    fn overlays(&self, image: &Path) -> std::io::Result<Vec<u32>> {
        in_place(|| overlay_files::list(image))
    }

    fn free_space(&self, image: &Path) -> std::io::Result<Option<FreeSpace>> {
        in_place(|| overlay_files::free_space(image))
    }
}

fn mark_beside(image: &Path, mark: Uuid) -> PathBuf {
    image.with_file_name(mark_name(mark))
}

fn mark_name(mark: Uuid) -> String {
    format!(".transhume-{mark}")
}
