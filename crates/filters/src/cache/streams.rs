//! Which reads belong to a long sequential stream.

use block::{Bytes, Extent};

/// So many streams are followed at a time.
const STREAMS: usize = 8;

/// The streams that the guest reads lately.
pub(super) struct Streams {
    /// Longer ones pass by; zero for none.
    limit: Bytes,
    streams: [Stream; STREAMS],
    /// How many reads were seen.
    clock: u64,
}

#[derive(Clone, Copy, Default)]
struct Stream {
    /// Where it goes on.
    next: Bytes,
    length: Bytes,
    /// When it went on last.
    last: u64,
}

impl Streams {
    pub(super) fn new(limit: Bytes) -> Self {
        Self { limit, streams: [Stream::default(); STREAMS], clock: 0 }
    }

    /// The guest reads `extent`: whether the stream that this goes on with is longer than the limit.
    pub(super) fn is_long(&mut self, extent: Extent) -> bool {
        if self.limit.is_zero() {
            return false;
        }
        self.clock += 1;
        let found = self.streams.iter().position(|stream| stream.last > 0 && stream.next == extent.offset);
        let oldest = || (0..STREAMS).min_by_key(|at| self.streams[*at].last).unwrap_or(0);
        let at = found.unwrap_or_else(oldest);
        let before = if found.is_some() { self.streams[at].length } else { Bytes::ZERO };
        let length = before + extent.length;
        self.streams[at] = Stream { next: extent.end(), length, last: self.clock };
        length > self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, length: u64) -> Extent {
        Extent::new(Bytes(offset), Bytes(length))
    }

    #[test]
    fn a_stream_is_long_once_more_than_the_limit_was_read_in_order() {
        let mut streams = Streams::new(Bytes(100));
        let told: Vec<bool> = (0..5).map(|at| streams.is_long(extent(at * 40, 40))).collect();
        assert_eq!(told, [false, false, true, true, true]);
        assert!(!streams.is_long(extent(1000, 40)), "another place");
        assert!(streams.is_long(extent(200, 1)), "the first one goes on");
        let mut off = Streams::new(Bytes::ZERO);
        assert!(!off.is_long(extent(0, 1000)) && !off.is_long(extent(1000, 1000)));
    }

    #[test]
    fn streams_that_go_on_beside_each_other_are_told_apart_and_the_oldest_is_forgotten() {
        let mut streams = Streams::new(Bytes(10));
        for round in 0..3 {
            for stream in 0..STREAMS as u64 {
                assert_eq!(streams.is_long(extent(stream * 1000 + round * 5, 5)), round == 2);
            }
        }
        assert!(!streams.is_long(extent(90_000, 5)));
        assert!(!streams.is_long(extent(15, 5)), "it had to go for the new one");
        assert!(streams.is_long(extent(2015, 5)));
    }
}
