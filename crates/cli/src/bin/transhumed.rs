//! The daemon.

use clap::Parser;

fn main() -> std::process::ExitCode {
    // It starts itself again for each device; see `daemon::run_as_helper`.
    if let Some(end) = daemon::run_as_helper() {
        return end;
    }
    daemon::main(&daemon::Args::parse())
}
