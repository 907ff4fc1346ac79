//! Copying what nobody uses: no guest, no mirror, no switchover. It looks for holes and zeroes, and has many pieces
//! under way at once. It flushes what it has written, and reads that again if asked to.

use std::sync::atomic::{AtomicU64, Ordering};

use block::{BufferPool, Bytes, Device, Error, ErrorKind, Extent, Mutation, Result};
use env::EnvRef;
use filters::TokenBucket;
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use crate::zeroes::is_zero;

/// The size of a request.
const PIECE: u64 = 1 << 20;
/// How many of them are under way.
const UNDER_WAY: usize = 16;
/// Zeroes move no data, so more of them go at once.
const ZEROES: u64 = 64 << 20;

/// How a cold copy is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct ColdOptions {
    /// Whether all of the target is known to read as zeroes, so that zeroes need not be written.
    pub target_is_zero: bool,
    /// At most so many bytes a second are read.
    pub bandwidth: Option<u64>,
    /// Whether both sides are read again and compared.
    pub verify: bool,
}

/// How far a cold copy is. Grows only.
#[derive(Debug, Default)]
pub struct ColdProgress {
    done: AtomicU64,
    compared: AtomicU64,
    data: AtomicU64,
}

impl ColdProgress {
    /// How many bytes of the source are at the target, zeroes included.
    #[must_use]
    pub fn done(&self) -> Bytes {
        Bytes(self.done.load(Ordering::Relaxed))
    }

    /// How many bytes of both sides were compared.
    #[must_use]
    pub fn compared(&self) -> Bytes {
        Bytes(self.compared.load(Ordering::Relaxed))
    }

    /// How many bytes were written as data.
    #[must_use]
    pub fn data(&self) -> Bytes {
        Bytes(self.data.load(Ordering::Relaxed))
    }
}

/// Copies all of `source` to the start of `target`, and flushes that.
///
/// # Errors
/// What either side says, its name before it. If the two are compared and differ, `Corrupt`, with the first place that was
/// found.
pub async fn copy_cold(
    env: &EnvRef,
    source: &Device,
    target: &Device,
    options: ColdOptions,
    progress: &ColdProgress,
) -> Result<()> {
    let largest = source.geometry().transfer_bytes_max.min(target.geometry().transfer_bytes_max);
    let job = Job {
        source,
        target,
        options,
        progress,
        unit: PIECE.min(u64::from(largest)),
        pool: BufferPool::new(Bytes(PIECE * 2 * UNDER_WAY as u64)),
        bucket: TokenBucket::new(EnvRef::clone(env), options.bandwidth.filter(|rate| *rate > 0)),
    };
    job.copy().await?;
    target.flush().await.map_err(at_target)?;
    if options.verify { job.compare().await } else { Ok(()) }
}

struct Job<'a> {
    source: &'a Device,
    target: &'a Device,
    options: ColdOptions,
    progress: &'a ColdProgress,
    unit: u64,
    pool: BufferPool,
    bucket: TokenBucket,
}

fn at_source(error: Error) -> Error {
    Error::new(error.kind(), "reading the source").with_source(error)
}

fn at_target(error: Error) -> Error {
    Error::new(error.kind(), "writing the target").with_source(error)
}

impl Job<'_> {
    async fn copy(&self) -> Result<()> {
        let (size, mut next) = (self.source.size(), Bytes::ZERO);
        let mut under_way = FuturesUnordered::new();
        while next < size {
            for known in self.source.extents(Extent::between(next, size)).await.map_err(at_source)? {
                let is_zero = known.state.reads_zero();
                for piece in known.extent.split_at_multiples(if is_zero { ZEROES } else { self.unit }) {
                    if under_way.len() == UNDER_WAY {
                        under_way.next().await.transpose()?;
                    }
                    under_way.push(self.copy_piece(piece, is_zero));
                }
                next = known.extent.end();
            }
        }
        while let Some(outcome) = under_way.next().await {
            outcome?;
        }
        Ok(())
    }

    async fn copy_piece(&self, piece: Extent, is_known_zero: bool) -> Result<()> {
        if !is_known_zero {
            self.bucket.acquire(piece.length.get()).await;
            let buffer = self.pool.acquire(piece.length.as_usize()).await;
            let buffer = self.source.read(piece.offset, buffer).await.map_err(at_source)?;
            if !is_zero(&buffer) {
                let write = Mutation::data(piece.offset, buffer.freeze());
                self.target.write(write).await.map_err(at_target)?;
                self.progress.data.fetch_add(piece.length.get(), Ordering::Relaxed);
                self.progress.done.fetch_add(piece.length.get(), Ordering::Relaxed);
                return Ok(());
            }
        }
        if !self.options.target_is_zero {
            self.target.write(Mutation::zeroes(piece, true)).await.map_err(at_target)?;
        }
        self.progress.done.fetch_add(piece.length.get(), Ordering::Relaxed);
        Ok(())
    }

    async fn compare(&self) -> Result<()> {
        let mut under_way = FuturesUnordered::new();
        for piece in Extent::whole(self.source.size()).split_at_multiples(self.unit) {
            if under_way.len() == UNDER_WAY {
                under_way.next().await.transpose()?;
            }
            under_way.push(self.compare_piece(piece));
        }
        while let Some(outcome) = under_way.next().await {
            outcome?;
        }
        Ok(())
    }

    async fn compare_piece(&self, piece: Extent) -> Result<()> {
        let length = piece.length.as_usize();
        // Past the pool: whoever holds one of its buffers and waits for a second may wait for ever.
        let ours = self.source.read(piece.offset, block::Buffer::unpooled(length)).await.map_err(at_source)?;
        let theirs = self.target.read(piece.offset, block::Buffer::unpooled(length)).await;
        let theirs = theirs.map_err(|error| Error::new(error.kind(), "reading the target again").with_source(error))?;
        if let Some(at) = ours.iter().zip(theirs.iter()).position(|(ours, theirs)| ours != theirs) {
            let context = format!("source and target differ from byte {} on", piece.offset.get() + at as u64);
            return Err(Error::new(ErrorKind::Corrupt, context));
        }
        self.progress.compared.fetch_add(piece.length.get(), Ordering::Relaxed);
        Ok(())
    }
}
