//! What a move will take, from what is known before it begins: time, passes, and for how long the guest is held.
//!
//! The guest's writes are taken to go anywhere: of `n` chunks, `k` writes make `n (1 - e^(-k/n))` dirty. A guest that writes
//! to the same places again and again makes fewer dirty, so the forecast of a strategy that tracks is an upper bound.

use std::time::Duration;

use crate::{MoveOptions, OnNoConverge, Strategy};

/// What is known before a move.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Known {
    /// The volume's size in bytes.
    pub volume: u64,
    /// What must be copied as data, in bytes.
    pub to_copy: u64,
    /// What is going to be compared, in bytes.
    pub to_compare: u64,
    /// How fast the copy goes, in bytes a second, without a guest.
    pub copy_rate: f64,
    /// What the guest writes, in bytes a second.
    pub write_bytes: f64,
    /// How many writes that are, a second.
    pub writes: f64,
    /// What a switchover takes without anything to copy.
    pub switchover: Duration,
}

/// What is expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// The move, from its start to the switchover.
    pub seconds: f64,
    /// How long the guest is held.
    pub downtime: Duration,
    /// Of an asynchronous mirror: how long the buffer takes to be emptied before the switchover, while the guest works.
    pub drain: Duration,
    /// How many passes, the last copy included.
    pub passes: u32,
    /// What the passes copy in all, in bytes.
    pub copied: u64,
    /// Whether it converges by itself; otherwise [`OnNoConverge`] decides, and the rest of this is what follows from that.
    pub converges: bool,
}

/// More passes than this are not looked at.
const PASSES_MAX: u32 = 400;

impl Known {
    /// What a move with `options` will take.
    #[must_use]
    pub fn forecast(&self, options: &MoveOptions) -> Forecast {
        // The guest's writes take their share of the disks.
        let rate = (self.copy_rate - self.write_bytes).max(self.copy_rate / 4.0).max(1.0);
        let seconds = (self.to_copy + self.to_compare) as f64 / rate;
        let drain =
            options.buffer().map_or(0.0, |buffer| self.buffered(buffer.0 as f64, seconds) / self.copy_rate.max(1.0));
        let mirrored = Forecast {
            seconds: seconds + drain,
            downtime: self.switchover,
            drain: Duration::from_secs_f64(drain.min(1e9)),
            passes: 1,
            copied: self.to_copy,
            converges: true,
        };
        if !options.strategy.iterates() {
            return mirrored;
        }
        self.in_passes(options, rate)
    }

    /// How much of a buffer is full at the end of `seconds` of copying. A target that takes what the guest writes fast
    /// enough has hardly anything of it waiting; one that does not, all of it.
    fn buffered(&self, buffer: f64, seconds: f64) -> f64 {
        let load = self.write_bytes / self.copy_rate.max(1.0);
        if load >= 1.0 { buffer.min(self.write_bytes * seconds) } else { buffer.min(self.write_bytes * load) }
    }

    /// How many bytes the guest makes dirty in `seconds` of `part` of the volume.
    fn dirtied(&self, chunk: f64, seconds: f64, part: f64) -> f64 {
        let chunks = self.volume as f64 / chunk;
        // A write may end in the chunk after the one where it begins.
        let size = if self.writes > 0.0 { self.write_bytes / self.writes } else { 0.0 };
        let touched = self.writes * (1.0 + (size / chunk).min(1e6)) * part;
        chunk * chunks * (1.0 - (-touched * seconds / chunks).exp())
    }

    fn in_passes(&self, options: &MoveOptions, rate: f64) -> Forecast {
        let chunk = options.chunk_bytes as f64;
        let limit = options.downtime_limit_ms as f64 / 1e3;
        let held = |left: f64| self.switchover.as_secs_f64() + left / self.copy_rate.max(1.0);
        let part = if options.strategy == Strategy::IncrementalDbt { 0.5 } else { 1.0 };
        let (mut seconds, mut copied, mut passes) = (self.to_copy as f64 / rate, self.to_copy as f64, 1);
        let mut left = self.dirtied(chunk, seconds, part);
        // Comparing once, and what is written meanwhile.
        let compare = self.to_compare as f64 / rate;
        let mut best = f64::MAX;
        let forecast = |seconds, left, passes, copied: f64, converges| Forecast {
            seconds: seconds + compare,
            downtime: Duration::from_secs_f64(held(left).min(1e9)),
            drain: Duration::ZERO,
            passes,
            copied: copied as u64,
            converges,
        };
        while passes < PASSES_MAX {
            if held(left) <= limit {
                return forecast(seconds, left, passes + u32::from(left >= chunk), copied + left, true);
            }
            let is_late = options.deadline_ms.is_some_and(|deadline| seconds * 1e3 >= deadline as f64);
            if is_late || left >= best * 0.9 {
                break;
            }
            best = best.min(left);
            let pass = left / rate;
            (seconds, copied, passes) = (seconds + pass, copied + left, passes + 1);
            left = self.dirtied(chunk, pass, part);
        }
        match options.on_no_converge {
            OnNoConverge::Mirror => {
                let mirrored = forecast(seconds + left / rate, 0.0, passes + 1, copied + left, false);
                Forecast { downtime: self.switchover, ..mirrored }
            }
            OnNoConverge::Force | OnNoConverge::Abort => forecast(seconds, left, passes + 1, copied + left, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10 GB at 100 MB/s under a guest that writes so many blocks of 4 KiB a second.
    fn known(writes: f64) -> Known {
        Known {
            volume: 10_000_000_000,
            to_copy: 10_000_000_000,
            copy_rate: 100e6,
            write_bytes: writes * 4096.0,
            writes,
            switchover: Duration::from_millis(2),
            ..Known::default()
        }
    }

    fn options(strategy: Strategy) -> MoveOptions {
        MoveOptions { strategy, on_no_converge: OnNoConverge::Force, ..MoveOptions::default() }
    }

    #[test]
    fn an_idle_guest_costs_nothing_with_any_strategy() {
        for strategy in Strategy::ALL {
            let expected = known(0.0).forecast(&options(*strategy));
            assert!((expected.seconds - 100.0).abs() < 0.1 && expected.passes == 1, "{strategy}: {expected:?}");
            assert_eq!(expected.downtime, Duration::from_millis(2));
        }
    }

    #[test]
    fn tracking_takes_longer_than_mirroring_and_incremental_tracking_less_than_plain() {
        let [mirror, dbt, incremental] = [Strategy::Mirror, Strategy::Dbt, Strategy::IncrementalDbt]
            .map(|name| known(500.0).forecast(&options(name)));
        assert!(
            mirror.seconds < incremental.seconds && incremental.seconds < dbt.seconds,
            "{mirror:?} {incremental:?} {dbt:?}"
        );
        assert!(dbt.converges && dbt.passes > 2 && dbt.downtime <= Duration::from_millis(200), "{dbt:?}");
    }

    #[test]
    fn a_guest_that_writes_faster_than_the_copy_does_not_converge() {
        let forced = known(5000.0).forecast(&options(Strategy::Dbt));
        assert!(!forced.converges && forced.downtime > Duration::from_secs(5), "{forced:?}");
        let mirrored = MoveOptions { on_no_converge: OnNoConverge::Mirror, ..options(Strategy::Dbt) };
        assert_eq!(known(5000.0).forecast(&mirrored).downtime, Duration::from_millis(2));
    }

    #[test]
    fn a_buffer_is_emptied_at_the_target_s_rate_and_nobody_is_held_for_that() {
        let options = options(Strategy::MirrorAsync);
        let slow = known(100_000.0).forecast(&options);
        assert_eq!(slow.downtime, Duration::from_millis(2));
        assert!((slow.drain.as_secs_f64() - 0.671).abs() < 0.01, "64 MiB at 100 MB/s take {:?}", slow.drain);
        let fast = known(500.0).forecast(&options);
        assert!(fast.drain < Duration::from_millis(10), "{fast:?}");
    }

    #[test]
    fn a_shorter_limit_takes_more_passes() {
        let passes =
            |ms| known(300.0).forecast(&MoveOptions { downtime_limit_ms: ms, ..options(Strategy::Dbt) }).passes;
        assert!(passes(5000) < passes(50), "{} and {}", passes(5000), passes(50));
    }
}
