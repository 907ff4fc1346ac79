//! Adopting and releasing a running guest's disk under load, many times.

use std::time::{Duration, Instant};

use anyhow::bail;
use transhume_guest::{Disk, Guest, GuestSpec, Load};

use super::figures::{Goal, Row, Samples};
use super::server::Transhumed;
use super::{Bench, private_folder};

const DISK_BYTES: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(120);
const NAME: &str = "adopted";

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let folder = private_folder(bench.memory.path())?;
    let disk = folder.path().join("disk.raw");
    transhume_guest::create_filled(&disk, DISK_BYTES)?;
    let load = Load { is_prefilled: true, workers: 4, interval_ms: 100, ..Load::default() };
    let mut guest = Guest::boot(GuestSpec::new().disk(Disk::raw(&disk, "data")).load(load))?;
    guest.wait_for_load(PATIENCE)?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    let qmp = guest.qmp_socket().display().to_string();
    std::thread::sleep(Duration::from_secs(2));
    let quiet = longest_since(&mut guest, None);
    let (mut adopt, mut release) = (Samples::default(), Samples::default());
    let began = Instant::now();
    for _ in 0..bench.repeats {
        adopt.push(timed(|| daemon.run(&["adopt", "--qmp", &qmp, "--node", "data", "--name", NAME]))?);
        release.push(timed(|| daemon.run(&["release", NAME]))?);
    }
    std::thread::sleep(Duration::from_millis(300));
    let felt = longest_since(&mut guest, Some(began));
    let verdict = guest.finish(PATIENCE)?;
    if !verdict.is_right() {
        bail!("the guest saw errors: {verdict:?}");
    }
    let mut worst = Samples::default();
    worst.push(felt.most());
    let what = |figure: &str| format!("{} adoptions and releases under load: {figure}", bench.repeats);
    Ok(vec![
        Row::new(what("the guest's worst latency"), "ms", worst, Goal::AtMost(20.0)),
        Row::new(what("the guest's longest latency per 100 ms"), "ms", felt, Goal::None).against("not adopting", quiet),
        Row::new(what("time of `transhume adopt`"), "ms", adopt, Goal::None),
        Row::new(what("time of `transhume release`"), "ms", release, Goal::None),
    ])
}

fn timed(act: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<f64> {
    let started = Instant::now();
    act()?;
    Ok(started.elapsed().as_secs_f64() * 1e3)
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
