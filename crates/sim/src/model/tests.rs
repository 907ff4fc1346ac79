//! That flash, arrays and volumes on the network behave as their figures say.

use super::*;
use crate::bench::{Client, Tally, play};
use crate::rng::Rng;
use crate::workload::{Oltp, Sequential, Workload};

fn run(model: impl Model, workload: impl Workload + 'static, outstanding: usize, seconds: u64) -> Tally {
    let mut model = model;
    let clients = vec![Client::new(workload, outstanding)];
    play(&mut model, clients, Duration::from_secs(seconds), &Rng::new(1, "model")).remove(0)
}

#[track_caller]
fn near(value: f64, wanted: f64, part: f64) {
    assert!((value - wanted).abs() <= wanted * part, "{value:.1} instead of {wanted} within {part}");
}

#[test]
fn flash_reaches_the_iops_and_rates_of_its_data_sheets() {
    let sata = FlashFigures::SATA_80GB;
    let over = 40 << 30;
    let iops =
        |figures, reads, depth, seconds| run(Flash::new(figures), Oltp::new(over, 4096, reads), depth, seconds).iops();
    near(iops(sata, 1.0, 32, 4), 38_000.0, 0.05);
    near(iops(sata, 0.0, 32, 20), 10_000.0, 0.05);
    near(1e6 / iops(sata, 1.0, 1, 2), 77.0, 0.05);
    let rate =
        |figures, reads| run(Flash::new(figures), Sequential::new(0, over, 1 << 20, reads), 8, 20).megabytes_a_second();
    near(rate(sata, 1.0), 270.0, 0.05);
    near(rate(sata, 0.0), 90.0, 0.05);
    let nvme = FlashFigures::NVME_512GB;
    near(iops(nvme, 1.0, 128, 1), 370_000.0, 0.05);
    near(iops(nvme, 0.0, 128, 1), 370_000.0, 0.05);
    near(1e6 / iops(nvme, 1.0, 1, 1), 65.0, 0.05);
    near(rate(nvme, 1.0), 3500.0, 0.05);
    near(rate(nvme, 0.0), 2300.0, 0.05);
}

#[test]
fn a_small_partition_of_flash_has_a_small_part_of_its_parallelism() {
    let whole = FlashFigures::NVME_512GB;
    let iops = |figures: FlashFigures| run(Flash::new(figures), Oltp::new(8 << 30, 4096, 1.0), 128, 1).iops();
    let (ten, fifty) = (whole.partition(10_000_000_000), whole.partition(50_000_000_000));
    assert_eq!((ten.dies, fifty.dies), (2, 7));
    // A die gives 1 / 60 us.
    near(iops(ten), 33_333.0, 0.02);
    near(iops(fifty), 116_667.0, 0.03);
}

#[test]
fn writes_slow_reads_of_flash_down() {
    let figures = FlashFigures::SATA_80GB;
    let p99 = |reads| run(Flash::new(figures), Oltp::new(40 << 30, 4096, reads), 4, 4).latency.quantile(0.99);
    assert!(p99(0.7) > 3 * p99(1.0), "{:?} and {:?}", p99(0.7), p99(1.0));
}

fn striped(members: usize) -> Raid0 {
    let disks = (0..members).map(|_| Box::new(HardDisk::new(HardDiskFigures::ST31000524AS)) as Box<dyn Model>);
    Raid0::new(disks.collect(), 64 << 10)
}

#[test]
fn raid_0_adds_up_rates_and_random_requests() {
    let stream =
        |members| run(striped(members), Sequential::new(0, 40 << 30, 4 << 20, 1.0), 4, 20).megabytes_a_second();
    near(stream(4), 4.0 * stream(1), 0.15);
    let reads = |members| run(striped(members), Oltp::new(100 << 30, 4096, 1.0), 16 * members, 40).iops();
    near(reads(4), 4.0 * reads(1), 0.15);
}

#[test]
fn raid_0_answers_everything_once_wherever_stripes_cut_it() {
    let mut raid = striped(3);
    let (mut done, rng) = (Vec::new(), Rng::new(1, "cuts"));
    for number in 0..200 {
        let request = Request::read(rng.below(1 << 30), rng.within(1..=1 << 20));
        raid.submit(Moment::default(), Ticket(number), request);
        let parts = raid.parts(&request);
        assert_eq!(parts.iter().map(|(_, part)| part.length).sum::<u64>(), request.length);
    }
    raid.submit(Moment::default(), Ticket(200), Request::flush());
    while let Some(next) = raid.next() {
        raid.advance(next, &mut done);
    }
    done.sort_unstable();
    assert_eq!(done, (0..=200).map(Ticket).collect::<Vec<_>>());
}

#[test]
fn the_array_of_the_esx_paper_serves_its_load_and_its_copy() {
    let array = || Array::new(ArrayFigures::CX4_120);
    let oltp = run(array(), Oltp::iometer(32 << 30), 16, 60);
    // Figure 10 begins with about 2600 reads and 1100 writes a second.
    near(oltp.reads as f64 / 60.0, 2600.0, 0.08);
    near(oltp.writes as f64 / 60.0, 1100.0, 0.08);
    // The rates of its processors; the offline copy of section 3.1 is bounded by the second.
    let stream = |reads| run(array(), Sequential::new(0, 32 << 30, 256 << 10, reads), 16, 20).megabytes_a_second();
    near(stream(1.0), 255.0, 0.05);
    near(stream(0.0), 232.0, 0.05);
}

#[test]
fn a_write_to_the_array_is_answered_from_its_cache_and_later_bounded_by_its_disks() {
    let short = run(Array::new(ArrayFigures::CX4_120), Oltp::new(32 << 30, 8192, 0.0), 16, 2);
    assert!(short.latency_mean() < Duration::from_millis(1), "{:?}", short.latency_mean());
    let long = run(Array::new(ArrayFigures::CX4_120), Oltp::new(32 << 30, 8192, 0.0), 16, 200);
    let at_end = long.iops();
    assert!(at_end < short.iops() / 3.0, "{at_end} and {} writes a second", short.iops());
}

#[test]
fn the_slow_volume_of_the_esx_paper_gives_a_tenth_of_the_array() {
    let oltp = run(Nfs::new(NfsFigures::ESX_SLOW), Oltp::iometer(32 << 30), 16, 100);
    near(oltp.reads as f64 / 100.0, 200.0, 0.15);
    near(oltp.writes as f64 / 100.0, 95.0, 0.2);
}

fn cached(capacity: u64) -> PageCache {
    PageCache::new(PageCacheFigures::of(capacity), HardDisk::new(HardDiskFigures::ST31000524AS))
}

#[test]
fn what_the_page_cache_holds_costs_no_disk_and_what_it_cannot_hold_does() {
    let read = |capacity: u64| {
        let mut cache = cached(capacity).warmed(0..256 << 20);
        let clients = vec![Client::new(Oltp::new(256 << 20, 4096, 1.0), 1)];
        let tally = play(&mut cache, clients, Duration::from_secs(2), &Rng::new(1, "cache")).remove(0);
        (tally.latency.quantile(0.5), cache.hit_ratio())
    };
    let (fits, all) = read(300 << 20);
    assert!(fits < Duration::from_micros(5) && all > 0.999, "{fits:?} {all}");
    let (_, half) = read(128 << 20);
    near(half, 0.5, 0.1);
}

#[test]
fn the_page_cache_reads_ahead_of_a_stream_only() {
    let stream = run(cached(1 << 30), Sequential::new(0, 1 << 30, 4096, 1.0), 1, 5);
    assert!(stream.megabytes_a_second() > 100.0, "{} MB/s", stream.megabytes_a_second());
    let random = run(cached(1 << 30), Oltp::new(100 << 30, 4096, 1.0), 1, 20);
    assert!(random.latency_mean() > Duration::from_millis(5), "{:?}", random.latency_mean());
}

#[test]
fn writers_wait_when_too_much_of_the_page_cache_is_dirty() {
    let tally = run(cached(100 << 20), Oltp::new(100 << 30, 4096, 0.0), 1, 60);
    let absorbed = (20 << 20) as f64 / 4096.0;
    assert!(tally.writes as f64 > absorbed, "{} writes", tally.writes);
    let beyond = (tally.writes as f64 - absorbed) / 60.0;
    // Beyond that it is the disk's own pace, with many to choose from.
    assert!((60.0..700.0).contains(&beyond), "{beyond} writes a second");
}

#[test]
fn a_flush_of_the_page_cache_waits_for_everything_dirty_and_for_the_disk() {
    let mut cache = cached(1 << 30);
    let (mut done, rng) = (Vec::new(), Rng::new(1, "flush"));
    for number in 0..100 {
        let request = Request::write(rng.below(1 << 26) * 4096, 4096);
        cache.submit(Moment::default(), Ticket(number), request);
    }
    cache.submit(Moment::default(), Ticket(100), Request::flush());
    let mut ends = Vec::new();
    while let Some(next) = cache.next() {
        cache.advance(next, &mut done);
        ends.extend(done.drain(..).map(|ticket| (ticket.0, next.0)));
    }
    assert_eq!(ends.len(), 101);
    let flushed = ends.iter().find(|(number, _)| *number == 100).expect("it was answered").1;
    assert!(flushed > Duration::from_millis(200), "a hundred places were written within {flushed:?}");
    assert!(ends.iter().all(|(number, end)| *number == 100 || *end < Duration::from_millis(1)));
}

#[test]
fn a_path_carries_what_it_says_and_no_more() {
    let path = Path::new(Duration::from_micros(100), Flash::new(FlashFigures::NVME_512GB));
    near(run(path, Oltp::new(1 << 30, 4096, 0.8), 64, 5).iops(), 10_000.0, 0.01);
}
