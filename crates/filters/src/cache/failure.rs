//! What becomes of a cache whose flash fails.
//!
//! ```text
//!   works ──▶ a request to the flash fails ──▶ failed: nothing is taken in, clean places are not read
//!                                                │ before the base is changed
//!                                                ▼
//!               nothing is dirty or becomes so, and the boot record can be struck ──▶ revoked: nothing is believed in this boot
//!               otherwise ──▶ CacheLoss::note ──▶ revoked: nothing clean is believed
//! ```
//!
//! What was under way when the flash failed may still become dirty. A boot record that was struck would forget that, so it is struck only
//! when nothing is.
//!
//! A write that could not be recorded has failed, but the next process may find it in the record. Until then its sectors are neither the old
//! ones nor the new ones: a guest that has read either must not read the other later. So it reads neither. A copy takes what is there; where
//! it goes, that is what holds.
//!
//! The record of a failed flash still says what was cached, and nobody can change that. Were the base changed regardless, the next process
//! might find the flash well again, and answer old bytes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use block::{Error, ErrorKind, Extent, Result};
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
    /// Blocks whose record may be what memory says, or what it should have become when the flash failed; with those sectors that the next
    /// process may find to be others.
    in_doubt: Mutex<BTreeMap<u64, u8>>,
    /// How many changes are under way that may make something dirty.
    becoming_dirty: AtomicUsize,
}

/// A change that may make something dirty is under way.
pub(super) struct BecomingDirty<'a>(&'a AtomicUsize);

impl Drop for BecomingDirty<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
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

    /// Begins a change that may make something dirty; none if nothing is to become dirty any more.
    pub(super) fn begin_dirty(&self) -> Option<BecomingDirty<'_>> {
        self.failure.becoming_dirty.fetch_add(1, Ordering::SeqCst);
        let becoming_dirty = BecomingDirty(&self.failure.becoming_dirty);
        // Asked afterwards: whoever has seen that none is under way has had the flash fail before.
        self.takes_dirty().then_some(becoming_dirty)
    }

    /// Nobody knows what the record says of `block`, nor which bytes the next process finds in `sectors` of it.
    pub(super) fn doubt(&self, block: u64, sectors: u8) {
        *self.failure.in_doubt.lock().entry(block).or_default() |= sectors;
    }

    /// Fails if the next process may find other bytes in a part of `extent` than this one would read.
    pub(super) fn check_certain(&self, extent: Extent) -> Result<()> {
        if !self.failure.has_failed() {
            return Ok(());
        }
        let in_doubt = self.failure.in_doubt.lock();
        let is_doubtful = |(block, sectors): (&u64, &u8)| {
            let part = extent.intersection(self.extent_of(*block));
            part.is_some_and(|part| self.sectors_of(part).0 & sectors != 0)
        };
        if !in_doubt.range(self.block.indices_of(extent)).any(is_doubtful) {
            return Ok(());
        }
        let context = format!("{} has failed while it recorded a write that is read here", self.partition.name());
        Err(Error::new(ErrorKind::Io, context))
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
        // In this order: what has ended meanwhile is seen in the maps.
        let holds_nothing = self.failure.becoming_dirty.load(Ordering::SeqCst) == 0
            && self.holds_nothing()
            && self.failure.in_doubt.lock().is_empty();
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
