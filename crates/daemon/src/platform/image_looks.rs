//! Looks at images, on threads that a file system that hangs may keep.
//!
//! Nobody waits longer than [`LOOK_LIMIT`] for a look. One that comes later counts for nothing. Until it has come the next one of the same
//! image waits for it, so that an image that hangs keeps one thread.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// How long somebody waits for how an image is.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// Held by whoever looks at one image.
type Turn = tokio::sync::Mutex<()>;

/// One look at a time at each image.
#[derive(Default)]
pub(super) struct ImageLooks {
    turns: Mutex<BTreeMap<PathBuf, Weak<Turn>>>,
}

impl ImageLooks {
    /// What `look` says of the image at `path`.
    pub(super) async fn look<T: Send + 'static>(
        &self,
        path: &Path,
        look: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> Result<T> {
        let (turn, image) = (self.turn_of(path), path.to_owned());
        let looking = async move {
            let turn = turn.lock_owned().await;
            let looking = tokio::task::spawn_blocking(move || {
                let state = look(&image);
                drop(turn);
                state
            });
            looking.await
        };
        match tokio::time::timeout(LOOK_LIMIT, looking).await {
            Ok(Ok(state)) => Ok(state),
            Ok(Err(_)) => Err(Error::new(ErrorKind::Internal, format!("nobody looks at {}", path.display()))),
            Err(_) => {
                let context = format!("{} has not answered within {LOOK_LIMIT:?}", path.display());
                Err(Error::new(ErrorKind::TimedOut, context))
            }
        }
    }

    fn turn_of(&self, path: &Path) -> Arc<Turn> {
        let mut turns = self.turns.lock();
        if let Some(turn) = turns.get(path).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Turn::default());
        turns.insert(path.to_owned(), Arc::downgrade(&turn));
        turn
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn an_image_that_hangs_keeps_one_thread_and_nobody_longer_than_the_limit() {
        let (looks, begun, path) = (ImageLooks::default(), Arc::new(AtomicUsize::new(0)), Path::new("/images/hangs"));
        let mut answers = Vec::new();
        for _ in 0..3 {
            let (answer, is_answered) = channel::<()>();
            answers.push(answer);
            let begun = Arc::clone(&begun);
            let look = looks.look(path, move |_| {
                begun.fetch_add(1, Ordering::Relaxed);
                let _ = is_answered.recv();
            });
            let late = look.await.expect_err("it hangs");
            assert_eq!(late.kind(), ErrorKind::TimedOut, "{}", late.chain());
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1, "a thread is kept by each look");
        // Another image is looked at meanwhile, and this one once it has answered.
        assert_eq!(looks.look(Path::new("/images/well"), |_| 1).await.expect("it answers"), 1);
        answers.clear();
        assert_eq!(looks.look(path, |_| 2).await.expect("it answers again"), 2);
    }
}
