//! Places for volumes that other hosts move here: whether one may come, where it is put, and what is on record of it first.

use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use backends::{BackendSpec, TargetRequest};
use block::Bytes;
use filters::layout;
use migrate::Journal;
use migrate::stream::SessionRequest;
use migrate::stream::protocol::PART_ALIGNMENT;

use super::incoming::{fenced, size_on_record};
use super::pending_files::PendingFile;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::{DOCUMENT_VERSION, IncomingDocument, IncomingStage, LayerDocument, VolumeDocument, random_uuid};
use crate::journal::VolumeJournal;
use crate::location::{JobTarget, Location};
use crate::places::{Use, User};
use crate::problem::{Result, invalid, of_backend, of_target};
use crate::stack::{ArrivingCache, SNAPSHOTS_MAX, free_number, layers_of, make_layer_files, note_layer_files};
use crate::state_dir::check_name;
use crate::volume::Volume;

/// Where a volume is to be that comes.
pub(super) enum ArrivalPlace {
    /// A file that is made for it.
    Made(BackendSpec),
    /// Where it is already, on storage that both hosts reach.
    Shared {
        place: Location,
        /// It is a container that grows.
        grows: bool,
        /// The cache that it is to have here.
        cache: Option<Box<ArrivingCache>>,
    },
}

impl Daemon {
    /// Makes a place for a volume of `host`, durably.
    pub(super) async fn make_incoming(self: &Arc<Self>, host: &str, request: &SessionRequest) -> Result<Arc<Volume>> {
        let name = &request.volume;
        let _membership = self.membership.lock().await;
        let place = self.may_arrive(host, request)?;
        if self.volume(name).is_ok() {
            return Err(Error::new(ErrorCode::AlreadyExists, format!("there is a volume {name} already")));
        }
        let spec = match place {
            ArrivalPlace::Made(spec) => spec,
            ArrivalPlace::Shared { place, grows, cache } => {
                return Box::pin(self.make_shared_incoming(host, request, (place, grows, cache))).await;
            }
        };
        let noted = self.note_pending_file(name, &spec).await?;
        let made = Box::pin(self.make_noted_incoming(host, request, (spec, noted.as_ref()))).await;
        if let Some(noted) = noted {
            self.made(&noted);
        }
        made
    }

    /// Where a volume of `host` that is not here is to be, if it may come.
    pub(super) fn may_arrive(&self, host: &str, request: &SessionRequest) -> Result<ArrivalPlace> {
        check_name(&request.volume)?;
        if self.aborted_jobs.has(request.job) {
            return Err(fenced(format!("the move of {} was undone", request.volume)));
        }
        if let Some((place, grows, cache)) = self.shared_place_of(host, &request.volume) {
            return Ok(ArrivalPlace::Shared { place, grows, cache: cache.map(Box::new) });
        }
        if request.stays {
            // Its machine was forgotten since: a place of its own would be another disk.
            return Err(fenced(format!("no VM comes here any more with {}", request.volume)));
        }
        self.check_quota(request)?;
        self.place_for_incoming(&request.volume).map(ArrivalPlace::Made)
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

    async fn make_noted_incoming(
        self: &Arc<Self>,
        host: &str,
        request: &SessionRequest,
        (spec, noted): (BackendSpec, Option<&PendingFile>),
    ) -> Result<Arc<Volume>> {
        let name = &request.volume;
        let parts = parts_of(request)?;
        let target = TargetRequest {
            spec: &spec,
            source: None,
            size: parts[0],
            guest_alignment: request.request_alignment,
            overwrite: false,
        };
        let _place = self.take_place(spec.path(), User::Volume(name.clone()), Use::Kept).await?;
        let target = self.backends.prepare(&target, &*self.env).await.map_err(|error| of_target(&error))?;
        if let Some(noted) = noted {
            self.note_made_file(noted, &target);
        }
        let layers = match self.make_incoming_layers(request, &parts[1..], spec.path()).await {
            Ok(layers) => layers,
            Err(error) => {
                self.discard_unused(&JobTarget::Local(target), &[]).await;
                return Err(error);
            }
        };
        let mut document = self.arriving_document(host, request, Location::Local(spec));
        if let Some(incoming) = &mut document.incoming {
            (incoming.target, incoming.layers) = (Some(target.clone()), layers.clone());
        }
        match Box::pin(self.begin_arrival(host, request, document)).await {
            Ok(volume) => Ok(volume),
            Err(error) => {
                self.state.abandon_volume(name);
                self.discard_unused(&JobTarget::Local(target), &layers).await;
                Err(error)
            }
        }
    }

    /// A volume of `host` that stays where both hosts reach it: nothing is made here but its journal.
    async fn make_shared_incoming(
        self: &Arc<Self>,
        host: &str,
        request: &SessionRequest,
        (place, grows, cache): (Location, bool, Option<Box<ArrivingCache>>),
    ) -> Result<Arc<Volume>> {
        if request.layers.is_some() {
            return Err(invalid("layers do not come with shared storage", "this is a defect of the other host"));
        }
        let mut document = self.arriving_document(host, request, place);
        document.size_advertised = grows.then_some(request.size.get());
        let mut part = None;
        if let Some(cache) = cache {
            // Under the epoch in which it is held here.
            let layer = self.take_arriving_cache(&request.volume, request.epoch + 1, &cache)?;
            part = Some(layer.id);
            // What its part of the cache is believed under.
            document.id = Some(random_uuid(&*self.env));
            document.incoming.as_mut().into_iter().for_each(|incoming| incoming.layers = vec![layer.clone()]);
        }
        let made = Box::pin(self.begin_arrival(host, request, document)).await;
        made.inspect_err(|_| {
            self.state.abandon_volume(&request.volume);
            part.into_iter().for_each(|part| self.caches.give_back(part));
        })
    }

    /// What is on record of a volume that begins to come, without a target of its own.
    fn arriving_document(&self, host: &str, request: &SessionRequest, backend: Location) -> VolumeDocument {
        let name = &request.volume;
        VolumeDocument {
            version: DOCUMENT_VERSION,
            name: name.clone(),
            // It holds nothing yet.
            epoch: 0,
            backend,
            image: None,
            export: format!("nbd+unix:///{name}?socket={}", self.socket_dir.join(format!("{name}.sock")).display()),
            socket_owner: None,
            client: None,
            read_only: false,
            size_limit: None,
            size_advertised: None,
            has_lost: false,
            adoption: None,
            job: None,
            incoming: Some(IncomingDocument {
                host: host.to_owned(),
                origin: request.origin.clone(),
                job: request.job,
                epoch: request.epoch,
                size: request.size.get(),
                request_alignment: request.request_alignment,
                target: None,
                stage: IncomingStage::Filling,
                exclusive: false,
                undone: false,
                machine: None,
                layers: Vec::new(),
            }),
            came_with: None,
            opened: None,
            id: None,
            layers: Vec::new(),
            layers_generation: 0,
            sector: Some(request.request_alignment),
            accepted_tombstone: None,
        }
    }

    async fn begin_arrival(
        self: &Arc<Self>,
        host: &str,
        request: &SessionRequest,
        document: VolumeDocument,
    ) -> Result<Arc<Volume>> {
        let volume = self.record_incoming(document).await?;
        let what = serde_json::json!({ "host": host, "origin": request.origin, "job": request.job });
        self.note(&Peer::daemon(), ("arrival.begin", &request.volume), what, None);
        Ok(volume)
    }

    /// Makes the files of the layers that come with a volume, beside `image`. When this fails none is left.
    async fn make_incoming_layers(
        &self,
        request: &SessionRequest,
        sizes: &[Bytes],
        image: &Path,
    ) -> Result<Vec<LayerDocument>> {
        let Some(carried) = &request.layers else { return Ok(Vec::new()) };
        let mut layers = layers_of(carried, free_number(&*self.backends, image, None)?);
        let made = make_layer_files(&layers, sizes, image, &self.overlay_context(), self.config.lock_wait()).await;
        made.map_err(|error| of_backend(&error, "a snapshot's file"))?;
        note_layer_files(&*self.backends, &mut layers, image);
        Ok(layers)
    }

    async fn record_incoming(self: &Arc<Self>, document: VolumeDocument) -> Result<Arc<Volume>> {
        let name = document.name.clone();
        let directory = self.state.begin_volume(&name, Journal::<VolumeDocument>::bytes_needed())?;
        let journal = VolumeJournal::create(&directory.join("journal"), document, &self.backends, &*self.env).await;
        let journal = journal.map_err(|error| of_backend(&error, "the new volume's journal"))?;
        let volume = Arc::new(Volume::new(&name, journal, Arc::clone(&self.env)));
        self.open_backend_of_incoming(&volume).await?;
        self.state.finish_volume(&name)?;
        self.admit(Arc::clone(&volume));
        Ok(volume)
    }

    /// Where a volume of that name is put: in the first directory that the configuration gives.
    fn place_for_incoming(&self, name: &str) -> Result<BackendSpec> {
        let Some(directory) = self.config.hosts.as_ref().and_then(|hosts| hosts.incoming_dirs.first()) else {
            let message = "this host takes no volumes of others".to_owned();
            return Err(Error::new(ErrorCode::HostRefused, message)
                .with_hint("give its configuration `incoming-dirs` in the section [hosts]"));
        };
        Ok(BackendSpec::file(directory.join(format!("{name}.raw"))))
    }
}

/// The size of each part of a volume that is to come, the backend's first.
fn parts_of(request: &SessionRequest) -> Result<Vec<Bytes>> {
    let Some(layers) = request.layers.as_ref().filter(|layers| layers.hold_bytes()) else {
        return Ok(vec![request.size]);
    };
    let sizes = layers.part_sizes();
    let end = layout(&sizes, PART_ALIGNMENT).last().map_or(Bytes::ZERO, |last| last.end());
    if sizes.len() > SNAPSHOTS_MAX + 1 || end != request.size {
        let message = format!("{} comes as {} parts of {end}, not {}", request.volume, sizes.len(), request.size);
        return Err(invalid(message, "this is a defect of the other host"));
    }
    Ok(sizes)
}
