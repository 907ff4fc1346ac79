//! The fetch of a popular chunk: all of it goes into its place, aside from the request that made it popular.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Buffer, Mutation, Result};
use tokio::sync::Notify;

use super::index::LOOKS_MAX;
use super::{Found, Inner, SurrogateEntry};

/// So many chunks are fetched at a time; what becomes popular meanwhile is fetched at its next request.
const AT_ONCE: u64 = 4;

/// Fetches under way.
#[derive(Default)]
pub(super) struct Fetches {
    under_way: AtomicU64,
    ended: Notify,
}

impl Fetches {
    /// Waits until none is under way. Nobody begins one meanwhile.
    pub(super) async fn ended(&self) {
        loop {
            let ended = self.ended.notified();
            if self.under_way.load(Ordering::SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }
}

/// A fetch under way.
struct UnderWay(Arc<Inner>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetches.under_way.fetch_sub(1, Ordering::SeqCst);
        self.0.fetches.ended.notify_waiters();
    }
}

impl Inner {
    /// Begins to fetch `chunk`, unless enough are being fetched.
    pub(super) fn fetch_aside(self: &Arc<Self>, chunk: u64) {
        let fetches = &self.fetches.under_way;
        if fetches.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| (now < AT_ONCE).then_some(now + 1)).is_err() {
            return;
        }
        let under_way = UnderWay(Arc::clone(self));
        if !self.takes() {
            return;
        }
        self.env.spawn(Box::pin(async move {
            if let Err(error) = under_way.0.fetch(chunk).await {
                tracing::debug!(chunk, error = error.chain(), "a popular chunk is not fetched");
            }
        }));
    }

    async fn fetch(&self, chunk: u64) -> Result<()> {
        let whole = self.extent_of(chunk);
        let _guard = self.chunks.exclusive(whole).await;
        if !self.takes() {
            return Ok(());
        }
        let found = match self.find(chunk) {
            Some(Found { is_cached: true, .. }) => return Ok(()),
            Some(found) => found,
            None => match self.claim(chunk) {
                Some(found) => found,
                None => return Ok(()),
            },
        };
        let filled = self.fill(chunk, found).await;
        if filled.is_ok() {
            self.index.lock().set_cached(found.place, true);
            self.counters.chunks_fetched.fetch_add(1, Ordering::Relaxed);
            self.counters.fetched_bytes.fetch_add(whole.length.get(), Ordering::Relaxed);
        } else {
            self.release_if_clean(found);
        }
        filled
    }

    /// Writes the clean sectors of `chunk` into its place.
    async fn fill(&self, chunk: u64, found: Found) -> Result<()> {
        let whole = self.extent_of(chunk);
        let data = self.base.device().read(whole.offset, Buffer::unpooled(whole.length.as_usize())).await?;
        let all = Mutation::data(whole.offset, data.freeze());
        for run in found.dirty.clean_runs(self.sectors_of(whole)) {
            let piece = all.slice(self.extent_of_sectors(chunk, &run));
            self.write_place(piece, found.place).await.inspect_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// Gives `chunk`, which has none and is held, a place: a free one, or that of a chunk which is only cached.
    pub(super) fn claim(&self, chunk: u64) -> Option<Found> {
        let empty = |place| Found { place, is_cached: false, dirty: SurrogateEntry::Clean.sectors() };
        if let Some(place) = self.index.lock().claim(chunk) {
            return Some(empty(place));
        }
        for _ in 0..LOOKS_MAX {
            let (place, owner) = self.index.lock().candidate()?;
            // Whoever waits for a chunk holds another one: nobody waits here.
            let Some(_guard) = self.chunks.try_exclusive(self.extent_of(owner)) else { continue };
            let is_clean = self.record.look(|map| map.get(place)) == SurrogateEntry::Clean;
            let mut index = self.index.lock();
            if !is_clean || index.owner(place) != Some(owner) {
                continue;
            }
            index.release(place);
            if let Some(place) = index.claim(chunk) {
                return Some(empty(place));
            }
        }
        None
    }
}
