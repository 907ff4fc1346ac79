//! Boots a guest by hand: `cargo run -p transhume-guest --example boot -- DISK MIB SECONDS [RATE]`. The disk is
//! created; the monitor's socket and what the load reports are printed; then the load verifies and the guest powers
//! off.

use std::time::{Duration, Instant};

use transhume_guest::{Acceleration, Disk, Guest, GuestSpec, Load};

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| words.get(index).and_then(|word| word.parse::<u32>().ok());
    let disk = words.first().map_or("disk.raw", String::as_str);
    transhume_guest::create_filled(disk.as_ref(), u64::from(number(1).unwrap_or(64)) << 20)?;
    let seconds = u64::from(number(2).unwrap_or(10));
    let load = Load { is_prefilled: true, rate: number(3).unwrap_or(0), interval_ms: 1000, ..Load::default() };
    let acceleration = Acceleration::probe();
    let started = Instant::now();
    let spec = GuestSpec::new().disk(Disk::raw(disk, "data")).load(load).acceleration(acceleration);
    let mut guest = Guest::boot(spec)?;
    guest.wait_for_load(Duration::from_secs(60))?;
    println!("up after {:?} ({}); QMP on {}", started.elapsed(), acceleration.name(), guest.qmp_socket().display());
    std::thread::sleep(Duration::from_secs(seconds));
    for (_, interval) in guest.intervals() {
        println!("{:6.0} IOPS, p99 {:?}, longest {:?}", interval.iops(), interval.p99, interval.longest);
    }
    let load_result = guest.finish(Duration::from_secs(60))?;
    anyhow::ensure!(load_result.is_right(), "{load_result:?}");
    println!("{load_result:?}");
    Ok(())
}
