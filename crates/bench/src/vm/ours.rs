//! A move by `transhume vm move`.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;
use transhume_guest::Side;

use super::felt::{Ended, Judged};
use super::moment::{Witness, now_unix_ms};
use super::place::{NAME, PATIENCE, Place};

const POLL: Duration = Duration::from_millis(20);

/// A move that was ordered.
pub(crate) struct Ordered {
    began_unix_ms: f64,
    source: Witness,
}

/// A move that has come to its end.
pub(crate) struct Done {
    /// From the order to the end.
    pub(crate) seconds: f64,
    /// When QEMU stopped the guest at the source, in milliseconds since 1970.
    pub(crate) stopped_unix_ms: f64,
    /// When QEMU ran it at the target.
    pub(crate) ran_unix_ms: f64,
    /// What the daemon says of it.
    pub(crate) shown: Value,
}

impl Ordered {
    /// Orders the move of the place's guest to B.
    pub(crate) fn new(place: &Place, options: &[&str]) -> anyhow::Result<Self> {
        let source = Witness::of(place.guest.folder())?;
        let began_unix_ms = now_unix_ms();
        let words = [&["vm", "move", NAME, "--to", Side::B.name(), "--detach"], options].concat();
        place.hosts.daemon(Side::A).json(&words)?;
        Ok(Self { began_unix_ms, source })
    }

    /// When it was ordered, in milliseconds since 1970.
    pub(crate) fn began_unix_ms(&self) -> f64 {
        self.began_unix_ms
    }

    /// Follows the guest to the other host, and waits until the move is done.
    pub(crate) fn follow(mut self, place: &mut Place) -> anyhow::Result<Done> {
        let folder = place.folder_there()?;
        let end = Instant::now() + PATIENCE;
        // The new QEMU listens before the guest is there, but not before the disks are copied.
        while !folder.join("workload.sock").exists() || !folder.join("qmp2.sock").exists() {
            let shown = move_shown(place)?;
            if shown["phase"] == "over" || Instant::now() > end {
                bail!("the move has come to nothing: {shown}\n{}", place.logs());
            }
            std::thread::sleep(POLL);
        }
        let mut target = Witness::of(&folder)?;
        place.guest.follow(&folder)?;
        let shown = place.hosts.daemon(Side::A).json(&["vm", "watch", NAME])?;
        if shown["state"] != "done" {
            bail!("the move has come to nothing: {shown}\n{}", place.logs());
        }
        Ok(Done {
            seconds: self.seconds_of(&shown),
            stopped_unix_ms: self.source.when("STOP")?,
            ran_unix_ms: target.when("RESUME")?,
            shown,
        })
    }

    /// Waits until the move is over, whatever comes of it; gives its seconds, and what the daemon says.
    pub(crate) fn wait(self, place: &Place) -> anyhow::Result<(f64, Value)> {
        // Whether it was done is told by what is shown of it.
        let _ = place.hosts.daemon(Side::A).ask(&["vm", "watch", NAME])?;
        let shown = move_shown(place)?;
        Ok((self.seconds_of(&shown), shown))
    }

    fn seconds_of(&self, shown: &Value) -> f64 {
        let time = |name: &str| shown[name].as_f64().unwrap_or(f64::NAN);
        (time("started_unix_ms") + time("elapsed_ms") - self.began_unix_ms) / 1e3
    }
}

/// What the source's daemon says of the guest's last move.
fn move_shown(place: &Place) -> anyhow::Result<Value> {
    Ok(place.hosts.daemon(Side::A).json(&["vm", "show", NAME])?["last_move"].clone())
}

/// The options of a move that compares as little as QEMU does.
pub(super) fn options(strategy: &str, channels: u8, downtime_limit_ms: u64) -> Vec<String> {
    let (channels, limit) = (channels.to_string(), format!("{downtime_limit_ms}ms"));
    let words = ["--verify", "off", "--strategy", strategy, "--channels", &channels, "--downtime-limit", &limit];
    words.map(str::to_owned).to_vec()
}

/// Asks what the move would be.
pub(super) fn plan(place: &Place, options: &[String]) -> anyhow::Result<Value> {
    let options = options.iter().map(String::as_str);
    let words: Vec<&str> = ["vm", "plan", NAME, "--to", Side::B.name()].into_iter().chain(options).collect();
    let plan = place.hosts.daemon(Side::A).json(&words)?;
    if std::env::var_os("TRANSHUME_BENCH_LOGS").is_some() {
        eprintln!("{plan}");
    }
    Ok(plan)
}

/// How far the forecast of a move was off.
fn judge(shown: &Value) -> Option<Judged> {
    let figure = |name: &str| shown[name].as_f64();
    let (seconds, took) = (figure("forecast_seconds")?, figure("elapsed_ms")? / 1e3);
    let downtime = figure("forecast_downtime_ms")? / figure("downtime_ms")?;
    let seconds_percent = (seconds / took - 1.0).abs() * 100.0;
    Some(Judged { seconds_percent, downtime_factor: downtime.max(1.0 / downtime) })
}

/// Asks what a move from one host to the other would be, makes it, and gives how far the forecast was off.
pub(super) fn judged(place: &mut Place, (from, to): (Side, Side), options: &[String]) -> anyhow::Result<Judged> {
    let daemon = place.hosts.daemon(from);
    let words: Vec<&str> = [NAME, "--to", to.name()].into_iter().chain(options.iter().map(String::as_str)).collect();
    let plan = [&["vm", "plan"], &words[..]].concat();
    let end = Instant::now() + PATIENCE;
    // It is refused for as long as the host still hands the disks of the move before to QEMU.
    while daemon.ask(&plan)?.is_err() && Instant::now() < end {
        std::thread::sleep(POLL);
    }
    let shown = daemon.json(&[&["vm", "move", "--delete-source"], &words[..]].concat())?;
    let Some(judged) = judge(&shown).filter(|_| shown["state"] == "done") else {
        bail!("the move has come to nothing: {shown}\n{}", place.logs());
    };
    let Judged { seconds_percent, downtime_factor } = judged;
    eprintln!(
        "    to {}: {} s expected, {} ms taken; downtime {} ms expected, {} taken: off by {seconds_percent:.0} %, {downtime_factor:.2} x",
        to.name(),
        shown["forecast_seconds"],
        shown["elapsed_ms"],
        shown["forecast_downtime_ms"],
        shown["downtime_ms"]
    );
    let folder = place.folder_at(to)?;
    place.guest.leave();
    place.guest.follow(&folder)?;
    Ok(judged)
}

/// Makes a move that may not end by itself, and follows the guest if it does. Whether it was done, and in how many seconds. The guest
/// is as it was, whatever came of it.
pub(super) fn may_end(place: &mut Place, options: &[&str]) -> anyhow::Result<(bool, f64)> {
    let (seconds, shown) = Ordered::new(place, options)?.wait(place)?;
    let is_done = shown["state"] == "done";
    if !is_done && shown["error"]["code"] != "no-convergence" {
        bail!("the move has failed otherwise: {shown}\n{}", place.logs());
    }
    eprintln!("    {} in {seconds:.1} s, {}", shown["state"], shown["memory"]);
    if is_done {
        let folder = place.folder_there()?;
        place.guest.follow(&folder)?;
    }
    place.verify()?;
    Ok((is_done, seconds))
}

/// When the source's daemon began to copy the memory, in milliseconds since 1970: it logs each phase with its time of the day. It
/// was less than a day before `later`.
fn memory_began_unix_ms(place: &Place, later: f64) -> anyhow::Result<f64> {
    const DAY_MS: f64 = 86_400_000.0;
    let log = place.hosts.daemon(Side::A).log();
    let line = log.lines().find(|line| line.contains("a VM moves") && line.contains("copying memory"));
    let time =
        line.and_then(|line| line.split_once('T')?.1.split_once('Z')).context("the daemon says when it begins")?.0;
    let parts: Vec<f64> = time.split(':').map(str::parse).collect::<Result<_, _>>().context("a time of the day")?;
    let [hours, minutes, seconds] = parts[..] else { bail!("no time of the day: {time}") };
    let of_day = ((hours * 60.0 + minutes) * 60.0 + seconds) * 1e3;
    Ok(later - (later % DAY_MS - of_day).rem_euclid(DAY_MS))
}

/// Moves the guest.
pub(super) fn transhume(place: &mut Place, options: &[String]) -> anyhow::Result<Ended> {
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let done = Ordered::new(place, &options)?.follow(place)?;
    if std::env::var_os("TRANSHUME_BENCH_LOGS").is_some() {
        eprintln!("{}", done.shown);
        eprintln!("STOP {:.3}, RESUME {:.3}\n{}", done.stopped_unix_ms, done.ran_unix_ms, place.logs());
    }
    let stopped_ms = done.ran_unix_ms - done.stopped_unix_ms;
    let memory_seconds = (done.ran_unix_ms - memory_began_unix_ms(place, done.stopped_unix_ms)?) / 1e3;
    let rounds = done.shown["memory"]["iterations"].as_u64().unwrap_or_default();
    Ok(Ended { seconds: done.seconds, stopped_ms, memory_seconds, rounds, forecast: judge(&done.shown), keeps: None })
}
