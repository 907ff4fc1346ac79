//! One move beside one guest on one disk, or several of them: the real engine and the real filter on modelled devices.
//!
//! A scale divides the image, what a generator uses of it, the host's page cache and the hard disk's capacity. Rates, the size
//! of a chunk and the length of a seek over the image stay. So times are multiplied by it afterwards, and a chunk that is
//! admitted to the surrogate is asked for as often as in a move of the paper's size. Recorded traces are played at scale 1.

use std::time::Duration;

use block::{Error, ErrorKind, Result};
use filters::RedirectStatus;
use migrate::{MoveOptions, OnNoConverge, ReadCacheReport, ScheduleKind, ScheduleReport, Strategy, Verify};
use sim::bench::Tally;
use sim::clock;
use sim::log::Keep;
use sim::world::World;

use super::devices::{CacheMode, Disk};
use super::load::{Laid, Load};

mod host;
mod machine;

/// What the dissertation calls 15 GB.
pub(crate) const IMAGE_BYTES: u64 = 15_000_000_000;
/// The unit of what is popular, tracked and copied.
pub(crate) const CHUNK_BYTES: u64 = 1 << 20;
/// A limit that is never reached.
const NEVER_US: u64 = 3_600_000_000;
/// However long the last copy of DBT takes, it is made.
const FOR_EVER_MS: u64 = 86_400_000;
/// The guest is held when what is left takes so long. Not stated; QEMU's default of 30 ms would never be reached beside a guest
/// that writes to chunks of 1 MiB.
const DOWNTIME_LIMIT_MS: u64 = 10_000;

/// The engine's read cache has room for so many chunks at least.
const CACHED_CHUNKS_MIN: u64 = 16;

/// In which order chunks are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Order {
    /// From the first to the last.
    Sequential,
    /// What the guest has asked for least comes first.
    ColdFirst,
    /// Where the head is, after so many requests of the guest's.
    Follow {
        /// How many.
        ratio: u8,
    },
}

/// A scene.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Scene {
    pub(crate) load: Load,
    /// Its addresses are stretched over the whole image.
    pub(crate) is_stretched: bool,
    /// The load is played at its own times.
    pub(crate) is_open_loop: bool,
    /// Zipf's exponent of a generator, in hundredths of what the specification says.
    pub(crate) skew: u32,
    /// The load ends after so many requests at the paper's scale, and the move with it.
    pub(crate) requests_max: Option<u64>,
    /// How many requests of a guest are outstanding in a closed loop.
    pub(crate) outstanding: usize,
    /// How many guests move at once, each with an image on the same disk.
    pub(crate) machines: u64,
    pub(crate) source: Disk,
    /// Where popular chunks and changes go; nowhere without one.
    pub(crate) surrogate: Option<Disk>,
    /// From which request on a chunk is popular.
    pub(crate) threshold: u16,
    pub(crate) cache: CacheMode,
    /// How much memory the engine keeps for what was copied, at the paper's scale; none with zero.
    pub(crate) read_cache: u64,
    pub(crate) target: Disk,
    /// Whether the guest moves at all, and in which order.
    pub(crate) order: Option<Order>,
    /// Bytes a second of a move; as fast as it goes without.
    pub(crate) rate: Option<u64>,
    /// How much a move has outstanding.
    pub(crate) window_bytes: u64,
    pub(crate) chunk_bytes: u64,
    /// The image's bytes, at the paper's scale.
    pub(crate) image: u64,
    /// Two other guests use the source's disk.
    pub(crate) has_neighbours: bool,
    /// A second image of the guest's on a disk of its own moves first.
    pub(crate) has_system_disk: bool,
    /// Everything is so many times smaller.
    pub(crate) scale: u64,
}

impl Scene {
    /// As section 3.3 of the dissertation has it: 15 GB, 40 MB/s, one request outstanding, writethrough, two neighbours, no
    /// redirection.
    pub(crate) fn of_waio(load: Load, scale: u64) -> Self {
        let rate = 40_000_000;
        Self {
            load,
            is_stretched: false,
            is_open_loop: false,
            skew: 100,
            requests_max: None,
            outstanding: 1,
            machines: 1,
            source: Disk::Hard,
            surrogate: None,
            threshold: 1,
            cache: CacheMode::WriteThrough,
            read_cache: 0,
            target: Disk::Hard,
            order: Some(Order::Sequential),
            rate: Some(rate),
            window_bytes: window_of(rate),
            chunk_bytes: CHUNK_BYTES,
            image: IMAGE_BYTES,
            has_neighbours: true,
            has_system_disk: false,
            scale: if load.is_recorded() { 1 } else { scale },
        }
    }

    /// The same with a surrogate.
    pub(crate) const fn on(self, surrogate: Disk) -> Self {
        Self { surrogate: Some(surrogate), ..self }
    }

    /// The same at another rate.
    pub(crate) const fn at_rate(self, rate: u64) -> Self {
        Self { rate: Some(rate), window_bytes: window_of(rate), ..self }
    }

    /// The image's bytes, here.
    pub(crate) const fn image_here(&self) -> u64 {
        (self.image / self.scale).next_multiple_of(CHUNK_BYTES)
    }

    fn laid(&self) -> Laid {
        let Self { is_stretched, is_open_loop, skew, scale, .. } = *self;
        let requests_max = self.requests_max.map(|most| most / scale);
        Laid { image: self.image_here(), is_stretched, is_open_loop, skew, requests_max, scale }
    }

    /// What the engine is asked for: dirty block tracking as QEMU 1.5 does it, which pays no regard to the guest.
    fn options(&self) -> MoveOptions {
        let defaults = MoveOptions::default();
        let (schedule, follow_ratio) = match self.order {
            None | Some(Order::Sequential) => (ScheduleKind::Sequential, defaults.follow_ratio),
            Some(Order::ColdFirst) => (ScheduleKind::ColdFirst, defaults.follow_ratio),
            Some(Order::Follow { ratio }) => (ScheduleKind::Follow, ratio),
        };
        let least = CACHED_CHUNKS_MIN * self.chunk_bytes;
        let read_cache_bytes = if self.read_cache == 0 { 0 } else { (self.read_cache / self.scale).max(least) };
        MoveOptions {
            strategy: Strategy::Dbt,
            schedule,
            follow_ratio,
            follow_run_bytes: self.chunk_bytes,
            read_cache_bytes,
            chunk_bytes: self.chunk_bytes,
            copy_bytes_max: self.chunk_bytes.min(CHUNK_BYTES),
            bandwidth: self.rate,
            window_bytes_max: self.window_bytes,
            guest_latency_us: NEVER_US,
            quiesce_ms: 5_000,
            downtime_limit_ms: (DOWNTIME_LIMIT_MS / self.scale).max(1),
            on_no_converge: OnNoConverge::Force,
            forced_downtime_ms_max: FOR_EVER_MS,
            verify: Verify::Off,
            ..defaults
        }
    }
}

/// QEMU 1.5's block migration asks for what its rate allows within 100 ms, in pieces of 1 MiB.
const fn window_of(rate: u64) -> u64 {
    let window = rate / 10;
    if window < CHUNK_BYTES { CHUNK_BYTES } else { window }
}

impl std::fmt::Display for Scene {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} on {}", self.load.name(), self.source.name())?;
        if let Some(surrogate) = self.surrogate {
            write!(out, ", WAIO on {} from request {}", surrogate.name(), self.threshold)?;
        }
        match self.order {
            None => out.write_str(", no move")?,
            Some(Order::Sequential) => {}
            Some(Order::ColdFirst) => out.write_str(", cold first")?,
            Some(Order::Follow { ratio }) => write!(out, ", IOFollow {ratio}:1")?,
        }
        if self.read_cache > 0 {
            write!(out, ", {:.1} GB cached", self.read_cache as f64 / 1e9)?;
        }
        if let (Some(_), Some(rate)) = (self.order, self.rate) {
            write!(out, ", {:.1} MB/s", rate as f64 / 1e6)?;
        }
        if self.chunk_bytes != CHUNK_BYTES {
            write!(out, ", chunks of {} KiB", self.chunk_bytes >> 10)?;
        }
        if self.machines > 1 {
            write!(out, ", {} machines", self.machines)?;
        }
        write!(out, ", {}, {:.0} GB, {} outstanding", self.cache.name(), self.image as f64 / 1e9, self.outstanding)?;
        for (is_so, words) in [
            (self.is_stretched, ", stretched"),
            (!self.has_neighbours, ", no neighbours"),
            (self.rate.is_some_and(|rate| self.window_bytes != window_of(rate)), ", one chunk outstanding"),
            (self.has_system_disk, ", a system disk first"),
        ] {
            out.write_str(if is_so { words } else { "" })?;
        }
        if self.is_open_loop {
            out.write_str(", open loop")?;
        }
        if let Some(most) = self.requests_max {
            write!(out, ", {most} requests")?;
        }
        if self.skew != 100 {
            write!(out, ", skew x{:.2}", f64::from(self.skew) / 100.0)?;
        }
        Ok(())
    }
}

/// Requests that were answered, and what that took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// All their times together, in seconds.
    pub(crate) seconds: f64,
}

impl Sums {
    pub(crate) fn add(&mut self, tally: &Tally) {
        self.requests += tally.reads + tally.writes;
        self.bytes += tally.bytes_read + tally.bytes_written;
        self.seconds += tally.latency_sum.as_secs_f64();
    }

    /// The mean response time in milliseconds.
    pub(crate) fn mean_ms(&self) -> f64 {
        self.seconds * 1e3 / self.requests as f64
    }
}

/// What came of a scene. Times are those of the paper's scale, but for single requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// What the guests were answered while they moved, the hold at the end left out.
    pub(crate) guest: Sums,
    /// The same in steps of ten seconds of the paper's scale: when each ended, in seconds since the beginning.
    pub(crate) windows: Vec<(f64, Sums)>,
    /// What the moves have read of their source.
    pub(crate) copy: Sums,
    /// From the start of the moves to their end, or to the end of the load.
    pub(crate) seconds: f64,
    /// When the move of the system disk had ended.
    pub(crate) system_seconds: f64,
    /// The load ended before the move, which was cancelled.
    pub(crate) is_cut: bool,
    /// What the redirections did.
    pub(crate) redirect: Option<RedirectStatus>,
    /// What the last machine's read cache did.
    pub(crate) read_cache: Option<ReadCacheReport>,
    /// What the last machine's schedule did.
    pub(crate) schedule: Option<ScheduleReport>,
    outstanding: f64,
    image: f64,
}

impl Seen {
    /// The guests' MB/s in a closed loop: somebody waits at every moment, so the times are the span.
    pub(crate) fn throughput(&self) -> f64 {
        self.guest.bytes as f64 * self.outstanding / 1e6 / self.guest.seconds
    }

    /// What the moves have read, in MB/s.
    pub(crate) fn copied_rate(&self, scale: u64) -> f64 {
        self.copy.bytes as f64 * scale as f64 / 1e6 / self.seconds
    }

    /// Which part of the requests the surrogate alone has answered, in percent.
    pub(crate) fn outsourced(&self) -> f64 {
        self.redirect.map_or(0.0, |status| {
            let there = status.reads_redirected + status.writes_redirected;
            let all = there + status.reads_merged + status.reads_at_source + status.writes_at_source;
            there as f64 * 100.0 / all.max(1) as f64
        })
    }

    /// Which part of the image has a place in the surrogate, in percent.
    pub(crate) fn space(&self) -> f64 {
        self.redirect
            .map_or(0.0, |status| (status.places - status.places_free) as f64 * CHUNK_BYTES as f64 * 100.0 / self.image)
    }
}

impl crate::runs::Scene for Scene {
    type Seen = Seen;

    fn weight(&self) -> u64 {
        let redirects = if self.surrogate.is_some() { 4 } else { 1 };
        (self.image_here() >> 20) * self.machines * redirects
    }

    fn play(&self, seed: u64) -> Result<Seen> {
        clock::run(async {
            let world = World::new(seed, Keep::Tail);
            let seen = host::play(&world, *self).await;
            match world.violation() {
                Some(violation) => Err(Error::new(ErrorKind::Internal, format!("{violation} in {self}"))),
                None => seen,
            }
        })
    }

    fn ending(seen: &Seen) -> String {
        let cut = if seen.is_cut { ", until the trace ended" } else { "" };
        format!("{:.2} MB/s, {:.1} ms, {:.0} s{cut}", seen.throughput(), seen.guest.mean_ms(), seen.seconds)
    }
}

/// A span of the paper's, here.
fn scaled(span: Duration, scale: u64) -> Duration {
    span / u32::try_from(scale).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::Scene as _;

    const SCALE: u64 = 128;

    #[test]
    fn a_redirected_guest_moves_whole_and_gets_more_than_one_that_is_not() {
        let scene = Scene::of_waio(Load::Financial2, SCALE);
        let dbt = scene.play(1).expect("nothing is violated");
        let waio = scene.on(Disk::SataFlash).play(1).expect("nothing is violated");
        assert!(!dbt.is_cut && dbt.guest.requests > 100 && dbt.redirect.is_none(), "{dbt:?}");
        assert!(waio.throughput() > dbt.throughput(), "{} and {}", waio.throughput(), dbt.throughput());
        assert!(waio.outsourced() > 50.0 && waio.space() > 0.5, "{waio:?}");
        let size_over_rate = IMAGE_BYTES as f64 / 40e6;
        assert!((0.9..1.5).contains(&(dbt.seconds / size_over_rate)), "{} s", dbt.seconds);
        let again = scene.play(1).expect("nothing was the first time");
        assert_eq!((again.seconds, again.guest.requests), (dbt.seconds, dbt.guest.requests), "a seed is not a run");
    }

    #[test]
    fn a_guest_that_does_not_move_is_faster() {
        let scene = Scene { has_neighbours: false, cache: CacheMode::Off, ..Scene::of_waio(Load::WebSearch1, SCALE) };
        let moving = scene.play(1).expect("nothing is violated");
        let still = Scene { order: None, ..scene }.play(1).expect("nothing is violated");
        assert!(still.guest.mean_ms() < moving.guest.mean_ms() * 0.8, "{still:?} and {moving:?}");
        assert!(still.copy.requests == 0 && moving.copy.requests > 100);
    }
}
