//! What the program does besides playing seeds: experiments and replays.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::ExitCode;

use block::{Error, Result};
use env::Env;
use transhume_sim::experiment::{self, EXPERIMENTS, ReplayOptions, Table};
use transhume_sim::trace::Format;

/// What else may be asked for.
#[derive(clap::Args)]
pub(crate) struct SideShow {
    /// Carry out an experiment instead and print its table.
    #[arg(long, value_name = "NAME", value_parser = parse_experiment)]
    experiment: Option<&'static str>,
    /// Replay a trace on modelled devices instead; `-` reads it from the standard input.
    #[arg(long, value_name = "FILE", requires = "format")]
    replay: Option<PathBuf>,
    /// How the trace is written down: spc, msr, blkparse or plain (`time_us,op,offset_bytes,length_bytes`).
    #[arg(long, value_parser = parse_format)]
    format: Option<Format>,
    /// Replay only this volume of the trace (an SPC unit, an MSR disk, a device's minor number).
    #[arg(long)]
    volume: Option<u32>,
    /// Replay as fast as answers come, with so many requests outstanding, instead of at the trace's times.
    #[arg(long, value_name = "COUNT")]
    closed_loop: Option<usize>,
}

fn parse_experiment(name: &str) -> std::result::Result<&'static str, String> {
    experiment::find(name).map(|found| found.name).ok_or_else(|| format!("no experiment `{name}`: see --list"))
}

fn parse_format(word: &str) -> std::result::Result<Format, String> {
    word.parse().map_err(|error: Error| error.to_string())
}

/// Names the experiments.
pub(crate) fn list() {
    EXPERIMENTS.iter().for_each(|found| println!("{:<16} {}", found.name, found.about));
}

impl SideShow {
    /// Carries out what was asked for; `None` if nothing was.
    pub(crate) fn play(&self, seed: u64, clock: &dyn Env) -> Option<ExitCode> {
        Some(match self.table(seed)? {
            Ok(table) => {
                println!("{table}\n{:.1} s of this machine's time", clock.now().0.as_secs_f64());
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("{}", error.chain());
                ExitCode::FAILURE
            }
        })
    }

    fn table(&self, seed: u64) -> Option<Result<Table>> {
        if let Some(name) = self.experiment {
            return Some(experiment::find(name).expect("the argument was checked").run(seed));
        }
        let (path, format) = (self.replay.as_ref()?, self.format?);
        let options = ReplayOptions { format, volume: self.volume, outstanding: self.closed_loop };
        if path.as_os_str() == "-" {
            return Some(experiment::replay(&options, std::io::stdin().lock(), seed));
        }
        let file = File::open(path).map_err(|error| Error::from_os(error, format!("opening {}", path.display())));
        Some(file.and_then(|file| experiment::replay(&options, BufReader::new(file), seed)))
    }
}
