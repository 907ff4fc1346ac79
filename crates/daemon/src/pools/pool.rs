//! A pool while the daemon runs: its record, and its stores once somebody needs them.

use std::collections::BTreeMap;

use block::{Bytes, Device};
use parking_lot::{Mutex, MutexGuard};

use super::document::{self, DocumentOf, StoreDocument};
use super::giving_back::Leaving;
use super::{PoolContext, PoolKind};
use crate::location::Location;
use crate::open_backend::{BackendOpenOptions, OpenBackend, QemuRule};
use crate::problem::Result;

/// A pool.
pub(crate) struct Pool<K: PoolKind> {
    pub(super) context: PoolContext,
    document: Mutex<DocumentOf<K>>,
    pub(super) leaving: Mutex<Leaving>,
    /// Its stores with their locks, each from its first use on.
    open: tokio::sync::Mutex<BTreeMap<usize, OpenStore>>,
}

/// What is open of a store: each file or block device, or export, to which its name has led while somebody used it.
#[derive(Default)]
struct OpenStore {
    found: Vec<OpenFile>,
}

/// A file or block device, or an export, with its lock. One that has grown was opened again, and the last one is used.
struct OpenFile {
    opened: Vec<OpenBackend>,
}

impl OpenStore {
    fn of(open_backend: OpenBackend) -> Self {
        let mut store = Self::default();
        store.add(open_backend);
        store
    }

    /// That to which its name leads now, if that is open.
    fn named(&self) -> Option<Device> {
        let mut opened = self.found.iter().filter_map(|file| file.opened.last());
        opened.find(|open_backend| !open_backend.is_renamed()).map(|open_backend| open_backend.device.clone())
    }

    /// Its name has led to `open_backend`, which is in use from now on.
    fn add(&mut self, open_backend: OpenBackend) {
        self.found.push(OpenFile { opened: vec![open_backend] });
    }

    /// What is open as `known` has grown and was opened `again`.
    fn add_grown(&mut self, known: &Device, again: OpenBackend) {
        let is_known = |open_backend: &OpenBackend| open_backend.device.is_same(known);
        if let Some(file) = self.found.iter_mut().find(|file| file.opened.iter().any(is_known)) {
            file.opened.push(again);
        }
    }

    /// Lets go of what nobody uses.
    fn drop_unused(&mut self) {
        self.found.retain(|file| file.opened.iter().any(OpenBackend::is_used));
    }
}

impl<K: PoolKind> Pool<K> {
    pub(super) fn new(document: DocumentOf<K>, context: PoolContext) -> Self {
        Self { context, document: Mutex::new(document), leaving: Mutex::default(), open: tokio::sync::Mutex::default() }
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
            // Its lock stays while this is used.
            let device = self.device(number).await?;
            let known = device.size();
            let place = self.document().stores[number].place.clone();
            let Location::Local(spec) = place else {
                // An export is as large as it was.
                least = least.min(known.get());
                continue;
            };
            let now = self.context.backends.size(spec.path());
            let now = now.map_err(|error| block::Error::from_os(error, format!("looking at {spec}")))?;
            if now > known {
                let again =
                    BackendOpenOptions { unlocked: true, qemu: QemuRule::Later, ..BackendOpenOptions::default() };
                let store = self.context.backends.open_backend(&spec, &again, &*self.context.env).await?;
                self.open.lock().await.entry(number).or_default().add_grown(&device, store);
            }
            least = least.min(self.device(number).await?.size().get()).min(now.get());
        }
        Ok(least)
    }

    /// Store `number`, opened and locked by now: that to which its name leads. Whoever uses what it has led to before goes on with that.
    pub(crate) async fn device(&self, number: usize) -> block::Result<Device> {
        let mut open = self.open.lock().await;
        let store = open.entry(number).or_default();
        if let Some(device) = store.named() {
            return Ok(device);
        }
        store.drop_unused();
        let place = self.document().stores[number].place.clone();
        let open_backend = self.context.open_store(&place).await?;
        let device = open_backend.device.clone();
        store.add(open_backend);
        Ok(device)
    }

    /// Lets those of its stores go that nobody uses: what was refused must not be kept from whoever puts it right.
    pub(crate) async fn close_unused(&self) {
        self.open.lock().await.values_mut().for_each(OpenStore::drop_unused);
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
        open.insert(number, OpenStore::of(open_backend));
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
