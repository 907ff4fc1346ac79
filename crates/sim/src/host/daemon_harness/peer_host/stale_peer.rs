//! Somebody who speaks for the first host and does not know what it knows: a daemon that was started on an old copy of its
//! state directory.

use std::sync::Arc;
use std::time::Duration;

use block::Bytes;
use migrate::stream::{Remote, Role, SessionRequest, StreamOptions};

use super::{Shared, Way};
use crate::host::Host;
use crate::process::Process;
use crate::world::Invariant;

/// How long it tries.
const PATIENCE: Duration = Duration::from_secs(5);
/// By how much its epochs are not the one of the source; the next one is what the other host may be prepared for.
const EPOCHS_BEYOND: [u64; 3] = [0, 2, 3];

impl Host {
    /// Somebody asks the other host to hold the volume that comes there under an epoch that nobody was ever to have.
    pub async fn ask_under_wrong_epoch(&self) {
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        let Shared { world, rng, .. } = &*peer.shared;
        let Some(document) = peer.document() else { return };
        let Some(incoming) = document.incoming else { return };
        let epoch = incoming.epoch + rng.pick(&EPOCHS_BEYOND);
        let request = SessionRequest {
            volume: document.name,
            job: incoming.job,
            role: Role::Forward,
            epoch,
            size: Bytes(incoming.size),
            request_alignment: incoming.request_alignment,
            origin: incoming.origin,
            layers: None,
            stays: false,
        };
        world.fault("wrong-epoch", format_args!("somebody asks the neighbour to hold the volume under epoch {epoch}"));
        let process = Process::bystander(world, "stranger", 1);
        let way = Arc::new(Way { peer: peer.clone(), own: 0 });
        let options = StreamOptions { reconnect_limit: Duration::ZERO, ..StreamOptions::default() };
        let connecting = Remote::connect(process.env(), way, request, options);
        let outcome = tokio::select! {
            biased;
            outcome = connecting => Some(outcome),
            () = world.sleep(PATIENCE) => None,
        };
        match outcome {
            Some(Ok(_)) => {
                let what = format!("the neighbour lets somebody in who asks for epoch {epoch}");
                world.violate(Invariant::OneWriter, what);
            }
            Some(Err(error)) => world.event(format_args!("the stranger is told: {}", error.chain())),
            None => world.event(format_args!("the stranger is told nothing")),
        }
        process.kill().await;
    }
}
