//! Volumes that other hosts move here: made, filled, prepared, taken, or removed again.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use backends::{BackendSpec, TargetRequest};
use block::{Bytes, Device};
use migrate::Journal;
use migrate::stream::{SessionRequest, Standing};

use super::entrance::Entrance;
use super::gate::ASKING_EPOCH;
use super::making::InTheMaking;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::{ArrivalDocument, ArrivalStage, DOCUMENT_VERSION, VolumeDocument};
use crate::held::{Held, HoldOptions};
use crate::jobs::of_target;
use crate::journal::VolumeJournal;
use crate::location::{JobTarget, Location};
use crate::problem::{Result, invalid, of_backend};
use crate::state_dir::check_name;
use crate::volume::Volume;

/// What is held of a volume that another host fills.
pub(crate) struct Incoming {
    pub(crate) held: Held,
    /// The way of the session that fills it.
    entrance: Option<Entrance>,
}

impl Incoming {
    pub(crate) const fn new(held: Held) -> Self {
        Self { held, entrance: None }
    }
}

impl Daemon {
    /// Whether [`open_arrival`](Self::open_arrival) would find on record what it needs. Changes nothing, and waits for nobody.
    pub(super) fn may_open_arrival(&self, host: &str, request: &SessionRequest) -> Result<()> {
        match self.volume(&request.volume) {
            Ok(volume) => may_fill(&volume.name, &arrival_of(&volume, host, request)?, request),
            Err(error) if error.code == ErrorCode::NotFound => self.may_arrive(request).map(drop),
            Err(error) => Err(error),
        }
    }

    /// The same of [`open_forward`](Self::open_forward).
    pub(super) fn may_open_forward(&self, host: &str, request: &SessionRequest) -> Result<()> {
        let volume = self.volume(&request.volume)?;
        may_take(&volume.name, &arrival_of(&volume, host, request)?, request.epoch)
    }

    /// A way for a session of `host` that fills a volume, and whether there is anything of it from before. What an earlier
    /// session has under way is over then.
    pub(super) async fn open_arrival(&self, host: &str, request: &SessionRequest) -> Result<(Device, bool)> {
        let (volume, is_new) = match self.volume(&request.volume) {
            Ok(volume) => (volume, false),
            Err(error) if error.code == ErrorCode::NotFound => (self.make_arrival(host, request).await?, true),
            Err(error) => return Err(error),
        };
        let _operation = volume.operation.lock().await;
        let arrival = arrival_of(&volume, host, request)?;
        may_fill(&volume.name, &arrival, request)?;
        if let ArrivalStage::Prepared { .. } = arrival.stage {
            // Whoever fills it holds it: what was prepared is not what it will be.
            set_stage(&volume, ArrivalStage::Filling).await?;
        }
        close_entrance(&volume).await;
        let mut incoming = volume.incoming.lock();
        let Some(incoming) = incoming.as_mut() else {
            volume.require_up()?;
            return Err(invalid("the volume is not to be filled", "look at it on its host"));
        };
        if let Some(backend) = incoming.held.backend() {
            // Whoever fills it has given up what was not flushed, and writes it again.
            backend.forget_failed_sync();
        }
        let (entrance, device) = Entrance::open(incoming.held.device.clone());
        incoming.entrance = Some(entrance);
        Ok((device, is_new))
    }

    /// Makes a place for a volume of `host`, durably.
    async fn make_arrival(&self, host: &str, request: &SessionRequest) -> Result<Arc<Volume>> {
        let name = &request.volume;
        let _membership = self.membership.lock().await;
        let spec = self.may_arrive(request)?;
        if self.volume(name).is_ok() {
            return Err(Error::new(ErrorCode::AlreadyExists, format!("there is a volume {name} already")));
        }
        let noted = self.note_making(name, &spec).await?;
        let made = self.make_noted_arrival(host, request, (spec, noted.as_ref())).await;
        if let Some(noted) = noted {
            self.made(&noted);
        }
        made
    }

    /// Where a volume that is not here is to be put, if it may come.
    fn may_arrive(&self, request: &SessionRequest) -> Result<BackendSpec> {
        check_name(&request.volume)?;
        if self.undone.has(request.job) {
            return Err(fenced(format!("the move of {} was undone", request.volume)));
        }
        self.check_quota(request)?;
        self.place_for_arrival(&request.volume)
    }

    /// Whether what other hosts have put here leaves room for one more volume, as this host is configured.
    fn check_quota(&self, request: &SessionRequest) -> Result<()> {
        let Some(config) = &self.config.hosts else { return Ok(()) };
        let is_theirs = |document: &VolumeDocument| {
            let path = document.backend.local_path();
            path.is_some_and(|path| config.incoming_dirs.iter().any(|directory| path.starts_with(directory)))
        };
        let volumes = self.volumes();
        let theirs: Vec<_> = volumes.iter().filter(|volume| is_theirs(&volume.document())).collect();
        let refuse = |what: String, key: &str| {
            let error = Error::new(ErrorCode::NoSpace, format!("this host takes no more of others than {what}"));
            Err(error.with_hint(format!("raise `{key}` in its section [hosts], or detach volumes there")))
        };
        if config.incoming_volumes_max > 0 && theirs.len() >= config.incoming_volumes_max {
            return refuse(format!("{} volumes", config.incoming_volumes_max), "incoming-volumes-max");
        }
        let size = |volume: &Volume| {
            volume.slot().map_or_else(|| size_on_record(&volume.document()), |slot| slot.device().size())
        };
        let bytes =
            theirs.iter().fold(u128::from(request.size.get()), |sum, volume| sum + u128::from(size(volume).get()));
        if config.incoming_gib_max > 0 && bytes > u128::from(config.incoming_gib_max) << 30 {
            return refuse(format!("{} GiB", config.incoming_gib_max), "incoming-gib-max");
        }
        Ok(())
    }

    async fn make_noted_arrival(
        &self,
        host: &str,
        request: &SessionRequest,
        (spec, noted): (BackendSpec, Option<&InTheMaking>),
    ) -> Result<Arc<Volume>> {
        let name = &request.volume;
        let target = TargetRequest {
            spec: &spec,
            source: None,
            size: request.size,
            guest_alignment: request.request_alignment,
            overwrite: false,
        };
        let target = self.backends.prepare(&target, &*self.env).await.map_err(|error| of_target(&error))?;
        if let Some(noted) = noted {
            self.note_made_file(noted, &target);
        }
        let document = VolumeDocument {
            version: DOCUMENT_VERSION,
            name: name.clone(),
            // It holds nothing yet.
            epoch: 0,
            backend: Location::Local(spec),
            export: format!("nbd+unix:///{name}?socket={}", self.socket_dir.join(format!("{name}.sock")).display()),
            socket_owner: None,
            read_only: false,
            size_limit: None,
            adoption: None,
            job: None,
            arrival: Some(ArrivalDocument {
                host: host.to_owned(),
                origin: request.origin.clone(),
                job: request.job,
                epoch: request.epoch,
                size: request.size.get(),
                request_alignment: request.request_alignment,
                target: target.clone(),
                stage: ArrivalStage::Filling,
                exclusive: false,
            }),
        };
        match self.record_arrival(document).await {
            Ok(volume) => {
                let what = serde_json::json!({ "host": host, "origin": request.origin, "job": request.job });
                self.note(&Peer::daemon(), ("arrival.begin", name), what, None);
                Ok(volume)
            }
            Err(error) => {
                self.state.abandon_volume(name);
                if let Err(error) = self.backends.discard(&target) {
                    tracing::warn!(%error, "what a volume that did not arrive left could not be removed");
                }
                Err(error)
            }
        }
    }

    async fn record_arrival(&self, document: VolumeDocument) -> Result<Arc<Volume>> {
        let name = document.name.clone();
        let directory = self.state.begin_volume(&name, Journal::<VolumeDocument>::bytes_needed())?;
        let journal = VolumeJournal::create(&directory.join("journal"), document, &self.backends, &*self.env).await;
        let journal = journal.map_err(|error| of_backend(&error, "the new volume's journal"))?;
        let volume = Arc::new(Volume::new(&name, journal, Arc::clone(&self.env)));
        self.hold_arrival(&volume).await?;
        self.state.finish_volume(&name)?;
        self.admit(Arc::clone(&volume));
        Ok(volume)
    }

    /// Locks what a volume that arrives is written to.
    pub(crate) async fn hold_arrival(&self, volume: &Volume) -> Result<()> {
        let document = volume.document();
        let hold = HoldOptions { lock_wait: self.config.lock_wait(), ..HoldOptions::default() };
        let held = match &document.arrival {
            Some(arrival) => {
                self.hold_prepared(volume, &JobTarget::Local(arrival.target.clone()), &hold.for_target()).await
            }
            None => self.hold(volume, &document.backend, &hold.for_target()).await,
        };
        let held = held.map_err(|error| of_backend(&error, "the backend"))?;
        *volume.incoming.lock() = Some(Incoming::new(held));
        Ok(())
    }

    /// Where a volume of that name is put: in the first directory that the configuration gives.
    fn place_for_arrival(&self, name: &str) -> Result<BackendSpec> {
        let Some(directory) = self.config.hosts.as_ref().and_then(|hosts| hosts.incoming_dirs.first()) else {
            let message = "this host takes no volumes of others".to_owned();
            return Err(Error::new(ErrorCode::HostRefused, message)
                .with_hint("give its configuration `incoming-dirs` in the section [hosts]"));
        };
        Ok(BackendSpec::file(directory.join(format!("{name}.raw"))))
    }

    /// Is durably ready to hold the volume under `epoch`.
    pub(super) async fn prepare_arrival(&self, host: &str, request: &SessionRequest, epoch: u64) -> Result<()> {
        let volume = self.volume(&request.volume)?;
        let _operation = volume.operation.lock().await;
        let arrival = arrival_of(&volume, host, request)?;
        match arrival.stage {
            ArrivalStage::Prepared { epoch: prepared } if prepared == epoch => Ok(()),
            ArrivalStage::Filling | ArrivalStage::Prepared { .. } if epoch > arrival.epoch => {
                self.backends.check(&arrival.target).map_err(|error| of_target(&error))?;
                set_stage(&volume, ArrivalStage::Prepared { epoch }).await
            }
            _ => Err(fenced(format!("{} cannot be prepared for epoch {epoch} here", volume.name))),
        }
    }

    /// Holds the volume under `epoch`, durably, and serves it.
    pub(super) async fn take_arrival(&self, volume: &Arc<Volume>, arrival: &ArrivalDocument, epoch: u64) -> Result<()> {
        may_take(&volume.name, arrival, epoch)?;
        if let ArrivalStage::Held { .. } = arrival.stage {
            return Ok(());
        }
        // Nothing of the copy lands from here on.
        close_entrance(volume).await;
        let device = volume.incoming.lock().as_ref().map(|incoming| incoming.held.device.clone());
        let Some(device) = device else { return volume.require_up().map(drop) };
        // The guest does not end with this host's power: what it was answered must be there when that comes back.
        device.flush().await.map_err(|error| of_backend(&error, "the volume's backend"))?;
        let stored = volume.journal.update(|document| {
            document.epoch = epoch;
            if let Some(arrival) = &mut document.arrival {
                // Its guest comes through the other host. Whoever came to an export here would write beside that.
                (arrival.stage, arrival.exclusive) = (ArrivalStage::Held { epoch }, true);
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        let Some(Incoming { held, .. }) = volume.incoming.lock().take() else { return Ok(()) };
        drop(volume.bring_up(held, self.pool.clone()));
        let what = serde_json::json!({ "host": arrival.host, "epoch": epoch });
        self.note(&Peer::daemon(), ("arrival.take", &volume.name), what, None);
        Ok(())
    }

    /// The guest of the host that a volume came from uses it no more: it is this host's like any other.
    pub(super) async fn release_arrival(&self, volume: &Arc<Volume>) -> Result<()> {
        let before = volume.forward.lock().take();
        if let Some(before) = before {
            before.close().await;
        }
        let stored = volume.journal.update(|document| document.arrival = None);
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        self.note(&Peer::daemon(), ("arrival.release", &volume.name), serde_json::json!({}), None);
        self.open_export(volume).await
    }

    /// Somebody has decided that a volume which is held here for another host's guest may be used here.
    pub(super) async fn open_to_others(&self, volume: &Arc<Volume>) -> Result<()> {
        set_exclusive(volume, false).await?;
        self.open_export(volume).await
    }

    async fn open_export(&self, volume: &Volume) -> Result<()> {
        match volume.export() {
            Some(export) => self.network.offer(&volume.uri()?, export, volume.document().clients()).await,
            None => Ok(()),
        }
    }

    /// The guest of the host that a volume came from comes to it: nobody else does any more.
    async fn close_to_others(&self, volume: &Volume, arrival: &ArrivalDocument) -> Result<()> {
        if arrival.exclusive {
            return Ok(());
        }
        let uri = volume.uri()?;
        self.network.withdraw(&uri).await;
        let connections = volume.connections();
        if connections > 0 {
            self.open_export(volume).await?;
            let message = format!("{} is used at its new host, by {connections} connections there", volume.name);
            return Err(Error::new(ErrorCode::InUse, message)
                .with_hint("let those disconnect: the guest at this host waits until then"));
        }
        set_exclusive(volume, true).await
    }

    /// Forgets a volume that does not arrive, and removes what there is of it.
    pub(crate) async fn drop_arrival(&self, volume: &Arc<Volume>) -> Result<()> {
        let Some(arrival) = volume.document().arrival.clone() else { return Ok(()) };
        if let ArrivalStage::Held { epoch } = arrival.stage {
            let message = format!("this host holds {} under epoch {epoch}", volume.name);
            return Err(fenced(message));
        }
        close_entrance(volume).await;
        drop(volume.incoming.lock().take());
        self.backends.discard(&arrival.target).map_err(|error| of_target(&error))?;
        self.remove_volume(volume).await?;
        let what = serde_json::json!({ "host": arrival.host, "job": arrival.job });
        self.note(&Peer::daemon(), ("arrival.drop", &volume.name), what, None);
        Ok(())
    }

    /// Where the volume of a request stands here.
    ///
    /// # Errors
    /// There is one of that name, and its journal cannot be read: nobody knows.
    pub(super) fn standing(&self, request: &SessionRequest) -> Result<Standing> {
        let Some(volume) = self.volume_if_any(&request.volume)? else {
            // Of a move that was undone nothing was given up, also when the volume was detached since.
            let was_kept = self.has_undone(request.job);
            return Ok(if was_kept { Standing::Held { epoch: ASKING_EPOCH } } else { Standing::Without });
        };
        let document = volume.document();
        Ok(match (document.arrival.as_ref().map(|arrival| arrival.stage), &document.backend) {
            (Some(ArrivalStage::Filling), _) => Standing::Filling,
            (Some(ArrivalStage::Prepared { epoch }), _) => Standing::Prepared { epoch },
            // What was given up by another move than the one that is asked about is somebody else's.
            (_, Location::Remote(remote)) if remote.job == request.job => Standing::Without,
            _ => Standing::Held { epoch: document.epoch },
        })
    }

    /// A way for a session of `host` that uses a volume which this host holds, or takes by this.
    pub(super) async fn open_forward(&self, host: &str, request: &SessionRequest) -> Result<Device> {
        let volume = self.volume(&request.volume)?;
        let _operation = volume.operation.lock().await;
        let arrival = arrival_of(&volume, host, request)?;
        self.take_arrival(&volume, &arrival, request.epoch).await?;
        self.close_to_others(&volume, &arrival_of(&volume, host, request)?).await?;
        let before = volume.forward.lock().take();
        if let Some(before) = before {
            before.close().await;
        }
        let slot = volume.require_up()?;
        let (entrance, device) = Entrance::open(volume.metered(&slot));
        *volume.forward.lock() = Some(entrance);
        Ok(device)
    }
}

/// What is on record of a volume that `host` moves here by the job of `request`.
pub(super) fn arrival_of(volume: &Volume, host: &str, request: &SessionRequest) -> Result<ArrivalDocument> {
    let document = volume.document();
    let Some(arrival) = &document.arrival else {
        return Err(Error::new(ErrorCode::AlreadyExists, format!("there is a volume {} already", volume.name))
            .with_hint("move it under another name: --to HOST:VOLUME"));
    };
    if arrival.host == host && arrival.job == request.job {
        return Ok(arrival.clone());
    }
    let (code, what) = match arrival.stage {
        ArrivalStage::Held { .. } => (ErrorCode::AlreadyExists, "has come"),
        ArrivalStage::Filling | ArrivalStage::Prepared { .. } => (ErrorCode::Busy, "is coming"),
    };
    let message = format!("a volume {} {what} from {} already, as {} there", volume.name, arrival.host, arrival.origin);
    Err(Error::new(code, message).with_hint("move it under another name: --to HOST:VOLUME"))
}

/// Whether what is on record of a volume lets a session fill it.
fn may_fill(name: &str, arrival: &ArrivalDocument, request: &SessionRequest) -> Result<()> {
    match arrival.stage {
        ArrivalStage::Held { epoch } => {
            Err(fenced(format!("this host holds {name} under epoch {epoch}: it is filled no more")))
        }
        _ if arrival.epoch != request.epoch => {
            Err(fenced(format!("{name} comes under epoch {}, not {}", arrival.epoch, request.epoch)))
        }
        _ if arrival.size != request.size.get() => {
            let message = format!("{name} has {} bytes here, not {}", arrival.size, request.size.get());
            Err(invalid(message, "cancel that move and begin another"))
        }
        ArrivalStage::Prepared { .. } | ArrivalStage::Filling => Ok(()),
    }
}

/// Whether it lets this host hold the volume under `epoch`, if it does not already.
fn may_take(name: &str, arrival: &ArrivalDocument, epoch: u64) -> Result<()> {
    match arrival.stage {
        ArrivalStage::Held { epoch: ready } | ArrivalStage::Prepared { epoch: ready } if ready == epoch => Ok(()),
        _ => Err(fenced(format!("{name} was not prepared for epoch {epoch}"))),
    }
}

/// Lets nothing through any more of the session that fills the volume.
async fn close_entrance(volume: &Volume) {
    let entrance = volume.incoming.lock().as_mut().and_then(|incoming| incoming.entrance.take());
    if let Some(entrance) = entrance {
        entrance.close().await;
    }
}

async fn set_exclusive(volume: &Volume, exclusive: bool) -> Result<()> {
    let stored = volume.journal.update(|document| {
        if let Some(arrival) = &mut document.arrival {
            arrival.exclusive = exclusive;
        }
    });
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
}

async fn set_stage(volume: &Volume, stage: ArrivalStage) -> Result<()> {
    let stored = volume.journal.update(|document| {
        if let Some(arrival) = &mut document.arrival {
            arrival.stage = stage;
        }
    });
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
}

/// Somebody else holds the volume, or under another epoch.
pub(super) fn fenced(message: String) -> Error {
    Error::new(ErrorCode::WrongState, message).with_hint("`transhume resolve` says what both hosts have on record")
}

/// The bytes that a document's volume has, while it is not up.
pub(crate) fn size_on_record(document: &VolumeDocument) -> Bytes {
    match (&document.backend, &document.arrival) {
        (Location::Remote(remote), _) => Bytes(remote.size),
        (Location::Foreign(export), _) => Bytes(export.size),
        (Location::Local(_), Some(arrival)) => Bytes(arrival.size),
        (Location::Local(_), None) => Bytes::ZERO,
    }
}
