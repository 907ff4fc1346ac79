//! What the program does besides playing seeds: experiments and replays.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use block::{Error, Result};
use env::Env;
use transhume_sim::experiment::esx::{self, Evaluation, EvaluationOptions, RealRuns};
use transhume_sim::experiment::{self, EXPERIMENTS, ReplayOptions, Table};
use transhume_sim::trace::Format;

/// What else may be asked for.
#[derive(clap::Args)]
pub(crate) struct ExperimentArguments {
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
    /// Repeat the ESX paper's evaluation instead and write its report, HTML and JSON, into this directory.
    #[arg(long, value_name = "DIRECTORY")]
    paper_esx: Option<PathBuf>,
    /// Make the same page of moves on real files, from what `cargo xtask paper-esx-real` has measured.
    #[arg(long, value_name = "FILE", requires = "report_to")]
    paper_esx_real: Option<PathBuf>,
    /// Where that page goes.
    #[arg(long, value_name = "DIRECTORY")]
    report_to: Option<PathBuf>,
    /// Sizes and limits of time are so many times smaller than the paper's.
    #[arg(long, value_name = "TIMES", default_value_t = 4, requires = "paper_esx")]
    scale: u64,
    /// Repeat these figures and tables only.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "paper_esx")]
    only: Vec<String>,
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
    let names: Vec<&str> = esx::figure_names().collect();
    println!("{:<16} of the ESX paper's evaluation: {}", "--paper-esx", names.join(", "));
}

impl ExperimentArguments {
    /// Carries out what was asked for; `None` if nothing was.
    pub(crate) fn play(&self, seed: u64, jobs: usize, clock: &dyn Env) -> Option<ExitCode> {
        let shown = match (&self.paper_esx, &self.paper_esx_real, &self.report_to) {
            (Some(directory), ..) => self.evaluate(directory, seed, jobs),
            (None, Some(measured), Some(directory)) => report_real(measured, directory),
            _ => self.table(seed)?.map(|table| println!("{table}")),
        };
        Some(match shown {
            Ok(()) => {
                println!("{:.1} s of this machine's time", clock.now().0.as_secs_f64());
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("{}", error.chain());
                ExitCode::FAILURE
            }
        })
    }

    fn evaluate(&self, directory: &Path, seed: u64, jobs: usize) -> Result<()> {
        let only = if self.only.is_empty() { String::new() } else { format!(" --only {}", self.only.join(",")) };
        let command = format!("cargo xtask paper-esx --scale {} --seed {seed}{only}", self.scale);
        let options = EvaluationOptions { scale: self.scale, only: self.only.clone(), seed, jobs, command };
        write_report(directory, "paper-esx", &esx::evaluate(&options, &|line| eprintln!("{line}"))?)
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

fn report_real(measured: &Path, directory: &Path) -> Result<()> {
    let text = std::fs::read_to_string(measured)
        .map_err(|error| Error::from_os(error, format!("reading {}", measured.display())))?;
    write_report(directory, "paper-esx-real", &RealRuns::parse(&text)?.evaluation())
}

/// Writes a page and a document for programs, and prints what is in them.
fn write_report(directory: &Path, name: &str, evaluation: &Evaluation) -> Result<()> {
    std::fs::create_dir_all(directory)
        .map_err(|error| Error::from_os(error, format!("making {}", directory.display())))?;
    println!("{}", evaluation.text());
    for (ending, text) in [("html", evaluation.html()), ("json", evaluation.json()?)] {
        let path = directory.join(format!("{name}.{ending}"));
        std::fs::write(&path, text).map_err(|error| Error::from_os(error, format!("writing {}", path.display())))?;
        println!("{}", path.display());
    }
    Ok(())
}
