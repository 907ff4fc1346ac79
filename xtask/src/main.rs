//! Checks and chores of the repository: `cargo xtask COMMAND`.

mod guest_programs;
mod modules;
mod mutations;
mod programs;
mod runs;
mod setup;
mod sim;
mod tests;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use programs::{BENCH, EXPERIMENTS, TORTURE, run_chore};

/// Checks and chores of the repository.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Check the house rules that no compiler knows: file lengths, left-overs, forbidden calls, imports in a circle.
    Tidy(tidy::Arguments),
    /// Install the Debian packages that tests, demo and benchmarks need (as root), or say which are missing.
    Setup(setup::Arguments),
    /// Run all tests, many at a time.
    Test(tests::Arguments),
    /// Boot a real guest, move its disk while it works, and print the report.
    Demo(programs::Arguments),
    /// Boot a guest that serves a web page, move it whole to another host while a client asks it, and print the report.
    DemoVm(programs::Arguments),
    /// Play migrations in a simulated world and check what must always hold.
    Sim(programs::Arguments),
    /// Make mistakes in the engine on purpose, and check that the simulator sees each of them.
    Mutations(mutations::Arguments),
    /// Kill, cut, throttle, freeze and fill the real daemon while it moves a volume, at random from a seed.
    Torture(programs::Arguments),
    /// Do the same to two real daemons while a volume moves from one to the other.
    TortureHosts(programs::Arguments),
    /// Do the same while a whole VM goes back and forth between two real daemons.
    TortureVms(programs::Arguments),
    /// Repeat a paper's evaluation in the simulator (`paper esx`); writes one HTML page with plots, and JSON.
    Paper(programs::Arguments),
    /// The same as `paper esx`.
    PaperEsx(programs::Arguments),
    /// Make the ESX paper's moves on real files, by the daemon, under real loads; writes the same page of what came out.
    PaperEsxReal(programs::Arguments),
    /// Measure against nbdkit, QEMU and plain copies; prints a table and writes JSON.
    BenchLocal(programs::Arguments),
    /// Measure the range lock beside simpler locks at 1, 2, 4 and 8 threads; prints tables and writes JSON.
    BenchRangeLock(programs::Arguments),
    /// Measure moves between two hosts in network namespaces against nbdcopy, QEMU and plain TCP (needs root); prints a table
    /// and writes JSON.
    BenchWire(programs::Arguments),
    /// Measure moves of whole VMs between two hosts against QEMU's own migration (needs root); prints a table and writes
    /// JSON.
    BenchVm(programs::Arguments),
    /// Move a VM with its flash cache by every way, under the load of the Firepan paper (needs root); prints a table and writes
    /// JSON.
    BenchCaches(programs::Arguments),
    /// Record state directories, API answers and wire transcripts of a version, which later programs must read.
    RecordFixtures(programs::Arguments),
    /// Run a command, and keep what came of it in docs/runs, for the table in docs/reliability.md.
    Record(runs::RecordArguments),
    /// Draw the table of recorded runs in docs/reliability.md.
    Runs(runs::Arguments),
    /// One plain TCP stream, as `bench-wire` starts it on both hosts.
    #[command(hide = true)]
    TcpStream(programs::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().chore {
        Chore::Tidy(arguments) => tidy::run(&arguments),
        Chore::Setup(arguments) => setup::run(&arguments),
        Chore::Test(arguments) => tests::run(&arguments),
        Chore::Demo(arguments) => programs::demo("demo", &arguments),
        Chore::DemoVm(arguments) => programs::demo("demo-vm", &arguments),
        Chore::Sim(arguments) => sim::run(&arguments),
        Chore::Mutations(arguments) => mutations::run(&arguments),
        Chore::Torture(arguments) => run_chore(TORTURE, "torture", &arguments),
        Chore::TortureHosts(arguments) => run_chore(TORTURE, "torture-hosts", &arguments),
        Chore::TortureVms(arguments) => run_chore(TORTURE, "torture-vms", &arguments),
        Chore::Paper(arguments) => run_chore(EXPERIMENTS, "paper", &arguments),
        Chore::PaperEsx(mut arguments) => {
            arguments.arguments.insert(0, "esx".to_owned());
            run_chore(EXPERIMENTS, "paper", &arguments)
        }
        Chore::PaperEsxReal(arguments) => run_chore(BENCH, "paper-esx-real", &arguments),
        Chore::BenchLocal(arguments) => run_chore(BENCH, "bench-local", &arguments),
        Chore::BenchRangeLock(arguments) => run_chore(BENCH, "bench-range-lock", &arguments),
        Chore::BenchWire(arguments) => run_chore(BENCH, "bench-wire", &arguments),
        Chore::BenchVm(arguments) => run_chore(BENCH, "bench-vm", &arguments),
        Chore::BenchCaches(arguments) => run_chore(BENCH, "bench-caches", &arguments),
        Chore::RecordFixtures(arguments) => run_chore(BENCH, "record-fixtures", &arguments),
        Chore::Record(arguments) => runs::record(&arguments),
        Chore::Runs(arguments) => runs::run(&arguments),
        Chore::TcpStream(arguments) => run_chore(BENCH, "tcp-stream", &arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
