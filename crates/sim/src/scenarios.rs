//! Named scenarios: the stories that are told again and again, and every regression.

mod aborted;
mod asynchronous;
mod auto;
mod basic;
mod caches;
mod common;
mod environment;
mod hosts;
mod layers;
mod machines;
mod nbd;
mod read_cache;
mod requirements;
mod schedules;
mod skips;
mod snapshots;
mod starts;
mod stores;
mod strategies;
mod surrogates;
mod targets;
mod volumes;

use std::time::Duration;

use block::Bytes;
use migrate::{ProgressMap, Verify};

use stores::{in_doubt, journal_errors, journal_torn, map_stuck, store_full};
use targets::{
    no_space, target_errors, target_flaky, target_lost, target_silent, target_stopped, target_stuck, target_trouble,
};

use crate::guest::{Load, Pattern};
use crate::occurrence::Occurrence;
use crate::rng::Rng;
use crate::scenario::Scenario;

/// A scenario by its name.
#[derive(Clone, Copy)]
pub struct NamedScenario {
    /// Its name.
    pub name: &'static str,
    /// What it is about.
    pub about: &'static str,
    tell: fn(&Rng) -> Scenario,
}

impl NamedScenario {
    /// The story of this scenario for `seed`.
    #[must_use]
    pub fn for_seed(&self, seed: u64) -> Scenario {
        // From dice of its own: what else a seed tells stays as it was.
        let chunks = Rng::new(seed, "pages of the progress map").pick(&[1, 4, 7, 16, 64, ProgressMap::PAGE_CHUNKS]);
        (self.tell)(&Rng::new(seed, self.name)).map_pages_of(chunks)
    }

    /// What must occur over its seeds.
    #[must_use]
    pub fn occurs(&self) -> &'static [Occurrence] {
        self.requirement().map_or(&[], |requirement| requirement.occurs)
    }

    /// Why no mistake of `mutations` names it; `None` if one does.
    #[must_use]
    pub fn unproved(&self) -> Option<&'static str> {
        self.requirement().map(|requirement| requirement.unproved).filter(|why| !why.is_empty())
    }

    /// Why the daemon does not pass it yet; `None` if it does.
    #[must_use]
    pub fn unmended(&self) -> Option<&'static str> {
        UNMENDED.iter().find(|(name, _)| *name == self.name).map(|(_, why)| *why)
    }

    /// Whether it is about whole machines, whose phases are those of their disks' moves.
    #[must_use]
    pub fn is_about_machines(&self) -> bool {
        self.subject() == Subject::Machines
    }

    fn subject(&self) -> Subject {
        let begins = |words: &[&str]| words.iter().any(|word| self.name.starts_with(word));
        match self.name {
            "swarm" => Subject::Swarm,
            _ if begins(&["machine"]) => Subject::Machines,
            _ if begins(&["layers", "cache", "surrogate", "read-cache", "start-", "away-", "flush-lost"]) => {
                Subject::Layers
            }
            _ => Subject::Moves,
        }
    }

    fn requirement(&self) -> Option<&'static requirements::Requirement> {
        requirements::REQUIREMENTS.iter().find(|requirement| requirement.scenario == self.name)
    }
}

const fn scenario(name: &'static str, about: &'static str, tell: fn(&Rng) -> Scenario) -> NamedScenario {
    NamedScenario { name, about, tell }
}

/// All of them. The last is what every other seed plays.
pub const SCENARIOS: &[NamedScenario] = &[
    scenario("quiet", "a move under load, and nothing goes wrong", common),
    scenario(
        "standard",
        "8 MiB, 2000 requests, every kind of fault now and then: what speed is measured with",
        basic::standard,
    ),
    scenario("slow-disks", "source or target are slow, with slow periods", basic::slow_disks),
    scenario("hot-spot", "overlapping writes at one place of a small volume", basic::hot_spot),
    scenario("never-rests", "a guest that writes to one place until the volume has moved", basic::never_rests),
    scenario("target-errors", "the target fails requests and flushes", target_errors),
    scenario("target-flaky", "the target fails many requests and few flushes, and the mirror bears it", target_flaky),
    scenario("failed-flush", "a long move under writes to a target whose flushes fail", basic::failed_flush),
    scenario("target-lost", "the target goes away and comes back", target_lost),
    scenario("target-stuck", "the target answers after a minute", target_stuck),
    scenario("target-silent", "the target answers nothing for a while, and the guest does not wait", target_silent),
    scenario(
        "target-stopped",
        "the target answers nothing at all, reads no more than writes, and no request waits for it for long",
        target_stopped,
    ),
    scenario(
        "target-given-up",
        "copies hang, the move is cancelled, and they are answered after it",
        aborted::target_given_up,
    ),
    scenario("undone-crash", "the process dies while a move is undone, because requests hang", aborted::crashed),
    scenario("no-space", "the target fills up midway", no_space),
    scenario("source-errors", "the source fails requests and flushes", basic::source_errors),
    scenario("map-stuck", "guest writes wait for the activity log, and the move is given up meanwhile", map_stuck),
    scenario(
        "flush-death",
        "a flush of the target fails, and the process dies before the map can follow",
        basic::flush_death,
    ),
    scenario("short-reads", "reads give less than they were asked for", basic::short_reads),
    scenario("journal-errors", "the journal's disk fails stores: commits in doubt", journal_errors),
    scenario("in-doubt", "a commit in doubt, and then a crash, a cancel, a lost target", in_doubt),
    scenario("map-errors", "the progress map's disk alone fails", environment::map_errors),
    scenario("stores-errors", "the disks of journal and progress map fail together", environment::stores_errors),
    scenario("source-late", "the source answers after a minute", environment::source_late),
    scenario("large-sectors", "disks and guests of sectors of 4096 bytes", environment::large_sectors),
    scenario("pool-empty", "somebody else has all buffers for a while", environment::pool_empty),
    scenario("store-full", "the disk of the journal and the progress map is full", store_full),
    scenario("crash", "the process is killed, again and again", basic::crash),
    scenario("await", "the process is killed at one await, and again at another", basic::at_await),
    scenario("journal-torn", "the host loses its power while the journal is written", journal_torn),
    scenario("recovery", "the process is killed while it recovers", basic::recovery),
    scenario("resume", "a long move is killed, and goes on where it was", basic::resume),
    scenario("power-loss", "the host loses its power", basic::power_loss),
    scenario("steering", "pause, resume, cancel and bandwidth at any moment", basic::steering),
    scenario("corruption", "the target's bytes change behind our back; full comparison", basic::corruption),
    scenario("lies", "the target loses, misdirects and flips what it is given; full comparison", basic::lies),
    scenario("reconnect", "the guest's connection is cut and comes back", basic::reconnect),
    scenario("nbd", "the guest speaks NBD, and nothing is wrong with its link", nbd::whole),
    scenario("nbd-cut", "connections are cut, and requests asked again while the old ones are under way", nbd::cut),
    scenario("nbd-half-open", "connections are lost for the guest and not for the server", nbd::half_open),
    scenario("nbd-crash", "the daemon is killed with requests of NBD clients in flight", nbd::crashed),
    scenario("nbd-power-loss", "the host loses its power under guests that flush and force over NBD", nbd::powerless),
    scenario("nbd-slow-reader", "a guest that does not read, on a link that stops", nbd::slow_reader),
    scenario(
        "nbd-two",
        "a guest with two connections to one export, each of which comes and goes by itself",
        environment::two_connections,
    ),
    scenario("snapshots", "a move by snapshots under load, and nothing goes wrong", snapshots::quiet),
    scenario("snapshots-crash", "a move by snapshots whose process is killed", snapshots::crashed),
    scenario("snapshots-power-loss", "a move by snapshots whose host loses its power", snapshots::powerless),
    scenario("snapshots-steering", "a move by snapshots that is paused, resumed and cancelled", snapshots::steered),
    scenario("snapshots-errors", "a move by snapshots on disks that fail", snapshots::on_failing_disks),
    scenario(
        "target-trouble",
        "the target fails, is lost or full, and the move is cancelled or killed",
        target_trouble,
    ),
    scenario("files-fail", "the daemon's small files fail writes and syncs", environment::files_fail),
    scenario("clock-jumps", "the wall clocks jump while the daemon moves the volume", environment::clock_jumps),
    scenario("hosts", "the volume moves to another host's daemon, and nothing goes wrong", hosts::quiet),
    scenario("hosts-crash", "either host's daemon is killed, around the switchover, too", hosts::crashed),
    scenario("hosts-cut", "the hosts cannot reach each other now and then", hosts::cut),
    scenario("hosts-cut-guest", "a guest goes on while the hosts cannot reach each other", hosts::cut_beside_guest),
    scenario("hosts-power-loss", "either host loses its power", hosts::powerless),
    scenario("hosts-unheard", "the other host loses its power with writes that were not answered", hosts::unheard),
    scenario("hosts-meddled", "what was copied is changed while the other host's daemon is away", hosts::meddled),
    scenario("hosts-full", "the other host fills up, and the source's daemon dies while that is undone", hosts::full),
    scenario("hosts-undone", "a move to another host is cancelled, and both forget it", hosts::aborted),
    scenario("hosts-judged", "an arbiter that is hard to ask, and everything else between two hosts", hosts::judged),
    scenario("hosts-judged-late", "commits are decided late, after they were taken back", hosts::judged_late),
    scenario("hosts-judged-await", "the same, and one of the daemons is killed at one await", hosts::judged_dying),
    scenario("hosts-await", "the source's daemon is killed at one await or step of its files", hosts::dying),
    scenario(
        "hosts-await-there",
        "the other host's daemon is killed at one await or step of its files",
        hosts::dying_there,
    ),
    scenario("hosts-together", "several volumes move to another host as one, and either daemon dies", hosts::together),
    scenario("hosts-together-judged", "the same with an arbiter that is hard to ask", hosts::together_judged),
    scenario("machine", "a whole machine moves to another host, and daemons and QEMUs die", machines::machine),
    scenario("machine-await", "the same, and one of the daemons is killed at one await", machines::dying),
    scenario("machine-postcopy", "a machine moves whose memory follows its guest", machines::following),
    scenario(
        "machine-postcopy-await",
        "the same, and one of the daemons is killed at one await",
        machines::following_dying,
    ),
    scenario("machine-parallel", "a machine moves whose memory is copied from outside", machines::parallel),
    scenario(
        "machine-parallel-await",
        "the same, and one of the daemons is killed at one await",
        machines::parallel_dying,
    ),
    scenario("machine-sharing", "a machine moves whose disks stay on storage that both hosts reach", machines::sharing),
    scenario(
        "machine-sharing-await",
        "the same, and one of the daemons is killed at one await",
        machines::sharing_dying,
    ),
    scenario("machine-layers", "a machine moves whose disks have snapshots and limits", machines::layered),
    scenario(
        "machine-restarted",
        "a machine moves whose QEMU was started again since it is known",
        machines::restarted,
    ),
    scenario("machine-stopped", "an operator stops a guest, and lets it go on, while it moves", machines::stopped),
    scenario("machine-sent-resumed", "a script lets a guest go on that was sent already", machines::sent_resumed),
    scenario("machine-monitor-held", "another client has the monitor that the daemon needs", machines::monitor_held),
    scenario(
        "machine-layers-again",
        "a machine moves with layers, and again soon after a move that was undone",
        machines::layered_again,
    ),
    scenario("machine-supervised", "a supervisor starts a QEMU again that was killed", machines::supervised),
    scenario("machine-qemu-killed", "a QEMU is killed while its machine moves", machines::qemu_killed),
    scenario("machine-namesake", "another VM of the machine's name lives at the other host", machines::namesake),
    scenario("machine-disk-alone", "a machine is to move whose disk has moved alone before", machines::disk_alone),
    scenario("machine-leftover", "a volume at the other host has the name of a disk", machines::leftover),
    scenario("hosts-together-await", "the same, and one of the daemons is killed at one await", hosts::together_dying),
    scenario(
        "snapshots-await",
        "a move by snapshots whose process is killed at one await or step of its files",
        snapshots::dying,
    ),
    scenario(
        "snapshots-files",
        "a move by snapshots while the daemon's files fail writes, syncs and removals",
        snapshots::on_failing_files,
    ),
    scenario("there-and-back", "the volume is moved, and moved back", basic::there_and_back),
    scenario(
        "zeroes-lost",
        "regression: zeroes that a failed flush had dropped were not written again",
        basic::zeroes_lost,
    ),
    scenario(
        "offload",
        "source and target copy between each other, in part, with errors, and the target fails",
        basic::offload,
    ),
    scenario("skip-zero", "zeroes and holes are skipped under a guest that writes both and data", skips::quiet),
    scenario(
        "skip-zero-trouble",
        "zeroes are skipped while the target fails and is lost, and the process is killed",
        skips::trouble,
    ),
    scenario("skip-zero-resume", "a long move that skips zeroes is killed, and goes on", skips::resumed),
    scenario(
        "read-cache",
        "guest and copy read from a cache in memory, both sides fail, and the process is killed",
        read_cache::trouble,
    ),
    scenario(
        "follow",
        "the copy follows the guest, the target fails and is lost, and the process is killed",
        schedules::follow,
    ),
    scenario(
        "cold-first",
        "what the guest touches least comes first, the target fails, and the process is killed",
        schedules::cold_first,
    ),
    scenario(
        "surrogate",
        "a surrogate serves the guest of a move; the process is killed, the power is lost, moves are cancelled",
        surrogates::crashed,
    ),
    scenario(
        "surrogate-cached",
        "a surrogate serves the guest, and below it a cache in memory that the copy reads from, too",
        surrogates::cached,
    ),
    scenario("surrogate-dying", "the process dies at one of its awaits while a surrogate serves", surrogates::dying),
    scenario(
        "surrogate-failing",
        "one store of two fails while it serves, and the target is lost and comes back",
        surrogates::failing_store,
    ),
    scenario(
        "surrogate-hosts",
        "a surrogate serves the guest while the volume goes to another host",
        surrogates::to_other_host,
    ),
    scenario(
        "cache",
        "a flash cache over the volume; the process is killed, the power is lost, mode and size change",
        caches::crashed,
    ),
    scenario("cache-failing", "the flash of a cache that holds nothing alone fails", caches::failing),
    scenario(
        "cache-moves",
        "a flash cache goes to other flash by every way, over a link that is cut; the process is killed, the power is lost",
        caches::moved,
    ),
    scenario("cache-moves-failing", "the same, and the flash of both ends fails", caches::moved_failing),
    scenario("dbt", "a move in passes, under any load", strategies::dbt),
    scenario("dbt-downtime", "a move in passes holds the guest no longer than it may", strategies::dbt_downtime),
    scenario("dbt-scattered", "scattered chunks are copied slowly, and no hold shows it", strategies::dbt_scattered),
    scenario("dbt-slows-down", "a target becomes slow while the guest is held", strategies::dbt_slows_down),
    scenario(
        "dbt-never-rests",
        "a guest that writes to one place, and passes that end as a mirror",
        strategies::dbt_never_rests,
    ),
    scenario("dbt-races", "passes and guest writes meet on slow disks in every order", strategies::dbt_races),
    scenario("dbt-hot", "chunks that are written again and again are put off", strategies::dbt_hot),
    scenario(
        "dbt-last-copy",
        "the process dies, the target fails or somebody cancels in the last copy",
        strategies::dbt_last_copy,
    ),
    scenario("dbt-resume", "a long move in passes is killed, and goes on where it was", strategies::dbt_resume),
    scenario("dbt-swarm", "passes, and anything together", strategies::dbt_swarm),
    scenario("async", "an asynchronous mirror under any load, and nothing goes wrong", asynchronous::quiet),
    scenario(
        "async-slow-target",
        "a target ten times slower, which the guest is throttled to",
        asynchronous::slow_target,
    ),
    scenario("async-races", "copies, buffered writes and comparisons meet on slow disks", asynchronous::races),
    scenario(
        "async-errors",
        "the target fails, is lost and comes back with writes in the buffer",
        asynchronous::errors,
    ),
    scenario("async-crash", "the process is killed with writes in the buffer", asynchronous::crashed),
    scenario("async-resume", "a long asynchronous move is killed, and goes on where it was", asynchronous::resumed),
    scenario("async-power-loss", "the host loses its power with writes in the buffer", asynchronous::powerless),
    scenario("async-steering", "pause, cancel and bandwidth with writes in the buffer", asynchronous::steered),
    scenario("async-swarm", "an asynchronous mirror, and anything together", asynchronous::any),
    scenario("auto", "mirrored or tracked chunk by chunk, under any load, and nothing goes wrong", auto::quiet),
    scenario(
        "auto-slow-target",
        "a target ten times slower, which is mirrored to as late as can be",
        auto::slow_target,
    ),
    scenario("auto-never-rests", "a guest that writes to one place until the volume has moved", auto::never_rests),
    scenario("auto-races", "copies, mirrored writes and writes that are left meet on slow disks", auto::races),
    scenario("auto-errors", "either side fails, and the target is lost and comes back", auto::errors),
    scenario("auto-crash", "the process is killed while chunks are left and copied again", auto::crashed),
    scenario("auto-resume", "a long move is killed, and goes on without what was left", auto::resumed),
    scenario("auto-power-loss", "the host loses its power while chunks are left and copied again", auto::powerless),
    scenario("auto-steering", "pause, cancel and bandwidth between sweeps", auto::steered),
    scenario("auto-swarm", "mirrored or tracked chunk by chunk, and anything together", auto::any),
    scenario("paper", "the ESX paper's mirror under any load, and nothing goes wrong", strategies::paper),
    scenario("paper-races", "writes meet the window of the paper's mirror on slow disks", strategies::paper_races),
    scenario(
        "paper-errors",
        "the target of the paper's mirror fails, is lost and comes back, and the copy goes back",
        strategies::paper_errors,
    ),
    scenario("paper-resume", "the paper's mirror goes back, is killed, and goes on", strategies::paper_resume),
    scenario("paper-steering", "pause, cancel, bandwidth and kills of the paper's mirror", strategies::paper_steering),
    scenario("paper-swarm", "the paper's mirror, and anything together", strategies::paper_swarm),
    scenario("volumes", "several volumes move beside each other, and some targets fail", volumes::beside),
    scenario(
        "volumes-crash",
        "the process that moves several volumes dies, and recovers all of them",
        volumes::crashed,
    ),
    scenario("volumes-together", "several volumes move as one, and one of them is undone", volumes::together),
    scenario(
        "volumes-committed",
        "several volumes move as one, with trouble around their one commit",
        volumes::committed,
    ),
    scenario("volumes-pool", "several volumes with few buffers between them, one of which may hang", volumes::pooled),
    scenario("layers", "snapshots and limits come and go under guests, and move with the volume", layers::quiet),
    scenario(
        "layers-crash",
        "the process is killed and the power lost while layers come, go and move",
        layers::crashed,
    ),
    scenario("layers-dying", "the process dies at an await while layers come, go and move", layers::dying),
    scenario(
        "layers-hosts",
        "a volume with layers moves to another host, and either is killed or without power",
        layers::to_other_host,
    ),
    scenario("layers-errors", "targets fail, and moves of volumes with layers are undone", layers::failing_disks),
    scenario("layers-flush-lost", "targets fail flushes, too, under volumes with layers", layers::failing_flushes),
    scenario(
        "machine-files",
        "a machine moves, and the small files of either daemon fail, or are full",
        machines::files,
    ),
    scenario(
        "surrogate-files",
        "a surrogate serves, and the daemon's small files fail, or are full",
        surrogates::files,
    ),
    scenario("layers-files", "layers come and go, and the daemon's small files fail, or are full", layers::files),
    scenario("hosts-files", "the small files of either host's daemon fail, or are full", hosts::files),
    scenario("start-away-volume", "the daemon starts while the disk of a volume is away", starts::without_disk),
    scenario("start-away-base", "the same under a write-back cache", starts::without_base),
    scenario("start-away-flash", "the daemon starts while the flash of a cache is away", starts::without_flash),
    scenario("start-away-layer", "the daemon starts while the file of a snapshot is away", starts::without_layer),
    scenario("start-away-store", "the daemon starts without one store of two of a surrogate", starts::without_store),
    scenario("start-away-target", "the daemon starts while the target of a move is away", starts::without_target),
    scenario(
        "start-exchanged-flash",
        "the flash of a cache is an older one when the daemon starts, or empty",
        starts::exchanged_flash,
    ),
    scenario(
        "start-exchanged-store",
        "one store of two of a surrogate is an older one when the daemon starts, or empty",
        starts::exchanged_store,
    ),
    scenario("start-changed-base", "a disk under a cache is written to while no daemon runs", starts::changed_base),
    scenario("start-changed-source", "the source of a move is written to while no daemon runs", starts::changed_source),
    scenario("away-base", "the disk under a write-back cache is away for a while", starts::base_away),
    scenario("flush-lost-base", "the disk under a write-back cache loses a flush for good", starts::base_loses),
    scenario("flush-lost-image", "the disk under snapshots loses a flush for good", starts::image_loses),
    scenario("cache-failing-dirty", "the flash of a cache that may alone have something fails", starts::failing_flash),
    scenario("swarm", "any of it together, every probability from the seed", basic::swarm),
];

/// Scenarios that the daemon does not pass yet, and why. No seed chooses one and `--covers` leaves them out; they are played by
/// name. Whoever mends what one of them shows takes it out of this list.
pub const UNMENDED: &[(&str, &str)] = &[];

/// The scenario of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static NamedScenario> {
    SCENARIOS.iter().find(|scenario| scenario.name == name)
}

/// What a scenario is about, as far as that decides how often it is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    /// Anything together.
    Swarm,
    /// Whole machines.
    Machines,
    /// Layers, caches and surrogates, and what of them is away at a start.
    Layers,
    /// Everything else.
    Moves,
}

/// What 20 seeds in a row play: 5 swarms, 7 machines, 4 layers and 4 of everything else.
const TURNS: [Subject; 20] = {
    use Subject::{Layers, Machines, Moves, Swarm};
    [
        Swarm, Machines, Layers, Machines, Moves, Swarm, Machines, Layers, Moves, Machines, Swarm, Machines, Layers,
        Moves, Swarm, Machines, Layers, Machines, Moves, Swarm,
    ]
};

/// The scenario that `seed` plays when none is named; every one of [`UNMENDED`] is played by its name alone.
#[must_use]
pub fn of_seed(seed: u64) -> &'static NamedScenario {
    let turn = (seed % TURNS.len() as u64) as usize;
    let subject = TURNS[turn];
    let among = |turns: &[Subject]| turns.iter().filter(|other| **other == subject).count() as u64;
    let number = seed / TURNS.len() as u64 * among(&TURNS) + among(&TURNS[..turn]);
    let members = || played().filter(|scenario| scenario.subject() == subject);
    let index = number % members().count() as u64;
    members().nth(index as usize).expect("every subject has scenarios")
}

/// All but those that the daemon does not yet pass.
pub fn played() -> impl Iterator<Item = &'static NamedScenario> {
    SCENARIOS.iter().filter(|scenario| scenario.unmended().is_none())
}

/// A volume, a guest and options of any kind.
fn common(rng: &Rng) -> Scenario {
    let odd = rng.pick(&[0, 0, 512, 4096, 5 * 512, 1, 700]);
    let size = Bytes(rng.pick(&[1 << 20, 3 << 20, 8 << 20]) + odd);
    let chunk = rng.pick(&[4096, 16_384, 65_536, 65_536, 262_144]);
    let load = Load {
        requests: rng.pick(&[500, 1000, 2000]),
        outstanding: rng.pick(&[1, 4, 8, 16]),
        reads: rng.pick(&[0.2, 0.5, 0.7]),
        sectors_max: rng.pick(&[1, 16, 64, 256]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Uniform, Pattern::Hot(256), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[50, 300, 1000])),
        ..Load::default()
    };
    let alignment = if size.is_multiple_of(512) { rng.pick(&[1, 512]) } else { 1 };
    let (verify, bandwidth) = (
        rng.pick(&[Verify::Off, Verify::Sample, Verify::Sample, Verify::Full]),
        rng.pick(&[None, Some(50 << 20), Some(200 << 20), Some(600 << 20)]),
    );
    let (window, target_ms) = (rng.pick(&[512 << 10, 4 << 20, 16 << 20]), rng.pick(&[50, 1000, 30_000]));
    // A move of many seconds, in which the progress map has something to say, or one of milliseconds, in which every
    // request meets a copy.
    let is_long = rng.chance(0.35);
    let (bandwidth, think, span_ms) = match is_long {
        true => (Some(rng.pick(&[100 << 10, 300 << 10, 1 << 20])), 100, rng.pick(&[10_000, 30_000])),
        false => (bandwidth, 0, rng.pick(&[10, 30, 60])),
    };
    let load = Load { think: load.think.max(Duration::from_millis(think)), ..load };
    let (filled, dirty) = (rng.pick(&[0.0, 0.3, 0.7, 1.0]), rng.chance(0.3));
    Scenario::new()
        .volume(size)
        .alignment(alignment)
        .filled(filled)
        .dirty_target(dirty)
        .guest(load)
        .verify(verify)
        .within(Duration::from_millis(span_ms))
        .options(|options| {
            options.chunk_bytes = chunk;
            options.bandwidth = bandwidth;
            options.window_bytes_max = window;
            options.target_ms = target_ms;
            options.sample_chunks = 16;
        })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn seeds_play_every_scenario_and_each_subject_by_its_weight() {
        let mut times: BTreeMap<&str, u64> = BTreeMap::new();
        let seeds = 20 * played().count() as u64;
        (0..seeds).for_each(|seed| *times.entry(of_seed(seed).name).or_default() += 1);
        let never: Vec<_> = played().filter(|scenario| !times.contains_key(scenario.name)).collect();
        assert!(never.is_empty(), "{:?}", never.iter().map(|scenario| scenario.name).collect::<Vec<_>>());
        for (subject, percent) in
            [(Subject::Swarm, 25), (Subject::Machines, 35), (Subject::Layers, 20), (Subject::Moves, 20)]
        {
            let of_it = times.iter().filter(|(name, _)| find(name).expect("it is listed").subject() == subject);
            assert_eq!(of_it.map(|(_, times)| times).sum::<u64>() * 100, seeds * percent, "{subject:?}");
        }
    }

    #[test]
    fn what_the_daemon_does_not_pass_is_listed_and_no_seed_plays_it() {
        for (name, why) in UNMENDED {
            assert!(find(name).is_some() && !why.is_empty(), "{name}");
            assert!((0..4000).all(|seed| of_seed(seed).name != *name), "{name}");
        }
    }
}
