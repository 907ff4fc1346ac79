//! What the checkers learn from documents that are stored: who holds the volume, and who is fenced.

use block::BufferPool;
use migrate::Phase;

use super::Host;
use crate::checks;

impl Host {
    /// So many writes and syncs of the files of its daemon fail.
    pub fn set_files_failing(&self, part: f64) {
        self.shared.daemon_harness.files.set_failing(part);
    }

    /// The pools that its process takes buffers from.
    #[must_use]
    pub fn pools(&self) -> Vec<BufferPool> {
        self.shared.now.lock().pools.clone()
    }

    /// The sides whose failures the guest may be told. That is the side that holds the volume, or either side while
    /// nobody knows which one holds it.
    pub(crate) fn answerable(&self) -> [bool; 2] {
        let holder = self.holder();
        let in_doubt = |phase| matches!(phase, Phase::Committing | Phase::InDoubt | Phase::Reverting);
        let in_doubt = self.control().is_some_and(|control| in_doubt(control.snapshot().phase));
        [0, 1].map(|side| side == holder || in_doubt)
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
        let history = shared.guest.history();
        // With a surrogate the source alone is not the volume.
        if is_promised && !shared.setup.is_shared && shared.setup.surrogate_stores == 0 {
            // What failed at a target that was lost in doubt is not answered, and is written there again.
            checks::equal_at_switch(&shared.world, source, target, &history, shared.setup.has_arbiter);
        }
        // What the guest has flushed is in the layers, if there are any: those that are copied with the volume, too.
        if !self.has_layers(from) {
            checks::flushed(&shared.world, target, &history, is_promised);
        }
    }
}
