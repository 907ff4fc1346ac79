//! What the checkers learn from documents that are stored: who holds the volume, and who is fenced.

use super::Host;
use crate::checks;
use crate::record::Document;

impl Host {
    /// The epoch and the number of the newest document whose store was answered.
    pub(crate) fn newest_stored(&self) -> (u64, u64) {
        (*self.shared.epoch.lock(), *self.shared.stores.lock())
    }

    /// A document was stored durably, or found. The side that does not hold the volume any more is fenced: whoever opens
    /// it must know so.
    pub(crate) fn note_stored(&self, document: &Document) {
        let shared = &self.shared;
        let mut newest = shared.epoch.lock();
        let is_new = document.epoch > *newest;
        *newest = document.epoch.max(*newest);
        let mut stores = shared.stores.lock();
        *stores = document.stores.max(*stores);
        self.note_holder(document.holder, document.epoch, is_new);
    }

    /// The record names `holder` under `epoch`, because a move was committed or because its commit was taken back. Then the
    /// target is its target still.
    pub(crate) fn note_holder(&self, holder: usize, epoch: u64, is_commit: bool) {
        let sides = &self.shared.sides;
        let before = std::mem::replace(&mut *self.shared.holder.lock(), holder);
        match before != holder {
            true if is_commit => sides[before].require_epoch(epoch),
            true => sides[holder].take_epoch_back(),
            false => {}
        }
    }

    /// The checks at the commit point, while the record is about to be stored.
    pub(crate) fn check_commit(&self, from: usize) {
        let shared = &self.shared;
        let (source, target) = (&shared.sides[from], &shared.sides[1 - from]);
        let is_promised = !shared.setup.corrupts || shared.setup.options.verify == migrate::Verify::Full;
        if target.is_faulty() {
            shared.guest.allow_errors();
        }
        let ledger = shared.guest.ledger();
        if is_promised {
            // What failed at a target that was lost in doubt is not answered, and is written there again.
            checks::equal_at_switch(&shared.world, source, target, &ledger, shared.setup.has_arbiter);
        }
        checks::flushed(&shared.world, target, &ledger, is_promised);
    }
}
