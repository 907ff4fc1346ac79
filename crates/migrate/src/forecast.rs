//! What a move will take, from what is known before it begins: time, passes, and for how long the guest is held.
//!
//! The guest's writes are taken to go anywhere: of `n` chunks, `k` writes make `n (1 - e^(-k/n))` dirty. A guest that
//! writes to the same places again and again makes fewer dirty. So the forecast of a strategy that tracks is an upper
//! bound.
//!
//! Strategies in passes are simulated with the engine's own decisions (`strategy::tracking::converge`). The lengths of
//! the passes come from what was seen of the source before ([`Scattered`]). Whether a pass leaves a little more or a
//! little less than fits decides whether there is another one, and how it ends. So the simulation is run several times,
//! with copies and writes somewhat slower and faster than seen. The expected end is how most runs end, and the expected
//! numbers are the middle of those runs. The interval comes from all runs.

use std::time::Duration;

use crate::strategy::snapshot::rounds::{Decision, Rounds};
use crate::strategy::tracking::converge::{Convergence, LOOK_AT, PassDecision, Passed};
use crate::strategy::tracking::rates::Kind;
use crate::{MoveOptions, OnNoConverge, Strategy};

/// What is known before a move.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Known {
    /// The volume's size in bytes.
    pub volume: u64,
    /// What must be copied as data, in bytes.
    pub to_copy: u64,
    /// What is going to be compared, in bytes.
    pub to_compare: u64,
    /// How fast the copy goes, in bytes a second, without a guest.
    pub copy_rate: f64,
    /// What the guest writes, in bytes a second.
    pub write_bytes: f64,
    /// How many writes that are, a second.
    pub writes: f64,
    /// What a switchover takes without anything to copy.
    pub switchover: Duration,
    /// What was seen of chunks that lie scattered, the sparsest first and all of them last. `None`: they are taken to be
    /// copied like a stream, and the guest to write beside it as it does without.
    pub scattered: Option<[Scattered; LOOKS]>,
}

/// So many looks are had at a source.
pub const LOOKS: usize = 5;

/// How chunks that lie scattered are read beside the guest ([`crate::scattered`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scattered {
    /// Which part of all chunks was to be read, 0 to 1.
    pub part: f64,
    /// What one of them took, in seconds.
    pub chunk_seconds: f64,
    /// How many writes a second the guest came to meanwhile,
    pub writes: f64,
    /// and how many reads.
    pub reads: f64,
}

/// What is expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// The move, from its start to the switchover.
    pub seconds: f64,
    /// Between which it is expected to lie.
    pub seconds_between: (f64, f64),
    /// How long the guest is held.
    pub downtime: Duration,
    /// Of an asynchronous mirror: how long the buffer takes to be emptied before the switchover, while the guest works.
    pub drain: Duration,
    /// How many passes, the last copy included.
    pub passes: u32,
    /// What the passes copy in all, in bytes.
    pub copied: u64,
    /// Whether it converges by itself; otherwise [`OnNoConverge`] decides, and the rest of this is what follows from that.
    pub converges: bool,
    /// Whether it ends with the guest on the source, and the rest of this is what comes before that.
    pub gives_up: bool,
}

/// More passes than this are not looked at.
const PASSES_MAX: u32 = 400;
/// Copies and writes may be so many times slower or faster than they were seen.
const OFF_BY: [f64; 3] = [0.85, 1.0, 1.18];
/// At which parts of what a first pass leaves dirty a source is looked at, before all of it is.
const PARTS: [f64; LOOKS - 1] = [0.03, 0.1, 0.32, 1.0];
/// A guest may cost a copy so much of its time more than what it writes.
const GUEST_MAY_COST: f64 = 1.1;
/// The unit in which overlays keep what was written, in bytes.
const OVERLAY_UNIT: f64 = 4096.0;

impl Known {
    /// What a move with `options` will take.
    #[must_use]
    pub fn forecast(&self, options: &MoveOptions) -> Forecast {
        if options.strategy.holds_for_copy() {
            return self.played(options);
        }
        let seconds = (self.to_copy + self.to_compare) as f64 / self.beside_guest();
        let drain =
            options.buffer().map_or(0.0, |buffer| self.buffered(buffer.0 as f64, seconds) / self.copy_rate.max(1.0));
        let least = (self.to_copy + self.to_compare) as f64 / self.copy_rate.max(1.0);
        Forecast {
            seconds: seconds + drain,
            seconds_between: (least, (seconds + drain) * GUEST_MAY_COST),
            downtime: self.switchover,
            drain: Duration::from_secs_f64(drain.min(1e9)),
            passes: 1,
            copied: self.to_copy,
            converges: true,
            gives_up: false,
        }
    }

    /// Which part of the chunks a first pass would leave dirty.
    fn dirty_after_first(&self, options: &MoveOptions) -> f64 {
        let seconds = self.to_copy as f64 / self.beside_guest();
        self.chances(options).dirtied(seconds * self.touched(self.writes, options), 1.0)
    }

    /// How many writes a second the guest comes to beside a pass over everything.
    fn beside_stream(&self) -> f64 {
        self.scattered.map_or(self.writes, |seen| seen[LOOKS - 1].writes.min(self.writes))
    }

    /// Which parts of the chunks are worth a look beforehand ([`crate::scattered`]). They are what a first pass would
    /// leave dirty, parts of that as later passes would leave them, and all chunks. Nothing if the guest writes next to
    /// nothing.
    #[must_use]
    pub fn worth_a_look(&self, options: &MoveOptions) -> Option<[f64; LOOKS]> {
        let dense = self.dirty_after_first(options).min(0.9);
        let mut parts = [1.0; LOOKS];
        parts.iter_mut().zip(PARTS).for_each(|(part, of_dense)| *part = dense * of_dense);
        (dense * self.chances(options).chunks >= 1.0).then_some(parts)
    }

    /// How fast the copy goes beside the guest, whose writes take their share of the disks.
    fn beside_guest(&self) -> f64 {
        (self.copy_rate - self.write_bytes).max(self.copy_rate / 4.0).max(1.0)
    }

    /// How much of a buffer is full at the end of `seconds` of copying. A target that takes what the guest writes fast
    /// enough has hardly anything of it waiting; one that does not, all of it.
    fn buffered(&self, buffer: f64, seconds: f64) -> f64 {
        let load = self.write_bytes / self.copy_rate.max(1.0);
        if load >= 1.0 { buffer.min(self.write_bytes * seconds) } else { buffer.min(self.write_bytes * load) }
    }

    /// How many chunks `writes` touch: one may end in the chunk after the one where it begins.
    fn touched(&self, writes: f64, options: &MoveOptions) -> f64 {
        let size = if self.writes > 0.0 { self.write_bytes / self.writes } else { 0.0 };
        writes * (1.0 + (size / options.chunk_bytes as f64).min(1e6))
    }

    fn chances(&self, options: &MoveOptions) -> Chances {
        let chunks = (self.volume as f64 / options.chunk_bytes as f64).max(1.0);
        Chances { chunks, incremental: options.strategy.is_incremental() }
    }

    /// What one chunk takes in a pass over this part of all chunks, and what the guest does meanwhile.
    fn scattered(&self, options: &MoveOptions, part: f64) -> Scattered {
        let Some(seen) = self.scattered else {
            let chunk_seconds = options.chunk_bytes as f64 / self.beside_guest();
            return Scattered { part, chunk_seconds, writes: self.writes, reads: 0.0 };
        };
        let next = seen.iter().position(|look| part <= look.part).unwrap_or(LOOKS - 1).max(1);
        let [sparse, dense] = [seen[next - 1], seen[next]];
        let span = (dense.part / sparse.part).max(1.0 + 1e-9).ln();
        let at = ((part / sparse.part).max(1e-12).ln() / span).clamp(0.0, 1.0);
        let between = |value: fn(&Scattered) -> f64| value(&sparse) + (value(&dense) - value(&sparse)) * at;
        Scattered {
            part,
            // What a chunk takes goes with a power of how many there are. It is copied no faster than a stream is.
            chunk_seconds: between(|look| look.chunk_seconds.max(1e-9).ln())
                .exp()
                .max(options.chunk_bytes as f64 / self.copy_rate.max(1.0)),
            writes: between(|look| look.writes).min(self.writes),
            reads: between(|look| look.reads),
        }
    }

    /// The middle of what comes of copies and writes as fast as known, and somewhat slower and faster.
    fn played(&self, options: &MoveOptions) -> Forecast {
        let play = |copies: f64, writes: f64| match options.strategy {
            Strategy::Snapshot => self.in_snapshots(options, copies, writes),
            _ => self.in_passes(options, copies, writes),
        };
        let mut all: Vec<Forecast> = OFF_BY
            .iter()
            .flat_map(|copies| OFF_BY.iter().map(move |writes| (*copies, *writes)))
            .map(|(copies, writes)| play(copies, writes))
            .collect();
        let seconds = all.iter().map(|played| played.seconds);
        let between = (seconds.clone().fold(f64::MAX, f64::min), seconds.fold(0.0, f64::max));
        // How it ends is how most of them end, and of those the middle is expected.
        let ending = |played: &Forecast| (played.converges, played.gives_up);
        let likely =
            all.iter().map(ending).max_by_key(|end| all.iter().filter(|played| ending(played) == *end).count());
        all.retain(|played| Some(ending(played)) == likely);
        all.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let middle = all[all.len() / 2];
        let downtimes = all.iter().map(|played| played.downtime.as_secs_f64().max(1e-6).ln());
        let mut downtime = span((downtimes.sum::<f64>() / all.len() as f64).exp());
        if middle.gives_up {
            downtime = middle.downtime;
        } else if middle.converges && options.strategy.iterates() {
            // What takes longer is given up.
            downtime = downtime.min(self.switchover + Duration::from_millis(options.downtime_limit_ms));
        }
        Forecast { seconds_between: between, downtime, ..middle }
    }

    /// A move in passes whose copies take so many times what was seen, under a guest that writes so many times as much.
    fn in_passes(&self, options: &MoveOptions, copies: f64, writes: f64) -> Forecast {
        let (chunk, chances) = (options.chunk_bytes as f64, self.chances(options));
        let mut convergence = Convergence::new(options);
        let first = self.to_copy as f64 * copies / self.beside_guest();
        convergence.rates().note_pass(Kind::Whole, self.to_copy, span(first));
        let written = |seconds: f64, rate: f64| self.touched(rate, options) * writes * seconds;
        let (mut seconds, mut copied, mut passes) = (first, self.to_copy as f64, 1);
        let mut dirty = chances.dirtied(written(first, self.beside_stream()), 1.0);
        // The longest that the guest was held in vain.
        let mut held_in_vain: f64 = 0.0;
        let compare = self.to_compare as f64 / self.beside_guest();
        loop {
            let count = dirty * chances.chunks;
            // A chunk by chance is none.
            let bytes = if count < 0.5 { 0 } else { (count * chunk) as u64 };
            let passed = Passed { age: span(seconds), dirty: bytes, deferred: 0 };
            let (decision, _) = convergence.decide(passed);
            let last = count * self.scattered(options, dirty).in_hold() * copies;
            let ends = |last: f64, converges| Forecast {
                seconds: seconds + last + compare,
                seconds_between: (seconds, seconds),
                downtime: span(held_in_vain.max(self.switchover.as_secs_f64() + last)),
                drain: Duration::ZERO,
                passes: passes + u32::from(bytes > 0),
                copied: copied as u64 + bytes,
                converges,
                gives_up: false,
            };
            match decision {
                PassDecision::GoOn | PassDecision::GoOnWithAll if passes < PASSES_MAX => {}
                PassDecision::Mirror => {
                    let rest = count * self.scattered(options, dirty).chunk_seconds * copies;
                    return Forecast { downtime: span(held_in_vain).max(self.switchover), ..ends(rest, false) };
                }
                PassDecision::Complete | PassDecision::Force => {
                    let forced = decision == PassDecision::Force;
                    let limit = convergence.copy_limit(forced).as_secs_f64();
                    if last <= limit {
                        return ends(last, !forced);
                    }
                    // The guest is let go, early if it is plain that the time will not do, and what is left is a pass.
                    let in_time = (bytes as f64 * limit / last) as u64;
                    let is_vain = Convergence::is_in_vain(span(limit), span(limit), in_time, bytes);
                    let spent = if is_vain { limit * LOOK_AT } else { limit };
                    let done = bytes as f64 * spent / last;
                    convergence.note_hold(done as u64, span(spent), forced);
                    held_in_vain = held_in_vain.max(spent);
                    (seconds, copied, dirty) = (seconds + spent, copied + done, dirty * (1.0 - spent / last));
                }
                _ => {
                    let (downtime, copied) = (span(held_in_vain), copied as u64);
                    return Forecast { downtime, copied, passes, gives_up: true, ..ends(0.0, false) };
                }
            }
            let Scattered { chunk_seconds, writes: rate, .. } = self.scattered(options, dirty);
            let (pass, bytes) = (dirty * chances.chunks * chunk_seconds * copies, dirty * chances.chunks * chunk);
            convergence.rates().note_pass(Kind::Scattered, bytes as u64, span(pass));
            (seconds, copied, passes) = (seconds + pass, copied + bytes, passes + 1);
            dirty = chances.dirtied(written(pass, rate), dirty);
        }
    }

    /// A move in snapshots, in the same way: the base is copied, then one overlay after the other is folded.
    fn in_snapshots(&self, options: &MoveOptions, copies: f64, writes: f64) -> Forecast {
        let units = Chances { chunks: (self.volume as f64 / OVERLAY_UNIT).max(1.0), incremental: false };
        let size = if self.writes > 0.0 { self.write_bytes / self.writes } else { 0.0 };
        let holds = |seconds: f64, rate: f64| {
            let touched = rate * writes * seconds * (size / OVERLAY_UNIT).max(1.0);
            units.dirtied(touched, 1.0) * units.chunks * OVERLAY_UNIT
        };
        // As many places as writes, each of which is a movement like that of a chunk.
        let places = |bytes: f64| bytes / size.max(OVERLAY_UNIT);
        let look = |bytes: f64| {
            let chunks = (self.volume as f64 / options.chunk_bytes as f64).max(1.0);
            self.scattered(options, (places(bytes) / chunks).min(1.0))
        };
        let first = self.to_copy as f64 * copies / self.beside_guest();
        let (mut seconds, mut copied, mut passes) = (first, self.to_copy as f64, 1);
        let mut overlay = holds(first, self.beside_stream());
        let compare = self.to_compare as f64 / self.beside_guest();
        let limit = Duration::from_millis(options.downtime_limit_ms);
        let longest = Duration::from_millis(options.forced_downtime_ms_max);
        let mut rounds = Rounds::default();
        // The longest that the guest was held in vain.
        let mut held_in_vain: f64 = 0.0;
        loop {
            let aborts = options.on_no_converge == OnNoConverge::Abort;
            let decision = rounds.decide(overlay as u64, limit, longest, aborts);
            let is_another = matches!(decision, Decision::Another(_));
            let last = places(overlay) * look(overlay).in_hold() * copies;
            let ends = Forecast {
                seconds: seconds + last + compare,
                seconds_between: (seconds, seconds),
                downtime: self.switchover + span(last.max(held_in_vain)),
                drain: Duration::ZERO,
                passes: passes + u32::from(overlay >= OVERLAY_UNIT),
                copied: (copied + overlay) as u64,
                converges: last <= limit.as_secs_f64() * 2.0,
                gives_up: false,
            };
            if matches!(decision, Decision::GiveUp(_)) || is_another && passes >= PASSES_MAX {
                let (downtime, copied) = (span(held_in_vain), copied as u64);
                return Forecast { seconds, downtime, copied, passes, converges: false, gives_up: true, ..ends };
            }
            if let Decision::Hold(_, hold) = decision {
                if last <= hold.as_secs_f64() {
                    return ends;
                }
                // The guest is let go, and what it holds is folded again.
                let spent = hold.as_secs_f64();
                rounds.note_miss((overlay * spent / last) as u64, hold, longest);
                (seconds, held_in_vain) = (seconds + spent, held_in_vain.max(spent));
                continue;
            }
            let Scattered { chunk_seconds, writes: rate, .. } = look(overlay);
            let fold = places(overlay) * chunk_seconds * copies;
            // Only the first overlay is taken to be read where the guest reads, too, as where the others lie beside the target.
            let next = holds(fold, if passes == 1 { rate } else { self.writes });
            rounds.note(overlay as u64, span(fold), next as u64);
            (seconds, copied, passes) = (seconds + fold, copied + overlay, passes + 1);
            overlay = next;
        }
    }
}

impl Scattered {
    /// What one chunk takes while the guest is held, in seconds. The disks then have the time that the guest's requests
    /// took, but a few copies keep them less busy than copies and guest did. So it lies between what a chunk takes
    /// beside the guest, and what it would take if each of the guest's requests were a copy.
    fn in_hold(&self) -> f64 {
        let alone = 1.0 / (1.0 / self.chunk_seconds.max(1e-9) + self.reads + self.writes);
        (self.chunk_seconds * alone).sqrt()
    }
}

fn span(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 1e9))
}

/// What becomes of chunks that are written by chance.
#[derive(Clone, Copy)]
struct Chances {
    chunks: f64,
    /// What is written ahead of a pass is not dirty after it.
    incremental: bool,
}

impl Chances {
    /// Which part of all chunks is dirty after a pass over this `part` of them, in which so many were written.
    fn dirtied(self, written: f64, part: f64) -> f64 {
        let each = written / self.chunks;
        let all = 1.0 - (-each).exp();
        if !self.incremental || each < 1e-12 {
            return all;
        }
        // A chunk that the pass comes to has what is left of it to be written in.
        let behind = 1.0 - all / each;
        part * behind + (1.0 - part) * all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10 GB at 100 MB/s under a guest that writes so many blocks of 4 KiB a second.
    fn known(writes: f64) -> Known {
        Known {
            volume: 10_000_000_000,
            to_copy: 10_000_000_000,
            copy_rate: 100e6,
            write_bytes: writes * 4096.0,
            writes,
            switchover: Duration::from_millis(2),
            ..Known::default()
        }
    }

    fn options(strategy: Strategy) -> MoveOptions {
        MoveOptions { strategy, on_no_converge: OnNoConverge::Force, ..MoveOptions::default() }
    }

    #[test]
    fn an_idle_guest_costs_nothing_with_any_strategy() {
        for strategy in Strategy::ALL {
            let expected = known(0.0).forecast(&options(*strategy));
            assert!((expected.seconds - 100.0).abs() < 0.1 && expected.passes == 1, "{strategy}: {expected:?}");
            assert_eq!(expected.downtime, Duration::from_millis(2));
        }
    }

    #[test]
    fn tracking_takes_longer_than_mirroring_and_incremental_tracking_less_than_plain() {
        let [mirror, dbt, incremental] = [Strategy::Mirror, Strategy::Dbt, Strategy::IncrementalDbt]
            .map(|name| known(500.0).forecast(&options(name)));
        assert!(
            mirror.seconds < incremental.seconds && incremental.seconds < dbt.seconds,
            "{mirror:?} {incremental:?} {dbt:?}"
        );
        assert!(dbt.converges && dbt.passes > 2 && dbt.downtime <= Duration::from_millis(200), "{dbt:?}");
    }

    #[test]
    fn a_guest_that_writes_faster_than_the_copy_does_not_converge() {
        let patient = MoveOptions { forced_downtime_ms_max: 300_000, ..options(Strategy::Dbt) };
        let forced = known(5000.0).forecast(&patient);
        assert!(!forced.converges && !forced.gives_up && forced.downtime > Duration::from_secs(5), "{forced:?}");
        let given_up = known(5000.0).forecast(&options(Strategy::Dbt));
        assert!(given_up.gives_up && given_up.downtime.is_zero(), "80 s are more than half a minute: {given_up:?}");
        let mirrored = MoveOptions { on_no_converge: OnNoConverge::Mirror, ..options(Strategy::Dbt) };
        assert_eq!(known(5000.0).forecast(&mirrored).downtime, Duration::from_millis(2));
    }

    #[test]
    fn a_buffer_is_emptied_at_the_target_s_rate_and_nobody_is_held_for_that() {
        let options = options(Strategy::MirrorAsync);
        let slow = known(100_000.0).forecast(&options);
        assert_eq!(slow.downtime, Duration::from_millis(2));
        assert!((slow.drain.as_secs_f64() - 0.671).abs() < 0.01, "64 MiB at 100 MB/s take {:?}", slow.drain);
        let fast = known(500.0).forecast(&options);
        assert!(fast.drain < Duration::from_millis(10), "{fast:?}");
    }

    /// A source that gives a scattered chunk in `ms`, whatever is dirty.
    fn with_scattered(known: Known, ms: f64) -> Known {
        let seen = |part| Scattered { part, chunk_seconds: ms / 1e3, writes: known.writes, reads: 0.0 };
        Known { scattered: Some([0.003, 0.01, 0.03, 0.1, 1.0].map(seen)), ..known }
    }

    #[test]
    fn scattered_chunks_that_are_slow_cost_time_and_more_passes() {
        for strategy in [Strategy::Dbt, Strategy::IncrementalDbt, Strategy::Snapshot] {
            let options = MoveOptions { downtime_limit_ms: 1000, ..options(strategy) };
            let [stream, slow] =
                [known(100.0), with_scattered(known(100.0), 3.0)].map(|known| known.forecast(&options));
            assert!(slow.seconds > stream.seconds * 1.1, "{strategy}: {slow:?} and {stream:?}");
            assert!(slow.converges && slow.downtime <= Duration::from_millis(1000), "{strategy}: {slow:?}");
            let (least, most) = slow.seconds_between;
            assert!(least < slow.seconds && slow.seconds < most, "{strategy}: {slow:?}");
        }
        let hopeless = with_scattered(known(500.0), 5.0).forecast(&options(Strategy::Dbt));
        assert!(!hopeless.converges, "500 chunks a second become dirty, and 200 are copied: {hopeless:?}");
    }

    #[test]
    fn what_is_written_ahead_of_a_pass_is_spared_where_the_pass_goes_and_nowhere_else() {
        let [plain, incremental] = [false, true].map(|incremental| Chances { chunks: 1e5, incremental });
        let saved = |part| incremental.dirtied(1000.0, part) / plain.dirtied(1000.0, part);
        assert!((saved(1.0) - 0.5).abs() < 0.01, "half of a pass over everything: {}", saved(1.0));
        assert!(saved(0.01) > 0.99, "hardly anything of a pass over a hundredth: {}", saved(0.01));
    }

    #[test]
    fn nobody_looks_at_a_source_whose_guest_writes_nothing() {
        assert_eq!(known(0.0).worth_a_look(&options(Strategy::Dbt)), None);
        let parts = known(100.0).worth_a_look(&options(Strategy::Dbt)).expect("it writes");
        assert!(parts.is_sorted() && parts[0] < parts[LOOKS - 2] && parts[LOOKS - 1] == 1.0, "{parts:?}");
    }

    #[test]
    fn a_shorter_limit_takes_more_passes() {
        let passes =
            |ms| known(300.0).forecast(&MoveOptions { downtime_limit_ms: ms, ..options(Strategy::Dbt) }).passes;
        assert!(passes(5000) < passes(50), "{} and {}", passes(5000), passes(50));
    }
}
