//! Migrations over devices in memory, and the wire between two hosts. One program: what it links is linked once.

extern crate transhume_migrate as migrate;

mod asynchronous;
mod auto;
mod commit_in_doubt;
mod common;
mod failures;
mod handover;
mod mirror;
mod mirror_paper;
mod progress_map;
mod read_cache;
mod schedules;
mod snapshot;
mod target_stall;
mod tracking;
mod verification;
mod wire;
