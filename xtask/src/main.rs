//! Checks and chores of the repository: `cargo xtask COMMAND`.

mod bench;
mod demo;
mod fixtures;
mod mutations;
mod paper_esx;
mod runs;
mod setup;
mod sim;
mod tidy;
mod torture;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checks and chores of the repository.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Check the house rules that no compiler knows: file lengths, left-overs, forbidden calls.
    Tidy,
    /// Install the Debian packages that tests, demo and benchmarks need (as root), or say which are missing.
    Setup(setup::Arguments),
    /// Boot a real guest, move its disk while it works, and print the report.
    Demo(demo::Arguments),
    /// Play migrations in a simulated world and check what must always hold.
    Sim(sim::Arguments),
    /// Make mistakes in the engine on purpose, and check that the simulator sees each of them.
    Mutations(mutations::Arguments),
    /// Kill, cut, throttle, freeze and fill the real daemon while it moves a volume, at random from a seed.
    Torture(torture::Arguments),
    /// Do the same to two real daemons while a volume moves from one to the other.
    TortureHosts(torture::hosts::Arguments),
    /// Repeat the ESX paper's evaluation in the simulator; writes one HTML page with plots, and JSON.
    PaperEsx(paper_esx::Arguments),
    /// Make the evaluation's moves on real files, by the daemon, under real loads; writes the same page of what came out.
    PaperEsxReal(paper_esx::real::Arguments),
    /// Measure against nbdkit, QEMU and plain copies; prints a table and writes JSON.
    BenchLocal(bench::Arguments),
    /// Measure the range lock beside simpler locks at 1, 2, 4 and 8 threads; prints tables and writes JSON.
    BenchRangeLock(bench::range_lock::Arguments),
    /// Measure moves between two hosts in network namespaces against nbdcopy, QEMU and plain TCP (needs root); prints a table
    /// and writes JSON.
    BenchWire(bench::wire::Arguments),
    /// Record state directories, API answers and wire transcripts of a version, which later programs must read.
    RecordFixtures(fixtures::Arguments),
    /// Run a command, and keep what came of it in docs/runs, for the table in docs/reliability.md.
    Record(runs::RecordArguments),
    /// Draw the table of recorded runs in docs/reliability.md.
    Runs(runs::Arguments),
    /// One plain TCP stream, as `bench-wire` starts it on both hosts.
    #[command(hide = true)]
    TcpStream(bench::wire::tcp::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().chore {
        Chore::Tidy => tidy::run(),
        Chore::Setup(arguments) => setup::run(&arguments),
        Chore::Demo(arguments) => demo::run(arguments),
        Chore::Sim(arguments) => sim::run(&arguments),
        Chore::Mutations(arguments) => mutations::run(&arguments),
        Chore::Torture(arguments) => torture::run(&arguments),
        Chore::TortureHosts(arguments) => torture::hosts::torture(&arguments),
        Chore::PaperEsx(arguments) => paper_esx::run(&arguments),
        Chore::PaperEsxReal(arguments) => paper_esx::real::run(&arguments),
        Chore::BenchLocal(arguments) => bench::run(arguments),
        Chore::BenchRangeLock(arguments) => bench::range_lock::run(&arguments),
        Chore::BenchWire(arguments) => bench::wire::run(arguments),
        Chore::RecordFixtures(arguments) => fixtures::run(&arguments),
        Chore::Record(arguments) => runs::record(&arguments),
        Chore::Runs(arguments) => runs::run(&arguments),
        Chore::TcpStream(arguments) => bench::wire::tcp::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
