//! The surrogate that serves the guest while its volume moves: its stores are disks of their own, which outlive the process and lose
//! power with the host.

use std::io::ErrorKind as OsErrorKind;
use std::path::Path;
use std::time::Duration;

use api::v1::{Error, ErrorCode, LayerKind, LayerState, StoreRequest, SurrogateRequest};
use block::{Bytes, Device};

use super::{Host, SURROGATE};
use crate::occurrence::Occurrence;
use crate::world::Invariant;

/// What it is called.
const NAME: &str = "fast";
/// Where its stores are.
const FOLDER: &str = "/fast";
/// A part has room for sixteen chunks: fewer than a volume has, so it is full at times.
const CHUNK_BYTES: u64 = 64 << 10;
const PARTITION_BYTES: u64 = 2 << 20;
/// Two parts, so that a move that follows a cancelled one need not wait.
const STORE_BYTES: u64 = 2 * PARTITION_BYTES;
/// How often it is looked at whether the surrogate is given back.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// The number of the store at `path`, if that is one.
pub(super) fn store_of(path: &Path) -> Option<u32> {
    path.strip_prefix(FOLDER).ok()?.to_str()?.parse().ok()
}

impl Host {
    /// The surrogate that a move asks for.
    pub(super) fn surrogate(&self) -> Option<String> {
        (self.shared.setup.surrogate_stores > 0).then(|| NAME.to_owned())
    }

    /// Makes the surrogate, unless a life before this has.
    pub(super) async fn make_surrogate(&self, core: &::daemon::Core) -> Result<(), Error> {
        let stores = self.shared.setup.surrogate_stores;
        if stores == 0 || !core.surrogates().is_empty() {
            return Ok(());
        }
        let store = |number| StoreRequest { place: format!("file:{FOLDER}/{number}"), size_bytes: Some(STORE_BYTES) };
        let request = SurrogateRequest {
            name: NAME.to_owned(),
            stores: (0..stores).map(store).collect(),
            partition_bytes: Some(PARTITION_BYTES),
            chunk_bytes: Some(CHUNK_BYTES),
        };
        match core.create_surrogate(request).await {
            Ok(_) => Ok(()),
            // The move is refused without it, and asked for again.
            Err(error) if error.code != ErrorCode::Internal => {
                self.say(format_args!("the surrogate is not made: {error}"));
                Err(error)
            }
            Err(error) => {
                self.shared.world.violate(Invariant::AsTold, format!("a surrogate is refused as a defect: {error}"));
                Err(error)
            }
        }
    }

    /// Makes the disk of a store.
    pub(super) async fn prepare_surrogate(&self, number: u32, size: Bytes) {
        let Self { shared } = self;
        drop(shared.shelf.make(&shared.world, (SURROGATE, number), size, 1).await);
        self.begin_surrogate_faults();
    }

    pub(super) async fn open_surrogate(&self, number: u32) -> std::io::Result<Device> {
        if !self.shared.shelf.numbers(SURROGATE).contains(&number) {
            return Err(OsErrorKind::NotFound.into());
        }
        let disk = self.shared.shelf.disk((SURROGATE, number));
        if disk.is_some_and(|disk| disk.require_there().is_err()) {
            return Err(OsErrorKind::NotFound.into());
        }
        self.shared.shelf.open(&self.shared.world, (SURROGATE, number)).await.map_err(std::io::Error::other)
    }

    pub(super) fn discard_surrogate(&self, number: u32) {
        self.shared.shelf.remove((SURROGATE, number));
    }

    fn begin_surrogate_faults(&self) {
        if self.shared.setup.surrogate_stores > 1 {
            self.shared.shelf.set_faults((SURROGATE, 0), self.shared.setup.surrogate_faults);
        }
    }

    /// Nothing goes wrong with the surrogate any more.
    pub(crate) fn end_surrogate_faults(&self) {
        self.shared.shelf.set_faults((SURROGATE, 0), <_>::default());
    }

    /// Ends when no volume has a part of the surrogate, and the volume's disk has what that held.
    pub(crate) async fn surrogate_given_back(&self) {
        while self.shared.setup.surrogate_stores > 0 && self.has_surrogate_layer() {
            self.shared.world.sleep(LOOK_INTERVAL).await;
        }
    }

    /// Whether the journal lists a surrogate.
    pub(in crate::host) fn has_surrogate_layer(&self) -> bool {
        let slots = self.shared.daemon_harness.slots.lock();
        let newest = slots.doubtful.last().or(slots.acknowledged.as_ref());
        let document = newest.and_then(|newest| serde_json::from_slice::<::daemon::VolumeDocument>(newest).ok());
        document.is_some_and(|document| document.layers.iter().any(|layer| layer.redirect().is_some()))
    }

    /// Notes whether the surrogate is being emptied into the disk.
    pub(super) fn note_draining(&self, core: &::daemon::Core) {
        let volumes = core.volumes();
        let layers = volumes.iter().filter(|volume| volume.name == self.name()).flat_map(|volume| &volume.layers);
        let mut redirects = layers.filter(|layer| layer.kind == LayerKind::Redirect);
        if redirects.any(|layer| layer.state == LayerState::Draining) {
            self.shared.world.occur(Occurrence::Told("draining"));
        }
    }
}
