//! A backend that is opened, locked and ready to be part of a stack.

use std::sync::Arc;
use std::time::Duration;

use backends::{Access, BackendSpec, CacheMode, Engine, FileBackend, OpenOptions, QemuLocks};
use block::{Bytes, Device};
use env::Env;

/// How a volume's backends are opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HoldOptions {
    pub(crate) read_only: bool,
    /// The size that a container may grow to.
    pub(crate) size_advertised: Option<Bytes>,
    /// How long to wait for the lock of a dead process.
    pub(crate) lock_wait: Duration,
    /// How programs of QEMU's are kept out.
    pub(crate) qemu: QemuRule,
}

/// How QEMU's programs are kept out of an image that is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum QemuRule {
    /// None may have it, and none gets it.
    #[default]
    Exclude,
    /// Further ones do not get it; the one whose disk was adopted may still have it for a moment.
    Beside,
    /// An adoption or a release is under way: its steps take and drop the locks.
    Later,
}

/// A backend with its locks: as long as this lives, no other server and no QEMU program writes to it.
pub(crate) struct Held {
    pub(crate) spec: BackendSpec,
    pub(crate) device: Device,
    backend: Arc<FileBackend>,
    /// Let go of while QEMU takes the image back.
    qemu_locks: Option<QemuLocks>,
}

impl HoldOptions {
    /// The same for a target, which is written even if the volume is not, and which no QEMU has.
    pub(crate) const fn for_target(mut self) -> Self {
        self.read_only = false;
        self.qemu = QemuRule::Exclude;
        self
    }
}

impl Held {
    /// Opens and locks what `spec` names.
    pub(crate) async fn open(spec: &BackendSpec, hold: &HoldOptions, env: &dyn Env) -> block::Result<Self> {
        let mut options = match hold.size_advertised {
            Some(size) => OpenOptions::growing(size),
            None => OpenOptions::default(),
        };
        if hold.read_only {
            options.access = Access::ReadOnly;
        }
        options.lock_wait = Some(hold.lock_wait);
        let backend = Arc::new(FileBackend::open(spec, &options, env).await?);
        let qemu_locks = match hold.qemu {
            // A read-only export may stand beside others that read.
            _ if hold.read_only => None,
            QemuRule::Exclude => Some(QemuLocks::take(spec.path())?),
            QemuRule::Beside => Some(QemuLocks::take_beside(spec.path())?),
            QemuRule::Later => None,
        };
        let device = Device::from_arc(&spec.to_string(), Arc::clone(&backend) as _);
        Ok(Self { spec: spec.clone(), device, backend, qemu_locks })
    }

    /// What it takes to read the same bytes past the page cache.
    pub(crate) fn comparison_spec(&self) -> PastCache {
        match self.backend.engine() {
            Engine::Direct => PastCache::Same(self.device.clone()),
            Engine::Memory => PastCache::Never,
            Engine::PageCache => PastCache::Reopen(self.spec.clone().with_cache(CacheMode::Direct)),
        }
    }

    /// Whether it is a block device.
    pub(crate) fn is_block_device(&self) -> bool {
        self.backend.is_block_device()
    }

    /// Lets QEMU have the image again.
    pub(crate) fn drop_qemu_locks(&mut self) {
        self.qemu_locks = None;
    }

    /// Keeps QEMU's programs out again, beside a QEMU that may still have the image.
    pub(crate) fn retake_qemu_locks(&mut self) -> block::Result<()> {
        if self.qemu_locks.is_none() {
            self.qemu_locks = Some(QemuLocks::take_beside(self.spec.path())?);
        }
        Ok(())
    }
}

/// How the bytes of a backend are read past the page cache.
pub(crate) enum PastCache {
    /// The backend does that itself.
    Same(Device),
    /// The file must be opened once more.
    Reopen(BackendSpec),
    /// The file is in memory.
    Never,
}

impl PastCache {
    /// The device that does it, if the file system can.
    pub(crate) async fn open(self, hold: &HoldOptions, env: &dyn Env) -> Option<Device> {
        match self {
            Self::Same(device) => Some(device),
            Self::Never => None,
            Self::Reopen(spec) => {
                let mut options = OpenOptions::read_only();
                options.advertised_size = hold.size_advertised;
                options.lock_wait = None;
                let backend = FileBackend::open(&spec, &options, env).await.ok()?;
                Some(Device::new(&format!("{spec} past the page cache"), backend))
            }
        }
    }
}
