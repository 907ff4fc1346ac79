//! The end of a move: a page for a person, a document for a program.

use api::v1::{
    Estimate, Iteration, Job, JobState, PathRate, Prediction, Rates, ReadCache, Report, Schedule, ScheduleReport,
    Strategy, StreamReport,
};

use crate::show::{bytes, rate, time, us};

/// A stall at the start of the move that is worth a word, in microseconds.
const ENTRY_STALL_US_MIN: u64 = 10_000;

/// The report as JSON: its fields at the top, with what was moved where, and the error if there is one.
pub(crate) fn to_json(job: &Job) -> serde_json::Value {
    let mut value = serde_json::to_value(job.report.clone().unwrap_or_default()).unwrap_or_default();
    if let Some(fields) = value.as_object_mut() {
        fields.insert("job".to_owned(), job.id.into());
        fields.insert("volume".to_owned(), job.volume.clone().into());
        fields.insert("group".to_owned(), job.group.into());
        fields.insert("state".to_owned(), job.state.name().into());
        fields.insert("source".to_owned(), job.source.clone().into());
        fields.insert("target".to_owned(), job.target.clone().into());
        fields.insert("prediction".to_owned(), serde_json::to_value(&job.prediction).unwrap_or_default());
        fields.insert("error".to_owned(), serde_json::to_value(&job.error).unwrap_or_default());
    }
    value
}

/// The report for a person.
pub(crate) fn to_words(job: &Job) -> String {
    let moved = matches!(&job.report, Some(report) if report.source_kept.is_some()) || job.state == JobState::Done;
    let mut text = match (job.state, moved) {
        (JobState::Done, _) => format!("Moved {} to {}\n", job.volume, job.target),
        (_, true) => format!("Moved {} to {}, but not everything after that was done\n", job.volume, job.target),
        (JobState::Cancelled, _) => format!("Cancelled the move of {}: the guest is on {}\n", job.volume, job.source),
        _ => format!("Did not move {}: the guest is on {}\n", job.volume, job.source),
    };
    if let Some(report) = &job.report {
        let foretold = job.prediction.iter().map(|prediction| ("foretold", foretold(prediction)));
        for (key, value) in lines(report).into_iter().chain(foretold) {
            text.push_str(&format!("\n  {key:<11} {value}"));
        }
        text.push('\n');
    }
    text
}

/// What was expected before the move began, and how far off that was.
fn foretold(prediction: &Prediction) -> String {
    let when = if prediction.planned { "by its plan" } else { "in a moment before it began" };
    let [seconds, least, most] = [prediction.seconds, prediction.seconds_min, prediction.seconds_max].map(time);
    let off = prediction
        .seconds_error_percent
        .map_or_else(String::new, |error| format!(": {}", off_by(error, prediction.seconds)));
    let felt = match prediction.stall_factor {
        Some(factor) if factor >= 1.0 => format!(", {factor:.1} times what it was"),
        Some(factor) => format!(", and it was {:.1} times that", 1.0 / factor.max(1e-9)),
        None => String::new(),
    };
    let passes = if prediction.passes == 1 { "one pass".to_owned() } else { format!("{} passes", prediction.passes) };
    let converges = if prediction.converges { "" } else { " without converging" };
    format!(
        "{when}: {seconds} ({least} to {most}) in {passes}{converges}{off}; a stall of {}{felt}",
        us(prediction.stall_us)
    )
}

/// By how many percent a time of `seconds` was off; of short ones, that it was not by much.
fn off_by(error: f64, seconds: f64) -> String {
    let off = (seconds - seconds / (1.0 + error / 100.0)).abs();
    match error {
        error if error.abs() < 0.5 => "right".to_owned(),
        _ if off <= 0.25 => format!("right to {}", time(off)),
        error => format!("{:.0} % too {}", error.abs(), if error > 0.0 { "long" } else { "short" }),
    }
}

/// What a read cache has spared, and what it has cost.
fn read_cache(cache: &ReadCache) -> String {
    let share = |hits: u64, misses: u64| format!("{hits} of {} reads", hits + misses);
    format!(
        "{} of the guest's and {} of the copy's from at most {}; {} read whole for the copy ({}), {} evicted",
        share(cache.guest_hits, cache.guest_misses),
        share(cache.copy_hits, cache.copy_misses),
        bytes(cache.bytes_used_max),
        cache.chunks_fetched,
        bytes(cache.bytes_fetched),
        cache.evictions
    )
}

/// The order of the copies, if it was to be another than the volume's.
fn schedule(report: &ScheduleReport) -> Option<String> {
    let ScheduleReport { asked, used, runs_chosen, runs_bounded, copies_swept, .. } = *report;
    match (asked, used) {
        (Schedule::Sequential, _) => None,
        (_, Schedule::Sequential) => {
            Some(format!("sequential instead of {asked}: the source's disk has no head that moves"))
        }
        _ => Some(format!(
            "{used}: {runs_chosen} runs chosen, {runs_bounded} whose turn it was, {copies_swept} copies in order"
        )),
    }
}

/// What was not sent because both sides read zeroes there.
fn skipped(report: &Report) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if !report.skipped.is_empty() {
        let skipped: Vec<_> = report.skipped.iter().map(|(why, count)| format!("{} ({why})", bytes(*count))).collect();
        lines.push(("skipped", format!("{}, zeroes on both sides", skipped.join(", "))));
    }
    if report.bytes_unskipped > 0 {
        let again = bytes(report.bytes_unskipped);
        lines.push(("skipped", format!("{again} that was written, or lost with the target, afterwards")));
    }
    lines
}

fn lines(report: &Report) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if report.bytes_total > 0 {
        let copying = report.phases.get("copying").copied().unwrap_or(report.seconds).max(1e-6);
        lines.push(("volume", bytes(report.bytes_total)));
        lines.push(("strategy", report.strategy.to_string()));
        lines.extend(schedule(&report.schedule).map(|text| ("schedule", text)));
        lines.push(("time", time(report.seconds)));
        lines.push((
            "copied",
            format!("{} at {}", bytes(report.bytes_copied), rate(report.bytes_copied as f64 / copying)),
        ));
        if report.bytes_offloaded > 0 {
            let shared = bytes(report.bytes_offloaded);
            lines.push(("offloaded", format!("{shared} of that by the file system, without a checksum of ours")));
        }
        if report.bytes_zero > 0 {
            lines.push(("holes", format!("{}, not copied", bytes(report.bytes_zero))));
        }
        if let Some(redirection) = &report.redirection {
            lines.push(("surrogate", crate::show::redirection(redirection)));
        }
        if let Some(cache) = &report.read_cache {
            lines.push(("read cache", read_cache(cache)));
        }
        lines.extend(skipped(report));
        if report.bytes_resumed > 0 {
            lines.push(("resumed", format!("{} were there from before a restart", bytes(report.bytes_resumed))));
        }
        if report.bytes_rechecked > 0 {
            let (rechecked, different) = (bytes(report.bytes_rechecked), bytes(report.bytes_different));
            lines.push((
                "rechecked",
                format!("{rechecked} when the other host was back; {different} had changed there"),
            ));
        }
        if report.iterations.len() > 1 {
            lines.extend(report.iterations.iter().map(|pass| ("pass", iteration(pass))));
        }
        if report.strategy == Strategy::Mirror || report.bytes_mirrored > 0 {
            lines.push(("mirrored", format!("{} that the guest wrote meanwhile", bytes(report.bytes_mirrored))));
        }
        if report.strategy == Strategy::MirrorAsync {
            let (most, throttled, drain) =
                (bytes(report.bytes_buffered_max), us(report.throttled_us), us(report.switchover.drain_us));
            let text =
                format!("at most {most}; writes waited for room {throttled} in all, the last of it took {drain}");
            lines.push(("buffered", text));
        }
        lines.extend(report.estimates.iter().map(|said| ("expected", estimate(said))));
        let entry = match report.switchover.entry_stall_us {
            0..ENTRY_STALL_US_MIN => String::new(),
            stall => format!("; {} at the start of the move", us(stall)),
        };
        let text = format!("{}, the guest's longest request at the switchover{entry}", us(report.stall_us_max));
        lines.push(("stall", text));
        lines.push(("compared", compared(report)));
    }
    if let Some(digest) = &report.digest {
        lines.push(("BLAKE3", format!("{digest} (of the source; `b3sum` prints the same)")));
    }
    if let Some(stream) = &report.stream {
        lines.push(("sent", sent(stream)));
    }
    if let Some(rates) = &report.rates {
        lines.extend(network(rates));
    }
    if report.target_losses > 0 {
        lines.push(("losses", format!("the target was lost {} times and found again", report.target_losses)));
    }
    if let Some(kept) = &report.source_kept {
        lines.push(("old source", format!("kept as {kept}")));
    }
    lines.extend(report.notes.iter().map(|note| ("note", note.clone())));
    lines
}

/// What went to another host.
fn sent(stream: &StreamReport) -> String {
    let again = match stream.bytes_again {
        0 => String::new(),
        again => format!(", {} of it twice", bytes(again)),
    };
    let saved = stream.bytes_raw.saturating_sub(stream.bytes_payload);
    let saved = if saved == 0 { String::new() } else { format!(" ({} left out or compressed away)", bytes(saved)) };
    let sessions = if stream.sessions > 1 { format!(", in {} sessions", stream.sessions) } else { String::new() };
    format!("{} over {} streams{saved}{again}{sessions}", bytes(stream.bytes_sent), stream.streams)
}

/// What it took of the network beside others, and whether it was in time.
fn network(rates: &Rates) -> Vec<(&'static str, String)> {
    let way = |path: &PathRate| {
        let there = path.other_interface.as_deref().unwrap_or("?");
        let capacity =
            path.capacity.map_or_else(|| "of unknown speed".to_owned(), |most| format!("of {}", rate(most as f64)));
        let held = match path.limit_min {
            Some(least) => {
                format!("others took up to {}; held to {} then", rate(path.others_max as f64), rate(least as f64))
            }
            None => "nobody else needed it".to_owned(),
        };
        ("network", format!("{} to {there} {capacity}: {held}", path.interface))
    };
    let mut lines: Vec<_> = rates.paths.iter().map(way).collect();
    if let (Some(deadline), Some(kept)) = (rates.deadline_ms, rates.deadline_kept) {
        let kept = if kept { "kept" } else { "NOT KEPT" };
        lines.push(("deadline", format!("{}: {kept}", time(deadline as f64 / 1e3))));
    }
    lines.extend(rates.notes.iter().map(|note| ("note", note.clone())));
    lines
}

/// What was expected on the way.
fn estimate(said: &Estimate) -> String {
    let off = said.error_percent.map_or_else(String::new, |error| format!(": {}", off_by(error, said.eta_seconds)));
    let [eta, least, most] = [said.eta_seconds, said.eta_seconds_min, said.eta_seconds_max].map(time);
    format!("at {:.0} %, after {}: {eta} more ({least} to {most}){off}", said.percent, time(said.seconds))
}

/// One pass over what was not in step.
fn iteration(pass: &Iteration) -> String {
    let held = if pass.held { " with the guest held" } else { "" };
    let deferred = match pass.bytes_deferred {
        0 => String::new(),
        deferred => format!(" ({} of it put off)", bytes(deferred)),
    };
    format!(
        "{}: {} in {}{held}, then {} were different again{deferred}: {}",
        pass.number,
        bytes(pass.bytes_copied),
        time(pass.seconds),
        bytes(pass.bytes_dirty),
        pass.decision
    )
}

fn compared(report: &Report) -> String {
    let verification = &report.verification;
    let what = match (report.verified, report.equal) {
        (_, Some(false)) => "NOT EQUAL".to_owned(),
        (true, Some(true)) => format!("{} ({} chunks), all equal", bytes(verification.bytes), verification.chunks),
        (false, Some(true)) => format!(
            "{} of {}, equal after their last copy (the rest was copied again later)",
            bytes(verification.bytes_proved),
            bytes(report.bytes_total)
        ),
        _ => return format!("nothing; extents carried {}", checksum(report)),
    };
    let how = if verification.past_page_cache { "past the page cache" } else { "through the page cache" };
    format!("{what}, read from both sides {how} in {}", time(verification.seconds))
}

fn checksum(report: &Report) -> &str {
    match &*report.verification.checksum {
        "" => "a checksum",
        named => named,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::v1::{MoveRequest, Verification};

    fn job(state: JobState, report: Option<Report>) -> Job {
        Job {
            group: None,
            id: 7,
            volume: "web1".to_owned(),
            state,
            source: "file:/a".to_owned(),
            target: "file:/b".to_owned(),
            request: MoveRequest::default(),
            requester: String::new(),
            started_unix_ms: 0,
            finished_unix_ms: None,
            prediction: None,
            progress: None,
            guest: None,
            report,
            error: None,
        }
    }

    #[test]
    fn the_json_has_what_programs_rely_on() {
        let value =
            to_json(&job(JobState::Done, Some(Report { seconds: 1.5, equal: Some(true), ..Report::default() })));
        for key in ["seconds", "bytes_copied", "bytes_mirrored", "stall_us_max", "verified", "equal", "digest"] {
            assert!(value.get(key).is_some(), "{key} is missing");
        }
        assert_eq!(value["state"], "done");
    }

    #[test]
    fn what_was_foretold_is_told_beside_what_it_took() {
        let prediction = Prediction {
            planned: true,
            seconds: 11.0,
            seconds_min: 9.0,
            seconds_max: 12.0,
            passes: 1,
            converges: true,
            stall_us: 1000,
            seconds_error_percent: Some(10.0),
            stall_factor: Some(0.25),
            ..Prediction::default()
        };
        let done = job(JobState::Done, Some(Report { bytes_total: 1, ..Report::default() }));
        let foretold = Job { prediction: Some(prediction), ..done };
        let words = to_words(&foretold);
        let said = "by its plan: 11.0 s (9.0 s to 12.0 s) in one pass: 10 % too long; a stall of 1.0 ms, and it was 4.0 times that";
        assert!(words.contains(said), "{words}");
        assert_eq!(to_json(&foretold)["prediction"]["seconds_error_percent"], 10.0);
        assert_eq!(
            (off_by(-25.0, 0.15), off_by(-25.0, 15.0)),
            ("right to 50.0 ms".to_owned(), "25 % too short".to_owned())
        );
    }

    #[test]
    fn what_was_skipped_is_said_with_its_reasons() {
        let skipped = [("hole".to_owned(), 1 << 20), ("zero".to_owned(), 3 << 20)].into_iter().collect();
        let report = Report { bytes_total: 1, skipped, bytes_unskipped: 2 << 20, ..Report::default() };
        let words = to_words(&job(JobState::Done, Some(report)));
        for said in ["1 MiB (hole), 3 MiB (zero), zeroes on both sides", "2 MiB that was written"] {
            assert!(words.contains(said), "{said}: {words}");
        }
        assert!(
            !to_words(&job(JobState::Done, Some(Report { bytes_total: 1, ..Report::default() }))).contains("skipped")
        );
    }

    #[test]
    fn what_a_read_cache_has_spared_is_said() {
        let cache = ReadCache {
            guest_hits: 30,
            guest_misses: 70,
            copy_hits: 5,
            copy_misses: 11,
            chunks_fetched: 4,
            bytes_fetched: 256 << 10,
            evictions: 2,
            bytes_used_max: 1 << 20,
            ..ReadCache::default()
        };
        let report = Report { bytes_total: 1, read_cache: Some(cache), ..Report::default() };
        let words = to_words(&job(JobState::Done, Some(report)));
        for said in [
            "30 of 100 reads of the guest's",
            "5 of 16 reads of the copy's from at most 1 MiB",
            "4 read whole for the copy (256 KiB), 2 evicted",
        ] {
            assert!(words.contains(said), "{said}: {words}");
        }
    }

    #[test]
    fn what_was_not_compared_is_not_called_equal() {
        let words = to_words(&job(JobState::Done, Some(Report { bytes_total: 1, ..Report::default() })));
        assert!(words.contains("compared") && !words.contains("all equal"), "{words}");
        let unequal = Report {
            bytes_total: 1,
            verified: true,
            equal: Some(false),
            verification: Verification::default(),
            ..Report::default()
        };
        let words = to_words(&job(JobState::Failed, Some(unequal)));
        assert!(words.contains("NOT EQUAL") && words.contains("Did not move"), "{words}");
    }
}
