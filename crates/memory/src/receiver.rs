//! The receiver's side: checks what comes, and writes it straight into the target's memory.
//!
//! A frame is acknowledged after it is written, at the latest with the mark at the end of its round. A newer generation of streams waits
//! until the frame that an older one is writing is written, and the older ones write no more: what a cut connection still has on its way
//! never lands after something newer.

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::error::{Error, ErrorKind, Result};
use crate::guest_memory::TargetMemory;
use crate::region::{PAGE_BYTES, Region};
use crate::transport::{BoxTransport, receive_greeting};
use crate::wire::{
    ACK_FRAMES, Ack, AckStatus, BODY_BYTES_MAX, Coding, ENTRY_BYTES, Entry, EntryKind, FRAME_PAYLOAD_BYTES_MAX,
    FrameHeader, FrameKind, HEADER_BYTES, Hello, Refusal, Welcome, checksum_of, parse_entries,
};

const PAGE: usize = PAGE_BYTES as usize;
/// What one stream takes of memory at most, in bytes.
pub const RECEIVING_BYTES: usize = (FRAME_PAYLOAD_BYTES_MAX + BODY_BYTES_MAX) as usize + 16 * 1024;

/// Takes one guest's memory from one sender.
pub struct Receiver {
    memory: Arc<dyn TargetMemory>,
    session: [u8; 16],
    /// The generation that may write. Who writes holds it shared.
    generation: RwLock<u64>,
    ends: Mutex<Ends>,
}

/// Which streams have said that nothing is missing.
#[derive(Default)]
struct Ends {
    generation: u64,
    streams: u16,
    ended: u64,
}

impl Receiver {
    /// Writes to `memory` what the copy `session` sends.
    #[must_use]
    pub fn new(memory: Arc<dyn TargetMemory>, session: [u8; 16]) -> Self {
        Self { memory, session, generation: RwLock::new(0), ends: Mutex::default() }
    }

    /// Whether all of the memory is here: every stream of the newest generation has said so after its last page.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let ends = self.ends.lock();
        ends.streams > 0 && ends.ended == u64::MAX >> (64 - u32::from(ends.streams))
    }

    /// Serves one stream to its end.
    ///
    /// # Errors
    /// The connection fails, or says what it must not; the memory cannot be written.
    pub async fn serve(&self, mut transport: BoxTransport) -> Result<()> {
        let text = receive_greeting(&mut transport).await?;
        let hello = Hello::parse(&text)?;
        let refusal = self.admit(&hello);
        transport.write_all(&Welcome { refusal }.to_bytes()?).await.map_err(Error::disconnected)?;
        transport.flush().await.map_err(Error::disconnected)?;
        if let Some(refusal) = refusal {
            return Err(Error::new(ErrorKind::Mismatch, format!("a stream of memory was not taken: {refusal:?}")));
        }
        Incoming::default().serve(self, &hello, &mut transport).await
    }

    fn admit(&self, hello: &Hello) -> Option<Refusal> {
        if hello.session != self.session {
            return Some(Refusal::OtherSession);
        }
        if hello.regions != self.memory.regions() {
            return Some(Refusal::OtherRegions);
        }
        let mut newest = self.generation.write();
        if hello.generation < *newest {
            return Some(Refusal::Superseded);
        }
        let mut ends = self.ends.lock();
        if hello.generation > *newest || ends.streams == 0 {
            *newest = hello.generation;
            *ends = Ends { generation: hello.generation, streams: hello.streams, ended: 0 };
        }
        // Streams of one generation agree on how many they are.
        (ends.streams != hello.streams).then_some(Refusal::OtherSession)
    }

    fn note(&self, hello: &Hello, has_ended: bool) {
        let mut ends = self.ends.lock();
        if ends.generation == hello.generation {
            let bit = 1 << hello.stream;
            if has_ended {
                ends.ended |= bit;
            } else {
                ends.ended &= !bit;
            }
        }
    }
}

/// The buffers of one stream.
#[derive(Default)]
struct Incoming {
    payload: Vec<u8>,
    body: Vec<u8>,
    page: Vec<u8>,
}

impl Incoming {
    async fn serve(mut self, receiver: &Receiver, hello: &Hello, transport: &mut BoxTransport) -> Result<()> {
        let mut expected = 1;
        loop {
            let mut first = [0; HEADER_BYTES];
            match transport.read_exact(&mut first).await {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(Error::disconnected(error)),
            }
            let header = FrameHeader::parse(&first)?;
            if header.sequence != expected {
                return Err(Error::protocol(format!("frame {} came, and {expected} was expected", header.sequence)));
            }
            expected += 1;
            self.payload.resize(header.payload_bytes as usize, 0);
            transport.read_exact(&mut self.payload).await.map_err(Error::disconnected)?;
            if checksum_of(&self.payload) != header.payload_sum {
                return Err(Error::protocol("a frame is damaged"));
            }
            let done = match header.kind {
                FrameKind::Pages => self.write(receiver, hello, &header),
                FrameKind::Barrier => Ok(()),
                FrameKind::End => {
                    receiver.note(hello, true);
                    Ok(())
                }
            };
            let status = match &done {
                Ok(()) => AckStatus::Written,
                Err(error) if error.kind() == ErrorKind::Mismatch => AckStatus::Superseded,
                Err(error) if error.kind() == ErrorKind::Target => AckStatus::OtherVersion,
                // It has broken the rules, and hears that by the end of the connection.
                Err(error) if error.kind() == ErrorKind::Protocol => return done,
                Err(_) => AckStatus::TargetFailed,
            };
            let is_told =
                header.kind != FrameKind::Pages || header.sequence.is_multiple_of(ACK_FRAMES) || done.is_err();
            if is_told {
                let ack = Ack { sequence: header.sequence, status };
                transport.write_all(&ack.to_bytes()).await.map_err(Error::disconnected)?;
                transport.flush().await.map_err(Error::disconnected)?;
            }
            done?;
        }
    }

    /// Writes the pages of one frame.
    fn write(&mut self, receiver: &Receiver, hello: &Hello, header: &FrameHeader) -> Result<()> {
        let region = usize::from(header.region);
        let pages = receiver.memory.regions().get(region).map(Region::pages);
        let pages = pages.ok_or_else(|| Error::protocol(format!("there is no region {region}")))?;
        let (entries, coded) = self.payload.split_at(header.entries as usize * ENTRY_BYTES);
        let entries = parse_entries(entries, header, pages)?;
        let body = match header.coding {
            Coding::Plain => coded,
            Coding::Lz4 => {
                self.body.resize(header.body_bytes as usize, 0);
                let length = lz4_flex::block::decompress_into(coded, &mut self.body);
                if length.ok() != Some(self.body.len()) {
                    return Err(Error::protocol("the body of a frame cannot be decoded"));
                }
                &self.body
            }
        };
        let newest = receiver.generation.read();
        if *newest != hello.generation {
            return Err(Error::new(ErrorKind::Mismatch, "a newer generation of streams has begun"));
        }
        receiver.note(hello, false);
        let mut rest = body;
        for entry in &entries {
            let (bytes, behind) = rest.split_at(entry.body_bytes() as usize);
            rest = behind;
            write_entry(&*receiver.memory, (region, entry), bytes, &mut self.page)?;
        }
        drop(newest);
        Ok(())
    }
}

fn write_entry(
    memory: &dyn TargetMemory,
    (region, entry): (usize, &Entry),
    bytes: &[u8],
    page: &mut Vec<u8>,
) -> Result<()> {
    let first = u64::from(entry.page);
    match entry.kind {
        EntryKind::Zero => memory.zero(region, first, entry.count.into()),
        EntryKind::Bytes => memory.write(region, first, bytes),
        EntryKind::Delta => {
            let (difference, sum) = bytes.split_at(PAGE);
            page.resize(PAGE, 0);
            memory.read(region, first, page)?;
            page.iter_mut().zip(difference).for_each(|(byte, difference)| *byte ^= difference);
            if checksum_of(page).to_le_bytes() != sum {
                let context = format!("page {first} of region {region} is not the version that a difference is from");
                return Err(Error::new(ErrorKind::Target, context));
            }
            memory.write(region, first, page)
        }
    }
}
