//! What the daemon is made of, and what it does with volumes as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use api::v1::{self, AttachRequest, Error, ErrorCode};
use backends::{CacheMode, ImageError, TargetError};
use block::{BufferPool, Bytes};
use env::{EnvRef, Moment};
use migrate::Journal;
use parking_lot::RwLock;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::audit::{Audit, Peer, unix_ms};
use crate::caches::Caches;
use crate::clients::SocketOwner;
use crate::config::{Config, LiveConfig};
use crate::descriptors;
use crate::document::{AdoptionDocument, DOCUMENT_VERSION, LayerDocument, VolumeDocument};
use crate::foreign::ForeignUse;
use crate::hooks::Hooks;
use crate::hosts::{HostNetwork, no_hosts};
use crate::hypervisor::{Hypervisors, Monitors};
use crate::jobs::{Group, History, JobHandle};
use crate::journal::VolumeJournal;
use crate::last_life::LastLife;
use crate::lent_parts::LentParts;
use crate::location::{JobTarget, Location, parse_backend};
use crate::log::LogQueue;
use crate::machines::{HostStores, Machines};
use crate::open_backend::{BackendOpenOptions, MovedRule, OpenBackend, suited};
use crate::overlays::OverlayContext;
use crate::places::{Places, Use, User};
use crate::platform::{Backends, Hosts, Network, Platform, WorkerSpawner};
use crate::pools::PoolContext;
use crate::problem::{Result, no_volume, of_backend};
use crate::remote::{AbortedJobs, PendingNotice};
use crate::stack::open_layer_files;
use crate::state_dir::{Layout, StateDir, check_name};
use crate::surrogates::Surrogates;
use crate::volume::{Volume, parse_export};

/// A running daemon.
pub(crate) struct Daemon {
    pub(crate) env: EnvRef,
    pub(crate) config: LiveConfig,
    pub(crate) state: StateDir,
    pub(crate) layout: Layout,
    pub(crate) audit: Audit,
    /// What the daemon that was here before has noted of its life.
    pub(crate) last_life: LastLife,
    pub(crate) history: History,
    pub(crate) network: Arc<dyn Network>,
    /// Where volumes are and go.
    pub(crate) backends: Arc<dyn Backends>,
    /// Other daemons.
    pub(crate) hosts: Arc<dyn Hosts>,
    /// Who copies.
    pub(crate) spawner: Arc<dyn WorkerSpawner>,
    /// Where guest requests live.
    pub(crate) pool: BufferPool,
    /// One permit a running job.
    pub(crate) running_jobs: Arc<Semaphore>,
    /// This boot of the machine.
    pub(crate) boot: [u8; 16],
    /// For how many chunks a page of a progress map stands.
    pub(crate) map_page_chunks: u64,
    pub(crate) started: Moment,
    pub(crate) socket_dir: PathBuf,
    volumes: RwLock<BTreeMap<String, Arc<Volume>>>,
    /// The places of what is being made.
    pub(crate) places: Places,
    /// Volumes whose journal cannot be read, and why: nothing else is known of them.
    pub(crate) unreadable: RwLock<BTreeMap<String, Error>>,
    /// This host among others, if it speaks to any.
    pub(crate) host_network: Option<Arc<HostNetwork>>,
    /// Why it is none, although the configuration says that it is one.
    pub(crate) host_problem: Option<Error>,
    /// The log, if it is this daemon's own.
    pub(crate) log_queue: Option<LogQueue>,
    /// Held while a volume comes or goes.
    pub(crate) membership: tokio::sync::Mutex<()>,
    /// Held while it is decided whether the volumes of a move from another host are taken or forgotten.
    pub(crate) arrivals_decided: tokio::sync::Mutex<()>,
    /// What other hosts are to be told of volumes that will not arrive there, or are used from here no more, once anybody has
    /// looked.
    pub(crate) notices: parking_lot::Mutex<Option<Vec<PendingNotice>>>,
    /// Moves to this host that were undone.
    pub(crate) aborted_jobs: AbortedJobs,
    /// Moves that switch over together, by their records.
    pub(crate) groups: parking_lot::Mutex<BTreeMap<Uuid, Arc<Group>>>,
    /// Held by whoever reads a record of a group that is not among them.
    pub(crate) group_recovery: tokio::sync::Mutex<()>,
    /// The connections to the monitors of QEMUs.
    pub(crate) monitors: Arc<Monitors>,
    /// What runs machines.
    pub(crate) hypervisors: Arc<dyn Hypervisors>,
    /// What runs the operator's hooks.
    pub(crate) hook_runner: Arc<dyn Hooks>,
    /// Whole machines.
    pub(crate) machines: Machines,
    /// Stores for what is popular while volumes are moved.
    pub(crate) surrogates: Arc<Surrogates>,
    /// Stores on flash in which blocks of volumes are kept.
    pub(crate) caches: Arc<Caches>,
    /// Parts of caches, by their layers, that are being copied to other hosts, or opened: they are given back afterwards.
    pub(crate) lent_parts: LentParts,
    /// Volumes of other hosts that are stores here, and those of this host that are stores there.
    pub(crate) host_stores: HostStores,
    /// The heads of rotating disks by the kernel's names of these.
    pub(crate) heads: parking_lot::Mutex<BTreeMap<String, migrate::HeadPosition>>,
    /// Hosts that are being told of volumes which will not arrive there.
    pub(crate) notifiers: parking_lot::Mutex<BTreeSet<String>>,
    /// How many moves may be late and do not give way.
    hurrying: parking_lot::Mutex<usize>,
    /// Exports of other servers that are in use, those included whose requests nobody waits for any more.
    pub(crate) foreign: parking_lot::Mutex<Vec<ForeignUse>>,
}

/// A volume that is about to be.
pub(crate) struct NewVolume {
    pub(crate) name: String,
    pub(crate) backend: backends::BackendSpec,
    pub(crate) export: String,
    pub(crate) read_only: bool,
    pub(crate) socket_owner: Option<SocketOwner>,
    pub(crate) adoption: Option<AdoptionDocument>,
}

impl Daemon {
    /// A daemon without volumes.
    pub(crate) fn new(platform: Platform, config: Config, state: StateDir, socket_dir: PathBuf) -> Result<Self> {
        let Platform {
            env,
            files: _,
            backends,
            network,
            hosts,
            spawner,
            monitors,
            hypervisors,
            hooks,
            boot,
            map_page_chunks,
        } = platform;
        let layout = state.layout();
        let pools =
            PoolContext::new(layout.clone(), Arc::clone(&backends), Arc::clone(&env), config.nbd_reconnect_limit());
        Ok(Self {
            audit: Audit::open(layout.clone())?,
            last_life: LastLife::read(&layout, boot),
            history: History::open(layout.clone(), config.history_max),
            network,
            spawner,
            hosts,
            pool: BufferPool::new(Bytes::mib(config.request_pool_mib)),
            running_jobs: Arc::new(Semaphore::new(config.running_jobs_max)),
            boot,
            map_page_chunks,
            started: env.now(),
            socket_dir: config.socket_dir.clone().unwrap_or(socket_dir),
            volumes: RwLock::default(),
            places: Places::default(),
            unreadable: RwLock::default(),
            membership: tokio::sync::Mutex::default(),
            arrivals_decided: tokio::sync::Mutex::default(),
            host_network: None,
            host_problem: None,
            log_queue: None,
            notices: parking_lot::Mutex::default(),
            hurrying: parking_lot::Mutex::default(),
            foreign: parking_lot::Mutex::default(),
            lent_parts: LentParts::default(),
            heads: parking_lot::Mutex::default(),
            host_stores: HostStores::default(),
            notifiers: parking_lot::Mutex::default(),
            aborted_jobs: AbortedJobs::default(),
            groups: parking_lot::Mutex::default(),
            group_recovery: tokio::sync::Mutex::default(),
            machines: Machines::default(),
            surrogates: Arc::new(Surrogates::load(&pools)?),
            caches: Arc::new(Caches::load(&pools)?),
            monitors,
            hypervisors,
            hook_runner: hooks,
            layout,
            backends,
            env,
            config: LiveConfig::new(config),
            state,
        })
    }

    /// One more move, or one less, needs its streams not to give way.
    pub(crate) fn hurry(&self, hurries: bool) {
        let mut hurrying = self.hurrying.lock();
        *hurrying = if hurries { *hurrying + 1 } else { hurrying.saturating_sub(1) };
        self.hosts.give_way(*hurrying == 0);
    }

    /// What volumes with overlays are put together on.
    pub(crate) fn overlay_context(&self) -> OverlayContext {
        OverlayContext {
            backends: Arc::clone(&self.backends),
            surrogates: Arc::clone(&self.surrogates),
            caches: Arc::clone(&self.caches),
            lent_parts: self.lent_parts.clone(),
            env: Arc::clone(&self.env),
            boot: self.boot,
        }
    }

    /// Opens and locks what `place` names. A file or block device that is on record must be that one: another one is not used,
    /// and left as it is.
    pub(crate) async fn open_backend(
        self: &Arc<Self>,
        volume: &Volume,
        place: &Location,
        open_options: &BackendOpenOptions,
    ) -> block::Result<OpenBackend> {
        match place {
            Location::Local(spec) => {
                let open_backend = self.backends.open_backend(spec, open_options, &*self.env).await?;
                let document = volume.document();
                open_backend.require_image(document.image_of(place))?;
                if !open_options.read_only && document.backend == *place {
                    volume.journal.mark_image();
                }
                Ok(open_backend)
            }
            Location::Remote(remote) => OpenBackend::over_remote(self.remote_device(volume, remote)),
            Location::Foreign(export) => {
                let open_backend =
                    OpenBackend::foreign(export, open_options, self.config.nbd_reconnect_limit(), &self.env)?;
                volume.recall_loss(&open_backend);
                self.note_foreign(export, &open_backend);
                Ok(open_backend)
            }
        }
    }

    /// Opens and locks a target that is on record, with the files of `layers` over it. Its name may lead elsewhere by now: only its identity is believed, before
    /// the first byte is written.
    pub(crate) async fn open_prepared(
        self: &Arc<Self>,
        volume: &Volume,
        target: &JobTarget,
        layers: &[LayerDocument],
        open_options: &BackendOpenOptions,
    ) -> block::Result<OpenBackend> {
        let other = |error: TargetError| block::Error::new(error.kind(), error.to_string());
        if let JobTarget::Local(prepared) = target {
            self.backends.check(prepared).map_err(other)?;
        }
        let mut open_backend = self.open_backend(volume, &target.location(), open_options).await?;
        if let JobTarget::Local(prepared) = target
            && let Some(backend) = open_backend.backend()
        {
            // The name may have changed between the look and the opening.
            backend.check_is(prepared).map_err(other)?;
            backend.guard_length(true);
            if let Some(tombstone) = backend.tombstone().await?
                && tombstone.volume.as_deref() == Some(&*volume.name)
                && tombstone.epoch >= volume.document().epoch
                // A guest's own tombstone is copied along.
                && tombstone.concerns(Some(&volume.name), &backend.device_names().unwrap_or_default())
                && volume.document().accepted_tombstone != Some(tombstone.epoch)
            {
                return Err(ImageError::Moved { epoch: tombstone.epoch }.about(prepared.spec.path()));
            }
        }
        if let Some(image) = target.location().local_path() {
            let files = open_layer_files(layers, image, &self.overlay_context(), open_options.lock_wait).await?;
            files.into_iter().for_each(|file| open_backend.add_file(file));
        }
        Ok(open_backend)
    }

    /// This host among others.
    pub(crate) fn host_network(&self) -> Result<&Arc<HostNetwork>> {
        let none = || no_hosts("this daemon speaks to no other hosts".to_owned());
        self.host_network.as_ref().ok_or_else(|| self.host_problem.clone().unwrap_or_else(none))
    }

    /// The volume `name`.
    pub(crate) fn volume(&self, name: &str) -> Result<Arc<Volume>> {
        self.volume_if_any(name)?.ok_or_else(|| no_volume(name))
    }

    /// The same, if there is one of that name.
    ///
    /// # Errors
    /// There is, and recovery could not read its journal.
    pub(crate) fn volume_if_any(&self, name: &str) -> Result<Option<Arc<Volume>>> {
        let found = self.volumes.read().get(name).cloned();
        match found {
            Some(volume) => Ok(Some(volume)),
            None => self.unreadable.read().get(name).cloned().map_or(Ok(None), Err),
        }
    }

    /// All volumes, by name.
    pub(crate) fn volumes(&self) -> Vec<Arc<Volume>> {
        self.volumes.read().values().cloned().collect()
    }

    /// How the API shows all volumes, those included that cannot be read.
    pub(crate) fn shown_volumes(&self) -> Vec<v1::Volume> {
        let mut shown: Vec<v1::Volume> = self.volumes().iter().map(|volume| volume.show()).collect();
        shown.extend(self.unreadable.read().iter().map(|(name, error)| v1::Volume::unreadable(name, error)));
        shown.sort_by(|one, other| one.name.cmp(&other.name));
        shown
    }

    /// A volume that recovery has found and cannot read.
    pub(crate) fn admit_unreadable(&self, name: &str, error: Error) {
        self.unreadable.write().insert(name.to_owned(), error);
    }

    /// Whether there is a volume of that name which cannot be read.
    pub(crate) fn is_unreadable(&self, name: &str) -> bool {
        self.unreadable.read().contains_key(name)
    }

    /// Whether `volume` is one of them still.
    pub(crate) fn has(&self, volume: &Volume) -> bool {
        self.volumes.read().get(&volume.name).is_some_and(|there| std::ptr::eq(&**there, volume))
    }

    /// A volume that recovery has found.
    pub(crate) fn admit(&self, volume: Arc<Volume>) {
        self.unreadable.write().remove(&volume.name);
        self.volumes.write().insert(volume.name.clone(), volume);
    }

    /// Job `id`, if it is not over.
    pub(crate) fn job(&self, id: u64) -> Option<(Arc<Volume>, Arc<JobHandle>)> {
        self.volumes().into_iter().find_map(|volume| {
            let job = volume.job().filter(|job| job.id == id)?;
            Some((volume, job))
        })
    }

    /// Serves a backend.
    pub(crate) async fn attach(&self, request: AttachRequest) -> Result<v1::Volume> {
        let volume = NewVolume {
            backend: suited(parse_backend(&request.backend, CacheMode::Auto)?, &*self.backends)?,
            name: request.name,
            export: request.export,
            read_only: request.read_only,
            socket_owner: None,
            adoption: None,
        };
        let moved = if request.accept_tombstone { MovedRule::AcceptUnknown } else { MovedRule::Refuse };
        let open_options = BackendOpenOptions { read_only: volume.read_only, moved, ..BackendOpenOptions::default() };
        Ok(self.make_volume(volume, open_options).await?.show())
    }

    /// Makes a volume, brings it up and offers it. When this fails nothing is left behind.
    pub(crate) async fn make_volume(&self, new: NewVolume, open_options: BackendOpenOptions) -> Result<Arc<Volume>> {
        check_name(&new.name)?;
        let uri = parse_export(&new.export)?;
        let _membership = self.membership.lock().await;
        self.refuse_known(&new)?;
        let _place = self.take_place(new.backend.path(), User::Volume(new.name.clone()), Use::Kept).await?;
        self.require_descriptors()?;
        let open_backend = self.backends.open_backend(&new.backend, &open_options, &*self.env).await;
        let open_backend = open_backend.map_err(|error| of_backend(&error, "the backend"))?;

        let accepted_tombstone = match open_options.moved {
            MovedRule::AcceptUnknown => open_backend.tombstone_epoch().await,
            _ => Ok(None),
        };
        let accepted_tombstone = accepted_tombstone.map_err(|error| of_backend(&error, "the backend"))?;
        let name = new.name.clone();
        let directory = self.state.begin_volume(&name, Journal::<VolumeDocument>::bytes_needed())?;
        let document = VolumeDocument {
            version: DOCUMENT_VERSION,
            name: new.name,
            // Later volumes of the same files have later epochs, and so other names for what is retired.
            epoch: (unix_ms(self.env.wall_clock()) / 1000).max(open_backend.marked_epoch().unwrap_or_default()),
            backend: new.backend.into(),
            image: open_backend.image().map(Box::new),
            export: new.export,
            socket_owner: new.socket_owner,
            client: None,
            read_only: new.read_only,
            size_limit: None,
            size_advertised: None,
            has_lost: false,
            adoption: new.adoption,
            job: None,
            incoming: None,
            came_with: None,
            opened: None,
            id: None,
            layers: Vec::new(),
            sector: Some(open_backend.device.geometry().request_alignment),
            accepted_tombstone,
            layers_generation: open_backend.marked_layers().unwrap_or_default(),
        };
        let clients = document.clients();
        let journal = VolumeJournal::create(&directory.join("journal"), document, &self.backends, &*self.env).await;
        let journal = journal.map_err(|error| {
            self.state.abandon_volume(&name);
            of_backend(&error, "the new volume's journal")
        })?;
        let volume = Arc::new(Volume::new(&name, journal, Arc::clone(&self.env)));
        let device = open_backend.device.clone();
        let (_, export) = volume.bring_up_bare(open_backend, device, self.pool.clone());
        if let Err(error) = self.network.offer(&uri, export, clients).await {
            self.state.abandon_volume(&name);
            return Err(error);
        }
        if let Err(error) = self.state.finish_volume(&name) {
            self.network.withdraw(&uri).await;
            self.state.abandon_volume(&name);
            return Err(error);
        }
        self.admit(Arc::clone(&volume));
        Ok(volume)
    }

    /// Refuses a volume for which there may be too few file descriptors.
    pub(crate) fn require_descriptors(&self) -> Result<()> {
        // A client of each that has none, and rings for it.
        let alone = self.volumes().iter().filter(|volume| volume.connections() == 0).count();
        let of_devices = self.backends.descriptors_to_come(self.config.worker_count());
        descriptors::require_room(3 * alone + of_devices)
    }

    pub(crate) fn refuse_known(&self, new: &NewVolume) -> Result<()> {
        for volume in self.volumes() {
            let document = volume.document();
            let what = if volume.name == new.name {
                format!("there is a volume {} already", new.name)
            } else if document.backend.local_path() == Some(new.backend.path()) {
                format!("{} is the volume {} already", new.backend.path().display(), volume.name)
            } else {
                continue;
            };
            let hint = format!("choose another one, or `transhume volume detach {}` first", volume.name);
            return Err(Error::new(ErrorCode::AlreadyExists, what).with_hint(hint));
        }
        Ok(())
    }

    /// Knows a volume no more.
    pub(crate) fn forget_volume(&self, name: &str) {
        self.volumes.write().remove(name);
    }

    /// Who answers.
    pub(crate) fn version(&self) -> v1::Version {
        v1::Version {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api: vec![api::API_VERSION.to_owned()],
            pid: std::process::id(),
        }
    }

    /// The daemon as a whole.
    pub(crate) fn status(&self) -> v1::Status {
        v1::Status {
            daemon: self.version(),
            state_dir: self.layout.root().display().to_string(),
            uptime_seconds: self.env.now().since(self.started).as_secs_f64(),
            volumes: self.shown_volumes(),
            jobs: self.jobs(false),
        }
    }

    /// Jobs, newest first.
    pub(crate) fn jobs(&self, all: bool) -> Vec<v1::Job> {
        let mut jobs: Vec<v1::Job> = self.volumes().iter().filter_map(|volume| show_job(volume)).collect();
        jobs.sort_by_key(|job| std::cmp::Reverse(job.id));
        if all {
            let over = self.history.list().into_iter().filter(|job| jobs.iter().all(|live| live.id != job.id));
            let over: Vec<v1::Job> = over.collect();
            jobs.extend(over);
        }
        jobs
    }

    /// Notes in the audit log that `peer` asked for `action`.
    pub(crate) fn note(&self, peer: &Peer, action: (&str, &str), request: serde_json::Value, outcome: Option<&Error>) {
        self.audit.record(self.env.wall_clock(), peer, action, request, outcome);
    }
}

/// The job of a volume, with what its clients feel beside it.
pub(crate) fn show_job(volume: &Volume) -> Option<v1::Job> {
    let mut job = volume.job()?.show();
    job.guest = Some(volume.gauge.guest_io());
    Some(job)
}
