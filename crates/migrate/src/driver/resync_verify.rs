//! A target that was away: what it is thought to have is compared before the copy goes on from there.
//!
//! ```text
//!   copied chunks ──4 MiB at a time──▶ the source's digest and the target's ──equal──▶ next
//!                                                   │ different
//!                                                   ▼
//!                                    the same, chunk by chunk ──different──▶ absent: it is copied again
//! ```
//!
//! The guest works on the source meanwhile, and nothing is mirrored. A chunk that it writes is absent from then on,
//! whatever is found here. So nothing is locked, and a difference that a guest's write has made costs nothing.

use std::ops::Range;
use std::time::Duration;

use block::{Error, ErrorKind, Extent, Result};
use futures::future::try_join;

use super::Driver;
use crate::digests::{Digests, digests_of};
use crate::strategy::mirror::tracker::Tracker;
use crate::{Event, Phase};

/// So much of the volume has one digest at first.
const DIGEST_BYTES: u64 = 4 << 20;
/// So many digests are asked for at once.
const DIGESTS_MAX: usize = 16;
/// How long the target may take for them.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Below this share of its speed, which the guest's latency gives the copy, this rests too,
const RESTLESS_SHARE: f64 = 0.25;
/// for so many times of what it took at most.
const REST_MAX: f64 = 8.0;

impl Driver {
    /// Compares what the record of an earlier session says that the target has, if that is in doubt. The mirror is on
    /// meanwhile: a write between the two reads of a chunk makes it differ at most, and it is copied again. What could not be
    /// compared does not count.
    pub(super) async fn verify_record(&mut self) -> Option<Event> {
        let digests = self.mirror.map.as_ref()?.take_unverified()?;
        let event = self.resync_verify(&*digests).await;
        if event.is_some() {
            // Nobody compares the rest later.
            self.recopy_from(0).await;
        }
        event
    }

    /// Compares what the target is thought to have, and gives up what it has not, or what cannot be compared. If it is lost
    /// again, whoever goes on will find out. Gives what has come in between, if that ends this.
    pub(super) async fn resync_verify(&mut self, digests: &dyn Digests) -> Option<Event> {
        let chunks_max = (DIGEST_BYTES / self.mirror.chunk.bytes()).max(1);
        let mut from = 0;
        loop {
            self.tick();
            let is_lost = self.machine.phase() == Phase::TargetLost;
            if let Some(event) = self.demand().filter(|event| !is_lost || *event != Event::TargetFailed) {
                return Some(event);
            }
            let runs = self.next_copied(&mut from, chunks_max);
            if runs.is_empty() {
                return self.end_resync_verify(digests).await;
            }
            let began = self.env.now();
            if let Err(error) = self.resync_verify_runs(&runs, digests).await {
                tracing::warn!(error = error.chain(), "what the target has could not be compared");
                // A target that is lost again is compared when it is back. Of one that is there nobody knows what it has.
                if !is_lost || error.kind() != ErrorKind::Disconnected {
                    self.recopy_from(runs[0].start).await;
                    return self.end_resync_verify(digests).await;
                }
                return None;
            }
            let share = self.latency_controller.share();
            if share < RESTLESS_SHARE {
                let took = self.env.now().since(began);
                self.env.sleep(took.mul_f64((1.0 / share.max(0.01) - 1.0).min(REST_MAX))).await;
            }
        }
    }

    /// The next runs of chunks that the target is thought to have, each with one digest.
    fn next_copied(&self, from: &mut u64, chunks_max: u64) -> Vec<Range<u64>> {
        self.mirror.tracker(|tracker| {
            let next = || {
                let run = tracker.next_copied(*from, chunks_max)?;
                *from = run.end;
                Some(run)
            };
            std::iter::from_fn(next).take(DIGESTS_MAX).collect()
        })
    }

    /// What the target does not have is taken off the record before anybody is told that all was compared. So after a
    /// crash of this process nothing is compared again.
    async fn end_resync_verify(&mut self, digests: &dyn Digests) -> Option<Event> {
        if let Err(error) = self.mirror.sync_map().await {
            self.error = Some(error);
            return Some(Event::Broken);
        }
        digests.compared();
        None
    }

    /// Gives up all that the target is thought to have from the chunk `from` on.
    async fn recopy_from(&self, from: u64) {
        self.mirror.in_parts(from, Tracker::forget_all_copied).await;
    }

    async fn resync_verify_runs(&mut self, runs: &[Range<u64>], digests: &dyn Digests) -> Result<()> {
        for run in self.different(runs, digests).await? {
            let chunks: Vec<Range<u64>> = run.map(|index| index..index + 1).collect();
            for chunks in chunks.chunks(DIGESTS_MAX) {
                for chunk in self.different(chunks, digests).await? {
                    if self.mirror.tracker(|tracker| tracker.forget_copied(chunk.start)) {
                        self.statistics.bytes_different += self.mirror.chunk.bytes();
                    }
                }
            }
        }
        Ok(())
    }

    /// Those of the runs of which source and target have different digests.
    async fn different(&mut self, runs: &[Range<u64>], digests: &dyn Digests) -> Result<Vec<Range<u64>>> {
        let extents: Vec<Extent> =
            self.mirror.tracker(|tracker| runs.iter().map(|run| tracker.run_extent(run)).collect());
        let theirs = async {
            let late = || Error::new(ErrorKind::TimedOut, format!("no digests within {ANSWER_MAX:?}"));
            env::timeout(&*self.env, ANSWER_MAX, digests.digests(&extents)).await.unwrap_or_else(|| Err(late()))
        };
        let (ours, theirs) = try_join(self.own_digests(&extents), theirs).await?;
        if ours.len() != theirs.len() {
            return Err(Error::new(ErrorKind::Invalid, "there are not as many digests as were asked for"));
        }
        self.statistics.bytes_rechecked += extents.iter().map(|extent| extent.length.0).sum::<u64>();
        let pairs = runs.iter().zip(ours.iter().zip(&theirs));
        Ok(pairs.filter(|(_, (ours, theirs))| ours != theirs).map(|(run, _)| run.clone()).collect())
    }

    async fn own_digests(&self, extents: &[Extent]) -> Result<Vec<[u8; 32]>> {
        digests_of(&self.mirror.comparison_face, &self.pool, extents).await
    }
}
