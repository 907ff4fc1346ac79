//! What has been sent and received.

use std::sync::atomic::{AtomicU64, Ordering};

/// Of one stream, all of its connections together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Requests that were sent.
    pub requests: u64,
    /// Bytes that were given to the transport, headers included.
    pub bytes_sent: u64,
    /// Bytes that came from it.
    pub bytes_received: u64,
    /// How many of its connections have died.
    pub deaths: u64,
}

/// Of a sending device since it was connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamStatistics {
    /// Bytes of the volume in writes, before anything was left out; sent again, they count again.
    pub bytes_raw: u64,
    /// The payloads that went for them.
    pub bytes_payload: u64,
    /// Of `bytes_raw`, those that were zeroes and went as such.
    pub bytes_zero: u64,
    /// Of `bytes_raw`, those that went compressed.
    pub bytes_compressed: u64,
    /// Of `bytes_raw`, those that were sent a second time or more, because a stream died or a frame came damaged.
    pub bytes_again: u64,
    /// Frames that came damaged, on either side.
    pub damaged: u64,
    /// Sessions that were opened.
    pub sessions: u64,
    /// Each stream by its number.
    pub streams: Vec<StreamCounts>,
}

#[derive(Default)]
pub(super) struct OneStream {
    pub(super) requests: AtomicU64,
    pub(super) bytes_sent: AtomicU64,
    pub(super) bytes_received: AtomicU64,
    pub(super) deaths: AtomicU64,
}

/// The counters behind [`StreamStatistics`].
#[derive(Default)]
pub(super) struct Counters {
    pub(super) bytes_raw: AtomicU64,
    pub(super) bytes_payload: AtomicU64,
    pub(super) bytes_zero: AtomicU64,
    pub(super) bytes_compressed: AtomicU64,
    pub(super) bytes_again: AtomicU64,
    pub(super) damaged: AtomicU64,
    pub(super) sessions: AtomicU64,
    pub(super) streams: Vec<OneStream>,
}

/// Adds to a counter that nothing is ordered by.
pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn new(streams: u16) -> Self {
        Self { streams: (0..streams).map(|_| OneStream::default()).collect(), ..Self::default() }
    }

    pub(super) fn read(&self) -> StreamStatistics {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let of_stream = |stream: &OneStream| StreamCounts {
            requests: get(&stream.requests),
            bytes_sent: get(&stream.bytes_sent),
            bytes_received: get(&stream.bytes_received),
            deaths: get(&stream.deaths),
        };
        StreamStatistics {
            bytes_raw: get(&self.bytes_raw),
            bytes_payload: get(&self.bytes_payload),
            bytes_zero: get(&self.bytes_zero),
            bytes_compressed: get(&self.bytes_compressed),
            bytes_again: get(&self.bytes_again),
            damaged: get(&self.damaged),
            sessions: get(&self.sessions),
            streams: self.streams.iter().map(of_stream).collect(),
        }
    }
}
