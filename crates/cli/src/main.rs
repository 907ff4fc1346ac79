//! `transhume`: the command line of the daemon. It asks, waits and shows; what is done, the daemon does. What needs no daemon
//! (`rescue`, `copy`) is the daemon's code all the same.

mod args;
mod caches;
mod commands;
mod copy;
mod layers;
mod path;
mod rate;
mod report;
mod say;
mod show;
mod span;
mod store;
mod surrogates;
mod vm;
mod watch;

use std::process::ExitCode;

use api::v1::Error;
use clap::Parser;

use crate::args::Cli;

fn main() -> ExitCode {
    // A rescue starts itself again for each device.
    if let Some(end) = daemon::run_as_helper() {
        return end;
    }
    let cli = Cli::parse();
    let json = cli.common.json;
    let outcome = match cli.command {
        args::Command::Rescue(rescue) => daemon::rescue(&rescue.state_dir, &rescue.name, json).map(|()| 0),
        args::Command::Copy(args) => copy::run(&args, json),
        command => run(command, &cli.common),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            if json {
                say::line(&serde_json::json!({ "error": error }).to_string());
            }
            say::aside(&format!("transhume: {error}"));
            ExitCode::from(error.exit_code)
        }
    }
}

fn run(command: args::Command, common: &args::Common) -> Result<u8, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
        Error::new(api::v1::ErrorCode::Internal, format!("the event loop cannot be started: {error}"))
    })?;
    runtime.block_on(commands::run(command, common))
}
