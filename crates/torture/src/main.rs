//! `transhume-torture`: what `cargo xtask torture`, `cargo xtask torture-hosts` and `cargo xtask torture-vms` run. It is a
//! program of its own, so that no other chore of the repository waits for it to build.

mod acts;
mod alone;
mod checks;
mod client;
mod cycle;
mod hosts;
mod party;
mod plan;
mod proxy;
mod server;
mod stall;
mod tally;
mod testbed;
mod vms;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The real daemon under everything that may happen to it.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    kind: Kind,
}

#[derive(Subcommand)]
enum Kind {
    /// Kill, cut, throttle, freeze and fill the real daemon while it moves a volume, at random from a seed.
    Torture(acts::Arguments),
    /// Do the same to two real daemons while a volume moves from one to the other.
    TortureHosts(hosts::Arguments),
    /// Do the same while a whole VM goes back and forth between two real daemons.
    TortureVms(vms::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().kind {
        Kind::Torture(arguments) => acts::play_all(&arguments),
        Kind::TortureHosts(arguments) => hosts::play_all(&arguments),
        Kind::TortureVms(arguments) => vms::play_all(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
