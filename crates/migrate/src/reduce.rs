//! What need not be sent.
//!
//! [`skip`] says of chunks that they need not be sent at all, and why; [`skip_map`] keeps that of every chunk.

pub(crate) mod skip;
pub(crate) mod skip_map;
