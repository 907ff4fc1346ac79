//! Whether a surrogate can serve the guest of a move.

use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode, MoveRequest, VmDisk};
use migrate::Strategy;

use super::to_options;
use crate::daemon::Daemon;
use crate::document::{RedirectLayer, VolumeDocument};
use crate::problem::{Result, invalid};
use crate::stack::cannot_serve;
use crate::surrogates::Surrogate;
use crate::volume::Volume;

/// Said of strategies that take the guest's writes away from a surrogate.
const OTHER_STRATEGY: &str = "use mirror, mirror-async, auto, dbt or incremental-dbt";

impl Daemon {
    /// Refuses a surrogate that cannot serve the guest of a move.
    pub(super) fn check_surrogate(&self, volume: &Volume, request: &MoveRequest, strategy: Strategy) -> Result<()> {
        let Some(surrogate) = self.asked_surrogate(request)? else { return Ok(()) };
        let document = volume.document();
        if standing(&document).is_some() {
            // It does already, and what a move with it takes has been looked at.
            return Ok(());
        }
        self.check_redirectable(&surrogate, &document)?;
        if request.shared {
            let why = "nothing is copied that the guest could be in the way of";
            return Err(cannot_serve(&surrogate, &volume.name, why, "move without a surrogate"));
        }
        self.check_suits(&surrogate, (&volume.name, document.backend.local_path()), request, strategy)
    }

    /// Refuses what the move of a machine's disk would be refused for, as far as that is known of one that is no volume yet.
    pub(crate) fn check_unadopted(&self, disk: &VmDisk, request: &MoveRequest) -> Result<()> {
        let options = to_options(request)?;
        match self.asked_surrogate(request)? {
            Some(surrogate) => {
                let image = Path::new(&disk.file);
                self.check_suits(&surrogate, (&disk.node, Some(image)), request, options.strategy)
            }
            None => Ok(()),
        }
    }

    /// The surrogate that a move asks for, if it does.
    fn asked_surrogate(&self, request: &MoveRequest) -> Result<Option<Arc<Surrogate>>> {
        match &request.surrogate {
            Some(name) => self.surrogates.get(name).map(Some),
            None if request.popular_threshold.is_none() && !request.sole_copy && !request.surrogate_on_flash => {
                Ok(None)
            }
            None => Err(invalid(
                "a threshold, --sole-copy and --surrogate-on-flash are of a surrogate",
                "name one with --surrogate",
            )),
        }
    }

    /// Refuses what follows from the surrogate, the request and the place of the source, whatever else is known of that.
    fn check_suits(
        &self,
        surrogate: &Surrogate,
        (name, image): (&str, Option<&Path>),
        request: &MoveRequest,
        strategy: Strategy,
    ) -> Result<()> {
        if takes_writes(strategy) {
            return Err(cannot_serve(surrogate, name, "the strategy takes the guest's writes itself", OTHER_STRATEGY));
        }
        self.check_surrogate_stores(surrogate, (name, image), request.sole_copy)
    }
}

/// The redirection that no move has brought.
fn standing(document: &VolumeDocument) -> Option<&RedirectLayer> {
    document.redirect_layer().map(|(_, redirect)| redirect).filter(|redirect| redirect.stays)
}

const fn takes_writes(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::Snapshot | Strategy::MirrorPaper)
}

/// Refuses a move that cannot go on with the surrogate that serves the guest already, or that asks for something else of it.
pub(super) fn refuse_standing_surrogate(
    document: &VolumeDocument,
    request: &MoveRequest,
    strategy: Strategy,
) -> Result<()> {
    let Some(standing) = standing(document) else { return Ok(()) };
    let (name, surrogate) = (&document.name, &standing.surrogate);
    let why = if request.shared {
        "what that holds is not on the storage that both hosts reach".to_owned()
    } else if takes_writes(strategy) {
        format!("the strategy takes the guest's writes itself: {OTHER_STRATEGY}")
    } else if request.surrogate.as_ref().is_some_and(|asked| asked != surrogate) {
        "no other one can serve it beside that".to_owned()
    } else if request.popular_threshold.is_some_and(|asked| asked != standing.threshold) {
        format!("a chunk is popular there from request {} on: leave --popular-threshold out", standing.threshold)
    } else {
        return Ok(());
    };
    let message = format!("the surrogate {surrogate} serves {name} already, and it cannot be moved so: {why}");
    Err(Error::new(ErrorCode::InUse, message)
        .with_hint(format!("`transhume volume layer rm {name} surrogate` takes it out")))
}
