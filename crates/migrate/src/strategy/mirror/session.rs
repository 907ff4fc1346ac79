//! One attempt with one target, and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Device, Error, ErrorKind, ExtentState, Result};

/// One attempt with one target.
#[derive(Clone)]
pub(crate) struct Session {
    pub(crate) number: u64,
    pub(crate) target: Device,
    /// Whether what the target reads as zeroes may be left alone. That is not so if there was a session before this
    /// one, of this job or of another. A flush may have failed there. Zeroes that it should have made durable read as
    /// zeroes only until the power fails.
    pub(crate) trusts_zeroes: bool,
    /// Shared by all clones.
    is_over: Arc<AtomicBool>,
}

impl Session {
    pub(super) fn new(number: u64, target: Device, trusts_zeroes: bool) -> Self {
        Self { number, target, trusts_zeroes, is_over: Arc::default() }
    }

    /// Whoever writes to the target piece by piece asks this before every piece. A request that hangs is given up with
    /// its session and goes on by itself. When it is answered after all, another session may use the target.
    ///
    /// # Errors
    /// The session is over.
    pub(crate) fn require(&self) -> Result<()> {
        match self.is_over.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(given_up()),
        }
    }

    /// Whether what the target says of an extent is enough to leave it alone as zeroes. A hole that stays one needs no trust: to
    /// write zeroes into all holes of a sparse target would allocate what the volume never had.
    pub(crate) fn believes(&self, state: ExtentState) -> bool {
        match state {
            ExtentState::Hole => self.trusts_zeroes || self.target.keeps_holes(),
            ExtentState::Zero => self.trusts_zeroes,
            ExtentState::Data => false,
        }
    }

    /// Nothing more is written to the target but what is under way.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }
}

/// What a write says whose session has ended before it was answered.
pub(super) fn given_up() -> Error {
    Error::new(ErrorKind::Disconnected, "the target was given up while it was being written")
}
