//! What a load found.

use crate::Event;
use crate::event::MemoryTotals;

/// What the load found, all in all.
#[derive(Clone, Debug, Default)]
pub struct LoadResult {
    /// Blocks that the final verification read.
    pub blocks: u64,
    /// Blocks among them that held something else than they should.
    pub wrong: u64,
    /// Places that the load had written at least once.
    pub slots_rewritten: u64,
    /// The load's memory, if it has any.
    pub memory: MemoryTotals,
    /// What was told of wrong blocks and failed requests.
    pub complaints: Vec<String>,
    /// What the load itself says, once it is done.
    pub is_done: Option<bool>,
}

impl LoadResult {
    /// Whether the load came to its end and everything was as it should be.
    #[must_use]
    pub fn is_right(&self) -> bool {
        let has_checked = self.blocks > 0 || self.memory.pages > 0;
        let has_found = self.wrong > 0 || self.memory.wrong > 0 || !self.complaints.is_empty();
        self.is_done == Some(true) && has_checked && !has_found
    }

    /// Takes what an event says into account.
    pub fn note(&mut self, event: &Event) {
        match event {
            Event::Fault(complaint) | Event::Error(complaint) => self.complaints.push(complaint.clone()),
            Event::Verified { blocks, wrong, slots_rewritten } => {
                self.blocks = *blocks;
                self.wrong = *wrong;
                self.slots_rewritten = *slots_rewritten;
            }
            Event::Memory(memory) => self.memory = *memory,
            Event::Done { is_right, totals } => {
                self.is_done = Some(*is_right);
                // Lines before it may have been lost while nobody was connected.
                if let Some(totals) = totals {
                    self.blocks = totals.blocks;
                    self.wrong = totals.wrong;
                    self.slots_rewritten = totals.slots_rewritten;
                    self.memory = totals.memory;
                }
            }
            _ => {}
        }
    }
}
