//! Waiting for moves, with a bar for those who look.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;

use api::Client;
use api::v1::{Error, ErrorCode, Job, JobState, Result};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::{say, show};

/// How often progress is asked for.
const INTERVAL: Duration = Duration::from_millis(250);
/// How long a daemon that is away is waited for.
const AWAY_MAX: Duration = Duration::from_secs(600);

/// One line of progress.
struct Bar {
    bar: ProgressBar,
}

impl Bar {
    fn new(volume: &str) -> Self {
        let bar = ProgressBar::new(1000);
        let style = ProgressStyle::with_template("{prefix} [{bar:30}] {percent:>3} %  {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        bar.set_prefix(volume.to_owned());
        Self { bar }
    }

    fn show(&self, job: &Job) {
        let Some(progress) = &job.progress else {
            self.bar.set_message(job.state.name());
            return;
        };
        self.bar.set_position((progress.percent * 10.0) as u64);
        let mut parts = vec![match job.state {
            JobState::Running => progress.phase.clone(),
            state => state.name().to_owned(),
        }];
        if job.state == JobState::Running {
            parts.push(show::rate(progress.rate as f64));
            parts.extend(show::eta(progress).map(|eta| format!("{eta} left")));
            parts.extend(progress.rates.as_ref().and_then(show::left_by_others));
        }
        parts.extend(job.guest.as_ref().map(show::guest));
        self.bar.set_message(parts.join(", "));
    }
}

/// Waits until `job` is over, with a bar if somebody looks. Ctrl-C leaves the move running.
pub(crate) async fn wait(client: &Client, job: &Job, json: bool) -> Result<Job> {
    let bar = Bar::new(&job.volume);
    if json || !std::io::stderr().is_terminal() {
        bar.bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let following = follow(client, job.id, &bar);
    let over = tokio::select! {
        over = following => over?,
        _ = tokio::signal::ctrl_c() => {
            bar.bar.abandon();
            say::aside(&format!(
                "the move goes on; `transhume watch {0}` shows it, `transhume cancel {0}` undoes it",
                job.volume
            ));
            std::process::exit(130);
        }
    };
    bar.bar.finish_and_clear();
    Ok(over)
}

async fn follow(client: &Client, id: u64, bar: &Bar) -> Result<Job> {
    let mut away = Duration::ZERO;
    let mut is_stuck = false;
    loop {
        match client.job(id, INTERVAL).await {
            Ok(job) if job.state.is_over() => return Ok(job),
            Ok(job) => {
                away = Duration::ZERO;
                bar.show(&job);
                let lost = job.progress.as_ref().filter(|progress| progress.phase == "target-lost");
                if let (Some(progress), false) = (lost, is_stuck) {
                    let why = progress.last_error.as_deref().unwrap_or("no reason known");
                    let hint =
                        format!("`transhume resume {0}` tries again, `transhume cancel {0}` undoes it", job.volume);
                    bar.bar.suspend(|| say::aside(&format!("the target was lost, the guest goes on: {why} - {hint}")));
                }
                is_stuck = lost.is_some();
            }
            Err(error) if error.code == ErrorCode::DaemonUnreachable && away < AWAY_MAX => {
                if away.is_zero() {
                    bar.bar.suspend(|| say::aside("the daemon is away; the move resumes when it is back"));
                }
                away += INTERVAL;
                tokio::time::sleep(INTERVAL).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Shows the moves under way (of one volume, or all) until there are none. Gives what the program exits with: what the first of
/// them that did not end well says.
pub(crate) async fn watch(client: &Client, name: Option<&str>, json: bool) -> Result<u8> {
    if let Some(name) = name {
        client.volume(name).await?;
    }
    let is_seen = std::io::stderr().is_terminal() && !json;
    let bars = MultiProgress::new();
    let mut shown: BTreeMap<u64, Bar> = BTreeMap::new();
    let mut code = 0;
    loop {
        let mut jobs = client.jobs(false).await?;
        jobs.retain(|job| name.is_none_or(|name| job.volume == name));
        for (id, bar) in std::mem::take(&mut shown) {
            if jobs.iter().any(|job| job.id == id) {
                shown.insert(id, bar);
                continue;
            }
            bar.bar.finish_and_clear();
            let over = client.job(id, Duration::ZERO).await?;
            say_end(&over, json)?;
            if let Some(error) = &over.error {
                say::aside(&format!("transhume: {error}"));
                code = if code == 0 { error.exit_code } else { code };
            }
        }
        if jobs.is_empty() {
            return Ok(code);
        }
        for job in &jobs {
            let bar = shown.entry(job.id).or_insert_with(|| {
                let bar = Bar::new(&job.volume);
                Bar { bar: bars.add(bar.bar) }
            });
            bar.show(job);
        }
        if json {
            say::line(&serde_json::to_string(&jobs).map_err(not_json)?);
        } else if !is_seen {
            say::line(&show::jobs(&jobs));
        }
        tokio::time::sleep(if is_seen { INTERVAL } else { Duration::from_secs(1) }).await;
    }
}

fn say_end(job: &Job, json: bool) -> Result<()> {
    if json {
        say::line(&serde_json::to_string(&[job]).map_err(not_json)?);
    } else {
        say::line(&crate::report::to_words(job));
    }
    Ok(())
}

fn not_json(error: serde_json::Error) -> Error {
    Error::new(ErrorCode::Internal, format!("the answer is no JSON: {error}"))
}
