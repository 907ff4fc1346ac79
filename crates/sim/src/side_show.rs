//! What the program does besides playing seeds: experiments and replays.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use block::{Error, Result};
use env::Env;
use transhume_sim::experiment::esx::{self, EvaluationOptions};
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
    /// Repeat the ESX paper's evaluation instead and write its report, HTML and JSON, into this directory.
    #[arg(long, value_name = "DIRECTORY")]
    paper_esx: Option<PathBuf>,
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

impl SideShow {
    /// Carries out what was asked for; `None` if nothing was.
    pub(crate) fn play(&self, seed: u64, jobs: usize, clock: &dyn Env) -> Option<ExitCode> {
        if let Some(directory) = &self.paper_esx {
            return Some(match self.evaluate(directory, seed, jobs, clock) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("{}", error.chain());
                    ExitCode::FAILURE
                }
            });
        }
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

    fn evaluate(&self, directory: &Path, seed: u64, jobs: usize, clock: &dyn Env) -> Result<()> {
        let only = if self.only.is_empty() { String::new() } else { format!(" --only {}", self.only.join(",")) };
        let command = format!("cargo xtask paper-esx --scale {} --seed {seed}{only}", self.scale);
        let options = EvaluationOptions { scale: self.scale, only: self.only.clone(), seed, jobs, command };
        let evaluation = esx::evaluate(&options, &|line| eprintln!("{line}"))?;
        let write = |name: &str, text: String| -> Result<_> {
            let path = directory.join(name);
            std::fs::write(&path, text)
                .map_err(|error| Error::from_os(error, format!("writing {}", path.display())))?;
            Ok(path)
        };
        std::fs::create_dir_all(directory)
            .map_err(|error| Error::from_os(error, format!("making {}", directory.display())))?;
        let page = write("paper-esx.html", evaluation.html())?;
        let document = write("paper-esx.json", evaluation.json()?)?;
        println!("{}", evaluation.text());
        println!("{}\n{}", page.display(), document.display());
        println!("{:.0} s of this machine's time", clock.now().0.as_secs_f64());
        Ok(())
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
