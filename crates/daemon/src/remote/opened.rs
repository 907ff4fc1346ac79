//! A volume that a person opens at its new host, although its guest at the old one may run on.
//!
//! ```text
//!                       resolve --take, rescue                              its host lets it go, or it had layers
//!   held for the guest ───────────────────────▶ opened: export here,      ────────────────────────────────────────▶ this host's
//!   of its old host    ◀─────────────────────── that guest is kept out
//!                       resolve --give-back,
//!                       nobody is connected
//! ```
//!
//! What that guest waits to write is older than what is written here. Its host is told that the volume is held here, so that its move
//! ends; the guest waits.

use std::sync::Arc;

use api::v1::{Decision, Error, ErrorCode, Resolution};
use migrate::stream::SessionRequest;

use super::incoming::close_forward;
use super::resolve::refuse;
use crate::daemon::Daemon;
use crate::document::{IncomingDocument, OpenedArrival, random_uuid};
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

impl Daemon {
    /// A person has decided that a volume which is held here for another host's guest may be used here. That guest is kept out from
    /// then on: what it waits to write is older than what is written here.
    pub(super) async fn open_to_others(&self, volume: &Arc<Volume>) -> Result<()> {
        // The QEMU that it has come for runs no more, or was never meant.
        volume.free_of_machine().await?;
        close_forward(volume).await;
        let id = random_uuid(&*self.env);
        let stored = volume.journal.update(|document| document.open_to_others(id)).await;
        stored.map_err(|error| of_backend(&error, "the volume's journal"))?;
        let is_let_go = volume.document().incoming.is_none();
        if is_let_go && let Err(error) = self.build_layers(volume).await {
            volume.set_problem(error.clone());
            return Err(error);
        }
        self.open_export(volume).await
    }

    /// The guest of the host that a volume came from may come to it, and nobody else does any more.
    ///
    /// # Errors
    /// Somebody is connected to the volume here, or its journal cannot be stored. Those who use it here still may.
    pub(super) async fn close_to_others(&self, volume: &Volume, incoming: &IncomingDocument) -> Result<()> {
        if incoming.exclusive {
            return Ok(());
        }
        let uri = volume.uri()?;
        self.network.withdraw(&uri).await;
        let connections = volume.connections();
        if connections > 0 {
            self.open_export(volume).await?;
            let message = format!("{} is used at its new host, by {connections} connections there", volume.name);
            return Err(Error::new(ErrorCode::InUse, message)
                .with_hint("let those disconnect first: the guest at the old host waits until then"));
        }
        let stored = volume.journal.update(|document| {
            document.opened = None;
            document.incoming.iter_mut().for_each(|incoming| incoming.exclusive = true);
        });
        if let Err(error) = stored.await {
            self.open_export(volume).await?;
            return Err(of_backend(&error, "the volume's journal"));
        }
        Ok(())
    }

    /// The guest that is kept out of a volume since a person has opened it here is over: its host has said so.
    pub(super) async fn end_opened(&self, volume: &Volume, host: &str, request: &SessionRequest) -> Result<()> {
        if !is_opened_to(volume, host, request) {
            return Ok(());
        }
        let stored = volume.journal.update(|document| document.opened = None);
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
    }

    /// A volume that a person has opened here, and whose guest at the host that it came from is kept out.
    pub(super) async fn resolve_opened(
        &self,
        (volume, incoming): (&Arc<Volume>, &IncomingDocument),
        resolution: Resolution,
        decision: Option<Decision>,
    ) -> Result<Resolution> {
        let (name, host, origin) = (&volume.name, &incoming.host, &incoming.origin);
        let verdict = format!(
            "this host holds the volume, and a person has opened it here: the guest of {host} is kept out until `transhume resolve \
             {name} --give-back` here, or `transhume volume detach {origin}` there"
        );
        match decision {
            None => {
                let risk = format!(
                    "--give-back: what the guest of {host} waits to write, and what it holds in memory, goes over what was written here \
                     since"
                );
                Ok(Resolution { verdict, risk: Some(risk), ..resolution })
            }
            Some(Decision::Take) => {
                Ok(Resolution { verdict, done: Some("it is open already".to_owned()), ..resolution })
            }
            Some(Decision::Lost) => refuse(verdict),
            Some(Decision::GiveBack) => {
                self.close_to_others(volume, incoming).await?;
                let done = Some(format!("the guest of {host} may use it again"));
                Ok(Resolution { verdict, done, ..resolution })
            }
        }
    }
}

/// Whether the volume came from `host` by the job of `request`, and a person has opened it here.
fn is_opened_to(volume: &Volume, host: &str, request: &SessionRequest) -> bool {
    volume.document().opened.as_ref().is_some_and(|opened| opened.host == host && opened.job == request.job)
}

/// Refuses the guest of the host that a volume came from, once a person has opened it here.
pub(super) fn require_origin_admitted(volume: &Volume, host: &str, request: &SessionRequest) -> Result<()> {
    if !is_opened_to(volume, host, request) {
        return Ok(());
    }
    let (name, origin) = (&volume.name, &request.origin);
    let message = format!("a person has opened {name} to others at its new host, and its guest at {host} is kept out");
    let ends = format!("`transhume volume detach {origin}` at {host} ends its waiting");
    let document = volume.document();
    let hint = match &document.incoming {
        Some(_) if document.backend.local_path().is_some() => {
            format!("`transhume resolve {name} --give-back` at the new host lets it in again; {ends}")
        }
        _ => ends,
    };
    Err(Error::new(ErrorCode::InUse, message).with_hint(hint))
}

/// What is said of a volume with layers that a person has opened here.
pub(super) fn opened_without_way_back(opened: &OpenedArrival) -> String {
    let OpenedArrival { host, origin, .. } = opened;
    format!(
        "this host holds the volume, and a person has opened it here: the guest of {host} is kept out for good; `transhume volume detach \
         {origin}` there ends its waiting"
    )
}
