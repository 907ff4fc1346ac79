//! The primitives of what threads share without a lock or wait for, named in one place: the files that use them from here
//! are compiled a second time by `tests/models.rs`, with a model checker's primitives of the same names.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub(crate) use parking_lot::Mutex;
pub(crate) use tokio::sync::Notify;
