//! The daemon.

use clap::Parser;

fn main() -> std::process::ExitCode {
    daemon::main(&daemon::Args::parse())
}
