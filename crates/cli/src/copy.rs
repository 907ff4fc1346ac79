//! `transhume copy`, with a bar for those who look.

use std::io::IsTerminal;

use api::v1::Result;
use daemon::{CopyOutcome, CopyReport, CopyRequest, CopyStep};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::{CopyArgs, CopyVerifyArg};
use crate::path::absolute_backend;
use crate::say::print;
use crate::{say, show};

/// What an interrupted program exits with.
const INTERRUPTED: u8 = 130;

/// Copies, and gives what the program exits with.
pub(crate) fn run(args: &CopyArgs, json: bool) -> Result<u8> {
    let request = CopyRequest {
        source: absolute_backend(&args.source)?,
        to: absolute_backend(&args.to)?,
        overwrite: args.overwrite,
        bandwidth: args.bandwidth.map(|rate| rate.0),
        verify: args.verify == CopyVerifyArg::Full,
    };
    let bar = ProgressBar::new(1000);
    if json || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{msg} [{bar:30}] {percent:>3} %  {elapsed} {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    let copied = daemon::copy(&request, |CopyStep { compares, done, total }| {
        bar.set_length(total.get());
        bar.set_position(done.get());
        bar.set_message(if compares { "comparing" } else { "copying" });
    });
    bar.finish_and_clear();
    match copied? {
        CopyOutcome::Copied(report) => print(json, &report, || words(&report)).map(|()| 0),
        CopyOutcome::Interrupted { rest } => {
            let hint = "copy again, with --overwrite if the target is there and holds something";
            say::aside(&format!("transhume: interrupted; {rest} - {hint}"));
            Ok(INTERRUPTED)
        }
    }
}

fn words(report: &CopyReport) -> String {
    let CopyReport { source, target, bytes_total, bytes_copied, bytes_zero, seconds, verified } = report;
    let [total, copied, zero] = [bytes_total, bytes_copied, bytes_zero].map(|bytes| show::bytes(*bytes));
    let compared = if *verified { "; both were read again and are equal" } else { "" };
    format!("{source} is copied to {target}: {total} in {seconds:.1} s, {copied} of data, {zero} of zeroes{compared}")
}
