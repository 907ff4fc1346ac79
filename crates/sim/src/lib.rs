//! The world in a box: the real engine, run under a virtual clock against simulated disks and guests, with faults from
//! one seed and the checkers that hold what must always hold.
//!
//! # Fault model
//!
//! What may fail here, and what must survive it. Nothing else fails: a fault that is not listed is not simulated, and
//! what survives only by luck is not tested.
//!
//! | fault | where | what it does | what must survive |
//! |---|---|---|---|
//! | read error | any disk | one read fails | the guest's request may fail on the disk that holds the volume, never because of another |
//! | write error | any disk | one write fails; any part of it may have landed | the same; the two sides never differ unnoticed |
//! | flush error | any disk | what it covered is not made durable by any later flush | the guest is told, or another copy has it |
//! | no space | target | data beyond a limit is refused | the guest is not touched |
//! | disk lost | target | every request fails until it comes back | the guest is not touched, the job waits or ends |
//! | stuck | any disk | a request takes up to 90 s | the guest waits for no target longer than the stated limit |
//! | slow | any disk | up to 50 ms at a twentieth of the speed | all |
//! | lost write, corruption | target | bytes are not what was written | found by a full comparison if it came before that |
//! | crash | the process | every task ends at its await; requests under way land wholly, in part, late (up to 56 ms) or never | everything that was answered |
//! | power loss | the host | the same, and every sector (512 bytes) that was not flushed holds any of its versions | everything that was flushed |
//! | reconnect | the guest's connection | requests under way are asked again on a new one, in any order | all |
//!
//! Reads see the disk as it was at some moment between question and answer; writes land at some moment between, or in
//! two parts at two moments. Requests that overlap in time may take effect in any order. Discards free whole blocks of
//! 4096 bytes and leave the rest as it was. Memory is never corrupted and the clock never jumps.
//!
//! # Parts
//!
//! [`world::World`] has the clock, the log and the verdict; [`process::Process`] is what can be killed; [`disk::Disk`]
//! what outlives it; [`ledger::Ledger`] what the guest may legally read. Randomness comes from [`dice::Dice`], so that
//! the same seed is the same run to the last event.

mod checks;
pub mod clock;
pub mod dice;
pub mod disk;
mod flight;
pub mod guest;
pub mod host;
pub mod ledger;
pub mod log;
mod medium;
pub mod pattern;
pub mod port;
pub mod process;
mod record;
pub mod scenarios;
pub mod story;
pub mod world;
