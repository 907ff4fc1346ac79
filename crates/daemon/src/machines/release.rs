//! Disks of a machine that has come are given back to its QEMU: it was started on the exports of this daemon, and opens the files
//! itself from then on. The daemon may be stopped afterwards, and the machine goes on.
//!
//! ```text
//!   runs here, its disks are exports ── the other host has let go of all ──▶ each is released ──▶ QEMU has its files
//!                                                                              │ it cannot be
//!                                                                              ▼ stays a volume; the log and the audit say why
//! ```
//!
//! Each is made an adopted disk first, as if this daemon had come between QEMU and the file, and that is on record. From there a
//! release is the same as any other, its recovery included.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor, Vm};
use tokio::sync::MutexGuard;
use vm::{AdoptionRequest, ArrivedImage, ExportAddress};

use super::Machine;
use super::document::{MachineDisk, MachineDocument};
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::{AdoptionDirection, AdoptionDocument};
use crate::location::require_local;
use crate::problem::{Result, invalid, of_backend};
use crate::stack::{require_complete_backend, require_no_cache};
use crate::volume::Volume;

/// What tells the user how to go on.
const COMMAND: &str = "transhume vm release";
/// How often it is looked whether the other host has let go of all disks.
const LOOK: Duration = Duration::from_millis(100);

/// Who wants the disks of a machine given back.
#[derive(Clone, Copy)]
enum Asking {
    /// A user, who does not wait for ever.
    User,
    /// The daemon itself, for which that is as good later.
    Daemon,
}

impl Daemon {
    /// Gives all disks of a machine back to its QEMU that go through this daemon.
    ///
    /// # Errors
    /// One cannot be given back, and stays a volume.
    pub(crate) async fn release_machine(self: &Arc<Self>, name: &str) -> Result<Vm> {
        let machine = self.machine(name)?;
        {
            let _operation = machine.begin_operation(&*self.env).await?;
            refuse_under_way(&machine.document())?;
            self.release_disks(&machine, Asking::User).await?;
        }
        self.machine_shown(name).await
    }

    /// The same once the other host has let go of all disks of a machine that has come, if that is due.
    pub(super) fn release_when_let_go(self: &Arc<Self>, machine: &Arc<Machine>) {
        let (daemon, machine) = (Arc::clone(self), Arc::clone(machine));
        let env = Arc::clone(&self.env);
        env.spawn(Box::pin(async move {
            while daemon.is_known(&machine) && machine.document().release_due {
                if daemon.is_let_go(&machine.document()) {
                    Box::pin(daemon.release_due(&machine)).await;
                }
                daemon.env.sleep(LOOK).await;
            }
        }));
    }

    async fn release_due(self: &Arc<Self>, machine: &Arc<Machine>) {
        let _operation = machine.operation.lock().await;
        let released = match refuse_under_way(&machine.document()) {
            // Whoever moves it on decides anew.
            Err(_) => Ok(()),
            Ok(()) => self.release_disks(machine, Asking::Daemon).await,
        };
        if let Err(error) = &released {
            tracing::warn!(vm = machine.name, %error, "a disk of a VM that has come stays a volume of this daemon");
        }
        self.note(&Peer::daemon(), ("vm.release", &machine.name), serde_json::json!({}), released.as_ref().err());
        if let Err(error) = self.update_machine(machine, |document| document.release_due = false) {
            tracing::error!(vm = machine.name, %error, "that the disks of a VM were released could not be stored");
        }
    }

    /// Whether no other host has a part in the disks of a machine any more, nor in its memory.
    fn is_let_go(&self, document: &MachineDocument) -> bool {
        let comes = |disk: &MachineDisk| self.volume(&disk.volume).is_ok_and(|it| it.document().incoming.is_some());
        document.following.is_none() && document.arrived.is_none() && !document.disks.iter().any(comes)
    }

    async fn release_disks(self: &Arc<Self>, machine: &Machine, asking: Asking) -> Result<()> {
        let mut outcome = Ok(());
        for disk in machine.document().disks {
            match self.take_for_adopted(machine, &disk, asking).await {
                Ok(()) => {
                    self.update_machine(machine, |document| {
                        document.disks.retain(|known| known.volume != disk.volume)
                    })?;
                }
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        for volume in self.adopted_from(&machine.document().monitor) {
            let released = match self.begin_with(&volume, asking).await {
                Ok(_operation) => self.release_alone(&volume).await.map(drop),
                Err(error) => Err(error),
            };
            outcome = outcome.and(released);
        }
        outcome
    }

    /// Waits until nothing else is under way with `volume`.
    async fn begin_with<'a>(&self, volume: &'a Volume, asking: Asking) -> Result<MutexGuard<'a, ()>> {
        match asking {
            Asking::User => volume.begin_operation(&*self.env).await,
            Asking::Daemon => Ok(volume.operation.lock().await),
        }
    }

    /// A disk that its QEMU was started on through this daemon is one that was adopted, from here on.
    async fn take_for_adopted(&self, machine: &Machine, disk: &MachineDisk, asking: Asking) -> Result<()> {
        let volume = self.volume(&disk.volume)?;
        let _operation = self.begin_with(&volume, asking).await?;
        let document = volume.document();
        if document.adoption.is_some() {
            return Ok(());
        }
        volume.refuse_moving()?;
        require_complete_backend(&document, COMMAND)?;
        require_no_cache(&document)?;
        if let Some(incoming) = &document.incoming {
            let message = format!("{} has not let go of {} yet", incoming.host, volume.name);
            return Err(Error::new(ErrorCode::WrongState, message).with_hint("try again when the move is over"));
        }
        let backend = require_local(&document.backend, "its disk cannot be given back to its VM")?;
        let of_machine = machine.document();
        let first_started = of_machine.description.as_ref().ok_or_else(|| cannot(machine, disk))?;
        // QEMU may read through the page cache, where the daemon need not have.
        self.forget_cached(&document.backend).await?;
        let is_block_device = volume.with_backend(|backend| backend.is_block_device()).unwrap_or_default();
        let image = ArrivedImage {
            image: backend.path(),
            driver: if is_block_device { "host_device" } else { "file" },
            first_started,
        };
        let request = AdoptionRequest {
            node: disk.node.clone(),
            volume: volume.name.clone(),
            export: ExportAddress {
                socket: self.socket_dir.join(format!("{}.sock", volume.name)),
                name: volume.name.clone(),
            },
            accept_option_loss: false,
            format: None,
            reconnect_seconds: self.config.reconnect_delay_seconds,
        };
        let hypervisor = self.hypervisor_of(machine).await?;
        let plan = hypervisor.plan_release(&request, image).await?.ok_or_else(|| cannot(machine, disk))?;
        let adoption = AdoptionDocument {
            monitor: of_machine.monitor.clone(),
            node: disk.node.clone(),
            format: plan.disk.format.clone(),
            size_advertised: document.room_to_grow(),
            direction: AdoptionDirection::Adopted,
            plan,
        };
        let stored = volume.journal.update(|document| document.adoption = Some(adoption));
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
    }
}

fn refuse_under_way(document: &MachineDocument) -> Result<()> {
    let name = &document.name;
    if document.outgoing.is_some() || document.incoming.is_some() || document.following.is_some() {
        return Err(
            Error::new(ErrorCode::Busy, format!("{name} is being moved")).with_hint("wait until the move is over")
        );
    }
    if matches!(document.monitor, Monitor::Libvirt(_)) && !document.disks.is_empty() {
        return Err(invalid(
            format!("{name} is a domain of libvirt, whose definition names the exports of this daemon"),
            "its disks stay volumes; shut it down and define it over the files that `transhume vm show` names",
        ));
    }
    Ok(())
}

fn cannot(machine: &Machine, disk: &MachineDisk) -> Error {
    let message = format!("the disk {} of {} cannot be given back to its QEMU", disk.node, machine.name);
    Error::new(ErrorCode::VmRefused, message).with_hint("it stays a volume of this daemon")
}
