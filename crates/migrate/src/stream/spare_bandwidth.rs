//! How much of a network path a migration may take: what others leave of it (PMigrate, section 3.2).
//!
//! Once a second each end says what its interface has carried, and how much of it migrations were, between whichever
//! hosts. The rest is others' traffic. What that leaves, less some headroom, migrations may take.
//!
//! ```text
//!             others are seen                            they rose, or the path is full
//!   free ───────────────────────▶ sharing, by the rest ◀───────────────────────────────▶ giving way, by half
//!     ▲                              │
//!     └──────────────────────────────┘ nobody for some seconds
//! ```
//!
//! The migrations that use an interface share what others leave of it, in equal parts. They need not know of each other: each is
//! told by the interface's own host how many they are.
//!
//! The headroom makes the others' traffic visible: on a full path nobody can tell what they would take. TCP gives each
//! connection a share. So others that come to a path that we fill still get enough to be seen.

use std::time::Duration;

/// How often the ends look.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// So much of a path is left free beside others, as a part of its capacity.
const HEADROOM: f64 = 0.06;
/// Less than this part of the capacity does not count as others' traffic. It is acknowledgements, monitoring, and
/// errors in what we know of our own.
const NOBODY: f64 = 0.03;
/// After so many quiet seconds no headroom is left free any more.
const QUIET_INTERVALS: u32 = 3;
/// A path that carries this part of its capacity is full.
const FULL: f64 = 0.95;
/// The limits of all migrations together rise by this part of the capacity an interval at most, so that others who pause find
/// room again.
const RISE: f64 = 0.125;
/// What frames, addresses and acknowledgements add to a stream's bytes on Ethernet: 1448 bytes of payload in 1538.
pub const OVERHEAD: f64 = 1538.0 / 1448.0;
/// Nothing goes below this, in bytes a second: a path that we do not use tells us nothing of whether we could.
const RATE_MIN: f64 = 256.0 * 1024.0;

/// What one end of a path has carried in an interval, all figures in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndUsage {
    /// What the interface can carry in this direction; more than 0.
    pub capacity: u64,
    /// What it has carried in this direction, by the kernel's counters.
    pub carried: u64,
    /// What of that was of migrations: payload, all of them together, by the end's own count of the same moment.
    pub ours: u64,
    /// How many migrations use the interface in this direction and share what others leave; 0 is as 1.
    pub sharers: u32,
}

impl EndUsage {
    /// What others have taken of it, at least.
    #[must_use]
    pub fn others(&self) -> u64 {
        (self.carried as f64 - self.ours as f64 * OVERHEAD).max(0.0) as u64
    }
}

/// Says once an interval how much one path may carry of a migration.
#[derive(Clone, Debug, Default)]
pub struct SpareBandwidth {
    /// Bytes a second; `None` while nobody else is there.
    limit: Option<f64>,
    quiet: u32,
    /// What others took in the interval before, at the end that has least left.
    others: f64,
}

impl SpareBandwidth {
    /// A path that nobody else uses, as far as is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes what the path's ends have carried, as far as they are known, and this migration's part of it (payload,
    /// bytes a second). Gives what it may take in the next interval, or `None` for no limit.
    pub fn step(&mut self, ends: &[EndUsage], own: u64) -> Option<u64> {
        let own = own as f64 * OVERHEAD;
        let Some(tightest) = ends.iter().map(|end| EndCapacity::of(*end)).min_by(|a, b| a.spare.total_cmp(&b.spare))
        else {
            return self.limit.map(|limit| (limit / OVERHEAD) as u64);
        };
        let rose = tightest.others > self.others + tightest.capacity * HEADROOM / 2.0;
        self.others = tightest.others;
        if tightest.others < tightest.capacity * NOBODY {
            self.quiet += 1;
            if self.quiet >= QUIET_INTERVALS || self.limit.is_none() {
                self.limit = None;
                return None;
            }
        } else {
            self.quiet = 0;
        }
        let spare = tightest.spare;
        let limit = match self.limit {
            _ if tightest.is_full || rose => spare.min(own / 2.0),
            Some(before) => spare.min(before + tightest.capacity * RISE / tightest.sharers),
            None => spare,
        };
        let limit = limit.max(RATE_MIN);
        self.limit = Some(limit);
        Some((limit / OVERHEAD) as u64)
    }
}

/// What is left at one end for one migration, less the headroom.
struct EndCapacity {
    capacity: f64,
    others: f64,
    sharers: f64,
    spare: f64,
    is_full: bool,
}

impl EndCapacity {
    fn of(end: EndUsage) -> Self {
        let (capacity, carried, others) = (end.capacity as f64, end.carried as f64, end.others() as f64);
        let sharers = f64::from(end.sharers.max(1));
        let spare = (capacity * (1.0 - HEADROOM) - others) / sharers;
        Self { capacity, others, sharers, spare, is_full: carried >= capacity * FULL && others > 0.0 }
    }
}

/// What a migration must get to be over in time: `bytes_left` within `time_left`, a tenth faster for what comes between, or
/// `reserve` if that is more. In bytes a second.
#[must_use]
pub fn needed_rate(bytes_left: u64, time_left: Option<Duration>, reserve: u64) -> u64 {
    let for_deadline = time_left.map_or(0.0, |left| bytes_left as f64 * 1.1 / left.as_secs_f64().max(1.0));
    reserve.max(for_deadline as u64)
}

/// Raises the limits of a migration's paths until they give `reserve` together, each by a share that follows what it can
/// carry. `paths` are limits and capacities; a path without a limit needs no help.
pub fn raise_to_reserve(paths: &mut [(Option<u64>, u64)], reserve: u64) {
    let limits: Option<u64> = paths.iter().map(|(limit, _)| *limit).sum();
    let (Some(limits), capacity) = (limits, paths.iter().map(|(_, capacity)| capacity).sum::<u64>()) else { return };
    let missing = reserve.saturating_sub(limits);
    for (limit, own) in paths {
        let more = missing as f64 * (*own as f64 / capacity.max(1) as f64);
        *limit = limit.map(|limit| limit + more.ceil() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIGABIT: f64 = 125e6;

    /// A path that TCP shares: whoever wants less than a fair share gets it, the others get what is left in proportion to
    /// their connections.
    struct Path {
        spare: SpareBandwidth,
        limit: Option<u64>,
        streams: f64,
    }

    impl Path {
        fn new() -> Self {
            Self { spare: SpareBandwidth::new(), limit: None, streams: 4.0 }
        }

        /// A second in which others want `wanted` bytes over `connections`; what they got, and what we got.
        fn second(&mut self, wanted: f64, connections: f64, reserve: u64) -> (f64, f64) {
            let ours_wanted = self.limit.map_or(GIGABIT, |limit| limit as f64 * OVERHEAD);
            let fair = GIGABIT * connections / (connections + self.streams);
            let others = match wanted + ours_wanted <= GIGABIT {
                true => wanted,
                false => wanted.min(fair.max(GIGABIT - ours_wanted)),
            };
            let ours = ours_wanted.min(GIGABIT - others);
            let payload = (ours / OVERHEAD) as u64;
            let carried = (others + ours) as u64;
            let end = EndUsage { capacity: GIGABIT as u64, carried, ours: payload, sharers: 1 };
            let mut path = [(self.spare.step(&[end], payload), end.capacity)];
            raise_to_reserve(&mut path, reserve);
            self.limit = path[0].0;
            (others, ours)
        }
    }

    #[test]
    fn a_path_that_nobody_else_uses_is_ours_without_a_limit() {
        let mut path = Path::new();
        for _ in 0..10 {
            let (_, ours) = path.second(0.0, 1.0, 0);
            assert!(ours > GIGABIT * 0.999, "{ours} of {GIGABIT}");
        }
        assert_eq!(path.limit, None);
    }

    #[test]
    fn a_web_server_that_comes_keeps_what_the_paper_left_it() {
        let mut path = Path::new();
        path.second(0.0, 1.0, 0);
        let wanted = 101.7e6 * OVERHEAD;
        let got: Vec<f64> = (0..60).map(|_| path.second(wanted, 8.0, 0).0).collect();
        let mean = got[5..].iter().sum::<f64>() / 55.0;
        assert!(mean >= wanted * 91.1 / 101.7, "it kept {mean} of {wanted}");
        // What it left was used.
        let (others, ours) = path.second(wanted, 8.0, 0);
        assert!(ours > (GIGABIT - others - GIGABIT * HEADROOM) * 0.5, "{ours} of {}", GIGABIT - others);
    }

    #[test]
    fn one_connection_of_others_against_four_of_ours_gets_all_it_wants_within_seconds() {
        let mut path = Path::new();
        for wanted in [0.3, 0.6, 0.8] {
            let got = (0..12).map(|_| path.second(GIGABIT * wanted, 1.0, 0).0).last().expect("twelve seconds");
            assert!(got > GIGABIT * wanted * 0.98, "{got} of {}", GIGABIT * wanted);
        }
    }

    #[test]
    fn when_the_others_have_gone_the_limit_goes_too() {
        let mut path = Path::new();
        for _ in 0..10 {
            path.second(GIGABIT * 0.5, 4.0, 0);
        }
        assert!(path.limit.is_some());
        for _ in 0..5 {
            path.second(0.0, 1.0, 0);
        }
        assert_eq!(path.limit, None);
    }

    #[test]
    fn a_reserve_is_taken_whatever_others_want() {
        let mut path = Path::new();
        let reserve = 40_000_000;
        let ours = (0..30).map(|_| path.second(GIGABIT, 4.0, reserve).1).fold(f64::INFINITY, f64::min);
        assert!(ours >= reserve as f64, "{ours}");
    }

    #[test]
    fn the_end_with_least_left_decides() {
        let mut spare = SpareBandwidth::new();
        let idle = EndUsage { capacity: 1_250_000_000, carried: 1_000_000, ours: 0, sharers: 1 };
        let busy = EndUsage { capacity: 125_000_000, carried: 100_000_000, ours: 0, sharers: 1 };
        let limit = spare.step(&[idle, busy], 0).expect("others are there");
        assert!(limit < 25_000_000, "{limit}");
    }

    #[test]
    fn what_another_migration_takes_is_shared_and_is_not_of_others() {
        let mut spare = SpareBandwidth::new();
        let (carried, ours) = (115_000_000, 60_000_000);
        let end = EndUsage { capacity: GIGABIT as u64, carried, ours, sharers: 2 };
        // Two looks: in the first, others are new.
        spare.step(&[end], 30_000_000);
        let limit = (0..4).filter_map(|_| spare.step(&[end], 30_000_000)).last().expect("others are there");
        let others = 115e6 - 60e6 * OVERHEAD;
        let half = (GIGABIT * (1.0 - HEADROOM) - others) / 2.0 / OVERHEAD;
        assert!((limit as f64 - half).abs() < 2.0, "{limit}, not {half}");
    }

    #[test]
    fn a_reserve_is_spread_over_paths_as_they_can_carry_it_and_a_free_path_carries_all() {
        let mut paths = [(Some(10), 1000), (Some(30), 3000)];
        raise_to_reserve(&mut paths, 80);
        assert_eq!(paths, [(Some(20), 1000), (Some(60), 3000)]);
        raise_to_reserve(&mut paths, 80);
        assert_eq!(paths, [(Some(20), 1000), (Some(60), 3000)], "there was enough");
        let mut free = [(Some(10), 1000), (None, 1000)];
        raise_to_reserve(&mut free, 80);
        assert_eq!(free, [(Some(10), 1000), (None, 1000)]);
    }

    #[test]
    fn a_deadline_needs_what_is_left_over_the_time_that_is_left() {
        assert_eq!(needed_rate(1 << 30, None, 7), 7);
        let rate = needed_rate(1_000_000_000, Some(Duration::from_secs(10)), 0);
        assert!((109_000_000..111_000_000).contains(&rate), "{rate}");
        assert_eq!(needed_rate(1000, Some(Duration::ZERO), 0), 1100, "a deadline that is over divides by nothing");
    }
}
