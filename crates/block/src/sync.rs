//! Lock-free primitives and waits that threads share, named in one place. `tests/models.rs` compiles the files that use
//! them a second time, with a model checker's primitives of the same names.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub(crate) use parking_lot::Mutex;
pub(crate) use tokio::sync::Notify;
