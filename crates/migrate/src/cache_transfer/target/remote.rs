//! The guest's reads of the source's cache. The storage has the same bytes, so nobody waits for long.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{Buffer, IoFuture};
use filters::OtherCache;
use tokio::sync::oneshot;

use super::{Arriving, Frame, Kind};

/// How long a read of the guest's waits for the source's cache, before the storage is asked, which has the same.
const REMOTE_READ_LIMIT: Duration = Duration::from_millis(100);
/// After so many reads in a row that were not answered in time nobody asks until the source answers something.
const UNANSWERED_MAX: u64 = 8;

/// The source's cache, for what the guest misses here.
pub(super) struct Remote(Arc<Arriving>);

impl Remote {
    pub(super) fn new(arriving: &Arc<Arriving>) -> Self {
        Self(Arc::clone(arriving))
    }
}

impl OtherCache for Remote {
    fn may_have(&self, block: u64) -> bool {
        let answers = self.0.unanswered.load(Ordering::Relaxed) < UNANSWERED_MAX;
        answers && self.0.state.get().is_linked && self.0.list.lock().known.contains(block)
    }

    fn read(&self, block: u64) -> IoFuture<'_, Option<Buffer>> {
        Box::pin(async move {
            let answer = {
                let link = self.0.link.lock();
                let Some(link) = link.as_ref() else { return Ok(None) };
                let (sender, answer) = oneshot::channel();
                let mut awaited = self.0.awaited.lock();
                let waiting = awaited.entry(block).or_default();
                waiting.push(sender);
                // The copier may have asked for it already.
                if waiting.len() == 1 && !self.0.list.lock().asked.contains_key(&block) {
                    let _ = link.send(Frame::new(Kind::Ask, block));
                }
                answer
            };
            match env::timeout(&*self.0.env, REMOTE_READ_LIMIT, answer).await {
                Some(answer) => Ok(answer.ok()),
                None => {
                    // The source, or the way to it, hangs.
                    self.0.unanswered.fetch_add(1, Ordering::Relaxed);
                    self.0.forget_waiting(block);
                    Ok(None)
                }
            }
        })
    }
}

impl Arriving {
    /// Those who have waited long enough for a block wait no more.
    fn forget_waiting(&self, block: u64) {
        let mut awaited = self.awaited.lock();
        if let Some(waiting) = awaited.get_mut(&block) {
            waiting.retain(|waiting| !waiting.is_closed());
            if waiting.is_empty() {
                awaited.remove(&block);
            }
        }
    }
}
