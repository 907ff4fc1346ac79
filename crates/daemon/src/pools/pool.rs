//! A pool while the daemon runs: its record, and its stores once somebody needs them.

use std::collections::BTreeMap;

use block::{Bytes, Device};
use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use super::document::{self, DocumentOf, StoreDocument};
use super::{PoolContext, PoolKind};
use crate::location::Location;
use crate::open_backend::{BackendOpenOptions, OpenBackend, QemuRule};
use crate::problem::Result;

/// A pool.
pub(crate) struct Pool<K: PoolKind> {
    pub(super) context: PoolContext,
    document: Mutex<DocumentOf<K>>,
    /// Its stores with their locks, each from its first use on. One that has grown was opened again, and the last one is used.
    open: tokio::sync::Mutex<BTreeMap<usize, Vec<OpenBackend>>>,
}

impl<K: PoolKind> Pool<K> {
    pub(super) fn new(document: DocumentOf<K>, context: PoolContext) -> Self {
        Self { context, document: Mutex::new(document), open: tokio::sync::Mutex::default() }
    }

    /// What it is called.
    pub(crate) fn name(&self) -> String {
        self.document().name.clone()
    }

    /// What is on record of it. It is not kept over an await.
    pub(crate) fn document(&self) -> MutexGuard<'_, DocumentOf<K>> {
        self.document.lock()
    }

    /// How many stores it has.
    pub(crate) fn stores(&self) -> usize {
        self.document().stores.len()
    }

    /// Changes what is on record, unless `change` refuses. When that cannot be stored nothing has changed.
    pub(crate) fn update(&self, change: impl FnOnce(&mut DocumentOf<K>) -> Result<()>) -> Result<()> {
        let mut document = self.document.lock();
        let mut changed = document.clone();
        change(&mut changed)?;
        document::store::<K>(&self.context.layout, &changed)?;
        *document = changed;
        Ok(())
    }

    /// Gives back those partitions whose layer `is_gone`. One that cannot be struck off now is struck off by the next start.
    pub(super) fn give_back(&self, is_gone: impl Fn(Uuid) -> bool) {
        if !self.document().partitions.iter().any(|partition| is_gone(partition.layer)) {
            return;
        }
        let struck = self.update(|document| {
            document.partitions.retain(|partition| !is_gone(partition.layer));
            Ok(())
        });
        if let Err(error) = struck {
            tracing::warn!(pool = self.name(), %error, "a part of a {} is given back by the next start", K::NAME);
        }
    }

    /// How much its stores have for volumes as they are open, in bytes: as much as the smallest one.
    pub(crate) async fn measure(&self) -> block::Result<u64> {
        let mut least = u64::MAX;
        for number in 0..self.stores() {
            least = least.min(self.device(number).await?.size().get());
        }
        Ok(least)
    }

    /// The same, of what they are by now: one that is larger than when it was opened is opened once more beside that.
    pub(crate) async fn measure_again(&self) -> block::Result<u64> {
        let mut least = u64::MAX;
        for number in 0..self.stores() {
            let known = self.device(number).await?.size();
            let place = self.document().stores[number].place.clone();
            let Location::Local(spec) = place else {
                // An export is as large as it was.
                least = least.min(known.get());
                continue;
            };
            let now = self.context.backends.size(spec.path());
            let now = now.map_err(|error| block::Error::from_os(error, format!("looking at {spec}")))?;
            if now > known {
                // The lock is held already, and stays.
                let again =
                    BackendOpenOptions { unlocked: true, qemu: QemuRule::Later, ..BackendOpenOptions::default() };
                let store = self.context.backends.open_backend(&spec, &again, &*self.context.env).await?;
                self.open.lock().await.entry(number).or_default().push(store);
            }
            least = least.min(self.device(number).await?.size().get()).min(now.get());
        }
        Ok(least)
    }

    /// Store `number`, opened and locked by now.
    pub(crate) async fn device(&self, number: usize) -> block::Result<Device> {
        let mut open = self.open.lock().await;
        if let Some(store) = open.get(&number).and_then(|stores| stores.last()) {
            return Ok(store.device.clone());
        }
        let place = self.document().stores[number].place.clone();
        let store = self.context.open_store(&place).await?;
        let device = store.device.clone();
        open.insert(number, vec![store]);
        Ok(device)
    }

    /// Has store `number` be `store` from now on, which is opened by now, and gives what it was. `change` changes what else is on
    /// record, or refuses.
    pub(super) async fn replace_store(
        &self,
        number: usize,
        (store, open_backend): (StoreDocument, OpenBackend),
        change: impl FnOnce(&mut DocumentOf<K>) -> Result<()> + Send,
    ) -> Result<StoreDocument> {
        let mut open = self.open.lock().await;
        let mut before = None;
        self.update(|document| {
            change(document)?;
            before = Some(std::mem::replace(&mut document.stores[number], store));
            Ok(())
        })?;
        // Whoever has lost it asks it nothing more.
        open.insert(number, vec![open_backend]);
        Ok(before.expect("the change was made"))
    }

    /// Has the file of store `number`, which the daemon has made, `bytes` of room.
    pub(crate) fn grow(&self, number: usize, bytes: Bytes) -> std::io::Result<()> {
        let place = self.document().stores[number].place.clone();
        let path = place.local_path().ok_or(std::io::ErrorKind::Unsupported)?;
        self.context.layout.files().reserve(path, bytes.get())
    }

    /// Lets its stores go.
    pub(super) async fn close(&self) {
        self.open.lock().await.clear();
    }
}
