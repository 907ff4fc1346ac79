//! Moves from here to another host: what is looked at beforehand, and how a lost host is brought back.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, MoveRequest};
use block::ErrorKind;
use migrate::stream::{Ask, StreamOptions, VolumeStatus};
use migrate::{Control, MoveOptions, Phase, Strategy};

use super::commit::forget_ruling;
use super::remote_volume_device::{Found, NoteTaken, RemoteVolumeDevice};
use super::session_authorizer::of_wire;
use crate::daemon::Daemon;
use crate::document::{JobDocument, VolumeDocument, random_uuid};
use crate::hosts::HostName;
use crate::jobs::{JobHandle, record_of};
use crate::journal::VolumeJournal;
use crate::location::{JobTarget, RemoteVolume};
use crate::open_backend::OpenBackend;
use crate::problem::{Result, invalid, of_backend};
use crate::stack::carried;
use crate::volume::Volume;

impl Daemon {
    /// The place on another host that a volume is to go to.
    ///
    /// # Errors
    /// What keeps it from going there, as far as it is known here. The other host is not asked.
    pub(crate) fn remote_target(
        &self,
        volume: &Volume,
        (host, name): (String, String),
        options: &MoveOptions,
        request: &MoveRequest,
    ) -> Result<RemoteVolume> {
        drop(self.hosts.dialer(&HostName::new(&host)?)?);
        let refuse = |what: &str, hint: &str| Err(invalid(format!("{}: {what}", volume.name), hint));
        if volume.document().read_only {
            return refuse("it is served read-only", "attach it without --read-only first");
        }
        if options.strategy == Strategy::Snapshot {
            return refuse("a snapshot move keeps overlays beside source and target", "leave --strategy out");
        }
        if request.overwrite {
            return refuse("nothing is overwritten on another host", "leave --overwrite out");
        }
        // A container goes with all the room that it may grow into: what it does not take yet is a hole there.
        let geometry = volume.require_up()?.device().geometry();
        let size = geometry.size;
        let document = volume.document();
        let parts = volume.with_backend(|open_backend| open_backend.parts()).unwrap_or_default();
        let target = RemoteVolume {
            host,
            volume: name,
            job: random_uuid(&*self.env),
            size: size.get(),
            request_alignment: geometry.request_alignment,
            layers: carried(&document.layers, &parts),
            shared: request.shared,
        };
        let has_only_cache = matches!(&document.layers[..], [layer] if layer.cache().is_some());
        if request.shared && !document.layers.is_empty() && !has_only_cache {
            return refuse("it has layers, which are not on the storage that both hosts reach", "remove them first");
        }
        if !document.has_holding_layers() {
            return Ok(target);
        }
        // What is copied is what lies below all layers.
        let ground = volume.with_backend(|open_backend| open_backend.ground()).expect("it is up");
        let geometry = ground.map_err(|error| of_backend(&error, "the volume"))?.geometry();
        Ok(RemoteVolume { size: geometry.size.get(), request_alignment: geometry.request_alignment, ..target })
    }

    /// Why the other host would refuse a volume now.
    pub(crate) async fn remote_refusal(&self, target: &RemoteVolume, name: &str) -> Option<Error> {
        match self.ask_host(target, Ask::Offer).await {
            Ok(_) => return None,
            // It is of an older version, and says less.
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            Err(error) => return Some(of_wire(&error, &target.host)),
        }
        match self.ask_volume_status(target).await {
            Ok(VolumeStatus::Without) => None,
            Ok(_) => Some(
                Error::new(
                    ErrorCode::TargetExists,
                    format!("{}: there is a volume {} already", target.host, target.volume),
                )
                .with_hint(format!("move it under another name: --to {}:{name}-2", target.host)),
            ),
            Err(error) => Some(of_wire(&error, &target.host)),
        }
    }

    /// What reaches a volume of another host. It has no session yet.
    pub(crate) fn remote_device(self: &Arc<Self>, volume: &Volume, remote: &RemoteVolume) -> Arc<RemoteVolumeDevice> {
        let rest_max = self.config.hosts.as_ref().map_or(2, |hosts| hosts.resume_interval_seconds);
        let remote_device = RemoteVolumeDevice::new(
            &self.env,
            &self.hosts,
            (remote, &volume.name),
            self.stream_options(remote),
            Duration::from_secs(rest_max),
        );
        let (daemon, name) = (Arc::downgrade(self), volume.name.clone());
        let place = remote.clone();
        let refuses = move |is_told_again| {
            let daemon = daemon.upgrade()?;
            if daemon.has_aborted(&place) {
                return Some("it is being given back to this host: decide that once more to finish it".to_owned());
            }
            let volume = daemon.volume(&name).ok().filter(|_| is_told_again)?;
            daemon.refuse_beside(&volume).err().map(|error| error.to_string())
        };
        let note_taken = self.note_taken(&volume.journal, remote.job);
        let keeping = Arc::clone(&remote_device).keep(note_taken, Box::new(refuses));
        self.env.spawn(Box::pin(keeping));
        remote_device
    }

    /// Notes in the volume's journal that the other host has answered that it holds the volume.
    fn note_taken(&self, journal: &Arc<VolumeJournal>, job: uuid::Uuid) -> NoteTaken {
        let (journal, hosts, env) = (Arc::clone(journal), Arc::clone(&self.hosts), Arc::clone(&self.env));
        Box::new(move || {
            let (journal, hosts, env) = (Arc::clone(&journal), Arc::clone(&hosts), Arc::clone(&env));
            Box::pin(async move {
                let document = journal.document();
                if document.given_up().is_none() {
                    return Ok(());
                }
                let taken = |job: &mut JobDocument| _ = job.committed.as_mut().map(|committed| committed.taken = true);
                journal.update_job(taken).await?;
                // The ruling on a group is for all its volumes, which may not have been taken yet.
                if record_of(&document).is_none() {
                    // The guest does not wait for this.
                    env.spawn(Box::pin(async move { forget_ruling(&*hosts, job).await }));
                }
                Ok(())
            })
        })
    }

    pub(super) fn stream_options(&self, remote: &RemoteVolume) -> StreamOptions {
        let hosts = self.config.hosts.clone().unwrap_or_default();
        let pairs = || self.dialer_of(remote).map_or(1, |dialer| dialer.pairs());
        let options = match hosts.streams {
            0 => StreamOptions::for_machine(self.config.worker_count(), pairs()),
            streams => StreamOptions { streams, ..StreamOptions::default() },
        };
        StreamOptions {
            compression: hosts.compression.into(),
            // The remote volume device brings a lost host back, and writes again what was not flushed.
            reconnect_limit: Duration::ZERO,
            workers: self.hosts.stream_workers(),
            ..options
        }
    }

    /// Opens the session of a move that has waited in the queue, or that a restart has found there. It does so only if
    /// the session was lost or never existed, and as soon as the other host answers.
    ///
    /// # Errors
    /// It answers that it will not have the volume.
    pub(crate) async fn wait_for_host(&self, volume: &Volume, target: &OpenBackend) -> block::Result<()> {
        let Some(remote_device) = target.remote_device() else { return Ok(()) };
        let began = self.env.now();
        while !remote_device.is_connected() {
            match remote_device.connect(volume.document().epoch).await {
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::Disconnected | ErrorKind::TimedOut) => {
                    tracing::info!(volume = volume.name, error = error.chain(), "a move waits for its target's host");
                    remote_device.rest(remote_device.rest_since(began)).await;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// A migration has lost its target on another host. The session is opened again. The migration goes on with what
    /// the other host has flushed, or is undone. The guest works on the source meanwhile.
    pub(crate) async fn bring_host_back(
        &self,
        volume: &Volume,
        job: &JobHandle,
        control: &Control,
        remote_device: &Arc<RemoteVolumeDevice>,
    ) {
        let host = &remote_device.place().host;
        let limit = self.config.hosts.as_ref().map_or(0, |hosts| hosts.resume_limit_seconds);
        let began = self.env.now();
        let mut was_tried = false;
        while control.snapshot().phase == Phase::TargetLost {
            let is_late = limit > 0 && self.env.now().since(began) > Duration::from_secs(limit);
            if job.is_paused() || (is_late && was_tried) {
                // Somebody must say so.
                remote_device.rest(Duration::from_secs(1)).await;
                if job.is_paused() || !remote_device.was_kicked() {
                    continue;
                }
            }
            match remote_device.connect(volume.document().epoch).await {
                Ok(Found::Earlier) => {
                    job.retry_target(remote_device.unverified());
                    return;
                }
                Ok(Found::Nothing) => {
                    let message = format!("{host} has nothing any more of what was copied there");
                    job.fail(
                        Error::new(ErrorCode::MoveFailed, message)
                            .with_hint("see who removed it there, and move it again"),
                    );
                    return;
                }
                Err(error) if is_final(&error) => {
                    job.fail(of_wire(&error, host));
                    return;
                }
                Err(error) => {
                    tracing::info!(job = job.id, error = error.chain(), "the target's host is not reached");
                    remote_device.rest(remote_device.rest_since(began)).await;
                    was_tried = true;
                }
            }
        }
    }
}

/// Whether asking again would give the same answer.
fn is_final(error: &block::Error) -> bool {
    matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Busy | ErrorKind::Invalid)
}

/// The volume that a job goes to on another host.
pub(super) fn remote_of(document: &VolumeDocument) -> Option<&RemoteVolume> {
    match &document.job.as_ref()?.target {
        JobTarget::Remote(remote) => Some(remote),
        JobTarget::Local(_) | JobTarget::Foreign(_) => None,
    }
}
