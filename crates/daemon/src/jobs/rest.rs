//! What a move finds of its source and its target when it goes on after a restart.
//!
//! ```text
//!   polite stop: copies pause, guests are held ──▶ the times of both files go on record ──▶ the process ends
//!   next start:  both files have these times ──▶ what the progress map says counts
//!                otherwise, and after a crash ──▶ what it says is compared first, chunk by chunk
//! ```
//!
//! Nobody keeps others from the files while no daemon runs. The map says what was copied, and nothing of what somebody has
//! changed since.

use std::time::Duration;

use super::JobHandle;
use crate::daemon::Daemon;
use crate::document::Rested;
use crate::open_backend::OpenBackend;
use crate::volume::Volume;

/// How long copies may take to rest at a polite stop, and how often that is looked at.
const REST_LIMIT: Duration = Duration::from_secs(2);
const REST_INTERVAL: Duration = Duration::from_millis(20);

impl Daemon {
    /// Begins no more copies: the process ends.
    pub(crate) fn pause_copies(&self) {
        self.volumes().iter().filter_map(|volume| volume.job()?.control()).for_each(|control| control.pause());
    }

    /// Has it on record what source and target of every move under way are like. Its guests are held by now, and nothing
    /// is copied.
    pub(crate) async fn note_rest(&self) {
        futures::future::join_all(self.volumes().iter().map(|volume| self.note_rest_of(volume))).await;
    }

    async fn note_rest_of(&self, volume: &Volume) {
        let Some(job) = volume.job().filter(|job| job.control().is_some()) else { return };
        let Some(rested) = self.rest(volume, &job).await else { return };
        if let Err(error) = volume.journal.update_job(|job| job.rested = Some(rested)).await {
            tracing::warn!(volume = volume.name, error = error.chain(), "how a move rests could not be recorded");
        }
    }

    /// What source and target are like once nothing is on its way to them; none if they are no files, or do not rest.
    async fn rest(&self, volume: &Volume, job: &JobHandle) -> Option<Rested> {
        let look = || {
            let source = volume.with_backend(|open_backend| open_backend.image_times()).flatten()?;
            Some(Rested { source, target: job.target_times()? })
        };
        let begun = self.env.now();
        let mut before = look()?;
        loop {
            self.env.sleep(REST_INTERVAL).await;
            let now = look()?;
            if now == before && job.pool().is_none_or(|pool| pool.in_use().0 == 0) {
                return Some(now);
            }
            if self.env.now().since(begun) >= REST_LIMIT {
                return None;
            }
            before = now;
        }
    }
}

/// Whether nobody has changed source and target since the daemon was stopped. A place that somebody else vouches for is
/// believed, and so is another host, whose copy is compared when it is reached.
pub(super) fn is_undisturbed(rested: Option<Rested>, source: &OpenBackend, target: &OpenBackend) -> bool {
    if target.remote_device().is_some() || source.is_vouched_for() && target.is_vouched_for() {
        return true;
    }
    if source.has_files() || target.has_files() {
        // Nobody has looked at these.
        return false;
    }
    let now = source.image_times().zip(target.image_times());
    let now = now.map(|(source, target)| Rested { source, target });
    rested.is_some() && rested == now
}
