//! Pools: stores of the daemon with a partition for each volume that has a layer of their kind. Surrogates and caches are such.
//!
//! ```text
//!   a partition:  free ──taken, on record──▶ of a layer ──header made──▶ the layer on the volume's record ──▶ in use
//!                  ▲                              │ a crash before that: no record names the layer          │
//!                  └──────────────────────────────┴─────────── given back ◀── the layer is off the record ──┘
//! ```
//!
//! The volume's record is the authority: a partition is given back only once no record names its layer any more. How partitions
//! lie in the stores, and what is in them, is the business of the kind.

mod document;
mod export;
mod generation;
mod giving_back;
mod pool;
mod renewal;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, StoreRequest};
use backends::{BackendSpec, TargetRequest};
use block::Bytes;
use env::EnvRef;
use nbd::NbdUri;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

pub(crate) use self::document::{DocumentOf, Partition, PoolDocument, StoreDocument};
pub(crate) use self::pool::Pool;
pub(crate) use self::renewal::{PartStores, Renewal};
use crate::location::Location;
use crate::open_backend::{BackendOpenOptions, CLIENT_SECTOR, OpenBackend};
use crate::places::TakenPlace;
use crate::platform::Backends;
use crate::problem::{Result, invalid, of_backend, of_target};
use crate::state_dir::{Layout, check_name};

/// What a dead process has in flight keeps its lock for a moment.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// A kind of pool.
pub(crate) trait PoolKind: Send + Sync + Sized + 'static {
    /// What is on record of one as a whole, beside its stores and partitions.
    type Settings: Clone + Serialize + DeserializeOwned + Send;
    /// What is on record of where a partition is.
    type Place: Clone + Serialize + DeserializeOwned + Send;

    /// What one is called; also the command.
    const NAME: &'static str;

    /// Where their records are.
    fn directory(layout: &Layout) -> PathBuf;

    /// Whether what was read of one can be.
    fn is_sound(document: &DocumentOf<Self>) -> bool;
}

/// What pools stand on, of whatever kind. Clones know of the same stores.
#[derive(Clone)]
pub(crate) struct PoolContext {
    pub(crate) layout: Layout,
    pub(crate) backends: Arc<dyn Backends>,
    pub(crate) env: EnvRef,
    /// How long a request waits for the server of a store that is away.
    reconnect_limit: Duration,
    /// The stores that there are, and of what kind of pool each is.
    claimed: Arc<Mutex<Vec<(Location, &'static str)>>>,
}

/// A store that is to be part of a new pool.
pub(crate) struct NewStore {
    /// Where it is.
    place: Location,
    /// Of a file that is to be made: how large.
    size_bytes: Option<u64>,
    /// Of a place of this host: it is nobody else's before the pool is on record.
    _taken: Option<TakenPlace>,
}

impl NewStore {
    /// The file or block device of this host that the store of a pool of `kind` is to be on.
    ///
    /// # Errors
    /// It is none.
    pub(crate) fn parse(store: &StoreRequest, kind: &str) -> Result<BackendSpec> {
        store.place.parse().map_err(|error| {
            invalid(format!("\"{}\" is no place for a {kind}: {error}", store.place), "write file:PATH,size=40GiB")
        })
    }

    /// A store on a file or block device of this host, which is nobody else's.
    pub(crate) fn local(spec: BackendSpec, size_bytes: Option<u64>, taken: TakenPlace) -> Self {
        Self { place: Location::Local(spec), size_bytes, _taken: Some(taken) }
    }

    /// A store that is an export of another server.
    pub(crate) const fn export(place: Location, size_bytes: Option<u64>) -> Self {
        Self { place, size_bytes, _taken: None }
    }
}

impl PoolContext {
    /// Where there are no pools yet.
    pub(crate) fn new(layout: Layout, backends: Arc<dyn Backends>, env: EnvRef, reconnect_limit: Duration) -> Self {
        Self { layout, backends, env, reconnect_limit, claimed: Arc::default() }
    }

    /// Claims `stores` for a new pool of `kind`.
    fn claim(&self, stores: &[Location], kind: &'static str) -> Result<()> {
        let mut claimed = self.claimed.lock();
        let known = claimed.len();
        for store in stores {
            if let Some((_, of)) = claimed.iter().find(|(other, _)| is_same_store(other, store)) {
                let shown = store.local_path().map_or_else(|| store.to_string(), |path| path.display().to_string());
                let message = format!("{shown} is a store of a {of} already");
                claimed.truncate(known);
                return Err(
                    Error::new(ErrorCode::AlreadyExists, message).with_hint("give every store a file of its own")
                );
            }
            claimed.push((store.clone(), kind));
        }
        Ok(())
    }

    fn disclaim(&self, stores: &[Location]) {
        self.claimed.lock().retain(|(claimed, _)| !stores.iter().any(|store| is_same_store(claimed, store)));
    }

    /// Opens nothing, but makes the file of a store that is to be made.
    async fn make_store(&self, store: &NewStore) -> Result<StoreDocument> {
        let (spec, bytes) = match (store.place.clone(), store.size_bytes) {
            (Location::Local(spec), Some(bytes)) => (spec, bytes),
            (place, None) => return Ok(StoreDocument { place, made: None }),
            (place, Some(_)) => {
                return Err(invalid(format!("{place} has its size"), "leave size= out: it is for files that are made"));
            }
        };
        let size = Bytes(bytes - bytes % u64::from(CLIENT_SECTOR));
        let request =
            TargetRequest { spec: &spec, source: None, size, guest_alignment: CLIENT_SECTOR, overwrite: false };
        let made = self.backends.prepare(&request, &*self.env).await;
        let made = made.map_err(|error| of_target(&error))?;
        let reserved = self.backends.reserve(&made, size);
        let store = StoreDocument { place: Location::Local(spec), made: Some(made) };
        // A store that finds no room later has failed, and what it holds may be the only copy.
        if let Err(error) = reserved {
            self.discard(&store).await;
            return Err(match error.kind() {
                block::ErrorKind::NoSpace => Error::new(ErrorCode::NoSpace, error.to_string()).with_hint(
                    "make room or give a smaller size=; a file that you make yourself, named without size=, may be sparse",
                ),
                _ => of_target(&error),
            });
        }
        Ok(store)
    }

    /// Opens and locks the store at `place`.
    async fn open_store(&self, place: &Location) -> block::Result<OpenBackend> {
        let Self { backends, env, reconnect_limit, .. } = self;
        match place {
            Location::Local(spec) => {
                let options = BackendOpenOptions { lock_wait: LOCK_WAIT, ..BackendOpenOptions::default() };
                backends.open_backend(spec, &options, &**env).await
            }
            place => export::open(place, *reconnect_limit, env).unwrap_or_else(|| {
                Err(block::Error::new(block::ErrorKind::Unsupported, format!("{place} is no store")))
            }),
        }
    }

    async fn discard(&self, store: &StoreDocument) {
        let Some(made) = &store.made else { return };
        if let Err(error) = self.backends.discard(made, &*self.env).await {
            tracing::warn!(%error, store = %store.place, "the file of a pool could not be removed");
        }
    }
}

/// All pools of a kind on this host.
pub(crate) struct Pools<K: PoolKind> {
    context: PoolContext,
    known: Mutex<BTreeMap<String, Arc<Pool<K>>>>,
    /// Held while one comes or goes.
    membership: tokio::sync::Mutex<()>,
}

impl<K: PoolKind> Pools<K> {
    /// Those on record. One that cannot be read is left out: volumes that need it stay down.
    pub(crate) fn load(context: &PoolContext) -> Result<Self> {
        let mut known = BTreeMap::new();
        for found in document::load_all::<K>(&context.layout)? {
            match found {
                Ok(document) => {
                    let stores = document.stores.iter().map(|store| (store.place.clone(), K::NAME));
                    context.claimed.lock().extend(stores);
                    let name = document.name.clone();
                    known.insert(name, Arc::new(Pool::new(document, context.clone())));
                }
                Err(error) => tracing::error!(%error, "a {} cannot be used", K::NAME),
            }
        }
        let context = context.clone();
        Ok(Self { context, known: Mutex::new(known), membership: tokio::sync::Mutex::default() })
    }

    /// The pool `name`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Pool<K>>> {
        self.known.lock().get(name).cloned().ok_or_else(|| {
            let kind = K::NAME;
            Error::new(ErrorCode::NotFound, format!("there is no {kind} {name}"))
                .with_hint(format!("`transhume {kind} ls` lists them, `transhume {kind} create` makes one"))
        })
    }

    /// Of what kind the pool is that the export at `uri` is a store of, if it is one. Pools of other kinds count, too.
    pub(crate) fn kind_at(&self, uri: &NbdUri) -> Option<&'static str> {
        let claimed = self.context.claimed.lock();
        let is_there = |place: &Location| export_of(place).is_some_and(|export| export.is_same_export(uri));
        claimed.iter().find(|(place, _)| is_there(place)).map(|(_, kind)| *kind)
    }

    /// The files and block devices of this host that are their stores, and what kind of pool that is.
    pub(crate) fn stores(&self) -> Vec<(PathBuf, &'static str)> {
        let of = |pool: Arc<Pool<K>>| pool.document().stores.clone();
        let stores = self.list().into_iter().flat_map(of);
        stores.filter_map(|store| Some((store.place.local_path()?.to_owned(), K::NAME))).collect()
    }

    /// All of them, by name.
    pub(crate) fn list(&self) -> Vec<Arc<Pool<K>>> {
        self.known.lock().values().cloned().collect()
    }

    /// Makes a pool; `fit` says how it is divided, once it is known how many bytes it has. When this fails nothing was left behind.
    ///
    /// # Errors
    /// There is one of that name, a store cannot be used, or `fit` refuses.
    pub(crate) async fn make(
        &self,
        name: String,
        stores: Vec<NewStore>,
        settings: K::Settings,
        fit: impl FnOnce(&mut DocumentOf<K>) -> Result<()> + Send,
    ) -> Result<Arc<Pool<K>>> {
        let _membership = self.membership.lock().await;
        check_name(&name)?;
        if self.known.lock().contains_key(&name) {
            return Err(Error::new(ErrorCode::AlreadyExists, format!("there is a {} {name} already", K::NAME))
                .with_hint("choose another name, or remove that one first"));
        }
        let places: Vec<Location> = stores.iter().map(|store| store.place.clone()).collect();
        self.context.claim(&places, K::NAME)?;
        let mut made = Vec::new();
        let outcome = async {
            for store in &stores {
                made.push(self.context.make_store(store).await?);
            }
            let document = PoolDocument::new(name.clone(), made.clone(), settings);
            let pool = Pool::<K>::new(document, self.context.clone());
            let measured = pool.measure().await;
            let bytes = measured.map_err(|error| of_backend(&error, &format!("a store of the {}", K::NAME)))?;
            pool.update(|document| {
                document.bytes = bytes;
                fit(document)
            })?;
            Ok(Arc::new(pool))
        };
        let outcome = outcome.await;
        match &outcome {
            Ok(pool) => _ = self.known.lock().insert(name, Arc::clone(pool)),
            Err(_) => {
                for store in &made {
                    self.context.discard(store).await;
                }
                self.context.disclaim(&places);
            }
        }
        outcome
    }

    /// Has store `number` of `pool` be `store` from now on. A file that was made for what it was is removed. `change` changes what else is on
    /// record, or refuses. When this fails nothing was left behind.
    ///
    /// # Errors
    /// The store cannot be used or is too small, or `change` refuses.
    pub(crate) async fn replace_store(
        &self,
        pool: &Pool<K>,
        (number, store): (usize, NewStore),
        change: impl FnOnce(&mut DocumentOf<K>) -> Result<()> + Send,
    ) -> Result<()> {
        let _membership = self.membership.lock().await;
        let place = store.place.clone();
        self.context.claim(std::slice::from_ref(&place), K::NAME)?;
        let mut made = None;
        let replaced = async {
            let store = self.context.make_store(&store).await?;
            made = Some(store.clone());
            let opened = self.context.open_store(&store.place).await;
            let opened = opened.map_err(|error| of_backend(&error, &format!("a store of the {}", K::NAME)))?;
            let (has, needs) = (opened.device.size(), Bytes(pool.document().bytes));
            if has < needs {
                let message = format!("{place} has {has}, and the other store {needs}");
                return Err(Error::new(ErrorCode::NoSpace, message).with_hint("give a store that is no smaller"));
            }
            pool.replace_store(number, (store, opened), change).await
        };
        let replaced = replaced.await;
        match &replaced {
            Ok(before) => {
                self.context.disclaim(std::slice::from_ref(&before.place));
                self.context.discard(before).await;
            }
            Err(_) => {
                if let Some(store) = &made {
                    self.context.discard(store).await;
                }
                self.context.disclaim(std::slice::from_ref(&place));
            }
        }
        replaced.map(drop)
    }

    /// Removes a pool that no volume has a part of, with the files that were made for it.
    ///
    /// # Errors
    /// There is none of that name, or it is in use; `hint` says what to do then.
    pub(crate) async fn unmake(&self, name: &str, hint: &str) -> Result<Arc<Pool<K>>> {
        let _membership = self.membership.lock().await;
        let pool = self.get(name)?;
        // From here on no volume gets a part, so none comes between the look and the removal.
        pool.update(|document| {
            document.draining = true;
            let volumes = document.volumes();
            let has = match volumes.len() {
                0 => return Ok(()),
                1 => "has",
                _ => "have",
            };
            let message = format!("{} {has} a part of the {} {name}", volumes.join(", "), K::NAME);
            Err(Error::new(ErrorCode::InUse, message).with_hint(hint))
        })?;
        document::remove::<K>(&self.context.layout, name)?;
        self.known.lock().remove(name);
        pool.close().await;
        let stores = pool.document().stores.clone();
        for store in &stores {
            self.context.discard(store).await;
        }
        self.context.disclaim(&stores.into_iter().map(|store| store.place).collect::<Vec<_>>());
        Ok(pool)
    }

    /// Gives back what no volume's record names: `layers` are those that records do name.
    pub(crate) fn keep_only(&self, layers: &BTreeSet<Uuid>) {
        for pool in self.list() {
            pool.give_back(|layer| !layers.contains(&layer));
        }
    }

    /// Gives back the partition of `layer`, which no record names any more.
    pub(crate) fn give_back(&self, layer: Uuid) {
        for pool in self.list() {
            pool.give_back(|other| other == layer);
        }
    }
}

fn is_same_store(one: &Location, other: &Location) -> bool {
    match (export_of(one), export_of(other)) {
        (Some(one), Some(other)) => one.is_same_export(&other),
        _ => one.local_path().is_some() && one.local_path() == other.local_path(),
    }
}

fn export_of(place: &Location) -> Option<NbdUri> {
    match place {
        Location::Foreign(export) => export.uri().ok(),
        Location::Local(_) | Location::Remote(_) => None,
    }
}
