//! One limit of the network for all disks of a machine: each has of it what its part of what is left is.

use std::convert::Infallible;
use std::time::Duration;

use env::Env;

use super::attempt::MovingDisk;

/// How often what is left is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// A disk that has nothing left has this part of the limit, for what its guest writes.
const LEAST_PART: u64 = 20;

/// Divides `bytes_per_second` among the copies of `disks`, for as long as it is driven.
pub(super) async fn divide(env: &dyn Env, disks: &[MovingDisk], bytes_per_second: u64) -> Infallible {
    let mut given: Vec<Option<u64>> = disks.iter().map(limit_of).collect();
    loop {
        let left: Vec<u64> = disks.iter().map(bytes_left).collect();
        for ((disk, given), share) in disks.iter().zip(&mut given).zip(shares(bytes_per_second, &left)) {
            // What somebody has said of one disk since stays.
            if limit_of(disk) == *given && *given != Some(share) {
                *given = Some(share);
                disk.job.set_bandwidth(Some(share));
            }
        }
        env.sleep(LOOK).await;
    }
}

/// What one disk of several has of it at first.
pub(super) fn first_share(bytes_per_second: u64, disks: usize) -> u64 {
    (bytes_per_second / disks.max(1) as u64).max(1)
}

fn limit_of(disk: &MovingDisk) -> Option<u64> {
    disk.job.control().map_or_else(|| disk.job.request().bandwidth, |control| control.bandwidth())
}

fn bytes_left(disk: &MovingDisk) -> u64 {
    let job = disk.job.show();
    // One that waits for its turn needs nothing yet.
    job.progress.map_or(0, |progress| progress.bytes_left)
}

fn shares(bytes_per_second: u64, left: &[u64]) -> Vec<u64> {
    let count = left.len().max(1) as u64;
    let all: u128 = left.iter().map(|left| u128::from(*left)).sum();
    let least = (bytes_per_second / LEAST_PART / count).max(1);
    let free = bytes_per_second.saturating_sub(least * count);
    let part = |left: u64| match all {
        0 => free / count,
        all => u64::try_from(u128::from(free) * u128::from(left) / all).unwrap_or(free),
    };
    left.iter().map(|left| least + part(*left)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_divided_by_what_is_left_and_nobody_has_nothing() {
        let divided = shares(1_000_000, &[3 << 30, 1 << 30, 0]);
        assert!(divided.iter().sum::<u64>() <= 1_000_000, "{divided:?}");
        assert!(divided[0] > 2 * divided[1] && divided[1] > divided[2] && divided[2] > 0, "{divided:?}");
        let even = shares(900, &[0, 0, 0]);
        assert!(even.iter().all(|share| *share == even[0]) && even.iter().sum::<u64>() <= 900, "{even:?}");
        assert_eq!(shares(1, &[5]), [1]);
    }
}
