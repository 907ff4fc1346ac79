//! Machines under QEMU on both hosts, whose disks change places while they work.

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use transhume_guest::{Disk, Guest, GuestSpec, Interval, Load, LoadResult, Side, TwoHosts};

use super::{GBIT, WireBench, limited, mib};
use crate::figures::{Goal, Row, Samples};
use transhume_guest::programs::private_folder;

/// Requests a second that each guest offers: what it gets done, emulated, beside another one and two daemons on two cores.
const RATE: u32 = 300;
/// How long both guests are left alone, to compare with.
const ALONE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(300);

/// What one guest has seen.
struct Felt {
    seconds: f64,
    alone: Vec<Interval>,
    moving: Vec<Interval>,
    load_result: LoadResult,
}

/// The disk of a guest on A goes to B while the disk of a guest on B goes to A. The loads check every byte.
pub(super) fn guests(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    // Two disks, each in two places.
    let bytes = bench.bytes / 4;
    let (mut seconds, mut complaints) = (Samples::default(), Samples::default());
    let [mut iops, mut iops_alone, mut longest, mut longest_alone] = [(); 4].map(|()| Samples::default());
    for _ in 0..bench.runs {
        for felt in round(bench, bytes)? {
            seconds.push(felt.seconds);
            iops.push(mean_iops(&felt.moving));
            iops_alone.push(mean_iops(&felt.alone));
            longest.push(longest_ms(&felt.moving));
            longest_alone.push(longest_ms(&felt.alone));
            let LoadResult { wrong, complaints: told, is_done, .. } = &felt.load_result;
            complaints.push((*wrong + told.len() as u64 + u64::from(*is_done != Some(true))) as f64);
        }
    }
    let what =
        format!("a guest's disk of {} to the other host, and another's back, {RATE} requests/s each", mib(bytes));
    let same = |figure: &str| format!("the same: {figure}");
    let peer = "the same guests left alone";
    Ok(vec![
        Row::new(format!("{what}: time of a move"), "s", seconds, Goal::None),
        Row::new(same("the guest's requests while it moves"), "IOPS", iops, Goal::None).against(peer, iops_alone),
        Row::new(same("the guest's longest latency"), "ms", longest, Goal::None).against(peer, longest_alone),
        Row::new(same("errors and wrong blocks of a guest"), "errors", complaints, Goal::AtMost(0.0)),
    ])
}

fn round(bench: &WireBench, bytes: u64) -> anyhow::Result<[Felt; 2]> {
    let folder = private_folder(bench.memory.path())?;
    let mut hosts = TwoHosts::new(&bench.programs, folder.path(), limited(GBIT))?;
    hosts.start()?;
    hosts.pair()?;
    let (hosts, folder, meeting) = (&hosts, folder.path(), &Barrier::new(2));
    std::thread::scope(|scope| {
        let [a, b] = Side::BOTH.map(|side| scope.spawn(move || one_machine(hosts, folder, side, bytes, meeting)));
        let end = |machine: std::thread::ScopedJoinHandle<'_, _>| {
            machine.join().unwrap_or_else(|_| Err(anyhow!("a thread has panicked")))
        };
        Ok([end(a)?, end(b)?])
    })
}

/// Boots a machine on `side`, and moves its disk away under its load.
fn one_machine(hosts: &TwoHosts, folder: &Path, side: Side, bytes: u64, meeting: &Barrier) -> anyhow::Result<Felt> {
    let ready = ready_machine(hosts, folder, side, bytes);
    // The other one waits here, too: whatever became of this one.
    meeting.wait();
    let (mut guest, name) = ready?;
    std::thread::sleep(ALONE);
    meeting.wait();
    let other = if side == Side::A { Side::B } else { Side::A };
    let began = Instant::now();
    let to = format!("{}:{name}", other.name());
    let report = hosts.daemon(side).json(&["move", &name, "--to", &to, "--no-persist", "--verify", "off"]);
    let ended = Instant::now();
    meeting.wait();
    let report = report?;
    if report["state"] != "done" {
        bail!("the move of {name} failed: {report}");
    }
    let within = |guest: &mut Guest, from: Instant, until: Instant| -> Vec<Interval> {
        let all = guest.intervals().iter();
        all.filter(|(at, _)| (from..until).contains(at)).map(|(_, interval)| *interval).collect()
    };
    let alone = within(&mut guest, began.checked_sub(ALONE).unwrap_or(began), began);
    let moving = within(&mut guest, began, ended + Duration::from_millis(100));
    let load_result = guest.finish(PATIENCE)?;
    Ok(Felt { seconds: (ended - began).as_secs_f64(), alone, moving, load_result })
}

fn ready_machine(hosts: &TwoHosts, folder: &Path, side: Side, bytes: u64) -> anyhow::Result<(Guest, String)> {
    hosts.enter(side)?;
    let (name, image) = (format!("disk-of-{}", side.name()), folder.join(format!("{}.raw", side.name())));
    transhume_guest::create_filled(&image, bytes)?;
    let load = Load { is_prefilled: true, workers: 4, rate: RATE, interval_ms: 100, ..Load::default() };
    let mut guest = Guest::boot(GuestSpec::new().disk(Disk::raw(&image, "data")).load(load))?;
    guest.wait_for_load(PATIENCE)?;
    let qmp = guest.qmp_socket().display().to_string();
    hosts.daemon(side).json(&["adopt", "--qmp", &qmp, "--node", "data", "--name", &name])?;
    Ok((guest, name))
}

fn mean_iops(intervals: &[Interval]) -> f64 {
    let requests: u64 = intervals.iter().map(|interval| interval.reads + interval.writes).sum();
    let length: Duration = intervals.iter().map(|interval| interval.length).sum();
    requests as f64 / length.as_secs_f64().max(1e-9)
}

fn longest_ms(intervals: &[Interval]) -> f64 {
    intervals.iter().map(|interval| interval.longest.as_secs_f64() * 1e3).fold(0.0, f64::max)
}
