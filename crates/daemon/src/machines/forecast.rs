//! What the move of a machine takes: forecast from what is seen before, and kept beside what it took.
//!
//! ```text
//!   the disks' plans ─┐
//!   memory that exists, how fast it changes (QEMU) ─┼─▶ seconds, downtime, whether it converges
//!   how fast the other host is reached (probe, earlier moves) ─┘
//! ```

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use api::v1::{Job, JobState, Plan, Report, Verify, VmDisk, VmMove, VmMoveRequest};
use block::Bytes;
use env::Moment;
use migrate::stream::BoxTransport;
use tokio::io::AsyncWriteExt;
use vm::machine::{MachineFacts, MemoryUse};

use super::channel::{Ask, receive, send};
use super::{Machine, Machines, attempt};
use crate::daemon::Daemon;
use crate::hosts::HostName;

/// How fast memory goes where nobody has seen the network: 10 Gbit/s.
const MEMORY_BYTES_PER_SECOND: f64 = 1.25e9;
/// How fast two QEMUs and two daemons carry memory, and two daemons disks, over a network that is faster. Measured on 4
/// hyperthreads that had both hosts; the first move to a host shows what it is there.
const MEMORY_CARRIED: f64 = 0.7e9;
const DISK_CARRIED: f64 = 1.1e9;
/// How fast QEMU goes through memory that was never written.
const SCAN_BYTES_PER_SECOND: f64 = 8e9;
/// What every move takes beside disks and memory: QEMU's start at the target, records, the looks of whoever waits. The first move to a
/// host shows what it is there, and no more than the second number is believed.
const SECONDS_LEAST: f64 = 0.15;
const SECONDS_BESIDE_MAX: f64 = 10.0;
/// What a disk takes that is still to be adopted.
const ADOPTION_SECONDS: f64 = 0.1;
/// What a switchover takes beside what is left of the memory: device state, the commit, two daemons.
const SWITCHOVER: Duration = Duration::from_millis(35);
/// How much of the downtime that QEMU may have for the rest of the memory it takes: it stops the guest as soon as it believes
/// that the rest fits, and the rest has pages without data.
const LIMIT_SHARE: f64 = 0.4;
/// More passes are none that come to an end.
const PASSES_MAX: u32 = 100;
/// The rest fits if it is so much larger than what fits: QEMU's own idea of the rate is no better.
const FITS_NEARLY: f64 = 1.02;
/// A guest that changes more than this of what the link carries is not waited for.
const DIRTY_SHARE_MAX: f64 = 0.9;
/// Older ones clear a page's dirty bit and leave it writable in an emulated processor's TLB: what is written through that entry is
/// not sent. Mended by "physmem: Fix migration dirty bitmap coherency with TCG memory access" (March 2024). 7.2.22 of Debian loses
/// writes in most moves over a link that its guest keeps busy, 10.0 was not seen to.
const KEEPS_EMULATED_SINCE: (u64, u64) = (9, 0);
/// The link is asked with so many bytes at first and at most, until that takes so long.
const PROBE_BYTES_FIRST: u64 = 256 << 10;
pub(super) const PROBE_BYTES_MAX: u64 = 64 << 20;
const PROBE_ENOUGH: Duration = Duration::from_millis(100);
const PROBE_LIMIT: Duration = Duration::from_secs(3);
const PIECE_BYTES: usize = 256 << 10;
/// A move that has sent less memory says nothing of the link.
const SHOWN_BYTES_MIN: u64 = 64 << 20;
/// A plan is the forecast of the same move for so long.
const PLAN_AGE_MAX: Duration = Duration::from_secs(600);

/// What is expected of a move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MoveForecast {
    pub(super) seconds: f64,
    pub(super) downtime: Duration,
}

/// The plan that somebody has asked for last.
pub(super) struct PlannedMove {
    request: VmMoveRequest,
    made: Moment,
    forecast: MoveForecast,
}

/// What is expected of a move that has begun: by its plan, or by what the disks' own forecasts come to.
pub(super) struct BegunForecast {
    pub(super) planned: Option<MoveForecast>,
    pub(super) memory: MemoryForecast,
    /// What it takes beside disks and memory, in seconds.
    pub(super) beside: f64,
}

impl BegunForecast {
    /// With the moves of its disks, which are forecast when they begin.
    pub(super) fn of(&self, disks: &[Job]) -> Option<MoveForecast> {
        if self.planned.is_some() || !self.memory.converges {
            return self.planned;
        }
        let seconds = disks.iter().map(|job| Some(job.prediction.as_ref()?.seconds)).sum::<Option<f64>>()?;
        Some(together(seconds, self.memory, self.beside))
    }
}

/// What the last move to a host has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Shown {
    /// How fast the memory went, in bytes a second.
    memory: Option<f64>,
    /// How fast the disks were copied, in bytes a second.
    disks: Option<f64>,
    /// What the move took beside both, in seconds.
    beside: Option<f64>,
}

impl Shown {
    /// What `last`, which is done, has shown.
    fn by(last: &VmMove) -> Self {
        let sent = last.memory.as_ref().map_or(0, |memory| memory.bytes_sent);
        let memory =
            last.memory_bytes_per_second.filter(|rate| sent >= SHOWN_BYTES_MIN && *rate > 0).map(|rate| rate as f64);
        let reports = last.disks.iter().filter_map(|job| job.report.as_ref());
        let copied = |report: &Report| (report.bytes_copied, report.phases.get("copying").copied().unwrap_or_default());
        let (bytes, seconds) = reports.map(copied).fold((0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let disks = (bytes >= SHOWN_BYTES_MIN && seconds > 0.0).then(|| bytes as f64 / seconds);
        // Of a move whose disks were held back for the memory, or the other way round, nobody can tell what was beside them.
        let beside = memory.map(|rate| last.elapsed_ms as f64 / 1e3 - seconds - sent as f64 / rate);
        let beside = beside.map(|seconds| seconds.clamp(SECONDS_LEAST, SECONDS_BESIDE_MAX));
        Self { memory, disks, beside }
    }

    /// What is known of the memory of a move that begins without a plan, without waiting.
    pub(super) fn memory_known(
        &self,
        request: &VmMoveRequest,
        (facts, seen): (&MachineFacts, MemoryUse),
    ) -> MemoryKnown {
        let shown = self.memory.unwrap_or(MEMORY_CARRIED);
        let rate = request.bandwidth.map_or(shown, |limit| shown.min(limit as f64));
        MemoryKnown::new(facts, seen, rate, attempt::downtime_limit(request))
    }

    /// What the next move takes beside disks and memory, in seconds.
    pub(super) fn beside(&self) -> f64 {
        self.beside.unwrap_or(SECONDS_LEAST)
    }
}

/// What is known of a machine's memory, and of the way that it takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryKnown {
    pub(super) total: f64,
    pub(super) resident: f64,
    /// What the guest changes in a second; nothing if nobody has looked.
    pub(super) dirty: f64,
    /// How many bytes a second go.
    pub(super) rate: f64,
    pub(super) downtime_limit: Duration,
}

/// What follows for the memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MemoryForecast {
    pub(super) seconds: f64,
    pub(super) downtime: Duration,
    pub(super) converges: bool,
}

impl MemoryKnown {
    pub(super) fn new(facts: &MachineFacts, seen: MemoryUse, rate: f64, downtime_limit: Duration) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "bytes of a memory, for a forecast")]
        let [total, resident, dirty] = [
            facts.memory_bytes,
            seen.resident_bytes.unwrap_or(facts.memory_bytes),
            seen.dirty_bytes_per_second.unwrap_or_default(),
        ]
        .map(|bytes| bytes as f64);
        Self { total, resident, dirty, rate: rate.max(1.0), downtime_limit }
    }

    /// Pass after pass: each sends what the guest has changed during the one before, until the rest fits into the limit.
    pub(super) fn forecast(&self) -> MemoryForecast {
        let fits = self.rate * self.downtime_limit.as_secs_f64();
        let (mut seconds, mut left) = ((self.total - self.resident).max(0.0) / SCAN_BYTES_PER_SECOND, self.resident);
        let mut converges = false;
        for _ in 0..PASSES_MAX {
            let span = (left - fits).max(0.0) / self.rate;
            seconds += span;
            left = left.min(fits) + (self.dirty * span).min(self.resident);
            if left <= fits * FITS_NEARLY {
                converges = true;
                break;
            }
        }
        converges &= self.dirty <= self.rate * DIRTY_SHARE_MAX || self.resident <= fits;
        let rest = left.min(fits) / self.rate * LIMIT_SHARE;
        let downtime = SWITCHOVER + Duration::from_secs_f64(rest);
        MemoryForecast { seconds: seconds + downtime.as_secs_f64(), downtime, converges }
    }
}

/// What somebody should know of a machine whose memory changes too fast, before it is moved.
pub(super) fn notes(known: &MemoryKnown, request: &VmMoveRequest) -> Vec<String> {
    if known.forecast().converges {
        return Vec::new();
    }
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let mut ways = vec!["more links or a higher --bandwidth"];
    if !request.auto_converge {
        ways.insert(0, "--auto-converge, which slows the guest down");
    }
    if request.postcopy {
        // The guest does not wait for its memory to converge.
        return Vec::new();
    }
    ways.extend(["a longer --downtime-limit", "--postcopy, which docs/vm.md tells the price of"]);
    vec![format!(
        "the guest changes {:.0} MiB/s of its memory, and about {:.0} MiB/s can be sent: the move may never end. What helps: {}",
        mib(known.dirty),
        mib(known.rate),
        ways.join(", ")
    )]
}

/// What somebody should know of an emulated machine: an old QEMU loses some of what its guest writes to its memory.
pub(super) fn emulation_note(facts: &MachineFacts) -> Option<String> {
    let version = (facts.version.major, facts.version.minor);
    (facts.accelerator != "kvm" && version < KEEPS_EMULATED_SINCE).then(|| {
        format!(
            "the guest is emulated (TCG) by QEMU {}, which can lose some of the guest's writes to its memory in any live migration. \
             What helps: QEMU 9.0 or later, or a fast link; guests under KVM are not concerned",
            facts.version
        )
    })
}

/// What of a request changes nothing of what a move takes.
fn of_no_weight(request: &VmMoveRequest) -> VmMoveRequest {
    VmMoveRequest { delete_source: false, no_persist: false, deadline_ms: None, ..request.clone() }
}

impl Daemon {
    /// How fast memory and disks go to `host`, in bytes a second: what earlier moves have shown, or what is measured now, within
    /// what was asked for.
    pub(super) async fn rates_to(
        &self,
        host: &HostName,
        request: &VmMoveRequest,
        (connections, shown): (u16, &Shown),
    ) -> (f64, f64) {
        let within = |rate: f64| request.bandwidth.map_or(rate, |limit| rate.min(limit as f64));
        if let (Some(memory), Some(disks)) = (shown.memory, shown.disks) {
            return (within(memory), within(disks));
        }
        let link = env::timeout(&*self.env, PROBE_LIMIT, self.probe(host, connections)).await.flatten();
        let link = link.unwrap_or(MEMORY_BYTES_PER_SECOND);
        let memory = shown.memory.unwrap_or_else(|| slower(link, MEMORY_CARRIED));
        let disks = shown.disks.unwrap_or_else(|| slower(link, DISK_CARRIED));
        (within(memory), within(disks))
    }

    /// What the last move of any machine to `host` has shown, over as many connections.
    pub(super) fn moves_shown(&self, host: &HostName, connections: u16) -> Shown {
        if let Some(shown) = self.machines.shown.lock().get(&(host.as_str().to_owned(), connections)) {
            return *shown;
        }
        // Of those before this process's start the machines' records tell.
        let moves = self.machines.list().into_iter().filter_map(|machine| machine.document().last_move);
        let is_alike = |last: &VmMove| last.to == host.as_str() && connections_shown(last) == Some(connections);
        let last = moves.filter(is_alike).max_by_key(|last| last.started_unix_ms);
        last.map_or_else(Shown::default, |last| Shown::by(&last))
    }

    /// How many bytes a second reach the daemon of `host` over so many connections. Nothing if it does not answer.
    async fn probe(&self, host: &HostName, connections: u16) -> Option<f64> {
        let each = (0..connections.max(1)).map(|number| self.probe_one(host, number));
        let rates = futures::future::join_all(each).await;
        rates.into_iter().collect::<Option<Vec<f64>>>().map(|rates| rates.into_iter().sum())
    }

    async fn probe_one(&self, host: &HostName, number: u16) -> Option<f64> {
        let mut channel = self.hosts.machine_connection(host, number).await.ok()?;
        let mut bytes = PROBE_BYTES_FIRST;
        loop {
            let began = self.env.now();
            // A daemon that does not know the question ends the connection.
            throw(&mut channel, bytes).await.ok()?;
            let span = self.env.now().since(began);
            if span >= PROBE_ENOUGH || bytes >= PROBE_BYTES_MAX {
                return Some(bytes as f64 / span.as_secs_f64().max(1e-6));
            }
            bytes *= 4;
        }
    }

    /// How long the disks take. One that is no volume yet has no plan.
    pub(super) fn disk_seconds(&self, disk: &VmDisk, plan: Option<&Plan>, request: &VmMoveRequest, rate: f64) -> f64 {
        if let Some(plan) = plan {
            // What its own plan does not know: how fast the other host is really reached.
            let (bytes, own) = (plan.bytes_to_copy as f64, plan.copy_bytes_per_second.max(1) as f64);
            return plan.seconds + (bytes / rate - bytes / own).max(0.0);
        }
        let allocated = std::fs::metadata(&disk.file).ok().filter(std::fs::Metadata::is_file);
        let bytes = allocated.map_or(disk.size_bytes, |found| (found.blocks() * 512).min(disk.size_bytes));
        let copied = if request.verify == Verify::Full { 2.0 } else { 1.0 };
        ADOPTION_SECONDS + copied * Bytes(bytes).get() as f64 / rate
    }

    /// Keeps what a plan has said, for the move that may follow.
    pub(super) fn keep_machine_plan(&self, machine: &Machine, request: &VmMoveRequest, forecast: MoveForecast) {
        let planned = PlannedMove { request: of_no_weight(request), made: self.env.now(), forecast };
        *machine.planned.lock() = Some(planned);
    }

    /// What the plan of the same move has said a short while ago.
    pub(super) fn planned_forecast(&self, machine: &Machine, request: &VmMoveRequest) -> Option<MoveForecast> {
        let planned = machine.planned.lock().take()?;
        let is_of_it = planned.request == of_no_weight(request);
        (is_of_it && self.env.now().since(planned.made) <= PLAN_AGE_MAX).then_some(planned.forecast)
    }
}

impl Machines {
    /// Remembers what a move that has ended has shown.
    pub(super) fn note_shown(&self, over: &VmMove) {
        if let Some(connections) = connections_shown(over) {
            self.shown.lock().insert((over.to.clone(), connections), Shown::by(over));
        }
    }
}

/// Over how many connections a move has shown something.
fn connections_shown(over: &VmMove) -> Option<u16> {
    over.connections.filter(|_| over.state == JobState::Done && over.memory.is_some())
}

/// How fast something is that is done in two steps at the same time: as the slower one, or less if both are about as slow.
fn slower(one: f64, other: f64) -> f64 {
    (one.max(1.0).powi(-2) + other.max(1.0).powi(-2)).powf(-0.5)
}

/// The forecast of all of it.
pub(super) fn together(disk_seconds: f64, memory: MemoryForecast, beside: f64) -> MoveForecast {
    MoveForecast { seconds: beside + disk_seconds + memory.seconds, downtime: memory.downtime }
}

/// Sends so many bytes that mean nothing, and waits until they have arrived.
async fn throw(channel: &mut BoxTransport, bytes: u64) -> std::io::Result<()> {
    send(channel, &Ask::Probe { bytes }).await?;
    // Bytes that no compression shortens are not needed: nothing here compresses.
    let piece = vec![0x5a; PIECE_BYTES];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(PIECE_BYTES as u64) as usize;
        channel.write_all(&piece[..length]).await?;
        left -= length as u64;
    }
    channel.flush().await?;
    receive::<super::channel::Answer>(channel).await.map(drop)
}

#[cfg(test)]
mod tests {
    use api::v1::VmMemory;

    use super::*;

    const MIB: f64 = 1_048_576.0;

    fn known(resident: f64, dirty: f64) -> MemoryKnown {
        let limit = Duration::from_millis(300);
        MemoryKnown {
            total: 1024.0 * MIB,
            resident: resident * MIB,
            dirty: dirty * MIB,
            rate: 100.0 * MIB,
            downtime_limit: limit,
        }
    }

    #[test]
    fn an_idle_guest_takes_what_its_memory_takes_and_what_was_never_written_next_to_nothing() {
        let idle = known(1000.0, 0.0).forecast();
        assert!((9.5..10.5).contains(&idle.seconds) && idle.converges, "{idle:?}");
        let empty = known(10.0, 0.0).forecast();
        assert!(empty.seconds < 0.4 && empty.downtime < Duration::from_millis(140), "{empty:?}");
    }

    #[test]
    fn a_guest_that_changes_half_as_much_as_the_link_carries_takes_twice_as_long() {
        let busy = known(1000.0, 50.0).forecast();
        assert!((17.0..21.0).contains(&busy.seconds) && busy.converges, "{busy:?}");
        assert!(busy.downtime <= SWITCHOVER + Duration::from_millis(300), "{busy:?}");
    }

    #[test]
    fn a_guest_that_is_faster_than_the_link_is_told_of_beforehand_and_what_helps() {
        let fast = known(1000.0, 150.0);
        assert!(!fast.forecast().converges);
        let notes_of = |request: &VmMoveRequest| notes(&fast, request).join("\n");
        let told = notes_of(&VmMoveRequest::default());
        assert!(told.contains("changes 150 MiB/s") && told.contains("--auto-converge"), "{told}");
        let slowed = VmMoveRequest { auto_converge: true, ..VmMoveRequest::default() };
        assert!(!notes_of(&slowed).contains("--auto-converge"));
        // A small one fits into the limit, however fast it is.
        assert!(known(20.0, 500.0).forecast().converges);
    }

    #[test]
    fn a_move_shows_how_fast_memory_and_disks_went_and_what_it_took_beside_them() {
        let report = Report {
            bytes_copied: 2 << 30,
            phases: [("copying".to_owned(), 8.0)].into_iter().collect(),
            ..Report::default()
        };
        let memory = VmMemory { bytes_sent: 1 << 30, ..VmMemory::default() };
        let last: VmMove = serde_json::from_value(serde_json::json!({
            "id": "x", "vm": "web1", "to": "b", "state": "done", "phase": "over", "started_unix_ms": 0, "elapsed_ms": 13_000,
            "memory_bytes_per_second": 1_u64 << 28,
        }))
        .expect("a move");
        let job: Job = serde_json::from_value(serde_json::json!({
            "id": 1, "volume": "x", "state": "done", "source": "", "target": "", "request": { "to": "b:x" }, "requester": "", "started_unix_ms": 0,
        }))
        .expect("a job");
        let last = VmMove { memory: Some(memory), disks: vec![Job { report: Some(report), ..job }], ..last };
        let shown = Shown::by(&last);
        assert_eq!(shown, Shown { memory: Some(268_435_456.0), disks: Some(268_435_456.0), beside: Some(1.0) });
        let none = Shown::by(&VmMove { memory: None, disks: Vec::new(), ..last });
        assert_eq!((none.disks, none.beside()), (None, SECONDS_LEAST));
    }

    #[test]
    fn the_slower_step_says_how_fast_it_goes() {
        assert!((slower(1e8, 1e10) / 1e8 - 1.0).abs() < 0.01);
        assert!((slower(1e9, f64::INFINITY) / 1e9 - 1.0).abs() < 0.01);
        assert!(slower(1e9, 1e9) < 0.8e9);
    }

    #[test]
    fn a_plan_is_that_of_the_same_move_whatever_becomes_of_the_source() {
        let request = VmMoveRequest { to: "b".to_owned(), ..VmMoveRequest::default() };
        let deleting = VmMoveRequest { delete_source: true, ..request.clone() };
        assert_eq!(of_no_weight(&deleting), of_no_weight(&request));
        assert_ne!(of_no_weight(&VmMoveRequest { channels: Some(4), ..request.clone() }), of_no_weight(&request));
    }
}
