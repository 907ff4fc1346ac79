//! What becomes of one run of chunks in the copy.
//!
//! Whoever calls has the run claimed, its buffer acquired and its bandwidth granted: nothing is waited for under the
//! lock but the source.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::checksum::checksum_of;
use crate::reduce::skip::SkipReason;
use crate::stream::FRAME_BYTES;
use crate::zeroes;
use block::{Buffer, Bytes, Checks, Data, Error, ErrorKind, Extent, Mutation, Result};
use filters::TokenBucket;

use super::filter::Shared;
use super::target_stall::{Asked, AtTarget};
use super::target_work::TargetWork;
use super::tracker::Session;

/// Zeroes are written in pieces of this size, so that a target that must write them out is not held for long.
pub(super) const ZERO_BYTES_MAX: u64 = 4 << 20;

/// Zeroes that the target takes faster than this, in bytes a second, it does not write out.
const UNMAP_RATE_MIN: f64 = 1e9;
/// How often whoever waits for the bandwidth looks at it again.
const LOOK: Duration = Duration::from_millis(50);

/// Which side of a copy failed.
#[derive(Debug)]
pub(crate) enum CopyError {
    Source(Error),
    /// Of the session with this number.
    Target(u64, Error),
    /// The target is silent, and the guest may wait for what the copy keeps from it.
    Silent,
}

/// What a copy has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Bytes written as data.
    pub(crate) data: u64,
    /// Bytes of holes and zeroes.
    pub(crate) zero: u64,
    /// Of the data, what was copied below us.
    pub(crate) offloaded: u64,
}

impl Copied {
    /// All of `extent` was copied below us.
    pub(in crate::strategy) const fn offloaded(extent: Extent) -> Self {
        Self { data: extent.length.0, zero: 0, offloaded: extent.length.0 }
    }
}

impl std::ops::AddAssign for Copied {
    fn add_assign(&mut self, other: Self) {
        self.data += other.data;
        self.zero += other.zero;
        self.offloaded += other.offloaded;
    }
}

impl Shared {
    /// Copies a claimed run through `buffer`, which is as long as the run.
    pub(crate) async fn copy_run(&self, run: Range<u64>, buffer: Buffer) -> Result<Copied, CopyError> {
        let mut claim = Claim::new(self, run.clone());
        let extent = self.tracker(|tracker| tracker.run_extent(&run));
        // Of a chunk that is claimed nothing more is buffered before its copy is written.
        self.written_back(extent).await;
        let Some(guard) = self.lock_for_lone_copy(extent).await else {
            claim.nothing_happened();
            return Ok(Copied::default());
        };
        let _turn = self.lock_at_target(extent).await;
        let (session, hold) = self.tracker(|tracker| (tracker.session().cloned(), tracker.holds_guest(run.clone())));
        let Some(session) = session else {
            claim.nothing_happened();
            return Ok(Copied::default());
        };
        let offloads = self.tracker(|tracker| tracker.offload().is_some());
        claim.written = offloads;
        // What must be seen to be skipped is read first, and the rest of it is offloaded then.
        let reads_first = self.skip.needs_data();
        if !reads_first && self.offload(extent, &session).await? {
            let copied = Copied::offloaded(extent);
            self.end_copy(claim, &session, copied, &[]);
            return Ok(copied);
        }
        let source = self.copy_face.read(extent.offset, buffer).await;
        let data = source.map_err(|error| CopyError::Source(error.wrap(format!("copying {extent}"))))?.freeze();
        let mut pieces = self.pieces_of(extent, data);
        let skipped: Vec<_> = pieces.iter().filter_map(|piece| Some((piece.extent, piece.reason?))).collect();
        let offloaded = match reads_first && offloads {
            true => self.offload_pieces(&mut pieces, &session).await?,
            false => Copied::default(),
        };
        self.tracker(|tracker| tracker.begin_writing(run.clone()));
        claim.written = true;
        let guard = hold.then_some(guard);
        let mut copied = self.write_copy(extent, pieces, &session, guard.is_some()).await?;
        copied += offloaded;
        self.end_copy(claim, &session, copied, &skipped);
        drop(guard);
        Ok(copied)
    }

    /// What was read of `extent`, as it is to be written: in runs of chunks that are all zeroes and runs that are not.
    /// The latter have their checksums. Call this right after the read.
    pub(in crate::strategy) fn pieces_of(&self, extent: Extent, data: Data) -> Vec<Piece> {
        let bytes_of = |piece: Extent| {
            let start = (piece.offset - extent.offset).as_usize();
            start..start + piece.length.as_usize()
        };
        let content_of = |piece: Extent| {
            let bytes = &data[bytes_of(piece)];
            let reason = self.skip.judge(bytes);
            Content { is_zero: reason.is_some() || zeroes::is_zero(bytes), reason }
        };
        let cut = |(piece, content): (Extent, Content)| {
            let data = (!content.is_zero).then(|| data.slice(bytes_of(piece)));
            let data = data.map(|data| (checks_of(piece, &data), data));
            Piece { extent: piece, data, reason: content.reason }
        };
        runs_of(extent, self.chunk.bytes(), content_of).into_iter().map(cut).collect()
    }

    /// Has the layer below copy those of the `pieces` that hold data, and leaves the others. As with [`offload`](Self::offload).
    async fn offload_pieces(&self, pieces: &mut Vec<Piece>, session: &Session) -> Result<Copied, CopyError> {
        let (mut copied, mut rest) = (Copied::default(), Vec::new());
        for piece in pieces.drain(..) {
            match piece.data.is_some() && self.offload(piece.extent, session).await? {
                true => copied += Copied::offloaded(piece.extent),
                false => rest.push(piece),
            }
        }
        *pieces = rest;
        Ok(copied)
    }

    /// Writes what was read of `extent` to the target of `session`, with the extent's lock `held` or not.
    pub(in crate::strategy) async fn write_copy(
        &self,
        extent: Extent,
        pieces: Vec<Piece>,
        session: &Session,
        held: bool,
    ) -> Result<Copied, CopyError> {
        // Where both devices answer at once, this is half of the copy's time: others on this worker get their turn.
        crate::pace::yield_now().await;
        let mut copied = Copied::default();
        for piece in &pieces {
            *(if piece.data.is_none() { &mut copied.zero } else { &mut copied.data }) += piece.extent.length.0;
        }
        // A target that compares finds what was changed later, too, and says so.
        if !session.target.compares_checks() && !pieces.iter().all(Piece::is_whole) {
            let context = format!("{extent} changed in memory between the source's read and the target's write");
            return Err(CopyError::Source(Error::new(ErrorKind::Corrupt, context)));
        }
        let writes = Box::pin(write_pieces(session.clone(), pieces));
        let failed = |error: Error| CopyError::Target(session.number, error.wrap(format!("copying {extent}")));
        let asked = Asked::Write { extent, is_forced: false };
        self.finish_for_copy(writes, session, held.then_some(asked)).await?.map_err(failed)?;
        Ok(copied)
    }

    /// Gives the target its time for a part of a copy. With the lock of what is `asked` held, one that is silent is not waited
    /// for.
    async fn finish_for_copy<T: Send + 'static>(
        &self,
        target: TargetWork<T>,
        session: &Session,
        asked: Option<Asked>,
    ) -> Result<Result<T>, CopyError> {
        let Some(asked) = asked else { return Ok(self.finish_target(target, session.number).await) };
        match self.finish_at_target(target, session.number, asked).await {
            AtTarget::Answered(outcome) => Ok(outcome),
            AtTarget::Detached => Err(CopyError::Silent),
        }
    }

    /// Whether the target need not be written to read `extent` as zeroes. The extent's lock is held.
    async fn is_left_alone(&self, session: &Session, extent: Extent) -> Result<bool, CopyError> {
        let asked_of = session.clone();
        let asking = Box::pin(async move { left_alone(&asked_of, extent).await });
        let failed = |error: Error| CopyError::Target(session.number, error.wrap(format!("copying the hole {extent}")));
        let end = self.finish_for_copy(asking, session, Some(Asked::Read)).await?.map_err(failed)?;
        Ok(end == extent.end())
    }

    /// Brings into step, without reading it, the part of a claimed run that the source reads as zeroes without data.
    /// The rest of the run is released again. Gives how many chunks, from the run's start, were done. What the target
    /// writes out for that is charged to `bucket`.
    pub(crate) async fn copy_zero_run(
        &self,
        run: Range<u64>,
        bucket: Option<Arc<TokenBucket>>,
    ) -> Result<u64, CopyError> {
        let mut claim = Claim::new(self, run.clone());
        claim.nothing_happened();
        let extent = self.tracker(|tracker| tracker.run_extent(&run));
        self.written_back(extent).await;
        let Some(guard) = self.lock_for_lone_copy(extent).await else { return Ok(0) };
        let _turn = self.lock_at_target(extent).await;
        let (session, hold) = self.tracker(|tracker| (tracker.session().cloned(), tracker.holds_guest(run.clone())));
        let Some(session) = session else { return Ok(0) };
        // Asked again under the lock: what was a hole a moment ago may have been written since.
        let confirmed = self.skip.confirm(&self.copy_face, extent).await.map_err(CopyError::Source)?;
        let chunks = match confirmed.end == extent.end() {
            true => run.end - run.start,
            false => (confirmed.end - extent.offset).0 / self.chunk.bytes(),
        };
        let zeroes = run.start..run.start + chunks;
        self.tracker(|tracker| tracker.abort_copy(zeroes.end..run.end, false));
        claim.run = zeroes.clone();
        if zeroes.is_empty() {
            return Ok(0);
        }
        let extent = self.tracker(|tracker| tracker.run_extent(&zeroes));
        let failed = |error: Error| CopyError::Target(session.number, error.wrap(format!("copying the hole {extent}")));
        let copied = Copied { zero: extent.length.0, ..Copied::default() };
        if self.is_left_alone(&session, extent).await? {
            self.tracker(|tracker| {
                tracker.counts.zero += copied.zero;
                tracker.end_skip(zeroes.clone(), session.number);
                if let Some(reason) = confirmed.reason {
                    tracker.note_skipped(zeroes, reason);
                }
            });
            claim.done = true;
            return Ok(chunks);
        }
        claim.written = true;
        self.tracker(|tracker| tracker.begin_writing(zeroes.clone()));
        let guard = hold.then_some(guard);
        // Every piece has its own time: a target may write zeroes out slowly.
        for extent in extent.split_at_multiples(ZERO_BYTES_MAX) {
            let began = self.env.now();
            let writes =
                Box::pin(write_pieces(session.clone(), vec![Piece { extent, data: None, reason: confirmed.reason }]));
            let asked = guard.is_some().then_some(Asked::Write { extent, is_forced: false });
            self.finish_for_copy(writes, &session, asked).await?.map_err(failed)?;
            if let (Some(bucket), None) = (&bucket, &guard) {
                self.pay_for_zeroes(&session, extent, self.env.now().since(began), bucket).await;
            }
        }
        let skipped = confirmed.reason.map(|reason| (extent, reason));
        self.end_copy(claim, &session, copied, skipped.as_slice());
        drop(guard);
        Ok(chunks)
    }

    /// Waits for the bandwidth if the target has written `extent` out: it took its time, and is no hole there. No lock is held.
    async fn pay_for_zeroes(&self, session: &Session, extent: Extent, took: Duration, bucket: &TokenBucket) {
        if took.as_secs_f64() * UNMAP_RATE_MIN < extent.length.0 as f64 {
            return;
        }
        let target = session.target.clone();
        let asking = Box::pin(async move { zeroes::zero_prefix(&target, extent).await });
        if self.finish_target(asking, session.number).await.is_ok_and(|end| end == extent.end()) {
            return;
        }
        let _ = bucket.take(extent.length.0);
        loop {
            let rest = bucket.wait();
            if rest.is_zero() || session.require().is_err() {
                return;
            }
            // The bandwidth may be changed meanwhile.
            self.env.sleep(rest.min(LOOK)).await;
        }
    }

    /// Has the layer below copy all of a claimed `extent`, if it does such things. The lock is held meanwhile, as it is
    /// while the source is read: the layer below reads the source, which is no faster than this. If the copy is not
    /// done, is done in part or fails, everything is read and written. That then tells what is wrong.
    pub(in crate::strategy) async fn offload(&self, extent: Extent, session: &Session) -> Result<bool, CopyError> {
        let Some(offload) = self.tracker(|tracker| tracker.offload()) else { return Ok(false) };
        let copy = Box::pin(async move { offload.copy(extent).await });
        let asked = Asked::Write { extent, is_forced: false };
        match self.finish_for_copy(copy, session, Some(asked)).await? {
            Ok(done) => Ok(done == extent.length),
            Err(error) if self.tracker(|tracker| tracker.is_current(session.number)) => {
                tracing::warn!(%extent, error = error.chain(), "a copy could not be offloaded and is made here");
                Ok(false)
            }
            Err(error) => Err(CopyError::Target(session.number, error.wrap(format!("copying {extent}")))),
        }
    }

    /// All that was claimed was copied, or `skipped`: whole chunks, but for the last one of the volume.
    pub(in crate::strategy) fn end_copy(
        &self,
        mut claim: Claim<'_>,
        session: &Session,
        copied: Copied,
        skipped: &[(Extent, SkipReason)],
    ) {
        self.tracker(|tracker| {
            tracker.counts.copied += copied.data;
            tracker.counts.zero += copied.zero;
            tracker.counts.offloaded += copied.offloaded;
            tracker.counts.unflushed += copied.data;
            tracker.end_copy(claim.run.clone(), session.number);
            for (extent, reason) in skipped {
                tracker.note_skipped(self.chunk.indices_of(*extent), *reason);
            }
        });
        claim.done = true;
    }
}

/// A claimed run. Unless the copy was done, the chunks are absent again when this is dropped.
pub(in crate::strategy) struct Claim<'a> {
    shared: &'a Shared,
    run: Range<u64>,
    /// Whether an error has touched the chunks.
    suspect: bool,
    /// Whether the target may have got something.
    written: bool,
    done: bool,
}

impl<'a> Claim<'a> {
    /// Whatever ends it from now on has touched the chunks.
    pub(in crate::strategy) const fn new(shared: &'a Shared, run: Range<u64>) -> Self {
        Self { shared, run, suspect: true, written: false, done: false }
    }

    /// The target may have got something from now on.
    pub(in crate::strategy) const fn writes(&mut self) {
        self.written = true;
    }

    /// Nothing has touched the chunks.
    pub(in crate::strategy) const fn nothing_happened(&mut self) {
        self.suspect = false;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.done && !self.run.is_empty() {
            let (run, suspect) = (self.run.clone(), self.suspect);
            self.shared.tracker(|tracker| match self.written {
                true => tracker.abort_written_copy(run),
                false => tracker.abort_copy(run, suspect),
            });
        }
    }
}

/// A part of a copy as it is written.
pub(in crate::strategy) struct Piece {
    extent: Extent,
    /// `None`: zeroes.
    data: Option<(Arc<Checks>, Data)>,
    /// Why it is skipped, if it is.
    reason: Option<SkipReason>,
}

/// What of a chunk decides how it is written.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Content {
    is_zero: bool,
    reason: Option<SkipReason>,
}

impl Piece {
    /// Whether its data is what it was when its checksums were made.
    fn is_whole(&self) -> bool {
        self.data.as_ref().is_none_or(|(checks, data)| checks_of(self.extent, data) == *checks)
    }
}

/// The checksums of data, by the parts that go to another host in a frame each.
fn checks_of(extent: Extent, data: &[u8]) -> Arc<Checks> {
    let check = |part: Extent| {
        let start = (part.offset - extent.offset).as_usize();
        (part, checksum_of(&data[start..start + part.length.as_usize()]))
    };
    Arc::new(Checks::new(extent.split_at_multiples(FRAME_BYTES.into()).map(check).collect()))
}

/// `extent` cut into runs of chunks with the same content.
fn runs_of(extent: Extent, chunk: u64, content_of: impl Fn(Extent) -> Content) -> Vec<(Extent, Content)> {
    let mut runs: Vec<(Extent, Content)> = Vec::new();
    for piece in extent.split_at_multiples(chunk) {
        let content = content_of(piece);
        match runs.last_mut() {
            Some((last, known)) if *known == content => last.length += piece.length,
            _ => runs.push((piece, content)),
        }
    }
    runs
}

/// Where the part of `extent` that needs no zeroes written at the target, from its start, ends.
async fn left_alone(session: &Session, extent: Extent) -> Result<Bytes> {
    if !session.trusts_zeroes && !session.target.keeps_holes() {
        return Ok(extent.offset);
    }
    zeroes::prefix(&session.target, extent, |state| session.believes(state)).await
}

/// Makes `extent` of the target read as zeroes, where it is not known to.
pub(super) async fn write_zeroes(session: &Session, extent: Extent) -> Result<()> {
    for piece in extent.split_at_multiples(ZERO_BYTES_MAX) {
        session.require()?;
        let from = left_alone(session, piece).await?;
        if from < piece.end() {
            session.target.write(Mutation::zeroes(Extent::between(from, piece.end()), true)).await?;
        }
    }
    Ok(())
}

/// Writes pieces to the target: data, or zeroes where there is none.
async fn write_pieces(session: Session, pieces: Vec<Piece>) -> Result<()> {
    let target = &session.target;
    let limit = u64::from(target.geometry().transfer_bytes_max);
    for Piece { extent, data, reason: _ } in pieces {
        let Some((checks, data)) = data else {
            write_zeroes(&session, extent).await?;
            continue;
        };
        let write = Mutation::data(extent.offset, data).with_checks(checks);
        if extent.length.0 <= limit {
            session.require()?;
            target.write(write).await?;
            continue;
        }
        for piece in extent.split_at_multiples(1 << limit.max(1).ilog2()) {
            session.require()?;
            target.write(write.slice(piece)).await?;
        }
    }
    Ok(())
}
