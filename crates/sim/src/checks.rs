//! Checks that look at the world from outside, at the moments that matter.

use std::time::Duration;

use api::v1::Report;
use block::Bytes;
use migrate::Progress;

use crate::disk::Disk;
use crate::guest::GuestReport;
use crate::host::Status;
use crate::medium::SECTOR_BYTES;
use crate::register_history::RegisterHistory;
use crate::scenario::Expected;
use crate::world::{Invariant, World};

/// Source and target are equal. Sectors that a guest's write is under way to may differ while anything is in flight. An
/// example is a commit that is tried again while the guest runs. They may also differ if some writes `may_wait` for a
/// decision. Otherwise they may not.
pub(crate) fn equal_at_switch(world: &World, source: &Disk, target: &Disk, history: &RegisterHistory, may_wait: bool) {
    let busy = may_wait || source.in_flight() + target.in_flight() > 0;
    let difference = source.inspect(|source| {
        target.inspect(|target| {
            // Either disk may be larger than the volume: a volume also moves back from where there was more room.
            let length = history.bytes_of(&(0..history.sector_count())).end as usize;
            let (source, target) = (&source[..length], &target[..length]);
            if source == target {
                return None;
            }
            let sectors = source.chunks(SECTOR_BYTES as usize).zip(target.chunks(SECTOR_BYTES as usize)).enumerate();
            let mut different = sectors.filter(|(_, (source, target))| source != target);
            let first = different.find(|(sector, _)| !busy || !history.is_being_written(*sector as u64));
            first.map(|(sector, (source, target))| {
                let sector = sector as u64;
                let (source, target) = (history.describe(sector, source), history.describe(sector, target));
                format!("sector {sector} is {source} on the source and {target} on the target")
            })
        })
    });
    if let Some(difference) = difference {
        world.violate(Invariant::EqualAtSwitch, difference);
    }
}

/// Whatever a power loss leaves on `disk`, nothing that the guest has flushed is missing. Bytes that nobody wrote are
/// excused where corruption is part of the scenario.
pub(crate) fn flushed(world: &World, disk: &Disk, history: &RegisterHistory, is_promised: bool) {
    let mut worst = None;
    disk.each_uncertain(|sector, bytes| {
        if worst.is_some() || sector >= history.sector_count() {
            return;
        }
        let bytes = &bytes[..bytes.len().min(length_of(history, sector))];
        if is_promised && !history.may_survive(sector, bytes) {
            worst = Some(format!(
                "a power loss may leave {} in sector {sector} of {}, but only {} may survive",
                history.describe(sector, bytes),
                disk.name(),
                history.survivors(sector)
            ));
        }
    });
    if let Some(what) = worst {
        world.violate(Invariant::Flush, what);
    }
}

fn length_of(history: &RegisterHistory, sector: u64) -> usize {
    let bytes = history.bytes_of(&(sector..sector + 1));
    Bytes(bytes.end - bytes.start).as_usize()
}

/// Nothing that is counted goes back.
pub(crate) fn monotonic(world: &World, before: &Progress, now: &Progress) {
    let counts = [
        ("bytes_done", before.bytes_done, now.bytes_done),
        ("bytes_copied", before.bytes_copied, now.bytes_copied),
        ("bytes_zero", before.bytes_zero, now.bytes_zero),
        ("bytes_mirrored", before.bytes_mirrored, now.bytes_mirrored),
        ("bytes_verified", before.bytes_verified, now.bytes_verified),
        ("stall_us_max", before.stall_us_max, now.stall_us_max),
        ("target_losses", before.target_losses, now.target_losses),
    ];
    for (name, before, now) in counts {
        if now < before {
            world.violate(Invariant::Monotonic, format!("{name} went from {before} back to {now}"));
        }
    }
    if now.percent < before.percent || now.percent > 100.0 {
        let what = format!("{} % are done after {} %", now.percent, before.percent);
        world.violate(Invariant::Monotonic, what);
    }
    let (least, most) = (now.eta_seconds_min, now.eta_seconds_max);
    if now.eta_seconds < least || now.eta_seconds > most {
        let what = format!("{:?} s are left, between {least:?} and {most:?}", now.eta_seconds);
        world.violate(Invariant::Monotonic, what);
    }
    if now.bytes_done > now.bytes_total {
        let what = format!("{} of {} bytes are done", now.bytes_done, now.bytes_total);
        world.violate(Invariant::Monotonic, what);
    }
}

/// What the scenario expects of its own.
pub(crate) fn as_told(world: &World, expected: &Expected, guest: &GuestReport, status: &Status) {
    let report = if let Status::Switched(Some(report)) = status { Some(report) } else { None };
    if let Some(limit) = expected.wait_max.filter(|limit| guest.longest > *limit) {
        world.violate(Invariant::AsTold, format!("a guest's request took {:?}, expected {limit:?}", guest.longest));
    }
    let holds: Vec<f64> = report.map_or_else(Vec::new, |report| {
        report.iterations.iter().filter(|pass| pass.held).map(|pass| pass.seconds).collect()
    });
    if let Some(most) = expected.holds_max.filter(|most| holds.len() > *most) {
        let what = format!("the guest was held for {} last copies, expected {most} at most", holds.len());
        world.violate(Invariant::AsTold, what);
    }
    let longest = Duration::from_secs_f64(holds.iter().copied().fold(0.0, f64::max));
    if let Some(limit) = expected.hold_max.filter(|limit| longest > *limit) {
        world.violate(Invariant::AsTold, format!("a last copy held the guest for {longest:?}, expected {limit:?}"));
    }
    if expected.resumes && report.is_none_or(|report| report.bytes_resumed == 0) {
        world.violate(Invariant::AsTold, format!("nothing was resumed: {status:?}"));
    }
    let failures = |report: &Report| report.target_losses + report.missed_writes + report.retries;
    if expected.target_fails && report.is_none_or(|report| failures(report) == 0) {
        world.violate(Invariant::AsTold, format!("the target has not failed within the move: {status:?}"));
    }
}
