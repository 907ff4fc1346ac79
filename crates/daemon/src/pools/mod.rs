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
mod pool;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::v1::{Error, ErrorCode, StoreRequest};
use backends::{BackendSpec, TargetRequest};
use block::Bytes;
use env::EnvRef;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

pub(crate) use self::document::{DocumentOf, Partition, PoolDocument, StoreDocument};
pub(crate) use self::pool::Pool;
use crate::open_backend::CLIENT_SECTOR;
use crate::platform::Backends;
use crate::problem::{Result, invalid, of_backend, of_target};
use crate::state_dir::{Layout, check_name};

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
    /// The stores that there are, and of what kind of pool each is.
    claimed: Arc<Mutex<BTreeMap<PathBuf, &'static str>>>,
}

impl PoolContext {
    /// Where there are no pools yet.
    pub(crate) fn new(layout: Layout, backends: Arc<dyn Backends>, env: EnvRef) -> Self {
        Self { layout, backends, env, claimed: Arc::default() }
    }

    /// Claims the stores at `paths` for a new pool of `kind`.
    fn claim(&self, paths: &[PathBuf], kind: &'static str) -> Result<()> {
        let mut claimed = self.claimed.lock();
        let mut new = BTreeSet::new();
        for path in paths {
            let of = claimed.get(path).copied().or_else(|| (!new.insert(path)).then_some(kind));
            if let Some(of) = of {
                let message = format!("{} is a store of a {of} already", path.display());
                return Err(
                    Error::new(ErrorCode::AlreadyExists, message).with_hint("give every store a file of its own")
                );
            }
        }
        claimed.extend(paths.iter().map(|path| (path.clone(), kind)));
        Ok(())
    }

    fn disclaim<'a>(&self, paths: impl Iterator<Item = &'a Path>) {
        let mut claimed = self.claimed.lock();
        paths.for_each(|path| _ = claimed.remove(path));
    }

    /// Opens nothing, but makes the file of a store that is to be made.
    async fn make_store(&self, spec: BackendSpec, size_bytes: Option<u64>) -> Result<StoreDocument> {
        let Some(bytes) = size_bytes else { return Ok(StoreDocument { spec, made: None }) };
        let size = Bytes(bytes - bytes % u64::from(CLIENT_SECTOR));
        let request =
            TargetRequest { spec: &spec, source: None, size, guest_alignment: CLIENT_SECTOR, overwrite: false };
        let made = self.backends.prepare(&request, &*self.env).await;
        let made = made.map_err(|error| of_target(&error))?;
        Ok(StoreDocument { spec, made: Some(made) })
    }

    fn discard(&self, store: &StoreDocument) {
        let Some(made) = &store.made else { return };
        if let Err(error) = self.backends.discard(made) {
            tracing::warn!(%error, store = %store.spec, "the file of a pool could not be removed");
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
                    let stores = document.stores.iter().map(|store| (store.spec.path().to_owned(), K::NAME));
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
        stores: &[StoreRequest],
        settings: K::Settings,
        fit: impl FnOnce(&mut DocumentOf<K>) -> Result<()> + Send,
    ) -> Result<Arc<Pool<K>>> {
        let _membership = self.membership.lock().await;
        check_name(&name)?;
        if self.known.lock().contains_key(&name) {
            return Err(Error::new(ErrorCode::AlreadyExists, format!("there is a {} {name} already", K::NAME))
                .with_hint("choose another name, or remove that one first"));
        }
        let specs = stores.iter().map(|store| parse(store, K::NAME)).collect::<Result<Vec<_>>>()?;
        let paths: Vec<PathBuf> = specs.iter().map(|spec| spec.path().to_owned()).collect();
        self.context.claim(&paths, K::NAME)?;
        let mut made = Vec::new();
        let outcome = async {
            for (spec, store) in specs.into_iter().zip(stores) {
                made.push(self.context.make_store(spec, store.size_bytes).await?);
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
                made.iter().for_each(|store| self.context.discard(store));
                self.context.disclaim(paths.iter().map(PathBuf::as_path));
            }
        }
        outcome
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
        stores.iter().for_each(|store| self.context.discard(store));
        self.context.disclaim(stores.iter().map(|store| store.spec.path()));
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

fn parse(store: &StoreRequest, kind: &str) -> Result<BackendSpec> {
    store.place.parse::<BackendSpec>().map_err(|error| {
        invalid(format!("\"{}\" is no place for a {kind}: {error}", store.place), "write file:PATH,size=40GiB")
    })
}
