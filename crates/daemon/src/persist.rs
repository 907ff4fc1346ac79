//! Telling an adopted VM's configuration where its disk is now, so that nobody starts it on the stale one tomorrow.

use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor, MoveRequest};

use crate::adopt;
use crate::daemon::Daemon;
use crate::document::JobDocument;
use crate::problem::Result;
use crate::volume::Volume;

impl Daemon {
    /// Refuses a move of an adopted VM's disk that nobody would tell the VM's configuration of.
    pub(crate) fn check_persistence(&self, volume: &Volume, request: &MoveRequest) -> Result<()> {
        let document = volume.document();
        let Some(adoption) = &document.adoption else { return Ok(()) };
        let has_hook = request.persist_hook.is_some() || self.config.persist_hook.is_some();
        if has_hook || request.no_persist || matches!(adoption.monitor, Monitor::Libvirt(_)) {
            return Ok(());
        }
        let message =
            format!("nobody would tell the configuration of {}'s VM where the disk is after the move", volume.name);
        Err(Error::new(ErrorCode::PersistMissing, message).with_hint(
            "name a program with --persist-hook (or persist-hook in the daemon's configuration), or say --no-persist and \
             change the VM's configuration yourself",
        ))
    }

    /// Tells the configuration of an adopted VM the new place; gives a note for the report, if there is one.
    pub(crate) async fn persist(&self, volume: &Volume, job: &JobDocument) -> Result<Option<String>> {
        let document = volume.document();
        let Some(adoption) = &document.adoption else { return Ok(None) };
        let Some(committed) = &job.committed else { return Ok(None) };
        let places = (committed.source.local_path(), job.target.local().map(|target| target.spec.path()));
        let (Some(from), Some(to)) = places else {
            let note = "the VM's configuration was not told: it reaches its disk through this daemon".to_owned();
            return Ok(Some(note));
        };
        let (from, to) = (from.to_owned(), to.to_owned());
        let untold = |error: &Error, hint: String| {
            let (to, why) = (to.display(), &error.message);
            let message = format!("the volume is on {to}, but the VM's configuration was not told: {why}");
            Error::new(ErrorCode::PersistFailed, message).with_hint(hint)
        };
        if let Err(error) = self.require_uncovered(volume).await {
            return Err(untold(&error, error.hint.clone().unwrap_or_default()));
        }
        if job.request.no_persist {
            let note =
                format!("the VM's configuration was not told: change {} to {} there", from.display(), to.display());
            return Ok(Some(note));
        }
        let hook = job.request.persist_hook.clone().map(Into::into).or_else(|| self.config.persist_hook.clone());
        let how = match (hook, &adoption.monitor) {
            (Some(program), _) => vm::Persist::Script { program },
            (None, Monitor::Libvirt(domain)) => vm::Persist::Libvirt { domain: domain.clone() },
            (None, Monitor::Qmp(_)) => vm::Persist::No,
        };
        let disk = &adoption.plan.disk;
        let moved = vm::Moved {
            volume: volume.name.clone(),
            source: from.clone(),
            target_is_block_device: adopt::is_block_device(&to),
            target: to.clone(),
            format: adoption.format.clone(),
            node: disk.nodes.format.clone(),
            device: disk.device.clone(),
            process_id: disk.process_id,
        };
        let limit = Duration::from_secs(self.config.persist_hook_seconds);
        adopt::persist(&how, &moved, limit).await.map_err(|error| {
            untold(&error, format!("change {} to {} in the VM's configuration yourself", from.display(), to.display()))
        })
    }
}
