//! What whoever starts a move may choose.

use std::time::Duration;

use block::{Bytes, ChunkSize};
use serde::{Deserialize, Serialize};

/// How much of the copy is compared with its source before the switchover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// Nothing is compared. Extents still carry a checksum from the source's read to the target's write.
    Off,
    /// A random sample, and every chunk that saw an error, a retry or a redo.
    #[default]
    Sample,
    /// Every chunk, and a digest of the frozen source after the commit.
    Full,
}

impl Verify {
    /// The word for it on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Sample => "sample",
            Self::Full => "full",
        }
    }
}

impl std::str::FromStr for Verify {
    type Err = block::Error;
    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "off" => Ok(Self::Off),
            "sample" => Ok(Self::Sample),
            "full" => Ok(Self::Full),
            other => Err(block::Error::new(
                block::ErrorKind::Invalid,
                format!("`{other}` is no way to verify: say off, sample or full"),
            )),
        }
    }
}

/// How a move is carried out. The default is right for most; it serialises into the job's record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoveOptions {
    /// The unit of copying and tracking in bytes: a power of two between 4 KiB and 4 MiB.
    pub chunk_bytes: u64,
    /// What is compared.
    pub verify: Verify,
    /// How many bytes a second may be copied; mirrored writes do not count. `None` for no limit.
    pub bandwidth: Option<u64>,
    /// How many bytes may be in flight in copies at most, whatever the devices could take.
    pub window_bytes_max: u64,
    /// The guest latency (99th percentile) above which the copy yields, in microseconds.
    pub guest_latency_us: u64,
    /// How long the switchover may hold the guest while it waits for requests in flight, before it gives up and tries
    /// again later, in milliseconds.
    pub quiesce_ms: u64,
    /// How long the commit record may hold the guest before it is let go, in doubt, mirrored to both sides, in
    /// milliseconds.
    pub commit_ms: u64,
    /// How long a write to the target may take once the source has answered, before the target counts as lost, in
    /// milliseconds.
    pub target_ms: u64,
    /// How many chunks `sample` draws at random.
    pub sample_chunks: u64,
}

impl Default for MoveOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: ChunkSize::default().bytes(),
            verify: Verify::default(),
            bandwidth: None,
            window_bytes_max: 16 << 20,
            guest_latency_us: 2_000,
            quiesce_ms: 100,
            commit_ms: 500,
            target_ms: 30_000,
            sample_chunks: 256,
        }
    }
}

impl MoveOptions {
    /// The chunk size.
    ///
    /// # Errors
    /// Invalid if it is no power of two between 4 KiB and 4 MiB.
    pub fn chunk_size(&self) -> block::Result<ChunkSize> {
        ChunkSize::new(self.chunk_bytes).ok_or_else(|| {
            let context = format!("a chunk of {} is no power of two between 4 KiB and 4 MiB", Bytes(self.chunk_bytes));
            block::Error::new(block::ErrorKind::Invalid, context)
        })
    }

    pub(crate) const fn quiesce_limit(&self) -> Duration {
        Duration::from_millis(self.quiesce_ms)
    }

    pub(crate) const fn commit_limit(&self) -> Duration {
        Duration::from_millis(self.commit_ms)
    }

    pub(crate) const fn target_limit(&self) -> Duration {
        Duration::from_millis(self.target_ms)
    }
}
