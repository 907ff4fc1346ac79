//! The journal's disk, and the checks of what the daemon stores there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ::daemon::VolumeDocument;
use block::{Device, Filter, IoFuture, Mutation, MutationKind};
use parking_lot::Mutex;

use super::{Host, Slots, side_held_by};
use crate::process::Process;

/// The journal's disk as one life of the daemon has it.
pub(super) struct Watched {
    pub(super) lower: Device,
    pub(super) host: Host,
    pub(super) process: Process,
    /// The newest epoch that this life knows.
    pub(super) known: Arc<AtomicU64>,
    /// The epoch of the first document that this life has stored: what it found, or what it began with.
    pub(super) found: Mutex<Option<u64>>,
}

/// Never, once `process` has died: of a step of its files, in the middle of a poll.
pub(super) async fn alive(process: &Process) {
    if process.is_dead() {
        std::future::pending().await
    }
}

/// What a slot that is written holds.
pub(super) fn payload_in(mutation: &Mutation) -> Option<Vec<u8>> {
    let MutationKind::Data(data) = mutation.kind() else { return None };
    let length = u32::from_le_bytes(data.get(12..16)?.try_into().ok()?) as usize;
    Some(data.get(32..32 + length)?.to_vec())
}

/// The document in a slot that is written, and its bytes.
pub(super) fn document_in(mutation: &Mutation) -> Option<(VolumeDocument, Vec<u8>)> {
    let payload = payload_in(mutation)?;
    Some((serde_json::from_slice(&payload).ok()?, payload))
}

impl Filter for Watched {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let shared = &self.host.shared;
            alive(&self.process).await;
            let Some((document, slot)) = document_in(&mutation) else { return self.lower.write(mutation).await };
            let found = *self.found.lock();
            if found.is_none() {
                self.host.check_recovered(&slot);
            }
            let found = *self.found.lock().insert(found.unwrap_or(document.epoch));
            let holder = side_held_by(&document);
            // A commit that an earlier life has begun, and whose store is found on the disk, has been looked at then: the
            // power may have gone since, and each side may have lost what was not flushed.
            if document.epoch > found.max(*shared.epoch.lock()) && document.job.is_some() {
                let group = document.job.as_ref().and_then(|job| job.group.as_ref());
                match group.and_then(|group| group.record) {
                    // Its sides were compared when the record of the group was stored.
                    Some(_) => self.host.check_group_committed(),
                    None => {
                        self.host.check_commit(1 - holder);
                        self.host.check_durable_there();
                    }
                }
            }
            self.host.check_given_up(&document);
            self.host.check_struck(&document);
            shared.daemon_harness.slots.lock().doubtful.push(slot.clone());
            let stored = self.lower.write(mutation).await;
            let word = if stored.is_ok() { "durable" } else { "in doubt" };
            self.host.say(format_args!("journal {word}: holder {holder} epoch {}", document.epoch));
            if stored.is_ok() {
                *shared.daemon_harness.slots.lock() = Slots { acknowledged: Some(slot), doubtful: Vec::new() };
                self.known.fetch_max(document.epoch, Ordering::Relaxed);
                self.host.note_daemon_stored(&document);
            }
            stored
        })
    }
}
