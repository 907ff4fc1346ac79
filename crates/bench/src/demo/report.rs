//! The report that a person reads.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use transhume_guest::LoadResult;

/// What the load felt in one stretch of time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Feeling {
    pub(super) requests: u64,
    pub(super) length: Duration,
    /// The median of the 99th percentiles of its tenths of seconds.
    pub(super) p99: Duration,
    pub(super) longest: Duration,
}

impl Feeling {
    fn iops(&self) -> f64 {
        let seconds = self.length.as_secs_f64();
        if seconds > 0.0 { self.requests as f64 / seconds } else { 0.0 }
    }
}

/// Everything that is told at the end.
#[derive(Default)]
pub(super) struct DemoSummary {
    pub(super) scene: String,
    pub(super) disk: (PathBuf, PathBuf, u64),
    pub(super) offered: u32,
    pub(super) boot: Option<Duration>,
    pub(super) adopt: Option<Duration>,
    pub(super) release: Option<Duration>,
    pub(super) before: Feeling,
    pub(super) adopting: Option<Feeling>,
    pub(super) during: Feeling,
    pub(super) releasing: Option<Feeling>,
    pub(super) after: Feeling,
    /// What `transhume move --json` printed.
    pub(super) report: Value,
    pub(super) kept: PathBuf,
    pub(super) b3sum: Option<String>,
    pub(super) plain_copy: Duration,
    pub(super) load_result: LoadResult,
    pub(super) whole: Duration,
}

const RULE: &str = "  ────────────────────────────────────────────────────────────────────────────";

impl DemoSummary {
    /// Whether everything was compared and equal, and the load found nothing wrong.
    pub(super) fn is_right(&self) -> bool {
        let digest_agrees = match (&self.b3sum, self.report["digest"].as_str()) {
            (Some(printed), Some(told)) => printed == told,
            // Without b3sum there is nothing to hold it against; without a digest `full` was not carried out.
            (None, Some(_)) => true,
            (_, None) => false,
        };
        self.load_result.is_right() && self.report["equal"] == true && self.report["verified"] == true && digest_agrees
    }

    /// The whole report.
    pub(super) fn tell(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.tell_to(&mut out);
        out
    }

    fn tell_to(&self, out: &mut String) -> std::fmt::Result {
        let (source, target, bytes) = &self.disk;
        let end = if self.is_right() { "and nothing was lost" } else { "BUT SOMETHING IS WRONG" };
        writeln!(out, "\n  A running disk was moved, {end}\n{RULE}")?;
        writeln!(out, "  guest        {}", self.scene)?;
        let load = format!("{} requests/s of 8 KiB, 70 % reads, every block checked", self.offered);
        writeln!(out, "  load         {load}")?;
        writeln!(out, "  disk         {} MiB, {}", bytes >> 20, shown(source))?;
        writeln!(out, "  moved to     {}", shown(target))?;
        writeln!(out)?;
        self.tell_times(out)?;
        writeln!(out)?;
        self.tell_feelings(out)?;
        writeln!(out)?;
        self.tell_proof(out)?;
        write!(out, "{RULE}\n  the demo took {}", human(self.whole))
    }

    fn tell_times(&self, out: &mut String) -> std::fmt::Result {
        let seconds = self.report["seconds"].as_f64().unwrap_or(f64::NAN);
        let plain = self.plain_copy.as_secs_f64();
        if let Some(boot) = self.boot {
            writeln!(out, "  boot         {}", human(boot))?;
        }
        if let (Some(adopt), Some(release)) = (self.adopt, self.release) {
            writeln!(out, "  adopt        {}   (release {})", human(adopt), human(release))?;
        }
        let phase = |name: &str| self.report["phases"][name].as_f64().unwrap_or(0.0);
        let digest = self.report["verification"]["digest_seconds"].as_f64().unwrap_or(0.0);
        writeln!(
            out,
            "  move         {seconds:.2} s   (copying {:.2} s, comparing {:.2} s; then the digest {digest:.2} s)",
            phase("copying"),
            phase("verifying")
        )?;
        writeln!(out, "  plain copy   {plain:.2} s   (cp of the same bytes between the same volumes, then sync)")?;
        let count = |name: &str| mib(self.report[name].as_u64().unwrap_or(0));
        writeln!(
            out,
            "  bytes        {} copied, {} of zeroes not copied, {} mirrored while the guest wrote",
            count("bytes_copied"),
            count("bytes_zero"),
            count("bytes_mirrored")
        )
    }

    fn tell_feelings(&self, out: &mut String) -> std::fmt::Result {
        let columns = [
            ("before", Some(self.before)),
            ("adopting", self.adopting),
            ("moving", Some(self.during)),
            ("releasing", self.releasing),
            ("after", Some(self.after)),
        ];
        let columns: Vec<(&str, Feeling)> =
            columns.into_iter().filter_map(|(name, feeling)| Some((name, feeling?))).collect();
        let mut line = |name: &str, cell: &dyn Fn(&str, &Feeling) -> String| {
            let cells: String = columns.iter().map(|(name, feeling)| format!("{:>11}", cell(name, feeling))).collect();
            writeln!(out, "  {name:<13}{cells}")
        };
        line("guest", &|name, _| name.to_owned())?;
        line("IOPS", &|_, feeling| format!("{:.0}", feeling.iops()))?;
        line("p99", &|_, feeling| human(feeling.p99))?;
        line("longest", &|_, feeling| human(feeling.longest))?;
        let stall = self.report["stall_us_max"].as_u64().unwrap_or(0);
        let window = self.report["switchover"]["window_us"].as_u64().unwrap_or(0);
        writeln!(
            out,
            "  longest stall at the switchover {} (new requests were held for {})",
            human(Duration::from_micros(stall)),
            human(Duration::from_micros(window))
        )
    }

    fn tell_proof(&self, out: &mut String) -> std::fmt::Result {
        let verification = &self.report["verification"];
        let chunks = verification["chunks"].as_u64().unwrap_or(0);
        let bytes = mib(verification["bytes"].as_u64().unwrap_or(0));
        let cache =
            if verification["past_page_cache"] == true { "past the page cache" } else { "through the page cache" };
        let equal = match self.report["equal"].as_bool() {
            Some(true) => "all equal",
            Some(false) => "NOT EQUAL",
            None => "nothing compared",
        };
        writeln!(out, "  compared     {bytes} in {chunks} chunks on both sides, {cache}: {equal}")?;
        let digest = self.report["digest"].as_str().unwrap_or("none");
        writeln!(out, "  digest       BLAKE3 of the frozen source {}...", digest.get(..16).unwrap_or(digest))?;
        let agrees = match &self.b3sum {
            Some(printed) if printed == digest => "b3sum of it prints the same",
            Some(_) => "b3sum of it prints ANOTHER",
            None => "b3sum is not installed, so nobody held it against that",
        };
        writeln!(out, "               {agrees}; it is kept as {}", shown(&self.kept))?;
        let LoadResult { blocks, wrong, slots_rewritten, .. } = &self.load_result;
        let found =
            if self.load_result.is_right() { "nothing lost, stale, torn or refused" } else { "SOMETHING IS WRONG" };
        writeln!(out, "  the guest    read its whole disk again: {blocks} blocks, {wrong} wrong, {found}")?;
        writeln!(out, "               ({slots_rewritten} places were rewritten during the demo)")?;
        for complaint in self.load_result.complaints.iter().take(5) {
            writeln!(out, "               {complaint}")?;
        }
        Ok(())
    }
}

fn shown(path: &Path) -> String {
    let own = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(&own).unwrap_or(path).display().to_string()
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn human(time: Duration) -> String {
    let us = time.as_micros();
    match us {
        0..1_000 => format!("{us} us"),
        1_000..10_000 => format!("{:.1} ms", time.as_secs_f64() * 1e3),
        10_000..1_000_000 => format!("{:.0} ms", time.as_secs_f64() * 1e3),
        _ => format!("{:.1} s", time.as_secs_f64()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn right_story() -> DemoSummary {
        let load_result = LoadResult { blocks: 10, is_done: Some(true), ..LoadResult::default() };
        let report = json!({ "equal": true, "verified": true, "digest": "0123456789abcdef0123", "seconds": 1.5 });
        DemoSummary { load_result, report, b3sum: Some("0123456789abcdef0123".into()), ..DemoSummary::default() }
    }

    #[test]
    fn a_demo_that_compared_nothing_or_found_a_fault_is_not_right() {
        assert!(right_story().is_right());
        let mut summary = right_story();
        summary.report["equal"] = Value::Null;
        assert!(!summary.is_right());
        let mut summary = right_story();
        summary.b3sum = Some("another".into());
        assert!(!summary.is_right());
        let mut summary = right_story();
        summary.load_result.complaints.push("stale".into());
        assert!(!summary.is_right());
        assert!(summary.tell().contains("BUT SOMETHING IS WRONG"));
    }

    #[test]
    fn times_are_told_in_the_unit_that_fits() {
        assert_eq!(human(Duration::from_micros(250)), "250 us");
        assert_eq!(human(Duration::from_micros(2_500)), "2.5 ms");
        assert_eq!(human(Duration::from_millis(250)), "250 ms");
        assert_eq!(human(Duration::from_millis(2_500)), "2.5 s");
    }
}
