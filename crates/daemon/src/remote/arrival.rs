//! Volumes that other hosts move here: made, filled, prepared, taken, or removed again.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use backends::{BackendSpec, TargetRequest};
use block::{Bytes, Device};
use migrate::Journal;
use migrate::stream::{SessionRequest, Standing};

use super::entrance::Entrance;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::{ArrivalDocument, ArrivalStage, DOCUMENT_VERSION, VolumeDocument};
use crate::held::{Held, HoldOptions};
use crate::jobs::of_target;
use crate::journal::VolumeJournal;
use crate::location::Location;
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
        let noted = self.note_making(name, &spec)?;
        let made = self.make_noted_arrival(host, request, spec).await;
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
        self.place_for_arrival(&request.volume)
    }

    async fn make_noted_arrival(&self, host: &str, request: &SessionRequest, spec: BackendSpec) -> Result<Arc<Volume>> {
        let name = &request.volume;
        let target = TargetRequest {
            spec: &spec,
            source: None,
            size: request.size,
            guest_alignment: request.request_alignment,
            overwrite: false,
        };
        let target = self.backends.prepare(&target, &*self.env).await.map_err(|error| of_target(&error))?;
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
        let held = self.hold(volume, &document.backend, &hold.for_target()).await;
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
                arrival.stage = ArrivalStage::Held { epoch };
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        let Some(Incoming { held, .. }) = volume.incoming.lock().take() else { return Ok(()) };
        let (_, export) = volume.bring_up(held, self.pool.clone());
        let what = serde_json::json!({ "host": arrival.host, "epoch": epoch });
        // The other host's guest goes on whether or not there is an export here.
        let offered = match volume.uri() {
            Ok(uri) => self.network.offer(&uri, export, None).await,
            Err(error) => Err(error),
        };
        self.note(&Peer::daemon(), ("arrival.take", &volume.name), what, offered.as_ref().err());
        if let Err(error) = offered {
            tracing::error!(volume = volume.name, %error, "a volume that has arrived has no export");
        }
        Ok(())
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
        let Some(volume) = self.volume_if_any(&request.volume)? else { return Ok(Standing::Without) };
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
