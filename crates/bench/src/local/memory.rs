//! The daemon's memory while it moves a sparse volume of 16 TiB.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::Context;

use crate::figures::{Goal, Row, Samples};
use crate::server::{Transhumed, VOLUME};
use transhume_guest::process::memory_peak_of;
use transhume_guest::programs::private_folder;

use super::Bench;

const VOLUME_BYTES: u64 = 16 << 40;
/// Where ext4 stops; the row then says what it measured instead.
const SMALLER_BYTES: u64 = 15 << 40;
const ISLANDS: u64 = 256;

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let folder = private_folder(bench.memory.path())?;
    let (source, target) = (folder.path().join("source.raw"), folder.path().join("target.raw"));
    let file = File::create(&source).context("creating the sparse volume")?;
    let bytes = if file.set_len(VOLUME_BYTES).is_ok() { VOLUME_BYTES } else { SMALLER_BYTES };
    file.set_len(bytes).context("sizing the sparse volume")?;
    for island in 0..ISLANDS {
        file.write_all_at(&[1 + island as u8 / 2; 65536], bytes / ISLANDS * island).context("writing data into it")?;
    }
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    daemon.attach(VOLUME, &source, &folder.path().join("nbd.sock"), "")?;
    let report = daemon.move_to(VOLUME, &target, &["--verify", "sample", "--delete-source"])?;
    let mut peak = Samples::default();
    peak.push(memory_peak_of(daemon.process.pid())? as f64 / f64::from(1 << 20));
    let mut seconds = Samples::default();
    seconds.push(report["seconds"].as_f64().context("the report tells seconds")?);
    let size = format!("a sparse volume of {} TiB", bytes >> 40);
    Ok(vec![
        Row::new(format!("{size}: the daemon's memory, most"), "MiB", peak, Goal::AtMost(256.0)),
        Row::new(format!("{size}: time"), "s", seconds, Goal::None),
    ])
}
