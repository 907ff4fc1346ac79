//! One volume at the other host: its journal and progress map there, and what the checks know of it.

use ::daemon::{IncomingStage, VolumeDocument};
use block::{Bytes, Device, Filter, IoFuture, Mutation};
use parking_lot::Mutex;

use super::PeerHost;
use crate::disk::{Disk, HostCache, Timing};
use crate::host::beside::names;
use crate::host::daemon_harness::watched::{alive, document_in};
use crate::host::{Host, daemon_harness::Slots};
use crate::process::Process;
use crate::world::{Invariant, World};

/// What the other host has of a volume.
pub(super) struct PeerVolume {
    pub(super) journal: Disk,
    pub(super) map: Disk,
    /// What may be found in its journal.
    slots: Mutex<Slots>,
    /// It has durably taken the volume; and the first host's guest may use it there.
    is_held: Mutex<bool>,
    is_used: Mutex<bool>,
    pub(super) flushes: Mutex<Flushes>,
    /// The page cache of this host of the volume's disk, if both hosts reach that.
    pub(super) page_cache: HostCache,
}

/// Flushes of the target, by numbers that grow.
#[derive(Default)]
pub(super) struct Flushes {
    pub(super) begun: u64,
    pub(super) done: u64,
    /// Which one covers what a dead daemon of the source has passed on.
    pub(super) after_death: u64,
    /// Which one covers what was written again after this host had lost its power.
    pub(super) after_power_loss: u64,
    /// How many answers the guest had got when a new daemon of the source began to serve it.
    pub(super) served_from: Option<u64>,
}

impl PeerVolume {
    pub(super) fn new(world: &World, number: usize) -> Self {
        let names = names(number);
        Self {
            journal: Disk::new(world, names.journal_there, Bytes::mib(1), 512, Timing::FLASH),
            map: Disk::new(world, names.map_there, Bytes::mib(1), 512, Timing::FLASH),
            slots: Mutex::default(),
            is_held: Mutex::new(false),
            is_used: Mutex::new(false),
            flushes: Mutex::default(),
            page_cache: HostCache::default(),
        }
    }
}

impl PeerHost {
    /// The disk of the volume's journal, for `process`.
    pub(in crate::host) async fn journal(&self, host: &Host, process: &Process) -> Device {
        let lower = self.volume.journal.open(0).await;
        let (host, process) = (host.clone(), process.clone());
        Device::new("neighbour-journal", Watched { lower, host, process, peer: self.clone() })
    }

    /// The disk of its progress map.
    pub(in crate::host) fn map(&self) -> &Disk {
        &self.volume.map
    }

    /// The place of the target as this host's daemon opens it.
    pub(in crate::host) fn counted(&self, host: &Host, lower: Device) -> Device {
        Device::new("target", Counted { lower, host: host.clone(), peer: self.clone() })
    }

    /// Whether it is durably ready to take the volume under `epoch`, or has it.
    pub(in crate::host) fn is_ready_for(&self, epoch: u64) -> bool {
        self.stage() == Some(IncomingStage::Prepared { epoch }) || self.holds()
    }

    /// The epoch under which it is ready to take the volume, or has it.
    pub(in crate::host) fn epoch(&self) -> u64 {
        match self.stage() {
            Some(IncomingStage::Prepared { epoch } | IncomingStage::Held { epoch }) => epoch,
            Some(IncomingStage::Filling) | None => self.document().map_or(0, |document| document.epoch),
        }
    }

    /// Whether it has durably taken the volume.
    pub(in crate::host) fn holds(&self) -> bool {
        *self.volume.is_held.lock()
    }

    /// Whether it says durably that it is ready, and does not have it.
    pub(in crate::host) fn is_prepared(&self) -> bool {
        matches!(self.stage(), Some(IncomingStage::Prepared { .. }))
    }

    pub(super) fn stage(&self) -> Option<IncomingStage> {
        self.document().and_then(|document| document.incoming).map(|incoming| incoming.stage)
    }

    /// Whether nothing else may be on record than what is.
    pub(super) fn is_certain(&self) -> bool {
        self.volume.slots.lock().doubtful.is_empty()
    }

    /// What it has durably on record of the volume.
    pub(super) fn document(&self) -> Option<VolumeDocument> {
        self.volume.slots.lock().acknowledged.as_deref().and_then(|slot| serde_json::from_slice(slot).ok())
    }

    /// The source's daemon has died.
    pub(in crate::host) fn note_death(&self) {
        let mut flushes = self.volume.flushes.lock();
        (flushes.after_death, flushes.served_from) = (flushes.begun + 1, None);
    }

    /// A new daemon of the source serves the guest, which has got so many answers until now.
    pub(in crate::host) fn note_served(&self, answered: u64) {
        self.volume.flushes.lock().served_from.get_or_insert(answered);
    }
}

/// The journals' disk as one life of the other daemon has it.
struct Watched {
    lower: Device,
    host: Host,
    process: Process,
    peer: PeerHost,
}

impl Filter for Watched {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            alive(&self.process).await;
            let Some((document, slot)) = document_in(&mutation) else { return self.lower.write(mutation).await };
            let (world, slots) = (&self.peer.shared.world, &self.peer.volume.slots);
            let stage = document.incoming.as_ref().map(|incoming| incoming.stage);
            let job = document.incoming.as_ref().map(|incoming| incoming.job);
            let held = slots.lock().acknowledged.as_deref().and_then(|document| {
                let document: VolumeDocument = serde_json::from_slice(document).ok()?;
                document.incoming.filter(|incoming| matches!(incoming.stage, IncomingStage::Held { .. }))
            });
            match (held, stage) {
                // Its machine has it here, and nobody passes on to it any more.
                (Some(held), None) if held.machine.is_some() && document.incoming.is_none() => {}
                (Some(held), stage) if job != Some(held.job) || stage != Some(held.stage) => {
                    let what = format!("the neighbour holds the volume as {held:?}, and now records {stage:?}");
                    world.violate(Invariant::OneWriter, what);
                }
                (None, Some(IncomingStage::Held { epoch })) if !self.host.has_given_up(epoch) => {
                    let what = format!("the neighbour takes the volume under epoch {epoch}; it was not given up");
                    world.violate(Invariant::OneWriter, what);
                }
                _ => {}
            }
            slots.lock().doubtful.push(slot.clone());
            let stored = self.lower.write(mutation).await;
            let word = if stored.is_ok() { "durable" } else { "in doubt" };
            world.event(format_args!("the neighbour's journal {word}: {stage:?}"));
            if stored.is_ok() {
                *slots.lock() = Slots { acknowledged: Some(slot), doubtful: Vec::new() };
                let is_let_go = self.host.shared.setup.has_machine && self.peer.holds() && document.incoming.is_none();
                *self.peer.volume.is_held.lock() = is_let_go || matches!(stage, Some(IncomingStage::Held { .. }));
            }
            stored
        })
    }
}

/// The place of the target as the other daemon has it.
struct Counted {
    lower: Device,
    host: Host,
    peer: PeerHost,
}

impl Filter for Counted {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        // Whoever uses the volume there is the first host's guest, and that comes when this host has given it up on record.
        let is_used = || {
            let mut is_used = self.peer.volume.is_used.lock();
            *is_used = *is_used || self.host.has_given_up_on_record();
            *is_used
        };
        if self.peer.holds() && !is_used() {
            let what = format!("{} is written by the copy, and the neighbour has taken the volume", mutation.extent());
            self.peer.shared.world.violate(Invariant::OneWriter, what);
        }
        Box::pin(self.lower.write(mutation))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let number = {
                let mut flushes = self.peer.volume.flushes.lock();
                flushes.begun += 1;
                flushes.begun
            };
            self.lower.flush().await?;
            let mut flushes = self.peer.volume.flushes.lock();
            flushes.done = number.max(flushes.done);
            drop(flushes);
            Ok(())
        })
    }
}
