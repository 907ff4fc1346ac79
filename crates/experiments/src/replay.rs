//! A user's own trace, or a synthetic load, on modelled devices.

use std::io::BufRead;
use std::time::Duration;

use block::{Error, ErrorKind, Result};

use crate::table::Table;
use sim::bench::{Client, Tally, play};
use sim::model::{Flash, FlashFigures, HardDisk, HardDiskFigures, Model};
use sim::player::p99_ms;
use sim::rng::Rng;
use sim::trace::{self, Format, Record};
use sim::workload::{Characteristics, Replay, Synthetic, Workload};

/// How a trace is replayed.
pub struct ReplayOptions {
    /// How it is written down.
    pub format: Format,
    /// Which volume of it; all of them if not told.
    pub volume: Option<u32>,
    /// At its own times, or with so many outstanding.
    pub outstanding: Option<usize>,
}

/// So many may be outstanding in an open loop: what does not fit waits, and is seen as latency.
const OPEN_OUTSTANDING: usize = 4096;
/// A synthetic load runs this long.
const SYNTHETIC_SPAN: Duration = Duration::from_secs(600);

fn devices() -> [(&'static str, Box<dyn Model>); 3] {
    [
        ("hard disk ST31000524AS", Box::new(HardDisk::new(HardDiskFigures::ST31000524AS))),
        ("SATA flash 80 GB", Box::new(Flash::new(FlashFigures::SATA_80GB))),
        ("NVMe flash 512 GB", Box::new(Flash::new(FlashFigures::NVME_512GB))),
    ]
}

fn new_table() -> Table {
    Table::new(&["load", "device", "requests", "reads", "IOPS", "MB/s", "mean ms", "p99 ms"])
}

fn row(load: &str, device: &str, tally: &Tally) -> Vec<String> {
    vec![
        load.into(),
        device.into(),
        tally.requests().to_string(),
        format!("{:.1} %", tally.reads as f64 * 100.0 / tally.requests().max(1) as f64),
        format!("{:.1}", tally.iops()),
        format!("{:.2}", tally.megabytes_a_second()),
        format!("{:.3}", tally.latency_mean().as_secs_f64() * 1e3),
        format!("{:.3}", p99_ms(&tally.latency)),
    ]
}

/// Replays the trace that `text` is on a hard disk and two flash devices.
///
/// # Errors
/// The trace cannot be read, or has no such volume.
pub fn replay(options: &ReplayOptions, text: impl BufRead, seed: u64) -> Result<Table> {
    let mut records = trace::read(options.format, text)?;
    records.retain(|record| options.volume.is_none_or(|volume| record.volume == volume));
    if records.is_empty() {
        return Err(Error::new(ErrorKind::Invalid, "the trace has no requests of that volume"));
    }
    let mut table = new_table();
    let span = records[records.len() - 1].at.saturating_sub(records[0].at);
    table.note(format!(
        "A trace of {} requests over {:.0} s, its places as they are.",
        records.len(),
        span.as_secs_f64()
    ));
    for (name, mut model) in devices() {
        let (load, outstanding) = load_of(options, records.clone());
        let client = Client::new(load, outstanding);
        let tally = play(&mut *model, vec![client], Duration::MAX, &Rng::new(seed, "replay")).remove(0);
        let how = if options.outstanding.is_some() { "trace, closed loop" } else { "trace, open loop" };
        table.row(row(how, name, &tally));
    }
    Ok(table)
}

fn load_of(options: &ReplayOptions, records: Vec<Record>) -> (Replay, usize) {
    match options.outstanding {
        Some(outstanding) => (Replay::closed_loop(records), outstanding),
        None => (Replay::open_loop(records), OPEN_OUTSTANDING),
    }
}

/// The synthetic loads on the same devices.
pub(crate) fn synthetic(seed: u64) -> Result<Table> {
    let mut table = new_table();
    table.note(
        "SYNTHETIC: loads with the published characteristics of SPC traces (dissertation, table 3.5). No traces.",
    );
    for like in Characteristics::ALL {
        for (name, mut model) in devices() {
            let rng = Rng::new(seed, like.name);
            let load: Box<dyn Workload> = Box::new(Synthetic::new(like, &rng));
            let client = Client::new(load, OPEN_OUTSTANDING);
            let tally = play(&mut *model, vec![client], SYNTHETIC_SPAN, &rng).remove(0);
            table.row(row(like.name, name, &tally));
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_replayed_at_its_times_or_as_fast_as_it_goes() {
        let lines = (0..100).map(|index| format!("{},R,{},4096\n", index * 1_000_000, index * 8192 % 1_000_000));
        let text = lines.collect::<String>();
        let options = |outstanding| ReplayOptions { format: Format::Plain, volume: None, outstanding };
        let iops = |outstanding| {
            let table = replay(&options(outstanding), text.as_bytes(), 1).expect("the trace is well formed");
            table.rows()[2][4].parse::<f64>().expect("a number")
        };
        assert!((0.9..1.1).contains(&iops(None)), "{}", iops(None));
        assert!(iops(Some(4)) > 10_000.0, "{}", iops(Some(4)));
        let nobody = ReplayOptions { volume: Some(7), ..options(None) };
        assert!(replay(&nobody, text.as_bytes(), 1).is_err(), "a volume that the trace has not");
    }
}
