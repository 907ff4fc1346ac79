//! Adopting and releasing a running guest's disk under load, many times.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;
use transhume_guest::{Disk, Guest, GuestSpec, Load};

use crate::figures::{Goal, Row, Samples};
use crate::server::Transhumed;
use transhume_guest::process::output_of;
use transhume_guest::programs::private_folder;

use super::Bench;

const DISK_BYTES: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(120);
const NAME: &str = "adopted";

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let raw = trial(bench, "raw", bench.repeats)?;
    let qcow2 = trial(bench, "qcow2", bench.repeats.div_ceil(5))?;
    let mut worst = Samples::default();
    worst.push(raw.felt.most());
    let what = |figure: &str| format!("{} adoptions and releases under load: {figure}", bench.repeats);
    let of_qcow2 = |figure: &str| format!("{} of a qcow2 disk: {figure}", bench.repeats.div_ceil(5));
    Ok(vec![
        Row::new(what("the guest's worst latency"), "ms", worst, Goal::AtMost(20.0)),
        Row::new(what("the guest's longest latency per 100 ms"), "ms", raw.felt, Goal::None)
            .against("not adopting", raw.quiet),
        Row::new(what("time of `transhume adopt`"), "ms", raw.adopt, Goal::None),
        Row::new(what("time of `transhume release`"), "ms", raw.release, Goal::None),
        Row::new(of_qcow2("the guest stopped at the release"), "ms", qcow2.stopped, Goal::None),
        Row::new(of_qcow2("the guest's longest latency per 100 ms"), "ms", qcow2.felt, Goal::None)
            .against("not adopting", qcow2.quiet),
    ])
}

/// What a guest felt and what the commands took, in milliseconds.
#[derive(Default)]
struct Trial {
    adopt: Samples,
    release: Samples,
    /// For how long the releases stopped the guest.
    stopped: Samples,
    /// The longest latency of each interval before, and while disks were adopted and released.
    quiet: Samples,
    felt: Samples,
}

/// Adopts and releases the disk of a guest under load so many times.
fn trial(bench: &Bench, format: &str, repeats: usize) -> anyhow::Result<Trial> {
    let folder = private_folder(bench.memory.path())?;
    let filled = folder.path().join("disk.raw");
    transhume_guest::create_filled(&filled, DISK_BYTES)?;
    let disk = match format {
        "qcow2" => {
            let container = folder.path().join("disk.qcow2");
            let (from, to) = (filled.display().to_string(), container.display().to_string());
            output_of(Path::new("qemu-img"), &["convert", "-f", "raw", "-O", "qcow2", &from, &to].map(str::to_owned))?;
            Disk::qcow2(&container, "data")
        }
        _ => Disk::raw(&filled, "data"),
    };
    let load = Load { is_prefilled: true, workers: 4, interval_ms: 100, ..Load::default() };
    let mut guest = Guest::boot(GuestSpec::new().disk(disk).load(load))?;
    guest.wait_for_load(PATIENCE)?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    let qmp = guest.qmp_socket().display().to_string();
    std::thread::sleep(Duration::from_secs(2));
    let mut trial = Trial { quiet: longest_since(&mut guest, None), ..Trial::default() };
    let began = Instant::now();
    for _ in 0..repeats {
        let adopted = timed(&mut trial.adopt, || {
            daemon.run(&["adopt", "--qmp", &qmp, "--node", "data", "--name", NAME, "--json"])
        })?;
        let released = timed(&mut trial.release, || daemon.run(&["release", NAME, "--json"]))?;
        for answer in [adopted, released] {
            let answer: serde_json::Value = serde_json::from_str(&answer)?;
            if let Some(stopped_us) = answer["vm"]["stopped_us"].as_f64() {
                trial.stopped.push(stopped_us / 1e3);
            }
        }
    }
    std::thread::sleep(Duration::from_millis(300));
    trial.felt = longest_since(&mut guest, Some(began));
    let load_result = guest.finish(PATIENCE)?;
    if !load_result.is_right() {
        bail!("the guest saw errors: {load_result:?}");
    }
    Ok(trial)
}

fn timed(times: &mut Samples, act: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<String> {
    let started = Instant::now();
    let answer = act()?;
    times.push(started.elapsed().as_secs_f64() * 1e3);
    Ok(answer)
}

fn longest_since(guest: &mut Guest, moment: Option<Instant>) -> Samples {
    let mut longest = Samples::default();
    for (at, interval) in guest.intervals() {
        if moment.is_none_or(|moment| *at >= moment) {
            longest.push(interval.longest.as_secs_f64() * 1e3);
        }
    }
    longest
}
