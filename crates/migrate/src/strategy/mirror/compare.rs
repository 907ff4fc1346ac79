//! Comparing a run of chunks of both sides while the guest writes to them.
//!
//! The comparison reads without the lock. Equal is equal. If the sides differ and a mirrored write began or ended
//! meanwhile, that may be the cause, and the comparison is repeated. After three such conflicts, or if nothing can
//! explain the difference, it is repeated under the lock. A difference under the lock is real. A chunk that was skipped
//! must read as zeroes on both sides.

use std::ops::Range;
use std::time::Duration;

use block::{Buffer, BufferPool, Bytes, Device, Error, ErrorKind, Extent, Result};

use super::filter::Shared;
use super::skipped::first_not_zero;
use super::target_stall::{Asked, AtTarget};
use super::target_work::TargetWork;
use crate::Comparison;

/// How often a comparison is disturbed before it takes the lock.
const CONFLICTS_MAX: u64 = 3;
/// So long a comparison waits for what is buffered without the lock.
const LANDING_LIMIT: Duration = Duration::from_secs(1);

/// What a comparison found.
#[derive(Debug)]
pub(crate) enum Compared {
    Equal(Effort),
    /// These bytes differ, and nobody was writing them.
    Different(Extent),
    /// Some chunk is not on both sides: the target was lost, or a side failed a write.
    NotHad,
}

/// What it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Effort {
    pub(crate) conflicts: u64,
    pub(crate) locked: bool,
}

/// Which side could not be read.
#[derive(Debug)]
pub(crate) enum CompareError {
    Source(Error),
    Target(u64, Error),
    /// The target is silent, and the guest may wait for what is compared.
    Silent,
}

impl Shared {
    /// Compares a run of chunks that are copied.
    pub(crate) async fn compare(
        &self,
        run: Range<u64>,
        comparison: Option<&Comparison>,
        pool: &BufferPool,
    ) -> Result<Compared, CompareError> {
        let extent = self.tracker(|tracker| tracker.run_extent(&run));
        let length = extent.length.as_usize();
        let mut buffers = pool.acquire_two(length).await;
        let mut effort = Effort::default();
        loop {
            let guard = match effort.locked {
                true => match self.lock_for_job(extent).await {
                    None => return Ok(Compared::NotHad),
                    guard => {
                        self.or_fail_stalled(self.written_back(extent)).await;
                        guard
                    }
                },
                false => None,
            };
            let (session, before, skipped) = self.tracker(|tracker| {
                (tracker.session().cloned(), tracker.generation(run.clone()), tracker.skipped_in(extent))
            });
            let Some(session) = session else { return Ok(Compared::NotHad) };
            let (source, target) = match comparison {
                Some(devices) => (&devices.source, &devices.target),
                None => (&self.comparison_face, &session.target),
            };
            let at_target = TargetOfComparison { shared: self, target, session: session.number, locked: effort.locked };
            if effort.conflicts == 0 && reads_zero(source, extent).await && at_target.reads_zero(extent).await? {
                return Ok(Compared::Equal(effort));
            }
            let (mine, theirs) = buffers;
            let (a, b) = futures::join!(source.read(extent.offset, mine), at_target.read(extent, theirs));
            let failed = |error: Error| error.wrap(format!("comparing {extent}"));
            let a = a.map_err(|error| CompareError::Source(failed(error)))?;
            let b = b?.map_err(|error| CompareError::Target(session.number, failed(error)))?;
            // What was skipped is equal only as zeroes.
            let difference = first_difference(&a, &b).or_else(|| first_not_zero(extent, &skipped, &b));
            let after = self.tracker(|tracker| tracker.generation(run.clone()));
            drop(guard);
            let Some(at) = difference else { return Ok(Compared::Equal(effort)) };
            if !self.tracker(|tracker| tracker.all_in_step(run.clone())) {
                return Ok(Compared::NotHad);
            }
            if effort.locked {
                return Ok(Compared::Different(differing(extent, at, &a, &b)));
            }
            buffers = (a, b);
            if self.tracker(|tracker| tracker.is_pending(extent)) {
                // The target has yet to get it. Waited for here, it is seldom waited for under the lock.
                env::timeout(&*self.env, LANDING_LIMIT, self.written_back(extent)).await;
                effort.conflicts += 1;
                effort.locked = effort.conflicts >= CONFLICTS_MAX;
            } else if before == after {
                // A write may have been in flight all the while: only the lock can tell.
                effort.locked = true;
            } else {
                effort.conflicts += 1;
                effort.locked = effort.conflicts >= CONFLICTS_MAX;
            }
        }
    }
}

/// The target as a comparison reads it. A read that hangs is given up with its session, and under the lock nobody waits
/// for a silent target. What is under way there then keeps its memory.
struct TargetOfComparison<'a> {
    shared: &'a Shared,
    target: &'a Device,
    session: u64,
    locked: bool,
}

impl TargetOfComparison<'_> {
    /// Whether it says, without being read, that it has nothing there.
    async fn reads_zero(&self, extent: Extent) -> Result<bool, CompareError> {
        let target = self.target.clone();
        let asking = Box::pin(async move { Ok(reads_zero(&target, extent).await) });
        Ok(self.finish(asking).await?.unwrap_or(false))
    }

    async fn read(&self, extent: Extent, buffer: Buffer) -> Result<Result<Buffer>, CompareError> {
        let target = self.target.clone();
        self.finish(Box::pin(async move { target.read(extent.offset, buffer).await })).await
    }

    async fn finish<T: Send + 'static>(&self, work: TargetWork<T>) -> Result<Result<T>, CompareError> {
        if !self.locked {
            return Ok(self.shared.finish_target(work, self.session).await);
        }
        match self.shared.finish_at_target(work, self.session, Asked::Read).await {
            AtTarget::Answered(outcome) => Ok(outcome),
            AtTarget::Detached => Err(CompareError::Silent),
        }
    }
}

/// Whether a device says, without being read, that it has nothing there.
async fn reads_zero(device: &Device, extent: Extent) -> bool {
    crate::zeroes::zero_prefix(device, extent).await.is_ok_and(|end| end == extent.end())
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b {
        return None;
    }
    a.iter().zip(b).position(|(a, b)| a != b)
}

/// The bytes from the first difference to the last.
fn differing(extent: Extent, first: usize, a: &[u8], b: &[u8]) -> Extent {
    let last = a.iter().zip(b).rposition(|(a, b)| a != b).unwrap_or(first);
    Extent::new(extent.offset + Bytes::from(first), Bytes::from(last - first + 1))
}

/// The error that ends a migration whose sides differ.
pub(crate) fn difference(extent: Extent) -> Error {
    let context = format!("source and target differ in {extent}, which nobody was writing; the move ends here");
    Error::new(ErrorKind::Corrupt, context)
}
