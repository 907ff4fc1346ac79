//! fio on the export of a volume: the load of the paper's figure 5, and what it was answered.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use transhume_guest::process::guarded;

use crate::server::path_word;

/// How many files the load has, each with a job of its own.
pub(super) const AREAS: u64 = 4;
/// What one job has in flight.
pub(super) const DEPTH: u32 = 32;
/// How long the intervals are over which fio counts.
pub(super) const INTERVAL_MS: u64 = 250;
/// How long it may take to end once it was told to.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A running fio. Dropping it ends it.
pub(super) struct Load {
    fio: Child,
    log: PathBuf,
    said: PathBuf,
}

/// What was answered in one interval, in requests a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Answered {
    /// When the interval ended, in milliseconds since 1970.
    pub(super) unix_ms: f64,
    pub(super) reads: f64,
    pub(super) writes: f64,
}

impl Load {
    /// Starts it on the export at `uri`: areas of `area_mib`, the first `first_mib` behind the volume's beginning. What it writes goes to files
    /// in `folder` that begin with `name`.
    pub(super) fn start(
        uri: &str,
        (first_mib, area_mib): (u64, u64),
        folder: &Path,
        name: &str,
    ) -> anyhow::Result<Self> {
        let at = |what: &str| folder.join(format!("{name}{what}"));
        let (jobs, said) = (at(".fio"), at(".said"));
        std::fs::write(&jobs, jobs_of(uri, (first_mib, area_mib), &at(""))).context("writing fio's jobs")?;
        let out = std::fs::File::create(&said).context("making fio's output")?;
        let errors = out.try_clone().context("sharing fio's output")?;
        let fio = guarded(Path::new("fio"))
            .arg(&jobs)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(errors)
            .spawn()
            .context("starting fio: run `make setup`")?;
        Ok(Self { fio, log: at("_iops.log"), said })
    }

    /// Has it end.
    pub(super) fn stop(&self) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.fio), Signal::INT).context("stopping fio")
    }

    /// Waits for its end, and gives what it was answered.
    pub(super) fn finish(mut self) -> anyhow::Result<Vec<Answered>> {
        let end = Instant::now() + END_LIMIT;
        while self.fio.try_wait().context("asking for a child")?.is_none() {
            if Instant::now() > end {
                bail!("fio does not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let said = std::fs::read_to_string(&self.said).unwrap_or_default();
        let log = std::fs::read_to_string(&self.log).with_context(|| format!("fio has left no log: {said}"))?;
        if let Some(error) = said.lines().find(|line| line.contains("error=")) {
            eprintln!("    fio: {error}");
        }
        parse(&log)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It has most likely ended.
        let _ = self.fio.kill();
        let _ = self.fio.wait();
    }
}

fn jobs_of(uri: &str, (first_mib, area_mib): (u64, u64), log: &Path) -> String {
    let mut jobs = format!(
        "[global]\nioengine=nbd\nuri={uri}\nrw=randrw\nrwmixread=80\nbs=4k\niodepth={DEPTH}\nsize={area_mib}m\n\
         norandommap\nrandom_distribution=zoned:50/5:30/15:20/80\nrandrepeat=0\ntime_based\nruntime=3600\nthread\n\
         log_avg_msec={INTERVAL_MS}\nlog_unix_epoch=1\nper_job_logs=0\nwrite_iops_log={}\n",
        path_word(log)
    );
    for area in 0..AREAS {
        // Writing to a string does not fail.
        let _ = write!(jobs, "[file{}]\noffset={}m\n", area + 1, first_mib + area * area_mib);
    }
    jobs
}

/// Adds up the jobs' lines: when an interval has ended, how many requests a second were answered in it, and whether they wrote.
fn parse(log: &str) -> anyhow::Result<Vec<Answered>> {
    let mut intervals = std::collections::BTreeMap::<u64, (f64, f64)>::new();
    for line in log.lines() {
        let mut fields = line.split(',').map(str::trim);
        let mut next = || fields.next().and_then(|field| field.parse::<u64>().ok());
        let (Some(unix_ms), Some(rate), Some(direction)) = (next(), next(), next()) else {
            bail!("fio's log has the line {line}");
        };
        let (reads, writes) = intervals.entry(unix_ms / INTERVAL_MS).or_default();
        *(if direction == 0 { reads } else { writes }) += rate as f64;
    }
    let answered = |(interval, (reads, writes))| Answered { unix_ms: (interval * INTERVAL_MS) as f64, reads, writes };
    Ok(intervals.into_iter().map(answered).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_all_jobs_are_added_up() {
        let log = "1000, 10, 0, 4096, 0\n1001, 20, 0, 4096, 0\n1000, 5, 1, 4096, 0\n1250, 7, 0, 4096, 0\n";
        let answered = parse(log).expect("a log");
        let first = Answered { unix_ms: 1000.0, reads: 30.0, writes: 5.0 };
        assert_eq!(answered, [first, Answered { unix_ms: 1250.0, reads: 7.0, writes: 0.0 }]);
        assert!(parse("nonsense").is_err(), "a line that is none was taken");
    }
}
