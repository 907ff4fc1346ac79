//! The generations of a part while its layer is open.
//!
//! ```text
//!   opened: 6 ──ten minutes──▶ 7 ──ten minutes──▶ 8 ──the process is told to end──▶ 9
//! ```
//!
//! Whoever copies a store while its layer is open copies the generation of that moment, too. So another one is begun now and then, and one
//! more when the layer is left: a copy that comes back then is older. After a crash one that was made since the last of these is believed.
//! A generation that cannot be begun takes nothing from the layer: the one before stays valid.

use std::sync::{Arc, Weak};
use std::time::Duration;

use block::{Device, Extent, Result};
use env::EnvRef;
use filters::ReplicaPair;
use uuid::Uuid;

use super::{Pool, PoolKind};

/// How long a generation lasts at most while its layer is open.
const INTERVAL: Duration = Duration::from_secs(600);
/// How often it is looked whether the layer is still open.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What holds a part.
pub(crate) enum PartStores {
    /// One store.
    Only(Device),
    /// Two stores that hold the same.
    Pair(ReplicaPair),
}

impl PartStores {
    /// The stores that have everything, with their numbers.
    fn trusted(&self) -> Vec<(usize, Device)> {
        match self {
            Self::Only(device) => vec![(0, device.clone())],
            Self::Pair(pair) => pair.trusted_members(),
        }
    }
}

/// Begins generations of a part while its layer is open.
pub(crate) struct Renewal<K: PoolKind> {
    pool: Arc<Pool<K>>,
    layer: Uuid,
    pages: Extent,
    stores: PartStores,
    /// Held by who begins a generation. False once none is begun any more.
    is_open: tokio::sync::Mutex<bool>,
}

impl<K: PoolKind> Renewal<K> {
    /// Of the part that `layer` has of `pool`, which `stores` hold, with the owner's `pages` in each of them.
    pub(crate) fn new(pool: &Arc<Pool<K>>, layer: Uuid, pages: Extent, stores: PartStores) -> Self {
        Self { pool: Arc::clone(pool), layer, pages, stores, is_open: tokio::sync::Mutex::new(true) }
    }

    /// Begins the next generation: from here on no older copy of a store is believed.
    async fn renew(&self) -> Result<()> {
        let is_open = self.is_open.lock().await;
        if !*is_open {
            return Ok(());
        }
        let generation = self.pool.begin_generation(self.layer)?;
        // Not before: one that has everything from here on says by itself in which generation that is.
        for (number, part) in self.stores.trusted() {
            self.pool.stamp((self.layer, generation), number, &part, self.pages).await?;
        }
        self.pool.end_generation(self.layer, generation)
    }

    async fn renew_or_say_why(&self) {
        if let Err(error) = self.renew().await {
            let (pool, layer, error) = (self.pool.name(), self.layer, error.chain());
            tracing::warn!(pool, %layer, error, "a generation could not be begun: the one before stays valid");
        }
    }

    /// Nobody writes to the part any more: begins a last generation.
    pub(crate) async fn leave(&self) {
        self.renew_or_say_why().await;
        self.close().await;
    }

    /// No generation is begun any more when this returns: the part may be another's.
    pub(crate) async fn close(&self) {
        *self.is_open.lock().await = false;
    }

    /// Begins a generation now and then until nobody has this any more.
    pub(crate) async fn watch(this: Weak<Self>, env: EnvRef) {
        let mut begun = env.now();
        while let Some(renewal) = this.upgrade() {
            if env.now().since(begun) >= INTERVAL {
                renewal.renew_or_say_why().await;
                begun = env.now();
            }
            drop(renewal);
            env.sleep(LOOK_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use block::{BLOCK_BYTES, Bytes, MemDevice};
    use env::RealFiles;
    use env::testing::PausedEnv;
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::platform::RealBackends;
    use crate::pools::{DocumentOf, Partition, PoolContext, PoolDocument};
    use crate::state_dir::Layout;

    const LAYER: Uuid = Uuid::from_u128(7);

    #[derive(Clone, Serialize, Deserialize)]
    struct Nothing {}

    struct PlainKind;

    impl PoolKind for PlainKind {
        type Settings = Nothing;
        type Place = Nothing;

        const NAME: &'static str = "plain pool";

        fn directory(layout: &Layout) -> PathBuf {
            layout.caches()
        }

        fn is_sound(_document: &DocumentOf<Self>) -> bool {
            true
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_generation_is_begun_now_and_then_once_more_at_the_end_and_never_after_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let layout = Layout::new(folder.path(), RealFiles::shared());
        std::fs::create_dir_all(layout.caches()).expect("it is made");
        let env = PausedEnv::shared(1);
        let backends = Arc::new(RealBackends::default());
        let context = PoolContext::new(layout, backends, Arc::clone(&env), Duration::from_secs(1));
        let mut document = PoolDocument::new("p".to_owned(), Vec::new(), Nothing {});
        document.partitions.push(Partition::new(LAYER, "a".to_owned(), Nothing {}));
        let pool = Arc::new(Pool::<PlainKind>::new(document, context));
        let (part, pages) = (Device::new("part", MemDevice::new(Bytes::mib(1))), Extent::whole(Bytes(BLOCK_BYTES)));
        let renewal = Arc::new(Renewal::new(&pool, LAYER, pages, PartStores::Only(part.clone())));
        env.spawn(Box::pin(Renewal::watch(Arc::downgrade(&renewal), Arc::clone(&env))));
        let mut seen = Vec::new();
        for _ in 0..3 {
            env.sleep(INTERVAL / 2).await;
            seen.push(pool.generation(LAYER));
            env.sleep(INTERVAL / 2).await;
        }
        assert_eq!(seen, [None, Some(1), Some(2)]);
        env.sleep(INTERVAL / 2).await;
        let before = pool.generation(LAYER).expect("it has one");
        renewal.leave().await;
        assert_eq!(pool.generation(LAYER), Some(before + 1), "a copy of while it was open is believed");
        pool.check_generation(LAYER, 0, &part, Some(pages)).await.expect("it is as it was left");
        env.sleep(INTERVAL * 2).await;
        assert_eq!(pool.generation(LAYER), Some(before + 1), "the part may be another's");
    }
}
