//! Two names of one storage: what a volume or a store of this host is in is nobody else's place, whatever that is called.

use std::path::{Path, PathBuf};

use api::v1::{Cache, CacheRequest, Error, ErrorCode, StoreRequest};
use backends::{Alias, TargetError};

use crate::daemon::Daemon;
use crate::document::{VolumeDocument, random_uuid};
use crate::location::JobTarget;
use crate::places::{Place, TakenPlace, Use, User};
use crate::platform::overlay_path;
use crate::pools::NewStore;
use crate::problem::{Result, invalid, of_backend, of_target};

impl Daemon {
    /// Makes a cache.
    ///
    /// # Errors
    /// Its store has bytes of a volume or of another store, or as the API says.
    pub(crate) async fn create_cache(&self, request: CacheRequest) -> Result<Cache> {
        let CacheRequest { name, store, policy } = request;
        if nbd::NbdUri::is_meant(&store.place) {
            let message = format!("{} is an export, and a cache is on this host's own flash", store.place);
            return Err(invalid(message, "write file:PATH,size=40GiB"));
        }
        let store = self.local_store(&store, "cache").await?;
        self.caches.create(name, store, policy).await
    }

    /// The store of a new pool of `kind` on a file or block device of this host, which is nobody else's from now on.
    ///
    /// # Errors
    /// It is none, or it has bytes in common with a place of this host.
    pub(crate) async fn local_store(&self, store: &StoreRequest, kind: &'static str) -> Result<NewStore> {
        let spec = NewStore::parse(store, kind)?;
        let place = self.take_place(spec.path(), User::Store(kind), Use::Overwritten).await?;
        Ok(NewStore::local(spec, store.size_bytes, place))
    }

    /// Takes `path` for `user`: from now on until the end of what is given nobody else is let there.
    ///
    /// # Errors
    /// It has bytes in common with the place of another one.
    pub(crate) async fn take_place(&self, path: &Path, user: User, using: Use) -> Result<TakenPlace> {
        let _looking = self.places.look().await;
        Box::pin(self.require_separate(path, &user, using)).await?;
        Ok(self.places.take(path, user))
    }

    /// Refuses `path` for `user` if it has bytes in common with what another one is in, or comes to: a loop device over its file, a
    /// partition of its disk, another path to it. A file that is written over may not be the user's own image either.
    ///
    /// # Errors
    /// As said.
    pub(crate) async fn require_separate(&self, path: &Path, user: &User, using: Use) -> Result<()> {
        let known = self.known_places();
        // Two stores by one name are refused by that name.
        let is_named =
            |place: &Place| matches!((user, &place.user), (User::Store(_), User::Store(_)) if place.path == path);
        let others: Vec<&Place> = known.iter().filter(|place| place.user != *user || user.is_store()).collect();
        let others: Vec<&Place> = others.into_iter().filter(|place| !is_named(place)).collect();
        let asked = others.iter().map(|place| (place.path.clone(), place.is_locked)).collect();
        if let Some(found) = self.backends.sharing(path, asked).await {
            let of = others.iter().find(|place| place.path == found);
            return Err(of.map_or_else(|| unknown_place(path, &found), |of| in_common(path, of)));
        }
        let root = self.layout.root();
        let real = path.parent().and_then(|folder| self.backends.resolve(folder).ok());
        if path.starts_with(root) || real.is_some_and(|folder| folder.starts_with(root)) {
            let message = format!("{} is in the daemon's own state directory", path.display());
            return Err(Error::new(ErrorCode::InUse, message).with_hint("name another place"));
        }
        let images = known.iter().filter(|place| !is_named(place)).map(|place| place.path.clone()).collect();
        let alias = self.backends.alias_of(path, images, random_uuid(&*self.env)).await;
        let Some((found, alias)) = alias.map_err(|error| of_backend(&error, "the target"))? else { return Ok(()) };
        if using == Use::Kept && alias != Alias::Same {
            // Nothing is written over, and a clone of an image has its bytes.
            return Ok(());
        }
        let Some(of) = known.iter().find(|place| place.path == found) else { return Err(unknown_place(path, &found)) };
        Err(refuse_alias(path, of, user, alias))
    }

    /// The places of this host's volumes and stores, those included that are being made.
    fn known_places(&self) -> Vec<Place> {
        let mut known: Vec<Place> = Vec::new();
        for volume in self.volumes() {
            let document = volume.document();
            let target = document.job.as_ref().and_then(|job| match &job.target {
                JobTarget::Local(target) => Some(target.spec.path()),
                JobTarget::Remote(_) | JobTarget::Foreign(_) => None,
            });
            let coming = document.incoming.as_ref().and_then(|incoming| incoming.target.as_ref());
            let coming = coming.map(|target| target.spec.path());
            let images: Vec<&Path> = document.backend.local_path().into_iter().chain(target).chain(coming).collect();
            let user = User::Volume(volume.name.clone());
            // Nobody has the locks of one that is down.
            let is_locked = volume.with_backend(|_| ()).is_some();
            let files = images.iter().flat_map(|image| overlay_files(&document, image));
            let places = images.iter().map(|image| image.to_path_buf()).chain(files);
            known.extend(places.map(|path| Place { path, user: user.clone(), is_locked }));
        }
        let stores = self.caches.stores().into_iter().chain(self.surrogates.stores());
        known.extend(stores.map(|(path, kind)| Place { path, user: User::Store(kind), is_locked: false }));
        known.extend(self.places.taken());
        known
    }
}

/// The files of the overlays over an image: of its snapshots, and of a snapshot move.
fn overlay_files(document: &VolumeDocument, image: &Path) -> Vec<PathBuf> {
    let layers = document.layers_named().filter_map(|layer| layer.overlay());
    let of_layers = layers.map(|overlay| overlay_path(&overlay.beside(image), overlay.number));
    let of_job = document.job.iter().flat_map(|job| &job.overlays).map(|number| overlay_path(image, *number));
    of_layers.chain(of_job).collect()
}

fn unknown_place(path: &Path, found: &Path) -> Error {
    Error::new(ErrorCode::InUse, format!("{} has bytes in common with {}", path.display(), found.display()))
        .with_hint("name another place")
}

fn in_common(path: &Path, of: &Place) -> Error {
    let (what, hint) = of.user.words();
    let message = format!("{} has bytes in common with {}, {what}", path.display(), of.path.display());
    Error::new(ErrorCode::InUse, message).with_hint(format!("name another place, or {hint}"))
}

/// Why a file that would be written over stays as it is.
fn refuse_alias(path: &Path, of: &Place, user: &User, alias: Alias) -> Error {
    let why = match alias {
        Alias::Apart | Alias::Same if of.user == *user && !user.is_store() => {
            return of_target(&TargetError::SameAsSource { path: path.to_owned(), source: of.path.clone() });
        }
        Alias::Apart | Alias::Same => return in_common(path, of),
        Alias::Names => "one of them has several names, is mounted by itself, or is a FUSE server's",
        Alias::Unmarked => "no file can be made in its folder to find that out",
        Alias::Silent => "that does not answer",
    };
    let (what, _) = of.user.words();
    let message = format!("whether {} is {}, {what}, is not known: {why}", path.display(), of.path.display());
    Error::new(ErrorCode::InUse, message).with_hint("name a file that does not exist yet")
}
