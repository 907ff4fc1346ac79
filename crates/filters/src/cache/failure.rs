//! What becomes of a cache whose flash fails.
//!
//! ```text
//!   works ──▶ a request to the flash fails ──▶ failed: nothing is taken in, clean places are not read
//!                                                │ before the base is changed
//!                                                ▼
//!               nothing is dirty, and the boot record can be struck ──▶ revoked: nothing is believed in this boot
//!               otherwise ──▶ CacheLoss::note ──▶ revoked: nothing clean is believed
//! ```
//!
//! The record of a failed flash still says what was cached, and nobody can change that. Were the base changed regardless, the next process
//! might find the flash well again, and answer old bytes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::Inner;

#[derive(Default)]
pub(super) struct Failure {
    has_failed: AtomicBool,
    cause: Mutex<Option<(ErrorKind, String)>>,
    /// Whether it is on record that nothing clean is believed. Held by who puts it there.
    is_revoked: tokio::sync::Mutex<bool>,
    /// Why nothing in the base is promised to be durable any more: a flush of it has failed.
    base: Mutex<Option<String>>,
    has_failed_base: AtomicBool,
    /// Blocks whose record may be what memory says, or what it should have become when the flash failed.
    in_doubt: Mutex<BTreeSet<u64>>,
}

impl Failure {
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    /// Fails once the flash has failed.
    pub(super) fn check(&self, name: &str) -> Result<()> {
        match &*self.cause.lock() {
            None => Ok(()),
            Some((_, cause)) => Err(Error::new(ErrorKind::Io, format!("{name} has failed before ({cause})"))),
        }
    }

    /// A flush of the base has failed: what it covered may be lost, and a later one that succeeds proves nothing.
    pub(super) fn fail_base(&self, error: &Error) {
        self.base.lock().get_or_insert_with(|| error.chain());
        self.has_failed_base.store(true, Ordering::Release);
    }

    /// Whether there was such a flush.
    pub(super) fn has_failed_base(&self) -> bool {
        self.has_failed_base.load(Ordering::Acquire)
    }

    /// Fails after such a flush.
    pub(super) fn check_base(&self) -> Result<()> {
        match &*self.base.lock() {
            None => Ok(()),
            Some(cause) => {
                let context =
                    format!("nothing durable is promised any more since a flush of the base failed ({cause})");
                Err(Error::new(ErrorKind::Io, context))
            }
        }
    }
}

impl Inner {
    /// Takes nothing more into the flash.
    pub(super) fn fail(&self, error: &Error) {
        let mut cause = self.failure.cause.lock();
        if cause.is_none() {
            tracing::error!(flash = self.partition.name(), error = error.chain(), "the flash of a cache has failed");
            *cause = Some((error.kind(), error.chain()));
            self.failure.has_failed.store(true, Ordering::SeqCst);
        }
    }

    /// Nobody knows what the record says of `block`.
    pub(super) fn doubt(&self, block: u64) {
        self.failure.in_doubt.lock().insert(block);
    }

    /// Before the base is changed in one of `blocks` after a failure: what is clean is not believed any more, and for none of them the record
    /// is in doubt.
    pub(super) async fn revoke(&self, blocks: std::ops::Range<u64>) -> Result<()> {
        if !self.failure.has_failed() {
            return Ok(());
        }
        if self.failure.in_doubt.lock().range(blocks).next().is_some() {
            let context = format!("{} has failed while it recorded a write to the same block", self.partition.name());
            return Err(Error::new(ErrorKind::Io, context));
        }
        let mut is_revoked = self.failure.is_revoked.lock().await;
        if *is_revoked {
            return Ok(());
        }
        let holds_nothing = self.holds_nothing() && self.failure.in_doubt.lock().is_empty();
        if !(holds_nothing && self.record.strike_boot().await.is_ok()) {
            let (kind, context) = self.failure.cause.lock().clone().expect("it has failed");
            let error = Error::new(kind, context);
            let Some(loss) = &self.options.loss else {
                let context = format!("{} has failed, and it cannot be put on record", self.partition.name());
                return Err(Error::new(ErrorKind::Io, context).with_source(error));
            };
            loss.note(&error)
                .await
                .map_err(|cause| cause.wrap("it cannot be put on record that a cache has failed"))?;
        }
        *is_revoked = true;
        Ok(())
    }

    /// The error of a write to what only the flash has.
    pub(super) fn cannot_write_over(&self, error: Error) -> Error {
        let context = format!("{} alone has what is written over, and takes no writes", self.partition.name());
        Error::new(ErrorKind::Io, context).with_source(error)
    }
}
