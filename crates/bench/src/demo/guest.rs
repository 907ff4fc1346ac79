//! The demo with a real guest: a Linux under QEMU whose disk is a plain file that QEMU itself opened.

use std::time::{Duration, Instant};

use anyhow::Context;
use transhume_guest::{Acceleration, Disk, Guest, GuestSpec, Load};

use super::report::DemoSummary;
use super::{Scene, felt, moved};
use crate::server::Transhumed;
use transhume_guest::process::output_of;

const PATIENCE: Duration = Duration::from_secs(90);
const NODE: &str = "data";
const NAME: &str = "demo";
/// What an emulated guest offers without being at its limit on a small machine.
const RATE_EMULATED: u32 = 2_000;
const RATE_KVM: u32 = 5_000;

pub(super) fn play(scene: &Scene) -> anyhow::Result<DemoSummary> {
    let acceleration = Acceleration::probe();
    let is_emulated = acceleration == Acceleration::Tcg;
    let rate = scene.rate.unwrap_or(if is_emulated { RATE_EMULATED } else { RATE_KVM });
    let load = Load { is_prefilled: true, rate, interval_ms: 100, ..Load::default() };
    let spec = GuestSpec::new().disk(Disk::raw(scene.source_disk(), NODE)).load(load).acceleration(acceleration);
    step("boot", "a Linux guest under QEMU, its disk a plain file that QEMU opened");
    let started = Instant::now();
    let mut guest = Guest::boot(spec)?;
    guest.wait_for_load(PATIENCE)?;
    let mut summary = DemoSummary { offered: rate, boot: Some(started.elapsed()), ..DemoSummary::default() };
    summary.scene = format!(
        "Linux {} under {}, {}",
        kernel_release()?,
        qemu_version().unwrap_or_else(|| "QEMU".into()),
        if is_emulated { "emulated (KVM boots no guest here)" } else { "KVM" }
    );
    summary.disk = (scene.source_disk(), scene.target_disk(), scene.bytes);

    let daemon = Transhumed::start(&scene.programs, scene.source.path())?;
    std::thread::sleep(Duration::from_secs(1));
    step("before", &format!("{} s of load on QEMU's own disk", scene.calm.as_secs()));
    let (from, to) = pause(scene.calm);
    summary.before = felt(guest.intervals(), from, to);

    step("adopt", "the daemon takes the disk over from the running QEMU");
    let qmp = guest.qmp_socket().display().to_string();
    let from = Instant::now();
    daemon.run(&["adopt", "--qmp", &qmp, "--node", NODE, "--name", NAME])?;
    summary.adopt = Some(from.elapsed());
    settle();
    summary.adopting = Some(felt(guest.intervals(), from, Instant::now()));

    step("move", "to the other volume, every chunk compared");
    let from = Instant::now();
    let report = daemon.move_to(NAME, &scene.target_disk(), &["--verify", "full", "--no-persist"])?;
    let to = Instant::now();
    settle();
    summary.during = felt(guest.intervals(), from, to + Duration::from_millis(200));
    moved(scene, &mut summary, report)?;

    step("release", "QEMU opens the moved file itself; the daemon is out of the way");
    let from = Instant::now();
    daemon.run(&["release", NAME])?;
    summary.release = Some(from.elapsed());
    settle();
    summary.releasing = Some(felt(guest.intervals(), from, Instant::now()));
    drop(daemon);

    step("after", &format!("{} s of load without the daemon", scene.calm.as_secs()));
    let (from, to) = pause(scene.calm);
    summary.after = felt(guest.intervals(), from, to);

    step("verify", "the guest reads its whole disk again");
    summary.load_result = guest.finish(PATIENCE)?;
    Ok(summary)
}

/// Long enough for the report of the interval in which something happened.
fn settle() {
    std::thread::sleep(Duration::from_millis(300));
}

fn pause(length: Duration) -> (Instant, Instant) {
    let from = Instant::now();
    std::thread::sleep(length);
    (from, Instant::now())
}

pub(super) fn step(name: &str, what: &str) {
    println!("  {name:<8} {what}");
}

fn kernel_release() -> anyhow::Result<String> {
    let (kernel, _) = transhume_guest::kernel()?;
    let name = kernel.file_name().and_then(|name| name.to_str()).context("a kernel has a name")?;
    Ok(name.trim_start_matches("vmlinuz-").to_owned())
}

fn qemu_version() -> Option<String> {
    let printed = output_of("qemu-system-x86_64".as_ref(), &["--version".into()]).ok()?;
    let version = printed.lines().next()?.split("version ").nth(1)?;
    Some(format!("QEMU {}", version.split(' ').next()?))
}
