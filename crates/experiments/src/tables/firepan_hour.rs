//! An hour of the Firepan paper's guest (section 4.1, figure 5) without a cache: what the storage alone gives it.
//!
//! The guest: 4 files of 5 GB, 4 KiB, 80 % reads, `zoned:50/5:30/15:20/80`, 128 requests outstanding. The paper's
//! storage is a partition of 50 GB of an NVMe device of 480 GB in a storage node. It lies behind a network that four
//! guests of a host share. Without a cache it serves a guest about 8,000 reads a second. With a cache each of four
//! guests gets 15,000 and each of three 20,000 (figures 6 and 8). A host that carries about 40,000 requests a second to
//! its storage explains all three. With a hit ratio of 60 % and writes passing through, each request costs the storage
//! 0.52 of one. That gives 10,000 / 0.52 * 0.8 = 15,400 reads. So [`Path`] gives a guest its share of that: one request
//! every 100 us.
//!
//! No cache, no warming and no migration are here: those are the experiment that this load and these devices are for.

use std::time::Duration;

use block::{Bytes, Error, ErrorKind, Result};

use crate::table::Table;
use sim::bench::{Client, Tally, play};
use sim::clock;
use sim::log::Keep;
use sim::model::contents::Origin;
use sim::model::{Flash, FlashFigures, HardDisk, HardDiskFigures, Model, Path, Volume};
use sim::player::{Player, p99_ms};
use sim::rng::Rng;
use sim::workload::Zoned;
use sim::world::World;

const HOUR: Duration = Duration::from_secs(3600);
const FILE_BYTES: u64 = 5_000_003_584 / 4096 * 4096;
const OUTSTANDING: u64 = 128;
/// One request stands for so many, in the row that goes through the engine's devices.
const SCALE: u32 = 20;

/// What a guest has of the storage node: its partition behind its share of its host's path.
fn shared_storage(scale: u32) -> Path<Flash> {
    let figures = FlashFigures::NVME_480GB.partition(50_000_000_000);
    Path::new(Duration::from_micros(100) * scale, Flash::new(figures))
}

/// The partition of the host's flash that a cache would have.
fn cache_partition() -> Flash {
    Flash::new(FlashFigures::NVME_512GB.partition(10_000_000_000))
}

fn bare(model: &mut dyn Model, outstanding: u64, span: Duration, seed: u64) -> Tally {
    let client = Client::new(Zoned::firepan(FILE_BYTES), outstanding as usize);
    play(model, vec![client], span, &Rng::new(seed, "firepan")).remove(0)
}

/// The load through a device of the engine, one request standing for `scale`.
fn through_device(scale: u32, span: Duration, seed: u64) -> Result<Tally> {
    clock::run(async {
        let world = World::new(seed, Keep::Tail);
        let volume = Volume::new(&world, "shared", Bytes(4 * FILE_BYTES), Origin::Filled, shared_storage(scale));
        let outstanding = (OUTSTANDING as f64 / f64::from(scale)).round() as usize;
        let load = Zoned::firepan(FILE_BYTES);
        let player = Player::start(&world, "guest", volume.device(), Origin::Filled, load, outstanding);
        world.sleep(span).await;
        let tally = player.take();
        player.stop().await;
        match world.violation() {
            Some(violation) => Err(Error::new(ErrorKind::Internal, violation.to_string())),
            None => Ok(tally),
        }
    })
}

pub(super) fn run(seed: u64) -> Result<Table> {
    let mut table = Table::new(&[
        "storage",
        "played",
        "one stands for",
        "requests",
        "reads/s",
        "writes/s",
        "mean ms",
        "p99 ms",
        "paper reads/s",
    ]);
    table.note(
        "The Firepan paper's guest without a cache (fio zoned:50/5:30/15:20/80, 4 KiB, 80 % reads, 128 outstanding).",
    );
    table.note("Firepan itself, its cache and its migration are not in this: only the load and the devices.");
    table.note(format!(
        "\"1:{SCALE}\": every simulated request stands for {SCALE}; 128 / {SCALE} are outstanding and the path is {SCALE} times slower."
    ));
    let mut row = |name: &str, tally: &Tally, scale: u32, paper: &str| {
        let seconds = tally.span.as_secs_f64();
        let a_second = |count: u64| format!("{:.0}", count as f64 * f64::from(scale) / seconds);
        table.row(vec![
            name.into(),
            format!("{seconds:.0} s"),
            scale.to_string(),
            (tally.requests() * u64::from(scale)).to_string(),
            a_second(tally.reads),
            a_second(tally.writes),
            format!("{:.2}", tally.latency_mean().as_secs_f64() * 1e3),
            format!("{:.2}", p99_ms(&tally.latency)),
            paper.into(),
        ]);
    };
    row("shared storage, as an engine's device, 1:20", &through_device(SCALE, HOUR, seed)?, SCALE, "about 8000");
    row("shared storage, bare model, unscaled", &bare(&mut shared_storage(1), OUTSTANDING, HOUR / 60, seed), 1, "");
    row(
        "10 GB partition of host flash, bare model",
        &bare(&mut cache_partition(), OUTSTANDING, HOUR / 60, seed),
        1,
        "",
    );
    let mut disk = HardDisk::new(HardDiskFigures::ST31000524AS);
    row("one hard disk (ST31000524AS), bare model", &bare(&mut disk, 32, HOUR, seed), 1, "");
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_for_twenty_gives_the_figures_of_twenty() {
        let scaled = through_device(SCALE, HOUR / 60, 1).expect("nothing is violated");
        let bare = bare(&mut shared_storage(1), OUTSTANDING, HOUR / 60, 1);
        let reads = |tally: &Tally| tally.reads as f64 / tally.span.as_secs_f64();
        assert!((reads(&scaled) * f64::from(SCALE) / reads(&bare) - 1.0).abs() < 0.02);
        assert!((reads(&bare) / 8000.0 - 1.0).abs() < 0.02, "{} reads a second", reads(&bare));
        let latencies = [&scaled, &bare].map(|tally| tally.latency_mean().as_secs_f64() * 1e3);
        assert!((latencies[0] / latencies[1] - 1.0).abs() < 0.1, "{latencies:?} ms");
    }
}
