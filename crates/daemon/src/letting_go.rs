//! How a volume leaves this daemon: nobody uses it, nothing here holds more than its backend, and the host that has its bytes hears of it.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode};

use crate::daemon::Daemon;
use crate::document::{IncomingDocument, IncomingStage, JobDocument, VolumeDocument};
use crate::location::Location;
use crate::problem::Result;
use crate::stack::require_complete_backend;
use crate::volume::Volume;

/// A volume whose layers are here and whose bytes are at another host is let go once that host has flushed, within this time.
const COMPLETE_LIMIT: Duration = Duration::from_secs(10);
/// How long clients that are gone may take to be, and how often that is looked at.
const GONE_LIMIT: Duration = Duration::from_secs(2);
const GONE_LOOK: Duration = Duration::from_millis(50);

impl Daemon {
    /// Stops serving a volume that nobody uses.
    pub(crate) async fn detach(self: &Arc<Self>, name: &str) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let document = volume.document();
        if document.adoption.is_some() {
            let message = format!("{name} is the disk of a running VM");
            return Err(Error::new(ErrorCode::InUse, message).with_hint(format!("use `transhume release {name}`")));
        }
        require_complete_backend(&document, "transhume volume detach")?;
        if document.job.as_deref().is_some_and(JobDocument::is_for_the_arbiter) {
            let message = format!("whether {name} was given up only the arbiter knows, and it has not said so yet");
            return Err(Error::new(ErrorCode::WrongState, message).with_hint(format!(
                "let this host reach the arbiter; `transhume resolve {name}` says what is on record"
            )));
        }
        if let Some(incoming) = &document.incoming {
            match incoming.stage {
                IncomingStage::Filling => {
                    let shown = volume.show();
                    self.require_held_there(&volume, incoming).await?;
                    self.drop_incoming(&volume).await?;
                    return Ok(shown);
                }
                // Nothing is here of it: an older record names a file that has gone on under another name.
                IncomingStage::Prepared { .. } if self.is_target_absent(incoming) => {}
                IncomingStage::Prepared { .. } => {
                    let message = format!("{name} comes from {}, which may have given it up already", incoming.host);
                    return Err(Error::new(ErrorCode::WrongState, message)
                        .with_hint(format!("`transhume resolve {name}` says what both hosts have on record")));
                }
                IncomingStage::Held { .. } if incoming.exclusive || volume.is_used_from_afar() => {
                    let message = format!("a guest of {} uses {name}, through that host's daemon", incoming.host);
                    return Err(Error::new(ErrorCode::InUse, message).with_hint(format!(
                        "`transhume volume detach {}` there first; if that host is gone for good, `transhume resolve {name} \
                         --take` here",
                        incoming.origin
                    )));
                }
                IncomingStage::Held { .. } => {}
            }
        }
        self.free_of_waiting(&volume).await;
        let shown = self.remove_volume(&volume).await?;
        self.let_go_elsewhere(&document).await;
        Ok(shown)
    }

    /// Clients that are gone count as connected as long as what they have asked for is not answered. While the host that holds the volume
    /// is not reached, or lets nobody from here in, nothing else answers it. Nobody was told that it was done.
    async fn free_of_waiting(&self, volume: &Volume) {
        let is_taken = volume.document().given_up().is_none();
        let Some(remote_device) = volume.remote_device().filter(|_| is_taken) else { return };
        let Some(question) = volume.export().map(|export| export.ask_life()) else { return };
        let began = self.env.now();
        self.env.sleep(GONE_LOOK).await;
        if !question.have_all_left() {
            // They go first.
            return;
        }
        while volume.connections() > 0 && self.env.now().since(began) < GONE_LIMIT {
            remote_device.fail_waiting();
            self.env.sleep(GONE_LOOK).await;
        }
    }

    /// Whether what a volume was to come to is not there any more.
    fn is_target_absent(&self, incoming: &IncomingDocument) -> bool {
        let found = incoming.target.as_ref().map(|target| self.backends.resolve(target.spec.path()));
        matches!(found, Some(Err(error)) if error.kind() == std::io::ErrorKind::NotFound)
    }

    /// A volume of this host is no more: if another host holds it, that need not keep it for a guest of this one.
    pub(crate) async fn let_go_elsewhere(self: &Arc<Self>, document: &VolumeDocument) {
        if let Location::Remote(remote) = &document.backend {
            self.notify_release(remote).await;
        }
    }

    /// Has the host that holds a volume have all that its layers here have taken: they are opened there next, and what was not
    /// flushed does not count there.
    async fn complete_elsewhere(&self, volume: &Volume) -> Result<()> {
        let document = volume.document();
        let (Location::Remote(remote), true) = (&document.backend, document.has_holding_layers()) else {
            return Ok(());
        };
        if volume.kept_out().is_some() {
            // A person has opened it there without what is not there.
            return Ok(());
        }
        require_unused(volume)?;
        let slot = volume.require_up()?;
        let uri = volume.uri()?;
        // From here on no client comes that would write more.
        self.network.withdraw(&uri).await;
        let flushed = env::timeout(&*self.env, COMPLETE_LIMIT, slot.device().flush()).await;
        let flushed = flushed.unwrap_or_else(|| Err(block::Error::new(block::ErrorKind::TimedOut, "no answer")));
        let Err(error) = flushed else { return Ok(()) };
        if let Some(export) = volume.export() {
            self.network.offer(&uri, export, volume.clients()).await?;
        }
        let message = format!("{} must have all that the snapshots of {} hold: {error}", remote.host, volume.name);
        Err(Error::new(ErrorCode::HostUnreachable, message).with_hint("try again when that host can be reached"))
    }

    /// Withdraws a volume, takes it down and forgets it.
    pub(crate) async fn remove_volume(&self, volume: &Volume) -> Result<v1::Volume> {
        // It may take long, and other volumes come and go meanwhile.
        self.complete_elsewhere(volume).await?;
        let _membership = self.membership.lock().await;
        let name = &volume.name;
        require_unused(volume)?;
        // A pending note may be left from when its file was made. With it the next start would remove the file of a
        // volume that no longer exists.
        self.forget_pending_file(name)?;
        let shown = volume.show();
        if let Ok(uri) = volume.uri() {
            self.network.withdraw(&uri).await;
        }
        volume.bring_down().await;
        let document = volume.document();
        // On record before the volume is not any more: nobody else knows that the other host is still to hear of it.
        if let Location::Remote(remote) = &document.backend {
            self.note_release(remote);
        }
        self.forget_volume(name);
        if let Err(error) = self.state.remove_volume(name) {
            if let Location::Remote(remote) = &document.backend {
                self.forget_release(remote);
            }
            return Err(error);
        }
        // No record names them any more.
        document
            .layers_named()
            .filter(|layer| layer.cache().is_some())
            .for_each(|layer| self.lent_parts.give_back(&self.caches, &self.env, layer.id));
        Ok(shown)
    }
}

/// Refuses to remove a volume that moves, or has clients.
fn require_unused(volume: &Volume) -> Result<()> {
    volume.refuse_moving()?;
    volume.refuse_connected("let them disconnect first")
}
