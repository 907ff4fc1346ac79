//! What must hold when a cycle is over, besides what the client has read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::cycle::Outcome;
use crate::party::{Party, Whereabouts};
use crate::plan::{Place, Plan};
use crate::testbed::{Testbed, digest_of};

/// Checks how the move of the volume `name` has ended, and says where it is now.
pub(crate) fn check(testbed: &Testbed, name: &str, plan: &Plan, outcome: &Outcome) -> anyhow::Result<Whereabouts> {
    let state = outcome.job["state"].as_str().context("a job has a state")?;
    let code = outcome.job["error"]["code"].as_str().unwrap_or_default();
    let is_expected = match state {
        "done" => !outcome.was_cancelled,
        "cancelled" => outcome.was_cancelled,
        "failed" => outcome.was_filled && code == "no-space" && !outcome.was_cancelled,
        _ => false,
    };
    ensure!(is_expected, "the move should not have ended as {state}: {}", outcome.job);
    let is_done = state == "done";
    let here = if is_done { moved(plan, outcome)? } else { stayed(outcome)? };
    history_tells(testbed, plan, outcome)?;
    volume_is_at(testbed, name, &here)?;
    Ok(here)
}

/// Nothing is left behind but the volumes and what was kept on purpose.
pub(crate) fn nothing_is_left(testbed: &Testbed, parties: &[Party]) -> anyhow::Result<()> {
    nothing_is_left_in_the_state(testbed, parties)?;
    nothing_is_left_at_the_places(testbed, parties)?;
    nothing_is_left_open(testbed, parties)
}

/// The target holds the volume, and the source is out of the way.
fn moved(plan: &Plan, outcome: &Outcome) -> anyhow::Result<Whereabouts> {
    let report = &outcome.job["report"];
    let source = &outcome.source;
    let kept = report["source_kept"].as_str().map(PathBuf::from);
    match (&kept, source.place) {
        // It is left as it is, for its server to keep or delete.
        (_, Place::Server) => {}
        (None, _) => ensure!(plan.delete_source, "the source was not kept: {report}"),
        (Some(kept), Place::Device) => ensure!(*kept == source.path, "a block device cannot become another: {report}"),
        (Some(kept), _) => {
            ensure!(!plan.delete_source, "the source was to be deleted: {report}");
            ensure!(kept.exists(), "the source is not where it was put: {report}");
        }
    }
    let is_file = source.place.is_file();
    ensure!(!(is_file && source.path.exists()), "a VM could be started on the old disk");
    // A crash right after the commit takes the figures away, and the report says so.
    let has_figures = !(outcome.was_restarted && report["notes"].to_string().contains("figures and digest are lost"));
    if has_figures {
        let is_compared = plan.verify != "off";
        // What strategies that iterate copy last is not compared, and with `full` the report says so.
        let is_whole = report["verification"]["bytes_proved"] == report["bytes_total"];
        let may_be_less = plan.verify == "full" && plan.strategy.ends_with("dbt") && !is_whole;
        ensure!(report["verified"] == (is_compared && !may_be_less), "verify {}: {report}", plan.verify);
        ensure!(!is_compared || report["equal"] == true, "source and target were not equal: {report}");
        // What a surrogate or a cache held is in the target alone.
        let held_none = plan.cache_from(source.place) != Some("write-back");
        let is_complete = report["redirection"].is_null() && held_none;
        if let (Some(kept), "full", true) = (&kept, plan.verify, is_file && is_complete) {
            ensure!(report["digest"] == digest_of(kept)?, "the digest is not that of the kept source: {report}");
        }
    }
    Ok(Whereabouts {
        place: plan.place,
        path: outcome.target.clone(),
        kept: kept.filter(|_| is_file).map(|kept| (source.place, kept)),
    })
}

/// The source holds the volume, and nothing is left of the target.
fn stayed(outcome: &Outcome) -> anyhow::Result<Whereabouts> {
    let mut here = outcome.source.clone();
    let was_kept = here.kept.as_ref().is_some_and(|(_, path)| *path == outcome.target);
    if !was_kept {
        here.kept = None;
    } else if !outcome.target.exists() {
        bail!("a file that was there before is gone: {}", outcome.target.display());
    }
    Ok(here)
}

fn volume_is_at(testbed: &Testbed, name: &str, here: &Whereabouts) -> anyhow::Result<()> {
    let path = &here.path;
    let volume = testbed.daemon.json(&["volume", "show", name])?;
    let backend = volume["backend"].as_str().context("a volume has a backend")?;
    let address = testbed.address(here.place, path);
    ensure!(backend.split(',').next() == Some(&*address), "the volume is in {backend}, not in {address}");
    ensure!(volume["state"] == "serving" && volume["job"].is_null(), "the volume is not at rest: {volume}");
    ensure!(path.exists(), "the volume's file is gone");
    Ok(())
}

/// The history and the audit log say of this job what happened, once.
fn history_tells(testbed: &Testbed, plan: &Plan, outcome: &Outcome) -> anyhow::Result<()> {
    let id = &outcome.job["id"];
    let jobs = testbed.daemon.json(&["jobs", "--all"])?;
    let of_it: Vec<&Value> = jobs.as_array().context("a list")?.iter().filter(|job| job["id"] == *id).collect();
    let [job] = of_it[..] else { bail!("job {id} is {} times in the history", of_it.len()) };
    ensure!(job["state"] == outcome.job["state"], "the history says something else: {job}");
    let names = |what: &str, place: Place, path: &Path| {
        let address = testbed.address(place, path);
        job[what].as_str().is_some_and(|told| told.contains(address.trim_start_matches("file:")))
    };
    ensure!(names("source", outcome.source.place, &outcome.source.path), "the history names another source: {job}");
    ensure!(names("target", plan.place, &outcome.target), "the history names another target: {job}");
    ensure!(job["finished_unix_ms"].is_u64(), "a job that is over has an end: {job}");

    let audit = std::fs::read_to_string(testbed.daemon.state().join("audit.jsonl")).context("reading the audit log")?;
    let lines = audit.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>();
    let lines = lines.context("a line of the audit log is not whole")?;
    let ends: Vec<&Value> =
        lines.iter().filter(|line| line["action"] == "move.end" && line["request"]["job"] == *id).collect();
    ensure!(ends.len() == 1 || (ends.is_empty() && outcome.was_restarted), "the audit log has {} ends", ends.len());
    ensure!(ends.iter().all(|end| end["request"]["state"] == job["state"]), "the audit log says {ends:?}");
    Ok(())
}

fn nothing_is_left_in_the_state(testbed: &Testbed, parties: &[Party]) -> anyhow::Result<()> {
    let state = testbed.daemon.state();
    let mut found = BTreeSet::new();
    list(&state, &state, &mut found)?;
    let is_expected = |name: &str| {
        let is_job = name.strip_prefix("jobs/").and_then(|name| name.strip_suffix(".json"));
        let is_retired = name.strip_prefix("retired/").is_some_and(|name| name.ends_with(".blocks"));
        ["lock", "audit.jsonl", "remembered.json", "alive", "jobs/last", "surrogates/fast.json", "caches/ssd.json"]
            .contains(&name)
            || parties.iter().any(|party| *name == format!("volumes/{}/journal", party.name))
            || is_job.is_some_and(|id| id.parse::<u64>().is_ok())
            || is_retired
    };
    let orphans: Vec<&String> = found.iter().filter(|name| !is_expected(name)).collect();
    ensure!(orphans.is_empty(), "left behind in the state directory: {orphans:?}");
    Ok(())
}

fn list(root: &Path, directory: &Path, found: &mut BTreeSet<String>) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(directory).context("listing the state directory")? {
        let path = entry.context("listing the state directory")?.path();
        if path.is_dir() {
            list(root, &path, found)?;
        } else {
            let name = path.strip_prefix(root).context("a file is below its directory")?;
            found.insert(name.display().to_string());
        }
    }
    Ok(())
}

/// Where volumes can be there is nothing but the volumes and what was kept on purpose.
fn nothing_is_left_at_the_places(testbed: &Testbed, parties: &[Party]) -> anyhow::Result<()> {
    let is_expected = |path: &PathBuf| {
        let is_of = |here: &Whereabouts| here.path == *path || here.kept.as_ref().is_some_and(|(_, kept)| kept == path);
        parties.iter().any(|party| is_of(&party.here))
    };
    let orphans: Vec<PathBuf> = testbed.files()?.into_iter().filter(|path| !is_expected(path)).collect();
    ensure!(orphans.is_empty(), "left behind: {orphans:?}");
    Ok(())
}

/// The daemon has no file open but those that volumes are in.
fn nothing_is_left_open(testbed: &Testbed, parties: &[Party]) -> anyhow::Result<()> {
    let pid = testbed.daemon.pid().context("the daemon runs")?;
    let state = testbed.daemon.state();
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).context("listing descriptors")?;
    for entry in descriptors.flatten() {
        let Ok(path) = std::fs::read_link(entry.path()) else { continue };
        let is_volume = path.starts_with(testbed.folder()) || path.starts_with("/dev/loop");
        let is_used = parties.iter().any(|party| party.here.path == path);
        let is_own = path.starts_with(&state) || path == testbed.folder().join("log") || is_used;
        ensure!(!is_volume || is_own, "the daemon still has {} open", path.display());
    }
    Ok(())
}
