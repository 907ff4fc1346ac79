//! All disks of a machine go back to this host, or none of them.
//!
//! ```text
//!   every old image opens ──▶ nobody tells the other host ──▶ it holds none of them ──▶ the arbiter's ruling is taken back
//!       ──▶ ON RECORD: none of them arrives there ──▶ each is given back; who was interrupted decides again, and the rest follows
//! ```
//!
//! The record is the list of notices that the other host is given: one file, stored at once. A volume in it is never told to be held
//! there, by no later life of this daemon either. So the other host cannot take some disks while others are used here.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use futures::future::join_all;
use migrate::stream::VolumeStatus;

use super::resolve::refuse;
use crate::daemon::Daemon;
use crate::location::{Location, RemoteVolume};
use crate::problem::Result;
use crate::volume::Volume;

impl Daemon {
    /// Decides that the disks of the machine `name`, which are `volumes`, go back to this host, as far as it has given them up.
    ///
    /// # Errors
    /// One of them cannot be used here, is held by the other host, or the arbiter or the state directory cannot be written: nothing is
    /// decided then.
    pub(crate) async fn decide_give_back(
        self: &Arc<Self>,
        name: &str,
        volumes: &[Arc<Volume>],
        at_risk: bool,
    ) -> Result<()> {
        let given_up: Vec<_> =
            volumes.iter().filter(|volume| volume.document().given_up().is_some()).map(Arc::clone).collect();
        if given_up.is_empty() {
            return Ok(());
        }
        for volume in volumes {
            let document = volume.document();
            if let (Location::Remote(remote), None) = (&document.backend, document.given_up()) {
                return Err(half_taken(name, &volume.name, remote));
            }
        }
        let decided = async {
            // Open, and so locked, until it is decided: they have their names back, by which something may start them.
            let mut opened = Vec::new();
            for volume in &given_up {
                let document = volume.document();
                let Some(committed) = document.given_up() else { continue };
                opened.push(Box::pin(self.open_given_up(volume, committed)).await?);
            }
            self.decide_on_record(name, &given_up, at_risk).await
        };
        decided.await.inspect_err(|_| given_up.iter().for_each(|volume| self.put_away_again(volume)))
    }

    async fn decide_on_record(self: &Arc<Self>, name: &str, given_up: &[Arc<Volume>], at_risk: bool) -> Result<()> {
        let mut deciding = Vec::new();
        for volume in given_up {
            deciding.push(self.stop_telling(volume).await?);
        }
        self.require_not_held(name, given_up, at_risk).await?;
        // Whether or not it answers: it is told only after this is on record, and may take them by the ruling before it hears of it.
        for remote in remotes_of(name, given_up)? {
            self.revoke(&remote).await?;
        }
        // That may have taken long, and the other host have taken them meanwhile.
        let answers = self.require_not_held(name, given_up, at_risk).await?;
        tracing::warn!(vm = name, answers, "the disks of a VM are given back to this host");
        self.decide_abort(&remotes_of(name, given_up)?)
    }

    /// Whether the other host answers for each of them, and holds none.
    async fn require_not_held(&self, name: &str, given_up: &[Arc<Volume>], at_risk: bool) -> Result<bool> {
        let remotes = remotes_of(name, given_up)?;
        let asked = join_all(remotes.iter().map(|remote| self.ask_volume_status(remote))).await;
        for (volume, (remote, there)) in given_up.iter().zip(remotes.iter().zip(&asked)) {
            if matches!(there, Ok(VolumeStatus::Held { .. })) {
                return Err(half_taken(name, &remote.volume, remote));
            }
            self.require_known_there(&volume.name, remote, (there, at_risk))?;
        }
        // One of them may have been noted as taken meanwhile.
        remotes_of(name, given_up).map(|_| asked.iter().all(Result::is_ok))
    }
}

/// Where each of them was to go.
///
/// # Errors
/// The other host has taken one meanwhile.
fn remotes_of(name: &str, given_up: &[Arc<Volume>]) -> Result<Vec<RemoteVolume>> {
    let remote_of = |volume: &Arc<Volume>| {
        let document = volume.document();
        match (&document.backend, document.given_up()) {
            (Location::Remote(remote), Some(_)) => Ok(remote.clone()),
            (Location::Remote(remote), None) => Err(half_taken(name, &volume.name, remote)),
            _ => refuse(format!("{} is at this host meanwhile", volume.name)),
        }
    };
    given_up.iter().map(remote_of).collect()
}

fn half_taken(name: &str, volume: &str, remote: &RemoteVolume) -> Error {
    let host = &remote.host;
    let message = format!("{host} holds {volume}: the disks of {name} are given back together, or not at all");
    Error::new(ErrorCode::WrongState, message).with_hint(format!(
        "have {host} take the others, too (`transhume vm show {name}` and its log say what keeps it). If it is gone for good: `transhume vm rm \
         {name}`, then `transhume resolve DISK --give-back` for those that it does not hold; the image of one that it holds is here as it \
         was at the commit, as NAME.moved-EPOCH"
    ))
}
