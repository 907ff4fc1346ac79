//! What earlier moves have shown of a place: how fast it takes what is copied, and how fast it is compared beside guests. What is
//! read of a source before a move says nothing of either.

use api::v1::{Job, JobState};

/// A move of less than this shows nothing.
const BYTES_MIN: u64 = 64 << 20;

/// How fast the last moves to a place went, in bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RateHistory {
    /// Copying.
    pub(super) copied: Option<f64>,
    /// Comparing.
    pub(super) compared: Option<f64>,
}

impl RateHistory {
    /// What `jobs`, the newest first, show of the place that `to` names.
    pub(super) fn of(jobs: &[Job], to: &str) -> Self {
        let is_there = |job: &&Job| {
            let report = job.report.as_ref();
            let went_well = report.is_some_and(|report| report.sessions == 1 && report.target_losses == 0);
            went_well && job.state == JobState::Done && place_of(&job.request.to) == place_of(to)
        };
        let mut shown = Self::default();
        for job in jobs.iter().filter(is_there) {
            let Some(report) = &job.report else { continue };
            let rate = |bytes: u64, phase: &str| {
                let seconds = report.phases.get(phase).copied().filter(|seconds| *seconds > 0.0)?;
                (bytes >= BYTES_MIN).then_some(bytes as f64 / seconds)
            };
            let is_held_back = job.request.bandwidth.is_some_and(|limit| limit > 0);
            if !is_held_back && report.bytes_offloaded == 0 {
                shown.copied = shown.copied.or_else(|| rate(report.bytes_copied, "copying"));
            }
            shown.compared = shown.compared.or_else(|| rate(report.verification.bytes, "verifying"));
        }
        shown
    }
}

/// What moves to one folder, block device, server or host have in common.
fn place_of(to: &str) -> &str {
    let Some(path) = to.strip_prefix("file:") else {
        return to.rsplit_once(['/', ':']).map_or(to, |(place, _)| place);
    };
    let path = path.split_once(',').map_or(path, |(path, _)| path);
    match path.starts_with("/dev/") && !path.starts_with("/dev/shm/") {
        true => path,
        false => path.rsplit_once('/').map_or(path, |(folder, _)| folder),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use api::v1::{MoveRequest, Report, Verification};

    use super::*;

    fn job(to: &str, mib: u64, copying: f64, verifying: f64) -> Job {
        let phases = BTreeMap::from([("copying".to_owned(), copying), ("verifying".to_owned(), verifying)]);
        let verification = Verification { bytes: mib << 20, ..Verification::default() };
        let report = Report { sessions: 1, bytes_copied: mib << 20, phases, verification, ..Report::default() };
        Job {
            id: 1,
            volume: "x".to_owned(),
            group: None,
            state: JobState::Done,
            source: String::new(),
            target: to.to_owned(),
            request: MoveRequest { to: to.to_owned(), ..MoveRequest::default() },
            requester: String::new(),
            started_unix_ms: 0,
            finished_unix_ms: Some(1),
            prediction: None,
            progress: None,
            guest: None,
            report: Some(report),
            error: None,
        }
    }

    #[test]
    fn the_newest_move_to_the_same_place_shows_how_fast_it_is() {
        let mib = f64::from(1 << 20);
        let slow = job("file:/slow/a.img,cache=page", 512, 4.0, 8.0);
        let jobs = [job("file:/fast/a.img", 512, 1.0, 1.0), slow.clone(), job("file:/slow/b.img", 512, 1.0, 1.0)];
        let shown = RateHistory::of(&jobs, "file:/slow/c.img");
        assert_eq!(shown, RateHistory { copied: Some(128.0 * mib), compared: Some(64.0 * mib) });
        assert_eq!(RateHistory::of(&jobs, "file:/new/c.img"), RateHistory::default());
        assert_eq!(
            RateHistory::of(&[job("file:/slow/a.img", 1, 4.0, 8.0)], "file:/slow/c.img"),
            RateHistory::default()
        );

        let request = MoveRequest { bandwidth: Some(1 << 20), ..slow.request.clone() };
        let held_back = [Job { request, ..slow.clone() }];
        assert_eq!(
            RateHistory::of(&held_back, "file:/slow/c.img"),
            RateHistory { copied: None, compared: Some(64.0 * mib) }
        );
        let failed = [Job { state: JobState::Failed, ..slow }];
        assert_eq!(RateHistory::of(&failed, "file:/slow/c.img"), RateHistory::default());
    }

    #[test]
    fn a_place_is_a_folder_a_device_a_server_or_a_host() {
        for (to, place) in [
            ("file:/vm/a.img,cache=direct", "/vm"),
            ("file:/dev/sdb", "/dev/sdb"),
            ("file:/dev/shm/a", "/dev/shm"),
            ("nbd://far:10809/disk", "nbd://far:10809"),
            ("host2:web1", "host2"),
            ("host2", "host2"),
        ] {
            assert_eq!(place_of(to), place, "{to}");
        }
    }
}
