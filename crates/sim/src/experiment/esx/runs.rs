//! The moves that the figures need, each played once, several at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::{Error, Result};

use super::scene::{self, Scene, Seen};

/// What came of every move.
pub(super) struct Runs {
    seen: BTreeMap<Scene, Seen>,
}

impl Runs {
    /// Plays `scenes` with `seed`, `jobs` at once, and tells `progress` of each.
    pub(super) fn play(
        scenes: BTreeSet<Scene>,
        seed: u64,
        jobs: usize,
        progress: &(dyn Fn(String) + Sync),
    ) -> Result<Self> {
        let mut order: Vec<Scene> = scenes.into_iter().collect();
        // The longest first, so that nobody waits for one at the end.
        order.sort_by_key(|scene| (std::cmp::Reverse(scene.weight()), *scene));
        let (next, seen) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        let lock = "nobody panics while holding this";
        let worker = || {
            while let Some(scene) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                match scene::play(*scene, seed) {
                    Ok(what) => {
                        let mut seen = seen.lock().expect(lock);
                        let end = if what.switched { "moved" } else { "failed" };
                        let done = seen.len() + 1;
                        progress(format!("{done}/{}: {scene}: {end} in {:.0} s", order.len(), what.seconds));
                        seen.insert(*scene, what);
                    }
                    Err(error) => {
                        next.store(order.len(), Ordering::Relaxed);
                        failed.lock().expect(lock).get_or_insert(error);
                    }
                }
            }
        };
        std::thread::scope(|scope| (0..jobs.max(1)).for_each(|_| drop(scope.spawn(worker))));
        match failed.into_inner().expect(lock) {
            Some(error) => Err(error),
            None => Ok(Self { seen: seen.into_inner().expect(lock) }),
        }
    }

    /// What came of `scene`.
    ///
    /// # Panics
    /// If the figure that asks has not said that it needs it.
    pub(super) fn get(&self, scene: &Scene) -> &Seen {
        self.seen.get(scene).unwrap_or_else(|| panic!("a figure uses {scene} without asking for it"))
    }
}
