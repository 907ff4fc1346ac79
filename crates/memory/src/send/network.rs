//! What a stream has seen of its network.

use env::Moment;

/// How much the newest frame counts in what is known.
const NEWEST: f64 = 0.1;
/// A stream that waits for the network for more than this part of its time has a processor to spare.
const WAITS: f64 = 0.3;
/// A stream that carries more bytes a second waits for processors, its own or the receiver's. LZ4 codes some 400 MB/s of ordinary pages on
/// one processor. To halve them pays below half of that, and a stream seldom has a whole processor.
const FAST_BYTES_PER_SECOND: f64 = 128.0 * 1024.0 * 1024.0;

/// The network of one stream, of late.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Network {
    /// Which part of the time the stream waits for it.
    waits: f64,
    bytes_per_second: f64,
}

impl Network {
    /// Whether work that spares bytes pays.
    pub(crate) fn is_slow(&self) -> bool {
        self.waits > WAITS && self.bytes_per_second < FAST_BYTES_PER_SECOND
    }

    /// A frame of so many bytes was begun, made and given to the network, and taken by it, at these times.
    pub(crate) fn note(&mut self, bytes: u64, (began, writing, written): (Moment, Moment, Moment)) {
        let all = written.since(began).as_secs_f64();
        if all <= 0.0 {
            return;
        }
        let mean = |before: f64, now: f64| before * (1.0 - NEWEST) + now * NEWEST;
        self.waits = mean(self.waits, written.since(writing).as_secs_f64() / all);
        self.bytes_per_second = mean(self.bytes_per_second, bytes as f64 / all);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// After many frames, each of which took so many microseconds to be made, and to be taken.
    fn after(bytes: u64, made_us: u64, taken_us: u64) -> Network {
        let mut network = Network::default();
        for _ in 0..100 {
            let at = |us| Moment(Duration::from_micros(us));
            network.note(bytes, (at(0), at(made_us), at(made_us + taken_us)));
        }
        network
    }

    #[test]
    fn a_network_is_slow_if_a_stream_waits_for_it_and_little_goes_through() {
        assert!(!Network::default().is_slow(), "nothing is known");
        assert!(after(262_144, 200, 10_000).is_slow(), "25 MB/s");
        assert!(!after(262_144, 200, 800).is_slow(), "262 MB/s: whoever waits here waits for a processor");
        assert!(!after(262_144, 10_000, 200).is_slow(), "it waits for its own processor");
    }
}
