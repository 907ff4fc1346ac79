//! What must occur over the seeds of each scenario, and why a scenario is no mistake's target.
//!
//! A scenario whose faults never come, or never come where they should, proves nothing about them. `--covers` plays each one
//! until everything has occurred that is named here, and everything that its stories tell.

mod others;

use migrate::Phase::{
    Cancelling, Committing, Copying, InDoubt, LastCopy, PreSwitch, Reverting, Switched, TargetLost, Verifying,
};

use crate::fault_event::{Exchange, FaultEvent as H, Part};
use crate::occurrence::Occurrence::{self, AtOnce, Comes, Fault, Happens, In, Told};

/// What a scenario must show.
#[derive(Clone, Copy, Debug)]
pub(super) struct Requirement {
    pub(super) scenario: &'static str,
    /// What must occur.
    pub(super) occurs: &'static [Occurrence],
    /// Why no mistake in `mutations` names this scenario; empty if one does.
    pub(super) unproved: &'static str,
}

const fn requirement(scenario: &'static str, occurs: &'static [Occurrence]) -> Requirement {
    Requirement { scenario, occurs, unproved: "" }
}

impl Requirement {
    const fn because(self, unproved: &'static str) -> Self {
        Self { unproved, ..self }
    }
}

const SWITCHED: Occurrence = Told("switched");
const RESUMED: Occurrence = Told("resumed");
const CANCELLED: Occurrence = Told("cancelled");
const A_FAILURE: Occurrence = Told("a failure");
const SKIPPED_HOLES: Occurrence = Told("skipped holes");
const SKIPPED_ZEROES: Occurrence = Told("skipped zeroes");
const UNSKIPPED: Occurrence = Told("written over what was skipped");
const READ_FROM_MEMORY: Occurrence = Told("the guest read from memory");
const COPIED_FROM_MEMORY: Occurrence = Told("copied from memory");
const EVICTED: Occurrence = Told("evicted from memory");

const FROM_SURROGATE: Occurrence = Told("read from a surrogate");
const FROM_BOTH: Occurrence = Told("read from source and surrogate");
const TO_SURROGATE: Occurrence = Told("written to a surrogate");
const FETCHED: Occurrence = Told("fetched into a surrogate");
const FULL_SURROGATE: Occurrence = Told("a full surrogate");
const DRAINING: Occurrence = Told("draining");

/// Everything may happen there, and each of its parts is another scenario's.
const TOGETHER: &str = "parts of other scenarios together; their mistakes are seen there in fewer seeds";
const DOWN: Occurrence = Told("down while something is away");
/// What a start does without something is not proved by a mistake yet.
const STARTS: &str =
    "the mistakes that it shows were the daemon's own; each of its mends has a test that fails without it";
/// The strategy's mistakes are proved by its other scenarios.
const STRATEGY: &str =
    "the strategy's mistakes are proved where they are seen in the fewest seeds: its other scenarios";

/// In the order of [`SCENARIOS`](super::SCENARIOS).
pub(super) const REQUIREMENTS: &[Requirement] = &[
    requirement("quiet", &[SWITCHED, Comes(Verifying), Comes(PreSwitch)]),
    requirement(
        "standard",
        &[SWITCHED, A_FAILURE, Fault("crash"), Fault("disk-lost"), Fault("power-loss"), Fault("store-full"), Fault("slow")],
    )
    .because("it is there to measure speed with, and told like a swarm"),
    requirement("slow-disks", &[SWITCHED, Fault("slow")]),
    requirement("hot-spot", &[SWITCHED]),
    requirement("never-rests", &[SWITCHED]),
    requirement("target-errors", &[SWITCHED, Comes(TargetLost), Fault("read-error"), Fault("write-error"), Fault("flush-error")]),
    requirement("target-flaky", &[SWITCHED, Comes(TargetLost), Fault("write-error"), Fault("crash")]),
    requirement("failed-flush", &[SWITCHED, Comes(TargetLost), Fault("flush-error"), Fault("slow"), Fault("crash")]),
    requirement("target-lost", &[SWITCHED, Comes(TargetLost), Fault("disk-lost")]),
    requirement("target-stuck", &[SWITCHED, Fault("stuck"), Fault("slow")]),
    requirement("target-silent", &[SWITCHED, Fault("stuck"), Fault("slow"), Fault("late-landing"), Comes(TargetLost)]),
    requirement("target-stopped", &[SWITCHED, Fault("silent")]),
    requirement("target-given-up", &[SWITCHED, CANCELLED, Fault("stuck")])
        .because("seldom is a copy of many pieces given up between two; given-up-goes-on has a test of the engine that is"),
    requirement("undone-crash", &[SWITCHED, Fault("stuck"), Fault("crash"), Happens(H::Cancel), Comes(Cancelling)]),
    requirement("no-space", &[SWITCHED, Fault("no-space")])
        .because("what a target refuses for space fails as in target-errors, which proves those mistakes"),
    requirement("source-errors", &[SWITCHED, A_FAILURE, Fault("read-error"), Fault("write-error"), Fault("flush-error")])
        .because("a failure that is not passed on to the guest is told-too-well, which the flush mistakes of nbd-power-loss prove"),
    requirement("map-stuck", &[SWITCHED, CANCELLED, Fault("stuck"), In(Copying, H::Cancel)]),
    requirement("flush-death", &[SWITCHED, Fault("flush-error"), In(TargetLost, H::Crash)]),
    requirement("short-reads", &[SWITCHED, A_FAILURE, Fault("short-read")])
        .because("the checked device makes an error of a short read, which its own tests prove"),
    requirement("journal-errors", &[SWITCHED, Fault("write-error"), Fault("crash"), Comes(InDoubt)])
        .because("its mistakes are those of in-doubt, where they are seen sooner"),
    requirement(
        "in-doubt",
        &[
            SWITCHED,
            Comes(InDoubt),
            Comes(Reverting),
            In(InDoubt, H::Crash),
            In(InDoubt, H::PowerLoss),
            In(Switched, H::Crash),
            In(InDoubt, H::TargetLost),
        ],
    ),
    requirement("map-errors", &[SWITCHED, RESUMED, Fault("write-error"), In(Copying, H::CrashAtWrite)])
        .because("what the map says too much is proved by flush-death and resume, which need no errors of it"),
    requirement("stores-errors", &[SWITCHED, Fault("write-error"), Fault("read-error"), Comes(InDoubt), Fault("crash")])
        .because("its mistakes are those of in-doubt, where they are seen sooner"),
    requirement("source-late", &[SWITCHED, Fault("stuck"), Fault("crash"), Happens(H::Cancel), Fault("disk-lost")])
        .because("what a late source holds up is proved by undone-crash"),
    requirement("large-sectors", &[SWITCHED, Fault("crash"), Fault("power-loss"), Fault("disk-lost")])
        .because("a request that is no multiple of a sector is refused by the checked device, which proves itself"),
    requirement("pool-empty", &[SWITCHED, Fault("pool-empty"), In(Copying, H::PoolEmpty), In(Verifying, H::PoolEmpty)])
        .because("who holds a lock while it waits for a buffer is seen as converges; no such mistake is made yet"),
    requirement("store-full", &[SWITCHED, Fault("store-full"), Fault("no-space"), In(Copying, H::StoreFull), Fault("crash")])
        .because("what a full store must not do is hold the guest, which told.rs proves for each phase"),
    requirement("crash", &[SWITCHED, Fault("crash"), Fault("late-landing")])
        .because("crashes are proved where there is something to be believed after them: resume, flush-death, in-doubt"),
    requirement("await", &[SWITCHED, Fault("crash")]).because("it is played at every await, which needs no luck; see awaits.rs"),
    requirement("journal-torn", &[SWITCHED, Fault("power-loss"), In(Copying, H::PowerLossAtStore), Fault("late-landing")]),
    requirement("recovery", &[SWITCHED, Fault("crash"), In(Copying, H::CrashAgain), In(Committing, H::CrashAgain)])
        .because("recovery's mistakes are proved by resume and in-doubt"),
    requirement("resume", &[SWITCHED, RESUMED, Fault("crash"), Fault("power-loss"), In(TargetLost, H::CrashAtWrite)]),
    requirement("power-loss", &[SWITCHED, Fault("power-loss"), Fault("crash")]),
    requirement("steering", &[SWITCHED, CANCELLED, Happens(H::Pause), Happens(H::Cancel), Happens(H::Bandwidth)]),
    requirement("corruption", &[SWITCHED, Fault("corruption")])
        .because("a comparison that compares nothing is seen in lies, which corrupts more"),
    requirement("lies", &[SWITCHED, Fault("lost-write"), Fault("misdirected-write"), Fault("flipped-bit")]),
    requirement("reconnect", &[SWITCHED, Fault("reconnect"), Fault("slow")])
        .because("who lets a new connection in too early is a mistake of the host, made in world.rs"),
    requirement("nbd", &[SWITCHED]),
    requirement("nbd-cut", &[SWITCHED, Fault("link-cut"), Fault("link-down")]),
    requirement("nbd-half-open", &[SWITCHED, Fault("half-open"), Fault("reconnect")]),
    requirement("nbd-crash", &[SWITCHED, Fault("crash"), Fault("reconnect")])
        .because("a dead server's requests are the disks' late landings, which crash and nbd-cut prove"),
    requirement("nbd-power-loss", &[SWITCHED, Fault("power-loss"), Fault("reconnect")]),
    requirement("nbd-slow-reader", &[SWITCHED, Fault("slow-reader"), Fault("link-down")])
        .because("who waits for a reader holds up only that one: nbd's own tests prove it"),
    requirement("nbd-two", &[SWITCHED, Fault("reconnect"), Fault("half-open"), Fault("crash"), Fault("power-loss")])
        .because("a connection that is let in too early is proved by nbd-cut and nbd-half-open"),
    requirement("snapshots", &[SWITCHED, Comes(PreSwitch)]),
    requirement("snapshots-crash", &[SWITCHED, Fault("crash"), Happens(H::Cancel)]),
    requirement("snapshots-power-loss", &[SWITCHED, Fault("power-loss"), Happens(H::Cancel)]),
    requirement("snapshots-steering", &[SWITCHED, CANCELLED, Happens(H::Pause)]).because(STRATEGY),
    requirement("snapshots-errors", &[SWITCHED, A_FAILURE, Fault("write-error"), Fault("flush-error")]),
    requirement("target-trouble", &[SWITCHED, Fault("write-error"), Fault("no-space"), Happens(H::TargetLost)]).because("its mistakes are those of the target-* scenarios, where they are seen sooner"),
    requirement("files-fail", &[SWITCHED, Fault("file-error"), Fault("crash"), Fault("power-loss")])
        .because("what is not durable though it was said to be is proved by hosts-prepare-not-durable and its like"),
    requirement("clock-jumps", &[SWITCHED, Fault("clock-step"), Fault("crash"), In(Copying, H::ClockJump)])
        .because("nothing of a guest's data hangs on the wall clock; what is told of time is checked as monotonic"),
    requirement("hosts", &[SWITCHED]),
    requirement(
        "hosts-crash",
        &[SWITCHED, Fault("crash"), Fault("neighbour-crash"), Fault("wrong-epoch"), In(Committing, H::Crash)],
    ),
    requirement("hosts-cut", &[SWITCHED, Happens(H::PeerTrouble), In(PreSwitch, H::PeerTrouble), Comes(TargetLost)]),
    requirement("hosts-cut-guest", &[SWITCHED, Happens(H::PeerTrouble)])
        .because("that the guest waits for nobody is proved by hosts-silence-borne in hosts-cut"),
    requirement("hosts-power-loss", &[SWITCHED, Fault("power-loss"), Fault("neighbour-power-loss")]),
    requirement("hosts-unheard", &[SWITCHED, Happens(H::PeerUnheard), Fault("neighbour-power-loss")]),
    requirement("hosts-meddled", &[SWITCHED, Happens(H::PeerMeddled), In(TargetLost, H::Crash)]),
    requirement("hosts-full", &[SWITCHED, Fault("no-space"), In(Cancelling, H::Crash)]),
    requirement("hosts-undone", &[SWITCHED, Happens(H::Cancel), Fault("neighbour-crash")]),
    requirement(
        "hosts-judged",
        &[SWITCHED, Fault("arbiter-trouble"), Comes(InDoubt), Comes(Reverting), Fault("crash"), Fault("neighbour-crash")],
    ),
    requirement("hosts-judged-late", &[SWITCHED, Fault("arbiter-late"), In(InDoubt, H::Crash)]),
    requirement("hosts-judged-await", &[SWITCHED, Fault("arbiter-trouble"), Fault("crash")])
        .because("it is played at many awaits; its mistakes are those of hosts-judged"),
    requirement("hosts-await", &[SWITCHED, Fault("crash")]).because("it is played at every await, which needs no luck"),
    requirement("hosts-await-there", &[SWITCHED, Fault("neighbour-crash")]),
    requirement(
        "hosts-together",
        &[
            SWITCHED,
            CANCELLED,
            Told("asked together"),
            Told("committed together"),
            Told("undone together"),
            Fault("crash"),
            Fault("neighbour-crash"),
            In(Committing, H::Crash),
            In(Committing, H::PeerCrash),
        ],
    ),
    requirement(
        "hosts-together-judged",
        &[SWITCHED, Told("asked together"), Fault("arbiter-trouble"), Comes(InDoubt), Fault("crash"), Fault("neighbour-crash")],
    ),
    requirement(
        "machine",
        &[
            SWITCHED,
            CANCELLED,
            Told("machine runs there"),
            Told("machine moved"),
            Told("committed together"),
            Fault("crash"),
            Fault("neighbour-crash"),
            Fault("qemu-dies"),
            Fault("qemu-refuses"),
            Fault("qemu-does-not-start"),
            Fault("snapshot-taken"),
        ],
    ),
    requirement("machine-await", &[SWITCHED, Told("machine moved"), Fault("crash"), Fault("neighbour-crash")]),
    requirement(
        "machine-postcopy",
        &[
            SWITCHED,
            CANCELLED,
            Told("machine moved"),
            Told("memory followed"),
            Fault("memory-cut"),
            Fault("crash"),
            Fault("neighbour-crash"),
            Fault("qemu-refuses"),
        ],
    ),
    requirement(
        "machine-postcopy-await",
        &[SWITCHED, Told("memory followed"), Fault("memory-cut"), Fault("crash"), Fault("neighbour-crash")],
    )
    .because("it is played at one await; its mistakes are those of machine-postcopy"),
    requirement(
        "machine-parallel",
        &[
            SWITCHED,
            CANCELLED,
            Told("machine moved"),
            Told("memory copied from outside"),
            Fault("memory-link-cut"),
            Fault("memory-written-late"),
            Fault("crash"),
            Fault("neighbour-crash"),
            Fault("qemu-dies"),
            Fault("qemu-refuses"),
        ],
    ),
    requirement(
        "machine-parallel-await",
        &[SWITCHED, Told("memory copied from outside"), Fault("crash"), Fault("neighbour-crash")],
    )
    .because("it is played at one await; its mistakes are those of machine-parallel"),
    requirement(
        "machine-sharing",
        &[
            SWITCHED,
            CANCELLED,
            Told("machine moved"),
            Told("handed over"),
            Fault("crash"),
            Fault("neighbour-crash"),
            Fault("qemu-refuses"),
            In(Committing, H::Crash),
            In(Committing, H::PeerCrash),
            Comes(Reverting),
        ],
    ),
    requirement(
        "machine-sharing-await",
        &[SWITCHED, Told("handed over"), Fault("crash"), Fault("neighbour-crash")],
    )
    .because("it is played at one await; its mistakes are those of machine-sharing"),
    requirement(
        "machine-layers",
        &[
            SWITCHED,
            CANCELLED,
            Told("machine moved"),
            Told("snapshot"),
            Told("layers there"),
            Fault("crash"),
            Fault("neighbour-crash"),
        ],
    ),
    others::RESTARTED,
    others::STOPPED,
    others::SENT_RESUMED,
    others::MONITOR_HELD,
    others::LAYERS_AGAIN,
    others::SUPERVISED,
    others::QEMU_KILLED,
    others::NAMESAKE,
    others::DISK_ALONE,
    others::LEFTOVER,
    requirement("hosts-together-await", &[SWITCHED, Told("committed together"), Fault("crash"), Fault("neighbour-crash")]),
    requirement("snapshots-await", &[SWITCHED, Fault("crash")]).because("it is played at one await or step of many; its mistakes are those of snapshots-crash"),
    requirement("snapshots-files", &[SWITCHED, Fault("file-error"), Fault("crash"), In(Switched, H::FilesFail)])
        .because("a removal that fails is tried again by the move itself; none was seen that only the last look makes good"),
    requirement("there-and-back", &[SWITCHED, Fault("crash"), Fault("power-loss")])
        .because("the way back is the way there with the sides exchanged, which quiet proves"),
    requirement("zeroes-lost", &[SWITCHED, Fault("flush-error"), Comes(TargetLost)])
        .because("a regression of had-unflushed, which target-errors proves"),
    requirement("offload", &[SWITCHED, Fault("offload-error"), Fault("offload-part"), Fault("crash")])
        .because("what an offload has left is copied by the engine, whose mistakes are proved without it"),
    requirement("skip-zero", &[SWITCHED, SKIPPED_HOLES, SKIPPED_ZEROES, UNSKIPPED, Fault("offload-part")]),
    requirement(
        "skip-zero-trouble",
        &[SWITCHED, SKIPPED_HOLES, SKIPPED_ZEROES, Comes(TargetLost), Fault("disk-lost"), Fault("crash"), Fault("flush-error")],
    )
    .because("a skip that is believed of another target or too long is seen in skip-zero and skip-zero-resume, in fewer seeds"),
    requirement("skip-zero-resume", &[SWITCHED, RESUMED, SKIPPED_HOLES, SKIPPED_ZEROES, Fault("crash"), Fault("disk-lost")]),
    requirement(
        "read-cache",
        &[SWITCHED, READ_FROM_MEMORY, COPIED_FROM_MEMORY, EVICTED, Comes(TargetLost), Fault("read-error"), Fault("crash")],
    ),
    requirement("follow", &[SWITCHED, RESUMED, Comes(TargetLost), Fault("write-error"), Fault("crash"), Fault("disk-lost")]),
    requirement("cold-first", &[SWITCHED, Comes(TargetLost), Fault("write-error"), Fault("crash"), Fault("disk-lost")])
        .because("its mistakes cost order and no data, and a chunk that is never chosen is seen by follow"),
    requirement(
        "surrogate",
        &[
            SWITCHED,
            RESUMED,
            CANCELLED,
            FROM_SURROGATE,
            FROM_BOTH,
            TO_SURROGATE,
            FETCHED,
            FULL_SURROGATE,
            DRAINING,
            Fault("crash"),
        ],
    ),
    requirement(
        "surrogate-cached",
        &[SWITCHED, CANCELLED, FROM_SURROGATE, TO_SURROGATE, READ_FROM_MEMORY, COPIED_FROM_MEMORY, Fault("crash")],
    ),
    requirement("surrogate-dying", &[SWITCHED, TO_SURROGATE]).because(TOGETHER),
    requirement(
        "surrogate-failing",
        &[SWITCHED, FROM_SURROGATE, TO_SURROGATE, Comes(TargetLost), Fault("write-error"), Fault("flush-error")],
    ),
    requirement("surrogate-hosts", &[SWITCHED, FROM_SURROGATE, TO_SURROGATE, Fault("crash")]).because(TOGETHER),
    requirement(
        "cache",
        &[
            Told("read from a cache"),
            Told("read from base and cache"),
            Told("admitted"),
            Told("a full cache"),
            Told("passed by a cache"),
            Told("written to a cache"),
            Told("written through a cache"),
            Told("written back"),
            Told("another mode"),
            Told("another size"),
            Told("drained"),
            Told("cached blocks outlived the process"),
            Told("dirty blocks outlived the power"),
            Fault("crash"),
            Happens(H::PowerLoss),
        ],
    ),
    requirement(
        "cache-failing",
        &[
            Told("read from a cache"),
            Told("a failed cache"),
            Fault("crash"),
            Fault("read-error"),
            Fault("write-error"),
        ],
    ),
    requirement(
        "cache-moves",
        &[
            Told("none"),
            Told("cachemior"),
            Told("firepan"),
            Told("firepan-if"),
            Told("remote-read"),
            Told("hybrid"),
            Told("blocks of the other cache"),
            Told("blocks of the storage"),
            Told("a miss read at the other host"),
            Told("blocks that came in vain"),
            Told("a cache stays"),
            Told("a cache begins empty"),
            Told("written to a cache"),
            Fault("slow"),
            Fault("link-cut"),
            Fault("crash"),
            Happens(H::PowerLoss),
        ],
    ),
    requirement(
        "cache-moves-failing",
        &[
            Told("blocks of the other cache"),
            Told("a failed cache"),
            Fault("link-cut"),
            Fault("crash"),
            Fault("read-error"),
            Fault("write-error"),
        ],
    )
    .because("the mistakes of a transfer are proved by cache-moves, and those of flash that fails by cache-failing"),
    requirement("dbt", &[SWITCHED, Comes(LastCopy)]),
    requirement("dbt-downtime", &[SWITCHED, Comes(LastCopy)])
        .because("a hold that is not bounded is proved by dbt-slows-down, on a target that makes it long"),
    requirement("dbt-scattered", &[SWITCHED, Comes(LastCopy)]),
    requirement("dbt-slows-down", &[SWITCHED, Comes(LastCopy), Fault("slow")]),
    requirement("dbt-never-rests", &[SWITCHED]).because(STRATEGY),
    requirement("dbt-races", &[SWITCHED, Comes(LastCopy), Fault("slow")]),
    requirement("dbt-hot", &[SWITCHED, Comes(LastCopy), Fault("crash")]).because(STRATEGY),
    requirement(
        "dbt-last-copy",
        &[
            SWITCHED,
            Comes(LastCopy),
            In(LastCopy, H::Crash),
            In(LastCopy, H::PowerLoss),
            In(LastCopy, H::Cancel),
            In(LastCopy, H::TargetLost),
        ],
    ),
    requirement("dbt-resume", &[SWITCHED, RESUMED, Fault("crash"), Fault("power-loss")]),
    requirement("dbt-swarm", &[SWITCHED, Comes(LastCopy), Fault("crash")]).because(TOGETHER),
    requirement("async", &[SWITCHED]).because(STRATEGY),
    requirement("async-slow-target", &[SWITCHED]),
    requirement("async-races", &[SWITCHED, Fault("slow")]),
    requirement("async-errors", &[SWITCHED, Comes(TargetLost), Fault("write-error"), Fault("flush-error"), Fault("disk-lost")])
        .because(STRATEGY),
    requirement("async-crash", &[SWITCHED, Fault("crash"), In(Copying, H::Crash)]).because(STRATEGY),
    requirement("async-resume", &[SWITCHED, RESUMED, Fault("crash"), Fault("power-loss")])
        .because("seldom does a write wait in the buffer over a flush; async-answered-unlogged has a test in which one does"),
    requirement("async-power-loss", &[SWITCHED, Fault("power-loss")]).because(STRATEGY),
    requirement("async-steering", &[SWITCHED, CANCELLED, Happens(H::Pause)]).because(STRATEGY),
    requirement("async-swarm", &[SWITCHED, Fault("crash")]).because(TOGETHER),
    requirement("auto", &[SWITCHED]).because(STRATEGY),
    requirement("auto-slow-target", &[SWITCHED]),
    requirement("auto-never-rests", &[SWITCHED]),
    requirement("auto-races", &[SWITCHED, Fault("slow")]),
    requirement("auto-errors", &[SWITCHED, A_FAILURE, Comes(TargetLost), Fault("write-error"), Fault("flush-error")])
        .because(STRATEGY),
    requirement("auto-crash", &[SWITCHED, Fault("crash"), In(Copying, H::Crash)]).because(STRATEGY),
    requirement("auto-resume", &[SWITCHED, RESUMED, Fault("crash"), Fault("power-loss")]),
    requirement("auto-power-loss", &[SWITCHED, Fault("power-loss")]).because(STRATEGY),
    requirement("auto-steering", &[SWITCHED, CANCELLED, Happens(H::Pause), Fault("stuck")]).because(STRATEGY),
    requirement("auto-swarm", &[SWITCHED, Fault("crash")]).because(TOGETHER),
    requirement("paper", &[SWITCHED]).because(STRATEGY),
    requirement("paper-races", &[SWITCHED, Fault("slow")]),
    requirement("paper-errors", &[SWITCHED, Comes(TargetLost), Fault("write-error"), Fault("flush-error")]).because(STRATEGY),
    requirement("paper-resume", &[SWITCHED, RESUMED, Fault("crash"), Fault("write-error")]).because(STRATEGY),
    requirement("paper-steering", &[SWITCHED, CANCELLED, Fault("crash"), Happens(H::Pause)]).because(STRATEGY),
    requirement("paper-swarm", &[SWITCHED, Fault("crash")]).because(TOGETHER),
    requirement("volumes", &[SWITCHED, CANCELLED, AtOnce(2), AtOnce(3), Comes(TargetLost), Fault("slow"), Fault("write-error")]),
    requirement(
        "volumes-crash",
        &[SWITCHED, RESUMED, CANCELLED, AtOnce(2), AtOnce(3), Fault("crash"), Fault("power-loss"), In(Copying, H::Crash)],
    ),
    requirement(
        "volumes-together",
        &[SWITCHED, CANCELLED, Told("asked together"), Told("undone together"), In(Cancelling, H::Crash), AtOnce(3)],
    ),
    requirement(
        "volumes-committed",
        &[
            SWITCHED,
            CANCELLED,
            RESUMED,
            Told("committed together"),
            Told("group in doubt"),
            Told("undone together"),
            In(InDoubt, H::Crash),
            In(Committing, H::Crash),
        ],
    ),
    requirement("volumes-pool", &[SWITCHED, AtOnce(2), AtOnce(3), Fault("pool-empty"), Fault("stuck")])
        .because("a volume that hangs seldom has all buffers here; that no export may is proved by nbd-pool-not-shared-out"),
    requirement(
        "layers",
        &[SWITCHED, Told("snapshot"), Told("removal"), Told("draining"), Told("throttle"), Told("no throttle")],
    ),
    requirement(
        "layers-crash",
        &[SWITCHED, Fault("crash"), Fault("power-loss"), Told("snapshot"), Told("removal"), Told("draining")],
    ),
    requirement("layers-dying", &[SWITCHED, Fault("crash"), Told("snapshot"), Told("removal")]),
    requirement(
        "layers-hosts",
        &[
            SWITCHED,
            CANCELLED,
            RESUMED,
            Told("layers there"),
            Told("removal"),
            Fault("crash"),
            Fault("neighbour-crash"),
            Fault("neighbour-power-loss"),
        ],
    ),
    requirement("layers-errors", &[SWITCHED, CANCELLED, Fault("write-error"), Told("snapshot"), Told("draining")]),
    requirement("layers-flush-lost", &[SWITCHED, Fault("flush-error"), Told("snapshot"), Told("draining")])
        .because(STARTS),
    requirement(
        "machine-files",
        &[
            SWITCHED,
            Told("machine moved"),
            Fault("file-error"),
            Happens(H::FilesFail),
            Happens(H::StoreFull),
            Happens(H::PeerFilesFail),
            Happens(H::PeerStoreFull),
        ],
    )
    .because(TOGETHER),
    requirement(
        "surrogate-files",
        &[SWITCHED, TO_SURROGATE, Fault("file-error"), Happens(H::FilesFail), Happens(H::StoreFull)],
    )
    .because(TOGETHER),
    requirement(
        "layers-files",
        &[SWITCHED, Told("snapshot"), Fault("file-error"), Happens(H::FilesFail), Happens(H::StoreFull)],
    )
    .because(TOGETHER),
    requirement(
        "hosts-files",
        &[
            SWITCHED,
            Fault("file-error"),
            Happens(H::FilesFail),
            Happens(H::StoreFull),
            Happens(H::PeerFilesFail),
            Happens(H::PeerStoreFull),
        ],
    )
    .because(TOGETHER),
    requirement("start-away-volume", &[SWITCHED, DOWN, Fault("away"), Happens(H::StartWithout(Part::Source))])
        .because(STARTS),
    requirement(
        "start-away-base",
        &[DOWN, Fault("away"), Happens(H::StartWithout(Part::Source)), Told("written to a cache"), Told("written back")],
    )
    .because(STARTS),
    requirement("start-away-flash", &[DOWN, Fault("away"), Happens(H::StartWithout(Part::Cache))]).because(STARTS),
    requirement(
        "start-away-layer",
        &[SWITCHED, DOWN, Fault("away"), Happens(H::StartWithout(Part::Layer)), Told("snapshot")],
    )
    .because(STARTS),
    requirement(
        "start-away-store",
        &[
            SWITCHED,
            TO_SURROGATE,
            Fault("away"),
            Happens(H::StartWithout(Part::Store(0))),
            Happens(H::StartWithout(Part::Store(1))),
        ],
    )
    .because(STARTS),
    requirement("start-away-target", &[SWITCHED, Fault("away"), Happens(H::StartWithout(Part::Target))]).because(STARTS),
    requirement(
        "start-exchanged-flash",
        &[
            Fault("exchanged"),
            Happens(H::StartExchanged(Part::Cache, Exchange::RolledBack)),
            Happens(H::StartExchanged(Part::Cache, Exchange::Blank)),
            Told("written to a cache"),
            Told("left without its cache"),
        ],
    ),
    requirement(
        "start-exchanged-store",
        &[
            SWITCHED,
            Fault("exchanged"),
            Happens(H::StartExchanged(Part::Store(0), Exchange::RolledBack)),
            Happens(H::StartExchanged(Part::Store(0), Exchange::Blank)),
            Happens(H::StartExchanged(Part::Store(1), Exchange::RolledBack)),
            Happens(H::StartExchanged(Part::Store(1), Exchange::Blank)),
        ],
    )
    .because(STARTS),
    requirement("start-changed-base", &[Fault("changed-behind"), Told("read from a cache")]),
    requirement("start-changed-source", &[SWITCHED, RESUMED, Fault("changed-behind")]),
    requirement("away-base", &[A_FAILURE, Fault("away"), Told("written to a cache"), Told("written back")]).because(STARTS),
    requirement("flush-lost-base", &[A_FAILURE, Fault("flush-lost"), Told("written to a cache")]),
    requirement("flush-lost-image", &[A_FAILURE, Fault("flush-lost"), Told("snapshot"), Told("draining")]).because(STARTS),
    requirement(
        "cache-failing-dirty",
        &[A_FAILURE, Fault("read-error"), Fault("write-error"), Fault("crash"), Told("a failed cache")],
    ),
    requirement(
        "swarm",
        &[
            SWITCHED,
            CANCELLED,
            A_FAILURE,
            Comes(TargetLost),
            Fault("crash"),
            Fault("power-loss"),
            Fault("reconnect"),
            Fault("store-full"),
            Fault("half-open"),
        ],
    )
    .because(TOGETHER),
];

#[cfg(test)]
mod tests;
