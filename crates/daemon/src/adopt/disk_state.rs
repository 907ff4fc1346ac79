//! Where an adopted disk stands before anything relies on it: whether its QEMU lives, answers, and goes through us.
//!
//! A monitor that does not answer says nothing of QEMU. One that answers may belong to another QEMU. So this module
//! first asks for the process that the disk was adopted from.

use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor};
use backends::ImageError;
use vm::{DiskState, Graph, ProcessState};

use super::cover::is_covered;
use super::monitor::Vm;
use crate::daemon::Daemon;
use crate::document::{AdoptionDirection, AdoptionDocument};
use crate::problem::{Result, of_backend, of_vm};
use crate::volume::Volume;

/// How long a look at QEMU's graph may keep a move, or a guest after a restart, waiting.
const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// Whom an adopted disk's monitor leads to.
pub(super) enum Reached {
    /// The QEMU that it was adopted from.
    Adopted(Vm),
    /// Another one; the one that it was adopted from has ended.
    Successor(Vm),
    /// Nobody; the one that it was adopted from has ended.
    Nobody,
}

/// What a look at QEMU has shown.
pub(super) enum Inspection {
    /// It goes through us.
    Inside,
    /// It has ended, or the guest's device is gone: nobody writes.
    Gone,
    /// It does not go through us.
    Outside(Error),
    /// It does, and is about to be elsewhere.
    Leaving(Error),
    /// It does, with another program's node over the disk.
    Covered(Error),
    /// It does not say.
    Silent(Error),
}

impl Daemon {
    /// Reaches the QEMU of an adopted disk.
    ///
    /// # Errors
    /// It lives, and cannot be reached.
    pub(super) async fn reach_adopted(&self, volume: &Volume, adoption: &AdoptionDocument) -> Result<Reached> {
        let disk = &adoption.plan.disk;
        let (other, error) = match self.reach(&adoption.monitor).await {
            Ok(vm) if vm.qmp.process_id().is_none_or(|pid| disk.is_of(pid)) => return Ok(Reached::Adopted(vm)),
            Ok(vm) => {
                let pid = vm.qmp.process_id().unwrap_or_default();
                let message = format!("another QEMU (process {pid}) answers at {}", adoption.monitor);
                (Some(vm), Error::new(ErrorCode::QmpUnreachable, message))
            }
            Err(error) if error.code == ErrorCode::QmpUnreachable => (None, error),
            Err(error) => return Err(error),
        };
        let has_ended = match disk.process_state() {
            ProcessState::Ended => true,
            ProcessState::Lives => false,
            ProcessState::Unknown => is_deserted(&adoption.monitor).await,
        };
        if has_ended && volume.connections() == 0 {
            return Ok(other.map_or(Reached::Nobody, Reached::Successor));
        }
        let pid = disk.process_id.map_or_else(|| "of unknown number".to_owned(), |pid| pid.to_string());
        let message = format!("QEMU (process {pid}) has its disk {} here and lives: {}", volume.name, error.message);
        Err(Error::new(error.code, message)
            .with_hint("have its monitor answer there again, or end the VM, then do it again"))
    }

    /// Refuses what relies on QEMU going through us, where it does not or nobody knows.
    pub(crate) async fn require_inside(&self, volume: &Volume) -> Result<()> {
        let document = volume.document();
        let Some(adoption) = &document.adoption else { return Ok(()) };
        if adoption.direction != AdoptionDirection::Adopted {
            let (name, way) = (&volume.name, adoption.direction.name());
            let message = format!("{name} is {way}, and whether its VM goes through this daemon is not settled yet");
            return Err(Error::new(ErrorCode::WrongState, message)
                .with_hint(format!("wait until `transhume volume show {name}` says that it is adopted")));
        }
        match self.look(volume, adoption).await {
            Inspection::Inside | Inspection::Gone => Ok(()),
            Inspection::Outside(error) | Inspection::Leaving(error) | Inspection::Covered(error) => Err(error),
            // Whoever is connected is QEMU.
            Inspection::Silent(error) if volume.connections() > 0 => {
                tracing::info!(volume = volume.name, %error, "QEMU is connected, and says nothing of its graph");
                Ok(())
            }
            Inspection::Silent(error) => Err(error),
        }
    }

    /// Looks before a move goes on after a restart. A VM that was started again while the daemon was away may have
    /// opened its image itself. Nobody tracks what it writes there.
    pub(crate) async fn look_before_resuming(&self, volume: &Volume) -> Result<()> {
        let document = volume.document();
        let adopted = document.adoption.as_ref().filter(|it| it.direction == AdoptionDirection::Adopted);
        let (Some(adoption), Some(_)) = (adopted, &document.job) else { return Ok(()) };
        match self.look(volume, adoption).await {
            Inspection::Outside(error) => {
                self.forget_copied(volume);
                Err(error)
            }
            // The guest of one that is leaving, or covered, goes on through us; whoever watches it ends the move.
            Inspection::Leaving(_) | Inspection::Covered(_) => Ok(()),
            Inspection::Inside | Inspection::Gone | Inspection::Silent(_) => Ok(()),
        }
    }

    /// What to say of a backend that cannot be held after a restart.
    pub(crate) fn of_open(&self, volume: &Volume, error: &block::Error) -> Error {
        let is_adopted = volume.document().adoption.is_some();
        if is_adopted && error.kind() == block::ErrorKind::Busy {
            self.forget_copied(volume);
            let hint = format!(
                "a VM that was started on its image itself keeps it: `transhume release {}` if it has not been moving, or \
                 end that VM",
                volume.name
            );
            return Error::new(ErrorCode::BackendLocked, format!("the backend: {}", error.chain())).with_hint(hint);
        }
        let of_backend = of_backend(error, "the backend");
        match is_adopted && ImageError::of(error).is_some_and(|image| *image != ImageError::Layered) {
            true => of_backend.with_hint(format!(
                "put back the one that was served, and it is served again; if this is what the guest has used last, `transhume \
                 volume accept {0}`; if another one is meant, end the VM and `transhume release {0}`",
                volume.name
            )),
            false => of_backend,
        }
    }

    /// Whoever writes beside us writes what no map knows: a move that goes on later copies everything again.
    fn forget_copied(&self, volume: &Volume) {
        if volume.document().job.as_ref().is_some_and(|job| job.committed.is_none())
            && let Err(error) = self.layout.forget_progress(&volume.name)
        {
            tracing::error!(volume = volume.name, %error, "what was copied could not be forgotten");
        }
    }

    /// Gives up an adopted disk that is down, if there is nothing to be given back.
    pub(super) async fn release_down(&self, volume: &Volume, adoption: &AdoptionDocument) -> Result<()> {
        if volume.document().job.is_some() {
            return volume.require_up().map(drop);
        }
        let is_over = match self.reach_adopted(volume, adoption).await? {
            Reached::Nobody | Reached::Successor(_) => true,
            Reached::Adopted(vm) => {
                let graph = Graph::read(&vm.qmp).await.map_err(|error| of_vm(&error))?;
                matches!(vm::disk_state(&adoption.plan.disk, &graph), DiskState::Outside | DiskState::DeviceGone)
            }
        };
        if is_over { Ok(()) } else { volume.require_up().map(drop) }
    }

    /// Says of an adopted disk if its QEMU does not go through us.
    pub(super) async fn warn_if_elsewhere(&self, volume: &Volume, adoption: &AdoptionDocument) {
        if let Inspection::Outside(error) = self.look(volume, adoption).await {
            volume.set_problem(error);
        }
    }

    pub(super) async fn look(&self, volume: &Volume, adoption: &AdoptionDocument) -> Inspection {
        match env::timeout(&*self.env, LOOK_LIMIT, self.ask(volume, adoption)).await {
            Some(Ok(look)) => look,
            Some(Err(error)) => Inspection::Silent(error),
            None => {
                let message =
                    format!("QEMU did not say where {} stands within {} s", volume.name, LOOK_LIMIT.as_secs());
                Inspection::Silent(
                    Error::new(ErrorCode::QmpBusy, message).with_hint("try again when its monitor is free"),
                )
            }
        }
    }

    async fn ask(&self, volume: &Volume, adoption: &AdoptionDocument) -> Result<Inspection> {
        let name = &volume.name;
        let hint = format!("end the VM, or `transhume release {name}`");
        let outside = |message: String| {
            Ok(Inspection::Outside(Error::new(ErrorCode::WrongState, message).with_hint(hint.clone())))
        };
        let vm = match self.reach_adopted(volume, adoption).await? {
            Reached::Nobody => return Ok(Inspection::Gone),
            Reached::Successor(vm) => {
                let pid = vm.qmp.process_id().unwrap_or_default();
                let document = volume.document();
                let image = document.backend.local_path().and_then(|path| std::fs::metadata(path).ok());
                if image.is_some_and(|image| vm::writes_to(pid, &image).unwrap_or(true)) {
                    return outside(format!(
                        "the VM of {name} was started again, and its QEMU (process {pid}) has the image itself"
                    ));
                }
                return Ok(Inspection::Gone);
            }
            Reached::Adopted(vm) => vm,
        };
        let graph = Graph::read(&vm.qmp).await.map_err(|error| of_vm(&error))?;
        let state = vm::disk_state(&adoption.plan.disk, &graph);
        if let (DiskState::Inside, Some(cover)) = (state, vm::cover_of(&adoption.plan.disk, &graph)) {
            return Ok(Inspection::Covered(is_covered(name, cover)));
        }
        match (state, graph.migration_under_way()) {
            (DiskState::DeviceGone, _) => Ok(Inspection::Gone),
            (DiskState::Inside, None) => Ok(Inspection::Inside),
            (DiskState::Inside, Some(status)) => {
                let message = format!("QEMU itself is being migrated ({status}), with the disk {name}");
                let error = Error::new(ErrorCode::WrongState, message);
                Ok(Inspection::Leaving(error.with_hint("do it again when that is over, where the VM is then")))
            }
            (DiskState::Outside | DiskState::Prepared, _) => {
                outside(format!("the VM of {name} does not go through this daemon: it has its image itself"))
            }
        }
    }
}

/// Whether what made a monitor's socket listens on it no more.
async fn is_deserted(monitor: &Monitor) -> bool {
    let Monitor::Qmp(path) = monitor else { return false };
    let connected = tokio::net::UnixStream::connect(path).await;
    connected.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}
