//! What is looked at before a move, and what is expected of it by that: closely for `plan`, in a moment for a move that
//! begins without one. What was expected stays with the job, beside what it took.

use std::time::Duration;

use api::v1::{MoveRequest, Prediction, Report, Verify};
use block::{Buffer, Bytes, Device, Extent};
use filters::MeterWindow;
use migrate::{Forecast, Known, LOOKS, MoveOptions, Scattered};

use super::JobHandle;
use super::rate_history::RateHistory;
use crate::audit::unix_ms;
use crate::daemon::Daemon;
use crate::open_backend::OpenBackend;
use crate::problem::{Result, of_backend};
use crate::rates::capacity;
use crate::volume::Volume;

/// In requests of this size the source is read to see how fast it is, as the copy does it.
const PROBE_PIECE: u64 = 1 << 20;
/// What is expected of the switchover when no move has shown it yet.
const STALL_US_EXPECTED: u64 = 2_000;
/// So many of the last moves say what a switchover takes.
const EARLIER_MAX: usize = 20;
/// What takes so much more or less than expected is as expected: of a move of 0.2 s nobody can say more.
const SECONDS_NEAR: f64 = 0.25;
/// What every move takes: its records, its flushes and the looks of whoever waits for it.
const SECONDS_LEAST: f64 = 0.05;
/// A plan is the prediction of the same move for so long.
const PLAN_AGE_MAX: Duration = Duration::from_secs(600);
/// A move waits no longer than this to be foretold.
const MOMENT: Duration = Duration::from_secs(1);

/// How closely a volume is looked at.
#[derive(Clone, Copy)]
pub(super) struct SurveyDepth {
    /// Looking for holes takes this long at most; what is not seen counts as data.
    holes: Duration,
    /// How much is read to see how fast the source is,
    probe_bytes: u64,
    /// and how long that may take.
    probe: Duration,
    /// How long each look at chunks that lie scattered takes.
    scattered: Duration,
    /// How long the guest is watched at least.
    guest: Duration,
}

impl SurveyDepth {
    /// What somebody asks for and waits for.
    pub(super) const CLOSE: Self = Self {
        holes: Duration::from_secs(3),
        probe_bytes: 64 << 20,
        probe: Duration::from_millis(500),
        scattered: Duration::from_millis(500),
        guest: Duration::from_millis(500),
    };
    /// Before a move, which waits for it.
    pub(super) const BRIEF: Self = Self {
        holes: Duration::from_millis(100),
        probe_bytes: 16 << 20,
        probe: Duration::from_millis(50),
        scattered: Duration::from_millis(50),
        guest: Duration::from_millis(50),
    };
}

/// What was seen, and what follows from it.
pub(super) struct MoveForecast {
    /// What must be copied as data.
    pub(super) data: Bytes,
    /// Whether all of the volume was looked at.
    pub(super) is_complete: bool,
    /// How fast the source was read, in bytes a second.
    pub(super) measured: u64,
    /// What the network to the other host carries at most, if it goes to one and that is known.
    pub(super) carried: Option<u64>,
    /// How fast the last move to the same place went, if there was one.
    pub(super) shown: Option<u64>,
    /// How fast the copy goes: the least of these and the bandwidth that was asked for.
    pub(super) rate: u64,
    /// What the guest writes, in bytes a second.
    pub(super) write_bytes: f64,
    /// Whether a move of this daemon has shown what a switchover takes.
    pub(super) has_seen_stall: bool,
    pub(super) forecast: Forecast,
}

impl MoveForecast {
    fn prediction(&self, made_unix_ms: u64, planned: bool) -> Prediction {
        let forecast = &self.forecast;
        Prediction {
            made_unix_ms,
            planned,
            copy_bytes_per_second: self.rate,
            guest_write_bytes_per_second: self.write_bytes,
            seconds: forecast.seconds,
            seconds_min: forecast.seconds_between.0,
            seconds_max: forecast.seconds_between.1,
            passes: forecast.passes,
            converges: forecast.converges,
            stall_us: micros(forecast.downtime),
            ..Prediction::default()
        }
    }
}

pub(super) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// The plan that somebody has asked for last.
pub(crate) struct Planned {
    request: MoveRequest,
    prediction: Prediction,
}

/// What of a request changes nothing of what a move takes.
fn of_no_weight(request: &MoveRequest) -> MoveRequest {
    let (overwrite, delete_source, no_persist) = (false, false, false);
    MoveRequest { overwrite, delete_source, no_persist, persist_hook: None, ..request.clone() }
}

impl Daemon {
    /// Looks at `volume` and says what a move with `options` will take; if it goes to another host, over a network that
    /// carries so much.
    pub(super) async fn forecast_move(
        &self,
        volume: &Volume,
        request: &MoveRequest,
        options: &MoveOptions,
        carried: Option<u64>,
        look: SurveyDepth,
    ) -> Result<MoveForecast> {
        let source = volume.require_up()?.device();
        // The guest is watched before it is disturbed.
        let guest = self.watch_guest(volume, look.guest).await;
        let seconds = guest.span.as_secs_f64().max(1e-9);
        let (write_bytes, writes) = (guest.write.bytes as f64 / seconds, guest.write.requests() as f64 / seconds);
        let began = self.env.now();
        let (data, is_complete) = self.count_data(&source, look.holes).await?;
        // The move looks for the holes again.
        let walk = self.env.now().since(began).as_secs_f64();
        let measured = self.read_rate(&source, look).await?;
        let earlier = self.history.newest(EARLIER_MAX);
        let seen = RateHistory::of(&earlier, &request.to);
        let shown = seen.copied.map(|rate| rate as u64);
        let limits = [Some(measured), carried, shown, request.bandwidth.filter(|limit| *limit > 0)];
        let rate = limits.into_iter().flatten().min().unwrap_or(measured);
        let compared = match request.verify {
            // Comparing has a rate of its own, which no bandwidth limits: so many bytes would be copied meanwhile.
            Verify::Full => {
                let slower = seen.compared.map_or(1.0, |compared| rate as f64 / compared.max(1.0));
                (data.get() as f64 * slower) as u64
            }
            Verify::Sample | Verify::Off => 0,
        };
        let earlier = earlier.into_iter().filter_map(|job| job.report);
        let stall_us = earlier.map(|report| report.stall_us_max).max().filter(|stall_us| *stall_us > 0);
        let mut known = Known {
            volume: source.size().get(),
            to_copy: data.get(),
            to_compare: compared,
            copy_rate: rate as f64,
            write_bytes,
            writes,
            switchover: Duration::from_micros(stall_us.unwrap_or(STALL_US_EXPECTED)),
            scattered: None,
        };
        if options.strategy.holds_for_copy() {
            known.scattered = self.look_at_scattered(volume, &known, options, look.scattered).await?;
        }
        let forecast = with_fixed(known.forecast(options), SECONDS_LEAST + walk);
        let has_seen_stall = stall_us.is_some();
        Ok(MoveForecast { data, is_complete, measured, carried, shown, rate, write_bytes, has_seen_stall, forecast })
    }

    /// Keeps what a plan has said, for the move that may follow.
    pub(super) fn keep_plan(&self, volume: &Volume, request: &MoveRequest, move_forecast: &MoveForecast) {
        self.note_plan(volume, request, move_forecast.prediction(0, true));
    }

    /// Keeps `prediction`, made now, for the move that may follow.
    pub(crate) fn note_plan(&self, volume: &Volume, request: &MoveRequest, prediction: Prediction) {
        let prediction = Prediction { made_unix_ms: unix_ms(self.env.wall_clock()), ..prediction };
        *volume.planned.lock() = Some(Planned { request: of_no_weight(request), prediction });
    }

    /// What is expected of a move that is about to begin: what its plan has said a short while ago, or what is seen in a
    /// moment. Nothing if that cannot be told; no move fails for that.
    pub(super) async fn predict(&self, volume: &Volume, job: &JobHandle, target: &OpenBackend) -> Option<Prediction> {
        let document = volume.document();
        let document = document.job.as_ref()?;
        if document.prediction.is_some() || document.record.sessions > 0 {
            return document.prediction.clone();
        }
        let (request, options) = (&document.request, &document.record.options);
        let now = unix_ms(self.env.wall_clock());
        let planned = volume.planned.lock().take();
        let is_of_it = |planned: &Planned| {
            let age = Duration::from_millis(now.saturating_sub(planned.prediction.made_unix_ms));
            planned.request == of_no_weight(request) && age <= PLAN_AGE_MAX
        };
        if let Some(planned) = planned.filter(is_of_it) {
            return Some(planned.prediction);
        }
        let forecast_move = async {
            let carried = match target.remote_device().and_then(|remote_device| remote_device.copying()) {
                Some(remote) => capacity(self, &remote).await,
                None => None,
            };
            self.forecast_move(volume, request, options, carried, SurveyDepth::BRIEF).await
        };
        let forecast_move = env::timeout(&*self.env, MOMENT, forecast_move);
        let move_forecast = tokio::select! {
            biased;
            () = job.cancelled() => return None,
            move_forecast = forecast_move => move_forecast,
        };
        match move_forecast {
            Some(Ok(move_forecast)) => Some(move_forecast.prediction(now, false)),
            Some(Err(error)) => {
                tracing::info!(volume = volume.name, %error, "what the move will take could not be told");
                None
            }
            None => {
                tracing::info!(volume = volume.name, "the source was too slow to tell what the move will take");
                None
            }
        }
    }

    /// What the guest does, if there is one.
    async fn watch_guest(&self, volume: &Volume, span: Duration) -> MeterWindow {
        let before = volume.meter.snapshot();
        if volume.connections() > 0 {
            self.env.sleep(span).await;
        }
        volume.meter.snapshot().since(&before)
    }

    /// How many bytes must be read to be known, and whether all of the volume was looked at.
    async fn count_data(&self, source: &Device, limit: Duration) -> Result<(Bytes, bool)> {
        let (size, start) = (source.size(), self.env.now());
        let (mut next, mut data) = (Bytes::ZERO, Bytes::ZERO);
        while next < size {
            if self.env.now().since(start) > limit {
                return Ok((data + (size - next), false));
            }
            let pieces = source.extents(Extent::between(next, size)).await;
            for piece in pieces.map_err(|error| of_backend(&error, "the source"))? {
                if !piece.state.reads_zero() {
                    data += piece.extent.length;
                }
                next = piece.extent.end();
            }
        }
        Ok((data, true))
    }

    /// Reads a few chunks that lie scattered, as passes would, and sees what the guest writes meanwhile. Nothing if so few
    /// would be dirty that nobody need know.
    async fn look_at_scattered(
        &self,
        volume: &Volume,
        known: &Known,
        options: &MoveOptions,
        limit: Duration,
    ) -> Result<Option<[Scattered; LOOKS]>> {
        let Some(parts) = known.worth_a_look(options) else { return Ok(None) };
        let source = volume.require_up()?.device();
        let mut seen = Vec::new();
        for part in parts {
            let before = volume.meter.snapshot();
            let each = migrate::scattered(&source, &*self.env, options, part, limit).await;
            let each = each.map_err(|error| of_backend(&error, "reading the source"))?;
            let window = volume.meter.snapshot().since(&before);
            let seconds = window.span.as_secs_f64().max(1e-9);
            let [writes, reads] = [&window.write, &window.read].map(|kind| kind.requests() as f64 / seconds);
            seen.extend(each.map(|chunk_seconds| Scattered { part, chunk_seconds, writes, reads }));
        }
        Ok(seen.try_into().ok())
    }

    /// Reads a little from places over all of the volume. Gives bytes a second.
    async fn read_rate(&self, source: &Device, look: SurveyDepth) -> Result<u64> {
        let (size, start) = (source.size().get(), self.env.now());
        let piece = PROBE_PIECE.min(source.geometry().transfer_bytes_max.into());
        let pieces = (look.probe_bytes / piece).min(size / piece);
        if pieces == 0 {
            return Ok(SurveyDepth::CLOSE.probe_bytes);
        }
        let mut read = 0;
        let mut buffer = Buffer::unpooled(piece as usize);
        for number in 0..pieces {
            let offset = (size / pieces * number).next_multiple_of(4096).min(size - piece) / 4096 * 4096;
            buffer =
                source.read(Bytes(offset), buffer).await.map_err(|error| of_backend(&error, "reading the source"))?;
            read += piece;
            if self.env.now().since(start) > look.probe {
                break;
            }
        }
        Ok((read as f64 / self.env.now().since(start).as_secs_f64().max(1e-6)) as u64)
    }
}

/// The same with `seconds` that every move of the volume takes, and that may be twice as many.
fn with_fixed(forecast: Forecast, seconds: f64) -> Forecast {
    let (least, most) = forecast.seconds_between;
    let seconds_between = (least + seconds / 2.0, most + 2.0 * seconds);
    Forecast { seconds: forecast.seconds + seconds, seconds_between, ..forecast }
}

/// Sets what was expected beside what it took. A move that was steered, interrupted, or did not come to its switchover says
/// nothing of how good the prediction was.
pub(super) fn score(prediction: &mut Prediction, report: &Report, is_undisturbed: bool) {
    if !is_undisturbed || report.sessions != 1 || report.target_losses > 0 || report.seconds <= 0.0 {
        return;
    }
    prediction.seconds_error_percent = Some((prediction.seconds / report.seconds - 1.0) * 100.0);
    let is_near = (prediction.seconds - report.seconds).abs() <= SECONDS_NEAR;
    let is_between = (prediction.seconds_min..=prediction.seconds_max).contains(&report.seconds);
    prediction.seconds_within = Some(is_between || is_near);
    // A guest that asked for nothing has not seen the switchover.
    let felt = report.stall_us_max.min(prediction.stall_us) > 0;
    prediction.stall_factor = felt.then(|| prediction.stall_us as f64 / report.stall_us_max as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prediction() -> Prediction {
        Prediction { seconds: 11.0, seconds_min: 9.0, seconds_max: 12.0, stall_us: 1000, ..Prediction::default() }
    }

    fn report() -> Report {
        Report { seconds: 10.0, stall_us_max: 4000, sessions: 1, ..Report::default() }
    }

    #[test]
    fn a_prediction_is_held_against_what_the_move_took() {
        let mut prediction = prediction();
        score(&mut prediction, &report(), true);
        let error = prediction.seconds_error_percent.expect("it is over");
        assert!((error - 10.0).abs() < 1e-9 && prediction.seconds_within == Some(true), "{prediction:?}");
        assert_eq!(prediction.stall_factor, Some(0.25));
    }

    #[test]
    fn a_short_move_is_held_against_its_prediction_by_what_it_was_off_in_seconds() {
        let short = |seconds| Prediction { seconds, seconds_min: seconds, seconds_max: seconds, ..prediction() };
        for (expected, took, within) in [(0.15, 0.2, true), (0.0, 0.2, true), (0.15, 0.9, false), (11.0, 12.0, false)] {
            let mut scored = short(expected);
            score(&mut scored, &Report { seconds: took, ..report() }, true);
            assert_eq!(scored.seconds_within, Some(within), "{expected} s, and it took {took} s");
        }
    }

    #[test]
    fn a_volume_without_data_takes_some_time_all_the_same() {
        let known = Known { volume: 1 << 40, copy_rate: 1e9, ..Known::default() };
        let forecast = with_fixed(known.forecast(&MoveOptions::default()), SECONDS_LEAST);
        assert!(forecast.seconds >= SECONDS_LEAST && forecast.seconds_between.0 > 0.0, "{forecast:?}");
        assert!((forecast.seconds_between.0..forecast.seconds_between.1).contains(&forecast.seconds));
    }

    #[test]
    fn a_move_that_was_paused_restarted_or_lost_its_target_proves_no_prediction_wrong() {
        let restarted = Report { sessions: 2, ..report() };
        let lost = Report { target_losses: 1, ..report() };
        for (report, is_undisturbed) in [(report(), false), (restarted, true), (lost, true), (Report::default(), true)]
        {
            let mut scored = prediction();
            score(&mut scored, &report, is_undisturbed);
            assert_eq!(scored, prediction(), "{report:?}");
        }
    }

    #[test]
    fn a_plan_is_that_of_the_same_move_whatever_becomes_of_the_source() {
        let request = MoveRequest { to: "file:/b".to_owned(), ..MoveRequest::default() };
        let deleting = MoveRequest { delete_source: true, no_persist: true, ..request.clone() };
        assert_eq!(of_no_weight(&deleting), of_no_weight(&request));
        let slower = MoveRequest { bandwidth: Some(1), ..request.clone() };
        assert_ne!(of_no_weight(&slower), of_no_weight(&request));
    }
}
