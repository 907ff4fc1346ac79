//! A backend that is opened, locked and ready to be part of a stack.

use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use backends::{
    Access, BackendSpec, CacheMode, Engine, FileBackend, Helpers, ImageError, ImageIdentity, ImageTimes, OpenOptions,
    QemuLocks, SourceIdentity,
};
use block::{BlockDevice, Bytes, Device, Extent};
use env::{Env, EnvRef};
use filters::{Region, Regions};
use migrate::stream::protocol::PART_ALIGNMENT;
use nbd::NbdBackend;

use crate::foreign::ForeignExport;
use crate::location::Location;
use crate::platform::Backends;
use crate::problem::Result;
use crate::reject_all::reject_all;
use crate::remote::{RemoteDeviceGuard, RemoteVolumeDevice};

/// What clients may count on. Requests of multiples of this are served, and no finer ones, on every backend that the
/// volume has now or later. A volume whose size is no multiple of it is served through the page cache, byte by byte.
pub(crate) const CLIENT_SECTOR: u32 = 512;

/// How a volume's backends are opened.
#[derive(Clone, Debug, Default)]
pub struct BackendOpenOptions {
    /// Nothing is written.
    pub read_only: bool,
    /// The size that a container may grow to.
    pub size_advertised: Option<Bytes>,
    /// Where the volume ends, even if the file or block device does not.
    pub size_limit: Option<Bytes>,
    /// How long to wait for the lock of a dead process.
    pub lock_wait: Duration,
    /// How programs of QEMU's are kept out.
    pub qemu: QemuRule,
    /// No lock is taken: somebody else has it, and only reads are meant.
    pub unlocked: bool,
    /// What the volume's clients were promised: requests of multiples of this are served, and no finer ones.
    pub sector: Option<u32>,
    /// What is opened for writing although a volume was moved away from it.
    pub moved: MovedRule,
}

/// Whether a block device is written that carries the tombstone of a volume that was moved away, or a file that a move has
/// made a volume's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MovedRule {
    /// No device with a tombstone is written, unless that was written to another device.
    #[default]
    Refuse,
    /// Somebody has said that a tombstone which does not say to which device it was written is the guest's own.
    AcceptUnknown,
    /// What the volume's record says.
    Since {
        /// What it is called. A tombstone of another volume is the guest's own.
        volume: Arc<str>,
        /// The epoch of the tombstone of which somebody has said that it is the guest's own.
        accepted: Option<u64>,
        /// Its epoch. A tombstone that is no older says that the volume is elsewhere, and so does a move that is newer: the record
        /// is an old copy.
        epoch: u64,
        /// The generation of its layers. So it is if the file is marked with a later one.
        layers: u64,
    },
    /// It is the target of a move, which may be overwritten.
    Allow,
}

/// How QEMU's programs are kept out of an image that is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QemuRule {
    /// None may have it, and none gets it.
    #[default]
    Exclude,
    /// An adoption or a release is under way: its steps take and drop the locks.
    Later,
}

/// Tells when a file was changed last; none once nobody knows.
pub type TimesOfImage = Arc<dyn Fn() -> Option<ImageTimes> + Send + Sync>;

/// A backend with its locks: as long as this lives, no other server and no QEMU program writes to it.
pub struct OpenBackend {
    pub(crate) place: Location,
    pub(crate) device: Device,
    /// The file or block device; none on a ground that has no such things.
    backend: Option<Arc<FileBackend>>,
    /// On such a ground: when it was changed last, where that is known.
    times: Option<TimesOfImage>,
    /// The export of another server; it has no locks.
    export: Option<Arc<NbdBackend>>,
    /// Let go of while QEMU takes the image back.
    qemu_locks: Option<QemuLocks>,
    /// What reaches it, if it is another host's.
    remote_device: Option<RemoteDeviceGuard>,
    /// The files of the layers over it, the lowest first.
    files: Vec<Device>,
    /// All of that as one device, if it is regions of one.
    whole: Option<Device>,
}

impl BackendOpenOptions {
    /// The same for a target, which is written even if the volume is not, and which no QEMU has.
    pub(crate) fn for_target(mut self) -> Self {
        self.read_only = false;
        self.qemu = QemuRule::Exclude;
        self.moved = MovedRule::Allow;
        self
    }
}

/// An end of a copy: what is copied from, or to.
#[derive(Clone)]
pub struct CopyEnd {
    /// Where it is.
    pub place: Location,
    /// Its bytes.
    pub device: Device,
    pub(crate) backend: Option<Arc<FileBackend>>,
}

impl OpenBackend {
    /// What `spec` names, opened and locked by somebody else.
    #[must_use]
    pub const fn over(spec: BackendSpec, device: Device) -> Self {
        Self {
            place: Location::Local(spec),
            device,
            backend: None,
            times: None,
            export: None,
            qemu_locks: None,
            remote_device: None,
            files: Vec::new(),
            whole: None,
        }
    }

    /// The same, and `times` tells when it was changed last.
    #[must_use]
    pub fn with_times(mut self, times: TimesOfImage) -> Self {
        self.times = Some(times);
        self
    }

    /// Tells when it was changed last, without keeping anything open.
    pub(crate) fn times_without_lock(&self) -> Option<TimesOfImage> {
        self.times.clone()
    }

    /// When it was changed last, if it is a file.
    pub(crate) fn image_times(&self) -> Option<ImageTimes> {
        match (&self.backend, &self.times) {
            (Some(backend), _) => backend.times(),
            (None, Some(times)) => times(),
            (None, None) => None,
        }
    }

    /// A volume of another host, which `remote_device` reaches, with the bytes of its layers. The device is closed when this
    /// is dropped.
    ///
    /// # Errors
    /// What is on record of its parts makes no sense.
    pub(crate) fn over_remote(remote_device: Arc<RemoteVolumeDevice>) -> block::Result<Self> {
        let place = Location::Remote(remote_device.place().clone());
        let whole = Device::from_arc(&place.to_string(), Arc::clone(&remote_device) as _);
        let parts = remote_device.place().parts();
        let (device, files, whole) = match &parts[..] {
            [_] => (whole, Vec::new(), None),
            parts => {
                let region = |extent: &Extent| {
                    let name = format!("{place} {extent}");
                    Region::new(whole.clone(), *extent).map(|region| Device::new(&name, region))
                };
                let mut devices = parts.iter().map(region).collect::<block::Result<Vec<_>>>()?;
                let files = devices.split_off(1);
                (devices.remove(0), files, Some(whole))
            }
        };
        Ok(Self {
            place,
            device,
            backend: None,
            times: None,
            export: None,
            qemu_locks: None,
            remote_device: Some(RemoteDeviceGuard(remote_device)),
            files,
            whole,
        })
    }

    /// What reaches it, if it is another host's.
    pub(crate) fn remote_device(&self) -> Option<&Arc<RemoteVolumeDevice>> {
        self.remote_device.as_ref().map(|open_backend| &open_backend.0)
    }

    /// An export of a server that is not ours.
    pub(crate) fn foreign(
        place: &ForeignExport,
        open_options: &BackendOpenOptions,
        reconnect_limit: Duration,
        env: &EnvRef,
    ) -> block::Result<Self> {
        let export = place.open(open_options, reconnect_limit, env)?;
        let device = Device::from_arc(&place.nbd, Arc::clone(&export) as _);
        let place = Location::Foreign(place.clone());
        let (backend, qemu_locks, remote_device, files) = (None, None, None, Vec::new());
        let (export, times, whole) = (Some(export), None, None);
        Ok(Self { place, device, backend, times, export, qemu_locks, remote_device, files, whole })
    }

    /// The export of another server, if it is one.
    pub(crate) const fn export(&self) -> Option<&Arc<NbdBackend>> {
        self.export.as_ref()
    }

    /// From now on the volume's clients rely on it, and on nothing else.
    pub(crate) fn serve_guest(&self) {
        self.export.iter().for_each(|export| export.serve_guest());
        self.backend.iter().for_each(|backend| backend.guard_length(false));
    }

    /// Opens and locks what `spec` names. `helpers` carry out what its device may hold for ever.
    pub(crate) async fn open(
        spec: &BackendSpec,
        open_options: &BackendOpenOptions,
        helpers: Option<&Arc<Helpers>>,
        env: &dyn Env,
    ) -> block::Result<Self> {
        let mut options = match open_options.size_advertised {
            Some(size) => OpenOptions::growing(size),
            None => OpenOptions::default(),
        };
        if open_options.read_only {
            options.access = Access::ReadOnly;
        }
        options.lock_wait = (!open_options.unlocked).then_some(open_options.lock_wait);
        options.size_limit = open_options.size_limit;
        options.request_alignment_min = open_options.sector.unwrap_or_default().max(CLIENT_SECTOR);
        options.request_alignment_max = open_options.sector;
        options.helpers = helpers.map(Arc::clone);
        let backend = Arc::new(FileBackend::open(spec, &options, env).await?);
        if !open_options.read_only {
            refuse_moved(&backend, &open_options.moved).await?;
        }
        let size = backend.geometry().size;
        if let Some(limit) = open_options.size_limit.filter(|limit| size < *limit) {
            let context = format!("{spec} has {} bytes and the volume has {}: it was made shorter", size.0, limit.0);
            return Err(block::Error::new(block::ErrorKind::Invalid, context));
        }
        let qemu_locks = match open_options.qemu {
            // A read-only export may stand beside others that read.
            _ if open_options.read_only => None,
            QemuRule::Exclude => Some(backend.keep(take_once_free(spec.path(), open_options.lock_wait, env).await?)),
            QemuRule::Later => None,
        };
        let device = Device::from_arc(&spec.to_string(), Arc::clone(&backend) as _);
        Ok(Self {
            place: Location::Local(spec.clone()),
            remote_device: None,
            device,
            backend: Some(backend),
            times: None,
            export: None,
            qemu_locks,
            files: Vec::new(),
            whole: None,
        })
    }

    /// Lets go of the file, block device or export, and of its locks: somebody else opens it.
    pub(crate) fn close(&mut self) {
        let geometry = self.device.geometry();
        self.device = reject_all("let go", geometry, block::ErrorKind::Fenced, "this host has let it go");
        (self.backend, self.times, self.export, self.qemu_locks) = (None, None, None, None);
    }

    /// The file of one more layer, over the others.
    pub(crate) fn add_file(&mut self, file: Device) {
        self.files.push(file);
    }

    /// Whether the files of layers are open with it.
    pub(crate) const fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    /// The files that are open with it, which somebody else keeps from here on.
    pub(crate) fn take_files(&mut self) -> Vec<Device> {
        std::mem::take(&mut self.files)
    }

    /// The file of layer `index` goes.
    pub(crate) fn remove_file(&mut self, index: usize) {
        self.files.remove(index);
    }

    /// The files of layer `index` and of all above go.
    pub(crate) fn truncate_files(&mut self, index: usize) {
        self.files.truncate(index);
    }

    /// What holds the volume and its layers: the backend, then the file of each layer, the lowest first.
    pub(crate) fn parts(&self) -> Vec<Device> {
        std::iter::once(&self.device).chain(&self.files).cloned().collect()
    }

    /// The same as one device, which is what a migration copies.
    ///
    /// # Errors
    /// The parts make no device together.
    pub(crate) fn ground(&self) -> block::Result<Device> {
        if let Some(whole) = &self.whole {
            return Ok(whole.clone());
        }
        if self.files.is_empty() {
            return Ok(self.device.clone());
        }
        let name = format!("{} with {} layers", self.place, self.files.len());
        Ok(Device::new(&name, Regions::new(self.parts(), PART_ALIGNMENT)?))
    }

    /// The backend itself.
    pub(crate) const fn backend(&self) -> Option<&Arc<FileBackend>> {
        self.backend.as_ref()
    }

    /// Why it promises nothing durable any more, in words, if so.
    pub(crate) fn sync_failure(&self) -> Option<String> {
        self.backend.as_ref()?.sync_failure().map(|error| error.context().to_owned())
    }

    /// What it takes to read the same bytes past the page cache.
    pub(crate) fn comparison_spec(&self) -> PastCache {
        match self.backend.as_ref().map(|backend| backend.engine()) {
            Some(Engine::Direct) => PastCache::Same(self.device.clone()),
            // What is between here and its medium is its server's.
            None if self.export.is_some() => PastCache::Same(self.device.clone()),
            Some(Engine::Memory) | None => PastCache::Never,
            // What could not be written out is in the page cache alone: only there the guest's bytes are.
            Some(Engine::PageCache) if self.backend.as_ref().is_some_and(|backend| backend.has_failed_sync()) => {
                PastCache::Never
            }
            Some(Engine::PageCache) => match &self.place {
                Location::Local(spec) => {
                    let helpers = self.backend.as_ref().and_then(|backend| backend.helpers()).map(Arc::clone);
                    let image = self.image().map(Box::new);
                    PastCache::Reopen { spec: spec.clone().with_cache(CacheMode::Direct), image, helpers }
                }
                Location::Remote(_) | Location::Foreign(_) => PastCache::Never,
            },
        }
    }

    /// What the system says of the file or block device that is open.
    pub(crate) fn metadata(&self) -> Option<std::fs::Metadata> {
        self.backend.as_ref().and_then(|backend| backend.metadata().ok())
    }

    /// Whether it is neither a file nor a block device nor an export, but something that whoever runs the daemon has made, and keeps from
    /// others.
    pub(crate) const fn is_vouched_for(&self) -> bool {
        self.backend.is_none() && self.times.is_none() && self.export.is_none() && self.remote_device.is_none()
    }

    /// Which file or block device it is, where that can be told.
    pub(crate) fn identity(&self) -> Option<SourceIdentity> {
        self.backend.as_ref().and_then(|backend| backend.identity().ok())
    }

    /// The same as an end of a copy.
    pub(crate) fn end(&self) -> CopyEnd {
        CopyEnd { place: self.place.clone(), device: self.device.clone(), backend: self.backend.clone() }
    }

    /// The same with its length, as a volume's record keeps it.
    pub(crate) fn image(&self) -> Option<ImageIdentity> {
        self.backend.as_ref().and_then(|backend| backend.image().ok())
    }

    /// Refuses it if it is not the `known` file or block device, where that can be told.
    pub(crate) fn require_image(&self, known: Option<&ImageIdentity>) -> block::Result<()> {
        let (Some(known), Some(backend)) = (known, &self.backend) else { return Ok(()) };
        let path = backend.path();
        let now = backend.image();
        let now = now.map_err(|error| block::Error::from_os(error, format!("looking at {}", path.display())))?;
        known.check(&now).map_err(|error| error.about(path))
    }

    /// Refuses to have anybody else open it by its name if that leads to something else by now.
    pub(crate) fn require_name(&self) -> block::Result<()> {
        let (Some(backend), Some(image)) = (&self.backend, self.image()) else { return Ok(()) };
        image.check_name(backend.path())
    }

    /// Whether its name leads to another file or block device by now, or nowhere. False where that cannot be told.
    pub(crate) fn is_renamed(&self) -> bool {
        let named = self.require_name();
        named.is_err_and(|error| matches!(ImageError::of(&error), Some(ImageError::Another)))
    }

    /// Whether anybody has its device, beside this.
    pub(crate) fn is_used(&self) -> bool {
        // One is here, and one in the device that is here.
        self.backend.as_ref().is_none_or(|backend| Arc::strong_count(backend) > 2)
    }

    /// The epoch under which a move has brought a volume into it, if one has.
    pub(crate) fn marked_epoch(&self) -> Option<u64> {
        self.backend.as_ref().and_then(|backend| backend.marked_epoch())
    }

    /// The epoch of the tombstone that it carries, if it is a block device with one.
    pub(crate) async fn tombstone_epoch(&self) -> block::Result<Option<u64>> {
        let Some(backend) = &self.backend else { return Ok(None) };
        Ok(backend.tombstone().await?.map(|tombstone| tombstone.epoch))
    }

    /// The generation of its volume's layers that it names, if it names one.
    pub(crate) fn marked_layers(&self) -> Option<u64> {
        self.backend.as_ref().and_then(|backend| backend.marked_layers())
    }

    /// Whether it is a block device.
    pub(crate) fn is_block_device(&self) -> bool {
        self.backend.as_ref().is_some_and(|backend| backend.is_block_device())
    }

    /// Lets QEMU have the image again.
    pub(crate) fn drop_qemu_locks(&mut self) {
        self.qemu_locks = None;
    }

    /// Keeps QEMU's programs out again, beside a QEMU that may still have the image.
    pub(crate) fn retake_qemu_locks(&mut self) -> block::Result<()> {
        // A volume of another host has no image here that a QEMU could have.
        if let (None, Some(path)) = (&self.qemu_locks, self.place.local_path()) {
            let locks = QemuLocks::take_beside(path)?;
            self.qemu_locks = Some(match &self.backend {
                Some(backend) => backend.keep(locks),
                None => locks,
            });
        }
        Ok(())
    }
}

/// Refuses what its own bytes or attributes say is not the volume any more.
async fn refuse_moved(backend: &FileBackend, rule: &MovedRule) -> block::Result<()> {
    refuse_tombstone(backend, rule).await?;
    let MovedRule::Since { epoch: since, layers: known, .. } = rule else { return Ok(()) };
    if let Some(epoch) = backend.marked_epoch().filter(|epoch| *since > 0 && epoch > since) {
        return Err(ImageError::Newer { epoch }.about(backend.path()));
    }
    match backend.marked_layers() > Some(*known) {
        true => Err(ImageError::Layered.about(backend.path())),
        false => Ok(()),
    }
}

/// Refuses a block device from which a volume was moved away. The guest may have a tombstone of its own in its first block: one of
/// another device, or of another volume, is only told of.
async fn refuse_tombstone(backend: &FileBackend, rule: &MovedRule) -> block::Result<()> {
    let (volume, since, accepted) = match rule {
        MovedRule::Allow => return Ok(()),
        MovedRule::Refuse | MovedRule::AcceptUnknown => (None, 0, None),
        MovedRule::Since { volume, epoch, accepted, .. } => (Some(&**volume), *epoch, *accepted),
    };
    let path = backend.path();
    let Some(tombstone) = backend.tombstone().await?.filter(|tombstone| tombstone.epoch >= since) else {
        return Ok(());
    };
    let own = backend.device_names();
    let own = own.map_err(|error| block::Error::from_os(error, format!("looking at {}", path.display())))?;
    let is_accepted = *rule == MovedRule::AcceptUnknown || accepted == Some(tombstone.epoch);
    let is_refused = match tombstone.is_of(&own) {
        None if is_accepted => false,
        _ => tombstone.concerns(volume, &own),
    };
    if is_refused {
        return Err(ImageError::Moved { epoch: tombstone.epoch }.about(path));
    }
    let name = tombstone.volume.as_deref().unwrap_or_default();
    tracing::warn!(
        path = %path.display(),
        epoch = tombstone.epoch,
        "the first block is the tombstone of another device or volume ({name}), and is taken for the guest's own bytes; if the volume \
         was moved away from here by another host, `transhume volume detach` it and attach it where it is"
    );
    Ok(())
}

/// Takes QEMU's locks. The requests that a dead QEMU has in flight keep its locks for a moment. A live QEMU keeps them
/// for good, and others wait for the start meanwhile.
async fn take_once_free(path: &Path, wait: Duration, env: &dyn Env) -> block::Result<QemuLocks> {
    const INTERVAL: Duration = Duration::from_millis(50);
    const WAIT_MAX: Duration = Duration::from_secs(2);
    let wait = wait.min(WAIT_MAX);
    let begun = env.now();
    loop {
        match QemuLocks::take(path) {
            Err(error) if error.kind() == block::ErrorKind::Busy && env.now().since(begun) < wait => {
                env.sleep(INTERVAL).await;
            }
            outcome => return outcome,
        }
    }
}

/// `spec` in the way that suits the file's size. Past the page cache only whole sectors are reached. If a volume ends
/// within a sector, its clients could not reach its end.
pub(crate) fn suited(spec: BackendSpec, backends: &dyn Backends) -> Result<BackendSpec> {
    let is_odd = backends.size(spec.path()).is_ok_and(|size| !size.is_multiple_of(CLIENT_SECTOR.into()));
    match spec.cache {
        CacheMode::Auto if is_odd => Ok(spec.with_cache(CacheMode::Page)),
        CacheMode::Direct if is_odd => {
            let message = format!("the size of {} is no multiple of {CLIENT_SECTOR}", spec.path().display());
            Err(Error::new(ErrorCode::BackendUnusable, message)
                .with_hint("its end cannot be reached past the page cache: use cache=page, or leave that out"))
        }
        CacheMode::Auto | CacheMode::Direct | CacheMode::Page => Ok(spec),
    }
}

/// How long a file or block device is.
pub(crate) fn file_size(path: &Path) -> std::io::Result<Bytes> {
    // The end of a block device is found by going there: its metadata do not say.
    let kind = std::fs::metadata(path)?;
    if kind.is_file() {
        return Ok(Bytes(kind.len()));
    }
    if !kind.file_type().is_block_device() {
        return Ok(Bytes::ZERO);
    }
    std::fs::File::open(path)?.seek(SeekFrom::End(0)).map(Bytes)
}

/// How the bytes of a backend are read past the page cache.
pub(crate) enum PastCache {
    /// The backend does that itself.
    Same(Device),
    /// The file must be opened once more, and be the same.
    Reopen { spec: BackendSpec, image: Option<Box<ImageIdentity>>, helpers: Option<Arc<Helpers>> },
    /// The file is in memory.
    Never,
}

impl PastCache {
    /// The device that does it, if the file system can.
    pub(crate) async fn open(self, open_options: &BackendOpenOptions, env: &dyn Env) -> Option<Device> {
        match self {
            Self::Same(device) => Some(device),
            Self::Never => None,
            Self::Reopen { spec, image, helpers } => {
                let mut options = OpenOptions { helpers, ..OpenOptions::read_only() };
                options.advertised_size = open_options.size_advertised;
                options.size_limit = open_options.size_limit;
                options.lock_wait = None;
                let backend = FileBackend::open(&spec, &options, env).await.ok()?;
                if image?.check(&backend.image().ok()?).is_err() {
                    tracing::warn!(%spec, "its name leads to something else by now, which is not compared");
                    return None;
                }
                if backend.is_block_device() && !backend.geometry().size.is_multiple_of(CLIENT_SECTOR.into()) {
                    // Its last sector lies on both sides of the volume's end.
                    return None;
                }
                Some(Device::new(&format!("{spec} past the page cache"), backend))
            }
        }
    }
}
