//! Machines that are domains of libvirt: what differs for them.
//!
//! ```text
//!   source's daemon                                         target's daemon
//!     │ prepare: the domain's XML ─────────────────────────▶ │ no such domain here yet; it may come
//!     │ start ─────────────────────────────────────────────▶ │ exports; the XML with the disks on them
//!     │ virsh migrate, stopped before Confirm                 │
//!     │   control ═════ libvirt's own protocol ════════════▶ │ ═══▶ libvirt, which starts and loads the domain
//!     │   memory  ═════ QEMU's own bytes ══════════════════▶ │ ═══▶ QEMU
//!     │ loaded, the disks are held, THE COMMIT                │
//!     │ run ───────────────────────────────────────────────▶ │ virsh resume
//!     │ Confirm: libvirt ends and forgets the domain here     │
//! ```

use std::sync::Arc;

use api::v1::{Error, ErrorCode, VmChange};
use uuid::Uuid;
use vm::machine::{DomainDefinition, TargetDomain, retarget_domain, untold_of_disks};
use vm::{ExportAddress, LibvirtDomain};

use super::Machine;
use super::channel::{Answer, Arrival, ArrivingDisk};
use super::document::{IncomingMachine, MachineDocument};
use super::hooks::HookPhase;
use crate::daemon::Daemon;
use crate::hypervisor::{Hypervisor, Libvirt};
use crate::problem::{Result, invalid, of_vm};

/// Bytes of a unix socket's path, without the zero that ends it.
const SOCKET_PATH_BYTES_MAX: usize = 107;

fn refuse<T>(what: String, hint: &str) -> Result<T> {
    Err(Error::new(ErrorCode::HostRefused, what).with_hint(hint.to_owned()))
}

/// Refuses a domain with something about a disk that the other host would not get: its guest would see another disk there.
fn refuse_untold(definition: &DomainDefinition, disks: &[ArrivingDisk]) -> Result<()> {
    // A disk that would be adopted is called by its name in the guest, too.
    let names: Vec<String> = disks.iter().map(|disk| disk.node.clone()).collect();
    let untold = untold_of_disks(&definition.live, &names).map_err(|error| of_vm(&error))?;
    match untold.as_slice() {
        [] => Ok(()),
        untold => Err(Error::new(
            ErrorCode::VmRefused,
            format!("the disks of {} have what does not go to another host: {}", definition.name, untold.join(", ")),
        )
        .with_hint("see `virsh dumpxml`; give the VM a disk without that, and move it then")),
    }
}

impl Daemon {
    fn libvirt(&self) -> Result<&dyn Libvirt> {
        self.hypervisors.libvirt().ok_or_else(|| Error::new(ErrorCode::VmRefused, "this host has no libvirt"))
    }

    /// How a domain is described to the other host, and its disks by their names in the guest; nothing if the machine is none of
    /// libvirt's.
    pub(super) async fn describe_domain(
        &self,
        document: &MachineDocument,
        hypervisor: &dyn Hypervisor,
        disks: &[ArrivingDisk],
    ) -> Result<Option<(DomainDefinition, Vec<ArrivingDisk>)>> {
        let Some((definition, domain)) = hypervisor.definition().await? else { return Ok(None) };
        let disks: Vec<_> =
            disks.iter().map(|disk| self.as_in_domain(document, &domain, disk)).collect::<Result<_>>()?;
        refuse_untold(&definition, &disks)?;
        Ok(Some((DomainDefinition { folder: self.machine_folder(&document.name), ..definition }, disks)))
    }

    /// The disk by its name in the guest, which is the same at every host.
    fn as_in_domain(
        &self,
        document: &MachineDocument,
        domain: &LibvirtDomain,
        disk: &ArrivingDisk,
    ) -> Result<ArrivingDisk> {
        if document.disks.iter().any(|known| known.volume == disk.volume) {
            return Ok(disk.clone());
        }
        if disk.volume.is_empty() {
            // A disk that would be adopted is called so afterwards.
            return Ok(ArrivingDisk { volume: format!("{}-{}", document.name, disk.node), ..disk.clone() });
        }
        let volume = self.volume(&disk.volume)?.document();
        let plan = volume.adoption.as_ref().map(|adoption| &adoption.plan.disk);
        let target = plan.and_then(|plan| domain.target_of(&plan.qom_path).or_else(|| domain.target_of(&plan.device)));
        let target = target.ok_or_else(|| {
            invalid(format!("libvirt knows no disk of {} that {} is", domain.name, disk.volume), "adopt it anew")
        })?;
        Ok(ArrivingDisk { node: target.to_owned(), ..disk.clone() })
    }

    /// Fails if this host's libvirt does not take that domain.
    pub(super) async fn may_take_domain(&self, name: &str, definition: &DomainDefinition) -> Result<()> {
        if !self.config.hosts.as_ref().is_some_and(|hosts| hosts.libvirt_vms) {
            return refuse(
                "this host's libvirt takes no VMs of others".to_owned(),
                "give its configuration `libvirt-vms = true` in the section [hosts] and restart it; docs/hosts.md says what that means",
            );
        }
        if Uuid::try_parse(&definition.uuid).is_err() {
            return refuse(format!("{} is no UUID of a domain", definition.uuid), "see `virsh domuuid` there");
        }
        let folder = self.machine_folder(name);
        if folder != definition.folder {
            let message =
                format!("sockets of VMs are in {} here and in {} there", folder.display(), definition.folder.display());
            return refuse(message, "libvirt needs one path for both: give both daemons the same `socket-dir`");
        }
        let longest = self.migration_place(name).join("gate").display().to_string();
        if longest.len() > SOCKET_PATH_BYTES_MAX {
            return refuse(format!("{longest} is too long for a socket"), "give the VM a shorter name");
        }
        if self.machine_owner()?.is_none() && rustix::process::geteuid().is_root() {
            return refuse(
                "this host does not say as which user its libvirt runs QEMU".to_owned(),
                "name it by `vm-user` in its section [hosts]: `libvirt-qemu` (Debian), `qemu` (Fedora), or `root`",
            );
        }
        if self.libvirt()?.knows(&definition.name, &definition.uuid).await? {
            let message = format!("libvirt has a domain {} ({}) here already", definition.name, definition.uuid);
            return Err(Error::new(ErrorCode::AlreadyExists, message)
                .with_hint(format!("if it is not needed: `virsh undefine {}` there", definition.name)));
        }
        Ok(())
    }

    /// The exports of a machine's disks, each with the disk's name in the machine.
    pub(super) fn exports_of_machine(&self, machine: &Machine) -> Vec<(String, ExportAddress)> {
        self.exports_of(machine.document().disks.into_iter().map(|disk| (disk.volume, disk.node)))
    }

    fn exports_of(&self, disks: impl Iterator<Item = (String, String)>) -> Vec<(String, ExportAddress)> {
        disks
            .map(|(volume, node)| {
                let socket = self.socket_dir.join(format!("{volume}.sock"));
                (node, ExportAddress { socket, name: volume })
            })
            .collect()
    }

    /// What of a domain differs here.
    pub(super) fn domain_changes(&self, arrival: &Arrival) -> Vec<VmChange> {
        let exports = self.exports_of(arrival.disks.iter().map(|disk| (disk.volume.clone(), disk.node.clone())));
        let disks = arrival.disks.iter().zip(exports);
        let change = |(disk, (node, export)): (&ArrivingDisk, (String, ExportAddress))| VmChange {
            option: format!("<disk> {node}"),
            from: disk.image.clone(),
            to: format!("nbd, {}", export.socket.display()),
            why: "its disk is a volume here".to_owned(),
        };
        disks.map(change).collect()
    }

    /// Has exports and a definition ready for a domain that libvirt brings.
    pub(super) async fn start_domain(
        self: &Arc<Self>,
        host: &str,
        (machine, incoming): (&Arc<Machine>, &IncomingMachine),
        definition: &DomainDefinition,
    ) -> Result<Answer> {
        self.run_hook(HookPhase::Start, self.hook_at_target(machine, incoming)).await?;
        if incoming.domain.is_some() {
            return Err(invalid(format!("the domain of {} was awaited already", machine.name), "move it again"));
        }
        let owner = self.machine_owner()?;
        let document = machine.document();
        for disk in &document.disks {
            // libvirt starts its QEMU, and starts another one whenever the domain is started again.
            self.serve_arriving((host, &disk.volume), &machine.name, (owner, None)).await?;
        }
        let exports = self.exports_of_machine(machine);
        let (live, placed) = retarget_domain(&definition.live, &exports).map_err(|error| of_vm(&error))?;
        if placed != exports.len() {
            let message = format!("{placed} of {} disks are in the definition of {}", exports.len(), definition.name);
            return Err(Error::new(ErrorCode::VmRefused, message).with_hint("see `virsh dumpxml`, and move it again"));
        }
        let persistent = definition.persistent.as_ref().map(|xml| retarget_domain(xml, &exports)).transpose();
        let persistent = persistent.map_err(|error| of_vm(&error))?.map(|(xml, _)| xml);
        let libvirt = self.libvirt()?;
        let instance = libvirt.instance().await?;
        self.require_own_folder(&machine.name, None)?;
        let (hypervisor, socket) = libvirt.expect(&definition.name, (&incoming.folder, owner))?;
        *machine.hypervisor.lock() = Some(hypervisor);
        // From here on there may be one that must be ended.
        self.update_machine(machine, |document| {
            if let Some(incoming) = &mut document.incoming {
                incoming.domain = Some(definition.uuid.clone());
            }
        })?;
        self.tend(machine);
        Ok(Answer::Domain(TargetDomain { live, persistent, instance, socket }))
    }

    /// A connection to this host's libvirt for a domain that comes.
    pub(super) async fn control_inlet(&self, incoming: &IncomingMachine) -> Result<migrate::stream::BoxTransport> {
        if incoming.domain.is_none() {
            return Err(invalid("no domain of libvirt is awaited by this move", "move it again"));
        }
        self.libvirt()?.inlet().await
    }

    /// Ends the domain of a machine that moves, by libvirt.
    pub(super) async fn end_domain(&self, document: &MachineDocument) {
        let going = document.outgoing.as_ref().and_then(|outgoing| outgoing.domain.as_ref());
        let coming = document.incoming.as_ref().and_then(|incoming| incoming.domain.as_ref());
        // One that was not begun may be somebody else's.
        let (Some(uuid), Ok(libvirt)) = (going.or(coming), self.libvirt()) else { return };
        if going.is_some() && self.runs_as_another(document).await {
            let vm = &document.name;
            tracing::error!(vm, uuid, "a domain that has moved was started here again, and is left as it is");
            return;
        }
        libvirt.end(uuid).await;
    }

    /// Whether the domain of a machine that has moved runs here in another QEMU than the one that has: somebody has started it again.
    async fn runs_as_another(&self, document: &MachineDocument) -> bool {
        let Some(known) = &document.process else { return false };
        let reached = self.hypervisors.reach(&document.monitor).await;
        let process = reached.ok().and_then(|hypervisor| hypervisor.process());
        process.is_some_and(|process| process != *known)
    }
}
