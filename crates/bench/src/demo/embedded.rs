//! The demo without QEMU: the same verifying load over the daemon's own NBD export.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use transhume_guest::{Event, Interval, LoadResult};

use super::guest::step;
use super::report::DemoSummary;
use super::{Scene, felt, moved};
use crate::server::Transhumed;
use transhume_guest::process::guarded;

const NAME: &str = "demo";
const RATE: u32 = 2_000;
const PATIENCE: Duration = Duration::from_secs(90);

pub(super) fn play(scene: &Scene) -> anyhow::Result<DemoSummary> {
    let rate = scene.rate.unwrap_or(RATE);
    let mut summary = DemoSummary {
        offered: rate,
        scene: "a load over the daemon's own NBD export".into(),
        ..DemoSummary::default()
    };
    summary.disk = (scene.source_disk(), scene.target_disk(), scene.bytes);
    let daemon = Transhumed::start(&scene.programs, scene.source.path())?;
    let socket = scene.source.path().join("nbd.sock");
    daemon.attach(NAME, &scene.source_disk(), &socket, "")?;
    let mut load = Stand::start(scene, &socket, rate)?;
    std::thread::sleep(Duration::from_secs(1));

    step("before", &format!("{} s of load", scene.calm.as_secs()));
    let from = Instant::now();
    std::thread::sleep(scene.calm);
    summary.before = load.felt(from, Instant::now());

    step("move", "to the other volume, every chunk compared");
    let from = Instant::now();
    let report = daemon.move_to(NAME, &scene.target_disk(), &["--verify", "full"])?;
    let to = Instant::now();
    std::thread::sleep(Duration::from_millis(300));
    summary.during = load.felt(from, to + Duration::from_millis(200));
    moved(scene, &mut summary, report)?;

    step("after", &format!("{} s of load", scene.calm.as_secs()));
    let from = Instant::now();
    std::thread::sleep(scene.calm);
    summary.after = load.felt(from, Instant::now());

    step("verify", "the load reads the whole volume again");
    summary.load_result = load.finish()?;
    Ok(summary)
}

/// What the load has told so far.
#[derive(Default)]
struct Told {
    intervals: Vec<(Instant, Interval)>,
    load_result: LoadResult,
}

struct Stand {
    child: Child,
    told: Arc<Mutex<Told>>,
    listener: Option<std::thread::JoinHandle<()>>,
}

impl Stand {
    fn start(scene: &Scene, socket: &std::path::Path, rate: u32) -> anyhow::Result<Self> {
        let mut child = guarded(&scene.programs.join("nbd-load"))
            .arg(format!("socket={}", socket.display()))
            .arg(format!("export={NAME}"))
            .arg(format!("rate={rate}"))
            .args(["verify=1", "interval_ms=100", "flush_every=64"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the load")?;
        let output = child.stdout.take().expect("a pipe was asked for");
        let told = Arc::new(Mutex::new(Told::default()));
        let shared = Arc::clone(&told);
        let listener = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let mut told = shared.lock().unwrap_or_else(PoisonError::into_inner);
                let event = Event::parse(&line);
                if let Event::Interval(interval) = event {
                    told.intervals.push((Instant::now(), interval));
                }
                told.load_result.note(&event);
            }
        });
        Ok(Self { child, told, listener: Some(listener) })
    }

    fn felt(&self, from: Instant, to: Instant) -> super::Feeling {
        felt(&self.told.lock().unwrap_or_else(PoisonError::into_inner).intervals, from, to)
    }

    fn finish(&mut self) -> anyhow::Result<LoadResult> {
        let input = self.child.stdin.as_mut().expect("a pipe was asked for");
        writeln!(input, "stop").context("the load is gone")?;
        let end = Instant::now() + PATIENCE;
        while self.child.try_wait().context("waiting for the load")?.is_none() {
            if Instant::now() > end {
                bail!("the load does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some(listener) = self.listener.take() {
            listener.join().ok().context("the load's listener panicked")?;
        }
        Ok(self.told.lock().unwrap_or_else(PoisonError::into_inner).load_result.clone())
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
