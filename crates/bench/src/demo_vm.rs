//! `cargo xtask demo-vm`: a running guest that serves a web page moves to another host while a client asks it, and a person
//! can read what the client felt. The two hosts are network namespaces of this machine.

mod plot;
mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use transhume_guest::programs::{given_or_built, private_folder};
use transhume_guest::{Acceleration, ClientSpec, GuestSpec, Load, MemoryLoad, TwoHostsSpec};

use crate::vm::ours::Ordered;
use crate::vm::place::{Place, RUNS_VMS, fillable_mib};
use plot::Mark;
use report::DemoVmSummary;

/// Arguments of `cargo xtask demo-vm`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The size of the guest's disk, in MiB.
    #[arg(long, default_value_t = 512)]
    mib: u64,
    /// The guest's memory, in MiB.
    #[arg(long, default_value_t = 512)]
    memory_mib: u32,
    /// How much of its memory the guest rewrites, in MiB/s.
    #[arg(long, default_value_t = 16)]
    rewrite_mib: u32,
    /// How fast the link between the hosts is, in Mbit/s; as fast as the machine if nothing is said.
    #[arg(long)]
    link_mbit: Option<u64>,
    /// Seconds in which the client asks before and after the move.
    #[arg(long, default_value_t = 2)]
    seconds: u64,
    /// The folder for the disks; memory (/dev/shm) unless said otherwise.
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// The folder of the programs; they are built as they are installed unless it is given.
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// Requests a second that the guest makes of its disk.
const DISK_RATE: u32 = 200;

/// Sets the scene, moves the guest, and prints the report.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    let programs = given_or_built(arguments.programs)?;
    let begun = Instant::now();
    let memory_mib = arguments.memory_mib.max(160);
    let acceleration = Acceleration::probe();
    let memory = MemoryLoad {
        mib: fillable_mib(memory_mib),
        rewrite_mib_per_second: arguments.rewrite_mib,
        ..MemoryLoad::default()
    };
    let load = Load { is_prefilled: true, rate: DISK_RATE, workers: 4, interval_ms: 100, ..Load::default() };
    let guest = GuestSpec::new().memory_mib(memory_mib).memory_load(memory).load(load).acceleration(acceleration);
    let hosts = TwoHostsSpec {
        link_bits_per_second: arguments.link_mbit.map(|mbit| mbit.max(1) * 1_000_000),
        more: RUNS_VMS,
        ..TwoHostsSpec::default()
    };
    let parent = private_folder(&arguments.folder)?;
    let disk_bytes = arguments.mib.max(16) << 20;
    step("boot", "two hosts in networks of their own, and a Linux guest on one of them that serves a web page");
    let mut place = Place::new((&programs, parent.path()), hosts, guest, disk_bytes)?;
    place.add()?;
    let calm = Duration::from_secs(arguments.seconds.max(1));
    let spec = ClientSpec::default();
    step("before", &format!("a client asks for {} pages a second, for {} s", spec.http_per_second, calm.as_secs()));
    let client = place.client(spec)?;
    std::thread::sleep(calm);
    step("move", "memory, devices and disk to the other host, the whole disk compared");
    let ordered = Ordered::new(&place, &["--verify", "full"])?;
    let ordered_unix_ms = ordered.began_unix_ms();
    let done = ordered.follow(&mut place)?;
    step("after", &format!("the client goes on for {} s", calm.as_secs()));
    std::thread::sleep(calm);
    let network = client.finish();
    step("verify", "the guest reads its whole disk and its memory again");
    let verified = place.verify();
    let log = place.hosts.daemon(transhume_guest::Side::A).log();
    let mut marks = plot::marks_of(&log);
    marks.push(Mark { letter: 'o', what: "the move is ordered", unix_ms: ordered_unix_ms });
    marks.push(Mark { letter: 's', what: "QEMU stops the guest here", unix_ms: done.stopped_unix_ms });
    marks.push(Mark { letter: 'r', what: "QEMU runs it there", unix_ms: done.ran_unix_ms });
    let summary = DemoVmSummary {
        scene: format!(
            "{} MiB of memory ({} MiB/s rewritten), a disk of {} MiB ({DISK_RATE} requests/s), {}",
            memory_mib,
            arguments.rewrite_mib,
            disk_bytes >> 20,
            if acceleration == Acceleration::Tcg { "emulated (KVM boots no guest here)" } else { "KVM" }
        ),
        load_result: place.guest.load_result().clone(),
        complaint: verified.err().map(|error| format!("{error:#}")),
        marks: plot::since(marks, started_unix_ms(network.started)),
        network,
        seconds: done.seconds,
        stopped: Duration::from_secs_f64((done.ran_unix_ms - done.stopped_unix_ms).max(0.0) / 1e3),
        shown: done.shown,
        whole: begun.elapsed(),
    };
    println!("{}", summary.tell());
    if summary.is_right() {
        return Ok(());
    }
    bail!("the demo did not show what it should: see above\n{}", place.logs())
}

fn step(name: &str, what: &str) {
    println!("  {name:<8} {what}");
}

/// A moment of this process's clock by the wall clock, in milliseconds since 1970.
fn started_unix_ms(moment: Instant) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_secs_f64() - moment.elapsed().as_secs_f64()) * 1e3
}
