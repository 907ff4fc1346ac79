//! What a load found.

use crate::Event;

/// What the load found, all in all.
#[derive(Clone, Debug, Default)]
pub struct LoadResult {
    /// Blocks that the final verification read.
    pub blocks: u64,
    /// Blocks among them that held something else than they should.
    pub wrong: u64,
    /// Places that the load had written at least once.
    pub slots_rewritten: u64,
    /// What was told of wrong blocks and failed requests.
    pub complaints: Vec<String>,
    /// What the load itself says, once it is done.
    pub is_done: Option<bool>,
}

impl LoadResult {
    /// Whether the load came to its end and everything was as it should be.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.is_done == Some(true) && self.wrong == 0 && self.complaints.is_empty() && self.blocks > 0
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
            Event::Done { is_right } => self.is_done = Some(*is_right),
            _ => {}
        }
    }
}
