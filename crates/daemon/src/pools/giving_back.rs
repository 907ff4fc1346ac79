//! Parts that no record names any more, until the pool's record does not, either.
//!
//! ```text
//!   named by nobody ──▶ leaving ──struck off the pool's record──▶ free
//!                         │  ▲
//!                         └──┘ that could not be stored: again after 100 ms, 200 ms, ... 30 s, for an hour
//! ```
//!
//! A state directory that fails for a moment, or is full, must not cost the next volume its room. A part stays leaving when the hour is over;
//! whatever is given back next, or the next start, strikes it off. Its layer's number is never another's, so it may be struck off at any time.
//! Nobody waits for this: a daemon that ends meanwhile leaves the rest to the next one.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use env::{EnvRef, Moment};
use uuid::Uuid;

use super::{Pool, PoolKind};
use crate::problem::Result;

/// A part that could not be struck off is tried again after this at first, and after twice as long each time, up to the limit.
const REST: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(30);
/// How long that goes on after the last part that could not be struck off.
const LIMIT: Duration = Duration::from_secs(3600);

/// The parts of a pool that are on record although no volume's record names them.
#[derive(Default)]
pub(super) struct Leaving {
    layers: BTreeSet<Uuid>,
    /// Until when somebody tries to strike them off; none if nobody does.
    tried_until: Option<Moment>,
}

impl<K: PoolKind> Pool<K> {
    /// Gives back those partitions whose layer `is_gone`: no record names it, nor will again. If the state directory fails that is done
    /// later.
    pub(super) fn give_back(self: &Arc<Self>, is_gone: impl Fn(Uuid) -> bool) {
        let layers = self.document().partitions.iter().map(|partition| partition.layer).collect::<Vec<_>>();
        let gone = layers.into_iter().filter(|layer| is_gone(*layer)).collect::<Vec<_>>();
        if gone.is_empty() {
            return;
        }
        self.leaving.lock().layers.extend(gone);
        let Err(error) = self.strike_off() else { return };
        tracing::warn!(pool = self.name(), %error, "a part of a {} cannot be given back yet: it is tried again", K::NAME);
        let env = &self.context.env;
        if self.leaving.lock().tried_until.replace(env.now() + LIMIT).is_none() {
            env.spawn(Box::pin(Self::strike_off_later(Arc::downgrade(self), Arc::clone(env))));
        }
    }

    /// Strikes off what is leaving.
    fn strike_off(&self) -> Result<()> {
        // Held meanwhile: a record that is removed in between must not come back.
        let mut leaving = self.leaving.lock();
        let is_listed = self.document().partitions.iter().any(|partition| leaving.layers.contains(&partition.layer));
        if is_listed {
            self.update(|document| {
                document.partitions.retain(|partition| !leaving.layers.contains(&partition.layer));
                Ok(())
            })?;
        }
        leaving.layers.clear();
        Ok(())
    }

    async fn strike_off_later(this: Weak<Self>, env: EnvRef) {
        let mut rest = REST;
        loop {
            env.sleep(rest).await;
            rest = (rest * 2).min(REST_MAX);
            let Some(pool) = this.upgrade() else { return };
            let failure = pool.strike_off().err();
            let mut leaving = pool.leaving.lock();
            let is_late = leaving.tried_until.is_none_or(|until| env.now() >= until);
            // Another one may have come to be tried since.
            if is_late || leaving.layers.is_empty() {
                leaving.tried_until = None;
                drop(leaving);
                if let Some(error) = failure {
                    tracing::error!(pool = pool.name(), %error, "a part of a {} is given back by the next start", K::NAME);
                }
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use env::RealFiles;
    use env::testing::PausedEnv;
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::platform::RealBackends;
    use crate::pools::{DocumentOf, Partition, PoolContext, PoolDocument};
    use crate::state_dir::Layout;

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

    fn pool_with_parts(folder: &Path, env: &EnvRef, layers: &[u128]) -> Arc<Pool<PlainKind>> {
        let layout = Layout::new(folder, RealFiles::shared());
        let context =
            PoolContext::new(layout, Arc::new(RealBackends::default()), Arc::clone(env), Duration::from_secs(1));
        let mut document = PoolDocument::new("p".to_owned(), Vec::new(), Nothing {});
        document.partitions =
            layers.iter().map(|layer| Partition::new(Uuid::from_u128(*layer), "a".to_owned(), Nothing {})).collect();
        Arc::new(Pool::new(document, context))
    }

    fn layers_of(pool: &Pool<PlainKind>) -> Vec<u128> {
        pool.document().partitions.iter().map(|partition| partition.layer.as_u128()).collect()
    }

    fn on_record(folder: &Path) -> Vec<u128> {
        let text = std::fs::read(folder.join("caches/p.json")).expect("it is on record");
        let document: DocumentOf<PlainKind> = serde_json::from_slice(&text).expect("it is readable");
        document.partitions.iter().map(|partition| partition.layer.as_u128()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn parts_are_struck_off_once_the_state_directory_works_and_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let env = PausedEnv::shared(1);
        let pool = pool_with_parts(folder.path(), &env, &[1, 2, 3]);
        // Without its folder no record can be stored.
        pool.give_back(|layer| layer.as_u128() == 1);
        env.sleep(REST_MAX).await;
        pool.give_back(|layer| layer.as_u128() == 2);
        env.sleep(REST_MAX).await;
        assert_eq!(layers_of(&pool), [1, 2, 3], "nothing has changed");
        std::fs::create_dir_all(folder.path().join("caches")).expect("it is made");
        env.sleep(REST_MAX).await;
        assert_eq!((layers_of(&pool), on_record(folder.path())), (vec![3], vec![3]));
        assert!(pool.leaving.lock().tried_until.is_none(), "somebody tries for ever");
        // What is gone is not written again.
        std::fs::remove_file(folder.path().join("caches/p.json")).expect("it is there");
        pool.give_back(|layer| layer.as_u128() == 1);
        env.sleep(REST_MAX * 2).await;
        assert!(!folder.path().join("caches/p.json").exists());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_tries_for_ever_and_what_is_given_back_later_takes_along_what_was_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let env = PausedEnv::shared(1);
        let pool = pool_with_parts(folder.path(), &env, &[1, 2, 3]);
        pool.give_back(|layer| layer.as_u128() == 1);
        env.sleep(LIMIT + 2 * REST_MAX).await;
        assert!(pool.leaving.lock().tried_until.is_none(), "somebody tries for ever");
        std::fs::create_dir_all(folder.path().join("caches")).expect("it is made");
        env.sleep(REST_MAX * 2).await;
        assert_eq!(layers_of(&pool), [1, 2, 3], "somebody tries still");
        pool.give_back(|layer| layer.as_u128() == 2);
        assert_eq!((layers_of(&pool), on_record(folder.path())), (vec![3], vec![3]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pool_that_is_gone_is_not_kept_for_what_was_to_be_struck_off() {
        let folder = tempfile::tempdir().expect("a folder");
        let env = PausedEnv::shared(1);
        let pool = pool_with_parts(folder.path(), &env, &[1]);
        pool.give_back(|_| true);
        env.sleep(2 * REST).await;
        let watched = Arc::downgrade(&pool);
        drop(pool);
        assert!(watched.upgrade().is_none(), "whoever tries has it");
    }
}
