//! The papers' evaluations, repeated in the simulator's world with the project's engine: `cargo xtask paper NAME`.
//!
//! A paper is a module that names scenes (what is played), and figures (what is made of it, beside the paper's numbers).
//! How they are played is [`runs`]' business, how they are shown [`report`]'s; devices, loads and the world with its
//! checkers are the simulator's. [`tables`] has the experiments of papers that are a table and no more.

pub mod esx;
pub mod figure;
pub mod firepan;
mod interference;
pub mod iofollow;
mod journal;
pub mod papers;
pub mod pmigrate;
pub mod replay;
pub mod report;
pub mod runs;
pub mod table;
pub mod tables;
pub mod waio;
