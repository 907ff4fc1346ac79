//! A closed world: the real engine runs under a virtual clock against simulated disks and guests. The faults come from
//! one seed, and checkers verify the invariants.
//!
//! # Fault model
//!
//! What may fail here, where, how often, and what must survive it. Nothing else fails. A fault that is not listed is
//! not simulated, and what survives only by luck is not tested. Rates are per request and come from the seed. In a
//! swarm each is drawn below the rate given here. In a scenario named after a fault it is one of a few rates up to the
//! one given here.
//!
//! | fault | where | how often | what it does | what must survive |
//! |---|---|---|---|---|
//! | read error | any disk | up to 1 % | one read fails | the guest's request may fail on the disk that holds the volume, never because of another |
//! | short read | any disk | up to 1 % | one read gives less than it was asked for, which the checked device refuses | the same |
//! | write error | any disk | up to 1 %; stores 70 % | one write fails; any part of it may have landed | the same; the two sides never differ unnoticed |
//! | flush error | any disk | up to 60 % | what it covered is not made durable by any later flush | the guest is told, or another copy has it |
//! | no space | target | once | data beyond a part of the volume is refused | the guest is not touched |
//! | store full | journal and progress map, on either host | up to 4 times, 30 ms each | every write is refused | the guest is not touched, the job waits or ends |
//! | file error | the daemon's files, on either host | half of them, up to 6 times, 30 ms each | a write leaves any beginning, a sync of a directory makes nothing durable | the journal that was acknowledged, and with it the volume's place |
//! | empty pool | buffers of copies and of the guest's connections | up to 5 times, 20 ms each | somebody else has every buffer that is free | all; who waits for a buffer holds nothing that others need |
//! | clock step | all wall clocks | up to 6 times, two days at most | they jump, forward or back; the monotonic ones do not | all |
//! | disk lost | target | up to 3 times | every request fails until it comes back | the same |
//! | away at a start | the disk that holds the volume, the target, a snapshot's file, a surrogate's store, a cache's flash | up to 3 times, up to 8 s | the daemon ends, and starts while it is away: requests fail or wait, it cannot be opened or openings wait | everything. A guest's request may fail, and a volume may be down as long as it needs that disk |
//! | away | the disk under a write-back cache | up to 3 times, up to 8 s | the same under a daemon that runs | everything |
//! | flush lost | the disk under a cache or snapshots | once | one flush fails, what it covered is lost, and no later one succeeds until the disk is opened again | what was flushed before, and what is answered later |
//! | exchanged | a cache's flash, one store of two | up to 2 times | the daemon ends, and starts with an older or an empty disk in that place | nothing of it is believed |
//! | changed behind | the disk that holds the volume | up to 2 times | the daemon ends, and somebody writes to the disk before it starts | what was written |
//! | stuck | any disk | up to 1 %; stores 5 % | a request takes up to 90 s | the guest waits for no target longer than the stated limit |
//! | slow | any disk | up to 10 % | up to 50 ms at a twentieth of the speed | all |
//! | offload refused, in part, failed | between source and target | 10 %, 10 %, 5 % | nobody knows what the target holds there | the engine copies it itself |
//! | lost, misdirected write, flipped bit | target | up to 2 % | a part of a write does not land, lands elsewhere, lands with one bit wrong | found by a full comparison if it came before that |
//! | corruption | target | up to 3 times | a bit changes by itself | the same |
//! | crash | the process | up to 6 times, at any moment, in a chosen phase, or at a chosen await | every task ends at its await; requests under way land wholly, in part, late (up to 56 ms) or never | everything that was answered |
//! | crash in recovery | the process | up to 9 times | killed again up to 0.8 ms after it was started | the same |
//! | crash between two steps | the daemon's files | at a chosen step, counted with the awaits | what was not done is not done | the same |
//! | names lost | the daemon's files | at a power loss | changes of names that no sync of their directory covered are undone, the newest first | the journal that was acknowledged, and with it the volume's place |
//! | power loss | the host | up to 3 times | the same, and every sector (512 bytes) that was not flushed holds any of its versions | everything that was flushed |
//! | reconnect | the guest's connection | up to 8 times | it is cut; requests under way are asked again on a new one, in any order | all |
//! | half open | a guest's connection over NBD | up to 5 times | what the guest's side sends vanishes, its end included; the guest notices within 20 ms and connects anew, the server is never told | the same |
//! | slow reader | a guest over NBD | up to 4 times | it does not read for up to 10 ms | the same |
//! | link down | between a guest over NBD and the server | up to 3 times | nothing moves for up to 10 ms | the same |
//! | other host's crash | its daemon | up to 4 times, or at a chosen await | as a crash | everything that was answered, and the guest is not told |
//! | other host's power loss | that host: journal, files, target | up to 4 times | as a power loss, while the guest's machine runs on | everything that was answered, flushed or not |
//! | trouble between hosts | their link | up to 7 times | up to 12 s: connections are reset and none is made; or nothing moves; or one direction of those that there are vanishes | all; the guest waits for nobody while it has its own disk |
//!
//! Not tested between hosts: the first host's daemon dies *and* the other host loses its power before the next
//! flush. Then writes that were passed on and not flushed are lost, and a guest whose machine runs on is not told.
//!
//! If a flush fails in a process that dies before it can say so, nobody knows of it. What it covered is excused,
//! because no file system of a real machine does better. If a flush fails while the guest's connection is cut, the next
//! connection is told.
//!
//! Reads see the disk as it was at some moment between question and answer. Writes take effect at some moment between,
//! or in two parts at two moments. Requests that overlap in time may take effect in any order. Discards free whole
//! blocks of 4096 bytes and leave the rest as it was. Memory is never corrupted.
//!
//! A request of the guest may fail only if a request to the disk that holds the volume has failed for the same blocks.
//! That failure must be later than the moment when the request was asked. While it is in doubt which disk that is, a
//! failure of either counts. Slowness explains no failure.
//!
//! # Parts
//!
//! [`world::World`] has the clock, the log and the verdict. [`process::Process`] is what can be killed, at a chosen
//! await by a [`crash_point::CrashPoint`]. [`disk::Disk`] is what outlives it. [`register_history::RegisterHistory`] is
//! what the guest may legally read. Randomness comes from [`rng::Rng`], so that the same seed is the same run to the
//! last event. A [`scenario::Scenario`] says what there is and what happens; [`scenario_dsl`] is the language for it.
//! [`shrink`] makes a failing scenario smaller.
//!
//! # Checkers
//!
//! All of them check while the world runs, at the event that could break their invariant. The first violation ends the
//! run. `docs/reliability.md` says how each one checks. Deliberate mistakes prove that each checker can fail. Some are
//! in hosts and devices (`tests/mutations.rs`), some in the engine itself (`mutations/*.patch`, made one by one by
//! `cargo xtask mutations`).

pub mod bench;
mod checks;
pub mod clock;
pub mod cover;
pub mod crash_point;
pub mod disk;
mod failures;
mod fault_event;
pub mod faults;
mod files;
mod flush_error_latch;
pub mod guest;
pub mod host;
mod hypervisor;
mod inflight_write;
pub mod link;
pub mod log;
pub mod machine;
mod medium;
pub mod model;
mod numbers;
pub mod occurrence;
mod offload;
mod overlay_disks;
pub mod pattern;
pub mod player;
pub mod port;
pub mod process;
pub mod register_history;
pub mod rng;
pub mod scenario;
pub mod scenario_dsl;
mod scenario_runner;
pub mod scenarios;
mod seat;
pub mod shrink;
pub mod trace;
pub mod wire;
pub mod workload;
pub mod world;
