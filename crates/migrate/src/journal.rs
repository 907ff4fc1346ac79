//! One small document, stored whole and durably, on a device: the memory of a volume and of its job.
//!
//! Three slots take turns. A store goes to a slot that does not hold the last good document, as one forced write. The
//! checksum shows a torn write, and then the document before it counts. `docs/journal.md` draws the bytes.
//!
//! After a store that failed nobody knows what the disk will give: the new document or the one before. That is *in
//! doubt*, and only a later store ends it. It goes to a third slot with a higher sequence. It never overwrites the
//! document in doubt, nor the last good one. Opening stores what it found once more, so that nobody acts upon a
//! document that a power cut could take back.

use std::marker::PhantomData;

use block::{Buffer, Bytes, Device, Error, ErrorKind, Mutation, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The first bytes of every slot.
const MAGIC: [u8; 8] = *b"TRANSHUJ";
/// The version of the layout.
const VERSION: u32 = 1;
/// How many slots take turns: the last good one, one that may be in doubt, and one to go to then.
const SLOT_COUNT: u64 = 3;
/// The size of a slot.
const SLOT_BYTES: u64 = 65536;
/// The size of a slot's header.
const HEADER_BYTES: usize = 32;
/// Where the checksum stands in the header.
const CRC_AT: std::ops::Range<usize> = 24..28;
/// Writes are padded to this, so that they suit a device of large sectors.
const PAD_BYTES: usize = 4096;

/// A document on a device, stored whole or not at all.
pub struct Journal<T> {
    device: Device,
    state: tokio::sync::Mutex<State>,
    document: PhantomData<fn(&T) -> T>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// The highest sequence that was ever tried.
    sequence: u64,
    /// The slot of the last document that is known to be durable.
    good: Option<u64>,
    /// The slot of the store before, while that is in doubt.
    doubtful: Option<u64>,
}

/// What a slot was found to hold.
enum Found {
    Zeroes,
    Torn,
    Valid { sequence: u64, payload: Vec<u8> },
}

impl<T: Serialize + DeserializeOwned> Journal<T> {
    /// How large the device must be. Whoever creates its file allocates all of it beforehand, so that a store never
    /// lacks space.
    #[must_use]
    pub const fn bytes_needed() -> Bytes {
        Bytes(SLOT_COUNT * SLOT_BYTES)
    }

    /// How many bytes a document may have at most.
    #[must_use]
    pub const fn document_bytes_max() -> usize {
        SLOT_BYTES as usize - HEADER_BYTES
    }

    /// Opens the journal on `device` (zeroes for a new one) and gives its document, if it has one. The document is
    /// stored once more before it is given, so what the caller reads it may rely on.
    ///
    /// # Errors
    /// Corrupt if there is something and nothing of it can be read; unsupported if a newer version wrote it; whatever
    /// the device says.
    pub async fn open(device: Device) -> Result<(Self, Option<T>)> {
        let (newest, sequence) = scan(&device).await?;
        let state = State { sequence, good: newest.as_ref().map(|(slot, _)| *slot), doubtful: None };
        let journal = Self { device, state: tokio::sync::Mutex::new(state), document: PhantomData };
        let Some((_, payload)) = newest else { return Ok((journal, None)) };
        let document = decode(&payload)?;
        journal.store_payload(&payload).await?;
        Ok((journal, Some(document)))
    }

    /// Reads the newest document without writing anything, for those who only look.
    ///
    /// # Errors
    /// Like [`open`](Self::open).
    pub async fn peek(device: &Device) -> Result<Option<T>> {
        let (newest, _) = scan(device).await?;
        newest.map(|(_, payload)| decode(&payload)).transpose()
    }

    /// Stores `document` durably in the place of the one before. Stores are carried out one after another, in the order
    /// of asking.
    ///
    /// # Errors
    /// Too large, with nothing written. Any other error means in doubt: the disk may give the new document or the one
    /// before, until a later store succeeds. The same holds for a store that was dropped before it was done.
    pub async fn store(&self, document: &T) -> Result<()> {
        let payload = serde_json::to_vec(document)
            .map_err(|error| Error::new(ErrorKind::Internal, "the document does not serialise").with_source(error))?;
        self.store_payload(&payload).await
    }

    /// Whether the last store failed, so that nobody knows which document the disk will give.
    pub async fn in_doubt(&self) -> bool {
        self.state.lock().await.doubtful.is_some()
    }

    async fn store_payload(&self, payload: &[u8]) -> Result<()> {
        if payload.len() > Self::document_bytes_max() {
            let context = format!("a document of {} bytes does not fit the journal's slots", payload.len());
            return Err(Error::new(ErrorKind::TooLarge, context));
        }
        let mut state = self.state.lock().await;
        let slot = state.next_slot();
        // Noted before the write begins: a store that is dropped half-way is in doubt, too.
        state.sequence += 1;
        state.doubtful = Some(slot);
        let data = encode(state.sequence, payload).freeze();
        let write = Mutation::data(Bytes(slot * SLOT_BYTES), data).with_fua(true);
        let stored = self.device.write(write).await;
        stored.map_err(|error| error.wrap("storing the journal; which document the disk holds is in doubt"))?;
        state.good = Some(slot);
        state.doubtful = None;
        Ok(())
    }
}

impl State {
    /// A slot that neither holds the last good document nor is in doubt from the store before.
    fn next_slot(&self) -> u64 {
        let last = self.doubtful.or(self.good).unwrap_or(SLOT_COUNT - 1);
        (1..=SLOT_COUNT)
            .map(|step| (last + step) % SLOT_COUNT)
            .find(|slot| Some(*slot) != self.good && Some(*slot) != self.doubtful)
            .expect("of three slots at most two are taken")
    }
}

/// The newest valid slot with its payload, and the highest sequence seen.
async fn scan(device: &Device) -> Result<(Option<(u64, Vec<u8>)>, u64)> {
    let needed = Bytes(SLOT_COUNT * SLOT_BYTES);
    if device.size() < needed {
        let context = format!("the journal {} has {} instead of {needed}", device.name(), device.size());
        return Err(Error::new(ErrorKind::Corrupt, context));
    }
    let mut newest: Option<(u64, u64, Vec<u8>)> = None;
    let mut torn = 0;
    for slot in 0..SLOT_COUNT {
        let bytes = device.read(Bytes(slot * SLOT_BYTES), Buffer::unpooled(SLOT_BYTES as usize)).await?;
        match examine(&bytes)? {
            Found::Zeroes => {}
            Found::Torn => torn += 1,
            Found::Valid { sequence, payload } => {
                if newest.as_ref().is_none_or(|(_, known, _)| sequence > *known) {
                    newest = Some((slot, sequence, payload));
                }
            }
        }
    }
    match newest {
        Some((slot, sequence, payload)) => Ok((Some((slot, payload)), sequence)),
        // The very first store may have been torn. More than that is damage.
        None if torn <= 1 => Ok((None, 0)),
        None => {
            let context = format!("the journal {} holds nothing that can be read", device.name());
            Err(Error::new(ErrorKind::Corrupt, context))
        }
    }
}

fn examine(bytes: &[u8]) -> Result<Found> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(Found::Zeroes);
    }
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let length = number(12) as usize;
    if bytes[..8] != MAGIC || length > SLOT_BYTES as usize - HEADER_BYTES {
        return Ok(Found::Torn);
    }
    let payload = &bytes[HEADER_BYTES..HEADER_BYTES + length];
    if checksum(&bytes[..HEADER_BYTES], payload) != number(CRC_AT.start) {
        return Ok(Found::Torn);
    }
    if number(8) != VERSION {
        let context = format!("the journal has layout {}, and only {VERSION} is known here", number(8));
        return Err(Error::new(ErrorKind::Unsupported, context));
    }
    let sequence = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes"));
    Ok(Found::Valid { sequence, payload: payload.to_vec() })
}

fn encode(sequence: u64, payload: &[u8]) -> Buffer {
    let mut buffer = Buffer::unpooled((HEADER_BYTES + payload.len()).next_multiple_of(PAD_BYTES));
    buffer[..8].copy_from_slice(&MAGIC);
    buffer[8..12].copy_from_slice(&VERSION.to_le_bytes());
    buffer[12..16].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    buffer[16..24].copy_from_slice(&sequence.to_le_bytes());
    buffer[HEADER_BYTES..HEADER_BYTES + payload.len()].copy_from_slice(payload);
    let crc = checksum(&buffer[..HEADER_BYTES], payload);
    buffer[CRC_AT].copy_from_slice(&crc.to_le_bytes());
    buffer
}

/// CRC-32 over the header without the checksum's own field, then the payload.
fn checksum(header: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..CRC_AT.start]);
    hasher.update(&header[CRC_AT.end..]);
    hasher.update(payload);
    hasher.finalize()
}

fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T> {
    serde_json::from_slice(payload)
        .map_err(|error| Error::new(ErrorKind::Corrupt, "the journal's document makes no sense").with_source(error))
}

impl<T> std::fmt::Debug for Journal<T> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Journal({})", self.device.name())
    }
}

#[cfg(test)]
mod tests;
