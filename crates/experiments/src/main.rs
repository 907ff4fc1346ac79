//! `transhume-experiments`: repeats papers in the simulator's world. `cargo xtask paper` and `cargo xtask sim` run it.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use block::{Error, ErrorKind, Result};
use clap::{Parser, Subcommand};
use env::{Env, RealEnv};
use sim::trace::Format;
use transhume_experiments::figure::{Evaluation, Verdict};
use transhume_experiments::papers::{self, PAPERS, Paper};
use transhume_experiments::replay::{ReplayOptions, replay};
use transhume_experiments::report;
use transhume_experiments::runs::EvaluationOptions;
use transhume_experiments::table::Table;
use transhume_experiments::tables::{self, EXPERIMENTS};

/// The papers, repeated in the simulator's world.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Repeat a paper's evaluation; writes one HTML page with plots, and JSON.
    Paper(PaperArguments),
    /// Make the same page of moves on real files, from what was measured.
    #[command(hide = true)]
    PaperReal(RealArguments),
    /// Carry out an experiment that is a table, or replay a trace on modelled devices.
    Sim(TableArguments),
    /// Name the papers, their figures and the experiments.
    List,
}

/// Which paper, how large, what of it, and where to.
#[derive(clap::Args)]
struct PaperArguments {
    /// Which: esx, pmigrate, waio, iofollow or firepan.
    #[arg(value_parser = parse_paper)]
    name: &'static str,
    /// Sizes, caches and limits of time are so many times smaller than the paper's; 4 unless said otherwise, and 64 for firepan.
    #[arg(long)]
    scale: Option<u64>,
    /// Repeat these figures and tables only, such as figure-4,table-1.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Where all randomness is from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many scenes are played at once; otherwise one a core.
    #[arg(long)]
    jobs: Option<usize>,
    /// Of waio and iofollow: play the traces in this directory, too (.csv, .spc, .msr, or one of them with .zst).
    #[arg(long, value_name = "DIRECTORY")]
    traces: Option<PathBuf>,
    /// Where the report goes; `target/paper-NAME` unless said otherwise.
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
}

/// What was measured on real files.
#[derive(clap::Args)]
struct RealArguments {
    /// Of which paper.
    #[arg(value_parser = parse_paper)]
    name: &'static str,
    /// What was measured.
    #[arg(long, value_name = "FILE")]
    measured: PathBuf,
    /// Where the report goes.
    #[arg(long, value_name = "DIRECTORY")]
    out: PathBuf,
}

/// An experiment or a replay.
#[derive(clap::Args)]
#[group(id = "what", required = true, args = ["experiment", "replay"])]
struct TableArguments {
    /// Carry out an experiment and print its table.
    #[arg(long, value_name = "NAME", value_parser = parse_experiment)]
    experiment: Option<&'static str>,
    /// Replay a trace on modelled devices; `-` reads it from the standard input.
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
    /// Where all randomness is from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn parse_paper(name: &str) -> std::result::Result<&'static str, String> {
    let known: Vec<&str> = PAPERS.iter().map(|paper| paper.name).collect();
    papers::find(name).map(|paper| paper.name).ok_or_else(|| format!("no paper `{name}`, only {}", known.join(", ")))
}

fn parse_experiment(name: &str) -> std::result::Result<&'static str, String> {
    let known = || EXPERIMENTS.iter().map(|found| found.name).collect::<Vec<_>>().join(", ");
    tables::find(name).map(|found| found.name).ok_or_else(|| format!("no experiment `{name}`, only {}", known()))
}

fn parse_format(word: &str) -> std::result::Result<Format, String> {
    word.parse().map_err(|error: Error| error.to_string())
}

fn main() -> ExitCode {
    let clock = RealEnv::new();
    let outcome = match Arguments::parse().chore {
        Chore::Paper(arguments) => repeat(&arguments),
        Chore::PaperReal(arguments) => show_real(&arguments),
        Chore::Sim(arguments) => arguments.table().map(|table| {
            println!("{table}");
            ExitCode::SUCCESS
        }),
        Chore::List => {
            list();
            return ExitCode::SUCCESS;
        }
    };
    match outcome {
        Ok(code) => {
            println!("{:.1} s of this machine's time", clock.now().0.as_secs_f64());
            code
        }
        Err(error) => {
            eprintln!("{}", error.chain());
            ExitCode::FAILURE
        }
    }
}

fn list() {
    EXPERIMENTS.iter().for_each(|found| println!("{:<16} {}", found.name, found.about));
    for paper in PAPERS {
        println!("{:<16} {}: {}", format!("paper {}", paper.name), paper.about, (paper.figures)().join(", "));
    }
}

fn paper(name: &str) -> &'static Paper {
    papers::find(name).expect("the argument was checked")
}

/// Carries out a paper's evaluation; fails if something did not hold that nothing explains.
fn repeat(arguments: &PaperArguments) -> Result<ExitCode> {
    let PaperArguments { name, scale, only, seed, jobs, traces, out } = arguments;
    let scale = scale.unwrap_or(paper(name).scale);
    let chosen = if only.is_empty() { String::new() } else { format!(" --only {}", only.join(",")) };
    let with_traces = if traces.is_some() { " --traces DIRECTORY" } else { "" };
    let command = format!("cargo xtask paper {name} --scale {scale} --seed {seed}{chosen}{with_traces}");
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let jobs = jobs.unwrap_or(cores).max(1);
    let options = EvaluationOptions { scale, only: only.clone(), seed: *seed, jobs, traces: traces.clone(), command };
    let evaluation = (paper(name).evaluate)(&options, &|line| eprintln!("{line}"))?;
    let name = format!("paper-{name}");
    let out = out.clone().unwrap_or_else(|| Path::new("target").join(&name));
    write_report(&out, &name, &evaluation)?;
    let not_held = evaluation.count(Verdict::NotHeld);
    if not_held == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{not_held} results did not hold, and no experiment shows why");
    Ok(ExitCode::FAILURE)
}

fn show_real(arguments: &RealArguments) -> Result<ExitCode> {
    let RealArguments { name, measured, out } = arguments;
    let text = std::fs::read_to_string(measured)
        .map_err(|error| Error::from_os(error, format!("reading {}", measured.display())))?;
    let evaluate = paper(name).evaluate_real;
    let evaluate = evaluate
        .ok_or_else(|| Error::new(ErrorKind::Invalid, format!("nothing of {name} is repeated on real files")))?;
    write_report(out, &format!("paper-{name}-real"), &evaluate(&text)?)?;
    Ok(ExitCode::SUCCESS)
}

impl TableArguments {
    fn table(&self) -> Result<Table> {
        if let Some(name) = self.experiment {
            return tables::find(name).expect("the argument was checked").run(self.seed);
        }
        let (Some(path), Some(format)) = (&self.replay, self.format) else {
            return Err(Error::new(ErrorKind::Invalid, "a replay takes --replay FILE and --format FORMAT"));
        };
        let options = ReplayOptions { format, volume: self.volume, outstanding: self.closed_loop };
        if path.as_os_str() == "-" {
            return replay(&options, std::io::stdin().lock(), self.seed);
        }
        let file = File::open(path).map_err(|error| Error::from_os(error, format!("opening {}", path.display())))?;
        replay(&options, BufReader::new(file), self.seed)
    }
}

/// Writes a page and a document for programs, and prints what is in them.
fn write_report(directory: &Path, name: &str, evaluation: &Evaluation) -> Result<()> {
    std::fs::create_dir_all(directory)
        .map_err(|error| Error::from_os(error, format!("making {}", directory.display())))?;
    println!("{}", report::text(evaluation));
    for (ending, text) in [("html", report::html(evaluation)), ("json", report::json(evaluation)?)] {
        let path = directory.join(format!("{name}.{ending}"));
        std::fs::write(&path, text).map_err(|error| Error::from_os(error, format!("writing {}", path.display())))?;
        println!("{}", path.display());
    }
    Ok(())
}
