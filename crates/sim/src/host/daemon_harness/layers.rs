//! Somebody who takes snapshots of the volumes, removes them and limits their guests, while they work and move.

use std::time::Duration;

use api::v1::{Error, ErrorCode, Layer, LayerKind, LayerRequest, LayerState, SnapshotRequest};

use super::super::setup::SNAPSHOTS_MAX;
use super::{Host, LAYERS_OF};
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::world::Invariant;

/// The longest rest between two changes.
const REST_MAX: Duration = Duration::from_millis(40);

impl Host {
    /// Changes the layers of this volume, in no order, as long as the process lives.
    pub(super) async fn change_layers(&self, process: &Process, core: &::daemon::Core) {
        // A life of its own has choices of its own.
        let rng = self.shared.world.rng(&format!("layers of {}, {}", self.name(), self.shared.lives.lock()));
        loop {
            process.env().sleep(rng.up_to(REST_MAX)).await;
            let Some(volume) = core.volumes().into_iter().find(|volume| volume.name == self.name()) else { continue };
            let snapshots: Vec<&Layer> =
                volume.layers.iter().filter(|layer| layer.kind == LayerKind::Overlay).collect();
            if snapshots.iter().any(|layer| layer.state == LayerState::Draining) {
                self.shared.world.occur(Occurrence::Told("draining"));
            }
            let (told, outcome) = match rng.below(5) {
                0 | 1 if snapshots.len() < SNAPSHOTS_MAX => {
                    ("snapshot", core.add_snapshot(self.name(), SnapshotRequest::default()).await)
                }
                2 if !snapshots.is_empty() => {
                    let which = &rng.pick(&snapshots).name;
                    ("removal", core.remove_snapshot(self.name(), which).await)
                }
                3 => {
                    let request = LayerRequest::Throttle { iops: Some(rng.pick(&[500, 5000])), bytes_per_second: None };
                    ("throttle", core.add_layer(self.name(), request).await)
                }
                _ => {
                    let outcome = core.remove_layer(self.name(), "throttle").await;
                    ("no throttle", outcome)
                }
            };
            match outcome {
                Ok(_) => self.shared.world.occur(Occurrence::Told(told)),
                Err(error) => self.note_refused(told, &error),
            }
        }
    }

    /// Takes a snapshot before the only move, if there is none.
    pub(super) async fn take_first_snapshot(&self, core: &::daemon::Core) {
        let volume = core.volumes().into_iter().find(|volume| volume.name == self.name());
        if volume.is_some_and(|volume| volume.layers.is_empty() && volume.job.is_none()) && self.holder() == 0 {
            let outcome = core.add_snapshot(self.name(), SnapshotRequest::default()).await;
            match outcome {
                Ok(_) => self.shared.world.occur(Occurrence::Told("snapshot")),
                Err(error) => self.note_refused("snapshot", &error),
            }
        }
    }

    fn note_refused(&self, what: &str, error: &Error) {
        self.say(format_args!("{what} is refused: {error}"));
        if error.code == ErrorCode::Internal {
            self.shared.world.violate(Invariant::AsTold, format!("{what} is refused as a defect: {error}"));
        }
    }

    /// A move is over: beside the place that does not hold the volume there are no files of layers that were made for it.
    pub(super) fn check_layers_swept(&self) {
        let shared = &self.shared;
        let slots = shared.daemon_harness.slots.lock();
        let (Some(acknowledged), true) = (&slots.acknowledged, slots.doubtful.is_empty()) else { return };
        let Ok(document) = serde_json::from_slice::<::daemon::VolumeDocument>(acknowledged) else { return };
        if self.shared.setup.is_between_hosts {
            // The files there have numbers of their own, and an undone move is told there later.
            return;
        }
        let holder = super::side_held_by(&document);
        let listed: Vec<u32> =
            document.layers.iter().filter_map(|layer| layer.overlay()).map(|overlay| overlay.number).collect();
        let there = shared.shelf.numbers(LAYERS_OF + holder);
        if let Some(missing) = listed.iter().find(|number| !there.contains(number)) {
            let what = format!("file {missing} of a layer is on record and was removed");
            shared.world.violate(Invariant::CrashResume, what);
        }
        let is_undone = document.job.is_none() && holder == *shared.from.lock();
        let left = (*shared.lives.lock(), shared.shelf.numbers(LAYERS_OF + 1 - holder));
        let before = shared.daemon_harness.layers_before.lock().take();
        // A process that died before its move was on record may have left files that nobody reads.
        if let Some(before) = before.filter(|before| is_undone && before.0 == left.0 && before.1 != left.1) {
            let what = format!("an undone move has left files of layers: {:?}, before it {:?}", left.1, before.1);
            shared.world.violate(Invariant::CancelSafe, what);
        }
    }

    /// Whether there are files of layers beside the place `side`.
    pub(crate) fn has_layers(&self, side: usize) -> bool {
        !self.shared.shelf.numbers(LAYERS_OF + side).is_empty()
    }

    /// A move to `target` is about to be asked for.
    pub(super) fn note_layers_before(&self, target: usize) {
        let shared = &self.shared;
        let before = (*shared.lives.lock(), shared.shelf.numbers(LAYERS_OF + target));
        *shared.daemon_harness.layers_before.lock() = Some(before);
    }
}
