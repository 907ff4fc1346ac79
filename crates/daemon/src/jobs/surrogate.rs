//! Whether a surrogate can serve the guest of a move.

use std::path::Path;

use api::v1::{MoveRequest, VmDisk};
use migrate::Strategy;

use super::to_options;
use crate::daemon::Daemon;
use crate::problem::{Result, invalid};
use crate::surrogates::Surrogate;
use crate::volume::Volume;

impl Daemon {
    /// Refuses a surrogate that cannot serve the guest of a move.
    pub(super) fn check_surrogate(&self, volume: &Volume, request: &MoveRequest, strategy: Strategy) -> Result<()> {
        let Some(surrogate) = self.asked_surrogate(request)? else { return Ok(()) };
        let document = volume.document();
        let refuse = |why: &str, hint: &str| Err(cannot_serve(&surrogate, &volume.name, why, hint));
        if document.cache_layer().is_some() {
            return refuse("it has a cache, which is in the same place", "move without a surrogate");
        }
        if document.has_holding_layers() {
            return refuse("it has snapshots", "remove them first, or move without a surrogate");
        }
        if document.room_to_grow().is_some() {
            return refuse("it is a container that grows", "a surrogate needs an image in the format raw");
        }
        if document.read_only || request.shared {
            return refuse("nothing is copied that the guest could be in the way of", "move without a surrogate");
        }
        let Some(image) = document.backend.local_path() else {
            return refuse("it is no file or block device of this host", "surrogates are beside the source");
        };
        self.check_suits(&surrogate, (&volume.name, image), request, strategy)
    }

    /// Refuses what the move of a machine's disk would be refused for, as far as that is known of one that is no volume yet.
    pub(crate) fn check_unadopted(&self, disk: &VmDisk, request: &MoveRequest) -> Result<()> {
        let options = to_options(request)?;
        match self.asked_surrogate(request)? {
            Some(surrogate) => {
                self.check_suits(&surrogate, (&disk.node, Path::new(&disk.file)), request, options.strategy)
            }
            None => Ok(()),
        }
    }

    /// The surrogate that a move asks for, if it does.
    fn asked_surrogate(&self, request: &MoveRequest) -> Result<Option<std::sync::Arc<Surrogate>>> {
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
        (name, image): (&str, &Path),
        request: &MoveRequest,
        strategy: Strategy,
    ) -> Result<()> {
        if matches!(strategy, Strategy::Snapshot | Strategy::MirrorPaper) {
            let hint = "use mirror, auto, dbt or incremental-dbt";
            return Err(cannot_serve(surrogate, name, "the strategy takes the guest's writes itself", hint));
        }
        if surrogate.is_sole() && !request.sole_copy {
            let hint = "make the surrogate with two stores on different devices, or say --sole-copy: a store that fails takes \
                        with it what the guest has written since the move began";
            let why = "it has one store, which would hold the only copy of what the guest writes";
            return Err(cannot_serve(surrogate, name, why, hint));
        }
        self.refuse_same_disk(surrogate, image)
    }

    /// Refuses a surrogate on the head that the volume's source is read by.
    fn refuse_same_disk(&self, surrogate: &Surrogate, image: &Path) -> Result<()> {
        let Some(disk) = self.backends.disk_of(image).filter(|disk| disk.is_rotational) else { return Ok(()) };
        for spec in surrogate.specs() {
            if self.backends.disk_of(spec.path()).as_ref() == Some(&disk) {
                let message = format!("{spec} is on {}, the disk that holds the volume", disk.name);
                return Err(invalid(
                    message,
                    "a surrogate is to spare that disk's head: put its stores on another device",
                ));
            }
        }
        Ok(())
    }
}

fn cannot_serve(surrogate: &Surrogate, volume: &str, why: &str, hint: &str) -> api::v1::Error {
    invalid(format!("{} cannot serve {volume}: {why}", surrogate.name()), hint)
}
