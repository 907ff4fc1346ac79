//! A volume at the other host that has the name of one of the machine's disks, and nothing else to do with it.

use std::path::Path;

use api::v1::AttachRequest;
use block::{Bytes, Device};

use super::PeerHost;
use crate::disk::{Disk, Timing};
use crate::host::Host;
use crate::world::World;

/// Where its image is.
const FOLDER: &str = "/leftover";

pub(super) fn disk(world: &World) -> Disk {
    Disk::new(world, "leftover", Bytes::mib(1), 512, Timing::FLASH)
}

impl PeerHost {
    /// Its image, if that is at `path`.
    pub(in crate::host) async fn leftover(&self, path: &Path) -> Option<Device> {
        if !path.starts_with(FOLDER) {
            return None;
        }
        Some(self.shared.leftover.open(0).await)
    }
}

impl Host {
    /// Has the other host's daemon serve it, in the first of its lives.
    pub(super) async fn leave_volume_there(&self, core: &::daemon::Core) {
        let Some(peer) = self.shared.daemon_harness.peer.as_ref().filter(|_| self.shared.setup.others.have_leftover)
        else {
            return;
        };
        if std::mem::replace(&mut *peer.shared.has_leftover.lock(), true) {
            return;
        }
        let (name, backend) = (self.name().to_owned(), format!("file:{FOLDER}/image"));
        let request = AttachRequest { name, backend, export: self.export(), read_only: false, accept_tombstone: false };
        if let Err(error) = core.attach(request).await {
            self.shared.world.event(format_args!("nothing is left at the other host: {error}"));
        }
    }

    /// Its owner takes it away.
    pub(crate) async fn clear_leftover(&self) {
        let Some(peer) = self.shared.daemon_harness.peer.as_ref().filter(|_| self.shared.setup.others.have_leftover)
        else {
            return;
        };
        let core = peer.shared.core.lock().clone();
        if let Some((process, core)) = core {
            let name = self.name();
            let cleared = process.run(async move { core.detach(name).await });
            if let Ok(Err(error)) = cleared.await {
                self.shared.world.event(format_args!("what was left at the other host stays: {error}"));
            }
        }
    }
}
