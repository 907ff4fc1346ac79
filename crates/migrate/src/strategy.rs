//! Strategies: how copies converge. Each has a filter of its own, because the two change together.

pub(crate) mod mirror;
