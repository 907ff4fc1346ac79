//! A move is asked for: everything that can be wrong with it is found here, before anything counts.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode, Job, JobState, MoveRequest};
use backends::{BackendSpec, CacheMode, PreparedTarget, SourceIdentity, TargetError, TargetOrigin, TargetRequest};
use block::Bytes;
use migrate::{JobRecord, MoveOptions, Phase, Strategy};
use nbd::NbdUri;

use super::finish::strike;
use super::surrogate::refuse_standing_surrogate;
use super::{JobHandle, to_options};
use crate::adopt::cache_of;
use crate::audit::{Peer, unix_ms};
use crate::daemon::Daemon;
use crate::document::{GroupDocument, JobDocument, LayerDocument, VolumeDocument, random_uuid};
use crate::free_space::Needs;
use crate::last_life::is_target_disturbed;
use crate::location::{Destination, JobTarget, Location, require_here, require_local};
use crate::open_backend::{BackendOpenOptions, CLIENT_SECTOR, OpenBackend};
use crate::places::{TakenPlace, Use, User};
use crate::problem::{Result, invalid, of_backend, of_target};
use crate::remote::of_wire;
use crate::stack::{
    layers_elsewhere, make_layer_files, note_layer_files, refuse_draining, remove_layer_files, target_layers,
};
use crate::volume::Volume;

/// What a move to another host has on its way: what is read, what is sent, what is received, what is written.
const HOST_PATH_DEPTH: u32 = 4;
/// How often another host is asked to flush: what it was sent since is sent again when the way to it was cut.
const HOST_FLUSH_MS: u64 = 500;

impl Daemon {
    /// Starts or queues a move. When this returns an error, nothing was left behind.
    pub(crate) async fn start_move(self: &Arc<Self>, peer: &Peer, name: &str, request: MoveRequest) -> Result<Job> {
        self.start_tuned_move(peer, name, request, |_| ()).await
    }

    /// The same, with options that `tune` changes.
    pub(crate) async fn start_tuned_move(
        self: &Arc<Self>,
        peer: &Peer,
        name: &str,
        request: MoveRequest,
        tune: impl FnOnce(&mut MoveOptions) + Send,
    ) -> Result<Job> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        volume.require_up()?;
        let mut needs = Needs::default();
        let mut ready = self.make_ready(&volume, request, &mut needs).await?;
        tune(&mut ready.options);
        let (target, layers, _place) = (ready.target.clone(), ready.layers.clone(), ready.place.clone());
        let outcome = async {
            if ready.options.strategy == Strategy::Snapshot {
                needs.check()?;
            }
            let open_backend = self.open_target(&volume, &target, &layers).await?;
            let id = self.history.next_ids(1)?.start;
            self.enlist(peer, &volume, ready, (id, None), open_backend).await
        };
        match outcome.await {
            Ok(enlisted) => Ok(self.begin(enlisted)),
            Err(error) => {
                self.discard_unused(&target, &layers).await;
                Err(error)
            }
        }
    }

    /// The end of the move before is on record before the next one is: nothing would end it afterwards.
    async fn strike_last(&self, volume: &Volume) -> Result<()> {
        let Some(id) = volume.document().job.as_ref().map(|job| job.id) else { return Ok(()) };
        strike(self, volume, id).await.map_err(|error| of_backend(&error, "the volume's journal"))
    }

    /// Looks at everything that can be wrong with a move, makes its target ready, and adds to `needs` what it takes.
    pub(super) async fn make_ready(
        self: &Arc<Self>,
        volume: &Volume,
        request: MoveRequest,
        needs: &mut Needs,
    ) -> Result<Ready> {
        let slot = volume.require_up()?;
        refuse_second(volume)?;
        self.strike_last(volume).await?;
        Box::pin(self.require_inside(volume)).await?;
        self.check_persistence(volume, &request)?;
        let options = to_options(&request)?;
        refuse_reserve(&request, matches!(destination(volume, &request.to)?, Destination::Host { .. }))?;
        require_here(&volume.document().backend, "it cannot be moved from here")?;
        self.check_layers(volume, &request, options.strategy)?;
        self.check_surrogate(volume, &request, options.strategy)?;
        let (target, place) = match destination(volume, &request.to)? {
            Destination::Local(spec) => self.prepare(volume, spec, request.overwrite).await?,
            Destination::Host { host, volume: name } => {
                if !request.shared {
                    require_local(&volume.document().backend, "it cannot go to another host from there")?;
                }
                let target = self.remote_target(volume, (host, name), &options, &request)?;
                let options = MoveOptions { path_depth: HOST_PATH_DEPTH, flush_ms: HOST_FLUSH_MS, ..options };
                let document = volume.document();
                let layers = layers_elsewhere(&document.layers);
                return Ok(Ready { request, options, target: JobTarget::Remote(target), layers, place: None });
            }
            Destination::Foreign(uri) => {
                let target = self.make_foreign_ready(volume, &uri, request.overwrite, &options).await?;
                return Ok(Ready { request, options, target, layers: Vec::new(), place: None });
            }
        };
        let size = slot.device().size();
        let path = target.spec.path();
        let is_counted = match options.strategy {
            Strategy::Snapshot => crate::overlays::add_needs(&*self.backends, &volume.document(), size, path, needs),
            _ => {
                if let Ok(Some(room)) = self.backends.free_space(path) {
                    needs.add(path, room, size);
                }
                Ok(())
            }
        };
        let layers = is_counted.and_then(|()| target_layers(&*self.backends, &volume.document().layers, path));
        match layers {
            Ok(layers) => Ok(Ready { request, options, target: JobTarget::Local(target), layers, place: Some(place) }),
            Err(error) => {
                self.discard_unused(&JobTarget::Local(target), &[]).await;
                Err(error)
            }
        }
    }

    /// Looks whether an export of a server that is not ours can be the target.
    pub(super) async fn make_foreign_ready(
        &self,
        volume: &Volume,
        uri: &NbdUri,
        overwrite: bool,
        options: &MoveOptions,
    ) -> Result<JobTarget> {
        let target = self.prepare_foreign(volume, uri, overwrite).await?;
        if options.strategy == Strategy::Snapshot {
            crate::overlays::file_of(&Location::Foreign(target.clone()))?;
        }
        Ok(JobTarget::Foreign(target))
    }

    /// Makes the target ready and looks whether it suits the volume.
    pub(super) async fn prepare(
        &self,
        volume: &Volume,
        spec: BackendSpec,
        overwrite: bool,
    ) -> Result<(PreparedTarget, TakenPlace)> {
        let backend = volume.document().backend.clone();
        let request = self.target_request(volume, &spec, backend.local_path(), overwrite)?;
        let using = if overwrite { Use::Overwritten } else { Use::Kept };
        let place = self.take_place(spec.path(), User::Volume(volume.name.clone()), using).await?;
        let prepared = self.backends.prepare(&request, &*self.env).await.map_err(|error| of_target(&error))?;
        Ok((prepared, place))
    }

    /// Looks whether a target that is there and may be overwritten suits the volume, and leaves it as it is.
    pub(super) fn check_overwritten(&self, volume: &Volume, spec: &BackendSpec) -> Result<()> {
        let backend = volume.document().backend.clone();
        let request = self.target_request(volume, spec, backend.local_path(), true)?;
        self.backends.check_request(&request).map_err(|error| of_target(&error))
    }

    /// What is asked of the target of a move of the volume, which is in `source`.
    fn target_request<'a>(
        &self,
        volume: &Volume,
        spec: &'a BackendSpec,
        source: Option<&'a Path>,
        overwrite: bool,
    ) -> Result<TargetRequest<'a>> {
        let geometry = volume.require_up()?.device().geometry();
        let grows = volume.document().room_to_grow().is_some();
        let size = match source.filter(|_| grows) {
            // A container is as long as it is now; it grows as it is written.
            Some(source) => self.backends.size(source).unwrap_or(geometry.size),
            None => geometry.size,
        };
        Ok(TargetRequest { spec, source, size, guest_alignment: geometry.request_alignment, overwrite })
    }

    /// Takes back a target that no move on record goes to, with the files of `layers` over it. What another host has made is
    /// not meant: who has asked it to sees to that. Gives what is left, and why.
    pub(crate) async fn discard_unused(&self, target: &JobTarget, layers: &[LayerDocument]) -> Option<String> {
        let JobTarget::Local(target) = target else { return None };
        let left = |error: &TargetError| {
            tracing::warn!(%error, target = %target.spec, "what an undone move left is left as it is");
            format!("{} is left as it is: {error}", target.spec)
        };
        // The files of layers go after it: a start that finds the target, and not them, would wait for them.
        if let Err(error) = self.backends.discard(target, &*self.env).await {
            return Some(left(&error));
        }
        remove_layer_files(&*self.backends, layers, target.spec.path());
        // A block device stays as it is, and is not asked: it may not answer.
        if target.origin == TargetOrigin::BlockDevice {
            return None;
        }
        // What was not there cannot be taken back, and no record names it any more.
        let checked = self.backends.check(target);
        checked.err().filter(|error| matches!(error, TargetError::Away { .. })).as_ref().map(left)
    }

    /// What is left of the target of a job that this daemon has not opened, if another program has used it while no daemon ran: it is not
    /// taken back.
    pub(super) async fn left_to_others(&self, volume: &Volume) -> Option<String> {
        let document = volume.document();
        let job = document.job.as_ref()?;
        let path = job.target.local()?.spec.path();
        // Whoever does not answer has not said that it is ours.
        let looked = self.backends.image_state(path).await;
        let Ok(state) = looked else { return Some(format!("{} is left as it is: it does not answer", path.display())) };
        if job.disturbed {
            return Some(format!("{} is left as it is: another program has used it", path.display()));
        }
        let state = state?;
        let is_disturbed = !job.goes_on_disturbed && is_target_disturbed(&self.last_life, job, Some(state.times));
        let what = "another program has used it while no daemon ran";
        is_disturbed.then(|| format!("{} is left as it is: {what}", path.display()))
    }

    /// Takes back the target of a volume's job that nothing came of. Gives what is left, and why.
    pub(super) async fn discard_target(self: &Arc<Self>, volume: &Volume) -> Option<String> {
        let document = volume.document();
        let job = document.job.as_ref()?;
        match &job.target {
            JobTarget::Local(_) => return self.discard_unused(&job.target, &job.layers).await,
            JobTarget::Remote(remote) => self.notify_abort(remote).await,
            // What was written there is all that could be taken back, and nobody knows what it replaced.
            JobTarget::Foreign(_) => {}
        }
        None
    }

    /// Opens a target that nothing was written to yet, and makes the files of `layers` over it.
    pub(super) async fn open_target(
        self: &Arc<Self>,
        volume: &Volume,
        target: &JobTarget,
        layers: &[LayerDocument],
    ) -> Result<OpenBackend> {
        let open_options = BackendOpenOptions {
            size_limit: volume_size(volume),
            ..volume.open_options(self.config.lock_wait()).for_target()
        };
        let open_backend = Box::pin(self.open_prepared(volume, target, &[], &open_options)).await;
        let mut open_backend = open_backend.map_err(|error| of_backend(&error, "the target"))?;
        if let Some(image) = target.location().local_path() {
            let parts = volume.with_backend(|open_backend| open_backend.parts()).unwrap_or_default();
            let sizes: Vec<Bytes> = parts.iter().skip(1).map(block::Device::size).collect();
            let files = make_layer_files(layers, &sizes, image, &self.overlay_context(), self.config.lock_wait()).await;
            let files = files.map_err(|error| of_backend(&error, "a snapshot's file at the target"))?;
            files.into_iter().for_each(|file| open_backend.add_file(file));
        }
        Ok(open_backend)
    }

    /// Refuses a move that would leave the layers of a volume behind.
    pub(super) fn check_layers(&self, volume: &Volume, request: &MoveRequest, strategy: Strategy) -> Result<()> {
        let document = volume.document();
        let name = &volume.name;
        if let Some(incoming) = document.incoming.as_ref().filter(|incoming| !incoming.layers.is_empty()) {
            let message = format!("{name} has snapshots, and its guest goes through them at {}", incoming.host);
            let hint = format!("let that host go of it first: `transhume volume detach {}` there", incoming.origin);
            return Err(Error::new(ErrorCode::InUse, message).with_hint(hint));
        }
        refuse_cache(&document, request, strategy)?;
        refuse_draining(&document)?;
        refuse_standing_surrogate(&document, request, strategy)?;
        if !document.has_overlays() {
            return Ok(());
        }
        let refusal = match destination(volume, &request.to)? {
            _ if strategy == Strategy::Snapshot => "a snapshot move has overlays of its own: leave --strategy out",
            Destination::Local(spec) if self.backends.free_space(spec.path()).is_ok_and(|space| space.is_none()) => {
                "a block device has no place beside it for snapshots: move it to a file"
            }
            Destination::Local(_) | Destination::Host { .. } => return Ok(()),
            Destination::Foreign(_) => "an export of another server holds no snapshots: move it to a file",
        };
        let message = format!("{name} has snapshots, which would not come along");
        Err(invalid(message, format!("{refusal}, or remove them: `transhume volume snapshot ls {name}`")))
    }

    /// Puts a move that is ready durably on record.
    pub(super) async fn enlist(
        self: &Arc<Self>,
        peer: &Peer,
        volume: &Arc<Volume>,
        ready: Ready,
        (id, group): (u64, Option<GroupDocument>),
        open_backend: OpenBackend,
    ) -> Result<Enlisted> {
        let Ready { request, options, target, mut layers, place: _place } = ready;
        if let Some(image) = target.location().local_path() {
            note_layer_files(&*self.backends, &mut layers, image);
        }
        let size_limit = volume_size(volume);
        let started_unix_ms = unix_ms(self.env.wall_clock());
        let document = JobDocument {
            id,
            group,
            uuid: match &target {
                JobTarget::Local(_) | JobTarget::Foreign(_) => random_uuid(&*self.env),
                JobTarget::Remote(remote) => remote.job,
            },
            request,
            requester: peer.to_string(),
            record: JobRecord { phase: Phase::Preparing, options, sessions: 0, started_unix_ms },
            target,
            size: size_limit.map(Bytes::get),
            source_size: size_limit
                .and_then(|_| self.backends.size(volume.document().backend.local_path()?).ok())
                .map(Bytes::get),
            source_identity: served_source(volume).map(Box::new),
            begun_unix_ms: None,
            rested: None,
            paused: false,
            disturbed: false,
            goes_on_disturbed: false,
            left_unix_ms: None,
            left_target: None,
            target_was_in_use: false,
            overlays: Vec::new(),
            overlay_files: BTreeMap::new(),
            layers,
            asked: false,
            withdrawals: 0,
            abandoning: false,
            failure: None,
            prediction: None,
            committed: None,
        };
        let job = show(volume, &document);
        volume.journal.begin_job();
        let handle = Arc::new(JobHandle::new(job.clone(), false, &volume.journal));
        let stored = volume.journal.update(|volume| volume.job = Some(Box::new(document)));
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        volume.set_job(Some(Arc::clone(&handle)));
        // On record first: a daemon that dies here tells the other host to forget it.
        if let Some(remote_device) = open_backend.remote_device()
            && let Err(error) = remote_device.connect(volume.document().epoch).await
        {
            if remote_device.was_reached() {
                // It may have been asked, and have made a place for the volume before something failed.
                self.notify_abort_later(remote_device.place());
            }
            unlist(volume, &handle).await;
            return Err(of_wire(&error, &remote_device.place().host));
        }
        Ok(Enlisted { job, volume: Arc::clone(volume), handle, open_backend })
    }

    /// Lets a move that is on record run when it is its turn.
    pub(super) fn begin(self: &Arc<Self>, enlisted: Enlisted) -> Job {
        let Enlisted { job, volume, handle, open_backend } = enlisted;
        let daemon = Arc::clone(self);
        self.env.spawn(Box::pin(async move { super::run::run(daemon, volume, handle, open_backend, None).await }));
        job
    }
}

/// What the volume was put in, wherever its name leads by now.
fn served_source(volume: &Volume) -> Option<SourceIdentity> {
    let identity = volume.with_backend(|open_backend| open_backend.identity()).flatten()?;
    Some(match &volume.document().image {
        Some(image) => image.as_source(identity),
        None => identity,
    })
}

/// Takes a move that has not begun off the record.
async fn unlist(volume: &Volume, handle: &JobHandle) {
    let stored = volume.journal.update(|document| document.job = None);
    if let Err(error) = stored.await {
        tracing::error!(volume = volume.name, error = error.chain(), "the end of a move could not be stored");
    }
    volume.set_job(None);
    handle.announce_end();
}

/// A move with which nothing is wrong, and whose target is ready.
pub(super) struct Ready {
    request: MoveRequest,
    pub(super) options: MoveOptions,
    pub(super) target: JobTarget,
    /// Where its layers go.
    pub(super) layers: Vec<LayerDocument>,
    /// The target's place here, which is nobody else's before the move is on record, and until it is undone.
    pub(super) place: Option<TakenPlace>,
}

/// A move that is on record.
pub(super) struct Enlisted {
    pub(super) job: Job,
    pub(super) volume: Arc<Volume>,
    pub(super) handle: Arc<JobHandle>,
    pub(super) open_backend: OpenBackend,
}

/// How the API shows a job that its document tells of.
pub(crate) fn show(volume: &Volume, document: &JobDocument) -> Job {
    let source = match &document.committed {
        Some(committed) => committed.source.to_string(),
        None => volume.document().backend.to_string(),
    };
    Job {
        id: document.id,
        volume: volume.name.clone(),
        group: document.group.as_ref().map(|group| group.id),
        state: JobState::Queued,
        source,
        target: document.target.to_string(),
        request: document.request.clone(),
        requester: document.requester.clone(),
        started_unix_ms: document.record.started_unix_ms,
        finished_unix_ms: None,
        prediction: document.prediction.clone(),
        progress: None,
        guest: None,
        report: None,
        error: None,
    }
}

/// Refuses a reserve that cannot be had.
pub(super) fn refuse_reserve(request: &MoveRequest, goes_to_host: bool) -> Result<()> {
    let Some(reserve) = request.reserve.filter(|reserve| *reserve > 0) else { return Ok(()) };
    if !goes_to_host {
        let message = "a reserve is of the network to another host's daemon, and this move does not go to one";
        return Err(invalid(message, "leave --reserve out"));
    }
    refuse_reserve_above(reserve, request.bandwidth)
}

/// Refuses a reserve above what the move may take at most.
pub(crate) fn refuse_reserve_above(reserve: u64, bandwidth: Option<u64>) -> Result<()> {
    match bandwidth.filter(|bandwidth| *bandwidth > 0 && *bandwidth < reserve) {
        Some(bandwidth) => {
            let [reserve, bandwidth] = [reserve, bandwidth].map(Bytes);
            let message = format!("a reserve of {reserve}/s is more than the bandwidth of {bandwidth}/s");
            Err(invalid(message, "give a reserve that is no more than the bandwidth"))
        }
        None => Ok(()),
    }
}

/// How large the volume is and stays, unless it is a container that grows.
pub(crate) fn volume_size(volume: &Volume) -> Option<Bytes> {
    let grows = volume.document().room_to_grow().is_some();
    volume.slot().filter(|_| !grows).map(|slot| slot.device().size())
}

/// Where a volume is to go, as a user writes it. What is not said of the page cache follows from the volume.
pub(super) fn destination(volume: &Volume, text: &str) -> Result<Destination> {
    let adoption = &volume.document().adoption;
    let cache = match volume_size(volume) {
        Some(size) if !size.is_multiple_of(CLIENT_SECTOR.into()) => CacheMode::Page,
        _ => adoption.as_ref().map_or(CacheMode::Auto, |adoption| cache_of(&adoption.plan.disk)),
    };
    Destination::parse(text, cache, &volume.name)
}

fn refuse_second(volume: &Volume) -> Result<()> {
    let Some(job) = volume.job() else { return Ok(()) };
    let job = job.show();
    let message =
        format!("{} is being moved to {} already (job {}, {})", volume.name, job.target, job.id, job.state.name());
    let hint = format!("wait for it (`transhume watch {0}`), or `transhume cancel {0}` first", volume.name);
    Err(Error::new(ErrorCode::Busy, message).with_hint(hint))
}

/// Refuses a move in which the copy would not see what only the cache of the volume has.
fn refuse_cache(document: &VolumeDocument, request: &MoveRequest, strategy: Strategy) -> Result<()> {
    let Some((_, cache)) = document.cache_layer() else { return Ok(()) };
    refuse_draining(document)?;
    let (name, cache) = (&document.name, &cache.cache);
    let is_alone = document.layers.len() == 1;
    let why = if request.shared && is_alone {
        // It goes along with its VM.
        return Ok(());
    } else if request.shared {
        "it has other layers, too"
    } else if matches!(strategy, Strategy::Snapshot | Strategy::MirrorPaper) {
        "the strategy reads past it: use mirror, mirror-async, auto, dbt or incremental-dbt"
    } else if document.layers.iter().any(|layer| layer.overlay().is_some()) {
        "it lies under snapshots, which are copied from below it"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorCode::InUse, format!("{name} has the cache {cache}, and cannot be moved so: {why}"))
        .with_hint(format!("`transhume volume layer rm {name} cache` first, and add one where the volume is then")))
}
