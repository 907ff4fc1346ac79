//! From the migration's types to the API's, whose meaning does not change when the migration's do.

use api::v1;
use migrate::stream::StreamStatistics;
use migrate::{MoveOptions, OnNoConverge, ScheduleKind, Strategy, Verify};

/// How the migration carries out what was asked for.
///
/// # Errors
/// What does not go together, for people.
pub(crate) fn to_options(request: &v1::MoveRequest) -> crate::problem::Result<MoveOptions> {
    let defaults = MoveOptions::default();
    if request.follow_ratio.is_some() && request.schedule != v1::Schedule::Follow {
        let hint = "say --schedule follow, or leave --follow-ratio out";
        return Err(crate::problem::invalid("a ratio of guest requests to copies is for the schedule follow", hint));
    }
    let options = MoveOptions {
        verify: of_api_verify(request.verify),
        bandwidth: request.bandwidth.filter(|rate| *rate > 0),
        strategy: of_api_strategy(request.strategy),
        schedule: of_api_schedule(request.schedule),
        follow_ratio: request.follow_ratio.unwrap_or(defaults.follow_ratio),
        hot_blocks: request.hot_blocks,
        skip_zero: request.skip_zero,
        downtime_limit_ms: request.downtime_limit_ms.unwrap_or(defaults.downtime_limit_ms),
        deadline_ms: request.deadline_ms,
        buffer_bytes: request.buffer,
        read_cache_bytes: request.read_cache.unwrap_or_default(),
        on_no_converge: request.on_no_converge.map_or(defaults.on_no_converge, of_api_on_no_converge),
        ..defaults
    };
    options.check().map_err(|error| {
        let hint = "docs/strategies.md says which flags belong to which strategy";
        crate::problem::invalid(error.context().to_owned(), hint)
    })?;
    Ok(options)
}

const fn of_api_strategy(strategy: v1::Strategy) -> Strategy {
    match strategy {
        v1::Strategy::Mirror => Strategy::Mirror,
        v1::Strategy::Dbt => Strategy::Dbt,
        v1::Strategy::IncrementalDbt => Strategy::IncrementalDbt,
        v1::Strategy::Snapshot => Strategy::Snapshot,
        v1::Strategy::MirrorAsync => Strategy::MirrorAsync,
        v1::Strategy::Auto => Strategy::Auto,
        v1::Strategy::MirrorPaper => Strategy::MirrorPaper,
    }
}

const fn to_api_strategy(strategy: Strategy) -> v1::Strategy {
    match strategy {
        Strategy::Mirror => v1::Strategy::Mirror,
        Strategy::Dbt => v1::Strategy::Dbt,
        Strategy::IncrementalDbt => v1::Strategy::IncrementalDbt,
        Strategy::Snapshot => v1::Strategy::Snapshot,
        Strategy::MirrorAsync => v1::Strategy::MirrorAsync,
        Strategy::Auto => v1::Strategy::Auto,
        Strategy::MirrorPaper => v1::Strategy::MirrorPaper,
    }
}

const fn of_api_schedule(schedule: v1::Schedule) -> ScheduleKind {
    match schedule {
        v1::Schedule::Sequential => ScheduleKind::Sequential,
        v1::Schedule::Follow => ScheduleKind::Follow,
        v1::Schedule::ColdFirst => ScheduleKind::ColdFirst,
    }
}

const fn to_api_schedule(schedule: ScheduleKind) -> v1::Schedule {
    match schedule {
        ScheduleKind::Sequential => v1::Schedule::Sequential,
        ScheduleKind::Follow => v1::Schedule::Follow,
        ScheduleKind::ColdFirst => v1::Schedule::ColdFirst,
    }
}

const fn of_api_on_no_converge(choice: v1::OnNoConverge) -> OnNoConverge {
    match choice {
        v1::OnNoConverge::Abort => OnNoConverge::Abort,
        v1::OnNoConverge::Force => OnNoConverge::Force,
        v1::OnNoConverge::Mirror => OnNoConverge::Mirror,
    }
}

const fn of_api_verify(verify: v1::Verify) -> Verify {
    match verify {
        v1::Verify::Off => Verify::Off,
        v1::Verify::Sample => Verify::Sample,
        v1::Verify::Full => Verify::Full,
    }
}

const fn to_api_verify(verify: Verify) -> v1::Verify {
    match verify {
        Verify::Off => v1::Verify::Off,
        Verify::Sample => v1::Verify::Sample,
        Verify::Full => v1::Verify::Full,
    }
}

pub(crate) fn to_api_progress(progress: &migrate::Progress) -> v1::Progress {
    v1::Progress {
        phase: progress.phase.name().to_owned(),
        bytes_total: progress.bytes_total,
        bytes_done: progress.bytes_done,
        bytes_left: progress.bytes_left,
        bytes_copied: progress.bytes_copied,
        bytes_zero: progress.bytes_zero,
        bytes_mirrored: progress.bytes_mirrored,
        bytes_buffered: progress.bytes_buffered,
        throttled_us: progress.throttled_us,
        bytes_verified: progress.bytes_verified,
        bytes_to_verify: progress.bytes_to_verify,
        rate: progress.rate,
        percent: progress.percent,
        eta_seconds: progress.eta_seconds,
        eta_seconds_min: progress.eta_seconds_min,
        eta_seconds_max: progress.eta_seconds_max,
        iteration: progress.iteration,
        bytes_dirty: progress.bytes_dirty,
        stall_us_max: progress.stall_us_max,
        seconds: progress.seconds,
        target_losses: progress.target_losses,
        last_error: progress.error.as_ref().map(|failure| failure.message.clone()),
        stream: None,
        rates: None,
    }
}

/// `again` is what was copied again because it was lost with a session.
pub(crate) fn to_api_stream(sent: &StreamStatistics, again: u64) -> v1::StreamReport {
    v1::StreamReport {
        streams: sent.streams.len() as u64,
        sessions: sent.sessions,
        bytes_raw: sent.bytes_raw,
        bytes_payload: sent.bytes_payload,
        bytes_zero: sent.bytes_zero,
        bytes_compressed: sent.bytes_compressed,
        bytes_again: sent.bytes_again + again,
        bytes_sent: sent.streams.iter().map(|stream| stream.bytes_sent).sum(),
        streams_lost: sent.streams.iter().map(|stream| stream.deaths).sum(),
        damaged: sent.damaged,
    }
}

const fn to_api_read_cache(cache: migrate::ReadCacheReport) -> v1::ReadCache {
    v1::ReadCache {
        guest_hits: cache.guest_hits,
        guest_misses: cache.guest_misses,
        copy_hits: cache.copy_hits,
        copy_misses: cache.copy_misses,
        chunks_fetched: cache.chunks_fetched,
        bytes_fetched: cache.bytes_fetched,
        outdated: cache.outdated,
        evictions: cache.evictions,
        evictions_unsent: cache.evictions_unsent,
        bytes_used_max: cache.bytes_used_max,
        bytes_max: cache.bytes_max,
    }
}

const fn to_api_switchover(switchover: &migrate::Switchover) -> v1::Switchover {
    v1::Switchover {
        drain_us: switchover.drain_us,
        flush_us: switchover.flush_us,
        quiesce_us: switchover.quiesce_us,
        quiesce_limit_us: switchover.quiesce_limit_us,
        entry_us: switchover.entry_us,
        entry_stall_us: switchover.entry_stall_us,
        entry_retries: switchover.entry_retries,
        last_copy_us: switchover.last_copy_us,
        last_copy_bytes: switchover.last_copy_bytes,
        commit_us: switchover.commit_us,
        window_us: switchover.window_us,
        retries: switchover.quiesce_retries,
    }
}

pub(crate) fn to_api_report(report: &migrate::Report, sessions: u32) -> v1::Report {
    let verification = &report.verification;
    let iterations = report.iterations.iter().map(|pass| v1::Iteration {
        number: pass.number,
        bytes: pass.bytes,
        bytes_copied: pass.bytes_copied,
        seconds: pass.seconds,
        bytes_dirty: pass.bytes_dirty,
        bytes_deferred: pass.bytes_deferred,
        held: pass.held,
        decision: pass.decision.clone(),
    });
    let estimates = report.estimates.iter().map(|said| v1::Estimate {
        percent: said.percent,
        seconds: said.seconds,
        eta_seconds: said.eta_seconds,
        eta_seconds_min: said.eta_seconds_min,
        eta_seconds_max: said.eta_seconds_max,
        error_percent: said.error_percent,
    });
    v1::Report {
        // The volume's stack knows it.
        redirection: None,
        strategy: to_api_strategy(report.strategy),
        schedule: v1::ScheduleReport {
            asked: to_api_schedule(report.schedule.asked),
            used: to_api_schedule(report.schedule.used),
            runs_chosen: report.schedule.runs_chosen,
            runs_bounded: report.schedule.runs_bounded,
            copies_swept: report.schedule.copies_swept,
            waits_ended: report.schedule.waits_ended,
        },
        seconds: report.seconds,
        bytes_total: report.bytes_total,
        bytes_copied: report.bytes_copied,
        bytes_offloaded: report.bytes_offloaded,
        bytes_zero: report.bytes_zero,
        skipped: report.skipped.clone(),
        bytes_unskipped: report.bytes_unskipped,
        read_cache: report.read_cache.map(to_api_read_cache),
        bytes_mirrored: report.bytes_mirrored,
        bytes_buffered_max: report.bytes_buffered_max,
        throttled_us: report.throttled_us,
        bytes_resumed: report.bytes_resumed,
        bytes_rechecked: report.bytes_rechecked,
        bytes_different: report.bytes_different,
        stall_us_max: report.stall_us_max,
        verified: report.verified,
        equal: report.equal,
        digest: report.digest.clone(),
        verification: v1::Verification {
            mode: to_api_verify(verification.mode),
            chunks: verification.chunks,
            bytes: verification.bytes,
            bytes_proved: verification.bytes_proved,
            suspects: verification.suspects,
            conflicts: verification.conflicts,
            past_page_cache: verification.past_page_cache,
            seconds: verification.seconds,
            digest_seconds: verification.digest_seconds,
            checksum: verification.checksum.clone(),
        },
        switchover: to_api_switchover(&report.switchover),
        phases: report.phases.clone(),
        iterations: iterations.collect(),
        estimates: estimates.collect(),
        redos: report.redos,
        retries: report.retries,
        missed_writes: report.missed_writes,
        target_losses: report.target_losses,
        sessions,
        source_kept: None,
        stream: None,
        rates: None,
        notes: Vec::new(),
    }
}
