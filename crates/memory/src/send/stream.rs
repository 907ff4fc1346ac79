//! One stream and its consumer.
//!
//! Sending and hearing of acknowledgements go on at the same time. What was sent and is not confirmed is kept by its pages, so
//! that it can be sent again over another stream. Its number is bounded.

use std::collections::VecDeque;
use std::sync::Arc;

use env::EnvRef;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::Semaphore;

use super::cutter::{Round, Task};
use super::encoder::{Compression, ENCODER_BYTES, Encoded, Encoder, Source};
use super::network::Network;
use super::pace::Pace;
use super::progress::{Counters, add};
use super::version_cache::VersionCache;
use crate::error::{Error, ErrorKind, Result};
use crate::guest_memory::GuestMemory;
use crate::transport::{BoxTransport, receive_greeting};
use crate::wire::{ACK_BYTES, ACK_FRAMES, Ack, AckStatus, FrameHeader, FrameKind, Hello, Refusal, Welcome};

/// So many frames of a stream may be unconfirmed.
const FRAMES_IN_FLIGHT: usize = 32;
// Otherwise both ends would wait for each other.
const _: () = assert!(FRAMES_IN_FLIGHT as u64 > ACK_FRAMES);
/// What a consumer takes of memory at most, in bytes.
pub const CONSUMER_BYTES: usize = ENCODER_BYTES + FRAMES_IN_FLIGHT * 8 * 1024;

/// A connection for a stream, and the environment whose worker its consumer runs on.
pub struct Lane {
    /// The connection.
    pub transport: BoxTransport,
    /// Where the consumer is spawned.
    pub env: EnvRef,
}

/// What all consumers of a copy share.
pub(crate) struct Shared {
    pub(crate) memory: Arc<dyn GuestMemory>,
    pub(crate) versions: VersionCache,
    pub(crate) counters: Arc<Counters>,
    pub(crate) pace: Arc<dyn Pace>,
    pub(crate) compression: Compression,
}

/// A stream that is open.
pub(crate) struct Stream {
    number: u16,
    pub(crate) env: EnvRef,
    reader: ReadHalf<BoxTransport>,
    writer: WriteHalf<BoxTransport>,
    encoder: Encoder,
    sequence: u64,
    network: Network,
}

impl Stream {
    /// Introduces a connection to the receiver.
    pub(crate) async fn open(lane: Lane, hello: &Hello) -> Result<Self> {
        let Lane { mut transport, env } = lane;
        transport.write_all(&hello.to_bytes()?).await.map_err(Error::disconnected)?;
        transport.flush().await.map_err(Error::disconnected)?;
        let text = receive_greeting(&mut transport).await?;
        match Welcome::parse(&text)?.refusal {
            None => {}
            Some(Refusal::OtherSession) => {
                return Err(Error::new(ErrorKind::Mismatch, "the receiver does not wait for this memory"));
            }
            Some(Refusal::Superseded) => {
                return Err(Error::new(ErrorKind::Mismatch, "the receiver has newer streams of this memory"));
            }
            Some(Refusal::OtherRegions) => {
                return Err(Error::new(ErrorKind::Mismatch, "the target's memory has other regions"));
            }
        }
        let (reader, writer) = tokio::io::split(transport);
        let encoder = Encoder::default();
        Ok(Self { number: hello.stream, env, reader, writer, encoder, sequence: 0, network: Network::default() })
    }

    /// Sends tasks of `round` until there are none, then a mark of `kind`, and waits until all is confirmed. Whatever is not goes back
    /// to the round.
    pub(crate) async fn send_round(
        mut self,
        round: Arc<Round>,
        shared: Arc<Shared>,
        kind: FrameKind,
    ) -> (Self, Result<()>) {
        let flight = Flight::default();
        let sent = self.exchange(&round, &shared, (&flight, kind)).await;
        if sent.is_err() {
            // The others need not begin what cannot be confirmed.
            round.end();
        }
        for (_, task) in flight.state.lock().unconfirmed.drain(..) {
            round.give_back(&task);
        }
        (self, sent)
    }

    async fn exchange(&mut self, round: &Round, shared: &Shared, (flight, kind): (&Flight, FrameKind)) -> Result<()> {
        let Self { number, env, reader, writer, encoder, sequence, network } = self;
        let mut consumer = Consumer { number: *number, env, writer, encoder, sequence, network };
        let sending = async {
            while let Some(task) = round.next_task()? {
                consumer.send(task, round, shared, flight).await?;
            }
            consumer.mark(kind, round.number, flight).await
        };
        futures::future::try_join(sending, hear(reader, flight)).await.map(drop)
    }
}

/// What was sent and is not confirmed.
struct Flight {
    state: Mutex<FlightState>,
    room: Semaphore,
}

#[derive(Default)]
struct FlightState {
    unconfirmed: VecDeque<(u64, Task)>,
    newest: u64,
    mark: Option<u64>,
}

impl Default for Flight {
    fn default() -> Self {
        Self { state: Mutex::default(), room: Semaphore::new(FRAMES_IN_FLIGHT) }
    }
}

/// Hears acknowledgements until the one of the mark.
async fn hear(reader: &mut ReadHalf<BoxTransport>, flight: &Flight) -> Result<()> {
    loop {
        let mut bytes = [0; ACK_BYTES];
        reader.read_exact(&mut bytes).await.map_err(Error::disconnected)?;
        let ack = Ack::parse(&bytes)?;
        match ack.status {
            AckStatus::Written => {}
            AckStatus::TargetFailed => {
                return Err(Error::new(ErrorKind::Target, "the target could not write its memory"));
            }
            AckStatus::OtherVersion => {
                return Err(Error::new(ErrorKind::Target, "the target's memory is not what was sent"));
            }
            AckStatus::Superseded => {
                return Err(Error::new(ErrorKind::Mismatch, "the receiver has newer streams of this memory"));
            }
        }
        let mut state = flight.state.lock();
        if ack.sequence > state.newest {
            return Err(Error::protocol("something was acknowledged that was not sent"));
        }
        while state.unconfirmed.front().is_some_and(|(sequence, _)| *sequence <= ack.sequence) {
            state.unconfirmed.pop_front();
            flight.room.add_permits(1);
        }
        if state.mark.is_some_and(|mark| mark <= ack.sequence) {
            return Ok(());
        }
    }
}

/// The sending half of a stream.
struct Consumer<'a> {
    number: u16,
    env: &'a EnvRef,
    writer: &'a mut WriteHalf<BoxTransport>,
    encoder: &'a mut Encoder,
    sequence: &'a mut u64,
    network: &'a mut Network,
}

impl Consumer<'_> {
    async fn send(&mut self, task: Task, round: &Round, shared: &Shared, flight: &Flight) -> Result<()> {
        let next = *self.sequence + 1;
        // From here on the task is given back if anything fails.
        let kept = task.clone();
        {
            let mut state = flight.state.lock();
            state.unconfirmed.push_back((next, kept));
        }
        let permit = flight.room.acquire().await.map_err(|error| Error::protocol("closed").with_source(error))?;
        let began = self.env.now();
        let is_slow = self.network.is_slow();
        let compresses = match shared.compression {
            Compression::Off => false,
            Compression::Lz4 => true,
            Compression::Auto => is_slow,
        };
        // What is sent first is kept only where to send it again costs more: few of these pages are written again.
        let keeps = round.number > 1 || is_slow;
        let (memory, versions) = (&*shared.memory, &shared.versions);
        let source = Source { memory, versions, round: round.number, compresses, keeps };
        let encoded = self.encoder.encode(&task, &source, next)?;
        let made = self.env.now();
        shared.pace.after_work(self.number, made.since(began)).await;
        let frame = self.encoder.frame();
        if frame.is_empty() {
            // All of it is there already, and was confirmed in an earlier round.
            flight.state.lock().unconfirmed.pop_back();
            count(shared, &encoded, 0);
            return Ok(());
        }
        permit.forget();
        let writing = self.env.now();
        shared.pace.before_send(self.number, frame.len() as u64).await;
        *self.sequence = next;
        flight.state.lock().newest = next;
        self.writer.write_all(frame).await.map_err(Error::disconnected)?;
        self.writer.flush().await.map_err(Error::disconnected)?;
        let written = self.env.now();
        self.network.note(frame.len() as u64, (began, writing, written));
        count(shared, &encoded, frame.len() as u64);
        Ok(())
    }

    async fn mark(&mut self, kind: FrameKind, round: u32, flight: &Flight) -> Result<()> {
        *self.sequence += 1;
        {
            let mut state = flight.state.lock();
            (state.newest, state.mark) = (*self.sequence, Some(*self.sequence));
        }
        let header = FrameHeader::mark(kind, *self.sequence, round);
        self.writer.write_all(&header.to_bytes()).await.map_err(Error::disconnected)?;
        self.writer.flush().await.map_err(Error::disconnected)
    }
}

fn count(shared: &Shared, encoded: &Encoded, bytes: u64) {
    let counters = &shared.counters;
    add(&counters.zero_pages, encoded.zero);
    add(&counters.data_pages, encoded.data);
    add(&counters.delta_pages, encoded.delta);
    add(&counters.unchanged_pages, encoded.unchanged);
    add(&counters.wire_bytes, bytes);
}
