//! How long a guest waits at most, over many migrations of a small volume under load.

use std::path::PathBuf;

use anyhow::Context;

use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::server::{Endpoint, Transhumed, VOLUME};
use transhume_guest::programs::private_folder;

use super::Bench;

const VOLUME_BYTES: u64 = 64 << 20;
const RATE: u32 = 5_000;

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let folder = private_folder(bench.memory.path())?;
    let place = |number: usize| -> PathBuf { folder.path().join(format!("volume-{number}.raw")) };
    transhume_guest::create_filled(&place(0), VOLUME_BYTES)?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    let endpoint = Endpoint { socket: folder.path().join("nbd.sock"), export: VOLUME };
    daemon.attach(VOLUME, &place(0), &endpoint.socket, "")?;
    let mut load = NbdLoad::start(&bench.programs, &endpoint, Offer::Rate(RATE))?;
    load.mark()?;
    let (mut quiet, mut felt, mut reported) = (Samples::default(), Samples::default(), Samples::default());
    for number in 1..=bench.repeats {
        std::thread::sleep(std::time::Duration::from_millis(50));
        quiet.push(load.mark()?.longest.as_secs_f64() * 1e3);
        let report = daemon.move_to(VOLUME, &place(number), &["--verify", "off", "--delete-source"])?;
        felt.push(load.mark()?.longest.as_secs_f64() * 1e3);
        let stall = report["stall_us_max"].as_f64().context("the report tells stall_us_max")?;
        reported.push(stall / 1e3);
    }
    let mut worst = Samples::default();
    worst.push(reported.most());
    let what = |figure: &str| format!("{} migrations of 64 MiB, 5,000 offered: {figure}", bench.repeats);
    let mut worst_felt = Samples::default();
    worst_felt.push(felt.most());
    Ok(vec![
        Row::new(what("longest stall, median"), "ms", reported, Goal::AtMost(2.0)),
        Row::new(what("longest stall, worst"), "ms", worst, Goal::AtMost(10.0)),
        Row::new(what("longest latency that the load saw"), "ms", felt, Goal::None)
            .against("50 ms of no migration", quiet),
        Row::new(what("the worst of them"), "ms", worst_felt, Goal::None),
    ])
}
