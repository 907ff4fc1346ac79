//! The old image of a volume that this host has given up to another one, until that has answered that it holds the volume.
//!
//! From the commit on nobody may start a VM on the old image, not even after a power failure and before this daemon runs. So it gets
//! the name of a retired source right after the commit, and not at the end of the job only. It is needed once more if a person gives the volume
//! back to this host: then it gets its old name first. A block device keeps its name and its bytes until the end of the job.

use std::sync::Arc;
use std::time::Duration;

use api::v1::Error;
use backends::{Retiring, TargetError};
use vm::QemuProcess;

use crate::daemon::Daemon;
use crate::document::{Committed, JobDocument};
use crate::location::{JobTarget, Location};
use crate::problem::of_target;
use crate::volume::Volume;

/// How often an image is tried again that a program has.
const REST: Duration = Duration::from_millis(50);
/// The same of one that cannot be renamed.
const REST_LONG: Duration = Duration::from_secs(2);

/// The image of a committed move to another host that held the volume here: left behind, or reached by both hosts.
fn old_image<'a>(name: &'a str, record: &'a JobDocument, committed: &'a Committed) -> Option<Retiring<'a>> {
    let Location::Local(spec) = &committed.source else { return None };
    let identity = record.source_identity.as_deref();
    matches!(record.target, JobTarget::Remote(_)).then(|| Retiring {
        path: spec.path(),
        identity,
        holder: None,
        epoch: committed.epoch,
        volume: Some(name),
    })
}

/// The same, if the move has left it behind.
pub(super) fn left_behind<'a>(
    name: &'a str,
    record: &'a JobDocument,
    committed: &'a Committed,
) -> Option<Retiring<'a>> {
    old_image(name, record, committed).filter(|_| !record.target.is_shared())
}

/// Puts the old image of `volume` out of the way. Tried again while a program has it, the QEMU that is being ended for one, and while its
/// folder does not let that be.
pub(super) async fn put_away(daemon: &Daemon, volume: &Volume) {
    let mut told = None;
    // Of one that is known no more a person may have the image elsewhere.
    while daemon.has(volume)
        && let Some(error) = daemon.try_to_put_away(volume).err()
    {
        let is_in_use = matches!(error, TargetError::InUse { .. });
        if told.replace(is_in_use) != Some(is_in_use) {
            match is_in_use {
                true => {
                    tracing::info!(volume = volume.name, %error, "the old image of a volume that was given up is in use")
                }
                false => {
                    tracing::warn!(volume = volume.name, %error, "the old image of a volume that was given up keeps its name");
                }
            }
        }
        daemon.env.sleep(if is_in_use { REST } else { REST_LONG }).await;
    }
}

impl Daemon {
    fn try_to_put_away(&self, volume: &Volume) -> Result<(), TargetError> {
        let document = volume.document();
        let Some(record) = document.job.as_deref() else { return Ok(()) };
        let Some(committed) = document.given_up() else { return Ok(()) };
        match left_behind(&volume.name, record, committed) {
            Some(source) => self.backends.put_away(&source, &self.layout.retired()),
            None => Ok(()),
        }
    }

    /// Puts the old image of a volume out of the way that was not given back after all.
    pub(crate) fn put_away_again(self: &Arc<Self>, volume: &Arc<Volume>) {
        let (daemon, volume) = (Arc::clone(self), Arc::clone(volume));
        self.env.spawn(Box::pin(async move { put_away(&daemon, &volume).await }));
    }

    /// The program that has the old image of a volume which this host has given up, in words. An image that keeps its name, as a block
    /// device or one that both hosts reach, is guarded by nothing but this look. `moved` is the QEMU that has moved.
    pub(crate) fn user_of_old_image(&self, volume: &Volume, moved: Option<&QemuProcess>) -> Option<String> {
        if let Err(error @ TargetError::InUse { .. }) = self.try_to_put_away(volume) {
            return Some(error.to_string());
        }
        let document = volume.document();
        let (record, committed) = (document.job.as_deref()?, document.given_up()?);
        let image = old_image(&volume.name, record, committed)?;
        let is_other = |pid: &u32| moved.is_none_or(|moved| moved.pid != *pid || !self.hypervisors.lives(moved));
        let writer = self.backends.writers_of(&image).into_iter().find(is_other)?;
        Some(format!("process {writer} writes to its old disk {}", image.path.display()))
    }

    /// Gives the old image of a volume its name again: a person has given the volume back to this host.
    pub(crate) fn bring_old_image_back(&self, volume: &Volume, committed: &Committed) -> Result<(), Error> {
        let document = volume.document();
        let source = document.job.as_deref().and_then(|record| left_behind(&volume.name, record, committed));
        source.map_or(Ok(()), |source| self.backends.bring_back(&source)).map_err(|error| of_target(&error))
    }
}
