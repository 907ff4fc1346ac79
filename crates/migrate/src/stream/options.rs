//! How much, how long, how many: every limit of the wire that is not the protocol's own.

use std::time::Duration;

use block::{Bytes, Error, ErrorKind, Result};
use env::EnvRef;

/// Whether payloads are made shorter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Where it is measured to be faster.
    #[default]
    Auto,
    /// Never.
    Off,
    /// By LZ4, wherever that makes a payload shorter.
    Lz4,
    /// By zstd at its level 1, wherever that makes a payload shorter.
    Zstd,
}

/// The usual frame. Copies make their checksums by parts of this size, so that the wire need not make them again.
pub(crate) const FRAME_BYTES: u32 = 256 << 10;

/// How the sender works. The default suits hosts within a rack.
#[derive(Clone)]
pub struct StreamOptions {
    /// How many streams, 1 to 64.
    pub streams: u16,
    /// The most bytes of the volume in one frame: a power of two from 4 KiB to 1 MiB. Larger requests are cut.
    pub frame_bytes: u32,
    /// How many bytes of a stream may be unanswered.
    pub stream_bytes_max: Bytes,
    /// How many requests of a stream may be unanswered.
    pub stream_requests_max: usize,
    /// What makes payloads shorter.
    pub compression: Compression,
    /// A stream that waits for an answer and hears nothing for so long is closed.
    pub silence_max: Duration,
    /// A stream that has sent nothing for so long sends a sign of life. A few of them fit into the other side's limit.
    pub beat: Duration,
    /// How long connecting, with all that is said before the first request, may take.
    pub dial_max: Duration,
    /// How long opening a session may take in all: at the other end the old one has to finish first.
    pub open_max: Duration,
    /// The first pause before a lost stream is dialled again; it doubles each time.
    pub backoff_min: Duration,
    /// The longest such pause.
    pub backoff_max: Duration,
    /// With [`Role::Forward`](super::Role::Forward): how long requests wait for lost streams to come back before they fail. Zero: they do
    /// not wait, and a lost session is opened again by [`reconnect`](super::Remote::reconnect) alone, as with a copy.
    pub reconnect_limit: Duration,
    /// How often a frame that arrives damaged is sent again.
    pub damage_max: u8,
    /// Streams but the first are ended when nothing was asked for so long, and dialled again when requests wait. `None`: all
    /// of them stay.
    pub idle_max: Option<Duration>,
    /// Where streams run: number `k` on the one at `k` modulo their number. Empty: all where the device was connected.
    pub workers: Vec<EnvRef>,
}

impl StreamOptions {
    /// The default for a machine of so many cores and so many pairs of addresses. It is a stream a core up to four, and
    /// at least one for each pair.
    #[must_use]
    pub fn for_machine(cores: usize, pairs: usize) -> Self {
        let streams = cores.clamp(1, 4).max(pairs).min(usize::from(STREAMS_MAX)) as u16;
        Self { streams, ..Self::default() }
    }

    /// # Errors
    /// A value is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |what: &str| Err(Error::new(ErrorKind::Invalid, format!("stream options: {what}")));
        if self.streams == 0 || self.streams > STREAMS_MAX {
            return refuse("there are 1 to 64 streams");
        }
        if !self.frame_bytes.is_power_of_two()
            || !(4096..=super::protocol::PAYLOAD_BYTES_MAX).contains(&self.frame_bytes)
        {
            return refuse("a frame is a power of two from 4 KiB to 1 MiB");
        }
        if self.beat.is_zero() || self.silence_max < 2 * self.beat {
            return refuse("the limit of silence is at least two beats");
        }
        if self.stream_requests_max == 0 {
            return refuse("a stream needs room for a request");
        }
        Ok(())
    }
}

/// More streams than this are of no use.
pub(super) const STREAMS_MAX: u16 = 64;

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            streams: 1,
            frame_bytes: FRAME_BYTES,
            stream_bytes_max: Bytes::mib(8),
            stream_requests_max: 256,
            compression: Compression::Auto,
            silence_max: Duration::from_secs(2),
            beat: Duration::from_millis(400),
            dial_max: Duration::from_secs(10),
            open_max: Duration::from_secs(60),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            reconnect_limit: Duration::from_secs(300),
            damage_max: 4,
            idle_max: None,
            workers: Vec::new(),
        }
    }
}

/// The limits of a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverLimits {
    /// Payloads of all sessions together, beside what each has for itself. Who needs more waits, and its connection is not
    /// read meanwhile.
    pub pool: Bytes,
    /// What each session has for itself, once for what it is told and once for what it answers; at least 2 MiB.
    pub share: Bytes,
    /// How many connections there may be before further streams of a session are refused. Each has 256 KiB of its own beside
    /// the pool.
    pub connections_max: usize,
    /// The same of the first stream of a session, without which its guest has no disk.
    pub connections_max_first: usize,
    /// How many requests of a connection may be in flight.
    pub requests_max: usize,
    /// How many bytes of a connection may be in flight, answers that wait to be sent included.
    pub bytes_max: Bytes,
    /// How long the first messages of a connection may take.
    pub opening_max: Duration,
    /// A connection that hears nothing, or cannot send, for so long is ended.
    pub silence_max: Duration,
    /// Who has sent nothing for so long sends a sign of life.
    pub beat: Duration,
    /// How long a session without connections stays open for its sender to come back.
    pub idle_limit: Duration,
}

impl Default for ReceiverLimits {
    fn default() -> Self {
        Self {
            pool: Bytes::mib(128),
            share: Bytes::mib(4),
            connections_max: 256,
            connections_max_first: 512,
            requests_max: 256,
            bytes_max: Bytes::mib(16),
            opening_max: Duration::from_secs(10),
            silence_max: Duration::from_secs(30),
            beat: Duration::from_millis(400),
            idle_limit: Duration::from_secs(60),
        }
    }
}
