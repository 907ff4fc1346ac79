//! A surrogate while the daemon runs: its record, and its stores once somebody needs them.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::v1::{self, ErrorCode};
use backends::BackendSpec;
use block::{Bytes, Device, Error, ErrorKind, Geometry, IoFuture};
use env::EnvRef;
use filters::{MemberLoss, Redirect, Region, ReplicaPair};
use parking_lot::Mutex;
use uuid::Uuid;

use super::document::{self, StoreDocument, SurrogateDocument};
use crate::open_backend::{BackendOpenOptions, OpenBackend};
use crate::platform::Backends;
use crate::problem::Result;
use crate::reject_all::reject_all;
use crate::state_dir::Layout;

/// A surrogate.
pub(crate) struct Surrogate {
    layout: Layout,
    backends: Arc<dyn Backends>,
    env: EnvRef,
    document: Mutex<SurrogateDocument>,
    /// Its stores with their locks, each from its first use on.
    open: tokio::sync::Mutex<BTreeMap<usize, OpenBackend>>,
}

impl Surrogate {
    pub(super) fn new(document: SurrogateDocument, layout: Layout, backends: Arc<dyn Backends>, env: EnvRef) -> Self {
        Self { layout, backends, env, document: Mutex::new(document), open: tokio::sync::Mutex::default() }
    }

    /// What it is called.
    pub(crate) fn name(&self) -> String {
        self.document.lock().name.clone()
    }

    /// How the API shows it.
    pub(crate) fn show(&self) -> v1::Surrogate {
        self.document.lock().show()
    }

    /// Whether what it holds is held by one device alone.
    pub(crate) fn is_sole(&self) -> bool {
        self.document.lock().stores.len() < 2
    }

    /// The unit of what is popular, in bytes.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.document.lock().chunk_bytes
    }

    /// Where its stores are.
    pub(crate) fn specs(&self) -> Vec<BackendSpec> {
        self.document.lock().stores.iter().map(|store| store.spec.clone()).collect()
    }

    pub(super) fn stores(&self) -> Vec<StoreDocument> {
        self.document.lock().stores.clone()
    }

    /// Changes what is on record. When that cannot be stored nothing has changed.
    pub(super) fn update(&self, change: impl FnOnce(&mut SurrogateDocument)) -> Result<()> {
        self.update_if(|document| {
            change(document);
            Ok(())
        })
    }

    /// The same, unless `change` refuses.
    pub(super) fn update_if(&self, change: impl FnOnce(&mut SurrogateDocument) -> Result<()>) -> Result<()> {
        let mut document = self.document.lock();
        let mut changed = document.clone();
        change(&mut changed)?;
        document::store(&self.layout, &changed)?;
        *document = changed;
        Ok(())
    }

    /// How much its stores have for volumes, in bytes: as much as the smaller one.
    pub(super) async fn measure(&self) -> block::Result<u64> {
        let mut least = u64::MAX;
        for number in 0..self.specs().len() {
            least = least.min(self.device(number).await?.size().get());
        }
        Ok(least)
    }

    pub(super) fn resize(&self, bytes: u64, partition_bytes: u64) -> Result<()> {
        self.update(|document| (document.bytes, document.partition_bytes) = (bytes, partition_bytes))
    }

    /// Gives a partition to `layer` of `volume`. Done means durable.
    ///
    /// # Errors
    /// It is being drained or full, or that could not be stored.
    pub(crate) fn take(&self, layer: Uuid, volume: &str) -> Result<()> {
        self.update_if(|document| document.take(layer, volume))
    }

    /// Gives back those partitions whose layer `is_gone`. One that cannot be struck off now is struck off by the next start.
    pub(super) fn give_back(&self, is_gone: impl Fn(Uuid) -> bool) {
        if !self.document.lock().partitions.iter().any(|partition| is_gone(partition.layer)) {
            return;
        }
        if let Err(error) = self.update(|document| document.partitions.retain(|partition| !is_gone(partition.layer))) {
            tracing::warn!(surrogate = self.name(), %error, "a part of a surrogate is given back by the next start");
        }
    }

    /// The partition of `layer` as one device.
    ///
    /// # Errors
    /// It has none, or a store cannot be opened.
    pub(crate) async fn partition(self: &Arc<Self>, layer: Uuid) -> block::Result<Device> {
        let found = {
            let document = self.document.lock();
            document.find(layer).map(|partition| (document.extent_of(partition), partition.lost))
        };
        let Some((extent, lost)) = found else {
            let context = format!("the surrogate {} has no part of layer {layer}", self.name());
            return Err(Error::new(ErrorKind::NotFound, context));
        };
        let name = format!("{}'s part for {layer}", self.name());
        let mut members = Vec::new();
        for number in 0..self.specs().len() {
            let member = format!("store {number} of {name}");
            members.push(match lost == Some(number) {
                // Nobody asks it anything, so it need not be there.
                true => lost_member(&member, extent.length),
                false => Device::new(&member, Region::new(self.device(number).await?, extent)?),
            });
        }
        match (members.pop(), members.pop()) {
            (Some(second), Some(first)) => {
                let loss = Arc::new(LostMember { surrogate: Arc::clone(self), layer });
                let pair = ReplicaPair::new([first, second], lost, loss)?;
                let device = Device::new(&name, pair.clone());
                // A power loss may have left other maps in each store. A new part has none yet.
                if let (Ok(header), None) = (Redirect::inspect(&device).await, lost) {
                    pair.copy_to_second(&[header.maps()]).await?;
                }
                Ok(device)
            }
            (Some(only), None) => Ok(only),
            (None, _) => Err(Error::new(ErrorKind::Internal, "a surrogate without stores")),
        }
    }

    /// Store `number`, opened and locked by now.
    async fn device(&self, number: usize) -> block::Result<Device> {
        let mut open = self.open.lock().await;
        if let Some(store) = open.get(&number) {
            return Ok(store.device.clone());
        }
        let spec = self.specs().swap_remove(number);
        let store = self.backends.open_backend(&spec, &BackendOpenOptions::default(), &*self.env).await?;
        let device = store.device.clone();
        open.insert(number, store);
        Ok(device)
    }

    /// Lets its stores go.
    pub(super) async fn close(&self) {
        self.open.lock().await.clear();
    }
}

/// What stands for the part of a store that is lost.
fn lost_member(name: &str, size: Bytes) -> Device {
    reject_all(name, Geometry::of_size(size), ErrorKind::Disconnected, "this store of the surrogate is lost")
}

/// Has it on record that a store lacks something of a partition.
struct LostMember {
    surrogate: Arc<Surrogate>,
    layer: Uuid,
}

impl MemberLoss for LostMember {
    fn note<'a>(&'a self, member: usize, error: &'a Error) -> IoFuture<'a, ()> {
        let surrogate = &self.surrogate;
        tracing::error!(
            surrogate = surrogate.name(),
            store = member,
            error = error.chain(),
            "a store of a surrogate is lost"
        );
        let noted = surrogate.update_if(|document| {
            let of_it = document.partitions.iter_mut().find(|partition| partition.layer == self.layer);
            let gone =
                || api::v1::Error::new(ErrorCode::Internal, "a part of a surrogate that was given back is written to");
            of_it.ok_or_else(gone)?.lost = Some(member);
            Ok(())
        });
        block::ready(noted.map_err(|error| Error::new(ErrorKind::Io, error.message)))
    }
}
