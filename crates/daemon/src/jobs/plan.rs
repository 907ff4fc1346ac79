//! What a move would cost, said before it begins.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, MoveRequest, Plan, PlanRequest};
use backends::Retiring;
use block::Bytes;
use migrate::{Forecast, MoveOptions, OnNoConverge, Strategy};

use super::forecast::{MoveForecast, SurveyDepth, micros};
use super::start::{destination, refuse_reserve};
use crate::daemon::Daemon;
use crate::free_space::Needs;
use crate::location::{Destination, JobTarget, require_here, require_local};
use crate::places::{Use, User};
use crate::problem::Result;
use crate::volume::Volume;

/// What the figures of every plan rest on.
fn general_notes(move_forecast: &MoveForecast) -> Vec<String> {
    let mut notes = Vec::new();
    if !move_forecast.is_complete {
        notes.push("the volume has too many holes to look at all of them: the rest counts as data".to_owned());
    }
    notes.push(match move_forecast.rate < move_forecast.measured {
        true if move_forecast.carried == Some(move_forecast.rate) => format!(
            "the time follows from what the network to the other host carries, {}/s, if nobody else uses it",
            Bytes(move_forecast.rate)
        ),
        true if move_forecast.shown == Some(move_forecast.rate) => {
            format!(
                "the last move to that place went at {}/s, slower than the source was read",
                Bytes(move_forecast.rate)
            )
        }
        true => "the time follows from the bandwidth that was given".to_owned(),
        false => format!(
            "the source was read at {}/s for a moment; a slower target makes the move slower",
            Bytes(move_forecast.measured)
        ),
    });
    notes.push(match move_forecast.has_seen_stall {
        true => "the stall is the longest of the last moves of this daemon".to_owned(),
        false => "the stall is an estimate: this daemon has not moved anything yet".to_owned(),
    });
    notes
}

/// What is to be known of a strategy that buffers.
fn buffer_note(options: &MoveOptions, forecast: &Forecast) -> Option<String> {
    let buffer = options.buffer()?;
    let drain = forecast.drain;
    Some(format!(
        "the target may be {buffer} behind; before the switchover that is written there, which takes about {drain:.1?} \
         while the guest works and is slowed down to the target's pace"
    ))
}

/// Whether the deadline can be kept.
fn deadline_note(options: &MoveOptions, forecast: &Forecast) -> Option<String> {
    let deadline = Duration::from_millis(options.deadline_ms?).as_secs_f64();
    let (least, most) = forecast.seconds_between;
    match deadline {
        deadline if deadline < least => {
            Some(format!("the deadline of {deadline:.0} s cannot be kept: it takes {least:.0} s at least"))
        }
        deadline if deadline < most => {
            Some(format!("the deadline of {deadline:.0} s is at risk: it may take {most:.0} s"))
        }
        _ => None,
    }
}

/// What is to be known of a strategy that copies in passes.
fn tracking_notes(options: &MoveOptions, forecast: &Forecast) -> Vec<String> {
    if !options.strategy.holds_for_copy() {
        return Vec::new();
    }
    let mut notes = vec![
        "passes and stall hold for a guest that writes anywhere; one that writes to few places needs less".to_owned(),
        "how long what is dirty takes was seen of the source; a target slower than it takes longer".to_owned(),
    ];
    if !forecast.converges {
        let then = match options.on_no_converge {
            _ if forecast.gives_up => "the move would end with the guest on the source",
            OnNoConverge::Mirror if options.strategy.iterates() => "it would go on as a mirror",
            _ => "the guest would be held for the rest",
        };
        notes.push(format!("{} would not converge under what the guest writes now: {then}", options.strategy));
    }
    notes
}

impl Daemon {
    /// What the move would cost. Nothing is changed, and nothing is left behind.
    pub(crate) async fn plan(self: &Arc<Self>, name: &str, request: PlanRequest) -> Result<Plan> {
        let volume = self.volume(name)?;
        let source = volume.require_up()?.device();
        let request = request.request;
        let options = super::to_options(&request)?;
        let to = destination(&volume, &request.to)?;
        let refusal = self.refusal(&volume, &request, &options, &to).await;
        let total = source.size();
        let carried = match &to {
            Destination::Host { host, volume: name } if refusal.is_none() => {
                let target = self.remote_target(&volume, (host.clone(), name.clone()), &options, &request)?;
                self.capacity_to(&target).await
            }
            _ => None,
        };
        let move_forecast = self.forecast_move(&volume, &request, &options, carried, SurveyDepth::CLOSE).await?;
        self.keep_plan(&volume, &request, &move_forecast);
        let MoveForecast { data, rate, write_bytes, forecast, .. } = move_forecast;
        let mut notes = general_notes(&move_forecast);
        notes.extend(tracking_notes(&options, &forecast));
        notes.extend(buffer_note(&options, &forecast));
        notes.extend(deadline_note(&options, &forecast));
        notes.extend(self.source_note(&volume, &request));
        Ok(Plan {
            volume: volume.name.clone(),
            source: volume.document().backend.to_string(),
            target: to.to_string(),
            bytes_total: total.get(),
            bytes_to_copy: data.get(),
            bytes_zero: total.saturating_sub(data).get(),
            guest_write_bytes_per_second: write_bytes,
            copy_bytes_per_second: rate,
            seconds: forecast.seconds,
            seconds_min: forecast.seconds_between.0,
            seconds_max: forecast.seconds_between.1,
            passes: forecast.passes,
            converges: forecast.converges,
            stall_us: micros(forecast.downtime),
            notes,
            refusal,
        })
    }

    /// What would keep the source from being put out of the way after the move.
    fn source_note(&self, volume: &Volume, request: &MoveRequest) -> Option<String> {
        let document = volume.document();
        let path = document.backend.local_path().filter(|_| !request.shared)?;
        let identity = volume.with_backend(|open_backend| open_backend.identity()).flatten();
        let source = Retiring {
            identity: identity.as_ref(),
            volume: Some(&volume.name),
            ..Retiring::by_name(path, document.epoch)
        };
        let obstacle = self.backends.obstacle(&source)?;
        Some(format!(
            "the move would end as failed although the target holds the volume: the old source cannot be put out of the way, \
             for {}; before the move: {}",
            obstacle.what(),
            obstacle.hint()
        ))
    }

    /// What would make the move be refused now.
    async fn refusal(
        self: &Arc<Self>,
        volume: &Volume,
        request: &MoveRequest,
        options: &MoveOptions,
        to: &Destination,
    ) -> Option<Error> {
        if let Err(error) = self.check_persistence(volume, request) {
            return Some(error);
        }
        if let Err(error) = refuse_reserve(request, matches!(to, Destination::Host { .. })) {
            return Some(error);
        }
        let backend = volume.document().backend.clone();
        if let Err(error) = require_here(&backend, "it cannot be moved from here") {
            return Some(error);
        }
        if let Err(error) = self.check_layers(volume, request, options.strategy) {
            return Some(error);
        }
        if let Err(error) = self.check_surrogate(volume, request, options.strategy) {
            return Some(error);
        }
        let spec = match to {
            Destination::Local(spec) => spec,
            Destination::Host { host, volume: name } => {
                if let (false, Err(error)) =
                    (request.shared, require_local(&backend, "it cannot go to another host from there"))
                {
                    return Some(error);
                }
                let target = self.remote_target(volume, (host.clone(), name.clone()), options, request);
                if let Err(error) = self.check_arbiter().await {
                    return Some(error);
                }
                return match target {
                    Ok(target) => self.remote_refusal(&target, &volume.name).await,
                    Err(error) => Some(error),
                };
            }
            Destination::Foreign(uri) => {
                return self.make_foreign_ready(volume, uri, request.overwrite, options).await.err();
            }
        };
        // A target that may be overwritten is not prepared just to see whether that works: what it holds stays.
        if request.overwrite && spec.path().exists() {
            let user = User::Volume(volume.name.clone());
            if let Err(error) = self.require_separate(spec.path(), &user, Use::Overwritten).await {
                return Some(error);
            }
            return self.check_overwritten(volume, spec).err();
        }
        match self.prepare(volume, spec.clone(), false).await {
            Ok((prepared, _place)) => {
                self.discard_unused(&JobTarget::Local(prepared), &[]).await;
                let size = volume.slot()?.device().size();
                match options.strategy {
                    Strategy::Snapshot => self.overlays_refused(volume, size, spec.path()).err(),
                    _ => None,
                }
            }
            Err(error) => Some(error),
        }
    }

    /// Whether there is no place or no room for overlays.
    fn overlays_refused(&self, volume: &Volume, size: Bytes, target: &Path) -> Result<()> {
        let mut needs = Needs::default();
        crate::overlays::add_needs(&*self.backends, &volume.document(), size, target, &mut needs)?;
        needs.check()
    }
}
