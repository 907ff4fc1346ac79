//! Two names of one storage: what a volume of this host is in is nobody else's place, whatever that is called.

use std::path::{Path, PathBuf};

use api::v1::{Cache, CacheRequest, Error, ErrorCode};

use crate::daemon::Daemon;
use crate::location::{JobTarget, Location};
use crate::pools::NewStore;
use crate::problem::Result;

impl Daemon {
    /// Makes a cache.
    ///
    /// # Errors
    /// Its store has bytes of a volume, or as the API says.
    pub(crate) async fn create_cache(&self, request: CacheRequest) -> Result<Cache> {
        // What is no place for one is refused by the name of the cache.
        if let Ok(store) = NewStore::local(&request.store, "cache") {
            self.require_separate_store(&store.place).await?;
        }
        self.caches.create(request).await
    }

    /// Refuses a store that has bytes in common with a volume of this host.
    pub(crate) async fn require_separate_store(&self, place: &Location) -> Result<()> {
        match place.local_path() {
            Some(path) => self.require_separate(path, None).await,
            None => Ok(()),
        }
    }

    /// Refuses `path` if it has bytes in common with what another volume than `own` is in, or moves to: a loop device over its file, a
    /// partition of its disk, another path to it.
    pub(crate) async fn require_separate(&self, path: &Path, own: Option<&str>) -> Result<()> {
        let mut known: Vec<(PathBuf, String)> = Vec::new();
        for volume in self.volumes().into_iter().filter(|volume| Some(volume.name.as_str()) != own) {
            let document = volume.document();
            let target = document.job.as_ref().and_then(|job| match &job.target {
                JobTarget::Local(target) => Some(target.spec.path()),
                JobTarget::Remote(_) | JobTarget::Foreign(_) => None,
            });
            let places = document.backend.local_path().into_iter().chain(target);
            known.extend(places.map(|place| (place.to_owned(), volume.name.clone())));
        }
        let places = known.iter().map(|(place, _)| place.clone()).collect();
        let Some(found) = self.backends.sharing(path, places).await else { return Ok(()) };
        let of = known.iter().find(|(place, _)| *place == found).map_or("", |(_, name)| name);
        let message =
            format!("{} has bytes in common with {}, where the volume {of} is", path.display(), found.display());
        Err(Error::new(ErrorCode::InUse, message)
            .with_hint(format!("name another place, or `transhume volume detach {of}` first")))
    }
}
