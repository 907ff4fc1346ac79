//! Surrogates: pools in which the popular data of volumes is kept while they are moved (WAIO), with a slot for each volume.
//!
//! What holds the bytes is `filters::Redirect`; what puts that into a volume's stack is `stack::redirect`.

mod document;
mod store;

use std::path::PathBuf;
use std::sync::Arc;

use api::v1::{self, Error, ErrorCode, SurrogateRequest};
use block::Bytes;

pub(crate) use self::document::SurrogateSettings;
use self::document::{SurrogateDocument, SurrogatePlace};
pub(crate) use self::store::SurrogatePart;
use crate::pools::{DocumentOf, NewStore, Pool, PoolKind, Pools};
use crate::problem::{Result, invalid};
use crate::state_dir::Layout;

/// A partition is no smaller: some chunks fit beside their maps.
const PARTITION_BYTES_MIN: u64 = 2 << 20;
/// The unit of what is popular.
const CHUNK_BYTES_MIN: u64 = 64 << 10;
const CHUNK_BYTES_MAX: u64 = 1 << 20;
/// So many volumes have room if nothing is said.
const PARTITIONS_DEFAULT: u64 = 8;

/// The kind of pool that surrogates are.
pub(crate) struct SurrogateKind;

/// A surrogate.
pub(crate) type Surrogate = Pool<SurrogateKind>;

/// All surrogates of this host.
pub(crate) type Surrogates = Pools<SurrogateKind>;

impl PoolKind for SurrogateKind {
    type Settings = SurrogateSettings;
    type Place = SurrogatePlace;

    const NAME: &'static str = "surrogate";

    fn directory(layout: &Layout) -> PathBuf {
        layout.surrogates()
    }

    fn is_sound(document: &DocumentOf<Self>) -> bool {
        document.settings.partition_bytes > 0
    }
}

impl Surrogates {
    /// Makes the surrogate that was asked for on `stores`. When this fails nothing was left behind.
    ///
    /// # Errors
    /// There is one of that name, the request makes no sense, or a store cannot be used.
    pub(crate) async fn create(&self, request: SurrogateRequest, stores: Vec<NewStore>) -> Result<v1::Surrogate> {
        let SurrogateRequest { name, stores: _, partition_bytes, chunk_bytes } = request;
        let chunk_bytes = chunk_bytes.unwrap_or(CHUNK_BYTES_MAX);
        if !chunk_bytes.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            let message = format!("{chunk_bytes} bytes cannot be the unit of a surrogate");
            return Err(invalid(message, "give a power of two from 64KiB to 1MiB"));
        }
        if !(1..=2).contains(&stores.len()) {
            return Err(invalid("a surrogate has one store or two", "give --store once, or twice for two devices"));
        }
        let settings = SurrogateSettings { partition_bytes: 1, chunk_bytes };
        let made = self.make(name, stores, settings, |document| divide(document, partition_bytes)).await?;
        Ok(made.show())
    }

    /// Has a surrogate take no further volume. Those that have a part of it keep it until their moves are over.
    ///
    /// # Errors
    /// There is none of that name, or that could not be stored.
    pub(crate) fn drain(&self, name: &str) -> Result<Arc<Surrogate>> {
        let surrogate = self.get(name)?;
        surrogate.update(|document| {
            document.draining = true;
            Ok(())
        })?;
        Ok(surrogate)
    }

    /// Removes a surrogate that no volume has a part of, with the files that were made for it.
    ///
    /// # Errors
    /// There is none of that name, or it is in use.
    pub(crate) async fn remove(&self, name: &str) -> Result<v1::Surrogate> {
        let hint =
            format!("wait until its move is over, or cancel that; `transhume surrogate drain {name}` keeps others out");
        Ok(self.unmake(name, &hint).await?.show())
    }
}

/// Says how large a part is, now that it is known how much there is.
fn divide(document: &mut SurrogateDocument, partition_bytes: Option<u64>) -> Result<()> {
    let bytes = document.bytes;
    let least = PARTITION_BYTES_MIN.max(16 * document.settings.chunk_bytes);
    let partition_bytes = partition_bytes.unwrap_or(bytes / PARTITIONS_DEFAULT).max(least);
    let partition_bytes = partition_bytes - partition_bytes % (1 << 20);
    if partition_bytes > bytes {
        let message = format!("a store of {} has no room for a part of {}", Bytes(bytes), Bytes(partition_bytes));
        return Err(Error::new(ErrorCode::NoSpace, message)
            .with_hint("give larger stores, or smaller parts; 16 chunks, or 2MiB, are the least"));
    }
    document.settings.partition_bytes = partition_bytes;
    Ok(())
}
