//! `transhume-bench`: what `cargo xtask` runs to measure, to show and to record the real programs. It is a program of its own,
//! so that no other chore of the repository waits for it to build.

mod caches;
mod demo;
mod demo_vm;
mod figures;
mod fixtures;
mod groups;
mod load;
mod local;
mod page;
mod paper_esx_real;
mod range_lock;
mod reserve;
mod seek_path;
mod server;
mod vm;
mod wire;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The real programs, measured, shown and recorded.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Boot a real guest, move its disk while it works, and print the report.
    Demo(demo::Arguments),
    /// Boot a guest that serves a web page, move it whole to another host while a client asks it, and print the report.
    DemoVm(demo_vm::Arguments),
    /// Make the ESX paper's moves on real files, by the daemon, under real loads, and write down what was measured.
    PaperEsxReal(paper_esx_real::Arguments),
    /// Measure against nbdkit, QEMU and plain copies; prints a table and writes JSON.
    BenchLocal(local::Arguments),
    /// Measure the range lock beside simpler locks at 1, 2, 4 and 8 threads; prints tables and writes JSON.
    BenchRangeLock(range_lock::Arguments),
    /// Measure moves between two hosts in network namespaces against nbdcopy, QEMU and plain TCP (needs root); prints a table
    /// and writes JSON.
    BenchWire(wire::Arguments),
    /// Measure moves of whole VMs between two hosts against QEMU's own migration (needs root); prints a table and writes
    /// JSON.
    BenchVm(vm::Arguments),
    /// Move a VM with its flash cache by every way, under the load of the Firepan paper (needs root); prints a table and writes
    /// JSON.
    BenchCaches(caches::Arguments),
    /// Record state directories, API answers and wire transcripts of a version, which later programs must read.
    RecordFixtures(fixtures::Arguments),
    /// One plain TCP stream, as `bench-wire` starts it on both hosts.
    #[command(hide = true)]
    TcpStream(wire::tcp::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().chore {
        Chore::Demo(arguments) => demo::run(arguments),
        Chore::DemoVm(arguments) => demo_vm::run(arguments),
        Chore::PaperEsxReal(arguments) => paper_esx_real::run(&arguments),
        Chore::BenchLocal(arguments) => local::run(arguments),
        Chore::BenchRangeLock(arguments) => range_lock::run(&arguments),
        Chore::BenchWire(arguments) => wire::run(arguments),
        Chore::BenchVm(arguments) => vm::run(arguments),
        Chore::BenchCaches(arguments) => caches::run(arguments),
        Chore::RecordFixtures(arguments) => fixtures::run(&arguments),
        Chore::TcpStream(arguments) => wire::tcp::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
