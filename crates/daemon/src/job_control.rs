//! Pausing, resuming, cancelling and changing a move that is under way.

use std::time::Duration;

use api::v1::{self, Error, ErrorCode, Job, SetRequest};

use crate::daemon::{Daemon, show_job};
use crate::document::JobDocument;
use crate::jobs::refuse_reserve_above;
use crate::problem::{Result, invalid, of_backend};
use crate::volume::Volume;

/// A request that waits for a job is answered after this long at most.
const WAIT_MAX: Duration = Duration::from_secs(60);

impl Daemon {
    /// Pauses, resumes or cancels the move of a volume.
    pub(crate) async fn steer(&self, name: &str, action: &str) -> Result<Job> {
        let volume = self.volume(name)?;
        let job = volume.job().ok_or_else(|| no_job(name))?;
        match action {
            "pause" => {
                job.pause()?;
                change(&volume, |job| job.paused = true).await?;
            }
            "resume" => {
                // On record first: a move that waits for this word goes by what it finds there.
                change(&volume, |job| {
                    job.goes_on_disturbed |= std::mem::take(&mut job.disturbed);
                    job.paused = false;
                })
                .await?;
                job.resume();
            }
            "cancel" => {
                job.cancel()?;
                job.wait().await;
                let over = job.show();
                self.wait_for_others(&over).await;
                return match over.state {
                    v1::JobState::Cancelled => Ok(over),
                    _ => Err(Error::new(
                        ErrorCode::WrongState,
                        format!("the cancel came too late: the move of {name} is {}", over.state.name()),
                    )),
                };
            }
            _ => return Err(invalid(format!("a move cannot {action}"), "use pause, resume or cancel")),
        }
        Ok(show_job(&volume).unwrap_or_else(|| job.show()))
    }

    /// Changes a running move.
    pub(crate) async fn set(&self, name: &str, request: SetRequest) -> Result<Job> {
        let volume = self.volume(name)?;
        let job = volume.job().ok_or_else(|| no_job(name))?;
        if request == SetRequest::default() {
            return Err(invalid("nothing is to be changed", "give --bandwidth, --reserve or --deadline"));
        }
        let now = job.request();
        let wanted = |asked: Option<u64>, now| asked.map_or(now, |rate| Some(rate).filter(|rate| *rate > 0));
        let (bandwidth, reserve) = (wanted(request.bandwidth, now.bandwidth), wanted(request.reserve, now.reserve));
        let deadline_ms = wanted(request.deadline_ms, now.deadline_ms);
        if reserve != now.reserve && !job.goes_to_host() {
            let message = format!("the move of {name} does not go to another host's daemon: it has no reserve");
            return Err(invalid(message, "give --bandwidth or --deadline"));
        }
        reserve.map_or(Ok(()), |reserve| refuse_reserve_above(reserve, bandwidth))?;
        if request.bandwidth.is_some() {
            job.set_bandwidth(bandwidth);
        }
        job.set_reserve(reserve);
        if deadline_ms != now.deadline_ms {
            job.set_deadline(deadline_ms);
        }
        change(&volume, |job| {
            (job.request.bandwidth, job.request.reserve) = (bandwidth, reserve);
            job.request.deadline_ms = deadline_ms;
            (job.record.options.bandwidth, job.record.options.deadline_ms) = (bandwidth, deadline_ms);
        })
        .await?;
        Ok(show_job(&volume).unwrap_or_else(|| job.show()))
    }

    /// One job, after `wait` or as soon as it is over.
    pub(crate) async fn show_job_after(&self, id: u64, wait: Duration) -> Result<Job> {
        let Some((volume, job)) = self.job(id) else {
            return self.history.find(id).ok_or_else(|| {
                Error::new(ErrorCode::NotFound, format!("there is no job {id}"))
                    .with_hint("`transhume jobs` shows those that there are")
            });
        };
        env::timeout(&*self.env, wait.min(WAIT_MAX), job.wait()).await;
        let mut shown = job.show();
        shown.guest = Some(volume.gauge.guest_io());
        Ok(shown)
    }
}

async fn change(volume: &Volume, change: impl FnOnce(&mut JobDocument) + Send) -> Result<()> {
    volume.journal.update_job(change).await.map_err(|error| of_backend(&error, "the volume's journal"))
}

fn no_job(name: &str) -> Error {
    Error::new(ErrorCode::WrongState, format!("{name} is not being moved"))
        .with_hint("`transhume status` shows what is under way")
}
