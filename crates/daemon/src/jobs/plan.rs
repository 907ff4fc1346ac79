//! What a move would cost, said before it begins.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, MoveRequest, Plan, PlanRequest, Verify};
use block::{Buffer, Bytes, Device, Extent};
use migrate::{Forecast, Known, MoveOptions, OnNoConverge, Scattered, Strategy};

use super::start::destination;
use crate::daemon::Daemon;
use crate::location::{Destination, JobTarget, require_here, require_local};
use crate::problem::{Result, of_backend};
use crate::room::Needs;
use crate::volume::Volume;

/// Looking for holes takes this long at most; what is not seen counts as data.
const LOOKING_LIMIT: Duration = Duration::from_secs(3);
/// How much is read to see how fast the source is.
const PROBE_BYTES: u64 = 64 << 20;
/// In requests of this size, as the copy does it.
const PROBE_PIECE: u64 = 1 << 20;
/// How long that may take.
const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// How long each of three looks at chunks that lie scattered takes.
const LOOK_LIMIT: Duration = Duration::from_millis(750);
/// What is expected of the switchover when no move has shown it yet.
const STALL_US_EXPECTED: u64 = 2_000;

/// What is to be known of a strategy that buffers.
fn buffer_note(options: &MoveOptions, forecast: &Forecast) -> Option<String> {
    let buffer = options.buffer()?;
    let drain = forecast.drain;
    Some(format!(
        "the target may be {buffer} behind; before the switchover that is written there, which takes about {drain:.1?} \
         while the guest works and is slowed down to the target's pace"
    ))
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
            OnNoConverge::Mirror => "it would go on as a mirror",
            OnNoConverge::Force => "the guest would be held for the rest",
            OnNoConverge::Abort => "the move would end with the guest on the source",
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
        let mut notes = Vec::new();
        let refusal = self.refusal(&volume, &request, &options, &to).await;
        let total = source.size();
        let (data, complete) = self.count_data(&source).await?;
        if !complete {
            notes.push("the volume has too many holes to look at all of them: the rest counts as data".to_owned());
        }
        let guest = volume.gauge.guest_io();
        let rate = self.copy_rate(&source, request.bandwidth, &mut notes).await?;
        let compared = match request.verify {
            Verify::Full => data.get(),
            Verify::Sample | Verify::Off => 0,
        };
        let earlier =
            self.history.list().into_iter().filter_map(|job| job.report).filter(|report| report.stall_us_max > 0);
        let stall_us = earlier.take(20).map(|report| report.stall_us_max).max();
        notes.push(match stall_us {
            Some(_) => "the stall is the longest of the last moves of this daemon".to_owned(),
            None => "the stall is an estimate: this daemon has not moved anything yet".to_owned(),
        });
        let mut known = Known {
            volume: total.get(),
            to_copy: data.get(),
            to_compare: compared,
            copy_rate: rate as f64,
            write_bytes: guest.write_bytes_per_second,
            writes: guest.write_iops,
            switchover: Duration::from_micros(stall_us.unwrap_or(STALL_US_EXPECTED)),
            scattered: None,
        };
        if options.strategy.holds_for_copy() {
            known.scattered = self.look_at_scattered(&volume, &source, &known, &options).await?;
        }
        let forecast = known.forecast(&options);
        notes.extend(tracking_notes(&options, &forecast));
        notes.extend(buffer_note(&options, &forecast));
        Ok(Plan {
            volume: volume.name.clone(),
            source: volume.document().backend.to_string(),
            target: to.to_string(),
            bytes_total: total.get(),
            bytes_to_copy: data.get(),
            bytes_zero: total.saturating_sub(data).get(),
            guest_write_bytes_per_second: guest.write_bytes_per_second,
            copy_bytes_per_second: rate,
            seconds: forecast.seconds,
            seconds_min: forecast.seconds_between.0,
            seconds_max: forecast.seconds_between.1,
            passes: forecast.passes,
            converges: forecast.converges,
            stall_us: u64::try_from(forecast.downtime.as_micros()).unwrap_or(u64::MAX),
            notes,
            refusal,
        })
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
        let backend = volume.document().backend.clone();
        if let Err(error) = require_here(&backend, "it cannot be moved from here") {
            return Some(error);
        }
        let spec = match to {
            Destination::Local(spec) => spec,
            Destination::Host { host, volume: name } => {
                if let Err(error) = require_local(&backend, "it cannot go to another host from there") {
                    return Some(error);
                }
                let target = self.remote_target(volume, (host.clone(), name.clone()), options, request);
                return match target {
                    Ok(target) => self.remote_refusal(&target, &volume.name).await,
                    Err(error) => Some(error),
                };
            }
            Destination::Foreign(uri) => {
                return self.make_foreign_ready(volume, uri, request.overwrite, options).await.err();
            }
        };
        // A target that may be overwritten is not prepared just to see whether that works.
        if request.overwrite && spec.path().exists() {
            return None;
        }
        match self.prepare(volume, spec.clone(), false).await {
            Ok(prepared) => {
                self.discard_unused(&JobTarget::Local(prepared));
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

    /// How many bytes must be read to be known, and whether all of the volume was looked at.
    async fn count_data(&self, source: &Device) -> Result<(Bytes, bool)> {
        let (size, start) = (source.size(), self.env.now());
        let (mut next, mut data) = (Bytes::ZERO, Bytes::ZERO);
        while next < size {
            if self.env.now().since(start) > LOOKING_LIMIT {
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
        source: &Device,
        known: &Known,
        options: &MoveOptions,
    ) -> Result<Option<[Scattered; 3]>> {
        let Some(parts) = known.worth_a_look(options) else { return Ok(None) };
        let mut seen = Vec::new();
        for part in parts {
            let before = volume.meter.snapshot();
            let each = migrate::scattered(source, &*self.env, options, part, LOOK_LIMIT).await;
            let each = each.map_err(|error| of_backend(&error, "reading the source"))?;
            let window = volume.meter.snapshot().since(&before);
            let writes = window.write.requests() as f64 / window.span.as_secs_f64().max(1e-9);
            seen.extend(each.map(|chunk_seconds| Scattered { part, chunk_seconds, writes }));
        }
        Ok(seen.try_into().ok())
    }

    async fn copy_rate(&self, source: &Device, bandwidth: Option<u64>, notes: &mut Vec<String>) -> Result<u64> {
        let measured = self.read_rate(source).await?;
        match bandwidth.filter(|limit| *limit > 0) {
            Some(limit) if limit <= measured => {
                notes.push("the time follows from the bandwidth that was given".to_owned());
                Ok(limit)
            }
            _ => {
                notes.push(format!(
                    "the source was read at {}/s for a moment; a slower target makes the move slower",
                    Bytes(measured)
                ));
                Ok(measured)
            }
        }
    }

    /// Reads a little from places over all of the volume.
    async fn read_rate(&self, source: &Device) -> Result<u64> {
        let (size, start) = (source.size().get(), self.env.now());
        let piece = PROBE_PIECE.min(source.geometry().transfer_bytes_max.into());
        let pieces = (PROBE_BYTES / piece).min(size / piece);
        if pieces == 0 {
            return Ok(PROBE_BYTES);
        }
        let mut read = 0;
        let mut buffer = Buffer::unpooled(piece as usize);
        for number in 0..pieces {
            let offset = (size / pieces * number).next_multiple_of(4096).min(size - piece) / 4096 * 4096;
            buffer =
                source.read(Bytes(offset), buffer).await.map_err(|error| of_backend(&error, "reading the source"))?;
            read += piece;
            if self.env.now().since(start) > PROBE_LIMIT {
                break;
            }
        }
        Ok((read as f64 / self.env.now().since(start).as_secs_f64().max(1e-6)) as u64)
    }
}
