//! What a guest feels when all disks of its machine switch over in one commit, beside what it feels when one of them does alone.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use transhume_guest::programs::private_folder;
use transhume_guest::{Disk, Guest, GuestSpec, Load};

use super::Bench;
use crate::figures::{Goal, Row, Samples};
use crate::server::Transhumed;

const DISKS: usize = 4;
const DISK_BYTES: u64 = 32 << 20;
/// Requests a second to the first disk; the others are idle.
const RATE: u32 = 500;
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let folder = private_folder(bench.memory.path())?;
    let mut spec = GuestSpec::new();
    for number in 0..DISKS {
        let image = folder.path().join(format!("disk{number}.raw"));
        transhume_guest::create_filled(&image, DISK_BYTES)?;
        spec = spec.disk(Disk::raw(&image, &format!("disk{number}")));
    }
    let load = Load { is_prefilled: true, workers: 4, rate: RATE, ..Load::default() };
    let mut guest = Guest::boot(spec.load(load))?;
    guest.wait_for_load(PATIENCE)?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    let qmp = guest.qmp_socket().display().to_string();
    for number in 0..DISKS {
        let name = format!("disk{number}");
        daemon.run(&["adopt", "--qmp", &qmp, "--node", &name, "--name", &name, "--json"])?;
    }
    let (mut alone, mut together, mut more) = (Samples::default(), Samples::default(), Samples::default());
    for round in 0..bench.repeats.div_ceil(5) {
        let place = |what: &str| -> PathBuf { folder.path().join(format!("{what}-{round}-{{name}}.raw")) };
        let one = stall_ms(&daemon, &place("alone"), false)?;
        let all = stall_ms(&daemon, &place("together"), true)?;
        alone.push(one);
        together.push(all);
        more.push(all - one);
    }
    let load_result = guest.finish(PATIENCE)?;
    if !load_result.is_right() {
        bail!("the guest saw errors: {load_result:?}");
    }
    let what = |figure: &str| format!("{DISKS} disks in one commit, {RATE} requests/s to one of them: {figure}");
    Ok(vec![
        Row::new(what("longest stall"), "ms", together, Goal::None).against("that disk alone", alone),
        Row::new(what("how much longer than alone"), "ms", more, Goal::AtMost(2.0)),
    ])
}

/// Moves the first disk, alone or with all others; gives the longest stall of any disk, in milliseconds.
fn stall_ms(daemon: &Transhumed, to: &std::path::Path, all: bool) -> anyhow::Result<f64> {
    let to = format!("file:{}", to.display()).replace("{name}", if all { "{name}" } else { "disk0" });
    let mut arguments =
        vec!["move", "disk0", "--to", &to, "--verify", "off", "--delete-source", "--no-persist", "--json"];
    arguments.extend(all.then_some("--all-disks"));
    let answer: Value = serde_json::from_str(&daemon.run(&arguments)?)?;
    let reports = if all { answer.as_array().context("a report for each")?.clone() } else { vec![answer] };
    let stalls = reports.iter().map(|report| report["stall_us_max"].as_f64().context("the report tells stall_us_max"));
    Ok(stalls.collect::<anyhow::Result<Vec<f64>>>()?.into_iter().fold(0.0, f64::max) / 1e3)
}
