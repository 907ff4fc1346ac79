//! Placeholder until the crate's first landing.
