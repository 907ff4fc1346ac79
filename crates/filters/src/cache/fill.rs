//! A cache that is full without having been filled: what a large one costs is measured with it.

use block::{Device, Error, ErrorKind, Result};

use super::Cache;
use super::entry::CacheEntry;

impl Cache {
    /// Has the empty cache on `partition`, which is not open, hold a block in each place, whole and clean: the one that `block_of` names, each
    /// another one. Only the record is written, so what is read of these blocks is whatever the partition has there. That is right if it has
    /// what the volume has: zeroes, of a sparse volume. It is believed in the boot in which the cache was last open. Done means durable.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect). Invalid if something is cached there already.
    pub async fn fill(partition: &Device, block_of: impl Fn(u64) -> u64) -> Result<()> {
        let header = Self::inspect(partition).await?;
        let state_of = |place| match place < header.places {
            true => CacheEntry::new(block_of(place), u8::MAX, 0),
            false => CacheEntry::FREE,
        };
        if header.layout().fill(partition, state_of).await? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Invalid, format!("{} has something cached", partition.name())))
    }
}
