//! A short look at how fast a source reads scattered chunks, before anything is copied. It only reads what a pass over
//! dirty chunks would read, beside whatever the guest does.

use std::pin::pin;
use std::time::Duration;

use block::{Buffer, Bytes, Device, Result};
use env::Env;
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use crate::MoveOptions;
use crate::driver::COPY_BYTES_MIN;

/// So many bytes are being read at most: of the copies under way half are being written, to a target like the source.
const READING_BYTES_MAX: u64 = 512 << 10;
/// Fewer reads than this say nothing.
const READS_MIN: u64 = 8;

/// Reads chunks of `source` for `limit`, in the order of the volume. It reads those that would be dirty if a `part` (0
/// to 1) of all were, by chance. Gives the mean time that the copy takes for one of them, in seconds; nothing where
/// that cannot be told.
///
/// # Errors
/// What reading the source fails with.
pub async fn scattered(
    source: &Device,
    env: &dyn Env,
    options: &MoveOptions,
    part: f64,
    limit: Duration,
) -> Result<Option<f64>> {
    let chunk = options.chunk_bytes;
    let chunks = source.size().get() / chunk;
    let reading_max = (options.window_bytes_max / 2).min(READING_BYTES_MAX) / chunk;
    // No larger than its copies are.
    let run_max = (COPY_BYTES_MIN.min(options.copy_bytes_max) / chunk).max(1);
    if chunks < READS_MIN {
        return Ok(None);
    }
    let mut walk = Walk { chunks, part: part.clamp(1e-6, 1.0), at: env.random() % chunks };
    let began = env.now();
    let (mut reads, mut done, mut reading) = (FuturesUnordered::new(), 0, 0);
    while env.now().since(began) < limit {
        while reads.is_empty() || reading < reading_max {
            let (first, count) = walk.next(run_max, || (env.random() >> 11) as f64 / (1_u64 << 53) as f64);
            let buffer = Buffer::unpooled((count * chunk) as usize);
            reading += count;
            reads.push(async move { source.read(Bytes(first * chunk), buffer).await.map(|_| count) });
        }
        let left = limit.saturating_sub(env.now().since(began));
        match env::timeout(env, left, pin!(reads.next())).await {
            Some(Some(read)) => {
                let count = read?;
                (done, reading) = (done + count, reading - count);
            }
            _ => break,
        }
    }
    let took = env.now().since(began).as_secs_f64();
    while let Some(read) = reads.next().await {
        read?;
    }
    Ok((done >= READS_MIN).then(|| took / done as f64))
}

/// Dirty chunks in the order of the volume, from somewhere on.
struct Walk {
    chunks: u64,
    part: f64,
    at: u64,
}

impl Walk {
    /// The next run of dirty chunks, no longer than `run_max`, by random numbers from 0 to 1.
    fn next(&mut self, run_max: u64, mut random: impl FnMut() -> f64) -> (u64, u64) {
        let gap = ((1.0 - random()).ln() / (1.0 - self.part).max(1e-12).ln()).min(self.chunks as f64) as u64;
        let first = (self.at + gap) % self.chunks;
        let mut count = 1;
        while count < run_max && first + count < self.chunks && random() < self.part {
            count += 1;
        }
        // The chunk after a run that was not cut off is clean.
        self.at = (first + count + u64::from(count < run_max)) % self.chunks;
        (first, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_that_is_dirty_is_the_part_that_is_read() {
        for (part, run_max) in [(0.01, 1000), (0.3, 1000), (0.9, 1000), (0.3, 4), (0.3, 1), (1.0, 1), (1.0, 4)] {
            let mut state = 1_u64;
            let mut random = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 11) as f64 / (1_u64 << 53) as f64
            };
            let mut walk = Walk { chunks: 1_000_000, part, at: 0 };
            let (mut read, mut before, mut end) = (0_u64, 0, 0);
            while end >= before {
                before = end;
                let (first, count) = walk.next(run_max, &mut random);
                read += count;
                end = first + count;
            }
            let seen = read as f64 / 1_000_000.0;
            assert!((seen / part - 1.0).abs() < 0.05, "{seen} instead of {part} in runs of {run_max}");
        }
    }
}
