//! That the disk behaves as its figures say.

use super::*;
use crate::bench::{Client, Tally, play};
use crate::rng::Rng;
use crate::workload::{Oltp, Sequential, Workload};

const DISK: HardDiskFigures = HardDiskFigures::ST31000524AS;

fn run(figures: HardDiskFigures, workload: impl Workload + 'static, outstanding: usize, seconds: u64) -> Tally {
    let clients = vec![Client::new(workload, outstanding)];
    let rng = Rng::new(1, "disk");
    play(&mut HardDisk::new(figures), clients, Duration::from_secs(seconds), &rng).remove(0)
}

#[test]
fn the_average_seek_is_the_stated_one() {
    let rng = Rng::new(1, "seeks");
    for (figures, wanted) in [(DISK, 8.5), (HardDiskFigures::CHEETAH_15K, 3.4)] {
        let seeks = (0..100_000).map(|_| figures.seek((rng.fraction() - rng.fraction()).abs()).as_secs_f64() * 1e3);
        let average = seeks.sum::<f64>() / 1e5;
        assert!((average - wanted).abs() < 0.05, "{average} ms");
    }
    assert_eq!(DISK.seek(0.0), Duration::ZERO);
    assert!(DISK.seek(1e-6) >= DISK.seek_track && DISK.seek(1.0) < Duration::from_millis(20));
}

#[test]
fn bytes_in_order_come_at_the_rate_of_their_zone() {
    let outside = run(DISK, Sequential::new(0, 50_000_000_000, 1 << 20, 1.0), 2, 20).megabytes_a_second();
    assert!((119.0..=125.5).contains(&outside), "{outside} MB/s outside");
    let end = DISK.capacity - (1 << 20);
    let inside = run(DISK, Sequential::new(end - 40_000_000_000, end, 1 << 20, 1.0), 2, 20).megabytes_a_second();
    assert!((59.0..=63.0).contains(&inside), "{inside} MB/s inside");
    let written = run(DISK, Sequential::new(0, 50_000_000_000, 1 << 20, 0.0), 4, 20).megabytes_a_second();
    assert!((110.0..=126.0).contains(&written), "{written} MB/s written");
}

#[test]
fn a_random_read_takes_a_seek_and_half_a_turn() {
    let tally = run(DISK, Oltp::new(DISK.capacity, 4096, 1.0), 1, 200);
    let mean = tally.latency_mean().as_secs_f64() * 1e3;
    // 8.5 + 4.17 + 0.1; a little less, since more bytes lie outside.
    assert!((11.9..=12.9).contains(&mean), "{mean} ms");
}

#[test]
fn the_elevator_gains_from_a_longer_queue() {
    let iops = |outstanding| run(DISK, Oltp::new(DISK.capacity, 4096, 1.0), outstanding, 100).iops();
    let (one, deep) = (iops(1), iops(32));
    assert!(deep > 1.4 * one && deep < 3.0 * one, "{one} and {deep} reads a second");
}

#[test]
fn a_write_is_answered_from_the_cache_until_that_is_full_and_a_flush_waits_for_the_platter() {
    let mut disk = HardDisk::new(DISK);
    let mut done = Vec::new();
    disk.submit(Moment::default(), Ticket(1), Request::write(500_000_000_000, 4096));
    disk.submit(Moment::default(), Ticket(2), Request::flush());
    let mut ends = std::collections::BTreeMap::new();
    while let Some(next) = disk.next() {
        disk.advance(next, &mut done);
        ends.extend(done.drain(..).map(|ticket| (ticket.0, next)));
    }
    assert!(ends[&1].0 < Duration::from_micros(200), "{ends:?}");
    assert!(ends[&2].0 > Duration::from_millis(5), "{ends:?}");
    let cached = run(DISK, Oltp::new(DISK.capacity, 4096, 0.0), 1, 60).iops();
    let through = run(DISK.without_write_cache(), Oltp::new(DISK.capacity, 4096, 0.0), 1, 60).iops();
    assert!(cached > 1.5 * through && through < 80.0, "{cached} and {through} writes a second");
}

#[test]
fn without_flushes_an_idle_disk_writes_its_cache_back_by_itself() {
    let mut disk = HardDisk::new(DISK);
    let mut done = Vec::new();
    disk.submit(Moment::default(), Ticket(1), Request::write(1 << 30, 4096));
    while let Some(next) = disk.next() {
        disk.advance(next, &mut done);
    }
    assert_eq!((disk.dirty, done.len()), (0, 1));
}
