//! The ground that the daemon stands on here.

use std::io::ErrorKind as OsErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use ::daemon::hosts::NoHosts;
use ::daemon::platform::{
    Backends, FreeSpace, Network, OverlayBackends, OverlayOpening, Platform, StoreFile, WorkerSpawner,
};
use ::daemon::{BackendOpenOptions, Clients, Config, CopyEnd, HostsConfig, OpenBackend, Worker};
use backends::{
    BackendSpec, CacheMode, ImageState, ImageTimes, PreparedTarget, Retired, Retiring, TargetError, TargetOrigin,
    TargetRequest,
};
use block::{Bytes, Device, Error, ErrorKind, Filter, Geometry, Offload};
use env::Env;
use futures::future::BoxFuture;
use nbd::{Export, NbdUri};
use parking_lot::Mutex;
use uuid::Uuid;

use super::group::GroupStore;
use super::{Host, Place, Watched, layered_cache, shelf_side_of, side_of, surrogate};
use crate::disk::Disk;
use crate::host::beside::VOLUMES_MAX;
use crate::host::setup::Role;
use crate::offload::SimOffload;
use crate::process::Process;
use crate::world::Invariant;

/// The world as one life of the daemon sees it.
struct ProcessView {
    host: Host,
    process: Process,
    /// The newest epoch of each volume.
    known: [Arc<AtomicU64>; VOLUMES_MAX],
    /// It is the neighbour's.
    is_far: bool,
}

impl Host {
    /// What this life of the daemon stands on, and how it is configured.
    pub(super) fn platform(&self, process: &Process) -> (Platform, Config) {
        let life = Arc::new(ProcessView {
            host: self.clone(),
            process: process.clone(),
            known: <_>::default(),
            is_far: false,
        });
        let peer = self.shared.daemon_harness.peer.as_ref();
        let ground = Platform {
            env: process.env(),
            files: self.shared.daemon_harness.files.of(process),
            backends: Arc::clone(&life) as _,
            network: Arc::clone(&life) as _,
            hosts: peer.map_or_else(|| Arc::new(NoHosts) as _, |peer| peer.hosts(0, process)),
            spawner: life,
            monitors: Arc::default(),
            hypervisors: self.hypervisors(0),
            hooks: self.hooks(process),
            boot: [*self.shared.boots.lock(); 16],
            map_page_chunks: self.shared.setup.map_page_chunks,
        };
        let config = Config {
            copy_pool_mib: self.shared.setup.pool.0 >> 20,
            request_pool_mib: self.shared.setup.request_pool.0 >> 20,
            running_jobs_max: self.shared.setup.running_jobs_max,
            history_max: 3 * self.volumes().len(),
            hosts: peer.map(|_| self.with_hook(HostsConfig { streams: 2, ..HostsConfig::default() })),
            ..Config::default()
        };
        (ground, config)
    }

    /// The same of a life of the neighbour's daemon.
    ///
    /// # Panics
    /// If there is no neighbour.
    pub(super) fn platform_of_peer(&self, process: &Process) -> (Platform, Config) {
        let peer = self.shared.daemon_harness.peer.as_ref().expect("whoever runs it has seen it");
        let life =
            Arc::new(ProcessView { host: self.clone(), process: process.clone(), known: <_>::default(), is_far: true });
        let ground = Platform {
            env: process.env(),
            files: peer.files().of(process),
            backends: Arc::clone(&life) as _,
            network: Arc::clone(&life) as _,
            hosts: peer.hosts(1, process),
            spawner: life,
            monitors: Arc::default(),
            hypervisors: self.hypervisors(1),
            hooks: self.hooks(process),
            boot: [peer.boot(); 16],
            map_page_chunks: self.shared.setup.map_page_chunks,
        };
        let incoming_dirs = vec!["/pool".into()];
        // Only the mark tells what both reach.
        let shared_storage = vec!["/".into()];
        let hosts = HostsConfig { streams: 2, incoming_dirs, shared_storage, run_vms: true, ..HostsConfig::default() };
        let socket_dir = Some("/run".into());
        let config = Config {
            request_pool_mib: 64,
            history_max: 3 * self.volumes().len(),
            socket_dir,
            hosts: Some(self.with_hook(hosts)),
            ..Config::default()
        };
        (ground, config)
    }

    /// The place at `path`, if there is a file.
    fn place(&self, path: &Path) -> std::io::Result<(usize, Place, &Disk)> {
        let side = side_of(path);
        let place = self.shared.daemon_harness.places.lock()[side];
        match place.exists {
            true => Ok((side, place, &self.shared.sides[side])),
            false => Err(OsErrorKind::NotFound.into()),
        }
    }

    /// Whoever removes the only name of what holds the volume has lost it.
    fn check_put_away(&self, side: usize, what: &str) {
        if self.holder() == side {
            let what =
                format!("{} was {what} although the newest journal says that it holds the volume", self.path_of(side));
            self.shared.world.violate(Invariant::CrashResume, what);
        }
        if side == 0 && self.shared.daemon_harness.peer.as_ref().is_some_and(|peer| !peer.holds()) {
            let what = format!("/pool/{side} was {what} although the neighbour has not durably taken the volume");
            self.shared.world.violate(Invariant::CrashResume, what);
        }
    }
}

impl ProcessView {
    /// What the neighbour finds where the first host has the volume: the same disk, or one of its own that is called so. Nothing
    /// there keeps anybody from writing, and nobody waits for what the other host has under way. What a dead process of this host has
    /// under way keeps the file's lock, once this host holds the volume.
    async fn open_shared(
        &self,
        host: &Host,
        spec: &BackendSpec,
        open_options: &BackendOpenOptions,
    ) -> std::io::Result<Device> {
        let Some(peer) = &host.shared.daemon_harness.peer else { return Err(OsErrorKind::NotFound.into()) };
        let disk = &host.shared.sides[usize::from(!host.is_shared())];
        if peer.holds() {
            disk.let_go().await;
        }
        let device = disk.open_at_once(peer.epoch());
        if open_options.read_only {
            // Somebody else on this host sees the device, too.
            host.shared.world.spawn(peer.page_cache().clone().look(disk.open_at_once(peer.epoch())));
        }
        let device = match spec.cache {
            CacheMode::Page => peer.page_cache().over(device),
            _ => peer.page_cache().past(device),
        };
        if open_options.read_only {
            let geometry = Geometry { read_only: true, ..device.geometry() };
            return Ok(Device::new(disk.name(), Bare { lower: device, geometry }));
        }
        Ok(peer.counted(host, device))
    }

    /// Undoes what was made ready.
    fn take_back(&self, target: &PreparedTarget) -> Result<(), TargetError> {
        if let Some(number) = layered_cache::store_of(target.spec.path()) {
            if self.process.step() {
                self.host.discard_cache_store(number);
            }
            return Ok(());
        }
        if let Some(number) = surrogate::store_of(target.spec.path()) {
            if self.process.step() {
                self.host.discard_surrogate(number);
            }
            return Ok(());
        }
        let host = self.host.with_place(target.spec.path());
        let Ok((side, place, disk)) = host.place(target.spec.path()) else { return Ok(()) };
        if !self.process.step() || place.number != target.number() {
            return Ok(());
        }
        host.check_put_away(side, "discarded");
        disk.revoke("the move to it was undone");
        // A file that was there before is left, empty: to whoever comes next that is a new one. A block device is left as it is.
        if target.origin != TargetOrigin::BlockDevice {
            host.shared.daemon_harness.places.lock()[side].exists = false;
        }
        Ok(())
    }

    /// The newest epoch that this life knows of the volume of `host`.
    fn known_of(&self, host: &Host) -> u64 {
        self.known[host.shared.number].load(Ordering::Relaxed)
    }
}

/// When the file was changed last.
fn times_of(disk: &Disk) -> ImageTimes {
    let world = disk.world();
    let age = world.now().since(disk.changed_at());
    let since_1970 = (world.wall_clock() - age).duration_since(UNIX_EPOCH).expect("the world begins later");
    let nanoseconds = i64::try_from(since_1970.as_nanos()).expect("days in the world");
    ImageTimes::new(nanoseconds, nanoseconds)
}

impl Backends for ProcessView {
    fn open_store<'a>(&'a self, path: &'a Path, _: &'a dyn Env) -> BoxFuture<'a, block::Result<StoreFile>> {
        Box::pin(async move {
            if GroupStore::is_of(path) {
                let device = self.host.open_group(path, &self.process).await;
                return Ok(StoreFile { device, forget_failed_sync: Box::new(|| ()) });
            }
            let host = self.host.with_store(path);
            let shared = &host.shared;
            let is_journal = path.ends_with("journal");
            if let (true, Some(peer)) = (self.is_far, &shared.daemon_harness.peer) {
                let device = match is_journal {
                    true => peer.journal(&host, &self.process).await,
                    false => peer.map().open(0).await,
                };
                return Ok(StoreFile { device, forget_failed_sync: Box::new(|| ()) });
            }
            let device = match is_journal {
                true => host.open(&shared.journal, Role::Journal, 0).await,
                false => host.open(&shared.map, Role::Map, 0).await,
            };
            let device = match is_journal {
                true => {
                    let (process, known) = (self.process.clone(), Arc::clone(&self.known[shared.number]));
                    Device::new("journal", Watched { lower: device, host, process, known, found: Mutex::default() })
                }
                false => device,
            };
            Ok(StoreFile { device, forget_failed_sync: Box::new(|| ()) })
        })
    }

    fn open_backend<'a>(
        &'a self,
        spec: &'a BackendSpec,
        open_options: &'a BackendOpenOptions,
        _: &'a dyn Env,
    ) -> BoxFuture<'a, block::Result<OpenBackend>> {
        Box::pin(async move {
            let missing = |error| Error::from_os(error, format!("opening {spec}"));
            if let Some(number) = layered_cache::store_of(spec.path()) {
                let device = self.host.open_cache_store(number).await.map_err(missing)?;
                return Ok(OpenBackend::over(spec.clone(), device));
            }
            if let Some(number) = surrogate::store_of(spec.path()) {
                let device = self.host.open_surrogate(number).await.map_err(missing)?;
                return Ok(OpenBackend::over(spec.clone(), device));
            }
            let host = self.host.with_place(spec.path());
            if let Some(peer) = host.shared.daemon_harness.peer.as_ref().filter(|_| self.is_far)
                && let Some(device) = peer.leftover(spec.path()).await
            {
                return Ok(OpenBackend::over(spec.clone(), device));
            }
            if self.is_far && side_of(spec.path()) == 0 {
                let device = self.open_shared(&host, spec, open_options).await.map_err(missing)?;
                return Ok(OpenBackend::over(spec.clone(), device));
            }
            let (side, _, disk) = host.place(spec.path()).map_err(missing)?;
            let role = if side == host.holder() { Role::Source } else { Role::Target };
            disk.require_there()?;
            if role == Role::Target {
                disk.let_go().await;
                // A block device is left as it is when a move to it is undone. If that could not be stored, the move goes on.
                if !self.is_far && host.is_target_on_record(side) {
                    disk.admit();
                }
            }
            let device = host.open(disk, role, self.known_of(&host)).await;
            let device = match side == 0 && !self.is_far && !open_options.read_only {
                true => Box::pin(host.cached(&self.process, device)).await?,
                false => device,
            };
            let device = match open_options.size_limit {
                Some(size) if size < device.size() => Device::new(disk.name(), Shortened { lower: device, size }),
                _ => device,
            };
            let device = match &host.shared.daemon_harness.peer {
                Some(peer) if self.is_far => peer.counted(&host, device),
                _ => device,
            };
            let (open_backend, times) = (OpenBackend::over(spec.clone(), device), disk.clone());
            // Where a map of another boot is believed, nobody asks for times either.
            Ok(match host.shared.setup.mistakes.trusts_old_maps {
                true => open_backend,
                false => open_backend.with_times(Arc::new(move || Some(times_of(&times)))),
            })
        })
    }

    fn offload(&self, source: CopyEnd, target: CopyEnd) -> BoxFuture<'_, Option<Arc<dyn Offload>>> {
        let host = target.place.local().map_or_else(|| self.host.clone(), |spec| self.host.with_place(spec.path()));
        let shared = &host.shared;
        let below = target.place.local().filter(|_| shared.setup.offloads).map(|spec| {
            let disk = &shared.sides[side_of(spec.path())];
            disk.open_below(self.known_of(&host))
        });
        let offload = below.map(|target| {
            let (world, rng) = (shared.world.clone(), shared.world.rng("offload"));
            Arc::new(SimOffload { world, rng, source: source.device, target }) as _
        });
        Box::pin(std::future::ready(offload))
    }

    fn image_state<'a>(&'a self, path: &'a Path) -> BoxFuture<'a, block::Result<Option<ImageState>>> {
        let host = self.host.with_place(path);
        let looked = match host.place(path) {
            Ok((_, place, disk)) if disk.is_there() => {
                Ok(Some(ImageState { device: 1, inode: place.number, size: disk.size().get(), times: times_of(disk) }))
            }
            Ok((_, _, disk)) => {
                Err(Error::new(ErrorKind::TimedOut, format!("looking at {}: it does not answer", disk.name())))
            }
            Err(error) => Err(Error::from_os(error, format!("looking at {}", path.display()))),
        };
        Box::pin(std::future::ready(looked))
    }

    fn prepare<'a>(
        &'a self,
        request: &'a TargetRequest<'a>,
        _: &'a dyn Env,
    ) -> BoxFuture<'a, Result<PreparedTarget, TargetError>> {
        Box::pin(async move {
            if let Some(number) = layered_cache::store_of(request.spec.path()) {
                self.host.prepare_cache_store(number, request.size).await;
                let (spec, origin) = (request.spec.clone(), TargetOrigin::Created);
                return Ok(PreparedTarget::elsewhere(spec, origin, true, number.into()));
            }
            if let Some(number) = surrogate::store_of(request.spec.path()) {
                self.host.prepare_surrogate(number, request.size).await;
                let (spec, origin) = (request.spec.clone(), TargetOrigin::Created);
                return Ok(PreparedTarget::elsewhere(spec, origin, true, number.into()));
            }
            let side = side_of(request.spec.path());
            let host = self.host.with_place(request.spec.path());
            if host.is_shared() {
                let what = format!("{} is copied, and both hosts reach it where it is", host.name());
                host.shared.world.violate(Invariant::OneWriter, what);
            }
            let disk = &host.shared.sides[side];
            let mut disks = host.shared.daemon_harness.places.lock();
            let place = &mut disks[side];
            let is_new = !place.exists;
            if self.is_far && !is_new {
                let (path, size) = (request.spec.path().to_owned(), disk.size());
                return Err(TargetError::NotEmpty { path, size });
            }
            if is_new {
                *place = Place { exists: true, number: place.number + 2 };
                disk.blank();
            }
            disk.admit();
            let origin = match is_new {
                true => TargetOrigin::Created,
                false if host.shared.rng.chance(0.5) => TargetOrigin::BlockDevice,
                false => TargetOrigin::Overwritten,
            };
            let reads_zero = is_new || host.shared.setup.mistakes.trusts_used_targets;
            Ok(PreparedTarget::elsewhere(request.spec.clone(), origin, reads_zero, place.number))
        })
    }

    fn check(&self, target: &PreparedTarget) -> Result<(), TargetError> {
        let path = target.spec.path();
        match self.host.with_place(path).place(path) {
            Ok((_, place, _)) if place.number == target.number() => Ok(()),
            _ => Err(TargetError::Replaced { path: path.to_owned() }),
        }
    }

    fn discard<'a>(&'a self, target: &'a PreparedTarget, _: &'a dyn Env) -> BoxFuture<'a, Result<(), TargetError>> {
        Box::pin(std::future::ready(self.take_back(target)))
    }

    fn retire(&self, source: &Retiring<'_>, _: &Path) -> Result<Retired, TargetError> {
        let (source, epoch) = (source.path, source.epoch);
        let (side, host) = (side_of(source), self.host.with_place(source));
        if self.process.step() && host.place(source).is_ok() {
            host.check_put_away(side, "renamed");
            host.shared.sides[side].revoke("the volume has moved away from it");
            host.shared.daemon_harness.places.lock()[side].exists = false;
        }
        let to = format!("{}.moved-{epoch}", source.display()).into();
        Ok(Retired::File { from: source.to_owned(), to })
    }

    fn is_deleted(&self, source: &Retiring<'_>) -> Result<bool, TargetError> {
        Ok(self.host.with_place(source.path).place(source.path).is_err())
    }

    fn delete(&self, _: &Retired) -> Result<(), TargetError> {
        Ok(())
    }

    fn remove(&self, path: &Path) -> std::io::Result<()> {
        let host = self.host.with_place(path);
        let Ok((side, _, disk)) = host.place(path) else { return Ok(()) };
        if self.process.step() {
            host.check_put_away(side, "removed");
            disk.revoke("its file was removed");
            host.shared.daemon_harness.places.lock()[side].exists = false;
        }
        Ok(())
    }

    fn leave_mark(&self, _: &Path, _: Uuid) -> std::io::Result<()> {
        match self.process.step() {
            true => Ok(()),
            false => Err(OsErrorKind::Other.into()),
        }
    }

    fn has_mark(&self, image: &Path, _: Uuid) -> std::io::Result<bool> {
        Ok(self.host.with_place(image).is_shared())
    }

    fn drop_page_cache<'a>(&'a self, path: &'a Path) -> BoxFuture<'a, std::io::Result<()>> {
        Box::pin(async move {
            if let (true, Some(peer)) = (self.is_far, &self.host.with_place(path).shared.daemon_harness.peer) {
                peer.page_cache().drop_all();
            }
            Ok(())
        })
    }

    fn size(&self, path: &Path) -> std::io::Result<Bytes> {
        self.host.with_place(path).place(path).map(|(_, _, disk)| disk.size())
    }
}

impl OverlayBackends for ProcessView {
    fn make_overlay<'a>(
        &'a self,
        image: &'a Path,
        number: u32,
        length: Bytes,
        _: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>> {
        Box::pin(async move {
            if !self.process.step() {
                std::future::pending::<()>().await;
            }
            let host = self.host.with_place(image);
            let shared = &host.shared;
            Ok(shared.shelf.make(&shared.world, (shelf_side_of(image), number), length, 1).await)
        })
    }

    fn open_overlay<'a>(
        &'a self,
        image: &'a Path,
        number: u32,
        _: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>> {
        let host = self.host.with_place(image);
        Box::pin(async move { host.shared.shelf.open(&host.shared.world, (shelf_side_of(image), number)).await })
    }

    fn remove_overlay(&self, image: &Path, number: u32) -> std::io::Result<()> {
        if self.process.step() {
            if self
                .host
                .shared
                .daemon_harness
                .files
                .refuses_to_remove(format!("overlay {number} of {}", image.display()))
            {
                return Err(std::io::Error::other("injected"));
            }
            self.host.with_place(image).shared.shelf.remove((shelf_side_of(image), number));
        }
        Ok(())
    }

    fn overlays(&self, image: &Path) -> std::io::Result<Vec<u32>> {
        Ok(self.host.with_place(image).shared.shelf.numbers(shelf_side_of(image)))
    }

    fn free_space(&self, _: &Path) -> std::io::Result<Option<FreeSpace>> {
        Ok(Some(FreeSpace { file_system: 1, free: Bytes(u64::MAX) }))
    }
}

impl Network for ProcessView {
    fn offer<'a>(
        &'a self,
        uri: &'a NbdUri,
        export: Arc<Export>,
        _: Clients,
    ) -> BoxFuture<'a, Result<(), api::v1::Error>> {
        let host = self.host.named(&uri.export);
        let peer = host.shared.daemon_harness.peer.as_ref();
        match peer {
            // Nobody comes to the neighbour's export: its guest is still at the first host.
            Some(peer) if self.is_far => {
                if let Some(machine) = peer.machine() {
                    // Its guests may be connected before the volume is taken.
                    if machine.offered(1, host.shared.number, (&self.process, &export)) {
                        host.shared.port.offer(&self.process, export);
                    }
                } else if !peer.holds() {
                    let what = "the neighbour serves the volume, and has not durably taken it";
                    self.host.shared.world.violate(Invariant::OneWriter, what);
                }
            }
            _ => {
                if export.name() != host.name() {
                    let what = format!("the guest of {} is offered {}", host.name(), export.name());
                    host.shared.world.violate(Invariant::StableRead, what);
                }
                let machine = peer.and_then(|peer| peer.machine());
                if machine.is_none_or(|machine| machine.offered(0, host.shared.number, (&self.process, &export))) {
                    host.offer(&self.process, export);
                }
                if let Some(peer) = peer {
                    peer.note_served(host.shared.guest.report().answered);
                }
            }
        }
        Box::pin(std::future::ready(Ok(())))
    }

    fn withdraw<'a>(&'a self, _: &'a NbdUri) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

impl WorkerSpawner for ProcessView {
    fn spawn_worker(&self, _: &str) -> Result<Worker, api::v1::Error> {
        Ok(Worker::beside(self.process.env()))
    }

    fn abort_process(&self) {
        self.host.shared.world.violate(Invariant::NoPanic, "a migration has panicked");
    }
}

/// The same bytes as something else.
struct Bare {
    lower: Device,
    geometry: Geometry,
}

impl Filter for Bare {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }
}

/// The beginning of a larger file.
struct Shortened {
    lower: Device,
    size: Bytes,
}

impl Filter for Shortened {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, ..self.lower.geometry() }
    }
}
