//! The lost store of a surrogate is repaired while its volumes' guests work.
//!
//! ```text
//!   parts that use it still: taken out of it, on record ──▶ another store in its place, on record ──▶ each part copied to it, aside
//!                                                                                          ──▶ on record: not lost
//! ```
//!
//! Until a part is on record as not lost nobody reads it there. A copy that fails or that a restart ends leaves the part as it was:
//! lost there. Somebody asks again then.

use std::sync::Arc;

use api::v1::{self, Error, ErrorCode, SurrogateRepairRequest};
use uuid::Uuid;

use super::StackedRedirect;
use crate::daemon::Daemon;
use crate::problem::{Result, of_backend};
use crate::surrogates::Surrogate;
use crate::volume::Volume;

impl Volume {
    fn redirect_of(&self, layer: Uuid) -> Option<StackedRedirect> {
        self.with_stack(|stack| stack.redirect().filter(|stacked| stacked.id == layer).cloned()).flatten()
    }
}

impl Daemon {
    /// Begins to repair the lost store of a surrogate: each part of it is copied from the other one. That goes on after this has returned.
    ///
    /// # Errors
    /// There is none of that name, none of its two stores is lost, or the new one cannot be used.
    pub(crate) async fn repair_surrogate(
        self: &Arc<Self>,
        name: &str,
        request: SurrogateRepairRequest,
    ) -> Result<v1::Surrogate> {
        let surrogate = self.surrogates.get(name)?;
        let number = surrogate.lost_store()?;
        if let Some(store) = &request.store {
            let store = self.new_store(store).await?;
            self.expel(&surrogate, number).await?;
            let replaced = self.surrogates.replace_store(&surrogate, (number, store), |document| {
                match document.partitions.iter().find(|partition| !partition.place.has_lost(number)) {
                    None => Ok(()),
                    Some(partition) => Err(uses(&partition.volume, name)),
                }
            });
            replaced.await?;
        }
        let partitions = surrogate.document().partitions.clone();
        for partition in partitions.iter().filter(|partition| partition.place.has_lost(number)) {
            let Some(volume) = self.volume_if_any(&partition.volume)? else { continue };
            let Some(stacked) = volume.redirect_of(partition.layer) else { continue };
            let lost = surrogate.lost_part(partition.layer).await;
            let Some(lost) = lost.map_err(|error| of_backend(&error, "the store"))? else { continue };
            self.begin_rebuild(volume, stacked, lost).await?;
        }
        Ok(self.show_surrogate(&surrogate))
    }

    /// Has no part of a surrogate use its store `number` any more.
    async fn expel(&self, surrogate: &Surrogate, number: usize) -> Result<()> {
        let partitions = surrogate.document().partitions.clone();
        for partition in partitions.iter().filter(|partition| !partition.place.has_lost(number)) {
            let volume = self.volume_if_any(&partition.volume)?;
            let stacked = volume.and_then(|volume| volume.redirect_of(partition.layer));
            let Some(pair) = stacked.and_then(|stacked| stacked.pair) else {
                return Err(uses(&partition.volume, &surrogate.name()));
            };
            pair.expel(number).await.map_err(|error| of_backend(&error, "taking a store out of use"))?;
        }
        Ok(())
    }

    /// Has `lost` take the place of what a part has lost, and copies to it aside.
    async fn begin_rebuild(
        self: &Arc<Self>,
        volume: Arc<Volume>,
        stacked: StackedRedirect,
        lost: block::Device,
    ) -> Result<()> {
        let Some(pair) = stacked.pair.clone().filter(|pair| pair.status().rebuilt.is_none()) else { return Ok(()) };
        let member = pair.begin_rebuild(lost).await.map_err(|error| of_backend(&error, "the new store"))?;
        let id = stacked.id;
        self.env.spawn(Box::pin(async move {
            let is_wanted = || volume.redirect_of(id).is_some();
            match pair.finish_rebuild(member, is_wanted).await {
                Ok(()) => tracing::info!(volume = volume.name, "the part of a surrogate is in both stores again"),
                Err(error) => {
                    let error = error.chain();
                    tracing::error!(volume = volume.name, error, "the part of a surrogate is not in both stores");
                }
            }
        }));
        Ok(())
    }
}

fn uses(volume: &str, surrogate: &str) -> Error {
    Error::new(
        ErrorCode::Busy,
        format!("{volume} is not up, or its part of the surrogate {surrogate} changes just now"),
    )
    .with_hint(format!("`transhume volume show {volume}` says what it is about; try again then"))
}
