//! Surrogates: stores of the daemon in which the popular data of volumes is kept while they are moved (WAIO), with a partition for
//! each volume.
//!
//! ```text
//!   a partition:  free ──taken, on record──▶ of a layer ──header made──▶ the layer on the volume's record ──▶ in use
//!                  ▲                              │ a crash before that: no record names the layer          │
//!                  └──────────────────────────────┴───────────── given back ◀── commit or drain on record ──┘
//! ```
//!
//! The volume's record is the authority: a partition is given back only once no record names its layer any more. What holds the
//! bytes is `filters::Redirect`; what puts that into a volume's stack is `stack::redirect`.

mod document;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::v1::{self, Error, ErrorCode, StoreRequest, SurrogateRequest};
use backends::{BackendSpec, TargetRequest};
use block::Bytes;
use env::EnvRef;
use parking_lot::Mutex;
use uuid::Uuid;

use self::document::{StoreDocument, SurrogateDocument};
pub(crate) use self::store::Surrogate;
use crate::open_backend::CLIENT_SECTOR;
use crate::platform::Backends;
use crate::problem::{Result, invalid, of_backend, of_target};
use crate::state_dir::{Layout, check_name};

/// A partition is no smaller: some chunks fit beside their maps.
const PARTITION_BYTES_MIN: u64 = 2 << 20;
/// The unit of what is popular.
const CHUNK_BYTES_MIN: u64 = 64 << 10;
const CHUNK_BYTES_MAX: u64 = 1 << 20;
/// So many volumes have room if nothing is said.
const PARTITIONS_DEFAULT: u64 = 8;

/// All surrogates of this host.
pub(crate) struct Surrogates {
    layout: Layout,
    backends: Arc<dyn Backends>,
    env: EnvRef,
    known: Mutex<BTreeMap<String, Arc<Surrogate>>>,
    /// Held while one comes or goes.
    membership: tokio::sync::Mutex<()>,
}

impl Surrogates {
    /// Those on record. One that cannot be read is left out: volumes that need it stay down.
    pub(crate) fn load(layout: Layout, backends: Arc<dyn Backends>, env: EnvRef) -> Result<Self> {
        let mut known = BTreeMap::new();
        for found in document::load_all(&layout)? {
            match found {
                Ok(document) => {
                    let name = document.name.clone();
                    let surrogate = Surrogate::new(document, layout.clone(), Arc::clone(&backends), Arc::clone(&env));
                    known.insert(name, Arc::new(surrogate));
                }
                Err(error) => tracing::error!(%error, "a surrogate cannot be used"),
            }
        }
        Ok(Self { layout, backends, env, known: Mutex::new(known), membership: tokio::sync::Mutex::default() })
    }

    /// The surrogate `name`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Surrogate>> {
        self.known.lock().get(name).cloned().ok_or_else(|| {
            Error::new(ErrorCode::NotFound, format!("there is no surrogate {name}"))
                .with_hint("`transhume surrogate ls` lists them, `transhume surrogate create` makes one")
        })
    }

    /// All of them, by name.
    pub(crate) fn list(&self) -> Vec<Arc<Surrogate>> {
        self.known.lock().values().cloned().collect()
    }

    /// Makes a surrogate. When this fails nothing was left behind.
    ///
    /// # Errors
    /// There is one of that name, the request makes no sense, or a store cannot be used.
    pub(crate) async fn create(&self, request: SurrogateRequest) -> Result<v1::Surrogate> {
        let _membership = self.membership.lock().await;
        let SurrogateRequest { name, stores, partition_bytes, chunk_bytes } = request;
        check_name(&name)?;
        let chunk_bytes = chunk_bytes.unwrap_or(CHUNK_BYTES_MAX);
        if !chunk_bytes.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            let message = format!("{chunk_bytes} bytes cannot be the unit of a surrogate");
            return Err(invalid(message, "give a power of two from 64KiB to 1MiB"));
        }
        if self.known.lock().contains_key(&name) {
            return Err(Error::new(ErrorCode::AlreadyExists, format!("there is a surrogate {name} already"))
                .with_hint("choose another name, or remove that one first"));
        }
        self.check_stores(&stores)?;
        let mut made = Vec::new();
        let outcome = async {
            for store in &stores {
                made.push(self.make_store(store).await?);
            }
            let document = SurrogateDocument::new(name, made.clone(), chunk_bytes);
            self.measure_and_keep(document, partition_bytes).await
        };
        let outcome = outcome.await;
        if outcome.is_err() {
            made.iter().for_each(|store| self.discard(store));
        }
        outcome
    }

    fn check_stores(&self, stores: &[StoreRequest]) -> Result<()> {
        if !(1..=2).contains(&stores.len()) {
            return Err(invalid("a surrogate has one store or two", "give --store once, or twice for two devices"));
        }
        let mut used: BTreeSet<std::path::PathBuf> = BTreeSet::new();
        for surrogate in self.list() {
            used.extend(surrogate.specs().iter().map(|spec| spec.path().to_owned()));
        }
        for store in stores {
            let spec = parse(store)?;
            if !used.insert(spec.path().to_owned()) {
                let message = format!("{} is a store of a surrogate already", spec.path().display());
                return Err(
                    Error::new(ErrorCode::AlreadyExists, message).with_hint("give every store a file of its own")
                );
            }
        }
        Ok(())
    }

    async fn make_store(&self, store: &StoreRequest) -> Result<StoreDocument> {
        let spec = parse(store)?;
        let Some(bytes) = store.size_bytes else { return Ok(StoreDocument { spec, made: None }) };
        let size = Bytes(bytes - bytes % u64::from(CLIENT_SECTOR));
        let request =
            TargetRequest { spec: &spec, source: None, size, guest_alignment: CLIENT_SECTOR, overwrite: false };
        let made = self.backends.prepare(&request, &*self.env).await;
        let made = made.map_err(|error| of_target(&error))?;
        Ok(StoreDocument { spec, made: Some(made) })
    }

    async fn measure_and_keep(
        &self,
        document: SurrogateDocument,
        partition_bytes: Option<u64>,
    ) -> Result<v1::Surrogate> {
        let (name, chunk_bytes) = (document.name.clone(), document.chunk_bytes);
        let (backends, env) = (Arc::clone(&self.backends), Arc::clone(&self.env));
        let surrogate = Surrogate::new(document, self.layout.clone(), backends, env);
        let bytes = surrogate.measure().await.map_err(|error| of_backend(&error, "a store of the surrogate"))?;
        let least = PARTITION_BYTES_MIN.max(16 * chunk_bytes);
        let partition_bytes = partition_bytes.unwrap_or(bytes / PARTITIONS_DEFAULT).max(least);
        let partition_bytes = partition_bytes - partition_bytes % (1 << 20);
        if partition_bytes > bytes {
            let message = format!("a store of {} has no room for a part of {}", Bytes(bytes), Bytes(partition_bytes));
            return Err(Error::new(ErrorCode::NoSpace, message)
                .with_hint("give larger stores, or smaller parts; 16 chunks, or 2MiB, are the least"));
        }
        surrogate.resize(bytes, partition_bytes)?;
        let shown = surrogate.show();
        self.known.lock().insert(name, Arc::new(surrogate));
        Ok(shown)
    }

    /// Has a surrogate take no further volume. Those that have a part of it keep it until their moves are over.
    ///
    /// # Errors
    /// There is none of that name, or that could not be stored.
    pub(crate) fn drain(&self, name: &str) -> Result<Arc<Surrogate>> {
        let surrogate = self.get(name)?;
        surrogate.update(|document| document.draining = true)?;
        Ok(surrogate)
    }

    /// Removes a surrogate that no volume has a part of, with the files that were made for it.
    ///
    /// # Errors
    /// There is none of that name, or it is in use.
    pub(crate) async fn remove(&self, name: &str) -> Result<v1::Surrogate> {
        let _membership = self.membership.lock().await;
        let surrogate = self.get(name)?;
        // From here on no volume gets a part, so none comes between the look and the removal.
        surrogate.update_if(|document| {
            document.draining = true;
            let Some(partition) = document.partitions.first() else { return Ok(()) };
            let message = format!("{} has a part of the surrogate {name}", partition.volume);
            let hint = format!(
                "wait until its move is over, or cancel that; `transhume surrogate drain {name}` keeps others out"
            );
            Err(Error::new(ErrorCode::InUse, message).with_hint(hint))
        })?;
        let shown = surrogate.show();
        document::remove(&self.layout, name)?;
        self.known.lock().remove(name);
        surrogate.close().await;
        surrogate.stores().iter().for_each(|store| self.discard(store));
        Ok(shown)
    }

    fn discard(&self, store: &StoreDocument) {
        let Some(made) = &store.made else { return };
        if let Err(error) = self.backends.discard(made) {
            tracing::warn!(%error, store = %store.spec, "the file of a surrogate could not be removed");
        }
    }

    /// Gives back what no volume's record names: `layers` are those that records do name.
    pub(crate) fn keep_only(&self, layers: &BTreeSet<Uuid>) {
        for surrogate in self.list() {
            surrogate.give_back(|layer| !layers.contains(&layer));
        }
    }

    /// Gives back the partition of `layer`, which no record names any more.
    pub(crate) fn give_back(&self, layer: Uuid) {
        for surrogate in self.list() {
            surrogate.give_back(|other| other == layer);
        }
    }
}

fn parse(store: &StoreRequest) -> Result<BackendSpec> {
    store.place.parse::<BackendSpec>().map_err(|error| {
        invalid(format!("\"{}\" is no place for a surrogate: {error}", store.place), "write file:PATH,size=40GiB")
    })
}
