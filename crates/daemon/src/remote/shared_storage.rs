//! Storage that another host writes until it lets go of it: what this host has read of it before is old afterwards.
//!
//! ```text
//!   the other host writes        opened here past the page cache: the waiting QEMU reads its first sectors
//!   it has flushed and let go    THE PAGE CACHE IS DROPPED, then the volume is held here, then the guest reads
//! ```

use std::sync::Arc;

use api::v1::Error;
use backends::CacheMode;

use crate::daemon::Daemon;
use crate::location::Location;
use crate::open_backend::{BackendOpenOptions, CLIENT_SECTOR, OpenBackend, suited};
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

impl Daemon {
    /// Opens what another host still writes: past the page cache, where that takes requests as fine as the volume's.
    pub(super) async fn open_at_other_host(
        self: &Arc<Self>,
        volume: &Volume,
        place: &Location,
        options: &BackendOpenOptions,
    ) -> block::Result<OpenBackend> {
        if let Some(past_cache) = self.past_cache(place) {
            let opened = self.open_backend(volume, &past_cache, options).await?;
            if opened.device.geometry().request_alignment <= CLIENT_SECTOR {
                return Ok(opened);
            }
        }
        self.open_backend(volume, place, options).await
    }

    /// The same place past the page cache; none if it is reached so anyway, or cannot be.
    fn past_cache(&self, place: &Location) -> Option<Location> {
        let Location::Local(spec) = place else { return None };
        let past_cache = suited(spec.clone().with_cache(CacheMode::Auto), &*self.backends).ok()?;
        (spec.cache == CacheMode::Page && past_cache.cache != CacheMode::Page).then_some(Location::Local(past_cache))
    }

    /// Has this host forget what it has read of `place`, which another host has let go.
    ///
    /// # Errors
    /// The system does not do it: what is read there may be old.
    pub(crate) async fn forget_cached(&self, place: &Location) -> Result<()> {
        let Some(path) = place.local_path() else { return Ok(()) };
        self.backends.drop_page_cache(path).await.map_err(|error| -> Error {
            let context =
                format!("what this host has read of {} before it was let go is not forgotten", path.display());
            of_backend(&block::Error::from_os(error, context), "the storage that both hosts reach")
        })
    }
}
