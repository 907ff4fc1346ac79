//! The report that a person reads.

use std::fmt::Write;
use std::time::Duration;

use serde_json::Value;
use transhume_guest::{LoadResult, NetworkReport, ProbeSeries};

use super::plot::{self, Mark};

/// Everything that is told at the end.
pub(super) struct DemoVmSummary {
    pub(super) scene: String,
    pub(super) network: NetworkReport,
    /// What happened, counted from the client's start.
    pub(super) marks: Vec<Mark>,
    pub(super) load_result: LoadResult,
    /// Why the guest was not found as it was.
    pub(super) complaint: Option<String>,
    pub(super) seconds: f64,
    /// From QEMU's stop here to its start there.
    pub(super) stopped: Duration,
    /// What the daemon says of the move.
    pub(super) shown: Value,
    pub(super) whole: Duration,
}

const RULE: &str = "  ────────────────────────────────────────────────────────────────────────────";

impl DemoVmSummary {
    /// Whether nothing was lost that a client or the guest would miss. Requests by UDP may be.
    pub(super) fn is_right(&self) -> bool {
        let network = &self.network;
        let has_answers = network.http.answered() > 0 && network.tcp.answered() > 0 && network.udp.answered() > 0;
        let is_reached = has_answers && network.http.lost() + network.tcp.lost() == 0;
        let is_consistent = network.http_backwards == 0 && network.tcp_broken.is_none();
        is_reached && is_consistent && self.is_unharmed() && self.shown["state"] == "done"
    }

    fn is_unharmed(&self) -> bool {
        let LoadResult { blocks, wrong, memory, complaints, .. } = &self.load_result;
        let was_checked = self.complaint.is_none() && *blocks > 0 && memory.pages > 0;
        was_checked && wrong + memory.wrong == 0 && complaints.is_empty()
    }

    /// The whole report.
    pub(super) fn tell(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.tell_to(&mut out);
        out
    }

    fn tell_to(&self, out: &mut String) -> std::fmt::Result {
        let end = if self.is_right() { "and nothing was lost" } else { "BUT SOMETHING IS WRONG" };
        writeln!(out, "\n  A running VM was moved to another host, {end}\n{RULE}")?;
        writeln!(out, "  guest        {}", self.scene)?;
        self.tell_move(out)?;
        writeln!(out, "\n  the longest time that a page took, per tenth of a second")?;
        out.push_str(&plot::draw(&self.network.http, &self.marks));
        for Mark { letter, what, unix_ms } in &self.marks {
            writeln!(out, "  {letter} {:>7.2} s  {what}", unix_ms / 1e3)?;
        }
        writeln!(out)?;
        self.tell_client(out)?;
        writeln!(out)?;
        self.tell_guest(out)?;
        write!(out, "{RULE}\n  the demo took {:.1} s", self.whole.as_secs_f64())
    }

    fn tell_move(&self, out: &mut String) -> std::fmt::Result {
        let gap = self.network.udp.longest_gap().length;
        let memory = &self.shown["memory"];
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let disks = self.shown["disks"].as_array().into_iter().flatten();
        let disk_bytes: u64 = disks
            .map(|job| ["bytes_copied", "bytes_mirrored"].iter().map(|name| count(&job["report"][*name])).sum::<u64>())
            .sum();
        let phase = |name: &str| {
            let reports = self.shown["disks"].as_array().into_iter().flatten();
            reports.filter_map(|job| job["report"]["phases"][name].as_f64()).fold(0.0, f64::max)
        };
        writeln!(
            out,
            "  move         {:.2} s   (the disk: copying {:.2} s, comparing {:.2} s)",
            self.seconds,
            phase("copying"),
            phase("verifying")
        )?;
        writeln!(
            out,
            "  downtime     {:.0} ms   (the longest time without an answer by UDP; QEMU had it stopped for {:.0} ms)",
            gap.as_secs_f64() * 1e3,
            self.stopped.as_secs_f64() * 1e3
        )?;
        let passes = count(&memory["iterations"]);
        writeln!(out, "  memory       {} sent, {passes} passes", mib(count(&memory["bytes_sent"])))?;
        writeln!(out, "  disk         {} sent, what the guest wrote meanwhile among it", mib(disk_bytes))
    }

    fn tell_client(&self, out: &mut String) -> std::fmt::Result {
        let NetworkReport { udp, http, http_retries, http_backwards, tcp, tcp_broken, .. } = &self.network;
        let kept = |series: &ProbeSeries| format!("{} of {} answered", series.answered(), series.made());
        let slow = |series: &ProbeSeries| {
            format!(
                "p50 {:.1} ms, longest {:.0} ms",
                series.percentile(0.5).as_secs_f64() * 1e3,
                series.longest().as_secs_f64() * 1e3
            )
        };
        writeln!(out, "  pages        {}, {}", kept(http), slow(http))?;
        let backwards = match http_backwards {
            0 => "none went back in time".to_owned(),
            count => format!("{count} WENT BACK IN TIME"),
        };
        writeln!(out, "               {} lost, {http_retries} tries repeated, {backwards}", http.lost())?;
        let connection = match tcp_broken {
            None => "the same connection all the time".to_owned(),
            Some(why) => format!("BROKEN: {why}"),
        };
        writeln!(out, "  TCP          {}, {}; {connection}", kept(tcp), slow(tcp))?;
        writeln!(out, "  UDP          {}, nobody repeats those", kept(udp))
    }

    fn tell_guest(&self, out: &mut String) -> std::fmt::Result {
        let LoadResult { blocks, wrong, slots_rewritten, memory, complaints, .. } = &self.load_result;
        let found = if self.is_unharmed() { "nothing lost, stale or torn" } else { "SOMETHING IS WRONG" };
        writeln!(out, "  the guest    read its whole disk again: {blocks} blocks, {wrong} wrong, {found}")?;
        writeln!(
            out,
            "               and its memory: {} pages, {} wrong ({slots_rewritten} places of the disk and {} pages",
            memory.pages, memory.wrong, memory.rewritten
        )?;
        writeln!(out, "               were rewritten during the demo)")?;
        for complaint in complaints.iter().chain(&self.complaint).take(5) {
            writeln!(out, "               {complaint}")?;
        }
        Ok(())
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::json;
    use transhume_guest::{MemoryTotals, Probe};

    use super::*;

    fn right_story() -> DemoVmSummary {
        let answered = || ProbeSeries::new(vec![Probe { at: Duration::ZERO, latency: Some(Duration::from_millis(1)) }]);
        let network = NetworkReport {
            started: Instant::now(),
            udp: answered(),
            http: answered(),
            http_retries: 0,
            http_backwards: 0,
            tcp: answered(),
            tcp_broken: None,
        };
        let memory = MemoryTotals { pages: 4, wrong: 0, rewritten: 0 };
        DemoVmSummary {
            scene: String::new(),
            network,
            marks: Vec::new(),
            load_result: LoadResult { blocks: 10, memory, ..LoadResult::default() },
            complaint: None,
            seconds: 1.0,
            stopped: Duration::from_millis(100),
            shown: json!({ "state": "done" }),
            whole: Duration::from_secs(9),
        }
    }

    #[test]
    fn a_demo_that_lost_a_page_or_a_connection_or_checked_nothing_is_not_right() {
        assert!(right_story().is_right(), "{}", right_story().tell());
        let mut summary = right_story();
        summary.network.http = ProbeSeries::new(vec![Probe { at: Duration::ZERO, latency: None }]);
        assert!(!summary.is_right());
        let mut summary = right_story();
        summary.network.tcp_broken = Some("reset".into());
        assert!(!summary.is_right());
        let mut summary = right_story();
        summary.load_result.memory.pages = 0;
        assert!(!summary.is_right());
        let mut summary = right_story();
        summary.load_result.wrong = 1;
        assert!(!summary.is_right() && summary.tell().contains("BUT SOMETHING IS WRONG"));
    }
}
