//! Strategies: how copies converge. What belongs to one of them is in its own module. Those that copy chunk by chunk
//! share one filter and one state of every chunk, [`mirror::filter`] and [`mirror::tracker`]. They differ in what
//! becomes of a guest's write to a chunk that was copied. [`auto`] decides that for every chunk.

pub(crate) mod auto;
pub(crate) mod mirror;
pub(crate) mod mirror_paper;
pub(crate) mod snapshot;
pub(crate) mod tracking;
